"""One log of any size as numbered clean lines."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from k2tui.errors import K2Error
from k2tui.sources import logindex
from k2tui.sources.logindex import LogFile, fold


def wait(log: LogFile) -> LogFile:
    end = time.monotonic() + 20
    while not log.is_complete():
        assert time.monotonic() < end
        time.sleep(0.005)
    return log


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(logindex, "BLOCK_B", 64)
    monkeypatch.setattr(logindex, "LINE_MAX_B", 4096)


_TEXT = st.lists(
    st.one_of(st.text(alphabet="abc é\t", max_size=30), st.text(alphabet="xy", min_size=60, max_size=200)),
    max_size=40,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_TEXT, st.booleans(), st.integers(0, 45), st.integers(1, 20))
@example(["x" * 60, "aaa\t"], False, 0, 2)  # the line that reaches into the next block is not plain there
def test_lines_equal_those_of_the_whole_file(small_blocks, tmp_path, texts, ends, start, count):
    data = "\n".join(texts).encode() + (b"\n" if ends else b"")
    path = tmp_path / "a.log"
    path.write_bytes(data)
    want = [fold(p) for p in data.split(b"\n")]
    if data.endswith(b"\n") or not data:
        want.pop()
    log = wait(LogFile(path))
    try:
        assert log.line_count() == len(want)
        assert list(log.lines(start, count)) == want[start : start + count]
        for pattern in ("a", "xy+", "c é"):
            hits = [n for n, t in enumerate(want) if re.search(pattern, t)]
            if want:
                at = min(start, len(want) - 1)
                assert log.search(pattern, at) == next((n for n in hits if n >= at), None)
                assert log.search(pattern, at, forward=False) == next(
                    (n for n in reversed(hits) if n <= at), None
                )
    finally:
        log.close()


def test_clean_text_and_folded_bars(tmp_path):
    path = tmp_path / "a.log"
    path.write_bytes(
        b"\x1b[31mred\x1b[0m\tline\x07\r\n\r 1%|#| 1/9\r 2%|#| 2/9\r\nlast \xff\x00\x1b]0;title\x07!"
    )
    log = wait(LogFile(path))
    assert list(log.lines(0, 9)) == ["red line", " 2%|#| 2/9", "last \ufffd!"]
    assert log.tail_lines(1) == ["last \ufffd!"]
    log.close()


def test_growth_truncation_and_replacement(tmp_path):
    path = tmp_path / "a.log"
    path.write_bytes(b"a\nb\n")
    log = wait(LogFile(path))
    assert log.line_count() == 2
    with path.open("ab") as fh:
        fh.write(b"c")
    wait(log)
    assert list(log.lines(0, 9)) == ["a", "b", "c"]
    with path.open("ab") as fh:
        fh.write(b"c\nd\n")
    wait(log)
    assert list(log.lines(0, 9)) == ["a", "b", "cc", "d"]
    path.write_bytes(b"new\n")
    wait(log)
    assert list(log.lines(0, 9)) == ["new"]
    log.close()


def test_bad_pattern_folder_and_empty(tmp_path):
    path = tmp_path / "a.log"
    path.write_bytes(b"")
    log = wait(LogFile(path))
    assert log.line_count() == 0 and log.lines(0, 5) == [] and log.search("x", 0) is None
    with pytest.raises(K2Error, match="search pattern"):
        log.search("(", 0)
    log.close()
    with pytest.raises(K2Error, match="folder"):
        LogFile(tmp_path)


def test_memory_does_not_grow_with_the_number_of_lines(tmp_path):
    path = tmp_path / "a.log"
    path.write_bytes(b"short line\n" * 1_000_000)
    log = wait(LogFile(path))
    assert log.line_count() == 1_000_000
    assert len(log._starts) <= 50
    assert list(log.lines(999_999, 5)) == ["short line"]
    log.close()


def test_lines_where_filters_both_ways_and_gives_up_in_time(tmp_path):
    path = tmp_path / "a.log"
    path.write_text("".join(f"[TP{n % 4}] line {n}\n" for n in range(2000)))
    log = wait(LogFile(path))
    rank = lambda text: "TP3" in text  # noqa: E731
    assert [n for n, _ in log.lines_where(rank, 10, 3)] == [11, 15, 19]
    assert [n for n, _ in log.lines_where(rank, 10, 3, forward=False)] == [7, 3]
    assert [n for n, _ in log.lines_where(rank, 9999, 2, forward=False)] == [1999, 1995]
    assert log.lines_where(lambda text: False, 0, 5, limit=500) == []
    log.close()
