"""One job folder as it is now: journal, lock and processes told together. Knows no order and no list.

The law of truth: a journal that says "running" is believed only while its keeper holds the lock. A lock that is free makes
the reader look again (it may have ended meanwhile), then at the processes: alive = orphaned, gone = lost.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from k2tui.core import journal
from k2tui.core.job import Job, JobSpec, JobState
from k2tui.jobs import procs
from k2tui.jobs.locks import is_held
from k2tui.jobs.writer import Journal
from k2tui.parsing import parse_json

WORK_LOCK = "work.lock"  # held by the work itself, not by the keeper
ENDED_ALONE = "ended after its keeper died; exit code not known, its result is there"


def read_json(path: Path) -> Any:
    try:
        return parse_json(path.read_bytes())
    except (OSError, ValueError):
        return None


def as_object(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def read_spec(folder: Path) -> JobSpec:
    raw = as_object(read_json(folder / "spec.json"))
    return journal.spec_of({**raw, "id": folder.name})


def read_events(folder: Path) -> tuple[list[dict[str, Any]], int]:
    try:
        return journal.parse((folder / "journal.jsonl").read_bytes())
    except OSError:
        return [], 0


def fold_job(folder: Path, spec: JobSpec) -> tuple[Job, list[dict[str, Any]]]:
    events, bad = read_events(folder)
    return journal.fold(spec, events, bad), events


def with_files(folder: Path, job: Job) -> Job:
    result = read_json(folder / "result.json")
    try:
        log_bytes = (folder / "output.log").stat().st_size
    except OSError:
        log_bytes = 0
    return replace(
        job,
        progress=journal.progress_of(read_json(folder / "progress.json")),
        result=as_object(result) if isinstance(result, dict) else None,
        log_bytes=log_bytes,
    )


def read_job(folder: Path) -> Job:
    """The job as journal, lock and processes tell it together."""
    spec = read_spec(folder)
    job, events = fold_job(folder, spec)
    if not job.state.is_final and not is_held(folder / "lock"):
        # it may have ended between the two looks: the journal is read once more after the lock was seen free
        job, events = fold_job(folder, spec)
        if not job.state.is_final:
            job = _without_keeper(folder, job, events)
    return with_files(folder, job)


def _without_keeper(folder: Path, job: Job, events: Sequence[journal.Event]) -> Job:
    started = journal.last_of(events, "started", "restarting")
    began = started is not None and started.get("e") == "started"
    keeper = journal.last_of(events, "keeper", "adopted")
    here = procs.boot_id()
    boot = str((keeper or {}).get("boot", ""))
    space = str((keeper or {}).get("ns", ""))
    name = str((keeper or {}).get("host", ""))
    if boot and boot != here and name and name != procs.host():
        why = f"it was started on {name}: whether it goes on can only be seen there"
        return replace(job, state=JobState.ORPHANED, reason=why)
    if boot in ("", here):
        if space and procs.pid_space() and space != procs.pid_space():
            why = "its keeper is dead; whether the work goes on can only be seen inside its container"
            return replace(job, state=JobState.ORPHANED, reason=why)
        alive = began and procs.is_alive(
            int((started or {}).get("pid") or 0), str((started or {}).get("birth", "")), boot
        )
        if alive or is_held(folder / WORK_LOCK) or procs.by_job([job.spec.id])[job.spec.id]:
            return replace(job, state=JobState.ORPHANED, reason="its keeper is dead, the work goes on")
    if boot and boot != here:
        why = "the machine was rebooted meanwhile"
    elif not began:
        why = "its keeper died before the work began"
    else:
        why = "keeper and work are gone without a word"
    return settle(folder, job, why, began=began)


def settle(folder: Path, job: Job, why: str, *, began: bool) -> Job:
    """Write down how a job without keeper and work ended, if nobody holds its lock now; else only say so.

    Lost, but for work that had written its result: a stage writes that last.
    """
    state = JobState.LOST
    if began and (folder / "result.json").exists():
        state, why = JobState.SUCCEEDED, ENDED_ALONE
    lost = replace(job, state=state, reason=why, waiting_for="", waiting_since_s=None)
    try:
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return lost
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return lost  # another reader looks at it or settles it in this moment
        again, _ = fold_job(folder, job.spec)
        if again.state.is_final:
            return again
        try:
            writer = Journal(folder)
        except OSError:
            return lost
        writer.drop_ballast()
        done = writer.add("ended", state=str(state), reason=why)
        writer.close()
        return fold_job(folder, job.spec)[0] if done else lost
    finally:
        os.close(fd)
