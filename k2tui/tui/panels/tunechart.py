"""The trials of a tuning run as bars in the order in which they were measured, with their 95 % intervals and the baseline."""

from __future__ import annotations

from k2tui.core.tuning_text import short
from k2tui.core.tuning_verdict import Ranked, ranked
from k2tui.tui.lines import Glyphs, Line, Picture, Row, Seg, fit, fit_line, line_width, text_line
from k2tui.tui.panels import Panel
from k2tui.tui.panels.tune import STATES, figure, middle, sign
from k2tui.tui.view import View


def axis(rows: list[Ranked]) -> tuple[float, float]:
    """(low, high) of the bars: from 0, unless everything lies so close together that nothing could be told apart."""
    ends = [
        v
        for r in rows
        if r.estimate is not None
        for v in (r.estimate.lo, r.estimate.value, r.estimate.hi)
        if v is not None
    ]
    if not ends:
        return (0.0, 1.0)
    low, high = min(ends), max(ends)
    if high <= 0:
        return (0.0, 1.0)
    floor = max(0.0, low - 0.5 * (high - low)) if low > 0.6 * high else 0.0
    return (floor, high if high > floor else floor + 1.0)


def bar_line(row: Ranked, base: float | None, low: float, high: float, cells: int, g: Glyphs) -> Line:
    """Full up to the lower end of the interval, thin up to the upper end; the baseline's mean is a mark across all bars."""
    e = row.estimate
    if e is None or cells < 1:
        return (Seg(fit(row.trial.state, cells, "<", g.ellipsis), STATES.get(row.trial.state, "bad")),)

    def at(value: float) -> int:
        return max(0, min(cells - 1, round((value - low) / (high - low) * (cells - 1))))

    sure, far = at(e.value if e.lo is None else e.lo), at(e.value if e.hi is None else e.hi)
    role = "ok" if row.mark == "best" else "accent" if row.mark in ("base", "again") else "bar"
    text = [g.bar[-1]] * (sure + 1) + [g.rest] * (far - sure) + [" "] * (cells - 1 - far)
    mark = None if base is None else at(base)
    segs: list[Seg] = []
    for n, char in enumerate(text):
        if n == mark and row.mark != "base":
            part = Seg(g.v, "accent")
        else:
            part = Seg(char, role if n <= sure else "dim" if n <= far else "")
        if segs and segs[-1].role == part.role:
            segs[-1] = Seg(segs[-1].text + part.text, part.role)
        else:
            segs.append(part)
    return tuple(segs)


def draw(view: View, width: int, height: int) -> Picture:
    run, g = view.snap.tune, view.glyphs
    if run is None or run.space is None or not run.trials:
        return Picture((Row("", text_line("A bar for each trial shows here once one was measured.", "dim")),))
    rows = sorted(ranked(run.space, run.trials), key=lambda r: r.trial.at_s)
    low, high = axis(rows)
    base = next((r.estimate.value for r in rows if r.mark == "base" and r.estimate is not None), None)
    value_w = 14 if width >= 52 else 0  # beside the table, which has the figures, the bars take the room
    longest = max(line_width((Seg(r.label),)) for r in rows)
    label_w = max(8, min(longest, (width - value_w - 4) // 2))
    cells = max(1, width - label_w - value_w - (4 if value_w else 3))
    room = max(1, height)  # the newest, when there is no room for all, but never without the selected one
    chosen = next((n for n, r in enumerate(rows) if r.trial.key == view.trial_key), len(rows))
    first = max(0, min(len(rows) - room, chosen))
    shown = rows[first : first + room]
    out: list[Row] = []
    for row in shown:
        line: Line = (
            sign(row, g),
            Seg(
                " " + middle(row.label, label_w, g.ellipsis) + " ",
                "bold" if row.trial.key == view.trial_key else "",
            ),
            *bar_line(row, base, low, high, cells, g),
            Seg(
                " " + fit("" if row.estimate is None else figure(row.estimate, g), value_w, ">", g.ellipsis)
                if value_w
                else ""
            ),
        )
        out.append(Row("", fit_line(line, width)))
    hidden = f"{len(shown)} of {len(rows)}, " if len(shown) < len(rows) else ""
    return Picture(
        tuple(out),
        None,
        (Seg(f"{hidden}{short(low)} to {short(high)}", "dim"),),
        title=f"{run.space.metric} by trial" if value_w else run.space.metric,
    )


PANEL = Panel(
    "tunechart",
    "Tuning: chart",
    draw,
    needs=("tune",),
    order=71,
    help="A bar for each trial in the order of time: full up to the lower end of its 95 % interval, thin up to the upper end; the upright line is the baseline.",
)
