"""The sweep view: points of one setting by ascending load, bars, the knee, deltas against a baseline. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from k2tui.core.bench import BenchRow
from k2tui.core.bench_compare import Delta, compare, delta_text, load_key, load_title
from k2tui.core.bench_table import accept_text, cells, clean, fit, footnotes, grid, load_words, ms, num
from k2tui.core.stats import knee, pareto

_EIGHTHS = " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One load of a sweep: its newest repeat (`row`), means over repeats, and what marks it."""

    row: BenchRow
    repeats: int
    output_throughput: float | None
    tok_s_user: float | None
    is_knee: bool = False
    is_best: bool = False
    is_pareto: bool = False
    deltas: Mapping[str, Delta] | None = None


def bar(share: float, width: int, *, ascii_only: bool = False) -> str:
    """A bar of `width` cells for 0..1, in eighths of a cell."""
    share = min(max(share, 0.0), 1.0)
    if ascii_only:
        return "#" * round(share * width)
    eighths = round(share * width * 8)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def sweep_points(rows: Sequence[BenchRow], baseline: Sequence[BenchRow] = ()) -> list[SweepPoint]:
    """Points by ascending load. rows: runs of one setting (repeats allowed); baseline: runs to measure against."""
    by: dict[tuple[str, float | None, int | None], list[BenchRow]] = {}
    for row in rows:
        by.setdefault(load_key(row), []).append(row)
    keys = sorted(by, key=lambda k: (k[0], k[1] or 0.0, k[2] or 0))
    means = {k: _mean([r.output_throughput for r in by[k]]) for k in keys}
    users = {k: _mean([r.tok_s_user for r in by[k]]) for k in keys}
    curve = [
        (float(k[1] if k[1] is not None else (k[2] or 0)), m) for k in keys if (m := means[k]) is not None
    ]
    at = knee(curve)
    best = max((m for m in means.values() if m is not None), default=None)
    known = [k for k in keys if means[k] is not None and users[k] is not None]
    front = {known[i] for i in pareto([(users[k] or 0.0, means[k] or 0.0) for k in known])}
    deltas: dict[tuple[str, float | None, int | None], dict[str, Delta]] = {}
    if baseline:
        for c in compare(baseline, rows):
            if c.new:
                deltas[load_key(c.new[0])] = {d.metric: d for d in c.deltas}
    return [
        SweepPoint(
            row=max(by[k], key=lambda r: r.started_s),
            repeats=len(by[k]),
            output_throughput=means[k],
            tok_s_user=users[k],
            is_knee=at is not None and float(k[1] if k[1] is not None else (k[2] or 0)) == at,
            is_best=best is not None and means[k] == best,
            is_pareto=k in front,
            deltas=deltas.get(k),
        )
        for k in keys
    ]


def knee_words(rows: Sequence[BenchRow], option: str = "--sweep") -> str:
    """Where the knee of a sweep is, or why none is told. option: what a higher limit is given with."""
    points = [p for p in sweep_points(rows) if p.output_throughput]
    at = next((p for p in points if p.is_knee), None)
    if at is not None:
        return f"◆ knee at {load_words(at.row)}: twice that load brings less than 10 % more"
    if len(points) < 3:
        return f"no knee: it takes three loads to tell one, {len(points)} gave figures"
    return f"no knee: the throughput still grew at {load_words(points[-1].row)}, the highest load; a higher {option} goes on"


def sweep_table(rows: Sequence[BenchRow], baseline: Sequence[BenchRow] = (), width: int = 120) -> str:
    """The sweep as text, ◆ at the knee."""
    if not rows:
        return "no points"
    points = sweep_points(rows, baseline)
    first = points[0].row
    title = f" sweep · {clean(first.label or first.run_id[-6:])} · {clean(first.workload)}"
    if baseline:
        title += f"   vs ● {clean(baseline[0].label or baseline[0].run_id[-6:])}"
    if first.slo:
        title += f"   SLO {clean(first.slo)}"
    best = max((p.output_throughput or 0.0 for p in points), default=0.0)
    headers = ["", "C" if first.request_rate is None else "rate", "out tok/s"]
    right = [False, True, True]
    if baseline:
        headers.append("Δ ●")
        right.append(False)
    headers += ["tok/s/user", "TTFT p50/p99", "TPOT p50/p99"]
    right += [True, True, True]
    extra: list[str] = []
    if any(p.row.goodput_fraction is not None for p in points):
        extra.append("good %")
    if any(accept_text(p.row) != "–" for p in points):
        extra.append("accept")
    if any(p.row.errors for p in points):
        extra.append("✗")
    headers += extra
    right += [True] * len(extra)
    body: list[list[str]] = []
    for p in points:
        r = p.row
        line = [
            ("◆" if p.is_knee else "") + ("⚠" if r.flags else ""),
            load_title(r),
            num(p.output_throughput),
        ]
        if baseline:
            d = (p.deltas or {}).get("output_throughput")
            line.append(delta_text(d) if d else "–")
        line += [
            num(p.tok_s_user),
            f"{ms(r.ttft_p50_ms)}/{ms(r.ttft_p99_ms)}",
            f"{num(r.tpot_p50_ms)}/{num(r.tpot_p99_ms)}",
        ]
        for name in extra:
            if name == "good %":
                line.append("–" if r.goodput_fraction is None else f"{100 * r.goodput_fraction:.0f}")
            elif name == "accept":
                line.append(accept_text(r))
            else:
                line.append(str(r.errors) if r.errors else "–")
        body.append(line)
    drops = ["TPOT p50/p99", "accept", "TTFT p50/p99"]
    while True:
        lines = grid(headers, body, right)
        used = max(map(cells, lines))
        if used <= width or not drops:
            break
        name = drops.pop(0)
        if name in headers:
            i = headers.index(name)
            headers.pop(i)
            right.pop(i)
            for line in body:
                line.pop(i)
    room = min(width - used - 2, 24)
    if room >= 4:
        for i, p in enumerate(points, 1):
            drawn = bar((p.output_throughput or 0.0) / best if best else 0.0, room)
            lines[i] = lines[i] + " " * (used - cells(lines[i]) + 2) + drawn
    foot = footnotes([p.row for p in points], width)
    return "\n".join(fit(x, width) for x in [title, *lines, *foot])
