"""One job folder as it is now: journal, lock and processes told together. Knows no order and no list.

The law of truth: a journal that says "running" is believed only while its keeper holds the lock. A lock that is free makes
the reader look again (it may have ended meanwhile), then at the processes: alive = orphaned, gone = lost, or stopped where
somebody had asked for the end. A file of the folder that cannot be read is damage that the job names, never an error.
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
from k2tui.regular import open_regular, read_regular

WORK_LOCK = "work.lock"  # held by the work itself, not by the keeper
ENDED_ALONE = "ended after its keeper died; exit code not known, its result is there"


def _look(path: Path, *, is_ours: bool = False) -> tuple[Any, str]:
    """(value, damage in words). No file is no damage. is_ours: k2tui wrote it whole, so that a torn one is damage too."""
    try:
        return parse_json(read_regular(path)), ""
    except FileNotFoundError:
        return None, ""
    except OSError as err:
        return None, f"{path.name}: {err.strerror or err}"
    except ValueError as err:
        return None, f"{path.name}: {err}" if is_ours else ""


def read_json(path: Path) -> Any:
    """A file's JSON value; None when there is none that can be read."""
    return _look(path)[0]


def as_object(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def read_spec(folder: Path) -> JobSpec:
    """What was asked. Of a damaged spec.json: what id and journal tell, stage and kind."""
    return _spec(folder)[0]


def _spec(folder: Path) -> tuple[JobSpec, str]:
    """(the spec, what is wrong with spec.json)."""
    raw, damage = _look(folder / "spec.json", is_ours=True)
    if isinstance(raw, dict) and raw:
        return journal.spec_of({**as_object(raw), "id": folder.name}), ""
    told = journal.last_of(read_events(folder)[0], "keeper") or {}
    damage = damage or ("spec.json is missing" if raw is None else "spec.json: no object of a job")
    return journal.spec_of(
        {
            "id": folder.name,
            "stage": str(told.get("stage") or folder.name[9:]),
            "kind": str(told.get("kind") or "task"),
            "title": "(damaged)",
        }
    ), damage


def read_events(folder: Path) -> tuple[list[dict[str, Any]], int]:
    """The journal's events, and how many lines were none. A journal that cannot be read has none."""
    try:
        return journal.parse(read_regular(folder / "journal.jsonl"))
    except OSError:
        return [], 0


def asked_to_stop(folder: Path, job: Job) -> str:
    """ "stopped by WHOM" when somebody has asked for this job's end; "" otherwise."""
    raw = read_json(folder / "stop.json")
    if isinstance(raw, dict):
        return f"stopped by {as_object(raw).get('by') or 'the user'}"
    return job.reason if job.state is JobState.STOPPING and job.reason.startswith("stopped by ") else ""


def fold_job(folder: Path, spec: JobSpec) -> tuple[Job, list[dict[str, Any]]]:
    events, bad = read_events(folder)
    return journal.fold(spec, events, bad), events


def with_files(folder: Path, job: Job, damage: str = "") -> Job:
    """The job with what its stage wrote beside the journal. damage: what is known to be wrong with the folder already."""
    result, no_result = _look(folder / "result.json")
    progress, no_progress = _look(folder / "progress.json")
    try:
        log_bytes = (folder / "output.log").stat().st_size
    except OSError:
        log_bytes = 0
    return replace(
        job,
        progress=journal.progress_of(progress),
        result=as_object(result) if isinstance(result, dict) else None,
        log_bytes=log_bytes,
        damage="; ".join(filter(None, (damage, no_result, no_progress))),
    )


def read_job(folder: Path) -> Job:
    """The job as journal, lock and processes tell it together."""
    spec, damage = _spec(folder)
    job, events = fold_job(folder, spec)
    if not events:
        try:
            open_regular(folder / "journal.jsonl").close()
        except OSError as err:
            damage = "; ".join(filter(None, (damage, f"journal.jsonl: {err.strerror or err}")))
    if not job.state.is_final and not is_held(folder / "lock"):
        # it may have ended between the two looks: the journal is read once more after the lock was seen free
        job, events = fold_job(folder, spec)
        if not job.state.is_final:
            job = _without_keeper(folder, job, events)
    return with_files(folder, job, damage)


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


def ended_alone(folder: Path) -> tuple[JobState, str] | None:
    """How work whose keeper died ended, by the result that it wrote; None = it wrote none."""
    if not (folder / "result.json").exists():
        return None
    result = as_object(read_json(folder / "result.json"))
    if result.get("ok") is False:
        return JobState.FAILED, f"{result.get('cause') or 'it failed'} (after its keeper died; exit code not known)"
    return JobState.SUCCEEDED, ENDED_ALONE


def settle(folder: Path, job: Job, why: str, *, began: bool) -> Job:
    """Write down how a job without keeper and work ended, if nobody holds its lock now; else only say so.

    Lost, but for a stop that was asked for and for work that had written its result: a stage writes that last.
    """
    state = JobState.LOST
    if asked := asked_to_stop(folder, job):
        state, why = JobState.STOPPED, f"{asked} ({why})"
    elif began and (alone := ended_alone(folder)) is not None:
        state, why = alone
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
