"""Any panel of the folder on a screen of its own (from the palette)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType

from k2tui.tui.screens.deck import Deck, Slot


class PanelScreen(Deck):
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "back", show=False)]
    HINTS: ClassVar[tuple[tuple[str, str, str], ...]] = (("Esc", "back", "back"),)

    def __init__(self, panel: str) -> None:
        self.PANELS = (panel,)  # type: ignore[misc]
        self.FOCUS = panel  # type: ignore[misc]
        super().__init__()

    def place(self, width: int, height: int) -> Sequence[Slot]:
        return (Slot(self.PANELS[0], 0, 0, width, height),)

    def action_back(self) -> None:
        self.dismiss(None)
