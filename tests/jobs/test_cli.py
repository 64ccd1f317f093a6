from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from k2tui import cli
from k2tui.core.job import JobState
from k2tui.jobs import folder, procs

from .world import running, until

ROOT = Path(__file__).parents[2]
Submit = Callable[..., str]
Capture = pytest.CaptureFixture[str]


def call(*argv: str) -> int:
    return cli.main(list(argv))


def test_submit_list_show_logs_wait_delete(home: Path, capsys: Capture) -> None:
    assert (
        call(
            "jobs",
            "submit",
            "--stage",
            "demo",
            "--title",
            "a try",
            "--env",
            "A=1",
            "--",
            "sh",
            "-c",
            "echo $A; echo two; exit 4",
        )
        == 0
    )
    job_id = capsys.readouterr().out.strip()
    assert job_id.endswith("-demo")
    assert call("jobs", "wait", "demo", "--timeout", "20") == 4
    assert f"{job_id} failed: exit 4" in capsys.readouterr().out
    assert call("jobs", "list") == 0
    row = capsys.readouterr().out.splitlines()[1]
    assert row.startswith(job_id) and "failed" in row and "a try" in row and row.endswith("exit 4")
    assert call("jobs", "list", "--json") == 0
    assert json.loads(capsys.readouterr().out)["jobs"][0]["exit_code"] == 4
    assert call("jobs", "show", "demo", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["argv"][0] == "sh" and shown["env"] == {"A": "1"} and shown["folder"].endswith(job_id)
    assert call("jobs", "show", "demo") == 0
    assert "exit code      4" in capsys.readouterr().out
    assert call("jobs", "logs", "demo") == 0
    assert capsys.readouterr().out == "1\ntwo\n"
    assert call("jobs", "logs", "demo", "-n", "1") == 0
    assert capsys.readouterr().out == "two\n"
    assert call("jobs", "delete", "demo") == 2, "nothing is deleted by a guess"
    assert call("jobs", "delete", job_id) == 0
    capsys.readouterr()
    assert call("jobs", "list", "--json") == 0
    assert json.loads(capsys.readouterr().out)["jobs"] == []


def test_stop_and_retry(home: Path, capsys: Capture) -> None:
    call("jobs", "submit", "--", "sleep", "600")
    job_id = capsys.readouterr().out.strip()
    running(job_id)
    assert call("jobs", "wait", job_id, "--timeout", "0.1") == 124
    assert call("jobs", "retry", job_id) == 3, "its work goes on"
    assert f"k2tui jobs stop {job_id}" in capsys.readouterr().err
    assert call("jobs", "stop", job_id, "--json") == 0
    assert json.loads(capsys.readouterr().out)["state"] == "stopped"
    assert call("jobs", "stop", job_id) == 0
    assert "had ended" in capsys.readouterr().out
    assert call("jobs", "retry", job_id) == 0
    again = capsys.readouterr().out.strip()
    assert again != job_id
    assert call("jobs", "stop", again) == 0


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["jobs", "show", "nothing"], "no job 'nothing'"),
        (["jobs", "submit"], "needs a command"),
        (["jobs", "submit", "--env", "A", "--", "true"], "NAME=VALUE"),
        (["jobs", "submit", "--timeout", "-1", "--", "true"], "timeout is -1 seconds"),
        (["jobs", "submit", "--timeout", "0", "--", "true"], "timeout is 0 seconds"),
        (["jobs", "submit", "--timeout", "nan", "--", "true"], "timeout is nan seconds"),
        (["jobs", "submit", "--grace", "inf", "--", "true"], "grace is inf seconds"),
        (["jobs", "submit", "--grace", "-1", "--", "true"], "grace is -1 seconds"),
        (["jobs", "submit", "--max-restarts", "-1", "--", "true"], "restarts is -1"),
        (["jobs", "submit", "--log-cap", "0", "--", "true"], "--log-cap 0"),
        (["jobs", "submit", "--log-cap", "nan", "--", "true"], "--log-cap nan"),
        (["jobs", "submit", "--lock", "", "--", "true"], "a lock needs a name"),
        (["jobs", "submit", "--", ""], "first word of the command is empty"),
        (["jobs", "submit", "--after", "nothing", "--", "true"], "no job 'nothing'"),
        (["jobs", "submit", "--cwd", "/no/such", "--", "true"], "no such folder"),
        (["jobs", "submit", "--requires", "moon", "--", "true"], "not understood"),
    ],
)
def test_bad_orders_are_one_line_and_exit_2(home: Path, capsys: Capture, argv: list[str], words: str) -> None:
    assert cli.main(argv) == 2
    err = capsys.readouterr().err
    assert words in err and "Traceback" not in err and len(err.splitlines()) <= 2


def test_nothing_of_a_log_reaches_the_terminal_as_a_code(submit: Submit, capsys: Capture) -> None:
    job_id = submit("import sys; sys.stdout.write('\\x1b[2J\\x1b]0;own\\x07 10%\\r 50%\\r100%\\nplain\\n')")
    folder.wait(job_id, 20)
    assert call("jobs", "logs", job_id) == 0
    assert capsys.readouterr().out == "100%\nplain\n"
    assert call("jobs", "logs", job_id, "--raw") == 0
    assert "\x1b[2J" in capsys.readouterr().out


def test_a_secret_that_the_work_writes_is_masked_where_the_log_is_shown(submit: Submit, capsys: Capture) -> None:
    job_id = submit("print('serving with --api-' + 'key S3CR1 --port 1\\nplain')")
    assert folder.wait(job_id, 20).state == "succeeded"
    assert call("jobs", "logs", job_id) == 0
    assert capsys.readouterr().out == "serving with --api-key *** --port 1\nplain\n"
    assert call("jobs", "logs", job_id, "--raw") == 0
    assert "S3CR1" in capsys.readouterr().out, "the log itself is the work's own"


def test_last_lines_of_a_long_log(submit: Submit, capsys: Capture) -> None:
    job_id = submit("for i in range(50000): print(i, 'y' * 40)")
    folder.wait(job_id, 30)
    assert call("jobs", "logs", job_id, "-n", "3000") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3000 and lines[0].startswith("47000 ") and lines[-1].startswith("49999 ")
    assert call("jobs", "logs", job_id, "-n", "0") == 0
    assert len(capsys.readouterr().out.splitlines()) == 50000


def test_follow_ends_with_the_job(submit: Submit) -> None:
    job_id = submit(
        "import time\nfor i in range(5): print(i, flush=True); time.sleep(0.2)\nraise SystemExit(1)"
    )
    done = subprocess.run(
        [sys.executable, "-m", "k2tui", "jobs", "logs", "-f", job_id],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (
        done.stdout.split() == ["0", "1", "2", "3", "4"]
        and "failed: exit 1" in done.stderr
        and done.returncode == 1
    )


def test_a_command_line_loads_nothing_heavy(home: Path) -> None:
    code = (
        "import sys\nfrom k2tui.cli import main\nmain(['jobs', 'list'])\nmain(['board', 'find'])\n"
        "bad = {'textual', 'rich', 'torch', 'transformers', 'sglang', 'psutil', 'pynvml', 'httpx', 'asyncio'} & set(sys.modules)\n"
        "print(sorted(bad), file=sys.stderr); sys.exit(bool(bad))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_job_outlives_the_terminal_that_started_it(home: Path) -> None:
    """A shell on a pty submits a job; then the pty goes away, as sshd does when the connection drops."""
    pid, master = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        code = "import sys, time; from k2tui.cli import main; main(['jobs', 'submit', '--', 'sleep', '600']); time.sleep(600)"
        os.execv(sys.executable, [sys.executable, "-c", code])
    until(lambda: folder.list_jobs() and folder.list_jobs()[0].state is JobState.RUNNING, 30)
    job = folder.list_jobs()[0]
    os.close(master)
    _, status = until(lambda: (r := os.waitpid(pid, os.WNOHANG))[0] and r, 20)  # type: ignore[misc]
    assert os.waitstatus_to_exitcode(status) == -signal.SIGHUP, "the shell died of it"
    time.sleep(0.5)
    now = folder.get(job.spec.id)
    assert now.state is JobState.RUNNING and procs.birth(now.pid or 0) and procs.birth(now.keeper_pid or 0)
    # no terminal, another session: nothing of the shell is left in them
    for process in (now.pid or 0, now.keeper_pid or 0):
        assert Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[4] == "0"
        assert os.getsid(process) == process
    assert folder.stop(job.spec.id, wait_s=20).state is JobState.STOPPED
