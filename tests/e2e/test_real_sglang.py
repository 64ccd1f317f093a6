"""A real SGLang on this CPU, started by k2tui: every shard counted, readiness proved, benchmarked, stopped without a trace."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
KIT = Path(os.environ.get("K2TUI_SGLANG_KIT", ROOT.parent / "shared" / "sglang-cpu"))

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not KIT.is_dir(), reason=f"no SGLang CPU kit at {KIT} (set K2TUI_SGLANG_KIT)"),
]


def k2(*argv: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "k2tui", *argv], capture_output=True, text=True, timeout=timeout, cwd=ROOT)


def test_sglang_start_is_counted_ready_and_benchmarked(sglang_venv: Path, tmp_path: Path, own_home: Path) -> None:
    venv = sglang_venv
    model = tmp_path / "model"
    made = subprocess.run([str(venv / "bin/python"), str(KIT / "tiny_models.py"), "llama", str(model), "16", "40KB"], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[-2000:]
    total = len(list(model.glob("*.safetensors")))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    config = tmp_path / "k2tui.toml"
    config.write_text(f"""
[profile.real]
engine = "sglang"
python = "{venv}/bin/python"
model = "{model}"
port = {port}
args = ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-cuda-graph",
        "--disable-overlap-schedule", "--max-total-tokens", "8192"]
[profile.real.env]
PYTHONPATH = "{KIT}/stubs"
STUB_ROOTS = "torchvision,soundfile,triton"
PYTHONDONTWRITEBYTECODE = "1"
TORCHDYNAMO_DISABLE = "1"
SGLANG_USE_CPU_ENGINE = "1"
HF_HUB_OFFLINE = "1"
TRANSFORMERS_OFFLINE = "1"
""")
    up = k2("up", "real", "--config", str(config), "--json")
    assert up.returncode == 0, up.stdout + up.stderr
    facts = json.loads(up.stdout)
    assert facts["state"] == "ready"
    assert facts["shards"]["done"] == facts["shards"]["total"] == total == 98
    bench = k2("bench", "run", "--concurrency", "1,2", "--num-prompts", "4", "--random-input-len", "16", "--random-output-len", "8", "--json")
    assert bench.returncode == 0, bench.stderr
    rows = json.loads(k2("bench", "list", "--json").stdout)["runs"]
    assert {r["concurrency"] for r in rows} == {1, 2} and all(r["errors"] == 0 and r["completed"] == 4 for r in rows)
    assert rows[0]["version"] == "0.5.23"
    server = psutil.Process(json.loads(k2("jobs", "show", facts["job"], "--json").stdout)["pid"])
    family = [server, *server.children(recursive=True)]
    assert len(family) >= 3  # launcher, scheduler, detokenizer
    down = k2("down")
    assert down.returncode == 0, down.stderr
    deadline = time.time() + 10
    while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family) and time.time() < deadline:
        time.sleep(0.2)
    assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_the_flags_that_are_read_are_those_of_its_own_parser(sglang_venv: Path) -> None:
    from k2tui.engine_flags import installed

    code = (
        "import argparse, json; from sglang.srt.server_args import ServerArgs; p = argparse.ArgumentParser(); ServerArgs.add_cli_args(p)\n"
        "print(json.dumps([o for a in p._actions for o in a.option_strings if o.startswith('--')]))"
    )
    python = str(sglang_venv / "bin" / "python")
    env = {**os.environ, "PYTHONPATH": f"{KIT}/stubs", "STUB_ROOTS": "torchvision,soundfile,triton", "SGLANG_USE_CPU_ENGINE": "1"}
    said = subprocess.run([python, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert said.returncode == 0, said.stderr[-2000:]
    own = {flag for flag in json.loads(said.stdout.splitlines()[-1]) if not flag.startswith("--no-")} - {"--help"}
    assert installed("sglang", python).flags == own
