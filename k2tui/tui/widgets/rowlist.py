"""A framed list of rows with a pinned header, selection and scrolling. Knows rows and keys, not what they mean."""

from __future__ import annotations

import re
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.reactive import reactive

from k2tui.tui.lines import UNICODE, Glyphs, Line, Picture, Row, Seg, fit, fit_line, line_width
from k2tui.tui.widgets.lines import Lines

FRAMES = ("box", "rule", "none")


class RowList(Lines, can_focus=True):
    """Shows a Picture. frame: "box" (border), "rule" (a title line only) or "none"."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup,ctrl+b", "page(-1)", show=False),
        Binding("pagedown,ctrl+f", "page(1)", show=False),
        Binding("home,g", "edge(-1)", show=False),
        Binding("end,G", "edge(1)", show=False),
        Binding("enter", "activate", show=False),
    ]

    selected: reactive[str] = reactive("", init=False, repaint=False)
    """Key of the selected row; "" when none is."""

    class Activated(Message):
        """Enter, or a second click, on a row."""

        def __init__(self, sender: RowList, key: str) -> None:
            super().__init__()
            self.sender = sender
            self.key = key

    class Moved(Message):
        """Another row is selected."""

        def __init__(self, sender: RowList, key: str) -> None:
            super().__init__()
            self.sender = sender
            self.key = key

    def __init__(
        self,
        title: str = "",
        *,
        frame: str = "box",
        glyphs: Glyphs = UNICODE,
        selectable: bool = True,
        id: str | None = None,
        classes: str | None = None,
    ) -> None:
        super().__init__(id=id, classes=classes)
        self.title = title
        self.frame = frame
        self.glyphs = glyphs
        self.selectable = selectable
        self.picture = Picture()
        self._top = 0
        self._index = 0
        self.is_moved = False  # by the user: until then the selection follows what the picture prefers

    # -- what there is to show

    @property
    def inner(self) -> tuple[int, int]:
        """(width, height) for rows and header."""
        width, height = self.cells, self.rows
        if self.frame == "box":
            return max(0, width - 4), max(0, height - 2)
        if self.frame == "rule":
            return max(0, width - 2), max(0, height - 1)
        return max(0, width - 2), height

    def set_picture(self, picture: Picture) -> None:
        self.picture = picture
        keys = [row.key for row in picture.rows]
        if self.selectable and any(keys):
            if not self.is_moved and picture.prefer in keys and picture.prefer:
                self._index = keys.index(picture.prefer)
                self.selected = picture.prefer
            elif self.selected in keys and self.selected:
                self._index = keys.index(self.selected)
            else:
                self._index = min(max(0, self._index), len(keys) - 1)
                while self._index < len(keys) - 1 and not keys[self._index]:
                    self._index += 1
                self.selected = keys[self._index]
        elif self.selected:
            self.selected = ""
        self._compose_lines()

    def select(self, key: str) -> None:
        """Select the row of that key when there is one."""
        for index, row in enumerate(self.picture.rows):
            if row.key == key and key:
                self._index = index
                self.selected = key
                self.is_moved = True
                self._compose_lines()
                return

    # -- drawing

    @property
    def _header_is_in_title(self) -> bool:
        """Where lines are few, the title's rule carries the column names."""
        return self.frame == "rule" and self.picture.header is not None and self.inner[1] <= 3

    @property
    def _header_height(self) -> int:
        return 1 if self.picture.header is not None and not self._header_is_in_title else 0

    def _visible_count(self) -> int:
        return max(0, self.inner[1] - self._header_height)

    def _compose_lines(self) -> None:
        width, height = self.cells, self.rows
        if not width or not height:
            return
        rows = self.picture.rows
        room = self._visible_count()
        if self.selectable and self.selected:
            if self._index < self._top:
                self._top = self._index
            elif self._index >= self._top + room:
                self._top = self._index - room + 1
        self._top = max(0, min(self._top, len(rows) - room))
        body: list[Line] = []
        if self._header_height and self.picture.header is not None and self.inner[1] > 0:
            body.append(fit_line(self.picture.header, self.inner[0]))
        for index in range(self._top, min(len(rows), self._top + room)):
            row = rows[index]
            line = fit_line(row.line, self.inner[0])
            if self.selectable and row.key and row.key == self.selected and index == self._index:
                line = self._marked(line)
            body.append(line)
        body = body[: self.inner[1]]
        self.show(self._framed(body))

    def _marked(self, line: Line) -> Line:
        role = "on-sel" if self.has_focus else "on-line"
        return tuple(Seg(seg.text, f"{seg.role} {role}".strip(), seg.action) for seg in line)

    def _framed(self, body: list[Line]) -> list[Line]:
        width, height = self.cells, self.rows
        g = self.glyphs
        edge = "accent" if self.has_focus else "rule"
        inner_width, inner_height = self.inner
        blank = (Seg(" " * inner_width),)
        body = body + [blank] * (inner_height - len(body))
        if self.frame == "none":
            return [(Seg(" "), *line, Seg(" ")) for line in body]
        more_above, more_below = self._top > 0, self._top + self._visible_count() < len(self.picture.rows)
        title = self._title_line(edge)
        if self.frame == "rule":
            return [title] + [(Seg(" "), *line, Seg(" ")) for line in body]
        thumb = self._thumb(inner_height) if more_above or more_below else range(0)
        out = [title]
        for y, line in enumerate(body):
            right = Seg(g.thumb, "accent") if y in thumb else Seg(g.v, edge)
            out.append((Seg(g.v, edge), Seg(" "), *line, Seg(" "), right))
        if height > 1:
            out.append((Seg(g.corners[2] + g.h * (width - 2) + g.corners[3], edge),))
        return out

    def _title_line(self, edge: str) -> Line:
        width = self.cells
        g = self.glyphs
        box = self.frame == "box"
        title = self.picture.title or self.title
        note = list(self.picture.note)
        if self._header_is_in_title and self.picture.header is not None:
            return self._header_title(title, edge)
        hidden = len(self.picture.rows) - self._visible_count()
        if hidden > 0 and self.frame == "rule":
            note += [Seg(f"  {self._top + 1}-{min(len(self.picture.rows), self._top + self._visible_count())}", "faint")]
        left: list[Seg] = [Seg((g.corners[0] if box else g.h) + g.h, edge)]
        if title:
            left += [Seg(f" {title} ", "accent bold" if self.has_focus else "title bold")]
        right: list[Seg] = [Seg(" "), *note, Seg(" ")] if note and line_width(note) else []
        right.append(Seg(g.h + (g.corners[1] if box else g.h), edge))
        room = width - line_width(left) - line_width(right)
        if room < 0:
            right = [Seg(g.h + (g.corners[1] if box else g.h), edge)]
            room = width - line_width(left) - line_width(right)
        if room < 0:
            return fit_line((Seg(fit(title, width), "title bold"),), width)
        return (*left, Seg(g.h * room, edge), *right)

    def _header_title(self, title: str, edge: str) -> Line:
        """The rule with the column names in it, above their columns."""
        width, g = self.cells, self.glyphs
        role = "accent bold" if self.has_focus else "title bold"
        left = fit_line((Seg(g.h, edge), Seg(f" {title} ", role)), min(width, len(title) + 3))
        start = line_width(left)
        text = " " + "".join(seg.text for seg in fit_line(self.picture.header or (), self.inner[0])) + " "
        out: list[Seg] = list(left)
        at = start
        for word in re.finditer(r"\S+(?: \S+)*", text):
            if word.start() <= at:
                continue
            out += [Seg(g.h * (word.start() - 1 - at), edge), Seg(f" {word[0]} ", "dim")]
            at = word.end() + 1
        out.append(Seg(g.h * max(0, width - at), edge))
        return fit_line(out, width)

    def _thumb(self, height: int) -> range:
        total = max(1, len(self.picture.rows))
        room = max(1, self._visible_count())
        length = max(1, round(height * room / total))
        start = round((height - length) * self._top / max(1, total - room))
        return range(start, start + length)

    # -- events

    def on_resize(self, event: events.Resize) -> None:
        super().on_resize(event)
        self.resized()

    def resized(self) -> None:
        """Lines for the new size."""
        self._compose_lines()

    def focus_changed(self) -> None:
        self._compose_lines()

    def _row_at(self, y: int) -> Row | None:
        y -= 0 if self.frame == "none" else 1
        y -= self._header_height
        index = self._top + y
        if 0 <= y < self._visible_count() and index < len(self.picture.rows):
            return self.picture.rows[index]
        return None

    def on_click(self, event: events.Click) -> None:
        super().on_click(event)
        row = self._row_at(event.y)
        event.stop()
        if row is None or not row.key or not self.selectable:
            return
        again = row.key == self.selected and event.chain >= 2
        self._go_to(self.picture.rows.index(row))
        if again:
            self.post_message(self.Activated(self, row.key))

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self._scroll(-3)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self._scroll(3)

    def _scroll(self, by: int) -> None:
        if self.selectable and self.selected:
            self.action_move(by)
            return
        self._top = max(0, min(self._top + by, len(self.picture.rows) - self._visible_count()))
        self._compose_lines()

    def _go_to(self, index: int) -> None:
        rows = self.picture.rows
        if not rows:
            return
        index = max(0, min(index, len(rows) - 1))
        step = 1 if index >= self._index else -1
        while 0 <= index < len(rows) and not rows[index].key:
            index += step
        if not 0 <= index < len(rows):
            return
        self._index = index
        self.is_moved = True
        moved = self.selected != rows[index].key
        self.selected = rows[index].key
        self._compose_lines()
        if moved:
            self.post_message(self.Moved(self, self.selected))

    def action_move(self, by: int) -> None:
        if self.selectable and self.selected:
            self._go_to(self._index + by)
        else:
            self._scroll(by)

    def action_page(self, by: int) -> None:
        self.action_move(by * max(1, self._visible_count() - 1))

    def action_edge(self, side: int) -> None:
        if self.selectable and self.selected:
            self._go_to(0 if side < 0 else len(self.picture.rows) - 1)
        else:
            self._scroll(side * len(self.picture.rows))

    def action_activate(self) -> None:
        if self.selected:
            self.post_message(self.Activated(self, self.selected))
