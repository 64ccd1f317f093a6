"""5: benchmark runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from k2tui.tui.screens.deck import Deck, Slot


class BenchScreen(Deck):
    NAME: ClassVar[str] = "bench"
    PANELS: ClassVar[tuple[str, ...]] = ("bench",)
    FOCUS: ClassVar[str] = "bench"

    def place(self, width: int, height: int) -> Sequence[Slot]:
        return (Slot("bench", 0, 0, width, height),)
