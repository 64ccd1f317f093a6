"""A Backend that is made on its first use: the first frame does not wait for the imports of the world behind it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from k2tui.core.snapshot import Snapshot
from k2tui.errors import NotReadyError

if TYPE_CHECKING:
    from k2tui.core.gpu_series import GpuCurves
    from k2tui.core.ports import Backend, LogPort


class LateBackend:
    """make() is called by start(), which the app runs off its event loop. Until then the snapshot is empty."""

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
        return self._real.snapshot() if self._real is not None else Snapshot(taken_s=time.time())

    @property
    def _ready(self) -> Backend:
        if self._real is None:
            raise NotReadyError("still starting", "try again in a moment")
        return self._real

    def log(self, key: str) -> LogPort:
        return self._ready.log(key)

    def preview(self, stage: str, params: Mapping[str, Any]) -> Sequence[str]:
        return self._ready.preview(stage, params)

    def submit(self, stage: str, params: Mapping[str, Any]) -> str:
        return self._ready.submit(stage, params)

    def stop_job(self, job_id: str) -> None:
        self._ready.stop_job(job_id)

    def retry_job(self, job_id: str) -> str:
        return self._ready.retry_job(job_id)

    def set_task(self, task_id: str, **changes: str) -> None:
        self._ready.set_task(task_id, **changes)

    def add_task(self, content: str, priority: str = "medium") -> None:
        self._ready.add_task(content, priority)

    def move_task(self, task_id: str, other_id: str) -> None:
        self._ready.move_task(task_id, other_id)

    def report(self, server_key: str) -> str:
        return self._ready.report(server_key)

    def end_processes(self, targets: Sequence[tuple[int, float]], how: str = "end") -> str:
        return self._ready.end_processes(targets, how)

    def describe_process(self, pid: int, started_s: float) -> Sequence[str]:
        return self._ready.describe_process(pid, started_s)

    def watch_gpu(self, index: int | None) -> None:
        if self._real is not None:
            self._real.watch_gpu(index)

    def gpu_curves(self, start_s: float, end_s: float, steps: int = 0) -> GpuCurves:
        return self._ready.gpu_curves(start_s, end_s, steps)
