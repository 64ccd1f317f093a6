"""A tuning run's table as plain text of a given width: what is long is cut in the middle, where it tells the least."""

from __future__ import annotations

from collections.abc import Sequence

from k2tui.core.tuning import Space, Trial
from k2tui.core.tuning_text import table
from k2tui.plain import clean

SETTING, DELTA, READY, ACCEPT, CAUSE = 1, 3, 4, 5, 6  # columns of `table`
LEAST = 20  # cells that a cut text keeps, however narrow the terminal


def cut(text: str, cells: int) -> str:
    """At most `cells` characters, "…" at two thirds: the begin says what, the end tells like from like."""
    if len(text) <= cells:
        return text
    tail = (cells - 1) // 3
    return text[: cells - 1 - tail] + "…" + (text[-tail:] if tail else "")


def table_text(space: Space, trials: Sequence[Trial], width: int) -> str:
    """The table in lines of at most `width` characters (more only where its figures alone need more), without trailing blanks and
    without columns that are empty. The cause of a trial without figures begins where they would stand."""
    header, rows = table(space, trials)
    cells = [[clean(c) for c in row] for row in (header, *rows)]
    shown = [n for n in range(CAUSE) if n not in (READY, ACCEPT) or any(row[n] for row in cells[1:])]

    def is_bare(row: Sequence[str]) -> bool:
        return not any(row[DELTA:CAUSE]) and row[CAUSE] != "baseline"

    def widest(n: int) -> int:
        return max((len(row[n]) for row in cells if n <= DELTA or not is_bare(row)), default=0)

    verdict = min(widest(CAUSE), LEAST)
    over = sum(widest(n) + 2 for n in shown) + verdict - width
    if over > 0:
        room = max(LEAST, widest(SETTING) - over)
        for row in cells:
            row[SETTING] = cut(row[SETTING], room)
    lines: list[str] = []
    for row in cells:
        own = [n for n in shown if n < DELTA] if is_bare(row) else shown
        line = "".join(
            (row[n].rjust(widest(n)) if n in (READY, ACCEPT) else row[n].ljust(widest(n))) + "  " for n in own
        )
        lines.append((line + cut(row[CAUSE], max(LEAST, width - len(line)))).rstrip())
    return "\n".join(lines)
