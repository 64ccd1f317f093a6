"""One file a server. The folder is the registry: `engines/x.py` exports ENGINE, an `Engine`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from k2tui.errors import UsageError


@dataclass(frozen=True)
class LaunchPlan:
    """What to run: argv without a shell, extra environment, where it will answer."""

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    host: str = "127.0.0.1"
    port: int = 30000


@dataclass(frozen=True)
class Engine:
    """name: as in profiles. launch(profile) -> LaunchPlan, profile being a `k2tui.config.Profile`.

    ready_line: text whose appearance in the log is necessary (not sufficient) for readiness.
    """

    name: str
    title: str
    launch: Callable[[Any], LaunchPlan]
    ready_line: str
    model_info_path: str = "/model_info"
    process_titles: tuple[str, ...] = ()  # prefixes of its processes' titles, e.g. "sglang::"


def no_nodes(profile: Any) -> None:
    """Raises UsageError for a profile that wants several machines of an engine that k2tui starts on one only."""
    if profile.nodes or profile.node_rank:
        raise UsageError(
            f"profile {profile.name!r}: engine {profile.engine!r} runs on one machine here",
            "`nodes` is for engine sglang",
        )


def names() -> list[str]:
    """Every engine's name, sorted."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))


def get(name: str) -> Engine:
    """The engine of that name. Raises UsageError naming the known ones."""
    if name not in names():
        raise UsageError(f"unknown engine {name!r}", f"known engines: {', '.join(names())}")
    engine: Engine = importlib.import_module(f"{__name__}.{name}").ENGINE
    return engine
