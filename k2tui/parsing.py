"""JSON and TOML that others wrote: whatever is wrong with a text is one error that knows its line.

Python's readers answer a number of more than 4,300 digits with a bare ValueError and deep nesting with a RecursionError.
"""

from __future__ import annotations

import json
import re
from typing import Any

_LONG_NUMBER = r"[0-9](?:_?[0-9]){4300}"
_LONG_BITS = r"[=\[,]\s*0[xob][0-9a-fA-F_]{3500}"


class ParseError(ValueError):
    """message: what is wrong, without the place. line: 1-based, 0 = not known."""

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.message = message
        self.line = line

    def at(self, where: str) -> str:
        """The error in words with its place: `FILE line N: ...`. TOML's own words name the line (and column) already."""
        is_told = not self.line or "(at line" in self.message
        return f"{where}{'' if is_told else f' line {self.line}'}: {self.message}"


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ParseError, whatever is wrong with it."""
    words = _decoded(text)
    try:
        return json.loads(words)
    except json.JSONDecodeError as err:
        raise ParseError(f"not valid JSON: {err.msg} (column {err.colno})", err.lineno) from None
    except (ValueError, RecursionError) as err:
        raise _beyond(words, err) from None


def parse_toml(text: str | bytes) -> dict[str, Any]:
    """The tables of a TOML text. Raises ParseError, whatever is wrong with it."""
    import tomllib  # 3 ms, for readers of TOML only

    words = _decoded(text)
    try:
        value = tomllib.loads(words)
    except tomllib.TOMLDecodeError as err:
        found = re.search(r"line (\d+)", str(err))
        raise ParseError(f"not valid TOML: {err}", int(found[1]) if found else 0) from None
    except (ValueError, RecursionError) as err:
        raise _beyond(words, err) from None
    if re.search(_LONG_BITS, words):  # read without a word, but no message could name it
        raise _beyond(words, ValueError())
    return value


def _decoded(text: str | bytes) -> str:
    if isinstance(text, str):
        return text
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as err:
        raise ParseError(f"not UTF-8 text (byte {err.start})", text.count(b"\n", 0, err.start) + 1) from None


def _beyond(text: str, err: Exception) -> ParseError:
    """A text that keeps to the grammar, but is beyond what Python reads."""
    if isinstance(err, RecursionError):
        return ParseError("nested too deeply", _deepest_line(text))
    long = re.search(_LONG_NUMBER, text) or re.search(_LONG_BITS, text)
    return ParseError(
        "a number of more than 4,300 digits", text.count("\n", 0, long.start()) + 1 if long else 0
    )


def _deepest_line(text: str) -> int:
    """Line of the bracket with the most open ones around it; texts in quotes are not counted."""
    depth = most = line = 0
    at = 1
    for found in re.finditer(r'"(?:[^"\\\n]|\\.)*"|[\[\]{}\n]', text):
        mark = found[0]
        if mark == "\n":
            at += 1
        elif mark in "[{":
            depth += 1
            if depth > most:
                most, line = depth, at
        elif mark in "]}":
            depth -= 1
    return line
