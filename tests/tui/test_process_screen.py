"""GPU processes on the screen: sorted, tagged, ended together by a chosen signal, and the curves of one."""

from __future__ import annotations

from typing import Any

import fake
from conftest import text_of

from k2tui.core.gpu import GpuProcess
from k2tui.tui.history import History
from k2tui.tui.panels.processes import SORTS, key_of, ordered


async def until(pilot: Any, true: Any, seconds: float = 20.0) -> None:
    for _ in range(int(seconds / 0.05)):
        if true():
            return
        await pilot.pause(0.05)
    raise AssertionError(f"did not come true; the screen:\n{text_of(pilot.app)}")


def test_order_of_processes() -> None:
    from dataclasses import replace

    base = fake.gpus(fake.T0, 3).processes
    procs = [
        replace(base[0], memory_used_b=1, sm_utilization=9, user="b"),
        replace(base[1], memory_used_b=3, sm_utilization=None, user="a"),
        replace(base[2], memory_used_b=2, sm_utilization=50, user="c"),
    ]
    assert [p.gpu_index for p in ordered(procs, "")] == [0, 1, 2]
    assert [p.gpu_index for p in ordered(procs, "memory")] == [1, 2, 0]
    assert [p.gpu_index for p in ordered(procs, "sm")] == [2, 0, 1]
    assert [p.gpu_index for p in ordered(procs, "user")] == [1, 0, 2]
    orphan = replace(procs[0], is_orphan=True)
    assert all(ordered([*procs[1:], orphan], sort)[0] is orphan for sort in SORTS)


def test_curves_of_a_process_end_with_it() -> None:
    from dataclasses import replace

    history = History()
    for second in range(5):
        history.add(fake.scene("serving", fake.T0 + second, 100.0 + second))
    process = fake.gpus(fake.T0 + 4).processes[0]
    from k2tui.tui.history import process_series

    name = process_series(process)
    assert len([n for n in history._series if n.startswith("proc.")]) > 0
    snap = fake.scene("serving", fake.T0 + 9, 109.0)
    assert snap.gpu is not None
    history.add(replace(snap, gpu=replace(snap.gpu, processes=())))
    assert not [n for n in history._series if n.startswith("proc.")] and list(history.get(f"{name}.sm")) == []


async def test_tagged_processes_are_ended_together_by_the_chosen_signal(make_app: Any) -> None:
    app = make_app("serving")
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("2")
        await until(pilot, lambda: "scheduler_TP1" in text_of(app))
        await pilot.press("tab")
        await until(pilot, lambda: "tag" in text_of(app))
        await pilot.press("space", "down", "space")
        await until(pilot, lambda: "2 tagged" in text_of(app))
        await pilot.press("K")
        await until(pilot, lambda: "End 2 processes: how?" in text_of(app))
        await pilot.press("down", "down", "enter")
        await until(pilot, lambda: "SIGINT now, and nothing after it" in text_of(app))
        assert (
            "pid 41000" in text_of(app)
            and "pid 41001" in text_of(app)
            and "the server will fail" in text_of(app)
        )
        assert not [o for o in app.backend.orders if o[0] == "end_processes"]
        await pilot.press("y")
        await until(pilot, lambda: [o for o in app.backend.orders if o[0] == "end_processes"])
        (order,) = [o for o in app.backend.orders if o[0] == "end_processes"]
        assert [pid for pid, _ in order[1]] == [41000, 41001] and order[2] == "INT"
        assert app.process_pick.tagged == frozenset()


async def test_sort_and_curves_by_key(make_app: Any) -> None:
    app = make_app("serving")
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("2")
        await until(pilot, lambda: "scheduler_TP1" in text_of(app))
        await pilot.press("tab", "o")
        await until(pilot, lambda: "by memory" in text_of(app))
        await pilot.press("c")
        await until(pilot, lambda: "SM share" in text_of(app) and "host memory" in text_of(app))
        assert app.backend.watched_gpu is not None
        await pilot.press("e")
        await until(pilot, lambda: "HF_TOKEN=***" in text_of(app))
        await pilot.press("escape", "escape")
        await until(pilot, lambda: "scheduler_TP3" in text_of(app) and app.backend.watched_gpu is None)


def test_keys_name_a_row_each() -> None:
    keys = [key_of(p) for p in fake.gpus(fake.T0).processes]
    assert len(keys) == len(set(keys)) == 8


async def test_the_hosts_processes_are_shown_and_ended_on_request(make_app: Any) -> None:
    app = make_app("serving")
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("2")
        await until(pilot, lambda: "scheduler_TP1" in text_of(app))
        assert not app.backend.host_processes
        await pilot.press("tab", "a")
        app.backend.host_processes = (
            GpuProcess(777, "rsync", "me", -1, host_rss_b=3 << 30, started_s=fake.T0 - 60, command="rsync -a /a /b", kind=""),
        )
        await until(pilot, lambda: "rsync" in text_of(app) and "with the host's busiest" in text_of(app))
        assert app.backend.sees_host_processes
        await pilot.press("end", "K")
        await until(pilot, lambda: "End pid 777: how?" in text_of(app))
        await pilot.press("enter")
        await until(pilot, lambda: "3.0G of memory, no GPU" in text_of(app))
        await pilot.press("escape", "1")
        await until(pilot, lambda: not app.backend.sees_host_processes)
        await pilot.press("2")
        await until(pilot, lambda: app.backend.sees_host_processes)
