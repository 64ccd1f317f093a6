"""Which jobs load this host, so that a benchmark beside them measures something else than its server. Pure: jobs in, jobs out.

Law: whoever waits waits only for jobs of an older family, so that two never wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from k2tui.core.job import Job, JobState

STAGES = frozenset({"bench", "tune", "prepare", "extract", "train", "evaluate", "pipeline"})
WAITS = "waits for the end of"  # how the note of a measurement that has not begun yet starts
FLAG = "another load ran: "  # how the flag of a measurement begins that was not alone

_RUNS = frozenset({JobState.RUNNING, JobState.STOPPING, JobState.ORPHANED})


def family_of(job_id: str, jobs: Iterable[Job]) -> str:
    """The job that the whole began with: of a pipeline's step the pipeline, of a trial's benchmark the tuner."""
    parents = {j.spec.id: j.spec.parent for j in jobs}
    seen = {job_id}
    while (parent := parents.get(job_id, "")) and parent not in seen:
        job_id = parent
        seen.add(parent)
    return job_id


def gpus_of(job: Job, jobs: Sequence[Job]) -> frozenset[str]:
    """GPUs that a job works on: its own locks, else those of the server that it asks; empty = none, or not known."""
    own = frozenset(n for n in job.spec.locks if n.startswith("gpu:"))
    return own or gpus_at(str(job.spec.params.get("url") or ""), jobs)


def gpus_at(url: str, jobs: Sequence[Job]) -> frozenset[str]:
    """GPUs of the server of ours that runs at this URL; empty = none, or not known."""
    servers = (j for j in jobs if j.spec.kind == "server" and j.state in _RUNS)
    found = next((j for j in servers if url and j.spec.params.get("url") == url), None)
    return (
        frozenset(n for n in found.spec.locks if n.startswith("gpu:")) if found is not None else frozenset()
    )


def _is_waiting(job: Job) -> bool:
    return job.progress is not None and job.progress.note.startswith(WAITS)


def _apart(jobs: Sequence[Job], me: str, url: str) -> Callable[[Job], bool]:
    """Tells whether a job is of the family of `me`, or on known GPUs that the server at `url` does not use."""
    family, gpus = family_of(me, jobs), gpus_at(url, jobs)

    def is_apart(job: Job) -> bool:
        if me and family_of(job.spec.id, jobs) == family:
            return True
        theirs = gpus_of(job, jobs) if gpus else frozenset[str]()
        return bool(theirs) and not gpus & theirs

    return is_apart


def now(jobs: Sequence[Job], me: str, url: str) -> list[Job]:
    """What loads this host now and would disturb a measurement of the server at `url`. me: the measuring job, "" = none.

    Jobs of its own family do not count, nor those on other GPUs, nor measurements that wait themselves.
    """
    is_apart = _apart(jobs, me, url)
    return [
        j
        for j in jobs
        if j.spec.stage in STAGES and j.state in _RUNS and not _is_waiting(j) and not is_apart(j)
    ]


def to_wait_for(jobs: Sequence[Job], me: str, url: str) -> Job | None:
    """The load that the measuring job `me` waits for: of an older family; None = it may begin."""
    family = family_of(me, jobs)
    return next((j for j in now(jobs, me, url) if family_of(j.spec.id, jobs) < family), None)


def during(jobs: Sequence[Job], me: str, url: str, since_s: float) -> list[Job]:
    """What disturbed a measurement from since_s (Unix seconds) until now: loads, and servers that were started meanwhile."""
    is_apart = _apart(jobs, me, url)
    found: list[Job] = []
    for job in jobs:
        is_load = job.spec.stage in STAGES and job.spec.stage != "pipeline"  # its steps are jobs themselves
        began = job.started_s is not None and (is_load or job.started_s >= since_s)
        ran = job.state in _RUNS or (job.ended_s is not None and job.ended_s > since_s)
        if (
            (is_load or job.spec.kind == "server")
            and began
            and ran
            and not _is_waiting(job)
            and not is_apart(job)
        ):
            found.append(job)
    return found


def name_of(job: Job) -> str:
    """ "job 0rpd-train (train the draft)"."""
    return f"job {job.spec.id} ({job.spec.title or job.spec.stage})"
