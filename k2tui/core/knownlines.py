"""Lines of one engine's log that change nothing but "this one came last", known again by their shape.

A start prints the same warnings for every rank, and a log with forty restarts prints them forty times. A line that was read in
full and proved nothing is remembered with each digit as a 0; another of that shape needs no grammar, only its stamp and its rank.
Knows no state: whether a line proves something is told by who read it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from k2tui.core.loadlines import Line, clean, parse

_ONE_DIGIT = bytes.maketrans(b"123456789", b"000000000")
_LONGEST = 600
_KEPT = 2048
_STAMP = b"[0000-00-00 00:00:00"
_NEVER = re.compile(rb"%\||% ?Completed|Errno|repeat=|[Ll][Oo][Ss][Ss]")  # what they say lies in their digits


class Known(NamedTuple):
    """prefix: bytes of what a wrapper put before it. head: bytes before the line's body. writer: the engine that writes so, "". has_form: of a log's line. is_stamped: its
    head holds a time. is_near: it counts among the lines before a fault. module: where a module's name stands of which the first mention counts, None = it names none."""

    prefix: int
    head: int
    writer: str
    has_form: bool
    is_stamped: bool
    is_near: bool
    module: slice | None


class Head(NamedTuple):
    """What a line's first bytes say: Unix seconds, None without a stamp; rank, ""."""

    at_s: float | None
    rank: str


class Told(NamedTuple):
    """What lines say whose text, without wrappers, has one shape. writer: as in Known. is_mute: they prove nothing. is_silent: they
    are no event either."""

    writer: str
    is_mute: bool
    is_silent: bool


def text_shape(text: str) -> bytes:
    """The text with each digit as a 0; b"" of a long one."""
    return text.encode("utf-8", "replace").translate(_ONE_DIGIT) if len(text) <= _LONGEST else b""


def says_digits(text: bytes) -> bool:
    """Is it a sort of line that may be an event or none by its digits?"""
    return _NEVER.search(text) is not None


def shape_of(piece: bytes) -> bytes:
    """The bytes with each digit as a 0."""
    return piece.translate(_ONE_DIGIT)


class KnownLines:
    """learn() a line that was read in full, find() another of its shape. Valid while one engine is believed to write."""

    def __init__(self) -> None:
        self._engine = ""
        self._known: dict[bytes, Known | None] = {}
        self._heads: dict[bytes, Head] = {}

    def enter(self, engine: str) -> None:
        """What was learned while another engine was believed to write does not count."""
        if engine != self._engine:
            self._engine = engine
            self._known.clear()

    def find(self, shape: bytes) -> Known | None:
        """What is known of such lines; None = they must be read."""
        return self._known.get(shape)

    def is_new(self, shape: bytes) -> bool:
        """Was nothing told yet about such lines?"""
        return shape not in self._known and len(shape) <= _LONGEST

    def head(self, piece: bytes, known: Known, year: int) -> Head | None:
        """Stamp and rank of a line whose shape is known. None: it must be read all the same."""
        start = piece[: known.head]
        told = self._heads.get(start)
        if told is None:
            line = parse(0, clean(piece.decode("utf-8", "replace")), year)
            is_other = piece[1:2].isdigit() and piece[:1] == b"[" and not piece.startswith(b"[20")
            if is_other or not _is_bare(line) or (line.at_s is not None) is not known.is_stamped:
                return None
            if len(self._heads) >= _KEPT:
                self._heads.clear()
            told = self._heads[start] = Head(line.at_s, line.rank)
        return told

    def learn(self, shape: bytes, piece: bytes, line: Line, known: Known | None) -> None:
        """What a line of that shape is, read in full; known: None = it says something."""
        if len(self._known) >= _KEPT:
            self._known.clear()
        self._known[shape] = known if known is not None and _is_plain(shape, piece, line) else None


def _is_bare(line: Line) -> bool:
    return line.wrap_s is None and not line.source and not line.node


def _is_plain(shape: bytes, piece: bytes, line: Line) -> bool:
    """Do all lines of that shape have the same parts?"""
    if not _is_bare(line) or says_digits(piece) or line.raw[:6].lstrip()[:1].isdigit():
        return False
    if shape.find(_STAMP, 1) >= 0 or (shape.startswith(b"[0") and not piece.startswith(b"[20")):
        return False  # cut before the inner stamp, or a stamp of another kind
    return "\ufffd" not in line.raw
