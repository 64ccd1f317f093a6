"""What capture costs beside an engine that never pauses: python tests/benchmarks/capture_writer.py [FOLDER] [BATCHES].

Batches of 8 samples of 1,024 tokens at H = 2048, three boundaries and last (134 MB). No engine and no GPU: the rows lie in the
ring already, as a GPU's copy engine would put them. A loop that never pauses stands for the scheduler; the time in which it stands still
(neither on a core nor waiting for one) is what capture takes from it. Compared are writer threads inside the engine's process and the writer process that the plug-in uses. Needs numpy and torch.
"""

from __future__ import annotations

import resource
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from k2tui.capture.link import WriterLink
from k2tui.capture.plugin import Capturer
from k2tui.capture.request import CaptureRequest
from k2tui.capture.ring import PinnedRing
from k2tui.states.layout import Manifest
from k2tui.states.writer import StatesWriter, WriterLimits, prepare_folder

HIDDEN, ROWS, SAMPLES = 2048, 1024, 8
BOUNDS = (2, 8, 13)
PARTS = (("input_ids", 4), ("aux", 3 * HIDDEN * 2), ("last", HIDDEN * 2))
BATCH_B = sum(ROWS * SAMPLES * b for _, b in PARTS)
RING_B = 1 << 29
LIMITS = WriterLimits(min_free_b=0, threads=2, pending_bytes=RING_B)


def ring_over(memory: Any) -> PinnedRing:
    return PinnedRing(torch.frombuffer(memory, dtype=torch.uint8))


def rid_of(index: int) -> str:
    return CaptureRequest("run", index, ROWS, ((ROWS // 2, ROWS),), "b").to_rid()


class InThreads:
    """Writer threads in this process."""

    def __init__(self, root: Path) -> None:
        self.writer = StatesWriter(root / "run", Manifest(HIDDEN, 16, BOUNDS), "bench", LIMITS)
        # as large as the ring: neither way may find its rows in the processor's cache
        self.rows = np.ones(RING_B, dtype=np.uint8)
        self.at = 0

    def batch(self, first: int) -> None:
        mask = np.zeros(ROWS, dtype=np.uint8)
        mask[ROWS // 2 :] = 1
        for i in range(first, first + SAMPLES):
            slot = self.writer.begin(i, ROWS, mask)
            for name, row_b in PARTS:
                if self.at + ROWS * row_b > RING_B:
                    self.at = 0
                rows = self.rows[self.at : self.at + ROWS * row_b]
                self.at += ROWS * row_b
                self.writer.put(slot, name, 0, rows, patience_s=None)

    def full(self) -> bool:
        return self.writer.stats.pending_bytes > RING_B - BATCH_B

    def close(self) -> None:
        self.writer.close()


class InProcess:
    """The plug-in's way."""

    def __init__(self, root: Path) -> None:
        prepare_folder_of(root)
        facts = {"hidden_size": HIDDEN, "num_hidden_layers": 16, "boundaries": list(BOUNDS)}
        self.link = WriterLink(root, "bench", facts, LIMITS, RING_B, ring_over)
        self.link.ring.buffer.fill_(1)

    def batch(self, first: int) -> None:
        region = self.link.ring.take(BATCH_B + 4096, None)
        assert region
        told, offset = [], 0
        for name, row_b in PARTS:
            told.append((name, offset, row_b))
            offset += ROWS * SAMPLES * row_b
        shares = [(rid_of(first + k), 0, ROWS, k * ROWS, k * ROWS) for k in range(SAMPLES)]
        self.link.piece(region, {"parts": told, "shares": shares})

    def full(self) -> bool:
        return sum(r.end - r.start for r in list(self.link.ring._used)) > RING_B - 2 * BATCH_B

    def close(self) -> None:
        self.link.close()


def prepare_folder_of(root: Path) -> None:
    (root / "run").mkdir(parents=True)
    prepare_folder(root / "run", Manifest(HIDDEN, 16, BOUNDS))


def thread_s() -> tuple[float, float, float]:
    """(wall, on a core, waiting for a core) of this thread, in seconds: what is missing in the sum, it stood still (Linux)."""
    on, queued, _ = Path("/proc/thread-self/schedstat").read_text().split()
    return time.perf_counter(), int(on) / 1e9, int(queued) / 1e9


def beside(kind: Any, root: Path, batches: int) -> tuple[float, float, float]:
    """(share of the time that the loop stood still, GB/s of the writer, CPU-seconds of all processes a GB)."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    used = cpu_s()
    made = kind(root)
    began, steps, sent = thread_s(), 0, 0
    while sent < batches:
        steps += 1
        if steps % 64 == 0 and not made.full():
            made.batch(sent * SAMPLES)
            sent += 1
    wall, on, queued = (b - a for a, b in zip(began, thread_s(), strict=True))
    made.close()
    all_s = time.perf_counter() - began[0]
    size = batches * BATCH_B / 1e9
    spent = cpu_s() - used - on
    shutil.rmtree(root, ignore_errors=True)
    return max(0.0, 1 - (on + queued) / wall), size / all_s, spent / size


def cpu_s() -> float:
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(u.ru_utime + u.ru_stime for u in both)


def hook_us(root: Path, turns: int = 300) -> float:
    """Microseconds of CPU that one prefill batch of 8 captured samples takes from the scheduler's thread; rows of width 8."""
    shutil.rmtree(root, ignore_errors=True)
    (root / "run").mkdir(parents=True)
    prepare_folder(root / "run", Manifest(8, 16, BOUNDS))
    facts = {"hidden_size": 8, "num_hidden_layers": 16, "boundaries": list(BOUNDS)}
    c: Any = Capturer.__new__(Capturer)
    c.torch, c.hidden_size, c.boundaries, c.patience_s = torch, 8, BOUNDS, 20.0
    c.root, c._runs, c._lost, c._looked, c.stream, c.piece_b = root, {}, {}, set(), None, 64 << 20
    c.link = WriterLink(root, "bench", facts, WriterLimits(min_free_b=0, threads=1), 1 << 26, ring_over)
    ids, hidden = (
        torch.zeros(SAMPLES * 64, dtype=torch.int64),
        torch.zeros(SAMPLES * 64, 8, dtype=torch.bfloat16),
    )
    spent: list[float] = []
    for turn in range(turns):
        rids = [
            CaptureRequest("run", turn * SAMPLES + k, 64, ((32, 64),), "b").to_rid() for k in range(SAMPLES)
        ]
        batch = SimpleNamespace(
            rids=rids, extend_prefix_lens_cpu=[0] * SAMPLES, extend_seq_lens_cpu=[64] * SAMPLES
        )
        began = time.thread_time()
        c.take(ids, hidden, [hidden] * 3, batch)
        spent.append(time.thread_time() - began)
        time.sleep(0.002)
    c.link.close()
    shutil.rmtree(root, ignore_errors=True)
    return sorted(spent)[len(spent) // 2] * 1e6


def main() -> None:
    torch.set_num_threads(1)
    root = Path((sys.argv[1:] or ["/dev/shm/k2-writer"])[0])
    batches = int((sys.argv[2:] or ["20"])[0])
    print(f"load average {Path('/proc/loadavg').read_text().split()[0]}, {root}", flush=True)
    print(f"hook, 8 samples a batch: {hook_us(root):6.0f} us (median)", flush=True)
    for turn in range(2):
        for name, kind in (("threads in the process", InThreads), ("a process of its own", InProcess)):
            still, rate, cost = beside(kind, root, batches)
            print(
                f"round {turn}: {name:22}: the loop stood still {still:6.1%}, {rate:5.2f} GB/s, {cost:5.2f} CPU-s a GB",
                flush=True,
            )


if __name__ == "__main__":
    main()
