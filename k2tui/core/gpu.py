"""GPU and process facts as NVML tells them. Units are in the names; what the driver cannot tell is None."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuProcess:
    pid: int
    name: str = ""  # command, control characters removed
    user: str = ""
    gpu_index: int = 0
    memory_used_b: int | None = None
    sm_utilization: int | None = None  # percent
    host_rss_b: int | None = None
    started_s: float | None = None  # birth time, Unix seconds: with pid it names one process
    rank: str = ""  # "TP3" when mapped to a server's rank
    job_id: str = ""  # k2tui job it belongs to
    is_orphan: bool = False  # holds GPU memory, its server is dead


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One GPU at one moment. utilization in percent, clocks in MHz, power in mW, temperature in C, PCIe in KB/s."""

    index: int
    uuid: str = ""
    name: str = ""
    error: str = ""  # "fallen off the bus", ...: the other fields may be None
    memory_total_b: int | None = None
    memory_used_b: int | None = None  # as nvidia-smi shows it: reserved apart
    memory_reserved_b: int | None = None
    gpu_utilization: int | None = None
    memory_utilization: int | None = None
    power_usage_mw: int | None = None
    enforced_power_limit_mw: int | None = None
    temperature_c: int | None = None
    temperature_slowdown_c: int | None = None
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    memory_clock_mhz: int | None = None
    throttle_reasons: tuple[str, ...] = ()  # in words; () also when idle
    pcie_gen: int | None = None
    pcie_gen_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_rx_kb_s: int | None = None
    pcie_tx_kb_s: int | None = None
    nvlink_rx_kb_s: int | None = None
    nvlink_tx_kb_s: int | None = None
    fan_percent: int | None = None
    ecc_uncorrected: int | None = None
    energy_mj: int | None = None


@dataclass(frozen=True, slots=True)
class GpuView:
    """All GPUs at one moment. error: why there are none, in words with what to do ("no NVIDIA driver here: ...")."""

    taken_s: float
    gpus: tuple[GpuSample, ...] = ()
    processes: tuple[GpuProcess, ...] = ()
    driver_version: str = ""
    error: str = ""
    hint: str = ""
    sample_ms: float = 0.0  # what taking this sample cost
