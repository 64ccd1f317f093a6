"""The GPU, detail and host panels as pure pictures, and the screens by keys, over scripted snapshots."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from k2tui.core.gpu import GpuProcess, GpuSample, GpuView, MigSlice
from k2tui.core.gpu_series import CurveBuilder
from k2tui.core.host import HostSample
from k2tui.core.snapshot import Snapshot
from k2tui.tui import gpucurves, panels
from k2tui.tui.history import History
from k2tui.tui.lines import ASCII, UNICODE, line_width
from k2tui.tui.view import View

NOW = 1_800_000_000.0
GIB = 1 << 30
SIZES = ((40, 3), (76, 9), (78, 10), (116, 14), (116, 42), (196, 26), (196, 43))


def sample(index: int, **changes: object) -> GpuSample:
    base = GpuSample(
        index,
        uuid=f"GPU-{index}",
        name="NVIDIA H200",
        memory_total_b=140 * GIB,
        memory_used_b=(60 + 9 * index) * GIB,
        memory_reserved_b=600 << 20,
        gpu_utilization=10 + 11 * index,
        memory_utilization=40,
        power_usage_mw=200_000 + 60_000 * index,
        enforced_power_limit_mw=700_000,
        temperature_c=40 + 3 * index,
        temperature_slowdown_c=89,
        sm_clock_mhz=1980,
        sm_clock_max_mhz=1980,
        pcie_gen=5,
        pcie_width=16,
        pcie_gen_max=5,
        pcie_width_max=16,
        nvlink_rx_kb_s=41_000_000,
        nvlink_tx_kb_s=40_000_000,
        taken_s=NOW,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def gpu_view(count: int = 8, at_s: float = NOW, **changes: object) -> GpuView:
    gpus = tuple(sample(i) for i in range(count))
    processes = tuple(
        GpuProcess(
            100 + i,
            f"sglang::scheduler_TP{i}",
            "me",
            i,
            60 * GIB,
            started_s=NOW - 60,
            rank=f"TP{i}",
            job_id="serve-1",
        )
        for i in range(count)
    )
    return replace(GpuView(at_s, gpus, processes, "580.159.04", cuda_version="13.0"), **changes)  # type: ignore[arg-type]


def make_view(
    gpu: GpuView | None = None, *, glyphs=UNICODE, host: HostSample | None = None, **changes
) -> View:
    history = History()
    gpu = gpu_view() if gpu is None else gpu
    for second in range(120):
        history.add(Snapshot(NOW - 120 + second, gpu=replace(gpu, taken_s=NOW - 120 + second)))
    return View(Snapshot(NOW, gpu=gpu, host=host), NOW, history, glyphs, **changes)


def texts(picture) -> list[str]:
    lines = ([picture.header] if picture.header else []) + [row.line for row in picture.rows]
    return ["".join(seg.text for seg in line).rstrip() for line in lines]


WORLDS = {
    "eight": gpu_view(),
    "one": gpu_view(1),
    "sixteen": gpu_view(16),
    "lost": replace(gpu_view(4), gpus=(sample(0), sample(1, error="fallen off the bus (NVML: GPU is lost)"), sample(2), sample(3))),
    "n/a": GpuView(NOW, tuple(GpuSample(i) for i in range(3))),
    "mig": replace(gpu_view(2), gpus=(sample(0, mig_enabled=True, gpu_utilization=None, mig=(MigSlice(1, 0, "3g.71gb", "", 70 * GIB, GIB, 60),)), sample(1))),
    "hot": replace(gpu_view(2), gpus=(sample(0, throttle_reasons=("heat (hardware)", "power brake"), temperature_c=91, last_xid=79), sample(1))),
    "unified": replace(gpu_view(1), gpus=(sample(0, memory_kind="unified"),)),
    "none": GpuView(NOW, error="no NVIDIA driver here: libnvidia-ml.so.1 was not found", hint="install the driver"),
}  # fmt: skip


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ["gpus", "gpu", "processes"])
def test_every_picture_fits_its_room(world, name):
    for glyphs in (UNICODE, ASCII):
        view = make_view(WORLDS[world], glyphs=glyphs)
        for width, height in SIZES:
            picture = panels.get(name).draw(view, width, height)
            for text, line in zip(
                texts(picture),
                ([picture.header] if picture.header else []) + [r.line for r in picture.rows],
                strict=True,
            ):
                assert line_width(line) <= width, (text, width)
                assert not glyphs.ascii or text.isascii(), text


def test_eight_gpus_are_eight_lines_at_eighty_columns():
    picture = panels.get("gpus").draw(make_view(), 78, 8)
    assert [row.key for row in picture.rows] == [str(i) for i in range(8)] and picture.header is None
    line = texts(picture)[3]
    for part in ("3", "TP3", "43%", "87G/140G", "380/700W", "49°C", "1980"):
        assert part in line


def test_cards_have_curves_and_one_key_a_gpu():
    picture = panels.get("gpus").draw(make_view(), 196, 41)
    assert [row.key for row in picture.rows if row.key] == [str(i) for i in range(8)] and len(
        picture.rows
    ) == 40
    lines = texts(picture)
    assert "utilisation, last" in lines[0] and "power to its limit" in lines[0]
    card = "\n".join(lines[1:6])
    for part in ("H200", "TP0", "serve-1", "util", "mem", "power", "Gen5 x16", "nv ↓41.0 GB ↑40.0 GB"):
        assert part in card
    assert any("\u2800" < ch <= "\u28ff" for ch in card)


def test_cards_only_where_all_fit():
    assert len(panels.get("gpus").draw(make_view(), 196, 20).rows) == 8
    assert len(panels.get("gpus").draw(make_view(), 100, 60).rows) == 8
    assert len(panels.get("gpus").draw(make_view(gpu_view(2)), 116, 12).rows) == 10


@pytest.mark.parametrize(
    ("name", "first"),
    [("", "0"), ("utilisation", "7"), ("memory", "7"), ("power", "7"), ("temperature", "7")],
)
def test_sorting(name, first):
    picture = panels.get("gpus").draw(make_view(gpu_sort=name), 116, 20)
    assert picture.rows[0].key == first
    assert name in "".join(seg.text for seg in picture.note)


def test_a_lost_gpu_is_last_and_says_so():
    picture = panels.get("gpus").draw(make_view(WORLDS["lost"], gpu_sort="power"), 78, 8)
    assert [row.key for row in picture.rows] == ["3", "2", "0", "1"]
    assert "fallen off the bus" in texts(picture)[-1] and "1 lost" in "".join(
        seg.text for seg in picture.note
    )


def test_unknown_is_n_a_and_never_zero():
    line = texts(panels.get("gpus").draw(make_view(WORLDS["n/a"]), 116, 8))[1]
    assert line.count("n/a") >= 4 and "0%" not in line


def test_states_have_words_beside_colours():
    line = texts(panels.get("gpus").draw(make_view(WORLDS["hot"]), 196, 4))[1]
    assert "Xid 79" in line or "heat" in line
    narrow = texts(panels.get("gpus").draw(make_view(WORLDS["hot"]), 78, 4))[1]
    assert "heat" in narrow


def test_old_figures_and_slow_calls_are_shown():
    note = lambda view: "".join(seg.text for seg in panels.get("gpus").draw(view, 116, 12).note)  # noqa: E731
    assert "old" in note(make_view(gpu_view(at_s=NOW - 30)))
    assert "NVML is slow: power usage of GPU 3" in note(
        make_view(gpu_view(waiting_for="power usage of GPU 3"))
    )


def test_one_gpu_in_depth():
    view = make_view(WORLDS["hot"], gpu_index=0)
    lines = texts(panels.get("gpu").draw(view, 116, 40))
    text = "\n".join(lines)
    for part in (
        "Xid 79: the GPU has fallen off the bus",
        "slowed down by heat (hardware)",
        "615M",
        "Gen5 x16 of Gen5 x16",
    ):
        assert part in text or part == "615M"
    assert "held down by heat (hardware), power brake" in text and "41.0 GB/s/40.0 GB/s" in text
    assert (
        sum(label in text for label in ("util ", "memory ", "power ", "temp ", "SM clock ")) == 5
        and "⣿" in text
    )
    other = texts(panels.get("gpu").draw(replace(view, gpu_index=1), 116, 40))
    assert "Xid 79" not in "\n".join(other)


def test_mig_slices_and_what_failed_are_listed():
    world = replace(
        WORLDS["mig"], gpus=(replace(WORLDS["mig"].gpus[0], missing=("power usage: Unknown Error",)),)
    )
    text = "\n".join(texts(panels.get("gpu").draw(make_view(world), 116, 40)))
    assert "MIG 1 3g.71gb" in text and "60 SMs" in text and "not told: power usage: Unknown Error" in text


def test_processes_of_one_gpu_orphans_first_and_notes():
    processes = (
        GpuProcess(7, "train.py", "me", 0, GIB, started_s=NOW - 5),
        GpuProcess(
            8,
            "sglang::scheduler_TP1",
            "me",
            1,
            70 * GIB,
            started_s=NOW - 5,
            is_orphan=True,
            orphan_reason="rank without its server",
        ),
        GpuProcess(9, gpu_index=1, memory_used_b=GIB, is_visible=False, is_own=False),
    )
    view = make_view(gpu_view(2, processes=processes, notes=("1 GPU process outside this PID namespace",)))
    rows = texts(panels.get("processes").draw(view, 140, 10))
    assert (
        "rank without its server" in rows[1]
        and "not visible in this PID namespace" in rows[3]
        and "outside this PID namespace" in rows[4]
    )
    only = panels.get("processes").draw(replace(view, gpu_index=0), 140, 10)
    assert [row.key for row in only.rows if row.key] == ["7/0"]


HOST = HostSample(
    NOW,
    "box",
    cpu_percent=42.0,
    cpu_percent_per_core=tuple(float(i % 101) for i in range(192)),
    load_1m=9.4,
    memory_total_b=2000 * GIB,
    memory_used_b=400 * GIB,
    memory_available_b=1600 * GIB,
    page_cache_b=547 * GIB,
    swap_total_b=8 * GIB,
    swap_used_b=GIB,
    disk_read_b_s=3.2e9,
    disk_write_b_s=1e6,
    net_rx_b_s=2e5,
    net_tx_b_s=8e5,
    shm_total_b=64 << 20,
    shm_used_b=0,
    disk_free_b=9 * GIB,
    fd_limit=1024,
    io_pressure_percent=3.0,
    dirty_b=5 << 20,
)


def test_host_at_every_size():
    for glyphs in (UNICODE, ASCII):
        for width, height in ((40, 1), (78, 1), (78, 2), (116, 4), (196, 8)):
            picture = panels.get("host").draw(make_view(glyphs=glyphs, host=HOST), width, height)
            assert 1 <= len(picture.rows) <= height
            assert all(line_width(row.line) <= width for row in picture.rows)
            assert all(not glyphs.ascii or text.isascii() for text in texts(picture))
    one = texts(panels.get("host").draw(make_view(host=HOST), 78, 1))[0]
    assert "cpu" in one and "42%" in one and "ram" in one
    text = "\n".join(texts(panels.get("host").draw(make_view(host=HOST), 116, 8)))
    for part in ("192 cores", "cache 547G", "swap 1.0G/8.0G", "files 1024", "--shm-size", "ulimit -n"):
        assert part in text


def test_curves_of_a_span_for_a_window():
    builder = CurveBuilder(NOW, NOW + 100, 50)
    for second in range(60):
        builder.add(
            NOW + second, 3, (50, 10, 2048, 400, 60, 1980, 0x20 if second < 15 else 0), "u", "NVIDIA H200"
        )
    for glyphs in (UNICODE, ASCII):
        lines = gpucurves.lines(builder.build(), 80, glyphs)
        text = "\n".join("".join(seg.text for seg in line) for line in lines)
        assert (
            "util 50%" in text
            and "memory up to 2.0G" in text
            and "slowed 25% of the time" in text
            and "60% of the time sampled" in text
        )
        assert not glyphs.ascii or text.isascii()
    empty = gpucurves.lines(CurveBuilder(NOW, NOW + 10, 5).build(), 80, UNICODE)
    assert "No GPU samples" in "".join(seg.text for line in empty for seg in line)


def test_a_draw_does_little_work():
    """Panels are drawn on the event loop: a slow one delays every key. Work is counted in calls, since a clock
    would tell of the machine and not of the panel (`tests/benchmarks/tui_budget.py` has the seconds)."""
    import sys

    view = make_view(WORLDS["sixteen"])
    for name, width, height in (("gpus", 196, 60), ("gpu", 196, 50), ("host", 196, 8)):
        panel = panels.get(name)
        panel.draw(view, width, height)
        calls = 0

        def count(_frame: object, event: str, _arg: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            panel.draw(view, width, height)
        finally:
            sys.setprofile(None)
        assert 0 < calls < 20_000, (name, calls)


# -- by keys -------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def world():
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tui"))
    try:
        import fake as scripted
    finally:
        sys.path.pop(0)
    return scripted


def text_of(app) -> str:
    strips = app.screen._compositor.render_strips()
    return "\n".join(strip.text for strip in strips[: app.size[1]])


async def until(pilot, condition, seconds: float = 30.0) -> None:
    for _ in range(int(seconds / 0.05)):
        if condition():
            return
        await pilot.pause(0.05)
    raise AssertionError(text_of(pilot.app))


async def test_sort_open_step_and_back(world):
    from k2tui.tui.app import Dashboard

    backend = world.still("serving")
    app = Dashboard(backend, clock=backend.clock)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "READY" in text_of(app))
        await pilot.press("2")
        await until(pilot, lambda: "GPU processes" in text_of(app))
        screen = text_of(app).splitlines()
        assert sum(f" {i} TP{i} " in line for line in screen for i in range(8)) == 8
        await pilot.press("o")
        await until(pilot, lambda: "by utilisation" in text_of(app))
        await pilot.press("o", "o", "o", "o")
        await until(pilot, lambda: "by " not in text_of(app).splitlines()[1])
        await pilot.press("home", "enter")
        await until(pilot, lambda: "GPU 0  H200" in text_of(app) and "held down by" in text_of(app))
        assert backend.watched_gpu == 0
        await pilot.press("right")
        await until(pilot, lambda: "GPU 1  H200" in text_of(app) and backend.watched_gpu == 1)
        await pilot.press("plus")
        await until(pilot, lambda: "a 5 s a step" in text_of(app))
        await pilot.press("escape")
        await until(pilot, lambda: "GPU 1  H200" not in text_of(app) and backend.watched_gpu is None)


async def test_ending_a_process_is_asked_and_names_pid_and_birth(world):
    from k2tui.tui.app import Dashboard

    backend = world.still("serving")
    app = Dashboard(backend, clock=backend.clock)
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: "READY" in text_of(app))
        await pilot.press("2")
        await until(pilot, lambda: "41003" in text_of(app))
        app.screen.query_one("#panel-processes").focus()
        await pilot.press("down", "enter")
        await until(pilot, lambda: "Process 41001" in text_of(app) and "HF_TOKEN=***" in text_of(app))
        await pilot.press("escape")
        await until(pilot, lambda: "Process 41001" not in text_of(app))
        await pilot.press("K")
        await until(pilot, lambda: "End pid 41001: how?" in text_of(app))
        await pilot.press("enter")
        await until(pilot, lambda: "End this process?" in text_of(app))
        assert "the server will fail" in text_of(app) and "41001" in text_of(app)
        await pilot.press("n")
        await until(pilot, lambda: "End this process?" not in text_of(app))
        assert not [o for o in backend.orders if o[0] == "end_processes"]
        await pilot.press("K")
        await until(pilot, lambda: "End pid 41001: how?" in text_of(app))
        await pilot.press("enter")
        await until(pilot, lambda: "End this process?" in text_of(app))
        await pilot.press("y")
        await until(pilot, lambda: any(o[0] == "end_processes" for o in backend.orders))
        process = next(p for p in backend.snapshot().gpu.processes if p.pid == 41001)
        assert ("end_processes", ((41001, process.started_s),), "end") in backend.orders


async def test_curves_of_the_selected_job(world):
    from k2tui.tui.app import Dashboard

    backend = world.still("serving")
    app = Dashboard(backend, clock=backend.clock)
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: "READY" in text_of(app))
        await pilot.press("3")
        await until(pilot, lambda: "serve kimi-k25" in text_of(app))
        app.screen.query_one("#panel-jobs").select("serve-01")
        await pilot.press("c")
        await until(
            pilot,
            lambda: "GPUs during serve kimi-k25" in text_of(app) and "memory up to 1.0G" in text_of(app),
        )


def ranked(*entries: tuple[str, str], **changes: object) -> GpuView:
    """Two GPUs, the second with changes; (title, rank) of the process on each."""
    processes = tuple(
        GpuProcess(100 + i, title, "me", i, 60 * GIB, started_s=NOW - 60, rank=rank)
        for i, (title, rank) in enumerate(entries)
    )
    return replace(gpu_view(2), gpus=(sample(0), sample(1, **changes)), processes=processes)


@pytest.mark.parametrize("width", [78, 116, 196])
def test_the_rank_column_is_as_wide_as_its_longest_entry(width: int) -> None:
    one = ranked(("sglang::scheduler", "scheduler"), ("eagle3_gpu.py", ""))
    for text, glyphs in (("eagle3_gpu.py", UNICODE), ("scheduler", ASCII)):
        lines = texts(panels.get("gpus").draw(make_view(one, glyphs=glyphs), width, 3))
        assert any(f" {text} " in line for line in lines), lines
    assert any(" scheduler " in line for line in texts(panels.get("processes").draw(make_view(one), width, 9)))
    tp = texts(panels.get("gpus").draw(make_view(gpu_view()), width, 9))
    assert tp[0].startswith(" # rank util ") and tp[0].endswith("state"), "short ranks take no more than their title"
    none = texts(panels.get("processes").draw(make_view(ranked(("a.py", ""), ("b.py", ""))), width, 9))
    assert "rank" not in none[0] and "a.py" in none[1]


def test_a_power_cap_that_comes_and_goes_moves_nothing_where_there_is_room() -> None:
    calm = ranked(("sglang::scheduler", "scheduler"))
    capped = ranked(("sglang::scheduler", "scheduler"), throttle_reasons=("power cap",))
    a, b = (texts(panels.get("gpus").draw(make_view(v), 116, 3)) for v in (calm, capped))
    assert a[:2] == b[:2] and b[2].endswith("power cap") and not a[2].endswith("cap")
    narrow = texts(panels.get("gpus").draw(make_view(capped), 78, 3))
    assert narrow[2].endswith("power"), "what is wrong comes before a whole name"
