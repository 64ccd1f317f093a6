"""How fast logs are understood: MB and lines a CPU-second for each kind of log.

python tests/benchmarks/parse_speed.py
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "load"))
from wrap import STYLES

from k2tui.engines._reading import load_tracker

FIXTURES = Path(__file__).parent.parent / "fixtures"
READY = (FIXTURES / "sglang/0.5.23/llama-ready.log").read_bytes()
DECODE = (
    b"[2026-11-29 18:10:00 TP0] Decode batch, #running-req: 31, #token: 212000, token usage: 0.31, accept len: 2.71, accept rate: 0.53, "
    b"cuda graph: True, gen throughput (token/s): 1312.12, #queue-req: 0\n"
)
ACCESS = b'[2026-11-29 18:10:00] INFO:     10.0.0.7:41234 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'


def main() -> int:
    serving = READY + (DECODE * 6 + ACCESS * 2) * 20_000
    samples = {
        "serving, SGLang": serving,
        "serving, docker stamps": STYLES["docker"](READY + (DECODE * 6 + ACCESS * 2) * 800),
        "start, SGLang 0.5.23": READY * 8,
        "start, 8 ranks": (FIXTURES / "sglang/0.5.23/tp8-72shards.log").read_bytes() * 8,
        "start, vLLM": (FIXTURES / "vllm/0.32.0/ready.log").read_bytes() * 20,
    }
    print(f"load of this machine {os.getloadavg()[0]:.1f}")
    print(f"{'log':28}{'MB':>8}{'MB/CPU-s':>10}{'lines/CPU-s':>14}")
    for name, data in samples.items():
        tracker = load_tracker()
        begin = time.process_time()
        for at in range(0, len(data), 1 << 20):
            tracker.feed(data[at : at + (1 << 20)], 1_796_000_000.0)
        tracker.view(1_796_000_000.0)
        took = time.process_time() - begin
        print(f"{name:28}{len(data) / 1e6:8.1f}{len(data) / 1e6 / took:10.1f}{data.count(10) / took:14,.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
