"""What a job's processes are doing: alive, CPU, disk reads, how many. Evidence for "work or hang", read from the kernel."""

from __future__ import annotations

from dataclasses import dataclass, field

import psutil


@dataclass(frozen=True, slots=True)
class TreeSample:
    """One look at a process and its descendants. Rates are over the time since the last look; None at the first."""

    alive: bool
    num_processes: int = 0
    cpu_percent: float | None = None  # of one core: 150 = one and a half cores busy
    read_b_s: float | None = None  # bytes that really came from the disk (page-cache hits do not count)
    read_b: int | None = None
    rss_b: int | None = None
    titles: tuple[str, ...] = field(default=())


class ProcTree:
    """Follows one pid. A recycled pid is told apart by its birth time."""

    def __init__(self, pid: int, started_s: float | None = None) -> None:
        self._pid = pid
        self._root: psutil.Process | None = None
        self._last: tuple[float, float, int] | None = None  # time, cpu seconds, read bytes
        try:
            root = psutil.Process(pid)
            if started_s is None or abs(root.create_time() - started_s) < 2.0:
                self._root = root
        except psutil.Error:
            pass

    def sample(self, now_s: float) -> TreeSample:
        root = self._root
        try:
            if root is None or not root.is_running() or root.status() == psutil.STATUS_ZOMBIE:
                return TreeSample(alive=False)
            family = [root, *root.children(recursive=True)]
        except psutil.Error:
            return TreeSample(alive=False)
        cpu = 0.0
        read = rss = 0
        read_known = False
        titles: list[str] = []
        for proc in family:
            try:
                with proc.oneshot():
                    times = proc.cpu_times()
                    cpu += times.user + times.system
                    rss += proc.memory_info().rss
                    titles.append(proc.name())
            except psutil.Error:
                continue
            try:
                io = proc.io_counters()  # type: ignore[attr-defined]  # not on macOS
                read += int(io.read_bytes)
                read_known = True
            except (psutil.Error, AttributeError, OSError):
                pass
        cpu_percent = read_rate = None
        if self._last is not None and now_s > self._last[0]:
            span = now_s - self._last[0]
            cpu_percent = max(0.0, (cpu - self._last[1]) / span * 100)
            read_rate = max(0.0, (read - self._last[2]) / span) if read_known else None
        self._last = (now_s, cpu, read)
        return TreeSample(
            alive=True,
            num_processes=len(family),
            cpu_percent=cpu_percent,
            read_b_s=read_rate,
            read_b=read if read_known else None,
            rss_b=rss,
            titles=tuple(titles),
        )
