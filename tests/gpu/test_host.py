"""The host sampler on this very machine, and on made-up /proc folders for what it cannot show here."""

from __future__ import annotations

import os
import time

import psutil

from k2tui.core.host import HostSample, describe_host
from k2tui.sources.host import HostSampler

MEMINFO = """MemTotal: 1000 kB
MemFree: 100 kB
MemAvailable: 600 kB
Buffers: 10 kB
Cached: 500 kB
SwapTotal: 200 kB
SwapFree: 150 kB
Dirty: 4 kB
Shmem: 60 kB
"""


def test_this_machine(tmp_path):
    sampler = HostSampler(state_dir=tmp_path / "not" / "there" / "yet")
    first = sampler.take()
    assert first.cpu_percent is None and first.disk_read_b_s is None
    sampler._rates_due = 0.0
    time.sleep(0.1)
    sample = sampler.take()
    assert len(sample.cpu_percent_per_core) == psutil.cpu_count() and 0 <= sample.cpu_percent <= 100
    assert sample.memory_total_b == psutil.virtual_memory().total
    assert abs(sample.memory_available_b - psutil.virtual_memory().available) < 1 << 28
    assert sample.disk_free_b > 0 and sample.disk_total_b >= sample.disk_free_b
    assert sample.net_rx_b_s >= 0 and sample.fd_limit > 0 and sample.hostname
    assert sampler.latest() is sample


def test_cores_of_a_made_up_kernel(tmp_path):
    """Idle and waiting for disks are not work; a core that comes later is shown from its second reading on; the rest is not read."""
    proc = tmp_path / "proc"
    proc.mkdir()
    sampler = HostSampler(state_dir=tmp_path, proc=str(proc))

    def take(*cores: str) -> tuple[float, ...]:
        (proc / "stat").write_text("cpu  9 9 9 9 9 9 9 9 0 0\n" + "\n".join(cores) + "\nintr 5 1 1\nctxt 7\n")
        return sampler.take().cpu_percent_per_core

    assert take("cpu0 100 0 0 100 0 0 0 0 0 0", "cpu1 0 0 0 0 0 0 0 0 0 0") == ()
    assert take("cpu0 120 5 5 140 20 5 3 2 20 0", "cpu1 0 0 0 0 0 0 0 0 0 0", "cpu7 1 0 0 0 0 0 0 0 0 0") == (
        40.0,
        0.0,
    )
    assert take("cpu0 120 5 5 150 20 5 3 2 20 0", "cpu7 11 0 0 0 0 0 0 0 0 0") == (0.0, 100.0)


def test_written_bytes_show_as_a_rate(tmp_path):
    sampler = HostSampler(state_dir=tmp_path)
    sampler.take()
    counters = psutil.disk_io_counters()
    if counters is None:
        return
    sampler._disk = (time.monotonic() - 1.0, counters.read_bytes, counters.write_bytes - 10_000_000)
    sampler._rates_due = 0.0
    assert sampler.take().disk_write_b_s > 5_000_000


def test_memory_pressure_and_container_limit(tmp_path):
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "pressure").mkdir(parents=True)
    (proc / "sys" / "fs").mkdir(parents=True)
    cgroup.mkdir()
    (proc / "meminfo").write_text(MEMINFO)
    (proc / "pressure" / "io").write_text(
        "some avg10=12.50 avg60=1.00 avg300=0.00 total=1\nfull avg10=1.00\n"
    )
    (proc / "sys" / "fs" / "file-nr").write_text("732\t0\t99999\n")
    (cgroup / "memory.max").write_text("1048576\n")
    (cgroup / "memory.current").write_text("1040000\n")
    sample = HostSampler(state_dir=tmp_path, proc=str(proc), cgroup=str(cgroup)).take()
    assert (sample.memory_total_b, sample.memory_used_b) == (1000 << 10, 400 << 10)
    assert sample.page_cache_b == 450 << 10 and sample.swap_used_b == 50 << 10 and sample.dirty_b == 4096
    assert sample.io_pressure_percent == 12.5 and sample.memory_pressure_percent is None
    assert (sample.memory_limit_b, sample.memory_limit_used_b, sample.fd_used) == (1048576, 1040000, 732)
    (cgroup / "memory.max").write_text("max\n")
    assert HostSampler(state_dir=tmp_path, proc=str(proc), cgroup=str(cgroup)).take().memory_limit_b is None


def test_the_thread_publishes_and_stops(tmp_path):
    seen: list[HostSample] = []
    sampler = HostSampler(interval_s=0.05, state_dir=tmp_path)
    sampler.start(seen.append)
    deadline = time.monotonic() + 5
    while len(seen) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    sampler.stop()
    count = len(seen)
    time.sleep(0.2)
    assert count >= 3 and len(seen) == count and sampler.latest() is seen[-1]


def test_a_failing_reader_does_not_end_the_thread(tmp_path, monkeypatch):
    seen: list[HostSample] = []
    sampler = HostSampler(interval_s=0.05, state_dir=tmp_path)
    monkeypatch.setattr(os, "getloadavg", lambda: (_ for _ in ()).throw(OSError("no")))
    sampler.start(seen.append)
    deadline = time.monotonic() + 5
    while len(seen) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    sampler.stop()
    assert seen[-1].load_1m is None and seen[-1].memory_total_b


def test_what_hurts_a_server_is_said():
    gib = 1 << 30
    bad = HostSample(
        0.0,
        memory_total_b=100 * gib,
        memory_available_b=1 * gib,
        shm_total_b=64 << 20,
        shm_used_b=0,
        disk_free_b=10 << 20,
        fd_limit=1024,
        memory_limit_b=gib,
        memory_limit_used_b=gib,
    )
    texts = [text for _, text in describe_host(bad)]
    assert len(texts) == 5 and "almost no memory" in texts[0] and any("--shm-size" in t for t in texts)
    assert [severity for severity, _ in describe_host(bad)] == [
        "error",
        "error",
        "warning",
        "warning",
        "warning",
    ]
    assert describe_host(HostSample(0.0)) == ()
