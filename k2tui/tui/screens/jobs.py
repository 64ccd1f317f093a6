"""3: jobs above, the selected job's log below."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from k2tui.tui.screens.deck import Deck, Slot
from k2tui.tui.view import View


class JobsScreen(Deck):
    NAME: ClassVar[str] = "jobs"
    PANELS: ClassVar[tuple[str, ...]] = ("jobs",)
    FOCUS: ClassVar[str] = "jobs"
    HAS_LOG: ClassVar[bool] = True

    def place(self, width: int, height: int) -> Sequence[Slot]:
        count = len(self._view.snap.jobs) if self._view is not None else 3
        top = max(6, min(count + 3, height * 2 // 5))
        return (Slot("jobs", 0, 0, width, top), Slot("log", 0, top, width, height - top))

    def draw_log(self, view: View) -> None:
        self.dashboard.show_log(self, self.selected_key("jobs"))

    def on_row_list_moved(self) -> None:
        self.dashboard.show_log(self, self.selected_key("jobs"))
