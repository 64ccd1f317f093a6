"""`k2tui board`: list, set, add, edit, move, find: the tasks of a plan file."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k2tui.errors import K2Error, UsageError

if TYPE_CHECKING:
    from k2tui.core.board import Board, Task
    from k2tui.core.job import Job
    from k2tui.sources.plan import PlanFile

HELP = "the task board: list, set, add, edit, move tasks of a plan file (JSON, Markdown or TOML)"

STATUSES = ("pending", "in_progress", "completed", "cancelled")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sub = parser.add_subparsers(dest="order", metavar="ORDER", required=True)

    def order(name: str, text: str, *, with_task: bool = True) -> argparse.ArgumentParser:
        child = sub.add_parser(name, help=text, description=text)
        if with_task:
            child.add_argument("task", help="task id, its number in the list, or a unique part of its words")
        child.add_argument(
            "--plan", default="", help="plan file (default: the configuration's, else the pipeline's own)"
        )
        child.add_argument("--json", action="store_true", help="print JSON")
        return child

    listing = order("list", "all tasks, with what jobs made of them", with_task=False)
    listing.add_argument("--status", choices=("open", *STATUSES), default="", help="open = not ended")
    listing.add_argument("--priority", choices=("high", "medium", "low"), default="")
    listing.add_argument("--search", default="", metavar="WORDS", help="only tasks with all of these words")
    listing.add_argument("--columns", action="store_true", help="side by side, by status")
    setting = order("set", "set a task's status")
    setting.add_argument("status", choices=STATUSES)
    setting.add_argument("--force", action="store_true", help="also when tasks that it depends on are open")
    adding = order("add", "add a task", with_task=False)
    adding.add_argument("content", help="what is to do")
    adding.add_argument("--priority", choices=("high", "medium", "low"), default="medium")
    adding.add_argument("--id", default="")
    adding.add_argument("--stage", default="", help="follow the newest job of this stage")
    adding.add_argument("--depends", action="append", default=[], metavar="TASK")
    adding.add_argument("--note", default="")
    editing = order("edit", "change a task's words, priority, note or links")
    editing.add_argument("--content")
    editing.add_argument("--priority", choices=("high", "medium", "low"))
    editing.add_argument("--note")
    editing.add_argument("--stage")
    editing.add_argument("--job", help="follow this job")
    editing.add_argument("--depends", metavar="TASK,TASK")
    moving = order("move", "move a task to another place")
    moving.add_argument("place", type=int, help="its new number in the list, from 1")
    order("find", "plan files here and where coding agents keep theirs", with_task=False)


def run(args: argparse.Namespace) -> int:
    orders: dict[str, Any] = {
        "list": _list,
        "set": _set,
        "add": _add,
        "edit": _edit,
        "move": _move,
        "find": _find,
    }
    return int(orders[args.order](args))


def _plan_file(args: argparse.Namespace) -> PlanFile:
    from k2tui.plans import open_plan, plan_at

    if args.plan:
        return plan_at(args.plan)
    from k2tui import config

    return open_plan(config.load())


def _read(args: argparse.Namespace) -> tuple[PlanFile, Board]:
    """The plan with its jobs. A broken file is an error here: there is no last good picture."""
    from k2tui.jobs import folder

    plan = _plan_file(args)
    plan.poll()
    if plan.board.error:
        hint = "fix that line; the file was left alone" if " line " in plan.board.error else ""
        raise UsageError(plan.board.error, hint or "check the file and its folder")
    jobs = folder.list_jobs()
    ready = _ready(jobs)
    try:
        plan.sync(jobs, ready)
    except K2Error:
        pass  # a folder that cannot be written: what jobs did is shown all the same
    return plan, plan.linked(jobs, ready)


def _ready(jobs: Sequence[Job]) -> list[str]:
    """Ids of live server jobs that are ready: read from their logs and asked once, as `status` does."""
    from k2tui.core.server_jobs import is_live, server_jobs

    live = [j for j in server_jobs(jobs) if is_live(j)]
    if not live:
        return []
    from k2tui.core.load import State
    from k2tui.servers import look_once, target_of

    return [j.spec.id for j in live if look_once(target_of(j)).load.state in (State.READY, State.DEGRADED)]


def _task(board: Board, word: str) -> Task:
    for task in board.tasks:
        if task.id == word:
            return task
    if word.isdigit() and 1 <= int(word) <= len(board.tasks):
        return board.tasks[int(word) - 1]
    found = [t for t in board.tasks if word.lower() in t.content.lower() or t.id.startswith(word)]
    if len(found) == 1:
        return found[0]
    ids = ", ".join(t.id for t in (found or board.tasks)[:12])
    raise UsageError(
        f"{'several tasks fit' if found else 'no task'} {word!r}",
        f"tasks: {ids}" if ids else "the plan is empty",
    )


def _object(task: Task) -> dict[str, Any]:
    return {
        "id": task.id,
        "content": task.content,
        "status": str(task.status),
        "priority": task.priority,
        "note": task.note,
        "stage": task.stage,
        "job": task.job_id,
        "depends": list(task.depends),
        "depth": task.depth,
        "line": task.line,
        "said": task.said,
        "waiting_for": list(task.waiting_for),
        "started_s": task.started_s,
        "ended_s": task.ended_s,
        "took_s": task.took_s,
    }


_BOXES = {"pending": "[ ]", "in_progress": "[/]", "completed": "[x]", "cancelled": "[-]"}


def _line(number: int, task: Task) -> str:
    from k2tui.core.job_text import duration, plain

    words = f"{number:>3} {'  ' * task.depth}{_BOXES[str(task.status)]} {plain(task.content)}"
    extra: list[str] = []
    if task.priority != "medium":
        extra.append(task.priority)
    if task.waiting_for:
        extra.append("needs " + ", ".join(task.waiting_for))
    if task.said:
        extra.append(task.said)
    if task.took_s is not None:
        extra.append(f"took {duration(task.took_s)}")
    elif task.started_s is not None and str(task.status) == "in_progress":
        extra.append(f"since {duration(time.time() - task.started_s)}")
    if task.note:
        extra.append(task.note)
    return words + (f"  ({plain('; '.join(extra))})" if extra else "")


def _list(args: argparse.Namespace) -> int:
    from k2tui.core.board import matches
    from k2tui.core.job_text import plain

    _, board = _read(args)
    shown = [
        (n, t) for n, t in enumerate(board.tasks, 1) if matches(t, args.search, args.status, args.priority)
    ]
    if args.json:
        print(
            json.dumps(
                {
                    "schema": 1,
                    "path": board.path,
                    "title": board.title,
                    "tasks": [_object(t) for _, t in shown],
                },
                ensure_ascii=False,
                indent=1,
            )
        )
        return 0
    print(f"{board.path}" + (f": {plain(board.title)}" if board.title else ""), file=sys.stderr)
    if args.columns:
        import shutil

        width = max(16, (shutil.get_terminal_size((100, 24)).columns - 6) // 4)
        columns = [[plain(t.content)[:width] for _, t in shown if str(t.status) == s] for s in STATUSES]
        print(
            "  ".join(f"{s} ({len(c)})".ljust(width) for s, c in zip(STATUSES, columns, strict=True)).rstrip()
        )
        for row in range(max((len(c) for c in columns), default=0)):
            print("  ".join((c[row] if row < len(c) else "").ljust(width) for c in columns).rstrip())
        return 0
    for number, task in shown:
        print(_line(number, task))
    return 0


def _done(args: argparse.Namespace, plan: PlanFile, task_id: str) -> int:
    board = plan.board
    for number, task in enumerate(board.tasks, 1):
        if task.id == task_id:
            print(
                json.dumps({"schema": 1, **_object(task)}, ensure_ascii=False, indent=1)
                if args.json
                else _line(number, task)
            )
    return 0


def _set(args: argparse.Namespace) -> int:
    plan, board = _read(args)
    task = _task(board, args.task)
    if args.status in ("in_progress", "completed") and task.waiting_for and not args.force:
        raise UsageError(
            f"{task.id} needs {', '.join(task.waiting_for)} first", "--force sets it all the same"
        )
    plan.set_task(task.id, status=args.status)
    return _done(args, plan, task.id)


def _add(args: argparse.Namespace) -> int:
    plan = _plan_file(args)
    task_id = plan.add_task(
        args.content, args.priority, id=args.id, stage=args.stage, depends=tuple(args.depends), note=args.note
    )
    return _done(args, plan, task_id)


def _edit(args: argparse.Namespace) -> int:
    plan, board = _read(args)
    task = _task(board, args.task)
    names = {
        "content": args.content,
        "priority": args.priority,
        "note": args.note,
        "stage": args.stage,
        "job_id": args.job,
    }
    changes = {k: v for k, v in {**names, "depends": args.depends}.items() if v is not None}
    if not changes:
        raise UsageError(
            "nothing to change", "give --content, --priority, --note, --stage, --job or --depends"
        )
    place = board.tasks.index(task)
    plan.set_task(task.id, **changes)
    # a task without an id of its own is named by its words: after a change of words it has another one
    now = plan.board.tasks
    task_id = task.id if any(t.id == task.id for t in now) else now[place].id if place < len(now) else task.id
    return _done(args, plan, task_id)


def _move(args: argparse.Namespace) -> int:
    plan, board = _read(args)
    task = _task(board, args.task)
    if not 1 <= args.place <= len(board.tasks):
        raise UsageError(f"there is no place {args.place}: the plan has {len(board.tasks)} tasks")
    plan.move_task(task.id, args.place - 1)
    return _done(args, plan, task.id)


def _find(args: argparse.Namespace) -> int:
    from k2tui.core.job_text import plain
    from k2tui.sources.plan import find_plans

    found = find_plans(Path.cwd())
    if args.json:
        print(json.dumps({"schema": 1, "plans": [str(p) for p in found]}, ensure_ascii=False, indent=1))
    else:
        for path in found:
            print(plain(str(path)))
        if not found:
            print("no plan file found; k2tui board add makes one", file=sys.stderr)
    return 0
