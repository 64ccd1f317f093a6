"""A regular expression that is compiled when it is first used: importing a table of two hundred of them costs nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cached_property


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


class BytesPattern:
    """The same for bytes."""

    def __init__(self, source: bytes, flags: re.RegexFlag | int = 0) -> None:
        self.source = source
        self.flags = flags

    @cached_property
    def compiled(self) -> re.Pattern[bytes]:
        return re.compile(self.source, self.flags)

    @cached_property
    def search(self) -> Callable[..., re.Match[bytes] | None]:
        return self.compiled.search

    @cached_property
    def finditer(self) -> Callable[..., Iterator[re.Match[bytes]]]:
        return self.compiled.finditer
