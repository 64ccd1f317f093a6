"""The task board: a mirror of a plan file."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class TaskStatus(StrEnum):
    PENDING = "pending"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Task:
    id: str
    content: str
    status: TaskStatus = TaskStatus.PENDING
    priority: str = "medium"  # high | medium | low
    note: str = ""
    stage: str = ""  # linked stage: the task follows the newest job of it
    job_id: str = ""
    depends: tuple[str, ...] = ()
    depth: int = 0  # nesting in Markdown lists


@dataclass(frozen=True, slots=True)
class Board:
    path: str = ""
    tasks: tuple[Task, ...] = ()
    error: str = ""  # "plan.json line 4: ...": the tasks shown are the last good ones
    title: str = ""
