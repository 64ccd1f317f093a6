"""Benchmark rows, newest first; columns adapt to the width."""

from __future__ import annotations

from collections.abc import Sequence

from k2tui.core.bench import BenchRow
from k2tui.tui import format as fmt
from k2tui.tui.lines import Cell, Column, Picture, Row, Seg, table, text_line
from k2tui.tui.panels import Panel
from k2tui.tui.view import View

COLUMNS = (
    Column("", 1, keep=6),
    Column("run", 12, weight=2, keep=7, limit=40),
    Column("conc", 4, keep=9, align=">"),
    Column("tok/s", 6, keep=9, align=">"),
    Column("/user", 5, keep=6, align=">"),
    Column("TTFT50", 6, keep=8, align=">"),
    Column("p99", 6, keep=7, align=">"),
    Column("ITL50", 6, keep=8, align=">"),
    Column("p99", 6, keep=5, align=">"),
    Column("accept", 6, keep=7, align=">"),
    Column("ok", 8, keep=6, align=">"),
    Column("req/s", 6, keep=3, align=">"),
    Column("E2E50", 6, keep=3, align=">"),
    Column("workload", 14, weight=1, keep=2, limit=40),
    Column("model", 12, weight=1, keep=1, limit=40),
    Column("at", 8, keep=4, align=">"),
)


def _ms(value: float | None) -> Seg:
    return Seg("n/a", "faint") if value is None else Seg(fmt.count(value))


def _row(row: BenchRow, view: View) -> Sequence[Cell]:
    g = view.glyphs
    sign = g.star if row.is_baseline else (g.warn if row.flags else (g.run if row.is_partial else ""))
    wrong = bool(row.errors or row.flags)
    return (
        Seg(sign, "accent" if row.is_baseline else ("warn" if row.flags else "info")),
        Seg(row.label or row.run_id, "warn" if row.flags else ""),
        fmt.count(row.concurrency, "-"),
        Seg(fmt.count(row.output_throughput), "bold"),
        fmt.count(row.tok_s_user),
        _ms(row.ttft_p50_ms),
        _ms(row.ttft_p99_ms),
        _ms(row.itl_p50_ms),
        _ms(row.itl_p99_ms),
        Seg(f"{row.accept_length:.2f}", "bold") if row.accept_length else Seg("n/a", "faint"),
        Seg(f"{row.completed}/{row.num_requests}", "warn" if wrong else "dim"),
        fmt.count(row.request_throughput),
        _ms(row.e2e_p50_ms),
        Seg(row.workload, "dim"),
        Seg(row.model, "dim"),
        Seg(fmt.clock(row.started_s), "dim"),
    )


def draw(view: View, width: int, height: int) -> Picture:
    rows = view.snap.bench
    if not rows:
        return Picture((Row("", (Seg("No benchmark yet. ", "dim"), Seg("b", "key", "stage('bench')"), Seg(" runs one.", "dim"))),))
    header, lines = table(COLUMNS, [(f"{r.run_id}/{i}", _row(r, view)) for i, r in enumerate(rows)], width, view.glyphs)
    note = (Seg(f"{len(rows)} rows, ms", "dim"),)
    flags = [Row("", text_line(f"{view.glyphs.warn} {rows[0].label or rows[0].run_id}: {'; '.join(rows[0].flags)}", "warn"))]
    if rows[0].flags and height > len(lines) + 2:
        lines += tuple(flags)
    return Picture(lines, header, note)


PANEL = Panel("bench", "Benchmarks", draw, needs=("bench",), order=60, selectable=True, help="Newest runs. Latencies in ms; n/a = not measured.")
