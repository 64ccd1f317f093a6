"""One GPU on a screen of its own: figures, curves, its processes. Left and right go to its neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from textual.binding import Binding, BindingType

from k2tui.tui.screens.deck import Deck, Slot
from k2tui.tui.view import View


class GpuDetailScreen(Deck):
    NAME: ClassVar[str] = "gpu"
    PANELS: ClassVar[tuple[str, ...]] = ("gpu", "processes")
    FOCUS: ClassVar[str] = "processes"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "back", show=False),
        Binding("left", "step(-1)", show=False),
        Binding("right", "step(1)", show=False),
        Binding("plus,equals_sign", "span(1)", show=False),
        Binding("minus", "span(-1)", show=False),
    ]
    HINTS: ClassVar[tuple[tuple[str, str, str], ...]] = (
        ("Esc", "back", "back"),
        ("Left Right", "other GPU", ""),
        ("+ -", "span", ""),
    )

    def __init__(self, index: int) -> None:
        super().__init__()
        self._gpu = index
        self._span = 0
        self._loaded: set[int] = set()  # grains whose past was asked for

    def place(self, width: int, height: int) -> Sequence[Slot]:
        frame = "rule" if height < 28 else "box"
        gpu = self._view.snap.gpu if self._view is not None else None
        mine = sum(1 for p in gpu.processes if p.gpu_index == self._gpu) if gpu is not None else 0
        below = min(max(1, mine) + (2 if frame == "rule" else 3), height // 3)
        return (
            Slot("gpu", 0, 0, width, height - below, frame),
            Slot("processes", 0, height - below, width, below, frame),
        )

    def draw(self, view: View) -> None:
        super().draw(replace(view, gpu_index=self._gpu, gpu_span=self._span))

    def on_mount(self) -> None:
        super().on_mount()
        self._watch(self._gpu)

    def on_unmount(self) -> None:
        self._watch(None)

    def _watch(self, index: int | None) -> None:
        """PCIe throughput costs the driver 40 ms a GPU: it is asked often for the one that is looked at only."""
        watch = getattr(self.dashboard.backend, "watch_gpu", None)
        if watch is not None:
            watch(index)

    def action_back(self) -> None:
        self.dismiss(None)

    def action_step(self, by: int) -> None:
        gpu = self._view.snap.gpu if self._view is not None else None
        indices = [x.index for x in gpu.gpus] if gpu is not None else []
        if self._gpu in indices and len(indices) > 1:
            self._gpu = indices[(indices.index(self._gpu) + by) % len(indices)]
            self._watch(self._gpu)
            self.dashboard.draw_now()

    def action_span(self, by: int) -> None:
        from k2tui.tui.panels.gpu import SPANS

        self._span = min(len(SPANS) - 1, max(0, self._span + by))
        step_s = SPANS[self._span][1]
        if step_s >= 15 and step_s not in self._loaded:
            self._loaded.add(step_s)
            self.dashboard.load_gpu_curves(step_s * 480, 480)
        self.dashboard.draw_now()
