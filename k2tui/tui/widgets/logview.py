"""Lines of one log at any size: asks its port for the visible lines only. Follow, search, filter, wrap. Knows LogPort and text."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from datetime import date
from functools import cache
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message

from k2tui.core.job_mask import LineMask, mask_text
from k2tui.core.loadlines import is_poll
from k2tui.core.ports import LogPort
from k2tui.errors import K2Error
from k2tui.tui.lines import UNICODE, Glyphs, Line, Picture, Row, Seg, clean, fit_line, width
from k2tui.tui.widgets.rowlist import RowList

ERRORS = r"(?i)\berror\b|\bexception\b|traceback \(most|\bfatal\b|out of memory|\boom\b|\bkilled\b|\bassert(ion)?\b.*fail|\bfailed\b"
_HEAD = re.compile(r"\[[^\]]{1,60}\]\s?")
_TIME = re.compile(r"(?:\b(\d{4}-\d\d-\d\d)[ T])?\b(\d\d):(\d\d):(\d\d)\b", re.ASCII)
_LOOK_BACK = 8  # screens that are looked at for lines that are no traces of polls
FILTER_LIMIT = 5000  # matching lines that a filter shows: the newest ones


@cache
def _patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Errors and warnings: compiled when the first log is shown, not at import."""
    return re.compile(ERRORS), re.compile(r"(?i)\bwarn(ing)?\b|\bdeprecat")


def smart_case(pattern: str) -> str:
    """A pattern without capitals ignores case: the rule of the log's own search, for marking hits on the screen."""
    return pattern if pattern != pattern.lower() else f"(?i){pattern}"


class LogView(RowList):
    """A log in a frame. Messages: `Said` (something to tell the user), `Asked` (the screen should ask for a text)."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "ask('search')", show=False),
        Binding("ampersand", "ask('filter')", show=False),
        Binding("n", "next(True)", show=False),
        Binding("N", "next(False)", show=False),
        Binding("e", "error(True)", show=False),
        Binding("E", "error(False)", show=False),
        Binding("f", "follow", show=False),
        Binding("w", "wrap", show=False),
        Binding("o", "polls", show=False),
        Binding("u", "gaps", show=False),
        Binding("left", "pan(-1)", show=False),
        Binding("right", "pan(1)", show=False),
        Binding("0", "pan(0)", show=False),
    ]

    class Said(Message):
        def __init__(self, text: str, severity: str = "information") -> None:
            super().__init__()
            self.text = text
            self.severity = severity

    class Asked(Message):
        def __init__(self, sender: LogView, what: str, initial: str) -> None:
            super().__init__()
            self.sender = sender
            self.what = what
            self.initial = initial

    def __init__(self, *, glyphs: Glyphs = UNICODE, frame: str = "box", id: str | None = None) -> None:
        super().__init__("Log", frame=frame, glyphs=glyphs, selectable=False, id=id)
        self.port: LogPort | None = None
        self.follow = True
        self.wraps = False
        self.shows_polls = False
        self.shows_gaps = False
        self.marked: int | None = None  # the line that a search found
        self.pattern = ""
        self.filter = ""
        self._first = 0  # first visible line (or hit, when filtered)
        self._pan = 0
        self._hits: list[int] | None = None
        self._hits_upto = 0
        self._busy = ""
        self._generation = 0
        self._is_known = False  # the log was indexed to its end once; before that its end comes from the port's tail

    # -- the log

    def open(self, port: LogPort | None, *, empty: str = "") -> None:
        """Show another log (None: none), from its end."""
        if self.port is not None and self.port is not port:
            self.port.close()
        self.port = port
        self._generation += 1
        self.follow, self.marked, self.filter, self._hits, self._first, self._pan, self._busy = True, None, "", None, 0, 0, ""
        self._is_known = False
        self._empty = empty
        self.poll()

    _empty = ""

    def on_unmount(self) -> None:
        if self.port is not None:
            self.port.close()
            self.port = None

    def _count(self) -> int:
        if self.port is None:
            return 0
        return len(self._hits) if self._hits is not None else self.port.line_count()

    def _texts(self, start: int, count: int) -> list[tuple[int, str]]:
        if self.port is None or count <= 0:
            return []
        if self._hits is None:
            return list(enumerate((clean(t) for t in self.port.lines(start, count)), start))
        out: list[tuple[int, str]] = []
        for number in self._hits[start : start + count]:
            found = self.port.lines(number, 1)
            out.append((number, clean(found[0]) if found else ""))
        return out

    def poll(self) -> None:
        """Look for news and draw them; costs nothing when there are none."""
        if self._hits is not None and self.port is not None:
            self._extend_hits()
        room = self.inner[1]
        count = self._count()
        if self.follow:
            self._first = max(0, count - room)
        self._first = max(0, min(self._first, max(0, count - 1)))
        if not self._is_known and self.port is not None:
            self._is_known = self._hits is not None or self.port.is_complete()
        self.set_picture(self._picture(count, room))

    def _picture(self, count: int, room: int) -> Picture:
        rows: list[Row]
        self._stamp = None
        if self.port is None:
            rows = [Row("", (Seg(self._empty or "No log to show.", "dim"),))]
        elif count == 0 and self._is_known:
            text = "no line matches the filter" if self._hits is not None else "empty so far"
            rows = [Row("", (Seg(self._busy or text, "dim"),))]
        elif self.follow and not self._is_known and (tail := getattr(self.port, "tail_lines", None)) is not None:
            rows = [Row("", self._line(-1, text)) for _, text in self._without_polls([(-1, clean(t)) for t in tail(4 * room)], room)]
        elif self.wraps:
            rows = self._wrapped(count, room)
        else:
            rows = [Row("", self._line(number, text)) for number, text in self._visible(count, room)]
        return Picture(tuple(rows), note=self._note(count), title=f"Log {self.glyphs.dot} {clean(self.port.title)}" if self.port else "Log")

    def _visible(self, count: int, room: int) -> list[tuple[int, str]]:
        """The lines on the screen. At the log's moving end the traces of polls are left out, unless `o` asked for them."""
        self._folded = 0
        if not self.follow or self.shows_polls or self._hits is not None:
            return self._texts(self._first, room)
        texts = self._texts(max(0, count - room), room)
        shown = self._without_polls(texts, room)
        if len(shown) < room and count > room:
            shown = self._without_polls(self._texts(max(0, count - _LOOK_BACK * room), _LOOK_BACK * room), room)
        return shown

    _folded = 0

    def _without_polls(self, texts: list[tuple[int, str]], room: int) -> list[tuple[int, str]]:
        if self.shows_polls:
            return texts[-room:] if room else []
        out: list[tuple[int, str]] = []
        self._folded = 0
        for number, text in reversed(texts):
            if len(out) >= room:
                break
            if is_poll(text):
                self._folded += 1
            else:
                out.append((number, text))
        return out[::-1]

    def _wrapped(self, count: int, room: int) -> list[Row]:
        cells = max(10, self.inner[0])

        def pieces(number: int, text: str) -> list[Row]:
            out: list[Row] = []
            styled = self._styled(number, text)
            while True:
                head = fit_line(styled, cells, pad=False)
                out.append(Row("", head))
                taken = sum(len(seg.text) for seg in head)
                rest: list[Seg] = []
                for seg in styled:
                    if taken >= len(seg.text):
                        taken -= len(seg.text)
                        continue
                    rest.append(Seg(seg.text[taken:], seg.role))
                    taken = 0
                styled = tuple(rest)
                if not styled or not head:
                    return out

        rows: list[Row] = []
        if self.follow:
            for number, text in reversed(self._visible(count, room)):
                rows = pieces(number, text) + rows
                if len(rows) >= room:
                    break
            return rows[-room:] if room else []
        for number, text in self._texts(self._first, room):
            rows += pieces(number, text)
            if len(rows) >= room:
                break
        return rows[:room]

    def _note(self, count: int) -> Line:
        note: list[Seg] = []
        if self._busy:
            note.append(Seg(f"{self._busy}  ", "warn"))
        if self.filter:
            note.append(Seg(f"&{self.filter}  ", "accent"))
        if self.pattern:
            note.append(Seg(f"/{self.pattern}  ", "accent"))
        if self.port is None:
            return tuple(note)
        if self.follow:
            note.append(Seg(f"{self.glyphs.down} following  " if not self.glyphs.ascii else "following  ", "ok"))
        if self.follow and self._folded:
            note.append(Seg(f"{self._folded} polls folded ", "dim"))
            note.append(Seg("o", "key"))
            note.append(Seg("  "))
        last = min(count, self._first + self.inner[1])
        note.append(Seg(f"{last:,}/{count:,}" if self._is_known else f"counting lines: {count:,}", "dim"))
        return tuple(note)

    # -- one line

    def _gap(self, text: str) -> Seg:
        """Time since the stamped line above on the screen, where it is a second or more."""
        found = _TIME.search(text[:80])
        if found is None:
            return Seg(" " * 9)
        try:
            day = date.fromisoformat(found[1]).toordinal() if found[1] else 0
        except ValueError:
            return Seg(" " * 9)
        at = day * 86_400 + int(found[2]) * 3600 + int(found[3]) * 60 + int(found[4])
        before, self._stamp = self._stamp, at
        gap = at - before if before is not None else 0
        if gap < 1:
            return Seg(" " * 9)
        hours, rest = divmod(gap, 3600)
        words = f"+{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"+{rest // 60}:{rest % 60:02d}"
        return Seg(f"{words if hours < 1000 else 'days':>8} ", "warn" if gap >= 30 else "dim")

    _stamp: int | None = None

    def _styled(self, number: int, text: str) -> Line:
        errors, warnings = _patterns()
        role = "bad" if errors.search(text) else ("warn" if warnings.search(text) else "")
        segs: list[Seg] = []
        head = _HEAD.match(text)
        if head and not role:
            segs.append(Seg(head[0], "faint"))
            text = text[head.end() :]
        pattern = self._compiled()
        at = 0
        if pattern is not None:
            for found in pattern.finditer(text):
                if found.end() == found.start():
                    continue
                segs += [Seg(text[at : found.start()], role), Seg(found[0], f"{role} hit")]
                at = found.end()
        segs.append(Seg(text[at:], role))
        if number == self.marked:
            segs = [Seg(s.text, f"{s.role} on-sel".strip()) for s in segs]
        return tuple(s for s in segs if s.text)

    def _line(self, number: int, text: str) -> Line:
        line = self._styled(number, text)
        if self.shows_gaps:
            line = (self._gap(text), *line)
        if self._pan:
            line = _drop(line, self._pan)
        line = fit_line(line, self.inner[0])
        if number == self.marked and line:
            line = (*line[:-1], Seg(line[-1].text, f"{line[-1].role} on-sel".strip() if "on-sel" not in line[-1].role else line[-1].role))
        return line

    _regex_of = ""
    _regex: re.Pattern[str] | None = None

    def _compiled(self) -> re.Pattern[str] | None:
        if not self.pattern:
            return None
        if self._regex_of != self.pattern:
            self._regex_of = self.pattern
            try:
                self._regex = re.compile(smart_case(self.pattern))
            except re.error:
                self._regex = None
        return self._regex

    # -- moving

    def action_move(self, by: int) -> None:
        count, room = self._count(), self.inner[1]
        self._first = max(0, min(self._first + by, count - room))
        self.follow = self._first >= count - room and by > 0
        self.poll()

    def action_edge(self, side: int) -> None:
        self.follow = side > 0
        if side < 0:
            self._first = 0
        self.poll()

    def _scroll(self, by: int) -> None:
        self.action_move(by)

    def action_pan(self, by: int) -> None:
        self._pan = 0 if by == 0 else max(0, self._pan + by * max(8, self.inner[0] // 3))
        self.poll()

    def action_follow(self) -> None:
        self.follow = not self.follow
        self.poll()

    def action_wrap(self) -> None:
        self.wraps = not self.wraps
        self._pan = 0
        self.poll()

    def action_polls(self) -> None:
        """Fold the traces of polls at the log's end, or show them."""
        self.shows_polls = not self.shows_polls
        self.poll()

    def action_gaps(self) -> None:
        """Show before each line how long after the one above it was written, or no longer."""
        self.shows_gaps = not self.shows_gaps
        self.poll()

    def on_resize(self, event: events.Resize) -> None:
        super().on_resize(event)
        self.poll()

    def on_key(self, event: events.Key) -> None:
        if event.key == "escape" and (self.filter or self.pattern or self.marked is not None):
            event.stop()
            self.pattern, self.marked = "", None
            self.set_filter("")

    # -- search and filter

    def action_ask(self, what: str) -> None:
        self.post_message(self.Asked(self, what, self.pattern if what == "search" else self.filter))

    def search(self, pattern: str) -> None:
        """Find it, backwards from the end when following, else forwards from what is visible."""
        self.pattern = pattern
        if not pattern:
            self.poll()
            return
        forward = not self.follow
        self.find(pattern, forward, self._count() if self.follow else self._first, f"no line matches {pattern!r}")

    def action_next(self, forward: bool) -> None:
        if not self.pattern:
            self.action_ask("search")
            return
        self.find(self.pattern, forward, self._from(forward), f"no line matches {self.pattern!r}")

    def action_error(self, forward: bool) -> None:
        self.find(ERRORS, forward, self._from(forward), "no error in this log")

    def _from(self, forward: bool) -> int:
        if self.marked is not None:
            return self.marked + (1 if forward else 0)
        first = self._hits[self._first] if self._hits and self._first < len(self._hits) else self._first
        return first if forward else first + self.inner[1]

    def find(self, pattern: str, forward: bool, start: int, nothing: str) -> None:
        """Search in a thread: a log of gigabytes takes seconds. Backwards finds the last match before `start`.

        At the end of the log it goes on from the other end, and says so. nothing: said when no line matches at all.
        """
        port = self.port
        if port is None:
            return
        self._busy = "searching"
        generation = self._generation

        def work() -> tuple[int | None, bool]:
            count = port.line_count()
            found = port.search(pattern, start if forward else start - 1, forward=forward) if forward or start > 0 else None
            if found is not None or (start <= 0 if forward else start >= count):
                return found, False
            return port.search(pattern, 0 if forward else max(0, count - 1), forward=forward), True

        async def run() -> None:
            try:
                number, is_around = await asyncio.to_thread(work)
            except K2Error as err:
                self._busy = ""
                self.post_message(self.Said(err.message, "error"))
                self.poll()
                return
            if generation != self._generation or not self.is_mounted:
                return
            self._busy = ""
            if number is None:
                self.post_message(self.Said(nothing, "warning"))
                self.poll()
                return
            if is_around:
                words = "it is the only one" if number == self.marked else f"from the {'top' if forward else 'end'} again"
                self.post_message(self.Said(words))
            self.show_line(number)

        self.poll()
        self.run_worker(run, exclusive=True, group=f"find-{id(self)}", exit_on_error=False)

    @property
    def first_line(self) -> int:
        """Number of the first line on the screen (0-based)."""
        return self._hits[self._first] if self._hits else self._first

    def show_line(self, number: int) -> None:
        """Mark that line and bring it to the upper third."""
        self.follow = False
        self.marked = number
        room = self.inner[1]
        if self._hits is not None:
            place = next((i for i, n in enumerate(self._hits) if n >= number), len(self._hits))
            self._first = max(0, place - room // 3)
        elif not self._first <= number < self._first + room or room == 0:
            self._first = max(0, number - room // 3)
        self.poll()

    def show_proof(self, text: str, number: int | None) -> None:
        """Jump to a line known by its text and (1-based or 0-based) number: the text decides."""
        port = self.port
        if port is None:
            return
        wanted = clean(text).strip()
        if number is not None:
            for candidate in (number - 1, number):
                found = port.lines(candidate, 1) if candidate >= 0 else ()
                if found and wanted and (wanted in clean(found[0]) or clean(found[0]).strip() in wanted) and clean(found[0]).strip():
                    self.show_line(candidate)
                    return
        if wanted:
            self.find(re.escape(wanted[:200]), False, port.line_count(), "the proving line is not in this log any more")
        elif number is not None:
            self.show_line(max(0, number - 1))

    def set_filter(self, pattern: str) -> None:
        """Show only the lines that match; "" shows all again. Matches are collected from the end, in a thread."""
        self.filter = pattern
        self._generation += 1
        self._hits = None
        if not pattern or self.port is None:
            self.follow = self.follow or self.marked is None
            self.poll()
            return
        try:
            re.compile(pattern)
        except re.error as err:
            self.filter = ""
            self.post_message(self.Said(f"not a regular expression: {pattern!r}: {err}", "error"))
            self.poll()
            return
        self._hits, self._busy, self.follow = [], "filtering", True
        self._collect(self.port, pattern)
        self.poll()

    def _collect(self, port: LogPort, pattern: str) -> None:
        generation = self._generation
        self._hits_upto = port.line_count()
        call: Callable[..., None] = self.app.call_from_thread

        def deliver(found: list[int]) -> None:
            if generation == self._generation and self._hits is not None:
                self._hits = found + self._hits
                self.poll()

        def work() -> None:
            at: int | None = self._hits_upto - 1
            batch: list[int] = []
            total = 0
            while at is not None and at >= 0 and total < FILTER_LIMIT and generation == self._generation:
                at = port.search(pattern, at, forward=False)
                if at is None:
                    break
                batch.insert(0, at)
                total += 1
                at -= 1
                if len(batch) >= 200:
                    call(deliver, batch)
                    batch = []
            call(deliver, batch)

        async def run() -> None:
            try:
                await asyncio.to_thread(work)
            except K2Error as err:
                self.post_message(self.Said(err.message, "error"))
            if generation == self._generation:
                self._busy = ""
                self.poll()

        self.run_worker(run, exclusive=True, group=f"filter-{id(self)}", exit_on_error=False)

    def _extend_hits(self) -> None:
        """New lines since the filter was set: matched here, a few at a time."""
        assert self.port is not None and self._hits is not None
        count = self.port.line_count()
        if count <= self._hits_upto:
            return
        pattern = re.compile(smart_case(self.filter))
        take = min(count - self._hits_upto, 2000)
        texts = self.port.lines(self._hits_upto, take)
        self._hits += [n for n, text in enumerate(texts, self._hits_upto) if pattern.search(text)]
        self._hits_upto += len(texts)

    def copy_text(self) -> str:
        """The marked line, else what is visible; secrets masked, since a copy is for others."""
        if self.port is None:
            return ""
        if self.marked is not None:
            found = self.port.lines(self.marked, 1)
            return mask_text(clean(found[0])) if found else ""
        mask = LineMask()
        return "\n".join(mask(text) for _, text in self._texts(self._first, self.inner[1]))


def _drop(line: Line, cells: int) -> Line:
    """The line without its first `cells` cells."""
    out: list[Seg] = []
    for seg in line:
        have = width(seg.text)
        if cells >= have:
            cells -= have
            continue
        text = seg.text
        while cells > 0 and text:
            cells -= width(text[0])
            text = text[1:]
        out.append(Seg(text, seg.role))
    return tuple(out)
