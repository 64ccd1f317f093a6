#!/usr/bin/env python3
"""A tuning run of the real SGLang on GPUs: attention back end, CUDA graphs, continuous decode steps, NCCL protocol with tp 2.

    python3 tests/benchmarks/gpu_tune.py KIT [--out DIR] [--seconds 540] [--tp 2] [--wheels DIR]

KIT: a folder with SGLang's wheels, boot.sh (installs them into $SITE), random_target.py and stubs/. The first call makes a model of
0.85 B random weights and begins the run; each further call goes on where the last one was stopped, until the table is whole. After
--seconds it stops in order, so that a machine that is lent by the minute loses one trial at most. State lies in build/gpu-tune (not in
git); the table, the JSON and the run's folder are copied to DIR at the end of each call. Exit code 0: the run is whole, 75: call again.

--cpu PYTHON: the same with an SGLang for CPUs (KIT then has tiny_models.py and stubs/), to try the script without a GPU; --space: another
space file than gpu_tune.toml.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STATE = ROOT / "build" / "gpu-tune"
GPU_ARGS = [
    "--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none", "--mem-fraction-static", "0.5",
    "--cuda-graph-max-bs", "4", "--disable-piecewise-cuda-graph",
]  # fmt: skip
CPU_ARGS = [
    "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-cuda-graph",
    "--disable-overlap-schedule", "--max-total-tokens", "8192",
]  # fmt: skip


def prepare(args: argparse.Namespace, env: dict[str, str]) -> Path:
    """Engine, model and profile; returns the config file. Skips what is there."""
    STATE.mkdir(parents=True, exist_ok=True)
    model, config = STATE / "model", STATE / "k2tui.toml"
    site = env["SITE"]
    engine: dict[str, str]
    if args.cpu:
        python, flags = args.cpu, CPU_ARGS
        engine = {
            "PYTHONPATH": str(args.kit / "stubs"), "STUB_ROOTS": "torchvision,soundfile,triton", "TORCHDYNAMO_DISABLE": "1",
            "SGLANG_USE_CPU_ENGINE": "1",
        }  # fmt: skip
        maker = [python, str(args.kit / "tiny_models.py"), "llama", str(model), "16", "40KB"]
    else:
        python, flags = sys.executable, GPU_ARGS
        subprocess.run(["bash", str(args.kit / "boot.sh")], env=env, check=True)
        if args.wheels:
            pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", site]
            subprocess.run([*pip, *map(str, sorted(args.wheels.glob("*.whl")))], check=True)
        engine = {
            "PYTHONPATH": f"{site}:{args.kit / 'stubs'}",
            "STUB_ROOTS": "soundfile,xgrammar,llguidance,flashinfer",
        }
        maker = [python, str(args.kit / "random_target.py"), str(model), "2048", "16", "24MB"]
    engine |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if not (model / "config.json").exists():
        subprocess.run(maker, env={**env, "PYTHONPATH": f"{site}:{env['PYTHONPATH']}"}, check=True)
    lines = [
        "[profile.gpu-tune]", 'engine = "sglang"', f"python = {json.dumps(python)}", f"model = {json.dumps(str(model))}", f"port = {args.port}",
        f"tp_size = {args.tp}", f"args = {json.dumps(flags)}", "stall_s = 200", "[profile.gpu-tune.env]",
        *(f"{k} = {json.dumps(v)}" for k, v in engine.items()),
    ]  # fmt: skip
    if not args.cpu:
        lines.insert(6, f"gpus = {list(range(args.tp))}")
    config.write_text("\n".join(lines) + "\n")
    return config


def k2(env: dict[str, str], *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "k2tui", *argv], env=env, capture_output=True, text=True, cwd=ROOT
    )


def facts_of(env: dict[str, str]) -> dict[str, Any]:
    done = k2(env, "tune", "show", "--json")
    return json.loads(done.stdout) if done.returncode == 0 else {"trials": []}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kit", type=Path)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", STATE / "out")))
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--port", type=int, default=31290)
    parser.add_argument("--wheels", type=Path, help="psutil and nvidia-ml-py, where the machine lacks them")
    parser.add_argument("--cpu", default="", metavar="PYTHON")
    parser.add_argument("--space", type=Path, default=Path(__file__).with_name("gpu_tune.toml"))
    args = parser.parse_args()
    began = time.monotonic()
    args.kit = args.kit.resolve()
    site = os.environ.get("SITE", str(Path.home() / ".sglang-site"))
    path = os.pathsep.join(
        p for p in (str(ROOT), "" if args.cpu else site, os.environ.get("PYTHONPATH", "")) if p
    )
    env = {**os.environ, "SITE": site, "K2TUI_HOME": str(STATE / "home"), "PYTHONPATH": path}
    config = prepare(args, env)
    check = k2(env, "doctor", "gpu-tune", "--config", str(config))
    print(check.stdout, flush=True)
    if check.returncode:
        return 1
    known = sorted((STATE / "home" / "tune").glob("*/space.toml"))
    order = ["resume"] if known else ["run", str(args.space)]
    started = k2(env, "tune", *order, "--config", str(config), "--json")
    if started.returncode:
        print(started.stderr, file=sys.stderr)
        return 1
    job = json.loads(started.stdout)["job"]
    seen = len(facts_of(env)["trials"])
    while k2(env, "jobs", "wait", job, "--timeout", "5").returncode == 124:
        trials = facts_of(env)["trials"]
        for trial in trials[seen:]:
            print(
                f"{time.monotonic() - began:5.0f} s  {trial['words']}: {trial['state']} {trial['value'] or trial['cause']}",
                flush=True,
            )
        seen = len(trials)
        if time.monotonic() - began > args.seconds:
            print("time is over: stopping in order", flush=True)
            k2(env, "jobs", "stop", job, "--wait", "60")
            break
    end = json.loads(k2(env, "jobs", "show", job, "--json").stdout)
    print(k2(env, "tune", "show").stdout, flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "table.txt").write_text(k2(env, "tune", "show").stdout)
    (args.out / "table.json").write_text(json.dumps(facts_of(env), indent=1))
    run = next(iter(sorted((STATE / "home" / "tune").glob("*"), reverse=True)))
    shutil.copytree(run, args.out / run.name, dirs_exist_ok=True)
    (args.out / "doctor.txt").write_text(check.stdout)
    left = k2(env, "down")
    print(f"down: {left.stdout}{left.stderr}", flush=True)
    return 0 if end["state"] == "succeeded" else 75


if __name__ == "__main__":
    sys.exit(main())
