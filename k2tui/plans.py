"""Which plan file the board mirrors. The stages are imported only to make a plan where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from k2tui import paths
from k2tui.sources.plan import PlanFile

if TYPE_CHECKING:
    from k2tui.config import Config


def open_plan(config: Config, *, is_demo: bool = False) -> PlanFile:
    """The configured file, else one in the state folder, made from the pipeline's stages (in the demo: from its pipeline's steps)."""
    if config.plan:
        return plan_at(config.plan)
    made = _steps_of_the_demo if is_demo else _stages
    return PlanFile(paths.state_dir() / "plan.json", default_text=made, times=_times())


def plan_at(path: str) -> PlanFile:
    """A plan file of the user's own; it has to be there."""
    return PlanFile(Path(path).expanduser(), times=_times())


def _times() -> Path:
    return paths.state_dir() / "plan-times.json"


def _stages() -> str:
    from k2tui import stages
    from k2tui.core.board_plan import default_plan

    found = [stages.get(name) for name in stages.names()]
    return default_plan([(s.name, s.title) for s in found if s.name != "pipeline"])


def _steps_of_the_demo() -> str:
    from k2tui.core.board_plan import default_plan
    from k2tui.jobs.chain import load_chain

    chain = load_chain("asset:demo")
    steps = [(s.name, s.title or s.name) for s in chain.steps]
    return default_plan(steps, {s.name: s.needs for s in chain.steps}, chain=chain.name)
