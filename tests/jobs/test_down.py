"""`k2tui down` and a server that a running job needs; whose port it is that is held."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from k2tui import doctor
from k2tui.config import Profile
from k2tui.core.job import Job, JobSpec, JobState
from k2tui.core.server_jobs import users_of
from k2tui.jobs import folder

from .world import running, until

DOWN = [sys.executable, "-m", "k2tui", "down"]
LISTEN = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); time.sleep(300)"


def of(
    job_id: str, stage: str, *, parent: str = "", url: str = "", state: JobState = JobState.RUNNING
) -> Job:
    kind = "server" if stage == "serve" else "task"
    params = {"url": url} if url else {}
    return Job(JobSpec(job_id, stage, stage, ("x",), kind=kind, parent=parent, params=params), state)


def test_who_needs_a_server() -> None:
    server, there = of("1", "serve", url="http://a"), of("2", "serve", url="http://b")
    pipeline = of("3", "pipeline")
    assert users_of(server, [pipeline, there, server]) == [pipeline], (
        "it has started nothing yet: it may want any"
    )
    step = of("4", "prepare", parent="3", url="http://a", state=JobState.SUCCEEDED)
    jobs = [step, pipeline, there, server]
    assert users_of(server, jobs) == [pipeline] and users_of(there, jobs) == []
    over = of("3", "pipeline", state=JobState.SUCCEEDED)
    assert users_of(server, [step, over, server]) == []
    tuner, trial = of("5", "tune"), of("6", "serve", parent="5")
    assert users_of(trial, [trial, tuner]) == [tuner] and users_of(server, [tuner, server]) == []


@pytest.fixture
def server(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    """(server, the pipeline that started it), both running."""
    pipeline = folder.submit(JobSpec(id="", stage="pipeline", title="pipeline demo", argv=("sleep", "300")))
    monkeypatch.setenv("K2TUI_JOB_ID", pipeline)
    spec = JobSpec(id="", stage="serve", title="tiny", kind="server", argv=(sys.executable, "-c", LISTEN))
    job_id = folder.submit(spec)
    monkeypatch.delenv("K2TUI_JOB_ID")
    running(pipeline)
    running(job_id)
    yield job_id, pipeline
    for one in (job_id, pipeline):
        folder.stop(one, wait_s=10)


def test_down_without_a_terminal_refuses_unless_it_is_meant(server: tuple[str, str]) -> None:
    job_id, pipeline = server
    no = subprocess.run(DOWN, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert no.returncode == 1 and f"pipeline demo (job {pipeline}) needs the server {job_id}" in no.stderr
    assert "--force" in no.stderr and folder.get(job_id).state is JobState.RUNNING
    yes = subprocess.run([*DOWN, job_id], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert yes.returncode == 0 and folder.get(job_id).state is JobState.STOPPED
    assert folder.get(pipeline).state is JobState.RUNNING


@pytest.mark.parametrize(("said", "state"), [(b"n\n", JobState.RUNNING), (b"y\n", JobState.STOPPED)])
def test_down_on_a_terminal_asks(server: tuple[str, str], said: bytes, state: JobState) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(DOWN, stdin=theirs, stderr=theirs, stdout=subprocess.PIPE)
    os.close(theirs)
    seen = b""
    while b"[y/N]" not in seen:
        seen += os.read(ours, 4096)
    assert server[1].encode() in seen
    os.write(ours, said)
    process.communicate(timeout=60)
    os.close(ours)
    assert folder.get(server[0]).state is state


def test_a_held_port_names_the_job_that_holds_it(server: tuple[str, str]) -> None:
    job_id, pipeline = server
    port = int(str(until(lambda: folder.log_path(job_id).read_text().strip())))
    assert doctor.port_owner("127.0.0.1", port).endswith(f", k2tui's own job {job_id} (tiny)")
    profile = Profile(name="t", engine="local", model="asset:tiny-target", port=port)
    (found,) = [f for f in doctor.check_profile(profile) if f.check == "port"]
    assert f"`k2tui down {job_id}`, started by job {pipeline}" in found.todo


def test_the_dashboard_knows_the_demos_server_again(own_home: Path) -> None:
    """`k2tui` after `k2tui demo` and `q` still says that it is the demo."""

    def picture() -> str:
        return subprocess.run(
            [sys.executable, "-m", "k2tui", "--plain"], capture_output=True, text=True, timeout=60
        ).stdout

    params = {"engine": "local", "profile": "tiny", "url": "http://127.0.0.1:1", "port": 1}
    spec = JobSpec(id="", stage="serve", title="tiny", kind="server", argv=("sleep", "300"), params=params)
    job_id = folder.submit(spec)
    running(job_id)
    assert picture().startswith("DEMO: ")
    folder.stop(job_id, wait_s=10)
    assert not picture().startswith("DEMO: ")
