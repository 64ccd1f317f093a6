"""Bytes of one streamed HTTP/1.1 answer -> token events of one request. Knows no socket, no clock and no file.

Law: any slicing of the same bytes gives the same events (tests/bench/test_stream.py). Two quick paths only skip work:
`take_plain` looks at the reads of many streams in one go, each one whole HTTP chunk with exactly one plain token event, so that
nearly all that costs per token runs in C; `Exchange._quick` takes such chunks off the front of any other read.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Sequence
from functools import cache
from operator import sub
from typing import Any

from k2tui.core.bench_record import RequestRecord
from k2tui.loadgen.jsonvalue import listing, mapping

MAX_HEADER = 65536
MAX_BODY_KEPT = 65536  # of an answer that is not a stream (an error page): the rest is counted, not kept
_COMPLETION = b'"completion_tokens":'
_COMPLETION_LEN = len(_COMPLETION)
_TOTALS = re.compile(rb'"completion_tokens":(\d+)')
EVENT_END = b"\n\n\r\n"  # of an HTTP chunk that ends with an event; the last chunk of an answer never ends so


class _Begins(dict[int, bytes]):
    """Bytes of a whole HTTP chunk that is one event -> how it must begin."""

    def __init__(self, hexadecimal: str) -> None:
        self.hexadecimal = hexadecimal

    def __missing__(self, n: int) -> bytes:
        digits = next((d for d in range(1, 9) if n > 12 + d and len(f"{n - 4 - d:x}") == d), 0)
        # a length that no chunk can have gets a beginning that none has
        self[n] = found = f"{n - 4 - digits:{self.hexadecimal}}\r\ndata: ".encode() if digits else b"\n"
        return found


class Plain:
    """How one server writes a plain token event. One object a way, so that `is` compares."""

    __slots__ = ("begins", "null", "tail", "totals")

    def __init__(self, null: bytes, hexadecimal: str, totals: bool, tail: bytes) -> None:
        self.null = null  # its spelling of "finish_reason": null
        self.tail = tail  # how the chunk of every such event ends
        self.begins = _Begins(hexadecimal)
        self.totals = totals  # events carry completion_tokens


@cache
def plain_way(null: bytes, hexadecimal: str, totals: bool, tail: bytes) -> Plain:
    return Plain(null, hexadecimal, totals, tail)


class ProtocolError(Exception):
    """The server's bytes are not HTTP/1.1 with a chunked, sized or closing body."""


class Answer:
    """Incremental HTTP/1.1 answer: head, transfer coding, then server-sent events or a plain body."""

    __slots__ = (
        "_body",
        "_carry",
        "_data",
        "_left",
        "_line",
        "_mode",
        "body",
        "done",
        "is_sse",
        "keep_alive",
        "status",
    )

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._carry: bytes = b""  # bytes not understood yet
        self._mode = 0  # 0 head, 1 chunk size, 2 chunk data, 3 chunk end, 4 trailer, 5 sized, 6 until close
        self._left = 0
        self._line = b""  # unfinished line of the event stream
        self._data: list[bytes] = []  # data lines of the unfinished event
        self._body = b""
        self.status = 0
        self.is_sse = False
        self.keep_alive = True
        self.done = False
        self.body = b""

    @property
    def at_boundary(self) -> bool:
        """Between two HTTP chunks and between two events: the quick path may look at the next bytes alone."""
        return self._mode == 1 and not self._carry and not self._line and not self._data

    def feed(self, data: bytes, into: list[bytes] | None = None) -> list[bytes]:
        """Payloads of the events completed by these bytes. Raises ProtocolError; what came before it is in `into`."""
        out: list[bytes] = [] if into is None else into
        if self._carry:
            data = self._carry + data
            self._carry = b""
        pos, n = 0, len(data)
        while pos < n and not self.done:
            mode = self._mode
            if mode == 2:
                take = min(self._left, n - pos)
                self._content(data[pos : pos + take], out)
                pos += take
                self._left -= take
                if not self._left:
                    self._mode = 3
            elif mode == 1:
                end = data.find(b"\n", pos)
                if end < 0:
                    self._keep(data[pos:], 1024)
                    return out
                size = data[pos:end].split(b";", 1)[0].strip()
                try:
                    self._left = int(size, 16)
                except ValueError:
                    raise ProtocolError(f"chunk size {size[:20]!r}") from None
                if self._left < 0:
                    raise ProtocolError(f"chunk size {size[:20]!r}")
                pos = end + 1
                self._mode = 2 if self._left else 4
            elif mode == 3:
                if data[pos] == 13:  # CR LF after the chunk's data
                    if pos + 1 >= n:
                        self._carry = data[pos:]
                        return out
                    if data[pos + 1] != 10:
                        raise ProtocolError("no line end after a chunk")
                    pos += 2
                elif data[pos] == 10:
                    pos += 1
                else:
                    raise ProtocolError("no line end after a chunk")
                self._mode = 1
            elif mode == 4:
                end = data.find(b"\n", pos)
                if end < 0:
                    self._keep(data[pos:], MAX_HEADER)
                    return out
                if not data[pos:end].strip():
                    self._finish(out)
                pos = end + 1
            elif mode == 5:
                take = min(self._left, n - pos)
                self._content(data[pos : pos + take], out)
                pos += take
                self._left -= take
                if not self._left:
                    self._finish(out)
            elif mode == 6:
                self._content(data[pos:], out)
                pos = n
            else:
                end = data.find(b"\r\n\r\n", pos)
                if end < 0:
                    self._keep(data[pos:], MAX_HEADER)
                    return out
                self._head(data[pos:end], out)
                pos = end + 4
        return out

    def eof(self) -> list[bytes]:
        """The server closed: payloads that this completes. `done` tells whether the answer is whole."""
        out: list[bytes] = []
        if self._mode == 6 and not self.done:
            self._finish(out)
        return out

    def _keep(self, rest: bytes, limit: int) -> None:
        if len(rest) > limit:
            raise ProtocolError("a header line without an end")
        self._carry = rest

    def _head(self, head: bytes, out: list[bytes]) -> None:
        lines = head.split(b"\r\n")
        parts = lines[0].split(b" ", 2)
        if len(parts) < 2 or not parts[0].startswith(b"HTTP/1.") or not parts[1].isdigit():
            raise ProtocolError(f"not an HTTP answer: {lines[0][:60]!r}")
        self.status = int(parts[1])
        if 100 <= self.status < 200:
            return  # an interim answer: the real head follows
        self.keep_alive = not parts[0].endswith(b"1.0")
        length: int | None = None
        chunked = False
        self.is_sse = False
        for line in lines[1:]:
            name, _, value = line.partition(b":")
            name = name.strip().lower()
            value = value.strip()
            if name == b"content-length" and value.isdigit():
                length = int(value)
            elif name == b"transfer-encoding":
                chunked = b"chunked" in value.lower()
            elif name == b"content-type":
                self.is_sse = value.lower().startswith(b"text/event-stream")
            elif name == b"connection":
                if b"close" in value.lower():
                    self.keep_alive = False
                elif b"keep-alive" in value.lower():
                    self.keep_alive = True
        if chunked:
            self._mode = 1
        elif length is not None:
            self._mode, self._left = 5, length
            if not length:
                self._finish(out)
        elif self.status in (204, 304):
            self._finish(out)
        else:
            self._mode = 6
            self.keep_alive = False

    def _finish(self, out: list[bytes]) -> None:
        if self.is_sse:
            if self._line:
                self._sse_line(self._line.rstrip(b"\r"), out)
            self._line = b""
            if self._data:
                out.append(b"\n".join(self._data))
                self._data = []
        self.done = True
        self._mode = 1

    def _content(self, data: bytes, out: list[bytes]) -> None:
        if not self.is_sse:
            if len(self.body) < MAX_BODY_KEPT:
                self.body += data[: MAX_BODY_KEPT - len(self.body)]
            return
        if self._line:
            data = self._line + data
            self._line = b""
        lines = data.split(b"\n")
        self._line = lines.pop()
        for line in lines:
            self._sse_line(line[:-1] if line.endswith(b"\r") else line, out)

    def _sse_line(self, line: bytes, out: list[bytes]) -> None:
        if not line:
            if self._data:
                out.append(b"\n".join(self._data) if len(self._data) > 1 else self._data[0])
                self._data = []
        elif line.startswith(b"data:"):
            self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
        # comments (":...") and event/id/retry fields carry no token


class Exchange:
    """One request in flight: its answer, stamps and what the server counted. Times are ns of one monotonic clock."""

    __slots__ = (
        "_burst", "_overhead", "answer",
        "api", "asked", "cached", "coalesced", "correct", "cumulative", "done", "done_mark", "error", "error_text", "finish",
        "histogram", "ignore_eos", "index", "keep_text", "later", "lens", "out_tokens", "output_ids", "plain", "prompt_tokens", "proposed", "session",
        "stamps", "t_done", "t_first", "t_sched", "t_send", "text", "turn", "verify",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        api: str,
        asked: int,
        *,
        ignore_eos: bool = True,
        keep_text: bool = False,
        session: int = -1,
        turn: int = 0,
    ) -> None:
        self.index = index
        self.api = api
        self.asked = asked
        self.ignore_eos = ignore_eos
        self.keep_text = keep_text
        self.session = session
        self.turn = turn
        self.answer = Answer()
        self.t_sched = self.t_send = self.t_first = self.t_done = 0
        self.later: list[tuple[bytes, int]] = []  # reads that wait for a quiet moment, with their stamps
        self.plain: Plain | None = None  # the quick paths may be used, and how
        # lists: an append to an array costs five times as much
        self.stamps: list[int] = []
        self.lens: list[int] = []  # payload bytes, one entry an event without a running count
        self.cumulative: list[int] = []  # completion tokens so far, one entry an event; -1 = not told
        self._overhead = -1  # payload bytes around the text
        self._burst = 0  # token events in the very first read, when there were several
        self.out_tokens: int | None = None
        self.prompt_tokens: int | None = None
        self.cached: int | None = None
        self.verify = self.correct = self.proposed = 0
        self.histogram: tuple[int, ...] = ()
        self.finish = ""
        self.done_mark = False  # [DONE] was seen
        self.done = False
        self.error = ""
        self.error_text = ""
        self.coalesced = 0
        self.text = ""
        self.output_ids: list[int] = []

    def receive(self, data: bytes, stamp: int) -> bool:
        """Take the bytes of one read, whose last byte arrived at `stamp`. True when the answer is whole."""
        if self.plain is None:
            return self._receive_slow(data, stamp, 0)
        fresh, pos = self._quick(data, self.plain)
        if pos < len(data):
            return self._receive_slow(data[pos:] if pos else data, stamp, fresh)
        self._stamp(fresh, stamp)
        return False

    def catch_up(self) -> bool:
        """Take the reads that wait. True when the answer is whole (then t_done is its last byte's stamp)."""
        waiting, self.later = self.later, []
        for data, stamp in waiting:
            if self.receive(data, stamp):
                self.t_done = stamp
                return True
        return self.done

    def _quick(self, data: bytes, plain: Plain) -> tuple[int, int]:
        """(token events, bytes) at the front of `data` that are whole HTTP chunks of exactly one token event each."""
        null = plain.null
        find = data.find
        n = len(data)
        pos = fresh = 0
        while pos < n:
            i = find(b"\r\n", pos + 1, pos + 12)
            if i < 0:
                break
            try:
                end = i + 2 + int(data[pos:i], 16)
            except ValueError:
                break
            # "data: ...\n\n" and nothing more, a plain token event, no error; a line end elsewhere would be another line
            if (
                end + 2 > n
                or not data.startswith(b"data: ", i + 2)
                or find(b"\n", i + 2) != end - 2
                or not data.startswith(b"\n\n\r\n", end - 2)
                or find(null, i, end) < 0
                or find(b'"error"', i, end) >= 0
            ):
                break
            if plain.totals:
                j = data.rfind(_COMPLETION, i, end) + _COMPLETION_LEN
                try:
                    total = int(data[j : find(b",", j, end)]) if j > _COMPLETION_LEN else -1
                except ValueError:
                    break
                if total <= self.cumulative[-1]:
                    break
                self.cumulative.append(total)
            else:
                self.lens.append(end - i - 10)
            fresh += 1
            pos = end + 2
        return fresh, pos

    def _receive_slow(self, data: bytes, stamp: int, fresh: int) -> bool:
        """The full parser. fresh: token events of the same read that the quick path took already."""
        answer = self.answer
        self.plain = None
        payloads: list[bytes] = []
        broken = ""
        try:
            answer.feed(data, payloads)
        except ProtocolError as err:
            broken = str(err)
        last: bytes = b""
        for payload in payloads:
            if self._event(payload):
                fresh += 1
                last = payload
        if fresh:
            self._stamp(fresh, stamp)
            if self.t_first == 0:
                self.t_first = self.stamps[0]
        if broken:
            self.fail("protocol", broken)
            return True
        if answer.done:
            self._complete()
            return True
        if last and answer.at_boundary and not self.keep_text:
            self._learn(last, data)
        return False

    def _learn(self, payload: bytes, data: bytes) -> None:
        """Let the quick path take over while the stream looks like this token event."""
        totals = self.cumulative[-1] >= 0
        if totals and _COMPLETION not in payload:
            return
        size = len(payload) + 8
        hexadecimal = (
            "X" if f"{size:X}\r\n".encode() in data and f"{size:x}\r\n".encode() not in data else "x"
        )
        for spelling in (b'"finish_reason":null', b'"finish_reason": null'):
            if spelling in payload:
                # what follows it is the same in every event, unless a number may change
                end = payload[payload.rindex(spelling) :]
                tail = EVENT_END if any(48 <= c <= 57 for c in end) else end + EVENT_END
                self.plain = plain_way(spelling, hexadecimal, totals, tail)
                return

    def _stamp(self, fresh: int, stamp: int) -> None:
        """Stamps of `fresh` token events that came with one read: the last is exact, earlier ones lie evenly between."""
        if fresh == 1:
            self.stamps.append(stamp)
            return
        self.coalesced += fresh - 1
        if not self.stamps:
            self._burst = fresh
        before = self.stamps[-1] if self.stamps else stamp
        for k in range(1, fresh + 1):
            self.stamps.append(before + (stamp - before) * k // fresh)

    def _event(self, payload: bytes) -> bool:
        """Understand one event; True if it holds tokens."""
        if payload == b"[DONE]":
            self.done_mark = True
            return False
        try:
            found: Any = json.loads(payload)
        except (ValueError, RecursionError):
            self._set_error("protocol", f"an event that is not JSON: {payload[:80]!r}")
            return False
        event = mapping(found)
        if not event:
            return False
        problem: Any = event.get("error")
        if problem:
            self._set_error("in_band", _words(problem))
            return False
        if event.get("object") == "error":
            self._set_error("in_band", _words(event.get("message")))
            return False
        return self._generate(event, payload) if self.api == "generate" else self._openai(event, payload)

    def _generate(self, event: dict[str, Any], payload: bytes) -> bool:
        meta = mapping(event.get("meta_info"))
        text: str = event.get("text") or ""
        ids: list[int] = listing(event.get("output_ids"))
        if self.keep_text:
            if ids:
                self.output_ids = ids if len(ids) >= len(self.output_ids) else self.output_ids + ids
            if text:
                self.text = text if text.startswith(self.text) else self.text + text
        total = meta.get("completion_tokens")
        before = self.cumulative[-1] if self.cumulative else 0
        reason = meta.get("finish_reason")
        if reason:
            kind: Any = mapping(reason).get("type") or reason
            self.finish = str(kind)
            if kind == "abort":
                self._set_error("in_band", _words(reason))
        self._meta(meta)
        if total is None:
            if not text and not ids:
                return False
            self.cumulative.append(-1)
            self.lens.append(len(payload))
            return True
        if total <= max(before, 0):
            return False
        self.cumulative.append(int(total))
        self.out_tokens = int(total)
        return True

    def _openai(self, event: dict[str, Any], payload: bytes) -> bool:
        usage = mapping(event.get("usage"))
        total: int | None = None
        if usage:
            total = usage.get("completion_tokens")
            if total is not None:
                self.out_tokens = int(total)
            if usage.get("prompt_tokens") is not None:
                self.prompt_tokens = int(usage["prompt_tokens"])
            cached = mapping(usage.get("prompt_tokens_details")).get("cached_tokens")
            if cached is not None:
                self.cached = int(cached)
        if event.get("sglext"):
            self._extension(event["sglext"])
        choices = listing(event.get("choices"))
        if not choices:
            return False
        choice = mapping(choices[0])
        if choice.get("sglext"):
            self._extension(choice["sglext"])
        if choice.get("finish_reason"):
            self.finish = str(choice["finish_reason"])
            if self.finish in ("abort", "error"):
                self._set_error("in_band", f"finish_reason {self.finish}")
        if choice.get("delta") is not None:
            delta = mapping(choice["delta"])
            text = delta.get("content") or ""
            thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
            calls = delta.get("tool_calls")
            held = bool(text or thought or calls)
            size = len(json.dumps(text or thought)) - 2 if not calls else len(json.dumps(calls))
            if self.keep_text:
                self.text += text
        else:
            text = choice.get("text") or ""
            held = bool(text)
            size = len(json.dumps(text)) - 2
            if self.keep_text:
                self.text += text
        # An event without text may still hold a token (half a character, a special token). The server's running count says
        # so; without one an open event after the first text counts, as on the quick path. The role chunk never does.
        if not held:
            if total is not None:
                told = max(self.cumulative[-1], 0) if self.cumulative else 0
                if total <= told or mapping(choice.get("delta")).get("role"):
                    return False
            elif choice.get("finish_reason") or not self.cumulative:
                return False
        if total is not None and not usage_is_final(event):
            self.cumulative.append(int(total))
            return True
        if self._overhead < 0:
            self._overhead = len(payload) - size
        self.cumulative.append(-1)
        self.lens.append(len(payload))
        return True

    def _extension(self, ext: Any) -> None:
        for item in mapping(ext).values():
            if "spec_verify_ct" in mapping(item):
                self._meta(mapping(item))

    def _meta(self, meta: dict[str, Any]) -> None:
        if meta.get("prompt_tokens") is not None:
            self.prompt_tokens = int(meta["prompt_tokens"])
        if meta.get("cached_tokens") is not None:
            self.cached = int(meta["cached_tokens"])
        if meta.get("spec_verify_ct"):
            self.verify = int(meta["spec_verify_ct"])
            # names of 0.5.23, then of 0.5.9 and before
            self.correct = int(meta.get("spec_num_correct_drafts") or meta.get("spec_accept_token_num") or 0)
            self.proposed = int(meta.get("spec_num_proposed_drafts") or meta.get("spec_draft_token_num") or 0)
            steps: Any = meta.get("spec_correct_drafts_histogram") or meta.get("spec_accept_histogram") or ()
            self.histogram = tuple(int(s) for s in steps)

    def _set_error(self, kind: str, text: str) -> None:
        if not self.error:
            self.error, self.error_text = kind, text[:300]

    def fail(self, kind: str, text: str) -> None:
        """The exchange ends here without a whole answer."""
        self._set_error(kind, text)
        self.done = True

    def closed(self, stamp: int) -> None:
        """The server closed the connection at `stamp`."""
        fresh = sum(1 for p in self.answer.eof() if self._event(p))
        if fresh:
            self._stamp(fresh, stamp)
            if self.t_first == 0:
                self.t_first = self.stamps[0]
        if self.answer.done:
            self._complete()
        elif self.answer.status == 0:
            self.fail("reset", "the server closed the connection before it answered")
        else:
            self.fail("truncated", f"the server closed the connection after {len(self.stamps)} events")

    def _complete(self) -> None:
        """The answer is whole: decide whether it is a success."""
        self.done = True
        answer = self.answer
        if answer.status != 200:
            self._set_error(f"http_{answer.status}", _body_words(answer.body))
            return
        if not answer.is_sse:
            self._set_error("in_band", _body_words(answer.body) or "the answer is no event stream")
            return
        if self.error:
            return
        if not self.done_mark and not self.finish:
            self._set_error("truncated", "the stream ended without [DONE] or a finish reason")
        elif not self.stamps:
            told = self.out_tokens or 0
            self._set_error(
                "empty",
                f"no text came, the server counted {told} tokens" if told else "the answer held no token",
            )

    @property
    def counted_by(self) -> str:
        """server: it told the count. finish: it told no count but that it stopped because max_tokens was reached, which
        is one. client: events were counted."""
        if self.out_tokens is not None or (self.cumulative and self.cumulative[-1] >= 0):
            return "server"
        return "finish" if self.finish == "length" and self.stamps else "client"

    @property
    def total_tokens(self) -> int:
        if self.cumulative and self.cumulative[-1] >= 0:
            return max(self.cumulative[-1], self.out_tokens or 0)
        if self.out_tokens is not None:
            return self.out_tokens
        return self.asked if self.counted_by == "finish" else len(self.stamps)

    def record(self, t0: int) -> RequestRecord:
        """The measured request, times counted from t0."""
        if self._burst > 1:
            self._spread_first()
        stamps = array("q", [s - t0 for s in self.stamps])
        total = self.total_tokens
        tokens, spread = self._tokens(total)
        return RequestRecord(
            index=self.index,
            t_sched_ns=self.t_sched - t0,
            t_send_ns=self.t_send - t0,
            t_first_ns=stamps[0] if stamps else 0,
            t_last_ns=stamps[-1] if stamps else 0,
            t_done_ns=self.t_done - t0 if self.t_done else 0,
            prompt_tokens=self.prompt_tokens,
            output_tokens=total,
            asked_tokens=self.asked,
            stamps_ns=stamps,
            tokens=tokens,
            cached_tokens=self.cached,
            spec_verify_ct=self.verify,
            spec_num_correct_drafts=self.correct,
            spec_num_proposed_drafts=self.proposed,
            spec_histogram=self.histogram,
            finish=self.finish,
            http_status=self.answer.status,
            error=self.error,
            error_text=self.error_text,
            count=self.counted_by,
            is_short=self.ignore_eos
            and not self.error
            and self.counted_by == "server"
            and total < self.asked,
            spread=spread,
            coalesced=self.coalesced,
            session=self.session,
            turn=self.turn,
        )

    def _spread_first(self) -> None:
        """Several events in the first read share its stamp, and nothing came before: the stream's own later gap tells how
        far apart they were. They stay counted as coalesced."""
        n, self._burst = self._burst, 0
        last = self.stamps[n - 1]
        gaps = sorted(map(sub, self.stamps[n:], self.stamps[n - 1 : -1]))
        gap = gaps[len(gaps) // 2] if gaps else 0
        for k in range(n - 1):
            self.stamps[k] = max(last - gap * (n - 1 - k), min(self.t_send, last))
        self.t_first = self.stamps[0]

    def _tokens(self, total: int) -> tuple[array[int], str]:
        """Tokens of each event, and how that is known."""
        n = len(self.stamps)
        if self.cumulative and self.cumulative[-1] >= 0 and len(self.cumulative) == n:
            before = 0
            told: array[int] = array("i")
            for c in self.cumulative:
                told.append(c - before)
                before = c
            return told, "exact"
        if total == n or not n:
            return array("i", [1]) * n, "chunk" if self.counted_by == "client" else "exact"
        overhead = max(self._overhead, 0)
        weights = [max(size - overhead, 0) for size in self.lens]
        whole = sum(weights)
        if len(weights) != n or not whole:
            weights, whole = [1] * n, n
        shared: array[int] = array("i")
        given = seen = 0
        for w in weights:
            seen += w
            upto = (total * seen + whole // 2) // whole
            shared.append(upto - given)
            given = upto
        return shared, "text"


def take_plain(
    plain: Plain, exchanges: Sequence[Exchange], reads: Sequence[bytes], stamps: Sequence[int]
) -> bool:
    """Take one read of each of several streams, if each is one whole HTTP chunk with exactly one plain token event.

    Every exchange must know this `plain` way, and every read must end with its tail. False = nothing was taken.
    """
    k = len(reads)
    joined = b"".join(reads)
    begins = list(map(plain.begins.__getitem__, map(len, reads)))
    if (
        len(joined) - len(joined.replace(b"\n", b"")) != 4 * k  # three times as fast as count
        or b"rror" in joined  # the shorter word is found faster; a text about errors goes the longer way
        or (plain.tail == EVENT_END and joined.count(plain.null) != k)
        or not all(map(bytes.startswith, reads, begins))
    ):
        return False
    if not plain.totals:
        for exchange, stamp, read, begin in zip(exchanges, stamps, reads, begins, strict=True):
            exchange.stamps.append(stamp)
            exchange.lens.append(len(read) - len(begin) - 4)
        return True
    totals = [int(t) for t in _TOTALS.findall(joined)]
    if len(totals) != k or not all(t > ex.cumulative[-1] for t, ex in zip(totals, exchanges, strict=True)):
        return False
    for exchange, stamp, total in zip(exchanges, stamps, totals, strict=True):
        exchange.stamps.append(stamp)
        exchange.cumulative.append(total)
    return True


def usage_is_final(event: dict[str, Any]) -> bool:
    """The closing usage event has no choices; a running one has."""
    return not event.get("choices")


def _words(problem: Any) -> str:
    return str(mapping(problem).get("message") or problem)


def _body_words(body: bytes) -> str:
    """The reason in an error page, one line."""
    text = body.decode("utf-8", "replace")
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        return " ".join(text.split())[:300]
    told = mapping(value)
    inner: Any = told.get("error") or told.get("message") or told.get("detail") or value
    return _words(inner)[:300]
