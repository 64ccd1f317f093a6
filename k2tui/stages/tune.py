"""Tune: trial after trial over flags, environment and draft settings, as a job. Starts nothing itself."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from k2tui.errors import UsageError
from k2tui.stages import Stage, StagePlan


def _plan(config: Any, params: Mapping[str, Any]) -> StagePlan:
    folder = str(params.get("folder") or "")
    if not folder:
        raise UsageError("tune needs the folder of a tuning run", "start it by: k2tui tune run SPACE.toml")
    argv = [sys.executable, "-m", "k2tui.tune", folder]
    if params.get("config"):
        argv += ["--config", str(params["config"])]
    return StagePlan(title=f"tune {folder.rsplit('/', 1)[-1]}", argv=tuple(argv), env={}, params=dict(params), grace_s=200.0)


STAGE = Stage(
    name="tune",
    title="Tune",
    help="find the fastest settings: k2tui tune run SPACE.toml",
    order=90,
    plan=_plan,
    unavailable=lambda config: "start it by `k2tui tune run SPACE.toml` (docs/tune.md); its table shows here",
)
