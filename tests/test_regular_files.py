"""A FIFO or a device where a file was meant: every verb says so at once and reads nothing of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def k2tui(home: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own: one that waits for ever fails the test by the time limit."""
    env = {**os.environ, "K2TUI_HOME": str(home)}
    return subprocess.run(
        [sys.executable, "-m", "k2tui", *argv], env=env, cwd=home, capture_output=True, text=True, timeout=20
    )


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("diagnose", "log", "--context", "{}"), 2),
        (("diagnose", "{}"), 4),
        (("data", "inspect", "{}"), 1),
        (("data", "check", "{}"), 1),
        (("data", "stats", "{}"), 1),
        (("data", "merge", "out", "{}"), 1),
        (("bench", "import", "{}"), 2),
        (("tune", "run", "{}"), 2),
        (("pipeline", "plan", "--file", "{}"), 2),
        (("config", "show", "--config", "{}"), 2),
        (("evaluate", "--prompts", "{}", "--url", "http://127.0.0.1:51999"), 2),
        (("prepare", "--prompts", "{}", "--out", "out", "--url", "http://127.0.0.1:51999"), 1),
    ],
)
def test_nothing_waits_for_what_is_no_file(tmp_path: Path, words: tuple[str, ...], code: int) -> None:
    (tmp_path / "log").write_text("hello\n")
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "zero.jsonl").symlink_to("/dev/zero")
    for name in ("pipe.jsonl", "zero.jsonl"):
        done = k2tui(tmp_path, *(w.replace("{}", str(tmp_path / name)) for w in words))
        assert "regular file" in done.stderr, done
        assert (done.returncode, done.stdout) == (code, ""), done


@pytest.mark.parametrize("kind", ["jsonl", "sharegpt", "mooncake", "tokenized"])
def test_a_workload_is_read_from_files_only(tmp_path: Path, kind: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    code = (
        "import sys\nfrom k2tui.loadgen.datasets import Wanted, build\nbuild(Wanted(dataset=sys.argv[1]), 1)"
    )
    for path in (tmp_path / "pipe", "/dev/zero"):
        words = [sys.executable, "-c", code, f"{kind}:{path}"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=20)
        assert f"UsageError: {path}: no regular file" in done.stderr, done


def test_data_without_rows_does_not_pass(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    done = k2tui(tmp_path, "data", "check", "empty.jsonl")
    assert done.returncode == 1
    assert done.stdout == "empty.jsonl: no rows\n0 valid rows, 1 problem, 0 prompts there twice\n"
    done = k2tui(tmp_path, "data", "inspect", "/proc/self/mem")
    assert done.returncode == 1 and "no regular file (of the kernel)" in done.stderr


def test_watch_once_does_not_wait_for_a_fifo(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    done = k2tui(tmp_path, "watch", "--once", "log")
    assert done.returncode == 4 and "log is a FIFO" in done.stderr, done
