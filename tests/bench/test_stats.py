"""Statistics against known answers, and the verdicts' error rates by simulation."""

from __future__ import annotations

import random
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k2tui.core import stats
from k2tui.core.stats import Estimate, Verdict


def test_quantiles_are_numpys() -> None:
    values = sorted([3.0, 1.0, 2.0, 10.0])
    assert stats.quantile(values, 0.5) == 2.5
    assert stats.quantile(values, 0.99) == pytest.approx(3 + 7 * 0.97)
    assert stats.quantile([5.0], 0.99) == 5.0
    with pytest.raises(ValueError):
        stats.quantile([], 0.5)


def test_t_points() -> None:
    assert stats.t95(4) == 2.776
    assert stats.t95(60) == pytest.approx(2.0003, abs=2e-3)
    assert stats.t95(10_000) == pytest.approx(1.9602, abs=1e-3)


def test_p99_interval_exists_from_368_values_on() -> None:
    assert stats.quantile_interval([float(i) for i in range(367)], 0.99).hi is None
    est = stats.quantile_interval([float(i) for i in range(368)], 0.99)
    assert est.hi is not None and est.lo is not None and est.lo < est.value < est.hi


@pytest.mark.parametrize(("n", "q"), [(50, 0.5), (400, 0.99), (1000, 0.9), (6000, 0.99)])
def test_quantile_interval_covers_95_percent(n: int, q: float) -> None:
    rng = random.Random(n)
    truth = NormalDist().inv_cdf(q)
    trials = 300 if n < 1000 else 100
    hits = 0
    for _ in range(trials):
        est = stats.quantile_interval(sorted(rng.gauss(0, 1) for _ in range(n)), q)
        assert est.lo is not None and est.hi is not None
        hits += est.lo <= truth <= est.hi
    assert hits / trials >= 0.9


@given(st.lists(st.floats(0.1, 1e6), min_size=2, max_size=40))
def test_mean_lies_in_its_interval(values: list[float]) -> None:
    est = stats.mean_interval(values)
    assert est.lo is not None and est.hi is not None
    assert est.lo <= est.value * (1 + 1e-9) and est.hi >= est.value * (1 - 1e-9)


def pairs(rng: random.Random, n: int, effect: float, noise: float) -> Estimate:
    """n interleaved repeats: both sides share the moment's drift, each has its own noise."""
    base, new = [], []
    for _ in range(n):
        drift = rng.gauss(1, 0.02)
        base.append(100 * drift * rng.gauss(1, noise))
        new.append(100 * effect * drift * rng.gauss(1, noise))
    return stats.ratio_of_pairs(base, new)


def rate(effect: float, want: Verdict, *, n: int = 5, noise: float = 0.007, trials: int = 1000) -> float:
    rng = random.Random(7)
    found = [stats.verdict(pairs(rng, n, effect, noise), higher_is_better=True) for _ in range(trials)]
    return sum(v is want for v in found) / trials


def test_a_against_a_is_the_same_and_three_percent_is_seen() -> None:
    assert rate(1.0, Verdict.SAME) >= 0.95
    assert rate(0.97, Verdict.SLOWER) >= 0.90
    assert rate(1.03, Verdict.FASTER) >= 0.90


def test_direction_depends_on_the_metric() -> None:
    up = Estimate(1.10, 1.08, 1.12, 5)
    assert stats.verdict(up, higher_is_better=True) is Verdict.FASTER
    assert stats.verdict(up, higher_is_better=False) is Verdict.SLOWER
    assert stats.verdict(up, higher_is_better=True, noise=0.15) is Verdict.SAME
    wide = Estimate(0.82, 0.42, 1.60, 3)
    assert stats.verdict(wide, higher_is_better=True) is Verdict.UNCLEAR
    assert stats.verdict(wide, higher_is_better=True, effect=0.7) is Verdict.SAME
    assert stats.verdict(Estimate(1.10), higher_is_better=True) is Verdict.UNCLEAR


def test_knee() -> None:
    curve = [
        (c, c / (2 + 0.3 * min(c, 64)) * 1000 if c <= 64 else 64 / (2 + 0.3 * 64) * 1000)
        for c in (1, 2, 4, 8, 16, 32, 64, 128, 256)
    ]
    assert stats.knee(curve) in (32, 64)
    assert stats.knee([(1, 10), (2, 20), (4, 40)]) is None
    assert stats.knee([(1, 10), (2, 20)]) is None


def test_pareto() -> None:
    assert stats.pareto([(90, 90), (72, 560), (50, 500), (47, 1480), (9, 1400)]) == [3, 1, 0]


def test_block_bootstrap_of_one_run() -> None:
    rng = random.Random(3)
    est = stats.block_bootstrap([rng.gauss(10, 1) for _ in range(400)])
    assert est.lo is not None and est.hi is not None and est.lo < 10.1 and est.hi > 9.9
    assert stats.block_bootstrap([1.0] * 5).lo is None
