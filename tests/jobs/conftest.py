"""Real jobs in a home of their own; after every test no process of it is left."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from k2tui.core.job import JobSpec
from k2tui.jobs import folder

from .world import processes_of

settings.register_profile("k2tui", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("k2tui")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    root = tmp_path / "home"
    root.mkdir()
    monkeypatch.setenv("K2TUI_HOME", str(root))
    yield root
    until = time.monotonic() + 30
    while (left := processes_of(root)) and time.monotonic() < until:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"processes left over: {left}"


@pytest.fixture
def submit(home: Path) -> Callable[..., str]:
    """submit("python code", stage=..., ...) -> id. The code runs in a fresh interpreter without site (quick)."""

    def go(code: str, **fields: object) -> str:
        spec = JobSpec(
            id="", stage="t", title="", argv=(sys.executable, "-S", "-c", code), cwd=str(home), grace_s=2.0
        )
        return folder.submit(replace(spec, **fields))  # type: ignore[arg-type]

    return go
