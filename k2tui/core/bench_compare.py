"""Is one setting faster than another: rows matched by load, ratios with intervals, verdicts, words. Pure."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from k2tui.core.bench import BenchRow
from k2tui.core.bench_table import cells, clean, fit, grid, load_words, ms, num
from k2tui.core.stats import Estimate, Verdict, mean, mean_interval, ratio_of_means, ratio_of_pairs, verdict

# metric -> (is more better, field of BenchRow, field of its interval inside one run)
METRICS: Mapping[str, tuple[bool, str, str]] = {
    "output_throughput": (True, "output_throughput", "output_throughput_ci"),
    "tok_s_user": (True, "tok_s_user", "tok_s_user_ci"),
    "ttft_p50": (False, "ttft_p50_ms", "ttft_p50_ci"),
    "ttft_p99": (False, "ttft_p99_ms", "ttft_p99_ci"),
    "tpot_p50": (False, "tpot_p50_ms", "tpot_p50_ci"),
    "tpot_p99": (False, "tpot_p99_ms", "tpot_p99_ci"),
}

ONE_RUN = 0.10  # what the luck of a single run can do where no noise floor was measured: only more than that is called


@dataclass(frozen=True, slots=True)
class Noise:
    """Noise floor of one figure: how far the mean of so many pairs of runs of one and the same server went from 1."""

    value: float
    pairs: int

    @property
    def of_one_run(self) -> float:
        """The same of a single pair: a mean of n is sqrt(n) times calmer."""
        return self.value * math.sqrt(self.pairs)


@dataclass(frozen=True, slots=True)
class Delta:
    """One figure of two settings. base, new: means over repeats. basis: "5 pairs", "3 against 5 runs", "1 run each".

    margin: below it nothing is called a difference. is_single: a side has one run only."""

    metric: str
    base: float
    new: float
    ratio: Estimate
    verdict: Verdict
    basis: str
    margin: float
    is_single: bool = False


@dataclass(frozen=True, slots=True)
class Comparison:
    """One point of load, two settings. why: why they cannot be compared, or what to be careful about."""

    load: str
    base: tuple[BenchRow, ...]
    new: tuple[BenchRow, ...]
    deltas: tuple[Delta, ...] = ()
    verdict: Verdict = Verdict.NOT_COMPARABLE
    why: str = ""


def load_key(row: BenchRow) -> tuple[str, float | None, int | None]:
    return (row.load_shape, row.request_rate, row.concurrency)


def load_title(row: BenchRow) -> str:
    if row.request_rate is not None:
        return f"{row.request_rate:g}/s"
    if row.concurrency is not None:
        return str(row.concurrency)
    return "–" if row.load_shape == "closed" else row.load_shape


def compare(
    base: Sequence[BenchRow],
    new: Sequence[BenchRow],
    *,
    noise: Mapping[str, Noise] | None = None,
    least: float = 0.01,
) -> list[Comparison]:
    """Every point of load that either side has, ascending. noise: A/A floor of this host by metric."""
    sides: list[dict[tuple[str, float | None, int | None], list[BenchRow]]] = [{}, {}]
    for side, rows in zip(sides, (base, new), strict=True):
        for row in rows:
            side.setdefault(load_key(row), []).append(row)
    keys = sorted(set(sides[0]) | set(sides[1]), key=lambda k: (k[0], k[1] or 0.0, k[2] or 0))
    out: list[Comparison] = []
    for key in keys:
        left = tuple(sorted(sides[0].get(key, ()), key=lambda r: (r.repeat, r.started_s)))
        right = tuple(sorted(sides[1].get(key, ()), key=lambda r: (r.repeat, r.started_s)))
        title = load_title((left or right)[0])
        out.append(_compare_point(title, left, right, noise or {}, least))
    return out


def _compare_point(
    title: str,
    base: tuple[BenchRow, ...],
    new: tuple[BenchRow, ...],
    noise: Mapping[str, Noise],
    least: float,
) -> Comparison:
    if not base or not new:
        return Comparison(title, base, new, why="measured on one side only")
    why = difference(base[0], new[0])
    if why:
        return Comparison(title, base, new, why=why)
    bad = [f"{r.run_id[-6:]}: {f}" for r in (*base, *new) for f in r.flags]
    deltas: list[Delta] = []
    for metric, (more, name, interval) in METRICS.items():
        a = [v for r in base if (v := getattr(r, name))]
        b = [v for r in new if (v := getattr(r, name))]
        if not a or not b:
            continue
        deltas.append(_delta(metric, base, new, a, b, interval, more, noise.get(metric), least))
    main = next(
        (d for d in deltas if d.metric == ("tok_s_user" if title == "1" else "output_throughput")), None
    )
    if main is None:
        return Comparison(title, base, new, tuple(deltas), why="a side has no figures")
    return Comparison(title, base, new, tuple(deltas), main.verdict, f"not valid: {bad[0]}" if bad else "")


def difference(a: BenchRow, b: BenchRow) -> str:
    """Why two runs must not be compared; "" when they may."""
    if a.workload_fp and b.workload_fp:
        if a.workload_fp != b.workload_fp:
            if a.workload != b.workload:
                return f"workloads differ: {a.workload} / {b.workload}"
            if a.api != b.api:
                return f"routes differ: {a.api} / {b.api}"
            return "workloads differ (sampling, lengths or file)"
    elif a.workload != b.workload:
        return f"workloads differ: {a.workload or 'not told'} / {b.workload or 'not told'}"
    if load_key(a) != load_key(b):
        return f"loads differ: {load_title(a)} / {load_title(b)}"
    return ""


def _delta(
    metric: str,
    base: Sequence[BenchRow],
    new: Sequence[BenchRow],
    a: Sequence[float],
    b: Sequence[float],
    interval: str,
    more: bool,
    noise: Noise | None,
    least: float,
) -> Delta:
    is_single = min(len(a), len(b)) == 1
    floor = (noise.of_one_run if noise else ONE_RUN) if is_single else noise.value if noise else 0.0
    margin = max(least, floor)
    if len(a) == len(b) >= 2:
        ratio = ratio_of_pairs(a, b)
        basis = f"{len(a)} pairs"
    elif len(a) >= 2 and len(b) >= 2:
        ratio = ratio_of_means(mean_interval(a), mean_interval(b))
        basis = f"{len(a)} against {len(b)} runs"
    else:
        ratio = ratio_of_means(_inside(base[0], a[0], interval), _inside(new[0], b[0], interval))
        basis = "1 run each"
        if len(a) > 1 or len(b) > 1:
            ratio = Estimate(mean(b) / mean(a), None, None, 1)
            basis = f"{len(a)} against {len(b)} runs"
    said = verdict(ratio, higher_is_better=more, noise=margin)
    if is_single and said is Verdict.SAME:
        said = Verdict.UNCLEAR  # the luck from run to run is not in the interval
    return Delta(metric, mean(a), mean(b), ratio, said, basis, margin, is_single)


def _inside(row: BenchRow, value: float, interval: str) -> Estimate:
    found: tuple[float, float] | None = getattr(row, interval)
    return Estimate(value, found[0], found[1]) if found else Estimate(value)


def comparison_dict(c: Comparison) -> dict[str, Any]:
    """A comparison as plain values, for --json."""
    return {
        "load": c.load,
        "verdict": str(c.verdict),
        "why": c.why,
        "base": [r.run_id for r in c.base],
        "new": [r.run_id for r in c.new],
        "deltas": [{**asdict(d), "verdict": str(d.verdict)} for d in c.deltas],
    }


_ARROW = {
    Verdict.FASTER: "▲",
    Verdict.SLOWER: "▼",
    Verdict.SAME: "≈",
    Verdict.UNCLEAR: "?",
    Verdict.NOT_COMPARABLE: "≠",
}


def delta_text(d: Delta) -> str:
    """ "▲ +29.7 % ±1.1", "≈" when it is noise, "? +2.0 %" when the runs are too few to say."""
    percent = 100 * (d.ratio.value - 1)
    if d.verdict is Verdict.SAME:
        return "≈"
    text = f"{_ARROW[d.verdict]} {percent:+.1f} %"
    half = d.ratio.half_width
    return text + (f" ±{100 * half:.1f}" if half is not None else "")


def name_of(rows: Sequence[BenchRow], typed: str = "") -> str:
    name = (rows[0].label or rows[0].run_id[-6:]) if rows else "–"
    return clean(f"{name} ({typed})" if typed not in ("", name) else name)


def compare_table(found: Sequence[Comparison], width: int = 120, typed: tuple[str, str] = ("", "")) -> str:
    """The compare view as text. typed: what the user called the two sides."""
    if not found:
        return "nothing to compare"
    base = next((c.base for c in found if c.base), ())
    new = next((c.new for c in found if c.new), ())
    title = f" base ● {name_of(base, typed[0])}   new {name_of(new, typed[1])}   (figures: base → new)"
    headers = ["C", "out tok/s", "Δ", "tok/s/user", "Δ", "TTFT p50", "Δ", "TPOT p50", "Δ", "verdict"]
    body: list[list[str]] = []
    for c in found:
        by = {d.metric: d for d in c.deltas}
        line = [c.load]
        for metric, show in (
            ("output_throughput", num),
            ("tok_s_user", num),
            ("ttft_p50", ms),
            ("tpot_p50", ms),
        ):
            d = by.get(metric)
            line += [f"{show(d.base)} → {show(d.new)}", delta_text(d)] if d else ["–", ""]
        line.append(str(c.verdict))
        body.append(line)
    keep = list(range(len(headers)))
    right = [True, True, False, True, False, True, False, True, False, False]
    for drop in ((5, 6), (3, 4), (7, 8)):
        lines = grid(
            [headers[i] for i in keep], [[row[i] for i in keep] for row in body], [right[i] for i in keep]
        )
        if max(map(cells, lines)) <= width:
            break
        keep = [i for i in keep if i not in drop]
    lines = grid(
        [headers[i] for i in keep], [[row[i] for i in keep] for row in body], [right[i] for i in keep]
    )
    notes = [f"{load_words((*c.new, *c.base)[0])}: {clean(c.why)}" for c in found if c.why]
    deltas = [d for c in found for d in c.deltas]
    single = next((d for d in deltas if d.is_single), None)
    if deltas:
        notes += [single_words(single), LEGEND] if single is not None else [f"{deltas[0].basis}; {LEGEND}"]
    notes = [" " + line for note in notes for line in textwrap.wrap(note, max(width - 1, 20))]
    return "\n".join(fit(line, width) for line in [title, *lines, *notes])


LEGEND = "▲ better, ▼ worse, ≈ same within the noise, ? unclear: too few or too unlike runs, ± 95 % interval"


def single_words(d: Delta) -> str:
    """What a comparison with a single run on a side cannot know."""
    which = d.basis if d.basis == "1 run each" else "1 run on one side"
    if d.ratio.half_width is None:
        return f"{which}: nothing tells run-to-run luck; bench run --repeats 3 measures it"
    words = f"{which}: run-to-run luck is not in the interval; bench run --repeats 3 measures it"
    return f"{words} (until then only more than {100 * d.margin:.3g} % is called)"


def noise_floor(a: Sequence[BenchRow], b: Sequence[BenchRow]) -> list[tuple[str, float, int]]:
    """(metric, relative noise, pairs) of runs of one server against itself: the larger edge of the ratio's interval."""
    out: list[tuple[str, float, int]] = []
    for c in compare(a, b):
        for d in c.deltas:
            if d.ratio.lo is not None and d.ratio.hi is not None:
                out.append((d.metric, max(abs(d.ratio.hi - 1), abs(1 - d.ratio.lo)), d.ratio.n))
    largest: dict[str, tuple[str, float, int]] = {}
    for item in out:
        if item[0] not in largest or item[1] > largest[item[0]][1]:
            largest[item[0]] = item
    return list(largest.values())


def noise_words(a: Sequence[BenchRow], b: Sequence[BenchRow]) -> str:
    found = noise_floor(a, b)
    if not found:
        return "too few pairs for a noise floor"
    return "noise floor: " + ", ".join(f"{name} ±{100 * value:.1f} %" for name, value, _ in found)
