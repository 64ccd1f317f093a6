"""What the tests of jobs look at: processes of a home, and waiting for something to become true."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from k2tui.core.job import Job
from k2tui.jobs import folder, procs


def processes_of(home: Path) -> list[int]:
    """Every living process, keeper or work, that belongs to jobs of this home."""
    jobs = home / "jobs"
    ids = [p.name for p in jobs.iterdir() if not p.name.startswith(".")] if jobs.is_dir() else []
    found = {pid for pids in procs.by_job(ids).values() for pid in pids}
    for pid in procs.all_pids():
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"k2tui.jobs.keeper" in line and os.fsencode(str(home)) in line and procs.birth(pid):
            found.add(pid)
    return sorted(found)


def until(check: Callable[[], object], seconds: float = 30.0) -> object:
    """Wait for something to become true; its value. Fails the test when it does not."""
    end = time.monotonic() + seconds
    while True:
        value = check()
        if value:
            return value
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def running(job_id: str) -> Job:
    """The job once it runs."""

    def look() -> Job | None:
        job = folder.get(job_id)
        assert not job.state.is_final, f"{job.state}: {job.reason}"
        return job if job.state == "running" and job.pid else None

    return until(look)  # type: ignore[return-value]
