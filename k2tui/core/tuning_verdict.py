"""What a tuning run's trials say: how long to measure one, which beat the baseline, which is the winner. Pure.

Passes of one start share its luck, so what seems best is started again and judged over starts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from k2tui.core.stats import Estimate, Verdict, mean, ratio_of_means, t95, verdict
from k2tui.core.tuning import METRICS, Setting, Space, Trial, label_of

TIMED = ("tok_s_user", "output_throughput", "tpot_p50_ms")
"""Metrics that a pass's length follows: only with these can a pass be too long to be of use."""
PASS_GRACE_S = 3.0
"""A pass is never called too long before it is this much longer than the baseline's: a hiccup is no verdict."""
CANDIDATES = 3
"""So many settings, best first, are started again until one is confirmed."""


def compare(base: Trial, trial: Trial, space: Space, noise: float = 0.0) -> Verdict:
    """faster | same | slower | unclear against the baseline. same: nothing of min_effect's size can hide in the interval, nor in the noise
    (how far the baseline itself moved); unclear: it can."""
    if trial.state == "slower":
        return Verdict.SLOWER
    if base.estimate is None or trial.estimate is None or base.estimate.value <= 0:
        return Verdict.NOT_COMPARABLE
    ratio = ratio_of_means(base.estimate, trial.estimate)
    said = verdict(ratio, higher_is_better=METRICS[space.metric], noise=noise, effect=space.min_effect)
    if (
        said is Verdict.SAME
        and ratio.half_width is not None
        and max(ratio.half_width, noise) > space.min_effect
    ):
        return Verdict.UNCLEAR
    return said


def baselines(trials: Iterable[Trial]) -> list[Trial]:
    """Every measurement of the profile as it is that has a figure."""
    return [t for t in trials if t.setting == () and t.estimate is not None]


def is_hopeless(space: Space, trials: Iterable[Trial], values: Sequence[float]) -> bool:
    """Whether even the best pass so far is worse than give_up_below of the baseline at its worst: its worst pass, or the far end of its
    interval. Its worst pass, because the first pass after a start is often a slow one, for every setting."""
    known = baselines(trials)
    if not known or not values or not space.give_up_below:
        return False
    seen = [v for t in known for v in t.values]
    ends = [v for t in known if (e := t.estimate) is not None for v in (e.lo, e.hi) if v is not None]
    if METRICS[space.metric]:
        return max(values) < space.give_up_below * min(seen + ends)
    return min(values) > max(seen + ends) / space.give_up_below


def longest_pass_s(space: Space, trials: Iterable[Trial]) -> float | None:
    """Seconds after which a trial's first pass is of no use any more; None where a pass's length does not tell."""
    took = max((t.pass_s for t in baselines(trials) if t.pass_s), default=None)
    if took is None or not space.give_up_below or space.metric not in TIMED:
        return None
    return max(took / space.give_up_below, took + PASS_GRACE_S)


def wants_more(space: Space, trials: Iterable[Trial], trial: Trial) -> bool:
    """Whether more passes are worth it: the interval is too wide to tell min_effect, and the trial is not slower for sure.

    Only the width decides (two intervals of min_effect / sqrt 2 make a ratio's of min_effect), never where the mean lies: passes that
    go on until a trial has won would make winners out of noise.
    """
    e = trial.estimate
    if e is None or e.value <= 0 or trial.state != "ok" or len(trial.values) >= space.max_repeats:
        return False
    if e.half_width is not None and e.half_width / e.value <= space.min_effect / math.sqrt(2):
        return False
    base = _first_baseline(trials)
    return base is None or trial.setting == () or compare(base, trial, space) is not Verdict.SLOWER


def drift(trials: Iterable[Trial]) -> float | None:
    """The largest relative change between the first baseline and its later measurements: how far the machine itself moved."""
    base: float | None = None
    again: list[float] = []
    for trial in trials:
        if trial.setting == () and trial.estimate is not None:
            if trial.is_again:
                again.append(trial.estimate.value)
            elif base is None:
                base = trial.estimate.value
    return max((value / base - 1 for value in again), key=abs) if base and again else None


def since_baseline(trials: Iterable[Trial]) -> int:
    """How many trials were measured since the baseline was (or should have been)."""
    count = 0
    for trial in trials:
        count = 0 if trial.setting == () else count + (trial.estimate is not None or trial.state == "slower")
    return count


def no_baseline(trials: Iterable[Trial]) -> str:
    """Why nothing can be compared, in words: the profile as it is has no figure. "" while it has one or was not tried."""
    base = next((t for t in trials if t.setting == () and not t.is_again), None)
    if base is None or base.estimate is not None:
        return ""
    return f"the profile as it is {base.state}: {base.cause or 'no cause is known'}; there is nothing to compare with"


def _first_baseline(trials: Iterable[Trial]) -> Trial | None:
    return next((t for t in baselines(trials) if not t.is_again), None)


def candidates(space: Space, trials: Sequence[Trial]) -> list[Trial]:
    """First starts whose difference to the baseline's is real, best first. The drift of the machine widens the margin: a gain that is no
    larger than it is no gain."""
    base = _first_baseline(trials)
    if base is None:
        return []
    noise = abs(drift(trials) or 0.0)
    sign = -1 if METRICS[space.metric] else 1
    found = [
        (sign * e.value, t)
        for t in trials
        if not t.is_again and t is not base and (e := t.estimate) is not None
        and compare(base, t, space, noise) is Verdict.FASTER
    ]  # fmt: skip
    return [t for _, t in sorted(found, key=lambda f: f[0])]


def gain(space: Space, trials: Sequence[Trial], setting: Setting) -> Estimate | None:
    """Ratio to the profile as it is over whole starts, with its 95 % interval; None before the setting was started again.

    The passes of one start share its luck (where its threads and its memory came to lie), so an interval over them is too narrow to
    tell a setting from a start: here each start counts as one value. The first start of the setting is left out: it was chosen because
    it was good. The spread is never taken to be less than what the passes alone would give.
    """
    again = [t for t in trials if t.setting == setting and t.is_again and t.mean > 0]
    base = [t for t in baselines(trials) if t.mean > 0]
    if not again or not base:
        return None
    groups = [[math.log(t.mean) for t in group] for group in (again, base)]
    means, sizes = [mean(g) for g in groups], [len(g) for g in groups]
    ratio, free = means[0] - means[1], sum(sizes) - 2
    if free < 1:
        return Estimate(math.exp(ratio), None, None, sizes[0])
    spread = sum((x - m) ** 2 for g, m in zip(groups, means, strict=True) for x in g) / free
    inner = [_pass_variance(t.values) for t in (*again, *base)]
    half = t95(free) * math.sqrt(max(spread, mean(inner)) * sum(1 / n for n in sizes))
    return Estimate(math.exp(ratio), math.exp(ratio - half), math.exp(ratio + half), sizes[0])


def _pass_variance(values: Sequence[float]) -> float:
    """Variance of the logarithm of the mean of one start's passes, as far as the passes tell it."""
    if len(values) < 2:
        return 0.0
    middle = mean(values)
    return sum((v / middle - 1) ** 2 for v in values) / (len(values) - 1) / len(values)


def is_confirmed(space: Space, trials: Sequence[Trial], setting: Setting) -> bool | None:
    """Whether a setting's later starts say what its first said; None: it has to be started again before one can tell."""
    again = [
        t for t in trials if t.setting == setting and t.is_again and t.state != "refused"
    ]  # refused: nothing was tried
    if not again:
        return None
    if any(t.state != "ok" or t.mean <= 0 for t in again):
        return False
    ratio = gain(space, trials, setting)
    if ratio is None or ratio.lo is None or ratio.hi is None:
        return False if len(again) >= space.confirm else None
    value, near, far = ratio.value, ratio.lo, ratio.hi
    if not METRICS[space.metric]:
        value, near, far = 1 / value, 1 / far, 1 / near
    if near > 1:
        return True
    if value <= 1 or far < 1 + space.min_effect or len(again) >= space.confirm:
        return False
    return None


def to_confirm(space: Space, trials: Sequence[Trial]) -> Setting | None:
    """The setting that has to be started again now; None: the best is confirmed, or none is left that could be."""
    if not space.confirm:
        return None
    for trial in candidates(space, trials)[:CANDIDATES]:
        confirmed = is_confirmed(space, trials, trial.setting)
        if confirmed is None:
            return trial.setting
        if confirmed:
            return None
    return None


def winner(space: Space, trials: Sequence[Trial]) -> Trial | None:
    """The best trial whose difference to the baseline is real and that no later start has refuted; the baseline itself when there is none;
    None without a baseline."""
    for trial in candidates(space, trials)[:CANDIDATES]:
        if is_confirmed(space, trials, trial.setting) is not False:
            return trial
    return _first_baseline(trials)


@dataclass(frozen=True, slots=True)
class Ranked:
    """A trial beside the others. mark: best | base | again | "". ratio: to the baseline, with its interval; None where there is none.
    note: what belongs to the verdict: why it ended early, whether a later start confirmed it."""

    trial: Trial
    mark: str = ""
    estimate: Estimate | None = None
    ratio: Estimate | None = None
    verdict: Verdict | None = None
    note: str = ""

    @property
    def label(self) -> str:
        return label_of(self.trial.setting, self.trial.is_again)

    @property
    def said(self) -> str:
        """The verdict, or why there is none, in words: "slower, 1 of 3 passes"."""
        if self.verdict is None:
            return self.trial.cause if self.estimate is None else self.note
        return str(self.verdict) + (f", {self.note}" if self.note else "")


def ranked(space: Space, trials: Sequence[Trial]) -> list[Ranked]:
    """Every trial, best first, then those without a figure (ended early, then failed) in the order of time; compared with the baseline as `winner` does it."""
    base = _first_baseline(trials)
    noise = abs(drift(trials) or 0.0)
    best = winner(space, trials)
    better = METRICS[space.metric]
    starts: dict[Setting, list[Trial]] = {}
    for trial in trials:
        starts.setdefault(trial.setting, []).append(trial)

    def order(trial: Trial) -> tuple[int, float]:
        if trial.estimate is None:
            return (1 if trial.state == "slower" else 2, trial.at_s)
        return (0, -trial.estimate.value if better else trial.estimate.value)

    out: list[Ranked] = []
    for trial in sorted(trials, key=order):
        mark = "base" if trial is base else "best" if trial is best else "again" if trial.is_again else ""
        ratio = said = None
        note = trial.cause if trial.state == "slower" else ""
        if (
            trial.estimate is not None
            and base is not None
            and base.estimate is not None
            and trial is not base
        ):
            ratio = ratio_of_means(base.estimate, trial.estimate)
            said = compare(base, trial, space, noise)
            mine = starts[trial.setting]
            if trial.is_again:  # a later start is part of the verdict on its setting, it has none of its own
                said, note = None, f"start {trial.again_no + 2}"
            elif (confirmed := is_confirmed(space, [*starts[()], *mine], trial.setting)) is not None:
                said, note = (
                    (Verdict.FASTER, "confirmed") if confirmed else (Verdict.UNCLEAR, "not confirmed")
                )
            elif said is Verdict.FASTER and space.confirm:
                more = sum(t.is_again and t.mean > 0 for t in mine)
                note = f"{more + 1} starts" if more else "one start"
        elif trial.state == "slower":
            said = Verdict.SLOWER
        out.append(Ranked(trial, mark, trial.estimate, ratio, said, note))
    return out
