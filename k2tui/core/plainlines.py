"""Runs of serving lines that change nothing: found in whole blocks of bytes, without cutting them into lines.

A serving log is nearly all batch lines and answered requests. The newest few say everything that the view shows, so a run
of them is skipped by one match, and only its newest lines are looked at later. Knows no state and no engine's events.
"""

from __future__ import annotations

import re
from collections import deque
from typing import NamedTuple

KEEP = 16  # newest decode lines that are kept
_KEEP_B = 16 << 10  # they nearly always stand in so many bytes

_STAMP = re.compile(rb"(?:\d{4}-\d\d-\d\d[T ])?\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?")
_ANY_STAMP = rb"[\dT:.,Z+ -]{8,40}"
_ACCESS = rb'INFO:     [^\[\n"]*+"[A-Z]+ /[^\[\n" ]*+ HTTP/1\.1" [1-4].*+\n'
_BATCH = rb"(?:Decode|Prefill) batch[,.] #.*+\n"
_ANSWER_WORDS = b'"POST /'
_ANSWER = re.compile(rb'"POST /(?:generate|v1/)[^\n"]* HTTP/1\.1" [123]')


# a line of a serving log that holds none of these says nothing about the state
_WORTH_READING = (
    b"rror", b"xception", b"ailed", b"ailure", b"atal", b"raceback", b"File ", b"killed", b"Kill", b"kill_", b"llegal", b"xit", b"SIG", b"ignal", b"out of", b"emory",
    b"timeout", b"imed out", b"raph", b"server_args", b"fired up", b"Load", b"Init", b"shard", b"%", b"hutting", b"hutdown", b"ccept len",
    b"tarted server", b"Uvicorn", b"NCCL", b"Xid", b"lost", b"refused", b"closed", b"abort", b"Abort", b"enied", b"vLLM", b"k2tui", b"KV ",
    b"used by", b"GET /health", b"drain", b"exiting", b"watchdog", b"Watchdog", b"JIT", b"ompil", b"orrupt", b"issing", b"nan", b"NaN", b"invalid", b"nsupported",
)  # fmt: skip


class Run(NamedTuple):
    """Lines data[start:stop], the first of which is line number `no`; `batches` of them are decode lines."""

    no: int
    data: bytes
    start: int
    stop: int
    batches: int


class PlainLines:
    """Where runs begin and end, and the newest lines of those that were passed over."""

    def __init__(self) -> None:
        self._patterns: dict[bytes, tuple[re.Pattern[bytes], re.Pattern[bytes], re.Pattern[bytes], int]] = {}
        self._prefix = b"\x00"
        self._runs: deque[Run] = deque()
        self._batches = 0
        self._others: dict[
            bytes, tuple[int, bytes]
        ] = {}  # newest prefill and health line, an answered request
        self._shapes: dict[bytes, bool] = {}  # a line without head and digits -> does it say nothing?
        self.usual(b"")

    # --- finding -----------------------------------------------------------------------------------------------------

    def usual(self, prefix: bytes) -> None:
        """What a wrapper put before the line that was just read in full. Other lines may differ from it in their stamps
        only: a name must be looked at."""
        if prefix == self._prefix:
            return
        self._prefix = prefix
        if b" P " in prefix or len(prefix) > 120:
            prefix = b"\x00"  # a part of a line that was split
        shape = _ANY_STAMP.join(re.escape(part) for part in _STAMP.split(prefix))
        known = self._patterns.get(shape)
        if known is None:
            if len(self._patterns) > 32:
                self._patterns.clear()
            known = self._patterns[shape] = (
                re.compile(
                    rb"(?:" + shape + rb"\[[^\[\]\n]{8,80}\] (?:" + _BATCH + rb"|" + _ACCESS + rb"))++"
                ),
                re.compile(rb"(?:" + shape + rb"(?:\(APIServer pid=\d+\) )?" + _ACCESS + rb")++"),
                re.compile(shape + rb"\[[^\[\]\n]{8,80}\] "),
                prefix.count(b"["),
            )
        self._stamped, self._bare, self._head, self._brackets = known

    def skim(self, no: int, data: bytes, start: int, end: int) -> tuple[int, int]:
        """Pass over what says nothing from `start` on, the beginning of line `no`: (where a line must be read, how many lines
        were passed). `end` is the end of a line; carriage returns stand only before newlines."""
        stamped, head, bare, brackets = self._stamped, self._head, self._bare, self._brackets
        shapes, at, lines = self._shapes, start, 0
        while at < end:
            if match := stamped.match(data, at, end):
                stop = match.end()
                count = data.count(b"\n", at, stop)
                if data.count(b"[", at, stop) != count * (brackets + 1):
                    # a line that was torn by another one, somewhere in the run
                    stop, count = data.find(b"\n", at) + 1, 1
                    if data.count(b"[", at, stop) != brackets + 1:
                        break
            elif match := head.match(data, at, end):
                stop, count = data.find(b"\n", at) + 1, 1
                rest = data[match.end() : stop]
                shape = rest.translate(None, b"0123456789")  # no word of those below holds a digit
                nothing = shapes.get(shape)
                if nothing is None:
                    nothing = self._says_nothing(rest, shape)
                if not nothing:
                    break
            elif match := bare.match(data, at, end):
                stop = match.end()
                count = data.count(b"\n", at, stop)
                if data.count(b"[", at, stop) != count * brackets:
                    break
            else:
                break
            lines += count
            at = stop
        if lines:
            self._note(no, data, start, at, lines)
        return at, lines

    def _says_nothing(self, rest: bytes, shape: bytes) -> bool:
        """A line with a stamp, without its head: may it be passed over? The shapes of such lines are few."""
        if b"[" in rest:
            return False
        if b" batch, #" in rest or b" batch. #" in rest:
            return True
        if b'HTTP/1.1" ' in rest:
            return b'HTTP/1.1" 5' not in rest
        nothing = not any(word in shape for word in _WORTH_READING)
        if len(self._shapes) >= 1024:
            self._shapes.clear()
        if len(shape) <= 400:
            self._shapes[shape] = nothing
        return nothing

    # --- keeping -----------------------------------------------------------------------------------------------------

    def _note(self, no: int, data: bytes, start: int, stop: int, lines: int) -> None:
        run = Run(no, data, start, stop, 0)
        first = start if stop - start <= _KEEP_B else data.find(b"\n", stop - _KEEP_B) + 1
        kept = data[first:stop]  # does not hold the whole block in memory
        batches = kept.count(b"Decode batch")
        if batches < KEEP and first > start:
            kept = data[start:stop]  # few and far between
            batches = kept.count(b"Decode batch")
        if batches:
            self._runs.append(Run(no + lines - kept.count(b"\n"), kept, 0, len(kept), batches))
            self._batches += batches
            while self._batches - self._runs[0].batches >= KEEP:
                self._batches -= self._runs.popleft().batches
        for words in (b"Prefill batch", b"GET /health"):
            if (at := data.rfind(words, start, stop)) >= 0:
                self._others[words] = _line_at(run, at)
        if _ANSWER_WORDS not in self._others:
            at = data.find(_ANSWER_WORDS, start, stop)
            found = _ANSWER.search(data, at, stop) if at >= 0 else None
            if found:
                self._others[_ANSWER_WORDS] = _line_at(run, found.start())

    def newest(self) -> list[tuple[int, bytes]]:
        """(line number, bytes) of the lines that count, oldest first, and forget them."""
        kept: dict[int, bytes] = dict(self._others.values())
        decodes = 0
        for run in reversed(self._runs):
            no, at = run.no + run.data.count(b"\n", run.start, run.stop), run.stop
            while at > run.start and decodes < KEEP:
                first = run.data.rfind(b"\n", run.start, at - 1) + 1 or run.start
                no -= 1
                line = run.data[first : at - 1]
                if b"Decode batch" in line:
                    kept[no] = line
                    decodes += 1
                at = first
        self._runs.clear()
        self._batches = 0
        self._others.clear()
        return sorted(kept.items())


def _line_at(run: Run, at: int) -> tuple[int, bytes]:
    first = run.data.rfind(b"\n", run.start, at) + 1 or run.start
    return run.no + run.data.count(b"\n", run.start, at), run.data[first : run.data.find(b"\n", at)]
