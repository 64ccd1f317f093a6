"""4: the task board on its own, with the jobs that its tasks are linked to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from k2tui.tui.screens.deck import Deck, Slot


class BoardScreen(Deck):
    NAME: ClassVar[str] = "board"
    PANELS: ClassVar[tuple[str, ...]] = ("board", "task")
    FOCUS: ClassVar[str] = "board"

    def place(self, width: int, height: int) -> Sequence[Slot]:
        if width >= 120:
            right = width * 2 // 5
            return (Slot("board", 0, 0, width - right, height), Slot("task", width - right, 0, right, height))
        detail = min(9, height // 3)
        return (Slot("board", 0, 0, width, height - detail), Slot("task", 0, height - detail, width, detail))

    def on_row_list_moved(self) -> None:
        self.dashboard.draw_now()
