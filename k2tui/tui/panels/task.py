"""One task in full: the one selected on the board (or the first open one)."""

from __future__ import annotations

from k2tui.core.board import TaskStatus, job_of
from k2tui.tui import format as fmt
from k2tui.tui.lines import Line, Picture, Row, Seg, bar, text_line, wrap
from k2tui.tui.panels import Panel
from k2tui.tui.panels.board import ROLES, mark, time_of
from k2tui.tui.panels.jobs import ROLES as JOB_ROLES
from k2tui.tui.view import View


def draw(view: View, width: int, height: int) -> Picture:
    tasks = view.snap.board.tasks
    task = next((t for t in tasks if t.id == view.task_id), None)
    task = task or next((t for t in tasks if t.status is TaskStatus.IN_PROGRESS), None) or (tasks[0] if tasks else None)
    if task is None:
        return Picture((Row("", text_line("No task selected.", "dim")),))
    lines: list[Line] = [
        (
            Seg(f"{mark(task.status, view.glyphs)} {task.status.value.replace('_', ' ')}", f"{ROLES[task.status]} bold"),
            Seg(f"  {task.priority}", "warn" if task.priority == "high" else "dim"),
            Seg(f"  {task.id}", "faint"),
        )
    ]
    lines += [text_line(t, "bold") for t in wrap(task.content, width, 4, view.glyphs.ellipsis)]
    if task.note:
        lines += [text_line(t) for t in wrap(task.note, width, 6, view.glyphs.ellipsis)]
    by_id = {t.id: t for t in tasks}
    for need in task.depends:
        other = by_id.get(need)
        done = other is not None and other.status is TaskStatus.COMPLETED
        sign = view.glyphs.ok if done else view.glyphs.wait
        lines.append((Seg("after  ", "dim"), Seg(f"{sign} ", "ok" if done else "warn"), Seg(other.content if other else need)))
    job = job_of(task, view.snap.jobs)
    if job is not None:
        lines.append((Seg("job    ", "dim"), Seg(f"{job.spec.id}  "), Seg(f"{job.state.value}  ", JOB_ROLES[job.state]), Seg(job.reason, "dim")))
        if job.waiting_for:
            since = "" if job.waiting_since_s is None else f", for {fmt.age(view.now_s - job.waiting_since_s)}"
            lines.append((Seg("waits  ", "dim"), Seg(f"for {job.waiting_for}{since}", "warn")))
        if job.progress is not None and job.progress.total:
            share = job.progress.done / job.progress.total
            lines.append((Seg("       "), *bar(share, max(4, min(40, width - 16)), "bar", view.glyphs), Seg(f" {fmt.percent(share)}")))
    if task.started_s is not None:
        ended = f", ended {fmt.clock(task.ended_s)}, took " if task.ended_s is not None else ", so far "
        lines.append((Seg("began  ", "dim"), Seg(f"{fmt.clock(task.started_s)}{ended}{time_of(task, view.now_s)}")))
    if task.stage:
        lines.append((Seg("stage  ", "dim"), Seg(task.stage, "accent")))
    if view.snap.board.path:
        lines.append((Seg("file   ", "dim"), *text_line(view.snap.board.path, "faint")))
    return Picture(tuple(Row("", x) for x in lines[:height]))


PANEL = Panel("task", "Task", draw, needs=("board", "jobs"), ticks=True, order=55, help="The selected task, what it waits for, and its job.")
