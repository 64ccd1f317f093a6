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
    memory_limit_b: int | None = None  # of the container (cgroup); None = the host's own memory is the limit
    memory_limit_used_b: int | None = None  # what the container uses of it, page cache included
    disk_total_b: int | None = None  # where k2tui's state lies
    fd_limit_max: int | None = None  # what `ulimit -n` may be raised to
    fd_used: int | None = None  # open files of the whole host
    io_pressure_percent: float | None = None  # share of the last 10 s in which some task waited for a disk
    memory_pressure_percent: float | None = None
    dirty_b: int | None = None  # written, not yet on the disk
    sample_ms: float = 0.0  # what taking this sample cost, CPU time


def describe_host(sample: HostSample) -> tuple[tuple[str, str], ...]:
    """What will hurt a server on this host: (severity, words), worst first; () = nothing known."""
    errors: list[str] = []
    warnings: list[str] = []
    limit, used = sample.memory_limit_b, sample.memory_limit_used_b
    if sample.memory_available_b is not None and sample.memory_total_b:
        share = sample.memory_available_b / sample.memory_total_b
        if share < 0.02:
            errors.append("almost no memory left: the kernel may kill the server")
        elif share < 0.05:
            warnings.append("less than 5 % of the memory is available")
    if limit and used is not None and used > 0.95 * limit:
        warnings.append("the container is at its memory limit: page cache is pushed out, loading gets slow")
    if sample.shm_total_b is not None and sample.shm_used_b is not None and sample.shm_total_b:
        free = sample.shm_total_b - sample.shm_used_b
        if sample.shm_total_b <= 64 << 20:
            warnings.append(
                "/dev/shm has only 64 MB (Docker's default): start the container with --shm-size or --ipc=host"
            )
        elif free < 64 << 20:
            errors.append("/dev/shm is full: NCCL and the tokenizer need it")
    if sample.disk_free_b is not None and sample.disk_free_b < 1 << 30:
        (errors if sample.disk_free_b < 64 << 20 else warnings).append(
            f"{sample.disk_free_b >> 20} MB free on the disk with k2tui's state: logs and captures will stop"
        )
    if sample.fd_limit is not None and sample.fd_limit < 4096:
        warnings.append(f"only {sample.fd_limit} open files allowed: raise it with ulimit -n 65535")
    if (
        sample.swap_used_b
        and sample.swap_total_b
        and sample.swap_used_b > 0.5 * sample.swap_total_b
        and sample.swap_used_b > 1 << 30
    ):
        warnings.append("more than half of the swap is in use")
    return tuple([("error", text) for text in errors] + [("warning", text) for text in warnings])
