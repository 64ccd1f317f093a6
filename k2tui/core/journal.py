"""A job's journal: JSON lines in, a Job out. Knows the table of moves; knows no file, clock or process.

Laws: one writer (the holder of the job's lock) appends; a torn last line is nothing; an event that this version does not
know, or that is no legal move, is counted and changes nothing. `t` is wall time (display), `m` is seconds since boot
(durations: it never jumps within one `boot`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any, cast

from k2tui.core.job import Job, JobSpec, JobState, Progress
from k2tui.parsing import parse_json

Event = Mapping[str, Any]

_ALIVE = (JobState.QUEUED, JobState.WAITING, JobState.RUNNING, JobState.STOPPING)
_S = JobState

# (state, event) -> next state; None = stays. `ended` is not here: it names its own state, which must be final.
MOVES: dict[tuple[JobState, str], JobState | None] = {
    **{(s, "note"): None for s in JobState},
    **{(s, "keeper"): None for s in (_S.QUEUED,)},
    **{(s, "submitted"): None for s in (_S.QUEUED,)},
    (_S.QUEUED, "waiting"): _S.WAITING,
    (_S.WAITING, "waiting"): None,
    (_S.QUEUED, "started"): _S.RUNNING,
    (_S.WAITING, "started"): _S.RUNNING,
    **{(s, "stop"): _S.STOPPING for s in _ALIVE},
    (_S.RUNNING, "exited"): None,
    (_S.STOPPING, "exited"): None,
    (_S.RUNNING, "restarting"): _S.WAITING,
    (_S.RUNNING, "usage"): None,
    (_S.STOPPING, "usage"): None,
    # after a keeper's death another one takes over: of the running child, or of nothing (it then ends as lost)
    **{(s, "adopted"): None for s in _ALIVE},
}


class IllegalMoveError(ValueError):
    """The event does not fit the state."""


def _num(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _int(value: Any) -> int | None:
    number = _num(value)
    return None if number is None else int(number)


def apply(job: Job, event: Event) -> Job:
    """The job after one event. Raises IllegalMoveError when the event is unknown or does not fit the state."""
    name = event.get("e")
    at = _num(event.get("t"))
    if name == "ended":
        try:
            state = JobState(str(event.get("state")))
        except ValueError as err:
            raise IllegalMoveError(f"ended in an unknown state {event.get('state')!r}") from err
        if job.state.is_final or not state.is_final:
            raise IllegalMoveError(f"{job.state} cannot end as {state}")
        return replace(
            job,
            state=state,
            ended_s=at,
            reason=str(event.get("reason", "")),
            exit_code=_int(event.get("exit_code")) if "exit_code" in event else job.exit_code,
            cpu_s=_num(event.get("cpu_s")) if "cpu_s" in event else job.cpu_s,
            peak_rss_b=_int(event.get("peak_rss_b")) if "peak_rss_b" in event else job.peak_rss_b,
            took_s=_num(event.get("took_s")),
            gpu_s=_num(event.get("gpu_s")),
            waiting_for="",
            waiting_since_s=None,
        )
    key = (job.state, str(name))
    if key not in MOVES:
        raise IllegalMoveError(f"{name!r} does not fit a job that is {job.state}")
    state = MOVES[key] or job.state
    if name == "keeper" or name == "adopted":
        return replace(job, keeper_pid=_int(event.get("pid")), state=state)
    if name == "waiting":
        what = str(event.get("for", ""))
        same = what == job.waiting_for and job.waiting_since_s is not None
        return replace(
            job,
            state=state,
            waiting_for=what,
            waiting_since_s=job.waiting_since_s if same else _num(event.get("since")) or at,
        )
    if name == "started":
        return replace(
            job,
            state=state,
            pid=_int(event.get("pid")),
            started_s=at,
            exit_code=None,
            waiting_for="",
            waiting_since_s=None,
        )
    if name == "restarting":
        return replace(
            job,
            state=state,
            pid=None,
            restarts=job.restarts + 1,
            reason=str(event.get("reason", "")),
            waiting_for=str(event.get("for", "restart")),
            waiting_since_s=at,
        )
    if name == "exited":
        return replace(
            job,
            exit_code=_int(event.get("code")),
            cpu_s=_num(event.get("cpu_s")),
            peak_rss_b=_int(event.get("peak_rss_b")),
        )
    if name == "usage":
        return replace(job, cpu_s=_num(event.get("cpu_s")), peak_rss_b=_int(event.get("peak_rss_b")))
    if name == "stop":
        return replace(
            job,
            state=state,
            reason=str(event.get("reason", "")) or job.reason,
            waiting_for="",
            waiting_since_s=None,
        )
    if name == "note":
        return replace(job, notes=(*job.notes, str(event.get("text", ""))))
    return replace(job, state=state)


def parse(raw: bytes) -> tuple[list[dict[str, Any]], int]:
    """Events of a journal's bytes, and how many whole lines were no JSON object. A torn last line is nothing at all."""
    end = raw.rfind(b"\n")
    events: list[dict[str, Any]] = []
    bad = 0
    for line in raw[: end + 1].splitlines():
        if not line.strip(b"\0 \t\r"):
            continue
        try:
            value = parse_json(line)
        except ValueError:
            bad += 1
            continue
        if isinstance(value, dict):
            events.append(cast("dict[str, Any]", value))
        else:
            bad += 1
    return events, bad


def fold(spec: JobSpec, events: Iterable[Event], bad: int = 0) -> Job:
    """The job after all events; those that do not fit are counted in `unknown_events`."""
    job = Job(spec=spec)
    for event in events:
        try:
            job = apply(job, event)
        except IllegalMoveError:
            bad += 1
    return replace(job, unknown_events=bad) if bad else job


def last_of(events: Iterable[Event], *names: str) -> Event | None:
    """The newest event with one of these names."""
    found: Event | None = None
    for event in events:
        if event.get("e") in names:
            found = event
    return found


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(str(v) for v in cast("list[Any]", value)) if isinstance(value, list | tuple) else ()


def _mapping(value: Any) -> dict[str, Any]:
    return {str(k): v for k, v in cast("dict[Any, Any]", value).items()} if isinstance(value, dict) else {}


_NUMBERS = {"timeout_s", "grace_s", "submitted_s", "requires_timeout_s", "backoff_s"}
_INTS = {"priority", "max_restarts", "log_cap_b"}


def spec_of(raw: Mapping[str, Any]) -> JobSpec:
    """A JobSpec from spec.json's object. Fields that this version does not know are left out, wrong types become defaults."""
    values: dict[str, Any] = {"id": "", "stage": "", "title": "", "argv": ()}
    for f in fields(JobSpec):
        if f.name not in raw:
            continue
        value = raw[f.name]
        if f.name in ("argv", "after", "locks", "requires", "ensures"):
            values[f.name] = _texts(value)
        elif f.name == "env":
            values[f.name] = {k: str(v) for k, v in _mapping(value).items()}
        elif f.name == "params":
            values[f.name] = _mapping(value)
        elif f.name in _NUMBERS:
            number = _num(value)
            if number is not None or f.name == "timeout_s":
                values[f.name] = number
        elif f.name in _INTS:
            number = _int(value)
            if number is not None:
                values[f.name] = number
        elif f.name == "scope":
            values[f.name] = value is True
        else:
            values[f.name] = str(value)
    return JobSpec(**values)


def spec_to_json(spec: JobSpec) -> dict[str, Any]:
    """spec.json's object. The caller has masked what must not lie on a disk."""
    out: dict[str, Any] = {"v": 1}
    for f in fields(JobSpec):
        value: Any = getattr(spec, f.name)
        if isinstance(value, tuple):
            value = list(cast("tuple[Any, ...]", value))
        elif isinstance(value, Mapping):
            value = dict(cast("Mapping[str, Any]", value))
        out[f.name] = value
    return out


def progress_of(raw: Any) -> Progress | None:
    """Progress from progress.json's object; None when it is not usable."""
    value = _mapping(raw)
    done = _num(value.get("done"))
    if done is None:
        return None
    return Progress(
        done=done,
        total=_num(value.get("total")),
        unit=str(value.get("unit") or ""),
        note=str(value.get("note") or ""),
        eta_s=_num(value.get("eta_s")),
        at_s=_num(value.get("at_s")) or 0.0,
        resumed=str(value.get("resumed") or ""),
    )
