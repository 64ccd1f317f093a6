from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k2tui import paths
from k2tui.core.board import Board, Seen, Task, TaskStatus, link, look, news, with_times
from k2tui.core.board_plan import parse
from k2tui.core.job import Job, JobSpec, JobState, Progress
from k2tui.sources.plan import PlanFile, default_plan, load_plan

PENDING, DOING, DONE, OFF = (
    TaskStatus.PENDING,
    TaskStatus.IN_PROGRESS,
    TaskStatus.COMPLETED,
    TaskStatus.CANCELLED,
)


def job(job_id: str, stage: str, state: JobState, *, kind: str = "task", reason: str = "") -> Job:
    return Job(
        spec=JobSpec(id=job_id, stage=stage, title=stage, argv=("x",), kind=kind),
        state=state,
        reason=reason,
        started_s=1.0,
        took_s=2.0,
    )


def one(task: Task, *jobs: Job, ready: tuple[str, ...] = ()) -> Task:
    return link(Board(tasks=(task,)), jobs, ready).tasks[0]


def test_a_task_follows_the_newest_job_of_its_stage() -> None:
    task = Task("b", "measure", stage="bench")
    assert one(task).status is PENDING
    running = replace(job("j2", "bench", JobState.RUNNING), progress=Progress(done=1, total=4))
    now = one(task, running, job("j1", "bench", JobState.SUCCEEDED))
    assert now.status is DOING and now.said == "running as j2, 25%"
    assert one(task, job("j2", "bench", JobState.SUCCEEDED)).status is DONE
    failed = one(
        task, job("j2", "bench", JobState.FAILED, reason="exit 1"), job("j1", "bench", JobState.SUCCEEDED)
    )
    assert failed.status is PENDING and failed.said == "failed as j2: exit 1"
    assert one(task, job("x", "train", JobState.RUNNING)).status is PENDING


def test_a_job_of_a_pipeline_belongs_to_its_step() -> None:
    first, again = job("j1", "bench", JobState.SUCCEEDED), job("j2", "bench", JobState.RUNNING)
    again = replace(again, spec=replace(again.spec, params={"chain": "demo", "step": "bench-draft"}))
    first = replace(first, spec=replace(first.spec, params={"chain": "demo", "step": "bench"}))
    assert one(Task("bench", "x", stage="bench"), again, first).status is DONE
    assert one(Task("bench-draft", "x", stage="bench-draft"), again, first).status is DOING


def test_a_step_of_a_chain_follows_that_chains_own_jobs_only() -> None:
    """An ordinary benchmark, or another chain's, completes no step, and starts none that is blocked."""
    plan = parse(
        default_plan([("prepare", "p"), ("bench", "b")], {"bench": ("prepare",)}, chain="demo"), "json"
    )
    board = Board(tasks=plan.tasks)
    plain = job("j9", "bench", JobState.RUNNING)
    other = replace(plain, spec=replace(plain.spec, params={"chain": "mine", "step": "bench"}))
    for strange in (plain, replace(plain, state=JobState.SUCCEEDED), other):
        task = link(board, (strange,)).tasks[1]
        assert task.status is PENDING and task.waiting_for == ("prepare",) and task.said == ""
    own = job("j1", "bench", JobState.SUCCEEDED)
    own = replace(own, spec=replace(own.spec, params={"chain": "demo", "step": "bench"}))
    done = link(board, (replace(plain, started_s=77.0), own)).tasks[1]
    assert done.status is DONE and done.started_s == 1.0  # the newer job of the same stage is none of it
    assert news(board, link(board, (plain, own)), (plain, own))["bench"]["reported"] == "j1:completed"


@pytest.mark.parametrize("is_tuner_listed", [True, False])
def test_what_a_tuner_starts_counts_for_no_task_but_its_own(is_tuner_listed: bool) -> None:
    def of(job: Job, parent: str, params: dict[str, str]) -> Job:
        return replace(job, spec=replace(job.spec, parent=parent, params=params))

    tuner = job("j3", "tune", JobState.RUNNING)
    trial = of(job("j5", "serve", JobState.STOPPED, kind="server"), "j3", {"tune": "r1"})
    measured = of(job("j4", "bench", JobState.RUNNING), "j3", {"tag": "r1"})
    own = job("j1", "serve", JobState.RUNNING, kind="server")
    jobs = (trial, measured, *((tuner,) if is_tuner_listed else ()), own)
    board = Board(tasks=(Task("serve", "s"), Task("bench", "b"), Task("tune", "t")))
    serve, bench, tune = link(board, jobs, ("j1",)).tasks
    assert serve.status is DONE and serve.said == "serving as j1"
    assert bench.status is PENDING and bench.said == "" and "bench" not in news(board, link(board, jobs), jobs)
    assert tune.said == ("running as j3" if is_tuner_listed else "")
    assert one(Task("x", "x", job_id="j4"), *jobs).status is DOING, "a job that is named counts"


def test_links_by_id_and_by_job() -> None:
    assert one(Task("bench", "x"), job("j", "bench", JobState.RUNNING)).status is DOING
    named = Task("q", "x", job_id="j1")
    assert one(named, job("j2", "q", JobState.RUNNING), job("j1", "bench", JobState.SUCCEEDED)).status is DONE


def test_a_server_is_done_once_it_answers() -> None:
    task = Task("serve", "start", stage="serve")
    server = job("s", "serve", JobState.RUNNING, kind="server")
    assert one(task, server).status is DOING and one(task, server).said == "loading as s"
    assert (
        one(task, server, ready=("s",)).status is DONE
        and one(task, server, ready=("s",)).said == "serving as s"
    )


def test_the_plan_keeps_its_word() -> None:
    assert one(Task("b", "x", OFF, stage="bench"), job("j", "bench", JobState.SUCCEEDED)).status is OFF
    assert one(Task("b", "x", DONE, stage="bench"), job("j", "bench", JobState.FAILED)).status is DONE
    # told once, then set back by hand to do it again: the same job does not win twice, the next one does
    again = Task("b", "x", PENDING, stage="bench", reported="j:completed")
    assert one(again, job("j", "bench", JobState.SUCCEEDED)).status is PENDING
    assert (
        one(again, job("k", "bench", JobState.RUNNING), job("j", "bench", JobState.SUCCEEDED)).status is DOING
    )


def test_dependencies_are_shown() -> None:
    board = Board(
        tasks=(
            Task("serve", "s"),
            Task("extract", "e", depends=("serve", "unknown")),
            Task("x", "x", DONE, depends=("serve",)),
        )
    )
    assert link(board, ()).tasks[1].waiting_for == ("serve",)
    assert link(board, ()).tasks[2].waiting_for == ()
    assert link(board, (job("s", "serve", JobState.SUCCEEDED),)).tasks[1].waiting_for == ()


def test_times_begin_with_the_first_change_that_is_seen() -> None:
    def at(now_s: float, known: dict[str, Seen] | None, *statuses: TaskStatus) -> dict[str, Seen]:
        return look(known, [Task(str(n), "x", status) for n, status in enumerate(statuses)], now_s)

    first = at(10.0, None, DOING, PENDING, DONE)
    assert {s.started_s for s in first.values()} == {None}  # nobody saw them begin
    then = at(20.0, first, DONE, DOING, DONE)
    assert (then["0"].started_s, then["0"].ended_s) == (None, 20.0)
    assert then["1"] == Seen(DOING, 20.0) and then["2"] is first["2"]
    last = at(50.0, at(30.0, then, DONE, DOING, DONE), DONE, DONE, PENDING, DOING)
    assert last["1"] == Seen(DONE, 20.0, 50.0) and last["2"] == Seen(PENDING)
    assert last["3"] == Seen(DOING, 50.0)  # a new task that begins at once
    assert at(60.0, last, DONE, DOING)["1"] == Seen(DOING, 60.0)  # begun again
    board = with_times(Board(tasks=(Task("1", "x", DONE), Task("0", "x", PENDING))), last)
    assert (board.tasks[0].started_s, board.tasks[0].took_s) == (20.0, 30.0)
    assert board.tasks[1].ended_s is None  # what was seen is of another status
    ran = link(board, (job("j", "1", JobState.SUCCEEDED),))
    assert (ran.tasks[0].started_s, ran.tasks[0].took_s) == (1.0, 2.0)  # a job knows better


tasks = st.builds(
    Task,
    id=st.sampled_from("abcd"),
    content=st.just("c"),
    status=st.sampled_from(list(TaskStatus)),
    stage=st.sampled_from(["", "bench", "train"]),
)
jobs = st.lists(
    st.builds(
        job,
        st.sampled_from(["j1", "j2", "j3"]),
        st.sampled_from(["bench", "train", "a"]),
        st.sampled_from(list(JobState)),
    ),
    max_size=5,
)


@given(st.lists(tasks, max_size=4, unique_by=lambda t: t.id), jobs)
def test_writing_the_news_makes_the_plan_say_it(rows: list[Task], row_of_jobs: list[Job]) -> None:
    board = Board(tasks=tuple(rows))
    linked = link(board, row_of_jobs)
    changes = news(board, linked, row_of_jobs)
    written = Board(
        tasks=tuple(
            replace(t, status=TaskStatus(changes[t.id]["status"]), reported=changes[t.id]["reported"])
            if t.id in changes
            else t
            for t in rows
        )
    )
    again = link(written, row_of_jobs)
    assert [t.status for t in again.tasks] == [t.status for t in linked.tasks]
    assert news(written, again, row_of_jobs) == {}, "nothing is written twice"


def test_the_plan_file_is_told_what_jobs_did(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan = PlanFile(path, default_text=lambda: default_plan([("serve", "Start"), ("bench", "Measure")]))
    plan.poll()
    assert plan.sync([job("j", "bench", JobState.RUNNING)]) == ["bench"]
    assert plan.sync([job("j", "bench", JobState.RUNNING)]) == []
    assert load_plan(path).tasks[1].status is DOING
    assert plan.sync([job("j", "bench", JobState.SUCCEEDED)]) == ["bench"]
    assert load_plan(path).tasks[1].status is DONE
    plan.set_task("bench", status="pending")
    assert plan.sync([job("j", "bench", JobState.SUCCEEDED)]) == []
    assert load_plan(path).tasks[1].status is PENDING


def test_a_step_is_done_when_the_pipelines_own_record_says_so() -> None:
    """A server that ran before the pipeline came (the demo's), and one that was stopped because no step needs it any more."""
    plan = parse(default_plan([("serve", "s"), ("bench", "b")], {"bench": ("serve",)}, chain="demo"), "json")
    board = Board(tasks=plan.tasks)
    key = ("demo", "serve")
    theirs = job("j1", "serve", JobState.RUNNING, kind="server")  # started by hand: no step of a pipeline
    assert link(board, (theirs,)).tasks[0].status is PENDING
    used = link(board, (theirs,), (), {key: "j1"})
    assert used.tasks[0].status is DONE and used.tasks[0].said == "serving as j1"
    assert used.tasks[1].waiting_for == (), "the benchmark's server is there"
    assert news(board, used, (theirs,), (), {key: "j1"})["serve"] == {
        "status": "completed",
        "reported": "j1:completed",
    }

    def own(job_id: str, state: JobState, reason: str = "") -> Job:
        made = job(job_id, "serve", state, kind="server", reason=reason)
        return replace(made, spec=replace(made.spec, params={"chain": "demo", "step": "serve"}))

    gone = own("j2", JobState.STOPPED, "stopped by pipeline demo")
    stopped = link(board, (gone, theirs), (), {key: "j2"}).tasks[0]
    assert stopped.status is DONE and stopped.said == "done as j2, stopped by pipeline demo"
    deleted = link(board, (), (), {key: "j2"}).tasks[0]
    assert deleted.status is DONE and deleted.said == "done as j2"
    again = link(board, (own("j3", JobState.RUNNING), gone), (), {key: "j2"}).tasks[0]
    assert again.status is DOING, "a newer start of the step counts more than what is known of the last one"
    failed = link(board, (own("j3", JobState.FAILED), gone), (), {key: "j2"}).tasks[0]
    assert failed.status is PENDING and failed.said.startswith("failed as j3")


def test_the_plan_file_reads_the_pipelines_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K2TUI_HOME", str(tmp_path))
    plan = tmp_path / "plan.json"
    plan.write_text(default_plan([("serve", "s")], {}, chain="demo"))
    file = PlanFile(plan)
    assert file.sync(()) == []
    record = paths.state_dir() / "chains" / "demo" / "serve.json"
    record.parent.mkdir(parents=True)
    record.write_text('{"fingerprint": "f", "job_id": "j1"}')
    assert file.sync(()) == ["serve"] and file.board.tasks[0].status is DONE
    assert file.linked(()).tasks[0].said == "done as j1"
