#!/usr/bin/env python3
"""What the dashboard costs, measured from outside on a real pty, beside its limits.

    python tests/benchmarks/tui_budget.py                 # all cases, about 4 minutes
    python tests/benchmarks/tui_budget.py --peer nvitop   # the same measurement of another program

live: the real `k2tui watch LOG` with 8 GPUs (fake NVML library, figures wave), a log of a loading server that grows by 4 lines a
second and is followed in the log pane. still: the same with nothing changing. Starts are those of plain `k2tui`, after one that
writes the bytecode (as an installer does); medians of several. Everything here depends on the load of the machine, which is
printed; on a busy one `chrt -f 10 python tests/benchmarks/tui_budget.py` (as root) comes close to a quiet one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tests" / "tui"))

from terminal import Terminal  # noqa: E402 - the pty of the tests

LIMITS = {
    "first paint s": 0.6,
    "settled s": 0.8,
    "live CPU s/min": 1.5,
    "live B/s": 3000.0,
    "still B/s": 1000.0,
    "key p50 ms": 10.0,
    "key p99 ms": 50.0,
    "memory MB": 60.0,
}
LOG = ROOT / "tests/fixtures/sglang/0.5.23/tp8-72shards.log"
TICK = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


class Probe(Terminal):
    """The tests' pty with the time of every read."""

    def __init__(self, argv: list[str], columns: int, lines: int, env: dict[str, str]) -> None:
        self.began = time.perf_counter()
        self.chunks: list[tuple[float, int]] = []  # (time, bytes so far)
        super().__init__(argv, columns, lines, env=env)

    def pump(self, seconds: float) -> None:
        end = time.perf_counter() + seconds
        while (left := end - time.perf_counter()) > 0:
            before = len(self.raw)
            super().pump(min(left, 0.005))
            if len(self.raw) > before:
                self.chunks.append((time.perf_counter() - self.began, len(self.raw)))


@dataclass
class Result:
    figures: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        self.figures.setdefault(name, []).append(value)

    def median(self, name: str) -> float | None:
        values = self.figures.get(name)
        return statistics.median(values) if values else None


def tree(root: int) -> tuple[float, float, float]:
    """(CPU seconds, RSS MB, PSS MB) of a process and everything below it."""
    parents: dict[int, list[int]] = {}
    facts: dict[int, tuple[float, int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                text = Path(f"/proc/{name}/stat").read_text()
            except OSError:
                continue
            part = text[text.rindex(")") + 2 :].split()
            facts[int(name)] = ((int(part[11]) + int(part[12])) / TICK, int(part[21]) * PAGE)
            parents.setdefault(int(part[1]), []).append(int(name))
    todo, cpu, rss, pss = [root], 0.0, 0, 0
    while todo:
        pid = todo.pop()
        if pid in facts:
            cpu += facts[pid][0]
            rss += facts[pid][1]
            try:
                for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                    if line.startswith("Pss:"):
                        pss += int(line.split()[1]) * 1024
            except OSError:
                pass
        todo += parents.get(pid, [])
    return cpu, rss / 2**20, pss / 2**20


def filled(raw: bytes, columns: int, lines: int) -> int:
    terminal = Terminal.__new__(Terminal)
    terminal.raw, terminal.columns, terminal.lines = raw, columns, lines
    return sum(1 for line in terminal.screen() for ch in line if not ch.isspace())


def start_times(probe: Probe, quiet: float = 0.15) -> tuple[float, float]:
    """First paint (10 visible cells), and the last write of the burst that completes 95 % of the picture."""
    final = filled(probe.raw, probe.columns, probe.lines)
    first = settled = 0.0
    times = [t for t, _ in probe.chunks]
    for n, (at, upto) in enumerate(probe.chunks):
        cells = filled(probe.raw[:upto], probe.columns, probe.lines)
        if not first and cells >= 10:
            first = at
        if not settled and cells >= 0.95 * final:
            settled = at
            for later in times[n + 1 :]:
                if later - settled > quiet:
                    break
                settled = later
            break
    return first, settled


def keys_ms(probe: Probe, keys: str, count: int) -> list[float]:
    """Key press to the first byte that follows, each after 40 ms of silence."""
    out: list[float] = []
    for n in range(count):
        limit, quiet = time.perf_counter() + 2.0, time.perf_counter()
        while time.perf_counter() - quiet < 0.04 and time.perf_counter() < limit:
            before = len(probe.raw)
            probe.pump(0.005)
            if len(probe.raw) > before:
                quiet = time.perf_counter()
        before, at = len(probe.raw), time.perf_counter()
        probe.send(keys[n % len(keys)])
        while len(probe.raw) == before and time.perf_counter() - at < 1.0:
            Terminal.pump(probe, 0.001)
        if len(probe.raw) > before:
            out.append((time.perf_counter() - at) * 1000)
        probe.pump(0.1)
    return out


class Feeder(threading.Thread):
    """Writes a recorded start into a file, a few lines a second."""

    def __init__(self, path: Path, rate: float, lines: int | None = None) -> None:
        super().__init__(daemon=True)
        self.path, self.rate, self.halt = path, rate, threading.Event()
        text = LOG.read_bytes().splitlines(keepends=True)
        self.lines = text if lines is None else text[:lines]
        path.write_bytes(b"".join(self.lines[:20]))

    def run(self) -> None:
        with self.path.open("ab", buffering=0) as out:
            for line in self.lines[20:]:
                if self.halt.wait(1 / self.rate):
                    return
                out.write(line)


def measure(argv: list[str], env: dict[str, str], *, seconds: float, columns: int, lines: int, keys: str, key_count: int) -> Result:
    result = Result()
    probe = Probe(argv, columns, lines, env)
    try:
        probe.pump(8.0)
        cpu, _, _ = tree(probe.pid)
        size, at = len(probe.raw), time.perf_counter()
        probe.pump(seconds)
        took = time.perf_counter() - at
        result.add("CPU s/min", (tree(probe.pid)[0] - cpu) / took * 60)
        result.add("B/s", (len(probe.raw) - size) / took)
        if keys:
            for ms in keys_ms(probe, keys, key_count):
                result.add("key ms", ms)
        _, rss, pss = tree(probe.pid)
        result.add("memory MB", rss)
        result.add("memory PSS MB", pss)
    finally:
        if not probe.is_over():
            probe.send("q")
            probe.wait_end(3)
        probe.close()
    return result


def start_only(argv: list[str], env: dict[str, str], columns: int, lines: int, into: Result) -> None:
    probe = Probe(argv, columns, lines, env)
    try:
        probe.pump(4.0)
        first, settled = start_times(probe)
        if not settled:
            return  # starved: the first screen did not come in time
        into.add("first paint s", first)
        into.add("settled s", settled)
    finally:
        probe.send("q")
        probe.wait_end(3)
        probe.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40.0, help="of the live and the still measurement")
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--keys", type=int, default=100)
    parser.add_argument("--press", default="\\t", help="keys pressed in turn, each with a visible effect (default: Tab, the next panel)")
    parser.add_argument("--size", default="120x40")
    parser.add_argument("--peer", help="measure this program instead (it sees the same fake GPUs)")
    args = parser.parse_args()
    columns, lines = map(int, args.size.split("x"))
    with tempfile.TemporaryDirectory(prefix="k2tui-budget-") as folder:
        home = Path(folder)
        subprocess.run([sys.executable, str(ROOT / "tests/gpu/fakenvml/make.py"), str(home / "nvml"), "--gpus", "8", "--busy"], check=True, stdout=subprocess.DEVNULL)
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        env = {
            "PYTHONPYCACHEPREFIX": str(home / "bytecode"),
            "K2TUI_HOME": str(home / "state"),
            "LD_LIBRARY_PATH": str(home / "nvml"),
            "K2TUI_FAKE_NVML": str(home / "nvml" / "scene.txt"),
        }
        log = home / "server.log"
        k2tui = [sys.executable, "-m", "k2tui", "watch", str(log)]
        argv = args.peer.split() if args.peer else k2tui
        if args.peer and "/" not in argv[0]:
            import shutil

            argv[0] = shutil.which(argv[0]) or argv[0]
        print(f"{' '.join(argv[-3:])} at {args.size}; load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")
        feeder = Feeder(log, 4.0)
        feeder.start()
        for _ in range(2):
            start_only(argv, env, columns, lines, Result())  # bytecode, file caches
        live = measure(argv, env, seconds=args.seconds, columns=columns, lines=lines, keys=args.press.encode().decode("unicode_escape"), key_count=args.keys)
        plain = argv if args.peer else [sys.executable, "-m", "k2tui"]
        for _ in range(args.starts):
            start_only(plain, env, columns, lines, live)
        feeder.halt.set()
        feeder.join()
        still_scene = subprocess.run([sys.executable, str(ROOT / "tests/gpu/fakenvml/make.py"), str(home / "nvml"), "--gpus", "8", "--scene", "still"], stdout=subprocess.DEVNULL)
        assert still_scene.returncode == 0
        still = measure(argv, env, seconds=args.seconds, columns=columns, lines=lines, keys="", key_count=0)
    keys = sorted(live.figures.get("key ms", []))
    figures: dict[str, float | None] = {
        "first paint s": live.median("first paint s"),
        "settled s": live.median("settled s"),
        "live CPU s/min": live.median("CPU s/min"),
        "live B/s": live.median("B/s"),
        "still CPU s/min": still.median("CPU s/min"),
        "still B/s": still.median("B/s"),
        "key p50 ms": keys[len(keys) // 2] if keys else None,
        "key p99 ms": keys[min(len(keys) - 1, int(len(keys) * 0.99))] if keys else None,
        "memory MB": live.median("memory MB"),
        "memory PSS MB": live.median("memory PSS MB"),
    }
    print(f"{'figure':<18}{'measured':>10}{'limit':>8}")
    bad = 0
    for name, value in figures.items():
        limit = LIMITS.get(name)
        over = value is not None and limit is not None and value > limit
        bad += over
        print(f"{name:<18}{'n/a' if value is None else f'{value:.2f}':>10}{'' if limit is None else f'{limit:g}':>8}{'  over' if over else ''}")
    print(f"load after: {os.getloadavg()[0]:.1f}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
