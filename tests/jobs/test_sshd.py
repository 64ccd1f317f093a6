from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from k2tui.core.job import JobState
from k2tui.jobs import folder, procs

from .sshd import Sshd, why_not
from .world import until

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is an sshd")


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[Sshd]:
    server = Sshd(tmp_path / "sshd", 32250)
    server.start()
    yield server
    server.stop()


@pytest.mark.parametrize("end", ["session killed", "client killed"])
def test_a_job_outlives_the_ssh_session_that_started_it(sshd: Sshd, home: Path, end: str) -> None:
    words = shlex.join(
        [
            sys.executable,
            "-m",
            "k2tui",
            "jobs",
            "submit",
            "--",
            sys.executable,
            "-S",
            "-c",
            f"import os, time\nwhile not os.path.exists({str(home / 'go')!r}): time.sleep(0.02)\nprint('made it')",
        ]
    )
    client = sshd.login(
        f"cd {shlex.quote(str(ROOT))} && export K2TUI_HOME={shlex.quote(str(home))} && {words} && exec sleep 600"
    )
    until(lambda: folder.list_jobs() and folder.list_jobs()[0].state is JobState.RUNNING, 30)
    job = folder.list_jobs()[0]
    if end == "session killed":
        assert sshd.kill_sessions() >= 1
    else:
        client.kill()
    client.wait(20)
    until(lambda: not sshd.sessions(), 20)
    assert procs.birth(job.pid or 0) and procs.birth(job.keeper_pid or 0)
    (home / "go").touch()
    done = folder.wait(job.spec.id, 30)
    assert done.state is JobState.SUCCEEDED
    assert folder.log_path(job.spec.id).read_text() == "made it\n"
