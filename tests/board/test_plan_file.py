from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k2tui import cli
from k2tui.core.board import TaskStatus, neighbour
from k2tui.errors import K2Error, UsageError
from k2tui.sources import plan as plan_module
from k2tui.sources.plan import PlanFile, find_plans, load_plan

ROOT = Path(__file__).parents[2]


def write(path: Path, *contents: str) -> Path:
    path.write_text(json.dumps([{"id": c, "content": c, "status": "pending"} for c in contents], indent=2))
    return path


def statuses(path: Path) -> dict[str, str]:
    return {t.id: str(t.status) for t in load_plan(path).tasks}


def test_a_change_outside_is_seen_and_a_broken_file_keeps_the_last_good_tasks(tmp_path: Path) -> None:
    path = write(tmp_path / "p.json", "a", "b")
    plan = PlanFile(path)
    assert plan.poll() and [t.id for t in plan.board.tasks] == ["a", "b"]
    assert not plan.poll()
    write(path, "a", "b", "c")
    assert plan.poll() and len(plan.board.tasks) == 3
    broken = '[\n {"id": "a",\n'
    path.write_text(broken)
    assert plan.poll()
    assert len(plan.board.tasks) == 3 and "p.json line 3: not valid JSON" in plan.board.error
    with pytest.raises(K2Error, match="line 3"):
        plan.set_task("a", status="completed")
    assert path.read_text() == broken, "left alone"
    write(path, "z")
    assert plan.poll() and plan.board.error == "" and plan.board.tasks[0].id == "z"
    path.unlink()
    assert plan.poll() and "No such file" in plan.board.error and plan.board.tasks[0].id == "z"


def test_edits_meet_edits_made_outside(tmp_path: Path) -> None:
    path = write(tmp_path / "p.json", "a", "b")
    plan = PlanFile(path)
    plan.poll()
    outside = json.loads(path.read_text())
    outside[1]["status"] = "completed"
    outside.append({"id": "c", "content": "c", "status": "pending", "theirs": True})
    path.write_text(json.dumps(outside))
    plan.set_task("a", status="in_progress", note="mine")
    assert statuses(path) == {"a": "in_progress", "b": "completed", "c": "pending"}
    assert json.loads(path.read_text())[2]["theirs"] is True
    with pytest.raises(K2Error, match="no task 'gone'"):
        plan.set_task("gone", status="completed")


@pytest.mark.parametrize("can_exchange", [True, False])
def test_an_edit_in_the_last_moment_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    """Somebody renames another version into place between our reading and our swap."""
    path = write(tmp_path / "p.json", "a", "b")
    plan = PlanFile(path)
    name = "_exchange" if can_exchange else "_read"
    real: Any = getattr(plan_module, name)
    done: list[int] = []

    def intrude(*args: Any) -> Any:
        result = real(*args) if name == "_read" else None
        if not done:
            done.append(1)
            other = tmp_path / "theirs"
            theirs = json.loads(path.read_text())
            theirs[1]["status"] = "completed"
            other.write_text(json.dumps(theirs))
            os.replace(other, path)
        return result if name == "_read" else real(*args)

    monkeypatch.setattr(plan_module, name, intrude)
    if not can_exchange:
        monkeypatch.setattr(plan_module, "_exchange", lambda a, b: False)
    plan.set_task("a", status="in_progress")
    assert done
    assert statuses(path) == {"a": "in_progress", "b": "completed"}
    assert not [p for p in tmp_path.iterdir() if p.suffix == ".tmp"], "no temporary file stays"


def test_many_writers_lose_nothing(tmp_path: Path) -> None:
    """Threads and other processes add and edit at once; every edit is in the file at the end."""
    path = write(tmp_path / "p.json", *[f"t{i}" for i in range(12)])
    code = (
        "import sys; from k2tui.sources.plan import PlanFile\np = PlanFile(sys.argv[1])\n"
        "for i in range(6):\n    p.set_task(f't{6 + i}', status='completed'); p.add_task(f'from outside {i}')"
    )
    other = subprocess.Popen([sys.executable, "-c", code, str(path)], cwd=ROOT)

    def work(base: int) -> None:
        mine = PlanFile(path)
        for i in range(3):
            mine.set_task(f"t{base + i}", status="in_progress", note=f"note {base + i}")
            mine.add_task(f"from thread {base + i}")

    threads = [threading.Thread(target=work, args=(b,)) for b in (0, 3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert other.wait(60) == 0
    tasks = {t.id: t for t in load_plan(path).tasks}
    assert [str(tasks[f"t{i}"].status) for i in range(12)] == ["in_progress"] * 6 + ["completed"] * 6
    assert [tasks[f"t{i}"].note for i in range(6)] == [f"note {i}" for i in range(6)]
    assert len(tasks) == 12 + 6 + 6


ops = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.integers(0, 5), st.sampled_from([str(s) for s in TaskStatus])),
        st.tuples(st.just("add"), st.integers(0, 99), st.just("")),
        st.tuples(st.just("outside"), st.integers(0, 5), st.sampled_from([str(s) for s in TaskStatus])),
        st.tuples(st.just("drop"), st.integers(0, 5), st.just("")),
        st.tuples(st.just("break"), st.just(0), st.just("")),
    ),
    max_size=12,
)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
    max_examples=40,
)
@given(ops=ops, fmt=st.sampled_from(["json", "md"]))
def test_the_file_is_always_the_sum_of_both_sides(
    tmp_path: Path, ops: list[tuple[str, int, str]], fmt: str
) -> None:
    """Against a model: a plain dict of what both sides did."""
    from k2tui.core import board_plan
    from k2tui.core.board import Task

    path = tmp_path / f"p.{fmt}"
    text = "" if fmt == "md" else "[]"
    model: dict[str, str] = {}
    kind = "markdown" if fmt == "md" else "json"
    for n in range(3):
        text, _ = board_plan.add_task(text, kind, Task(f"t{n}", f"task {n}"))
        model[f"t{n}"] = "pending"
    path.write_text(text)
    plan = PlanFile(path)
    for step, (op, n, word) in enumerate(ops):
        name = f"t{n}"
        if op == "set":
            if name in model:
                plan.set_task(name, status=word)
                model[name] = word
            else:
                with pytest.raises(K2Error):
                    plan.set_task(name, status=word)
        elif op == "add":
            model[plan.add_task(f"added {n} {step}")] = "pending"
        elif op == "outside" and name in model:
            path.write_text(board_plan.set_task(path.read_text(), kind, name, {"status": word}))
            model[name] = word
        elif op == "drop" and name in model and fmt == "json":
            path.write_text(json.dumps([t for t in json.loads(path.read_text()) if t["id"] != name]))
            del model[name]
        elif op == "break" and fmt == "json":
            good = path.read_text()
            path.write_text(good[:-1] + "{")
            broken = path.read_bytes()
            with pytest.raises(K2Error):
                plan.add_task("never")
            assert path.read_bytes() == broken
            path.write_text(good)
        plan.poll()
        assert {t.id: str(t.status) for t in plan.board.tasks} == model


def test_what_is_no_plan_is_told(tmp_path: Path) -> None:
    for path, words in ((tmp_path, "is a folder"), (tmp_path / "none.json", "No such file")):
        plan = PlanFile(path)
        plan.poll()
        assert words in plan.board.error
    bad = tmp_path / "b.md"
    bad.write_bytes(b"- [ ] a\n- [ ] \xff\n")
    plan = PlanFile(bad)
    plan.poll()
    assert "line 2: not UTF-8" in plan.board.error


def test_modes_and_links_are_kept(tmp_path: Path) -> None:
    real = write(tmp_path / "real.json", "a")
    real.chmod(0o664)
    link = tmp_path / "link.json"
    link.symlink_to(real)
    PlanFile(link).set_task("a", status="completed")
    assert link.is_symlink() and statuses(real) == {"a": "completed"} and real.stat().st_mode & 0o777 == 0o664


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    path = write(tmp_path / "p.json", "a")
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(K2Error, match="left as it is"):
            PlanFile(path).set_task("a", status="completed")
    finally:
        tmp_path.chmod(0o700)


def test_plans_of_coding_agents_are_found(tmp_path: Path) -> None:
    tasks = tmp_path / "home" / ".claude" / "tasks"
    tasks.mkdir(parents=True)
    write(tasks / "x.json", "a")
    (tasks / "empty.json").write_text("[]")
    (tmp_path / "TODO.md").write_text("- [ ] a")
    assert [p.name for p in find_plans(tmp_path, tmp_path / "home")] == ["TODO.md", "x.json"]


def test_times_are_kept_beside_the_state_and_shared(tmp_path: Path) -> None:
    """A coding agent's list without jobs: whoever looks notes when a task began and ended; the plan itself holds no times."""
    path, times = write(tmp_path / "p.json", "a", "b"), tmp_path / "times.json"
    one, two = PlanFile(path, times=times), PlanFile(path, times=times)
    assert one.poll() and two.poll()
    text = path.read_text()
    path.write_text(text.replace('"pending"', '"in_progress"', 1))
    one.poll()
    began = one.linked([]).tasks[0].started_s
    assert began is not None and one.linked([]).tasks[0].took_s is None
    two.poll()
    assert two.linked([]).tasks[0].started_s == began
    path.write_text(text.replace('"pending"', '"completed"', 1))
    assert two.poll()
    done = two.linked([]).tasks[0]
    assert done.started_s == began and done.took_s is not None and done.took_s >= 0
    fresh = PlanFile(path, times=times)
    fresh.poll()
    assert fresh.linked([]).tasks == two.linked([]).tasks
    assert "started" not in path.read_text()
    times.write_text("[3, {]")  # broken: made anew, and no error
    assert PlanFile(path, times=times).poll()
    assert str(path) in times.read_text()


NESTED = """# Plan

- [ ] one
  - [ ] one a
  - [ ] one b
    a line of text
- [ ] two
  - [ ] two a
- [x] three

The end.
"""


def test_a_task_takes_the_place_of_another_as_the_file_is_then(tmp_path: Path) -> None:
    """Down and up among brothers; what is nested below goes with it, and the text around stays."""
    path = tmp_path / "plan.md"
    path.write_text(NESTED)
    plan = PlanFile(path)
    plan.poll()

    def move(words: str, by: int) -> list[str]:
        tasks = plan.board.tasks
        task = next(t for t in tasks if t.content == words)
        other = neighbour(tasks, task.id, by, {t.id for t in tasks})
        if other:
            plan.take_place(task.id, other)
        return [t.content for t in plan.board.tasks]

    assert move("one", 1) == ["two", "two a", "one", "one a", "one b", "three"]
    assert move("one b", -1) == ["two", "two a", "one", "one b", "one a", "three"]
    assert "- [ ] one b\n    a line of text\n" in path.read_text()
    assert move("one b", -1) == [
        "two",
        "two a",
        "one",
        "one b",
        "one a",
        "three",
    ]  # the first of its brothers
    assert move("two a", 1) == ["two", "two a", "one", "one b", "one a", "three"]  # the only one
    assert move("three", -1)[2] == "three"
    assert path.read_text().startswith("# Plan\n\n") and path.read_text().endswith("\n\nThe end.\n")
    # somebody else has written in the meantime: the place is the other task's place in the newer text
    tasks = plan.board.tasks
    path.write_text("- [ ] new\n" + path.read_text())
    plan.take_place(tasks[0].id, tasks[2].id)
    assert [t.content for t in plan.board.tasks] == ["new", "three", "two", "two a", "one", "one b", "one a"]
    path.write_text("- [ ] two\n")
    with pytest.raises(UsageError, match="is not in the plan any more"):
        plan.take_place(tasks[0].id, tasks[2].id)
    assert path.read_text() == "- [ ] two\n"


def test_the_command_line(tmp_path: Path, own_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    md = tmp_path / "plan.md"
    md.write_text(
        "# Mine\n\n- [ ] start the \x1b[31mserver <!-- k2tui id=serve -->\n- [ ] measure [after:serve]\n"
    )

    def call(*argv: str) -> tuple[int, str, str]:
        code = cli.main(["board", argv[0], *argv[1:], "--plan", str(md)])
        out = capsys.readouterr()
        return code, out.out, out.err

    code, out, _ = call("list")
    assert code == 0 and out.splitlines() == [
        "  1 [ ] start the server",
        "  2 [ ] measure [after:serve]  (needs serve)",
    ]
    code, _, err = call("set", "measure", "in_progress")
    assert code == 2 and "needs serve first" in err
    assert call("set", "1", "completed")[0] == 0
    assert call("set", "measure", "in_progress")[0] == 0
    assert call("add", "third", "--priority", "high")[0] == 0
    assert call("edit", "third", "--note", "soon")[0] == 0
    assert call("move", "third", "1")[0] == 0
    assert md.read_text().startswith(
        "# Mine\n\n- [ ] third <!-- k2tui priority=high note=soon -->\n- [x] start"
    )
    code, out, _ = call("list", "--json")
    assert [(t["content"], t["status"]) for t in json.loads(out)["tasks"]][2] == (
        "measure [after:serve]",
        "in_progress",
    )
    assert "pending (1)" in call("list", "--columns")[1]
    assert len(call("list", "--search", "MEAS")[1].splitlines()) == 1
    assert [line.split()[0] for line in call("list", "--status", "open")[1].splitlines()] == ["1", "3"]
    assert [line.split()[0] for line in call("list", "--priority", "high")[1].splitlines()] == ["1"]
    code, _, err = call("set", "nothing", "completed")
    assert code == 2 and "no task 'nothing'" in err and "Traceback" not in err
    md.write_text("- [ ] a <!-- k2tui id=x -->\n- [ ] b <!-- k2tui id=x -->\n")
    code, _, err = call("list")
    assert code == 2 and "line 2" in err
