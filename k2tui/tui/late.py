"""A Backend that is made on its first use: the first frame does not wait for the imports of the world behind it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from k2tui.core.snapshot import Snapshot
from k2tui.errors import NotReadyError

if TYPE_CHECKING:
    from k2tui.core.ports import Backend


class LateBackend:
    """make() is called by start(), which the app runs off its event loop. Until then the snapshot is empty, and every other
    call of a Backend raises NotReadyError (watch_* do nothing); afterwards it is the real one's."""

    def __init__(self, make: Callable[[], Backend]) -> None:
        self._make = make
        self._real: Backend | None = None
        self._lock = threading.Lock()
        self._is_stopped = False

    def start(self, on_change: Callable[[], None]) -> None:
        real = self._make()
        with self._lock:
            if self._is_stopped:
                return
            self._real = real
        real.start(on_change)

    def stop(self) -> None:
        with self._lock:
            self._is_stopped = True
            real = self._real
        if real is not None:
            real.stop()

    def snapshot(self) -> Snapshot:
        return self._real.snapshot() if self._real is not None else Snapshot(taken_s=time.time(), is_whole=False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if self._real is not None:
            return getattr(self._real, name)

        def not_yet(*_args: object, **_kw: object) -> Any:
            if name.startswith("watch_"):
                return  # asked by a key, outside of an order: there is nothing to watch yet, and no reason to end
            raise NotReadyError("still starting", "try again in a moment")

        return not_yet


def late(make: Callable[[], Backend]) -> Backend:
    """The Backend that make() will give."""
    return cast("Backend", LateBackend(make))
