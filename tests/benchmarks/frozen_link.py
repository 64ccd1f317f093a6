"""A link that freezes for 25 s under the real dashboard, and under a plain Textual app: what the event loop, the CPU and the link see.

    python tests/benchmarks/frozen_link.py                 # about 3 minutes
    python tests/benchmarks/frozen_link.py --seconds 12 --only pty

pty: nobody reads the terminal for that time. ssh: the client is stopped (SIGSTOP), so that the session's own buffers fill; a real
sshd on loopback. A job prints 200 lines a second meanwhile, and the log is on the screen.

Columns: the longest time that the event loop stood still, CPU of the dashboard while frozen, bytes that came in the first 2 s
after the thaw (what had queued up, and one picture), and how long after the thaw the screen showed the job's newest lines.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "tui"), str(ROOT / "tests")]

PORT = 31160
RATE = 200


def child(gaps: str) -> int:
    """The real `k2tui`, with a watch over its event loop."""
    import play

    from k2tui.cli import main

    play.watch_gaps(gaps)
    return main([])


def stock(gaps: str, log: str) -> int:
    """A plain Textual app with the same news: a log and a table of figures, drawn by Textual itself."""
    import asyncio

    import play
    from textual.app import App, ComposeResult
    from textual.widgets import DataTable, RichLog

    class Stock(App[None]):
        def compose(self) -> ComposeResult:
            yield DataTable()
            yield RichLog(max_lines=2000)

        def on_mount(self) -> None:
            table = self.query_one(DataTable)
            table.add_columns(*(f"c{n}" for n in range(8)))
            for _ in range(8):
                table.add_row(*("0" for _ in range(8)))
            self.log_file = open(log, encoding="utf-8")
            self.set_interval(0.2, self.news)
            self.watch_task = asyncio.ensure_future(play.longest_gap(gaps))

        def news(self) -> None:
            table, now = self.query_one(DataTable), time.time()
            for row in range(8):
                for column in range(8):
                    table.update_cell_at((row, column), f"{(now * (row + 1) * (column + 2)) % 1000:7.2f}")  # type: ignore[arg-type]
            for line in self.log_file.read().splitlines():
                self.query_one(RichLog).write(line)

    Stock().run()
    return 0


def newest(lines: list[str]) -> int:
    """The highest line number of the job's output on the screen."""
    return max((int(n) for line in lines for n in re.findall(r"line (\d+)", line)), default=0)


def cpu_s(pid: int) -> float:
    text = Path(f"/proc/{pid}/stat").read_text()
    fields = text[text.rindex(")") + 2 :].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def try_one(what: str, link: str, seconds: float, base: Path) -> str:
    from jobs.sshd import Sshd
    from terminal import Terminal

    home = base / f"{what}-{link}"
    home.mkdir()
    env = {"K2TUI_HOME": str(home), "K2TUI_CONFIG": str(home / "config.toml"), "PYTHONPATH": str(ROOT)}
    (home / "config.toml").write_text("")
    work = f"import time\nn = 0\nwhile True:\n    n += 1\n    print('line', n, flush=True)\n    time.sleep({1 / RATE})"
    submit = [
        sys.executable,
        "-m",
        "k2tui",
        "jobs",
        "submit",
        "--stage",
        "talk",
        "--",
        sys.executable,
        "-c",
        work,
    ]
    job_id = subprocess.run(
        submit, env=os.environ | env, capture_output=True, text=True, check=True
    ).stdout.strip()
    log = home / "jobs" / job_id / "output.log"
    gaps, pid_file = home / "gaps", home / "pid"
    argv = [
        sys.executable,
        __file__,
        "--child",
        what,
        "--gaps",
        str(gaps),
        "--log",
        str(log),
        "--pid-file",
        str(pid_file),
    ]
    server = None
    if link == "ssh":
        server = Sshd(home / "sshd", PORT)
        server.start()
        words = " ".join(
            f"{k}={v}" for k, v in (env | {"TERM": "xterm-256color", "COLORTERM": "truecolor"}).items()
        )
        argv = server.argv("env " + words + " " + " ".join(argv))
        argv[0] = "/usr/bin/ssh"
    t = Terminal(argv, 120, 40, env=env)
    try:
        if what == "k2tui":
            t.wait_for("talk", 60)
            t.send("3")
        end = time.monotonic() + 60
        while not newest(t.screen()) and time.monotonic() < end:
            t.pump(0.2)
        t.pump(3.0)
        pid = int(pid_file.read_text())
        gaps.write_text("0")
        used = cpu_s(pid)
        if link == "ssh":
            os.kill(t.pid, signal.SIGSTOP)
        began = time.monotonic()
        for n in range(int(seconds)):
            time.sleep(1.0)
            if n == 2 and link == "pty":
                t.send("\t")  # a key in the meantime: frames want to come quickly
        frozen = time.monotonic() - began
        used = cpu_s(pid) - used
        goal = int(log.read_bytes().rstrip(b"\n").rpartition(b"\n")[2].split()[-1])
        if link == "ssh":
            os.kill(t.pid, signal.SIGCONT)
        thaw, before = time.monotonic(), len(t.raw)
        true_s: float | None = None
        flood = -1
        while time.monotonic() - thaw < 20 and (true_s is None or flood < 0):
            t.pump(0.05)
            if true_s is None and newest(t.screen()) >= goal:
                true_s = time.monotonic() - thaw
            if flood < 0 and time.monotonic() - thaw >= 2.0:
                flood = len(t.raw) - before
        worst = float(gaps.read_text() or 0)
        return (
            f"| {'k2tui' if what == 'k2tui' else 'a plain Textual app'} | {link} | {frozen:.0f} s | {worst:.2f} s | {used:.2f} s | {flood:,} | "
            + (f"{true_s:.1f} s |" if true_s is not None else "not within 20 s |")
        )
    finally:
        t.close()
        if server is not None:
            server.stop()
        subprocess.run(
            [sys.executable, "-m", "k2tui", "jobs", "stop", job_id],
            env=os.environ | env,
            capture_output=True,
            check=False,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--only", choices=("pty", "ssh"))
    parser.add_argument("--child", choices=("k2tui", "plain"), help=argparse.SUPPRESS)
    for name in ("--gaps", "--log", "--pid-file"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        Path(args.pid_file).write_text(str(os.getpid()))
        return child(args.gaps) if args.child == "k2tui" else stock(args.gaps, args.log)
    print(
        "| app | link | frozen | event loop stood still | CPU meanwhile | bytes after the thaw | newest lines shown after |"
    )
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="k2tui-frozen-") as base:
        for what in ("k2tui", "plain"):
            for link in ("pty", "ssh"):
                if not args.only or args.only == link:
                    print(try_one(what, link, args.seconds, Path(base)), flush=True)
    print(f"\nload average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
