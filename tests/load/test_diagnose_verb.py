"""The verb as people call it: a real process, bad input included."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FIXTURES = Path(__file__).parent.parent / "fixtures"


def diagnose(*args: str, data: bytes | None = None):
    return subprocess.run(
        [sys.executable, "-m", "k2tui", "diagnose", *args], capture_output=True, input=data, timeout=90
    )


def test_json_has_exactly_the_promised_keys():
    run = diagnose("--json", str(FIXTURES / "sglang/0.5.23/port-in-use.log"))
    got = json.loads(run.stdout)
    assert list(got) == [
        "schema", "state", "phase", "shards", "root_cause", "root_cause_group", "proof_line", "proof_line_no", "remedy", "confidence", "software", "version", "ranks",
    ]  # fmt: skip
    assert run.returncode == 1 and got["root_cause_group"] == "G19"
    assert got["shards"] == {"done": 12, "total": 12, "draft_done": None, "draft_total": None}


def test_stdin_and_context(tmp_path):
    context = tmp_path / "c.json"
    context.write_text('{"silence_s": 600, "alive": true, "something_new": [1]}')
    log = b"Loading safetensors checkpoint shards:  21% Completed | 21/99 [00:29<02:01,  1.55s/it]\n"
    run = diagnose("--json", "--context", str(context), "-", data=log)
    got = json.loads(run.stdout)
    assert (got["state"], got["root_cause"], run.returncode) == ("stalled", "load_stall_unknown", 3)


@pytest.mark.parametrize(
    "content",
    [b"", b"\x00\xff\xfe" * 50_000, b"x" * 3_000_000, b"\n" * 100_000, b"\r" * 100_000],
    ids=["empty", "binary", "one line", "newlines", "returns"],
)
def test_junk_gets_an_answer(tmp_path, content):
    path = tmp_path / "junk.log"
    path.write_bytes(content)
    run = diagnose("--json", str(path))
    got = json.loads(run.stdout)
    assert (got["state"], got["root_cause"], run.returncode) == ("unknown", "unknown", 4)
    assert b"Traceback" not in run.stderr


def test_a_state_is_said_once():
    """Neither `stopped: stopped`, nor a cause where nothing is wrong."""
    log = (FIXTURES / "sglang/0.5.23/port-in-use.log").read_bytes()
    ready = (FIXTURES / "vllm/0.32.0/ready.log").read_bytes()
    for data in (log, ready):
        first = diagnose("-", data=data).stdout.decode().splitlines()[0]
        state = first.split(":")[0].split()[0]
        assert first.count(state) == 1, first


def test_what_is_no_log_is_told_so():
    run = diagnose(str(Path(__file__).parent.parent.parent / "README.md"))
    assert run.returncode == 4 and run.stderr == b""
    assert run.stdout.decode().strip() == "unknown: not a log of a server, a trainer or a benchmark client"


@pytest.mark.parametrize("kind", ["folder", "missing", "fifo", "context"])
def test_bad_input_is_one_clear_line(tmp_path, kind):
    args = [str(tmp_path)]
    if kind == "missing":
        args = [str(tmp_path / "none.log")]
    elif kind == "fifo":
        os.mkfifo(tmp_path / "pipe")
        args = [str(tmp_path / "pipe")]
    elif kind == "context":
        (tmp_path / "c.json").write_text("[1]")
        args = ["--context", str(tmp_path / "c.json"), str(FIXTURES / "vllm/0.32.0/ready.log")]
    run = diagnose(*args)
    assert run.returncode == (2 if kind == "context" else 4) and run.stdout == b""
    assert b"Traceback" not in run.stderr and run.stderr.startswith(b"k2tui: ")


def test_secrets_of_a_log_are_not_shown():
    """Only the secret goes: the rest of the proving line stays, and what the log is judged as."""
    log = (
        b"[2026-11-29 18:00:00] server_args=ServerArgs(model_path='/m', api_key='S3CR1', admin_api_key='S3CR2', tp_size=1)\n"
        b"usage: launch_server.py [-h] [--api-key API_KEY]\n"
        b"launch_server.py: error: unrecognized arguments: --foo --api-key S3CR3 --tp 2\n"
    )
    hub = (
        log.splitlines(keepends=True)[0]
        + b"huggingface_hub.errors.GatedRepoError: 401 Client Error for https://joe:S3CR1@hf.co/m?token=S3CR2 Authorization: Bearer S3CRhf_x. Access to model m is restricted\n"
    )
    for data in (log, hub):
        for args in (("--json", "-"), ("--all", "-")):
            run = diagnose(*args, data=data)
            assert b"S3CR" not in run.stdout + run.stderr and b"Traceback" not in run.stderr
            assert b"***" in run.stdout
    got = json.loads(diagnose("--json", "-", data=log).stdout)
    assert got["proof_line"] == "launch_server.py: error: unrecognized arguments: --foo --api-key *** --tp 2"


def test_watch_shows_no_secret_of_a_log(tmp_path):
    path = tmp_path / "s.log"
    path.write_text(
        "usage: launch_server.py [-h]\nlaunch_server.py: error: unrecognized arguments: --foo --api-key S3CR3 --tp 2\n"
    )
    for more in ((), ("--json",)):
        run = subprocess.run(
            [sys.executable, "-m", "k2tui", "watch", "--once", *more, str(path)],
            capture_output=True,
            timeout=90,
            env={**os.environ, "K2TUI_HOME": str(tmp_path)},
        )
        assert b"--api-key ***" in run.stdout and b"S3CR" not in run.stdout + run.stderr
