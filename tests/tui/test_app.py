"""The whole app over a scripted world, driven by keys and mouse: what is shown, what is ordered, what never happens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import fake
import pytest
from conftest import text_of

from k2tui.core.chain_view import ChainView, StepState, StepView
from k2tui.core.gpu_series import GpuCurves
from k2tui.core.job import Job, JobSpec, JobState
from k2tui.core.snapshot import Notice, Snapshot, StageInfo
from k2tui.errors import K2Error
from k2tui.tui.settings import Settings
from k2tui.tui.widgets.logview import LogView
from k2tui.tui.widgets.rowlist import RowList

SIZES = [(80, 24), (120, 40), (200, 60)]


async def settle(pilot: Any, seconds: float = 0.25) -> None:
    await pilot.pause(seconds)
    await pilot.pause()


async def until(pilot: Any, true: Any, seconds: float = 20.0) -> None:
    """Wait until true() holds; the machine may be slow."""
    for _ in range(int(seconds / 0.05)):
        if true():
            return
        await pilot.pause(0.05)
    raise AssertionError(f"did not come true; the screen:\n{text_of(pilot.app)}")


async def shows(pilot: Any, *parts: str) -> None:
    await until(pilot, lambda: all(p in text_of(pilot.app) for p in parts))


@pytest.mark.parametrize("size", SIZES)
async def test_overview_shows_all_that_matters(make_app: Any, size: tuple[int, int]) -> None:
    async with make_app("loading").run_test(size=size) as pilot:
        await shows(pilot, "LOADING", "Kimi-K2.5-INT4", "26/64", "0/1", "±20s", "weights", "h200" if size[0] > 100 else "GPUs")
        await shows(pilot, "Start", "Stop", "Bench", "Extract", "Train", "serve kimi-k25", "Serve Kimi-K2.5", "eagle3 3", "help", "quit")
        text = text_of(pilot.app)
        lines = text.splitlines()
        assert len(lines) == size[1] and all(len(x) >= size[0] - 8 for x in lines)
        assert sum("/141G" in x for x in lines) == 8, text


async def test_serving_figures(make_app: Any) -> None:
    async with make_app("serving").run_test(size=(80, 24)) as pilot:
        await shows(pilot, "READY", "kimi-k2.5", "health 200", "run 12", "queue 0", "34%", "tok/s", "accept")


async def test_failed_server_and_proof_line(make_app: Any) -> None:
    async with make_app("failed").run_test(size=(120, 40)) as pilot:
        await shows(pilot, "FAILED", "ran out of memory at shard 10/64", "--mem-fraction-static")
        await pilot.press("p")
        await shows(pilot, "torch.OutOfMemoryError")
        view = pilot.app.screen.query_one(LogView)
        assert view.marked == 57 and not view.follow
        await pilot.press("escape", "escape")
        await shows(pilot, "GPUs")


async def test_screens_by_number(make_app: Any) -> None:
    async with make_app("serving").run_test(size=(120, 40)) as pilot:
        for key, words in (
            ("2", ("GPU processes", "TP7", "sglang::scheduler_TP0")),
            ("3", ("killed by signal 9", "Log · bench-02")),
            ("4", ("Ask ops about NVLink", "stage  serve")),
            ("5", ("eagle3 3", "5 Bench")),
            ("6", ("Start, phase by phase", "graphs", "accept length", "Diagnosis")),
            ("1", ("Host" if False else "Board", "Benchmarks")),
        ):
            await pilot.press(key)
            await shows(pilot, *words)


async def test_start_server_shows_the_exact_command_first(make_app: Any) -> None:
    app = make_app("loading")
    async with app.run_test(size=(80, 24)) as pilot:
        await shows(pilot, "LOADING")
        await pilot.press("s")
        await shows(pilot, "which profile?", "kimi-k25-eagle3", "--mem-fraction-static")
        assert not app.backend.orders
        await pilot.press("down")
        await shows(pilot, "/models/kimi-k25-eagle3")
        await pilot.press("enter")
        await until(pilot, lambda: ("submit", "serve", {"profile": "kimi-k25-eagle3"}) in app.backend.orders)
        await until(pilot, lambda: any("job serve-99" in m[2] for m in app.messages))


async def test_a_dialog_can_be_left(make_app: Any) -> None:
    app = make_app("loading")
    async with app.run_test(size=(80, 24)) as pilot:
        for key in ("s", "b", "S", "question_mark", "ctrl+p", "T", "m"):
            await pilot.press(key)
            await until(pilot, lambda: len(app.screen_stack) == 2)
            await pilot.press("escape")
            await until(pilot, lambda: len(app.screen_stack) == 1)
        assert not app.backend.orders and app.theme == "k2-dark"


async def test_stop_asks_and_shows_what_dies(make_app: Any) -> None:
    app = make_app("serving")
    async with app.run_test(size=(80, 24)) as pilot:
        await shows(pilot, "READY")
        await pilot.press("S")
        await shows(pilot, "Stop the server?", "took 5:18 to load", "12 requests are being answered", "pid 40999", "pid 41000")
        await pilot.press("enter")  # the default is no
        await until(pilot, lambda: len(app.screen_stack) == 1)
        assert not app.backend.orders
        await pilot.press("S")
        await shows(pilot, "Stop the server?")
        await pilot.press("y")
        await until(pilot, lambda: ("stop_job", "serve-01") in app.backend.orders)


def _pipeline_world(*states: StepState, server_ended: bool = False, runs: bool = False) -> fake.FakeBackend:
    """The serving world with a pipeline of these steps; its server's job ended, or a pipeline's job beside it, when wanted."""
    steps = tuple(StepView(f"step{n}", f"What step {n} does", s, job_id="train-00" if s is StepState.DONE else "") for n, s in enumerate(states))
    stage = StageInfo("pipeline", "Run the pipeline", "A", fields=(("to", "", "up to this step"),))

    def script(now: float) -> Snapshot:
        snap = fake.scene("serving", now, 124.0)
        jobs = snap.jobs
        if server_ended:
            jobs = tuple(replace(j, state=JobState.STOPPED) for j in jobs if j.spec.kind == "server")
        if runs:
            jobs = (*jobs, Job(JobSpec("pipeline-1", "pipeline", "pipeline t", ("k2tui",)), JobState.RUNNING))
        return replace(snap, chain=ChainView("t", steps=steps), jobs=jobs, stages=(*snap.stages, stage))

    return fake.FakeBackend(script, clock=lambda: fake.T0)


async def test_enter_on_a_step_only_looks_and_u_asks(make_app: Any) -> None:
    app = make_app(backend=_pipeline_world(StepState.DONE, StepState.PENDING))
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("8")
        await shows(pilot, "step1", "1/2 steps")
        await pilot.press("enter")  # the step that is next: nothing to read yet
        await shows(pilot, "What step 1 does", "no log yet")
        await pilot.press("escape", "up", "enter")
        await until(pilot, lambda: app.deck.NAME == "log")
        assert not app.backend.orders
        await pilot.press("escape", "down", "u")
        await shows(pilot, "Run the pipeline", "--to=step1")
        assert not app.backend.orders and "are done" not in text_of(app)
        await pilot.press("enter")
        await until(pilot, lambda: ("submit", "pipeline", {"to": "step1"}) in app.backend.orders)


async def test_a_pipeline_that_is_done_says_so_in_its_form(make_app: Any) -> None:
    async with make_app(backend=_pipeline_world(StepState.DONE, StepState.DONE)).run_test(size=(80, 24)) as pilot:
        await pilot.press("8")
        await shows(pilot, "step1", "A run all")
        await pilot.press("A")
        await shows(pilot, "All 2 steps are done")


async def test_run_all_is_offered_once_on_every_panel_of_the_pipeline(make_app: Any) -> None:
    async with make_app(backend=_pipeline_world(StepState.DONE, StepState.PENDING)).run_test(size=(140, 40)) as pilot:
        await pilot.press("8")
        await shows(pilot, "A run all")
        for panel in ("pipeline", "train", "report"):
            pilot.app.screen.query_one(f"#panel-{panel}").focus()
            await until(pilot, lambda panel=panel: pilot.app.screen.focused.id == f"panel-{panel}")
            pilot.app.screen.draw_keys()
            await settle(pilot, 0.1)
            assert text_of(pilot.app).splitlines()[-1].count("A run all") == 1, panel


async def test_a_server_is_not_retried_without_asking(make_app: Any) -> None:
    app = make_app(backend=_pipeline_world(server_ended=True))
    async with app.run_test(size=(80, 24)) as pilot:
        await shows(pilot, "serve kimi-k25")
        await pilot.press("r")
        await shows(pilot, "Start this server again?", "sglang.launch_server")
        await pilot.press("enter")  # the default is no
        await until(pilot, lambda: len(app.screen_stack) == 1)
        assert not app.backend.orders
        await pilot.press("r")
        await shows(pilot, "Start this server again?")
        await pilot.press("y")
        await until(pilot, lambda: ("retry_job", "serve-01") in app.backend.orders)


async def test_stopping_a_server_under_a_pipeline_warns(make_app: Any) -> None:
    async with make_app(backend=_pipeline_world(runs=True)).run_test(size=(80, 24)) as pilot:
        await shows(pilot, "READY")
        await pilot.press("S")
        await shows(pilot, "Stop the server?", "A pipeline is running (job pipeline-1)")


async def test_stopping_a_pipelines_step_says_what_comes_of_it(make_app: Any) -> None:
    def script(now: float) -> Snapshot:
        snap = fake.scene("serving", now, 124.0)
        step = Job(JobSpec("train-1", "train", "train the draft", ("k2tui",), parent="pipeline-1", params={"lr": 1}), JobState.RUNNING)
        above = Job(JobSpec("pipeline-1", "pipeline", "pipeline demo", ("k2tui",)), JobState.RUNNING)
        train = StageInfo("train", "Train", "t", resumes="its last save")
        return replace(snap, jobs=(step, above, *snap.jobs), stages=(*(s for s in snap.stages if s.name != "train"), train))

    async with make_app(backend=fake.FakeBackend(script, clock=lambda: fake.T0)).run_test(size=(120, 40)) as pilot:
        await pilot.press("3")
        await shows(pilot, "train the draft")
        await pilot.press("home", "d")
        await shows(pilot, "Stop this job?", "pipeline demo (job pipeline-1) started it", "goes on after its last save")


async def test_a_failed_server_of_80x24_shows_its_whole_remedy_and_the_pipelines_button(make_app: Any) -> None:
    words = "the host ran out of memory: " + "free some of it, then start again; " * 4 + "see the last word"

    def script(now: float) -> Snapshot:
        snap = fake.scene("failed", now, 124.0, gpu_count=0)
        (server,) = snap.servers
        return replace(snap, servers=(replace(server, load=replace(server.load, hint=words)),), stages=(*snap.stages, StageInfo("pipeline", "Run the pipeline", "A")))

    async with make_app(backend=fake.FakeBackend(script, clock=lambda: fake.T0)).run_test(size=(80, 24)) as pilot:
        await shows(pilot, "FAILED", "the last word", " A All ", " l Log ")


async def test_benchmark_form(make_app: Any) -> None:
    app = make_app("serving", settings=Settings(bench={"concurrency": "2", "num_prompts": "9"}))
    async with app.run_test(size=(80, 24)) as pilot:
        await shows(pilot, "READY")
        await pilot.press("b")
        await shows(pilot, "concurrency", "--num_prompts=9")
        await pilot.press("end", "ctrl+u", *"none")
        await shows(pilot, "is not a number", "write 1,4,8")
        await pilot.press("enter")
        assert not app.backend.orders  # a wrong form does not run
        await shows(pilot, "!concurrency", " requests")  # and shows which field it is
        await pilot.press("ctrl+u", "4", "enter")
        await until(pilot, lambda: ("submit", "bench", {"url": "http://127.0.0.1:30000", "concurrency": "4", "num_prompts": "9"}) in app.backend.orders)


async def test_a_job_that_fails_at_once_says_why(make_app: Any) -> None:
    failed = Job(JobSpec("bench-99", "bench", "bench C=4", ("k2tui",)), JobState.FAILED, reason="exit code 2")

    def script(now: float) -> Snapshot:
        snap = fake.scene("serving", now, 124.0)
        return replace(snap, jobs=(failed, *snap.jobs))

    app = make_app(backend=fake.FakeBackend(script, clock=lambda: fake.T0))
    async with app.run_test(size=(80, 24)) as pilot:
        await shows(pilot, "READY")
        await pilot.press("b")
        await shows(pilot, "This command")
        await pilot.press("enter")
        await until(pilot, lambda: any("bench C=4 failed: exit code 2" in m[2] and "OutOfMemoryError" in m[2] for m in app.messages))
        await settle(pilot, 0.5)
        assert sum("bench C=4 failed" in m[2] for m in app.messages) == 1


async def test_unavailable_stages_say_why(make_app: Any) -> None:
    app = make_app("loading")
    async with app.run_test(size=(80, 24)) as pilot:
        await shows(pilot, "LOADING")
        await pilot.press("x")
        await until(pilot, lambda: any("the server must be ready first" in m[2] for m in app.messages))
        await pilot.press("t")
        await until(pilot, lambda: any("no extracted states yet" in m[2] for m in app.messages))
        assert not app.backend.orders


async def test_order_errors_are_shown_once_with_their_hint(make_app: Any) -> None:
    app = make_app("loading")
    app.backend.broken = K2Error("no space left in [/tmp] for jobs", "free some [b]room[/b]")
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await shows(pilot, "LOADING")
        await pilot.press("3")
        await until(pilot, lambda: app.screen.go_to("jobs", "train-00"))
        await pilot.press("r")
        await until(pilot, lambda: [m for m in app.messages if "no space left in [/tmp]" in m[2] and "[b]room[/b]" in m[2]])
        await shows(pilot, "[b]room[/b]")  # markup of others stays text
        await pilot.press("r")
        await until(pilot, lambda: ("retry_job", "train-00") in app.backend.orders)


async def test_board_changes(make_app: Any) -> None:
    app = make_app("loading")
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("4")
        await shows(pilot, "stage  serve")
        await pilot.press("space")
        await until(pilot, lambda: ("set_task", "2", {"status": "completed"}) in app.backend.orders)
        await shows(pilot, "2/7 done")
        await pilot.press("a", *"! [x] new 草", "enter")
        await until(pilot, lambda: ("add_task", "[x] new 草", "high") in app.backend.orders)
        await shows(pilot, "[x] new 草")
        await pilot.press("down", "e", *" soon", "enter")
        await until(pilot, lambda: ("set_task", "3", {"content": "Baseline benchmark without a draft soon"}) in app.backend.orders)
        await pilot.press("exclamation_mark")
        await until(pilot, lambda: ("set_task", "3", {"priority": "high"}) in app.backend.orders)


async def test_log_screen_follow_search_filter_errors(make_app: Any) -> None:
    app = make_app("loading")
    async with app.run_test(size=(80, 24)) as pilot:
        await shows(pilot, "LOADING")
        await pilot.press("enter")  # the first job's log
        await shows(pilot, "Log · bench-02", "120/120", "following")
        view = app.screen.query_one(LogView)
        log = view.port
        assert isinstance(log, fake.FakeLog)
        assert all(count <= 21 for _, count in log.asked)  # never more than is visible
        await pilot.press("up")
        await until(pilot, lambda: not view.follow)
        await pilot.press("e")  # below there is none: from the top again
        await until(pilot, lambda: view.marked == 57 and any("from the top again" in m[2] for m in app.messages))
        await pilot.press("E")
        await until(pilot, lambda: view.marked == 57 and any("the only one" in m[2] for m in app.messages))
        await pilot.press("slash", *"NCCL", "enter")
        await until(pilot, lambda: view.pattern == "NCCL" and view.marked is not None and view.marked != 57)
        first = view.marked
        await pilot.press("n")
        await until(pilot, lambda: view.marked is not None and view.marked > first)
        await pilot.press("N")
        await until(pilot, lambda: view.marked == first)
        await shows(pilot, "[bold]markup[/]")
        await pilot.press("G", "slash", *"scheduler", "enter", "G", "slash", *"NCCL", "enter")  # typing replaces the last pattern; from the end backwards: the last one
        await until(pilot, lambda: view.marked == 107)
        await pilot.press("n")
        await until(pilot, lambda: view.marked == 5)
        await pilot.press("ampersand", *"nccl", "enter")
        await until(pilot, lambda: view._hits is not None and len(view._hits) == 7 and not view._busy)
        await shows(pilot, "&nccl")
        await pilot.press("escape")
        await until(pilot, lambda: view._hits is None)
        await pilot.press("slash", *"(", "enter")
        await until(pilot, lambda: any("not a regular expression" in m[2] for m in app.messages))
        await pilot.press("G", "w", "right", "0", "g", "f")
        await until(pilot, lambda: view.follow)
        await pilot.press("q")
        await until(pilot, lambda: len(app.screen_stack) == 1)
        assert log.is_closed


async def test_phases_and_gaps_of_a_servers_log(make_app: Any) -> None:
    app = make_app("loading")
    async with app.run_test(size=(80, 24)) as pilot:
        await shows(pilot, "LOADING")
        await pilot.press("l")
        await until(pilot, lambda: app.screen.NAME == "log")
        view = app.screen.query_one(LogView)
        await until(pilot, lambda: app.screen._view is not None)
        begins = [span.line_no - 1 for span in app.screen._view.server.load.phases if span.line_no is not None]
        assert len(begins) > 1
        view.show_line(begins[0])
        await pilot.press("}")
        await until(pilot, lambda: view.marked == begins[1])
        await pilot.press("{")
        await until(pilot, lambda: view.marked == begins[0])
        await pilot.press("{")
        await until(pilot, lambda: any("no phase above" in m[2] for m in app.messages))
    view = LogView()
    told = [view._gap(text).text.strip() for text in ("[2026-11-29 23:59:58 TP0] a", "  no stamp", "[2026-11-30 00:01:03] b", "11-30 00:01:03 c")]
    assert told == ["", "", "+1:05", ""]


async def test_missing_log_is_said_in_its_pane(make_app: Any) -> None:
    app = make_app("loading")
    async with app.run_test(size=(80, 24)) as pilot:
        await shows(pilot, "LOADING")
        app.open_log("missing")
        await shows(pilot, "no log of job missing")


async def test_copy_sends_the_jobs_command(make_app: Any) -> None:
    app = make_app("loading")
    copied: list[str] = []
    app.copy_to_clipboard = copied.append
    async with app.run_test(size=(80, 24)) as pilot:
        await shows(pilot, "LOADING")
        await pilot.press("down", "y")
        await until(pilot, lambda: bool(copied))
        assert copied == ["python -m sglang.launch_server --model-path /models/Kimi-K2.5-INT4 --tp-size 8 --port 30000"]
        await pilot.press("s")
        await shows(pilot, "--mem-fraction-static")
        await pilot.press("ctrl+y")
        await until(pilot, lambda: len(copied) == 2)
        assert "--speculative-algorithm EAGLE3" in copied[1]


async def test_palette_finds_and_runs(make_app: Any) -> None:
    app = make_app("loading")
    async with app.run_test(size=(80, 24)) as pilot:
        await shows(pilot, "LOADING")
        await pilot.press("colon")
        await shows(pilot, "Commands")
        await pilot.press(*"panel host", "enter")
        await shows(pilot, "cores")
        await pilot.press("escape")
        await pilot.press("ctrl+p", *"bnchmarks", "enter")
        await until(pilot, lambda: app.current_mode == "bench")


async def test_palette_says_that_nothing_matches(make_app: Any) -> None:
    async with make_app("serving").run_test(size=(80, 24)) as pilot:
        await shows(pilot, "READY")
        await pilot.press("ctrl+p")
        await shows(pilot, "Commands", "Overview")
        await pilot.press(*"qqxxzz")
        await shows(pilot, "nothing matches")


@pytest.mark.parametrize("size", SIZES)
async def test_help_is_whole_at_every_size(make_app: Any, size: tuple[int, int]) -> None:
    """Every word of every key's text is there, in its own column, and once."""
    from k2tui.tui.keys import KEYS
    from k2tui.tui.lines import UNICODE, line_width
    from k2tui.tui.screens.help import help_lines

    async with make_app("serving").run_test(size=size) as pilot:
        await shows(pilot, "READY")
        await pilot.press("question_mark")
        await shows(pilot, "Help", "Server: phases, charts")
        shown = pilot.app.screen.query_one(RowList)
        lines = ["".join(s.text for s in row.line) for row in shown.picture.rows]
        assert all(line_width(row.line) <= shown.inner[0] for row in shown.picture.rows)
    columns = [lines] if size[0] < 100 else [[line[:47] for line in lines], [line[47:] for line in lines]]
    texts = [" ".join(" ".join(column).split()) for column in columns]
    for key in KEYS:
        assert sum(f"{key.show} {key.text}" in text for text in texts) == 1, key
    assert any(line_width(line) > 68 for line in help_lines(UNICODE, 96))  # two columns were drawn there


async def test_the_key_line_says_what_q_does(make_app: Any) -> None:
    async with make_app("serving").run_test(size=(120, 40)) as pilot:
        await shows(pilot, "READY", "q quit")
        await pilot.press("l")
        await shows(pilot, "q back")
        assert "q quit" not in text_of(pilot.app)
        await pilot.press("q")
        await shows(pilot, "q quit")


async def test_every_stop_of_tab_shows_its_focus(make_app: Any) -> None:
    """The host's bare line is none; the server's keys are named; without a GPU there is nothing to open or to sort."""
    app = make_app("serving", gpu_count=0)
    async with app.run_test(size=(80, 24)) as pilot:
        await shows(pilot, "READY")
        seen: dict[str, str] = {}
        for _ in range(12):
            await pilot.press("tab")
            await settle(pilot, 0.1)
            seen[str(app.screen.focused.id)] = text_of(app).splitlines()[-1]
        assert "panel-host" not in seen and len(seen) >= 5
        assert all(f" {key} " in seen["panel-server"] for key in ("p", "l", "R"))
        assert "sort" not in seen["panel-gpus"] and "Enter" not in seen["panel-gpus"]


async def test_without_a_gpu_curves_are_one_sentence(make_app: Any) -> None:
    app = make_app("serving", gpu_count=0)
    async with app.run_test(size=(80, 24)) as pilot:
        await shows(pilot, "READY")
        app.backend.gpu_curves = lambda start, end, steps=0: GpuCurves(start, end, 1.0)
        await pilot.press("c")
        await until(pilot, lambda: [m[2] for m in app.messages] == ["no GPU here"])
        await pilot.press("3", "down", "down", "c")  # a job that has started
        await until(pilot, lambda: [m[2] for m in app.messages] == ["no GPU here"] * 2)
        assert len(app.screen_stack) == 1


async def test_a_key_takes_a_toast_away(make_app: Any) -> None:
    app = make_app("serving")
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await shows(pilot, "READY")
        app.say("something is wrong", "error")
        await shows(pilot, "something is wrong")
        await pilot.press("tab")
        await until(pilot, lambda: "something is wrong" not in text_of(app), 6.0)  # it would stay for 8 s
        assert "something is wrong" in app.messages[-1][2]


async def test_mouse_tabs_buttons_rows(make_app: Any) -> None:
    app = make_app("loading")
    async with app.run_test(size=(80, 24)) as pilot:
        await shows(pilot, "LOADING")
        await pilot.click("#tabs", offset=(text_of(app).splitlines()[0].index("Board"), 0))
        await until(pilot, lambda: app.current_mode == "board")
        await pilot.press("1")
        await shows(pilot, "LOADING")
        await pilot.click("#buttons", offset=(text_of(app).splitlines()[22].index("Bench"), 0))
        await shows(pilot, "input tokens")
        await pilot.press("escape")
        jobs = app.screen.query_one("#panel-jobs", RowList)
        await pilot.click("#panel-jobs", offset=(6, 3))
        await until(pilot, lambda: jobs.selected == "prepare-01")


async def test_unchanged_world_repaints_nothing(make_app: Any) -> None:
    app = make_app("serving")
    async with app.run_test(size=(120, 40)) as pilot:
        await shows(pilot, "READY", "accept")
        await settle(pilot, 0.5)
        widgets = list(app.screen.query("Lines"))
        before = [w.lines_refreshed for w in widgets]
        for _ in range(5):
            app.draw_now()
        assert [w.lines_refreshed for w in widgets] == before


async def test_one_changed_figure_repaints_one_line(make_app: Any) -> None:
    app = make_app("serving")
    async with app.run_test(size=(120, 40)) as pilot:
        await shows(pilot, "READY", "accept")
        snap = app.backend.snapshot()
        gpu = replace(snap.gpu.gpus[3], temperature_c=99)
        app.backend.script = lambda now: replace(snap, gpu=replace(snap.gpu, gpus=(*snap.gpu.gpus[:3], gpu, *snap.gpu.gpus[4:])))
        panel = app.screen.query_one("#panel-gpus", RowList)
        before = panel.lines_refreshed
        app.draw_now()
        assert panel.lines_refreshed - before == 1
        await shows(pilot, "99°C")


async def test_resize_down_to_nothing_and_back(make_app: Any) -> None:
    async with make_app("loading").run_test(size=(120, 40)) as pilot:
        await shows(pilot, "LOADING")
        await pilot.resize_terminal(60, 18)
        await shows(pilot, "60x18", "80x24", "LOADING")
        await pilot.resize_terminal(20, 5)
        await shows(pilot, "LOADING")
        await pilot.resize_terminal(1, 1)
        await pilot.pause()
        await pilot.resize_terminal(80, 24)
        await shows(pilot, "26/64", "quit")
        await pilot.resize_terminal(200, 60)
        await shows(pilot, "Log · serve-01", "26/64")


@pytest.mark.parametrize("theme", ["k2-dark", "k2-light", "k2-cvd-dark", "k2-cvd-light", "ansi-dark", "nord"])
async def test_themes(make_app: Any, theme: str) -> None:
    async with make_app("failed", settings=Settings(theme=theme)).run_test(size=(80, 24)) as pilot:
        await shows(pilot, "FAILED")
        assert pilot.app.theme == theme


async def test_theme_chooser_previews_and_goes_back(make_app: Any) -> None:
    app = make_app("loading")
    async with app.run_test(size=(80, 24)) as pilot:
        await shows(pilot, "LOADING")
        await pilot.press("T")
        await shows(pilot, "k2-light")
        await pilot.press("down", "down")
        await until(pilot, lambda: app.theme != "k2-dark")
        await pilot.press("escape")
        await until(pilot, lambda: app.theme == "k2-dark")
        await pilot.press("T")
        await shows(pilot, "k2-light")
        await pilot.press(*"cvd-light", "enter")
        await until(pilot, lambda: app.theme == "k2-cvd-light")


async def test_ascii_mode_draws_ascii_only(make_app: Any) -> None:
    async with make_app("serving", settings=Settings(ascii=True)).run_test(size=(120, 40)) as pilot:
        await shows(pilot, "READY", "####")
        await settle(pilot)
        import re

        own = re.sub("[草稿模型🧪]", "", text_of(pilot.app))
        assert own.isascii(), [ch for ch in own if not ch.isascii()]


async def test_demo_banner_stays(make_app: Any) -> None:
    async with make_app("loading", is_demo=True).run_test(size=(80, 24)) as pilot:
        for key in "123456":
            await pilot.press(key)
            await shows(pilot, "DEMO")


async def test_notices_are_told_once(make_app: Any) -> None:
    app = make_app("loading")
    script = app.backend.script
    app.backend.script = lambda now: replace(script(now), notices=(Notice(fake.T0, "error", "GPU 3 fell off the bus"), Notice(1.0, "warning", "old")))
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await shows(pilot, "GPU 3 fell off the bus")
        app.draw_now()
        app.draw_now()
        assert sum("fell off" in m[2] for m in app.messages) == 1
        await pilot.press("m")
        await shows(pilot, "old")


async def test_two_servers_can_be_chosen(make_app: Any) -> None:
    app = make_app("two")
    async with app.run_test(size=(120, 40)) as pilot:
        await shows(pilot, "LOADING", "1 of 2", "ready")
        await pilot.press("right_square_bracket")
        await shows(pilot, "READY", "2 of 2")
        await pilot.press("S")  # never another than the one that is shown
        await until(pilot, lambda: [m[2] for m in app.messages] == ["k2tui did not start this server, so it does not stop it"])
        assert len(app.screen_stack) == 1
        await pilot.press("b")
        await shows(pilot, "--url=http://127.0.0.1:30000")
        await pilot.press("escape", "left_square_bracket")
        await shows(pilot, "LOADING", "1 of 2")
        await pilot.press("b")
        await shows(pilot, "this measures another one")
        assert "--url" not in text_of(app)
        await pilot.press("escape", "S")
        await shows(pilot, "Stop the server?", "serve-01")


def _tuning_world(*, has_own: bool = True) -> fake.FakeBackend:
    """A tuning run at work: the server of its trial is newer than the user's own, and ready too."""
    spec = JobSpec("trial-01", "serve", "serve tiny", ("x",), kind="server", params={"tune": "t1"}, parent="tune-1")
    tuner = Job(JobSpec("tune-1", "tune", "tune tiny", ("k2tui",)), JobState.RUNNING)

    def script(now: float) -> Snapshot:
        snap = fake.scene("serving", now, 124.0)
        job = Job(spec, JobState.RUNNING, pid=77)
        (own,) = snap.servers
        assert own.http is not None
        http = replace(own.http, url="http://127.0.0.1:31000", served_model_name="on-trial")
        trial = replace(own, key="trial-01", title="serve tiny", job=job, log_key="trial-01", http=http, load=replace(own.load, url=http.url))
        return replace(snap, servers=(trial, own) if has_own else (trial,), jobs=(job, tuner, *snap.jobs))

    return fake.FakeBackend(script, clock=lambda: fake.T0)


async def test_a_tuning_trial_takes_no_view_from_the_users_own_server(make_app: Any) -> None:
    async with make_app(backend=_tuning_world()).run_test(size=(120, 40)) as pilot:
        await shows(pilot, "READY  kimi-k2.5", "on-trial  tuning trial")
        await pilot.press("b")
        await shows(pilot, "--url=http://127.0.0.1:30000")
        assert "stopped soon" not in text_of(pilot.app)
        await pilot.press("escape", "S")
        await shows(pilot, "Stop the server?", "serve-01")
        assert "A tuning run" not in text_of(pilot.app)


async def test_a_tuning_trial_is_named_as_one(make_app: Any) -> None:
    async with make_app(backend=_tuning_world(has_own=False)).run_test(size=(80, 24)) as pilot:
        await shows(pilot, "READY  on-trial", "tuning trial")
        await pilot.press("b")
        await shows(pilot, "--url=http://127.0.0.1:31000", "tuning trial: it will be stopped soon")
        await pilot.press("escape", "S")
        await shows(pilot, "Stop the server?", "A tuning run is at work (job tune-1): its trial on this server will")


async def test_quit_kills_nothing_and_shift_q_asks(make_app: Any) -> None:
    app = make_app("serving")
    async with app.run_test(size=(80, 24)) as pilot:
        await shows(pilot, "READY")
        await pilot.press("Q")
        await shows(pilot, "stop everything that runs?", "pid 40999")
        await pilot.press("n")
        await until(pilot, lambda: len(app.screen_stack) == 1)
        await pilot.press("q")
        await pilot.pause()
    assert [o for o in app.backend.orders if o[0] != "stop"] == []


async def test_zoom_and_tab(make_app: Any) -> None:
    app = make_app("loading")
    async with app.run_test(size=(80, 24)) as pilot:
        await shows(pilot, "LOADING", "GPUs")
        await pilot.press("z")
        await until(pilot, lambda: ("GPUs ──" not in text_of(app) and "killed by" in text_of(app)) or "LOADING" not in text_of(app))
        await pilot.press("z")
        await shows(pilot, "LOADING")
        seen = set()
        for _ in range(8):
            await pilot.press("tab")
            seen.add(app.focused.id)
        assert {"panel-board", "panel-bench", "panel-gpus", "buttons"} <= seen


async def test_buttons_by_keyboard(make_app: Any) -> None:
    app = make_app("loading")
    async with app.run_test(size=(80, 24)) as pilot:
        await shows(pilot, "LOADING")
        app.screen.query_one("#buttons").focus()
        await pilot.press("right", "right", "enter")
        await shows(pilot, "input tokens")


async def test_report_is_shown_and_saved_and_so_is_a_picture(make_app: Any, own_home: Path) -> None:
    app = make_app("serving")
    async with app.run_test(size=(80, 24)) as pilot:
        await shows(pilot, "READY")
        await pilot.press("R")
        await shows(pilot, "k2tui report on serve-01", "--api-key ***", "saves")
        await pilot.press("s")
        await until(pilot, lambda: any("saved: " in text for _, _, text in app.messages))
        (report,) = (own_home / "saved").iterdir()
        assert report.suffix == ".md" and "--api-key ***" in report.read_text()
        await app.run_action("save_picture")
        await until(pilot, lambda: len(list((own_home / "saved").glob("screen-overview-*.svg"))) == 1)
        assert next((own_home / "saved").glob("*.svg")).read_text().startswith("<svg")


async def test_a_broken_panel_does_not_take_the_screen(make_app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from k2tui.tui.panels import board

    def broken(view: Any, width: int, height: int) -> Any:
        raise ValueError("boom")

    monkeypatch.setattr(board, "PANEL", replace(board.PANEL, draw=broken))
    async with make_app("loading").run_test(size=(80, 24)) as pilot:
        await shows(pilot, "LOADING", "this panel failed", "eagle3 3")


def test_keys_are_unique_per_place() -> None:
    from k2tui.tui.keys import KEYS

    taken: dict[str, str] = {}
    for key in KEYS:
        for name in key.keys.split(","):
            if key.action:
                assert name not in taken, f"{name}: {key.text} and {taken[name]}"
                taken[name] = key.text


async def test_a_burst_of_keys_goes_where_they_were_meant(make_app: Any) -> None:
    """Over a slow link many keys arrive at once: what follows `/` is a text, not orders."""
    from textual import events

    app = make_app("loading")
    async with app.run_test(size=(120, 40)) as pilot:
        await shows(pilot, "LOADING")
        for key in ("4", "slash", *"bench", "enter", "5", "3", "ctrl+p", *"theme", "enter"):
            app._driver.send_message(events.Key(key, key if len(key) == 1 else None))
        await shows(pilot, "Theme", "k2-light")
        await pilot.press("escape", "4")
        await shows(pilot, "Baseline benchmark")
        text = text_of(app)
        assert "Baseline benchmark" in text and "Extract hidden states" not in text, text
        assert not app.backend.orders, "no letter of the texts became an order"


@pytest.mark.parametrize("burst", [("enter", "enter"), ("enter", "escape"), ("y", "y"), ("enter", "y", "n")])
async def test_a_question_is_answered_once(make_app: Any, burst: tuple[str, ...]) -> None:
    """Two keys that come before the window is gone are one answer and no error; the second is for what lies below."""
    from textual import events

    from k2tui.tui.screens.dialogs import Confirm

    app = make_app("loading")
    async with app.run_test(size=(80, 24)) as pilot:
        await shows(pilot, "LOADING")
        await pilot.press("S")
        await shows(pilot, "This will end")
        for key in burst:
            app._driver.send_message(events.Key(key, key if len(key) == 1 else None))
        await until(pilot, lambda: not isinstance(app.screen, Confirm))
        await settle(pilot)
        stopped = [order for order in app.backend.orders if order[0] == "stop_job"]
        assert len(stopped) == (1 if burst[0] == "y" else 0), app.backend.orders


async def test_a_screen_is_left_once(make_app: Any) -> None:
    app = make_app("loading")
    async with app.run_test(size=(80, 24)) as pilot:
        await shows(pilot, "LOADING")
        await pilot.press("l")
        await until(pilot, lambda: app.screen.NAME == "log")
        log = app.screen
        log.dismiss(None)
        log.dismiss(None)
        await until(pilot, lambda: len(app.screen_stack) == 1)


async def test_jobs_are_sorted_by_what_the_user_picks(make_app: Any) -> None:
    app = make_app("loading")
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("3")
        await shows(pilot, "serve kimi-k25", "sort")
        jobs = {job.spec.id: job for job in app.snap.jobs}

        def keys(value: Any) -> list[Any]:
            return [(jobs[key].state.is_final, value(jobs[key])) for key in app.screen.row_keys("jobs")]

        for word, value in (("stage", lambda j: j.spec.stage), ("state", lambda j: j.state.value)):
            await pilot.press("o")
            await shows(pilot, f"by {word}")
            assert len(jobs) > 2 and keys(value) == sorted(keys(value))
        await pilot.press("o")
        await shows(pilot, "by took")
        await pilot.press("o")
        await until(pilot, lambda: ", by " not in text_of(app))


async def test_jobs_are_filtered_and_removed(make_app: Any) -> None:
    app = make_app("loading")
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("3")
        await shows(pilot, "serve kimi-k25", "filter", "delete")
        await pilot.press("slash", *"train", "enter")
        await until(pilot, lambda: app.screen.row_keys("jobs") == ["train-00"])
        await shows(pilot, "1 with train")
        await pilot.press("D")
        await shows(pilot, "Remove this job?", "train-00")
        await pilot.press("n")
        await pilot.press("D", "y")
        await until(pilot, lambda: app.backend.orders == [("delete_job", "train-00")])
        await pilot.press("slash", *"kimi", "enter")
        await until(pilot, lambda: "serve-01" in app.screen.row_keys("jobs") and len(app.screen.row_keys("jobs")) < 4)
        await pilot.press("D")
        await until(pilot, lambda: any("stop it first" in m[2] for m in app.messages))
