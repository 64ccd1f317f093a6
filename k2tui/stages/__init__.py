"""One file a stage of the pipeline. The folder is the registry: `stages/x.py` exports STAGE, a `Stage`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from k2tui.errors import UsageError


@dataclass(frozen=True)
class StagePlan:
    """What a stage would run: argv without a shell, and the job's facts."""

    title: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    kind: str = "task"  # "server" runs until stopped
    locks: tuple[str, ...] = ()
    params: Mapping[str, Any] | None = None
    timeout_s: float | None = None
    grace_s: float = 15.0


@dataclass(frozen=True)
class Stage:
    """name: verb of the CLI and key of the board. order: place in the pipeline. key: the dashboard's key ("" = none).

    plan(config, params) -> StagePlan. unavailable(config) -> why it cannot run yet, "" when it can.
    """

    name: str
    title: str
    help: str
    order: int
    plan: Callable[[Any, Mapping[str, Any]], StagePlan]
    key: str = ""
    fields: tuple[tuple[str, str, str], ...] = ()  # the dashboard's form: (parameter, first value, hint)
    resumes: str = ""  # what a job that runs again finds and goes on after ("rows"); "" = it begins from nothing
    fresh: tuple[str, ...] = ()  # words of its command that throw that away: a retry leaves them out
    unavailable: Callable[[Any], str] = lambda config: ""


def names() -> list[str]:
    """Every stage's name, in the pipeline's order."""
    found = [m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")]
    return sorted(found, key=lambda n: (get(n).order, n))


def get(name: str) -> Stage:
    """The stage of that name. Raises UsageError naming the known ones."""
    found = sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))
    if name not in found:
        raise UsageError(f"unknown stage {name!r}", f"known stages: {', '.join(found)}")
    stage: Stage = importlib.import_module(f"{__name__}.{name}").STAGE
    return stage
