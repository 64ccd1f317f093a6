"""Runs of serving lines that change nothing: found in whole blocks of bytes, without cutting them into lines.

A serving log is nearly all batch lines and answered requests. The newest few say everything that the view shows, so a run
of them is skipped by one match, and only its newest lines are looked at later. Chatter is learned: what was read once and said
nothing is passed over when it comes again with other digits. Knows no state and no engine's events.
"""

from __future__ import annotations

import re
from collections import deque
from typing import NamedTuple

KEEP = 16  # newest decode lines that are kept
_KEEP_B = 16 << 10  # they nearly always stand in so many bytes

_STAMP = re.compile(rb"(?:\d{4}-\d\d-\d\d[T ])?\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?")
_ANY_STAMP = rb"[\dT:.,Z+ -]{8,40}"
# sets of printable ASCII without quote and bracket: a set that names what it holds is matched twice as fast as one of what it lacks
_ACCESS = rb'INFO:     [ !#-Z\\-~]*+"[A-Z]++ /[!#-Z\\-~]*+ HTTP/1\.1" [1-4].*+\n'
_BATCH = rb"(?:Decode|Prefill) batch[,.] #.*+\n"
_DIGITS = b"0123456789"
_ANSWER_WORDS = b'"POST /'
_ANSWER = re.compile(rb'"POST /(?:generate|v1/)[^\n"]* HTTP/1\.1" [123]')


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
        self._nothing: set[bytes] = set()  # chatter, without head and digits
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
                re.compile(rb"(?:" + shape + rb"(?:\(APIServer pid=\d++\) )?+" + _ACCESS + rb")++"),
                re.compile(shape + rb"\[[^\[\]\n]{8,80}\] "),
                prefix.count(b"["),
            )
        self._stamped, self._bare, self._head, self._brackets = known

    def skim(self, no: int, data: bytes, start: int, end: int) -> tuple[int, int]:
        """Pass over what says nothing from `start` on, the beginning of line `no`: (where a line must be read, how many lines
        were passed). `end` is the end of a line; carriage returns stand only before newlines."""
        stamped, head, bare, brackets = self._stamped, self._head, self._bare, self._brackets
        nothing, at, lines = self._nothing, start, 0
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
                rest = data[match.end() : stop].rstrip(b"\r\n")
                if rest.translate(None, _DIGITS) not in nothing and not _is_batch_or_answer(rest):
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

    def is_headed(self, piece: bytes) -> bool:
        """Does it begin as the lines do that learn() is for?"""
        return self._head.match(piece) is not None

    def learn(self, piece: bytes) -> None:
        """That line was read in full and said nothing: lines that differ from it in their digits only say nothing either."""
        match = self._head.match(piece)
        if match is not None and piece.count(b"[") == self._brackets + 1 and len(piece) <= 500:
            if len(self._nothing) >= 1024:
                self._nothing.clear()
            self._nothing.add(piece[match.end() :].translate(None, _DIGITS))

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


def _is_batch_or_answer(rest: bytes) -> bool:
    """A form of them that the quick patterns do not know; torn lines hold another bracket."""
    if b"[" in rest:
        return False
    return (
        b" batch, #" in rest or b" batch. #" in rest or (b'HTTP/1.1" ' in rest and b'HTTP/1.1" 5' not in rest)
    )


def _line_at(run: Run, at: int) -> tuple[int, bytes]:
    first = run.data.rfind(b"\n", run.start, at) + 1 or run.start
    return run.no + run.data.count(b"\n", run.start, at), run.data[first : run.data.find(b"\n", at)]
