"""One log on the whole screen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType

from k2tui.tui.screens.deck import Deck, Slot
from k2tui.tui.view import View
from k2tui.tui.widgets.logview import LogView


class LogScreen(Deck):
    """Pushed over the screen that it was opened from; Esc or q goes back."""

    NAME: ClassVar[str] = "log"
    PANELS: ClassVar[tuple[str, ...]] = ()
    FOCUS: ClassVar[str] = "log"
    HAS_LOG: ClassVar[bool] = True
    HINTS: ClassVar[tuple[tuple[str, str, str], ...]] = (("i", "links", "links"), ("y", "copy", "copy"), ("p", "proof", "proof"), ("Esc", "back", "back"))
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,l,backspace", "back", show=False)]

    def __init__(self, key: str, proof: tuple[str, int | None] | None = None) -> None:
        super().__init__()
        self.log_key = key
        self._proof = proof

    def place(self, width: int, height: int) -> Sequence[Slot]:
        return (Slot("log", 0, 0, width, height),)

    def on_mount(self) -> None:
        super().on_mount()
        self.call_after_refresh(self._open)

    def _open(self) -> None:
        self.dashboard.show_log(self, self.log_key)
        if self._proof is not None:
            self.query_one(LogView).show_proof(*self._proof)
            self._proof = None

    def draw_log(self, view: View) -> None:
        self.query_one(LogView).poll()

    def on_key(self, event: events.Key) -> None:
        if event.key == "p":
            server = self._view.server if self._view is not None else None
            if server is not None and server.load.proof_line:
                event.stop()
                self.query_one(LogView).show_proof(server.load.proof_line, server.load.proof_line_no)

        elif event.key in ("left_curly_bracket", "right_curly_bracket"):
            event.stop()
            self._to_phase(event.key == "right_curly_bracket")

    def _to_phase(self, forward: bool) -> None:
        """The line with which the next or previous phase of the start begins."""
        log = self.query_one(LogView)
        server = self._view.server if self._view is not None else None
        spans = server.load.phases if server is not None and server.log_key == self.log_key else ()
        begins = [(span.line_no - 1, str(span.phase)) for span in spans if span.line_no is not None]
        here = log.marked if log.marked is not None else log.first_line
        found = [at for at in begins if at[0] > here] if forward else [at for at in begins if at[0] < here][::-1]
        if not found:
            words = "no phase of the start that this log shows" if not begins else f"no phase {'below' if forward else 'above'}"
            self.dashboard.say(words, "warning")
            return
        log.show_line(found[0][0])
        self.dashboard.say(f"phase {found[0][1]}")

    def action_back(self) -> None:
        self.dismiss(None)
