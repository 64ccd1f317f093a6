"""What every test shares: its own state folder, and no way to touch the user's."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# a chance find must not decide whether a change may land: CI takes the same examples each time, people get new ones
settings.register_profile("ci", derandomize=True, deadline=None, max_examples=60)
settings.register_profile("new", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "new")

# tests start hundreds of processes: without its bytecode kept each would compile the package anew (0.2 s and more)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# a run in the background begins with SIGINT ignored, and so would all that it starts
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n 2` a file's tests stay in one process (they share servers and ports); files go out in their usual order."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)


@pytest.fixture
def own_port() -> int:
    """A TCP port of this machine that nobody holds now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """K2TUI_HOME in the test's own folder; nothing of the user's config is read."""
    home = tmp_path / "k2home"
    home.mkdir()
    monkeypatch.setenv("K2TUI_HOME", str(home))
    for name in ("K2TUI_CONFIG", "K2TUI_JOB_DIR", "K2TUI_JOB_ID", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    yield home


@pytest.fixture(scope="session")
def sglang_venv() -> Path:
    """An environment with a real SGLang for the CPU, made once by the kit beside the project (about 3 minutes, 1.6 GB)."""
    kit = Path(os.environ.get("K2TUI_SGLANG_KIT", Path(__file__).resolve().parents[2] / "shared" / "sglang-cpu"))
    venv = Path(os.environ.get("K2TUI_SGLANG_VENV", Path.home() / ".cache" / "k2tui-tests" / "sglang-0.5.23"))
    if not (venv / "ready").exists():
        venv.parent.mkdir(parents=True, exist_ok=True)
        made = subprocess.run(["bash", str(kit / "install.sh"), str(venv)], capture_output=True, text=True)
        assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-2000:]
        (venv / "ready").touch()
    return venv
