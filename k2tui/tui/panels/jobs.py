"""Jobs, newest first: state, progress, time left, and how they ended."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from k2tui.core.job import Job, JobState
from k2tui.core.job_text import ending
from k2tui.core.loads import WAITS
from k2tui.tui import format as fmt
from k2tui.tui.lines import (
    Across,
    Cell,
    Column,
    Glyphs,
    Line,
    Picture,
    Row,
    Seg,
    bar,
    line_width,
    plan_columns,
    table,
    text_line,
)
from k2tui.tui.panels import LOOKING, Panel
from k2tui.tui.view import View

ROLES = {
    JobState.QUEUED: "dim",
    JobState.WAITING: "dim",
    JobState.RUNNING: "info",
    JobState.STOPPING: "warn",
    JobState.SUCCEEDED: "ok",
    JobState.FAILED: "bad",
    JobState.STOPPED: "dim",
    JobState.SKIPPED: "dim",
    JobState.ORPHANED: "warn",
    JobState.LOST: "bad",
}

_ID = re.compile(r"[0-9A-HJKMNP-TV-Z]{26}|[0-9a-z]{8}-[a-z0-9-]+")  # of a run, of a job


def mark(state: JobState, g: Glyphs) -> str:
    return {
        JobState.QUEUED: g.wait,
        JobState.WAITING: g.wait,
        JobState.RUNNING: g.run,
        JobState.STOPPING: g.down,
        JobState.SUCCEEDED: g.ok,
        JobState.FAILED: g.bad,
        JobState.STOPPED: g.skip,
        JobState.SKIPPED: g.skip,
        JobState.ORPHANED: g.warn,
        JobState.LOST: g.bad,
    }[state]


COLUMNS = (
    Column("", 2, keep=9),
    Column("job", 14, weight=2, keep=9, limit=44),
    Column("state", 9, keep=4),
    Column("progress", 10, weight=1.5, keep=7, limit=40),
    Column("", 9, keep=5),
    Column("took", 5, keep=4, align=">"),
    Column("left", 5, keep=8, align=">"),
    Column("what", 12, weight=3, keep=3),
    Column("id", 10, keep=1, limit=28, weight=0.5),
)
WHAT = 7  # the column of that phrase


def took_s(job: Job, now_s: float) -> float | None:
    if job.started_s is None:
        return None
    return (job.ended_s if job.ended_s is not None else now_s) - job.started_s


def left_s(job: Job) -> float | None:
    """The stage's own estimate, else from its pace so far."""
    progress = job.progress
    if progress is None or job.state.is_final:
        return None
    if progress.eta_s is not None:
        return progress.eta_s
    if job.spec.stage in ("pipeline", "train"):  # steps that differ, a first step that compiles: their pace says nothing
        return None
    if progress.total and progress.done > 0 and job.started_s is not None and progress.at_s > job.started_s:
        return (progress.at_s - job.started_s) / progress.done * max(0.0, progress.total - progress.done)
    return None


def describe(job: Job, now_s: float) -> Seg:
    """One phrase: why it waits, what it does, or how it ended; damage of its folder comes first."""
    if job.damage:
        return Seg(f"damaged: {job.damage}", "warn")
    if job.state in (JobState.WAITING, JobState.QUEUED) and job.waiting_for:
        since = "" if job.waiting_since_s is None else f" ({fmt.age(now_s - job.waiting_since_s)})"
        return Seg(f"waits for {job.waiting_for}{since}", "dim")
    if job.state.is_final:
        if job.reason and job.state is not JobState.SUCCEEDED:
            return Seg(ending(job), ROLES[job.state])
        if job.result:
            return Seg(told(job.result), "dim")
        return Seg(job.reason, "dim")
    if job.state is JobState.ORPHANED:
        return Seg(job.reason or "its keeper is dead, the work goes on", "warn")
    if job.progress is not None and (job.progress.resumed or job.progress.note):
        resumed = f"resumed from {job.progress.resumed}" if job.progress.resumed else ""
        note = job.progress.note.replace(WAITS, "waits for", 1)  # the shorter, the more of what it waits for is seen
        return Seg("; ".join(w for w in (resumed, note) if w), "dim")
    return Seg(f"pid {job.pid}" if job.pid else "", "dim")


def told(result: Mapping[str, Any]) -> str:
    """A result in words: a benchmark's throughput at each load, else its figures and texts. Ids of jobs and runs say nothing to people."""
    rows = result.get("rows")
    if isinstance(rows, list) and rows and all(isinstance(r, dict) for r in rows):
        words = [f"C={r.get('concurrency')} {_short(r['output_throughput'])} tok/s" for r in rows if r.get("concurrency") and r.get("output_throughput")]
        if words:
            return "  ".join(dict.fromkeys(words))
    return "  ".join(f"{k} {_short(v)}" for k, v in result.items() if isinstance(v, int | float | str) and not _ID.fullmatch(str(v)))


def _short(value: object) -> str:
    return fmt.count(value) if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def cells_of(job: Job, view: View, room: int) -> Sequence[Cell]:
    """room: cells of the last phrase. One that says why there are no figures takes the place of those when it is longer."""
    progress, g, role = job.progress, view.glyphs, ROLES[job.state]
    share = None
    words = ""
    if progress is not None:
        share = progress.done / progress.total if progress.total else None
        words = fmt.count(progress.done) + (f"/{fmt.count(progress.total)}" if progress.total else f" {progress.unit}")
    if job.state is JobState.SUCCEEDED:
        share = 1.0
    shows_bar = share is not None and (not job.state.is_final or job.state is JobState.SUCCEEDED)
    what = describe(job, view.now_s)
    says_why = job.state in (JobState.FAILED, JobState.LOST) or (share is None and bool(job.waiting_for or (progress is not None and progress.note)))
    figures: Cell = (lambda w: bar(share, w, "ok" if job.state is JobState.SUCCEEDED else "bar", g)) if shows_bar else Seg("", "dim")
    if says_why and not job.state.is_final and progress is not None and not progress.done:
        words = ""  # "0 points" of nobody knows how many
    if says_why and not shows_bar and line_width((what,)) > room:
        so_far = f"{words}  " if words and not job.state.is_final else ""
        figures = Across(Seg(so_far + what.text, what.role), WHAT)
    return (
        Seg(mark(job.state, g), role),
        Seg(job.spec.title or job.spec.stage, "" if job.state.is_final else "bold"),
        Seg(job.state.value, role),
        figures,
        Seg(words, "dim" if job.state.is_final else ""),
        Seg(fmt.duration(took_s(job, view.now_s), "") if job.state.is_final else fmt.age(took_s(job, view.now_s), "")),
        Seg(fmt.age(left_s(job), ""), "bold"),
        what,
        Seg(job.spec.id, "faint"),
    )


def draw(view: View, width: int, height: int) -> Picture:
    jobs = view.snap.jobs
    if not jobs and not view.snap.is_whole:
        return LOOKING
    if not jobs:
        return Picture(
            (Row("", text_line("No jobs yet. What you start goes on when you quit or lose the terminal.", "dim")),),
        )
    shown = [job for job in ordered(jobs, view.job_sort, view.now_s) if matches(job, view.job_filter)]
    if not shown:
        return Picture((Row("", (Seg("No job has ", "dim"), Seg(view.job_filter, "warn"), Seg(".  "), Seg("/", "key"), Seg(" and Enter shows all.", "dim"))),))
    room = dict(plan_columns(COLUMNS, width)).get(WHAT, 0)
    rows = [(job.spec.id, cells_of(job, view, room)) for job in shown]
    header, lines = table(COLUMNS, rows, width, view.glyphs)
    active = sum(1 for job in jobs if not job.state.is_final)
    note: Line = (Seg(f"{active} running" if active else "none running", "info" if active else "dim"), Seg(f" of {len(jobs)}", "dim"))
    if view.job_filter:
        note = (*note, Seg(f", {len(shown)} with {view.job_filter}", "accent"))
    if view.job_sort:
        note = (*note, Seg(f", by {view.job_sort}", "dim"))
    return Picture(lines, header, note, prefer=rows[0][0])


SORTS = ("", "stage", "state", "took")  # "": newest first


def ordered(jobs: Sequence[Job], sort: str, now_s: float) -> list[Job]:
    """What has not ended first, then by `sort` (took: the longest first), then newest first as they come."""
    keys: dict[str, Callable[[Job], str | float]] = {
        "stage": lambda j: j.spec.stage,
        "state": lambda j: j.state.value,
        "took": lambda j: -(took_s(j, now_s) or 0.0),
    }
    key = keys.get(sort, lambda j: 0.0)
    return sorted(jobs, key=lambda j: (j.state.is_final, key(j)))


def matches(job: Job, words: str) -> bool:
    """Whether every word is in the job's title, stage, state or id."""
    text = f"{job.spec.title} {job.spec.stage} {job.state.value} {job.spec.id}".lower()
    return all(word in text for word in words.lower().split())


PANEL = Panel(
    "jobs",
    "Jobs",
    draw,
    needs=("jobs", "is_whole"), ticks=True,
    order=40,
    selectable=True,
    enter="open_job_log",
    keys=(("r", "retry", "retry"), ("d", "stop_job", "stop job"), ("slash", "filter_jobs", "filter"), ("o", "job_sort", "sort"), ("D", "delete_job", "delete")),
    help="What k2tui started. Enter opens the log; the work goes on when the dashboard ends.",
)
