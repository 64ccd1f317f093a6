"""Short logs for root causes, written after what each kind of failure prints: evidence -> class, and what must not fool it."""

from __future__ import annotations

import textwrap

import pytest

from k2tui.core.tracker import Evidence
from k2tui.engines._reading import read_whole

NOW = 1_796_000_000.0
SCHEDULER = """
    [2026-03-01 10:00:40 TP0] Scheduler hit an exception: Traceback (most recent call last):
      File "/x/sglang/srt/managers/scheduler.py", line 1999, in run_scheduler_process
        scheduler = Scheduler(server_args, port_args, gpu_id, tp_rank, dp_rank)
"""
TAIL = "    [2026-03-01 10:00:41] Received sigquit from a child process. It usually means the child failed.\n"
LOOP = """
      File "/x/sglang/srt/managers/scheduler.py", line 2100, in run_scheduler_process
        scheduler.event_loop_overlap()
"""
SERVING = """
    [2026-03-01 10:00:00 TP0] Load weight begin. avail mem=78.41 GB
    [2026-03-01 10:00:20 TP0] Load weight end. type=X, avail mem=63.02 GB, mem usage=15.39 GB.
    [2026-03-01 10:00:30] INFO:     Uvicorn running on http://127.0.0.1:30000 (Press CTRL+C to quit)
    [2026-03-01 10:00:32] The server is fired up and ready to roll!
"""
ARGS = "[2026-03-01 10:00:00] server_args=ServerArgs(model_path='m/x', port=30000)\n"
TRACE = """
    Traceback (most recent call last):
      File "/x/sglang/launch_server.py", line 20, in run_server
        launch_server(server_args)
"""


def diagnose(log: str, **facts: object):
    names = set(Evidence._fields)
    known = {k: v for k, v in facts.items() if k in names}
    text = "\n".join(textwrap.dedent(part) for part in [log])
    return read_whole(text.encode(), NOW, Evidence(**known, extra=facts, is_complete=True)).answer()  # type: ignore[arg-type]


CASES: list[tuple[str, str, dict[str, object], str, str, str]] = [
    # (log, text of the proving line, facts, state, phase, class)
    (SCHEDULER + """
      File "/x/sglang/srt/model_executor/cuda_graph_runner.py", line 300, in capture
      File "/x/sglang/srt/distributed/device_communicators/custom_all_reduce.py", line 400, in register_graph_buffers
    RuntimeError: invalid argument
    /sgl-kernel/csrc/allreduce/custom_all_reduce.cuh:350
    """ + TAIL, "invalid argument", {"alive": False}, "failed", "graph_capture", "custom_allreduce_failed"),
    (SCHEDULER + """
    Exception: Capture cuda graph failed: Runtime check failed at /x/sgl_kernel/distributed/custom_all_reduce.cuh:37: CUDA error: invalid argument
    Possible solutions:
    1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)
    """ + TAIL, "custom_all_reduce.cuh:37", {"alive": False}, "failed", "graph_capture", "custom_allreduce_failed"),
    (SERVING + SCHEDULER + LOOP + """
    RuntimeError: alloc_req_slots runs out of memory. Please set a smaller number for `--max-running-requests`. self.req_to_token_pool.available_size()=1, num_reqs=2,
    """ + TAIL, "alloc_req_slots runs out of memory", {"alive": False}, "failed", "serving", "req_slots_exhausted"),
    ("""
    Loading vocab mapping from the cached file at: /cache/vocab_mapping/1.pt
    Training Epoch 0:   6%|███▌       | 155/2484 [09:06<2:14:55,  3.48s/it, loss=0.00, acc=0.00, time=3.46s]
    """, "loss=0.00, acc=0.00", {"alive": True}, "degraded", "train", "train_no_signal"),
    ("""
    Training Epoch 0:   6%|███▌       | 155/2484 [09:06<2:14:55,  3.48s/it, loss=5.31, acc=0.02, time=3.46s]
    """, "155/2484", {"alive": True}, "loading", "train", "healthy"),
    ("""
    [rank0]: Traceback (most recent call last):
    [rank0]:   File "/x/SpecForge/scripts/prepare_hidden_states.py", line 186, in _save_tensor
    [rank0]:     assert not torch.any(
    [rank0]: AssertionError: hidden_state is expected to be non-nan
    """, "expected to be non-nan", {"alive": False, "exit_code": 1}, "failed", "extract", "hidden_state_nan"),
    ("""
    ============ Serving Benchmark Result ============
    Successful requests:                     100
    Benchmark duration (s):                  10.09
    Total input tokens:                      12800
    Total generated tokens:                  0
    Output token throughput (tok/s):         0.00
    """, "Total generated tokens:", {"exit_code": 0}, "degraded", "bench", "bench_zero_tokens"),
    ("""
    ============ Serving Benchmark Result ============
    Backend:                                 sglang-oai-chat
    Successful requests:                     768
    Total generated tokens:                  768
    Total generated tokens (retokenized):    768
    """, "Total generated tokens:", {"exit_code": 0}, "degraded", "bench", "bench_degenerate"),
    ("""
    python3 -m sglang.bench_serving --backend sglang --dataset-name sharegpt --num-prompts 3000
    ============ Serving Benchmark Result ============
    Successful requests:                     1648
    Total generated tokens:                  326408
    """, "Successful requests:", {"exit_code": 0}, "degraded", "bench", "bench_partial_failure"),
    ("""
    [2026-03-01 10:00:00 TP0] Load weight begin. avail mem=78.41 GB
    Loading safetensors checkpoint shards:  50% Completed | 2/4 [00:01<00:01,  1.52it/s]
    Loading safetensors checkpoint shards: 100% Completed | 4/4 [00:02<00:00,  1.86it/s]
    """, "4/4", {"alive": False, "exit_code": 0}, "failed", "weight_load", "exited_no_error"),
    ("""
    [2026-03-01 10:00:00 TP0] Load weight begin. avail mem=78.41 GB
    Loading safetensors checkpoint shards:  50% Completed | 2/4 [00:01<00:01,  1.52it/s]
    Loading safetensors checkpoint shards: 100% Completed | 4/4 [00:02<00:00,  1.86it/s]
    """, "4/4", {"alive": True, "silence_s": 3600}, "stalled", "after_load", "after_load_hang"),
    ("""
    [2026-03-01 10:00:00 TP0] Load weight begin. avail mem=78.41 GB
    Loading safetensors checkpoint shards:  50% Completed | 2/4 [00:01<00:01,  1.52it/s]
    """, "2/4", {"alive": True, "silence_s": 3600, "read_bytes_s": 80e6}, "loading", "weight_load", "healthy"),
    ("""
    [2026-03-01 10:00:00 TP0] Load weight end. type=DeepseekV3ForCausalLM, avail mem=20 GB
    [2026-03-01 10:00:10 TP0] Capture cuda graph begin. This can take up to several minutes. avail mem=20.41 GB
    [2026-03-01 10:00:24 TP0] Entering DeepGEMM JIT Pre-Compile session. It may take a long time (typically 10-20 mins) if you have not run `sglang.compile_deep_gemm`.
    [2026-03-01 10:00:24 TP0] Try DeepGEMM JIT Compiling for <GEMM_NT_F8F8BF16> N=24576, K=1536, num_groups=1 with all Ms.
    DeepGEMM warmup:   3%|▎         | 512/16384 [00:41<21:00, 12.5it/s]
    """, "DeepGEMM warmup", {"alive": True, "silence_s": 4}, "loading", "graph_capture", "healthy_slow_jit"),
    ("""
    [2026-03-01 10:00:10 TP0] Capture cuda graph begin. This can take up to several minutes. avail mem=20.41 GB
    [2026-03-01 10:00:24 TP0] Try DeepGEMM JIT Compiling for <GEMM_NT_F8F8BF16> N=24576, K=1536, num_groups=1 with all Ms.
    """, "DeepGEMM JIT", {"alive": True, "silence_s": 700}, "loading", "graph_capture", "healthy_slow_jit"),
    ("""
    Traceback (most recent call last):
      File "/x/huggingface_hub/file_download.py", line 900, in hf_hub_download
    PermissionError: [Errno 13] Permission denied: '/root/.cache/huggingface/hub/models--org--model'
    """, "Permission denied", {"alive": False, "exit_code": 1}, "failed", "boot", "permission_denied"),
    (SCHEDULER + """
      File "/x/sglang/srt/model_loader/loader.py", line 366, in load_model
    RuntimeError: model.safetensors.index.json references 1 shard file(s) missing from /m (incomplete download?): ['model-00007-of-00012.safetensors']
    """ + TAIL, "shard file(s) missing", {"alive": False}, "failed", "weight_load", "checkpoint_missing_shard"),
    ("""
    Traceback (most recent call last):
      File "/x/sglang/srt/configs/model_config.py", line 300, in _verify_quantization
    ValueError: Quantization method specified in the model config (fp8) does not match the quantization method specified in the `quantization` argument (awq).
    """, "does not match the quantization method", {"alive": False, "exit_code": 1}, "failed", "boot", "quant_mismatch"),
    ("""
    The repository for /models/x contains custom code which must be executed to correctly load the model.
    Do you wish to run the custom code? [y/N] Traceback (most recent call last):
    ValueError: Loading /models/x requires you to execute the configuration file in that repo on your local machine. Make sure you have read the code there to avoid malicious use, then set the option `trust_remote_code=True` to remove this error.
    """, "wish to run the custom code", {"alive": False, "exit_code": 1}, "failed", "boot", "trust_remote_code"),
    ("""
    RuntimeError: The NVIDIA driver on your system is too old (found version 12040). Please update your GPU driver by downloading and installing a new version
    """, "driver on your system is too old", {"alive": False, "exit_code": 1}, "failed", "boot", "driver_too_old"),
    ("""
    [2026-03-01 10:00:00 TP0] Load weight begin. avail mem=78.41 GB
    [2026-03-01 10:00:20 TP0] Load weight end. type=Qwen3MoeForCausalLM, avail mem=63.02 GB, mem usage=15.39 GB.
    [2026-03-01 10:00:25 TP0] Load weight begin. avail mem=20.41 GB
    """ + SCHEDULER + """
      File "/x/sglang/srt/speculative/eagle_worker.py", line 113, in __init__
      File "/x/sglang/srt/model_loader/loader.py", line 366, in load_model
    OSError: /models/draft does not appear to have a file named config.json.
    """ + TAIL, "does not appear to have a file named config.json", {"alive": False}, "failed", "draft_load", "draft_load_failed"),
    (SERVING + """
    [2026-03-01 10:05:00 TP0] Decode batch, #running-req: 4, #token: 900, token usage: 0.01, accept len: 2.40, cuda graph: True, gen throughput (token/s): 120.0, #queue-req: 2
    [2026-03-01 10:05:40] INFO:     10.0.0.2:1 - "GET /health HTTP/1.1" 200 OK
    [2026-03-01 10:07:40] INFO:     10.0.0.2:1 - "GET /health HTTP/1.1" 200 OK
    [2026-03-01 10:10:40] INFO:     10.0.0.2:1 - "GET /health HTTP/1.1" 200 OK
    """, "Decode batch", {"alive": True, "silence_s": 10}, "stalled", "serving", "serving_hang"),
    (SERVING + """
    [2026-03-01 10:05:00 TP0] Decode batch, #running-req: 0, #token: 900, token usage: 0.01, accept len: 2.40, cuda graph: True, gen throughput (token/s): 120.0, #queue-req: 0
    [2026-03-01 10:10:40] INFO:     10.0.0.2:1 - "GET /health HTTP/1.1" 200 OK
    """, "fired up", {"alive": True, "silence_s": 10}, "ready", "serving", "healthy"),
    ("""
    2026-03-07 23:50:27,532 - __main__ - INFO - [2026-03-07 23:50:27 TP0] Init torch distributed begin.
    2026-03-07 23:50:27,532 - __main__ - WARNING - Attempt 13: Please wait for sglang server to become ready...
    2026-03-07 23:50:27,727 - __main__ - INFO - [2026-03-07 23:50:27 TP0] Load weight begin. avail mem=22.46 GB
    Loading safetensors checkpoint shards:  50% Completed | 2/4 [00:00<00:00,  2.85it/s]
    2026-03-07 23:50:28,550 - __main__ - WARNING - Attempt 14: Please wait for sglang server to become ready...
    """, "2/4", {"alive": True, "silence_s": 1}, "loading", "weight_load", "healthy"),
    (SCHEDULER + LOOP + """
    [2026-03-01 10:00:41] Received sigquit from a child process. It usually means the child failed.
    Killed
    """, "Scheduler hit an exception", {"alive": False, "exit_code": -9}, "failed", "serving", "child_exception"),
    ("""
    [2026-03-01 10:00:00 TP0] Load weight begin. avail mem=78.41 GB
    [2026-03-01 10:01:00] Rank 0 scheduler is dead. Please check if there are relevant logs.
    [2026-03-01 10:01:00] Exit code: -9
    """, "Exit code: -9", {"alive": False}, "failed", "weight_load", "host_oom_kill"),
    ("""
    [2026-03-01 10:00:00 TP0] Load weight begin. avail mem=3.41 GB
    [2026-03-01 10:00:05 TP0] NCCL WARN Error while creating shared memory segment /dev/shm/nccl-abc (size 9637888)
    RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)
    OSError: [Errno 28] No space left on device
    """, "shared memory segment", {"alive": False}, "failed", "weight_load", "shm_too_small"),
    # nobody told whether it lives: an exception that nobody caught is a start's last word
    (ARGS + TRACE + "OSError: 403 Client Error: Forbidden for url: https://huggingface.co/m/x/resolve/main/config.json\n",
     "403 Client Error", {}, "failed", "boot", "hub_access_denied"),
    (ARGS + TRACE + """
    huggingface_hub.errors.GatedRepoError: 403 Client Error. (Request ID: Root=1-67)

    Cannot access gated repo for url https://huggingface.co/m/x/resolve/main/config.json.
    Access to model m/x is restricted and you are not in the authorized list. Visit https://huggingface.co/m/x to ask for access.
    """, "GatedRepoError", {}, "failed", "boot", "hub_access_denied"),
    (ARGS + TRACE + "ValueError: early\n" + "[2026-03-01 10:00:02] going on\n" + TRACE + """
    KeyError: 'first'

    During handling of the above exception, another exception occurred:
    """ + TRACE + "ValueError: second\n", "KeyError: 'first'", {}, "failed", "boot", "child_exception"),
    (TRACE + "ValueError: bad thing\n", "bad thing", {}, "failed", "boot", "child_exception"),
    # it went on after the trace, it lives, or it serves
    (ARGS + TRACE + "OSError: 403 Client Error: Forbidden for url: https://huggingface.co/m/x\n[2026-03-01 10:00:09] Using the cache.\n",
     "Using the cache", {}, "loading", "boot", "healthy"),
    (ARGS + TRACE + "ValueError: bad thing\nLoading safetensors checkpoint shards:   3% Completed | 1/64 [00:01<01:00,  1.00it/s]\n",
     "1/64", {}, "loading", "weight_load", "healthy"),
    (ARGS + TRACE + "ValueError: bad thing\n", "bad thing", {"alive": True}, "loading", "boot", "healthy"),
    (SERVING + TRACE + "ValueError: bad request\n", "ready to roll", {}, "ready", "serving", "healthy"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("log", "proof", "facts", "state", "phase", "cause"),
    CASES,
    ids=[f"{n}-{c[5]}" for n, c in enumerate(CASES)],
)
def test_class(log, proof, facts, state, phase, cause):
    got = diagnose(log, **facts)
    assert (got["root_cause"], got["state"], got["phase"]) == (cause, state, phase), got
    assert proof in got["proof_line"]
