"""The backend that comes late: nothing before start, everything after it, and a stop that wins a race with start."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import fake
import pytest

from k2tui import config
from k2tui.core.ports import Backend
from k2tui.errors import NotReadyError
from k2tui.monitor import Monitor
from k2tui.tui.late import late


def test_every_call_of_a_backend_is_the_real_ones_after_start() -> None:
    real = fake.FakeBackend(lambda t: fake.scene("loading", fake.T0, 64.0), time.time)
    backend = late(lambda: real)
    names = [n for n in vars(Backend) if not n.startswith("_")]
    assert len(names) > 15
    assert not backend.snapshot().servers and not backend.snapshot().is_whole
    with pytest.raises(NotReadyError):
        backend.set_task("1", status="completed")
    with pytest.raises(NotReadyError):
        backend.delete_run("x")
    backend.watch_host_processes(False)
    backend.start(lambda: None)
    for name in set(names) - {"start", "stop", "snapshot"}:
        assert getattr(backend, name) == getattr(real, name), name
    assert backend.snapshot().servers
    backend.stop()


def test_stopped_before_it_has_started() -> None:
    real = fake.FakeBackend(lambda t: fake.scene("loading", fake.T0, 64.0), time.time)
    backend = late(lambda: real)
    backend.stop()
    backend.start(lambda: None)
    assert not backend.snapshot().servers


def test_a_snapshot_is_whole_once_the_screens_of_their_own_are_read_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = Monitor(config.load(None))
    read: list[tuple[str, bool]] = []
    whole = threading.Event()
    for name in ("_read_tune", "_read_chain"):
        monkeypatch.setattr(monitor, name, lambda name=name: read.append((name, monitor.snapshot().is_whole)))
    monitor.start(lambda: whole.set() if monitor.snapshot().is_whole else None)
    try:
        assert whole.wait(20.0)
    finally:
        monitor.stop()
    assert read[:2] == [("_read_tune", False), ("_read_chain", False)]


async def test_a_screens_key_before_the_backend_is_there_only_shows_it(make_app: Any) -> None:
    begun = threading.Event()
    real = fake.still("serving")

    def make() -> fake.FakeBackend:
        begun.wait(20.0)
        return real

    backend: Any = late(make)
    app = make_app(backend=SimpleNamespace(clock=real.clock))
    app.backend = backend
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("7")
        await pilot.pause()
        assert app.current_mode == "tune" and app.snap.is_whole is False
        begun.set()
