"""The whole story on the embedded engine, in real processes: start, watch, benchmark, stop, and everything that can be wrong."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[2]


def k2(*argv: str, timeout: float = 100, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "k2tui", *argv], capture_output=True, text=True, timeout=timeout, cwd=ROOT, env={**os.environ, **env}
    )


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def none_left(still_there: Callable[[], list[psutil.Process]]) -> None:
    """A keeper ends after its last words."""
    deadline = time.time() + 30
    while still_there() and time.time() < deadline:
        time.sleep(0.1)
    assert still_there() == []


def test_demo_headless_from_nothing(still_there: Callable[[], list[psutil.Process]]) -> None:
    run = k2("demo", "--headless", "--json", "--port", str(free_port()))
    assert run.returncode == 0, run.stderr
    facts = json.loads(run.stdout)
    assert facts["shards"] == {"done": 64, "total": 64}
    assert 0 < facts["ready_s"] < 90
    assert [b["concurrency"] for b in facts["bench"]] == [1, 4]
    assert all(b["output_throughput"] > 0 and b["errors"] == 0 for b in facts["bench"])
    none_left(still_there)


def test_server_outlives_its_starter_and_is_found_again(still_there: Callable[[], list[psutil.Process]]) -> None:
    """The starter is killed with SIGKILL in the middle of the load; a later command finds the server, measures and stops it."""
    port = free_port()
    starter = subprocess.Popen(
        [sys.executable, "-m", "k2tui", "up", "tiny", "--port", str(port)],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
    )
    assert starter.stderr is not None
    starter.stderr.readline()  # "job ...": it is started
    os.killpg(starter.pid, signal.SIGKILL)
    starter.wait()
    deadline = time.time() + 90
    while True:
        status = json.loads(k2("status", "--json").stdout)
        if status["servers"] and status["servers"][0]["state"] == "ready":
            break
        assert time.time() < deadline, status
        time.sleep(0.5)
    server = status["servers"][0]
    assert server["shards"]["done"] == server["shards"]["total"] == 64
    assert server["embedded_engine"] is True
    bench = k2("bench", "run", "--concurrency", "2", "--num-prompts", "4", "--random-input-len", "16", "--random-output-len", "8", "--json")
    assert bench.returncode == 0, bench.stderr
    listed = json.loads(k2("bench", "list", "--json").stdout)
    assert listed["runs"][0]["completed"] == 4
    again = k2("up", "tiny", "--port", str(port))
    assert again.returncode != 0 and str(port) in again.stderr and "pid" in again.stderr
    down = k2("down")
    assert down.returncode == 0 and "stopped by the user" in down.stdout
    assert k2("down").returncode == 0
    none_left(still_there)


@pytest.fixture
def broken_model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "assets" / "tiny-target", folder, ignore=shutil.ignore_patterns("train"))
    return folder


def test_cut_shard_is_refused_before_the_start(own_home: Path, broken_model: Path) -> None:
    shard = broken_model / "model-00007-of-00064.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    run = k2("up", "tiny", "--model", str(broken_model), "--port", str(free_port()))
    assert run.returncode == 1
    assert "model-00007-of-00064.safetensors" in run.stderr and "cut short" in run.stderr and "Traceback" not in run.stderr
    assert json.loads(k2("jobs", "list", "--json").stdout)["jobs"] == []


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["up", "tiny", "--model", "/no/such/model"], 1, "/no/such/model does not exist"),
        (["up", "nope"], 2, "no profile 'nope'"),
        (["watch", "/no/such.log", "--once"], 2, "no file /no/such.log"),
        (["watch", "/tmp", "--once"], 2, "is a folder"),
        (["diagnose", "/tmp"], 4, "is a folder"),
        (["watch", "--once", "--", "/no/such/program"], 2, "cannot run"),
        (["jobs", "show", "nope"], 2, "no job 'nope'"),
        (["jobs", "stop", "nope"], 2, "no job 'nope'"),
        (["bench", "run", "--url", "http://127.0.0.1:9"], 3, "127.0.0.1:9"),
        (["board", "set", "nope", "completed"], 2, "nope"),
    ],
)
def test_bad_input_is_one_clear_line(argv: list[str], code: int, words: str) -> None:
    run = k2(*argv)
    assert "Traceback" not in run.stderr
    assert words in run.stderr, run.stderr
    assert run.returncode in ({code} if code != 1 else {1, 2}), run.stderr


def test_unknown_key_in_config(tmp_path: Path) -> None:
    bad = tmp_path / "k.toml"
    bad.write_text("[profile.x]\nmodle = '/m'\n")
    run = k2("config", "profiles", "--config", str(bad))
    assert run.returncode == 2 and f"{bad}:2" in run.stderr and "did you mean 'model'" in run.stderr
