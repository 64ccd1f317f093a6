"""5: benchmark runs, and views of the selected one: settings, sweep, trade-off, the run in full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from k2tui.core.bench_groups import SORTS, ordered
from k2tui.core.bench_table import markdown
from k2tui.tui.screens.deck import Deck, Slot
from k2tui.tui.view import BenchPick, View
from k2tui.tui.widgets.rowlist import RowList

VIEWS = ("benchsettings", "benchsweep", "benchpareto", "benchrun")


class BenchScreen(Deck):
    NAME: ClassVar[str] = "bench"
    PANELS: ClassVar[tuple[str, ...]] = ("bench", *VIEWS)
    FOCUS: ClassVar[str] = "bench"

    def __init__(self) -> None:
        super().__init__()
        self._pick = BenchPick()
        self._lower = 0

    def place(self, width: int, height: int) -> Sequence[Slot]:
        """The list above, one view of the selected run below (`v`: the next one); two views side by side where there is room."""
        rows = len(self._view.snap.bench) if self._view is not None else 0
        if not rows:
            return (Slot("bench", 0, 0, width, height),)
        frame = "rule" if height < 28 else "box"
        top = max(min(rows + 4, height * 2 // 5), 6)
        first = VIEWS[self._lower]
        if width < 140:
            return (Slot("bench", 0, 0, width, top, frame), Slot(first, 0, top, width, height - top, frame))
        second = "benchpareto" if first != "benchpareto" else "benchsweep"
        left = width * 3 // 5
        return (
            Slot("bench", 0, 0, width, top, frame),
            Slot(first, 0, top, left, height - top, frame),
            Slot(second, left, top, width - left, height - top, frame),
        )

    def draw(self, view: View) -> None:
        selected = self.selected_key("bench")
        if selected:
            self._pick = replace(self._pick, run_id=selected)
        super().draw(replace(view, bench=self._pick))

    def _again(self) -> None:
        if self._view is not None:
            self.draw(self._view)

    def on_row_list_moved(self, event: RowList.Moved) -> None:
        self._again()

    def action_bench_sort(self) -> None:
        at = SORTS.index(self._pick.sort) if self._pick.sort in SORTS else 0
        self._pick = replace(self._pick, sort=SORTS[(at + 1) % len(SORTS)])
        self._again()

    def action_bench_filter(self) -> None:
        def done(text: str) -> None:
            self._pick = replace(self._pick, text=text.strip())
            self._again()

        self.ask("show runs with", self._pick.text, done)

    def action_bench_base(self) -> None:
        """Measure the others against the selected run; again on the same run: back to the stored baseline."""
        chosen = self.selected_key("bench")
        self._pick = replace(self._pick, base_id="" if chosen == self._pick.base_id else chosen)
        self._again()

    def action_bench_view(self) -> None:
        self._lower = (self._lower + 1) % len(VIEWS)
        self._arrange()
        self._again()

    def action_bench_copy(self) -> None:
        """The list as a Markdown table."""
        if self._view is not None and self._view.snap.bench:
            self.dashboard.copy_text(markdown(ordered(self._view.snap.bench, self._pick.sort, self._pick.text)))
