"""Measurements and the other loads of a host: a command is refused, a job waits, and what ran beside all the same is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from k2tui import paths
from k2tui.benchdb import BenchDb
from k2tui.core import loads
from k2tui.core.job import Job, JobSpec, JobState, Progress
from k2tui.jobs import folder

SMALL = ["--concurrency", "1", "--num-prompts", "2", "--random-output-len", "4", "--warmup", "0"]


def job(
    job_id: str,
    stage: str = "train",
    state: JobState = JobState.RUNNING,
    *,
    parent: str = "",
    locks: tuple[str, ...] = (),
    url: str = "",
    note: str = "",
    times: tuple[float, float | None] = (10.0, None),
) -> Job:
    spec = JobSpec(
        id=job_id, stage=stage, title=stage, argv=("x",), parent=parent, locks=locks, params={"url": url} if url else {},
        kind="server" if stage == "serve" else "task",
    )  # fmt: skip
    return Job(
        spec, state, started_s=times[0], ended_s=times[1], progress=Progress(0, note=note) if note else None
    )


def ids(jobs: list[Job]) -> list[str]:
    return [j.spec.id for j in jobs]


def test_what_counts_as_another_load() -> None:
    url = "http://127.0.0.1:1"
    step, mine = job("3", parent="2"), job("5", "bench", parent="2")
    own = [job("6", "bench"), mine, step, job("2", "pipeline")]
    assert loads.family_of("5", own) == "2"
    assert ids(loads.now(own, "5", url)) == ["6"], "steps of my own pipeline are none"
    assert ids(loads.now(own, "", url)) == ["6", "5", "3", "2"]
    waiting = job("6", "bench", note=f"{loads.WAITS} job 2")
    assert ids(loads.now([waiting, mine, step], "5", url)) == []
    assert (
        loads.now([job("1", "custom"), job("1", state=JobState.WAITING), job("1", "serve")], "5", url) == []
    )
    served = job("0", "serve", url=url, locks=("gpu:0", "port:1"))
    there, here, unknown = job("7", locks=("gpu:1",)), job("8", locks=("gpu:0",)), job("9")
    assert ids(loads.now([served, there, here, unknown], "", url)) == ["8", "9"], "other GPUs do not disturb"


def test_only_the_younger_waits() -> None:
    """A benchmark and a tuning run that meet: one of them goes on, whichever of them looks."""
    old, young = job("1", "tune"), job("4", "bench")
    trial = job("5", "bench", parent="1")
    jobs = [trial, young, old]
    found = loads.to_wait_for(jobs, "4", "")
    assert found is not None and loads.family_of(found.spec.id, jobs) == "1"
    assert loads.to_wait_for(jobs, "5", "") is None


def test_what_ran_during_a_measurement() -> None:
    jobs = [
        job("1", times=(10.0, None)),
        job("2", state=JobState.SUCCEEDED, times=(10.0, 99.0)),
        job("3", state=JobState.SUCCEEDED, times=(10.0, 101.0)),
        job("4", "pipeline"),
        job("5", "serve", times=(10.0, None)),
        job("6", "serve", times=(105.0, None)),
    ]
    assert ids(loads.during(jobs, "", "", 100.0)) == ["1", "3", "6"], (
        "a server's start counts, its running does not"
    )


@pytest.fixture
def train(own_home: Path) -> Iterator[str]:
    job_id = folder.submit(JobSpec(id="", stage="train", title="train the draft", argv=("sleep", "300")))
    end = time.monotonic() + 20
    while folder.get(job_id).state is not JobState.RUNNING:
        assert time.monotonic() < end
        time.sleep(0.02)
    yield job_id
    folder.stop(job_id, wait_s=10)


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "k2tui.cli", "bench", "run", *words, *SMALL],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ,
    )


def test_a_command_is_refused_beside_a_load_or_marked(mock: Any, train: str) -> None:
    refused = bench("--url", mock.url)
    assert refused.returncode == 3 and f"job {train} (train the draft)" in refused.stderr
    assert "--anyway" in refused.stderr
    done = bench("--url", mock.url, "--anyway", "--json")
    (row,) = json.loads(done.stdout)["runs"]
    assert row["flags"] == [f"another load ran: job {train} (train the draft)"]
    folder.stop(train, wait_s=10)
    (row,) = json.loads(bench("--url", mock.url, "--json").stdout)["runs"]
    assert not row["flags"]
    assert not list((paths.state_dir() / "locks").glob("measuring-*"))


def test_a_job_waits_for_the_load(mock: Any, train: str) -> None:
    argv = (sys.executable, "-m", "k2tui.loadgen", "--url", mock.url, *SMALL)
    job_id = folder.submit(JobSpec(id="", stage="bench", title="bench", argv=argv))
    end = time.monotonic() + 30
    while not (
        (p := folder.get(job_id).progress) and p.note == f"waits for the end of job {train} (train the draft)"
    ):
        assert time.monotonic() < end and not folder.get(job_id).state.is_final
        time.sleep(0.05)
    assert ids(loads.now(folder.list_jobs(), "", mock.url)) == [train], "what waits does not load"
    folder.stop(train, wait_s=10)
    assert folder.wait(job_id, timeout_s=30).state is JobState.SUCCEEDED
    with BenchDb(readonly=True) as db:
        (row,) = db.rows(5)
    assert row.job_id == job_id and not row.flags


def test_a_benchmark_by_hand_is_seen(mock: Any, own_home: Path) -> None:
    from k2tui.errors import K2Error
    from k2tui.jobs.loads import Alone

    holder = subprocess.Popen(
        [
            sys.executable, "-c",
            "from k2tui.jobs.loads import Alone; a = Alone('http://x:1'); a.begin(print); print('in', flush=True); input()",
        ],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert holder.stdout is not None and holder.stdout.readline() == "in\n"
    mine = Alone(mock.url)
    with pytest.raises(K2Error, match=f"k2tui bench run of http://x:1 .pid {holder.pid}."):
        mine.begin(print)
    mine.start()
    holder.kill()
    holder.wait()
    assert mine.flags(time.time()) == [f"another load ran: k2tui bench run of http://x:1 (pid {holder.pid})"]
    mine.start()
    assert mine.flags(time.time()) == []
    mine.begin(print)
    mine.close()


def test_a_job_knows_the_job_that_submitted_it(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K2TUI_JOB_ID", "00-pipeline")
    job_id = folder.submit(JobSpec(id="", stage="x", title="x", argv=("true",)))
    assert folder.wait(job_id, timeout_s=20).spec.parent == "00-pipeline"
