"""GPU curves in memory and on disk: what goes in comes out, bounds hold, damage costs only what is damaged."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k2tui.core.gpu import GpuSample, GpuView
from k2tui.core.gpu_series import CurveBuilder, GpuMemory, figures_of, summarize
from k2tui.sources.gpuhistory import GpuHistory, read_curves

T0 = 1_800_000_000.0


def view(at_s: float, *utils: int | None, error: str = "") -> GpuView:
    gpus = tuple(
        GpuSample(
            index,
            uuid=f"u{index}",
            name="H200",
            error=error if util is None else "",
            gpu_utilization=util,
            memory_used_b=None if util is None else (100 + index) << 30,
            power_usage_mw=None if util is None else 400_000,
            temperature_c=60,
            sm_clock_mhz=1980,
            throttle_bits=0x20 if util == 100 else 0,
        )
        for index, util in enumerate(utils)
    )
    return GpuView(at_s, gpus)


def test_disk_gives_back_the_span(tmp_path):
    history = GpuHistory(tmp_path)
    for second in range(100):
        history.push(view(T0 + second, second, 100))
    history.close()
    curves = read_curves(T0 + 10, T0 + 20, folder=tmp_path)
    assert curves.step_s == 1.0 and [gpu.index for gpu in curves.gpus] == [0, 1]
    assert curves.gpus[0].gpu_utilization == tuple(float(x) for x in range(10, 20))
    assert curves.gpus[1].memory_used_mb == (101 * 1024.0,) * 10 and curves.gpus[1].uuid == "u1"
    first, second = summarize(curves)
    assert first.gpu_utilization_mean == 14.5 and first.throttled_share == 0.0 and first.coverage == 1.0
    assert second.energy_j == 4000.0 and second.throttled_share == 1.0
    assert read_curves(T0 - 50, T0 - 40, folder=tmp_path).gpus == ()
    assert read_curves(T0, T0 + 100, steps=10, folder=tmp_path).gpus[0].gpu_utilization[0] == 4.5


def test_holes_stay_holes(tmp_path):
    history = GpuHistory(tmp_path)
    for second in (0, 1, 5):
        history.push(view(T0 + second, 50, None, error="fallen off the bus"))
    history.close()
    curves = read_curves(T0, T0 + 6, folder=tmp_path)
    assert curves.gpus[0].gpu_utilization == (50.0, 50.0, None, None, None, 50.0)
    assert curves.gpus[1].gpu_utilization == (None,) * 6
    assert summarize(curves)[0].coverage == 0.5 and summarize(curves)[1].gpu_utilization_mean is None


def test_the_folder_is_bounded_and_the_oldest_goes_first(tmp_path, monkeypatch):
    monkeypatch.setattr("k2tui.sources.gpuhistory._SEGMENT_S", 100.0)
    monkeypatch.setattr("k2tui.sources.gpuhistory._FLUSH_S", 0.0)
    history = GpuHistory(tmp_path, max_b=60_000)
    for second in range(3000):
        history.push(view(T0 + second, *([10] * 8)))
    history.close()
    total = sum(p.stat().st_size for p in tmp_path.glob("*.gpu"))
    assert total <= 60_000 and total > 10_000
    assert read_curves(T0, T0 + 50, folder=tmp_path).gpus == ()
    assert len(read_curves(T0 + 2900, T0 + 3000, folder=tmp_path).gpus) == 8


def test_another_set_of_gpus_is_another_segment(tmp_path):
    history = GpuHistory(tmp_path)
    history.push(view(T0, 1, 2))
    history.push(view(T0 + 1, 3))
    history.close()
    assert len(list(tmp_path.glob("*.gpu"))) == 2
    curves = read_curves(T0, T0 + 2, folder=tmp_path)
    assert curves.gpus[0].gpu_utilization == (1.0, 3.0) and curves.gpus[1].gpu_utilization == (2.0, None)


def test_a_torn_tail_and_foreign_files_cost_only_themselves(tmp_path):
    history = GpuHistory(tmp_path)
    for second in range(10):
        history.push(view(T0 + second, 7))
    history.close()
    (path,) = tmp_path.glob("*.gpu")
    path.write_bytes(path.read_bytes()[:-5])
    (tmp_path / "000000000000001.gpu").write_bytes(b"\x00" * 100)
    (tmp_path / "999999999999999.gpu").write_text('{"format": "k2tui-gpu-history", "version": 99}\n')
    assert read_curves(T0, T0 + 10, folder=tmp_path).gpus[0].gpu_utilization == (7.0,) * 9 + (None,)


def test_one_writer_at_a_time_and_the_next_takes_over(tmp_path):
    now = [0.0]
    first, second = GpuHistory(tmp_path), GpuHistory(tmp_path, clock=lambda: now[0])
    first.push(view(T0, 1))
    second.push(view(T0, 1))
    assert first.is_writer and not second.is_writer
    first.close()
    second.push(view(T0 + 1, 2))
    assert not second.is_writer  # asked again after a while only
    now[0] = 31.0
    second.push(view(T0 + 2, 3))
    assert second.is_writer
    second.close()
    assert read_curves(T0, T0 + 3, folder=tmp_path).gpus[0].gpu_utilization == (1.0, None, 3.0)


def test_the_lock_of_a_killed_writer_is_free(tmp_path):
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom k2tui.core.gpu import GpuSample, GpuView\n"
        "from k2tui.sources.gpuhistory import GpuHistory\nh = GpuHistory(Path(sys.argv[1]))\n"
        f"h.push(GpuView({T0}, (GpuSample(0),)))\nprint(h.is_writer, flush=True)\ntime.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "True\n"
    child.kill()
    child.wait()
    child.stdout.close()
    history = GpuHistory(tmp_path)
    history.push(view(T0 + 5, 1))
    assert history.is_writer
    history.close()


def test_a_full_disk_is_said_and_does_not_raise(tmp_path, monkeypatch):
    history = GpuHistory(tmp_path)
    history.push(view(T0, 1))

    def full(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("k2tui.sources.gpuhistory.os.write", full)
    monkeypatch.setattr(history, "_flush_at", 0.0)
    history.push(view(T0 + 1, 1))
    assert "No space left" in history.error
    monkeypatch.undo()
    history.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_said(tmp_path):
    tmp_path.chmod(0o500)
    history = GpuHistory(tmp_path / "sub")
    history.push(view(T0, 1))
    assert history.error


def test_memory_keeps_the_newest_steps_at_every_grain():
    memory = GpuMemory()
    for second in range(2000):
        memory.push(view(T0 + second, second % 101, None))
    values = memory.values(0, "gpu_utilization", 1, 60)
    assert values == tuple(second % 101 for second in range(1940, 2000))
    assert memory.values(1, "gpu_utilization", 1, 4) == (None,) * 4  # in error: a hole
    assert memory.values(9, "gpu_utilization", 1, 4) == (None,) * 4  # never seen
    five = memory.values(0, "gpu_utilization", 5, 4)
    assert five[-1] == round(sum(s % 101 for s in range(1995, 2000)) / 5)
    assert (
        memory.values(0, "power_usage_w", 60, 40).count(400) in (34, 35)
        and memory.values(0, "power_usage_w", 60, 40)[0] is None
    )
    # time goes on without samples: the curve moves out to the left
    assert memory.values(0, "gpu_utilization", 1, 60, now_s=T0 + 2029)[-30:] == (None,) * 30


def test_pairs_of_steps_stay_pairs():
    """A braille cell holds two steps: the cells must not change while they move to the left."""
    memory = GpuMemory()
    seen = []
    for second in range(40):
        memory.push(view(T0 + second, second))
        values = memory.values(0, "gpu_utilization", 1, 20)
        seen.append(
            [
                (a, b)
                for a, b in zip(values[::2], values[1::2], strict=True)
                if a is not None and b is not None
            ]
        )
    for before, after in itertools.pairwise(seen[20:]):
        assert set(before[1:]) <= set(after)


def test_memory_starts_with_what_the_disk_has(tmp_path):
    history = GpuHistory(tmp_path)
    for second in range(120):
        history.push(view(T0 + second, 33))
    history.close()
    memory = GpuMemory()
    memory.load(read_curves(T0, T0 + 120, folder=tmp_path))
    memory.push(view(T0 + 121, 66))
    assert memory.values(0, "gpu_utilization", 1, 10) == (33,) * 8 + (None, 66)
    assert memory.values(0, "gpu_utilization", 15, 3) == (33, 66, None)


def test_what_the_disk_has_may_come_after_the_first_samples(tmp_path):
    history = GpuHistory(tmp_path)
    for second in range(100):
        history.push(view(T0 + second, 20))
    history.close()
    memory = GpuMemory()
    memory.push(view(T0 + 98, 90))
    memory.push(view(T0 + 99, 90))
    memory.load(read_curves(T0, T0 + 100, folder=tmp_path))
    memory.push(view(T0 + 101, 90))
    assert memory.values(0, "gpu_utilization", 1, 6) == (20, 20, 90, 90, None, 90)
    five = memory.values(0, "gpu_utilization", 5, 4)  # 90-94, 95-99 (both kinds), 100-104, and the next
    assert five[0] == 20 and 20 < five[1] <= 90 and five[2:] == (90, None)


def test_memory_of_another_board_at_the_same_index_starts_anew():
    memory = GpuMemory()
    memory.push(GpuView(T0, (GpuSample(0, uuid="a", gpu_utilization=5),)))
    memory.push(GpuView(T0 + 1, (GpuSample(0, uuid="b", gpu_utilization=6),)))
    assert memory.values(0, "gpu_utilization", 1, 2) == (None, 6)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 99.99), st.integers(0, 100)), max_size=40),
    st.integers(1, 30),
)
def test_every_sample_counts_once(samples, steps):
    """Law: the sum over steps of mean times count is the sum of the samples, however they are ordered."""
    builder = CurveBuilder(0.0, 100.0, steps)
    counts = [0] * steps
    for at, util in samples:
        builder.add(at, 0, (util, -1, -1, -1, -1, -1, -1))
        counts[int(at / (100.0 / steps))] += 1
    curves = builder.build()
    if not samples:
        assert curves.gpus == ()
        return
    total = sum((v or 0.0) * n for v, n in zip(curves.gpus[0].gpu_utilization, counts, strict=True))
    assert abs(total - sum(util for _, util in samples)) < 1e-6
    assert [v is not None for v in curves.gpus[0].gpu_utilization] == [n > 0 for n in counts]


def test_figures_are_whole_numbers_and_unknown_is_minus_one():
    assert figures_of(GpuSample(0)) == (-1,) * 7
    assert figures_of(view(T0, 42).gpus[0]) == (42, -1, 100 * 1024, 400, 60, 1980, 0)
