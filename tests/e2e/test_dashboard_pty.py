"""The story on a real terminal: the demo's load is watched, a benchmark is started by a key, the line drops, all is still there."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pyte
import pytest

pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[2]


class Terminal:
    """A pty of 80x24 with an emulator behind it. close() is what sshd does when the connection drops."""

    def __init__(self, *argv: str, columns: int = 80, lines: int = 24) -> None:
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        env = {**os.environ, "TERM": "xterm-256color", "PYTHONUNBUFFERED": "1"}
        env.pop("TMUX", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "k2tui", *argv], stdin=slave, stdout=slave, stderr=slave, cwd=ROOT, env=env,
            preexec_fn=lambda: (os.setsid(), fcntl.ioctl(0, termios.TIOCSCTTY, 0)),
        )
        os.close(slave)

    def pump(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if select.select([self.master], [], [], left)[0]:
                try:
                    self._stream.feed(os.read(self.master, 65536))
                except OSError:
                    return

    @property
    def text(self) -> str:
        return "\n".join(self.screen.display)

    def wait_for(self, words: str, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while words not in self.text:
            assert time.monotonic() < end, f"{words!r} did not come in {seconds} s:\n{self.text}"
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.text}"
            self.pump(0.2)

    def press(self, keys: str) -> None:
        for key in keys:
            os.write(self.master, key.encode())
            self.pump(0.3)

    def close(self) -> None:
        os.close(self.master)


def status() -> dict[str, object]:
    run = subprocess.run([sys.executable, "-m", "k2tui", "status", "--json"], capture_output=True, text=True, cwd=ROOT)
    return dict(json.loads(run.stdout))


def test_load_watched_benchmark_started_line_dropped_found_again(own_home: Path) -> None:
    first = Terminal("demo")
    first.wait_for("/64")  # counted while it loads; a quick one is over before each count was drawn
    first.wait_for("READY")
    shards = status()["servers"][0]["shards"]  # type: ignore[index]
    assert (shards["done"], shards["total"]) == (64, 64)
    assert "DEMO" in first.text
    first.press("b")
    first.wait_for("k2tui.loadgen", 30)  # the exact command is shown before it runs
    first.press("\r")
    deadline = time.monotonic() + 60
    while not any(j["stage"] == "bench" for j in status()["jobs"]):  # type: ignore[attr-defined]
        assert time.monotonic() < deadline, first.text
        first.pump(0.3)
    first.close()  # the line drops in the middle of the benchmark
    assert first.process.wait(timeout=30) is not None
    second = Terminal("dashboard", columns=120, lines=40)
    second.wait_for("READY", 60)
    deadline = time.monotonic() + 90
    while (row := status()["bench"]) is None or any(j["stage"] == "bench" for j in status()["jobs"]):  # type: ignore[attr-defined]
        assert time.monotonic() < deadline, second.text
        second.pump(0.5)
    assert row["output_throughput"] > 0  # type: ignore[index]
    second.press("5")
    second.wait_for("random in", 30)
    second.press("q")
    assert second.process.wait(timeout=30) == 0
    left = status()
    assert left["servers"][0]["state"] == "ready"  # type: ignore[index]  # quitting ends no job
    down = subprocess.run([sys.executable, "-m", "k2tui", "down"], capture_output=True, text=True, cwd=ROOT)
    assert down.returncode == 0
