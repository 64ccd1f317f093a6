"""The base of everything that is drawn: lines of styled segments, repainted only where they changed. Knows no domain word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from rich.segment import Segment
from textual import events
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from k2tui.tui.lines import Line, fit_line

if TYPE_CHECKING:
    from k2tui.tui.palette import Palette


class Lines(Widget):
    """`show(lines)` compares with what is drawn and refreshes the changed lines only. A click on a segment that carries an
    action posts `Pressed`."""

    ALLOW_SELECT = False
    DEFAULT_CSS = """
    Lines { height: 1; width: 1fr; }
    """

    class Pressed(Message):
        """A segment with an action was clicked."""

        def __init__(self, sender: Lines, action: str) -> None:
            super().__init__()
            self.sender = sender
            self.action = action

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._lines: list[Line] = []
        self._strips: dict[Line, Strip] = {}
        self.cells = 0  # own size, kept here: asking Textual for it is slow
        self.rows = 0
        self.lines_refreshed = 0  # how many lines were repainted so far: tests look at it

    @property
    def palette(self) -> Palette:
        return cast("Palette", self.app.palette)  # type: ignore[attr-defined]

    # Focus changes a line or two here, never a style sheet: Textual's own handlers would look up styles and paint the whole screen.

    def on_focus(self, event: events.Focus) -> None:
        event.prevent_default()
        self.has_focus = True
        self.focus_changed()
        if self.parent is not None:
            self.parent.post_message(events.DescendantFocus(self))

    def on_blur(self, event: events.Blur) -> None:
        event.prevent_default()
        self.has_focus = False
        self.focus_changed()
        if self.parent is not None:
            self.parent.post_message(events.DescendantBlur(self))

    def watch_has_focus(self, _has_focus: bool) -> None:
        return

    def focus_changed(self) -> None:
        """`has_focus` is another now: draw what shows it."""

    def on_resize(self, event: events.Resize) -> None:
        self.cells, self.rows = event.size
        self._strips.clear()
        self.refresh()  # what was painted before this event had the old width

    def show(self, lines: Sequence[Line]) -> None:
        """Draw these lines; unchanged ones cost nothing."""
        old = self._lines
        new = list(lines)
        if old == new:
            return
        self._lines = new
        width = self.cells
        if len(self._strips) > 4 * max(16, len(new)):
            self._strips.clear()
        start: int | None = None
        count = max(len(old), len(new))
        for y in range(count + 1):
            changed = y < count and (y >= len(old) or y >= len(new) or old[y] != new[y])
            if changed and start is None:
                start = y
            elif not changed and start is not None:
                self.lines_refreshed += y - start
                self.refresh(Region(0, start, width, y - start))
                start = None

    def repaint(self) -> None:
        """The colours changed: every line is drawn again."""
        self._strips.clear()
        self.refresh()

    def render_lines(self, crop: Region) -> list[Strip]:
        """Textual's own would look up borders, padding and filters for each line; there are none here."""
        strips = [self.render_line(y) for y in range(crop.y, crop.bottom)]
        if crop.x or crop.width != self.cells:
            return [strip.crop(crop.x, crop.right) for strip in strips]
        return strips

    def render_line(self, y: int) -> Strip:
        width = self.cells
        palette = self.palette
        if y >= len(self._lines):
            return Strip.blank(width, palette.base)
        line = self._lines[y]
        strip = self._strips.get(line)
        if strip is None or strip.cell_length != width:
            style = palette.style
            strip = Strip([Segment(seg.text, style(seg.role)) for seg in fit_line(line, width)], width)
            self._strips[line] = strip
        return strip

    def action_at(self, x: int, y: int) -> str:
        """The action of the segment at that place, "" when it has none."""
        if not 0 <= y < len(self._lines):
            return ""
        from k2tui.tui.lines import width

        at = 0
        for seg in self._lines[y]:
            at += width(seg.text)
            if x < at:
                return seg.action
        return ""

    def on_click(self, event: events.Click) -> None:
        action = self.action_at(event.x, event.y)
        if action:
            event.stop()
            self.post_message(self.Pressed(self, action))
