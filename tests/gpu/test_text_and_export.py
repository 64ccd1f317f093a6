"""Short texts, curves, JSON and Prometheus: tables of small cases."""

from __future__ import annotations

import json
import re

import pytest

from k2tui.core import gpu_text as t
from k2tui.core.gpu import (
    GpuProcess,
    GpuSample,
    GpuView,
    describe_health,
    describe_link,
    describe_throttle,
    describe_xid,
    explain_processes,
)
from k2tui.core.gpu_export import prometheus_text, view_json
from k2tui.core.host import HostSample


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("Tesla V100-SXM2-32GB", "V100-SXM2-32GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("NVIDIA GH200 480GB", "GH200 480GB"),
        ("NVIDIA GB10", "GB10"),
        ("", ""),
    ],
)
def test_short_gpu_name(name, short):
    assert t.short_gpu_name(name) == short


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        (0x0, ()),
        (0x1, ()),
        (0x4, ("power cap",)),
        (0x68, ("hardware slowdown", "heat (software)", "heat (hardware)")),
        (0x2000, ("reason 0x2000",)),
    ],
)
def test_throttle_words(bits, words):
    assert describe_throttle(bits) == words


def test_xid_words():
    assert describe_xid(79) == "Xid 79: the GPU has fallen off the bus" and describe_xid(7777) == "Xid 7777"


def test_a_slow_link_counts_at_work_a_narrow_one_always():
    link = {"pcie_gen_max": 5, "pcie_width_max": 16}
    assert describe_link(GpuSample(0, pcie_gen=1, pcie_width=16, gpu_utilization=0, **link)) == ""
    assert (
        describe_link(GpuSample(0, pcie_gen=1, pcie_width=16, gpu_utilization=90, **link))
        == "PCIe Gen1 x16 of Gen5 x16"
    )
    assert (
        describe_link(GpuSample(0, pcie_gen=1, pcie_width=4, gpu_utilization=0, **link))
        == "PCIe Gen1 x4 of Gen5 x16"
    )
    assert describe_link(GpuSample(0)) == ""


def test_health_puts_the_worst_first():
    sample = GpuSample(
        0, last_xid=48, ecc_uncorrected=2, remap_pending=True, throttle_reasons=("heat (hardware)",)
    )
    kinds = [severity for severity, _ in describe_health(sample)]
    assert kinds == ["error", "error", "warning", "warning"] and describe_health(GpuSample(0)) == ()


def test_process_notes():
    gpus = (
        GpuSample(0, memory_used_b=5 << 30),
        GpuSample(1, memory_used_b=5 << 30),
        GpuSample(2, process_error="no permission"),
    )
    notes = explain_processes(gpus, (GpuProcess(5, gpu_index=1, is_visible=False),))
    assert notes[0] == "GPU 2: processes unknown (no permission)"
    assert notes[1].startswith("1 GPU process outside this PID namespace") and notes[2].startswith(
        "GPU 0: memory in use"
    )


@pytest.mark.parametrize(
    ("percent", "width", "text", "plain"),
    [
        (0, 4, "    ", "...."),
        (50, 4, "██  ", "##.."),
        (100, 4, "████", "####"),
        (3.2, 4, "▏   ", "...."),
        (250, 4, "████", "####"),
        (None, 4, "    ", "    "),
        (50, 0, "", ""),
    ],
)
def test_bars_fill_their_cells(percent, width, text, plain):
    assert t.bar(percent, width) == text and t.bar(percent, width, ascii_only=True) == plain


def test_curves():
    assert t.curve([0, 25, 50, 100]) == ("⣀⣼",)
    assert t.curve([100, 100], 2) == ("⣿", "⣿") and t.curve([None, None], 1) == (" ",)
    assert t.curve([None, 0]) == ("⢀",)  # idle shows a dot, no sample shows nothing
    assert t.curve([5]) == ("⢀",)
    assert t.curve([0, 50, 100, None], 1, ascii_only=True) == (".=@ ",)
    assert all(ord(c) < 128 for line in t.curve([1, 50, 99], 3, ascii_only=True) for c in line)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "n/a"), (-3, "0s"), (59, "59s"), (60, "1m"), (3720, "1h02m"), (200_000, "2d7h")],
)
def test_age(seconds, text):
    assert t.age_text(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "n/a"), (0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (547e9, "547 GB"), (99_960_000, "100 MB")],
)
def test_bytes(value, text):
    assert t.bytes_text(value) == text


def example() -> GpuView:
    gpus = (
        GpuSample(
            0,
            "GPU-a",
            'H"200\\',
            memory_used_b=148176371712,
            power_usage_mw=76500,
            gpu_utilization=82,
            throttle_reasons=("power cap",),
        ),
        GpuSample(1, "GPU-b", "H200", error="fallen off the bus"),
    )
    return GpuView(
        1795997140.25, gpus, (GpuProcess(7, name="x", gpu_index=0, memory_used_b=1 << 30, rank="TP0"),)
    )


def test_json_has_every_field_and_a_schema():
    data = json.loads(json.dumps(view_json(example(), HostSample(1.0, cpu_percent=5.0))))
    assert data["schema"] == 1 and data["gpus"][0]["memory_used_b"] == 148176371712
    assert data["gpus"][0]["temperature_c"] is None and data["processes"][0]["rank"] == "TP0"
    assert data["gpus"][1]["health"][0] == {"severity": "error", "text": "fallen off the bus"}
    assert data["host"]["cpu_percent"] == 5.0


LINE = re.compile(r'^[a-z_0-9]+(\{([a-z]+="(?:[^"\\\n]|\\["\\n])*",?)*\})? -?\d+(\.\d+)?(e[+-]?\d+)?$')


def test_prometheus_text():
    text = prometheus_text(example(), HostSample(1.0, cpu_percent=50.0, memory_total_b=25276510208))
    lines = text.splitlines()
    assert text.endswith("\n") and all(line.startswith("# ") or LINE.match(line) for line in lines)
    name = r'{gpu="0",uuid="GPU-a",name="H\"200\\"}'
    assert f"k2tui_gpu_memory_used_bytes{name} 148176371712" in lines
    assert f"k2tui_gpu_power_watts{name} 76.5" in lines
    assert 'k2tui_gpu_up{gpu="1",uuid="GPU-b",name="H200"} 0' in lines
    assert not any(line.startswith("k2tui_gpu_power_watts") and "GPU-b" in line for line in lines)
    assert 'k2tui_gpu_process_memory_bytes{gpu="0",pid="7",name="x",rank="TP0",job=""} 1073741824' in lines
    assert "k2tui_host_cpu_ratio 0.5" in lines and "k2tui_host_memory_total_bytes 25276510208" in lines
    helped = [line.split()[2] for line in lines if line.startswith("# HELP")]
    assert len(helped) == len(set(helped))


def test_prometheus_without_a_driver():
    lines = prometheus_text(GpuView(1.0, error="no NVIDIA driver here")).splitlines()
    assert "k2tui_gpu_driver_up 0" in lines and len(lines) == 6
