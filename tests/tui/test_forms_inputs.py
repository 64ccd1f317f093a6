"""What the dashboard's forms refuse before there is a job, through the real monitor."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from k2tui import config, stages
from k2tui.core.job import Job, JobSpec, JobState
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


def _done(job_id: str, stage: str, cwd: Path, *argv: str, **params: object) -> Job:
    return Job(JobSpec(job_id, stage, stage, argv, cwd=str(cwd), params=params), JobState.SUCCEEDED)


def test_forms_begin_with_what_the_newest_jobs_made(monitor: Monitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, target = tmp_path / "run", tmp_path / "model"
    train = _done("2", "train", tmp_path, "python", "--target", str(target), states="run/states", out="run/draft")
    jobs = [
        Job(JobSpec("4", "extract", "x", (), params={"out": "/failed"}), JobState.FAILED),
        train,
        _done("1", "extract", tmp_path, out="run/states"),
    ]
    monkeypatch.setattr("k2tui.monitor.folder.list_jobs", lambda: jobs)

    def fields(stage: str) -> dict[str, str]:
        monitor._look(0.0)  # pyright: ignore[reportPrivateUsage]
        found = next(s for s in monitor.snapshot().stages if s.name == stage)
        return {name: value for name, value, _hint in found.fields}

    assert fields("train") == {"states": "states", "target": "", "out": "draft"}  # nothing lies there
    assert fields("evaluate") == {"draft": "", "target": "", "states": "states"}
    for made in (target, run / "states", run / "draft" / "draft-best", run / "newer"):
        made.mkdir(parents=True)
    jobs[1] = replace(train, result={})  # another look at the jobs
    assert fields("train") == {"states": str(run / "states"), "target": str(target), "out": "draft"}
    assert fields("evaluate") == {"draft": str(run / "draft" / "draft-best"), "target": str(target), "states": str(run / "states")}
    jobs.insert(0, _done("5", "extract", tmp_path, out=str(run / "newer")))  # of another model, it may be
    assert fields("train") == {"states": str(run / "newer"), "target": "", "out": "draft"}
    assert fields("evaluate")["states"] == str(run / "states")
    (run / "draft" / "draft-last").mkdir()
    jobs[2] = replace(train, result={"draft": str(run / "draft" / "draft-last")})
    assert fields("evaluate")["draft"].endswith("draft-last")


def test_evaluate_on_prompts_needs_a_server(monitor: Monitor) -> None:
    with pytest.raises(K2Error, match="no server is ready"):
        monitor.preview("evaluate", {"prompts": "p.jsonl"})


@pytest.mark.parametrize(
    ("stage", "params", "why"),
    [
        ("serve", {"profile": "tiny", "port": "8o"}, "serve: port must be a whole number from 1 to 65535, not '8o'"),
        ("serve", {"profile": "tiny", "tp_size": True}, "serve: tp_size must be a whole number of at least 1"),
        ("prepare", {"prompts": "p", "out": "o", "temperature": "hot"}, "prepare: temperature must be a number of at least 0"),
        ("prepare", {"prompts": "p", "out": "o", "top_p": 1.5}, "prepare: top_p must be a number from 0 to 1, not '1.5'"),
        ("extract", {"data": "d", "out": "o", "limit": "1e3"}, "extract: limit must be a whole number"),
        ("train", {"states": "s", "out": "o", "nproc": "two"}, "train: nproc must be a whole number"),
        ("train", {"states": "s", "out": "o", "gpus": "0,-1"}, "train: gpus must be numbers such as 0,1"),
        ("train", {"states": "s", "out": "o", "lr": "nan"}, "train: lr must be a number"),
        ("evaluate", {"draft": "d", "states": "s", "chains": "9" * 400}, "evaluate: chains must be a whole number"),
    ],
)  # fmt: skip
def test_a_number_that_is_none_is_named(stage: str, params: dict[str, object], why: str) -> None:
    with pytest.raises(K2Error) as caught:
        stages.get(stage).plan(config.load(None), params)
    assert caught.value.message.startswith(why)


def test_numbers_of_a_form_are_texts_and_a_hole_is_filled_later() -> None:
    loaded = config.load(None)
    plan = stages.get("serve").plan(loaded, {"profile": "tiny", "port": "44001"})
    assert plan.locks == ("port:44001",) and (plan.params or {})["url"] == "http://127.0.0.1:44001"
    held = {"states": "s", "out": "o", "target": "t", "epochs": "{check.result.epochs}"}
    assert "--epochs={check.result.epochs}" in stages.get("train").plan(loaded, held).argv


def test_a_step_that_the_pipeline_lacks_is_named_with_the_nearest(monitor: Monitor) -> None:
    with pytest.raises(K2Error, match="to: pipeline eagle3 has no step 'trian'; did you mean 'train'"):
        monitor.preview("pipeline", {"to": "trian"})
    assert "--to" in monitor.preview("pipeline", {"to": "train"})


def test_a_space_that_is_no_file_is_refused_at_once(monitor: Monitor, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    for name in ("pipe.toml", ".", "/dev/zero"):
        with pytest.raises(K2Error, match=r"no regular file|Is a directory"):
            monitor.preview("tune", {"space": name})
    with pytest.raises(K2Error, match="null byte"):
        monitor.preview("tune", {"space": "a\0b"})
