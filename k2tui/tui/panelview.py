"""A panel on the screen: asks its PANEL for a picture of the newest view and shows it."""

from __future__ import annotations

from textual import events
from textual.message import Message

from k2tui.tui.lines import Glyphs, Picture, Row, text_line
from k2tui.tui.panels import Panel
from k2tui.tui.view import View
from k2tui.tui.widgets.rowlist import RowList


class PanelView(RowList):
    """One panel. Its keys work while it has the focus and are posted as `Order`."""

    class Order(Message):
        def __init__(self, sender: PanelView, action: str, key: str) -> None:
            super().__init__()
            self.sender = sender
            self.action = action
            self.key = key

    def __init__(self, panel: Panel, glyphs: Glyphs, *, frame: str = "box") -> None:
        super().__init__(panel.title, frame=frame, glyphs=glyphs, selectable=panel.selectable, id=f"panel-{panel.name}")
        self.panel = panel
        self._view: View | None = None
        self._drawn_from: object = None

    def draw(self, view: View) -> None:
        """Draw when something that the panel needs has changed."""
        self._view = view
        width, height = self.inner
        if width <= 0 or height <= 0:
            return
        snap, panel = view.snap, self.panel
        inputs = (
            width,
            height,
            view.server_key,
            view.task_id,
            (view.gpu_sort, view.gpu_index, view.gpu_span),
            view.bench,
            view.trial_key,
            view.process,
            view.job_filter,
            view.job_sort,
            view.board,
            int(view.now_s) if panel.ticks else int(view.now_s) // 5,
            [getattr(snap, name) for name in panel.needs],
        )
        if inputs == self._drawn_from:
            return
        self._drawn_from = inputs
        try:
            picture = self.panel.draw(view, width, height)
        except Exception as err:  # one broken panel must not take the screen with it
            picture = Picture(rows=(_error_row(f"this panel failed: {type(err).__name__}: {err}"),))
            self.log(f"panel {self.panel.name}: {err!r}")
        self.set_picture(picture)

    def look_at(self, view: View) -> None:
        """The newest view, drawn when there is a size for it."""
        self._view = view

    def resized(self) -> None:
        if self._view is None:
            super().resized()
        else:
            self.draw(self._view)

    def on_key(self, event: events.Key) -> None:
        for key, action, _label in self.panel.keys:
            if event.key == key:
                event.stop()
                event.prevent_default()
                self.is_moved = True  # the next key means this row too
                self.post_message(self.Order(self, action, self.selected))
                return

    def action_activate(self) -> None:
        if self.panel.enter and self.selected:
            self.post_message(self.Order(self, self.panel.enter, self.selected))


def _error_row(text: str) -> Row:
    return Row("", text_line(text, "bad"))
