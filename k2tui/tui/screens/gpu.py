"""2: GPUs, their processes, the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from k2tui.tui.panels.gpus import CARD_LINES, CARD_WIDTH
from k2tui.tui.screens.deck import Deck, Slot


class GpuScreen(Deck):
    NAME: ClassVar[str] = "gpu"
    PANELS: ClassVar[tuple[str, ...]] = ("gpus", "processes", "host")
    FOCUS: ClassVar[str] = "gpus"

    def place(self, width: int, height: int) -> Sequence[Slot]:
        """Cards when they all fit beside a process list worth having, rows otherwise; the host takes what is left over."""
        view = self._view
        gpu = view.snap.gpu if view is not None else None
        count = len(gpu.gpus) if gpu is not None else 0
        processes = len(gpu.processes) if gpu is not None else 0
        if height < 28:
            top = min(max(2, count) + 2, height - 8)
            return (
                Slot("gpus", 0, 0, width, top, "rule"),
                Slot("processes", 0, top, width, height - top - 3, "rule"),
                Slot("host", 0, height - 3, width, 3, "rule"),
            )
        host = 4
        least = min(max(4, processes + 2), height // 3)
        room = height - host - least
        top = min(max(3, count) + 3, room)
        if width - 4 >= CARD_WIDTH and count:
            lines = next((n for n in CARD_LINES if count * n + 3 <= room), 0)
            top = count * lines + 3 if lines else top
        return (
            Slot("gpus", 0, 0, width, top),
            Slot("processes", 0, top, width, height - top - host),
            Slot("host", 0, height - host, width, host),
        )
