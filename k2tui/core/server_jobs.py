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
    """The servers worth showing: all live ones, else the one that ended last, so that a failure or a stop stays in sight."""
    servers = server_jobs(jobs)
    live = [j for j in servers if is_live(j)]
    if live or not servers:
        return live
    return [max(servers, key=lambda j: (j.ended_s or j.spec.submitted_s, j.spec.id))]
