"""The help: every key by group, and what the signs mean."""

from __future__ import annotations

from k2tui.tui.keys import KEYS
from k2tui.tui.lines import Glyphs, Line, Seg, fit, text_line
from k2tui.tui.screens.dialogs import Reader


def help_lines(glyphs: Glyphs, width: int) -> list[Line]:
    groups: dict[str, list[Line]] = {}
    for key in KEYS:
        groups.setdefault(key.group, []).append((Seg(f"  {key.show:<7}", "key bold"), Seg(key.text)))
    out: list[Line] = []
    if width >= 90:  # two columns
        names = list(groups)
        half = -(-len(names) // 2)
        columns: list[list[Line]] = []
        for part in (names[:half], names[half:]):
            column: list[Line] = []
            for name in part:
                column += [text_line(name, "accent bold"), *groups[name], ()]
            columns.append(column)
        for y in range(max(len(c) for c in columns)):
            line: list[Seg] = []
            for n, column in enumerate(columns):
                cell = column[y] if y < len(column) else ()
                text = "".join(s.text for s in cell)
                line += cell
                if n == 0:
                    line.append(Seg(" " * max(1, width // 2 - len(text))))
            out.append(tuple(line))
    else:
        for name, lines in groups.items():
            out += [text_line(name, "accent bold"), *lines, ()]
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
    out.append(tuple(s for sign, role, word in signs for s in (Seg(f"  {sign} ", role), Seg(word, "dim"))))
    out.append(())
    for text in (
        "Everything that you start goes on when the dashboard ends or the connection drops: start k2tui again to see it.",
        "The mouse works; with Shift (Option on macOS) held, the terminal selects text itself.",
        "y copies through the terminal (OSC 52); in tmux: set -g set-clipboard on.",
    ):
        out.append(text_line(fit(text, width).rstrip(), "dim"))
    return out


class HelpScreen(Reader):
    def __init__(self, glyphs: Glyphs, width: int) -> None:
        super().__init__("Help", help_lines(glyphs, width), note="Esc closes")
