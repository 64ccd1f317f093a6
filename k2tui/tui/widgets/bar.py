"""One line of things to press: tabs, buttons, keys. Knows labels and actions, not what they do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType

from k2tui.tui.lines import Line, Seg, fit_line, line_width
from k2tui.tui.widgets.lines import Lines


@dataclass(frozen=True, slots=True)
class Button:
    key: str
    label: str
    action: str
    enabled: bool = True
    active: bool = False


class Bar(Lines):
    """A line that is only shown and clicked (tabs, keys)."""


class ButtonBar(Lines, can_focus=True):
    """Buttons in a row; left and right choose one, Enter presses it, and so does the mouse."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left,h", "move(-1)", show=False),
        Binding("right,l", "move(1)", show=False),
        Binding("enter,space", "press", show=False),
    ]

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self.buttons: tuple[Button, ...] = ()
        self._index = 0

    def set_buttons(self, buttons: Sequence[Button]) -> None:
        self.buttons = tuple(buttons)
        self._index = max(0, min(self._index, len(self.buttons) - 1))
        self._draw()

    def _draw(self) -> None:
        self.show([button_line(self.buttons, self.cells, self._index if self.has_focus else None)])

    def on_focus(self) -> None:
        self._draw()

    def on_blur(self) -> None:
        self._draw()

    def on_resize(self, event: events.Resize) -> None:
        super().on_resize(event)
        self._draw()

    def action_move(self, by: int) -> None:
        if self.buttons:
            self._index = (self._index + by) % len(self.buttons)
            self._draw()

    def action_press(self) -> None:
        if self.buttons:
            self.post_message(self.Pressed(self, self.buttons[self._index].action))


def button_line(buttons: Sequence[Button], cells: int, chosen: int | None) -> Line:
    """` s Start server ` as chips with a gap; labels shorten to their first word when there is no room."""
    for labels in (
        [b.label for b in buttons],
        [b.label.split(" ")[0] for b in buttons],
        [b.label.split(" ")[0][:5] for b in buttons],
    ):
        segs: list[Seg] = [Seg(" ")]
        for n, (button, label) in enumerate(zip(buttons, labels, strict=True)):
            back = "on-tab" if n == chosen else "on-key"
            key_role = f"key bold {back}" if button.enabled else f"faint {back}"
            text_role = f"text {back}" if button.enabled else f"faint {back}"
            segs += [Seg(f" {button.key} ", key_role, button.action), Seg(f"{label} ", text_role, button.action), Seg(" ")]
        if line_width(segs) <= cells:
            break
    return fit_line(segs, cells)
