"""Job folders with something else in a file's place, and keepers that die while a stop waits: real jobs, real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from k2tui.core.job import Job, JobState
from k2tui.jobs import folder, procs
from k2tui.lifecycle import Stopped, stop_servers
from k2tui.regular import NotRegularError, open_regular, read_regular

from .world import running, until

Submit = Callable[..., str]

DEAF = """
import signal, subprocess, sys, time
signal.signal(15, signal.SIG_IGN)
deaf = [sys.executable, '-S', '-c', 'import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)']
for _ in range(2): subprocess.Popen(deaf, start_new_session=True)
print('up', flush=True)
time.sleep(600)
"""


def k2tui(home: Path, *argv: str, seconds: float = 20) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own: one that hangs fails the test by its time limit."""
    env = {**os.environ, "K2TUI_HOME": str(home)}
    return subprocess.run(
        [sys.executable, "-m", "k2tui", *argv],
        env=env,
        cwd=home,
        capture_output=True,
        text=True,
        timeout=seconds,
    )


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/full"])
def test_only_regular_files_are_opened(tmp_path: Path, path: str) -> None:
    with pytest.raises(NotRegularError, match=r"no regular file \(a device\)"):
        open_regular(path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(NotRegularError, match=r"no regular file \(a FIFO\)"):
        open_regular(tmp_path / "fifo")
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
    (tmp_path / "large").write_bytes(b"12345")
    assert read_regular(tmp_path / "large", 5) == b"12345"
    with pytest.raises(OSError, match="larger than"):
        read_regular(tmp_path / "large", 4)


@pytest.mark.parametrize(
    "name",
    [
        "spec.json",
        "progress.json",
        "result.json",
        "env.json",
        "stop.json",
        "journal.jsonl",
        "output.log",
        "lock",
    ],
)
def test_a_fifo_in_a_job_folder_is_one_damaged_row(submit: Submit, home: Path, name: str) -> None:
    other = submit("import time; time.sleep(600)")
    job_id = submit("import time; time.sleep(600)", kind="server", stage="d")
    running(job_id)
    running(other)
    path = folder.folder_of(job_id) / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    listed = k2tui(home, "jobs", "list")
    assert listed.returncode == 0 and other in listed.stdout and job_id in listed.stdout
    is_read = name not in ("env.json", "stop.json", "output.log", "lock")  # by a list, as JSON
    assert (f"damaged: {name}: no regular file (a FIFO)" in listed.stdout) == is_read
    assert listed.stdout.count("damaged:") == is_read
    assert job_id in k2tui(home, "status").stdout
    assert k2tui(home, "jobs", "show", job_id).returncode == 0
    logs = k2tui(home, "jobs", "logs", job_id)
    assert ("no regular file" in logs.stderr) == (name == "output.log"), logs
    done = k2tui(home, "jobs", "stop", job_id)
    assert done.returncode in (0, 1), done
    assert not procs.by_job([job_id])[job_id], "its work has ended"
    assert folder.get(other).state is JobState.RUNNING
    folder.stop(other, wait_s=20)


def test_down_stops_a_server_whose_spec_is_gone(submit: Submit, home: Path) -> None:
    job_id = submit("import time; time.sleep(600)", kind="server", stage="d")
    pid = running(job_id).pid or 0
    (folder.folder_of(job_id) / "spec.json").unlink()
    (job,) = folder.list_jobs()
    assert (job.spec.kind, job.spec.stage, job.damage) == ("server", "d", "spec.json is missing")
    told = json.loads(k2tui(home, "jobs", "list", "--json").stdout)["jobs"][0]
    assert told["damage"] == "spec.json is missing" and told["state"] == "running"
    done = k2tui(home, "down")
    assert done.returncode == 0 and f"{job_id}: stopped by the user" in done.stdout
    assert not procs.birth(pid)
    again = k2tui(home, "jobs", "retry", job_id)
    assert again.returncode == 1 and "is damaged" in again.stderr


def test_an_orphan_whose_spec_is_gone_is_adopted(submit: Submit) -> None:
    job_id = submit("import time; time.sleep(600)")
    job = running(job_id)
    (folder.folder_of(job_id) / "spec.json").unlink()
    os.kill(job.keeper_pid or 0, signal.SIGKILL)
    until(lambda: folder.get(job_id).state is JobState.ORPHANED)
    assert folder.adopt(job_id)
    assert folder.stop(job_id, wait_s=20).state is JobState.STOPPED


def deaf(job_id: str) -> Job:
    """The job once it is deaf to SIGTERM: before that a stop would end it at once."""
    until(lambda: folder.log_path(job_id).exists() and folder.log_path(job_id).read_text() == "up\n")
    return running(job_id)


def test_a_stop_goes_on_when_the_keeper_is_killed_meanwhile(submit: Submit) -> None:
    job_id = submit(DEAF, kind="server", grace_s=1.0)
    job = deaf(job_id)
    ends: list[Stopped] = []
    stopper = threading.Thread(target=lambda: ends.extend(stop_servers([job_id], timeout_s=60)))
    stopper.start()
    until(lambda: folder.get(job_id).state is JobState.STOPPING)
    os.kill(job.keeper_pid or 0, signal.SIGKILL)
    stopper.join(30)
    assert not stopper.is_alive(), "it did not wait for its whole time limit"
    (end,) = ends
    assert end.job.state is JobState.STOPPED and end.job.reason.startswith("stopped by the user")
    assert end.is_clean and not procs.by_job([job_id])[job_id]
    assert '"e":"adopted"' in (folder.folder_of(job_id) / "journal.jsonl").read_text()


def test_a_stop_whose_keeper_and_work_are_killed_is_no_loss(submit: Submit) -> None:
    job_id = submit(DEAF, grace_s=60.0)
    job = deaf(job_id)
    folder.stop(job_id, by="the tester")
    until(lambda: folder.get(job_id).state is JobState.STOPPING)
    os.kill(job.keeper_pid or 0, signal.SIGKILL)
    until(lambda: not procs.birth(job.keeper_pid or 0))
    end = time.monotonic() + 20
    while left := procs.by_job([job_id])[job_id]:
        procs.signal_all(set(left), signal.SIGKILL)
        assert time.monotonic() < end
    until(lambda: folder.get(job_id).state.is_final)
    job = folder.get(job_id)
    assert job.state is JobState.STOPPED
    assert job.reason == "stopped by the tester (keeper and work are gone without a word)"
