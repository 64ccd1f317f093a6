"""Plain terminal output for the CLI: colours only where wanted, aligned columns, durations and sizes in words."""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from typing import TextIO

_COLOURS = {
    "ok": "32", "ready": "32", "succeeded": "32", "completed": "32",
    "warning": "33", "loading": "36", "running": "36", "in_progress": "36", "queued": "33", "waiting": "33", "stopping": "33",
    "error": "31", "failed": "31", "stalled": "31", "degraded": "33", "lost": "31", "orphaned": "33", "stopped": "90", "info": "90",
}
_MARKS = {"ok": "✓", "info": "·", "warning": "!", "error": "✗"}
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def use_colour() -> bool:
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return bool(os.environ.get("FORCE_COLOR")) or sys.stdout.isatty()


def use_unicode() -> bool:
    return "utf" in (sys.stdout.encoding or "").lower() and not os.environ.get("K2TUI_ASCII")


def table_width() -> int:
    """Columns that a table may fill: those of the terminal or of COLUMNS, 120 where neither says so."""
    import shutil

    return shutil.get_terminal_size((120, 24)).columns if sys.stdout.isatty() or os.environ.get("COLUMNS") else 120


def clean(text: str) -> str:
    """Text from outside without escape codes and control characters."""
    return _CONTROL.sub("", text)


def paint(text: str, kind: str) -> str:
    code = _COLOURS.get(str(kind))
    return f"\x1b[{code}m{text}\x1b[0m" if code and use_colour() else text


def mark(kind: str) -> str:
    sign = _MARKS.get(str(kind), "·")
    return sign if use_unicode() else {"✓": "+", "✗": "x", "·": "-"}.get(sign, sign)


def duration(seconds: float | None) -> str:
    """"0.8 s", "42 s", "2:40", "1:02:03", "3 d 4 h"; "–" for None."""
    if seconds is None:
        return "–" if use_unicode() else "-"
    if seconds < 0:
        seconds = 0.0
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d}"
    if whole < 86400:
        return f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def size(count: float | None) -> str:
    """Bytes in decimal units: "12 B", "3.4 MB"."""
    if count is None:
        return "–" if use_unicode() else "-"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" or abs(count) >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return ""


def clock(at_s: float | None) -> str:
    return datetime.fromtimestamp(at_s).strftime("%H:%M:%S") if at_s else ""


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Aligned columns, two spaces apart. right: indices of right-aligned columns. Cells are cleaned here."""
    cells = [[clean(str(c)) for c in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = []
    for row in cells:
        parts = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)


class Teller:
    """Lines for people while something goes on: on a terminal a passing one is drawn over by the next, elsewhere (a pipe, a job's log)
    whole lines, of the passing ones one in `every_s` seconds."""

    def __init__(self, stream: TextIO, every_s: float = 10.0) -> None:
        self._stream, self.is_live, self._every_s = stream, stream.isatty(), every_s
        self._width = 0
        self._told = -math.inf

    def __call__(self, text: str, *, passing: bool = False) -> None:
        if passing and not self.is_live:
            if time.monotonic() - self._told < self._every_s:
                return
            self._told = time.monotonic()
        text = clean(text)  # a server's own words may be in it
        if self.is_live:
            if passing:  # a line that wraps cannot be drawn over
                import shutil

                text = text[: shutil.get_terminal_size().columns - 1]
            pad = " " * max(0, self._width - len(text))
            self._stream.write(f"\r{text}{pad}" + ("" if passing else "\n"))
            self._width = len(text) if passing else 0
        else:
            self._stream.write(text + "\n")
        self._stream.flush()

    def wipe(self) -> None:
        """Take the passing line off the terminal."""
        if self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()
            self._width = 0
