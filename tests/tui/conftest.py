"""Fixtures of the dashboard's tests: the scripted world, themes, and a real pty."""

from __future__ import annotations

import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clock texts are the same everywhere."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()


def themes() -> list[Any]:
    from k2tui.tui.themes import make

    return [make(p.stem, tomllib.loads(p.read_text()), str(p)) for p in sorted((ROOT / "assets/themes").glob("*.toml"))]


@pytest.fixture
def make_app() -> Callable[..., Any]:
    """make_app(kind, settings=..., **scene options) -> Dashboard over a world that stands still."""

    def make(kind: str = "loading", *, settings: Any = None, backend: Any = None, **options: Any) -> Any:
        import fake

        from k2tui.tui.app import Dashboard

        backend = backend or fake.still(kind, **options)
        return Dashboard(backend, settings, themes=themes(), clock=backend.clock)

    return make


def text_of(app: Any) -> str:
    """What the screen shows, as lines of text."""
    width, height = app.size
    strips = app.screen._compositor.render_strips()
    return "\n".join(strip.text.ljust(width) for strip in strips[:height])
