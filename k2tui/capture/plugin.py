"""The SGLang plug-in: installs the capture hooks in every SGLang process. Knows SGLang's inside; writes through `sink`.

Off unless K2TUI_CAPTURE_DIR is set; then nothing is hooked and nothing costs. Entry point group `sglang.srt.plugins`
(0.5.11 and newer) calls `activate`; older releases start through `python -m k2tui.capture.launch`.

Needs the standard library, torch, numpy and SGLang itself. Laws: rank 0 of each attention-TP group writes, the others only
capture the same layers (their collectives must agree); rows are copied in the forward pass itself, on a stream of their own, so
neither the overlap scheduler nor chunked prefill can reorder or lose them; a captured request never takes a prefix-cache hit.
"""

# sglang and fastapi are not in the development environment
# pyright: reportMissingImports=false

from __future__ import annotations

import atexit
import importlib.util
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from k2tui.capture import ids as layer_ids
from k2tui.capture.features import flat_bytes, stored
from k2tui.capture.request import is_capture

log = logging.getLogger("k2tui.capture")

DIR_ENV = "K2TUI_CAPTURE_DIR"
BOUNDARIES_ENV = "K2TUI_CAPTURE_BOUNDARIES"
PINNED_ENV = "K2TUI_CAPTURE_PINNED_MB"
THREADS_ENV = "K2TUI_CAPTURE_THREADS"
SHARD_ENV = "K2TUI_CAPTURE_SHARD_MB"
MIN_FREE_ENV = "K2TUI_CAPTURE_MIN_FREE_MB"
PATIENCE_ENV = "K2TUI_CAPTURE_PATIENCE_S"
SWITCH_S = 0.0002  # how soon a busy thread gives the interpreter to a writer thread

_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_LOGITS = "sglang.srt.layers.logits_processor.LogitsProcessor"
_REQ = "sglang.srt.managers.schedule_batch.Req"
_BATCH = "sglang.srt.model_executor.forward_batch_info.ForwardBatch"
_HTTP = "sglang.srt.entrypoints.http_server"
# prefill graphs by release: 0.5.6..0.5.12, then 0.5.13 and newer
_PREFILL_GRAPHS = (
    ("sglang.srt.model_executor.piecewise_cuda_graph_runner", "PiecewiseCudaGraphRunner", "can_run"),
    ("sglang.srt.model_executor.breakable_cuda_graph_runner", "BreakableCudaGraphRunner", "can_run"),
    ("sglang.srt.model_executor.runner.prefill_cuda_graph_runner", "PrefillCudaGraphRunner", "can_run_graph"),
)

_capturer: Any = None


def activate() -> None:
    """Entry point: register the hooks with SGLang's HookRegistry. Does nothing when K2TUI_CAPTURE_DIR is not set."""
    if not os.environ.get(DIR_ENV):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, before, hook in _hooks():
        HookRegistry.register(target, hook, HookType.BEFORE if before else HookType.AFTER)


def install() -> None:
    """The same hooks by plain assignment, for releases without a plug-in system. Call it in every process."""
    if not os.environ.get(DIR_ENV):
        return
    for target, before, hook in _hooks():
        _wrap(target, before=hook if before else None, after=None if before else hook)


def _hooks() -> list[tuple[str, bool, Callable[..., Any]]]:
    """(what, before it or after it, hook), only what this release has."""
    found: list[tuple[str, bool, Callable[..., Any]]] = [
        (f"{_RUNNER}.load_model", False, _after_load),
        (f"{_LOGITS}.forward", True, _before_logits),
        (f"{_REQ}.__init__", False, _after_req),
        (f"{_BATCH}.init_new", False, _after_batch),
        (f"{_HTTP}.set_global_state", False, _after_http),
    ]
    for module, cls, method in _PREFILL_GRAPHS:
        if _exists(module):
            found.append((f"{module}.{cls}.{method}", False, _after_can_run))
    return found


def _exists(module: str) -> bool:
    """Whether this release has the module; its parent package may be missing too."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _wrap(
    target: str, before: Callable[..., Any] | None = None, after: Callable[..., Any] | None = None
) -> None:
    import functools
    import pkgutil

    owner_path, name = target.rsplit(".", 1)
    owner = pkgutil.resolve_name(owner_path)
    raw = owner.__dict__.get(name) if isinstance(owner, type) else None
    original = raw.__func__ if isinstance(raw, classmethod | staticmethod) else getattr(owner, name)
    if getattr(original, "_k2tui_capture", False):
        return

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if before:
            changed = before(*args, **kwargs)
            if changed is not None:
                args, kwargs = changed
        result = original(*args, **kwargs)
        if after:
            replaced = after(result, *args, **kwargs)
            if replaced is not None:
                return replaced
        return result

    wrapper._k2tui_capture = True  # type: ignore[attr-defined]
    kind = type(raw) if isinstance(raw, classmethod | staticmethod) else None
    setattr(owner, name, kind(wrapper) if kind else wrapper)


# ---- hooks


def _after_can_run(result: Any, self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> bool | None:
    """A prefill that is captured runs as Python: a replayed graph calls no hook. All ranks see the same rids, so all agree."""
    if result and any(map(is_capture, getattr(forward_batch, "rids", None) or ())):
        return False
    return None


def _after_load(result: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    global _capturer
    if getattr(self, "is_draft_worker", False) or _capturer is not None:
        return
    _capturer = Capturer(self, Path(os.environ[DIR_ENV]))


def _after_batch(result: Any, *args: Any, **kwargs: Any) -> None:
    """Older releases keep no rids in a ForwardBatch: add them."""
    if getattr(result, "rids", None) is None:
        batch = next((a for a in (*args, *kwargs.values()) if getattr(a, "reqs", None)), None)
        if batch is not None:
            result.rids = [req.rid for req in batch.reqs]


def _after_req(result: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """A cache namespace of its own: no prefix hit, so no row is missing. Chunked prefill still finds its own chunks."""
    if is_capture(getattr(self, "rid", None)) and hasattr(self, "extra_key"):
        self.extra_key = self.rid


def _before_logits(
    self: Any,
    input_ids: Any = None,
    hidden_states: Any = None,
    lm_head: Any = None,
    logits_metadata: Any = None,
    aux_hidden_states: Any = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    if _capturer is None or _capturer.sink is None:
        return
    rids = getattr(logits_metadata, "rids", None)
    if rids is None:
        return
    mode = logits_metadata.forward_mode
    if not mode.is_extend() or mode.is_target_verify() or not any(map(is_capture, rids)):
        return
    # a multimodal wrapper hands embeddings on and no ids
    tokens = (
        logits_metadata.input_ids if getattr(logits_metadata, "input_ids", None) is not None else input_ids
    )
    _capturer.take(tokens, hidden_states, aux_hidden_states, logits_metadata)


def _after_http(result: Any, *args: Any, **kwargs: Any) -> None:
    """Adds the status routes to the server's own app."""
    from fastapi import Body
    from fastapi.responses import JSONResponse
    from sglang.srt.entrypoints.http_server import app

    from k2tui.capture.control import ROUTE, Control
    from k2tui.errors import K2Error

    if any(getattr(r, "path", "") == ROUTE for r in app.routes):
        return
    root = Path(os.environ[DIR_ENV])
    root.mkdir(parents=True, exist_ok=True)
    control = Control(root)

    def answer(call: Callable[[], Any]) -> JSONResponse:
        try:
            return JSONResponse(call())
        except K2Error as err:
            return JSONResponse({"error": err.message, "hint": err.hint}, status_code=400)

    async def status(run: str = "", cursor: int = 0, epoch: str = "") -> JSONResponse:
        return answer(lambda: control.status(run, cursor, epoch))

    async def begin(body: dict[str, Any] = Body()) -> JSONResponse:  # noqa: B008
        return answer(lambda: control.begin(str(body.get("run", "")), body.get("manifest", {})))

    async def flush(body: dict[str, Any] = Body()) -> JSONResponse:  # noqa: B008
        return answer(lambda: control.flush(str(body.get("run", ""))))

    # the annotations are strings in this module: FastAPI needs the real types
    status.__annotations__ = {"run": str, "cursor": int, "epoch": str}
    begin.__annotations__ = {"body": dict}
    flush.__annotations__ = {"body": dict}
    app.add_api_route(ROUTE, status, methods=["GET"])
    app.add_api_route(f"{ROUTE}/begin", begin, methods=["POST"])
    app.add_api_route(f"{ROUTE}/flush", flush, methods=["POST"])


# ---- the scheduler's side


def _inner(model: Any) -> Any:
    """The module that owns `layers_to_capture`, below wrappers such as language_model."""
    seen = model
    for _ in range(4):
        if hasattr(seen, "layers_to_capture"):
            return seen
        for name in ("model", "language_model"):
            deeper = getattr(seen, name, None)
            if deeper is not None:
                seen = deeper
                break
        else:
            return None
    return seen if hasattr(seen, "layers_to_capture") else None


def set_boundaries(model: Any, boundaries: Sequence[int]) -> None:
    """Make an SGLang model capture exactly these boundaries; what it was set to is read back, never trusted."""
    setter = getattr(model, "set_eagle3_layers_to_capture", None)
    if setter is None:
        raise RuntimeError(
            f"k2tui capture: {type(model).__name__} cannot capture layers in this SGLang (no set_eagle3_layers_to_capture)"
        )
    want = list(boundaries)
    # ids b - 1 are right for most classes; then raw ids; then the attribute itself
    for candidate in ([b - 1 for b in want], want):
        setter(candidate)
        owner = _inner(model)
        if owner is None or sorted(owner.layers_to_capture) == want:
            break
    owner = _inner(model)
    if owner is None:
        raise RuntimeError(f"k2tui capture: {type(model).__name__} has no layers_to_capture to read back")
    owner.layers_to_capture = want
    holder = model
    while holder is not None and not hasattr(holder, "capture_aux_hidden_states"):
        holder = getattr(holder, "language_model", None)
    if holder is None or not holder.capture_aux_hidden_states:
        raise RuntimeError(f"k2tui capture: {type(model).__name__} did not switch its layer capture on")


def refuse_unfit(server_args: Any) -> None:
    """Raises RuntimeError, in words, for set-ups under which states would be wrong or missing."""
    if getattr(server_args, "speculative_algorithm", None):
        raise RuntimeError("k2tui capture: start the capture server without --speculative-algorithm")
    if int(getattr(server_args, "pp_size", 1) or 1) > 1:
        raise RuntimeError("k2tui capture: pipeline parallelism is not supported (use --pp-size 1)")
    if getattr(server_args, "enable_two_batch_overlap", False):
        raise RuntimeError("k2tui capture: start without --enable-two-batch-overlap")
    if int(getattr(server_args, "attn_cp_size", 1) or 1) > 1 or getattr(
        server_args, "enable_prefill_context_parallel", False
    ):
        raise RuntimeError(
            "k2tui capture: context parallel attention splits a sequence over ranks; start without it"
        )
    if str(getattr(server_args, "disaggregation_mode", "null") or "null") == "decode":
        raise RuntimeError(
            "k2tui capture: a decode server computes no prefill; capture on the prefill server"
        )


class Capturer:
    """Copies captured rows off the device, from inside the forward pass. One per scheduler process."""

    def __init__(self, runner: Any, root: Path) -> None:
        import torch

        from k2tui.capture.sink import Sink
        from k2tui.states.writer import WriterLimits

        self.torch = torch
        server_args = runner.server_args
        refuse_unfit(server_args)
        config = runner.model_config
        text = getattr(config, "hf_text_config", None) or config.hf_config
        layers = int(getattr(text, "num_hidden_layers", 0) or config.num_hidden_layers)
        self.hidden_size = int(getattr(text, "hidden_size", 0) or config.hidden_size)
        self.boundaries = layer_ids.wanted_boundaries(layers, os.environ.get(BOUNDARIES_ENV))
        set_boundaries(runner.model, self.boundaries)
        self.sink: Any = None
        self.patience_s = float(os.environ.get(PATIENCE_ENV, "20"))
        self.device = torch.device(runner.device) if isinstance(runner.device, str) else runner.device
        rank, dp_rank = _ranks(runner)
        if rank != 0:
            return
        pinned_b = int(os.environ.get(PINNED_ENV, "2048")) << 20
        limits = WriterLimits(
            shard_bytes=int(os.environ.get(SHARD_ENV, "1024")) << 20,
            pending_bytes=pinned_b,
            min_free_b=int(os.environ.get(MIN_FREE_ENV, "2048")) << 20,
            threads=int(os.environ.get(THREADS_ENV, "4")),
        )
        from importlib.metadata import version

        facts = {
            "model_path": str(server_args.model_path),
            "architectures": list(getattr(config.hf_config, "architectures", None) or []),
            "hidden_size": self.hidden_size,
            "num_hidden_layers": layers,
            "vocab_size": int(config.vocab_size),
            "boundaries": list(self.boundaries),
            "engine": "sglang",
            "engine_version": version("sglang"),
            "engine_args": {
                "dtype": str(config.dtype).removeprefix("torch."),
                "tp_size": int(server_args.tp_size),
                "attention_backend": str(getattr(server_args, "attention_backend", None)),
                "quantization": str(getattr(server_args, "quantization", None)),
                "chunked_prefill_size": getattr(server_args, "chunked_prefill_size", None),
            },
            "dp_rank": dp_rank,
        }
        # SGLang's scheduler polls without a pause: at Python's usual 5 ms a writer thread waits that long for the interpreter
        # after every system call. Seen on an H200: 16 GB in the ring took 13 to 22 s to be published; that this wait is the cause is inferred
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
        host = re.sub(r"[^A-Za-z0-9]", "", os.uname().nodename)[:12] or "host"
        root.mkdir(parents=True, exist_ok=True)
        self.ring: Any = None
        self.stream: Any = None
        self.piece_b = 64 << 20
        if self.device.type == "cuda":
            from k2tui.capture.ring import PinnedRing

            self.ring = PinnedRing(torch.empty(pinned_b, dtype=torch.uint8, pin_memory=True))
            self.stream = torch.cuda.Stream(device=self.device)
            self.piece_b = min(self.piece_b, pinned_b // 8)
        self.sink = Sink(root, f"{host}-{dp_rank}-{os.getpid()}", facts, limits)
        atexit.register(self.sink.close)
        log.info("k2tui capture: boundaries %s of %d layers, into %s", list(self.boundaries), layers, root)

    def take(self, input_ids: Any, hidden: Any, aux: Any, batch: Any) -> None:
        """Start the copies of every captured row of one prefill batch. Never raises: a failure gives the samples up."""
        rids = batch.rids
        try:
            prefix = _cpu_list(batch, "extend_prefix_lens_cpu", "extend_prefix_lens")
            lengths = _cpu_list(batch, "extend_seq_lens_cpu", "extend_seq_lens")
            if aux is None:
                raise RuntimeError("the model gave no aux hidden states")
            count = len(self.boundaries)
            packed = isinstance(aux, self.torch.Tensor)
            if packed and aux.shape[-1] != count * self.hidden_size:
                raise RuntimeError(
                    f"aux states of width {aux.shape[-1]} for {count} boundaries of {self.hidden_size}"
                )
            if not packed and len(aux) != count:
                raise RuntimeError(f"{len(aux)} aux states for {count} boundaries")
            row = 0
            jobs: list[tuple[Any, int]] = []
            for rid, start, length in zip(rids, prefix, lengths, strict=False):
                if is_capture(rid):
                    ticket = self.sink.open_chunk(rid, int(start), int(length))
                    if ticket is not None:
                        jobs.append((ticket, row))
                row += int(length)
            if not jobs:
                return
            columns = (
                [aux[:, i * self.hidden_size : (i + 1) * self.hidden_size] for i in range(count)]
                if packed
                else list(aux)
            )
            if self.stream is not None:
                self._take_cuda(input_ids, hidden, columns, jobs)
            else:
                self._take_cpu(input_ids, hidden, columns, jobs)
        except Exception as err:
            log.exception("k2tui capture")
            for rid in rids:
                if is_capture(rid):
                    self.sink.refuse(rid, f"{type(err).__name__}: {err}")

    def _pick(self, columns: list[Any], ticket: Any) -> list[Any]:
        return [columns[self.boundaries.index(b)] for b in ticket.boundaries]

    def _take_cpu(self, input_ids: Any, hidden: Any, columns: list[Any], jobs: list[tuple[Any, int]]) -> None:
        torch = self.torch
        for ticket, row in jobs:
            end = row + ticket.count
            parts: list[tuple[str, int, Any]] = [
                ("input_ids", ticket.start, input_ids[row:end].to(torch.int32))
            ]
            aux = torch.cat([c[row:end] for c in self._pick(columns, ticket)], -1)
            parts += [(name, ticket.start, t) for name, t in self._features("aux", ticket, aux)]
            last = hidden[row:end]
            if ticket.need_last is not None:
                last = last[torch.from_numpy(ticket.need_last)] if len(ticket.need_last) else last[:0]
            if len(last):
                parts += [(name, ticket.last_row, t) for name, t in self._features("last", ticket, last)]
            for name, at, tensor in parts:
                if not ticket.put(name, at, flat_bytes(tensor), patience_s=self.patience_s):
                    break

    def _take_cuda(
        self, input_ids: Any, hidden: Any, columns: list[Any], jobs: list[tuple[Any, int]]
    ) -> None:
        """Neighbouring requests of one run travel together: few launches and copies a batch, however many requests."""
        torch = self.torch
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            group: list[tuple[Any, int]] = []
            for ticket, row in jobs:
                if group and (
                    group[-1][1] + group[-1][0].count != row or group[-1][0].writer is not ticket.writer
                ):
                    self._take_group(input_ids, hidden, columns, group)
                    group = []
                group.append((ticket, row))
            self._take_group(input_ids, hidden, columns, group)
        # the model's tensors must outlive the copies, though the model has done with them
        for tensor in (input_ids, hidden, *columns):
            tensor.record_stream(self.stream)

    def _take_group(
        self, input_ids: Any, hidden: Any, columns: list[Any], group: list[tuple[Any, int]]
    ) -> None:
        """Rows that lie side by side, of one run, cut into pieces of `piece_b`."""
        torch = self.torch
        picked = self._pick(columns, group[0][0])
        first, end = group[0][1], group[-1][1] + group[-1][0].count
        step = max(1, self.piece_b // (self.hidden_size * 2 * (len(picked) + 1) + 64))
        refused: set[int] = set()
        for a in range(first, end, step):
            b = min(a + step, end)
            # of each request: its rows inside this piece, as places in the piece, in the sample, and among the kept rows of `last`
            shares: list[tuple[Any, int, int, int, int, int, int]] = []
            wanted: list[np.ndarray] = []
            kept = 0
            for ticket, row in group:
                low, high = max(a, row), min(b, row + ticket.count)
                if low >= high:
                    continue
                before, count = ticket.last_row, high - low
                if ticket.need_last is None:
                    wanted.append(np.arange(low, high))
                    before += low - row
                elif len(ticket.need_last):
                    chosen = ticket.need_last[low - row : high - row].nonzero()[0]
                    wanted.append(chosen + low)
                    before += int(ticket.need_last[: low - row].sum())
                    count = len(chosen)
                else:
                    count = 0
                shares.append(
                    (ticket, low - a, high - a, ticket.start + low - row, kept, kept + count, before)
                )
                kept += count
            parts = [
                ("input_ids", input_ids[a:b].to(torch.int32)),
                *self._features("aux", group[0][0], torch.cat([c[a:b] for c in picked], -1)),
            ]
            if kept:
                if kept == b - a:
                    last = hidden[a:b]
                else:
                    rows = torch.from_numpy(np.concatenate(wanted))
                    last = hidden.index_select(0, rows.to(self.device, non_blocking=True))
                parts += self._features("last", group[0][0], last)
            if not self._copy(parts, shares, refused):
                for ticket, *_ in shares:
                    reason = "no room for the copy: the disk is too slow or full"
                    self.sink.refuse(ticket.request.to_rid(), reason)
                    ticket.writer.abandon(ticket.slot, reason)

    def _copy(
        self,
        parts: list[tuple[str, Any]],
        shares: list[tuple[Any, int, int, int, int, int, int]],
        refused: set[int],
    ) -> bool:
        """Device -> ring, all parts of one piece with one event; then each request's share of it to the writer."""
        torch = self.torch
        flats = [(name, len(t), t.contiguous().view(torch.uint8).reshape(-1)) for name, t in parts]
        sizes = [f.numel() + -f.numel() % 64 for _, _, f in flats]
        region = self.ring.take(sum(sizes), self.patience_s)
        self.sink.copy_stall_s = self.ring.stall_s
        if region is None:
            return False
        whole = self.ring.view(region, sum(sizes))
        offset = 0
        views: list[tuple[str, int, Any]] = []
        for (name, rows, flat), size in zip(flats, sizes, strict=True):
            target = whole[offset : offset + flat.numel()]
            target.copy_(flat, non_blocking=True)
            views.append((name, flat.numel() // rows, target.numpy()))
            offset += size
        event = torch.cuda.Event()
        event.record(self.stream)
        lost = False
        for ticket, low, high, at, last_low, last_high, last_at in shares:
            for name, row_b, target in views:
                is_last = name.startswith("last")
                p, q = (last_low, last_high) if is_last else (low, high)
                if p == q or id(ticket) in refused:
                    continue
                region.hold()
                piece = target[p * row_b : q * row_b]
                if not ticket.put(
                    name,
                    last_at if is_last else at,
                    piece,
                    event.synchronize,
                    region.release,
                    self.patience_s,
                ):
                    refused.add(id(ticket))
                    lost = True
        if lost:
            event.synchronize()  # what was not taken is reused at once: the copy must have ended
        region.release()
        return True

    def _features(self, name: str, ticket: Any, tensor: Any) -> list[tuple[str, Any]]:
        return stored(name, ticket.dtype, self.hidden_size, tensor)


def _cpu_list(batch: Any, *names: str) -> list[int]:
    for name in names:
        found = getattr(batch, name, None)
        if found is not None:
            return found.tolist() if hasattr(found, "tolist") else list(found)
    raise RuntimeError(f"this SGLang's batch has none of {', '.join(names)}")


def _ranks(runner: Any) -> tuple[int, int]:
    """(rank inside the attention-TP group, data-parallel rank)."""
    try:
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        return int(parallel.attn_tp_rank), int(parallel.attn_dp_rank or getattr(runner, "dp_rank", None) or 0)
    except ImportError:
        from sglang.srt.layers import dp_attention

        dp_rank = (
            getattr(dp_attention, "get_attention_dp_rank", lambda: 0)()
            or getattr(runner, "dp_rank", None)
            or 0
        )
        return int(dp_attention.get_attention_tp_rank()), int(dp_rank)
