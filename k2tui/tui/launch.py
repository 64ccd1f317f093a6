"""Starts the app on a terminal and ends it in order. Textual is imported here, late."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from k2tui.core.ports import Backend
from k2tui.tui.settings import Settings

STOP_PATIENCE_S = 0.5  # for a backend that does not come back when the terminal has gone


def run_app(
    backend: Backend,
    settings: Settings,
    *,
    theme_tables: Sequence[tuple[str, Mapping[str, Any], str]] = (),
    clock: Callable[[], float] = time.time,
) -> int:
    """Show the dashboard until the user leaves. Returns the exit code (0, or 128 + signal). theme_tables: (name, table, file)."""
    # read by Textual at import: no motion, no try for optional speed-ups
    os.environ.setdefault("TEXTUAL_ANIMATIONS", "none")
    os.environ.setdefault("TEXTUAL_SMOOTH_SCROLL", "0")
    os.environ.setdefault("TEXTUAL_SPEEDUPS", "0")
    gc.disable()  # thousands of long-lived objects are being made: collecting among them only costs start-up time
    from k2tui.tui.app import Dashboard
    from k2tui.tui.themes import make

    app = Dashboard(backend, settings, themes=[make(*table) for table in theme_tables], clock=clock)
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 20, 50)
    try:
        app.run(mouse=settings.mouse)
    finally:
        stopper = threading.Thread(target=backend.stop, daemon=True)
        stopper.start()
        stopper.join(STOP_PATIENCE_S if app.return_code else 5.0)
    return app.return_code or 0
