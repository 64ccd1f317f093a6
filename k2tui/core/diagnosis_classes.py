"""Root-cause classes: group, what each means, and a remedy in one or two sentences. A table, no logic."""

from __future__ import annotations

from typing import NamedTuple

from k2tui.core.load import Phase, State


class RootCause(NamedTuple):
    """state: the server's state when this class is proved. phase: where it happens when nothing else tells."""

    group: str
    state: State
    meaning: str
    remedy: str
    phase: Phase | None = None


_F, _S, _D = State.FAILED, State.STALLED, State.DEGRADED
_R = RootCause
CLASSES: dict[str, RootCause] = {
    "healthy": _R("G00", State.LOADING, "it is working", "None needed."),
    "healthy_slow_jit": _R("G00", State.LOADING, "kernels are being compiled", "Wait: the compile bars move. Later starts find them in the cache."),
    "load_stall_unknown": _R("G01", _S, "no shard has been loaded for far longer than this load's own rhythm", "Check the disk or network read rate, a dead or killed rank, host memory and access to the model hub before restarting.", Phase.WEIGHT_LOAD),
    "disk_full": _R("G02", _F, "the disk is full", "Free space or point HF_HOME (and TMPDIR) at a larger disk, then start again.", Phase.WEIGHT_LOAD),
    "permission_denied": _R("G02", _F, "a file may not be read or written", "chown or chmod the path in the proving line, or point HF_HOME / the cache folder to one that this user may write.", Phase.BOOT),
    "hub_access_denied": _R("G02", _F, "the model hub refused access", "Accept the model's terms on its page, and give the server a token of that account (HF_TOKEN); if the page asks for none, check the repository's name and the token's rights.", Phase.BOOT),
    "fd_limit": _R("G02", _F, "too many open files", "Raise ulimit -n (LimitNOFILE= in systemd, --ulimit nofile= in docker).", Phase.HTTP),
    "dist_init_hang": _R("G03", _S, "the ranks do not find each other", "Check that every node was started with the same image and dist-init-addr, and pin GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface that all nodes reach.", Phase.DIST_INIT),
    "rendezvous_unreachable": _R("G03", _F, "the rendezvous address does not answer", "Check the master address and port, the firewall and the world size on both sides; pin SGLANG_HOST_IP / NCCL_SOCKET_IFNAME.", Phase.DIST_INIT),
    "after_load_hang": _R("G03", _S, "the weights are in, and nothing but heartbeats comes after", "Look for a rank that never reports; unset tracing switches such as VLLM_TRACE_FUNCTION; run py-spy dump on the workers.", Phase.AFTER_LOAD),
    "p2p_iommu_hang": _R("G04", _S, "GPU peer-to-peer copies hang", "Try NCCL_P2P_DISABLE=1; if it cures it, turn off IOMMU/ACS on the host (or keep P2P off) and use --disable-custom-all-reduce.", Phase.DIST_INIT),
    "p2p_unsupported": _R("G04", _F, "these GPUs cannot reach each other's memory", "Start with --disable-custom-all-reduce (newer releases fall back by themselves).", Phase.DIST_INIT),
    "custom_allreduce_failed": _R("G04", _F, "the custom all-reduce could not register its buffers", "Start with --disable-custom-all-reduce; do not combine it with expandable_segments.", Phase.GRAPH_CAPTURE),
    "graph_capture_hang": _R("G05", _S, "graph capture began and does not go on", "Try --disable-cuda-graph or a smaller --cuda-graph-max-bs (from 0.5.23 on: --cuda-graph-max-bs-decode); if that starts, reinstall or update flashinfer, or choose another --attention-backend.", Phase.GRAPH_CAPTURE),
    "rank_desync_timeout": _R("G06", _F, "one rank did not reach a collective in time", "Read the log of the rank that is missing, not of the one that complains; put the model on a local disk or raise --dist-timeout if it was only slow.", Phase.WEIGHT_LOAD),
    "serving_hang": _R("G07", _F, "the server holds requests and does not work on them", "Dump the hung rank's stack with py-spy, then restart cleanly; raise --watchdog-timeout only when single steps are really that long.", Phase.SERVING),
    "kv_pool_too_small": _R("G08", _F, "after the weights there is no room for the KV cache", "Use more GPUs (tp) or a smaller or quantised model first; raise --mem-fraction-static if the weights do fit.", Phase.KV_ALLOC),
    "req_slots_exhausted": _R("G08", _F, "the request slots ran out", "Lower --max-running-requests or the draft tokens, or upgrade: slots leak in some releases.", Phase.SERVING),
    "gpu_oom_weights": _R("G09", _F, "the weights do not fit the GPU", "Spread the model over more GPUs (tp), or use a quantised checkpoint.", Phase.WEIGHT_LOAD),
    "gpu_oom_capture": _R("G09", _F, "graph capture ran out of GPU memory", "Lower --mem-fraction-static and --cuda-graph-max-bs (from 0.5.23 on: --cuda-graph-max-bs-decode).", Phase.GRAPH_CAPTURE),
    "gpu_oom_train": _R("G09", _F, "training ran out of GPU memory", "Lower the batch size or the sequence length, or shard the model.", Phase.TRAIN),
    "gpu_mem_held": _R("G10", _F, "another process holds the GPU's memory", "Stop the process that nvidia-smi shows on that GPU (often a left-over sglang::scheduler), or choose other GPUs.", Phase.BOOT),
    "gpu_mem_unbalanced": _R("G10", _F, "the GPUs' free memory differs too much", "Stop the foreign process named by nvidia-smi; if there is none, upgrade: the check was relaxed later.", Phase.DIST_INIT),
    "host_oom_kill": _R("G11", _F, "a process was killed with SIGKILL, most likely by the kernel for want of memory", "Give the host (or the container) more RAM, lower --hicache-size or the shuffle buffer; dmesg -T | grep -i oom proves it.", Phase.WEIGHT_LOAD),
    "killed_from_outside": _R("G11", _F, "killed by signal 9 from outside: the kernel counted no out-of-memory kill", "Look who sent the signal: an operator, a scheduler, a watchdog, or the container being stopped. More memory changes nothing.", Phase.SERVING),
    "checkpoint_corrupt": _R("G12", _F, "a checkpoint file is damaged or cut short", "Compare sizes and hashes with the hub and download the bad file again (an LFS pointer or a cut download looks like this).", Phase.WEIGHT_LOAD),
    "checkpoint_missing_shard": _R("G12", _F, "a checkpoint file is missing", "Download the files that the index names and the folder lacks.", Phase.WEIGHT_LOAD),
    "mmap_bus_error": _R("G12", _F, "reading the mapped checkpoint failed", "Check the file's size and the network disk; copy the model to a local disk, or load without mmap.", Phase.WEIGHT_LOAD),
    "arch_unsupported": _R("G13", _F, "this release does not know the model's architecture", "Upgrade the server to a release that has the model.", Phase.WEIGHT_LOAD),
    "model_import_failed": _R("G13", _F, "the model's own code could not be imported", "Fix the import that failed (install or match the named package), not the model.", Phase.WEIGHT_LOAD),
    "quant_mismatch": _R("G14", _F, "the quantization flag and the checkpoint disagree", "Drop --quantization, or give the one that the checkpoint's config names; a bf16 draft wants its own setting.", Phase.BOOT),
    "tp_not_divisible": _R("G14", _F, "the model's sizes are not divisible by the parallel size", "Choose a --tp size that divides the heads and the quantization blocks (or add expert parallelism).", Phase.WEIGHT_LOAD),
    "trust_remote_code": _R("G14", _F, "the model brings its own code and it was not allowed", "Add --trust-remote-code after reading that code.", Phase.BOOT),
    "tokenizer_incompatible": _R("G14", _F, "the tokenizer files do not fit the installed libraries", "Upgrade transformers and tokenizers to the version that the model's card names.", Phase.BOOT),
    "device_uuid_unsupported": _R("G14", _F, "CUDA_VISIBLE_DEVICES holds a UUID that this release cannot read", "Use device numbers instead of MIG-/GPU- UUIDs, or upgrade.", Phase.BOOT),
    "no_kernel_image": _R("G15", _F, "the wheel holds no code for this GPU", "Install the wheel built for this compute capability (and CUDA version).", Phase.GRAPH_CAPTURE),
    "kernel_unsupported": _R("G15", _F, "the chosen kernel does not support this shape or GPU", "Choose another --attention-backend (triton or flashinfer).", Phase.GRAPH_CAPTURE),
    "native_import_error": _R("G16", _F, "a native library could not be loaded", "Install the build that matches the installed torch and CUDA.", Phase.BOOT),
    "jit_toolchain": _R("G16", _F, "compiling a kernel failed: the tool chain is not complete", "Install a matching CUDA toolkit and point CUDA_HOME and PATH to it, or use --attention-backend triton --sampling-backend pytorch.", Phase.GRAPH_CAPTURE),
    "driver_too_old": _R("G17", _F, "the NVIDIA driver is too old for this CUDA", "Update the driver, or install the CUDA build that fits it.", Phase.BOOT),
    "fabric_manager": _R("G17", _F, "the NVSwitch fabric is not up", "Start nvidia-fabricmanager of exactly the driver's version, then retry.", Phase.BOOT),
    "shm_too_small": _R("G18", _F, "/dev/shm is too small", "Give the container --shm-size=32g or --ipc=host, and remove left-over /dev/shm/nccl-* files.", Phase.DIST_INIT),
    "nccl_system_error": _R("G18", _F, "NCCL met a system error", "Check df /dev/shm (remove stale /dev/shm/nccl-*), then run with NCCL_DEBUG=INFO to see the first WARN.", Phase.DIST_INIT),
    "port_in_use": _R("G19", _F, "the port belongs to another process", "Stop the process that holds the port (ss -ltnp), or choose another --port.", Phase.HTTP),
    "gpu_hw_fault": _R("G20", _F, "a GPU reported a hardware error", "Drain the node, look at nvidia-smi -q -d ECC and dmesg for Xid, reset the GPU or reboot; replace it if it comes back.", Phase.SERVING),
    "gpu_lost": _R("G20", _F, "a GPU has fallen off the bus", "Reboot or power-cycle the node; replace or reseat the GPU if it comes back.", Phase.MONITOR),
    "illegal_memory_access": _R("G21", _F, "a kernel touched memory that it may not", "Upgrade, or use another attention backend; CUDA_LAUNCH_BLOCKING=1 localises the kernel.", Phase.SERVING),
    "draft_arch_mismatch": _R("G22", _F, "the draft checkpoint does not fit the draft class", "Check the draft's config (architectures) and tensor names against the speculative algorithm.", Phase.DRAFT_LOAD),
    "draft_load_failed": _R("G22", _F, "the draft could not be loaded", "Check the draft's path, files and dtype; the target is fine.", Phase.DRAFT_LOAD),
    "spec_config_invalid": _R("G22", _F, "the speculative settings do not make sense together", "Give --speculative-draft-model-path a real draft of this target, and steps, top-k and draft tokens that fit.", Phase.DRAFT_LOAD),
    "draft_context_mismatch": _R("G22", _F, "the draft's context is shorter than the target's", "Limit --context-length to the draft's, or use a draft trained for the longer context; do not override.", Phase.DRAFT_LOAD),
    "draft_zero_acceptance": _R("G23", _D, "nothing that the draft proposes is accepted", "Check EAGLE against EAGLE3 and that the draft was trained on exactly this target (layers, vocabulary map, quantization).", Phase.SERVING),
    "draft_low_acceptance": _R("G23", _D, "the draft is accepted too rarely to pay", "Use fewer draft tokens, natural prompts or greedy sampling; retrain the draft on the target as it is served.", Phase.SERVING),
    "vocab_map_mismatch": _R("G24", _F, "the vocabulary map does not fit the vocabulary", "Rebuild the mapping (d2t/t2d) from this target's vocabulary size.", Phase.TRAIN),
    "hidden_state_mismatch": _R("G24", _F, "hidden states and labels have different shapes", "Extract with tp 1 (or gather correctly) and check the layers that the draft expects.", Phase.TRAIN),
    "hidden_state_nan": _R("G24", _F, "hidden states hold NaN", "Check the extraction's dtype and the prompts; drop the bad samples and extract again.", Phase.TRAIN),
    "train_no_signal": _R("G24", _D, "training runs and learns nothing", "Check the loss mask and chat template: no token seems to be trained on.", Phase.TRAIN),
    "bench_partial_failure": _R("G25", _D, "a part of the benchmark's requests failed", "Reject the numbers; count HTTP status and tokens, not replies, and read the server's log for the failing ones.", Phase.BENCH),
    "bench_zero_tokens": _R("G25", _D, "the benchmark received no tokens", "Reject the numbers: the requests failed or the stream was not parsed.", Phase.BENCH),
    "bench_degenerate": _R("G25", _D, "every request produced about one token", "Reject the numbers: check ignore_eos, max_tokens and the prompts.", Phase.BENCH),
    "client_connection_errors": _R("G25", _D, "the client could not keep its connections", "Lower the concurrency or raise the limits on the client's side; the server is alive.", Phase.BENCH),
    "server_died_under_client": _R("G26", _F, "the server is gone, the client only notices", "Open the server's log: it holds the cause.", Phase.BENCH),
    "nvml_version_mismatch": _R("G27", _D, "driver and NVML library have different versions", "Reboot (or reload the driver): GPU figures are off until then, the job may be healthy.", Phase.MONITOR),
    "nvml_pid_namespace": _R("G27", _D, "the processes on the GPU are not visible from in here", "Run the container with --pid=host (or look from the host).", Phase.MONITOR),
    "nvml_not_found": _R("G27", _D, "NVML is not there", "Install the driver, or give the container the NVIDIA runtime (--gpus all, NVIDIA_DRIVER_CAPABILITIES=utility).", Phase.MONITOR),
    "nvml_struct_mismatch": _R("G27", _D, "driver and NVML bindings disagree about a structure", "Upgrade nvidia-ml-py (or the driver): pids and memory are wrong until then.", Phase.MONITOR),
    "nvml_mig": _R("G27", _D, "the GPU is in MIG mode", "Query the MIG instance's handle; the parent's figures are not available.", Phase.MONITOR),
    "nvml_unified_memory": _R("G27", _D, "this GPU shares the host's memory", "Use MemAvailable of /proc/meminfo and the sum of the processes; label it unified.", Phase.MONITOR),
    "orphan_processes": _R("G28", _D, "processes of a dead server still hold the GPU", "Check that they are yours (title, parent 1), then SIGTERM their group and kill what is left by pid.", Phase.SHUTDOWN),
    "terminal_hangup": _R("G28", _F, "the terminal went away and took the server with it", "Start it in its own session (k2tui up, tmux, systemd-run, setsid).", Phase.SHUTDOWN),
    "child_exception": _R("G29", _F, "a process failed with an exception that names no known cause", "Read the trace around the proving line; if it is cut, the cause is not in this log: fetch the rest of it."),
    "exited_no_error": _R("G29", _F, "it ended without saying why", "Cause not in this log: fetch the exit code, dmesg -T, and the container's or scheduler's own log."),
    "warmup_failed": _R("G29", _F, "the warm-up request failed", "Cause not always in this log: read the lines above for the request's answer, or start with --skip-server-warmup to tell server from request.", Phase.WARMUP),
}  # fmt: skip


def remedy_for(root_cause: str) -> str:
    return CLASSES[root_cause].remedy if root_cause in CLASSES else ""
