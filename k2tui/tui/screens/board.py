"""4: the task board as a list or as columns, what of it is shown, and the selected task in full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from textual.binding import Binding, BindingType

from k2tui.core.board import PRIORITIES, TaskStatus
from k2tui.tui.panelview import PanelView
from k2tui.tui.screens.deck import Deck, Slot
from k2tui.tui.view import BoardPick, View

COLUMNS = ("boardpending", "boardactive", "boarddone")
STATUSES = ("", "open", *(str(s) for s in TaskStatus))


class BoardScreen(Deck):
    NAME: ClassVar[str] = "board"
    PANELS: ClassVar[tuple[str, ...]] = ("board", *COLUMNS, "task")
    FOCUS: ClassVar[str] = "board"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "board_column(-1)", show=False),
        Binding("right", "board_column(1)", show=False),
        Binding("escape", "board_all", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._pick = BoardPick()
        self._has_columns = False
        self._column = COLUMNS[0]  # the one that had the focus last

    def place(self, width: int, height: int) -> Sequence[Slot]:
        if self._has_columns:
            detail = min(11, height // 3)
            third = width // 3
            return (
                Slot(COLUMNS[0], 0, 0, third, height - detail),
                Slot(COLUMNS[1], third, 0, third, height - detail),
                Slot(COLUMNS[2], 2 * third, 0, width - 2 * third, height - detail),
                Slot("task", 0, height - detail, width, detail),
            )
        if width >= 120:
            right = width * 2 // 5
            return (Slot("board", 0, 0, width - right, height), Slot("task", width - right, 0, right, height))
        detail = min(9, height // 3)
        return (Slot("board", 0, 0, width, height - detail), Slot("task", 0, height - detail, width, detail))

    def draw(self, view: View) -> None:
        super().draw(replace(view, board=self._pick, task_id=self.selected_key("board")))

    def _again(self) -> None:
        if self._view is not None:
            self.draw(self._view)

    @property
    def _front(self) -> str:
        """The panel whose selected task is meant."""
        return self._column if self._has_columns else "board"

    def panel_of(self, name: str, key: str) -> str:
        """In columns a task is found in the column of its status."""
        if name != "board" or not self._has_columns or self._view is None:
            return name
        task = next((t for t in self._view.snap.board.tasks if t.id == key), None)
        if task is None or task.status is TaskStatus.PENDING:
            return COLUMNS[0]
        return COLUMNS[1] if task.status is TaskStatus.IN_PROGRESS else COLUMNS[2]

    def selected_key(self, panel: str) -> str:
        return super().selected_key(self._front if panel == "board" else panel)

    def row_keys(self, panel: str) -> Sequence[str]:
        return super().row_keys(self._front if panel == "board" else panel)

    def go_to(self, panel: str, key: str) -> bool:
        if key and not self._pick.is_all and not super().go_to(panel, key):
            self.action_board_all()  # the filter hides it
        return super().go_to(panel, key)

    def on_row_list_moved(self) -> None:
        self.dashboard.draw_now()

    def on_descendant_focus(self) -> None:
        super().on_descendant_focus()
        focused = self.focused
        if isinstance(focused, PanelView) and focused.panel.name in COLUMNS and focused.panel.name != self._column:
            self._column = focused.panel.name
            self._again()

    # -- orders of the keys

    def action_board_view(self) -> None:
        """List or columns; the same task stays selected."""
        key = self.selected_key("board")
        self._has_columns = not self._has_columns
        self._arrange()
        self._again()
        self.go_to("board", key)

    def action_board_column(self, by: int) -> None:
        """The column at the left or right gets the keys."""
        if self._has_columns:
            at = COLUMNS.index(self._column)
            self.query_one(f"#panel-{COLUMNS[max(0, min(2, at + by))]}", PanelView).focus(scroll_visible=False)

    def _show(self, pick: BoardPick) -> None:
        self._pick = pick
        self._again()

    def action_board_filter(self) -> None:
        self.ask("show tasks with", self._pick.text, lambda text: self._show(replace(self._pick, text=text.strip())), replaces=True)

    def action_board_status(self) -> None:
        self._show(replace(self._pick, status=STATUSES[(STATUSES.index(self._pick.status) + 1) % len(STATUSES)]))

    def action_board_priority(self) -> None:
        names = ("", *PRIORITIES)
        self._show(replace(self._pick, priority=names[(names.index(self._pick.priority) + 1) % len(names)]))

    def action_board_all(self) -> None:
        """No filter."""
        self._show(BoardPick())
