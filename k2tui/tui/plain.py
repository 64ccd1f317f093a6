"""The overview as plain text, without Textual: for pipes, TERM=dumb and screen readers. The panels are the dashboard's own."""

from __future__ import annotations

from k2tui.core.snapshot import Snapshot
from k2tui.tui import panels
from k2tui.tui.lines import ASCII, UNICODE
from k2tui.tui.view import View

PANELS = (("server", 6), ("gpus", 17), ("host", 1), ("jobs", 12), ("board", 20), ("bench", 10))


def picture(snap: Snapshot, now_s: float, width: int, *, use_ascii: bool = False) -> str:
    """Every panel of the overview, one under the other. No colours, no escape codes."""
    view = View(snap, now_s, glyphs=ASCII if use_ascii else UNICODE)
    out: list[str] = ["DEMO: nothing here is a measurement of yours"] if snap.is_demo else []
    for name, height in PANELS:
        panel = panels.get(name)
        drawn = panel.draw(view, width - 2, height)
        note = "".join(seg.text for seg in drawn.note).strip()
        out.append(f"{panel.title}" + (f" ({note})" if note else ""))
        lines = ([drawn.header] if drawn.header is not None else []) + [row.line for row in drawn.rows[:height]]
        out += ["  " + "".join(seg.text for seg in line).rstrip() for line in lines]
    return "\n".join(out)
