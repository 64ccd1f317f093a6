"""Serving figures over time: tokens per second, running and queued requests, KV use, accept length."""

from __future__ import annotations

from k2tui.tui import format as fmt
from k2tui.tui.lines import Picture, Row, Seg, chart, fit_line, spread, text_line
from k2tui.tui.panels import Panel
from k2tui.tui.view import View

SERIES = (
    ("tok_s", "tok/s", None),
    ("accept", "accept length", None),
    ("running", "running requests", None),
    ("queue", "queued requests", None),
    ("usage", "KV use %", 100.0),
)


def draw(view: View, width: int, height: int) -> Picture:
    server = view.server
    known = []
    if server is not None:
        known = [(word, view.history.get(f"{server.key}.{name}"), top) for name, word, top in SERIES]
        known = [item for item in known if item[1]]
    if not known:
        return Picture((Row("", text_line("No requests seen yet: charts appear with the first decode lines or metrics.", "dim")),))
    across = 2 if width >= 90 and len(known) > 1 else 1
    lines_down = -(-len(known) // across)
    each = max(3, height // lines_down)
    cells = (width - (across - 1) * 3) // across
    blocks = []
    for word, values, top in known:
        high = top if top is not None else max(values)
        head = spread(
            [Seg(word, "bold"), Seg(f"  {fmt.count(values[-1])}", "accent bold")],
            [Seg(f"max {fmt.count(max(values))}  mean {fmt.count(sum(values) / len(values))}", "dim")],
            cells,
        )
        body = [fit_line([Seg(text, "spark")], cells) for text in chart(values, cells, max(1, each - 2), high or 1.0, view.glyphs)]
        blocks.append([head, *body, fit_line([], cells)])
    rows = []
    for n in range(0, len(blocks), across):
        group = blocks[n : n + across]
        for y in range(max(len(b) for b in group)):
            line: list[Seg] = []
            for i, block in enumerate(group):
                if i:
                    line.append(Seg("   "))
                line += block[y]
            rows.append(Row("", tuple(line)))
    return Picture(tuple(rows[:height]))


PANEL = Panel("decode", "Serving", draw, needs=("servers",), order=80, help="One point a decode line or a poll of /metrics; newest at the right.")
