"""Panels of the dashboard, one file each: `panels/x.py` exports PANEL. A panel is a pure function from a View to a Picture.

The folder is the registry: a new file shows up in the palette, on its own full screen and in the contract test.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

from k2tui.tui.lines import Picture, Row, text_line
from k2tui.tui.view import View

LOOKING = Picture((Row("", text_line("looking ...", "dim")),))  # in place of "there is none", until the snapshot is whole


@dataclass(frozen=True)
class Panel:
    """draw(view, width, height) -> Picture, for an inner room of width x height cells; it must be quick (< 1 ms) and pure.

    needs: the fields of the snapshot that it looks at; it is drawn again when one of them changed. ticks: also every second
    (running times, ages).
    order: place among the panels. selectable: rows with a key can be selected. enter: app action for Enter on a row
    (called with the row's key). keys: (key, action, label) that work while the panel has the focus.
    """

    name: str
    title: str
    draw: Callable[[View, int, int], Picture]
    needs: tuple[str, ...] = ("servers", "gpu", "host", "jobs", "board", "bench")
    ticks: bool = False
    order: int = 100
    selectable: bool = False
    enter: str = ""
    keys: tuple[tuple[str, str, str], ...] = ()
    help: str = ""


def names() -> list[str]:
    """Every panel's name, sorted."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))


def get(name: str) -> Panel:
    """The panel of that name (KeyError when there is none)."""
    try:
        panel: Panel = importlib.import_module(f"{__name__}.{name}").PANEL
    except ModuleNotFoundError as err:
        if err.name == f"{__name__}.{name}":
            raise KeyError(name) from None
        raise
    return panel
