"""The only file that touches Textual's private parts: what goes to the terminal, and what happens when it freezes or goes.

Laws kept here (each has a test on a real pty):
- Only cells that differ from what the terminal already shows are sent.
- A frame is dropped while the one before it is still being written; the newest state is drawn once the terminal has caught up.
- Nothing on the event loop ever waits for the terminal.
- End of input, an I/O error or SIGHUP ends the program within a second; it never spins.
- The mouse reports clicks, drags and the wheel, not every move (each move would be traffic over SSH).

K2TUI_PLAIN_PAINT=1 turns the cell comparison off (to see whether a picture fault is ours).
"""

from __future__ import annotations

import asyncio
import os
import selectors
import signal
import sys
import threading
from codecs import getincrementaldecoder
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from rich.cells import get_character_cell_size
from rich.color import ColorSystem
from rich.style import Style
from textual import events
from textual._compositor import ChopsUpdate, LayoutUpdate
from textual._xterm_parser import XTermParser
from textual.app import App
from textual.await_complete import AwaitComplete
from textual.drivers.linux_driver import LinuxDriver
from textual.message import Message
from textual.message_pump import MessagePump
from textual.screen import Screen
from textual.strip import Strip
from textual.widget import AwaitMount

SYNC_START, SYNC_END = "\x1b[?2026h", "\x1b[?2026l"
GAP = 5  # unchanged cells that are cheaper to send again than to jump over
HANGUP_GRACE_S = 0.7
EXIT_HANGUP = 129
SCREEN_CHANGE_S = 0.008
KEY_PATIENCE_S, OPEN_PATIENCE_S = 0.3, 1.0
_ATTRIBUTE_CODES = ("1", "2", "3", "4", "5", "6", "7", "8", "9", "21", "51", "52", "53")

Cell = tuple[str, Style | None]


class Painter:
    """Remembers what the terminal shows and turns strips into the shortest text that brings it up to date."""

    def __init__(self, color_system: ColorSystem = ColorSystem.TRUECOLOR, *, no_color: bool = False) -> None:
        self._color_system = color_system
        self._no_color = no_color
        self._size = (0, 0)
        self._rows: list[list[Cell | None]] = []
        self._codes: dict[Style, tuple[str, str, str]] = {}

    def forget(self) -> None:
        """The terminal may show anything now: everything is sent again."""
        self._size = (0, 0)

    def resize(self, columns: int, lines: int) -> None:
        if self._size != (columns, lines):
            self._size = (columns, lines)
            self._rows = [[None] * columns for _ in range(lines)]

    def paint(self, parts: Iterable[tuple[int, int, Strip]]) -> str:
        """parts: (y, x, strip). Returns the text to send, "" when the terminal already shows all of it."""
        out: list[str] = []
        pen: tuple[str, str, str] | None = None
        columns, lines = self._size
        for y, x, strip in parts:
            if not 0 <= y < lines:
                continue
            row = self._rows[y]
            new = self._cells(strip, columns - x)
            if row[x : x + len(new)] == new:
                continue
            for start, stop in self._runs(row, new, x):
                out.append(f"\x1b[{y + 1};{x + start + 1}H")
                previous: Style | object | None = self
                jump = False
                for at in range(start, stop):
                    text, style = new[at]
                    if not text:
                        continue  # second half of a wide character
                    if jump:
                        out.append(f"\x1b[{x + at + 1}G")
                        jump = False
                    if style is not previous:
                        codes = self._codes_of(style)
                        if codes != pen:
                            out.append(self._switch(pen, codes))
                            pen = codes
                        previous = style
                    out.append(text)
                    # terminals disagree about wide and combining characters: say where the next one goes
                    jump = len(text) > 1 or (text > "\u2fff" and not "\ue000" <= text <= "\uf8ff")
                row[x + start : x + stop] = new[start:stop]
        if not out:
            return ""
        return "".join(out) + "\x1b[0m"

    @staticmethod
    def _cells(strip: Strip, room: int) -> list[Cell]:
        cells: list[Cell] = []
        for text, style, control in strip:
            if control:
                continue
            if text.isascii():
                cells.extend([(ch, style) for ch in text])
                continue
            for ch in text:
                if ch < "\u0300":
                    cells.append((ch, style))
                    continue
                size = get_character_cell_size(ch)
                if size == 0:
                    if cells and cells[-1][0]:
                        cells[-1] = (cells[-1][0] + ch, cells[-1][1])
                    elif len(cells) > 1:
                        cells[-2] = (cells[-2][0] + ch, cells[-2][1])
                    continue
                cells.append((ch, style))
                if size == 2:
                    cells.append(("", style))
        return cells[:room] if len(cells) > room else cells

    @staticmethod
    def _runs(row: list[Cell | None], new: list[Cell], x: int) -> list[tuple[int, int]]:
        runs: list[list[int]] = []
        for at, cell in enumerate(new):
            if row[x + at] == cell:
                continue
            if runs and at - runs[-1][1] <= GAP:
                runs[-1][1] = at + 1
            else:
                runs.append([at, at + 1])
        for run in runs:  # never half of a wide character
            while run[0] > 0 and not new[run[0]][0]:
                run[0] -= 1
            while run[1] < len(new) and not new[run[1]][0]:
                run[1] += 1
        return [(a, b) for a, b in runs]

    def _codes_of(self, style: Style | None) -> tuple[str, str, str]:
        if style is None:
            return ("", "", "")
        found = self._codes.get(style)
        if found is None:
            bits = style._attributes & style._set_attributes
            attributes = ";".join(code for n, code in enumerate(_ATTRIBUTE_CODES) if bits & (1 << n))
            fore = back = ""
            if not self._no_color:
                if style.color is not None:
                    fore = ";".join(style.color.downgrade(self._color_system).get_ansi_codes(True))
                if style.bgcolor is not None:
                    back = ";".join(style.bgcolor.downgrade(self._color_system).get_ansi_codes(False))
            if len(self._codes) > 4096:
                self._codes.clear()
            found = self._codes[style] = (attributes, fore, back)
        return found

    @staticmethod
    def _switch(old: tuple[str, str, str] | None, new: tuple[str, str, str]) -> str:
        attributes, fore, back = new
        if old is None or old[0] != attributes:
            return "\x1b[" + ";".join(("0", *(part for part in new if part))) + "m"
        parts = []
        if old[1] != fore:
            parts.append(fore or "39")
        if old[2] != back:
            parts.append(back or "49")
        return "\x1b[" + ";".join(parts) + "m"


class TerminalFile:
    """Where the writer thread writes: straight to the descriptor, without Python's locked buffer; silent once it is gone."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.is_busy = False
        self.is_gone = False
        self.on_idle: Callable[[], object] | None = None
        self._wanted = False

    def want_idle(self) -> None:
        """Call on_idle after the next write that ends."""
        self._wanted = True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        data = text.encode("utf-8", "replace")
        self.is_busy = True
        try:
            view = memoryview(data)
            while view and not self.is_gone:
                try:
                    view = view[os.write(self._fd, view) :]
                except BlockingIOError:
                    threading.Event().wait(0.01)  # a shell left the descriptor non-blocking
                except OSError:
                    self.is_gone = True
        finally:
            self.is_busy = False
        if self._wanted and self.on_idle is not None:
            self._wanted = False
            self.on_idle()
        return len(text)

    def flush(self) -> None:
        return


class QuietDriver(LinuxDriver):
    """Textual's driver without its ways to block, spin or chatter."""

    def __init__(self, app: App[Any], **options: Any) -> None:
        super().__init__(app, **options)
        self.terminal = TerminalFile(sys.__stderr__.fileno() if sys.__stderr__ is not None else 2)
        self._file = self.terminal  # type: ignore[assignment]

    @property
    def is_behind(self) -> bool:
        """True while something waits to be written."""
        writer = self._writer_thread
        return self.terminal.is_busy or (writer is not None and writer._queue.qsize() > 0)

    def write(self, data: str) -> None:
        writer = self._writer_thread
        if writer is None or self.terminal.is_gone or writer._queue.full():
            return  # the terminal takes nothing now: better a lost control code than a loop that waits
        writer._queue.put_nowait(data)

    def start_application_mode(self) -> None:
        if isinstance(self._app, QuietApp):
            self._app.painter.forget()
        super().start_application_mode()

    def close(self) -> None:
        writer = self._writer_thread
        if writer is None:
            return
        if not writer._queue.full():
            writer._queue.put_nowait(None)
            writer.join(timeout=0.5)

    def _enable_mouse_support(self) -> None:
        if self._mouse:
            for mode in ("1000", "1002", "1006"):
                self.write(f"\x1b[?{mode}h")

    def _disable_mouse_support(self) -> None:
        if self._mouse:
            for mode in ("1006", "1002", "1000"):
                self.write(f"\x1b[?{mode}l")

    def _enable_mouse_pixels(self) -> None:
        return

    def run_input_thread(self) -> None:
        """Like the base class, but the end of input (a closed terminal) ends the program."""
        parser = XTermParser(self._debug)
        decode = getincrementaldecoder("utf-8")(errors="replace").decode
        with selectors.DefaultSelector() as selector:
            selector.register(self.fileno, selectors.EVENT_READ)
            while not self.exit_event.is_set():
                if selector.select(0.1):
                    try:
                        data = os.read(self.fileno, 4096)
                    except BlockingIOError:
                        continue
                    except OSError:
                        data = b""
                    if not data:
                        self._gone()
                        return
                    for event in parser.feed(decode(data)):
                        self.process_message(event)
                for event in parser.tick():
                    self.process_message(event)

    def _gone(self) -> None:
        self.terminal.is_gone = True
        app = self._app
        if isinstance(app, QuietApp):
            app.terminal_gone()


class KeyDone(Message, bubble=True):
    """Follows a key on its way through the widgets: where this arrives, the key has been dealt with."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class OnceScreen(Screen[Any]):
    """A screen that can be left once: a second key or click that came before it was gone is nothing, not an error."""

    _is_left = False

    def dismiss(self, result: Any = None) -> AwaitComplete:
        if self._is_left or not self.is_current:
            return AwaitComplete.nothing()
        self._is_left = True
        return super().dismiss(result)


class QuietApp(App[int]):
    """An App that paints through `Painter`, takes keys in order and survives what terminals do.

    Keys in order: over a slow link they come in bursts. Each waits until the one before it has been dealt with, and until the
    window or field that it opened has the focus; else letters of a search word would be taken for orders.
    """

    ENABLE_COMMAND_PALETTE = False
    ALLOW_SELECT = False

    def __init__(self, **options: Any) -> None:
        super().__init__(driver_class=QuietDriver, **options)
        self.painter = Painter()
        self.frames_sent = 0
        self.frames_dropped = 0
        self._plain_paint = os.environ.get("K2TUI_PLAIN_PAINT") == "1"
        self._loop_of_app: asyncio.AbstractEventLoop | None = None
        self._has_dropped = False
        self.animation_level = "none"
        self._keys: deque[events.Key] = deque()  # not dealt with yet
        self._key_number = 0
        self._key_is_on_its_way = False
        self._opening = 0  # windows and fields that have not got the focus yet

    # -- keys, one after another

    async def on_event(self, event: events.Event) -> None:
        if not isinstance(event, events.Key) or event.is_forwarded:
            await super().on_event(event)
            return
        self._keys.append(event)
        await self._next_key()

    async def _next_key(self) -> None:
        while self._keys and not self._key_is_on_its_way and not self._opening:
            event = self._keys.popleft()
            self._key_number += 1
            number = self._key_number
            self._key_is_on_its_way = True
            target = self.focused or self.screen
            await super().on_event(event)
            if not target.post_message(KeyDone(number)):
                self._key_is_on_its_way = False
                continue
            asyncio.get_running_loop().call_later(KEY_PATIENCE_S, self._key_is_lost, number)

    async def on_key_done(self, message: KeyDone) -> None:
        if message.number == self._key_number:
            self._key_is_on_its_way = False
            await self._next_key()

    def _key_is_lost(self, number: int) -> None:
        """Whoever had the key has gone, or takes its time: the others go on."""
        if number == self._key_number and self._key_is_on_its_way:
            self._key_is_on_its_way = False
            self.call_later(self._next_key)

    def hold_keys(self, until: MessagePump) -> None:
        """Keys wait until that window or field has been built and has the focus."""
        self._opening += 1
        is_open = False

        async def opened() -> None:
            nonlocal is_open
            if not is_open:
                is_open = True
                self._opening -= 1
                await self._next_key()

        until.call_after_refresh(lambda: self.call_later(opened))
        asyncio.get_running_loop().call_later(OPEN_PATIENCE_S, lambda: self.call_later(opened))

    def push_screen(self, screen: Any, *args: Any, **options: Any) -> Any:
        found = super().push_screen(screen, *args, **options)
        self.hold_keys(self.screen)
        return found

    def switch_mode(self, mode: str) -> AwaitMount:
        found = super().switch_mode(mode)
        self.hold_keys(self.screen)
        return found

    def delay_update(self, delay: float = 0.05) -> None:
        """Textual holds the picture for 50 ms at every change of screen. Ours are drawn in one go."""
        super().delay_update(min(delay, SCREEN_CHANGE_S))

    def watch_terminal(self) -> None:
        """Called once the event loop runs: signals, and the call-back of a terminal that caught up."""
        self._loop_of_app = loop = asyncio.get_running_loop()
        self.painter = Painter(self.console._color_system or ColorSystem.TRUECOLOR, no_color=self.no_color)
        driver = self._driver
        if isinstance(driver, QuietDriver):
            driver.terminal.on_idle = lambda: loop.call_soon_threadsafe(self._caught_up)
            for number in (signal.SIGHUP, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    loop.add_signal_handler(number, self._leave, 128 + number)

    @property
    def is_terminal_behind(self) -> bool:
        driver = self._driver
        return isinstance(driver, QuietDriver) and driver.is_behind

    def redraw_all(self) -> None:
        """Send everything again: another program wrote on our terminal."""
        self.painter.forget()
        self.screen.refresh()

    def terminal_gone(self) -> None:
        """From the input thread: nobody reads any more."""
        if self._loop_of_app is not None:
            self._loop_of_app.call_soon_threadsafe(self._leave, EXIT_HANGUP)
        self._end_anyway(EXIT_HANGUP)

    def _leave(self, code: int) -> None:
        self._end_anyway(code)
        driver = self._driver
        if code == EXIT_HANGUP and isinstance(driver, QuietDriver):
            driver.terminal.is_gone = True
        self.exit(code, return_code=code)

    @staticmethod
    def _end_anyway(code: int) -> None:
        timer = threading.Timer(HANGUP_GRACE_S, os._exit, (code,))
        timer.daemon = True
        timer.start()

    def _caught_up(self) -> None:
        if self._has_dropped and self._running and self.screen_stack:
            self._has_dropped = False
            self.screen.refresh()

    def _display(self, screen: Any, renderable: Any) -> None:
        driver = self._driver
        if self._plain_paint or not isinstance(driver, QuietDriver) or self.is_inline:
            super()._display(screen, renderable)
            return
        try:
            if renderable is None or self._batch_count or not self._running or self._closed:
                return
            if driver.is_behind:
                self.frames_dropped += 1
                self._has_dropped = True
                driver.terminal.want_idle()
                if not driver.is_behind:  # it caught up between the two looks
                    self.call_later(self._caught_up)
                return
            size = self.screen.outer_size
            fresh = self.painter._size != (size.width, size.height)
            self.painter.resize(size.width, size.height)
            if isinstance(renderable, LayoutUpdate):
                text = self.painter.paint(_layout_parts(renderable))
            elif isinstance(renderable, ChopsUpdate):
                text = self.painter.paint(_chop_parts(renderable))
            else:
                self.painter.forget()
                super()._display(screen, renderable)
                return
            if fresh and not isinstance(renderable, LayoutUpdate):
                self.call_later(self.screen.refresh)
            if not text:
                return
            x, y = size.clamp_offset(self.cursor_position)
            if (x, y) != (0, 0):
                text += f"\x1b[{y + 1};{x + 1}H"
            if fresh:
                text = "\x1b[0m\x1b[2J" + text
            if self._sync_available and len(text) > 200:
                text = SYNC_START + text + SYNC_END
            self.frames_sent += 1
            driver.write(text)
        except Exception as error:
            self._handle_exception(error)
        finally:
            self.post_display_hook()


def _layout_parts(update: LayoutUpdate) -> Iterable[tuple[int, int, Strip]]:
    for y, strips in enumerate(update.strips, update.region.y):
        x = update.region.x
        for strip in strips:
            yield y, x, strip
            x += strip.cell_length


def _chop_parts(update: ChopsUpdate) -> Iterable[tuple[int, int, Strip]]:
    for y, x1, x2 in update.spans:
        for end, (x, strip) in zip(update.chop_ends[y], update.chops[y].items(), strict=False):
            if strip is None or x > x2 or end <= x1:
                continue
            yield y, x, strip
