"""A regular expression that is compiled when it is first used: importing a table of two hundred of them costs nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property

BIGGEST = 10**15


def whole(digits: str | bytes) -> int:
    """A number out of a log, `BIGGEST` at most: Python refuses to read one of 4,301 digits, and nothing that is counted has 16."""
    return int(digits) if len(digits) < 16 else BIGGEST


class Pattern:
    """Like `re.compile(source, flags)`. After the first call its methods are the compiled pattern's own."""

    def __init__(self, source: str, flags: re.RegexFlag | int = 0) -> None:
        self.source = source
        self.flags = flags

    @cached_property
    def compiled(self) -> re.Pattern[str]:
        return re.compile(self.source, self.flags)

    @cached_property
    def search(self) -> Callable[..., re.Match[str] | None]:
        return self.compiled.search

    @cached_property
    def match(self) -> Callable[..., re.Match[str] | None]:
        return self.compiled.match

    @cached_property
    def finditer(self) -> Callable[..., Iterator[re.Match[str]]]:
        return self.compiled.finditer

    @cached_property
    def sub(self) -> Callable[..., str]:
        return self.compiled.sub

    @cached_property
    def split(self) -> Callable[..., list[str]]:
        return self.compiled.split


_DIGITS = b"0123456789"
_KEPT_SHAPES = 2048
_LONG = 1024


class Words:
    """Many words, some of which may stand in a text. Lines of a log differ mostly in their digits: what was found for a line
    without them is remembered."""

    def __init__(self, words: Iterable[str]) -> None:
        listed = [(word, word.encode().translate(None, _DIGITS)) for word in words]
        self._words = [pair for pair in listed if pair[1]]
        self._all = tuple(word for word, _ in listed)
        self._numbers = tuple(word for word, bare in listed if not bare)  # nothing but digits
        self._known: dict[bytes, tuple[str, ...]] = {}

    def maybe_in(self, text: str) -> tuple[str, ...]:
        """The words that may be in the text, in the order of the table: all that are, and a few that differ in digits. Of a long
        text nothing is told: every word may be in it."""
        if len(text) > _LONG:
            return self._all
        shape = text.encode("utf-8", "replace").translate(None, _DIGITS)
        found = self._known.get(shape)
        if found is None:
            found = tuple(word for word, bare in self._words if bare in shape)
            if len(self._known) >= _KEPT_SHAPES:
                self._known.clear()
            self._known[shape] = found
        numbers = tuple(word for word in self._numbers if word in text)
        return found + numbers if numbers else found
