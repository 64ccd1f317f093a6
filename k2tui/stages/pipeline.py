"""Pipeline: the whole chain from a served model to a measured draft, as one job that starts the others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from k2tui.errors import UsageError
from k2tui.paths import own_module
from k2tui.stages import Stage, StagePlan

_OWN = ("file", "to", "start", "only", "set", "force", "keep_servers", "name")


def _list(value: Any) -> list[str]:
    return [str(v) for v in value] if isinstance(value, list | tuple) else [str(value)] if value else []  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def _plan(config: Any, params: Mapping[str, Any]) -> StagePlan:
    """params: file (a pipeline's TOML, "asset:demo", "" = the one of this folder, else the shipped one), to and start (steps), only
    and set (lists, or one text), force, keep_servers, name (the pipeline's own)."""
    unknown = sorted(set(params) - set(_OWN))
    if unknown:
        raise UsageError(f"pipeline: unknown parameter {unknown[0]!r}", "known: " + ", ".join(_OWN))
    file = str(params.get("file") or "")
    if not file and os.path.exists("pipeline.toml"):
        file = "pipeline.toml"
    if file and not file.startswith("asset:"):
        file = os.path.abspath(os.path.expanduser(file))
    argv = [*own_module("k2tui"), "pipeline", "run", "--here"]
    argv += ["--file", file] if file else []
    argv += ["--from", str(params["start"])] if params.get("start") else []
    argv += ["--to", str(params["to"])] if params.get("to") else []
    for key in ("only", "set"):
        for value in _list(params.get(key)):
            argv += [f"--{key}", value]
    argv += ["--force"] if params.get("force") else []
    argv += ["--keep-servers"] if params.get("keep_servers") else []
    name = str(
        params.get("name") or file.removeprefix("asset:").rpartition("/")[2].removesuffix(".toml") or "eagle3"
    )
    return StagePlan(
        title=f"pipeline {name}" + (f" up to {params['to']}" if params.get("to") else ""),
        argv=tuple(argv),
        env={},
        params={k: v for k, v in params.items() if v not in (None, "")} | {"file": file},
        locks=(f"pipeline:{name}",),
        grace_s=240.0,  # the step in work may want its own grace, then its servers are stopped to their end
    )


STAGE = Stage(
    name="pipeline",
    title="Run the pipeline",
    help="every step from the served model to the measured draft; what is valid already is skipped",
    order=90,
    fields=(
        ("to", "", "run up to this step; empty = all of it"),
        ("start", "", "run this step and all after it, valid or not"),
        ("file", "", "pipeline.toml; empty = the one of this folder, else the shipped one"),
    ),
    plan=_plan,
    key="A",
)
