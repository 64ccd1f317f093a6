"""Benchmark figures as segments: marks, deltas, latencies. Shared by the benchmark panels."""

from __future__ import annotations

from collections.abc import Sequence

from k2tui.core.bench import BenchRow
from k2tui.core.bench_compare import Delta
from k2tui.core.bench_groups import baseline_of
from k2tui.core.bench_table import num
from k2tui.core.stats import Verdict
from k2tui.tui import format as fmt
from k2tui.tui.lines import Cell, Glyphs, Row, Seg, middle, wrap
from k2tui.tui.view import View

NONE = "-"


def figure(value: float | None, role: str = "") -> Seg:
    return Seg(NONE, "faint") if value is None else Seg(num(value).replace("–", NONE), role)


def latency(value: float | None, role: str = "") -> Seg:
    """ms below a second, then seconds."""
    if value is None:
        return Seg(NONE, "faint")
    return Seg(f"{value / 1000:.3g}s" if value >= 1000 else num(value), role)


def accept(row: BenchRow) -> Seg:
    rate = "" if row.accept_rate is None else f"{100 * row.accept_rate:.0f}%"
    length = "" if row.accept_length is None else f"{row.accept_length:.2f}"
    text = f"{rate} {length}".strip()
    return Seg(text, "bold") if text else Seg(NONE, "faint")


def mark(row: BenchRow, g: Glyphs, *, is_base: bool = False) -> Seg:
    """Baseline, not valid, partial: told apart by sign, then by colour."""
    if is_base or row.is_baseline:
        return Seg(g.run, "accent")
    if row.is_partial:
        return Seg(g.skip, "warn")
    if row.flags:
        return Seg(g.warn, "warn")
    return Seg(g.down, "dim") if row.imported_from else Seg("")


def delta(d: Delta | None, g: Glyphs) -> Seg:
    """Sign and words first, colour second: better is ok, worse is bad whatever the metric's direction."""
    if d is None:
        return Seg(NONE, "faint")
    if d.verdict is Verdict.SAME:
        return Seg("same" if g.ascii else "≈", "dim")
    percent = 100 * (d.ratio.value - 1)
    half = d.ratio.half_width
    text = f"{percent:+.1f}%" + (f" {g.plus_minus}{100 * half:.1f}" if half is not None else "")
    if d.verdict is Verdict.UNCLEAR:
        return Seg(f"? {text}", "dim")
    better = d.verdict is Verdict.FASTER
    return Seg(f"{g.up if better else g.down} {text}", "ok" if better else "bad")


def verdict(v: Verdict) -> Seg:
    roles = {
        Verdict.FASTER: "ok bold",
        Verdict.SLOWER: "bad bold",
        Verdict.SAME: "dim",
        Verdict.UNCLEAR: "warn",
    }
    return Seg(v.value, roles.get(v, "warn"))


def name(row: BenchRow) -> str:
    return row.label or row.run_id[-6:]


def name_cell(text: str, role: str, g: Glyphs) -> Cell:
    """A label for a cell of any width, cut in the middle: labels begin alike ("tune ..."), and their ends tell them apart."""
    return lambda cells: (Seg(middle(text, cells, g.ellipsis), role),)


def load(row: BenchRow) -> str:
    if row.request_rate is not None:
        return f"{row.request_rate:g}/s"
    return str(row.concurrency) if row.concurrency is not None else NONE


def trust(row: BenchRow, g: Glyphs, width: int, most: int = 3) -> tuple[Row, ...]:
    """Who counted, whose clock, how late, how busy; what is wrong comes instead of it. At most `most` lines, never cut
    while there is room for another."""
    role = "warn" if row.flags else "dim"
    return tuple(Row("", (Seg(text, role),)) for text in wrap(_trust_words(row, g), width, most, g.ellipsis))


def _trust_words(row: BenchRow, g: Glyphs) -> str:
    if row.flags:
        return f"{g.warn} not valid: {'; '.join(row.flags)}"
    if row.imported_from:
        return f"imported from {row.imported_from}"
    parts = [f"count={row.count or NONE}", f"stamps={row.stamps or NONE}"]
    if row.lag_p99_ms is not None:
        parts.append(f"lag p99 {num(row.lag_p99_ms)} ms")
    if row.client_cpu is not None:
        parts.append(f"client CPU {100 * row.client_cpu:.0f}%")
    if row.coalesced is not None:
        parts.append(f"coalesced {100 * row.coalesced:.1f}%")
    if row.achieved is not None:
        parts.append(f"achieved {100 * row.achieved:.0f}%")
    if row.short_outputs:
        parts.append(f"short {row.short_outputs}")
    if row.host_steal is not None:
        parts.append(f"steal {100 * row.host_steal:.1f}%")
    return f" {g.dot} ".join(parts)


def picked(view: View) -> BenchRow | None:
    """The selected run, else the newest."""
    rows = view.snap.bench
    return next((r for r in rows if r.run_id == view.bench.run_id), rows[0] if rows else None)


def base_of(view: View, row: BenchRow, mine: Sequence[BenchRow]) -> list[BenchRow]:
    """What `row` is measured against, without the runs of its own sweep."""
    own = {r.run_id for r in mine}
    return [r for r in baseline_of(view.snap.bench, row, view.bench.base_id) if r.run_id not in own]


def clock(row: BenchRow) -> str:
    return fmt.clock(row.started_s)
