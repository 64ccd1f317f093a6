"""7: the newest tuning run: its trials, a bar for each, and the selected one in full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from k2tui.core.tuning_text import table
from k2tui.tui.screens.deck import Deck, Slot
from k2tui.tui.view import View
from k2tui.tui.widgets.rowlist import RowList


class TuneScreen(Deck):
    NAME: ClassVar[str] = "tune"
    PANELS: ClassVar[tuple[str, ...]] = ("tune", "tunechart", "tunetrial")
    FOCUS: ClassVar[str] = "tune"

    def place(self, width: int, height: int) -> Sequence[Slot]:
        run = self._view.snap.tune if self._view is not None else None
        if run is None or run.space is None:
            return (Slot("tune", 0, 0, width, height),)
        trials = len(run.trials)
        if width >= 120 and height >= 30:
            top = max(8, min(trials + 7, height * 3 // 5))
            left = width * 11 // 20
            return (
                Slot("tune", 0, 0, width, top),
                Slot("tunechart", 0, top, left, height - top),
                Slot("tunetrial", left, top, width - left, height - top),
            )
        if height < 30:  # low: bars beside the trial, so that there is a line for each
            top = min(trials + 5, height - max(8, min(height // 2 - 1, 11)))
            left = width // 2
            return (
                Slot("tune", 0, 0, width, top, "rule"),
                Slot("tunechart", 0, top, left, height - top, "rule"),
                Slot("tunetrial", left, top, width - left, height - top, "rule"),
            )
        top = max(6, min(trials + 5, height // 2))
        return (
            Slot("tune", 0, 0, width, top),
            Slot("tunechart", 0, top, width, height - top - 9),
            Slot("tunetrial", 0, height - 9, width, 9),
        )

    def draw(self, view: View) -> None:
        super().draw(replace(view, trial_key=self.selected_key("tune")))

    def action_tune_copy(self) -> None:
        """The table as Markdown."""
        run = self._view.snap.tune if self._view is not None else None
        if run is not None and run.space is not None:
            header, rows = table(run.space, run.trials)
            lines = [header, ["---"] * len(header), *rows]
            self.dashboard.copy_text(
                "\n".join("| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in lines)
            )

    def on_row_list_moved(self, event: RowList.Moved) -> None:
        if self._view is not None:
            self.draw(self._view)
