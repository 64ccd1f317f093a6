"""The benchmark stage: which command measures the running server. Starts nothing itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from k2tui.config import Config
from k2tui.errors import UsageError
from k2tui.loadgen import options
from k2tui.paths import own_module
from k2tui.stages import Stage, StagePlan

# stage parameter -> option of the load generator
_OPTIONS = (
    "url", "api", "model", "concurrency", "request_rate", "arrival", "burstiness", "max_concurrency", "num_prompts",
    "max_seconds", "warmup", "flush_cache", "repeats", "stop_ci", "dataset", "random_input_len", "random_output_len",
    "random_range_ratio", "output_len", "prefix_len", "prefix_groups", "zipf", "turns", "think_s", "trace_speed",
    "vocab_size", "seed", "temperature", "extra_body", "no_ignore_eos", "goodput", "label", "tag", "db", "engine",
    "idle_timeout", "usage_each", "sweep", "sweep_rate", "anyway",
)  # fmt: skip


def plan(config: Config, params: Mapping[str, Any]) -> StagePlan:
    """argv of one benchmark. params: any option of `k2tui bench run` with underscores; defaults from [bench].

    Raises UsageError naming the option whose value is wrong.
    """
    unknown = sorted(set(params) - set(_OPTIONS) - {"profile", "gpus"})
    if unknown:
        raise UsageError(f"bench: unknown parameter {unknown[0]!r}", "known: " + ", ".join(_OPTIONS))
    values: dict[str, Any] = {
        "url": "",
        "concurrency": list(config.bench.concurrency),
        "num_prompts": config.bench.num_prompts,
        "random_input_len": config.bench.random_input_len,
        "random_output_len": config.bench.random_output_len,
        "seed": config.bench.seed,
    }
    values |= {k: v for k, v in params.items() if k in _OPTIONS and v is not None}
    if not values["url"]:
        values["url"] = config.get_profile(str(params.get("profile") or "")).url
    words: list[str] = []
    for key, value in values.items():
        words += _flag(key, value)
    options.check(options.parse(words, "k2tui bench run"))  # said now, not in a log
    shown = _words(values.get("request_rate") or values["concurrency"])
    label = str(values.get("label") or "")
    title = f"bench {label} {'rate' if values.get('request_rate') else 'C'}={shown}".replace("  ", " ")
    return StagePlan(title=title, argv=(*own_module("k2tui.loadgen"), *words), env={}, params=values, grace_s=20.0)


def _flag(key: str, value: Any) -> list[str]:
    flag = "--" + key.replace("_", "-")
    if value is None or value == "" or value is False:
        return []
    if value is True:
        return [flag]
    text = _words(value)
    if not text:
        return []
    # one word, so that a value with a leading dash stays a value
    return [f"{flag}={text}"] if text.startswith("-") else [flag, text]


def _words(value: Any) -> str:
    """A list as "1,4,8", anything else as it is."""
    if isinstance(value, list | tuple):
        return ",".join(str(v) for v in cast("Sequence[Any]", value))
    return str(value)


STAGE = Stage(
    name="bench",
    title="Benchmark",
    help="measure the running server: TTFT, ITL, throughput, acceptance",
    order=20,
    plan=plan,
    key="b",
)
