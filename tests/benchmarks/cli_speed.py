"""How long CLI answers take: whole processes, warm file cache, median of N. Prints a table; budget 120 ms.

    python tests/benchmarks/cli_speed.py [N]
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

K2 = str(Path(sys.executable).with_name("k2tui"))
BUDGET_MS = 120
COMMANDS = (["--version"], ["status", "--json"], ["jobs", "list", "--json"], ["board", "list", "--json"], ["notify", "test"], ["bench", "list", "--json"], ["config", "profiles"])


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    with tempfile.TemporaryDirectory() as home:
        env = {**os.environ, "K2TUI_HOME": home}
        print(f"load average {os.getloadavg()[0]:.2f}; median of {count}")
        print(f"{'command':<24} {'wall ms':>8} {'cpu ms':>8}  within {BUDGET_MS} ms (wall)")
        for argv in (["-c", "pass"], *COMMANDS):
            program = [sys.executable] if argv[0] == "-c" else [K2]
            wall, cpu = [], []
            for _ in range(count + 1):
                before = resource.getrusage(resource.RUSAGE_CHILDREN)
                began = time.perf_counter()
                subprocess.run([*program, *argv], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
                wall.append((time.perf_counter() - began) * 1e3)
                after = resource.getrusage(resource.RUSAGE_CHILDREN)
                cpu.append((after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1e3)
            name = "python -c pass" if argv[0] == "-c" else " ".join(argv)
            median = statistics.median(wall[1:])
            print(f"{name:<24} {median:>8.0f} {statistics.median(cpu[1:]):>8.0f}  {'yes' if median <= BUDGET_MS else 'NO'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
