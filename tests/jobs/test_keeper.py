from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from k2tui import paths
from k2tui.core.job import JobSpec, JobState
from k2tui.errors import K2Error, NotReadyError, UsageError
from k2tui.jobs import folder, procs
from k2tui.jobs.state import ended_alone

from .world import processes_of, running, until

Submit = Callable[..., str]


def test_a_job_runs_and_its_end_is_told(submit: Submit, home: Path) -> None:
    job_id = submit(
        "import os, sys; print('hello', os.environ['K2TUI_JOB_ID'], os.environ['PYTHONUNBUFFERED']); sys.exit(3)"
    )
    job = folder.wait(job_id, 20)
    assert (job.state, job.exit_code, job.reason) == (JobState.FAILED, 3, "exit 3")
    assert folder.log_path(job_id).read_text() == f"hello {job_id} 1\n"
    assert job.took_s is not None and job.cpu_s is not None and job.log_bytes > 0
    assert not (folder.folder_of(job_id) / ".ballast").exists()


def test_the_work_gets_no_terminal_and_nothing_inherited(submit: Submit, tmp_path: Path) -> None:
    held = os.open(tmp_path / "held", os.O_CREAT | os.O_RDWR)
    os.set_inheritable(held, True)
    code = """
import os
links = [f'/proc/self/fd/{f}' for f in sorted(os.listdir('/proc/self/fd'), key=int)]
print([os.path.basename(os.readlink(x)) for x in links if os.path.lexists(x)])
print(os.getsid(0) == os.getpid())
"""
    job_id = submit(code)
    folder.wait(job_id, 20)
    os.close(held)
    assert folder.log_path(job_id).read_text() == "['null', 'output.log', 'output.log', 'work.lock']\nTrue\n"


def test_stop_ends_gently_when_the_work_agrees(submit: Submit) -> None:
    code = "import signal, sys, time\nsignal.signal(15, lambda *_: (print('bye'), sys.exit(0)))\nprint('up')\nwhile True: time.sleep(0.1)"
    job_id = submit(code)
    until(lambda: folder.log_path(job_id).exists() and folder.log_path(job_id).read_text() == "up\n")
    job = folder.stop(job_id, wait_s=20)
    assert (job.state, job.reason, job.exit_code) == (JobState.STOPPED, "stopped by the user", 0)
    assert folder.log_path(job_id).read_text() == "up\nbye\n"


def test_stop_kills_who_will_not_and_who_left_the_group(submit: Submit, home: Path) -> None:
    # the work ignores SIGTERM; one child leaves the session, one of those even its environment
    code = """
import os, signal, subprocess, sys, time
signal.signal(15, signal.SIG_IGN)
sleeper = [sys.executable, '-S', '-c', 'import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)']
subprocess.Popen(sleeper, start_new_session=True)
subprocess.Popen(['sh', '-c', 'env -i setsid sleep 601 & exit 0']).wait()
print('up', flush=True)
time.sleep(600)
"""
    job_id = submit(code, grace_s=0.5)
    until(lambda: folder.log_path(job_id).exists() and "up" in folder.log_path(job_id).read_text())
    pid = running(job_id).keeper_pid
    assert pid is not None
    family = until(lambda: (f := procs.family({pid})) and len(f) >= 4 and f)
    job = folder.stop(job_id, wait_s=20)
    assert job.state is JobState.STOPPED and "killed" in job.reason and job.exit_code == -9
    until(lambda: not [p for p in family if procs.birth(p)])  # type: ignore[attr-defined]


def test_what_the_work_leaves_behind_is_ended(submit: Submit) -> None:
    job_id = submit("import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)")
    job = folder.wait(job_id, 20)
    assert job.state is JobState.SUCCEEDED
    assert job.notes == ("1 process left behind by the work ended",)
    assert procs.by_job([job_id]) == {job_id: []}


def test_a_timeout_ends_the_work_as_failed(submit: Submit) -> None:
    job = folder.wait(submit("import time; time.sleep(600)", timeout_s=0.3), 20)
    assert (job.state, job.reason) == (JobState.FAILED, "timed out after 0.3 s")


def test_a_command_that_is_not_there(home: Path) -> None:
    job_id = folder.submit(JobSpec(id="", stage="t", title="", argv=("/no/such/program",)))
    job = folder.wait(job_id, 20)
    assert (
        job.state is JobState.FAILED
        and job.reason == "not started: /no/such/program: No such file or directory"
    )


def test_what_cannot_be_submitted_is_refused_and_leaves_nothing(home: Path) -> None:
    good = JobSpec(id="", stage="t", title="", argv=("true",))
    for bad in (
        replace(good, argv=()),
        replace(good, argv=("a\0b",)),
        replace(good, cwd="/no/such/folder"),
        replace(good, kind="daemon"),
        replace(good, restart="sometimes"),
        replace(good, requires=("moon:full",)),
        replace(good, after=("nothing",)),
        replace(good, id="../up"),
    ):
        with pytest.raises(UsageError):
            folder.submit(bad)
    assert folder.list_jobs() == []
    assert [p.name for p in paths.jobs_dir().iterdir()] == []


def test_a_chain_runs_with_nobody_watching(submit: Submit, home: Path) -> None:
    first = submit(
        "import os, time\nwhile not os.path.exists('go'): time.sleep(0.05)\nopen('made', 'w').write('x')"
    )
    second = submit("print(open('made').read())", after=(first,))
    third = submit("print('never')", after=(second, first))
    until(lambda: folder.get(second).waiting_for.startswith(f"job {first}"))
    (home / "go").write_text("x")
    assert folder.wait(third, 30).state is JobState.SUCCEEDED
    assert folder.log_path(second).read_text() == "x\n"


def test_a_chain_behind_a_failure_is_skipped_with_the_reason(submit: Submit) -> None:
    first = submit("raise SystemExit(2)")
    second = submit("print('never')", after=(first,))
    third = submit("print('never')", after=(second,))
    job = folder.wait(third, 30)
    assert job.state is JobState.SKIPPED and f"its predecessor {second} is skipped" in job.reason
    assert folder.get(second).reason == f"its predecessor {first} is failed: exit 2"
    assert not folder.log_path(third).exists()


def test_a_waiting_job_says_for_what_and_since_when_and_can_be_stopped(submit: Submit) -> None:
    first = submit("import time; time.sleep(600)", locks=("gpu:0", "port:32200"))
    running(first)
    second = submit("pass", locks=("gpu:1", "gpu:0"))
    until(lambda: folder.get(second).state is JobState.WAITING)
    job = folder.get(second)
    assert job.waiting_for == f"gpu:0 (held by {first})" and job.waiting_since_s is not None
    assert folder.stop(second, wait_s=20).state is JobState.STOPPED
    third = submit("pass", locks=("gpu:1",))
    assert folder.wait(third, 20).state is JobState.SUCCEEDED, "a name that the waiter did not get is free"
    folder.stop(first, wait_s=20)
    assert (folder.get(first).gpu_s or 0) > 0


def test_the_more_urgent_waiter_goes_first(submit: Submit, home: Path) -> None:
    holder = submit("import time; time.sleep(600)", locks=("gpu:0",))
    running(holder)
    code = "import os; open('order', 'a').write(os.environ['WHO'] + ' ')"
    low = submit(code, locks=("gpu:0",), env={"WHO": "low"})
    until(lambda: folder.get(low).state is JobState.WAITING)
    high = submit(code, locks=("gpu:0",), env={"WHO": "high"}, priority=5)
    until(lambda: folder.get(high).state is JobState.WAITING)
    time.sleep(0.6)
    folder.stop(holder, wait_s=20)
    for job_id in (low, high):
        assert folder.wait(job_id, 20).state is JobState.SUCCEEDED
    assert (home / "order").read_text() == "high low "


def test_conditions_before_and_after(submit: Submit, home: Path) -> None:
    waits = submit("print('go')", requires=("file:flag",))
    until(lambda: folder.get(waits).state is JobState.WAITING)
    assert "flag: No such file" in folder.get(waits).waiting_for
    (home / "flag").write_text("x")
    assert folder.wait(waits, 20).state is JobState.SUCCEEDED
    vain = submit("pass", requires=("url:http://127.0.0.1:32299/health",), requires_timeout_s=0.2)
    job = folder.wait(vain, 20)
    assert job.state is JobState.FAILED and "in vain" in job.reason and "refused" in job.reason.lower()
    broken = folder.wait(submit("pass", ensures=("file:promised",)), 20)
    assert broken.state is JobState.FAILED and "promise" in broken.reason
    kept = folder.wait(submit("open('promised', 'w').write('x')", ensures=("file:promised",)), 20)
    assert kept.state is JobState.SUCCEEDED


def test_a_server_is_started_again_and_given_up_in_the_end(submit: Submit) -> None:
    job_id = submit(
        "print('try', flush=True); raise SystemExit(7)",
        kind="server",
        restart="on-failure",
        max_restarts=2,
        backoff_s=0.1,
    )
    job = folder.wait(job_id, 30)
    assert (
        job.state is JobState.FAILED
        and job.reason == "exit 7 (given up after 2 restarts)"
        and job.restarts == 2
    )
    assert folder.log_path(job_id).read_text() == "try\n" * 3


def test_stop_during_the_back_off(submit: Submit) -> None:
    job_id = submit("raise SystemExit(1)", restart="always", backoff_s=60)
    until(lambda: "restart 1 of 5" in folder.get(job_id).waiting_for)
    assert folder.stop(job_id, wait_s=20).state is JobState.STOPPED


def test_killed_by_somebody_else(submit: Submit) -> None:
    job_id = submit("import time; time.sleep(600)")
    os.kill(running(job_id).pid or 0, signal.SIGKILL)
    job = folder.wait(job_id, 20)
    assert job.state is JobState.FAILED and job.exit_code == -9 and "signal 9" in job.reason


def test_a_killed_keeper_shows_as_orphaned_then_lost(submit: Submit) -> None:
    job_id = submit("import time; time.sleep(600)")
    job = running(job_id)
    os.kill(job.keeper_pid or 0, signal.SIGKILL)
    until(lambda: folder.get(job_id).state is JobState.ORPHANED)
    assert procs.birth(job.pid or 0), "the work goes on"
    os.kill(job.pid or 0, signal.SIGKILL)
    job = until(lambda: (j := folder.get(job_id)).state is JobState.LOST and j)  # type: ignore[assignment]
    assert "without a word" in job.reason
    assert '"state":"lost"' in (folder.folder_of(job_id) / "journal.jsonl").read_text(), (
        "the first reader writes it down"
    )


def test_an_orphan_is_adopted_and_can_be_stopped(submit: Submit) -> None:
    job_id = submit("import time; time.sleep(600)", locks=("gpu:0",))
    job = running(job_id)
    os.kill(job.keeper_pid or 0, signal.SIGKILL)
    until(lambda: folder.get(job_id).state is JobState.ORPHANED)
    waiter = submit("pass", locks=("gpu:0",))
    until(lambda: folder.get(waiter).state is JobState.WAITING), "the GPU stays taken under a living orphan"
    with pytest.raises(NotReadyError, match="its work goes on") as told:
        folder.retry(job_id)
    assert "k2tui jobs adopt" in told.value.hint and len(folder.list_jobs()) == 2
    assert folder.adopt_orphans() == [job_id]
    again = until(lambda: (j := folder.get(job_id)).state is JobState.RUNNING and j)
    assert again.keeper_pid != job.keeper_pid and again.pid == job.pid  # type: ignore[attr-defined]
    stopped = folder.stop(job_id, wait_s=20)
    assert stopped.state is JobState.STOPPED
    assert folder.wait(waiter, 20).state is JobState.SUCCEEDED


def test_work_begun_without_a_word_is_found_and_taken_over(submit: Submit) -> None:
    """The keeper dies between the start and the journal's line, and the work has no trace of the job in its environment."""
    code = "import os, sys\nif 'K2TUI_JOB_ID' in os.environ: os.execve(sys.executable, [sys.executable, '-S', '-c', 'import time; time.sleep(600)'], {})"
    job_id = submit(code)
    job = running(job_id)
    until(lambda: not procs.by_job([job_id])[job_id] and procs.birth(job.pid or 0))
    os.kill(job.keeper_pid or 0, signal.SIGKILL)
    path = folder.folder_of(job_id) / "journal.jsonl"
    until(lambda: not procs.birth(job.keeper_pid or 0))
    path.write_text("".join(line + "\n" for line in path.read_text().splitlines() if '"started"' not in line))
    assert folder.get(job_id).state is JobState.ORPHANED
    assert folder.adopt(job_id)
    again = folder.get(job_id)
    assert again.state is JobState.RUNNING and again.pid == job.pid
    assert folder.stop(job_id, wait_s=20).state is JobState.STOPPED
    assert not procs.birth(job.pid or 0)


def test_stop_of_an_orphan_adopts_it_first(submit: Submit) -> None:
    job_id = submit("import time; time.sleep(600)")
    job = running(job_id)
    os.kill(job.keeper_pid or 0, signal.SIGKILL)
    until(lambda: folder.get(job_id).state is JobState.ORPHANED)
    assert folder.stop(job_id, wait_s=20).state is JobState.STOPPED
    assert not procs.birth(job.pid or 0)


def test_a_result_tells_how_an_orphan_ended(submit: Submit, home: Path) -> None:
    code = (
        "import os, time\nwhile not os.path.exists('go'): time.sleep(0.02)\n"
        "open(os.environ['K2TUI_JOB_DIR'] + '/result.json', 'w').write('{\"rows\": 3}')"
    )
    job_id = submit(code)
    after = submit("print('next')", after=(job_id,))
    os.kill(running(job_id).keeper_pid or 0, signal.SIGKILL)
    until(lambda: folder.get(job_id).state is JobState.ORPHANED)
    (home / "go").touch()
    job = folder.wait(job_id, 20)
    assert (
        job.state is JobState.SUCCEEDED and "exit code not known" in job.reason and job.result == {"rows": 3}
    )
    assert folder.wait(after, 20).state is JobState.SUCCEEDED, "the waiting keeper found out by itself"


def test_a_result_that_tells_of_a_failure_is_no_success(tmp_path: Path) -> None:
    assert ended_alone(tmp_path) is None
    (tmp_path / "result.json").write_text('{"ok": false, "cause": "no server answers"}')
    state, why = ended_alone(tmp_path) or (None, "")
    assert state is JobState.FAILED and why.startswith("no server answers (")
    (tmp_path / "result.json").write_text('{"ok": true}')
    assert (ended_alone(tmp_path) or ("",))[0] is JobState.SUCCEEDED


def test_a_reboot_is_seen(submit: Submit, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = submit("import time; time.sleep(600)")
    job = running(job_id)
    os.kill(job.keeper_pid or 0, signal.SIGKILL)
    os.kill(job.pid or 0, signal.SIGKILL)
    monkeypatch.setenv("K2TUI_FAKE_BOOT_ID", "another-boot")
    until(lambda: not procs.birth(job.keeper_pid or 0))
    now = folder.get(job_id)
    assert now.state is JobState.LOST and now.reason == "the machine was rebooted meanwhile"


def test_a_recycled_pid_is_not_mistaken_for_the_work(submit: Submit) -> None:
    job_id = submit("import time; time.sleep(600)")
    job = running(job_id)
    os.kill(job.keeper_pid or 0, signal.SIGKILL)
    os.kill(job.pid or 0, signal.SIGKILL)
    until(lambda: not procs.birth(job.keeper_pid or 0))
    path = folder.folder_of(job_id) / "journal.jsonl"
    # the journal now names a living process (this one) with the birth time of another
    path.write_text(path.read_text().replace(f'"pid":{job.pid},', f'"pid":{os.getpid()},'))
    assert folder.get(job_id).state is JobState.LOST


def test_progress_and_result_are_read(submit: Submit) -> None:
    code = (
        "import os, json, time\nd = os.environ['K2TUI_JOB_DIR']\n"
        "open(d + '/progress.json', 'w').write(json.dumps({'done': 3, 'total': 4, 'unit': 'rows'}))\n"
        "open(d + '/result.json', 'w').write(json.dumps({'rows': 4}))"
    )
    job = folder.wait(submit(code), 20)
    assert job.progress is not None and (job.progress.done, job.progress.unit) == (3.0, "rows")
    assert job.result == {"rows": 4}


def test_retry_repeats_command_folder_and_environment(
    submit: Submit, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FROM_OUTSIDE", "then")
    job_id = submit(
        "import os; print(os.environ['A'], os.environ['FROM_OUTSIDE'], os.getcwd())",
        env={"A": "b"},
    )
    folder.wait(job_id, 20)
    monkeypatch.setenv("FROM_OUTSIDE", "now")
    monkeypatch.chdir("/")
    again = folder.retry(job_id)
    assert folder.wait(again, 20).state is JobState.SUCCEEDED
    assert folder.log_path(job_id).read_text() == f"b then {home}\n"
    assert folder.log_path(again).read_text() == f"b then {home}\n"
    assert folder.get(again).spec.retry_of == job_id


def test_secrets_reach_the_work_and_no_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "outer-secret-1")
    code = (
        "import os, sys; print(len(os.environ['HF_TOKEN']), len(os.environ['MY_API_KEY']), len(sys.argv[2]))"
    )
    spec = JobSpec(
        id="",
        stage="t",
        title="",
        argv=(sys.executable, "-c", code, "--api-key", "argv-secret-33"),
        env={"MY_API_KEY": "env-secret-22"},
    )
    job_id = folder.submit(spec)
    assert folder.wait(job_id, 20).state is JobState.SUCCEEDED
    assert folder.log_path(job_id).read_text() == "14 13 14\n"
    everything = b"".join(p.read_bytes() for p in home.rglob("*") if p.is_file())
    for secret in (b"outer-secret-1", b"argv-secret-33", b"env-secret-22"):
        assert secret not in everything
    with pytest.raises(UsageError, match="MY_API_KEY"):
        folder.retry(job_id)
    monkeypatch.setenv("MY_API_KEY", "x" * 5)
    with pytest.raises(UsageError, match="api-key"):
        folder.retry(job_id)
    monkeypatch.setenv("K2TUI_SECRET_API_KEY", "y" * 6)
    again = folder.retry(job_id)
    folder.wait(again, 20)
    assert folder.log_path(again).read_text() == "14 5 6\n"
    assert (folder.folder_of(job_id) / "spec.json").stat().st_mode & 0o77 == 0


def test_the_log_is_rotated_above_its_cap(submit: Submit) -> None:
    code = (
        "import os, time\ni = 0\n"
        "while i < 200 or not os.path.exists(os.environ['K2TUI_JOB_DIR'] + '/output.log.1'):\n"
        "    print(f'{i:04d} ' + 'x' * 200, flush=True); i += 1; time.sleep(0.002)\n"
        "time.sleep(0.1)\nprint('the last line')"
    )
    job_id = submit(code, log_cap_b=20_000)
    job = folder.wait(job_id, 60)
    assert job.state is JobState.SUCCEEDED
    assert any("log cut" in n for n in job.notes)
    assert (folder.folder_of(job_id) / "output.log.1").stat().st_size > 20_000
    last = folder.log_path(job_id).read_text().splitlines()
    assert last[-1] == "the last line"


def test_a_job_may_submit_a_job_that_outlives_it(submit: Submit, home: Path) -> None:
    root = Path(__file__).parents[2]
    code = (
        f"import sys; sys.path.insert(0, {str(root)!r})\n"
        "from k2tui.core.job import JobSpec; from k2tui.jobs import folder\n"
        "print(folder.submit(JobSpec(id='', stage='inner', title='', argv=('sleep', '600'))))"
    )
    outer = folder.wait(submit(code), 20)
    assert outer.state is JobState.SUCCEEDED and outer.notes == ()
    inner = folder.get("inner")
    assert inner.state in (JobState.QUEUED, JobState.RUNNING)
    running(inner.spec.id)
    assert folder.stop(inner.spec.id, wait_s=20).state is JobState.STOPPED


def test_two_submitters_at_once_get_two_jobs(home: Path) -> None:
    import subprocess

    root = Path(__file__).parents[2]
    code = (
        "from k2tui.core.job import JobSpec; from k2tui.jobs import folder\n"
        "[folder.submit(JobSpec(id='', stage='t', title='', argv=('true',))) for _ in range(5)]"
    )
    both = [subprocess.Popen([sys.executable, "-c", code], cwd=root) for _ in range(2)]
    assert [p.wait(60) for p in both] == [0, 0]
    jobs = folder.list_jobs()
    assert len({j.spec.id for j in jobs}) == 10
    for job in jobs:
        assert folder.wait(job.spec.id, 20).state is JobState.SUCCEEDED


def test_ids_sort_by_time_even_when_the_clock_is_set_back(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = folder.submit(JobSpec(id="", stage="t", title="", argv=("true",)))
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 86400)
    second = folder.submit(JobSpec(id="", stage="t", title="", argv=("true",)))
    assert second > first
    job = folder.wait(second, 20)
    assert job.took_s is not None and 0 <= job.took_s < 20


def test_finding_a_job_by_part_of_its_id(submit: Submit) -> None:
    a = submit("pass", stage="bench")
    b = submit("pass", stage="train")
    assert (
        folder.folder_of(a[:8]).name == a
        and folder.folder_of("train").name == b
        and folder.folder_of("last").name == b
    )
    with pytest.raises(UsageError, match="could be any of 2"):
        folder.folder_of(a[:3])
    with pytest.raises(UsageError, match="no job 'nothing'") as caught:
        folder.folder_of("nothing")
    assert a in caught.value.hint or b in caught.value.hint
    for bad in ("", "..", "../..", "/etc"):
        with pytest.raises(UsageError):
            folder.folder_of(bad)
    for job_id in (a, b):
        folder.wait(job_id, 20)


def test_delete_wants_an_ended_job(submit: Submit) -> None:
    job_id = submit("import time; time.sleep(600)")
    running(job_id)
    with pytest.raises(K2Error, match="running"):
        folder.delete(job_id)
    folder.stop(job_id, wait_s=20)
    folder.delete(job_id)
    assert folder.list_jobs() == [] and not list(paths.jobs_dir().glob("*-t"))


def test_the_index_serves_ended_jobs_and_follows_a_change(submit: Submit, home: Path) -> None:
    ids = [submit("print('x')", params={"n": i}) for i in range(9)]
    for job_id in ids:
        folder.wait(job_id, 30)
    first = folder.list_jobs()
    assert [j.spec.id for j in first] == sorted(ids, reverse=True)
    index = json.loads((paths.jobs_dir() / ".index.json").read_text())
    assert set(index["jobs"]) == set(ids)
    folder._cache.clear()
    assert folder.list_jobs() == first, "from the index, field by field the same"
    folder.delete(ids[0])
    folder._cache.clear()
    assert [j.spec.id for j in folder.list_jobs()] == sorted(ids[1:], reverse=True)
    (paths.jobs_dir() / ".index.json").write_text('{"v": 1, "jobs": {"' + ids[1] + '": [1, 2]}}')
    folder._cache.clear()
    assert len(folder.list_jobs()) == 8, "a broken index is no index"


def test_keeper_is_small(submit: Submit) -> None:
    job_id = submit("import time; time.sleep(600)", locks=("gpu:0",))
    pid = running(job_id).keeper_pid or 0
    assert procs.rss_b([pid]) < 20 << 20
    folder.stop(job_id, wait_s=20)


def test_sigterm_to_the_keeper_stops_the_work(submit: Submit) -> None:
    job_id = submit("import time; time.sleep(600)")
    os.kill(running(job_id).keeper_pid or 0, signal.SIGTERM)
    job = folder.wait(job_id, 20)
    assert job.state is JobState.STOPPED and "SIGTERM" in job.reason


def test_nothing_is_left(home: Path) -> None:
    assert processes_of(home) == []
