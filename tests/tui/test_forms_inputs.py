"""What the dashboard's forms refuse before there is a job, through the real monitor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from k2tui import config
from k2tui.errors import K2Error
from k2tui.monitor import Monitor


@pytest.fixture
def monitor(own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Monitor]:
    monkeypatch.chdir(tmp_path)
    made = Monitor(config.load(None))
    yield made
    made.stop()


def test_train_and_evaluate_say_which_folder_is_missing(monitor: Monitor, tmp_path: Path) -> None:
    train = {"states": "states", "target": "/t", "out": "draft"}
    with pytest.raises(K2Error, match="states: there is no states in") as missing:
        monitor.preview("train", train)
    assert "x extracts states" in missing.value.hint
    (tmp_path / "states").mkdir()
    assert "k2tui.eagle3.train" in monitor.preview("train", train)
    with pytest.raises(K2Error, match="draft: no folder is given"):
        monitor.preview("evaluate", {"states": "states"})
    (tmp_path / "draft").mkdir()
    assert "k2tui.eagle3.score" in monitor.preview(
        "evaluate", {"states": "states", "draft": "draft"}
    )  # needs no server


def test_evaluate_on_prompts_needs_a_server(monitor: Monitor) -> None:
    with pytest.raises(K2Error, match="no server is ready"):
        monitor.preview("evaluate", {"prompts": "p.jsonl"})
