"""The dashboard in a real pseudo-terminal: first screen, keys, colours, hang-up, freeze, tiny sizes, no terminal."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from terminal import Terminal

HERE = Path(__file__).resolve().parent
PLAY = [sys.executable, str(HERE / "play.py")]


@pytest.fixture
def start() -> Iterator[object]:
    running: list[Terminal] = []

    def make(*args: str, argv: list[str] | None = None, columns: int = 80, lines: int = 24, **options: object) -> Terminal:
        terminal = Terminal(argv or [*PLAY, *args], columns, lines, **options)  # type: ignore[arg-type]
        running.append(terminal)
        return terminal

    yield make
    for terminal in running:
        terminal.close()


def test_first_screen_keys_and_quit(start) -> None:  # type: ignore[no-untyped-def]
    t = start("loading", "--still")
    t.wait_for("26/64")
    end = time.monotonic() + 20
    while sum("/141G" in line for line in t.screen()) < 8 and time.monotonic() < end:
        t.pump(0.1)
    assert sum("/141G" in line for line in t.screen()) == 8
    t.send("4")
    t.wait_for("stage  serve")
    t.send("1")
    t.wait_for("26/64")
    t.resize(120, 40)
    t.wait_for("Log · serve-01")
    t.send("q")
    assert t.wait_end(20) == 0
    t.pump(0.2)
    tail = t.raw[-400:]
    for code in (b"\x1b[?1049l", b"\x1b[?25h", b"\x1b[?1002l"):  # the terminal is given back as it was
        assert code in tail
    assert b"\x1b[?1003h" not in t.raw  # mouse moves are not asked for


def test_the_painted_screen_equals_a_full_repaint(start) -> None:  # type: ignore[no-untyped-def]
    t = start("loading", "--still", columns=120, lines=40)
    t.wait_for("26/64")
    for keys in ("\t", "\t", "6", "2", "1", "?", "\x1b", "j"):
        t.send(keys)
        t.pump(0.4)
    t.pump(0.6)
    before = t.screen()
    assert any("GPUs" in line for line in before)
    at = len(t.raw)
    t.send("\x0c")  # ctrl+l: everything again
    t.pump(1.0)
    assert len(t.raw) - at > 3000
    assert t.screen() == before


@pytest.mark.parametrize("ignore_hup", [False, True], ids=["SIGHUP", "EOF only"])
def test_hang_up_ends_it_and_spares_the_job(start, ignore_hup: bool) -> None:  # type: ignore[no-untyped-def]
    t = start("loading", "--child", "--log-rate", "20", ignore_hup=ignore_hup)
    t.wait_for("serve kimi-k25")
    t.pump(0.5)
    children = [int(p) for p in Path(f"/proc/{t.pid}/task/{t.pid}/children").read_text().split()]
    assert children
    t.hang_up()
    assert t.wait_end(10) == 129  # a second, and room for a busy machine
    for pid in children:
        assert os.path.exists(f"/proc/{pid}")
        os.kill(pid, 9)


def test_sigterm_ends_it_in_order(start) -> None:  # type: ignore[no-untyped-def]
    t = start("loading", "--still")
    t.wait_for("26/64")
    os.kill(t.pid, 15)
    assert t.wait_end(10) == 143
    assert b"\x1b[?1049l" in t.raw[-400:]


def test_frozen_link_neither_blocks_nor_floods(start, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    gaps = tmp_path / "gaps"
    t = start("loading", "--log-rate", "200", "--period", "0.05", "--gaps", str(gaps), columns=120, lines=40)
    t.wait_for("Log · serve-01")
    t.send("3")
    t.pump(1.0)
    for _ in range(4):
        t.send("\t")  # activity, so that frames want to come quickly
    cpu = t.cpu_s()
    time.sleep(4)  # nobody reads (tests/benchmarks/frozen_link.py freezes it for 25 s)
    cpu = t.cpu_s() - cpu
    before = len(t.raw)
    t.pump(1.5)
    flood = len(t.raw) - before
    assert float(gaps.read_text()) < 2.5, "the event loop waited for the terminal"
    assert cpu < 2.0
    assert flood < 60_000, f"{flood} bytes of stale frames"
    t.send("1")
    t.wait_for("Board")
    t.wait_for("141G")
    t.send("q")
    assert t.wait_end(20) == 0


def test_no_color_sends_no_colour(start) -> None:  # type: ignore[no-untyped-def]
    t = start("failed", "--still", env={"NO_COLOR": "1"})
    t.wait_for("FAILED")
    t.send("S")
    t.wait_for("Stop the server?")
    t.send("n")
    t.pump(0.5)
    t.send("\x10")
    t.wait_for("Commands")
    codes = [int(c or 0) for group in re.findall(rb"\x1b\[([0-9;]*)m", t.raw) for c in group.split(b";")]
    assert codes and not [c for c in codes if 30 <= c <= 49 or 90 <= c <= 107], sorted(set(codes))


@pytest.mark.parametrize(("columns", "lines"), [(20, 5), (79, 24), (80, 23), (11, 3)])
def test_small_terminals_get_a_plain_message(start, columns: int, lines: int) -> None:  # type: ignore[no-untyped-def]
    t = start("loading", "--still", columns=columns, lines=lines)
    t.wait_for("LOADING")
    t.resize(80, 24)
    t.wait_for("26/64")
    t.send("q")
    assert t.wait_end(20) == 0


def test_16_colours_and_no_truecolor(start) -> None:  # type: ignore[no-untyped-def]
    t = start("serving", "--still", env={"COLORTERM": "", "TERM": "xterm-256color"})
    t.wait_for("READY")
    assert b"38;2;" not in t.raw and b"38;5;" in t.raw


def run_plain(home: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    base = {**os.environ, "K2TUI_HOME": str(home), **env}
    return subprocess.run(
        [sys.executable, "-m", "k2tui", *args], capture_output=True, text=True, env=base, stdin=subprocess.DEVNULL, timeout=60, cwd=home
    )


def test_without_a_terminal_a_plain_picture(tmp_path: Path) -> None:
    done = run_plain(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "No server yet" in done.stdout and "Jobs" in done.stdout and "\x1b" not in done.stdout
    assert done.stderr == ""


def test_unknown_profile_and_replay_are_told_plainly(tmp_path: Path) -> None:
    done = run_plain(tmp_path, "--profile", "tinny")
    assert done.returncode == 2 and "did you mean 'tiny'" in done.stderr and "Traceback" not in done.stderr
    done = run_plain(tmp_path, "--replay", str(tmp_path))
    assert done.returncode == 2 and "is a folder" in done.stderr
    done = run_plain(tmp_path, "--replay", str(tmp_path / "none.log"))
    assert done.returncode == 2 and "no such file" in done.stderr


def test_dumb_terminal_gets_plain_text(start, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    t = start(argv=[sys.executable, "-m", "k2tui"], env={"TERM": "dumb", "K2TUI_HOME": str(tmp_path)}, columns=100)
    assert t.wait_end(20) == 0
    t.pump(0.2)
    assert b"No server yet" in t.raw and b"\x1b" not in t.raw


def test_stderr_in_a_file_draws_on_the_terminal(start, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    log = tmp_path / "err.log"
    command = f'exec "{sys.executable}" -m k2tui 2>"{log}"'
    t = start(argv=["/bin/sh", "-c", command], env={"K2TUI_HOME": str(tmp_path)}, columns=100, lines=30)
    t.wait_for("No server yet")
    t.send("q")
    assert t.wait_end(20) == 0
    assert "\x1b" not in log.read_text()


def test_keys_typed_while_it_starts_are_kept_and_not_echoed(start) -> None:  # type: ignore[no-untyped-def]
    t = start("loading", "--still")
    end = time.monotonic() + 20
    while b"starting" not in t.raw and time.monotonic() < end:
        t.pump(0.01)
    t.send("4")
    t.wait_for("stage  serve")
    assert b"starting4" not in t.raw, "the key was echoed on the first picture"
    t.send("q")
    assert t.wait_end(20) == 0
    attributes = termios.tcgetattr(t.master)
    assert attributes[3] & termios.ECHO and attributes[3] & termios.ICANON, "the terminal is as it was"
