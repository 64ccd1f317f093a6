"""Processes are real ones: titles, parents, environments, birth times and signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from k2tui.core.gpu import GpuProcess, GpuSample, GpuView, JobProcess, find_orphans, parse_rank, with_jobs
from k2tui.errors import K2Error, UsageError
from k2tui.sources.hostprocs import HostProcesses
from k2tui.sources.nvml import NvmlSampler
from k2tui.sources.procs import ProcessTable, birth_time_s, describe_process, end_processes, short_name

SLEEP = "import time\ntime.sleep(600)"


@pytest.fixture
def spawn() -> Iterator:
    children: list[subprocess.Popen[bytes]] = []

    def start(title: str = "", *args: str, body: str = SLEEP, **env: str) -> subprocess.Popen[bytes]:
        argv = [title or sys.executable, "-c", body, *args]
        child = subprocess.Popen(
            argv, executable=sys.executable, env={**os.environ, **env}, stdout=subprocess.PIPE
        )
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.wait()
        if child.stdout:
            child.stdout.close()


def wait_until(condition, timeout_s: float = 30.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return False


def wait_title(pid: int, title: str) -> None:
    """Until exec has happened: before it, the child still carries this process's own command line."""
    assert wait_until(
        lambda: (f := ProcessTable().read([pid]).get(pid)) is not None and f.title.startswith(title)
    )


@pytest.mark.parametrize(
    ("title", "rank"),
    [
        ("sglang::scheduler_TP3", "TP3"),
        ("sglang::scheduler_DP1_PP0_TP12_EP3", "DP1 PP0 TP12 EP3"),
        ("sglang::scheduler_ATTN_CP1_MOE_DP0_TP7", "ATTN_CP1 MOE_DP0 TP7"),
        ("sglang::scheduler", "scheduler"),
        ("sglang::detokenizer", "detokenizer"),
        ("VLLM::Worker_TP1", "TP1"),
        ("VLLM::EngineCore_DP0", "DP0"),
        ("python -m sglang.launch_server --tp 8", ""),
        ("", ""),
    ],
)
def test_rank_from_a_title(title, rank):
    assert parse_rank(title) == rank


@pytest.mark.parametrize(
    ("title", "command", "name"),
    [
        ("sglang::scheduler_TP3", "sglang::scheduler_TP3", "sglang::scheduler_TP3"),
        ("python3", "python3 -m sglang.launch_server --port 1", "sglang.launch_server"),
        ("/usr/bin/python3.12", "/usr/bin/python3.12 -u /home/x/train.py --lr 1", "train.py"),
        ("python", "python -c import torch", "python"),
        ("/usr/bin/Xorg", "/usr/bin/Xorg :0", "Xorg"),
        ("", "", ""),
    ],
)
def test_short_name(title, command, name):
    assert short_name(title, command) == name


def test_facts_of_a_real_process(spawn):
    child = spawn("sglang::scheduler_TP3", "--api-key", "sk-0123456789abcdef0123", "evil\x1b[31m\u202ename")
    wait_title(child.pid, "sglang::")
    fact = ProcessTable().read([child.pid])[child.pid]
    assert fact.rank == "TP3" and fact.title == "sglang::scheduler_TP3"
    assert fact.ppid == os.getpid() and fact.uid == os.getuid() and fact.user
    assert abs(fact.started_s - time.time()) < 10 and fact.host_rss_b > 0
    assert "sk-0123456789abcdef0123" not in fact.command
    assert "\x1b" not in fact.command and "\u202e" not in fact.command
    assert fact.orphan_reason == ""


def test_a_pid_that_is_not_here_is_left_out():
    assert ProcessTable().read([2**22 + 5]) == {}


def test_the_job_comes_from_the_process_or_an_ancestor(spawn):
    own = spawn(K2TUI_JOB_ID="job-a")
    wait_title(own.pid, sys.executable)
    body = (
        "import os, subprocess, sys\n"
        "env = {k: v for k, v in os.environ.items() if not k.startswith('K2TUI')}\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], env=env)\n"
        "print(p.pid, flush=True)\np.wait()"
    )
    parent = spawn(body=body, K2TUI_JOB_DIR="/somewhere/jobs/job-b")
    grandchild = int(parent.stdout.readline())
    try:
        table = ProcessTable()
        facts = table.read([own.pid, grandchild])
        assert facts[own.pid].job_id == "job-a" and facts[grandchild].job_id == "job-b"
        parent.kill()
        parent.wait()
        # once known it is kept, although the ancestor that told it is gone
        assert wait_until(lambda: table.read([grandchild])[grandchild].ppid != parent.pid)
        assert table.read([grandchild])[grandchild].job_id == "job-b"
    finally:
        os.kill(grandchild, signal.SIGKILL)


def test_a_rank_whose_server_died_is_an_orphan(spawn, fake):
    """The server is a Python program that starts a rank with SGLang's title; it is killed, the rank goes on with GPU memory."""
    body = (
        "import subprocess, sys\n"
        "p = subprocess.Popen(['sglang::scheduler_TP0', '-c', 'import time; time.sleep(600)'], executable=sys.executable)\n"
        "print(p.pid, flush=True)\np.wait()"
    )
    server = spawn(body=body)
    rank = int(server.stdout.readline())
    try:
        wait_title(rank, "sglang::")
        fake.show(fake.make.still(1).proc(0, rank, 5 << 30, sm=3))
        sampler = NvmlSampler()
        (process,) = sampler.take().processes
        assert not process.is_orphan and process.rank == "TP0" and process.sm_utilization == 3
        server.kill()
        server.wait()
        view = GpuView(0.0)

        def orphaned() -> bool:
            nonlocal view
            view = sampler.take()
            return view.processes[0].is_orphan

        assert wait_until(orphaned)
        sampler.stop()
        (orphan,) = find_orphans(view)
        assert orphan.pid == rank and "without its server" in orphan.orphan_reason
        assert end_processes([(orphan.pid, orphan.started_s)])[0].outcome == "ended"
        assert birth_time_s(rank) is None
    finally:
        try:
            os.kill(rank, signal.SIGKILL)
        except ProcessLookupError:
            pass


def test_a_rank_adopted_by_another_python_program_is_an_orphan_too(spawn):
    """A supervisor written in Python may adopt the children of the dead: it is no server, and of another session."""
    inner = (
        "import subprocess, sys\n"
        "argv = ['sglang::scheduler_TP0', '-c', 'import time; time.sleep(600)']\n"
        "print(subprocess.Popen(argv, executable=sys.executable, stdout=subprocess.DEVNULL).pid, flush=True)"
    )
    body = (
        "import ctypes, subprocess, sys, time\n"
        "ctypes.CDLL(None).prctl(36, 1)\n"  # PR_SET_CHILD_SUBREAPER
        f"out = subprocess.run([sys.executable, '-c', {inner!r}], start_new_session=True, stdout=subprocess.PIPE, text=True)\n"
        "print(out.stdout.strip(), flush=True)\ntime.sleep(600)"
    )
    supervisor = spawn(body=body)
    rank = int(supervisor.stdout.readline())
    try:
        wait_title(rank, "sglang::")
        fact = ProcessTable().read([rank])[rank]
        assert fact.ppid == supervisor.pid and "without its server" in fact.orphan_reason
    finally:
        os.kill(rank, signal.SIGKILL)


def test_a_process_of_an_ended_job_is_an_orphan():
    view = GpuView(
        0.0, (GpuSample(0),), (GpuProcess(7, job_id="a"), GpuProcess(8, job_id="b"), GpuProcess(9))
    )
    marked = with_jobs(view, [JobProcess("a", is_final=True), JobProcess("b")])
    assert [p.pid for p in find_orphans(marked)] == [7] and "job a has ended" in marked.processes[
        0
    ].orphan_reason
    assert with_jobs(view, [JobProcess("b")]) is view


def test_a_process_in_depth_hides_secrets_and_names_its_family(spawn):
    child = spawn(
        "sglang::scheduler_TP2", body=SLEEP, HF_TOKEN="hf_0123456789abcdefABCDEF", MARK="a\x1b[31mb"
    )
    wait_title(child.pid, "sglang::")
    text = "\n".join(describe_process(child.pid, birth_time_s(child.pid)))
    assert (
        f"pid {child.pid}" in text and "rank TP2" in text and f"{os.getpid()} " in text and "MARK=a" in text
    )
    assert "HF_TOKEN=***" in text and "hf_0123" not in text and "\x1b" not in text
    with pytest.raises(K2Error, match="has ended"):
        describe_process(child.pid, birth_time_s(child.pid) - 60)


def test_ending_refuses_a_pid_with_another_birth_time_and_signals_nobody(spawn):
    right, wrong = spawn(), spawn()
    wait_title(right.pid, sys.executable)
    wait_title(wrong.pid, sys.executable)
    born = birth_time_s(wrong.pid)
    with pytest.raises(K2Error, match="another process"):
        end_processes([(right.pid, birth_time_s(right.pid)), (wrong.pid, born - 30)])
    assert right.poll() is None and wrong.poll() is None


def test_ending_refuses_itself_and_its_ancestors():
    for pid in (os.getpid(), os.getppid(), 1):
        with pytest.raises(K2Error, match="nothing was ended"):
            end_processes([(pid, birth_time_s(pid) or 0.0)])


def test_ending_takes_sigkill_after_the_grace_and_knows_the_dead(spawn):
    stubborn = spawn(
        body="import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint('x', flush=True)\ntime.sleep(600)"
    )
    stubborn.stdout.readline()
    polite, gone = spawn(), spawn()
    wait_title(polite.pid, sys.executable)
    born = {p.pid: birth_time_s(p.pid) for p in (stubborn, polite, gone)}
    gone.kill()
    gone.wait()
    results = end_processes([(p.pid, born[p.pid]) for p in (stubborn, polite, gone)], grace_s=0.4)
    assert [r.outcome for r in results] == ["killed", "ended", "already gone"]


def test_pids_of_another_namespace_are_shown_without_facts(fake):
    fake.show(fake.make.still(2).proc(1, 2**22 + 77, 3 << 30))
    sampler = NvmlSampler()
    view = sampler.take()
    sampler.stop()
    (process,) = view.processes
    assert not process.is_visible and process.memory_used_b == 3 << 30 and process.gpu_index == 1
    assert any("PID namespace" in note for note in view.notes)


def test_memory_that_the_driver_does_not_tell_is_none(fake):
    fake.show(fake.make.still(1).proc(0, os.getpid(), -1).proc(0, os.getpid(), 1 << 20, kind="G"))
    sampler = NvmlSampler()
    (process,) = sampler.take().processes
    sampler.stop()
    assert process.kind == "C+G" and process.memory_used_b == 1 << 20 and process.pid == os.getpid()


def test_one_signal_alone_is_the_users_choice():
    ignores = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", ignores], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        target = [(child.pid, birth_time_s(child.pid) or 0.0)]
        with pytest.raises(UsageError, match="no way to end"):
            end_processes(target, how="HUP")
        assert end_processes(target, how="TERM", grace_s=0.3)[0].outcome == "still there"
        assert child.poll() is None
        assert end_processes(target, how="KILL")[0].outcome == "killed"
        assert child.wait(30) == -9
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def test_the_busiest_of_the_host_are_read_while_watched_only(spawn):
    busy = spawn(body="while True: pass")
    host = HostProcesses()
    assert host.latest() == ()
    host.watch(True)
    try:
        assert wait_until(lambda: any(p.pid == busy.pid and (p.host_cpu_percent or 0) > 5 for p in host.latest()))
        found = host.latest()
        mine = next(p for p in found if p.pid == busy.pid)
        assert mine.gpu_index == -1 and mine.is_own and mine.memory_used_b is None and mine.host_rss_b > 1 << 20
        assert abs(mine.started_s - birth_time_s(busy.pid)) < 1 and "while True" in mine.command
        shares = [p.host_cpu_percent for p in found if p.host_cpu_percent is not None]
        assert shares == sorted(shares, reverse=True)
    finally:
        host.watch(False)
    assert host.latest() == ()
    assert wait_until(lambda: not [t for t in threading.enumerate() if t.name == "k2tui-hostprocs"])
