from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from k2tui import cli, paths
from k2tui.core.job import JobSpec, JobState
from k2tui.errors import UsageError
from k2tui.jobs import folder, place, scope

from .world import running, until

MOUNTS = """22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:40 / /home rw,relatime shared:1 - nfs4 server:/home rw
31 30 0:41 / /home/me/local\\040disk rw - xfs /dev/vdb rw
32 22 0:42 / /mnt/s rw - fuse.sshfs a:/ rw
33 22 0:43 / /data rw - lustre x rw
34 22 0:44 / /data rw - ext4 /dev/vdc rw
broken line
"""


@pytest.mark.parametrize(
    ("path", "kind", "network"),
    [
        ("/root/x", "ext4", False),
        ("/home/me/.local/state", "nfs4", True),
        ("/homes", "ext4", False),
        ("/home/me/local disk/x", "xfs", False),
        ("/mnt/s", "fuse.sshfs", True),
        ("/data/x", "ext4", False),
    ],
)
def test_the_file_system_under_a_path(path: str, kind: str, network: bool) -> None:
    assert place.type_of(Path(path), MOUNTS) == kind and place.is_network(kind) == network


@pytest.mark.parametrize("kind", ["tmpfs", "overlay", "btrfs", "zfs", "fuse.ext2", "virtiofs", ""])
def test_local_ones(kind: str) -> None:
    assert not place.is_network(kind)


def test_a_home_on_the_network_moves_the_jobs_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The mount table is written out; everything after it is real."""
    monkeypatch.delenv("K2TUI_HOME")
    home, local = tmp_path / "nfs home", tmp_path / "vartmp"
    local.mkdir()
    monkeypatch.setenv("XDG_STATE_HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
    table = tmp_path / "mounts"
    table.write_text(
        f"1 0 0:1 / / rw - ext4 x rw\n2 1 0:2 / {str(home).replace(' ', chr(92) + '040')} rw - nfs4 y rw\n"
    )
    monkeypatch.setattr(place, "MOUNTINFO", table)
    monkeypatch.setattr(place, "LOCAL_BASE", local)
    place._kind.cache_clear()
    try:
        job_id = folder.submit(JobSpec(id="", stage="t", title="", argv=("true",)))
        assert folder.wait(job_id, 20).state is JobState.SUCCEEDED
        mine = local / f"k2tui-{os.getuid()}"
        assert (mine / "jobs" / job_id).is_dir() and not home.exists()
        assert mine.stat().st_mode & 0o777 == 0o700
        assert cli.main(["jobs", "list"]) == 0
        assert "is on nfs4: jobs are kept on this machine" in capsys.readouterr().err
        # somebody else was there first and may write: the folder is not used
        mine.chmod(0o777)
        assert paths.jobs_dir() == home / "k2tui" / "jobs"
        assert "set K2TUI_HOME" in place.notice(paths.state_dir())
    finally:
        place._kind.cache_clear()


def test_a_job_of_another_machine_is_not_judged_from_here(submit: Callable[..., str]) -> None:
    job_id = submit("import time; time.sleep(600)")
    folder.stop(job_id, wait_s=20) if running(job_id) else None
    path = folder.folder_of(job_id) / "journal.jsonl"
    # the keeper lives for a moment longer than its last line
    until(lambda: not folder.is_held(path.with_name("lock")))
    lines = [line for line in path.read_text().splitlines() if '"ended"' not in line and '"stop"' not in line]
    moved = "\n".join(lines).replace(f'"host":"{os.uname().nodename}"', '"host":"elsewhere"') + "\n"
    here = folder.procs.boot_id()
    path.write_text(moved.replace(here, "their-boot"))
    job = folder.get(job_id)
    assert job.state is JobState.ORPHANED and "started on elsewhere" in job.reason
    path.write_text("\n".join(lines).replace(here, "their-boot") + "\n")
    assert folder.get(job_id).reason == "the machine was rebooted meanwhile"


def test_an_orphan_of_elsewhere_can_be_deleted_by_force(submit: Callable[..., str]) -> None:
    job_id = submit("import time; time.sleep(600)")
    running(job_id)
    folder.stop(job_id, wait_s=20)
    path = folder.folder_of(job_id) / "journal.jsonl"
    lines = [line for line in path.read_text().splitlines() if '"ended"' not in line]
    text = "\n".join(lines).replace(f'"host":"{os.uname().nodename}"', '"host":"elsewhere"')
    path.write_text(text.replace(folder.procs.boot_id(), "b") + "\n")
    assert cli.main(["jobs", "delete", job_id]) == 1
    assert cli.main(["jobs", "delete", job_id, "--force"]) == 0


def test_a_scope_wraps_the_keeper(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small systemd-run that notes its words and becomes the command, as --scope does."""
    fake = tmp_path / "bin" / "systemd-run"
    fake.parent.mkdir()
    fake.write_text(
        '#!/bin/sh\necho "$@" > "$SCOPE_NOTE"\nwhile [ "$1" != "--" ]; do shift; done\nshift\nexec "$@"\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SCOPE_NOTE", str(tmp_path / "note"))
    spec = JobSpec(id="", stage="t", title="", argv=(sys.executable, "-c", "print('in')"), scope=True)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with pytest.raises(UsageError, match="user manager"):
        folder.submit(spec)
    (tmp_path / "run" / "systemd").mkdir(parents=True)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    job_id = folder.submit(spec)
    assert folder.wait(job_id, 20).state is JobState.SUCCEEDED
    note = (tmp_path / "note").read_text()
    assert (
        note.startswith(f"--user --scope --quiet --collect --unit=k2tui-{job_id} -- ")
        and "k2tui.jobs.keeper" in note
    )


def test_what_logind_says(tmp_path: Path) -> None:
    assert scope.kills_at_logout(tmp_path) is None
    conf = tmp_path / "etc" / "systemd" / "logind.conf"
    conf.parent.mkdir(parents=True)
    conf.write_text("[Login]\n#KillUserProcesses=yes\n")
    assert scope.kills_at_logout(tmp_path) is False
    more = tmp_path / "etc" / "systemd" / "logind.conf.d"
    more.mkdir()
    (more / "x.conf").write_text("[Login]\nKillUserProcesses=yes\n")
    assert scope.kills_at_logout(tmp_path) is True
    until(lambda: True)
