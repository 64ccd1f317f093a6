"""Energy of a run: only the GPUs that the server's own processes hold."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from k2tui.core.gpu import GpuProcess, GpuSample, GpuView
from k2tui.loadgen.gpuwatch import GpuWatch

SERVER = """
import socket, subprocess, sys, time
rank = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
with socket.create_server(("127.0.0.1", 0)) as s:
    print(s.getsockname()[1], rank.pid, flush=True)
    time.sleep(60)
"""


def watched(url: str, processes: tuple[GpuProcess, ...]) -> GpuWatch:
    """A watch that sees two GPUs of 100 W and 300 W for four seconds."""
    watch = GpuWatch(url)
    watch.close()
    gpus = tuple(GpuSample(index=i, name="H200", power_usage_mw=w * 1000) for i, w in enumerate((100, 300)))
    watch._sampler = SimpleNamespace(latest=lambda: GpuView(0.0, gpus, processes), stop=lambda: None)
    for second in range(5):
        watch.look(second * 1_000_000_000)
    return watch


@pytest.mark.skipif(sys.platform != "linux", reason="who listens is read from /proc")
def test_the_servers_own_gpus_are_counted_and_no_others() -> None:
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        port, rank = map(int, server.stdout.readline().split())
        watch = watched(
            f"http://127.0.0.1:{port}", (GpuProcess(rank, gpu_index=1), GpuProcess(1, gpu_index=0))
        )
        power, yielded = watch.figures(2400)
        assert power.value == 300
        assert yielded.value == pytest.approx(2400 / (300 * 4))
    finally:
        server.kill()
        server.wait()


def test_a_server_whose_processes_cannot_be_told_counts_every_gpu() -> None:
    power, _ = watched("http://127.0.0.1:9", (GpuProcess(1, gpu_index=0),)).figures(1)
    assert power.value == 400
