"""What a user gets against what the machine gives: output throughput over tok/s/user, a dot a run, braille."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from k2tui.core.bench import BenchRow
from k2tui.core.bench_groups import sweep_of
from k2tui.core.bench_table import num
from k2tui.tui import benchtext as bt
from k2tui.tui.lines import Glyphs, Line, Picture, Row, Seg, fit, fit_line
from k2tui.tui.panels import Panel
from k2tui.tui.view import View

_BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # columns left, right; rows top to bottom
AXIS = 7  # cells of the y axis


def plot(
    sets: Sequence[tuple[str, Sequence[tuple[float, float]]]], cells: int, lines: int, g: Glyphs
) -> list[Line]:
    """(role, points) sets drawn over each other, joined by straight lines; origin at the bottom left, both axes from 0."""
    every = [p for _, points in sets for p in points]
    top_x = max((x for x, _ in every), default=1.0) or 1.0
    top_y = max((y for _, y in every), default=1.0) or 1.0
    px, py = (1, 1) if g.ascii else (2, 4)
    wide, high = cells * px, lines * py
    dots: dict[tuple[int, int], tuple[int, str]] = {}

    def put(x: float, y: float, role: str, big: bool) -> None:
        i = min(int(x / top_x * (wide - 1)), wide - 1)
        j = high - 1 - min(int(y / top_y * (high - 1)), high - 1)
        cell = (j // py, i // px)
        bits, _ = dots.get(cell, (0, role))
        if g.ascii:
            dots[cell] = (2 if big else max(bits, 1), role)
            return
        bits |= _BITS[i % 2][j % 4]
        if big:  # a point is two dots high, so that it stands out of its line
            bits |= _BITS[i % 2][max(j % 4 - 1, 0)] | _BITS[(i + 1) % 2][j % 4]
        dots[cell] = (bits, role)

    for role, points in sets:
        ordered = sorted(points)
        for (x0, y0), (x1, y1) in itertools.pairwise(ordered):
            steps = max(int(abs(x1 - x0) / top_x * wide), int(abs(y1 - y0) / top_y * high), 1)
            for k in range(steps):
                put(x0 + (x1 - x0) * k / steps, y0 + (y1 - y0) * k / steps, role, False)
        for x, y in ordered:
            put(x, y, role, True)
    out: list[Line] = []
    for line in range(lines):
        label = num(top_y) if line == 0 else ("0" if line == lines - 1 else "")
        segs: list[Seg] = [Seg(fit(label, AXIS - 1, ">", g.ellipsis) + g.v, "dim")]
        for column in range(cells):
            bits, role = dots.get((line, column), (0, ""))
            text = " " if not bits else (("o" if bits == 2 else ".") if g.ascii else chr(0x2800 + bits))
            if segs[-1].role == role and len(segs) > 1:
                segs[-1] = Seg(segs[-1].text + text, role)
            else:
                segs.append(Seg(text, role))
        out.append(tuple(segs))
    return out


def _points(rows: Sequence[BenchRow]) -> list[tuple[float, float]]:
    return [(r.tok_s_user, r.output_throughput) for r in rows if r.tok_s_user and r.output_throughput]


def draw(view: View, width: int, height: int) -> Picture:
    row = bt.picked(view)
    g = view.glyphs
    if row is None:
        return Picture((Row("", (Seg("The trade-off is drawn here once there are runs.", "dim"),)),))
    mine = sweep_of(view.snap.bench, row)
    base = bt.base_of(view, row, mine)
    points = _points(mine)
    if not points or height < 4 or width < AXIS + 10:
        return Picture((Row("", fit_line((Seg("No run here has both figures.", "dim"),), width)),))
    sets = [("dim", _points(base)), ("accent", points)]
    drawn = plot(sets, width - AXIS, height - 2, g)
    top_x = max(x for _, s in sets for x, _ in s)
    right = num(top_x)
    axis = " " * (AXIS - 1) + ("+" if g.ascii else "└") + g.h * (width - AXIS)
    words = fit("0", width - AXIS - len(right)) + right
    rows = [Row("", line) for line in drawn]
    rows += [Row("", (Seg(axis, "dim"),)), Row("", (Seg(" " * AXIS + words, "dim"),))]
    note: list[Seg] = [Seg(bt.name(row), "accent")]
    if base:
        note += [Seg("  base ", "dim"), Seg(bt.name(base[0]), "dim")]
    return Picture(tuple(rows), None, tuple(note), title=f"out tok/s {g.up}   tok/s/user {g.arrow}")


PANEL = Panel(
    "benchpareto",
    "Trade-off",
    draw,
    needs=("bench",),
    order=63,
    help="Output throughput over tok/s/user: up is more for the machine's owner, right is more for one user. Both axes start at 0.",
)
