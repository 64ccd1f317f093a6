"""The backend that comes late: nothing before start, everything after it, and a stop that wins a race with start."""

from __future__ import annotations

import time

import fake
import pytest

from k2tui.core.ports import Backend
from k2tui.errors import NotReadyError
from k2tui.tui.late import late


def test_every_call_of_a_backend_is_the_real_ones_after_start() -> None:
    real = fake.FakeBackend(lambda t: fake.scene("loading", fake.T0, 64.0), time.time)
    backend = late(lambda: real)
    names = [n for n in vars(Backend) if not n.startswith("_")]
    assert len(names) > 15
    assert not backend.snapshot().servers
    with pytest.raises(NotReadyError):
        backend.set_task("1", status="completed")
    with pytest.raises(NotReadyError):
        backend.delete_run("x")
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
