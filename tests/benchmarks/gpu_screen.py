#!/usr/bin/env python3
"""The GPU screen beside nvitop, gpustat, nvtop and btop on the same eight fake GPUs: start, CPU, bytes, key to paint, memory.

    python tests/benchmarks/gpu_screen.py --probe ../shared/probes/tui_probe.py [--idle 30] [--sizes 80x24,120x40,200x60]

The probe runs each program in a pty and measures from outside. Programs that are not there are left out. Limits: the GPU screen
costs no more CPU than nvitop in the same run, sends at most 2.4 kB/s at 120x40, and paints within 50 ms of a key (p99).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "gpu" / "fakenvml"))


def find(name: str, *places: str) -> str:
    return shutil.which(name) or next((p for p in places if os.path.exists(p)), "")


def main() -> int:
    import make

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--probe", type=Path, default=ROOT.parent / "shared" / "probes" / "tui_probe.py")
    parser.add_argument("--idle", type=float, default=30.0, help="seconds of the CPU and byte measurement")
    parser.add_argument("--sizes", default="80x24,120x40,200x60")
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--only", default="", help="names, comma-separated")
    parser.add_argument("--out", type=Path, help="keep the probe's JSON and the screens in this folder")
    args = parser.parse_args()
    if not args.probe.exists():
        print(f"no probe at {args.probe}", file=sys.stderr)
        return 2
    python = sys.executable
    programs: list[tuple[str, list[str], str, str, str]] = [
        # name, command, keys sent first, keys of the latency test, keys that quit
        ("k2tui GPU screen", [python, "-m", "k2tui"], "2", "down,up", "q"),
        ("k2tui one GPU", [python, "-m", "k2tui"], "2,enter", "right,left", "esc,q"),
        ("nvitop", [find("nvitop", "/opt/nvitop/bin/nvitop")], "", "down,up", "q"),
        ("gpustat -a -i 1", [find("gpustat", "/opt/nvitop/bin/gpustat"), "-a", "-i", "1"], "", "", "ctrl+c"),
        ("nvtop", [find("nvtop")], "", "down,up", "q"),
        ("btop", [find("btop")], "", "down,up", "q"),
    ]
    wanted = {name.strip() for name in args.only.split(",") if name.strip()}
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        out = args.out or Path(folder)
        out.mkdir(parents=True, exist_ok=True)
        library = Path(folder)
        make.compile_library(library)
        ranks = make.start_ranks(f"sglang::scheduler_TP{i}" for i in range(8))
        try:
            scene = make.busy(8)
            for index, child in enumerate(ranks):
                scene.proc(index, child.pid, 136 << 30, sm=70 + index, mem=40)
            scene.write(library / "scene.txt")
            env = {
                **os.environ,
                "LD_LIBRARY_PATH": folder,
                "K2TUI_FAKE_NVML": str(library / "scene.txt"),
                "K2TUI_HOME": str(library / "home"),
                "PYTHONPATH": str(ROOT),
            }
            for size in args.sizes.split(","):
                columns, lines = size.split("x")
                for name, command, pre, keys, quit_keys in programs:
                    if not command[0] or (wanted and name not in wanted):
                        continue
                    tag = f"{name.split()[0]}-{name.split()[-1]}-{size}".replace(",", "")
                    argv = [
                        python,
                        str(args.probe),
                        "--name",
                        name,
                        "--cols",
                        columns,
                        "--rows",
                        lines,
                        "--starts",
                        str(args.starts),
                    ]
                    argv += [
                        "--idle",
                        str(args.idle),
                        "--window",
                        "5",
                        "--json",
                        str(out / "probe.jsonl"),
                        "--screen",
                        str(out / f"{tag}.txt"),
                    ]
                    argv += ["--pre", pre] if pre else []
                    argv += ["--keys", keys, "--nkeys", "60"] if keys else []
                    argv += ["--quit", quit_keys, "--", *command]
                    done = subprocess.run(argv, env=env, capture_output=True, text=True)
                    if done.returncode != 0:
                        print(f"{name}: the probe failed: {done.stderr[-300:]}", file=sys.stderr)
                        continue
                    rows.append({**json.loads(done.stdout), "size": size})
        finally:
            for child in ranks:
                child.terminate()
                child.wait()
    head = f"{'program':20} {'size':>7} {'first':>6} {'settled':>7} {'cpu s/min':>9} {'B/s':>7} {'zB/s':>6} {'key p50':>7} {'p99 ms':>7} {'RSS MB':>6} {'load':>5}"
    print(head)
    for row in rows:

        def figure(key: str, width: int, digits: int = 0, row: dict[str, object] = row) -> str:
            value = row.get(key)
            return f"{value:{width}.{digits}f}" if isinstance(value, int | float) else " " * (width - 1) + "-"

        print(
            f"{row['name']!s:20} {row['size']!s:>7} {figure('first_paint_s', 6, 2)} {figure('settled_s', 7, 2)} {figure('cpu_s_per_min', 9, 2)} "
            f"{figure('bytes_per_s', 7)} {figure('zbytes_per_s', 6)} {figure('key_first_ms_p50', 7, 1)} {figure('key_first_ms_p99', 7, 1)} "
            f"{figure('peak_rss_mb', 6)} {figure('load_before', 5, 1)}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
