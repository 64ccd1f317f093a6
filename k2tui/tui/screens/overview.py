"""1: everything at once: server, GPUs, host, jobs, board, benchmarks; from 80x24 up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from k2tui.core.load import State
from k2tui.tui.panels import server as server_panel
from k2tui.tui.screens.deck import Deck, Slot
from k2tui.tui.view import View


class OverviewScreen(Deck):
    NAME: ClassVar[str] = "overview"
    PANELS: ClassVar[tuple[str, ...]] = ("server", "gpus", "host", "jobs", "board", "bench", "decode")
    FOCUS: ClassVar[str] = "jobs"
    HAS_LOG: ClassVar[bool] = True

    def place(self, width: int, height: int) -> Sequence[Slot]:
        gpus = self.gpu_count()
        if height < 32 or width < 100:
            return self._compact(width, height, gpus)
        return self._roomy(width, height, gpus)

    def gpu_count(self) -> int:
        view = self._view
        if view is None or view.snap.gpu is None:
            return 2
        return max(2, len(view.snap.gpu.gpus))

    def _compact(self, width: int, height: int, gpus: int) -> Sequence[Slot]:
        """21 lines at 80x24: title rules instead of boxes."""
        server = max(5, min(self._rows_of_what_is_wrong(width), height - (gpus + 1) - 1 - 9))
        slots = [Slot("server", 0, 0, width, server, "rule")]
        y = server
        rows = min(gpus, max(2, height - server - 1 - 1 - 6))
        slots.append(Slot("gpus", 0, y, width, rows + 1, "rule"))
        y += rows + 1
        slots.append(Slot("host", 0, y, width, 1, "none"))
        y += 1
        left = height - y
        bench = 2 if left <= 7 else max(3, left * 2 // 5)
        half = width // 2
        slots.append(Slot("jobs", 0, y, half + 2, left - bench, "rule"))
        slots.append(Slot("board", half + 2, y, width - half - 2, left - bench, "rule"))
        y += left - bench
        slots.append(Slot("bench", 0, y, width, bench, "rule"))
        return slots

    def _roomy(self, width: int, height: int, gpus: int) -> Sequence[Slot]:
        """Boxes; beside the overview of 80x24 there is a log, and longer lists."""
        server = 7 if height < 45 else 8
        slots = [Slot("server", 0, 0, width, server)]
        y = server
        gpu_rows = min(gpus, 8 if height < 50 else 16)
        wide = width >= 160
        gpu_height = gpu_rows + 3
        if wide:
            right = width * 2 // 5
            slots.append(Slot("gpus", 0, y, width - right, gpu_height))
            slots.append(Slot("board", width - right, y, right, gpu_height + 3))
            slots.append(Slot("host", 0, y + gpu_height, width - right, 3))
            y += gpu_height + 3
        else:
            slots.append(Slot("gpus", 0, y, width, gpu_height))
            y += gpu_height
            slots.append(Slot("host", 0, y, width, 1, "none"))
            y += 1
        left = height - y
        if wide:
            right = width * 2 // 5
            jobs = max(6, min(self._longest_list() + 3, left * 2 // 5))
            slots.append(Slot("jobs", 0, y, width - right, jobs))
            slots.append(Slot("bench", width - right, y, right, jobs))
            y += jobs
            if left - jobs >= 10 and self._serves():
                slots.append(Slot("log", 0, y, width - right, left - jobs))
                slots.append(Slot("decode", width - right, y, right, left - jobs))
            else:
                slots.append(Slot("log", 0, y, width, left - jobs))
            return slots
        half = width * 11 // 20
        jobs = max(5, left * 2 // 5)
        bench = max(4, left * 3 // 10)
        log = left - jobs - bench
        if log < 4:
            jobs += log
            log = 0
        slots.append(Slot("jobs", 0, y, half, jobs))
        slots.append(Slot("board", half, y, width - half, jobs))
        y += jobs
        slots.append(Slot("bench", 0, y, width, bench))
        y += bench
        if log:
            slots.append(Slot("log", 0, y, width, log))
        return slots

    def _longest_list(self) -> int:
        view = self._view
        return max(len(view.snap.jobs), min(8, len(view.snap.bench)), 3) if view is not None else 3

    def _rows_of_what_is_wrong(self, width: int) -> int:
        """Rows, at most 8, for a server that failed with its whole remedy; 0 while nothing is wrong."""
        view = self._view
        if view is None or view.server is None or view.server.load.state not in (State.FAILED, State.STALLED, State.DEGRADED):
            return 0
        return 1 + len(server_panel.draw(view, width - 2, 7).rows)

    def _serves(self) -> bool:
        server = self._view.server if self._view is not None else None
        return server is not None and bool(self._view and self._view.history.get(f"{server.key}.tok_s"))

    def draw_log(self, view: View) -> None:
        if "log" in self._slots:
            self.dashboard.follow_server_log(self)
