"""Speed of the embedded engine on the shipped model, from outside: python tests/benchmarks/embedded_engine.py [--runs 3]

Prints a table: start to ready, time to the first token, decode speed of one stream and of eight, prefill speed. One core
(the engine's default). Best of the runs beside the median, since other work on the machine only ever makes it slower.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

READY = "The server is fired up and ready to roll!"


def start(log: Path, extra: list[str]) -> tuple[subprocess.Popen[bytes], str, float]:
    root = Path(__file__).resolve().parents[2]
    argv = [
        sys.executable,
        "-m",
        "k2tui.local",
        "--model-path",
        str(root / "assets/tiny-target"),
        "--port",
        "0",
        *extra,
    ]
    began = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            argv, stdout=out, stderr=out, cwd=root, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    while READY not in log.read_text(errors="replace"):
        if process.poll() is not None:
            raise SystemExit(log.read_text(errors="replace"))
        time.sleep(0.01)
    ready_s = time.monotonic() - began
    found = re.search(r"running on (http://\S+)", log.read_text(errors="replace"))
    assert found
    return process, found.group(1), ready_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    args, extra = parser.parse_known_args()
    rows: dict[str, list[float]] = {}
    for _ in range(args.runs):
        log = Path(tempfile.mkdtemp()) / "engine.log"
        process, url, ready_s = start(log, extra)
        rows.setdefault("start to ready, s", []).append(ready_s)
        with httpx.Client(base_url=url, timeout=120) as client:

            def ask(count: int, prompt: list[int] | None = None, client: httpx.Client = client) -> float:
                params = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
                began = time.perf_counter()
                client.post(
                    "/generate", json={"input_ids": prompt or [1, 400, 500, 600], "sampling_params": params}
                ).raise_for_status()
                return time.perf_counter() - began

            ask(50)
            one, many = ask(1), ask(401)
            rows.setdefault("one stream, tokens/s", []).append(400 / (many - one))
            began = time.perf_counter()
            first = 0.0
            chunks = 0
            body = {
                "messages": [{"role": "user", "content": "Explain lambda."}],
                "stream": True,
                "max_tokens": 300,
                "temperature": 0,
            }
            with client.stream("POST", "/v1/chat/completions", json={**body, "ignore_eos": True}) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["delta"].get(
                        "content"
                    ):
                        chunks += 1
                        first = first or time.perf_counter()
            rows.setdefault("time to first token, ms", []).append(1e3 * (first - began))
            rows.setdefault("one SSE stream, tokens/s", []).append(299 / (time.perf_counter() - first))
            rows.setdefault("prefill of 1,000 tokens, tokens/s", []).append(
                1000 / ask(1, [1] + [7 + i % 2000 for i in range(999)])
            )
            with ThreadPoolExecutor(8) as pool:
                began = time.perf_counter()
                list(pool.map(ask, [200] * 8))
                rows.setdefault("eight requests together, tokens/s", []).append(
                    1600 / (time.perf_counter() - began)
                )
        rss = Path(f"/proc/{process.pid}/status")
        if rss.exists():
            found = re.search(r"VmHWM:\s+(\d+)", rss.read_text())
            rows.setdefault("peak memory, MB", []).append(int(found.group(1)) / 1024 if found else 0)
        process.terminate()
        process.wait()
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load {load:.1f}, {args.runs} runs")
    print(f"{'':36}{'best':>10}{'median':>10}")
    for name, values in rows.items():
        lower = name.endswith((" s", "ms", "MB"))
        print(f"{name:36}{(min if lower else max)(values):10.1f}{statistics.median(values):10.1f}")


if __name__ == "__main__":
    main()
