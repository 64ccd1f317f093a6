"""6: one server in depth: head, diagnosis, phases, charts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from k2tui.tui.screens.deck import Deck, Slot


class ServerScreen(Deck):
    NAME: ClassVar[str] = "server"
    PANELS: ClassVar[tuple[str, ...]] = ("server", "diagnosis", "phases", "decode")
    FOCUS: ClassVar[str] = "phases"
    HINTS: ClassVar[tuple[tuple[str, str, str], ...]] = (
        ("p", "proof line", "proof"),
        ("l", "log", "open_log"),
        ("R", "report", "report"),
    )

    def place(self, width: int, height: int) -> Sequence[Slot]:
        phases = self._phase_count()
        if width >= 120 and height >= 30:
            left = width * 9 // 20
            middle = max(phases + 3, 10)
            middle = min(middle, height - 7 - 8)
            return (
                Slot("server", 0, 0, width, 7),
                Slot("phases", 0, 7, left, middle),
                Slot("diagnosis", left, 7, width - left, middle),
                Slot("decode", 0, 7 + middle, width, height - 7 - middle),
            )
        if height < 30:
            top = min(phases + 2, 9)
            return (
                Slot("server", 0, 0, width, 5, "rule"),
                Slot("phases", 0, 5, width, top, "rule"),
                Slot("diagnosis", 0, 5 + top, width, height - 5 - top, "rule"),
            ) if not self._serves() else (
                Slot("server", 0, 0, width, 5, "rule"),
                Slot("diagnosis", 0, 5, width, 4, "rule"),
                Slot("decode", 0, 9, width, height - 9, "rule"),
            )
        return (
            Slot("server", 0, 0, width, 6),
            Slot("phases", 0, 6, width, min(phases + 3, 11)),
            Slot("diagnosis", 0, 6 + min(phases + 3, 11), width, 8),
            Slot("decode", 0, 14 + min(phases + 3, 11), width, height - 14 - min(phases + 3, 11)),
        )

    def _phase_count(self) -> int:
        server = self._view.server if self._view is not None else None
        return max(2, len(server.load.phases)) if server is not None else 2

    def _serves(self) -> bool:
        server = self._view.server if self._view is not None else None
        return server is not None and server.load.decode is not None
