"""Statistics of measured samples: quantiles, intervals, paired comparison, verdicts. Pure; randomness comes by seed.

Quantiles interpolate linearly between order statistics (the rule of numpy's default and of sglang.bench_serving).
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

# Two-sided 95 % points of Student's t by degrees of freedom; beyond 30 the normal expansion below is within 0.1 %.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def t95(df: int) -> float:
    """Two-sided 95 % point of Student's t with `df` >= 1 degrees of freedom."""
    if df < 1:
        raise ValueError("t95 needs at least one degree of freedom")
    if df <= len(_T95):
        return _T95[df - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * df) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df * df)


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def std(values: Sequence[float]) -> float:
    """Population standard deviation (divisor n), as sglang.bench_serving prints it."""
    m = mean(values)
    return math.sqrt(math.fsum((v - m) ** 2 for v in values) / len(values))


def quantile(ordered: Sequence[float], q: float) -> float:
    """Quantile q (0..1) of an ascending sequence, linear between neighbours. Raises ValueError when empty."""
    if not ordered:
        raise ValueError("no values")
    x = q * (len(ordered) - 1)
    i = int(x)
    if i + 1 >= len(ordered):
        return float(ordered[-1])
    f = x - i
    return ordered[i] * (1 - f) + ordered[i + 1] * f


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its 95 % interval; lo/hi None = the interval does not exist (too few samples)."""

    value: float
    lo: float | None = None
    hi: float | None = None
    n: int = 1

    @property
    def half_width(self) -> float | None:
        return None if self.lo is None or self.hi is None else (self.hi - self.lo) / 2


def quantile_interval(ordered: Sequence[float], q: float) -> Estimate:
    """Quantile with its distribution-free 95 % interval by order statistics.

    The interval needs samples beyond the quantile on both sides: a p99 has one from n = 368 on (0.99^n <= 2.5 %).
    """
    n = len(ordered)
    value = quantile(ordered, q)
    lo_i, hi_i = _order_ranks(n, q)
    if lo_i is None or hi_i is None:
        return Estimate(value, None, None, n)
    return Estimate(value, float(ordered[lo_i]), float(ordered[hi_i]), n)


def _order_ranks(n: int, q: float) -> tuple[int | None, int | None]:
    """Indices (0-based) of the order statistics that bound quantile q with >= 95 % (2.5 % on each side)."""
    if n < 2:
        return None, None
    if n * min(q, 1 - q) > 50:  # the normal approximation is within one rank here
        sd = math.sqrt(n * q * (1 - q))
        lo = math.floor(n * q - 1.96 * sd) - 1
        hi = math.ceil(n * q + 1.96 * sd)
        return (lo if lo >= 0 else None), (hi if hi < n else None)
    # P(Binomial(n, q) <= k), summed in logs
    lp, lq = math.log(q), math.log1p(-q)
    lgn = math.lgamma(n + 1)
    cdf = 0.0
    lo_i: int | None = None
    hi_i: int | None = None
    for k in range(n + 1):
        if cdf <= 0.025:
            lo_i = k - 1 if k >= 1 else None  # x_(k) with P(B < k) <= 2.5 %
        cdf += math.exp(lgn - math.lgamma(k + 1) - math.lgamma(n - k + 1) + k * lp + (n - k) * lq)
        if cdf >= 0.975:
            hi_i = k if k < n else None  # x_(k+1) with P(B <= k) >= 97.5 %
            break
    return lo_i, hi_i


def mean_interval(values: Sequence[float]) -> Estimate:
    """Mean with its 95 % t interval; one value has none."""
    n = len(values)
    m = mean(values)
    if n < 2:
        return Estimate(m, None, None, n)
    s = math.sqrt(math.fsum((v - m) ** 2 for v in values) / (n - 1))
    half = t95(n - 1) * s / math.sqrt(n)
    return Estimate(m, m - half, m + half, n)


def block_bootstrap(
    values: Sequence[float],
    statistic: Callable[[Sequence[float]], float] = mean,
    *,
    blocks: int = 10,
    draws: int = 1000,
    seed: int = 0,
) -> Estimate:
    """95 % interval of a statistic from ONE run: whole blocks in time order are redrawn, so that slow drift stays in."""
    n = len(values)
    value = statistic(values)
    if n < 2 * blocks:
        return Estimate(value, None, None, n)
    size = n // blocks
    parts = [values[i * size : (i + 1) * size if i < blocks - 1 else n] for i in range(blocks)]
    rng = random.Random(seed)
    results: list[float] = []
    for _ in range(draws):
        sample: list[float] = []
        for _ in range(blocks):
            sample.extend(parts[rng.randrange(blocks)])
        results.append(statistic(sample))
    results.sort()
    return Estimate(value, quantile(results, 0.025), quantile(results, 0.975), n)


def ratio_of_pairs(base: Sequence[float], new: Sequence[float]) -> Estimate:
    """new/base from paired repeats, with a 95 % interval.

    The log ratios' mean with a t interval: with 3 to 10 repeats a plain percentile bootstrap of the same pairs covers
    only 78 to 90 %, the t interval 95 % (docs/benchmarks.md). One pair has no interval.
    """
    if len(base) != len(new) or not base:
        raise ValueError("pairs need two sequences of the same, non-zero length")
    logs = [math.log(b / a) for a, b in zip(base, new, strict=True)]
    est = mean_interval(logs)
    if est.lo is None or est.hi is None:
        return Estimate(math.exp(est.value), None, None, est.n)
    return Estimate(math.exp(est.value), math.exp(est.lo), math.exp(est.hi), est.n)


def ratio_of_means(base: Estimate, new: Estimate) -> Estimate:
    """new/base of two independent estimates, the intervals joined on the log scale."""
    value = new.value / base.value
    if base.lo is None or base.hi is None or new.lo is None or new.hi is None or min(base.lo, new.lo) <= 0:
        return Estimate(value, None, None, min(base.n, new.n))
    half = math.hypot(math.log(base.hi / base.lo) / 2, math.log(new.hi / new.lo) / 2)
    return Estimate(value, value * math.exp(-half), value * math.exp(half), min(base.n, new.n))


class Verdict(StrEnum):
    FASTER = "faster"
    SAME = "same"
    SLOWER = "slower"
    UNCLEAR = "unclear"  # the interval is wider than the effect asked about: more repeats are needed
    NOT_COMPARABLE = "not comparable"


EFFECT = 0.03  # the smallest difference that is asked about, where nobody says another


def verdict(
    ratio: Estimate, *, higher_is_better: bool, noise: float = 0.0, least: float = 0.01, effect: float = EFFECT
) -> Verdict:
    """What a ratio new/base says.

    A difference is called only if its 95 % interval excludes 1 and the estimate lies beyond +-max(least, noise). Otherwise it is
    "same", or unclear where the interval is so wide (half of it above max(effect, noise)) that the effect asked about could hide
    in it. Without an interval (one repeat): unclear, unless the estimate is within the margin.
    """
    margin = max(least, noise)
    up, down = 1 + margin, 1 - margin
    half = ratio.half_width
    if ratio.lo is None or ratio.hi is None or half is None:
        return Verdict.SAME if down <= ratio.value <= up else Verdict.UNCLEAR
    better = Verdict.FASTER if higher_is_better else Verdict.SLOWER
    worse = Verdict.SLOWER if higher_is_better else Verdict.FASTER
    if ratio.lo > 1 and ratio.value > up:
        return better
    if ratio.hi < 1 and ratio.value < down:
        return worse
    return Verdict.UNCLEAR if half > max(effect, margin) else Verdict.SAME


def knee(points: Iterable[tuple[float, float]], *, gain: float = 0.10) -> float | None:
    """The load x after which doubling the load brings less than `gain` more throughput.

    points: (load, throughput), any order. None when fewer than three points, or throughput still grows at the end.
    """
    ordered = sorted(points)
    if len(ordered) < 3:
        return None
    for (x0, y0), (x1, y1) in itertools.pairwise(ordered):
        if y0 <= 0 or x1 <= x0:
            continue
        doublings = math.log2(x1 / x0) if x0 > 0 else 1.0
        if math.log(max(y1, 1e-12) / y0) / max(doublings, 1e-9) < math.log1p(gain):
            return x0
    return None


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points that no other point beats in both coordinates (more is better), by ascending x."""
    order = sorted(range(len(points)), key=lambda i: (-points[i][0], -points[i][1]))
    best = -math.inf
    front: list[int] = []
    for i in order:
        if points[i][1] > best:
            best = points[i][1]
            front.append(i)
    front.reverse()
    return front
