"""A job: what was asked (JobSpec, written once) and what became of it (Job, folded from the journal)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class JobState(StrEnum):
    QUEUED = "queued"
    WAITING = "waiting"  # for a predecessor, a lock or a condition: Job.waiting_for says which
    RUNNING = "running"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    SKIPPED = "skipped"  # a predecessor failed, or its result is already valid
    ORPHANED = "orphaned"  # the keeper is dead, the work goes on
    LOST = "lost"  # keeper and work are gone without a word

    @property
    def is_final(self) -> bool:
        return self in _FINAL


_FINAL = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.STOPPED, JobState.SKIPPED, JobState.LOST})


@dataclass(frozen=True, slots=True)
class JobSpec:
    """Written once to spec.json. argv is run without a shell. Secrets in env/argv are masked on disk and kept out of logs.

    locks: names such as "gpu:0", "port:30000"; held from start to end of the child. after: job ids that must succeed first.
    kind: "server" (runs until stopped) or "task" (ends by itself).
    """

    id: str
    stage: str
    title: str
    argv: tuple[str, ...]
    kind: str = "task"
    cwd: str = ""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    after: tuple[str, ...] = ()
    locks: tuple[str, ...] = ()
    timeout_s: float | None = None
    grace_s: float = 15.0
    priority: int = 0
    params: Mapping[str, Any] = field(
        default_factory=dict[str, Any]
    )  # the stage's own inputs, for retry and display
    submitted_s: float = 0.0
    requires: tuple[
        str, ...
    ] = ()  # conditions waited for before the start: "file:PATH", "url:http://.../health"
    ensures: tuple[
        str, ...
    ] = ()  # conditions checked after exit 0: one that does not hold makes the job failed
    requires_timeout_s: float = 600.0
    restart: str = "never"  # never | on-failure | always: the keeper starts the child again, with back-off
    max_restarts: int = 5
    backoff_s: float = 2.0  # doubles with each restart in a row, at most 60 s
    log_cap_b: int = 0  # output.log is rotated into output.log.1 above this size; 0 = the default (512 MiB)
    retry_of: str = ""
    parent: str = ""  # the job whose process submitted it: a step's pipeline, a trial's tuner
    scope: bool = False  # run inside `systemd-run --user --scope`, out of reach of KillUserProcesses=yes


@dataclass(frozen=True, slots=True)
class Progress:
    """Newest progress that the stage reported (progress.json in the job folder)."""

    done: float
    total: float | None = None
    unit: str = ""
    note: str = ""
    eta_s: float | None = None
    at_s: float = 0.0
    resumed: str = ""  # where an earlier run had stopped: "row 812"; "" = it began from nothing


@dataclass(frozen=True, slots=True)
class Job:
    spec: JobSpec
    state: JobState = JobState.QUEUED
    pid: int | None = None
    keeper_pid: int | None = None
    started_s: float | None = None
    ended_s: float | None = None
    exit_code: int | None = None  # negative = signal
    reason: str = (
        ""  # the end in words: "exit 1", "stopped by the user", "killed by signal 9 (out of memory?)"
    )
    waiting_for: str = ""
    waiting_since_s: float | None = None
    progress: Progress | None = None
    result: Mapping[str, Any] | None = None  # result.json of the stage
    log_bytes: int = 0
    cpu_s: float | None = None
    peak_rss_b: int | None = None
    took_s: float | None = (
        None  # run time by a clock that never jumps; None while it runs or when it is not known
    )
    gpu_s: float | None = None  # GPUs held times seconds held
    restarts: int = 0
    notes: tuple[
        str, ...
    ] = ()  # what the keeper had to say: "log rotated", "2 processes left behind were ended"
    damage: str = ""  # what of the job's folder cannot be read: "spec.json is missing"; "" = all is well
    unknown_events: int = 0  # journal lines that this version does not understand (counted, never fatal)
