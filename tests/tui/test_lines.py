"""Widths, bars, tables: any text fits exactly, outside text cannot bring markup or control codes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from k2tui.tui import format as fmt
from k2tui.tui.lines import (
    ASCII,
    UNICODE,
    Across,
    Column,
    Seg,
    bar,
    chart,
    clean,
    fit,
    fit_line,
    line_width,
    plan_columns,
    spark,
    table,
    wrap,
)

TEXTS = st.text(alphabet=st.one_of(st.characters(), st.sampled_from("\x1b[31m草稿🧪👨‍👩‍👧é́\t\r\n\u202e")), max_size=40)


@given(TEXTS, st.integers(0, 30), st.sampled_from("<>^"))
def test_fit_is_exact_and_printable(text: str, cells: int, align: str) -> None:
    out = fit(text, cells, align)
    assert cell_len(out) == cells
    assert out.isprintable()


@given(st.lists(TEXTS, max_size=5), st.integers(1, 40))
def test_fit_line_is_exact(texts: list[str], cells: int) -> None:
    line = fit_line([Seg(t, "ok") for t in texts], cells)
    assert line_width(line) == cells
    assert all(seg.text.isprintable() for seg in line)


def test_clean_takes_escape_codes_and_joiners_away() -> None:
    assert clean("a\x1b[31mred\x07\u202e") == "a·[31mred··"
    assert clean("[bold]x[/]") == "[bold]x[/]"
    assert clean("👨\u200d👩") == "👨👩"


@given(st.one_of(st.none(), st.floats(allow_nan=False)), st.integers(1, 40))
def test_bar_keeps_its_width(share: float | None, cells: int) -> None:
    for glyphs in (UNICODE, ASCII):
        assert line_width(bar(share, cells, "ok", glyphs)) == cells


def test_bar_shows_the_smallest_share() -> None:
    on, off = bar(0.0001, 10, "ok", UNICODE)
    assert on.text == "╸" and len(off.text) == 9
    assert bar(0, 10, "ok", UNICODE)[0].text == ""
    assert bar(1, 10, "ok", ASCII)[0].text == "#" * 10


def test_spark_and_chart() -> None:
    assert spark([0, 50, 100], 5, 100, UNICODE) == "  ▁▅█"
    rows = chart([0, 1, 2, 4], 2, 2, 4, UNICODE)
    assert [len(r) for r in rows] == [2, 2]
    assert rows[0][1] != " " and rows[0][0] == " "
    assert chart([1, 2], 2, 2, 2, ASCII) == [" #", "##"]


@pytest.mark.parametrize("cells", [8, 20, 40, 80, 200])
def test_table_lines_are_exact_and_drop_the_least_columns(cells: int) -> None:
    columns = (Column("a", 4, keep=1), Column("b", 6, weight=1, keep=9, limit=30), Column("c", 5, keep=5, align=">"))
    header, rows = table(columns, [("k", ("xxxxxxxx", "🧪 long long long text", "7"))], cells, UNICODE)
    shown = [i for i, _ in plan_columns(columns, cells)]
    assert 1 in shown and (0 in shown) == (cells >= 17) and (2 in shown) == (cells >= 12)
    assert line_width(header) == line_width(rows[0].line) <= cells


@given(TEXTS, st.integers(4, 20))
def test_wrap_never_overflows(text: str, cells: int) -> None:
    assert all(cell_len(line) <= cells for line in wrap(text, cells))
    assert len(wrap(text, cells, 2)) <= 2


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "n/a"), (0.42, "0.4s"), (12, "12s"), (222, "3:42"), (3840, "1h04"), (183600, "2d3h"), (59.7, "1:00")]
)
def test_durations_take_five_cells(seconds: float | None, text: str) -> None:
    assert fmt.duration(seconds) == text


@given(st.floats(0, 1e12))
def test_counts_and_sizes_stay_narrow(number: float) -> None:
    assert len(fmt.count(number if number < 1e9 else 1e9)) <= 7
    assert len(fmt.size(number)) <= 5


def test_buttons_give_way_before_they_shorten() -> None:
    from k2tui.tui.widgets.bar import Button, button_line

    row = [Button("s", "Start", "a"), Button("P", "Prep", "b", spare=True), Button("", "Tune", "c", spare=True), Button("l", "Log", "d")]

    def text(cells: int) -> str:
        line = button_line(row, cells, None)
        assert line_width(line) == cells
        return "".join(seg.text for seg in line).rstrip()

    assert text(60) == "  s Start   P Prep   Tune   l Log"
    assert text(30) == "  s Start   P Prep   l Log"
    assert text(20) == "  s Start   l Log"
    assert text(14) == "  s Sta   l Lo"


def test_a_cell_across_takes_the_room_of_those_after_it() -> None:
    columns = (Column("a", 2), Column("b", 3, keep=1), Column("c", 4), Column("d", 2))
    for cells in (14, 10):  # with column b, and without
        _header, (plain, wide) = table(columns, [("", ["a", "b", "c", "d"]), ("", [Seg("a"), Across(Seg("b to c, long"), 2), "c", "d"])], cells, UNICODE)
        assert line_width(plain.line) == line_width(wide.line) == cells
    assert "".join(s.text for s in table(columns, [("", ["a", Across(Seg("b to c, long"), 2), "c", "d"])], 14, UNICODE)[1][0].line) == "a  b to c,… d "
