"""Runs of refreshes of one bar, found in bytes: a trainer or a benchmark client draws its bar thousands of times.

Of such a run the newest refreshes say everything that the tracker keeps: it remembers 64 steps of a bar, 24 lines before a
fault, and the newest line of each sort. So the older ones are passed over. What may be passed over is learned: a refresh, or a
line between refreshes (a logged loss), that was read in full and would change nothing but "the newest is this one". Another
that differs from it only in its numbers is of the same sort. Knows no state and no engine's events.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from k2tui.core.events import Bar
from k2tui.core.patterns import whole

STEPS = 64  # steps of a bar that the tracker remembers
_LEAST = 2 * STEPS  # of shorter runs everything is read

_PIECE = re.compile(
    rb"(?:([ -$&-{}~]{0,200}+)(?<=[0-9])(?<![0-9]{4})%\|(?:\xe2\x96[\x88-\x8f]){0,120}+[# 0-9]{0,120}+\| (\d{1,12})/(\d{1,12}) \[([0-5]\d:[0-5]\d|\d{1,6}:[0-5]\d:[0-5]\d)<([ -$&-~]{0,240}+)"
    rb"|([ -$&-~]{0,300}+)|[^\r\n]*+)[\r\n]"
)
_ONE_DIGIT = bytes.maketrans(b"123456789", b"000000000")
_KEPT_SORTS = 512


class Run(NamedTuple):
    """Pieces up to data[stop], `lines` of them not blank, `marks` of these with a log line's form; kept: (offset, bytes, has it
    that form) of those that must be read, oldest first; tail: where in `kept` the unbroken end begins."""

    stop: int
    lines: int
    marks: int
    kept: list[tuple[int, bytes, bool]]
    tail: int


def _sort(rest: bytes) -> bytes:
    """The text with each number as a 0 (a very long one as a few)."""
    return rest.translate(_ONE_DIGIT).replace(b"00", b"0").replace(b"00", b"0").replace(b"00", b"0")


class BarLines:
    """The sorts of pieces that were learned in one phase of one start."""

    def __init__(self) -> None:
        self._place: object = None
        self._bars: dict[tuple[bytes, bytes], set[bytes]] = {}
        self._others: dict[bytes, bool] = {}

    def enter(self, place: object) -> None:
        """What was learned elsewhere does not count here."""
        if place != self._place:
            self._place = place
            self._bars.clear()
            self._others.clear()

    @staticmethod
    def piece_end(data: bytes, at: int) -> int:
        """Behind the newline or carriage return that ends the piece at data[at]; there must be one."""
        match = _PIECE.match(data, at)
        assert match is not None
        return match.end()

    def learn(self, piece: bytes, told: Callable[[], tuple[Bar | None, bool] | None]) -> None:
        """That piece was read in full. told: as a refresh of which bar (None = as another line), and whether with a log line's
        form; None = a run must not hold it."""
        match = _PIECE.fullmatch(piece + b"\n")
        if match is None or match.lastindex is None or b"0m" in _sort(piece):  # what is left of a colour code
            return
        said = told()
        if said is None:
            return
        bar, has_form = said
        head, done, total, elapsed, rest, other = match.groups()
        if len(self._others) + sum(map(len, self._bars.values())) >= _KEPT_SORTS:
            self._others.clear()
            self._bars.clear()
        if bar is None:
            if other is not None:
                self._others[_sort(other)] = has_form
        elif rest is not None and (whole(done), whole(total)) == (bar.done, bar.total):
            low = piece.lower()
            if b"step" in head.lower() and b"loss" in low:
                return  # how far they stand apart decides what the line says
            if bar.elapsed_s == _seconds(elapsed):
                self._bars.setdefault((_title(head), total), set()).add(_sort(rest))

    def skim(self, data: bytes, start: int, end: int, done: int, total: int) -> Run | None:
        """The run that begins at data[start], a piece's beginning, and the pieces of it that count. done: count of the newest
        refresh before, of `total`. `end` is the end of a piece. None: no known piece stands there."""
        others, sorts, want, newest_head = self._others, set[bytes](), None, b""
        total_text, clock, seconds, stop, marks = b"", b"", -1, start, 0
        pieces: list[tuple[int, int, int, bool]] = []  # where, count (-1 = no bar), seconds, form
        newest: dict[bytes, int] = {}
        for match in _PIECE.finditer(data, start, end):
            head, count, of, elapsed, rest, other = match.groups()
            if rest is not None:
                if want is None or head != newest_head:
                    newest_head, bar = head, (_title(head), of)
                    if want is None and whole(of) == total:
                        want, sorts = bar, self._bars.get(bar, sorts)
                    elif bar != want:
                        break
                    total_text = of
                sort, now = _sort(rest), whole(count)
                if of != total_text or sort not in sorts or not done <= now <= total:
                    break
                if elapsed != clock:
                    clock, before = elapsed, seconds
                    if (seconds := whole(elapsed.replace(b":", b""))) < before:
                        break
                done = now
                marks += 1
                newest[sort] = len(pieces)
                pieces.append((stop, done, seconds, True))
            elif other is None:
                break
            elif other and not other.isspace():
                sort = _sort(other)
                has_form = others.get(sort)
                if has_form is None:
                    break
                marks += has_form
                newest[sort] = len(pieces)
                pieces.append((stop, -1, 0, has_form))
            stop = match.end()
        if stop == start:
            return None
        cut = _tail(pieces)
        places = [*sorted(n for n in newest.values() if n < cut), *range(cut, len(pieces))]
        kept = [
            (at, data[at : self.piece_end(data, at) - 1], form)
            for at, _, _, form in (pieces[n] for n in places)
        ]
        return Run(stop, len(pieces), marks, kept, len(places) - (len(pieces) - cut))


def _tail(pieces: list[tuple[int, int, int, bool]]) -> int:
    """Where the end of the run begins that holds all steps which are remembered; every bar before it is older by a second of
    its own clock at least, so its time is before the newest."""
    if len(pieces) < _LEAST:
        return 0
    steps, above, last = 0, -1, -1
    for place in range(len(pieces) - 1, -1, -1):
        _, done, seconds, _ = pieces[place]
        if done < 0:
            continue
        if last < 0:
            last = seconds
        if steps > STEPS and seconds < last:
            return place + 1
        steps += done != above
        above = done
    return 0


def _title(head: bytes) -> bytes:
    """What stands before the percentage, and at most one of the blanks between."""
    told = head.rstrip(b"0123456789")
    title = told.rstrip(b" ")
    return title + b" " if title and title != told else title


def _seconds(elapsed: bytes) -> int:
    total = 0
    for part in elapsed.split(b":"):
        total = total * 60 + whole(part)
    return total
