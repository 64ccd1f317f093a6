"""A pipeline as the dashboard shows it: each step's state and figures, and what the whole came to. Values and one pure join."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from k2tui.core.chain import Chain, Record, Step
from k2tui.core.chain_report import figures_of, step_words
from k2tui.core.job import Job, JobState


class StepState(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class StepView:
    """words: its figures, what it does now, or why it failed. share: 0..1 of a running one, None = not known."""

    name: str
    title: str
    state: StepState = StepState.PENDING
    words: str = ""
    job_id: str = ""
    took_s: float | None = None
    started_s: float | None = None
    share: float | None = None


@dataclass(frozen=True, slots=True)
class ChainView:
    """job_id: the run that goes on now ("" = none). report: the newest final report (`core.chain_report`), None = none yet."""

    name: str
    file: str = ""
    steps: tuple[StepView, ...] = ()
    job_id: str = ""
    report: Mapping[str, Any] | None = None
    report_path: str = ""


def step_view(step: Step, record: Record | None, job: Job | None) -> StepView:
    """One step from its newest record and its newest job (either may be missing)."""
    title = step.title or step.name
    words = ""
    if record is not None:
        row = {"state": "done", "stage": step.stage or "command", "figures": figures_of(step, record.result)}
        words = step_words(row)
    if job is None or (record is not None and record.job_id == job.spec.id and job.state.is_final):
        if record is None:
            return StepView(step.name, title)
        return StepView(step.name, title, StepState.DONE, words, record.job_id, record.took_s)
    if not job.state.is_final:
        progress = job.progress
        is_ready = (
            record is not None and record.job_id == job.spec.id
        )  # a server's record is made when it is ready
        share = progress.done / progress.total if progress is not None and progress.total else None
        note = progress.note if progress is not None else ""
        if share is not None and share >= 1:
            note = "finishes"  # its work is done, its process still runs
        if job.waiting_for:
            note = f"waits for {job.waiting_for}"
        return StepView(
            step.name, title, StepState.RUNNING, words if is_ready else note, job.spec.id, None, job.started_s,
            1.0 if is_ready else share,
        )  # fmt: skip
    state = {
        JobState.SUCCEEDED: StepState.DONE,
        JobState.STOPPED: StepState.STOPPED,
        JobState.SKIPPED: StepState.STOPPED,
    }
    return StepView(
        step.name, title, state.get(job.state, StepState.FAILED), job.reason, job.spec.id, job.took_s
    )


def chain_view(
    chain: Chain,
    records: Mapping[str, Record],
    jobs: Sequence[Job],
    report: Mapping[str, Any] | None = None,
    report_path: str = "",
) -> ChainView:
    """The chain as it stands. jobs: newest first."""
    newest: dict[str, Job] = {}
    run = ""
    for job in jobs:
        params = job.spec.params
        if params.get("chain") == chain.name:
            newest.setdefault(str(params.get("step", "")), job)
        elif not run and job.spec.stage == "pipeline" and not job.state.is_final:
            run = job.spec.id
    steps = tuple(step_view(s, records.get(s.name), newest.get(s.name)) for s in chain.steps)
    return ChainView(chain.name, chain.path, steps, run, report, report_path)
