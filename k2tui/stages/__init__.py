"""One file a stage of the pipeline. The folder is the registry: `stages/x.py` exports STAGE, a `Stage`."""

from __future__ import annotations

import importlib
import math
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


@dataclass(frozen=True)
class Span:
    """What a parameter that is a number may be; both ends are allowed."""

    least: float | None = None
    most: float | None = None
    whole: bool = True

    @property
    def words(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        if self.least is not None and self.most is not None:
            return f"{kind} from {self.least:g} to {self.most:g}"
        return kind if self.least is None else f"{kind} of at least {self.least:g}"


PORT = Span(1, 65535)
COUNT = Span(1)


def check_numbers(stage: str, params: Mapping[str, Any], spans: Mapping[str, Span]) -> dict[str, int | float]:
    """The numbers among params, read from the texts of a form too. Raises UsageError naming stage ("" = none) and parameter.

    What is empty, or a {hole} that a pipeline fills later, is left out.
    """
    out: dict[str, int | float] = {}
    for name, span in spans.items():
        value = params.get(name)
        if value is None or value == "" or (isinstance(value, str) and "{" in value):
            continue
        try:
            if isinstance(value, bool):
                raise ValueError
            number = int(str(value)) if span.whole else float(str(value))
            is_in = math.isfinite(number)  # a number of hundreds of digits is an OverflowError
        except (ValueError, OverflowError):
            number, is_in = 0, False
        if (span.least is not None and number < span.least) or (span.most is not None and number > span.most):
            is_in = False
        if not is_in:
            raise UsageError(f"{stage and stage + ': '}{name} must be {span.words}, not {str(value)[:40]!r}")
        out[name] = number
    return out
