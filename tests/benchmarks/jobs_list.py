"""What a list of many ended jobs costs: 500 jobs on disk, read without an index, with it, in a warm process, and by the CLI.

python tests/benchmarks/jobs_list.py [--jobs 500]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from k2tui.core import journal  # noqa: E402
from k2tui.core.job import JobSpec  # noqa: E402
from k2tui.jobs import folder, procs  # noqa: E402


def make(home: Path, count: int) -> None:
    """Folders of ended jobs, as keepers leave them."""
    for n in range(count):
        job_id = f"0r{n:06d}-bench"
        path = home / "jobs" / job_id
        path.mkdir(parents=True)
        argv = (
            sys.executable,
            "-m",
            "k2tui.loadgen",
            "--url",
            "http://127.0.0.1:30000",
            "--concurrency",
            "1,4,8",
            "--num-prompts",
            "32",
        )
        spec = JobSpec(
            id=job_id,
            stage="bench",
            title=f"bench {n}",
            argv=argv,
            params={"concurrency": [1, 4, 8]},
            submitted_s=1.7e9 + n,
        )
        (path / "spec.json").write_text(json.dumps(journal.spec_to_json(spec), indent=1))
        (path / "env.json").write_text(json.dumps(dict(os.environ)))
        (path / "lock").touch()
        (path / "output.log").write_text("line\n" * 100)
        (path / "progress.json").write_text(
            json.dumps(
                {"done": 96, "total": 96, "unit": "requests", "note": "", "eta_s": None, "at_s": 1.7e9}
            )
        )
        (path / "result.json").write_text(
            json.dumps({"completed": 96, "output_throughput": 123.4, "rows": [1, 2, 3]})
        )
        facts = {"pid": 1000 + n, "birth": "1", "boot": "b", "ns": "n", "host": "h"}
        lines = [
            {"t": 1.7e9 + n, "m": 1.0, "e": "keeper", **facts},
            {"t": 1.7e9 + n, "m": 1.0, "e": "waiting", "for": "port:30000 (held by x)"},
            {"t": 1.7e9 + n, "m": 1.0, "e": "started", **facts},
            {
                "t": 1.7e9 + n,
                "m": 9.0,
                "e": "ended",
                "state": "succeeded",
                "reason": "exit 0",
                "took_s": 8.0,
                "cpu_s": 3.0,
                "peak_rss_b": 1 << 27,
                "exit_code": 0,
            },
        ]
        (path / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def ms(work: object, times: int) -> str:
    spans: list[float] = []
    for _ in range(times):
        begun = time.perf_counter()
        work()  # type: ignore[operator]
        spans.append((time.perf_counter() - begun) * 1000)
    return f"p50 {statistics.median(spans):6.1f} ms   max {max(spans):6.1f} ms   ({times} times)"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=500)
    args = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="k2tui-list-"))
    os.environ["K2TUI_HOME"] = str(home)
    try:
        make(home, args.jobs)
        begun = time.perf_counter()
        assert len(folder.list_jobs()) == args.jobs
        print(
            f"{args.jobs} ended jobs, never read before:   {(time.perf_counter() - begun) * 1000:6.1f} ms (once)"
        )

        def cold() -> None:
            folder._cache.clear()
            assert len(folder.list_jobs()) == args.jobs

        print(f"a fresh process's read, by the index:    {ms(cold, 20)}")
        print(f"a dashboard's next look:                 {ms(folder.list_jobs, 50)}")
        argv = [shutil.which("k2tui") or str(Path(sys.executable).parent / "k2tui"), "jobs", "list"]

        def cli() -> None:
            subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        print(f"k2tui jobs list (whole process):         {ms(cli, 15)}")
        shutil.rmtree(home)
        home.mkdir()
        spans: list[float] = []
        ids: list[str] = []
        for _ in range(10):
            begun = time.perf_counter()
            ids.append(
                folder.submit(
                    JobSpec(
                        id="", stage="t", title="", argv=("sleep", "60"), locks=("gpu:0",) if not ids else ()
                    )
                )
            )
            spans.append((time.perf_counter() - begun) * 1000)
        print(
            f"submit until the keeper holds the lock:  p50 {statistics.median(spans):6.1f} ms   max {max(spans):6.1f} ms   (10 times)"
        )
        time.sleep(0.5)
        keepers = [j.keeper_pid or 0 for j in folder.list_jobs()]
        print(
            f"a keeper's memory:                       {procs.rss_b(keepers) / len(keepers) / 1e6:.1f} MB resident (mean of {len(keepers)})"
        )

        def cpu() -> float:
            total = 0.0
            for pid in keepers:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            return total

        before = cpu()
        time.sleep(20)
        print(
            f"a keeper's work while its child runs:    {(cpu() - before) / len(keepers) * 3 * 1000:.0f} ms of CPU a minute"
        )
        for job_id in ids:
            folder.stop(job_id, wait_s=10)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
