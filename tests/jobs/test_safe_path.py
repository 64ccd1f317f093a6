"""What k2tui starts of its own does not import modules that lie in the user's working folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from k2tui import config, paths, stages
from k2tui.nodes import remote_argv

SAFE = [sys.executable, "-P", "-m"]
PARAMS: dict[str, dict[str, object]] = {
    "serve": {"profile": "tiny"},
    "bench": {},
    "prepare": {"prompts": "p", "out": "o"},
    "extract": {"data": "d", "out": "o", "profile": "tiny"},
    "train": {"states": "s", "out": "o", "target": "t"},
    "evaluate": {"draft": "d", "states": "s"},
    "tune": {"folder": "f"},
    "pipeline": {},
}


@pytest.mark.parametrize("name", PARAMS)
def test_a_stage_starts_its_module_without_the_working_folder(name: str) -> None:
    plan = stages.get(name).plan(config.load(None), PARAMS[name])
    assert list(plan.argv[:3]) == SAFE and plan.argv[3].partition(".")[0] == "k2tui"


def test_the_embedded_engine_starts_where_a_file_shadows_the_library(tmp_path: Path) -> None:
    for name in ("random", "h2", "json", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('shadow')\n")
    plan = stages.get("serve").plan(config.load(None), {"profile": "tiny"})
    done = subprocess.run([*plan.argv[:4], "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--model-path" in done.stdout, done.stderr


def test_a_pipeline_s_own_commands_and_other_machines_too() -> None:
    own = [sys.executable, "-m", "k2tui.jobs.losses", "x"]
    assert paths.safely(own) == [*SAFE, *own[2:]]
    for other in ([sys.executable, "-m", "pytest"], ["/p", "-m", "k2tui"], [sys.executable, "x.py"], [sys.executable, "-m"], []):
        assert paths.safely(other) == other
    assert "/p -P -m k2tui.nodes check" in remote_argv("host", "/p", "check")[-1]
