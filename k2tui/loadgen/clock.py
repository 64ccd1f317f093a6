"""Kernel receive stamps on the monotonic clock. Linux only; knows sockets, nothing of HTTP.

The kernel stamps a segment with CLOCK_REALTIME when it arrives; the offset to CLOCK_MONOTONIC (Python's perf_counter on
Linux) is measured before and after a run. Both clocks are slewed alike, so the offset moves only when somebody steps the
wall clock: a run in which it moved by more than 100 us is flagged.
"""

from __future__ import annotations

import socket
import sys
import time

SO_TIMESTAMPING = 37
_RX_SOFTWARE = 1 << 3
_REPORT_SOFTWARE = 1 << 4
MAX_DRIFT_NS = 100_000


def have_kernel_stamps() -> bool:
    return sys.platform == "linux"


def ask_kernel_stamps(sock: socket.socket) -> bool:
    """Ask for a software receive stamp with every read. False where the system refuses."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPING, _RX_SOFTWARE | _REPORT_SOFTWARE)
    except OSError:
        return False
    return True


def realtime_offset_ns() -> int:
    """CLOCK_REALTIME - CLOCK_MONOTONIC in ns: the tightest of 50 bracketed readings (within about 0.1 us)."""
    best_width = 1 << 62
    best = 0
    for _ in range(50):
        a = time.perf_counter_ns()
        wall = time.time_ns()
        b = time.perf_counter_ns()
        if b - a < best_width:
            best_width, best = b - a, wall - (a + b) // 2
    return best


def cpu_steal() -> tuple[int, int] | None:
    """(steal ticks, all ticks) of this host since boot; None where /proc/stat is absent."""
    try:
        with open("/proc/stat", "rb") as fh:
            fields = [int(x) for x in fh.readline().split()[1:9]]
    except (OSError, ValueError):
        return None
    return (fields[7] if len(fields) > 7 else 0), sum(fields)
