"""The doctor's questions to the GPUs: driver, health, memory held by the dead, links between the GPUs of one start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from k2tui import paths
from k2tui.config import Profile
from k2tui.core.gpu import describe_health, find_orphans, free_gpus
from k2tui.core.gpu_text import gib, short_gpu_name
from k2tui.core.launch_rules import number, option
from k2tui.core.topology import Topology, choose_gpus, describe_topology
from k2tui.errors import K2Error
from k2tui.jobs.locks import is_held, lock_file
from k2tui.sources.nvml import NvmlSampler
from k2tui.sources.nvml_topology import read_topology

Answer = tuple[
    str, str, str, str
]  # (check, severity "ok" | "info" | "warning" | "error", evidence, what to do)


def check_gpus(*, are_needed: bool = False) -> Iterator[Answer]:
    """This host's GPUs, whatever is started on them. are_needed: for a start that cannot do without."""
    sampler = NvmlSampler()
    try:
        view = sampler.take()
    finally:
        sampler.stop()
    if not view.gpus:
        yield (
            "GPU driver",
            "warning" if are_needed else "info",
            view.error,
            f"{view.hint}; the embedded engine runs on the CPU" if view.hint and not are_needed else view.hint,
        )
        return
    names = sorted({short_gpu_name(gpu.name) for gpu in view.gpus if gpu.name})
    count = len(view.gpus)
    yield (
        "GPU driver",
        "ok",
        f"{count} GPU{'s' if count != 1 else ''} ({', '.join(names)}), driver {view.driver_version}"
        + (f" (CUDA up to {view.cuda_version})" if view.cuda_version else ""),
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


def check_links(topology: Topology | None, indices: Sequence[int], count: int) -> Iterator[Answer]:
    """How the GPUs of one start are joined. topology: None = one GPU. indices: () = the first `count`."""
    if topology is None or not topology.gpus:
        return
    wanted = list(indices) or list(range(count))
    for severity, text in describe_topology(topology, wanted):
        yield "GPU links", severity, text, "k2tui gpus --topology" if severity in ("warning", "error") else ""


def settle_gpus(profile: Profile) -> Profile:
    """The profile with the GPUs that a start would take now: free, unlocked by other jobs, and joined best. Raises K2Error.

    A machine without a driver keeps the profile as it is: there the engine takes what it finds.
    """
    sampler = NvmlSampler()
    try:
        view = sampler.take()
    finally:
        sampler.stop()
    if not view.gpus:
        return replace(profile, auto_gpus=0)
    wanted = profile.auto_gpus if profile.auto_gpus > 0 else gpus_per_node(profile)
    locked = {
        gpu.index
        for gpu in view.gpus
        if is_held(lock_file(paths.jobs_dir().parent / "locks", f"gpu:{gpu.index}"))
    }
    free = [index for index in free_gpus(view) if index not in locked]
    chosen = choose_gpus(read_topology(), wanted, free) if free else ()
    if not chosen:
        holders = sorted({p.gpu_index for p in view.processes} | locked)
        held = f"; {', '.join(map(str, holders))} are held by processes or jobs" if holders else ""
        raise K2Error(
            f"{len(free)} of {len(view.gpus)} GPUs are free, {wanted} are wanted{held}",
            "k2tui gpus shows by whom; stop them, or name GPUs by `gpus`",
        )
    return replace(profile, gpus=chosen, auto_gpus=0)


def needs_gpus(profile: Profile) -> bool:
    """Whether this start is for GPUs: an engine made for them, and no other device named."""
    device = option(profile.args, "--device") or "cuda"
    return profile.engine in ("sglang", "vllm") and device.split(":")[0] in ("cuda", "auto")


def gpus_per_node(profile: Profile) -> int:
    """How many GPUs one machine of this start needs: tensor x pipeline parallel, spread over the nodes."""
    pipelines = number(option(profile.args, "--pp-size", "--pipeline-parallel-size"), 1)
    return max(1, profile.tp_size * max(1, int(pipelines)) // profile.nnodes)
