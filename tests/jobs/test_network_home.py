"""A home on a real network mount (sshfs to a real sshd on loopback): jobs stay on this machine, also while the server hangs."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from k2tui import cli
from k2tui.core.job import JobSpec, JobState
from k2tui.jobs import folder, place

from .sshd import Sshd, why_not
from .world import running, until

PORT = 31161


def cannot() -> str:
    if shutil.which("sshfs") is None or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "no sshfs or no access to /dev/fuse"
    return why_not()


pytestmark = pytest.mark.skipif(bool(cannot()), reason=cannot())


@pytest.fixture
def network_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Sshd, Path]]:
    """(the mounted home, its server, the folder that stands for /var/tmp)."""
    far, near, local = tmp_path / "far", tmp_path / "near", tmp_path / "vartmp"
    for path in (far, near, local):
        path.mkdir()
    server = Sshd(tmp_path / "sshd", PORT, "Subsystem sftp internal-sftp\n")
    server.start()
    user = pwd.getpwuid(os.getuid()).pw_name
    options = (
        f"port={PORT},IdentityFile={server.folder}/user,StrictHostKeyChecking=no,UserKnownHostsFile=/dev/null"
    )
    made = subprocess.run(
        ["sshfs", "-F", "/dev/null", "-o", options, f"{user}@127.0.0.1:{far}", str(near)],
        capture_output=True,
        text=True,
        timeout=30,
    )
    if made.returncode:
        server.stop()
        pytest.skip(f"sshfs cannot mount here: {made.stderr.strip()}")
    monkeypatch.delenv("K2TUI_HOME")
    monkeypatch.setenv("XDG_STATE_HOME", str(near / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(place, "LOCAL_BASE", local)
    place._kind.cache_clear()
    try:
        yield near, server, local / f"k2tui-{os.getuid()}"
    finally:
        place._kind.cache_clear()
        subprocess.run(["fusermount3", "-u", "-z", str(near)], check=False, capture_output=True)
        server.stop()


def test_jobs_of_a_network_home_live_on_this_machine(
    network_home: tuple[Path, Sshd, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    near, _, local = network_home
    (near / "state").mkdir()
    job_id = folder.submit(JobSpec(id="", stage="t", title="", argv=("echo", "hello")))
    assert folder.wait(job_id, 30).state is JobState.SUCCEEDED
    assert (local / "jobs" / job_id / "output.log").read_text() == "hello\n"
    assert not (near / "state" / "k2tui" / "jobs").exists()
    assert cli.main(["jobs", "list"]) == 0
    assert f"is on fuse.sshfs: jobs are kept on this machine, in {local}" in capsys.readouterr().err


def test_a_job_runs_and_ends_while_its_homes_server_hangs(network_home: tuple[Path, Sshd, Path]) -> None:
    near, server, local = network_home
    script = "for n in 1 2 3 4 5 6 7 8; do echo $n; sleep 0.2; done"
    job_id = folder.submit(JobSpec(id="", stage="t", title="", argv=("sh", "-c", script), cwd="/"))
    running(job_id)
    where = local / "jobs" / job_id
    sessions = server.sessions()
    assert sessions
    for pid in sessions:
        os.kill(pid, signal.SIGSTOP)
    stuck = threading.Thread(target=os.listdir, args=(near,), daemon=True)
    stuck.start()
    try:
        place._kind.cache_clear()  # as in a process that starts now
        until(lambda: [j.state for j in folder.list_jobs()] == [JobState.SUCCEEDED])
        assert cli.main(["jobs", "show", job_id]) == 0
        assert (where / "output.log").read_text() == "1\n2\n3\n4\n5\n6\n7\n8\n"
    finally:
        hung = stuck.is_alive()
        for pid in sessions:
            os.kill(pid, signal.SIGCONT)
    assert hung, "the mount did not hang"
    assert folder.wait(job_id, 30).state is JobState.SUCCEEDED
    until(lambda: not folder.is_held(where / "lock"))  # its keeper has gone
