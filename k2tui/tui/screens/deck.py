"""A screen of panels: tabs, panels placed by size, buttons, keys. Each screen file says only where its panels go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple, cast

from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.reactive import Reactive
from textual.widget import Widget

from k2tui.tui import panels
from k2tui.tui.lines import Line, Seg, fit_line, line_width, spread, text_line, wrap
from k2tui.tui.panelview import PanelView
from k2tui.tui.terminal import OnceScreen
from k2tui.tui.view import STATE_ROLES, View
from k2tui.tui.widgets.bar import Bar, Button, ButtonBar
from k2tui.tui.widgets.lines import Lines
from k2tui.tui.widgets.logview import LogView
from k2tui.tui.widgets.rowlist import RowList

if TYPE_CHECKING:
    from k2tui.tui.app import Dashboard

LEAST = (80, 24)
KEY_SIGNS = {
    "space": "Space",
    "exclamation_mark": "!",
    "slash": "/",
    "ampersand": "&",
    "question_mark": "?",
    "left_square_bracket": "[",
    "right_square_bracket": "]",
    "plus": "+",
    "minus": "-",
    "enter": "Enter",
}


class Slot(NamedTuple):
    """Where a panel (or "log") goes. frame: "box", "rule" or "none"."""

    name: str
    x: int
    y: int
    width: int
    height: int
    frame: str = "box"


class Deck(OnceScreen):
    """Subclasses set NAME, PANELS (all that may be shown, in focus order) and `place(width, height)`."""

    NAME: ClassVar[str] = ""
    PANELS: ClassVar[tuple[str, ...]] = ()
    FOCUS: ClassVar[str] = ""  # the panel that has the focus at first
    HAS_LOG: ClassVar[bool] = False
    HINTS: ClassVar[tuple[tuple[str, str, str], ...]] = ()  # (key, word, action) shown first in the key line
    BINDINGS: ClassVar[list[BindingType]] = []

    focused: Reactive[Widget | None] = Reactive(None, repaint=False)  # the two panels paint themselves; not all 40 lines for that

    DEFAULT_CSS = """
    Deck { layers: base top; overflow: hidden; }
    Deck > Lines { position: absolute; }
    """

    def place(self, width: int, height: int) -> Sequence[Slot]:
        """Slots for the room between tabs and buttons: width x height cells, origin at its top left."""
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        self._view: View | None = None
        self._zoomed = ""
        self._slots: dict[str, Slot] = {}
        self.is_small = False

    @property
    def dashboard(self) -> Dashboard:
        return cast("Dashboard", self.app)

    # -- building and placing

    def compose(self) -> ComposeResult:
        glyphs = self.dashboard.glyphs
        # kept here: a query a frame would cost more than the drawing
        self._tabs, self._keys, self._buttons = Bar(id="tabs"), Bar(id="keys"), ButtonBar(id="buttons")
        self._panels = [PanelView(panels.get(name), glyphs) for name in self.PANELS]
        self._small = Lines(id="small")
        yield self._tabs
        yield from self._panels
        if self.HAS_LOG:
            yield LogView(glyphs=glyphs, id="panel-log")
        yield self._buttons
        yield self._keys
        yield self._small

    def on_mount(self) -> None:
        self._arrange()
        focus = self.FOCUS or next((n for n in self.PANELS if panels.get(n).selectable), "")
        if focus:
            self.query_one(f"#panel-{focus}", Widget).focus(scroll_visible=False)

    def on_resize(self, event: events.Resize) -> None:
        self._arrange()

    def _arrange(self) -> None:
        width, height = self.app.size
        self.is_small = width < LEAST[0] or height < LEAST[1]
        small = self._small
        small.display = self.is_small
        if self.is_small:
            for child in self.children:
                child.display = child is small
            _put(small, 0, 0, width, height)
            self._draw_small()
            return
        inner = height - 3
        slots = self.place(width, inner)
        if self._zoomed:
            slots = [Slot(self._zoomed, 0, 0, width, inner)]
        self._slots = {slot.name: slot for slot in slots}
        _put(self._tabs, 0, 0, width, 1)
        _put(self._buttons, 0, height - 2, width, 1)
        _put(self._keys, 0, height - 1, width, 1)
        for widget in self.query(RowList):
            if not (widget.id or "").startswith("panel-"):
                continue
            slot = self._slots.get((widget.id or "").removeprefix("panel-"))
            widget.display = slot is not None
            if slot is not None:
                widget.frame = slot.frame
                widget.can_focus = slot.frame != "none"  # a bare line has no place to show that it has the focus
                _put(widget, slot.x, slot.y + 1, slot.width, slot.height)
        if self._view is not None:
            self.call_after_refresh(self.draw, self._view)

    def zoom(self) -> None:
        """The focused panel fills the screen, or goes back to its place."""
        if self._zoomed:
            self._zoomed = ""
        else:
            focused = self.focused
            if not isinstance(focused, RowList) or not (focused.id or "").startswith("panel-"):
                return
            self._zoomed = (focused.id or "").removeprefix("panel-")
        self._arrange()

    # -- drawing

    def draw(self, view: View) -> None:
        """Show the newest view: called by the app, at most a few times a second."""
        self._view = view
        if not self.is_mounted:
            return
        if self.is_small:
            self._draw_small()
            return
        width, height = self.app.size
        for panel in self._panels:
            panel.look_at(view)
        if not self._zoomed and list(self.place(width, height - 3)) != list(self._slots.values()):
            self._arrange()  # another number of GPUs, phases, jobs: other heights; panels draw when they have them
            return
        self._tabs.show([tab_line(view, self.NAME, self.dashboard.settings.banner, width)])
        for panel in self._panels:
            if panel.display:
                panel.draw(view)
        self._buttons.set_buttons(self.dashboard.buttons())
        self.draw_keys()
        if self.HAS_LOG:
            self.draw_log(view)

    def draw_log(self, view: View) -> None:
        self.query_one(LogView).poll()

    def draw_keys(self) -> None:
        width = self.app.size.width
        self._keys.show([key_line(self._hints(), width, goes_back="q" in self._bindings.key_to_bindings)])

    def _hints(self) -> list[tuple[str, str, str]]:
        hints: list[tuple[str, str, str]] = []
        focused = self.focused
        if isinstance(focused, PanelView):
            if focused.panel.enter.startswith("open") and focused.selected:
                hints.append(("Enter", "open", ""))
            if focused.selected or focused.panel.name not in ("gpus", "processes"):  # nothing to sort or to end
                hints += [(KEY_SIGNS.get(k, k), label, order_action(focused.panel.name, a)) for k, a, label in focused.panel.keys]
        elif isinstance(focused, LogView):
            hints += [("/", "search", ""), ("&", "filter", ""), ("e", "error", ""), ("f", "follow", ""), ("w", "wrap", "")]
        named = {key for key, _word, _action in hints}
        return [*hints, *(h for h in self.HINTS if h[0] not in named)]

    def _draw_small(self) -> None:
        width, height = self.app.size
        view = self._view
        lines: list[Line] = []
        server = view.server if view is not None else None
        if server is not None and view is not None:
            load = server.load
            lines.append((Seg(f"{view.state_mark(load)} {load.state.value.upper()} ", f"{STATE_ROLES[load.state]} bold"), Seg(server.title)))
        lines += [text_line(t, "warn") for t in wrap(f"The terminal is {width}x{height}; the dashboard needs {LEAST[0]}x{LEAST[1]}.", width)]
        lines += [text_line(t, "dim") for t in wrap("Enlarge it, or press q. In a small window: k2tui status.", width)]
        self._small.show([fit_line(x, width) for x in lines[:height]])

    # -- asking for a text

    def ask(self, label: str, initial: str, done: Callable[[str], None], *, replaces: bool = False) -> None:
        """Ask for a text at the bottom. replaces: typing takes the place of `initial`."""
        from k2tui.tui.widgets.prompt import Prompt

        if self.query(Prompt):
            return
        before = self.focused

        def finish(text: str) -> None:
            if before is not None:
                before.focus(scroll_visible=False)
            done(text)

        prompt = Prompt(label, initial, finish, replaces=replaces)
        self.mount(prompt)
        self.dashboard.hold_keys(prompt)

    def on_log_view_asked(self, event: LogView.Asked) -> None:
        event.stop()
        view = event.sender
        if event.what == "search":
            self.ask("search /", event.initial, view.search, replaces=True)
        else:
            self.ask("only lines with", event.initial, view.set_filter, replaces=True)

    def on_descendant_focus(self) -> None:
        if not self.is_small:
            self.draw_keys()

    def selected_key(self, panel: str) -> str:
        """Key of the selected row of that panel, "" when it is not here."""
        found = self.query(f"#panel-{panel}")
        return found.first(RowList).selected if found else ""

    def row_keys(self, panel: str) -> Sequence[str]:
        """Keys of the rows that this panel shows, () when it is not here."""
        found = self.query(f"#panel-{panel}")
        return [row.key for row in found.first(RowList).picture.rows if row.key] if found else ()

    def panel_of(self, name: str, key: str) -> str:
        """The panel that shows that row of `name` here."""
        return name

    def go_to(self, panel: str, key: str) -> bool:
        """Select that row and give its panel the keys; False when it is not (yet) shown."""
        found = self.query(f"#panel-{self.panel_of(panel, key)}")
        if not found or key not in [row.key for row in found.first(RowList).picture.rows]:
            return False
        rows = found.first(RowList)
        rows.select(key)
        rows.focus(scroll_visible=False)
        rows.post_message(RowList.Moved(rows, key))
        return True


def order_action(panel: str, action: str) -> str:
    """What a click on the hint of a panel's key (or its palette entry) runs."""
    return action if action.startswith("screen.") else f"panel_order('{panel}', '{action}')"


def _put(widget: Widget, x: int, y: int, width: int, height: int) -> None:
    widget.display = True
    styles = widget.styles
    styles.offset = (x, y)
    styles.width = max(1, width)
    styles.height = max(1, height)


def tab_line(view: View, active: str, banner: str, width: int) -> Line:
    """Name, tabs, and at the right: demo mark, host, time of the picture."""
    from k2tui.tui import format as fmt

    short = width < 100
    right: list[Seg] = []
    if view.snap.is_demo:
        right.append(Seg(" DEMO ", "text bold on-warn"))
    if banner:
        right.append(Seg(f" {banner} ", "text bold on-warn"))
    host = view.snap.host.hostname if view.snap.host is not None else ""
    if host and not short:
        right.append(Seg(f"  {host}", "dim"))
    right.append(Seg(f" {fmt.clock(view.now_s)[:5]} ", "dim"))
    # without room titles shorten, then the clock leaves, then only the tab in front has a title
    left: list[Seg] = []
    for words in ("all", "short", "one"):
        left = _tabs(active, words)
        for tail in (right, right[:-1]):
            if (tail or words == "one") and line_width(left) + line_width(tail) <= width:
                return spread(left, tail, width)
    return spread(left, right, width)


_SHORT = {"Overview": "Over", "Server": "Serv", "Pipeline": "Pipe"}


def _tabs(active: str, words: str) -> list[Seg]:
    """words: "all", "short", or "one" (only the tab in front has a title)."""
    from k2tui.tui.keys import TABS

    out: list[Seg] = [Seg(" k2tui ", "accent bold")]
    for key, title, name in TABS:
        on = name == active
        word = title if words == "all" else _SHORT.get(title, title) if words == "short" or on else ""
        out.append(Seg(f" {key} ", ("key bold" if not on else "text bold") + (" on-tab" if on else ""), f"show('{name}')"))
        if word:
            out.append(Seg(f"{word} ", "text bold on-tab" if on else "dim", f"show('{name}')"))
    return out


def key_line(hints: Sequence[tuple[str, str, str]], width: int, *, goes_back: bool = False) -> Line:
    """What keys do here, then the ones that always work. goes_back: q leaves this screen, not the program."""
    leave = ("q", "back", "back") if goes_back else ("q", "quit", "leave")
    always = (("Tab", "panel", ""), ("?", "help", "help"), ("^p", "commands", "palette"), leave)
    tail: list[Seg] = []
    for key, word, action in always:
        tail += [Seg(f" {key}", "key", action), Seg(f" {word} ", "dim", action)]
    line: list[Seg] = []
    room = width - line_width(tail) - 1
    for key, word, action in hints:
        group = [Seg(f" {key}", "key", action), Seg(f" {word} ", "dim", action)]
        if line_width(line) + line_width(group) > room:
            break
        line += group
    return spread(line, tail, width)


__all__ = ["Button", "Deck", "Slot", "key_line", "tab_line"]
