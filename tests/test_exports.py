"""Saved texts: whole, private, never over another file, and a full or forbidden folder says so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from k2tui import exports
from k2tui.errors import K2Error


async def test_two_in_one_second_are_two_files(own_home: Path) -> None:
    paths = [await exports.save_text("report of ../../x \x1b[31m", ".md", f"text {n}\n") for n in range(3)]
    assert [p.read_text() for p in paths] == ["text 0\n", "text 1\n", "text 2\n"]
    for path in paths:
        assert path.parent == own_home / "saved" and path.suffix == ".md" and path.name.startswith("report-of-..-..-x")
        assert path.stat().st_mode & 0o077 == 0
    assert sorted(p.name for p in (own_home / "saved").iterdir()) == sorted(p.name for p in paths), "no temp file stays"


async def test_a_place_that_takes_nothing(own_home: Path) -> None:
    (own_home / "saved").write_text("a file is in the way")
    with pytest.raises(K2Error, match="saved: cannot save report"):
        await exports.save_text("report", ".md", "text")
    assert (own_home / "saved").read_text() == "a file is in the way"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
async def test_a_full_disk_leaves_nothing(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: object, **_kw: object) -> tuple[int, str]:
        temp = own_home / "saved" / ".t.tmp"
        temp.touch()
        return os.open("/dev/full", os.O_WRONLY), str(temp)

    monkeypatch.setattr(exports.tempfile, "mkstemp", full)
    with pytest.raises(K2Error, match="No space left"):
        await exports.save_text("report", ".md", "text")
    assert not list((own_home / "saved").iterdir())
