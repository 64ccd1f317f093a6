"""The board on the screen, and the ways between a job, its task, its benchmark rows and its GPU curves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import fake
import pytest
from conftest import text_of
from test_app import shows, until

from k2tui.core.job import Job, JobState, Progress
from k2tui.core.snapshot import Snapshot, StageInfo
from k2tui.sources.logindex import LogFile
from k2tui.tui.panelview import PanelView
from k2tui.tui.widgets.logview import LogView

SIZES = [(80, 24), (120, 40), (200, 60)]


def world(kind: str = "loading") -> fake.FakeBackend:
    """The usual scene; the benchmark has run, its rows know their job, and task 3 follows it."""

    def script(now: float) -> Snapshot:
        snap = fake.scene(kind, now, 124.0)
        bench = next(j for j in snap.jobs if j.spec.id == "bench-02")
        ran = Job(
            bench.spec, JobState.SUCCEEDED, started_s=now - 200, ended_s=now - 100, took_s=100.0, exit_code=0
        )
        rows = tuple(replace(r, job_id="bench-02" if n < 2 else "gone") for n, r in enumerate(snap.bench))
        times: dict[str, dict[str, Any]] = {
            "2": {"started_s": now - 124},
            "3": {"started_s": ran.started_s, "ended_s": ran.ended_s, "took_s": ran.took_s},
        }
        tasks = tuple(replace(t, **times.get(t.id, {})) for t in snap.board.tasks)
        jobs = tuple(ran if j is bench else j for j in snap.jobs)
        return replace(snap, jobs=jobs, bench=rows, board=replace(snap.board, tasks=tasks))

    return fake.FakeBackend(script, clock=lambda: fake.T0)


def front(app: Any) -> str:
    focused = app.screen.focused
    return focused.panel.name if isinstance(focused, PanelView) else ""


@pytest.mark.parametrize("size", SIZES)
async def test_list_and_columns_show_the_same_tasks(make_app: Any, size: tuple[int, int]) -> None:
    app = make_app(backend=world())
    async with app.run_test(size=size) as pilot:
        await pilot.press("4")
        await shows(pilot, "1/7 done", "Convert prompts", "needs 2", "1:40", "2:04")
        await pilot.press("down")
        await until(pilot, lambda: app.screen.selected_key("board") == "3")
        await pilot.press("v")
        await shows(
            pilot, "Pending", "In progress", "Completed", "Serve Kimi", "Baseline", "Convert", "Ask ops"
        )
        # the same task is selected, in the column of its status, and stands in full below
        await until(pilot, lambda: front(app) == "boardpending" and app.screen.selected_key("board") == "3")
        await shows(pilot, "Baseline benchmark without a draft", "took 1:40", "after  ○ Serve Kimi")
        await pilot.press("right")
        await until(pilot, lambda: front(app) == "boardactive" and app.screen.selected_key("board") == "2")
        await shows(pilot, "so far 2:04")
        await pilot.press("right", "right")
        await until(pilot, lambda: front(app) == "boarddone" and app.screen.selected_key("board") == "1")
        await pilot.press("v")
        await until(pilot, lambda: front(app) == "board" and app.screen.selected_key("board") == "1")


async def test_filter_by_words_status_and_priority(make_app: Any) -> None:
    app = make_app("loading")
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("4")
        await shows(pilot, "1/7 done", "Ask ops")
        await pilot.press("slash", *"DRAFT eagle", "enter")
        await shows(pilot, "1 shown: /DRAFT eagle", "Train the EAGLE-3 draft")
        assert "Ask ops" not in text_of(app)
        await pilot.press("escape")
        await shows(pilot, "Ask ops")
        await pilot.press("f")
        await shows(pilot, "5 shown: open")
        await pilot.press("F")
        await shows(pilot, "1 shown: open, high", "Serve Kimi")
        await pilot.press("f")
        await shows(pilot, "No task is pending, high")
        await pilot.press("v")  # the filter holds for the columns too
        await shows(pilot, "In progress", "pending, high", "none")
        await pilot.press("escape")
        await shows(pilot, "Ask ops", "Convert prompts")


async def test_move_note_and_what_comes_first(make_app: Any) -> None:
    app = make_app("loading")
    backend = app.backend
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("4")
        await until(pilot, lambda: app.screen.selected_key("board") == "2")
        await pilot.press("J")
        await until(pilot, lambda: ("move_task", "2", "3") in backend.orders)
        await until(pilot, lambda: app.screen.row_keys("board")[:3] == ["1", "3", "2"])
        assert app.screen.selected_key("board") == "2"
        await pilot.press("K", "K")
        await until(pilot, lambda: app.screen.row_keys("board")[:3] == ["2", "1", "3"])
        await pilot.press("K")
        await until(pilot, lambda: any("first one here already" in m[2] for m in app.messages))
        await pilot.press("n", *"after lunch", "enter")
        await until(pilot, lambda: ("set_task", "2", {"note": "after lunch"}) in backend.orders)
        await shows(pilot, "after lunch")
        # task 3 needs task 2: asked first, and `n` leaves it alone
        await pilot.press("down", "down", "space")
        await shows(pilot, "Set to in progress?", "Baseline benchmark", "It needs these first", "Serve Kimi")
        await pilot.press("n")
        await until(pilot, lambda: len(app.screen_stack) == 1)
        assert not any(o[0] == "set_task" and "status" in o[2] for o in backend.orders)
        await pilot.press("space")
        await shows(pilot, "Set to in progress?")
        await pilot.press("y")
        await until(pilot, lambda: ("set_task", "3", {"status": "in_progress"}) in backend.orders)


async def test_moving_among_shown_tasks_passes_the_hidden_ones(make_app: Any) -> None:
    app = make_app("loading")
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("4")
        await shows(pilot, "1/7 done")
        await pilot.press("slash", *"bench", "enter")
        await shows(pilot, "2 shown")
        await pilot.press("g", "J")  # 3 and 6 are shown
        await until(pilot, lambda: ("move_task", "3", "6") in app.backend.orders)


async def test_every_board_key_is_in_the_palette_and_its_hint_can_be_clicked(make_app: Any) -> None:
    app = make_app("loading")
    async with app.run_test(size=(160, 40)) as pilot:
        await pilot.press("4")
        await shows(pilot, "1/7 done", "n note")
        await pilot.press("ctrl+p")
        await shows(pilot, "Commands")
        await pilot.press(*"board list/columns", "enter")
        await shows(pilot, "In progress", "Pending")
        await pilot.press("ctrl+p")
        await pilot.press(*"pending note", "enter")
        await shows(pilot, "note")
        await pilot.press(*"by palette", "enter")
        await until(
            pilot,
            lambda: any(o[0] == "set_task" and o[2] == {"note": "by palette"} for o in app.backend.orders),
        )
        keys = text_of(app).splitlines()[39]
        await pilot.click("#keys", offset=(keys.index("list/columns") + 1, 0))
        await until(pilot, lambda: front(app) == "board")
        keys = text_of(app).splitlines()[39]
        await pilot.click("#keys", offset=(keys.index("edit") + 1, 0))
        await shows(pilot, "task")
        await pilot.press(*" now", "enter")
        await until(
            pilot,
            lambda: any(
                o[0] == "set_task" and o[2].get("content", "").endswith(" now") for o in app.backend.orders
            ),
        )


async def test_links_lead_from_each_to_each(make_app: Any) -> None:
    """job -> task -> benchmark row -> GPU curves -> log -> job, by the key alone."""
    app = make_app(backend=world())
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("3")
        await until(pilot, lambda: "bench-02" in app.screen.row_keys("jobs"))
        app.screen.go_to("jobs", "bench-02")
        await pilot.press("i")
        await shows(
            pilot, "Linked", "Log of bench", "Task: Baseline", "Benchmark: eagle3", "GPUs over its time"
        )
        await pilot.press(*"task", "enter")
        await until(pilot, lambda: app.current_mode == "board" and app.screen.selected_key("board") == "3")
        await pilot.press("i")
        await shows(pilot, "Benchmark: eagle3")
        await pilot.press(*"eagle3 C 8", "enter")
        await until(
            pilot, lambda: app.current_mode == "bench" and app.screen.selected_key("bench") == "run-8"
        )
        await pilot.press("c")
        await shows(pilot, "GPUs during eagle3", "H200", "i links")
        await pilot.press("i")
        await shows(pilot, "Log of bench", "Task: Baseline")
        await pilot.press(*"log of", "enter")
        await until(
            pilot, lambda: app.screen.NAME == "log" and app.screen.query_one(LogView).log_key == "bench-02"
        )
        await shows(pilot, "i links")
        await pilot.press("c")
        await shows(pilot, "GPUs during bench")
        await pilot.press("escape")
        await pilot.press("ctrl+p", *"go to its task", "enter")
        await until(pilot, lambda: app.current_mode == "board" and app.screen.selected_key("board") == "3")
        await pilot.press("ctrl+p", *"go to its job", "enter")
        await until(
            pilot, lambda: app.current_mode == "jobs" and app.screen.selected_key("jobs") == "bench-02"
        )
        await pilot.press("ctrl+p", *"go to its benchmark", "enter")
        await until(
            pilot, lambda: app.current_mode == "bench" and app.screen.selected_key("bench") == "run-9"
        )
        app.screen.go_to("bench", "run-6")  # a row whose job was deleted
        await pilot.press("ctrl+p", *"go to its task", "enter")
        await until(pilot, lambda: any("no task is linked" in m[2] for m in app.messages))


async def test_a_retry_says_whether_it_goes_on(make_app: Any) -> None:
    def script(now: float) -> Snapshot:
        snap = fake.scene("loading", now, 124.0)
        ran = replace(snap.jobs[-1], spec=replace(snap.jobs[-1].spec, params={"out": "draft"}))
        train = StageInfo("train", "Train the draft", "t", resumes="its last save")
        resumed = replace(snap.jobs[1], progress=Progress(41, 64, "steps", resumed="step 30"))
        return replace(snap, jobs=(snap.jobs[0], resumed, snap.jobs[2], ran), stages=(train,))

    app = make_app(backend=fake.FakeBackend(script, clock=lambda: fake.T0))
    async with app.run_test(size=(200, 60)) as pilot:
        await pilot.press("3")
        await shows(pilot, "resumed from step 30", "train-00")
        app.screen.go_to("jobs", "train-00")
        await pilot.press("r")
        await until(
            pilot, lambda: any("job train-00b; goes on after its last save" in m[2] for m in app.messages)
        )
        app.screen.go_to("jobs", "prepare-01")  # a command of one's own: no stage's parameters
        await pilot.press("r")
        await until(pilot, lambda: any("job prepare-01b; from the beginning" in m[2] for m in app.messages))


async def test_enter_opens_and_only_space_changes_a_status(make_app: Any) -> None:
    app = make_app(backend=world())
    orders = app.backend.orders
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("4")
        await until(pilot, lambda: app.screen.selected_key("board") == "2")
        await pilot.press("end", "enter")  # task 7 has no job
        await shows(pilot, "Ask ops", "Esc closes")
        await pilot.press("escape", "home", "space")
        await until(pilot, lambda: ("set_task", "1", {"status": "cancelled"}) in orders)
        await until(pilot, lambda: any("u undoes" in m[2] for m in app.messages))
        assert [o for o in orders if o[0] == "set_task"] == [("set_task", "1", {"status": "cancelled"})]
        await pilot.press("u")
        await until(pilot, lambda: ("set_task", "1", {"status": "completed"}) in orders)
        await pilot.press("v")
        await shows(pilot, "1 \u00b7 1 cancelled")


async def test_the_boards_log_key_opens_the_tasks_job(make_app: Any) -> None:
    app = make_app(backend=world())
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("4", "down", "l")
        await until(
            pilot, lambda: app.screen.NAME == "log" and app.screen.query_one(LogView).log_key == "bench-02"
        )


async def test_a_jobs_log_folds_its_bars_and_marks_its_errors(make_app: Any, tmp_path: Path) -> None:
    """tqdm's carriage returns are one line, with its newest state; a real file, read by the real index."""
    path = tmp_path / "output.log"
    bars = b"".join(b"\rshards: %3d%%|##        | %d/64" % (n * 100 // 64, n) for n in range(1, 65))
    path.write_bytes(b"begin\n" + bars + b"\nRuntimeError: CUDA error\nwarning: slow disk\nend\n")
    backend = world()
    backend.log = lambda key: LogFile(path, title=key)  # type: ignore[assignment]
    app = make_app(backend=backend)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("3", "enter")
        await shows(pilot, "begin", "shards: 100%|##        | 64/64", "CUDA error", "5/5")
        assert text_of(app).count("shards:") == 1
        lines = app.screen.query_one(LogView)._lines
        roles = {
            word: {s.role for line in lines for s in line if word in s.text}
            for word in ("CUDA", "slow disk", "begin")
        }
        assert roles == {"CUDA": {"bad"}, "slow disk": {"warn"}, "begin": {""}}
        await pilot.press("e")
        await until(pilot, lambda: app.screen.query_one(LogView).marked == 2)
