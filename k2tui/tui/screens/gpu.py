"""2: GPUs, their processes, the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from k2tui.tui.screens.deck import Deck, Slot


class GpuScreen(Deck):
    NAME: ClassVar[str] = "gpu"
    PANELS: ClassVar[tuple[str, ...]] = ("gpus", "processes", "host")
    FOCUS: ClassVar[str] = "processes"

    def place(self, width: int, height: int) -> Sequence[Slot]:
        view = self._view
        count = len(view.snap.gpu.gpus) if view is not None and view.snap.gpu is not None else 0
        top = min(max(3, count) + 3, height - 8)
        return (
            Slot("gpus", 0, 0, width, top),
            Slot("processes", 0, top, width, height - top - 3),
            Slot("host", 0, height - 3, width, 3),
        )
