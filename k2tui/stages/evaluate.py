"""Evaluate: a draft judged on held-out states, or on the running server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k2tui.errors import UsageError
from k2tui.paths import own_module
from k2tui.stages import COUNT, Span, Stage, StagePlan, check_numbers

_FLAGS = (
    "draft", "target", "states", "limit", "ttt_length", "num_steps", "chains", "max_tokens", "device", "accept", "url", "baseline_url", "prompts",
    "max_new_tokens", "temperature", "concurrency",
)  # fmt: skip

NUMBERS = {
    "limit": Span(0), "ttt_length": COUNT, "num_steps": COUNT, "chains": Span(0), "max_tokens": COUNT, "max_new_tokens": COUNT,
    "temperature": Span(0, whole=False), "concurrency": COUNT,
}  # fmt: skip


def _plan(config: Any, params: Mapping[str, Any]) -> StagePlan:
    """params: draft and states (offline), or prompts (online; url defaults to the profile's server), and the verb's flags."""
    unknown = sorted(set(params) - {*_FLAGS, "profile", "json"})
    if unknown:
        raise UsageError(
            f"evaluate: unknown parameter {unknown[0]!r}", "known: " + ", ".join((*_FLAGS, "profile"))
        )
    check_numbers("evaluate", params, NUMBERS)
    values = {k: v for k, v in params.items() if k in _FLAGS and v not in (None, "")}
    profile = config.get_profile(str(params.get("profile") or ""))
    if "prompts" in values or "url" in values:
        values.setdefault("url", profile.url)
        if "prompts" not in values:
            raise UsageError(
                "evaluate needs prompts beside url", "prompts = a JSONL file; tokenized_data.jsonl fits"
            )
        title = f"evaluate {values['url']}"
    else:
        for key in ("draft", "states"):
            if key not in values:
                raise UsageError(
                    f"evaluate needs {key}", "draft and states (offline), or prompts (on the running server)"
                )
        values.setdefault("target", profile.model)
        title = f"evaluate {values['draft']}"
    argv = [
        *own_module("k2tui.eagle3.score"),
        *(f"--{k.replace('_', '-')}={v}" for k, v in values.items()),
    ]
    argv += ["--json"] if params.get("json") else []
    return StagePlan(
        title=title, argv=tuple(argv), env={}, params={k: v for k, v in params.items() if v is not None}
    )


STAGE = Stage(
    name="evaluate",
    title="Evaluate the draft",
    help="expected accept length on held-out states, or accept length and speed on the running server",
    order=60,
    fields=(
        ("draft", "", "folder of the draft"),
        ("target", "", "folder of the target model; empty = the profile's"),
        ("states", "states", "held-out states"),
    ),
    plan=_plan,
    key="",
)
