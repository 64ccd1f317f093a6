"""GPU and host figures for other programs: JSON values with a schema number, and the Prometheus text format."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from k2tui.core.gpu import GpuSample, GpuView, describe_health, describe_link
from k2tui.core.host import HostSample

SCHEMA = 1


def view_json(view: GpuView, host: HostSample | None = None) -> dict[str, Any]:
    """The whole view as plain values; names and units are those of the dataclasses, unknown is null."""
    data = asdict(view)
    for gpu, sample in zip(data["gpus"], view.gpus, strict=True):
        gpu["health"] = [{"severity": severity, "text": text} for severity, text in describe_health(sample)]
    out: dict[str, Any] = {"schema": SCHEMA, **data}
    if host is not None:
        out["host"] = asdict(host)
    return out


_Read = Callable[[GpuSample], float | int | None]


def _scaled(value: int | None, factor: float) -> float | None:
    return None if value is None else value * factor


# (name, type, help, figure); base units as Prometheus asks: bytes, watts, seconds, ratios of 1.
_GPU: tuple[tuple[str, str, str, _Read], ...] = (
    ("k2tui_gpu_up", "gauge", "1 = the GPU answers, 0 = it is lost.", lambda g: 0 if g.error else 1),
    (
        "k2tui_gpu_utilization_ratio",
        "gauge",
        "Share of time with a kernel running.",
        lambda g: _scaled(g.gpu_utilization, 0.01),
    ),
    (
        "k2tui_gpu_memory_utilization_ratio",
        "gauge",
        "Share of time with memory traffic.",
        lambda g: _scaled(g.memory_utilization, 0.01),
    ),
    (
        "k2tui_gpu_memory_used_bytes",
        "gauge",
        "Memory in use, without what the driver reserves.",
        lambda g: g.memory_used_b,
    ),
    ("k2tui_gpu_memory_total_bytes", "gauge", "Memory of the GPU.", lambda g: g.memory_total_b),
    (
        "k2tui_gpu_memory_reserved_bytes",
        "gauge",
        "Memory that the driver keeps.",
        lambda g: g.memory_reserved_b,
    ),
    ("k2tui_gpu_power_watts", "gauge", "Power drawn.", lambda g: _scaled(g.power_usage_mw, 0.001)),
    (
        "k2tui_gpu_power_limit_watts",
        "gauge",
        "Power limit in force.",
        lambda g: _scaled(g.enforced_power_limit_mw, 0.001),
    ),
    (
        "k2tui_gpu_energy_joules_total",
        "counter",
        "Energy since the driver was loaded.",
        lambda g: _scaled(g.energy_mj, 0.001),
    ),
    ("k2tui_gpu_temperature_celsius", "gauge", "Temperature of the chip.", lambda g: g.temperature_c),
    (
        "k2tui_gpu_memory_temperature_celsius",
        "gauge",
        "Temperature of the memory.",
        lambda g: g.memory_temperature_c,
    ),
    (
        "k2tui_gpu_sm_clock_hertz",
        "gauge",
        "Clock of the multiprocessors.",
        lambda g: _scaled(g.sm_clock_mhz, 1e6),
    ),
    (
        "k2tui_gpu_memory_clock_hertz",
        "gauge",
        "Clock of the memory.",
        lambda g: _scaled(g.memory_clock_mhz, 1e6),
    ),
    ("k2tui_gpu_fan_ratio", "gauge", "Fan speed.", lambda g: _scaled(g.fan_percent, 0.01)),
    ("k2tui_gpu_pcie_generation", "gauge", "PCIe generation in use.", lambda g: g.pcie_gen),
    ("k2tui_gpu_pcie_width", "gauge", "PCIe lanes in use.", lambda g: g.pcie_width),
    (
        "k2tui_gpu_pcie_below_maximum",
        "gauge",
        "1 = the link is slower than it could be at work.",
        lambda g: int(bool(describe_link(g))),
    ),
    (
        "k2tui_gpu_pcie_receive_bytes_per_second",
        "gauge",
        "PCIe traffic to the GPU.",
        lambda g: _scaled(g.pcie_rx_kb_s, 1000),
    ),
    (
        "k2tui_gpu_pcie_transmit_bytes_per_second",
        "gauge",
        "PCIe traffic from the GPU.",
        lambda g: _scaled(g.pcie_tx_kb_s, 1000),
    ),
    (
        "k2tui_gpu_nvlink_receive_bytes_per_second",
        "gauge",
        "NVLink traffic to the GPU.",
        lambda g: _scaled(g.nvlink_rx_kb_s, 1000),
    ),
    (
        "k2tui_gpu_nvlink_transmit_bytes_per_second",
        "gauge",
        "NVLink traffic from the GPU.",
        lambda g: _scaled(g.nvlink_tx_kb_s, 1000),
    ),
    (
        "k2tui_gpu_ecc_uncorrected_errors_total",
        "counter",
        "Uncorrected ECC errors since the driver was loaded.",
        lambda g: g.ecc_uncorrected,
    ),
    (
        "k2tui_gpu_ecc_corrected_errors_total",
        "counter",
        "Corrected ECC errors since the driver was loaded.",
        lambda g: g.ecc_corrected,
    ),
    (
        "k2tui_gpu_remapped_rows",
        "gauge",
        "Memory rows remapped.",
        lambda g: sum(g.remapped_rows) if g.remapped_rows else None,
    ),
    (
        "k2tui_gpu_remap_pending",
        "gauge",
        "1 = a row waits for the next reset.",
        lambda g: _scaled(g.remap_pending, 1),
    ),
    ("k2tui_gpu_remap_failed", "gauge", "1 = no spare row left.", lambda g: _scaled(g.remap_failed, 1)),
    ("k2tui_gpu_xid_last", "gauge", "Newest critical error code since k2tui started.", lambda g: g.last_xid),
)

_HOST: tuple[tuple[str, str, Callable[[HostSample], float | int | None]], ...] = (
    (
        "k2tui_host_cpu_ratio",
        "Share of all cores in use.",
        lambda h: None if h.cpu_percent is None else h.cpu_percent / 100,
    ),
    ("k2tui_host_memory_total_bytes", "Memory of the host.", lambda h: h.memory_total_b),
    (
        "k2tui_host_memory_available_bytes",
        "Memory that programs can still get.",
        lambda h: h.memory_available_b,
    ),
    ("k2tui_host_page_cache_bytes", "Files kept in memory.", lambda h: h.page_cache_b),
    ("k2tui_host_swap_used_bytes", "Swap in use.", lambda h: h.swap_used_b),
    ("k2tui_host_disk_read_bytes_per_second", "Read from disks.", lambda h: h.disk_read_b_s),
    ("k2tui_host_disk_write_bytes_per_second", "Written to disks.", lambda h: h.disk_write_b_s),
    ("k2tui_host_net_receive_bytes_per_second", "Received from the network.", lambda h: h.net_rx_b_s),
    ("k2tui_host_net_transmit_bytes_per_second", "Sent to the network.", lambda h: h.net_tx_b_s),
    ("k2tui_host_shm_used_bytes", "In use in /dev/shm.", lambda h: h.shm_used_b),
)


def prometheus_text(view: GpuView, host: HostSample | None = None) -> str:
    """The text exposition format 0.0.4. A figure that the driver does not tell has no line; a lost GPU has k2tui_gpu_up 0."""
    lines: list[str] = []

    def family(name: str, kind: str, text: str, rows: Iterable[tuple[str, float | int | None]]) -> None:
        found = [(labels, value) for labels, value in rows if value is not None]
        if found:
            lines.append(f"# HELP {name} {text}")
            lines.append(f"# TYPE {name} {kind}")
            lines.extend(f"{name}{labels} {_number(value)}" for labels, value in found)

    family("k2tui_gpu_driver_up", "gauge", "1 = the NVIDIA driver answers.", [("", 0 if view.error else 1)])
    family("k2tui_gpu_sample_timestamp_seconds", "gauge", "When the figures were read.", [("", view.taken_s)])
    for name, kind, text, read in _GPU:
        family(
            name,
            kind,
            text,
            [(_labels(g), read(g)) for g in view.gpus if name == "k2tui_gpu_up" or not g.error],
        )
    reasons = sorted({reason for g in view.gpus for reason in g.throttle_reasons})
    family(
        "k2tui_gpu_throttled",
        "gauge",
        "1 = the clocks are held down for this reason.",
        [
            (_labels(g, reason=reason), int(reason in g.throttle_reasons))
            for reason in reasons
            for g in view.gpus
            if not g.error
        ],
    )
    family(
        "k2tui_gpu_process_memory_bytes",
        "gauge",
        "GPU memory of one process.",
        [
            (
                _text_labels(
                    {
                        "gpu": str(p.gpu_index),
                        "pid": str(p.pid),
                        "name": p.name,
                        "rank": p.rank,
                        "job": p.job_id,
                    }
                ),
                p.memory_used_b,
            )
            for p in view.processes
        ],
    )
    if host is not None:
        for name, text, read_host in _HOST:
            family(name, "gauge", text, [("", read_host(host))])
    return "\n".join(lines) + "\n"


def _number(value: float | int) -> str:
    """Whole numbers whole (bytes keep every figure), others without the noise of binary fractions."""
    return str(int(value)) if isinstance(value, int) else f"{value:.15g}"


def _labels(gpu: GpuSample, **more: str) -> str:
    return _text_labels({"gpu": str(gpu.index), "uuid": gpu.uuid, "name": gpu.name, **more})


def _text_labels(labels: dict[str, str]) -> str:
    return "{" + ",".join(f'{key}="{_escape(value)}"' for key, value in labels.items()) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
