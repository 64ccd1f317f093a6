"""GPU and process facts as NVML tells them, and what follows from them; units are in the names, unknown is None."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

# NVML's clock event reasons (nvml.h, nvmlClocksEventReason*): bit -> words. Idle (0x1) is no throttling and has no word.
THROTTLE_WORDS: Mapping[int, str] = {
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "power brake",
    0x100: "display clocks",
}
THROTTLE_IDLE = 0x1

# The Xid codes that a serving operator meets, in words (NVIDIA, "Xid Errors").
XID_WORDS: Mapping[int, str] = {
    13: "graphics engine exception: usually a bug in a kernel",
    31: "GPU memory page fault: usually an illegal address in a kernel",
    43: "reset channel: a program's fault, the GPU itself is healthy",
    45: "a process ended while it used the GPU",
    48: "double-bit ECC error: the GPU needs a reset",
    61: "internal micro-controller breakpoint",
    62: "internal micro-controller halt: reset the GPU",
    63: "a memory row was remapped: takes effect at the next reset",
    64: "remapping a memory row failed: the board needs service",
    69: "graphics engine class error",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    92: "high rate of single-bit ECC errors",
    94: "contained ECC error: the program that hit it must restart",
    95: "uncontained ECC error: the GPU needs a reset",
    109: "context switch time-out",
    119: "GSP firmware did not answer in time",
    120: "GSP firmware error",
    137: "NVLink: a fatal fault of a peer",
    140: "unrecovered ECC error",
    144: "NVLink error (SAW)",
    145: "NVLink error (RLW)",
    149: "NVLink error (NETIR)",
}


def describe_throttle(bits: int) -> tuple[str, ...]:
    """Clock event reasons in words, in bit order; () when nothing holds the clocks down. Unknown bits keep their number."""
    words = [word for bit, word in THROTTLE_WORDS.items() if bits & bit]
    rest = bits & ~(sum(THROTTLE_WORDS) | THROTTLE_IDLE)
    if rest:
        words.append(f"reason 0x{rest:x}")
    return tuple(words)


def describe_xid(code: int) -> str:
    """ "Xid 79: the GPU has fallen off the bus"; an unknown code keeps its number only."""
    words = XID_WORDS.get(code)
    return f"Xid {code}: {words}" if words else f"Xid {code}"


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
    command: str = ""  # the whole command line, clean, at most 512 characters
    kind: str = "C"  # C compute, G graphics, M through MPS
    ppid: int | None = None
    is_visible: bool = True  # False: NVML names a pid that does not exist in this PID namespace
    is_own: bool = True  # False: another user's process
    gpu_instance: int | None = None  # MIG slice
    host_cpu_percent: float | None = None  # of one core, over the last interval
    orphan_reason: str = ""  # why is_orphan, in words


@dataclass(frozen=True, slots=True)
class MigSlice:
    """One MIG device. memory in bytes; sm_count = multiprocessors."""

    gpu_instance: int
    compute_instance: int
    name: str = ""  # the profile, "3g.71gb"
    uuid: str = ""
    memory_total_b: int | None = None
    memory_used_b: int | None = None
    sm_count: int | None = None


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
    ecc_uncorrected: int | None = None  # since the driver was loaded
    energy_mj: int | None = None  # since the driver was loaded
    taken_s: float = 0.0  # when this GPU was read (Unix seconds); older than the view's when NVML is slow
    memory_clock_max_mhz: int | None = None
    memory_temperature_c: int | None = None
    temperature_shutdown_c: int | None = None
    temperature_max_c: int | None = None  # highest at which the GPU is meant to work
    power_limit_default_mw: int | None = None
    throttle_bits: int | None = None  # NVML's own bits behind throttle_reasons
    pstate: int | None = None  # 0 = fastest
    ecc_enabled: bool | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected_total: int | None = None  # over the board's life
    remapped_rows: tuple[int, int] | None = None  # (after correctable, after uncorrectable errors)
    remap_pending: bool | None = None  # a row waits for the next reset
    remap_failed: bool | None = None  # no spare row left: the board needs service
    retired_pages: int | None = None  # boards before Ampere
    last_xid: int | None = None  # newest critical error since the sampler started
    last_xid_s: float | None = None
    mig_enabled: bool | None = None
    mig: tuple[MigSlice, ...] = ()
    virtualization: str = ""  # "", "passthrough", "vGPU", "vGPU host"
    memory_kind: str = (
        ""  # "" = its own; "unified" = host RAM; "coherent" = its own, and the host can use it too
    )
    nvlink_count: int | None = None  # active links
    bus_id: str = ""
    encoder_utilization: int | None = None
    decoder_utilization: int | None = None
    persistence: bool | None = None
    pcie_replays: int | None = None
    missing: tuple[str, ...] = ()  # figures that failed (not: unsupported), "power usage: Unknown Error"
    process_error: str = ""  # why this GPU's processes are unknown, in words
    bar1_total_b: int | None = None  # memory that the host can map at once
    bar1_used_b: int | None = None
    rates_span_s: float | None = None  # the seconds over which the NVLink and PCIe rates are means
    usage_taken_s: float | None = None  # when the processes' SM shares were asked (Unix seconds)


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
    cuda_version: str = ""  # what the driver supports, "13.0"
    waiting_for: str = ""  # NVML call that has not answered for more than a second
    notes: tuple[str, ...] = ()  # what a reader must know: hidden processes, missing permission


_RANK_PART = re.compile(r"(?:^|[_ ])((?:ATTN_CP|MOE_DP|MOE_EP|DP|PP|TP|EP|CP)\d+)")
_RANK_NAMES = (
    ("sglang::scheduler", "scheduler"),
    ("sglang::data_parallel_controller", "dp controller"),
    ("sglang::detokenizer", "detokenizer"),
    ("sglang::tokenizer", "tokenizer"),
    ("VLLM::EngineCore", "engine"),
    ("VLLM::Worker", "worker"),
    ("VLLM::APIServer", "api"),
)


def parse_rank(title: str) -> str:
    """Rank in a process title as SGLang and vLLM set it: "sglang::scheduler_DP0_TP3" -> "DP0 TP3"; "" for anything else.

    A scheduler without numbers (one GPU) is "scheduler".
    """
    for prefix, role in _RANK_NAMES:
        if title.startswith(prefix):
            parts = _RANK_PART.findall(title[len(prefix) :])
            return " ".join(parts) or role
    return ""


def memory_percent(sample: GpuSample) -> float | None:
    """Used memory in percent of the total, 0..100."""
    if sample.memory_used_b is None or not sample.memory_total_b:
        return None
    return 100.0 * sample.memory_used_b / sample.memory_total_b


def describe_health(sample: GpuSample) -> tuple[tuple[str, str], ...]:
    """What is wrong with a GPU: (severity, words), worst first; severity "error" or "warning". () = nothing known to be wrong."""
    errors: list[str] = []
    warnings: list[str] = []
    if sample.error:
        errors.append(sample.error)
    if sample.last_xid is not None:
        errors.append(describe_xid(sample.last_xid))
    if sample.remap_failed:
        errors.append("row remapping failed: the board needs service")
    if sample.ecc_uncorrected:
        errors.append(f"{sample.ecc_uncorrected} uncorrected ECC errors")
    if sample.remap_pending:
        warnings.append("a memory row waits to be remapped: reset the GPU when it is free")
    for reason in sample.throttle_reasons:
        if reason in ("heat (software)", "heat (hardware)", "hardware slowdown", "power brake"):
            warnings.append(f"slowed down by {reason}")
    link = describe_link(sample)
    if link:
        warnings.append(link)
    return tuple([("error", text) for text in errors] + [("warning", text) for text in warnings])


def describe_link(sample: GpuSample) -> str:
    """ "PCIe Gen1 x4 of Gen5 x16" when the link runs below its maximum while the GPU works; "" otherwise.

    An idle link slows down to save power, so a lower generation counts only at work; a lower width always counts.
    """
    gen, gen_max, width, width_max = (
        sample.pcie_gen,
        sample.pcie_gen_max,
        sample.pcie_width,
        sample.pcie_width_max,
    )
    if gen is None or width is None or gen_max is None or width_max is None:
        return ""
    is_working = (sample.gpu_utilization or 0) >= 10 and sample.pstate in (None, 0, 1, 2)
    if width < width_max or (gen < gen_max and is_working):
        return f"PCIe Gen{gen} x{width} of Gen{gen_max} x{width_max}"
    return ""


def explain_processes(gpus: Iterable[GpuSample], processes: Iterable[GpuProcess]) -> tuple[str, ...]:
    """Notes on what the process list cannot show: no permission, pids of another namespace, memory that nobody owns."""
    notes: list[str] = []
    by_gpu: dict[int, list[GpuProcess]] = {}
    hidden = 0
    for process in processes:
        by_gpu.setdefault(process.gpu_index, []).append(process)
        hidden += not process.is_visible
    errors: dict[str, list[int]] = {}
    unowned: list[int] = []
    for gpu in gpus:
        if gpu.process_error:
            errors.setdefault(gpu.process_error, []).append(gpu.index)
        elif (
            not gpu.error
            and not by_gpu.get(gpu.index)
            and (gpu.memory_used_b or 0) > 1 << 30
            and gpu.memory_kind != "unified"
        ):
            unowned.append(gpu.index)
    for text, indices in errors.items():
        notes.append(f"GPU {_ranges(indices)}: processes unknown ({text})")
    if hidden:
        notes.append(
            f"{hidden} GPU process{'es' if hidden > 1 else ''} outside this PID namespace: in a container, start it with --pid=host"
        )
    if unowned:
        notes.append(
            f"GPU {_ranges(unowned)}: memory in use but no process visible (another container or PID namespace; --pid=host shows it)"
        )
    return tuple(notes)


def _ranges(numbers: Iterable[int]) -> str:
    """[0,1,2,5] -> "0-2,5"."""
    out: list[list[int]] = []
    for number in sorted(set(numbers)):
        if out and number == out[-1][1] + 1:
            out[-1][1] = number
        else:
            out.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in out)


def free_gpus(view: GpuView) -> list[int]:
    """GPUs that nobody uses: no process, less than 1 GiB in use, nothing running, healthy."""
    busy = {p.gpu_index for p in view.processes}
    return [
        gpu.index
        for gpu in view.gpus
        if gpu.index not in busy
        and (gpu.memory_used_b or 0) < 1 << 30
        and (gpu.gpu_utilization or 0) < 5
        and not any(severity == "error" for severity, _ in describe_health(gpu))
    ]


@dataclass(frozen=True, slots=True)
class JobProcess:
    """What is needed of a job to find its GPU processes: id, the child's pid, whether the job is over."""

    id: str
    pid: int | None = None
    is_final: bool = False


def with_jobs(view: GpuView, jobs: Iterable[JobProcess]) -> GpuView:
    """The view with every process of an ended job marked as orphan: the job is over and its process still holds GPU memory."""
    ended = {job.id for job in jobs if job.is_final}
    if not ended or not any(p.job_id in ended and not p.is_orphan for p in view.processes):
        return view
    processes = tuple(
        replace(p, is_orphan=True, orphan_reason=f"job {p.job_id} has ended")
        if p.job_id in ended and p.is_visible and not p.is_orphan
        else p
        for p in view.processes
    )
    return replace(view, processes=processes)


def find_orphans(view: GpuView) -> tuple[GpuProcess, ...]:
    """Processes that hold GPU memory after their server died; those of other users are named too but are not ours to end."""
    seen: set[int] = set()
    out: list[GpuProcess] = []
    for process in view.processes:
        if process.is_orphan and process.pid not in seen:
            seen.add(process.pid)
            out.append(process)
    return tuple(out)


def visible_gpus(gpus: Sequence[int]) -> dict[str, str]:
    """Environment that gives a CUDA program these GPUs by NVML's numbers; {} for none.

    CUDA counts the fastest first unless told otherwise: on a machine with two kinds of GPU its 0 is not NVML's 0.
    """
    if not gpus:
        return {}
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
