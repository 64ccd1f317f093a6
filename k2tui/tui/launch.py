"""Starts the app on a terminal and ends it in order. Everything heavy is imported here, late, behind a first line on the screen."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import sys
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from k2tui.core.ports import Backend
    from k2tui.tui.settings import Settings

STOP_PATIENCE_S = 0.5  # for a backend that does not come back when the terminal has gone

_ALT_ON, _ALT_OFF = "\x1b[?1049h\x1b[2J\x1b[H\x1b[?25l", "\x1b[?25h\x1b[?1049l"


def run_app(
    backend: Backend,
    settings: Settings,
    *,
    theme_tables: Sequence[tuple[str, Mapping[str, Any], str]] = (),
    clock: Callable[[], float] = time.time,
) -> int:
    """Show the dashboard until the user leaves. Returns the exit code (0, or 128 + signal). theme_tables: (name, table, file)."""
    # read by Textual at import: no motion, no try for optional speed-ups, no wait
    os.environ.setdefault("TEXTUAL_ANIMATIONS", "none")
    os.environ.setdefault("TEXTUAL_SMOOTH_SCROLL", "0")
    os.environ.setdefault("TEXTUAL_SPEEDUPS", "0")
    os.environ.setdefault("TEXTUAL_FPS", "240")  # how long a change waits to be painted; frames are paced by the app
    gc.disable()  # thousands of long-lived objects are being made: collecting among them only costs start-up time
    loud = _hush()
    _say(_ALT_ON + " k2tui  1 Overview  2 GPUs  3 Jobs  4 Board  5 Bench  6 Server\r\n\r\n  starting")
    try:
        from k2tui.tui.app import Dashboard
        from k2tui.tui.themes import make

        app = Dashboard(backend, settings, themes=[make(*table) for table in theme_tables], clock=clock)
    except BaseException:
        _say(_ALT_OFF)
        loud()
        raise
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 20, 50)
    try:
        app.run(mouse=settings.mouse)
    finally:
        loud()
        stopper = threading.Thread(target=backend.stop, daemon=True)
        stopper.start()
        stopper.join(STOP_PATIENCE_S if app.return_code else 5.0)
    if not app.return_code:
        going_on = [job for job in app.snap.jobs if not job.state.is_final]
        if going_on:
            words = "1 job goes on" if len(going_on) == 1 else f"{len(going_on)} jobs go on"
            me = own_command()
            stop = f". Stop the server: {me} down" if any(job.spec.kind == "server" for job in going_on) else ""
            print(f"{words}. See again: {me}. List: {me} jobs list{stop}")
    return app.return_code or 0


def own_command() -> str:
    """How this program was started, to be typed again: plain `k2tui` where the shell finds it by that name."""
    started = sys.argv[0]
    if os.path.basename(started) != "k2tui" or shutil.which("k2tui") == os.path.abspath(started):
        return "k2tui"
    return started


def _hush() -> Callable[[], None]:
    """Keys typed before the app reads them are kept for it and not echoed on the first picture. Returns what undoes it."""
    try:
        fd = sys.__stdin__.fileno() if sys.__stdin__ is not None else -1
        before = termios.tcgetattr(fd)
        quiet = [*before[:3], before[3] & ~(termios.ECHO | termios.ICANON), *before[4:]]
        termios.tcsetattr(fd, termios.TCSANOW, quiet)
    except (termios.error, OSError, ValueError):
        return lambda: None  # no terminal

    def undo() -> None:
        with contextlib.suppress(termios.error, OSError):  # it has gone
            termios.tcsetattr(fd, termios.TCSANOW, before)

    return undo


def _say(text: str) -> None:
    """Straight to the terminal that Textual will draw on (stderr): an answer before half a second of imports."""
    if sys.__stderr__ is not None:
        try:
            os.write(sys.__stderr__.fileno(), text.encode())
        except OSError:
            pass  # a terminal that has gone is noticed by the app
