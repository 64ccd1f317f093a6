#!/usr/bin/env python3
"""Compiles the fake NVML library and writes its scenes; usable from tests and from a shell, and it knows no GPU.

    python tests/gpu/fakenvml/make.py OUT --gpus 8 --busy
    LD_LIBRARY_PATH=OUT K2TUI_FAKE_NVML=OUT/scene.txt k2tui gpus

The figures are those of real H200s (tests/fixtures/nvml). `--ranks` also starts one small process a GPU with a server's titles
(sglang::scheduler_TP0 ...), so that process tables have real pids to show; they end with this program (Ctrl-C).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FIXTURES = HERE.parent.parent / "fixtures" / "nvml"
LIBRARY = "libnvidia-ml.so.1"
GIB = 1 << 30

# One H200 as recorded (bytes, mW, MHz, degrees C, KB/s, KiB).
H200: dict[str, int | str] = {
    "name": "NVIDIA H200",
    "vbios": "96.00.A5.00.1A",
    "total": 150754820096,
    "used": 0,
    "reserved": 644939776,
    "util": 0,
    "memutil": 0,
    "power": 76500,
    "limit": 700000,
    "limit_default": 700000,
    "limit_min": 200000,
    "limit_max": 700000,
    "temp": 28,
    "memtemp": 33,
    "temp_shutdown": 95,
    "temp_slow": 89,
    "temp_memmax": 95,
    "temp_max": 87,
    "sm": 345,
    "sm_max": 1980,
    "mem": 3201,
    "mem_max": 3201,
    "reasons": 1,
    "gen": 5,
    "gen_max": 5,
    "width": 16,
    "width_max": 16,
    "pcie_tx": 600,
    "pcie_rx": 449,
    "fans": 0,
    "energy": 19523445,
    "ecc": 1,
    "ecc_corr": 0,
    "ecc_unc": 0,
    "ecc_corr_total": 0,
    "ecc_unc_total": 0,
    "remap_corr": 0,
    "remap_unc": 0,
    "remap_pending": 0,
    "remap_failed": 0,
    "pstate": 0,
    "persistence": 1,
    "virt": 1,
    "mig_mode": 0,
    "arch": 9,
    "major": 9,
    "minor": 0,
    "links": 18,
    "nvlink_tx": 4678,
    "nvlink_rx": 4628,
    "addressing": 0,
    "c2c": 0,
    "encoder": 0,
    "decoder": 0,
    "compute_mode": 0,
    "bar1_total": 274877906944,
    "bar1_used": 1703936,
    "replay": 0,
    "cores": 16896,
    "buswidth": 6016,
    "numa_node": 0,
    "remote": 2,
    "fabric": 3,
}
BUSY: dict[str, int | str] = {
    "used": 138 * GIB,
    "util": 82,
    "memutil": 41,
    "power": 560000,
    "temp": 61,
    "memtemp": 70,
    "sm": 1980,
    "reasons": 0,
}


def compile_library(out: Path) -> Path:
    """Build OUT/libnvidia-ml.so.1 if it is older than its source. Raises RuntimeError without a C compiler."""
    source = HERE / "fakenvml.c"
    target = out / LIBRARY
    if target.exists() and target.stat().st_mtime >= source.stat().st_mtime:
        return target
    compiler = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError("no C compiler (gcc, cc or clang) to build the fake NVML library")
    out.mkdir(parents=True, exist_ok=True)
    partial = out / f".{LIBRARY}.{os.getpid()}"
    flags = ["-O2", "-Wall", "-Wextra", "-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}"]
    subprocess.run([compiler, *flags, "-o", str(partial), str(source), "-lm", "-lpthread"], check=True)
    os.replace(partial, target)
    return target


class Scene:
    """Lines of a scene, written whole so that the library never reads half a file."""

    def __init__(self, gpus: int, base: dict[str, int | str] | None = None) -> None:
        self.lines: list[str] = [f"gpus {gpus}", "link * * 40 0"]
        self.gpus = gpus
        for key, value in (H200 if base is None else base).items():
            self.gpu("*", key, value)
        for index in range(gpus):
            # eight boards, two sockets: the numbers a DGX shows
            self.gpu(index, "numa_node", 0 if index < max(1, gpus // 2) else 1)
            for other in range(index + 1, gpus):
                far = (index < gpus // 2) != (other < gpus // 2)
                self.say(f"link {index} {other} {50 if far else 40} 0")

    def say(self, line: str) -> Scene:
        self.lines.append(line)
        return self

    def gpu(self, which: int | str, key: str, value: int | str) -> Scene:
        return self.say(f"gpu {which} {key} {value}")

    def many(self, which: int | str, values: dict[str, int | str]) -> Scene:
        for key, value in values.items():
            self.gpu(which, key, value)
        return self

    def fail(self, which: int | str, getter: str, code: int) -> Scene:
        """The getter (name without nvmlDeviceGet, or '*') returns an NVML error code."""
        return self.gpu(which, "fail", f"{getter} {code}")

    def delay(self, which: int | str, getter: str, ms: int) -> Scene:
        return self.gpu(which, "delay", f"{getter} {ms}")

    def burn(self, which: int | str, getter: str, us: int) -> Scene:
        """The getter keeps the CPU busy for so many microseconds."""
        return self.gpu(which, "burn", f"{getter} {us}")

    def proc(
        self, which: int, pid: int, memory: int, kind: str = "C", sm: int = 0, mem: int = 0, at: str = ""
    ) -> Scene:
        """memory in bytes, -1 = not available; at: "GI CI" inside a MIG slice."""
        return self.gpu(which, "proc", f"{pid} {memory} {kind} {sm} {mem} {at}".rstrip())

    def write(self, path: Path) -> Path:
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text("\n".join(self.lines) + "\n")
        os.replace(partial, path)
        return path


def busy(gpus: int = 8) -> Scene:
    scene = Scene(gpus).many("*", BUSY).say("wave 1")
    for index in range(gpus):
        scene.gpu(index, "util", 70 + (index * 7) % 28)
    return scene


def still(gpus: int = 8) -> Scene:
    """Busy, every GPU different, and nothing moves: two programs read the same figures."""
    scene = Scene(gpus).many("*", BUSY)
    for index in range(gpus):
        scene.many(
            index,
            {
                "util": 12 + 11 * index,
                "memutil": 5 + 6 * index,
                "used": (20 + 15 * index) * GIB,
                "power": 210_000 + 61_000 * index,
                "temp": 41 + 5 * index,
                "sm": 1980 - 45 * index,
                "fan": -1,
            },
        )
    return scene


def idle(gpus: int = 8) -> Scene:
    return Scene(gpus)


def mig(gpus: int = 2) -> Scene:
    scene = Scene(gpus).many("*", BUSY).gpu(0, "mig_mode", 1).gpu(0, "util", -1)
    for number, (name, gib, sms, slices) in enumerate(
        [("3g.71gb", 70, 60, 3), ("2g.35gb", 34, 32, 2), ("1g.18gb", 17, 16, 1)]
    ):
        scene.gpu(0, "mig", f"{number + 1} 0 {gib * GIB} {(gib // 2) * GIB} {16 << 20} {sms} {slices} {name}")
    return scene


def lost(gpus: int = 8) -> Scene:
    return busy(gpus).fail(3, "*", 15)


def gone(gpus: int = 8) -> Scene:
    """GPU 3 fell off the bus and the next initialisation does not count it."""
    return busy(gpus).gpu(3, "gone", 1)


def na(gpus: int = 4) -> Scene:
    """Consumer and embedded boards tell little: whole groups of getters are not supported."""
    scene = Scene(gpus).many("*", BUSY)
    for getter in (
        "PowerUsage",
        "EnforcedPowerLimit",
        "MemoryInfo_v2",
        "UtilizationRates",
        "ProcessUtilization",
        "EccMode",
    ):
        scene.fail(1, getter, 3)
    return scene.fail(2, "Temperature", 999).fail(2, "ClockInfo", 4)


def mismatch(gpus: int = 8) -> Scene:
    return Scene(gpus).say("init 18")


def noperm(gpus: int = 2) -> Scene:
    scene = Scene(gpus).many("*", BUSY)
    for getter in ("ComputeRunningProcesses", "GraphicsRunningProcesses", "ProcessUtilization", "Events"):
        scene.fail("*", getter, 4)
    return scene


def slow(gpus: int = 2) -> Scene:
    return busy(gpus).delay(1, "PowerUsage", 2000)


def throttled(gpus: int = 8) -> Scene:
    scene = busy(gpus).say("wave 0")
    scene.many(2, {"temp": 88, "reasons": 0x20, "sm": 1215}).many(
        5, {"power": 699000, "reasons": 0x4, "sm": 1620}
    )
    return scene.many(6, {"gen": 1, "width": 4}).many(
        7, {"ecc_unc": 2, "remap_unc": 1, "remap_pending": 1, "reasons": 0xC8}
    )


def spark(gpus: int = 1) -> Scene:
    """GB10: CPU and GPU share one memory; NVML says Not Supported to the memory question."""
    scene = Scene(gpus).many(
        "*", {**BUSY, "name": "NVIDIA GB10", "total": -1, "used": -1, "links": -1, "addressing": 2}
    )
    return scene.many(
        "*", {"limit": -1, "mem": -1, "mem_max": -1, "ecc": -1, "remap_corr": -1, "memtemp": -1, "util": 96}
    )


def grace(gpus: int = 1) -> Scene:
    return Scene(gpus).many("*", {**BUSY, "name": "NVIDIA GH200 480GB", "numa": 1, "addressing": 2, "c2c": 1})


def vgpu(gpus: int = 1) -> Scene:
    scene = Scene(gpus).many(
        "*", {**BUSY, "name": "GRID A100D-40C", "virt": 2, "power": -1, "limit": -1, "temp": -1}
    )
    return scene.many(
        "*", {"total": 40 * GIB, "used": 22 * GIB, "fan": -1, "links": -1, "gen": -1, "width": -1}
    )


def recorded(name: str) -> Callable[[int], Scene]:
    def build(gpus: int = 2) -> Scene:
        path = FIXTURES / f"{name}.json"
        data: dict[str, Any] = json.loads(path.read_text())
        scene = Scene(min(gpus, len(data["devices"]))).many("*", {"sm": 1980, "used": 0})
        for entry in data["trace"]:
            for index, gpu in enumerate(entry["g"][:gpus]):
                util = gpu["util"].get("ok") or {"gpu": 0, "memory": 0}
                used = gpu["mem2"]["ok"]["used"] if "mem2" in gpu else gpu["used"] - int(H200["reserved"])
                figures = [gpu["power_mw"]["ok"], gpu["temp"]["ok"], gpu["sm"]["ok"], gpu["thr"]["ok"]]
                line = [int(entry["t"] * 1000), index, util["gpu"], util["memory"], max(0, used), *figures]
                scene.say("frame " + " ".join(map(str, line)))
        return scene

    return build


SCENES: dict[str, Callable[[int], Scene]] = {
    "busy": busy,
    "still": still,
    "idle": idle,
    "mig": mig,
    "lost": lost,
    "gone": gone,
    "na": na,
    "mismatch": mismatch,
    "noperm": noperm,
    "slow": slow,
    "throttled": throttled,
    "spark": spark,
    "grace": grace,
    "vgpu": vgpu,
    "serving": recorded("h200x2_serving"),
    "matmul": recorded("h200x2_matmul"),
    "ranks": recorded("h200x2_ranks"),
}


def start_ranks(titles: Iterable[str]) -> list[subprocess.Popen[bytes]]:
    """Small sleeping processes that carry a server's process titles as argv[0]; the caller ends them."""
    body = "import time\ntime.sleep(86400)"
    return [subprocess.Popen([title, "-c", body], executable=sys.executable) for title in titles]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder for the library and scene.txt")
    parser.add_argument("--scene", choices=sorted(SCENES), default="", help="a made-up or recorded scene")
    parser.add_argument("--gpus", type=int, default=8, help="how many GPUs, up to 16 (default 8)")
    parser.add_argument("--busy", action="store_true", help="the same as --scene busy")
    parser.add_argument(
        "--ranks", action="store_true", help="start one process a GPU with SGLang's titles, until Ctrl-C"
    )
    args = parser.parse_args(argv)
    library = compile_library(args.out)
    scene = SCENES[args.scene or ("busy" if args.busy else "idle")](args.gpus)
    path = args.out / "scene.txt"
    ranks: list[subprocess.Popen[bytes]] = []
    if args.ranks:
        ranks = start_ranks(f"sglang::scheduler_TP{i}" for i in range(scene.gpus))
        for index, child in enumerate(ranks):
            scene.proc(index, child.pid, 136 * GIB, sm=70 + index, mem=40)
    scene.write(path)
    print(f"LD_LIBRARY_PATH={library.parent} K2TUI_FAKE_NVML={path}")
    if ranks:
        print("ranks: " + " ".join(str(child.pid) for child in ranks), flush=True)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        try:
            while True:
                time.sleep(3600)
        except (KeyboardInterrupt, SystemExit):
            pass
        finally:
            for child in ranks:
                child.terminate()
            for child in ranks:
                child.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
