"""Which jobs are servers, and which of them are worth showing. Pure, and light enough for every CLI answer."""

from __future__ import annotations

from collections.abc import Sequence

from k2tui.core.job import Job, JobState

_LIVE = (JobState.QUEUED, JobState.WAITING, JobState.RUNNING, JobState.STOPPING, JobState.ORPHANED)


def is_live(job: Job) -> bool:
    return job.state in _LIVE


def server_jobs(jobs: Sequence[Job]) -> list[Job]:
    """Server jobs, newest first, as listed."""
    return [j for j in jobs if j.spec.kind == "server"]


def shown_servers(jobs: Sequence[Job]) -> list[Job]:
    """The servers worth showing: all live ones, else the newest ended one, so that a failure stays in sight."""
    servers = server_jobs(jobs)
    live = [j for j in servers if is_live(j)]
    return live or servers[:1]
