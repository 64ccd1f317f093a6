"""The dashboard's own themes: dark, light, and two for colour-blind eyes (blue and orange instead of green and red)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from textual.theme import Theme

from k2tui.errors import UsageError

DEFAULT = "k2-dark"
_KEYS = ("primary", "secondary", "accent", "foreground", "background", "surface", "panel", "success", "warning", "error")


def make(name: str, table: Mapping[str, Any], where: str = "") -> Theme:
    """A Textual theme from a theme file's table. Raises UsageError naming the file and key."""
    from textual.color import Color, ColorParseError

    known = {*_KEYS, "dark", "variables"}
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in known:
            raise UsageError(f"{where}: unknown key {key!r} in theme {name!r}", "known keys: " + ", ".join(sorted(known)))
        if key == "variables":
            if not isinstance(value, Mapping):
                raise UsageError(f"{where}: 'variables' must be a table")
            values[key] = {f"k2-{k}": str(v) for k, v in value.items()}
        elif key == "dark":
            values[key] = bool(value)
        else:
            values[key] = str(value)
    for key, value in [*values.items(), *values.get("variables", {}).items()]:
        if isinstance(value, str):
            try:
                Color.parse(value)
            except ColorParseError:
                raise UsageError(f"{where}: {key!r} is not a colour: {value!r}", 'write it as "#rrggbb"') from None
    if "primary" not in values:
        raise UsageError(f"{where}: theme {name!r} has no 'primary' colour")
    return Theme(name=name, **values)
