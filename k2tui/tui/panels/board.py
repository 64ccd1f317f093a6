"""The task board as a list: the plan file's tasks with their status; linked tasks show their job's progress and time."""

from __future__ import annotations

from collections.abc import Sequence

from k2tui.core.board import Task, TaskStatus, job_of, matches
from k2tui.tui import format as fmt
from k2tui.tui.lines import Glyphs, Line, Picture, Row, Seg, fit, fit_line, line_width, text_line, width, wrap
from k2tui.tui.panels import Panel
from k2tui.tui.view import View

ROLES = {
    TaskStatus.PENDING: "dim",
    TaskStatus.IN_PROGRESS: "info",
    TaskStatus.COMPLETED: "ok",
    TaskStatus.CANCELLED: "faint",
}
OPEN = (TaskStatus.PENDING, TaskStatus.IN_PROGRESS)
# of the list and of each column: what can be done with the selected task
KEYS = (
    ("space", "cycle_task", "next status"),
    ("a", "add_task", "add"),
    ("e", "edit_task", "edit"),
    ("n", "edit_note", "note"),
    ("slash", "screen.board_filter", "filter"),
    ("v", "screen.board_view", "list/columns"),
    ("K", "task_up", "up"),
    ("J", "task_down", "down"),
    ("exclamation_mark", "cycle_priority", "priority"),
    ("f", "screen.board_status", "by status"),
    ("F", "screen.board_priority", "by priority"),
    ("u", "undo_task", "undo"),
    ("i", "links", "links"),
)


def mark(status: TaskStatus, g: Glyphs) -> str:
    return {
        TaskStatus.PENDING: g.wait,
        TaskStatus.IN_PROGRESS: g.run,
        TaskStatus.COMPLETED: g.ok,
        TaskStatus.CANCELLED: g.skip,
    }[status]


def shown(view: View) -> Sequence[Task]:
    """The tasks that the filter lets through, in the plan's order."""
    pick = view.board
    return [t for t in view.snap.board.tasks if matches(t, pick.text, pick.status, pick.priority)]


def time_of(task: Task, now_s: float) -> str:
    """How long its job took, or has been running; "" when no job says so."""
    if task.took_s is not None:
        return fmt.duration(task.took_s)
    if task.started_s is None:
        return ""
    if task.ended_s is not None:
        return fmt.duration(task.ended_s - task.started_s)
    return fmt.age(now_s - task.started_s)


def line(task: Task, view: View, cells: int, *, is_column: bool = False) -> Line:
    """One task in that many cells: mark and words at the left; progress, what it needs, priority and time at the right."""
    g, role = view.glyphs, ROLES[task.status]
    tail: list[Seg] = []
    job = job_of(task, view.snap.jobs)
    if job is not None and job.progress is not None and job.progress.total and not job.state.is_final:
        tail.append(Seg(f" {fmt.percent(job.progress.done / job.progress.total)}", "info"))
    if task.waiting_for:
        needs = "needs " + ",".join(task.waiting_for)
        tail.append(Seg(f" {needs}" if cells >= 60 and len(needs) < 24 else " blocked" if not is_column else f" {g.warn}", "warn"))
    if task.priority == "high" and task.status in OPEN:
        tail.append(Seg(f" {g.up}" if is_column else f" {g.up}high", "warn"))
    if cells >= 90:
        tail.append(Seg(f" {fit(task.stage, 9)}", "faint"))
    if cells >= 60 or (is_column and cells >= 24):
        spent = time_of(task, view.now_s)
        if spent or not is_column:
            tail.append(Seg(" " + fit(spent, 5, ">"), "" if task.status is TaskStatus.IN_PROGRESS else "dim"))
    head = ("" if is_column else "  " * min(task.depth, 6)) + mark(task.status, g) + " "
    text_role = {TaskStatus.COMPLETED: "dim", TaskStatus.CANCELLED: "faint", TaskStatus.IN_PROGRESS: "bold"}.get(task.status, "")
    content_cells = max(1, cells - len(head) - line_width(tail))
    content = fit(task.content, content_cells, ellipsis=g.ellipsis)
    segs = [Seg(head, role), Seg(content, text_role)]
    if task.note and content_cells > width(task.content) + 6:
        bare = content.rstrip()
        room = content_cells - width(bare) - 2
        segs = [Seg(head, role), Seg(bare, text_role), Seg("  " + fit(task.note, room, ellipsis=g.ellipsis), "faint")]
    return fit_line([*segs, *tail], cells)


def error_rows(view: View, cells: int) -> list[Row]:
    """What is wrong with the plan file, above the last good tasks."""
    if not view.snap.board.error:
        return []
    return [Row("", text_line(t, "warn")) for t in wrap(view.snap.board.error, cells, 2, view.glyphs.ellipsis)]


def filter_words(view: View) -> str:
    """The filter in words: "open, high, /kimi"; "" when all are shown."""
    pick = view.board
    return ", ".join(w for w in (pick.status.replace("_", " "), pick.priority, pick.text and f"/{pick.text}") if w)


def draw(view: View, width: int, height: int) -> Picture:
    board = view.snap.board
    rows = error_rows(view, width)
    tasks = shown(view)
    if not board.tasks and not board.error:
        rows.append(Row("", (Seg("No tasks. ", "dim"), Seg("a", "key", "add_task"), Seg(" adds one.", "dim"))))
    elif board.tasks and not tasks:
        rows.append(Row("", (Seg("No task is ", "dim"), Seg(filter_words(view), "warn"), Seg(".  "), Seg("Esc", "key", "screen.board_all"), Seg(" shows all.", "dim"))))
    rows += [Row(task.id, line(task, view, width)) for task in tasks]
    done = sum(1 for t in board.tasks if t.status is TaskStatus.COMPLETED)
    is_through = bool(board.tasks) and not any(t.status in OPEN for t in board.tasks)
    note = [Seg(f"{done}/{len(board.tasks)} done" if board.tasks else "", "ok" if is_through else "dim")]
    if not view.board.is_all:
        note.append(Seg(f" {view.glyphs.dot} {len(tasks)} shown: {filter_words(view)}", "accent"))
    current = next((t for t in tasks if t.status is TaskStatus.IN_PROGRESS), None)
    current = current or next((t for t in tasks if t.status is TaskStatus.PENDING), None)
    return Picture(tuple(rows), note=tuple(note), prefer=current.id if current is not None else "")


def column(name: str, title: str, statuses: Sequence[TaskStatus], help: str) -> Panel:
    """A panel of the tasks with these statuses: one column of the board."""

    def draw_column(view: View, width: int, height: int) -> Picture:
        tasks = [t for t in shown(view) if t.status in statuses]
        rows = error_rows(view, width) if statuses[0] is TaskStatus.PENDING else []
        rows += [Row(t.id, line(t, view, width, is_column=True)) for t in tasks]
        note = [Seg(str(sum(1 for t in tasks if t.status is statuses[0])), "dim")]
        if others := sum(1 for t in tasks if t.status is not statuses[0]):
            note.append(Seg(f" {view.glyphs.dot} {others} cancelled", "faint"))
        if not view.board.is_all and statuses[0] is TaskStatus.PENDING:
            note.append(Seg(f" {view.glyphs.dot} {filter_words(view)}", "accent"))
        return Picture(tuple(rows) or (Row("", text_line("none", "faint")),), note=tuple(note))

    return Panel(name, title, draw_column, needs=("board", "jobs"), ticks=True, order=51, selectable=True, enter="open_task", keys=KEYS, help=help)


PANEL = Panel(
    "board",
    "Board",
    draw,
    needs=("board", "jobs"),
    ticks=True,
    order=50,
    selectable=True,
    enter="open_task",
    keys=KEYS,
    help="Tasks of the plan file. Enter opens a task or its job's log, Space changes the status (u undoes), ! the priority, a adds, e edits, n writes a note, J and K move; the file changes with them.",
)
