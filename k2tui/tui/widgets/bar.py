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
    spare: bool = False  # leaves first when there is no room (it is in the palette, too)
    brief: str = ""  # a shorter label for where the rest does not fit; "" = none


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

    def focus_changed(self) -> None:
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
    """` s Start server ` as chips with a gap. Without room: spare buttons leave, then labels become brief, then they are cut."""
    shown = list(enumerate(buttons))
    segs: list[Seg] = []
    for limit, is_brief in ((40, False), (40, True), (5, True), (4, True), (3, True)):
        while True:
            segs = _chips(shown, limit, chosen, is_brief)
            if line_width(segs) - 1 <= cells:
                return fit_line(segs, cells)
            spare = next((item for item in reversed(shown) if item[1].spare and item[0] != chosen), None)
            if spare is None:
                break
            shown.remove(spare)
    return fit_line(segs, cells)


def _chips(shown: Sequence[tuple[int, Button]], limit: int, chosen: int | None, is_brief: bool) -> list[Seg]:
    segs: list[Seg] = [Seg(" ")]
    for n, button in shown:
        back = "on-tab" if n == chosen else "on-key"
        key = f" {button.key} " if button.key else " "
        label = button.brief if is_brief and button.brief else button.label
        label = label if limit >= 40 else label.split(" ")[0][:limit]
        segs.append(Seg(key, f"key bold {back}" if button.enabled else f"faint {back}", button.action))
        segs += [Seg(f"{label} ", f"text {back}" if button.enabled else f"faint {back}", button.action), Seg(" ")]
    return segs
