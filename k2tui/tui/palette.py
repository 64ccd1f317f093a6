"""Roles ("ok", "dim bold", "on-sel") to terminal styles, from whatever Textual theme is on. Knows no widget.

With `no_color` a role keeps its weight (bold, reverse, underline) and loses every colour.
"""

from __future__ import annotations

from rich.style import Style
from textual.color import Color
from textual.theme import Theme

_ATTRIBUTES = {"bold": Style(bold=True), "rev": Style(reverse=True), "ul": Style(underline=True), "italic": Style(italic=True)}
# without colour: what still sets a role apart
_PLAIN: dict[str, Style] = {
    "key": Style(bold=True),
    "title": Style(bold=True),
    "on-sel": Style(reverse=True),
    "on-key": Style(reverse=True),
    "on-tab": Style(reverse=True),
    "on-bad": Style(reverse=True),
    "on-warn": Style(reverse=True),
    "hit": Style(reverse=True),
    "faint": Style(dim=True),
    "rule": Style(dim=True),
    "bad": Style(bold=True),
}
_NONE = Style()
_ANSI = {
    "ok": "green",
    "warn": "yellow",
    "bad": "bright_red",
    "info": "cyan",
    "accent": "cyan",
    "bar": "blue",
    "bar2": "bright_blue",
    "mem": "magenta",
    "spark": "cyan",
    "key": "cyan",
    "title": "bright_white",
}


class Palette:
    """Styles by role for one theme. `style(role)` is cached; unknown words in a role are ignored."""

    def __init__(self, theme: Theme, *, no_color: bool = False) -> None:
        self._cache: dict[str, Style] = {}
        self._plain = no_color
        self._ansi = bool(theme.ansi)
        self._colors: dict[str, Color] = {}
        if not self._plain and not self._ansi:
            self._read(theme)
        self.base = Style() if self._plain or self._ansi else self._bg("background") + self._fg("text")

    def _read(self, theme: Theme) -> None:
        made = theme.to_color_system().generate()

        def color(name: str) -> Color:
            return Color.parse(made[name])

        bg, fg = color("background"), color("foreground")
        fg = bg.blend(fg, fg.a, alpha=1.0)
        primary, success, warning, error = color("primary"), color("success"), color("warning"), color("error")
        accent, secondary = color("accent"), color("secondary")
        extra = theme.variables

        def own(name: str, default: Color) -> Color:
            return Color.parse(extra[f"k2-{name}"]) if f"k2-{name}" in extra else default

        self._colors = {
            "background": bg,
            "text": fg,
            "dim": own("dim", bg.blend(fg, 0.62)),
            "faint": own("faint", bg.blend(fg, 0.42)),
            "rule": own("rule", bg.blend(fg, 0.22)),
            "ok": success,
            "warn": warning,
            "bad": error,
            "info": own("info", primary),
            "accent": accent,
            "bar": own("bar", primary),
            "bar2": own("bar2", accent),
            "mem": own("mem", secondary),
            "spark": own("spark", accent),
            "key": accent,
            "title": fg,
            "on-sel": own("sel", bg.blend(primary, 0.28)),
            "on-key": own("button", bg.blend(fg, 0.12)),
            "on-tab": own("tab", bg.blend(primary, 0.45)),
            "on-line": own("line", bg.blend(fg, 0.06)),
            "on-bad": bg.blend(error, 0.35),
            "on-warn": bg.blend(warning, 0.30),
            "on-ok": bg.blend(success, 0.30),
            "hit": bg.blend(warning, 0.45),
        }

    def _fg(self, name: str) -> Style:
        return Style(color=self._colors[name].rich_color)

    def _bg(self, name: str) -> Style:
        return Style(bgcolor=self._colors[name].rich_color)

    def style(self, role: str) -> Style:
        """The style of a role, background included."""
        found = self._cache.get(role)
        if found is None:
            found = self._cache[role] = self._make(role)
        return found

    def _make(self, role: str) -> Style:
        style = self.base
        for word in role.split():
            if word in _ATTRIBUTES:
                style += _ATTRIBUTES[word]
            elif self._plain:
                style += _PLAIN.get(word, _NONE)
            elif self._ansi:
                if word in _ANSI:
                    style += Style(color=_ANSI[word])
                style += _PLAIN.get(word, _NONE)
            elif word in self._colors:
                is_back = word.startswith("on-") or word == "hit"
                style += self._bg(word) if is_back else self._fg(word)
        return style
