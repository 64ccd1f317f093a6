"""A column of the task board: tasks that nobody has begun."""

from __future__ import annotations

from k2tui.core.board import TaskStatus
from k2tui.tui.panels.board import column

PANEL = column("boardpending", "Pending", (TaskStatus.PENDING,), "Tasks that nobody has begun.")
