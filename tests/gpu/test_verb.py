"""`k2tui gpus` as people and programs call it, in processes of its own, on the fake library found by LD_LIBRARY_PATH."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest


def test_no_driver_is_a_normal_answer(cli):
    done = cli.run("gpus", LD_LIBRARY_PATH="/nowhere")
    assert done.returncode == 5 and done.stdout.startswith("no NVIDIA driver here") and done.stderr == ""
    data = json.loads(cli.run("gpus", "--json", LD_LIBRARY_PATH="/nowhere").stdout)
    assert data["gpus"] == [] and data["error"].startswith("no NVIDIA driver here") and data["hint"]


def test_a_library_without_its_driver_is_another_answer(cli):
    done = cli.run("gpus")  # no scene: the library says that the driver is not loaded
    assert done.returncode == 5 and "kernel module is not loaded" in done.stdout


def test_text_of_eight_gpus_with_processes(cli):
    cli.make.still(8).proc(3, os.getpid(), 5 << 30, sm=12).write(cli.scene_path)
    done = cli.run("gpus", "--host")
    assert done.returncode == 0 and done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0] == "8 GPUs, driver 580.159.04, CUDA 13.0"
    assert lines[2].split()[:6] == ["0", "H200", "12%", "20.0/140.4G", "14%", "210/700W"]
    assert any(str(os.getpid()) in line and "5.0G" in line and "12%" in line for line in lines)
    assert lines[-1].startswith("host: CPU") and "page cache" in lines[-1]
    assert all(len(line) <= 80 for line in lines[1:10])


def test_json_and_prometheus(cli):
    cli.make.lost(4).write(cli.scene_path)
    data = json.loads(cli.run("gpus", "--json").stdout)
    assert [bool(g["error"]) for g in data["gpus"]] == [False, False, False, True]
    text = cli.run("gpus", "--prometheus", "--host").stdout
    assert 'k2tui_gpu_up{gpu="3"' in text and "k2tui_host_memory_total_bytes" in text


def test_watch_as_json_lines_recorded_and_read_back(cli):
    cli.make.still(2).write(cli.scene_path)
    argv = [sys.executable, "-m", "k2tui", "gpus", "--watch", "0.3", "--json", "--record"]
    child = subprocess.Popen(argv, env=cli.env, stdout=subprocess.PIPE, text=True)
    lines = [json.loads(child.stdout.readline()) for _ in range(4)]
    child.send_signal(signal.SIGINT)
    assert child.wait(30) == 0
    child.stdout.close()
    assert all(len(line["gpus"]) == 2 for line in lines) and lines[3]["taken_s"] > lines[0]["taken_s"]
    data = json.loads(cli.run("gpus", "--since", "1m", "--json").stdout)
    assert data["summary"][1]["gpu_utilization_mean"] == 23.0
    text = cli.run("gpus", "--since", "1m").stdout
    assert "UTIL OVER TIME" in text and "35.0G" in text


def test_since_without_samples_says_who_writes_them(cli):
    done = cli.run("gpus", "--since", "10m")
    assert done.returncode == 0 and "no GPU samples in that time" in done.stdout


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--since", "10x"], "is not a span"),
        (["--watch", "0"], "must be 0.1 to 3600"),
        (["--port", "1"], "--port needs --prometheus"),
        (["--end"], "need --orphans"),
        (["--record"], "needs --watch"),
        (["--job", "nonsense"], "nonsense"),
    ],
)
def test_bad_orders_are_refused_in_one_line(cli, argv, words):
    done = cli.run("gpus", *argv)
    assert done.returncode != 0 and words in done.stderr and "Traceback" not in done.stderr


def test_topology(cli):
    cli.make.busy(2).write(cli.scene_path)
    done = cli.run("gpus", "--topology")
    assert done.returncode == 0 and "NV18" in done.stdout and "joined by NVLink" in done.stdout
    assert json.loads(cli.run("gpus", "--topology", "--json").stdout)["pairs"][0]["label"] == "NV18"


def test_free_gpus_for_a_script(cli):
    scene = (
        cli.make.idle(8)
        .gpu(0, "used", 50 << 30)
        .gpu(2, "util", 90)
        .fail(5, "*", 15)
        .proc(7, os.getpid(), 1 << 20)
    )
    scene.write(cli.scene_path)
    assert cli.run("gpus", "--free", "2").stdout == "1,3\n"
    assert json.loads(cli.run("gpus", "--free", "4", "--json").stdout)["gpus"] == [1, 3, 4, 6]
    none = cli.run("gpus", "--free", "5")
    assert none.returncode == 5 and none.stdout == "" and "4 of 8 GPUs are free, 5 are wanted" in none.stderr


def test_orphans_are_named_and_ended_on_yes_only(cli):
    body = (
        "import subprocess, sys\n"
        "p = subprocess.Popen(['sglang::scheduler_TP0', '-c', 'import time; time.sleep(600)'], executable=sys.executable, "
        "stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        "print(p.pid, flush=True)"
    )
    rank = int(
        subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, check=True).stdout
    )
    try:
        time.sleep(0.2)
        cli.make.still(1).proc(0, rank, 70 << 30).write(cli.scene_path)
        named = cli.run("gpus", "--orphans")
        assert f"pid {rank}" in named.stdout and "70.0G" in named.stdout
        refused = cli.run("gpus", "--orphans", "--end")
        assert refused.returncode == 2 and "--yes" in refused.stderr
        os.kill(rank, 0)
        ended = cli.run("gpus", "--orphans", "--end", "--yes")
        assert ended.returncode == 0 and f"pid {rank}: ended" in ended.stdout
        assert (
            not os.path.exists(f"/proc/{rank}")
            or "Z" in open(f"/proc/{rank}/stat").read().rsplit(")", 1)[1][:3]
        )
    finally:
        try:
            os.kill(rank, signal.SIGKILL)
        except ProcessLookupError:
            pass


def test_metrics_are_served_on_loopback_only(cli):
    cli.make.still(2).write(cli.scene_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    argv = [sys.executable, "-m", "k2tui", "gpus", "--prometheus", "--port", str(port)]
    child = subprocess.Popen(argv, env=cli.env, stderr=subprocess.PIPE, text=True)
    try:
        assert str(port) in child.stderr.readline()
        deadline, text = time.monotonic() + 30, ""
        while "k2tui_gpu_utilization_ratio" not in text and time.monotonic() < deadline:
            text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
            time.sleep(0.05)
        assert 'k2tui_gpu_utilization_ratio{gpu="1"' in text
        with open(f"/proc/{child.pid}/net/tcp") as fh:
            addresses = [line.split()[1] for line in fh if f":{port:04X} " in line and " 0A " in line]
        assert addresses == [f"0100007F:{port:04X}"]
    finally:
        child.send_signal(signal.SIGINT)
        assert child.wait(30) == 0
        child.stderr.close()


def test_a_new_library_is_loaded_after_a_mismatch(cli):
    """The file is replaced, as a driver update does; the running sampler gets the new one without a restart."""
    cli.make.mismatch(2).write(cli.scene_path)
    code = (
        "import os, shutil, sys, time\n"
        "import k2tui.sources.nvml as n\n"
        "n._BACKOFF_S = (0.0,)\n"
        "s = n.NvmlSampler()\n"
        "print(s.take().error)\n"
        "lib = os.environ['LD_LIBRARY_PATH'] + '/libnvidia-ml.so.1'\n"
        "before = {l.split()[4] for l in open('/proc/self/maps') if 'libnvidia-ml' in l}\n"
        "shutil.copy(lib, lib + '.new'); os.replace(lib + '.new', lib)\n"
        "open(os.environ['K2TUI_FAKE_NVML'], 'a').write('init 0\\n')\n"
        "time.sleep(0.05)\n"
        "print(len(s.take().gpus))\n"
        "after = {l.split()[4] for l in open('/proc/self/maps') if 'libnvidia-ml' in l}\n"
        "print(before.isdisjoint(after), len(after))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=cli.env, capture_output=True, text=True, timeout=30
    )
    assert done.stderr == ""
    error, count, replaced = done.stdout.splitlines()
    assert "mismatch" in error and count == "2" and replaced == "True 1"


NVITOP = shutil.which("nvitop") or (
    "/opt/nvitop/bin/nvitop" if os.path.exists("/opt/nvitop/bin/nvitop") else ""
)

READ_WITH_NVITOP = """
import json
from nvitop import Device
print(json.dumps([{
    "name": d.name(), "used": d.memory_used(), "total": d.memory_total(), "util": d.gpu_utilization(),
    "memutil": d.memory_utilization(), "power": d.power_usage(), "limit": d.power_limit(), "temp": d.temperature(),
    "sm": d.sm_clock(), "pids": sorted(d.processes()),
} for d in Device.all()]))
"""


@pytest.mark.skipif(not NVITOP, reason="nvitop is not installed")
def test_nvitop_reads_the_same_values(cli):
    scene = cli.make.still(8)
    scene.proc(2, os.getpid(), 5 << 30)
    scene.write(cli.scene_path)
    python = os.path.join(
        os.path.dirname(os.path.realpath(NVITOP) if not NVITOP.startswith("/opt") else NVITOP), "python"
    )
    done = subprocess.run(
        [python, "-c", READ_WITH_NVITOP], env=cli.env, capture_output=True, text=True, timeout=60
    )
    theirs = json.loads(done.stdout)
    ours = json.loads(cli.run("gpus", "--json").stdout)
    for them, us in zip(theirs, ours["gpus"], strict=True):
        assert (
            them["name"] == us["name"]
            and them["used"] == us["memory_used_b"]
            and them["total"] == us["memory_total_b"]
        )
        assert (them["util"], them["memutil"]) == (us["gpu_utilization"], us["memory_utilization"])
        assert (them["power"], them["limit"]) == (us["power_usage_mw"], us["enforced_power_limit_mw"])
        assert (them["temp"], them["sm"]) == (us["temperature_c"], us["sm_clock_mhz"])
        assert them["pids"] == [p["pid"] for p in ours["processes"] if p["gpu_index"] == us["index"]]
