"""Short series of figures for sparklines and charts, filled from snapshots. Knows no clock: a sample's own time counts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from k2tui.core.gpu import GpuProcess
from k2tui.core.gpu_series import GpuMemory
from k2tui.core.snapshot import ServerView, Snapshot

LIMIT = 600  # points a series
PROCESS_PARTS = ("sm", "memory", "cpu", "ram")


def process_series(process: GpuProcess) -> str:
    """Name of a process's curves: another process of the same number has others."""
    return f"proc.{process.pid}.{process.started_s or 0:.0f}.{process.gpu_index}"


class History:
    """Series by name: `gpu.0.util`, `gpu.0.memory`, `host.cpu`, `KEY.tok_s`, `KEY.accept`, ... A snapshot adds a point to a
    series only when its source has a newer time than the last one."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._series: dict[str, deque[float]] = {}
        self._count: dict[str, int] = {}
        self._newest: dict[str, float] = {}
        self.gpus = GpuMemory()  # the GPUs' curves at several grains
        self._processes: set[str] = set()

    def get(self, name: str, per: int = 1) -> Sequence[float]:
        """Oldest first; empty when nothing is known. per: mean of so many points a value; the groups do not move as points come
        in, so a sparkline changes at its right end only."""
        found = self._series.get(name)
        if not found:
            return []
        if per <= 1:
            return list(found)
        points = list(found)
        first = self._count[name] - len(points)
        skip = -first % per
        return [sum(group) / len(group) for at in range(skip, len(points), per) if (group := points[at : at + per])]

    def add(self, snap: Snapshot) -> None:
        if snap.gpu is not None and self._is_new("gpu", snap.gpu.taken_s):
            self.gpus.push(snap.gpu)
            for gpu in snap.gpu.gpus:
                self._put(f"gpu.{gpu.index}.util", gpu.gpu_utilization)
                if gpu.memory_total_b:
                    self._put(f"gpu.{gpu.index}.memory", (gpu.memory_used_b or 0) / gpu.memory_total_b * 100)
                for name, rx, tx in (("nvlink", gpu.nvlink_rx_kb_s, gpu.nvlink_tx_kb_s), ("pcie", gpu.pcie_rx_kb_s, gpu.pcie_tx_kb_s)):
                    self._put(f"gpu.{gpu.index}.{name}", None if rx is None and tx is None else (rx or 0) + (tx or 0))
                self._put(f"gpu.{gpu.index}.power", None if gpu.power_usage_mw is None else gpu.power_usage_mw / 1000)
            self._add_processes(snap.gpu.processes)
        host = snap.host
        if host is not None and self._is_new("host", host.taken_s):
            self._put("host.cpu", host.cpu_percent)
            self._put("host.disk_read", host.disk_read_b_s)
            self._put("host.net_rx", host.net_rx_b_s)
        for server in snap.servers:
            self._add_server(server)

    def _add_processes(self, processes: Sequence[GpuProcess]) -> None:
        """Curves of each process on each GPU, `proc.PID.BIRTH.GPU.sm` and so on; those of one that has ended are forgotten."""
        here: set[str] = set()
        for p in processes:
            name = process_series(p)
            here.add(name)
            self._put(f"{name}.sm", p.sm_utilization)
            self._put(f"{name}.memory", p.memory_used_b)
            self._put(f"{name}.cpu", p.host_cpu_percent)
            self._put(f"{name}.ram", p.host_rss_b)
        for name in self._processes - here:
            for part in PROCESS_PARTS:
                self._series.pop(f"{name}.{part}", None)
                self._count.pop(f"{name}.{part}", None)
        self._processes = here

    def _add_server(self, server: ServerView) -> None:
        key, http, decode = server.key, server.http, server.load.decode
        # one source per series: figures of /metrics when it answers, else those of the log's decode lines
        if http is not None and http.gen_throughput is not None:
            if self._is_new(f"{key}.http", http.checked_s):
                self._put(f"{key}.tok_s", http.gen_throughput)
                self._put(f"{key}.running", http.num_running_reqs)
                self._put(f"{key}.queue", http.num_queue_reqs)
                self._put(f"{key}.usage", None if http.token_usage is None else http.token_usage * 100)
                accept = http.accept_length
                if not accept and decode is not None:
                    accept = decode.accept_length
                self._put(f"{key}.accept", accept or None)
        elif decode is not None and self._is_new(f"{key}.decode", decode.at_s):
            self._put(f"{key}.tok_s", decode.gen_throughput)
            self._put(f"{key}.running", decode.num_running_reqs)
            self._put(f"{key}.queue", decode.num_queue_reqs)
            self._put(f"{key}.usage", None if decode.token_usage is None else decode.token_usage * 100)
            self._put(f"{key}.accept", decode.accept_length)

    def _is_new(self, source: str, at_s: float) -> bool:
        if self._newest.get(source, -1.0) >= at_s:
            return False
        self._newest[source] = at_s
        return True

    def _put(self, name: str, value: float | None) -> None:
        if value is None:
            return
        series = self._series.get(name)
        if series is None:
            series = self._series[name] = deque(maxlen=self._limit)
        series.append(float(value))
        self._count[name] = self._count.get(name, 0) + 1
