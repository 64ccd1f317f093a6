"""5: benchmark runs, and views of the selected one: settings, sweep, trade-off, the run in full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from k2tui.core.bench import BenchRow
from k2tui.core.bench_groups import SORTS, ordered
from k2tui.core.bench_table import markdown
from k2tui.tui import benchtext as bt
from k2tui.tui.lines import Line, Seg, text_line
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

        self.ask("show runs with", self._pick.text, done, replaces=True)

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
            self.dashboard.copy_text(
                markdown(ordered(self._view.snap.bench, self._pick.sort, self._pick.text))
            )

    # -- orders: the store changes, and the next snapshot shows it

    def _chosen(self) -> BenchRow | None:
        key = self.selected_key("bench")
        row = (
            next((r for r in self._view.snap.bench if r.run_id == key), None)
            if self._view is not None
            else None
        )
        if row is None:
            self.dashboard.say("select a run first", "warning")
        return row

    def action_bench_label(self) -> None:
        row = self._chosen()
        if row is None:
            return

        def done(text: str) -> None:
            words = text.split()
            tag = next((w[1:] for w in words if w.startswith("#")), "")
            label = " ".join(w for w in words if not w.startswith("#"))
            if (label, tag) != (row.label, row.tag):
                self.dashboard.order(self.dashboard.backend.label_run, row.run_id, label, tag)

        self.ask("label (#word: tag)", f"{row.label} #{row.tag}" if row.tag else row.label, done)

    def action_bench_keep_base(self) -> None:
        """Store the run, with its sweep, as its workload's baseline; on a baseline: no longer."""
        row = self._chosen()
        if row is None:
            return
        dashboard, on = self.dashboard, not row.is_baseline

        def told(ids: Sequence[str]) -> None:
            dashboard.say(
                f"{bt.name(row)} is {'the' if on else 'no longer a'} baseline ({len(ids)} run{'s' if len(ids) != 1 else ''})"
            )

        dashboard.order(dashboard.backend.set_baseline, row.run_id, on, then=told)

    def action_bench_delete(self) -> None:
        """Remove the selected run for good: asked first."""
        row = self._chosen()
        if row is None:
            return
        from k2tui.tui.screens.dialogs import Confirm

        dashboard = self.dashboard
        lines: list[Line] = [
            (Seg(bt.name(row), "bold"), Seg(f"  {row.workload}, C={bt.load(row)}, at {bt.clock(row)}")),
            (
                bt.figure(row.output_throughput),
                Seg(f" tok/s, {row.completed}/{row.num_requests} requests", "dim"),
            ),
            text_line("Its figures and its requests leave the store.", "warn"),
            text_line("There is no way back.", "warn"),
        ]
        if row.is_baseline:
            lines.append(text_line("It is the baseline of its workload.", "bad"))

        def answer(agreed: bool | None) -> None:
            if agreed:
                dashboard.order(
                    dashboard.backend.delete_run,
                    row.run_id,
                    then=lambda _: dashboard.say(f"{bt.name(row)} was removed"),
                )

        dashboard.push_screen(Confirm("Remove this run?", lines, "remove it"), answer)

    def action_bench_open(self) -> None:
        """Every request of the run on one time line, and how its latencies are spread."""
        row = self._chosen()
        if row is None:
            return
        dashboard = self.dashboard
        width = min(180, dashboard.size.width * 9 // 10 - 4)

        def show(found: Sequence[str]) -> None:
            from k2tui.tui.screens.dialogs import Reader

            dashboard.push_screen(
                Reader(f"Requests: {bt.name(row)}", [text_line(x) for x in found], copy="\n".join(found))
            )

        dashboard.order(dashboard.backend.run_requests, row.run_id, width, dashboard.glyphs.ascii, then=show)
