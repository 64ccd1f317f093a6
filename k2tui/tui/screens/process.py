"""One GPU process on a screen of its own: its curves; `e` shows command, parents, children and environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from textual.binding import Binding, BindingType

from k2tui.tui.screens.deck import Deck, Slot
from k2tui.tui.view import View


class ProcessScreen(Deck):
    NAME: ClassVar[str] = "gpu"
    PANELS: ClassVar[tuple[str, ...]] = ("process",)
    FOCUS: ClassVar[str] = "process"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "back", show=False),
        Binding("e", "facts", show=False),
        Binding("K", "end", show=False),
    ]
    HINTS: ClassVar[tuple[tuple[str, str, str], ...]] = (
        ("Esc", "back", "back"),
        ("e", "environment", "screen.facts"),
        ("K", "end", "screen.end"),
    )

    def __init__(self, key: str) -> None:
        super().__init__()
        self._key = key

    def place(self, width: int, height: int) -> Sequence[Slot]:
        return (Slot("process", 0, 0, width, height, "rule" if height < 28 else "box"),)

    def draw(self, view: View) -> None:
        super().draw(replace(view, process=replace(view.process, key=self._key)))

    def on_mount(self) -> None:
        super().on_mount()
        self.dashboard.backend.watch_gpu(int(self._key.rpartition("/")[2]))

    def on_unmount(self) -> None:
        self.dashboard.backend.watch_gpu(None)

    def action_back(self) -> None:
        self.dismiss(None)

    def action_facts(self) -> None:
        self.dashboard.open_process(self._key)

    def action_end(self) -> None:
        self.dashboard.end_process(self._key)
