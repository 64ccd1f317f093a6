"""A column of the task board: tasks that are completed or cancelled."""

from __future__ import annotations

from k2tui.core.board import TaskStatus
from k2tui.tui.panels.board import column

PANEL = column(
    "boarddone",
    "Completed",
    (TaskStatus.COMPLETED, TaskStatus.CANCELLED),
    "Tasks that are completed or cancelled.",
)
