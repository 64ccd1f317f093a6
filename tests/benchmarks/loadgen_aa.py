"""Are the verdicts right? A server against itself, and against one that is 3 % slower: 40 comparisons of each, measured.

    .venv/bin/python tests/benchmarks/loadgen_aa.py --render docs/benchmarks.md

Two C servers (tests/fixtures/bench/mocksse.c) on core 0, the client on core 1. One `k2tui bench run --against` measures them in
turn (A B A B ...); each five repeats in a row are one comparison, as `bench compare` would make it. The second server's own
speed control (steps and first token 3 % longer) is the difference; every stream's step varies by `--jitter` of its length.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from k2tui.core.bench import BenchRow
from k2tui.core.bench_compare import compare

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "tests" / "fixtures" / "bench" / "mocksse.c"
STEP_US = 10000
FIRST_US = 20000


def server(binary: Path, port: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(["taskset", "-c", "0", str(binary), f"port={port}"], stdout=subprocess.DEVNULL)
    for _ in range(100):
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)) == 0:
                return process
        time.sleep(0.05)
    raise SystemExit("the mock server did not start")


def configure(port: int, factor: float, jitter: float) -> None:
    query = f"defaults=1&ttft_us={int(FIRST_US * factor)}&itl_us={int(STEP_US * factor)}&jitter_us={int(STEP_US * jitter)}"
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/__config?{query}", timeout=10) as answer:
        answer.read()


def measured(ports: tuple[int, int], repeats: int, folder: Path) -> tuple[list[BenchRow], list[BenchRow]]:
    """(base rows, new rows), one a repeat, measured in turn by one command."""
    base, new = (f"http://127.0.0.1:{p}" for p in ports)
    argv = ["taskset", "-c", "1", sys.executable, "-m", "k2tui.cli", "bench", "run", "--url", base, "--label", "base",
            "--against", new, "--against-label", "new", "--repeats", str(repeats), "--concurrency", "8", "--num-prompts", "16",
            "--random-input-len", "16", "--random-output-len", "16", "--warmup", "1", "--json", "--db", str(folder / "runs.db")]  # fmt: skip
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True)
    known = set(BenchRow.__dataclass_fields__)
    rows = [BenchRow(**{k: v for k, v in r.items() if k in known}) for r in json.loads(done.stdout)["runs"]]
    return [r for r in rows if r.label == "base"], [r for r in rows if r.label == "new"]


def verdicts(base: list[BenchRow], new: list[BenchRow], each: int) -> Counter[str]:
    """The verdict of every `each` repeats, by output throughput."""
    found: Counter[str] = Counter()
    for at in range(0, len(base) - each + 1, each):
        (point,) = compare(base[at : at + each], new[at : at + each])
        found[point.verdict.value] += 1
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comparisons", type=int, default=40)
    parser.add_argument("--each", type=int, default=5, help="repeats of one comparison")
    parser.add_argument("--jitter", type=float, default=0.2, help="how much a stream's step varies")
    parser.add_argument("--port", type=int, default=31440)
    parser.add_argument(
        "--render", default="", help="Markdown file: goes between <!-- aa --> and <!-- /aa -->"
    )
    args = parser.parse_args()
    lines = [
        "| new server | comparisons | same | slower | faster | not clear | runs not valid |",
        "|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory(prefix="k2tui-aa-") as name:
        folder = Path(name)
        binary = folder / "mocksse"
        subprocess.run(["gcc", "-O2", "-w", "-o", str(binary), str(SOURCE), "-lm"], check=True)
        ports = (args.port, args.port + 1)
        servers = [server(binary, p) for p in ports]
        loads: list[float] = []
        try:
            for title, factor in (("the same", 1.0), ("3 % slower", 1.03)):
                for port, f in zip(ports, (1.0, factor), strict=True):
                    configure(port, f, args.jitter)
                base, new = measured(ports, args.comparisons * args.each, folder)
                found: Any = verdicts(base, new, args.each)
                loads.append(os.getloadavg()[0])
                n = sum(found.values())
                bad = sum(bool(r.flags) for r in (*base, *new))
                cells = [f"{found[v]} ({found[v] / n:.0%})" for v in ("same", "slower", "faster", "unclear")]
                lines.append(f"| {title} | {n} | {' | '.join(cells)} | {bad} of {len(base) + len(new)} |")
                print(lines[-1], flush=True)
        finally:
            for process in servers:
                process.terminate()
                process.wait()
    text = "\n".join(
        [
            f"Measured {time.strftime('%Y-%m-%d')}, {args.each} repeats a side in each comparison, steps of {STEP_US / 1000:g} ms that vary by "
            f"{args.jitter:.0%}, load average {' and '.join(f'{x:.1f}' for x in loads)}.",
            "",
            *lines,
        ]
    )
    print(text)
    if args.render:
        page = Path(args.render)
        old = page.read_text()
        page.write_text(
            re.sub(r"(<!-- aa -->\n).*?(<!-- /aa -->)", lambda m: f"{m[1]}{text}\n{m[2]}", old, flags=re.S)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
