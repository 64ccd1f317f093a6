"""The writer beside a thread that never pauses (SGLang's scheduler): python tests/benchmarks/capture_writer.py [FOLDER] [SAMPLES].

Samples of 1536 tokens at H = 2048 and three boundaries (25 MB each), handed over as fast as the writer takes them, at Python's usual
switch interval and at the plug-in's. Needs numpy.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from pathlib import Path

import numpy as np

from k2tui.capture.plugin import SWITCH_S
from k2tui.states.layout import Manifest
from k2tui.states.writer import StatesWriter, WriterLimits, write_sample


def once(folder: Path, samples: int, switch_s: float, busy: bool) -> float:
    shutil.rmtree(folder, ignore_errors=True)
    hidden, length = 2048, 1536
    aux = np.zeros((length, 3 * hidden), dtype=np.uint16)
    last = np.zeros((length, hidden), dtype=np.uint16)
    ids, mask = np.zeros(length, dtype=np.int32), np.ones(length, dtype=np.uint8)
    stop = threading.Event()

    def poll() -> None:
        n = 0
        while not stop.is_set():
            n += 1

    old = sys.getswitchinterval()
    sys.setswitchinterval(switch_s)
    thread = threading.Thread(target=poll, daemon=True)
    if busy:
        thread.start()
    began = time.perf_counter()
    writer = StatesWriter(
        folder,
        Manifest(hidden, 16, (2, 8, 13)),
        "bench",
        WriterLimits(min_free_b=0, threads=4, pending_bytes=1 << 29),
    )
    for i in range(samples):
        write_sample(writer, i, ids, mask, aux, last)
    writer.flush()
    took = time.perf_counter() - began
    writer.close()
    stop.set()
    sys.setswitchinterval(old)
    shutil.rmtree(folder, ignore_errors=True)
    return samples * (aux.nbytes + last.nbytes) / took / 1e9


def main() -> None:
    folder = Path((sys.argv[1:] or ["/dev/shm/k2-writer"])[0])
    samples = int((sys.argv[2:] or ["60"])[0])
    for turn in range(2):
        for busy, switch_s in ((False, 0.005), (True, 0.005), (True, SWITCH_S)):
            rate = once(folder, samples, switch_s, busy)
            print(
                f"round {turn}: {'beside a busy thread' if busy else 'alone':21} switch interval {switch_s * 1e3:5.2f} ms: {rate:6.2f} GB/s",
                flush=True,
            )


if __name__ == "__main__":
    main()
