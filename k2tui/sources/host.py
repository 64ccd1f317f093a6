"""Reader of the host's own figures, in a thread of its own: CPU, memory, page cache, disks, network, /dev/shm, limits.

It knows no GPU and no screen. Budget: less than 0.1 % of one core at one sample a second.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from k2tui import paths
from k2tui.core.host import HostSample

_SECOND_AFTER_S = 0.2
_RATES_EVERY_S = 2.0
_SLOW_EVERY_S = 10.0
# A container's limit that is as large as the memory, or "max", is no limit.
_CGROUP_PLACES = (
    ("memory.max", "memory.current"),  # version 2
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),  # version 1
)

OnHostSample = Callable[[HostSample], None]


class HostSampler:
    """Samples the host each `interval_s` seconds. The same shape as NvmlSampler: start, stop, latest, take.

    state_dir: where free disk space is measured. proc, cgroup: other folders in tests.
    """

    def __init__(
        self,
        interval_s: float = 1.0,
        *,
        state_dir: Path | None = None,
        proc: str = "/proc",
        cgroup: str = "/sys/fs/cgroup",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.interval_s = interval_s
        self._state_dir = state_dir
        self._proc = proc
        self._cgroup = cgroup
        self._clock = clock
        self._psutil: Any = None
        self._hostname = platform.node()
        self._sample = HostSample(taken_s=0.0, hostname=self._hostname)
        self._cores: dict[bytes, tuple[int, int]] = {}
        self._disk: tuple[float, int, int] | None = None
        self._net: tuple[float, int, int] | None = None
        self._rates: dict[str, float | None] = {}
        self._slow: dict[str, Any] = {}
        self._rates_due = self._slow_due = 0.0
        self._on_sample: OnHostSample | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, on_sample: OnHostSample | None = None) -> None:
        """Begin sampling. Calling it again replaces on_sample only."""
        self._on_sample = on_sample
        if self._thread is None or not self._thread.is_alive():
            self._stop.clear()
            self._thread = threading.Thread(target=self._run, name="k2tui-host", daemon=True)
            self._thread.start()

    def stop(self, timeout_s: float = 1.0) -> None:
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def latest(self) -> HostSample:
        """The newest sample, at once. taken_s is 0.0 until the first one."""
        return self._sample

    def take(self, *, with_rates: bool = False) -> HostSample:
        """One sample now, in this thread. Rates and CPU shares need an earlier one to compare with: None on the first call.

        with_rates: read disk and network counters now, and not only every 2 s.
        """
        cpu = time.thread_time()
        if self._psutil is None:
            import psutil

            self._psutil = psutil
        cores = self._read_cores()
        now = time.monotonic()
        if with_rates or now >= self._rates_due:
            self._rates_due = now + _RATES_EVERY_S - 0.25
            self._read_rates(now)
        if now >= self._slow_due:
            self._slow_due = now + _SLOW_EVERY_S
            self._slow = self._read_slow()
        memory = self._read_memory()
        sample = HostSample(
            taken_s=self._clock(),
            hostname=self._hostname,
            cpu_percent=sum(cores) / len(cores) if cores else None,
            cpu_percent_per_core=cores,
            load_1m=_or_none(lambda: os.getloadavg()[0]),
            **memory,
            **self._rates,
            **self._slow,
        )
        self._sample = replace(sample, sample_ms=(time.thread_time() - cpu) * 1000.0)
        return self._sample

    def _run(self) -> None:
        failed, rounds = False, 0
        while not self._stop.is_set():
            began = time.monotonic()
            rounds += 1
            try:
                sample = self.take(with_rates=rounds == 2)
                if self._on_sample is not None:
                    self._on_sample(sample)
                failed = False
            except Exception:
                # the host panel goes stale and shows its age; one line in the log, not one a second
                if not failed:
                    _log_exception("host sample failed")
                failed = True
            # rates need two samples: the second comes soon, so that nobody looks at question marks
            interval_s = self.interval_s if rounds > 1 else min(_SECOND_AFTER_S, self.interval_s)
            self._stop.wait(max(0.05, interval_s - (time.monotonic() - began)))

    def _read_cores(self) -> tuple[float, ...]:
        """Percent of the time since the last call that each core worked; () at the first one.

        Own reading of /proc/stat where there is one: psutil makes objects of all its figures, which costs ms with 192 cores.
        """
        try:
            with open(f"{self._proc}/stat", "rb") as fh:
                head = fh.read().partition(b"\nintr")[0]
        except OSError:
            cores = tuple(float(x) for x in self._psutil.cpu_percent(percpu=True))
            self._cores, is_first = {b"": (0, 0)}, not self._cores
            return () if is_first else cores
        old, new = self._cores, {}
        out: list[float] = []
        for line in head.split(b"\ncpu")[1:]:
            # user, nice, system, idle, waiting for disks, interrupts, soft interrupts, stolen; guests are in user
            name, *words = line.split(None, 9)
            ticks = [int(word) for word in words[:8]]
            total, idle = sum(ticks), ticks[3] + ticks[4]
            new[name] = (total, idle)
            if name in old:
                before, idle_before = old[name]
                spent = total - before
                busy = spent - max(0, idle - idle_before)
                out.append(min(100.0, max(0.0, 100.0 * busy / spent)) if spent > 0 else 0.0)
        self._cores = new
        return tuple(out)

    def _read_memory(self) -> dict[str, Any]:
        """One read of /proc/meminfo where there is one (psutil would read it twice), else psutil."""
        found: dict[str, int] = {}
        try:
            with open(f"{self._proc}/meminfo") as fh:
                for line in fh:
                    name, _, rest = line.partition(":")
                    if name in _MEMINFO:
                        found[name] = int(rest.split()[0]) * 1024
        except (OSError, ValueError, IndexError):
            pass
        if "MemTotal" not in found:
            memory = self._psutil.virtual_memory()
            return {
                "memory_total_b": int(memory.total),
                "memory_used_b": int(memory.total - memory.available),
                "memory_available_b": int(memory.available),
            }
        total, available = found["MemTotal"], found.get("MemAvailable")
        swap_total = found.get("SwapTotal")
        swap_free = found.get("SwapFree")
        return {
            "memory_total_b": total,
            "memory_used_b": None if available is None else total - available,
            "memory_available_b": available,
            "page_cache_b": found.get("Cached", 0) + found.get("Buffers", 0) - found.get("Shmem", 0),
            "swap_total_b": swap_total,
            "swap_used_b": None if swap_total is None or swap_free is None else swap_total - swap_free,
            "dirty_b": found.get("Dirty"),
        }

    def _read_rates(self, now: float) -> None:
        disk = _or_none(self._psutil.disk_io_counters)
        if disk is not None:
            self._rates["disk_read_b_s"], self._rates["disk_write_b_s"] = _rates(
                self._disk, now, disk.read_bytes, disk.write_bytes
            )
            self._disk = (now, disk.read_bytes, disk.write_bytes)
        nets = _or_none(lambda: self._psutil.net_io_counters(pernic=True))
        if nets:
            rx = sum(n.bytes_recv for name, n in nets.items() if not _is_virtual(name))
            tx = sum(n.bytes_sent for name, n in nets.items() if not _is_virtual(name))
            self._rates["net_rx_b_s"], self._rates["net_tx_b_s"] = _rates(self._net, now, rx, tx)
            self._net = (now, rx, tx)

    def _read_slow(self) -> dict[str, Any]:
        shm = _or_none(lambda: os.statvfs("/dev/shm"))
        disk = _or_none(lambda: shutil.disk_usage(_existing(self._state_dir or paths.state_dir())))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit, used = self._read_cgroup()
        return {
            "shm_total_b": None if shm is None else shm.f_blocks * shm.f_frsize,
            "shm_used_b": None if shm is None else (shm.f_blocks - shm.f_bfree) * shm.f_frsize,
            "disk_free_b": None if disk is None else disk.free,
            "disk_total_b": None if disk is None else disk.total,
            "fd_limit": None if soft == resource.RLIM_INFINITY else soft,
            "fd_limit_max": None if hard == resource.RLIM_INFINITY else hard,
            "fd_used": _or_none(lambda: int(Path(f"{self._proc}/sys/fs/file-nr").read_text().split()[0])),
            "io_pressure_percent": self._read_pressure("io"),
            "memory_pressure_percent": self._read_pressure("memory"),
            "memory_limit_b": limit,
            "memory_limit_used_b": used,
        }

    def _read_pressure(self, what: str) -> float | None:
        """avg10 of the "some" line; None on kernels without pressure information."""
        text = _or_none(lambda: Path(f"{self._proc}/pressure/{what}").read_text())
        if not text:
            return None
        found = dict(part.split("=", 1) for part in text.splitlines()[0].split() if "=" in part)
        return _or_none(lambda: float(found["avg10"]))

    def _read_cgroup(self) -> tuple[int | None, int | None]:
        """(limit, used) bytes of the memory cgroup as seen from inside a container; (None, None) without a limit."""
        for limit_name, used_name in _CGROUP_PLACES:
            limit = _or_none(lambda name=limit_name: int(Path(self._cgroup, name).read_text()))
            if limit is not None and limit < 1 << 60:
                return limit, _or_none(lambda name=used_name: int(Path(self._cgroup, name).read_text()))
        return None, None


_MEMINFO = frozenset(
    {"MemTotal", "MemAvailable", "Cached", "Buffers", "Shmem", "SwapTotal", "SwapFree", "Dirty"}
)


def _is_virtual(name: str) -> bool:
    """Loopback and the inner side of containers: their bytes are counted on the real interface, or never leave the host."""
    return name == "lo" or name.startswith(
        ("veth", "docker", "br-", "virbr", "cali", "flannel", "cni", "tunl")
    )


def _existing(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _rates(
    old: tuple[float, int, int] | None, now: float, first: int, second: int
) -> tuple[float | None, float | None]:
    if old is None or now <= old[0] or first < old[1] or second < old[2]:
        return None, None
    return (first - old[1]) / (now - old[0]), (second - old[2]) / (now - old[0])


def _or_none(call: Callable[[], Any]) -> Any:
    """The call's answer; None where this system cannot tell (not there, not permitted, not understood)."""
    try:
        return call()
    except (OSError, ValueError, KeyError, IndexError, RuntimeError, NotImplementedError, AttributeError):
        return None


def _log_exception(text: str) -> None:
    import logging  # costs a one-shot command more than all its other imports, and is needed when something is broken only

    logging.getLogger(__name__).exception(text)
