#!/usr/bin/env python3
"""The samplers on real GPUs: load made with torch, values beside nvidia-smi's, costs a refresh, orphans, a recording.

    python3 tests/benchmarks/gpu_machine.py OUT [--seconds 20]

Needs nvidia-ml-py and psutil, and torch for the load; no network. Everything printed also goes to OUT/report.txt; OUT/nvml.json has
the format of tests/fixtures/nvml/*.json (every getter once, then 4 Hz samples), so that the fake library can play it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

QUERY = (
    "timestamp,index,utilization.gpu,utilization.memory,memory.used,memory.reserved,memory.total,power.draw,enforced.power.limit,"
    "temperature.gpu,temperature.memory,clocks.current.sm,clocks.current.memory,pcie.link.gen.current,pcie.link.width.current,"
    "clocks_event_reasons.active,ecc.errors.uncorrected.volatile.total"
)

# A server and its rank: the parent is the server, the child holds the GPU memory and carries SGLang's title.
SERVER = """
import os, subprocess, sys
children = [subprocess.Popen([f"sglang::scheduler_TP{i}", "-c", open(sys.argv[1]).read(), str(i), sys.argv[2 + i]],
            executable=sys.executable, env=dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p)))
            for i in range(int(len(sys.argv) - 2))]  # a process with another title does not find its venv by itself
print("ranks", *[c.pid for c in children], flush=True)
for c in children: c.wait()
"""
RANK = """
import sys, time
import torch
gpu, duty = int(sys.argv[1]), float(sys.argv[2])
torch.cuda.set_device(gpu)
held = torch.empty(20 << 30, dtype=torch.uint8, device="cuda")
a = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
b = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
while True:
    began = time.time()
    while time.time() - began < 0.5 * duty:
        for _ in range(8): a @ b
        torch.cuda.synchronize()
    time.sleep(0.5 * (1 - duty))
"""


class Report:
    def __init__(self, out: Path) -> None:
        self._fh = (out / "report.txt").open("w")

    def say(self, text: str = "") -> None:
        print(text, flush=True)
        self._fh.write(text + "\n")
        self._fh.flush()


def ask_smi() -> list[dict[str, str]]:
    argv = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise RuntimeError(done.stdout + done.stderr)
    names = QUERY.split(",")
    return [
        dict(zip(names, [v.strip() for v in line.split(",")], strict=True))
        for line in done.stdout.splitlines()
        if line.strip()
    ]


def number(text: str) -> float | None:
    try:
        return float(int(text, 16)) if text.startswith("0x") else float(text)
    except ValueError:
        return None


# field: nvidia-smi's column, ours, tolerance. Moving figures are compared with samples of ours around the call (min..max).
FIELDS: tuple[tuple[str, str, float], ...] = (
    ("utilization.gpu", "gpu_utilization", 10),
    ("utilization.memory", "memory_utilization", 10),
    ("memory.used", "memory_used_mib", 1),
    ("memory.reserved", "memory_reserved_mib", 1),
    ("memory.total", "memory_total_mib", 1),
    ("power.draw", "power_w", 15),
    ("enforced.power.limit", "limit_w", 0.1),
    ("temperature.gpu", "temperature_c", 1),
    ("temperature.memory", "memory_temperature_c", 1),
    ("clocks.current.sm", "sm_clock_mhz", 60),
    ("clocks.current.memory", "memory_clock_mhz", 0),
    ("pcie.link.gen.current", "pcie_gen", 0),
    ("pcie.link.width.current", "pcie_width", 0),
    ("clocks_event_reasons.active", "throttle_bits", 0),
    ("ecc.errors.uncorrected.volatile.total", "ecc_uncorrected", 0),
)


def ours(gpu: Any, name: str) -> float | None:
    special = {
        "memory_used_mib": (gpu.memory_used_b, 1 / (1 << 20)),
        "memory_reserved_mib": (gpu.memory_reserved_b, 1 / (1 << 20)),
        "memory_total_mib": (gpu.memory_total_b, 1 / (1 << 20)),
        "power_w": (gpu.power_usage_mw, 1 / 1000),
        "limit_w": (gpu.enforced_power_limit_mw, 1 / 1000),
    }
    if name in special:
        value, factor = special[name]
        return None if value is None else value * factor
    return getattr(gpu, name)


def compare(
    report: Report, title: str, pairs: list[tuple[list[Any], list[dict[str, str]], list[Any]]]
) -> bool:
    """pairs: (our samples just before, nvidia-smi's rows, our samples just after). A figure agrees when nvidia-smi's lies within
    our two readings, widened by the tolerance."""
    report.say(f"\n{title}: {len(pairs)} calls of nvidia-smi between two samples of ours")
    report.say(
        f"{'figure':40} {'n':>4} {'both n/a':>8} {'agree':>6} {'mean diff':>10} {'max diff':>10} {'tolerance':>9}"
    )
    good = True
    for theirs_name, our_name, tolerance in FIELDS:
        count = nothing = agree = 0
        diffs: list[float] = []
        for before, rows, after in pairs:
            for row in rows:
                index = int(row["index"])
                theirs = number(row[theirs_name])
                values = [
                    v for v in (ours(before[index], our_name), ours(after[index], our_name)) if v is not None
                ]
                count += 1
                if theirs is None and not values:
                    nothing += 1
                elif theirs is not None and values:
                    low, high = min(values), max(values)
                    diff = max(0.0, low - theirs, theirs - high)
                    diffs.append(diff)
                    agree += diff <= tolerance
        shown = f"{statistics.mean(diffs):10.2f} {max(diffs):10.2f}" if diffs else f"{'':>10} {'':>10}"
        share = agree / max(1, count - nothing)
        mark = "" if count == nothing or share >= 0.9 else "   <-- differs"
        good = good and not mark
        report.say(f"{theirs_name:40} {count:4} {nothing:8} {100 * share:5.0f}% {shown} {tolerance:9g}{mark}")
    return good


def beside_smi(seconds: float, sampler: Any) -> list[tuple[list[Any], list[dict[str, str]], list[Any]]]:
    pairs = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for device in sampler.devices:  # every figure fresh, for the comparison only
            device.ask_again("mem", "gen", "width", "fields", "limit", "ecc_unc")
        before = list(sampler.take().gpus)
        rows = ask_smi()
        after = list(sampler.take().gpus)
        pairs.append((before, rows, after))
        time.sleep(0.3)
    return pairs


def cost(report: Report, title: str, seconds: int) -> None:
    """One sample a second in a thread of its own, as the dashboard takes them."""
    from k2tui.sources.nvml import NvmlSampler

    seen: list[Any] = []
    sampler = NvmlSampler()
    took: list[float] = []
    real = sampler._sample

    def timed() -> Any:
        began = time.perf_counter()
        view = real()
        took.append((time.perf_counter() - began) * 1000)
        return view

    sampler._sample = timed  # type: ignore[method-assign]
    sampler.start(seen.append)
    time.sleep(seconds)
    sampler.stop()
    cpu = [view.sample_ms for view in seen[1:]]
    wall = took[1:]
    if not cpu:
        report.say(f"{title}: no samples")
        return
    report.say(
        f"{title:28} CPU ms a sample: mean {statistics.mean(cpu):.2f}, median {statistics.median(cpu):.2f}, max {max(cpu):.2f} "
        f"({statistics.mean(cpu) / 10:.3f} % of a core at 1 Hz); wall ms: median {statistics.median(wall):.2f}, max {max(wall):.2f}; "
        f"first sample {seen[0].sample_ms:.1f} ms CPU"
    )
    report.say(f"{'':28} notes: {list(seen[-1].notes)}; missing: {[g.missing for g in seen[-1].gpus]}")


def getter_costs(report: Report, title: str) -> None:
    from k2tui.sources.nvml import NvmlSampler

    sampler = NvmlSampler()
    sampler.take()
    report.say(f"\n{title}: microseconds a call (median of 15), GPU 0; period in seconds; - = not supported")
    lines: list[str] = []
    nvml = importlib.import_module("pynvml")
    for key, slot in sampler.devices[0].slots.items():
        times: list[float] = []
        state = ""
        for _ in range(15):
            began = time.perf_counter()
            try:
                slot.call(sampler.devices[0].handle)
            except nvml.NVMLError as err:
                state = f" - ({err})"
            times.append((time.perf_counter() - began) * 1e6)
            if times[-1] > 15_000 and len(times) >= 3:
                break
        every = "once" if slot.every_s == float("inf") else "1" if slot.every_s == 0 else f"{slot.every_s:g}"
        lines.append(
            f"  {key:15} {statistics.median(times):9.0f} us  first {times[0]:9.0f}  every {every:>4} s{state}"
        )
    report.say("\n".join(lines))
    began = time.perf_counter()
    sampler._read_events()
    report.say(
        f"  events (Xid): {'registered' if sampler._events is not None else 'not available'}, "
        f"asking took {(time.perf_counter() - began) * 1e6:.0f} us"
    )
    sampler.stop()


def record(out: Path, seconds: float) -> None:
    """Every getter once, then 4 Hz samples, in the format of tests/fixtures/nvml."""
    nvml = importlib.import_module("pynvml")
    nvml.nvmlInit()

    def plain(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [plain(v) for v in value]
        if isinstance(value, bytes):
            return value.decode("utf-8", "replace")
        if isinstance(value, str | int | float | bool) or value is None:
            return value
        if hasattr(value, "_fields_"):
            return {name: plain(getattr(value, name)) for name, *_ in value._fields_}
        if hasattr(value, "__dict__"):
            return {k: plain(v) for k, v in vars(value).items()}
        try:
            return [plain(v) for v in value]
        except TypeError:
            return str(value)

    def ask(call: Any, *args: Any) -> dict[str, Any]:
        began = time.perf_counter()
        try:
            answer: dict[str, Any] = {"ok": plain(call(*args))}
        except nvml.NVMLError as err:
            answer = {"nvml_error": int(err.value), "text": str(err)}
        except (TypeError, ValueError, AttributeError) as err:
            answer = {"python_error": str(err)}
        answer["us"] = round((time.perf_counter() - began) * 1e6, 1)
        return answer

    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    devices: list[dict[str, Any]] = []
    hidden = {"nvmlDeviceGetUUID", "nvmlDeviceGetSerial", "nvmlDeviceGetBoardPartNumber"}
    for number_, handle in enumerate(handles):
        figures: dict[str, Any] = {}
        for name in sorted(dir(nvml)):
            call = getattr(nvml, name)
            code = getattr(call, "__wrapped__", call)
            if not name.startswith("nvmlDeviceGet") or not hasattr(code, "__code__") or "HandleBy" in name:
                continue
            if code.__code__.co_argcount - len(code.__defaults__ or ()) != 1:
                continue
            figures[name] = ask(call, handle)
            if name in hidden and "ok" in figures[name]:
                figures[name]["ok"] = f"hidden-{number_}"
        for name, which in (("SM", 1), ("MEM", 2), ("GRAPHICS", 0)):
            figures[f"clock_{name}"] = ask(nvml.nvmlDeviceGetClockInfo, handle, which)
            figures[f"maxclock_{name}"] = ask(nvml.nvmlDeviceGetMaxClockInfo, handle, which)
        figures["temp_gpu"] = ask(nvml.nvmlDeviceGetTemperature, handle, 0)
        for which in range(6):
            figures[f"temp_threshold_{which}"] = ask(nvml.nvmlDeviceGetTemperatureThreshold, handle, which)
        figures["pcie_tx"] = ask(nvml.nvmlDeviceGetPcieThroughput, handle, 0)
        figures["pcie_rx"] = ask(nvml.nvmlDeviceGetPcieThroughput, handle, 1)
        for link in range(18):
            figures[f"nvlink_state_{link}"] = ask(nvml.nvmlDeviceGetNvLinkState, handle, link)
            figures[f"nvlink_remote_{link}"] = ask(nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
        for other, second in enumerate(handles):
            if other != number_:
                figures[f"topo_common_ancestor_{other}"] = ask(
                    nvml.nvmlDeviceGetTopologyCommonAncestor, handle, second
                )
                for what in range(5):
                    figures[f"p2p_{other}_{what}"] = ask(nvml.nvmlDeviceGetP2PStatus, handle, second, what)
        ids = [(i, s) for i in (82, 83, 185, 186, 197, 198) for s in (0,)] + [
            (i, s) for i in (138, 139) for s in (0, 0xFFFFFFFF)
        ]
        try:
            figures["fields"] = [
                {
                    "id": int(f.fieldId),
                    "scope": int(f.scopeId),
                    "ret": int(f.nvmlReturn),
                    "type": int(f.valueType),
                    "ull": int(f.value.ullVal),
                }
                for f in nvml.nvmlDeviceGetFieldValues(handle, ids)
            ]
        except nvml.NVMLError as err:
            figures["fields"] = [{"nvml_error": int(err.value)}]
        devices.append(figures)
    trace: list[dict[str, Any]] = []
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        began = time.perf_counter()
        gpus = []
        for handle in handles:
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            gpus.append(
                {
                    "used": int(memory.used),
                    "total": int(memory.total),
                    "util": ask(nvml.nvmlDeviceGetUtilizationRates, handle),
                    "power_mw": ask(nvml.nvmlDeviceGetPowerUsage, handle),
                    "temp": ask(nvml.nvmlDeviceGetTemperature, handle, 0),
                    "sm": ask(nvml.nvmlDeviceGetClockInfo, handle, 1),
                    "thr": ask(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle),
                    "procs": ask(nvml.nvmlDeviceGetComputeRunningProcesses, handle),
                    "mem2": ask(lambda h=handle: nvml.nvmlDeviceGetMemoryInfo(h, version=nvml.nvmlMemory_v2)),
                }
            )
        trace.append(
            {"t": round(began - start, 3), "g": gpus, "us": round((time.perf_counter() - began) * 1e6)}
        )
        time.sleep(max(0.0, 0.25 - (time.perf_counter() - began)))
    versions = {
        "driver": ask(nvml.nvmlSystemGetDriverVersion),
        "nvml": ask(nvml.nvmlSystemGetNVMLVersion),
        "cuda": ask(nvml.nvmlSystemGetCudaDriverVersion),
    }
    nvml.nvmlShutdown()
    (out / "nvml.json").write_text(
        json.dumps(
            {**versions, "count": len(handles), "devices": devices, "trace": trace}, separators=(",", ":")
        )
    )


def command(report: Report, argv: list[str], out: Path, name: str) -> str:
    began = time.perf_counter()
    done = subprocess.run(
        argv,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), "K2TUI_HOME": str(out / "home")},
    )
    ms = (time.perf_counter() - began) * 1000
    (out / name).write_text(done.stdout + done.stderr)
    report.say(
        f"$ {' '.join(argv[1:] if argv[0] == sys.executable else argv)}   [exit {done.returncode}, {ms:.0f} ms] -> {name}"
    )
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=int, default=20, help="of each phase (default 20)")
    args = parser.parse_args()
    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)
    report = Report(out)
    k2 = [sys.executable, "-m", "k2tui", "gpus"]

    from k2tui.core.gpu import find_orphans
    from k2tui.sources.nvml import NvmlSampler
    from k2tui.sources.procs import end_processes

    sampler = NvmlSampler()
    view = sampler.take()
    if not view.gpus:
        report.say(f"no GPU: {view.error} {view.hint}")
        return 5
    report.say(
        f"{len(view.gpus)} x {view.gpus[0].name}, driver {view.driver_version}, CUDA {view.cuda_version}, Python {sys.version.split()[0]}"
    )
    has_smi = shutil.which("nvidia-smi") is not None
    good = True

    getter_costs(report, "idle")
    cost(report, "idle", args.seconds)
    if has_smi:
        good = compare(report, "idle", beside_smi(args.seconds / 2, sampler)) and good

    server = None
    try:
        import torch

        has_torch = torch.cuda.is_available()
    except ImportError:
        has_torch = False
    if has_torch:
        (out / "rank.py").write_text(RANK)
        duties = ["1.0" if i % 2 == 0 else "0.5" for i in range(len(view.gpus))]
        argv = [sys.executable, "-c", SERVER, str(out / "rank.py"), *duties]
        server = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        ranks = [int(x) for x in server.stdout.readline().split()[1:]]
        report.say(f"\nload: server pid {server.pid}, ranks {ranks}")
        time.sleep(15)
    else:
        report.say("\nno torch with CUDA here: the phases under load run without load")
    try:
        cost(report, "under load", args.seconds)
        getter_costs(report, "under load")
        recorder = threading.Thread(target=record, args=(out, args.seconds))
        if has_smi:
            good = compare(report, "under load", beside_smi(args.seconds, sampler)) and good
        recorder.start()
        recorder.join()
        report.say(f"\nrecorded to nvml.json ({(out / 'nvml.json').stat().st_size >> 10} KiB)")
        command(report, k2, out, "gpus.txt")
        report.say((out / "gpus.txt").read_text())
        command(report, [*k2, "--host"], out, "gpus_host.txt")
        command(report, [*k2, "--json"], out, "gpus.json")
        command(report, [*k2, "--prometheus", "--host"], out, "gpus.prom")
        report.say(command(report, [*k2, "--topology"], out, "topology.txt"))
        if has_smi:
            report.say(command(report, ["nvidia-smi", "topo", "-m"], out, "nvidia_smi_topo.txt"))
            command(report, ["nvidia-smi"], out, "nvidia_smi.txt")
        if server is not None:
            mapped = {p.pid: p.rank for p in sampler.take().processes}
            report.say(f"ranks by pid: {mapped}")
            good = good and set(mapped.values()) >= {f"TP{i}" for i in range(len(view.gpus))}
            server.kill()
            server.wait()
            time.sleep(6)
            orphans = [p for p in find_orphans(sampler.take()) if p.pid in ranks]  # never another program's
            report.say(
                "server killed; orphans: "
                + "; ".join(
                    f"{p.pid} {p.rank} {(p.memory_used_b or 0) >> 30} GiB: {p.orphan_reason}" for p in orphans
                )
            )
            results = end_processes([(p.pid, p.started_s) for p in orphans if p.started_s is not None])
            report.say(f"ended: {results}")
            time.sleep(4)
            left = [(g.index, g.memory_used_b) for g in sampler.take().gpus]
            report.say(f"memory in use after it: {left}")
            good = good and len(orphans) == len(view.gpus)
    finally:
        if server is not None and server.poll() is None:
            server.send_signal(signal.SIGKILL)
            server.wait()
        sampler.stop()
    report.say(f"\n{'all as expected' if good else 'SOMETHING DIFFERS: see the marks above'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
