"""What the whole-story tests share: after each, every process that carries its state folder is ended."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest


@pytest.fixture
def still_there(own_home: Path) -> Callable[[], list[psutil.Process]]:
    """Asks for the living processes that carry this test's state folder in their environment."""

    def look() -> list[psutil.Process]:
        found: list[psutil.Process] = []
        for proc in psutil.process_iter():
            try:
                is_ours = proc.pid != os.getpid() and proc.environ().get("K2TUI_HOME") == str(own_home)
                if is_ours and proc.status() != psutil.STATUS_ZOMBIE:
                    found.append(proc)
            except psutil.Error:
                continue
        return found

    return look


@pytest.fixture(autouse=True)
def nothing_left(still_there: Callable[[], list[psutil.Process]]) -> Iterator[None]:
    """Whatever a failing test leaves behind is ended: exactly the processes that carry its state folder."""
    yield
    for proc in still_there():
        with contextlib.suppress(psutil.Error):
            proc.kill()
