"""6: one server in depth: head, diagnosis, phases, charts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from k2tui.core.load import State
from k2tui.tui.screens.deck import Deck, Slot
from k2tui.tui.view import View


class ServerScreen(Deck):
    NAME: ClassVar[str] = "server"
    PANELS: ClassVar[tuple[str, ...]] = ("server", "diagnosis", "phases", "decode")
    FOCUS: ClassVar[str] = "server"
    HAS_LOG: ClassVar[bool] = True
    HINTS: ClassVar[tuple[tuple[str, str, str], ...]] = (
        ("p", "proof line", "proof"),
        ("l", "log", "open_log"),
        ("R", "report", "report"),
    )

    def place(self, width: int, height: int) -> Sequence[Slot]:
        """Charts once it serves, its log before that and when it has failed."""
        phases = self._phase_count()
        below = "decode" if self._serves() else "log"
        if width >= 120 and height >= 30:
            left = width * 9 // 20
            middle = min(max(phases + 3, 11), height - 7 - 8)
            return (
                Slot("server", 0, 0, width, 7),
                Slot("phases", 0, 7, left, middle),
                Slot("diagnosis", left, 7, width - left, middle),
                Slot(below, 0, 7 + middle, width, height - 7 - middle),
            )
        frame = "rule" if height < 30 else "box"
        head = 5 if height < 30 else 7
        server = self._view.server if self._view is not None else None
        wrong = server is not None and server.load.state in (State.FAILED, State.STALLED, State.DEGRADED)
        diagnosis = (7 if wrong else 4) if height < 30 else (9 if wrong else 5)
        shown = min(phases + (2 if frame == "rule" else 3), max(4, (height - head - diagnosis) // 2))
        if height < 30 and self._serves():
            shown = 0  # the times are in the server's line already: charts tell more
        slots = [Slot("server", 0, 0, width, head, frame)]
        y = head
        if shown:
            slots.append(Slot("phases", 0, y, width, shown, frame))
            y += shown
        slots.append(Slot("diagnosis", 0, y, width, diagnosis, frame))
        y += diagnosis
        slots.append(Slot(below, 0, y, width, height - y, frame))
        return slots

    def _phase_count(self) -> int:
        server = self._view.server if self._view is not None else None
        return max(2, len(server.load.phases)) if server is not None else 2

    def _serves(self) -> bool:
        server = self._view.server if self._view is not None else None
        if server is None or server.load.state in (State.FAILED, State.STOPPED, State.LOADING):
            return False
        return server.load.decode is not None or (server.http is not None and server.http.num_running_reqs is not None)

    def draw_log(self, view: View) -> None:
        if "log" in self._slots:
            self.dashboard.follow_server_log(self)
