"""8: the pipeline: its steps, the training's curves, the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from k2tui.core.chain_view import StepState
from k2tui.tui.screens.deck import Deck, Slot


class PipelineScreen(Deck):
    NAME: ClassVar[str] = "pipeline"
    PANELS: ClassVar[tuple[str, ...]] = ("pipeline", "train", "report")
    FOCUS: ClassVar[str] = "pipeline"
    HINTS: ClassVar[tuple[tuple[str, str, str], ...]] = (("A", "run all", "stage('pipeline')"),)

    def place(self, width: int, height: int) -> Sequence[Slot]:
        """Steps above; below, the training while it is what happens, and the report once there is one; both where there is room."""
        snap = self._view.snap if self._view is not None else None
        chain = snap.chain if snap is not None else None
        frame = "rule" if height < 28 else "box"
        edge = 2 if frame == "rule" else 3
        count = len(chain.steps) if chain is not None else 3
        top = min(count + edge, height * 3 // 5 if height < 28 else height // 2)
        below = [Slot("train", 0, top, width, height - top, frame)]
        has_report = chain is not None and chain.report is not None
        trains = snap is not None and snap.training is not None and snap.training.is_running
        if width >= 140 and height - top >= 8:
            left = width // 2
            below = [
                Slot("train", 0, top, left, height - top, frame),
                Slot("report", left, top, width - left, height - top, frame),
            ]
        elif has_report and not trains and not self._train_next():
            below = [Slot("report", 0, top, width, height - top, frame)]
        return (Slot("pipeline", 0, 0, width, top, frame), *below)

    def _hints(self) -> list[tuple[str, str, str]]:
        """`A` before what only the widest terminals show."""
        hints = [h for h in super()._hints() if h not in self.HINTS]
        return [*hints[:2], *self.HINTS, *hints[2:]]

    def _train_next(self) -> bool:
        """True while a run goes on whose training is not over."""
        chain = self._view.snap.chain if self._view is not None else None
        if chain is None or not chain.job_id:
            return False
        return any(s.name == "train" and s.state is not StepState.DONE for s in chain.steps)
