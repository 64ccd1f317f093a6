"""Which trial of a tuning run comes next, how many are left and how long they take. Pure.

Search ("one at a time"): the profile as it is; each knob's other values, one at a time; then what helped, together; and the baseline
again in between, so that drift of the machine shows. "matrix": every combination. At the end what seems best is started again, and the
baseline beside it: a start has luck of its own, which no number of passes shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from k2tui.core.stats import Verdict
from k2tui.core.tuning import METRICS, Setting, Space, Trial, Value, current_value, is_same, key_of
from k2tui.core.tuning_verdict import baselines, compare, since_baseline, to_confirm


def planned(space: Space, profile: Any, done: Mapping[str, Trial]) -> list[Setting]:
    """Settings still to be measured, in order, as far as they are known now; the search's last step waits for results. No control."""
    if space.method == "matrix":
        every: list[Setting] = []
        for values in itertools.product(*(k.values for k in space.knobs)):
            changed = [
                (k.kind, k.name, v)
                for k, v in zip(space.knobs, values, strict=True)
                if not is_same(v, current_value(profile, k))
            ]
            every.append(tuple(sorted(changed, key=lambda s: (s[0], s[1]))))
        first: list[Setting] = [()]
        return [s for s in dict.fromkeys(first + every) if key_of(s) not in done]
    singles: list[Setting] = [()]
    for knob in space.knobs:
        singles += [
            ((knob.kind, knob.name, v),) for v in knob.values if not is_same(v, current_value(profile, knob))
        ]
    todo = [s for s in dict.fromkeys(singles) if key_of(s) not in done]
    if todo:
        return todo
    both = combination(space, done)
    return [both] if both and key_of(both) not in done else []


def combination(space: Space, done: Mapping[str, Trial]) -> Setting:
    """What helped, together: each knob's best value that is faster than the baseline. () when fewer than two knobs helped."""
    base = done.get(key_of(()))
    if base is None or base.estimate is None:
        return ()
    better = METRICS[space.metric]
    chosen: list[tuple[str, str, Value]] = []
    for knob in space.knobs:
        best: tuple[float, tuple[str, str, Value]] | None = None
        for value in knob.values:
            trial = done.get(key_of(((knob.kind, knob.name, value),)))
            if trial is None or trial.estimate is None or compare(base, trial, space) is not Verdict.FASTER:
                continue
            score = trial.estimate.value if better else -trial.estimate.value
            if best is None or score > best[0]:
                best = (score, (knob.kind, knob.name, value))
        if best is not None:
            chosen.append(best[1])
    return tuple(sorted(chosen, key=lambda s: (s[0], s[1]))) if len(chosen) > 1 else ()


def trials_left(space: Space, trials: Iterable[Trial], settings: int) -> int:
    """Trials to come when so many settings are left: they, the baseline in between, what seems best again, and the baseline at the end."""
    known = list(trials)
    since, due = since_baseline(known), to_confirm(space, known) is not None
    if not settings and not since and not due:
        return 0
    others = settings - (not baselines(known))
    between = max(0, since + others - 1) // space.baseline_every if space.baseline_every else 0
    return settings + between + 1 + due


def time_left(trials: Iterable[Trial], to_come: int, spent_s: float = 0.0) -> float | None:
    """Seconds for so many trials at the mean of those that were started; spent_s: of the first of them already. None: not known, or
    that one takes longer than the mean and is the last."""
    took = [t.took_s for t in trials if t.took_s is not None and t.job_id]
    if not took:
        return None
    each = sum(took) / len(took)
    if spent_s >= each and to_come <= 1:
        return None
    return max(0.0, each - spent_s) + each * max(0, to_come - 1)
