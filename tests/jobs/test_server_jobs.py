"""Which servers are shown, and where a stage finds the one that it talks to."""

from __future__ import annotations

from dataclasses import replace

from k2tui import config, stages
from k2tui.core.job import Job, JobSpec, JobState
from k2tui.core.server_jobs import shown_servers


def job(job_id: str, state: JobState, ended_s: float | None = None, kind: str = "server") -> Job:
    spec = JobSpec(id=job_id, stage="serve", title="t", argv=("x",), kind=kind, submitted_s=float(job_id))
    return Job(spec=spec, state=state, ended_s=ended_s)


def test_without_a_living_server_the_one_that_ended_last_is_shown() -> None:
    newest_first = [
        job("4", JobState.SUCCEEDED, 99.0, kind="task"),
        job("3", JobState.FAILED, 5.0),  # started last, ended at once
        job("2", JobState.STOPPED, 60.0),
        job("1", JobState.FAILED, 30.0),
    ]
    assert [j.spec.id for j in shown_servers(newest_first)] == ["2"]
    living = [*newest_first[:2], job("2", JobState.RUNNING), job("1", JobState.STOPPING)]
    assert [j.spec.id for j in shown_servers(living)] == ["2", "1"]
    assert shown_servers(newest_first[:1]) == []
    lost = [
        job("3", JobState.LOST),
        job("2", JobState.STOPPED, 2.5),
    ]  # its end is not known: its start counts
    assert [j.spec.id for j in shown_servers(lost)] == ["3"]


def test_servers_of_tuning_trials_come_last() -> None:
    own, trial = job("1", JobState.RUNNING), job("2", JobState.RUNNING)
    trial = replace(trial, spec=replace(trial.spec, params={"tune": "t1"}))
    assert [j.spec.id for j in shown_servers([trial, own])] == ["1", "2"]


def test_a_profile_s_url_is_one_that_can_be_reached() -> None:
    loaded = config.load(None)
    tiny = loaded.get_profile("tiny")
    for host, url in (
        ("0.0.0.0", "http://127.0.0.1:44003"),
        ("::", "http://127.0.0.1:44003"),
        ("::1", "http://[::1]:44003"),
        ("gpu-a", "http://gpu-a:44003"),
    ):
        changed = replace(loaded, profiles={"tiny": replace(tiny, host=host, port=44003)})
        asked = stages.get("evaluate").plan(changed, {"prompts": "p.jsonl"})
        served = stages.get("serve").plan(changed, {})
        assert f"--url={url}" in asked.argv and (served.params or {})["url"] == url
