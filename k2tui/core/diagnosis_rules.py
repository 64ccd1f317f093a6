"""The table of evidence -> class (`_rules`), and the collector that keeps the few lines which prove something.

Knows no file, clock or engine. What a line must say, which class it proves, and how strongly; which of them wins is decided in
`diagnosis.py`.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

from k2tui.core.diagnosis_classes import CLASSES
from k2tui.core.load import DecodeBatch, Phase, ShardCount, State
from k2tui.core.loadlines import Line, clean, parse
from k2tui.core.patterns import Pattern, Words

CAUSE = 3  # names a cause
WEAK = 2  # names a fault whose cause may be another line
SYMPTOM = 1  # says only that something died or waits

KEEP_PER_CLASS = 4
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Finding(NamedTuple):
    """One line that proves something. phase, round: where the start was; frames: function names of the trace above."""

    root_cause: str
    line: Line
    strength: int
    phase: Phase
    round: int = 0
    frames: tuple[str, ...] = ()
    order: int = 0
    note: str = ""
    after_death: bool = False
    files: tuple[str, ...] = ()  # of the trace above
    near: tuple[str, ...] = ()  # the lines just before

    @property
    def in_draft(self) -> bool:
        """Does the trace run through the draft's worker?"""
        return any("eagle" in f or "draft" in f or "mtp" in f or "/spec" in f for f in self.files)


class Facts(NamedTuple):
    """What the tracker and the world know at this moment (see tracker.Evidence for the outer half)."""

    engine: str = ""
    phase: Phase = Phase.BOOT
    round: int = 0
    phase_seen: bool = False
    target: ShardCount | None = None
    draft: ShardCount | None = None
    bar_kind: str = ""
    bar_line: Line | None = None
    compile_line: Line | None = None  # the newest line, when it says that kernels are being compiled
    health_ok_s: float | None = None  # log time of the newest /health answered with 200
    bar_done: int | None = None
    bar_total: int | None = None
    gaps_s: tuple[float, ...] = ()
    steps: tuple[int, ...] = ()
    bar_elapsed_s: float | None = None
    work_line: Line | None = None
    milestone_line: Line | None = None  # the first rank's line of the newest step
    metrics_line: Line | None = None  # a trainer's newest logged loss
    end_line: Line | None = None  # a trainer's last word
    load_end_line: Line | None = None
    last_line: Line | None = None
    ready_line: Line | None = None
    answered: bool = False
    is_proved: bool = False  # it once answered over HTTP as our model
    bind_failed: Line | None = None
    stop_line: Line | None = None
    stop_how: str = ""
    stop_over: bool = False
    dying: Line | None = None
    dying_what: str = ""
    decodes: tuple[tuple[DecodeBatch, float | None, int | None, Line], ...] = ()
    decode_count: int = 0
    heartbeats: int = 0
    heartbeat_line: Line | None = None
    heartbeat_span_s: float | None = None
    load_types: tuple[str, ...] = ()
    ranks: tuple[str, ...] = ()
    rank_loads: Mapping[str, int] = _NOTHING
    rank_ends: Mapping[str, int] = _NOTHING
    tp_size: int | None = None
    nnodes: int | None = None
    model: str = ""
    silence_s: float | None = None
    stall_s: float = 0.0
    alive: bool | None = None
    exit_code: int | None = None
    cpu_pct: float | None = None
    read_bytes_s: float | None = None
    net_bytes_s: float | None = None
    gpu_util: float | None = None
    gpu_memory_b_s: float | None = None
    http_checked: bool = False
    model_path: str | None = None
    served_model_name: str | None = None
    expected_model: str | None = None
    health: int | None = None
    requests_waiting: int | None = None
    children: int | None = None
    expected_children: int | None = None
    wanted_stop: bool = False
    is_complete: bool = False
    extra: Mapping[str, object] = _NOTHING
    lines: int = 0  # read, of any kind
    marks: int = 0  # of them: those that have a log line's form
    votes: int = 0  # of them: those that an engine's own hand wrote


class Verdict(NamedTuple):
    """The answer: one state, one class, one proving line, one remedy. phase None = the tracker's."""

    state: State
    root_cause: str = "healthy"
    proof: Line | None = None
    phase: Phase | None = None
    confidence: float = 0.5
    remedy: str = ""
    sentence: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def group(self) -> str:
        return CLASSES[self.root_cause].group if self.root_cause in CLASSES else ""

    @property
    def is_healthy(self) -> bool:
        return self.root_cause in ("", "healthy", "healthy_slow_jit")


def advice_for(root_cause: str) -> str:
    """One sentence that says what a class means."""
    return CLASSES[root_cause].meaning if root_cause in CLASSES else ""


# --- the table -----------------------------------------------------------------------------------------------------------


class Rule(NamedTuple):
    """pattern: searched in the line's text. literal: must be in it (a cheap gate). bars: phases where the rule is mute."""

    root_cause: str
    literal: str
    pattern: str = ""
    strength: int = CAUSE
    unless: str = ""


def _rules() -> tuple[Rule, ...]:
    r = Rule
    return (
        # G02
        r("shm_too_small", "posix_fallocate"),
        r("shm_too_small", "No space left on device", r"/dev/shm|shared memory|shm_open|nccl-|posix_fallocate"),
        r("shm_too_small", "rror while creating shared memory segment"),
        r("shm_too_small", "Bus error", r"insufficient shared memory|\(shm\)"),
        r("disk_full", "Not enough free disk space"),
        r("disk_full", "[Errno 28]", unless=r"/dev/shm|shared memory|posix_fallocate"),
        r("disk_full", "No space left on device", unless=r"/dev/shm|shared memory|shm_open|nccl-|posix_fallocate"),
        r("disk_full", "Disk quota exceeded"),
        r("permission_denied", "[Errno 13]"),
        r("permission_denied", "PermissionError", r"PermissionError\b.*(?:denied|:)"),
        r("permission_denied", "ermission denied", r"ermission denied.*(?:/|cache)|(?:/\S+).*ermission denied", WEAK),
        r("hub_access_denied", "401 Client Error", "", WEAK, unless="for url: http://"),
        r("hub_access_denied", "403 Client Error", "", WEAK, unless="for url: http://"),
        r("hub_access_denied", "GatedRepoError", "", WEAK),
        r("hub_access_denied", "gated repo", "", WEAK),
        r("fd_limit", "[Errno 24]"),
        r("fd_limit", "code: 24"),
        r("fd_limit", "Too many open files"),
        # G03
        r("rendezvous_unreachable", "client socket has timed out"),
        r("rendezvous_unreachable", "while trying to connect to", r"timed out|failed to connect|refused"),
        r("rendezvous_unreachable", "failed to format addr"),
        r("rendezvous_unreachable", "network addresses of", r"cannot be retrieved"),
        r("rendezvous_unreachable", "connectFullMesh failed"),
        r("rendezvous_unreachable", "No route to host", r"socket|connect|nccl|gloo|tcp", WEAK),
        r("rendezvous_unreachable", "RendezvousTimeoutError"),
        r("rendezvous_unreachable", "RendezvousConnectionError"),
        r("rendezvous_unreachable", "ocket Timeout", r"[Ss]ocket Timeout", WEAK),
        # G04
        r("p2p_unsupported", "peer access is not supported"),
        r("p2p_unsupported", "cudaErrorPeerAccessUnsupported"),
        r("custom_allreduce_failed", "invalid argument", r"(?:[Cc][Uu][Dd][Aa]\w*|HIP) error.{0,200}invalid argument|^\s*RuntimeError: invalid argument"),
        r("custom_allreduce_failed", "custom_all_reduce", r"(?:Failed|failed|error).*custom_all_reduce|custom_all_reduce\.cuh?:\d+", WEAK),
        # G06
        r("rank_desync_timeout", "Watchdog caught collective operation timeout"),
        r("rank_desync_timeout", "monitoredBarrier", "", WEAK),
        r("rank_desync_timeout", "could finish the model loading, but there are other ranks", "", WEAK),
        # G07
        r("serving_hang", "atchdog timeout (self.", r"[Ww]atchdog timeout \(self\.(?:watchdog_timeout|soft_watchdog)"),
        r("serving_hang", "Health check failed", r"couldn't get a response from detokenizer", WEAK),
        # G08
        r("kv_pool_too_small", "larger than the profiled value", r"profiled value -\d"),
        r("kv_pool_too_small", "Not enough memory. Please try to increase"),
        r("kv_pool_too_small", "No available memory for the cache blocks"),
        r("kv_pool_too_small", "is larger than the available KV cache memory"),
        r("kv_pool_too_small", "larger than the maximum number of tokens that can be stored in KV cache"),
        r("kv_pool_too_small", "out of memory. Try to lower your batch size", r"(?:Prefill|Decode) out of memory", WEAK),
        r("req_slots_exhausted", "alloc_req_slots runs out of memory"),
        # G09 / G10
        r("gpu_oom_weights", "out of memory", r"CUDA out of memory|OutOfMemoryError|HIP out of memory|CUDA error: out of memory|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|NPU out of memory"),
        r("gpu_mem_unbalanced", "memory capacity is unbalanced"),
        r("gpu_mem_held", "Free memory on device", r"on startup is less"),
        # G11
        r("host_oom_kill", "xit code", r"[Ee]xit code:? ?-9\b", WEAK),
        r("host_oom_kill", "xitcode", r"[Ee]xitcode: ?-9\b", WEAK),
        r("host_oom_kill", "died during initialization", r"exit code: -9", WEAK),
        r("host_oom_kill", "Signal 9 (SIGKILL)", "", WEAK),
        r("host_oom_kill", "SIGKILL", r"(?:signal|Signal|killed by|Killed by|exitcode -?9|due to).*SIGKILL|SIGKILL.*(?:received|signal)", WEAK, unless=r"[Ss]ending|escalat"),
        r("host_oom_kill", "Killed", r"^\s*(?:bash: line \d+: +\d+ )?Killed\b(?! process)\s*(?:\w.*)?$", WEAK),
        r("host_oom_kill", "signal: 9", "", WEAK),
        r("host_oom_kill", "died with <Signals.SIGKILL", "", WEAK),
        r("host_oom_kill", "oom_kill", r"oom_kill(?:er)?\b"),
        r("host_oom_kill", "oom-kill"),
        r("host_oom_kill", "Out of memory: Killed process"),
        r("host_oom_kill", "OOMKilled"),
        r("host_oom_kill", "node running low on memory"),
        # G12
        r("checkpoint_corrupt", "rror while deserializing header"),
        r("checkpoint_corrupt", "HeaderTooLarge"),
        r("checkpoint_corrupt", "eader too large", r"[Hh]eader too large"),
        r("checkpoint_corrupt", "MetadataIncompleteBuffer"),
        r("checkpoint_corrupt", "InvalidHeader"),
        r("checkpoint_corrupt", "incomplete metadata, file not fully covered"),
        r("checkpoint_corrupt", "failed finding central directory"),
        r("checkpoint_corrupt", "invalid load key"),
        r("checkpoint_corrupt", "Consistency check failed"),
        r("checkpoint_missing_shard", "shard file(s) missing"),
        r("checkpoint_missing_shard", "shard", r"No such file or directory.*model-\d+-of-\d+|model-\d+-of-\d+\.safetensors.*(?:No such file|not found|missing)"),
        r("checkpoint_missing_shard", "-of-", r"No such file or directory.*-\d+-of-\d+|-\d+-of-\d+\.(?:safetensors|bin).*(?:No such file|not found|missing)"),
        r("checkpoint_missing_shard", "were not initialized from checkpoint"),
        r("checkpoint_missing_shard", "Cannot find any model weights"),
        r("mmap_bus_error", "Fatal Python error: Bus error"),
        r("mmap_bus_error", "Signal 7 (SIGBUS)"),
        # G13
        r("arch_unsupported", "are not supported for now", r"Model architectures? .* are not supported for now"),
        r("arch_unsupported", "has no SGLang implementation"),
        r("arch_unsupported", "does not recognize this architecture"),
        r("model_import_failed", "failed to be inspected"),
        # G14
        r("quant_mismatch", "does not match the quantization method"),
        r("quant_mismatch", "Cannot find the config file for"),
        r("quant_mismatch", "nknown quantization method"),
        r("quant_mismatch", "uantization", r"[Qq]uantization .{0,80}(?:is not supported|does not match|mismatch)|not a valid [Qq]uantization", WEAK),
        r("tp_not_divisible", "divisible", r"not divisible by|must be divisible|should be divisible|is not a multiple", CAUSE),
        r("trust_remote_code", "wish to run the custom code"),
        r("trust_remote_code", "trust_remote_code=True", r"(?:[Pp]lease|must|set|option|requires|pass).{0,120}trust_remote_code=True"),
        r("tokenizer_incompatible", "untagged enum"),
        r("tokenizer_incompatible", "Couldn't instantiate the backend tokenizer"),
        r("tokenizer_incompatible", "Tokenizer class", r"does not exist or is not currently imported"),
        r("tokenizer_incompatible", "okenizer", r"AttributeError: .*[Tt]okeniz\w* (?:object )?has no attribute", WEAK),
        r("device_uuid_unsupported", "invalid literal for int()", r"'(?:MIG|GPU)-"),
        # G15
        r("no_kernel_image", "no kernel image is available"),
        r("no_kernel_image", "cudaErrorNoKernelImageForDevice"),
        r("kernel_unsupported", "ailed to dispatch head", r"dispatch head.?dim"),
        r("kernel_unsupported", "Unsupported architecture"),
        r("kernel_unsupported", "nsupported head", r"[Uu]nsupported head.?(?:dim|size)"),
        r("kernel_unsupported", "is not supported in decode attention backend"),
        r("kernel_unsupported", "nsupported max_mma_kv"),
        r("kernel_unsupported", "only supports", r"(?:kernel|attention|backend|FlashInfer|flash.?attn|FlashAttention|GEMM).{0,80}only supports?.{0,60}(?:sm|SM|compute|GPU|head|Hopper|Ampere)", WEAK),
        r("kernel_unsupported", "PassManager::run failed"),
        # G16
        r("native_import_error", "Could not load any common_ops library", "", WEAK),
        r("native_import_error", "- ImportError:", r"- ImportError: .*(?:undefined symbol|cannot open shared object|GLIBC|version)"),
        r("native_import_error", "undefined symbol"),
        r("native_import_error", "cannot open shared object file", unless=r"libnvidia-ml"),
        r("native_import_error", "DLL load failed"),
        r("native_import_error", "GLIBC", r"version [`'\"]?GLIBC"),
        r("jit_toolchain", "fatal error:", r"fatal error: \S+\.(?:h|hpp|cuh|hh): No such file"),
        r("jit_toolchain", "nvcc", r"nvcc:? (?:command )?not found|Could not find nvcc|nvcc.*No such file"),
        r("jit_toolchain", "ninja: build stopped", "", WEAK),
        r("jit_toolchain", "CUDA_HOME environment variable is not set"),
        r("jit_toolchain", "Could not find compiler"),
        r("jit_toolchain", "Failed to find C compiler"),
        r("jit_toolchain", "Error building extension", "", SYMPTOM),
        r("jit_toolchain", "nvcc fatal"),
        r("jit_toolchain", "ptxas", r"ptxas (?:fatal|error|/)"),
        # G17
        r("fabric_manager", "Error 802"),
        r("fabric_manager", "system not yet initialized"),
        r("driver_too_old", "driver on your system is too old"),
        r("driver_too_old", "driver version is insufficient"),
        r("driver_too_old", "Falling back to CPU", r"(?:CUDA|GPU|driver).*Falling back to CPU|Falling back to CPU.*(?:CUDA|GPU|driver)", WEAK),
        # G18
        r("nccl_system_error", "unhandled system error", "", WEAK),
        r("nccl_system_error", "ncclSystemError", "", WEAK),
        # G19
        r("port_in_use", "[Errno 98]"),
        r("port_in_use", "[Errno 48]"),
        r("port_in_use", "10048", r"\[(?:Errno|WinError) 10048\]"),
        r("port_in_use", "is used by a process already"),
        r("port_in_use", "ddress already in use", r"[Aa]ddress already in use|EADDRINUSE"),
        r("port_in_use", "EADDRINUSE"),
        r("port_in_use", "Port is already in use"),
        # G20
        r("gpu_hw_fault", "ncorrectable ECC", r"[Uu]ncorrectable ECC"),
        r("gpu_hw_fault", "ncorrectable NVLink", r"[Uu]ncorrectable NVLink"),
        r("gpu_hw_fault", "Xid", r"\bXid\b.{0,40}\d+", unless=r"\b79\b|fallen off"),
        r("gpu_hw_fault", "hardware stack error"),
        r("gpu_lost", "fallen off the bus"),
        r("gpu_lost", "GPU_IS_LOST"),
        r("gpu_lost", "GPU is lost", r"GPU is lost"),
        r("gpu_lost", "GpuIsLost"),
        r("gpu_lost", "Unable to determine the device handle for"),
        r("gpu_lost", "has fallen", r"has\s*$", WEAK),
        # G21
        r("illegal_memory_access", "illegal memory access"),
        r("illegal_memory_access", "illegal instruction was encountered"),
        r("illegal_memory_access", "misaligned address"),
        r("illegal_memory_access", "device-side assert", "", WEAK),
        r("illegal_memory_access", "unspecified launch failure"),
        # G22
        r("draft_context_mismatch", "Target model's context_length", r"is greater"),
        r("draft_context_mismatch", "index out of bounds", r"Assertion .*index out of bounds|[Aa]ssert.*out of bounds"),
        r("draft_context_mismatch", "srcIndex < srcSelectDimSize"),
        r("spec_config_invalid", "set_embed", r"no attribute '?set_embed"),
        r("spec_config_invalid", "hot_token_id", r"no attribute '?hot_token_id"),
        r("spec_config_invalid", "get_embed_and_head", r"no attribute"),
        r("spec_config_invalid", "set_eagle3_layers_to_capture", r"no attribute"),
        r("spec_config_invalid", "speculative", r"(?:ValueError|AssertionError|Error|error:).{0,200}(?:speculative[_-]|speculative decoding)", WEAK),
        r("draft_arch_mismatch", "KeyError", r"KeyError: ['\"](?:model\.)?(?:midlayer|layers\.0|embed_tokens|fc|d2t|t2d|norm|lm_head|hidden_norm)\b"),
        # G24
        r("vocab_map_mismatch", "must match the size of tensor b", r"size of tensor a \(\d+\) must match", WEAK),
        r("vocab_map_mismatch", "load_vocab_mapping", r"[Ee]rror|mismatch", WEAK),
        r("hidden_state_mismatch", "does not match the shape of the indexed tensor"),
        r("hidden_state_mismatch", "mat1 and mat2 shapes cannot be multiplied", "", WEAK),
        r("hidden_state_nan", "expected to be non-nan"),
        r("hidden_state_nan", "nan", r"(?:hidden.?states?|logits|loss).{0,80}\b(?:contains?|is|are|=|:) ?(?:nan|NaN|inf)\b"),
        # G25 / G26
        r("server_died_under_client", "Cannot connect to host"),
        r("server_died_under_client", "may be unreachable"),
        r("server_died_under_client", "onnection refused", r"[Cc]onnection refused", WEAK),
        r("server_died_under_client", "ConnectionRefusedError", "", WEAK),
        r("server_died_under_client", "Server disconnected", "", WEAK),
        # G27
        r("nvml_version_mismatch", "river/library version mismatch", r"[Dd]river/library version mismatch"),
        r("nvml_version_mismatch", "LIB_RM_VERSION_MISMATCH"),
        r("nvml_version_mismatch", "LibRmVersionMismatch"),
        r("nvml_not_found", "ould not load NVML", r"could not load NVML|Could not load NVML"),
        r("nvml_not_found", "NVML Shared Library Not Found"),
        r("nvml_not_found", "LibraryNotFound"),
        r("nvml_not_found", "libnvidia-ml.so", r"not found|cannot open|No such file"),
        r("nvml_not_found", "NVIDIA-SMI has failed because it couldn't communicate"),
        r("nvml_mig", "MIG", r"(?:NoPermission|No Permission|Insufficient Permissions|N/A|[Nn]ot [Ss]upported|[Ee]nabled).*MIG|MIG.*(?:NoPermission|Insufficient Permissions|[Nn]ot [Ss]upported)", WEAK),
        r("nvml_mig", "Insufficient Permissions", "", WEAK),
        r("nvml_pid_namespace", "No running processes found", "", WEAK),
        r("nvml_struct_mismatch", "No Such Process", "", WEAK),
        r("nvml_unified_memory", "Not Supported", r"(?:failed to get memory info|[Mm]emory.?(?:info|usage)|memory\.(?:total|used)).*Not Supported|Not Supported.*[Mm]emory", WEAK),
        r("nvml_unified_memory", "NotSupported", r"[Mm]emory", WEAK),
        r("nvml_unified_memory", "GB10", r"GB10.*|Not Supported", SYMPTOM),
        # G28
        r("orphan_processes", "::", r"^\W*\S+\s+\d+\s+1\s.*(?:sglang::|VLLM::)", CAUSE),
        r("orphan_processes", "sglang::", r"\bppid[= :]+1\b|\bPPID 1\b"),
        r("orphan_processes", "MiB", r"\d\s+(?:C\s+)?\S*(?:sglang::|VLLM::)\w+.*\d+ ?MiB", WEAK),
        r("terminal_hangup", "SIGHUP", r"SIGHUP(?!.*ignor)"),
        r("terminal_hangup", "got signal: 1", r"got signal: 1\b"),
        r("terminal_hangup", "ignal 1", r"\b[Ss]ignal 1\b(?: \(|,|$| )"),
        r("terminal_hangup", "Hangup", r"^\W*Hangup\b"),
        # G29
        r("warmup_failed", "Initialization failed. warmup error", "", WEAK),
    )  # fmt: skip


@cache
def by_literal() -> dict[str, list[tuple[Rule, Pattern | None, Pattern | None]]]:
    """The table by the literal that gates its rules: literal -> (rule, its pattern, its `unless`)."""
    table: dict[str, list[tuple[Rule, Pattern | None, Pattern | None]]] = {}
    for rule in _rules():
        table.setdefault(rule.literal, []).append(
            (
                rule,
                Pattern(rule.pattern) if rule.pattern else None,
                Pattern(rule.unless) if rule.unless else None,
            )
        )
    return table


@cache
def _literals() -> Words:
    return Words(by_literal())


_FRAME = Pattern(r'File "([^"]+)", line \d+(?:, in (\S+))?')
_NATIVE_FRAME = Pattern(r"^\s*frame #\d+: (\S+)")
_EXCEPTION = Pattern(
    r"^\s*(?:\[rank\d+\]: ?|ERROR \S+ ?)?(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Timeout|Failure|Warning))(?::\s*(?P<msg>.*))?$"
)
_IGNORED_IMPORT = Pattern(r"Ignore import error when loading ([\w.]+)")

_FRAME_PHASE: tuple[tuple[Pattern, Phase], ...] = (
    (Pattern(r"^event_loop|^run_batch$|^process_batch|^update_weights|^init_weights_update_group$|^forward_batch_speculative|^run_busy_loop$|^run_engine_core.*busy|^_process_engine_step"), Phase.SERVING),
    (Pattern(r"^init_cuda_graph|^init_device_graphs|^capture|^CudaGraphRunner|^capture_model|^kernel_warmup|^compile_or_warm_up|^init_piecewise|^warmup_compile|^init_decode_cuda"), Phase.GRAPH_CAPTURE),
    (Pattern(r"^init_memory_pool|^profile_max_num|^determine_(?:available_memory|num_available)|^_?initialize_kv_cache|^init_kv|^profile_run|^_check_enough_kv|^get_kv_cache_config|^configure_pool"), Phase.KV_ALLOC),
    (Pattern(r"^load_model$|^get_model$|^_initialize_model|^load_weights|^make_layers|^create_weights|_weights_iterator$|^initialize_model$|^get_model_architecture|^resolve_model_cls|^load_vocab_mapping"), Phase.WEIGHT_LOAD),
    (Pattern(r"^init_torch_distributed|^init_distributed|^init_device|^ncclCommInit|^initialize_model_parallel|^init_process_group|^init_model_parallel|^_?new_process_group"), Phase.DIST_INIT),
)  # fmt: skip


_LOOP = Pattern(r"event_loop_\w+")
_LOSS = Pattern(r"\bloss\b['\" ]*[=: ]+ *([\d.]+|nan)")
_ACC = Pattern(r"\bacc(?:uracy)?(?:_\d+)?\b['\" ]*[=: ]+ *([\d.]+)")
_STEP = Pattern(r"(\d+)/(\d+) \[")
_AVAIL = Pattern(r"Load weight begin\. avail mem=(\d+(?:\.\d+)?) GB")
# name, words of which every match holds one, pattern
_NUMBERS: tuple[tuple[str, tuple[str, ...], Pattern], ...] = tuple(
    (name, words, Pattern(pattern, re.I))
    for name, words, pattern in (
        ("total", ("repeat=", "num_prompts", "num-prompts", "total_requests", "total requests"), r" repeat=\d+ completed=\d+/(\d+) |num_prompts['\"]?\s*[=:]\s*(\d+)|['\"]?total_requests['\"]?\s*[=:]\s*(\d+)|Total requests:\s+(\d+)|--num-prompts[ =](\d+)"),
        ("successful", ("repeat=", "successful", "completed'", 'completed"'), r" repeat=\d+ completed=(\d+)/|Successful requests:\s+(\d+)|['\"]successful_requests['\"]:\s*(\d+)|['\"]completed['\"]:\s*(\d+)"),
        ("failed", ("failed",), r"Failed requests:\s+(\d+)|['\"]failed_requests['\"]:\s*(\d+)|['\"]failed['\"]:\s*(\d+)"),
        ("generated", ("generated", "total_output"), r"Total generated tokens(?: \(retokenized\))?:\s+(\d+)|['\"]total_output_tokens['\"]:\s*(\d+)|['\"]total_generated_tokens['\"]:\s*(\d+)|['\"]total_output['\"]:\s*(\d+)"),
        ("throughput", ("throughput", "output_tokens_per_second"), r"\boutput_throughput=([\d.]+) tok/s|['\"]output_tokens_per_second['\"]:\s*([\d.]+)|['\"]output_throughput['\"]:\s*([\d.]+)|Output token throughput \(tok/s\):\s+([\d.]+)"),
        ("accept_length", ("accept",), r"^\s*(?:Average |Mean )?[Aa]ccept length:\s+([\d.]+)|['\"]accept_length['\"]:\s*([\d.]+)"),
    )
)  # fmt: skip
# words that note() acts upon beside those of the rules
_TELLING = (
    'File "', "event_loop", "Traceback", "Ignore import error", "igquit", "SIGQUIT", "hit an exception", "NCCL INFO", "spans across",
    "Load weight begin", "ImportError", "server_args=", "Namespace(", "Error", "Exception", "Exit", "above exception",
)  # fmt: skip
_NUMBER_WORDS = Pattern("|".join(re.escape(word) for _, words, _ in _NUMBERS for word in words))
_NUMBER_HINTS = ("requests", "prompts", "tokens", "ccept", "completed", "throughput", "total_output")
# what a client's line about a failed request holds
_CLIENT_WORDS = (
    "http/", "status", "service", "internal", "bad", "gateway", "connect", "timeout", "clientos",
)  # fmt: skip
_SERVER_ERROR = Pattern(
    r"HTTP/[\d.]+ 5\d\d|\b50[0234] (?:Service|Internal|Bad|Gateway)|\bstatus(?:_code)?[ =:]+5\d\d", re.I
)
_TRACE_WORDS = ('File "', "event_loop", "Traceback")
_ONE_DIGIT = str.maketrans("123456789", "000000000")
_CLIENT_ERRORS = (
    "connectionreseterror", "connection reset", "serverdisconnected", "clientconnectorerror", "clientoserror", "onnection refused", "connect call failed", "cannot connect to host", "readtimeout", "timeouterror", "connection aborted", "remotedisconnected",
)  # fmt: skip
_CLIENT_SAYS = Pattern(
    "|".join((r"http/|status|\d (?:service|internal|bad|gateway)", *map(re.escape, _CLIENT_ERRORS)))
)


class Collector:
    """note() every line of a start; keeps the few that prove something. Bounded: a gigabyte of errors costs kilobytes."""

    def __init__(self) -> None:
        self._rules = by_literal()
        self._words = _literals()
        self._reset()

    def _reset(self) -> None:
        self._found: dict[str, list[Finding]] = {}
        self._near: deque[str | bytes] = deque(maxlen=24)
        self.frames: deque[str] = deque(maxlen=60)
        self.files: deque[str] = deque(maxlen=60)
        self.order = 0
        self.ignored_imports: dict[str, Line] = {}
        self.trace_open: Line | None = None  # newest "Traceback" whose exception line has not come
        self.first_exception: Finding | None = None
        self.last_trace: Finding | None = None  # the newest trace's exception; of chained ones the first
        self.trace_end: Line | None = None  # the newest trace's last exception
        self._is_chained = False
        self.sigquit: Line | None = None
        self.scheduler_exception: Finding | None = None
        self.saw_p2p = False
        self.saw_init_complete = False
        self.spans_nodes = False
        self.nranks = 0
        self.avail_gb: float | None = None  # GPU memory free when the load began
        self.numbers: dict[str, float] = {}  # of a benchmark: total, successful, failed, generated ...
        self.lines: dict[str, Line] = {}  # the line that told each of them
        self.server_errors = 0  # 5xx lines that a client printed
        self.client_errors = 0  # refused, reset, timed out
        self.dead_steps: tuple[int, int] | None = (
            None  # first and newest training step without loss and accuracy
        )
        self.dead_lines = 0

    def restart(self, line: Line) -> None:
        """A new start begins: what the old one proved is history."""
        self._reset()

    def findings(self) -> tuple[Finding, ...]:
        return tuple(sorted((f for group in self._found.values() for f in group), key=lambda f: f.order))

    @property
    def has_cause(self) -> bool:
        return bool(self._found)

    def of(self, root_cause: str) -> list[Finding]:
        return [f for key, group in self._found.items() if key.startswith(f"{root_cause} ") for f in group]

    def _finding(
        self, root_cause: str, line: Line, strength: int, phase: Phase, round_: int, note: str = ""
    ) -> Finding:
        self.order += 1
        return Finding(
            root_cause, line, strength, phase, round_, tuple(self.frames), self.order, note,
            after_death=self.sigquit is not None, files=tuple(self.files), near=tuple(map(_near_text, self._near)),
        )  # fmt: skip

    def note(self, line: Line, phase: Phase, round_: int, engine: str) -> None:
        """One line of the start, in order; phase and round: where the tracker stands after it."""
        text, body = line.text, line.body
        if 'File "' in body:
            frame = _FRAME.search(body)
            if frame:
                self.frames.append(frame[2] or "")
                self.files.append(frame[1])
                return
        if "event_loop" in body and (loop := _LOOP.search(body)):
            self.frames.append(loop[0])  # a trace may be cut before the frame that this call opens
        if "Traceback (most recent call last)" in body:
            self.trace_open = line
            if not self._is_chained:
                self.last_trace = None
            self._is_chained = False
            self.frames.clear()
            self.files.clear()
        if len(text) > 8192:
            text = text[:4096] + " " + text[-4096:]
        if "Ignore import error when loading" in text:
            match = _IGNORED_IMPORT.search(text)
            if match and len(self.ignored_imports) < 400:
                self.ignored_imports.setdefault(match[1], line)
            return
        if "above exception" in body:  # During handling of the above exception, ...; The above exception was the direct cause ...
            self._is_chained = self.last_trace is not None
        self._count(text, line, phase, round_)
        if "server_args=" in text[:160] or text.startswith(("args: Namespace", "Namespace(")):
            return  # a wall of words such as error=None
        for literal in self._words.maybe_in(text):
            if literal not in text:
                continue
            for rule, pattern, unless in self._rules[literal]:
                if (pattern is None or pattern.search(text)) and not (unless and unless.search(text)):
                    group = self._found.setdefault(f"{rule.root_cause} {rule.strength}", [])
                    if len(group) < KEEP_PER_CLASS:
                        group.append(self._finding(rule.root_cause, line, rule.strength, phase, round_))
        if "Error" in body or "Exception" in body or "Exit" in body:
            self._note_exception(body, line, phase, round_)
        if line.body:
            self._near.append(text if len(text) <= 400 else text[:400])

    def pass_by(self, line: Line | bytes) -> None:
        """A line that is_mute(), perhaps not read: it stands near what comes after it all the same."""
        if isinstance(line, bytes):
            self._near.append(line)
        elif line.body:
            self._near.append(line.text[:400])

    def has_ignored(self, module: bytes) -> bool:
        """Was it told already that this module's import failed and was ignored? Then telling it again changes nothing."""
        return module.decode("utf-8", "replace") in self.ignored_imports

    @staticmethod
    def ignored_import(line: Line) -> str:
        """The module's name, when a line tells nothing but that its import failed and was ignored; else ""."""
        match = _IGNORED_IMPORT.search(line.text)
        return "" if match is None or any(word in line.text for word in _TRACE_WORDS) else match[1]

    def is_mute(self, text: str) -> bool:
        """Could note() in any phase not change anything, but for what stands near a fault and a step's loss, for this line and
        for any other of the same length that differs from it in its digits only?"""
        if any(word in text for word in _TELLING) or _CLIENT_SAYS.search(text.lower()):
            return False
        shape = text.translate(_ONE_DIGIT)
        for literal in self._words.maybe_in(text):
            if literal.translate(_ONE_DIGIT) not in shape:
                continue
            for rule, pattern, unless in self._rules[literal]:
                if _reads_digits(rule.pattern) or _reads_digits(rule.unless):
                    return False
                if (pattern is None or pattern.search(text)) and not (unless and unless.search(text)):
                    return False
        return not self._tells_number(text)

    def says_nothing(self, text: str, *, in_training: bool = False) -> bool:
        """Could note() not change anything for this line, and for any other that differs from it in its digits only?
        in_training: but for its loss and accuracy (see `signal`); a client's words count too."""
        if in_training:
            low = text.lower()
            if any(word in low for word in _CLIENT_WORDS):
                return False
        elif "loss" in text or "Loss" in text:
            return False
        if any(word in text for word in _TELLING):
            return False
        for literal in self._words.maybe_in(text):
            if literal not in text and not any(c.isdigit() for c in literal):
                continue  # "::" of a stamp without its digits
            for rule, pattern, unless in self._rules[literal]:
                if any(c.isdigit() for c in f"{literal}{rule.pattern}{rule.unless}"):
                    return False  # other digits may be a proof
                if (pattern is None or pattern.search(text)) and not (unless and unless.search(text)):
                    return False
        return not self._tells_number(text)

    @staticmethod
    def _tells_number(text: str) -> bool:
        low = text.lower()
        return _may_tell_number(low) and any(
            any(word in low for word in words) and pattern.search(text) for _, words, pattern in _NUMBERS
        )

    def _note_exception(self, body: str, line: Line, phase: Phase, round_: int) -> None:
        match = _EXCEPTION.match(body)
        if match is None or match["type"].endswith("Warning"):
            return
        if self.first_exception is None or (self.first_exception.strength == SYMPTOM and self.trace_open):
            self.first_exception = self._finding(
                "child_exception", line, WEAK if self.trace_open else SYMPTOM, phase, round_, match["type"]
            )
        if self.trace_open:
            self.last_trace = self.last_trace or self._finding("child_exception", line, WEAK, phase, round_, match["type"])
            self.trace_end = line
        self.trace_open = None

    def _count(self, text: str, line: Line, phase: Phase, round_: int) -> None:
        """Facts that need more than one line."""
        if "igquit from a child" in text or "SIGQUIT received" in text:
            self.sigquit = self.sigquit or line
        if "hit an exception" in text:
            self.scheduler_exception = self.scheduler_exception or self._finding(
                "child_exception", line, SYMPTOM, phase, round_
            )
        if "NCCL INFO" in text:
            if "via P2P" in text:
                self.saw_p2p = True
            if "Init COMPLETE" in text:
                self.saw_init_complete = True
                match = re.search(r"nranks (\d+)", text)
                if match:
                    self.nranks = max(self.nranks, int(match[1]))
        elif "spans across nodes" in text:
            self.spans_nodes = True
        elif "Load weight begin" in text and self.avail_gb is None:
            match = _AVAIL.search(text)
            self.avail_gb = float(match[1]) if match else None
        elif "- ImportError" in text:
            self.lines["native import"] = line  # the last one names the cause
        low = text.lower()
        if "#running-req" not in low and _may_tell_number(low):
            for name, words, pattern in _NUMBERS:
                match = pattern.search(text) if any(word in low for word in words) else None
                if match:
                    value = next((g for g in match.groups() if g is not None), None)
                    if value is not None and (name != "generated" or name not in self.numbers):
                        try:
                            self.numbers[name] = float(value)
                        except ValueError:
                            continue
                        self.lines[name] = line
        if phase in (Phase.BENCH, Phase.BOOT, Phase.EXTRACT, Phase.TRAIN):
            names_status = "50" in low and any(
                word in low for word in ("service", "internal", "bad", "gateway")
            )
            if (names_status or "http/" in low or "status" in low) and _SERVER_ERROR.search(text):
                self.server_errors += 1
                self.lines.setdefault("server error", line)
            elif ("connect" in low or "timeout" in low or "clientos" in low) and any(
                word in low for word in _CLIENT_ERRORS
            ):
                self.client_errors += 1
                self.lines.setdefault("client error", line)
        if "loss" in low:
            self._note_loss(low, line)

    def _note_loss(self, text: str, line: Line) -> None:
        told = signal(text)
        if told == "nan":
            self.lines.setdefault("nan loss", line)
        elif told == "alive":
            self.dead_steps, self.dead_lines = None, 0
        if told != "dead":
            return
        step = _STEP.search(text)
        at = int(step[1]) if step else self.dead_lines
        self.dead_lines += 1
        self.dead_steps = (self.dead_steps[0] if self.dead_steps else min(at, 1), at)
        self.lines["dead step"] = line


def _may_tell_number(low: str) -> bool:
    return any(hint in low for hint in _NUMBER_HINTS) and _NUMBER_WORDS.search(low) is not None


def _near_text(line: str | bytes) -> str:
    return line if isinstance(line, str) else parse(0, clean(line.decode("utf-8", "replace"))).text[:400]


@cache
def _reads_digits(pattern: str) -> bool:
    """Does a pattern ask for certain digits, not only for any? How often something may come is no digit of the text."""
    return any(c.isdigit() for c in re.sub(r"\{\d*,?\d*\}", "", pattern))


def signal(low: str) -> str:
    """What a training step's loss and accuracy say: "alive", "dead" (both nearly 0), "nan", or "" (it does not tell both)."""
    if "acc" not in low:
        return ""
    loss, acc = _LOSS.search(low), _ACC.search(low)
    if loss is None or acc is None:
        return ""
    if loss[1] == "nan":
        return "nan"
    try:
        return "dead" if float(loss[1]) < 0.005 and float(acc[1]) < 0.005 else "alive"
    except ValueError:
        return ""


def stage_of(finding: Finding) -> Phase | None:
    """The phase that the trace's frames name: the outermost loop or draft worker first, then the innermost frame."""
    names = [f for f in finding.frames if f]
    if any(_FRAME_PHASE[0][0].match(n) for n in names):
        return Phase.SERVING
    if finding.in_draft and any(
        n in ("__init__", "load_model", "init_device_graphs", "init_cuda_graphs") for n in names
    ):
        return Phase.DRAFT_LOAD
    for name in reversed(names):
        for pattern, phase in _FRAME_PHASE[1:]:
            if pattern.match(name):
                return phase
    return None
