"""The tuner's reasoning: a space of settings, which trial comes next, which trial won. Pure; it starts and measures nothing.

Search ("one at a time"): the profile as it is; each knob's other values, one at a time; then what helped, together; and the baseline
again in between, so that drift of the machine shows. "matrix": every combination. At the end what seems best is started again, and the
baseline beside it: a start has luck of its own, which no number of passes shows.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from k2tui.core.job_mask import mask_argv, mask_env
from k2tui.core.job_text import plain
from k2tui.core.stats import Estimate, Verdict, mean, mean_interval, ratio_of_means, t95, verdict
from k2tui.errors import UsageError

METRICS = {
    "tok_s_user": True,
    "output_throughput": True,
    "accept_length": True,
    "ttft_p50_ms": False,
    "tpot_p50_ms": False,
}
"""Metric -> whether more is better."""
TIMED = ("tok_s_user", "output_throughput", "tpot_p50_ms")
"""Metrics that a pass's length follows: only with these can a pass be too long to be of use."""
PASS_GRACE_S = 3.0
"""A pass is never called too long before it is this much longer than the baseline's: a hiccup is no verdict."""
METHODS = ("search", "matrix")
CANDIDATES = 3
"""So many settings, best first, are started again until one is confirmed."""
Value = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Knob:
    """One thing to vary: kind "flag" (an argument of the engine), "env" or "key" (a key of the profile). "" or false = leave it out."""

    kind: str
    name: str
    values: tuple[Value, ...]

    @property
    def label(self) -> str:
        return self.name.lstrip("-")


@dataclass(frozen=True, slots=True)
class Space:
    profile: str
    knobs: tuple[Knob, ...]
    method: str = "search"
    metric: str = "tok_s_user"
    repeats: int = 3  # passes of a benchmark, at least
    max_repeats: int = 9  # and at most, where the interval is too wide to tell min_effect
    min_effect: float = 0.03  # the smallest difference that is to be told, as a fraction
    give_up_below: float = (
        0.7  # a trial that is worse than this fraction of the baseline ends early; 0 = never
    )
    concurrency: int = 1
    num_prompts: int = 8
    random_input_len: int = 512
    random_output_len: int = 128
    seed: int = 1
    ready_timeout_s: float = 1800.0
    bench_timeout_s: float = 1800.0
    baseline_every: int = (
        8  # the baseline is measured again after so many trials, and at the end; 0 = only at the end
    )
    confirm: int = 3  # so often, at most, what seems best is started again, until it is told from the baseline; 0 = never
    name: str = ""


Setting = tuple[tuple[str, str, Value], ...]
"""What a trial changes against the profile: (kind, name, value), sorted; () = nothing."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One measured (or failed) setting. values: the metric, one for each whole pass. state: ok | slower (ended early as hopeless;
    values may be empty) | failed | stalled | refused | skipped (it would have measured the same command once more)."""

    setting: Setting
    state: str = "ok"
    values: tuple[float, ...] = ()
    cause: str = ""  # why it failed or ended early, in words
    ready_s: float | None = None
    stop_s: float | None = None
    accept_length: float | None = None
    figures: Mapping[str, float] = field(default_factory=dict[str, float])
    is_again: bool = False  # a setting (the baseline, or what seems best), started and measured again
    job_id: str = ""
    at_s: float = 0.0
    held_b: int = 0  # GPU memory that was still held after the stop
    again_no: int = 0  # which of this setting's later starts
    pass_s: float | None = None  # the longest whole pass, without its warm-up
    took_s: float | None = None  # the whole trial, from its check to the end of its stop

    @property
    def key(self) -> str:
        return key_of(self.setting) + (f"#again{self.again_no or ''}" if self.is_again else "")

    @property
    def estimate(self) -> Estimate | None:
        return mean_interval(self.values) if self.values else None

    @property
    def mean(self) -> float:
        """Of its passes; 0 without any."""
        return mean(self.values) if self.values else 0.0


def key_of(setting: Setting) -> str:
    return hashlib.sha256(json.dumps(setting).encode()).hexdigest()[:12]


def words(setting: Setting) -> str:
    """A setting for people, on one line without control characters: "attention-backend=triton, NCCL_PROTO=LL"; "as the profile" for none."""
    parts: list[str] = []
    for _, name, value in setting:
        shown = name.lstrip("-")
        parts.append(
            shown if value is True else f"no {shown}" if value is False or value == "" else f"{shown}={value}"
        )
    return " ".join(plain(", ".join(parts)).split()) or "as the profile"


# ---- the space


def parse_space(raw: Mapping[str, Any], where: str, line_of: Mapping[str, int] | None = None) -> Space:
    """A TOML table -> Space. Raises UsageError naming the file, the line (when known) and the key."""
    lines = line_of or {}

    def bad(key: str, message: str, hint: str = "") -> UsageError:
        at = f":{lines[key]}" if lines.get(key) else ""
        return UsageError(f"{where}{at}: {key}: {message}", hint)

    defaults = Space(profile="", knobs=())
    known = {"profile", "knob", "method", "metric", "repeats", "max_repeats", "min_effect", "give_up_below", "concurrency", "num_prompts", "random_input_len", "random_output_len", "seed",
             "ready_timeout_s", "bench_timeout_s", "baseline_every", "confirm", "name"}  # fmt: skip
    for key in raw:
        if key not in known:
            import difflib

            near = difflib.get_close_matches(key, known, n=1)
            raise bad(
                key,
                "unknown key" + (f"; did you mean {near[0]!r}?" if near else ""),
                "known: " + ", ".join(sorted(known)),
            )
    profile = raw.get("profile")
    if not isinstance(profile, str) or not profile:
        raise bad("profile", "the profile to start from is missing", 'profile = "NAME"')
    values: dict[str, Any] = {}
    for key in (
        "repeats", "concurrency", "num_prompts", "random_input_len", "random_output_len", "seed", "baseline_every", "confirm",
    ):  # fmt: skip
        value = raw.get(key, getattr(defaults, key))
        least = 0 if key in ("seed", "baseline_every", "confirm") else 1
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise bad(key, f"must be a whole number of at least {least}, not {value!r}")
        values[key] = value
    most = raw.get("max_repeats", max(defaults.max_repeats, values["repeats"]))
    if not isinstance(most, int) or isinstance(most, bool) or most < values["repeats"]:
        raise bad(
            "max_repeats", f"must be a whole number of at least repeats ({values['repeats']}), not {most!r}"
        )
    values["max_repeats"] = most
    for key, least_text in (("min_effect", "above 0"), ("give_up_below", "0 (never) or more")):
        value = raw.get(key, getattr(defaults, key))
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not (0 < value < 1 or (value == 0 and key == "give_up_below")):
            raise bad(key, f"must be a fraction, {least_text} and below 1, not {value!r}")
        values[key] = float(value)
    for key in ("ready_timeout_s", "bench_timeout_s"):
        value = raw.get(key, getattr(defaults, key))
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
            raise bad(key, f"must be a number of seconds, not {value!r}")
        values[key] = float(value)
    # one user: what that one gets; several: what all get together, since more at a time is slower for each
    usual = {"method": defaults.method, "metric": "tok_s_user" if values["concurrency"] == 1 else "output_throughput"}
    for key, choices in (("method", METHODS), ("metric", tuple(METRICS))):
        value = raw.get(key, usual[key])
        if value not in choices:
            raise bad(key, f"{value!r} is none of {', '.join(choices)}")
        values[key] = value
    knobs: list[Knob] = []
    raw_knobs = raw.get("knob")
    if not isinstance(raw_knobs, list) or not raw_knobs:
        raise bad(
            "knob",
            "there is nothing to vary",
            '[[knob]] flag = "--attention-backend", values = ["triton", "flashinfer"]',
        )
    for number, entry in enumerate(cast("list[object]", raw_knobs), 1):
        if not isinstance(entry, dict):
            raise bad("knob", f"number {number} is no table")
        table = cast("dict[str, Any]", entry)
        kinds = [k for k in ("flag", "env", "key") if k in table]
        extra = sorted(set(table) - {"flag", "env", "key", "values"})
        if len(kinds) != 1 or extra:
            raise bad(
                "knob",
                f"number {number} needs exactly one of flag, env, key, and values"
                + (f" (unknown: {extra[0]})" if extra else ""),
            )
        options = table.get("values")
        if not isinstance(options, list) or not options:
            raise bad("knob", f"number {number} ({table[kinds[0]]}) has no values")
        for value in cast("list[object]", options):
            if not isinstance(value, str | int | float):
                raise bad(
                    "knob",
                    f"number {number} ({table[kinds[0]]}): {value!r} is no text, number, true or false",
                )
        if kinds[0] == "flag" and not str(table["flag"]).startswith("--"):
            raise bad("knob", f"number {number}: a flag begins with --, not {table['flag']!r}")
        name, texts = str(table[kinds[0]]), [v for v in cast("list[Value]", options) if isinstance(v, str)]
        if any(_is_secret(kinds[0], name, text) for text in texts):
            raise bad(
                "knob",
                f"number {number} ({name}) has secrets as values: a knob's values are shown and stored",
                "set it in the profile: there it is masked",
            )
        knobs.append(Knob(kinds[0], str(table[kinds[0]]), tuple(cast("list[Value]", options))))
    return Space(profile=profile, knobs=tuple(knobs), name=str(raw.get("name") or ""), **values)


def _is_secret(kind: str, name: str, value: str) -> bool:
    try:
        float(value)
        return False
    except ValueError:
        return (
            mask_env({name: value})[name] != value if kind == "env" else mask_argv((name, value))[1] != value
        )


def apply(profile: Any, setting: Setting) -> dict[str, Any]:
    """The changes to a profile (args, env, keys) that a setting means. Raises UsageError for a key that profiles lack."""
    args, env = list(profile.args), dict(profile.env)
    keys: dict[str, Any] = {}
    for kind, name, value in setting:
        if kind == "flag":
            args = _without(args, name)
            if value is True:
                args.append(name)
            elif value is not False and value != "":
                args += [name, str(value)]
        elif kind == "env":
            env.pop(name, None)
            if value is not False and value != "":
                env[name] = "1" if value is True else str(value)
        else:
            if name not in getattr(profile, "__dataclass_fields__", {}):
                raise UsageError(
                    f"profiles have no key {name!r}",
                    "knob key = one of a profile's keys, for example speculative_num_steps",
                )
            want = getattr(profile, name)
            if isinstance(want, bool) != isinstance(value, bool) or not isinstance(value, type(want)):
                raise UsageError(
                    f"knob {name}: {value!r} is not of the kind of {want!r}, the profile's value"
                )
            keys[name] = value
    return {"args": tuple(args), "env": env, **keys}


def _without(args: Sequence[str], flag: str) -> list[str]:
    out: list[str] = []
    skip = False
    for i, word in enumerate(args):
        if skip:
            skip = False
            continue
        if word == flag:
            skip = i + 1 < len(args) and not args[i + 1].startswith("--")
            continue
        if not word.startswith(flag + "="):
            out.append(word)
    return out


def _current(profile: Any, knob: Knob) -> Value:
    """The knob's value in the profile as it is; False/"" when it is not set there."""
    if knob.kind == "env":
        return str(profile.env.get(knob.name, ""))
    if knob.kind == "key":
        return cast("Value", getattr(profile, knob.name, ""))
    for i, word in enumerate(profile.args):
        if word == knob.name:
            following = profile.args[i + 1] if i + 1 < len(profile.args) else ""
            return True if not following or following.startswith("--") else str(following)
        if word.startswith(knob.name + "="):
            return str(word[len(knob.name) + 1 :])
    return False


def _same(a: Value, b: Value) -> bool:
    off = (False, "")
    return (a in off and b in off) or (str(a) == str(b) and (a is True) == (b is True))


# ---- which trial next


def planned(space: Space, profile: Any, done: Mapping[str, Trial]) -> list[Setting]:
    """Settings still to be measured, in order, as far as they are known now; the search's last step waits for results. No control."""
    if space.method == "matrix":
        every: list[Setting] = []
        for values in itertools.product(*(k.values for k in space.knobs)):
            changed = [
                (k.kind, k.name, v)
                for k, v in zip(space.knobs, values, strict=True)
                if not _same(v, _current(profile, k))
            ]
            every.append(tuple(sorted(changed, key=lambda s: (s[0], s[1]))))
        first: list[Setting] = [()]
        return [s for s in dict.fromkeys(first + every) if key_of(s) not in done]
    singles: list[Setting] = [()]
    for knob in space.knobs:
        singles += [
            ((knob.kind, knob.name, v),) for v in knob.values if not _same(v, _current(profile, knob))
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


def compare(base: Trial, trial: Trial, space: Space, noise: float = 0.0) -> Verdict:
    """faster | same | slower | unclear against the baseline. same: nothing of min_effect's size can hide in the interval, nor in the noise
    (how far the baseline itself moved); unclear: it can."""
    if trial.state == "slower":
        return Verdict.SLOWER
    if base.estimate is None or trial.estimate is None or base.estimate.value <= 0:
        return Verdict.NOT_COMPARABLE
    ratio = ratio_of_means(base.estimate, trial.estimate)
    said = verdict(ratio, higher_is_better=METRICS[space.metric], noise=noise, effect=space.min_effect)
    if said is Verdict.SAME and ratio.half_width is not None and max(ratio.half_width, noise) > space.min_effect:
        return Verdict.UNCLEAR
    return said


# ---- how long to measure a trial


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
    base = next((t for t in baselines(trials) if not t.is_again), None)
    return base is None or trial.setting == () or compare(base, trial, space) is not Verdict.SLOWER


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
    again = [t for t in trials if t.setting == setting and t.is_again and t.state != "refused"]  # refused: nothing was tried
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


def gain_text(space: Space, trials: Sequence[Trial], setting: Setting) -> str:
    """How the later starts of a setting compare: "confirmed by 2 more starts: +14.9 % (95 % +12.8 to +17.0 %)"; "" while it was started once."""
    ratio = gain(space, trials, setting)
    if ratio is None:
        return ""
    confirmed = is_confirmed(space, trials, setting)
    said = "confirmed by" if confirmed else "not confirmed by" if confirmed is False else "so far"
    span = "" if ratio.lo is None or ratio.hi is None else f" (95 % {100 * (ratio.lo - 1):+.1f} to {100 * (ratio.hi - 1):+.1f} %)"
    return f"{said} {ratio.n} more start{'s' if ratio.n > 1 else ''}: {100 * (ratio.value - 1):+.1f} %{span}"


def trial_to_json(trial: Trial) -> dict[str, Any]:
    return {
        "setting": [list(s) for s in trial.setting], "state": trial.state, "values": list(trial.values), "cause": trial.cause, "ready_s": trial.ready_s,
        "stop_s": trial.stop_s, "accept_length": trial.accept_length, "figures": dict(trial.figures), "is_again": trial.is_again,
        "job_id": trial.job_id, "at_s": trial.at_s, "held_b": trial.held_b, "again_no": trial.again_no,
        "pass_s": trial.pass_s, "took_s": trial.took_s,
    }  # fmt: skip


def trial_from_json(raw: Mapping[str, Any]) -> Trial:
    """Inverse of trial_to_json; fields of a later version are left alone. Raises ValueError, KeyError or TypeError for what no tuner wrote:
    figures beyond all measure, texts that are no Unicode."""
    trial = Trial(
        setting=tuple((str(k), str(n), cast("Value", v)) for k, n, v in raw["setting"]), state=str(raw.get("state", "ok")),
        values=tuple(_figure(v) for v in raw.get("values") or ()), cause=str(raw.get("cause") or ""), ready_s=_maybe(raw.get("ready_s")),
        stop_s=_maybe(raw.get("stop_s")), accept_length=_maybe(raw.get("accept_length")),
        figures={str(k): _figure(v) for k, v in dict(raw.get("figures") or {}).items()},
        is_again=bool(raw.get("is_again", raw.get("is_control"))), job_id=str(raw.get("job_id") or ""), at_s=_figure(raw.get("at_s") or 0.0),
        held_b=int(_figure(raw.get("held_b") or 0)), again_no=int(_figure(raw.get("again_no", raw.get("control_no")) or 0)),
        pass_s=_maybe(raw.get("pass_s")), took_s=_maybe(raw.get("took_s")),
    )  # fmt: skip
    json.dumps(trial_to_json(trial), ensure_ascii=False, allow_nan=False).encode()
    return trial


def _figure(value: Any) -> float:
    number = float(value)
    if not 1e-12 <= abs(number) <= 1e15 and number != 0:
        raise ValueError(f"{number} is no figure that was measured")
    return number


def _maybe(value: Any) -> float | None:
    return None if value is None else _figure(value)


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
        return words(self.trial.setting) + (" (again)" if self.trial.is_again else "")

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

    def order(trial: Trial) -> tuple[int, float]:
        if trial.estimate is None:
            return (1 if trial.state == "slower" else 2, trial.at_s)
        return (0, -trial.estimate.value if better else trial.estimate.value)

    out: list[Ranked] = []
    for trial in sorted(trials, key=order):
        mark = "base" if trial is base else "best" if trial is best else "again" if trial.is_again else ""
        ratio = said = None
        note = trial.cause if trial.state == "slower" else ""
        if trial.estimate is not None and base is not None and base.estimate is not None and trial is not base:
            ratio = ratio_of_means(base.estimate, trial.estimate)
            said = compare(base, trial, space, noise)
            confirmed = is_confirmed(space, trials, trial.setting)
            if trial.is_again:  # a later start is part of the verdict on its setting, it has none of its own
                said, note = None, f"start {trial.again_no + 2}"
            elif confirmed is not None:
                said, note = (Verdict.FASTER, "confirmed") if confirmed else (Verdict.UNCLEAR, "not confirmed")
            elif said is Verdict.FASTER and space.confirm:
                more = sum(t.is_again and t.mean > 0 for t in trials if t.setting == trial.setting)
                note = f"{more + 1} starts" if more else "one start"
        elif trial.state == "slower":
            said = Verdict.SLOWER
        out.append(Ranked(trial, mark, trial.estimate, ratio, said, note))
    return out


_MARKS = {"best": "★", "base": "●", "again": "○", "": ""}


def table(space: Space, trials: Sequence[Trial]) -> tuple[list[str], list[list[str]]]:
    """(header, rows) for people: best first, then what failed; delta against the baseline with its interval and verdict."""
    rows: list[list[str]] = []
    for r in ranked(space, trials):
        trial, e = r.trial, r.estimate
        if e is None:
            figure = "–" if trial.state == "slower" else trial.state
            rows.append(["", r.label, figure, "", "", "", r.said])
            continue
        delta = change_text(r.ratio) if r.ratio is not None else ""
        accept = f"{trial.accept_length:.2f}" if trial.accept_length else ""
        rows.append(
            [
                _MARKS[r.mark],
                r.label,
                value_text(e),
                delta,
                _s(trial.ready_s),
                accept,
                r.said or "baseline",
            ]
        )
    return ["", "setting", space.metric, "Δ", "ready s", "accept", "verdict / cause"], rows


def short(value: float, digits: int = 4) -> str:
    """A figure with that many significant digits and never an exponent above 1: 348.8, 12345, 0.0123."""
    return f"{value:.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def value_text(e: Estimate, sign: str = "±") -> str:
    """ "90.1 ±1.2": the mean and half of its 95 % interval."""
    return short(e.value) + (f" {sign}{short(e.half_width, 3)}" if e.half_width is not None else "")


def change_text(ratio: Estimate, sign: str = "±") -> str:
    """ "+41.5 ±2.1 %" of a ratio to the baseline; whole per cent from 100 on."""

    def per_cent(value: float, plus: str = "") -> str:
        return f"{100 * value:{plus}.{0 if abs(value) >= 1 else 1}f}"

    half = f" {sign}{per_cent(ratio.half_width)}" if ratio.half_width is not None else ""
    return f"{per_cent(ratio.value - 1, '+')}{half} %"


@dataclass(frozen=True, slots=True)
class TuneStep:
    """What a tuner does now. step: check | start | bench | stop. left: trials known to come after this one. passes: (whole ones,
    planned) of the benchmark. ends_s: when the run will have ended, in Unix seconds, as far as earlier trials tell."""

    setting: Setting
    step: str
    since_s: float
    is_again: bool = False
    server_job: str = ""
    left: int = 0
    passes: tuple[int, int] = (0, 0)
    ends_s: float | None = None


@dataclass(frozen=True, slots=True)
class TuneView:
    """One tuning run as it stands. now: None unless it runs. error: why its files cannot be read, in words."""

    name: str
    space: Space | None = None
    trials: tuple[Trial, ...] = ()
    job_id: str = ""
    now: TuneStep | None = None
    error: str = ""


def _s(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"
