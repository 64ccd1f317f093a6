"""A run that was stopped anywhere goes on without losing or repeating a start: the tuner's own order, with starts that cost nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from k2tui import config
from k2tui.core.tuning import Setting, Trial, trial_to_json
from k2tui.core.tuning_text import gain_text
from k2tui.core.tuning_verdict import is_confirmed, winner
from k2tui.tune.__main__ import Tuner
from k2tui.tune.folder import TuneFolder

A: Setting = (("flag", "--max-running-requests", "2"),)
B: Setting = (("flag", "--max-running-requests", "3"),)


def start(setting: Setting, mean: float, no: int | None = None, state: str = "ok") -> Trial:
    values = (mean - 1, mean, mean + 1) if state == "ok" else ()
    return Trial(setting, state, values, is_again=no is not None, again_no=no or 0, cause="" if state == "ok" else "the port is held")


class Paper(Tuner):
    """A tuner whose starts give figures from a list instead of a server's."""

    speeds: dict[Setting, list[float | str]]
    asked: list[tuple[Setting, int | None]]

    def measure(self, setting: Setting, *, again_no: int | None = None) -> Trial:
        self.asked.append((setting, again_no))
        assert len(self.asked) < 40, "it goes round and round"
        got = self.speeds[setting].pop(0) if len(self.speeds[setting]) > 1 else self.speeds[setting][0]
        return start(setting, 0.0, again_no, got) if isinstance(got, str) else start(setting, got, again_no)


def paper(tmp_path: Path, known: list[Trial], speeds: dict[Setting, list[float | str]], more: str = "", name: str = "r") -> Paper:
    file = tmp_path / f"{name}.toml"
    if not file.exists():
        file.write_text(f'profile = "tiny"\n{more}\n[[knob]]\nflag = "--max-running-requests"\nvalues = ["2", "3"]\n')
    run = TuneFolder.create(file)
    for trial in known:
        run.add(trial)
    tuner = Paper(run, config.load())
    tuner.speeds, tuner.asked = speeds, []
    return tuner


@pytest.mark.usefixtures("own_home")
def test_a_later_start_has_a_number_of_its_own_also_after_one_that_failed(tmp_path: Path) -> None:
    known = [start((), 500), start(A, 400), start((), 0, 0, "failed"), start((), 505, 1)]
    tuner = paper(tmp_path, known, {(): [502.0], B: [450.0], A: [400.0]}, "baseline_every = 1")
    assert tuner.go() == 0
    kept = tuner.run.trials()
    assert [t.again_no for t in kept if t.setting == () and t.is_again] == [0, 1, 2], "none took another's place"
    assert tuner.asked == [(B, None), ((), 2)]


@pytest.mark.usefixtures("own_home")
def test_a_start_that_was_only_refused_speaks_against_nothing_and_is_tried_again(tmp_path: Path) -> None:
    known = [start((), 500), start(A, 600), start(B, 450)]
    tuner = paper(tmp_path, known, {(): [501.0], A: ["refused", 601.0, 602.0]})
    assert tuner.go() == 0
    kept = tuner.run.trials()
    assert is_confirmed(tuner.space, kept, A) is None and winner(tuner.space, kept).setting == A  # type: ignore[union-attr]
    assert tuner.asked == [((), 0), (A, 0)], "one refusal is enough for now"
    again = Paper(tuner.run, config.load())
    again.speeds, again.asked = tuner.speeds, []
    assert again.go() == 0 and again.asked[0] == (A, 1)
    assert is_confirmed(again.space, again.run.trials(), A)


@pytest.mark.usefixtures("own_home")
def test_a_run_stopped_between_a_second_start_and_the_baseline_beside_it_goes_on(tmp_path: Path) -> None:
    known = [start((), 340), start(A, 600), start(B, 200), start((), 342, 0), start(A, 350, 0)]
    tuner = paper(tmp_path, known, {(): [299.5, 341.0], A: [352.0, 348.0]})
    assert tuner.go() == 0
    kept = tuner.run.trials()
    assert tuner.asked[0] == ((), 1) and (A, 1) in tuner.asked, "what the baseline left open is asked again"
    assert is_confirmed(tuner.space, kept, A) is not None and gain_text(tuner.space, kept, A)


@pytest.mark.usefixtures("own_home")
def test_lines_that_no_tuner_wrote_are_left_out(tmp_path: Path) -> None:
    import json

    run = paper(tmp_path, [start((), 500)], {}).run
    good = trial_to_json(start(A, 600))
    for change in (
        {"values": [1.7e308] * 3}, {"values": [float("inf"), float("-inf")]}, {"values": [float("nan")]}, {"values": [1e-320]},
        {"ready_s": "x"}, {"took_s": "x"}, {"accept_length": "x"}, {"ready_s": float("inf")}, {"stop_s": float("nan")},
        {"setting": [["flag", "\ud800", "1"]]}, {"figures": {"a": float("nan")}},
    ):  # fmt: skip
        with (run.path / "trials.jsonl").open("a") as fh:
            fh.write(json.dumps(good | change) + "\n")
    assert run.trials() == [start((), 500)]
    nothing = start(A, 600)
    run.add(Trial(A, values=(0.0, 0.0, 0.0), is_again=True))
    run.add(nothing)
    assert is_confirmed(run.space, run.trials(), A) is False
