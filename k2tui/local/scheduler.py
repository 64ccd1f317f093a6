"""Continuous batching: admits requests, prefills them, decodes all running ones together. Knows no HTTP.

One thread owns the models and the KV cache; other threads only hand in requests and aborts. A request is admitted when a
row is free and its prompt plus everything it may generate fits into the token budget, so a running request is never
thrown out again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from k2tui.local.decoder import Decoder
from k2tui.local.kv import KVPool, Window
from k2tui.local.log import log
from k2tui.local.metrics import Metrics
from k2tui.local.request import Request
from k2tui.local.sampling import draw

if TYPE_CHECKING:
    from k2tui.local.speculative import Speculator

# Called after a prefill with the request, aux boundaries [T, B*H] and post-norm hidden states [T, H] of its prompt.
CaptureHook = Callable[[Request, torch.Tensor, torch.Tensor], None]


class Scheduler:
    """capture, capture_boundaries: set both before `start` to receive hidden states of every prefilled prompt."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        context_len: int,
        max_running_requests: int,
        max_total_num_tokens: int,
        chunked_prefill_size: int,
        decode_log_interval: int,
        eos_ids: frozenset[int],
        seed: int,
        metrics: Metrics,
        speculator: Speculator | None = None,
    ) -> None:
        self.decoder = decoder
        self.context_len = context_len
        self.max_running_requests = max_running_requests
        self.max_total_num_tokens = max_total_num_tokens
        self.chunked_prefill_size = chunked_prefill_size
        self.decode_log_interval = decode_log_interval
        self.eos_ids = eos_ids
        self.metrics = metrics
        self.speculator = speculator
        self.num_steps = speculator.num_steps if speculator else 0
        self.capture: CaptureHook | None = None
        self.capture_boundaries: tuple[int, ...] = ()
        self.pool = KVPool(
            num_layers=decoder.num_layers,
            rows=max_running_requests,
            capacity=context_len + self.num_steps + 1,  # a verification writes past the last kept token
            num_kv_heads=decoder.num_kv_heads,
            head_dim=decoder.head_dim,
            dtype=decoder.dtype,
            device=decoder.device,
        )
        self.running: list[Request] = []  # index = row of the cache
        self.waiting: deque[Request] = deque()
        self.beat_s = time.monotonic()  # the loop's last sign of life
        self._reserved = 0
        self._ended: list[Request] = []  # finished in this step, not told yet
        self._generator = torch.Generator(device=decoder.device).manual_seed(seed)
        self._wake = threading.Condition()
        self._inbox: deque[Request] = deque()
        self._aborts: set[str] = set()
        self._abort_all = False
        self._stopping = False
        self._flush: list[threading.Event] = []
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self.failure = ""  # why the loop ended by itself
        self._graph = "cuda graph" if decoder.device.type == "cuda" else "cpu graph"
        self._decode_steps = 0
        self._log_tokens = 0
        self._log_from = 0.0
        self._log_verify = 0
        self._log_correct = 0

    # ---- other threads

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, request: Request) -> None:
        with self._wake:
            self._inbox.append(request)
            self._wake.notify()

    def abort(self, rid: str = "", *, all_requests: bool = False) -> None:
        with self._wake:
            if all_requests:
                self._abort_all = True
            else:
                self._aborts.add(rid)
            self._wake.notify()

    def stop(self) -> None:
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(10)

    @property
    def num_open_requests(self) -> int:
        return len(self.running) + len(self.waiting) + len(self._inbox)

    @property
    def num_used_tokens(self) -> int:
        return sum(request.cached for request in list(self.running))

    # ---- the scheduler's own thread

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while not self._stopping:
                    self.beat_s = time.monotonic()
                    self._receive()
                    if self._stopping:
                        break
                    admitted = self._admit()
                    if admitted:
                        self._prefill(admitted)
                    elif self.running:
                        self._decode()
        except Exception as err:
            # The only place where a defect of ours, or a full GPU, may surface: said in SGLang's words, then the end.
            import traceback

            self.failure = f"{type(err).__name__}: {err}"
            log(f"Scheduler hit an exception: {self.failure}")
            for line in traceback.format_exc().splitlines():
                log(line)
        message = "The scheduler stopped" + (f": {self.failure}" if self.failure else ".")
        for request in (*self.running, *self.waiting, *self._inbox):
            self._finish(
                request,
                {"type": "abort", "message": message, "status_code": 503, "err_type": "ServiceUnavailable"},
            )
        self.running, self.waiting = [], deque()
        self._inbox.clear()
        self._tell_ended()

    def _receive(self) -> None:
        with self._wake:
            while not (
                self._inbox
                or self._aborts
                or self._abort_all
                or self._stopping
                or self.running
                or self.waiting
            ):
                self.metrics.idle()
                self._wake.wait(1.0)
                self.beat_s = time.monotonic()
            self.waiting.extend(self._inbox)
            self._inbox.clear()
            aborts, self._aborts = self._aborts, set()
            everything, self._abort_all = self._abort_all, False
        if not (aborts or everything):
            return
        reason = {
            "type": "abort",
            "message": "Aborted: the client went away, or an abort or a shutdown was asked for.",
            "status_code": None,
            "err_type": None,
        }
        for request in [r for r in self.waiting if everything or r.rid in aborts]:
            self.waiting.remove(request)
            self._finish(request, reason)
        for request in [r for r in self.running if everything or r.rid in aborts]:
            self._finish(request, reason)
        self._drop_finished()

    def _admit(self) -> list[Request]:
        """Requests of the next prefill batch, in order of arrival."""
        chosen: list[Request] = []
        longest = 0
        while self.waiting and len(self.running) + len(chosen) < self.max_running_requests:
            request = self.waiting[0]
            length = len(request.input_ids)
            want = min(length + request.params.max_new_tokens, self.context_len)
            if self._reserved + want > self.max_total_num_tokens:
                break
            if chosen and max(longest, length) * (len(chosen) + 1) > self.chunked_prefill_size:
                break
            self.waiting.popleft()
            request.reserved = want
            request.admitted_s = time.perf_counter()
            self._reserved += want
            longest = max(longest, length)
            chosen.append(request)
        return chosen

    def _prefill(self, batch: list[Request]) -> None:
        began = time.perf_counter()
        decoder = self.decoder
        lengths = [len(request.input_ids) for request in batch]
        width = max(lengths)
        row = len(self.running)
        boundaries = self.speculator.boundaries if self.speculator else self.capture_boundaries
        ids = torch.tensor(
            [r.input_ids + [0] * (width - n) for r, n in zip(batch, lengths, strict=True)],
            device=decoder.device,
        )
        positions = torch.arange(width, device=decoder.device).expand(len(batch), width)
        window = Window(self.pool, row, positions, [0] * len(batch))
        hidden, aux = decoder.forward(ids, positions, window, boundaries)
        last = hidden[torch.arange(len(batch)), torch.tensor(lengths) - 1]  # [n, H]
        logits = decoder.logits(last)
        tokens = self._choose(batch, logits)
        for i, request in enumerate(batch):
            if request.return_logprob and request.logprob_start_len >= 0:
                self._input_logprobs(request, hidden[i, : lengths[i]])
            if self.capture is not None and aux is not None:
                self.capture(request, aux[i, : lengths[i]], hidden[i, : lengths[i]])
        queued = len(self.waiting)
        running_before = len(self.running)
        self.running.extend(batch)
        for i, request in enumerate(batch):
            request.first_token_s = time.perf_counter()
            if request.params.max_new_tokens == 0:
                self._finish(request, {"type": "length", "length": 0})
            else:
                self._append(request, [tokens[i]], logits[i : i + 1])
        if self.speculator is not None:
            assert aux is not None
            self.speculator.prefill(batch, row, aux, lengths)
        spent = time.perf_counter() - began
        total = sum(lengths)
        self.metrics.prefilled(total, spent)
        log(
            f"Prefill batch, #new-seq: {len(batch)}, #new-token: {total}, #cached-token: 0, "
            f"token usage: {self.token_usage:.2f}, #running-req: {running_before}, #queue-req: {queued}, "
            f"#pending-token: {sum(len(r.input_ids) for r in self.waiting)}, {self._graph}: False, "
            f"input throughput (token/s): {total / spent:.2f}"
        )
        self._drop_finished()
        if not running_before:
            self._restart_interval()

    def _input_logprobs(self, request: Request, hidden: torch.Tensor) -> None:
        table = torch.log_softmax(self.decoder.logits(hidden).float(), -1)
        start = request.logprob_start_len
        ids = request.input_ids
        first: list[tuple[float | None, int, None]] = [(None, ids[0], None)] if start == 0 else []
        begin = max(start, 1)
        scores = table[
            torch.arange(begin - 1, len(ids) - 1), torch.tensor(ids[begin:], dtype=torch.long)
        ].tolist()
        request.input_logprobs = first + [(s, t, None) for s, t in zip(scores, ids[begin:], strict=True)]
        if request.top_logprobs_num:
            rows = [_top(row, request.top_logprobs_num) for row in table[begin - 1 : len(ids) - 1]]
            request.input_top_logprobs = [*([None] if start == 0 else []), *rows]

    def _decode(self) -> None:
        if self.speculator is not None:
            self._decode_speculative(self.speculator)
        else:
            self._decode_plain()
        self._decode_steps += 1
        if self._decode_steps >= self.decode_log_interval:
            self._log_decode()
        self._drop_finished()

    def _decode_plain(self) -> None:
        decoder = self.decoder
        batch = self.running
        starts = [request.cached for request in batch]
        ids = torch.tensor([[request.output_ids[-1]] for request in batch], device=decoder.device)
        positions = torch.tensor(starts, device=decoder.device).unsqueeze(1)
        hidden, _ = decoder.forward(ids, positions, Window(self.pool, 0, positions, starts))
        logits = decoder.logits(hidden[:, 0])
        for i, token in enumerate(self._choose(batch, logits)):
            self._append(batch[i], [token], logits[i : i + 1])
        self._log_tokens += len(batch)

    def _decode_speculative(self, speculator: Speculator) -> None:
        """Draft a chain for every running request, verify all chains in one forward pass, keep what the target agrees with."""
        decoder = self.decoder
        batch = self.running
        width = speculator.num_steps + 1
        starts = [request.cached for request in batch]
        chains = speculator.draft(batch, starts)  # [n][num_steps]
        block = [[request.output_ids[-1], *chain] for request, chain in zip(batch, chains, strict=True)]
        ids = torch.tensor(block, device=decoder.device)
        positions = torch.tensor(starts, device=decoder.device).unsqueeze(1) + torch.arange(
            width, device=decoder.device
        )
        hidden, aux = decoder.forward(
            ids, positions, Window(self.pool, 0, positions, starts), speculator.boundaries
        )
        assert aux is not None
        logits = decoder.logits(hidden)  # [n, width, V]
        greedy = logits.argmax(-1).tolist()
        kept: list[list[int]] = []
        for i, request in enumerate(batch):
            # The target's own token at each place; the first that differs from the draft ends the chain. Sampling draws
            # from the target's distribution, one draw a kept token, so the text has the same law as without a draft.
            new: list[int] = []
            for place in range(width):
                if request.params.is_greedy and not self._bans_eos(request, len(new)):
                    token = greedy[i][place]
                else:
                    token = self._draw(request, logits[i, place], len(new))
                new.append(token)
                if place == speculator.num_steps or token != chains[i][place]:
                    break
            correct = len(new) - 1
            request.verify_ct += 1
            request.correct_drafts += correct
            # as long as the longest chain so far, as SGLang's
            request.histogram += [0] * (correct + 1 - len(request.histogram))
            request.histogram[correct] += 1
            self._log_verify += 1
            self._log_correct += correct
            kept.append(new)
        before = [len(request.output_ids) for request in batch]
        for i, request in enumerate(batch):
            self._append(request, kept[i], logits[i, : len(kept[i])])
            self._log_tokens += len(request.output_ids) - before[i]
        if any(request.finish_reason is None for request in batch):
            speculator.extend(batch, starts, kept, aux)
        self.metrics.verified(sum(len(new) for new in kept), len(kept))

    def _bans_eos(self, request: Request, ahead: int) -> bool:
        return len(request.output_ids) + ahead < request.params.min_new_tokens

    def _draw(self, request: Request, logits: torch.Tensor, ahead: int = 0) -> int:
        if self._bans_eos(request, ahead):
            logits = logits.clone()
            logits[list(self.eos_ids | set(request.params.stop_token_ids))] = float("-inf")
        return draw(logits, request.params, request.generator or self._generator)

    def _choose(self, batch: list[Request], logits: torch.Tensor) -> list[int]:
        tokens: list[int] = logits.argmax(-1).tolist()
        for i, request in enumerate(batch):
            if not request.params.is_greedy or self._bans_eos(request, 0):
                tokens[i] = self._draw(request, logits[i])
        return tokens

    def _append(self, request: Request, tokens: list[int], logits: torch.Tensor) -> None:
        """Take tokens in order until one ends the request; tell the asker. logits: [len(tokens), V], for log-probabilities."""
        params = request.params
        for place, token in enumerate(tokens):
            request.output_ids.append(token)
            if request.return_logprob:
                table = torch.log_softmax(logits[place].float(), -1)
                request.output_logprobs.append((float(table[token]), token, None))
                if request.top_logprobs_num:
                    request.output_top_logprobs.append(_top(table, request.top_logprobs_num))
            if not params.ignore_eos and (token in self.eos_ids or token in params.stop_token_ids):
                shown = request.output_ids if params.no_stop_trim else request.output_ids[:-1]
                self._finish(request, {"type": "stop", "matched": token}, shown)
                return
            if params.stop:
                request.text.push(request.output_ids)
                if request.text.stopped_by is not None:
                    if params.no_stop_trim:
                        request.text.text += request.text.stopped_by
                        request.text.ready = request.text.text
                    self._finish(request, {"type": "stop", "matched": request.text.stopped_by}, None)
                    return
            if len(request.output_ids) >= params.max_new_tokens or request.cached + 1 >= self.context_len:
                self._finish(
                    request, {"type": "length", "length": len(request.output_ids)}, request.output_ids
                )
                return
        if request.stream:
            if not params.stop:
                request.text.push(request.output_ids)
            request.deliver(request.output(self.num_steps))

    def _finish(self, request: Request, reason: dict[str, Any], shown: list[int] | None = None) -> None:
        """shown: ids whose text is the answer; None = the text is already final."""
        if request.finish_reason is not None:
            return
        request.finish_reason = reason
        request.finished_s = time.perf_counter()
        if shown is not None:
            request.text.push(shown, last=True)
        else:
            request.text.ready = request.text.text
        self._ended.append(request)

    def _drop_finished(self) -> None:
        """Give up rows of finished requests; the last row moves into the gap."""
        row = 0
        while row < len(self.running):
            request = self.running[row]
            if request.finish_reason is None:
                row += 1
                continue
            self._reserved -= request.reserved
            last = self.running.pop()
            if last is not request:
                self.pool.move(len(self.running), row, max(last.cached, 0))
                if self.speculator is not None:
                    self.speculator.pool.move(len(self.running), row, max(last.cached, 0))
                self.running[row] = last
        if not self.running and self._decode_steps:
            self._log_decode(at_end=True)
        self._tell_ended()

    def _tell_ended(self) -> None:
        """Last: who asks for figures after an answer must find the request counted and its row free."""
        ended, self._ended = self._ended, []
        for request in ended:
            self.metrics.finished(request)
            request.deliver(request.output(self.num_steps))

    # ---- figures

    @property
    def token_usage(self) -> float:
        return self.num_used_tokens / self.max_total_num_tokens

    def _restart_interval(self) -> None:
        self._decode_steps = self._log_tokens = self._log_verify = self._log_correct = 0
        self._log_from = time.perf_counter()

    def _log_decode(self, *, at_end: bool = False) -> None:
        """SGLang's Decode line. The rate is over time spent decoding; idle time before the first token does not count."""
        now = time.perf_counter()
        throughput = self._log_tokens / max(now - self._log_from, 1e-9)
        length = rate = 0.0
        spec = ""
        if self.speculator is not None and self._log_verify:
            length = (self._log_correct + self._log_verify) / self._log_verify
            rate = self._log_correct / (self._log_verify * self.num_steps)
            spec = f"accept len: {length:.2f}, accept rate: {rate:.2f}, "
        self.metrics.decoded(throughput, length, rate)
        if not at_end:
            log(
                f"Decode batch, #running-req: {len(self.running)}, #token: {self.num_used_tokens}, "
                f"token usage: {self.token_usage:.2f}, {spec}{self._graph}: False, "
                f"gen throughput (token/s): {throughput:.2f}, #queue-req: {len(self.waiting)}"
            )
        self._restart_interval()


def _top(logprobs: torch.Tensor, count: int) -> list[tuple[float, int, None]]:
    """SGLang's triples (logprob, token, None) of the likeliest tokens, likeliest first."""
    found = logprobs.topk(min(count, logprobs.shape[-1]))
    return [(float(v), int(i), None) for v, i in zip(found.values, found.indices, strict=True)]
