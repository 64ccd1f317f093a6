"""The task board: a mirror of a plan file, and what jobs make of its tasks. Knows no file format and no file."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from k2tui.core.job import Job, JobState
from k2tui.core.server_jobs import trial_jobs


class TaskStatus(StrEnum):
    PENDING = "pending"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    CANCELLED = "cancelled"


PRIORITIES = ("high", "medium", "low")
_NONE: Mapping[tuple[str, str], str] = {}


@dataclass(frozen=True, slots=True)
class Task:
    id: str
    content: str
    status: TaskStatus = TaskStatus.PENDING
    priority: str = "medium"  # high | medium | low
    note: str = ""
    stage: str = ""  # linked stage (of a chain: step): the task follows the newest job of it
    job_id: str = ""
    depends: tuple[str, ...] = ()
    depth: int = 0  # nesting in Markdown lists
    line: int = 0  # where it stands in the plan file, 1-based; 0 = not known
    reported: str = ""  # "JOB:STATUS" that a job last wrote into the plan; a later edit by hand wins over it
    said: str = ""  # what its job says, in words: "running as 0rpd-bench, 41%"
    waiting_for: tuple[str, ...] = ()  # tasks that must be completed first and are not
    started_s: float | None = None
    ended_s: float | None = None
    took_s: float | None = None
    chain: str = ""  # a step of this chain: only jobs that the chain started for that step count


@dataclass(frozen=True, slots=True)
class Board:
    path: str = ""
    tasks: tuple[Task, ...] = ()
    error: str = ""  # "plan.json line 4: ...": the tasks shown are the last good ones
    title: str = ""
    format: str = ""  # json | markdown | toml


_ACTIVE = frozenset({JobState.RUNNING, JobState.STOPPING, JobState.ORPHANED})


def status_of_job(job: Job, ready: frozenset[str] | set[str] = frozenset()) -> TaskStatus | None:
    """What a job makes of its task; None = nothing (it waits, failed or was stopped: the plan keeps its own word)."""
    if job.state in _ACTIVE:
        if job.spec.kind == "server" and job.spec.id in ready:
            return TaskStatus.COMPLETED
        return TaskStatus.IN_PROGRESS
    return TaskStatus.COMPLETED if job.state is JobState.SUCCEEDED else None


def job_words(job: Job, ready: frozenset[str] | set[str] = frozenset()) -> str:
    """One short sentence about a task's job."""
    state = str(job.state)
    if job.state is JobState.RUNNING and job.spec.kind == "server":
        state = "serving" if job.spec.id in ready else "loading"
    words = f"{state} as {job.spec.id}"
    p = job.progress
    if job.state in _ACTIVE and p is not None and p.total:
        words += f", {100 * p.done / p.total:.0f}%"
    if job.waiting_for:
        words += f", waits for {job.waiting_for}"
    elif job.state.is_final and job.state is not JobState.SUCCEEDED and job.reason:
        words += f": {job.reason}"
    return words


def job_of(task: Task, jobs: Sequence[Job], done: Mapping[tuple[str, str], str] = _NONE) -> Job | None:
    """The job that a task follows: the named one, else the newest of its stage. jobs: newest first; done: see `link`."""
    if task.job_id:
        return next((j for j in jobs if j.spec.id == task.job_id), None)
    stage = task.stage or task.id  # by convention a task whose id is a stage's name belongs to it
    if task.chain:
        own = (task.chain, stage)
        newest = next(
            (j for j in jobs if (j.spec.params.get("chain"), j.spec.params.get("step")) == own), None
        )
        kept = done.get(own, "")
        if kept and (newest is None or kept > newest.spec.id):  # a server that was there already has no step
            return next((j for j in jobs if j.spec.id == kept), None)
        return newest
    # a pipeline may run a stage more than once: its job belongs to the step ("bench-draft") that it was started for; what a tuner
    # starts belongs to the tuner's own job
    mine = [j for j in jobs if str(j.spec.params.get("step") or j.spec.stage) == stage]
    # asked only where one could be a tuner's: this runs for each task at every look
    could_be = any(j.spec.parent or "tune" in j.spec.params for j in mine)
    trials = {j.spec.id for j in trial_jobs(jobs)} if could_be else set[str]()
    return next((j for j in mine if j.spec.id not in trials), None)


def _word(
    task: Task, jobs: Sequence[Job], ready: frozenset[str], done: Mapping[tuple[str, str], str]
) -> tuple[TaskStatus | None, str, str]:
    """What its job, or its pipeline's record, makes of a task: (status, "JOB:STATUS", words); None = nothing."""
    job = job_of(task, jobs, done)
    kept = done.get((task.chain, task.stage or task.id), "") if task.chain and not task.job_id else ""
    if kept and (job is None or job.spec.id == kept):  # the step is done, whatever became of its job since
        words = f"done as {kept}"
        if job is not None and not job.state.is_final:
            words = job_words(job, ready | {kept})
        elif job is not None and job.state is not JobState.SUCCEEDED and job.reason:
            words += f", {job.reason}"
        return TaskStatus.COMPLETED, f"{kept}:{TaskStatus.COMPLETED}", words
    if job is None:
        return None, "", ""
    status = status_of_job(job, ready)
    return status, f"{job.spec.id}:{status}" if status else "", job_words(job, ready)


def link(
    board: Board,
    jobs: Sequence[Job],
    ready: Iterable[str] = (),
    done: Mapping[tuple[str, str], str] = _NONE,
) -> Board:
    """The board with what the jobs made of it. jobs: newest first; ready: ids of server jobs that answer.

    done: (pipeline, step) -> the job of the step's last success, from the pipeline's own records: a server step is done once it answered,
    also when its server was there before, or was stopped since because no step needs it any more.
    A cancelled task stays cancelled. A failed job never undoes a `completed` that stands in the plan. Once a job's word was
    written into the plan (`reported`), an edit by hand wins over that same word.
    """
    served = frozenset(ready)
    tasks: list[Task] = []
    for task in board.tasks:
        status, told, said = _word(task, jobs, served, done)
        if said:
            job = job_of(task, jobs, done)
            wins = task.status is not TaskStatus.CANCELLED and status is not None and told != task.reported
            task = replace(
                task,
                status=status if wins and status is not None else task.status,
                said=said,
                started_s=job.started_s if job is not None else task.started_s,
                ended_s=job.ended_s if job is not None else task.ended_s,
                took_s=job.took_s if job is not None else task.took_s,
            )
        tasks.append(task)
    finished = {t.id for t in tasks if t.status is TaskStatus.COMPLETED}
    known = {t.id for t in tasks}
    tasks = [
        replace(t, waiting_for=tuple(d for d in t.depends if d in known and d not in finished))
        if t.depends and t.status in (TaskStatus.PENDING, TaskStatus.IN_PROGRESS)
        else t
        for t in tasks
    ]
    return replace(board, tasks=tuple(tasks))


def news(
    board: Board,
    linked: Board,
    jobs: Sequence[Job],
    ready: Iterable[str] = (),
    done: Mapping[tuple[str, str], str] = _NONE,
) -> dict[str, Mapping[str, str]]:
    """What has to be written into the plan so that it says what the jobs made of it: {task id: {status, reported}}."""
    served = frozenset(ready)
    changes: dict[str, Mapping[str, str]] = {}
    for before, after in zip(board.tasks, linked.tasks, strict=True):
        if before.status is after.status:
            continue
        told = _word(before, jobs, served, done)[1]
        if told:
            changes[before.id] = {"status": str(after.status), "reported": told}
    return changes


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen of a task: its status, when it was first seen in progress, when it was then seen completed (Unix seconds)."""

    status: str
    started_s: float | None = None
    ended_s: float | None = None


def look(known: Mapping[str, Seen] | None, tasks: Sequence[Task], now_s: float) -> dict[str, Seen]:
    """What is known after this look. Times begin with the first change that is seen: what a plan was before (known None) has none."""
    found: dict[str, Seen] = {}
    for task in tasks:
        before = known.get(task.id) if known is not None else Seen(task.status)
        if before is not None and before.status == task.status:
            found[task.id] = before
        elif task.status is TaskStatus.IN_PROGRESS:
            found[task.id] = Seen(task.status, now_s)
        elif task.status is TaskStatus.COMPLETED and before is not None:
            found[task.id] = Seen(task.status, before.started_s, now_s)
        else:
            found[task.id] = Seen(task.status)
    return found


def with_times(board: Board, seen: Mapping[str, Seen]) -> Board:
    """The board with the times that were seen; those of a task's job come later and count more."""

    def timed(task: Task) -> Task:
        one = seen.get(task.id)
        if one is None or one.status != task.status or (one.started_s is None and one.ended_s is None):
            return task
        took = one.ended_s - one.started_s if one.ended_s is not None and one.started_s is not None else None
        return replace(task, started_s=one.started_s, ended_s=one.ended_s, took_s=took)

    return replace(board, tasks=tuple(timed(t) for t in board.tasks))


def matches(task: Task, text: str = "", status: str = "", priority: str = "") -> bool:
    """Whether a task is shown: every word of the text is in it, and status ("open": not ended) and priority fit. "" fits all."""
    if status == "open" and task.status not in (TaskStatus.PENDING, TaskStatus.IN_PROGRESS):
        return False
    if status not in ("", "open") and task.status != status:
        return False
    if priority and task.priority != priority:
        return False
    inside = " ".join((task.content, task.note, task.id, task.stage, task.job_id, task.said)).lower()
    return all(word in inside for word in text.lower().split())


def neighbour(tasks: Sequence[Task], task_id: str, by: int, among: Collection[str]) -> str:
    """The task whose place this one takes when it moves up (by -1) or down (1) among its brothers; "" at the end of them.

    Brothers have the same parent in a nested list. tasks: all, in the plan's order; among: ids of those that are shown.
    """
    at = next((n for n, t in enumerate(tasks) if t.id == task_id), -1)
    if at < 0:
        return ""
    for other in tasks[at + 1 :] if by > 0 else reversed(tasks[:at]):
        if other.depth < tasks[at].depth:
            return ""
        if other.depth == tasks[at].depth and other.id in among:
            return other.id
    return ""
