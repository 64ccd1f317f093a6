"""A stop is followed to its end: processes gone, GPU memory back; what is still held is named with its holder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from k2tui import config, lifecycle
from k2tui.core.job import JobSpec, JobState
from k2tui.jobs import folder
from k2tui.jobs.chain import load_chain, open_run
from k2tui.lifecycle import Ending, stop_child, stop_servers
from k2tui.sources.nvml import NvmlSampler

GIB = 1 << 30
OBEYS = "import time\ntime.sleep(600)"
STUBBORN = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)"


def serve(body: str, grace_s: float = 1.0) -> tuple[str, int]:
    """A server job (id, pid of its work)."""
    spec = JobSpec(
        id="",
        stage="serve",
        title="serve t",
        argv=(sys.executable, "-c", body),
        kind="server",
        grace_s=grace_s,
    )
    job_id = folder.submit(spec)
    end = time.monotonic() + 30
    while not (pid := folder.get(job_id).pid):
        assert time.monotonic() < end
        time.sleep(0.05)
    return job_id, pid


def scene(fake, used_gib: int, *procs: tuple[int, int]):
    made = fake.make.idle(2).gpu(0, "used", used_gib * GIB)
    for pid, gib in procs:
        made.proc(0, pid, gib * GIB)
    return made


def test_memory_that_the_driver_gives_back_late_is_waited_for(fake) -> None:
    job_id, pid = serve(OBEYS)
    fake.show(scene(fake, 80, (pid, 78)))
    late = threading.Timer(3.0, fake.show, [scene(fake, 2)])
    late.start()
    (end,) = stop_servers([job_id])
    late.join()
    assert end.is_clean and end.job.state is JobState.STOPPED and end.rest.took_s >= 2.5
    assert end.rest.freed_b == 78 * GIB and "78.0 GiB of GPU memory are free again" in end.words


def test_memory_that_stays_is_named_with_its_holder(fake) -> None:
    job_id, pid = serve(OBEYS)
    fake.show(scene(fake, 80, (pid, 78)))
    sampler = NvmlSampler()
    ending = Ending(job_id, sampler.take)
    ending.order()
    end = ending.finish(30, free_wait_s=0.5)
    assert not end.is_clean and end.rest.held_b == 78 * GIB
    assert f"pid {pid}, which has ended: the driver still counts it" in end.words
    sampler.stop()


def test_another_program_that_takes_the_memory_is_named(fake) -> None:
    job_id, pid = serve(OBEYS)
    fake.show(scene(fake, 80, (pid, 78)))
    sampler = NvmlSampler()
    ending = Ending(job_id, sampler.take)
    ending.order()
    folder.wait(job_id, timeout_s=30)
    fake.show(scene(fake, 60, (os.getpid(), 58)))
    end = ending.finish(30, free_wait_s=0.5)
    (held,) = end.rest.held
    assert held.pid == os.getpid() and held.memory_b == 58 * GIB and held.gpu_index == 0
    assert folder.get(job_id).state is JobState.STOPPED
    sampler.stop()


def test_free_memory_before_the_start_counts_where_nvml_names_no_process(fake) -> None:
    job_id, _ = serve(OBEYS)
    fake.show(scene(fake, 80))
    sampler = NvmlSampler()
    total = sampler.take().gpus[0].memory_total_b or 0
    ending = Ending(job_id, sampler.take, free_before={0: total - 2 * GIB})
    ending.order()
    end = ending.finish(30, free_wait_s=0.5)
    assert [h.who for h in end.rest.held] == ["no process that NVML names"] and end.rest.held_b == 78 * GIB
    sampler.stop()


def test_a_process_that_outlives_the_end_is_killed(fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ignores TERM, has left session and family and hides from the keeper; the stop still knows it by birth."""
    body = (
        "import subprocess, sys, time\n"
        f"p = subprocess.Popen([sys.executable, '-c', {STUBBORN!r}], start_new_session=True)\n"
        "print(p.pid, flush=True)\ntime.sleep(600)"
    )
    monkeypatch.setattr(lifecycle, "_AFTER_GRACE_S", 0.1)
    job_id, pid = serve(body, grace_s=0.5)
    log = folder.log_path(job_id)
    end_s = time.monotonic() + 30
    while not (text := log.read_text().strip()):
        assert time.monotonic() < end_s
        time.sleep(0.05)
    rank = int(text)
    fake.show(scene(fake, 80, (rank, 78)))
    sampler = NvmlSampler()
    ending = Ending(job_id, sampler.take)
    keeper = folder.get(job_id).keeper_pid
    assert keeper
    os.kill(keeper, signal.SIGSTOP)  # a keeper that cannot do its work
    clear = threading.Timer(1.5, fake.show, [scene(fake, 2)])
    clear.start()
    ending.order()
    waker = threading.Timer(3.0, os.kill, [keeper, signal.SIGCONT])
    waker.start()
    end = ending.finish(0.5, free_wait_s=10)
    clear.join()
    waker.join()
    assert {pid, rank} <= set(end.rest.killed) and end.rest.left == ()
    assert end.is_clean, end.words


def test_down_says_what_is_held_and_fails(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K2TUI_HOME", cli.env["K2TUI_HOME"])
    job_id, pid = serve(OBEYS)
    cli.make.idle(1).gpu(0, "used", 80 * GIB).proc(0, pid, 78 * GIB).write(cli.scene_path)
    child = subprocess.Popen(
        [sys.executable, "-m", "k2tui", "down", "--json"], env=cli.env, stdout=subprocess.PIPE, text=True
    )
    folder.wait(job_id, timeout_s=30)
    cli.make.idle(1).gpu(0, "used", 1 * GIB).write(cli.scene_path)
    out, _ = child.communicate(timeout=60)
    (stopped,) = json.loads(out)["stopped"]
    assert child.returncode == 0 and stopped["is_clean"] and stopped["freed_b"] == 78 * GIB
    assert cli.run("down").stderr == "nothing is running\n"


def test_jobs_stop_follows_a_server_to_the_end_of_its_memory(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K2TUI_HOME", cli.env["K2TUI_HOME"])
    job_id, pid = serve(OBEYS)
    cli.make.idle(1).gpu(0, "used", 80 * GIB).proc(0, pid, 78 * GIB).write(cli.scene_path)
    child = subprocess.Popen(
        [sys.executable, "-m", "k2tui", "jobs", "stop", job_id, "--json"],
        env=cli.env,
        stdout=subprocess.PIPE,
        text=True,
    )
    folder.wait(job_id, timeout_s=30)
    assert child.poll() is None  # the job has ended, its memory is still held
    cli.make.idle(1).gpu(0, "used", 1 * GIB).write(cli.scene_path)
    out, _ = child.communicate(timeout=60)
    told = json.loads(out)
    assert child.returncode == 0 and told["state"] == "stopped" and told["stop"]["freed_b"] == 78 * GIB


def test_a_child_is_stopped_with_its_ranks_and_its_memory_waited_for(fake) -> None:
    """As `extract` stops the server that it started: the rank that ignores TERM is killed, memory that stays is named."""
    body = (
        "import subprocess, sys, time\n"
        f"p = subprocess.Popen([sys.executable, '-c', {STUBBORN!r}])\n"
        "print(p.pid, flush=True)\ntime.sleep(600)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", body], stdout=subprocess.PIPE, text=False, start_new_session=True
    )
    assert child.stdout is not None
    rank = int(child.stdout.readline())
    fake.show(scene(fake, 80, (rank, 78)))
    late = threading.Timer(4.0, fake.show, [scene(fake, 1)])
    late.start()
    rest = stop_child(child, gpus=(0,), grace_s=5)
    late.join()
    child.stdout.close()
    assert child.returncode == -signal.SIGTERM and rest.killed == (rank,)
    assert rest.is_clean and rest.freed_b == 78 * GIB and rest.took_s >= 2.5


def test_a_pipeline_s_next_step_waits_for_the_memory_of_its_server(fake, tmp_path: Path) -> None:
    """Extraction after a benchmark wants the same GPUs: it must not start while the driver still counts the server's memory."""
    (tmp_path / "p.toml").write_text(
        f"""name = "p"
[[step]]
name = "serve"
kind = "server"
needs = []
argv = ["sleep", "600"]
gate = ["file:{tmp_path}/p.toml"]
[[step]]
name = "bench"
needs = ["serve"]
argv = ["sleep", "1"]
[[step]]
name = "extract"
needs = ["bench"]
argv = ["true"]
"""
    )
    freed_s: list[float] = []

    def world() -> None:
        job_id = _wait_for("serve")
        fake.show(scene(fake, 80, (folder.get(job_id).pid or 0, 78)))
        folder.wait(job_id, timeout_s=30)
        time.sleep(1.5)
        freed_s.append(time.time())
        fake.show(scene(fake, 2))

    fake.show(scene(fake, 2))
    thread = threading.Thread(target=world, daemon=True)
    thread.start()
    open_run(config.load(), load_chain(tmp_path / "p.toml")).run()
    thread.join()
    started_s = folder.get(_wait_for("extract")).started_s
    assert started_s is not None and started_s > freed_s[0]


def _wait_for(stage: str) -> str:
    end = time.monotonic() + 30
    while not (found := [j for j in folder.list_jobs() if j.spec.stage == stage and j.pid]):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found[0].spec.id
