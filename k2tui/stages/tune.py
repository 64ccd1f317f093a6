"""Tune: trial after trial over flags, environment and draft settings, as a job. Starts nothing itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k2tui.errors import UsageError
from k2tui.paths import own_module
from k2tui.stages import Stage, StagePlan
from k2tui.tune.folder import read_space, space_path


def _plan(config: Any, params: Mapping[str, Any]) -> StagePlan:
    """params: folder (a run that is there, to go on with) or space (a file, for a new run); config (a file, optional); anyway
    (do not wait for the end of other loads)."""
    folder, space = str(params.get("folder") or ""), str(params.get("space") or "")
    if not folder and not space:
        raise UsageError(
            "tune needs a space file", "docs/tune.md shows one; `k2tui tune run SPACE.toml` does the same"
        )
    argv = own_module("k2tui.tune")
    if folder:
        argv.append(folder)
        name = folder.rsplit("/", 1)[-1]
    else:
        path = space_path(space)
        read_space(path)  # said now, not in a log
        argv += ["--space", str(path)]
        name = path.stem
    if params.get("anyway"):
        argv.append("--anyway")
    if params.get("config"):
        argv += ["--config", str(params["config"])]
    return StagePlan(
        title=f"tune {name}",
        argv=tuple(argv),
        env={},
        params=dict(params),
        grace_s=200.0,
        locks=(f"tune:{name}",),
    )


STAGE = Stage(
    name="tune",
    title="Tune",
    help="find the fastest settings: trial after trial over flags, environment and draft settings",
    order=90,
    plan=_plan,
    key="U",
    fields=(
        (
            "space",
            "asset:tune-tiny",
            "TOML file of yours: the profile and what to vary (docs/tune.md); asset:tune-tiny tries the embedded engine",
        ),
    ),
    resumes="trials that are done",
)
