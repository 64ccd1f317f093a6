#!/usr/bin/env python3
"""What the GPU and host samplers cost, against the fake NVML library: CPU a refresh, and the time of a one-shot command.

    python tests/benchmarks/gpu_sampler.py [--gpus 8] [--seconds 20] [--costs none|slow|h200]

--costs makes the library's calls keep the CPU busy: "slow", the three that took 2 to 3 ms on a serving H200 (SM shares, energy,
counters); "h200", every getter as tests/fixtures/nvml/h200x2_serving.json recorded it.

Eight GPUs, one process each with a server's title, one sample a second, as the dashboard takes them. Limits: a refresh of 8 GPUs
below 0.3 % of a core at 1 Hz, the host below 0.1 %.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tests" / "gpu" / "fakenvml"))

SLOW = {"ProcessUtilization": 2500, "TotalEnergyConsumption": 2500, "FieldValues": 2500}  # microseconds
H200 = {
    **SLOW, "PowerUsage": 28, "MemoryInfo_v2": 42, "UtilizationRates": 19, "Temperature": 526, "ComputeRunningProcesses": 145,
    "GraphicsRunningProcesses": 79, "MPSComputeRunningProcesses": 84, "ClockInfo": 10, "CurrentClocksEventReasons": 9,
    "PcieReplayCounter": 203, "FanSpeed": 223, "BAR1MemoryInfo": 228, "RemappedRows": 1245, "EccMode": 1071,
    "EnforcedPowerLimit": 898, "CurrPcieLinkGeneration": 572, "CurrPcieLinkWidth": 92,
}  # fmt: skip
COSTS: dict[str, dict[str, int]] = {"none": {}, "slow": SLOW, "h200": H200}

INNER = """
import statistics, sys, time
from k2tui.sources.host import HostSampler
from k2tui.sources.nvml import NvmlSampler
from k2tui.sources.gpuhistory import GpuHistory
seconds = int(sys.argv[1])
sampler, host, history = NvmlSampler(), HostSampler(), GpuHistory()
first = sampler.take(); host.take()
costs, host_costs, history_costs = [], [], []
for _ in range(seconds):
    time.sleep(1)
    view = sampler.take(); costs.append(view.sample_ms)
    host_costs.append(host.take().sample_ms)
    t = time.thread_time(); history.push(view); history_costs.append((time.thread_time() - t) * 1000)
def line(name, ms, limit):
    mean = statistics.mean(ms)
    print(f"{name:28} {mean:7.2f} {statistics.median(ms):7.2f} {max(ms):7.2f} {mean / 10:8.3f} %   {limit}")
print(f"{'ms of CPU a sample':28} {'mean':>7} {'median':>7} {'max':>7} {'of a core':>9}   limit")
print(f"{'first sample, all getters':28} {first.sample_ms:7.2f}")
line(f"{len(first.gpus)} GPUs, {len(first.processes)} processes", costs, "0.3 %")
line("host", host_costs, "0.1 %")
line("history on disk", history_costs, "")
"""


def main() -> int:
    import make

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--costs", choices=sorted(COSTS), default="none", help="what the library's calls cost, in CPU")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        make.compile_library(out)
        ranks = make.start_ranks(f"sglang::scheduler_TP{i}" for i in range(args.gpus))
        try:
            scene = make.busy(args.gpus)
            for index, child in enumerate(ranks):
                scene.proc(index, child.pid, 136 << 30, sm=70 + index, mem=40)
            for getter, us in COSTS[args.costs].items():
                scene.burn("*", getter, us)
            scene.write(out / "scene.txt")
            env = {
                **os.environ,
                "LD_LIBRARY_PATH": folder,
                "K2TUI_FAKE_NVML": str(out / "scene.txt"),
                "K2TUI_HOME": folder,
                "PYTHONPATH": str(ROOT),
            }
            print(f"costs of the library's calls: {args.costs} {COSTS[args.costs]}")
            print(f"load of this machine before: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores")
            subprocess.run([sys.executable, "-c", INNER, str(args.seconds)], env=env, check=True)
            for argv in (["gpus", "--json"], ["gpus"], ["gpus", "--prometheus"]):
                times: list[float] = []
                for _ in range(7):
                    began = time.perf_counter()
                    subprocess.run(
                        [sys.executable, "-m", "k2tui", *argv], env=env, stdout=subprocess.DEVNULL, check=True
                    )
                    times.append((time.perf_counter() - began) * 1000)
                print(f"k2tui {' '.join(argv):22} {statistics.median(times):7.0f} ms median of 7")
        finally:
            for child in ranks:
                child.terminate()
                child.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
