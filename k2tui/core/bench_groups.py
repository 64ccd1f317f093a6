"""Which runs belong together: the sweep of a run, the settings measured under one load, the baseline of a workload. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from k2tui.core.bench import BenchRow
from k2tui.core.bench_compare import Delta, compare, load_key
from k2tui.core.stats import Estimate, mean, mean_interval


def same_work(a: BenchRow, b: BenchRow) -> bool:
    """Whether two runs did the same work (load apart)."""
    if a.workload_fp or b.workload_fp:
        return a.workload_fp == b.workload_fp
    return a.workload == b.workload


def sweep_of(rows: Sequence[BenchRow], row: BenchRow) -> list[BenchRow]:
    """The points measured together with `row`: its sweep under its label; without one, its label and workload."""
    if row.sweep:
        return [r for r in rows if r.sweep == row.sweep and r.label == row.label]
    return [
        r for r in rows if r.label == row.label and same_work(r, row) and r.imported_from == row.imported_from
    ]


def baseline_of(rows: Sequence[BenchRow], row: BenchRow, chosen: str = "") -> list[BenchRow]:
    """What `row` is measured against: the sweep of the chosen run, else the stored baseline of its workload; [] = none."""
    if chosen:
        found = next((r for r in rows if r.run_id == chosen), None)
        return sweep_of(rows, found) if found is not None else []
    return [r for r in rows if r.is_baseline and same_work(r, row)]


@dataclass(frozen=True, slots=True)
class Setting:
    """One label under one load and workload: its repeats (newest sweep only) and its difference to the base."""

    label: str
    rows: tuple[BenchRow, ...]
    tok_s_user: Estimate | None
    output_throughput: Estimate | None
    is_base: bool = False
    delta: Delta | None = None  # of tok_s_user at C=1, else of output_throughput


def settings_like(rows: Sequence[BenchRow], row: BenchRow, base: Sequence[BenchRow]) -> list[Setting]:
    """Every label measured under the load and workload of `row`, fastest first."""
    like = [r for r in rows if load_key(r) == load_key(row) and same_work(r, row)]
    by: dict[str, list[BenchRow]] = {}
    for r in like:
        name = r.label or r.run_id[-6:]
        kept = by.setdefault(name, [])
        if not kept or r.sweep == kept[0].sweep or not r.sweep:
            kept.append(r)
    base_ids = {r.run_id for r in base}
    main = "tok_s_user" if row.concurrency == 1 and row.request_rate is None else "output_throughput"
    out: list[Setting] = []
    mine = [r for r in base if load_key(r) == load_key(row)]
    for name, found in by.items():
        is_base = any(r.run_id in base_ids for r in found)
        delta = None
        if mine and not is_base:
            points = compare(mine, found)
            delta = next((d for c in points for d in c.deltas if d.metric == main), None)
        out.append(
            Setting(
                name,
                tuple(found),
                _estimate([r.tok_s_user for r in found]),
                _estimate([r.output_throughput for r in found]),
                is_base,
                delta,
            )
        )
    key = "tok_s_user" if main == "tok_s_user" else "output_throughput"

    def speed(s: Setting) -> float:
        est: Estimate | None = getattr(s, key)
        return est.value if est is not None else -1.0

    return sorted(out, key=speed, reverse=True)


def _estimate(values: Sequence[float | None]) -> Estimate | None:
    known = [v for v in values if v is not None]
    if not known:
        return None
    return mean_interval(known) if len(known) > 1 else Estimate(mean(known))


SORTS: tuple[str, ...] = ("newest", "out tok/s", "tok/s/user", "TTFT", "TPOT", "accept", "label")


def ordered(rows: Sequence[BenchRow], sort: str, text: str = "") -> list[BenchRow]:
    """Filtered by words (all must be in label, tag, model, workload, engine, source) and sorted; rows without the value last."""
    words = text.lower().split()

    def hay(r: BenchRow) -> str:
        return f"{r.label} {r.tag} {r.model} {r.engine} {r.version} {r.workload} {r.imported_from} {r.run_id}".lower()

    kept = [r for r in rows if all(w in hay(r) for w in words)]
    fields = {
        "out tok/s": ("output_throughput", True), "tok/s/user": ("tok_s_user", True), "TTFT": ("ttft_p50_ms", False),
        "TPOT": ("tpot_p50_ms", False), "accept": ("accept_length", True), "label": ("label", False),
    }  # fmt: skip
    if sort not in fields:
        return kept
    name, down = fields[sort]
    have = [r for r in kept if getattr(r, name) is not None]
    rest = [r for r in kept if getattr(r, name) is None]
    return [*sorted(have, key=lambda r: getattr(r, name), reverse=down), *rest]
