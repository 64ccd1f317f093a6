"""The task board: the plan file's tasks with their status; linked tasks show their job's progress."""

from __future__ import annotations

from k2tui.core.board import Task, TaskStatus
from k2tui.tui import format as fmt
from k2tui.tui.lines import Glyphs, Line, Picture, Row, Seg, fit, fit_line, text_line, width, wrap
from k2tui.tui.panels import Panel
from k2tui.tui.view import View

ROLES = {
    TaskStatus.PENDING: "dim",
    TaskStatus.IN_PROGRESS: "info",
    TaskStatus.COMPLETED: "ok",
    TaskStatus.CANCELLED: "faint",
}


def mark(status: TaskStatus, g: Glyphs) -> str:
    return {
        TaskStatus.PENDING: g.wait,
        TaskStatus.IN_PROGRESS: g.run,
        TaskStatus.COMPLETED: g.ok,
        TaskStatus.CANCELLED: g.skip,
    }[status]


def _line(task: Task, view: View, cells: int, blocked: bool) -> Line:
    g, role = view.glyphs, ROLES[task.status]
    tail: list[Seg] = []
    job = next((j for j in view.snap.jobs if j.spec.id == task.job_id), None) if task.job_id else None
    if job is not None and job.progress is not None and job.progress.total and not job.state.is_final:
        tail.append(Seg(f" {fmt.percent(job.progress.done / job.progress.total)}", "info"))
    if blocked:
        tail.append(Seg(" blocked", "warn"))
    if task.priority == "high" and task.status in (TaskStatus.PENDING, TaskStatus.IN_PROGRESS):
        tail.append(Seg(f" {g.up}high", "warn"))
    if cells >= 90:
        tail.append(Seg(f" {task.stage:<9}", "faint"))
    right = sum(len(s.text) for s in tail)
    head = "  " * min(task.depth, 6) + mark(task.status, g) + " "
    text_role = {TaskStatus.COMPLETED: "dim", TaskStatus.CANCELLED: "faint", TaskStatus.IN_PROGRESS: "bold"}.get(task.status, "")
    content_cells = max(1, cells - len(head) - right)
    content = fit(task.content, content_cells, ellipsis=g.ellipsis)
    segs = [Seg(head, role), Seg(content, text_role)]
    if task.note and content_cells > width(task.content) + 6:
        bare = content.rstrip()
        room = content_cells - width(bare) - 2
        segs = [Seg(head, role), Seg(bare, text_role), Seg("  " + fit(task.note, room, ellipsis=g.ellipsis), "faint")]
    return fit_line([*segs, *tail], cells)


def draw(view: View, width: int, height: int) -> Picture:
    board = view.snap.board
    rows: list[Row] = []
    if board.error:
        rows += [Row("", text_line(t, "warn")) for t in wrap(board.error, width, 2, view.glyphs.ellipsis)]
    if not board.tasks and not board.error:
        rows.append(Row("", (Seg("No tasks. ", "dim"), Seg("a", "key", "add_task"), Seg(" adds one.", "dim"))))
    done = {t.id for t in board.tasks if t.status is TaskStatus.COMPLETED}
    known = {t.id for t in board.tasks}
    for task in board.tasks:
        blocked = task.status is TaskStatus.PENDING and any(d in known and d not in done for d in task.depends)
        rows.append(Row(task.id, _line(task, view, width, blocked)))
    open_ = sum(1 for t in board.tasks if t.status in (TaskStatus.PENDING, TaskStatus.IN_PROGRESS))
    note = (Seg(f"{len(done)}/{len(board.tasks)} done" if board.tasks else "", "ok" if board.tasks and not open_ else "dim"),)
    current = next((t for t in board.tasks if t.status is TaskStatus.IN_PROGRESS), None)
    current = current or next((t for t in board.tasks if t.status is TaskStatus.PENDING), None)
    return Picture(tuple(rows), note=note, prefer=current.id if current is not None else "")


PANEL = Panel(
    "board",
    "Board",
    draw,
    needs=("board", "jobs"),
    order=50,
    selectable=True,
    enter="cycle_task",
    keys=(("space", "cycle_task", "next status"), ("a", "add_task", "add"), ("e", "edit_task", "edit"), ("exclamation_mark", "cycle_priority", "priority")),
    help="Tasks of the plan file. Space changes the status, ! the priority, a adds, e edits; the file changes with them.",
)
