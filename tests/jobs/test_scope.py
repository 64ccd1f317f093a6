"""`--scope` under a real `systemd --user`: a login whose cgroup is killed, as KillUserProcesses=yes does, and two jobs of it.

The manager runs in a mount namespace of its own, with an empty /run and its own cgroup; nothing of the machine is touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SYSTEMD = "/lib/systemd/systemd"


def why_not() -> str:
    for name in ("unshare", "systemd-run", "dbus-daemon", SYSTEMD):
        if shutil.which(name) is None:
            return f"{name} is not installed"
    if os.geteuid() != 0:
        return "only root may mount an empty /run"
    if "cgroup2" not in Path("/proc/filesystems").read_text():
        return "no cgroup2"
    return ""


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_job_in_a_scope_outlives_a_login_that_is_killed_by_cgroup(tmp_path: Path) -> None:
    done = subprocess.run(
        ["unshare", "-m", "--propagation", "private", sys.executable, __file__, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "K2TUI_HOME": str(tmp_path / "home")},
    )
    if done.returncode == 77:
        pytest.skip(f"no user manager can run here: {done.stderr.strip()[-300:]}")
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["scope of the job"].endswith(f"k2tui-{told['kept']}.scope")
    assert told["keeper is in it too"]
    assert told["after the login was killed"] == {"kept": "running", "plain": "lost"}
    assert told["log went on"], "the job in the scope printed nothing after the login's end"
    assert told["stopped"] == "stopped" and told["left over"] == []


def inside(folder: Path) -> None:
    """In the namespace: a manager, a login's cgroup, a job with --scope and one without, then the kill."""

    def k2tui(*words: str) -> str:
        return subprocess.run(
            [sys.executable, "-m", "k2tui", *words], check=True, stdout=subprocess.PIPE, text=True
        ).stdout.strip()

    def cgroup_of(pid: int) -> str:
        return Path(f"/proc/{pid}/cgroup").read_text().rpartition("0::")[2].strip()

    def kill_all(group: Path) -> None:
        for path in group.rglob("cgroup.procs"):
            for pid in path.read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)

    runtime = Path(f"/run/user/{os.getuid()}")
    top = Path("/sys/fs/cgroup") / f"k2tui-test-{os.getpid()}"
    try:
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)
        subprocess.run(["umount", "-l", "/sys/fs/cgroup"], check=False, stderr=subprocess.DEVNULL)
        subprocess.run(["mount", "-t", "cgroup2", "none", "/sys/fs/cgroup"], check=True)
        Path("/run/systemd/system").mkdir(parents=True)
        runtime.mkdir(mode=0o700, parents=True)
        manager_group, login = top / "manager", top / "login"
        manager_group.mkdir(parents=True)
        login.mkdir()
    except (OSError, subprocess.CalledProcessError) as err:
        print(err, file=sys.stderr)
        sys.exit(77)
    os.environ |= {
        "XDG_RUNTIME_DIR": str(runtime),
        "DBUS_SESSION_BUS_ADDRESS": f"unix:path={runtime}/bus",
    }
    (manager_group / "cgroup.procs").write_text(str(os.getpid()))
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    bus = subprocess.Popen(
        ["dbus-daemon", "--session", f"--address=unix:path={runtime}/bus", "--nofork"], **quiet
    )  # type: ignore[call-overload]
    manager = subprocess.Popen([SYSTEMD, "--user"], **quiet)  # type: ignore[call-overload]
    try:
        end = time.monotonic() + 20
        while subprocess.run(["systemctl", "--user", "is-system-running"], **quiet).returncode:  # type: ignore[call-overload]
            if time.monotonic() > end or manager.poll() is not None:
                print("systemd --user did not come up", file=sys.stderr)
                sys.exit(77)
            time.sleep(0.1)
        work = "import time\nwhile True:\n    print('alive', flush=True)\n    time.sleep(0.05)"
        script = (
            f'echo $$ > {login}/cgroup.procs; for s in "" --scope; do '
            f'{sys.executable} -m k2tui jobs submit $s --stage talk -- {sys.executable} -c "{work}"; done; sleep 300'
        )
        shell = subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, text=True)
        assert shell.stdout is not None
        plain, kept = shell.stdout.readline().strip(), shell.stdout.readline().strip()
        from k2tui.jobs import folder as jobs

        while (job := jobs.get(kept)).pid is None or jobs.get(plain).pid is None:
            time.sleep(0.05)
        told: dict[str, object] = {
            "kept": kept,
            "scope of the job": cgroup_of(job.pid or 0),
            "keeper is in it too": cgroup_of(job.keeper_pid or 0) == cgroup_of(job.pid or 0),
        }
        kill_all(login)  # what logind does to the session's cgroup
        shell.wait(30)
        size = jobs.log_path(kept).stat().st_size
        end = time.monotonic() + 30
        while jobs.log_path(kept).stat().st_size <= size and time.monotonic() < end:
            time.sleep(0.05)
        told["log went on"] = jobs.log_path(kept).stat().st_size > size
        told["after the login was killed"] = {
            "kept": str(jobs.get(kept).state),
            "plain": str(jobs.get(plain).state),
        }
        told["stopped"] = k2tui("jobs", "stop", kept).split()[1].rstrip(":")
        end = time.monotonic() + 30
        while Path(f"/proc/{job.keeper_pid}").exists() and time.monotonic() < end:
            time.sleep(0.05)  # it ends after its last words
        told["left over"] = [
            pid for pid in (job.pid, job.keeper_pid) if pid and Path(f"/proc/{pid}").exists()
        ]
        print(json.dumps(told))
    finally:
        for process in (manager, bus):
            process.kill()
            process.wait()
        Path("/sys/fs/cgroup/cgroup.procs").write_text(str(os.getpid()))
        kill_all(top)
        time.sleep(0.2)
        for group in sorted(top.rglob("*/"), reverse=True):
            group.rmdir()
        top.rmdir()


if __name__ == "__main__":
    inside(Path(sys.argv[1]))
