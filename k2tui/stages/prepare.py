"""Prepare: prompts become tokenized_data.jsonl by inference on the running server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k2tui.errors import UsageError
from k2tui.paths import own_module
from k2tui.stages import COUNT, Span, Stage, StagePlan, check_numbers

_FLAGS = (
    "url", "count", "per_source", "temperature", "top_p", "top_k", "max_new_tokens", "seed", "max_seq_len", "min_response",
    "repetition", "verify_every", "concurrency", "give_up_s",
)  # fmt: skip
_NUMBERS = {
    "count": COUNT, "per_source": COUNT, "temperature": Span(0, whole=False), "top_p": Span(0, 1, whole=False), "top_k": Span(-1),
    "max_new_tokens": COUNT, "seed": Span(), "max_seq_len": COUNT, "min_response": Span(0), "repetition": Span(0, whole=False),
    "verify_every": Span(0), "concurrency": COUNT, "give_up_s": Span(0, whole=False),
}  # fmt: skip
_SWITCHES = ("balance", "first_turn", "keep_truncated", "keep_refusals", "no_thinking")


def _plan(config: Any, params: Mapping[str, Any]) -> StagePlan:
    """params: prompts (a path or a list), out (both needed), and the verb's flags."""
    for key in ("prompts", "out"):
        if not params.get(key):
            raise UsageError(f"prepare needs {key}", "prompts = a file or folder of prompts, out = tokenized_data.jsonl")
    check_numbers("prepare", params, _NUMBERS)
    prompts = params["prompts"]
    argv = [*own_module("k2tui"), "prepare", "--out", str(params["out"])]
    for path in [prompts] if isinstance(prompts, str) else prompts:
        argv += ["--prompts", str(path)]
    for key in _FLAGS:
        if params.get(key) not in (None, ""):
            argv += [f"--{key.replace('_', '-')}", str(params[key])]
    argv += [f"--{key.replace('_', '-')}" for key in _SWITCHES if params.get(key)]
    return StagePlan(
        title=f"prepare {params['out']}",
        argv=tuple(argv),
        env={},
        params={k: v for k, v in params.items() if v is not None},
        grace_s=30.0,
    )


STAGE = Stage(
    name="prepare",
    title="Prepare the data",
    help="make tokenized_data.jsonl from prompts, answered by the running server; adds to what is there",
    order=30,
    fields=(("prompts", "", "a JSONL file or a folder of prompts"), ("out", "tokenized_data.jsonl", "rows are added to what is there")),
    plan=_plan,
    key="p",
    resumes="rows that are in its file",
)
