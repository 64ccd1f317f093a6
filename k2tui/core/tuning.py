"""A tuning run: its space (read from TOML), what a setting changes of a profile, its trials (read from and written as JSON). Pure.

Beside it: tuning_plan (which trial next), tuning_verdict (what trials say), tuning_text (how it is told).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from k2tui.core.job_mask import mask_argv, mask_env
from k2tui.core.job_text import plain
from k2tui.core.stats import Estimate, mean, mean_interval
from k2tui.errors import UsageError

METRICS = {
    "tok_s_user": True,
    "output_throughput": True,
    "accept_length": True,
    "ttft_p50_ms": False,
    "tpot_p50_ms": False,
}
"""Metric -> whether more is better."""
METHODS = ("search", "matrix")
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


def label_of(setting: Setting, is_again: bool) -> str:
    """A start of a setting for people: its first by the setting's words, a later one marked so."""
    return words(setting) + (" (again)" if is_again else "")


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
    usual = {
        "method": defaults.method,
        "metric": "tok_s_user" if values["concurrency"] == 1 else "output_throughput",
    }
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


def current_value(profile: Any, knob: Knob) -> Value:
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


def is_same(a: Value, b: Value) -> bool:
    off = (False, "")
    return (a in off and b in off) or (str(a) == str(b) and (a is True) == (b is True))


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
