"""A tuner that is killed leaves no server behind, or it is named: real jobs, the tuner played by a script that submits a server as it does."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from k2tui import cli
from k2tui.core.job import Job, JobState
from k2tui.core.server_jobs import left_over
from k2tui.jobs import folder, procs
from k2tui.jobs.start import PACKAGE_ROOT

from .world import running, until

TUNER = f"""
import sys, time
sys.path.append({str(PACKAGE_ROOT)!r})
from k2tui.core.job import JobSpec
from k2tui.jobs import folder
nap = (sys.executable, '-S', '-c', 'import time; time.sleep(600)')
folder.submit(JobSpec(id='', stage='serve', title='trial', argv=nap, kind='server', params={{'tune': 'r1'}}))
folder.submit(JobSpec(id='', stage='bench', title='pass', argv=nap))
time.sleep(600)
"""


@pytest.fixture
def tuner(submit: Callable[..., str], home: Path) -> tuple[Job, Job, Job]:
    """The tuner, the server and the benchmark of its trial, all running."""
    run = home / "tune" / "r1"
    run.mkdir(parents=True)
    (run / "space.toml").write_text('profile = "tiny"\n[[knob]]\nflag = "--x"\nvalues = ["1"]\n')
    job_id = submit(TUNER, stage="tune", params={"folder": str(run)})
    by_stage = lambda: {j.spec.stage: j for j in folder.list_jobs()}  # noqa: E731
    until(lambda: len(by_stage()) == 3)
    return running(job_id), running(by_stage()["serve"].spec.id), running(by_stage()["bench"].spec.id)


def test_the_keeper_of_a_killed_tuner_stops_what_it_left(tuner: tuple[Job, Job, Job]) -> None:
    work, server, bench = tuner
    os.kill(work.pid or 0, signal.SIGKILL)
    ended = folder.wait(work.spec.id, 20)
    assert ended.state is JobState.FAILED and any(server.spec.id in note for note in ended.notes)
    for job in (folder.wait(server.spec.id, 20), folder.wait(bench.spec.id, 20)):
        assert job.state is JobState.STOPPED and "its tuner" in job.reason
    assert left_over(folder.list_jobs()) == []


def test_a_job_of_another_stage_leaves_its_jobs_running(submit: Callable[..., str]) -> None:
    job_id = submit(TUNER.replace("params=", "env="), stage="pipeline")
    until(lambda: len(folder.list_jobs()) == 3)
    os.kill(running(job_id).pid or 0, signal.SIGKILL)
    assert folder.wait(job_id, 20).state is JobState.FAILED
    others = [j for j in folder.list_jobs() if j.spec.id != job_id]
    assert [running(j.spec.id).state for j in others] == [JobState.RUNNING] * 2
    for job in others:
        folder.stop(job.spec.id, wait_s=20)


def test_what_a_tuner_without_keeper_left_is_named(
    tuner: tuple[Job, Job, Job], capsys: pytest.CaptureFixture[str]
) -> None:
    work, server, bench = tuner
    for pid in (work.keeper_pid or 0, work.pid or 0):
        os.kill(pid, signal.SIGKILL)
        until(lambda pid=pid: not procs.birth(pid))
    until(lambda: folder.get(work.spec.id).state is JobState.LOST)
    assert {j.spec.id for j in left_over(folder.list_jobs())} == {server.spec.id, bench.spec.id}
    words = f"left running: {server.spec.id}; k2tui down {server.spec.id}, or k2tui tune resume r1"
    assert cli.main(["tune", "list"]) == 0
    assert words in capsys.readouterr().out
    assert cli.main(["tune", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["details"][0]["unfinished"] == words
    assert cli.main(["tune", "show", "r1"]) == 0
    assert words in capsys.readouterr().err
    assert cli.main(["status", "--no-ask"]) == 0
    assert "left over by a tuning run" in capsys.readouterr().out
    assert cli.main(["down", server.spec.id]) == 0
    folder.stop(bench.spec.id, wait_s=20)
    capsys.readouterr()
    cli.main(["tune", "list"])
    assert "k2tui tune resume r1" in capsys.readouterr().out
