"""Host facts. Bytes are bytes, rates are per second over the last interval."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostSample:
    taken_s: float
    hostname: str = ""
    cpu_percent: float | None = None  # of all cores, 0..100
    cpu_percent_per_core: tuple[float, ...] = ()
    load_1m: float | None = None
    memory_total_b: int | None = None
    memory_used_b: int | None = None
    memory_available_b: int | None = None
    page_cache_b: int | None = None
    swap_total_b: int | None = None
    swap_used_b: int | None = None
    disk_read_b_s: float | None = None
    disk_write_b_s: float | None = None
    net_rx_b_s: float | None = None
    net_tx_b_s: float | None = None
    shm_total_b: int | None = None
    shm_used_b: int | None = None
    disk_free_b: int | None = None  # where k2tui's state lies
    fd_limit: int | None = None
