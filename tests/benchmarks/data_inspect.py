"""How long `k2tui data inspect` takes: python tests/benchmarks/data_inspect.py [ROWS] [TOKENS]."""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from k2tui.dataset.rows import make_row
from k2tui.dataset.stats import summarize


def main() -> None:
    rows, tokens = int((sys.argv[1:] or ["30000"])[0]), int((sys.argv[2:] or ["1000"])[0])
    rng = random.Random(0)
    lines = []
    for _ in range(50):
        n = rng.randrange(tokens // 2, tokens * 3 // 2)
        lines.append(
            make_row(
                [rng.randrange(160000) for _ in range(n)],
                [0] * (n // 3) + [1] * (n - n // 3),
                n // 3,
                True,
                "stop",
            ).to_line()
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenized_data.jsonl"
        with path.open("w") as fh:
            for i in range(rows):
                fh.write(lines[i % 50])
        print(f"{rows:,} rows, {path.stat().st_size / 1e6:,.0f} MB")
        for turn in range(3):
            began = time.perf_counter()
            summarize(path)
            print(
                f"summarize, page cache {'cold or warm' if turn == 0 else 'warm'}: {time.perf_counter() - began:.2f} s"
            )
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "k2tui", "data", "inspect", str(path)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        print(f"the whole command: {time.perf_counter() - began:.2f} s")


if __name__ == "__main__":
    main()
