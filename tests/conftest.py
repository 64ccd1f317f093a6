"""What every test shares: its own state folder, and no way to touch the user's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


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
