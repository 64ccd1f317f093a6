"""Commands and findings as people read them: as wide as the terminal, and still to be copied into a shell."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

from k2tui.plain import clean, mark, paint

if TYPE_CHECKING:
    from k2tui.doctor import Finding


def room(stream: TextIO) -> int:
    """Columns to write into; 0 = a file or a pipe, where lines stay whole."""
    return shutil.get_terminal_size().columns if stream.isatty() or os.environ.get("COLUMNS") else 0


def command(argv: Sequence[str], env: Mapping[str, str], width: int) -> str:
    """`NAME=value ... program --flag value ...` for a shell. With a width: broken by a backslash, a flag beside its value.

    Control characters are left out: they would reach the terminal."""
    parts = [clean(f"{name}={shlex.quote(value)}") for name, value in sorted(env.items())]
    at = 0
    while at < len(argv):
        takes = argv[at].startswith("-") and at + 1 < len(argv) and not argv[at + 1].startswith("-")
        parts.append(clean(shlex.join(argv[at : at + (2 if takes else 1)])))
        at += 2 if takes else 1
    if not width:
        return " ".join(parts)
    lines = [""]
    for part in parts:
        if lines[-1].strip() and len(lines[-1]) + 1 + len(part) > width - 2:
            lines.append("  ")
        lines[-1] += (" " if lines[-1].strip() else "") + part
    return " \\\n".join(lines)


def print_findings(findings: Iterable[Finding], stream: TextIO = sys.stdout) -> None:
    """A line each: sign, check, evidence; what to do below it."""
    width = room(stream)
    for f in findings:
        head = f"{mark(f.severity)} {f.check:<18} "
        for number, text in enumerate(_wrapped(f.evidence, width - len(head))):
            lead = f"{paint(mark(f.severity), f.severity)} {f.check:<18} " if number == 0 else " " * len(head)
            print(lead + text, file=stream)
        if f.todo:
            for number, text in enumerate(_wrapped(f.todo, width - len(head) - 3)):
                print(" " * len(head) + ("-> " if number == 0 else "   ") + text, file=stream)


def _wrapped(text: str, width: int) -> list[str]:
    text = clean(text)
    return (
        textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False) or [""]
        if width >= 20
        else [text]
    )
