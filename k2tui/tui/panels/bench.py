"""Benchmark runs: newest first, or sorted and filtered as the user picked; columns adapt to the width."""

from __future__ import annotations

from collections.abc import Sequence

from k2tui.core.bench import BenchRow
from k2tui.core.bench_groups import ordered
from k2tui.tui import benchtext as bt
from k2tui.tui.lines import Cell, Column, Picture, Row, Seg, table
from k2tui.tui.panels import Panel
from k2tui.tui.view import View

COLUMNS = (
    Column("", 1, keep=9),
    Column("run", 10, weight=2, keep=10, limit=40),
    Column("C", 5, keep=10, align=">"),
    Column("out tok/s", 9, keep=10, align=">"),
    Column("/user", 5, keep=9, align=">"),
    Column("TTFT50", 6, keep=8, align=">"),
    Column("p99", 6, keep=7, align=">"),
    Column("TPOT50", 6, keep=8, align=">"),
    Column("ITLp99", 6, keep=6, align=">"),
    Column("accept", 9, keep=7, align=">"),
    Column("ok", 7, keep=6, align=">"),
    Column("req/s", 5, keep=3, align=">"),
    Column("E2E50", 6, keep=2, align=">"),
    Column("workload", 14, weight=1, keep=4, limit=40),
    Column("model", 10, weight=1, keep=3, limit=40),
    Column("at", 8, keep=5, align=">"),
)


def _row(row: BenchRow, view: View) -> Sequence[Cell]:
    wrong = bool(row.errors or row.flags)
    return (
        bt.mark(row, view.glyphs, is_base=row.run_id == view.bench.base_id),
        bt.name_cell(bt.name(row), "warn" if row.flags else "", view.glyphs),
        Seg(bt.load(row)),
        bt.figure(row.output_throughput, "bold"),
        bt.figure(row.tok_s_user),
        bt.latency(row.ttft_p50_ms),
        bt.latency(row.ttft_p99_ms),
        bt.figure(row.tpot_p50_ms),
        bt.figure(row.itl_p99_ms),
        bt.accept(row),
        Seg(
            f"{row.completed}/{row.num_requests}" if row.num_requests else bt.NONE, "warn" if wrong else "dim"
        ),
        bt.figure(row.request_throughput),
        bt.latency(row.e2e_p50_ms),
        Seg(row.workload, "dim"),
        Seg(row.model.rsplit("/", 1)[-1], "dim"),
        Seg(bt.clock(row), "dim"),
    )


def draw(view: View, width: int, height: int) -> Picture:
    every = view.snap.bench
    if not every and view.snap.bench_error:
        return Picture((Row("", (Seg("Cannot read benchmarks: ", "warn"), Seg(view.snap.bench_error))),))
    if not every:
        return Picture(
            (
                Row(
                    "",
                    (
                        Seg("No benchmark yet. ", "dim"),
                        Seg("b", "key", "stage('bench')"),
                        Seg(" runs one.", "dim"),
                    ),
                ),
            )
        )
    rows = ordered(every, view.bench.sort, view.bench.text)
    if not rows:
        return Picture(
            (Row("", (Seg("No run matches ", "dim"), Seg(view.bench.text, "warn"))),),
            note=(Seg("/ to change", "dim"),),
        )
    header, lines = table(COLUMNS, [(r.run_id, _row(r, view)) for r in rows], width, view.glyphs)
    words = f"{len(rows)} of {len(every)} runs" if len(rows) != len(every) else f"{len(rows)} runs"
    if view.bench.sort and view.bench.sort != "newest":
        words += f", by {view.bench.sort}"
    shown = rows[0] if not view.bench.run_id else (bt.picked(view) or rows[0])
    trust = bt.trust(shown, view.glyphs, width)
    if height > len(lines) + len(trust):
        lines += trust
    return Picture(lines, header, (Seg(f"{words}, ms", "dim"),), prefer=rows[0].run_id)


PANEL = Panel(
    "bench",
    "Benchmarks",
    draw,
    needs=("bench",),
    order=60,
    selectable=True,
    enter="screen.bench_open",
    keys=(
        ("o", "screen.bench_sort", "order"),
        ("slash", "screen.bench_filter", "filter"),
        ("B", "screen.bench_base", "compare with"),
        ("v", "screen.bench_view", "view"),
        ("Y", "screen.bench_copy", "copy table"),
        ("e", "screen.bench_label", "label"),
        ("M", "screen.bench_keep_base", "baseline"),
        ("D", "screen.bench_delete", "delete"),
    ),
    help="Newest runs. Latencies in ms. Enter: every request of the run. A circle marks the baseline, a triangle a run that is not valid, an arrow an imported one.",
)
