"""Watching a server that k2tui itself started (by its log, pid or URL) shows one server, not two."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from k2tui import config
from k2tui.core.job import Job, JobSpec, JobState
from k2tui.jobs import folder
from k2tui.monitor import Monitor
from k2tui.verbs.watch import target_for

URL = "http://127.0.0.1:31099"
CODE = "print('[2026-11-29 18:10:00] Load weight begin. avail mem=1.00 GB', flush=True); import time; time.sleep(120)"


def until(done, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture
def job() -> Iterator[Job]:
    """A server job that lives and has logged its first line."""
    spec = JobSpec(
        id="", stage="serve", title="own", argv=(sys.executable, "-S", "-c", CODE), cwd="/", grace_s=1.0
    )
    key = folder.submit(replace(spec, kind="server", params={"url": URL}))

    def now() -> Job:
        return next(j for j in folder.list_jobs() if j.spec.id == key)

    until(
        lambda: (
            now().state is JobState.RUNNING
            and b"Load weight" in (folder.folder_of(key) / "output.log").read_bytes()
        )
    )
    yield now()
    folder.stop(key)
    until(lambda: now().state.is_final)


def names(job: Job, tmp_path: Path) -> list[str]:
    link = tmp_path / "link.log"
    link.symlink_to(folder.folder_of(job.spec.id) / "output.log")
    return [str(folder.folder_of(job.spec.id) / "output.log"), str(link), str(job.pid), URL, URL + "/"]


def test_every_name_of_our_job_is_the_job(job, tmp_path):
    for what in names(job, tmp_path):
        target = target_for(what)
        assert (target.key, target.job.spec.id) == (job.spec.id, job.spec.id), what
    other = tmp_path / "other.log"
    other.write_text("x\n")
    assert target_for(str(other)).job is None
    assert target_for(str(os.getpid()), url="http://127.0.0.1:31098").job is None
    assert target_for("http://127.0.0.1:31097").job is None


def test_the_dashboard_shows_it_once(job, tmp_path):
    monitor = Monitor(config.load(None), watch=[target_for(names(job, tmp_path)[0])])
    monitor.start(lambda: None)
    try:
        until(lambda: any(s.load.state == "loading" for s in monitor.snapshot().servers))
        assert [s.key for s in monitor.snapshot().servers] == [job.spec.id]
    finally:
        monitor.stop()
