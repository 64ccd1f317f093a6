"""The help: every key by group, and what the signs mean."""

from __future__ import annotations

from k2tui.tui.keys import KEYS
from k2tui.tui.lines import Glyphs, Line, Seg, line_width, text_line, wrap
from k2tui.tui.screens.dialogs import Reader

KEY_CELLS = 10  # the key's own column, indent included
GAP = 3


def _blocks(width: int) -> list[list[Line]]:
    """Each group of keys: its title, its keys wrapped to that width, an empty line."""
    groups: dict[str, list[Line]] = {}
    for key in KEYS:
        lines = groups.setdefault(key.group, [text_line(key.group, "accent bold")])
        for n, part in enumerate(wrap(key.text, width - KEY_CELLS)):
            lines.append((Seg(f"  {key.show if n == 0 else '':<{KEY_CELLS - 2}}", "key bold"), Seg(part)))
    return [[*lines, ()] for lines in groups.values()]


def _halves(blocks: list[list[Line]]) -> tuple[list[Line], list[Line]]:
    """The blocks in their order as two columns, as equal in height as that allows."""
    cuts = range(1, len(blocks))
    ways = [([x for b in blocks[:n] for x in b], [x for b in blocks[n:] for x in b]) for n in cuts]
    return min(ways, key=lambda way: max(len(way[0]), len(way[1])))


def help_lines(glyphs: Glyphs, width: int) -> list[Line]:
    """The help's lines, none wider than that: two columns of keys where there is room for both."""
    out: list[Line] = []
    if width >= 90:
        half = (width - GAP) // 2
        left, right = _halves(_blocks(half))
        for y in range(max(len(left), len(right))):
            first = left[y] if y < len(left) else ()
            second = right[y] if y < len(right) else ()
            out.append((*first, Seg(" " * (half + GAP - line_width(first))), *second) if second else first)
    else:
        out = [line for block in _blocks(width) for line in block]
    g = glyphs
    signs = (
        (g.run, "info", "running, ready"),
        (g.up, "info", "loading"),
        (g.ok, "ok", "done"),
        (g.wait, "dim", "waiting"),
        (g.warn, "warn", "stalled, degraded, or a warning"),
        (g.bad, "bad", "failed, lost"),
        (g.skip, "dim", "stopped, skipped"),
    )
    out.append(text_line("Signs", "accent bold"))
    line: list[Seg] = []
    for sign, role, word in signs:
        group = (Seg(f"  {sign} ", role), Seg(word, "dim"))
        if line and line_width(line) + line_width(group) > width:
            out.append(tuple(line))
            line = []
        line += group
    out.append(tuple(line))
    out.append(())
    for text in (
        "Everything that you start goes on when the dashboard ends or the connection drops: start k2tui again to see it.",
        "The mouse works; with Shift (Option on macOS) held, the terminal selects text itself.",
        "y copies through the terminal (OSC 52); in tmux: set -g set-clipboard on.",
    ):
        out += [text_line(part, "dim") for part in wrap(text, width)]
    return out


class HelpScreen(Reader):
    def __init__(self, glyphs: Glyphs, width: int) -> None:
        super().__init__("Help", help_lines(glyphs, width), note="Esc closes")
