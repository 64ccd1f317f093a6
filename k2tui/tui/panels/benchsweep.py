"""The sweep of the selected run: load, throughput with bars, deltas against the baseline, the knee."""

from __future__ import annotations

from collections.abc import Sequence

from k2tui.core.bench_groups import sweep_of
from k2tui.core.bench_sweep import SweepPoint, bar, sweep_points
from k2tui.tui import benchtext as bt
from k2tui.tui.lines import Cell, Column, Picture, Row, Seg, table
from k2tui.tui.panels import Panel
from k2tui.tui.view import View

COLUMNS = (
    Column("", 1, keep=10),
    Column("C", 5, keep=10, align=">"),
    Column("out tok/s", 9, keep=10, align=">"),
    Column("vs base", 17, keep=9),
    Column("/user", 6, keep=8, align=">"),
    Column("TTFT50", 6, keep=7, align=">"),
    Column("p99", 6, keep=6, align=">"),
    Column("TPOT50", 6, keep=5, align=">"),
    Column("p99", 6, keep=4, align=">"),
    Column("good%", 5, keep=3, align=">"),
    Column("accept", 9, keep=2, align=">"),
    Column("", 8, weight=3, keep=6, limit=60),
)


def draw(view: View, width: int, height: int) -> Picture:
    row = bt.picked(view)
    if row is None:
        return Picture((Row("", (Seg("A sweep shows here once there are runs.", "dim"),)),))
    rows = sweep_of(view.snap.bench, row)
    base = bt.base_of(view, row, rows)
    points = sweep_points(rows, base)
    best = max((p.output_throughput or 0.0 for p in points), default=0.0)
    g = view.glyphs

    def cells(p: SweepPoint) -> Sequence[Cell]:
        r = p.row
        share = (p.output_throughput or 0.0) / best if best else 0.0
        knee = Seg(g.star if g.ascii else "◆", "accent") if p.is_knee else bt.mark(r, g)
        return (
            knee,
            Seg(bt.load(r), "bold" if r.run_id == row.run_id else ""),
            bt.figure(p.output_throughput, "bold" if p.is_best else ""),
            bt.delta((p.deltas or {}).get("output_throughput"), g) if base else Seg(""),
            bt.figure(p.tok_s_user),
            bt.latency(r.ttft_p50_ms),
            bt.latency(r.ttft_p99_ms),
            bt.figure(r.tpot_p50_ms),
            bt.figure(r.tpot_p99_ms),
            Seg(bt.NONE, "faint") if r.goodput_fraction is None else Seg(f"{100 * r.goodput_fraction:.0f}"),
            bt.accept(r),
            lambda w: (Seg(bar(share, w, ascii_only=g.ascii), "bar"),),
        )

    header, lines = table(COLUMNS, [(p.row.run_id, cells(p)) for p in points], width, g)
    note: list[Seg] = [Seg(row.workload, "dim")]
    if base:
        note.append(Seg(f"  vs {bt.name(base[0])}", "accent"))
    if row.slo:
        note.append(Seg(f"  SLO {row.slo}", "dim"))
    trust = bt.trust(row, g, width)
    if height > len(lines) + len(trust):
        lines += trust
    return Picture(lines, header, tuple(note), title=f"Sweep: {bt.name(row)}")


PANEL = Panel(
    "benchsweep",
    "Sweep",
    draw,
    needs=("bench",),
    order=61,
    selectable=True,
    help="The points measured together with the selected run. A diamond marks the knee: beyond it more load brings little.",
)
