"""A column of the task board: tasks that are being worked on."""

from __future__ import annotations

from k2tui.core.board import TaskStatus
from k2tui.tui.panels.board import column

PANEL = column("boardactive", "In progress", (TaskStatus.IN_PROGRESS,), "Tasks that are being worked on.")
