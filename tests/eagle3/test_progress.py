"""What a training says of itself: seconds left, phases in the note, lines in the log. The clock is passed in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from k2tui.eagle3.progress import Pace, Progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_first_step_says_nothing_about_the_others() -> None:
    pace = Pace(200, 100)
    pace.step(7.24)  # it compiles
    assert pace.eta_s(1, 740) is None
    pace.step(1.3)  # a second length of batch may compile a kernel again
    pace.step(0.09)
    assert pace.eta_s(3, 740) is None
    pace.step(0.09)
    assert pace.eta_s(4, 740) == pytest.approx(736 * 0.09)
    for seconds in (0.08, 0.1, 9.0, 0.08, 0.08, 0.1, 9.0):  # two steps that waited for something
        pace.step(seconds)
    assert pace.eta_s(11, 740) == pytest.approx(729 * 0.09)
    assert pace.eta_s(740, 740) == 0.0


def test_slow_steps_need_not_be_three() -> None:
    pace = Pace(100, 100)
    pace.step(90.0)
    pace.step(21.0)
    assert pace.eta_s(2, 12) == pytest.approx(210.0)


def test_the_newest_steps_count() -> None:
    pace = Pace(1000, 1000)
    for n in range(300):
        pace.step(2.0 if n < 200 else 0.5)
    assert pace.eta_s(300, 400) == pytest.approx(50.0)


def test_evaluations_and_saves_to_come_are_counted() -> None:
    pace = Pace(200, 100)
    for seconds in (9.0, 1.0, 1.0, 1.0):
        pace.step(seconds)
    pace.took("eval", 10.0)
    pace.took("save", 5.0)
    pace.took("chain", 3.0)
    # after step 250 of 740: evaluated at 400, 600, 740; saved at 300..700, 740; chains once
    assert pace.eta_s(250, 740) == pytest.approx(490 + 3 * 10 + 6 * 5 + 3)
    assert pace.eta_s(600, 800) == pytest.approx(200 + 1 * 10 + 2 * 5 + 3)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("K2TUI_JOB_DIR", str(tmp_path))
    monkeypatch.setattr("k2tui.jobs.report._last", -1e9)
    return tmp_path / "progress.json"


def test_a_phase_tells_its_count_and_time_left_beside_the_steps(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, said = Clock(), list[str]()
    run = Progress(said.append, clock=clock)
    run.total, run.pace = 740, Pace(200, 100)

    def note() -> str:
        told = json.loads(job.read_text())
        assert (told["done"], told["total"], told["unit"], told["eta_s"]) == (0, 740, "steps", None)
        return told["note"]

    with run.phase("judging the untrained draft", 100, cost="eval", whole=1000, cold=True) as part:
        assert note() == "judging the untrained draft: 0/100 samples"
        for done, at in ((20, 112.0), (40, 113.0), (100, 116.0)):
            clock.now = at
            monkeypatch.setattr("k2tui.jobs.report._last", -1e9)
            part(done)
            if done == 20:
                assert note() == "judging the untrained draft: 20/100 samples, 48 s left"
            if done == 40:  # by the pace of the second part: the first one compiled
                assert note() == "judging the untrained draft: 40/100 samples, 3.0 s left"
        assert note() == "judging the untrained draft: 100/100 samples"
    assert said == [
        "judging the untrained draft: 100 samples",
        "judging the untrained draft: 20/100 samples, 48 s left",
        "judging the untrained draft: took 16 s",
    ]
    for seconds in (9.0, 1.0, 1.0, 1.0):
        run.pace.step(seconds)
    run.step = 4
    assert run.eta_s == pytest.approx(736 + 4 * 50.0)  # 80 samples in 4 s: 1000 in 50 s


def test_a_cold_phase_of_one_part_tells_no_cost_and_a_short_one_no_line(job: Path) -> None:
    clock, said = Clock(), list[str]()
    run = Progress(said.append, clock=clock)
    run.total, run.pace = 10, Pace(5, 5)
    with run.phase("judging", 8, cost="eval", cold=True, quiet=True) as part:
        clock.now += 1.5
        part(8)
    with run.phase("saving", cost="save", quiet=True):
        clock.now += 0.5
    assert said == []
    for seconds in (3.0, 1.0, 1.0, 1.0):
        run.pace.step(seconds)
    run.step = 4
    assert run.eta_s == pytest.approx(6 + 2 * 0.5)


def test_other_ranks_are_silent(job: Path) -> None:
    said: list[str] = []
    run = Progress(said.append)
    run.shown = False
    with run.phase("judging", 8) as part:
        part(8)
    run.note("x")
    assert said == [] and not job.exists()
