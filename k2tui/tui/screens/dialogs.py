"""Small windows over a screen: choose, confirm, read, launch. They know rows and texts; what to do comes back as the result."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets._input import Input

from k2tui.errors import K2Error
from k2tui.tui.lines import Glyphs, Line, Picture, Row, Seg, clean, spread, text_line, width, wrap
from k2tui.tui.terminal import OnceScreen
from k2tui.tui.widgets.bar import Button, ButtonBar
from k2tui.tui.widgets.lines import Lines
from k2tui.tui.widgets.rowlist import RowList


class Dialog(OnceScreen, ModalScreen[Any]):
    """A centred window. The screen below stays as it is: no veil, so nothing there has to be sent again."""

    DEFAULT_CSS = """
    Dialog { align: center middle; background: transparent; }
    Dialog > Vertical { width: 90%; max-width: 100; height: auto; max-height: 90%; background: $background; }
    Dialog RowList { width: 1fr; }
    Dialog ButtonBar { height: 1; }
    Dialog Horizontal { height: 1; }
    Dialog Input { border: none; height: 1; padding: 0 1; width: 1fr; background: $surface; }
    Dialog Input:focus { border: none; background: $panel; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "cancel", show=False)]

    @property
    def glyphs(self) -> Glyphs:
        return self.app.glyphs  # type: ignore[attr-defined, no-any-return]

    def action_cancel(self) -> None:
        self.dismiss(None)

    def room(self) -> tuple[int, int]:
        """Cells that the window may take."""
        columns, lines = self.app.size
        return min(100, columns * 9 // 10), max(3, lines * 9 // 10)


@dataclass(frozen=True, slots=True)
class Choice:
    key: str
    label: str
    note: str = ""
    enabled: bool = True


class Chooser(Dialog):
    """A list with a search field: the command palette, themes. Dismisses with the chosen key, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,ctrl+k", "move(-1)", show=False),
        Binding("down,ctrl+j", "move(1)", show=False),
        Binding("pageup", "move(-10)", show=False),
        Binding("pagedown", "move(10)", show=False),
    ]

    def __init__(self, title: str, choices: Sequence[Choice], *, on_move: Callable[[str], None] | None = None, selected: str = "") -> None:
        super().__init__()
        self._title = title
        self._choices = list(choices)
        self._on_move = on_move
        self._selected = selected

    def compose(self) -> ComposeResult:
        with Vertical():
            field = Input(placeholder="type to search", compact=True)
            field.cursor_blink = False
            yield field
            rows = RowList(self._title, glyphs=self.glyphs)
            rows.styles.height = min(len(self._choices) + 2, self.room()[1] - 1)
            rows.can_focus = False
            yield rows

    def on_mount(self) -> None:
        self.query_one(Input).focus()
        self.call_after_refresh(lambda: self._fill(self.query_one(Input).value))

    def _fill(self, query: str) -> None:
        rows = self.query_one(RowList)
        cells = rows.inner[0]
        found = sorted(
            ((score, n, c) for n, c in enumerate(self._choices) if (score := match(query, f"{c.label} {c.note}")) is not None),
            key=lambda item: (item[0], item[1]),
        )
        lines = [
            Row(c.key, spread([Seg(c.label, "" if c.enabled else "faint")], [Seg(c.note, "dim" if c.enabled else "faint")], cells))
            for _s, _n, c in found
        ] or [Row("", text_line("nothing matches", "warn"))]
        rows.set_picture(Picture(tuple(lines)))
        if not query and self._selected:
            rows.select(self._selected)
        elif found:
            rows.select(found[0][2].key)

    def on_resize(self) -> None:
        if self.is_mounted:
            self._fill(self.query_one(Input).value)

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        self._selected = ""
        self._fill(event.value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.dismiss(self.query_one(RowList).selected or None)

    def on_row_list_activated(self, event: RowList.Activated) -> None:
        event.stop()
        self.dismiss(event.key)

    def on_row_list_moved(self, event: RowList.Moved) -> None:
        event.stop()
        if self._on_move is not None:
            self._on_move(event.key)

    def action_move(self, by: int) -> None:
        self.query_one(RowList).action_move(by)


def match(query: str, text: str) -> int | None:
    """How well every word of the query is found in the text: 0 best, None = not at all. Letters in order count last."""
    text = text.lower()
    score = 0
    for word in query.lower().split():
        at = text.find(word)
        if at >= 0:
            score += 0 if at == 0 or text[at - 1] == " " else 2
            continue
        pos = 0
        for letter in word:
            pos = text.find(letter, pos) + 1
            if not pos:
                return None
        score += 10
    return score


class Confirm(Dialog):
    """Asks before something that cannot be undone; only `y` (or the button) says yes. Dismisses with True or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "yes", show=False),
        Binding("n,q", "cancel", show=False),
    ]

    def __init__(self, title: str, lines: Sequence[Line], yes: str, no: str = "no, go back") -> None:
        super().__init__()
        self._title = title
        self._lines = list(lines)
        self._yes = yes
        self._no = no

    def compose(self) -> ComposeResult:
        with Vertical():
            rows = RowList(self._title, glyphs=self.glyphs, selectable=False)
            rows.styles.height = min(len(self._lines) + 2, self.room()[1] - 1)
            yield rows
            yield ButtonBar()

    def on_mount(self) -> None:
        self.query_one(RowList).set_picture(Picture(tuple(Row("", x) for x in self._lines)))
        bar = self.query_one(ButtonBar)
        bar.set_buttons((Button("n", self._no, "no"), Button("y", self._yes, "yes")))
        bar.focus()

    def on_lines_pressed(self, event: Lines.Pressed) -> None:
        event.stop()
        self.dismiss(True if event.action == "yes" else None)

    def action_yes(self) -> None:
        self.dismiss(True)


class Reader(Dialog):
    """A text to read, scroll and copy."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,enter", "cancel", show=False),
        Binding("y", "copy", show=False),
    ]

    def __init__(self, title: str, lines: Sequence[Line], *, copy: str = "", note: str = "Esc closes", also: tuple[str, str] = ("", "")) -> None:
        """also: one more key and its word; the window is dismissed with the word then."""
        super().__init__()
        self._also = also
        self._title = title
        self._lines = list(lines)
        self._copy = copy
        self._note = note

    def compose(self) -> ComposeResult:
        with Vertical():
            rows = RowList(self._title, glyphs=self.glyphs, selectable=False)
            rows.styles.height = min(len(self._lines) + 2, self.room()[1])
            yield rows

    def on_mount(self) -> None:
        rows = self.query_one(RowList)
        note = [Seg("y", "key"), Seg(" copies  ", "dim")] if self._copy else []
        if self._also[0]:
            note += [Seg(self._also[0], "key"), Seg(f" {self._also[1]}  ", "dim")]
        rows.set_picture(Picture(tuple(Row("", x) for x in self._lines), note=(*note, Seg(self._note, "dim"))))
        rows.focus()

    def on_key(self, event: events.Key) -> None:
        if event.key == self._also[0]:
            event.stop()
            self.dismiss(self._also[1])

    def action_copy(self) -> None:
        if self._copy:
            self.app.copy_text(self._copy)  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Field:
    name: str
    label: str
    value: str = ""
    help: str = ""
    numeric: bool = False


class Launch(Dialog):
    """A form that shows the exact command before it runs. choices: profiles (may be empty); fields: texts.

    Dismisses with the parameters as a mapping of texts (the choice under `choice_name`), or None.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "run", show=False),
        Binding("f5,ctrl+r", "run", show=False),
        Binding("ctrl+y", "copy", show=False),
        Binding("down", "focus_next", show=False),
        Binding("up", "focus_previous", show=False),
    ]
    DEFAULT_CSS = """
    Launch #argv { height: 7; }
    Launch #fields { height: auto; border: round $foreground 30%; border-title-color: $foreground; border-title-style: bold; }
    Launch #fields.ascii { border: ascii $foreground 30%; }
    """

    def __init__(
        self,
        title: str,
        preview: Callable[[Mapping[str, str]], Awaitable[Sequence[str]]],
        *,
        choices: Sequence[Choice] = (),
        choice_name: str = "",
        selected: str = "",
        fields: Sequence[Field] = (),
        run_label: str = "Run",
        note: str = "",
    ) -> None:
        """note: a sentence above the command that stays as long as the form."""
        super().__init__()
        self._title = title
        self._preview = preview
        self._choices = list(choices)
        self._choice_name = choice_name
        self._selected = selected
        self._fields = list(fields)
        self._run_label = run_label
        self._note = note
        self._argv: Sequence[str] = ()
        self._error: K2Error | None = None

    def compose(self) -> ComposeResult:
        with Vertical():
            if self._choices:
                rows = RowList(self._title, glyphs=self.glyphs, id="choices")
                rows.styles.height = min(len(self._choices), max(3, self.room()[1] - 12 - len(self._fields))) + 2
                yield rows
            if self._fields:
                label_cells = max(width(f.label) for f in self._fields) + 3
                with Vertical(id="fields") as room:
                    room.border_title = self._title
                    room.set_class(self.glyphs.ascii, "ascii")
                    for field in self._fields:
                        with Horizontal():
                            label = Lines(id=f"label-{field.name}")
                            label.styles.width = label_cells
                            yield label
                            box = Input(field.value, id=f"field-{field.name}", placeholder=field.help, compact=True)
                            box.cursor_blink = False
                            yield box
            yield RowList("This command", glyphs=self.glyphs, selectable=False, id="argv")
            yield ButtonBar()

    def on_mount(self) -> None:
        self._mark_fields()
        self.query_one(ButtonBar).set_buttons(
            (Button("Enter", self._run_label, "run"), Button("^y", "Copy command", "copy"), Button("Esc", "Back", "cancel"))
        )
        first: Any = self.query_one("#choices", RowList) if self._choices else self.query(Input).first(Input) if self._fields else self.query_one(ButtonBar)
        first.focus()
        self.call_after_refresh(self._fill)

    def _fill(self) -> None:
        if self._choices:
            rows = self.query_one("#choices", RowList)
            cells = rows.inner[0]
            rows.set_picture(
                Picture(tuple(Row(c.key, spread([Seg(c.label, "bold")], [Seg(c.note, "dim")], cells)) for c in self._choices))
            )
            rows.select(self._selected)
        self._ask_preview()

    def values(self) -> dict[str, str]:
        """The form as it stands; empty fields are left out."""
        out = {f.name: self.query_one(f"#field-{f.name}", Input).value.strip() for f in self._fields}
        out = {k: v for k, v in out.items() if v}
        if self._choices:
            out[self._choice_name] = self.query_one("#choices", RowList).selected
        return out

    def _ask_preview(self) -> None:
        async def work() -> None:
            try:
                self._argv, self._error = await self._preview(self.values()), None
            except K2Error as err:
                self._argv, self._error = (), err
            self._show_argv()

        self.run_worker(work, exclusive=True, group="preview", exit_on_error=False)

    def _show_argv(self) -> None:
        rows = self.query_one("#argv", RowList)
        cells = rows.inner[0]
        self._mark_fields()
        lines: list[Line]
        if self._error is not None:
            lines = [text_line(t, "bad") for t in wrap(self._error.message, cells)]
            lines += [text_line(t, "dim") for t in wrap(self._error.hint, cells)] if self._error.hint else []
        else:
            lines = [text_line(t, "warn") for t in wrap(self._note, cells)] if self._note else []
            lines += [text_line(t) for t in wrap(shell_text(self._argv), cells)]
        rows.set_picture(Picture(tuple(Row("", x) for x in lines), note=(Seg("^y", "key"), Seg(" copies", "dim"))))

    def _mark_fields(self) -> None:
        """The field that the error is about stands out."""
        words = self._error.message.replace("--", " ").replace("-", "_").replace(":", " ").split() if self._error is not None else []
        for field in self._fields:
            label = (Seg("!", "bad"), Seg(field.label, "bad bold")) if field.name in words else (Seg(f" {field.label}", "dim"),)
            self.query_one(f"#label-{field.name}", Lines).show([label])

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        self._ask_preview()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.action_run()

    def on_row_list_moved(self, event: RowList.Moved) -> None:
        event.stop()
        self._ask_preview()

    def on_row_list_activated(self, event: RowList.Activated) -> None:
        event.stop()
        self.action_run()

    def on_lines_pressed(self, event: Lines.Pressed) -> None:
        event.stop()
        {"run": self.action_run, "copy": self.action_copy, "cancel": self.action_cancel}[event.action]()

    def on_resize(self, event: events.Resize) -> None:
        if self.is_mounted:
            self.call_after_refresh(self._show_argv)

    def action_run(self) -> None:
        if self._error is not None:
            self.app.bell()
            return
        self.dismiss(self.values())

    def action_copy(self) -> None:
        self.app.copy_text(shell_text(self._argv))  # type: ignore[attr-defined]


def shell_text(argv: Sequence[str]) -> str:
    """The command as one line for a POSIX shell."""
    import shlex

    return clean(shlex.join(argv))
