"""The ETA: learned, corrected, calibrated; and its history on disk."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k2tui.core.eta import LearnedEta, StartRecord, accuracy, time_at
from k2tui.core.load import Phase, State
from k2tui.engines._reading import load_tracker
from k2tui.sources import loadhistory

_SPEC = importlib.util.spec_from_file_location(
    "eta_benchmark", Path(__file__).parent.parent / "benchmarks" / "eta.py"
)
assert _SPEC and _SPEC.loader
bench = importlib.util.module_from_spec(_SPEC)
sys.modules["eta_benchmark"] = bench
_SPEC.loader.exec_module(bench)


def starts(kinds, seed=1):
    chance = random.Random(seed)
    return [
        bench.record_of(bench.start_log(kind(chance), chance, bench.T0 - 1e5 + n)[0])
        for n, kind in enumerate(kinds)
    ]


def test_a_record_holds_the_phases_and_the_curve_and_survives_the_disk():
    record = starts([bench.cold])[0]
    assert record.shards == 64
    assert [p for p, _ in record.phases][:3] == [Phase.BOOT, Phase.DIST_INIT, Phase.WEIGHT_LOAD]
    assert record.curve[0][0] == 0 and record.curve[-1][0] == 1
    assert sum(s for _, s in record.phases) == pytest.approx(record.ready_s, abs=1.5)
    again = StartRecord.from_json(json.loads(json.dumps(record.to_json())))
    assert again is not None and again.model == record.model and again.shards == 64


@pytest.mark.parametrize("kind", ["warm", "cold", "network"])
def test_phases_after_the_shards_are_part_of_the_eta(kind):
    shards = getattr(bench, kind)
    ours, theirs = [], []
    for seed in range(4):
        chance = random.Random(seed)
        history = starts([shards, bench.warm, shards, shards], seed + 100)
        for a, b, _, _ in bench.play(*bench.start_log(shards(chance), chance), history).values():
            ours.append(a)
            theirs.append(b)
    assert sum(ours) < 0.75 * sum(theirs)


def test_a_warm_start_is_not_predicted_from_cold_ones():
    chance = random.Random(5)
    chunks, _, ready = bench.start_log(bench.warm(chance), chance)
    errors = bench.play(chunks, ready, ready, starts([bench.cold, bench.warm, bench.cold, bench.warm]))
    assert errors[50][0] < 15


def test_without_history_the_eta_is_the_shards_own_pace():
    chance = random.Random(5)
    chunks, ends, _ = bench.start_log([1.0] * 50, chance)
    tracker = load_tracker()
    for at, data in chunks:
        if at > ends - 25:
            break
        tracker.feed(data, at)
    view = tracker.view(at)
    assert view.state is State.LOADING and view.eta_s == pytest.approx(ends - at, abs=4)
    assert view.eta_error_s is None


def test_the_eta_falls_while_nothing_is_printed_and_never_below_the_rest():
    history = starts([bench.cold] * 3)
    chance = random.Random(9)
    chunks, ends, _ = bench.start_log(bench.cold(chance), chance)
    tracker = load_tracker(eta=LearnedEta(history))
    for at, data in chunks:
        if at > ends - 30:
            break
        tracker.feed(data, at)
    etas = [tracker.view(at + wait).eta_s for wait in (0, 1, 2, 60)]
    assert etas[0] > etas[1] >= etas[2] >= etas[3] > 40


def test_the_error_is_calibrated_by_earlier_predictions():
    history = [replace(r, predictions={"10%": (100.0, 80.0)}) for r in starts([bench.cold] * 5)]
    chance = random.Random(3)
    chunks, _, _ = bench.start_log(bench.cold(chance), chance)
    tracker = load_tracker(eta=LearnedEta(history))
    for at, data in chunks:
        tracker.feed(data, at)
        view = tracker.view(at)
        if view.target and view.target.done >= 8:
            break
    assert view.eta_error_s == pytest.approx(view.eta_s * 0.25, rel=0.01)
    assert accuracy(history)[0].mean_error_s == 20


def test_recorder_writes_a_start_once_with_what_was_predicted(tmp_path):
    path = tmp_path / "state" / "loads.jsonl"
    for record in starts([bench.cold] * 3):
        assert loadhistory.append(record, path)
    chance = random.Random(4)
    chunks, _, _ = bench.start_log(bench.cold(chance), chance)
    tracker = load_tracker(eta=loadhistory.learned(path))
    first, second = (
        loadhistory.StartRecorder(tracker, path=path),
        loadhistory.StartRecorder(tracker, path=path),
    )
    for at, data in chunks:
        tracker.feed(data, at)
        view = tracker.view(at)
        first.look(view, at)
        second.look(view, at)
    records = loadhistory.read(path)
    assert len(records) == 4
    assert set(records[-1].predictions) == {"start", "10%", "50%", "90%", "after shards"}
    for predicted, true in records[-1].predictions.values():
        assert predicted == pytest.approx(true, rel=0.6, abs=20)


def test_corrupt_history_is_skipped(tmp_path):
    path = tmp_path / "loads.jsonl"
    good = starts([bench.warm])[0]
    loadhistory.append(good, path)
    with path.open("ab") as fh:
        fh.write(
            b'\x00\xff{"id": 1}\n[]\n{"id":"a","at_s":"x"}\nnull\n{"id":"b","at_s":1,"engine":"s","model":"m","ready_s":NaN}\n{"torn'
        )
    assert [r.id for r in loadhistory.read(path)] == [good.id]
    assert loadhistory.append(replace(good, id="next"), path)
    assert [r.id for r in loadhistory.read(path)] == [good.id, "next"]
    assert loadhistory.read(tmp_path / "none") == []
    assert loadhistory.append(good, Path("/proc/nowhere/loads.jsonl")) is False


def _write(path, name):
    good = starts([bench.warm])[0]
    for n in range(20):
        loadhistory.append(replace(good, id=f"{name} {n}"), path)
        loadhistory.append(replace(good, id=f"shared {n}"), path)


def test_several_writers_tear_no_line_and_write_no_start_twice(tmp_path):
    path = tmp_path / "loads.jsonl"
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_write, args=(path, name)) for name in "abc"]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    ids = [r.id for r in loadhistory.read(path)]
    assert len(ids) == len(set(ids)) == 80
    assert len(path.read_bytes().splitlines()) == 80


@settings(max_examples=100, deadline=None)
@given(
    st.recursive(
        st.none() | st.floats() | st.text() | st.integers(),
        lambda v: st.lists(v) | st.dictionaries(st.text(), v),
        max_leaves=20,
    )
)
def test_any_json_is_a_record_or_nothing(value):
    keys = ["id", "at_s", "engine", "model", "ready_s", "phases", "curve", "predictions"]
    StartRecord.from_json(value)
    StartRecord.from_json(dict.fromkeys(keys, value))


def test_time_at_interpolates():
    curve = [(0.0, 1.0), (0.5, 11.0), (1.0, 31.0)]
    assert time_at(curve, 0.25) == 6 and time_at(curve, 0.75) == 21 and time_at(curve, 1.0) == 31
    assert time_at([], 0.5) is None


def test_the_error_is_at_most_half_of_tqdms():
    ours: list[float] = []
    theirs: list[float] = []
    for name, (shards, before) in bench.SCENES.items():
        for seed in range(2):
            chance = random.Random(f"{name} {seed}")
            history = [
                bench.record_of(bench.start_log(kind(chance), chance, bench.T0 - 86400 * (9 - n))[0])
                for n, kind in enumerate(before)
            ]
            got = bench.play(*bench.start_log(shards(chance), chance), history)
            ours += [got[mark][0] for mark in (10, 50, 90)]
            theirs += [got[mark][1] for mark in (10, 50, 90)]
    assert len(ours) == 2 * 3 * len(bench.SCENES)
    assert sum(ours) <= 0.5 * sum(theirs)
