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


def demo_server(jobs: Sequence[Job]) -> Job | None:
    """The tiny server of `k2tui demo` that runs, or None."""
    return next(
        (
            j
            for j in server_jobs(jobs)
            if is_live(j) and j.spec.params.get("engine") == "local" and j.spec.params.get("profile") == "tiny"
        ),
        None,
    )


def users_of(server: Job, jobs: Sequence[Job]) -> list[Job]:
    """Live jobs that fail when this server goes: the one that started it (a pipeline, a tuner), and pipelines whose steps ask it.

    A pipeline that has started no step yet may use any server.
    """
    url = server.spec.params.get("url")
    found: list[Job] = []
    for job in jobs:
        if not is_live(job) or job.spec.kind == "server":
            continue
        steps = [j for j in jobs if j.spec.parent == job.spec.id] if job.spec.stage == "pipeline" else []
        asks = job.spec.stage == "pipeline" and (
            not steps or any(j.spec.params.get("url") == url for j in steps)
        )
        if server.spec.parent == job.spec.id or (asks and is_live(server)):
            found.append(job)
    return found


def trial_jobs(jobs: Sequence[Job]) -> list[Job]:
    """What tuning runs started: the servers of their trials and the benchmarks of those."""
    tuners = {j.spec.id if j.spec.stage == "tune" else j.spec.parent for j in jobs if j.spec.stage == "tune" or "tune" in j.spec.params}
    return [j for j in jobs if "tune" in j.spec.params or (j.spec.parent and j.spec.parent in tuners)]


def left_over(jobs: Sequence[Job]) -> list[Job]:
    """Live jobs of a tuning run (the server of a trial, its benchmark) whose tuner has ended or is not there any more."""
    alive = {j.spec.id for j in jobs if is_live(j)}
    return [j for j in trial_jobs(jobs) if is_live(j) and j.spec.parent not in alive]


def shown_servers(jobs: Sequence[Job]) -> list[Job]:
    """The servers worth showing: all live ones, those of tuning trials last; else the one that ended last, so that a failure or a
    stop stays in sight."""
    servers = server_jobs(jobs)
    live = sorted((j for j in servers if is_live(j)), key=lambda j: "tune" in j.spec.params)
    if live or not servers:
        return live
    return [max(servers, key=lambda j: (j.ended_s or j.spec.submitted_s, j.spec.id))]
