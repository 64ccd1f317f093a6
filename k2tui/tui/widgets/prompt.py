"""One line at the bottom that asks for a text: search, filter, a new task. Enter hands it over, Esc drops it."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.widget import Widget
from textual.widgets._input import Input

from k2tui.tui.lines import Seg, width
from k2tui.tui.widgets.lines import Lines


class Prompt(Horizontal):
    DEFAULT_CSS = """
    Prompt { dock: bottom; height: 1; layer: top; background: $surface; }
    Prompt Input { border: none; height: 1; padding: 0; width: 1fr; background: $surface; }
    Prompt Input:focus { border: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "drop", show=False)]

    def __init__(self, label: str, initial: str, done: Callable[[str], None], *, replaces: bool = False) -> None:
        """replaces: what is typed first takes the place of `initial` (a search); else it is added to it (a text to edit)."""
        super().__init__()
        self._replaces = replaces
        self._label = label
        self._initial = initial
        self._done = done
        self._before: Widget | None = None

    def compose(self) -> ComposeResult:
        label = Lines()
        label.styles.width = width(self._label) + 2
        yield label
        field = Input(self._initial, compact=True, select_on_focus=False)
        field.cursor_blink = False
        yield field

    def on_mount(self) -> None:
        self._before = self.screen.focused
        self.query_one(Lines).show([(Seg(f" {self._label} ", "key bold"),)])
        field = self.query_one(Input)
        field.focus()
        if self._replaces and self._initial:
            field.select_all()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self._leave()
        self._done(event.value)

    def action_drop(self) -> None:
        self._leave()

    def _leave(self) -> None:
        """The keys go back to where they went before."""
        if self._before is not None and self._before.is_attached:
            self._before.focus()
        self.remove()
