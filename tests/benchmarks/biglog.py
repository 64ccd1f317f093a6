"""A gigabyte of log with many restarts: opening, present state, reading speed, memory, search; beside less, lnav and toolong.

    python tests/benchmarks/biglog.py [--size-mb 1024] [--file /tmp/k2tui-big.log] [--toolong /path/to/tl] [--no-peers] [--docs docs/load.md]

Peers run in a pseudo terminal of 120x40; "at the end" is when the file's last line is on the screen.
"""

from __future__ import annotations

import argparse
import os
import pty
import random
import re
import resource
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from fcntl import ioctl
from pathlib import Path

MARK = "the-very-last-line-of-this-log"
STARTS = 40


def make(path: Path, size_b: int) -> None:
    """A server's log: restarts with shard bars, then serving lines; the last start is ready and serving."""
    chance = random.Random(1)
    now = 1_780_000_000.0
    per_start = size_b // STARTS
    with path.open("wb") as fh:
        for number in range(STARTS):
            stamp = time.strftime("[%Y-%m-%d %H:%M:%S", time.localtime(now))
            head = [
                f"{stamp}] server_args=ServerArgs(model_path='/models/big-{number}', tp_size=8, host='127.0.0.1', port=30000)\n",
                *(f"{stamp} TP{r}] Init torch distributed begin.\n" for r in range(8)),
                *(f"{stamp} TP{r}] Load weight begin. avail mem=138.34 GB\n" for r in range(8)),
                *(f"\rLoading safetensors checkpoint shards: {100 * n // 64:3d}% Completed | {n}/64 [{n // 60:02d}:{n % 60:02d}<00:10,  1.00s/it]" for n in range(65)),
                *(f"{stamp} TP{r}] Load weight end. elapsed=64.1 s, type=KimiK25ForConditionalGeneration, avail mem=66.31 GB, mem usage=72.60 GB.\n" for r in range(8)),
                *(f"{stamp} TP{r}] Memory pool end. avail mem=21.51 GB\n" for r in range(8)),
                f"{stamp}] INFO:     Uvicorn running on http://127.0.0.1:30000 (Press CTRL+C to quit)\n",
                f"{stamp}] The server is fired up and ready to roll!\n",
            ]  # fmt: skip
            fh.write("".join(head).encode())
            until = (number + 1) * per_start
            while fh.tell() < until:
                block: list[str] = []
                for _ in range(4000):
                    now += 0.05
                    stamp = time.strftime("[%Y-%m-%d %H:%M:%S", time.localtime(now))
                    kind = chance.random()
                    if kind < 0.62:
                        block.append(
                            f"{stamp} TP0] Decode batch, #running-req: {chance.randrange(64)}, #token: {chance.randrange(400000)}, token usage: 0.31, "
                            f"accept len: 2.{chance.randrange(99):02d}, accept rate: 0.53, cuda graph: True, gen throughput (token/s): {chance.randrange(900, 1500)}.12, #queue-req: 0\n"
                        )
                    elif kind < 0.82:
                        block.append(
                            f"{stamp} TP0] Prefill batch, #new-seq: 1, #new-token: 812, #cached-token: 0, token usage: 0.30, #running-req: 12, #queue-req: 0, \n"
                        )
                    elif kind < 0.97:
                        block.append(
                            f'{stamp}] INFO:     10.0.0.{chance.randrange(250)}:4{chance.randrange(9999):04d} - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
                        )
                    elif kind < 0.999:
                        block.append(
                            f"{stamp} TP{chance.randrange(8)}] Received output for rid={chance.random()} but the state was deleted in TokenizerManager.\n"
                        )
                    else:
                        block.append(
                            f"{stamp} TP0] KV cache pool is full. Retract requests. #retracted_reqs: 3\n"
                        )
                fh.write("".join(block).encode())
        fh.write(f"{stamp}] {MARK}\n".encode())


def hwm_mb(pid: int) -> float:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    match = re.search(r"VmHWM:\s+(\d+) kB", text)
    return int(match[1]) / 1024 if match else 0.0


def in_pty(
    argv: list[str],
    wanted: str,
    timeout_s: float = 90.0,
    keys: bytes = b"",
    env: dict[str, str] | None = None,
) -> tuple[float | None, float, float]:
    """(seconds until `wanted` is on the screen, CPU seconds until then, peak MB)."""
    begin = time.perf_counter()
    pid, fd = pty.fork()
    if pid == 0:
        os.environ.update({"TERM": "xterm-256color", "LESS": "", **(env or {})})
        os.execvp(argv[0], argv)
    ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    seen, found, sent = b"", None, False
    while time.perf_counter() - begin < timeout_s:
        ready, _, _ = select.select([fd], [], [], 0.02)
        if ready:
            try:
                data = os.read(fd, 65536)
            except OSError:
                break
            if not data:
                break
            seen = (seen + data)[-400_000:]
            if b"\x1b[c" in data or b"\x1b[0c" in data:
                os.write(fd, b"\x1b[?62;c")  # device attributes: some wait for the answer
        if keys and not sent and time.perf_counter() - begin > 0.5:
            os.write(fd, keys)
            sent = True
        plain = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", seen)
        if wanted.encode() in plain.replace(b" ", b""):
            found = time.perf_counter() - begin
            break
    memory = hwm_mb(pid)
    try:
        ticks = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        cpu = (int(ticks[11]) + int(ticks[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError):
        cpu = 0.0
    for sig in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.kill(pid, sig)
        except ProcessLookupError:
            break
        time.sleep(0.1)
    os.waitpid(pid, 0)
    os.close(fd)
    return found, cpu, memory


VIEWER = """
import sys, time
from k2tui.sources.logindex import LogFile
log = LogFile(sys.argv[1])
print("\\n".join(log.tail_lines(38)), flush=True)
while not log.is_complete():
    time.sleep(0.05)
"""


def child(code: str, *args: str) -> tuple[list[str], float]:
    """Run code in a fresh interpreter: (its printed words, peak MB)."""
    out = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, check=True
    ).stdout.split()
    return out[:-1], float(out[-1])


PEAK = "import resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)\n"
OPEN = """
import sys, time
from k2tui.sources.logindex import LogFile
t = time.perf_counter(); log = LogFile(sys.argv[1]); lines = log.tail_lines(40); print(time.perf_counter() - t)
c = time.process_time()
while not log.is_complete(): time.sleep(0.01)
print(time.perf_counter() - t, time.process_time() - c)
t = time.perf_counter(); n = log.line_count()
for k in range(200): log.lines(k * n // 200, 40)
print((time.perf_counter() - t) / 200)
t = time.perf_counter(); hit = log.search("Retract", n - 1, forward=False); print(time.perf_counter() - t)
t = time.perf_counter(); hit = log.search("no such text 12345", n - 1, forward=False); print(time.perf_counter() - t)
t = time.perf_counter(); hit = log.search("Retract", n // 2); print(time.perf_counter() - t)
"""
STATE = """
import sys, time
t = time.perf_counter(); c = time.process_time()
from k2tui.engines._reading import load_tracker
from k2tui.sources.logindex import chunks, newest_start_at
tracker = load_tracker(); now = time.time()
for data in chunks(sys.argv[1], newest_start_at(sys.argv[1])): tracker.feed(data, now)
view = tracker.view(now)
print(time.perf_counter() - t, time.process_time() - c, view.state, view.model, view.target.done)
"""
UNDERSTAND = """
import sys, time
from k2tui.engines._reading import load_tracker
tracker = load_tracker(); now = time.time(); n = 0
t = time.perf_counter(); c = time.process_time()
with open(sys.argv[1], "rb") as fh:
    while data := fh.read(1 << 20):
        tracker.feed(data, now); n += len(data)
view = tracker.view(now)
print(time.perf_counter() - t, time.process_time() - c, n, view.state, tracker.start_count)
"""


def whole(argv: list[str]) -> tuple[float, float, float]:
    """(seconds, CPU seconds, peak MB) of a whole process."""
    begin = time.perf_counter()
    pid = os.spawnvp(os.P_NOWAIT, argv[0], argv)
    _, _, used = os.wait4(pid, 0)
    return time.perf_counter() - begin, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def into_docs(path: Path, lines: list[str]) -> None:
    """Put the figures between the two marks of a document."""
    first, last = "<!-- biglog: begin -->\n", "<!-- biglog: end -->"
    head, rest = path.read_text().split(first, 1)
    path.write_text(head + first + "```\n" + "\n".join(lines) + "\n```\n" + last + rest.split(last, 1)[1])


def main() -> int:
    told: list[str] = []

    def say(text: str) -> None:
        print(text, flush=True)
        told.extend(text.split("\n"))

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size-mb", type=int, default=1024)
    parser.add_argument("--file", type=Path, default=Path("/tmp/k2tui-big.log"))
    parser.add_argument("--toolong", default=shutil.which("tl") or "")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--docs", type=Path, help="put the figures into this document, between its marks")
    args = parser.parse_args()
    path: Path = args.file
    if not path.exists() or path.stat().st_size < args.size_mb << 20:
        make(path, args.size_mb << 20)
    size = path.stat().st_size
    with path.open("rb") as fh:  # the same page cache for everybody
        while fh.read(16 << 20):
            pass
    say(f"{path.name}: {size:,} bytes, {STARTS} starts, load of this machine {os.getloadavg()[0]:.1f}\n")

    words, peak = child(OPEN + PEAK, str(path))
    say(f"open and last lines            {float(words[0]):8.3f} s")
    say(f"index complete in background   {float(words[1]):8.2f} s, {float(words[2]):.2f} CPU-s")
    say(f"40 lines anywhere              {1000 * float(words[3]):8.1f} ms")
    say(f"search back, a rare word       {float(words[4]):8.3f} s")
    say(f"search back, not there         {float(words[5]):8.2f} s")
    say(f"search on, from the middle     {float(words[6]):8.3f} s")
    say(f"memory for viewing             {peak:8.1f} MB (the whole interpreter)")
    words, peak = child(STATE + PEAK, str(path))
    say(
        f"present state                  {float(words[0]):8.2f} s, {float(words[1]):.2f} CPU-s: {words[2]} {words[3]} {words[4]} shards; {peak:.0f} MB"
    )
    words, peak = child(UNDERSTAND + PEAK, str(path))
    mb = float(words[2]) / 1e6
    say(
        f"understand every line          {float(words[0]):8.2f} s, {mb / float(words[1]):.0f} MB a CPU-s; {words[3]}, {words[4]} starts; {peak:.0f} MB"
    )

    for words in (["diagnose", "--json"], ["watch", "--once", "--json"]):
        out = os.open(os.devnull, os.O_WRONLY)
        kept = os.dup(1)
        os.dup2(out, 1)
        took, cpu, peak = whole([sys.executable, "-m", "k2tui", *words, str(path)])
        os.dup2(kept, 1)
        os.close(kept)
        os.close(out)
        name = f"k2tui {words[0]}" + (" --once" if "--once" in words else "")
        say(f"{name + ', whole process':31}{took:8.2f} s, {cpu:.2f} CPU-s; {peak:.0f} MB")

    if args.no_peers:
        if args.docs:
            into_docs(args.docs, told)
        return 0
    say(f"\n{'tool':28}{'at the end s':>14}{'CPU-s':>8}{'peak MB':>9}")
    rows: list[tuple[str, list[str], bytes]] = [
        ("k2tui (LogFile in a pty)", [sys.executable, "-c", VIEWER, str(path)], b"")
    ]
    if shutil.which("less"):
        rows.append(("less -n +F", ["less", "-n", "+F", str(path)], b""))
    if shutil.which("lnav"):
        rows.append(("lnav", ["lnav", str(path)], b""))
    if args.toolong:
        rows.append(("toolong", [args.toolong, str(path)], b"\x1b[F"))
    home = path.parent / "k2tui-biglog-home"
    for name, argv, keys in rows:
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
        found, cpu, memory = in_pty(argv, MARK, keys=keys, env={"HOME": str(home)})
        shown = f"{found:.2f}" if found is not None else "> 90"
        say(f"{name:28}{shown:>14}{cpu:8.2f}{memory:9.0f}")
    shutil.rmtree(home, ignore_errors=True)
    if args.docs:
        into_docs(args.docs, told)
    return 0


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.exit(main())
