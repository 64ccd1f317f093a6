"""Styled lines as plain values: segments, widths in terminal cells, bars, sparklines, tables. Knows no widget and no domain word.

A `Line` is a tuple of `Seg`; a `Seg` is text with a role (what it means: "ok", "dim bold"), never a colour, and an optional
action (what a click on it does). The palette turns roles into colours; plain mode drops them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size


class Seg(NamedTuple):
    text: str
    role: str = ""
    action: str = ""


Line = tuple[Seg, ...]


class Row(NamedTuple):
    """One line of a panel; rows with a key can be selected."""

    key: str
    line: Line


class Picture(NamedTuple):
    """What a panel wants to be seen: rows, a pinned header, and words at the right of its title."""

    rows: tuple[Row, ...] = ()
    header: Line | None = None
    note: Line = ()
    title: str = ""  # replaces the panel's own title when not empty
    prefer: str = ""  # key of the row that is selected at first


class Glyphs(NamedTuple):
    """The character set: full, or ASCII for terminals and fonts that cannot draw the rest."""

    ascii: bool
    bar: str  # fractions of a cell, from empty to full
    rest: str  # the empty part of a bar
    spark: str
    h: str
    v: str
    corners: str  # top left, top right, bottom left, bottom right
    dot: str
    ok: str
    wait: str
    run: str
    bad: str
    warn: str
    skip: str
    arrow: str
    ellipsis: str
    plus_minus: str
    degree: str
    box: str  # open task
    star: str
    up: str
    down: str
    thumb: str


UNICODE = Glyphs(
    ascii=False,
    bar=" ╸━",
    rest="─",
    spark="▁▂▃▄▅▆▇█",
    h="─",
    v="│",
    corners="╭╮╰╯",
    dot="·",
    ok="✓",
    wait="○",
    run="●",
    bad="✗",
    warn="▲",
    skip="–",
    arrow="→",
    ellipsis="…",
    plus_minus="±",
    degree="°C",
    box="□",
    star="★",
    up="↑",
    down="↓",
    thumb="┃",
)
ASCII = Glyphs(
    ascii=True,
    bar=" #",
    rest="-",
    spark="_.:-=+*#",
    h="-",
    v="|",
    corners="++++",
    dot=".",
    ok="+",
    wait="o",
    run="*",
    bad="x",
    warn="!",
    skip="-",
    arrow="->",
    ellipsis="~",
    plus_minus="+-",
    degree="C",
    box="[ ]",
    star="*",
    up="^",
    down="v",
    thumb="#",
)

_SELECTORS = re.compile("[\ufe0e\ufe0f]")


@lru_cache(4096)
def clean(text: str) -> str:
    """Text that is safe to draw: no control characters, escape codes, bidi marks or joiners; a tab is one blank."""
    if text.isascii() and text.isprintable():
        return text
    text = _SELECTORS.sub("", text.replace("\t", " "))
    if text.isprintable():
        return text
    return "".join(ch if ch.isprintable() else ("" if ch == "\u200d" else "·") for ch in text)


@lru_cache(4096)
def width(text: str) -> int:
    """Terminal cells that the text takes."""
    return len(text) if text.isascii() else cell_len(text)


def fit(text: str, cells: int, align: str = "<", ellipsis: str = "…") -> str:
    """Exactly `cells` cells: cut with an ellipsis, or padded. align: "<", ">" or "^"."""
    if cells <= 0:
        return ""
    text = clean(text)
    have = width(text)
    if have > cells:
        if cells <= len(ellipsis):
            return set_cell_size(text, cells)
        return set_cell_size(text, cells - len(ellipsis)) + ellipsis
    blank = " " * (cells - have)
    if align == ">":
        return blank + text
    if align == "^":
        half = len(blank) // 2
        return blank[:half] + text + blank[half:]
    return text + blank


def middle(text: str, cells: int, ellipsis: str) -> str:
    """Exactly `cells` cells, cut in the middle: texts that begin alike are told apart by their ends."""
    text = clean(text)
    room = cells - width(ellipsis)
    if width(text) <= cells or room < 8:
        return fit(text, cells, "<", ellipsis)
    tail = ""
    for char in reversed(text):
        if width(char + tail) > room // 2:
            break
        tail = char + tail
    return fit(text, room - width(tail), "<", "") + ellipsis + tail


def line_width(line: Iterable[Seg]) -> int:
    return sum(width(seg.text) for seg in line)


def fit_line(line: Sequence[Seg], cells: int, *, pad: bool = True) -> Line:
    """The line cut (or padded) to exactly `cells` cells; texts are cleaned on the way."""
    total = 0
    for seg in line:
        text = seg[0]
        if clean(text) != text:
            break
        total += width(text)
    else:  # the usual case: nothing to change
        if total == cells or (total < cells and not pad):
            return tuple(line)
        if total < cells:
            return (*line, Seg(" " * (cells - total)))
    out: list[Seg] = []
    left = cells
    for seg in line:
        text = clean(seg.text)
        have = width(text)
        if have > left:
            if left > 0:
                out.append(Seg(set_cell_size(text, left), seg.role, seg.action))
            left = 0
            break
        if text:
            out.append(seg if text is seg.text else Seg(text, seg.role, seg.action))
        left -= have
    if left > 0 and pad:
        out.append(Seg(" " * left))
    return tuple(out)


def spread(left: Sequence[Seg], right: Sequence[Seg], cells: int) -> Line:
    """Left part, gap, right part; the right part gives way when there is no room for both."""
    lw, rw = line_width(left), line_width(right)
    if lw + rw + 1 > cells:
        return fit_line(left, cells)
    return (*fit_line(left, cells - rw), *right)


def text_line(text: str, role: str = "") -> Line:
    return (Seg(clean(text), role),)


def wrap(text: str, cells: int, lines: int | None = None, ellipsis: str = "…") -> list[str]:
    """Words wrapped to `cells` cells, at most `lines` lines (the last one cut with an ellipsis)."""
    out: list[str] = []
    current = ""
    for word in clean(text).split(" "):
        while width(word) > cells:
            if current:
                out.append(current)
                current = ""
            head = set_cell_size(word, cells).rstrip()
            if not head:
                break
            out.append(head)
            word = word[len(head) :]
        trial = f"{current} {word}" if current else word
        if width(trial) > cells:
            out.append(current)
            current = word
        else:
            current = trial
    if current or not out:
        out.append(current)
    if lines is not None and len(out) > lines:
        out = out[:lines]
        out[-1] = set_cell_size(out[-1], min(width(out[-1]), cells - len(ellipsis))).rstrip() + ellipsis
    return out


def bar(share: float | None, cells: int, role: str, glyphs: Glyphs) -> tuple[Seg, Seg]:
    """A bar of `cells` cells; share 0..1, None draws an empty one."""
    share = 0.0 if share is None else min(1.0, max(0.0, share))
    steps = len(glyphs.bar) - 1
    units = round(share * cells * steps)
    if units == 0 and share > 0:
        units = 1  # something is not nothing
    full, part = divmod(units, steps)
    on = glyphs.bar[-1] * full + (glyphs.bar[part] if part and full < cells else "")
    return Seg(on, role), Seg(glyphs.rest * (cells - len(on)), "rule")


def spark(values: Sequence[float], cells: int, top: float | None, glyphs: Glyphs) -> str:
    """The newest `cells` values as one line of blocks, right-aligned. top: value of a full block (None = their maximum)."""
    if cells <= 0:
        return ""
    tail = values[-cells:]
    high = top if top is not None else max(tail, default=0.0)
    last = len(glyphs.spark) - 1
    text = "".join(
        glyphs.spark[min(last, max(0, round(v / high * last)))] if high > 0 else glyphs.spark[0] for v in tail
    )
    return text.rjust(cells)


_DOTS = ((0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08))  # bottom to top, left and right column


def chart(values: Sequence[float], cells: int, height: int, top: float | None, glyphs: Glyphs) -> list[str]:
    """An area chart of `height` lines: braille (2 values a cell, 4 levels a line), or columns in ASCII. Newest at the right."""
    if cells <= 0 or height <= 0:
        return []
    per_cell = 1 if glyphs.ascii else 2
    tail = list(values[-cells * per_cell :])
    high = top if top is not None else max(tail, default=0.0)
    levels = height * (1 if glyphs.ascii else 4)
    units = [0 if high <= 0 else min(levels, max(0, round(v / high * levels))) for v in tail]
    units = [max(1, u) if v > 0 else u for u, v in zip(units, tail, strict=True)]
    units = [-1] * (cells * per_cell - len(units)) + units
    out: list[str] = []
    for row in range(height - 1, -1, -1):
        text: list[str] = []
        for cell in range(cells):
            if glyphs.ascii:
                u = units[cell]
                text.append("#" if u > row else ("." if row == 0 and u >= 0 else " "))
                continue
            code = 0
            for column in (0, 1):
                u = units[cell * 2 + column]
                for dot in range(4):
                    if u > row * 4 + dot or (row == 0 and dot == 0 and u >= 0):
                        code |= _DOTS[column][dot]
            text.append(chr(0x2800 + code) if code else " ")
        out.append("".join(text))
    return out


class Column(NamedTuple):
    """One column of a table. cells: its width (the least one when weight > 0); weight: its share of the room left over.
    keep: columns with the lowest keep leave first when there is no room. limit: never wider than this."""

    title: str
    cells: int
    weight: float = 0.0
    keep: int = 5
    align: str = "<"
    limit: int = 1000


def plan_columns(columns: Sequence[Column], cells: int, gap: int = 1) -> list[tuple[int, int]]:
    """(index, width) of the columns that fit into `cells`, in order."""
    shown = list(range(len(columns)))

    def need() -> int:
        return sum(columns[i].cells for i in shown) + gap * max(0, len(shown) - 1)

    while len(shown) > 1 and need() > cells:
        shown.remove(min(reversed(shown), key=lambda i: columns[i].keep))
    widths = {i: columns[i].cells for i in shown}
    spare = cells - need()
    for _ in range(3):  # a limited column hands its rest on
        open_ = [i for i in shown if columns[i].weight > 0 and widths[i] < columns[i].limit]
        total = sum(columns[i].weight for i in open_)
        if spare <= 0 or not total:
            break
        given = 0
        for i in open_:
            more = min(int(spare * columns[i].weight / total), columns[i].limit - widths[i])
            widths[i] += more
            given += more
        if not given:
            widths[open_[0]] += min(spare, columns[open_[0]].limit - widths[open_[0]])
            break
        spare -= given
    return [(i, widths[i]) for i in shown]


class Across(NamedTuple):
    """A cell that takes the room of the columns after it too, up to the column of index `last`; their own cells are not shown."""

    seg: Seg
    last: int


Cell = str | Seg | Across | Sequence[Seg] | Callable[[int], Sequence[Seg]]


def table_line(cells: Sequence[Cell], plan: Sequence[tuple[int, int]], columns: Sequence[Column], glyphs: Glyphs) -> Line:
    """One row: each cell is text, a segment, segments, or a function of the width (bars, sparklines)."""
    out: list[Seg] = []
    covered = -1
    for n, (index, cell_width) in enumerate(plan):
        if index <= covered:
            continue
        if n:
            out.append(Seg(" "))
        cell = cells[index]
        if isinstance(cell, Across):
            covered = cell.last
            cell_width = sum(w + 1 for i, w in plan if index <= i <= covered) - 1
            cell = cell.seg
        if callable(cell):
            out.extend(fit_line(cell(cell_width), cell_width))
        elif isinstance(cell, str):
            out.append(Seg(fit(cell, cell_width, columns[index].align, glyphs.ellipsis)))
        elif isinstance(cell, Seg):
            out.append(Seg(fit(cell.text, cell_width, columns[index].align, glyphs.ellipsis), cell.role, cell.action))
        else:
            out.extend(fit_line(cell, cell_width))
    return tuple(out)


def table(
    columns: Sequence[Column], rows: Sequence[tuple[str, Sequence[Cell]]], cells: int, glyphs: Glyphs
) -> tuple[Line, tuple[Row, ...]]:
    """Header line and rows of a table that adapts to `cells`."""
    plan = plan_columns(columns, cells)
    header = table_line([Seg(c.title, "dim") for c in columns], plan, columns, glyphs)
    return header, tuple(Row(key, table_line(row, plan, columns, glyphs)) for key, row in rows)
