"""Jobs as text and JSON for the command line: one table, one detail view, one object. Control characters never get through."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

from k2tui.core.job import Job, JobState

_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[PX^_][^\x1b]*(?:\x1b\\)?|\x1b.?|\x9b[0-?]*[ -/]*[@-~]"
)
_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def plain(text: str) -> str:
    """Text without escape codes, control characters and direction overrides; tabs become spaces."""
    return _CONTROL.sub("", _ESCAPES.sub("", text)).replace("\t", "    ").replace("\n", " ")


def plain_line(line: str) -> str:
    """One log line: of a bar redrawn with carriage returns only the newest state is kept."""
    parts = [p for p in line.rstrip("\r\n").split("\r") if p.strip()]
    return plain(parts[-1]) if parts else ""


def duration(seconds: float | None) -> str:
    """ "0.4 s", "12 s", "3:05", "2:10:00", "" for None."""
    if seconds is None:
        return ""
    if seconds < 0:
        return "0 s"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def size(number: int | float | None) -> str:
    """Bytes in the unit that reads best, "" for None."""
    if number is None:
        return ""
    value = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    return ""


def took_s(job: Job, now_s: float) -> float | None:
    """Run time so far, or of the whole run."""
    if job.took_s is not None:
        return job.took_s
    if job.started_s is None:
        return None
    if job.state.is_final:
        return None if job.ended_s is None else max(0.0, job.ended_s - job.started_s)
    return max(0.0, now_s - job.started_s)


def detail(job: Job, now_s: float) -> str:
    """The last column: progress, what it waits for and since when, or how it ended; damage of its folder comes first."""
    if job.damage:
        return plain("; ".join(filter(None, (f"damaged: {job.damage}", job.reason))))
    if job.waiting_for:
        since = "" if job.waiting_since_s is None else f", for {duration(now_s - job.waiting_since_s)}"
        return plain(f"waits for {job.waiting_for}{since}")
    p = job.progress
    if not job.state.is_final and p is not None and p.total:
        eta = f", {duration(p.eta_s)} left" if p.eta_s else ""
        so_far = f"{p.done:g}/{p.total:g} {p.unit} ({100 * p.done / p.total:.0f}%){eta}"
        resumed = f"resumed from {p.resumed}" if p.resumed else ""
        return plain("; ".join(part for part in (so_far, resumed, p.note) if part))
    if job.state is JobState.RUNNING and p is not None and p.note:  # how much there is to do is not known yet
        return plain(p.note)
    return ending(job)


def ending(job: Job) -> str:
    """How it ended, and why in the words of its own result: "exit 3: no server answers"."""
    why = "" if job.state is JobState.SUCCEEDED or not job.result else job.result.get("cause") or job.result.get("error")
    return plain(f"{job.reason}: {why}" if isinstance(why, str) and why and why not in job.reason else job.reason)


def table(jobs: Sequence[Job], now_s: float) -> str:
    """Rows for people: id, state, run time, title, detail."""
    rows = [("ID", "STATE", "TOOK", "TITLE", "")]
    for job in jobs:
        rows.append(
            (
                plain(job.spec.id),
                str(job.state),
                duration(took_s(job, now_s)),
                plain(job.spec.title)[:60],
                detail(job, now_s),
            )
        )
    widths = [max(len(r[i]) for r in rows) for i in range(4)]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(r, [*widths, 0], strict=True)).rstrip() for r in rows
    )


def _when(stamp: float | None) -> str:
    return "" if not stamp else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stamp))


def card(job: Job, now_s: float, folder: str) -> str:
    """All about one job, for people."""
    spec = job.spec
    rows: list[tuple[str, str]] = [
        ("job", spec.id),
        ("title", spec.title),
        ("state", str(job.state) + (f": {job.reason}" if job.reason else "")),
        ("damaged", job.damage),
        ("waits for", detail(job, now_s) if job.waiting_for else ""),
        ("stage", spec.stage + (f" ({spec.kind})" if spec.kind != "task" else "")),
        ("command", " ".join(spec.argv)),
        ("folder", spec.cwd),
        ("environment", " ".join(f"{k}={v}" for k, v in sorted(spec.env.items()))),
        ("locks", " ".join(spec.locks)),
        ("after", " ".join(spec.after)),
        ("submitted", _when(spec.submitted_s)),
        ("started", _when(job.started_s)),
        ("ended", _when(job.ended_s)),
        ("took", duration(took_s(job, now_s))),
        ("exit code", "" if job.exit_code is None else str(job.exit_code)),
        ("pids", " ".join(f"{n} {p}" for n, p in (("work", job.pid), ("keeper", job.keeper_pid)) if p)),
        ("CPU", "" if job.cpu_s is None else f"{job.cpu_s:.1f} s"),
        ("peak memory", size(job.peak_rss_b)),
        ("GPU time", "" if not job.gpu_s else f"{job.gpu_s / 3600:.3f} GPU-hours"),
        ("restarts", str(job.restarts) if job.restarts else ""),
        ("retry of", spec.retry_of),
        (
            "resumed",
            f"from {job.progress.resumed}" if job.progress is not None and job.progress.resumed else "",
        ),
        ("notes", "; ".join(job.notes)),
        ("log", f"{folder}/output.log ({size(job.log_bytes)})"),
        ("not understood", f"{job.unknown_events} journal lines" if job.unknown_events else ""),
    ]
    return "\n".join(f"{name:<14} {plain(value)}" for name, value in rows if value)


def to_json(job: Job) -> dict[str, Any]:
    """One flat object for --json. Secrets were masked when the job was stored."""
    spec = job.spec
    p = job.progress
    return {
        "id": spec.id,
        "stage": spec.stage,
        "title": spec.title,
        "kind": spec.kind,
        "state": str(job.state),
        "is_final": job.state.is_final,
        "reason": job.reason,
        "damage": job.damage,
        "exit_code": job.exit_code,
        "pid": job.pid,
        "keeper_pid": job.keeper_pid,
        "submitted_s": spec.submitted_s,
        "started_s": job.started_s,
        "ended_s": job.ended_s,
        "took_s": job.took_s,
        "waiting_for": job.waiting_for,
        "waiting_since_s": job.waiting_since_s,
        "progress": None
        if p is None
        else {
            "done": p.done,
            "total": p.total,
            "unit": p.unit,
            "note": p.note,
            "eta_s": p.eta_s,
            "at_s": p.at_s,
            "resumed": p.resumed,
        },
        "result": None if job.result is None else dict(job.result),
        "log_bytes": job.log_bytes,
        "cpu_s": job.cpu_s,
        "peak_rss_b": job.peak_rss_b,
        "gpu_s": job.gpu_s,
        "restarts": job.restarts,
        "notes": list(job.notes),
        "argv": list(spec.argv),
        "cwd": spec.cwd,
        "env": dict(spec.env),
        "after": list(spec.after),
        "locks": list(spec.locks),
        "priority": spec.priority,
        "timeout_s": spec.timeout_s,
        "restart": spec.restart,
        "retry_of": spec.retry_of,
        "params": dict(spec.params),
    }


def exit_code_of(job: Job) -> int:
    """What `jobs wait` returns for an ended job: its own exit code where it has one, else 1."""
    if job.state is JobState.SUCCEEDED:
        return 0
    return job.exit_code if job.exit_code is not None and job.exit_code > 0 else 1
