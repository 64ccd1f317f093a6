"""The doctor's questions to the GPUs: driver, health, memory held by the dead, links between the GPUs of one start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from k2tui.core.gpu import describe_health, find_orphans
from k2tui.core.gpu_text import gib, short_gpu_name
from k2tui.core.topology import describe_topology
from k2tui.sources.nvml import NvmlSampler
from k2tui.sources.nvml_topology import read_topology

Answer = tuple[
    str, str, str, str
]  # (check, severity "ok" | "info" | "warning" | "error", evidence, what to do)


def check_gpus() -> Iterator[Answer]:
    """This host's GPUs, whatever is started on them."""
    sampler = NvmlSampler()
    try:
        view = sampler.take()
    finally:
        sampler.stop()
    if not view.gpus:
        yield (
            "GPU driver",
            "info",
            view.error,
            f"{view.hint}; the embedded engine runs on the CPU" if view.hint else "",
        )
        return
    names = sorted({short_gpu_name(gpu.name) for gpu in view.gpus if gpu.name})
    count = len(view.gpus)
    yield (
        "GPU driver",
        "ok",
        f"{count} GPU{'s' if count != 1 else ''} ({', '.join(names)}), driver {view.driver_version}",
        "",
    )
    for gpu in view.gpus:
        for severity, text in describe_health(gpu):
            yield (
                f"GPU {gpu.index}",
                severity,
                text,
                "k2tui gpus shows its figures; nvidia-smi -q -i " + str(gpu.index),
            )
    for process in find_orphans(view):
        yield (
            f"GPU {process.gpu_index}",
            "warning",
            f"pid {process.pid} holds {gib(process.memory_used_b)} GiB: {process.orphan_reason}",
            "k2tui gpus --orphans --end" if process.is_own else f"ask {process.user} to end it",
        )
    for note in view.notes:
        yield "GPU processes", "info", note, ""


def check_links(indices: Sequence[int], tp_size: int) -> Iterator[Answer]:
    """How the GPUs of one start are joined. indices: () = the first tp_size."""
    if tp_size < 2 and len(indices) < 2:
        return
    topology = read_topology()
    if not topology.gpus:
        return
    wanted = list(indices) or list(range(tp_size))
    for severity, text in describe_topology(topology, wanted):
        yield "GPU links", severity, text, "k2tui gpus --topology" if severity in ("warning", "error") else ""
