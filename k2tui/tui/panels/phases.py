"""Every phase of the start with its begin, its time, and its share of the whole as a bar."""

from __future__ import annotations

from k2tui.core.load import State
from k2tui.tui import format as fmt
from k2tui.tui.lines import Column, Picture, Row, Seg, table, text_line
from k2tui.tui.panels import Panel
from k2tui.tui.panels.server import merged_phases, phase_word
from k2tui.tui.view import View

COLUMNS = (
    Column("phase", 10, keep=9),
    Column("begins", 7, keep=5, align=">"),
    Column("took", 6, keep=8, align=">"),
    Column("", 10, weight=1, keep=6, limit=90),
)


def draw(view: View, width: int, height: int) -> Picture:
    server = view.server
    if server is None or not server.load.phases:
        return Picture((Row("", text_line("No phases seen yet.", "dim")),))
    load = server.load
    alive = load.state not in (State.FAILED, State.STOPPED)
    spans = merged_phases(load)
    zero = spans[0][1]
    # serving lasts for days: the bars show the start only
    ready = zero + load.ready_s if load.ready_s is not None else (view.now_s if alive else max(e or s for _, s, e in spans))
    whole = max(0.001, ready - zero)
    rows = []
    for n, (phase, start, end) in enumerate(spans):
        stop = end if end is not None else (view.now_s if alive else start)
        took = fmt.age(stop - start) if end is None and alive else fmt.duration(stop - start)
        died_in = load.state is State.FAILED and n == len(spans) - 1
        role = "bad" if died_in else ("info" if end is None and alive else "bar")

        def strip(cells: int, a: float = start, b: float = stop, role: str = role) -> list[Seg]:
            first = min(cells - 1, max(0, round((a - zero) / whole * cells)))
            length = max(1, min(cells - first, round((b - zero) / whole * cells) - first))
            full = "#" if view.glyphs.ascii else "█"
            return [Seg(" " * first), Seg(full * length, role)]

        rows.append(
            (phase.value, (Seg(phase_word(phase), "bold" if end is None else ""), Seg(f"+{fmt.duration(start - zero)}", "dim"), took, strip))
        )
    header, lines = table(COLUMNS, rows, width, view.glyphs)
    note = (Seg(f"ready after {fmt.duration(load.ready_s)}", "ok"),) if load.ready_s is not None else ()
    return Picture(tuple(Row("", r.line) for r in lines), header, note)


PANEL = Panel("phases", "Start, phase by phase", draw, needs=("servers",), ticks=True, order=70, help="Times of the log's own stamps.")
