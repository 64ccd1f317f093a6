"""How fast logs are understood: MB and lines a CPU-second for each kind of log.

python tests/benchmarks/parse_speed.py
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "load"))
from wrap import STYLES

from k2tui.engines._reading import load_tracker

FIXTURES = Path(__file__).parent.parent / "fixtures"
NOW = 1_796_000_000.0
READY = (FIXTURES / "sglang/0.5.23/llama-ready.log").read_bytes()
VLLM = (FIXTURES / "vllm/0.32.0/ready.log").read_bytes()
DECODE = (
    b"[2026-11-29 18:10:00 TP0] Decode batch, #running-req: 31, #token: 212000, token usage: 0.31, accept len: 2.71, accept rate: 0.53, "
    b"cuda graph: True, gen throughput (token/s): 1312.12, #queue-req: 0\n"
)
ACCESS = b'[2026-11-29 18:10:00] INFO:     10.0.0.7:41234 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
BARS = 100_000


def clock(seconds: int) -> str:
    return (
        f"{seconds // 3600}:{seconds % 3600 // 60:02d}:{seconds % 60:02d}"
        if seconds >= 3600
        else f"{seconds // 60:02d}:{seconds % 60:02d}"
    )


def bar(n: int, title: str, tail: str) -> str:
    """tqdm's n-th refresh of BARS, 8 a second."""
    times = f"{clock(n // 8)}<{clock((BARS - n) // 8)}"
    return (
        f"\r{title}{100 * n // BARS:3d}%|{'█' * (10 * n // BARS):<10}| {n}/{BARS} [{times},  8.01it/s{tail}]"
    )


def shards(total: int) -> bytes:
    """A checkpoint's shards, each refresh of the bar one shard more."""
    return "".join(
        f"Loading safetensors checkpoint shards: {100 * n // total:3d}% Completed | {n}/{total} "
        f"[{clock(n)}<{clock(total - n)},  1.01it/s]\r"
        for n in range(total + 1)
    ).encode()


def trainer(every: int) -> bytes:
    """A trainer's bar without a figure, and its logged loss as a line of its own."""
    return "".join(
        bar(n, "", "")
        + ("" if n % every else f"\n{{'loss': {4 - 3 * n / BARS:.4f}, 'epoch': {n / BARS:.2f}}}\n")
        for n in range(BARS)
    ).encode()


def main() -> int:
    some = READY + (DECODE * 6 + ACCESS * 2) * 800
    samples = {
        "serving, SGLang": READY + (DECODE * 6 + ACCESS * 2) * 40_000,
        "serving, docker stamps": STYLES["docker"](some) + STYLES["docker"]((DECODE * 6 + ACCESS * 2) * 8000),
        "serving, CRLF": (READY + (DECODE * 6 + ACCESS * 2) * 20_000).replace(b"\n", b"\r\n"),
        "serving, vLLM": VLLM
        + b"(APIServer pid=7) "
        + (ACCESS[22:] + b"(APIServer pid=7) ") * 100_000
        + b"\n",
        "first start, SGLang": READY,
        "first start, 8 ranks": (FIXTURES / "sglang/0.5.23/tp8-72shards.log").read_bytes(),
        "first start, vLLM": VLLM,
        "start, SGLang 0.5.23": READY * 40,
        "start, 8 ranks": (FIXTURES / "sglang/0.5.23/tp8-72shards.log").read_bytes() * 40,
        "start, vLLM": VLLM * 80,
        "start, docker stamps": STYLES["docker"](READY * 20),
        "bar of shards": READY[:30_000] + shards(20_000),
        "bars with loss": "".join(
            bar(n, "Training Epoch 0: ", f", loss={4 - 3 * n / BARS:.2f}, acc=0.21") for n in range(BARS)
        ).encode(),
        "bars, a loss every 10": trainer(10),
        "bars, a loss every step": trainer(1),
        "binary": random.Random(1).randbytes(8 << 20),
        "one line without end": b"abcdefgh " * (2 << 20),
    }
    print(f"load of this machine {os.getloadavg()[0]:.1f}")
    print(f"{'log':28}{'MB':>8}{'MB/CPU-s':>10}{'lines/CPU-s':>14}")
    for name, data in samples.items():
        tracker = load_tracker()
        tracker.feed(READY, NOW)  # the tables are made at their first use
        times = 20 if len(data) < 1 << 17 else 1
        begin = time.process_time()
        for _ in range(times):
            tracker = load_tracker()
            for at in range(0, len(data), 1 << 20):
                tracker.feed(data[at : at + (1 << 20)], NOW)
            tracker.view(NOW)
        took = (time.process_time() - begin) / times
        lines = data.count(b"\n") + data.count(b"\r") - data.count(b"\r\n")
        print(f"{name:28}{len(data) / 1e6:8.1f}{len(data) / 1e6 / took:10.1f}{lines / took:14,.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
