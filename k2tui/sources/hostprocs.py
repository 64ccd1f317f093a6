"""Reader of the host's busiest processes, in a thread of its own and only while somebody looks; it knows no GPU and no screen."""

from __future__ import annotations

import heapq
import os
import threading
import time

from k2tui.core.gpu import GpuProcess
from k2tui.sources.procs import ProcessTable, as_process, read_stat

_SHOWN = 60  # by CPU, and as many by memory
_EVERY_S = 2.0
_SECOND_AFTER_S = 0.3  # CPU shares need two readings


class HostProcesses:
    """While watched: the busiest processes of this host, by CPU, each with gpu_index -1; () otherwise.

    Every pid's stat is read (20 us each), the rest only of those that are shown.
    """

    def __init__(self, proc: str = "/proc") -> None:
        self._proc = proc
        self._table = ProcessTable(proc)
        self._ticks = os.sysconf("SC_CLK_TCK")
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._seen: dict[tuple[int, int], int] = {}
        self._seen_at = 0.0
        self._found: tuple[GpuProcess, ...] = ()
        self._halt: threading.Event | None = None

    def latest(self) -> tuple[GpuProcess, ...]:
        """The newest list, at once; () while nobody watches and until the first reading."""
        return self._found

    def watch(self, on: bool) -> None:
        """Begin or end reading; called again with the same value it does nothing."""
        if on == (self._halt is not None):
            return
        if self._halt is not None:
            self._halt.set()
            self._halt = None
            self._found = ()
            return
        self._halt = threading.Event()
        threading.Thread(target=self._run, args=(self._halt,), name="k2tui-hostprocs", daemon=True).start()

    def _run(self, halt: threading.Event) -> None:
        wait_s = _SECOND_AFTER_S
        while True:
            found = self.take()
            if halt.is_set():
                return
            self._found = found
            if halt.wait(wait_s):
                return
            wait_s = _EVERY_S

    def take(self) -> tuple[GpuProcess, ...]:
        """One reading now. host_cpu_percent: since the last one, None for a process that was not there then."""
        now = time.monotonic()
        elapsed = now - self._seen_at
        seen: dict[tuple[int, int], int] = {}
        rows: list[tuple[float, int, int]] = []  # CPU percent (-1: unknown), resident pages, pid
        for name in os.listdir(self._proc):
            stat = read_stat(self._proc, int(name)) if name.isdigit() else None
            if stat is None:
                continue
            _, _, cpu, started, pages = stat
            old = self._seen.get((int(name), started))
            seen[int(name), started] = cpu
            rows.append(
                (-1.0 if old is None else 100.0 * (cpu - old) / self._ticks / elapsed, pages, int(name))
            )
        self._seen, self._seen_at = seen, now
        shown = {row[2]: row for row in heapq.nlargest(_SHOWN, rows)}
        shown.update((row[2], row) for row in heapq.nlargest(_SHOWN, rows, key=lambda row: row[1]))
        facts = self._table.read(shown)
        uid = os.getuid()
        return tuple(
            [
                as_process(pid, -1, None, "", None, None, facts[pid], None if percent < 0 else percent, uid)
                for percent, _, pid in sorted(shown.values(), reverse=True)
                if pid in facts
            ]
        )
