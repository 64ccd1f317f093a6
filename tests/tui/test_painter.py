"""The painter sends only what differs, and what it sends makes a terminal show exactly the picture."""

from __future__ import annotations

import pyte
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from k2tui.tui.terminal import Painter

RED, BOLD = Style(color="#ff0000"), Style(bold=True, bgcolor="#001122")
WORDS = st.text(alphabet="ab c#─█é草稿🧪", min_size=1, max_size=12)


def strip(parts: list[tuple[str, Style | None]], width: int) -> Strip:
    return Strip([Segment(t, s) for t, s in parts]).adjust_cell_length(width)


def test_only_changed_cells_are_sent() -> None:
    painter = Painter()
    painter.resize(20, 2)
    first = painter.paint([(0, 0, strip([("progress 41/64", RED)], 20))])
    assert "progress" in first
    assert painter.paint([(0, 0, strip([("progress 41/64", RED)], 20))]) == ""
    second = painter.paint([(0, 0, strip([("progress 42/64", RED)], 20))])
    assert "progress" not in second and "2" in second and len(second) < 40
    painter.forget()
    painter.resize(20, 2)
    assert "progress" in painter.paint([(0, 0, strip([("progress 42/64", RED)], 20))])


def test_no_color_sends_no_colour_codes() -> None:
    painter = Painter(no_color=True)
    painter.resize(10, 1)
    text = painter.paint([(0, 0, strip([("ab", RED), ("cd", BOLD)], 10))])
    assert "38;" not in text and "48;" not in text and "\x1b[0;1m" in text


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.tuples(WORDS, st.sampled_from([None, RED, BOLD])), min_size=1, max_size=4), min_size=1, max_size=6))
def test_the_terminal_shows_the_last_picture(frames: list[list[tuple[str, Style | None]]]) -> None:
    width = 24
    painter = Painter()
    painter.resize(width, 1)
    screen = pyte.Screen(width, 1)
    stream = pyte.Stream(screen)
    for parts in frames:
        line = strip(parts, width)
        stream.feed(painter.paint([(0, 0, line)]))
        shown = "".join(screen.buffer[0][x].data for x in range(width))
        assert shown.rstrip() == line.text.rstrip()
