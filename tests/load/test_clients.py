"""Logs of trainers and benchmark clients: phase, steps or requests, the newest loss, the end, and what ended them."""

from __future__ import annotations

import pytest

from k2tui.core.load import Phase, ShardCount, State
from k2tui.core.tracker import Evidence
from k2tui.engines._reading import Reading, read_whole

NOW = 1_796_000_000.0
HF = """[2026-11-29 18:06:01,123] [INFO] [real_accelerator.py:222:get_accelerator] Setting ds_accelerator to cuda (auto detect)
***** Running training *****
  Num examples = 1,000
  Num Epochs = 3
  Instantaneous batch size per device = 8
  Total train batch size (w. parallel, distributed & accumulation) = 8
  Gradient Accumulation steps = 1
  Total optimization steps = 375
  Number of trainable parameters = 1,543,714,304
\r  0%|          | 0/375 [00:00<?, ?it/s]\r  3%|▎         | 10/375 [00:05<03:01,  2.01it/s]                                                {'loss': 2.3124, 'grad_norm': 1.53, 'learning_rate': 4.866e-05, 'epoch': 0.08}
\r  3%|▎         | 10/375 [00:05<03:01,  2.01it/s]\r  5%|▌         | 20/375 [00:10<02:56,  2.01it/s]                                                {'loss': 1.9871, 'grad_norm': 1.31, 'learning_rate': 4.73e-05, 'epoch': 0.16}
"""
HFEND = (
    HF
    + """\r100%|██████████| 375/375 [03:07<00:00,  2.00it/s]
{'train_runtime': 187.4, 'train_samples_per_second': 16.008, 'train_steps_per_second': 2.001, 'train_loss': 1.2345, 'epoch': 3.0}
"""
)
SF = """W1129 18:05:58.100000 4012 torch/distributed/run.py:793] *****************************************
W1129 18:05:58.100000 4012 torch/distributed/run.py:793] Setting OMP_NUM_THREADS environment variable for each process to be 1 in default, to avoid your system being overloaded, please further tune the variable for optimal performance in your application as needed.
W1129 18:05:58.100000 4012 torch/distributed/run.py:793] *****************************************
[2026-11-29 18:06:20] Loading target model from /models/Llama-3.1-8B-Instruct
Loading checkpoint shards: 100%|██████████| 4/4 [00:02<00:00,  1.61it/s]
dataset is cached at ./cache/processed_dataset
Training Epoch 0:   1%|          | 20/2500 [00:31<1:05:11,  1.58s/it, loss=3.41, acc=0.21, time=1.52s]
Training Epoch 0:   2%|          | 50/2500 [01:18<1:04:02,  1.57s/it, loss=2.90, acc=0.31, time=1.55s]
Train Epoch [1/10], position 0, Acc: 0.31
Train Epoch [1/10], position 0, pLoss: 2.90
"""
TR = """W1129 18:05:58.100000 4012 torch/distributed/run.py:793] Setting OMP_NUM_THREADS environment variable for each process to be 1 in default
step=10 loss=3.2 lr=1e-4
step=20 loss=3.0 lr=1e-4
W1129 18:09:00.100000 4012 torch/distributed/elastic/multiprocessing/api.py:897] Sending process 4020 closing signal SIGTERM
E1129 18:09:01.200000 4012 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: -9) local_rank: 3 (pid: 4023) of binary: /opt/venv/bin/python
Traceback (most recent call last):
  File "/opt/venv/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError: 
============================================================
train_eagle3_online.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-29_18:09:00
  host      : node0
  rank      : 3 (local_rank: 3)
  exitcode  : -9 (pid: 4023)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 4023
============================================================
"""
VB = """INFO 11-29 18:06:22 [__init__.py:241] Automatically detected platform cuda.
Namespace(subparser='bench', bench_type='serve', dispatch_function=<function BenchmarkServingSubcommand.cmd at 0x7f>, seed=0, num_prompts=100, dataset_name='random', port=8000)
Starting initial single prompt test run...
Waiting for endpoint to become up in 600 seconds
 |          | 00:00 elapsed, 00:00 remaining
Initial test run completed. Starting main benchmark run...
Traffic request rate: inf
Burstiness factor: 1.0 (Poisson process)
Maximum request concurrency: None
\r  0%|          | 0/100 [00:00<?, ?it/s]\r 50%|█████     | 50/100 [00:03<00:03, 15.6it/s]"""
VBEND = (
    VB
    + """\r100%|██████████| 100/100 [00:06<00:00, 15.6it/s]
tip: install termplotlib and gnuplot to plot the metrics
============ Serving Benchmark Result ============
Successful requests:                     100       
Failed requests:                         0         
Benchmark duration (s):                  6.40      
Total input tokens:                      102400    
Total generated tokens:                  12800     
Request throughput (req/s):              15.62     
Output token throughput (tok/s):         2000.00   
---------------Time to First Token----------------
Mean TTFT (ms):                          1234.5    
==================================================
"""
)
OWN = """4096 samples, 128 held out; 2500 steps of 8; 1 rank(s) on cuda, bfloat16
before training: expected accept length 1.021
step 1/2500: loss 8.1231, acc 0.013, 9120 tok/s, lr 1.00e-06, 3000 s left
step 50/2500: loss 5.1231, acc 0.213, 9120 tok/s, lr 1.00e-04, 2900 s left
"""
OB = "C=8 repeat=0 completed=64/64 output_throughput=812.3 tok/s ttft_p50=91.0 ms tpot_p50=9.12 ms itl_p99=21.00 ms accept_length=2.31\n"


def read(text: str, **facts: object) -> Reading:
    return read_whole(text.encode(), NOW, Evidence(is_complete=True, **facts))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "state", "phase", "count", "proof"),
    [
        (HF, State.LOADING, Phase.TRAIN, (20, 375), "'loss': 1.9871"),
        (HFEND, State.READY, Phase.TRAIN, (375, 375), "'train_runtime': 187.4"),
        (SF, State.LOADING, Phase.TRAIN, (50, 2500), "loss=2.90"),
        (TR, State.FAILED, Phase.TRAIN, None, "exitcode: -9"),
        (VB, State.LOADING, Phase.BENCH, (50, 100), "50/100"),
        (VBEND, State.READY, Phase.BENCH, (100, 100), "Successful requests:"),
        (OWN, State.LOADING, Phase.TRAIN, (50, 2500), "step 50/2500"),
        (OWN + "draft: /x/draft-best  expected accept length 2.310\n", State.READY, Phase.TRAIN, (50, 2500), "draft: /x/draft-best"),
        (OB, State.READY, Phase.BENCH, (64, 64), "completed=64/64"),
        (OB.replace("completed=64/64", "completed=60/64"), State.DEGRADED, Phase.BENCH, (60, 64), "completed=60/64"),
        (VBEND.replace("Failed requests:                         0", "Failed requests:                         7"), State.DEGRADED, Phase.BENCH, (100, 100), "Successful requests"),
    ],
    ids=["hf", "hf end", "specforge", "torchrun", "vllm bench", "vllm bench end", "own", "own end", "own bench", "own bench failed", "vllm bench failed"],
)  # fmt: skip
def test_clients_are_read(text, state, phase, count, proof):
    view = read(text).view
    assert (view.state, view.phase) == (state, phase)
    assert view.target == (ShardCount(*count) if count else None)
    assert proof in view.proof_line


def test_how_far_stands_in_the_sentence():
    assert read(OWN).view.verdict == "training, 50/2500"
    assert read(HFEND).view.verdict == "finished: 375 steps"
    assert read(VB).view.verdict == "running a benchmark, 50/100"


def test_training_that_goes_on_after_its_end_is_not_finished():
    assert read(HFEND + HF).view.state is State.LOADING


def test_a_trainer_that_was_killed_is_named_by_torchrun():
    verdict = read(TR).verdict
    assert verdict.root_cause == "host_oom_kill" and verdict.group == "G11"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (HF + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.00 GiB is free.\n", "gpu_oom_train"),
        (OWN.replace("loss 5.1231", "loss nan"), "hidden_state_nan"),
        (VB + "\naiohttp.client_exceptions.ClientConnectorError: Cannot connect to host 127.0.0.1:8000 ssl:default [Connect call failed]\n", "server_died_under_client"),
    ],
)  # fmt: skip
def test_what_goes_wrong_in_a_client(text, cause):
    assert read(text).view.root_cause == cause


def test_own_stop_of_a_trainer_is_told_by_its_exit_code():
    assert read(OWN, exit_code=1, alive=False).view.state is State.FAILED
