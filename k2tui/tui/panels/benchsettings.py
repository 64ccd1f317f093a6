"""Every setting measured under the selected run's load and workload, fastest first: the table that a decision is read from."""

from __future__ import annotations

from collections.abc import Sequence

from k2tui.core.bench_groups import Setting, baseline_of, settings_like
from k2tui.core.stats import Estimate
from k2tui.tui import benchtext as bt
from k2tui.tui.lines import Cell, Column, Glyphs, Picture, Row, Seg, table
from k2tui.tui.panels import Panel
from k2tui.tui.view import View

COLUMNS = (
    Column("", 1, keep=10),
    Column("setting", 12, weight=2, keep=10, limit=40),
    Column("tok/s/user", 12, keep=9, align=">"),
    Column("out tok/s", 12, keep=8, align=">"),
    Column("vs base", 15, keep=10),
    Column("verdict", 8, keep=7),
    Column("TTFT50", 6, keep=6, align=">"),
    Column("TPOT50", 6, keep=5, align=">"),
    Column("ITLp99", 6, keep=3, align=">"),
    Column("accept", 9, keep=6, align=">"),
    Column("runs", 4, keep=4, align=">"),
)


def _with_interval(est: Estimate | None, g: Glyphs) -> Seg:
    if est is None:
        return Seg(bt.NONE, "faint")
    half = est.half_width
    text = bt.figure(est.value).text
    return Seg(text if half is None else f"{text} {g.plus_minus}{bt.figure(half).text}", "bold")


def draw(view: View, width: int, height: int) -> Picture:
    row = bt.picked(view)
    if row is None:
        return Picture((Row("", (Seg("Settings are compared here once there are runs.", "dim"),)),))
    base = baseline_of(view.snap.bench, row, view.bench.base_id)
    found = settings_like(view.snap.bench, row, base)
    g = view.glyphs

    def cells(n: int, s: Setting) -> Sequence[Cell]:
        newest = s.rows[0]
        sign = bt.mark(newest, g, is_base=s.is_base)
        if not sign.text and n == 0 and base is not None and len(found) > 1:
            sign = Seg(g.star, "ok")
        return (
            sign,
            bt.name_cell(s.label, "warn" if newest.flags else "", g),
            _with_interval(s.tok_s_user, g),
            _with_interval(s.output_throughput, g),
            Seg("baseline", "accent") if s.is_base else bt.delta(s.delta, g),
            Seg("") if s.delta is None else bt.verdict(s.delta.verdict),
            bt.latency(newest.ttft_p50_ms),
            bt.figure(newest.tpot_p50_ms),
            bt.figure(newest.itl_p99_ms),
            bt.accept(newest),
            Seg(str(len(s.rows)), "dim"),
        )

    header, lines = table(COLUMNS, [(s.rows[0].run_id, cells(n, s)) for n, s in enumerate(found)], width, g)
    words = f"{row.workload}, C={bt.load(row)}"
    note = (Seg(words, "dim"),) if base else (Seg(f"{words}  no baseline: B picks one", "dim"),)
    return Picture(lines, header, note, title="One stream" if row.concurrency == 1 else "Settings")


PANEL = Panel(
    "benchsettings",
    "Settings",
    draw,
    needs=("bench",),
    order=62,
    selectable=True,
    help="All settings under the selected run's load and workload, with the difference to the baseline and whether it is real. One run on a side is unclear unless the difference is above 10 %: run-to-run luck is not in its interval.",
)
