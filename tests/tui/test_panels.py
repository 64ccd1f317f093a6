"""Contract of every panel in the folder: any scene at any size gives lines that fit, quickly, without markup or control codes."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import fake
import pytest

from k2tui.core.board import Board, Task
from k2tui.core.snapshot import Snapshot
from k2tui.tui import panels
from k2tui.tui.history import History
from k2tui.tui.lines import ASCII, UNICODE, line_width
from k2tui.tui.plain import picture
from k2tui.tui.view import View

SCENES = ("loading", "serving", "failed", "two", "empty")


@cache
def view(kind: str, *, glyphs=UNICODE, **options) -> View:  # type: ignore[no-untyped-def]
    snap = fake.scene(kind, fake.T0, 124.0, **options)
    history = History()
    for second in range(40):
        history.add(fake.scene(kind, fake.T0 - 40 + second, 84.0 + second, **options))
    return View(snap, fake.T0, history, glyphs)


@pytest.mark.parametrize("name", panels.names())
@pytest.mark.parametrize("kind", SCENES)
def test_every_panel_fits_every_room(name: str, kind: str) -> None:
    panel = panels.get(name)
    for width, height in ((76, 1), (78, 8), (116, 12), (196, 30)):
        for glyphs in (UNICODE, ASCII):
            drawn = panel.draw(view(kind, glyphs=glyphs), width, height)
            for row in drawn.rows:
                assert line_width(row.line) <= width or panel.name in ("task", "diagnosis"), row  # long words: the frame cuts them
                text = "".join(seg.text for seg in row.line)
                assert text.isprintable()
                if glyphs.ascii:
                    own = re.sub("[草稿模型🧪]", "", text)
                    assert own.isascii(), own
            if drawn.header is not None:
                assert line_width(drawn.header) <= width


@pytest.mark.parametrize("name", panels.names())
def test_every_panel_stands_an_empty_world(name: str) -> None:
    drawn = panels.get(name).draw(View(Snapshot(taken_s=0.0), 0.0), 78, 5)
    assert drawn.rows or name == "host"


@pytest.mark.parametrize("name", panels.names())
def test_panel_declares_itself(name: str) -> None:
    panel = panels.get(name)
    assert panel.name == name and panel.title and panel.help.endswith(".")
    assert set(panel.needs) <= set(Snapshot.__dataclass_fields__)


def test_no_gpu_is_explained_not_hidden() -> None:
    rows = panels.get("gpus").draw(view("loading", gpu_count=0), 78, 4).rows
    text = " ".join("".join(s.text for s in r.line) for r in rows)
    assert "NVML" in text and "normal on a laptop" in text


def test_failed_server_shows_cause_hint_and_proof() -> None:
    rows = panels.get("diagnosis").draw(view("failed"), 100, 14).rows
    text = "\n".join("".join(s.text for s in r.line) for r in rows)
    for part in ("cuda-oom", "G08", "97% sure", "--mem-fraction-static", "line 58", "torch.OutOfMemoryError"):
        assert part in text


def test_board_keeps_markup_and_escapes_as_text() -> None:
    snap = Snapshot(0.0, board=Board(tasks=(Task("1", "[red]x[/] \x1b]0;pwn\x07 草稿"),)))
    row = panels.get("board").draw(View(snap, 0.0), 60, 3).rows[0]
    text = "".join(s.text for s in row.line)
    assert "[red]x[/]" in text and "\x1b" not in text and line_width(row.line) == 60


def test_history_groups_do_not_move() -> None:
    history = History(limit=50)
    import dataclasses

    for n in range(120):
        history.add(dataclasses.replace(fake.scene("empty", 1000.0 + n, 0), servers=()))
    before = list(history.get("host.cpu", 10))
    history.add(fake.scene("empty", 2000.0, 0))
    after = list(history.get("host.cpu", 10))
    assert after[: len(before) - 1] == before[1:] or after[:-1] == before[: len(after) - 1] or after[: len(before)] == before


@pytest.mark.parametrize("use_ascii", [False, True])
def test_plain_picture_has_everything_and_no_codes(use_ascii: bool) -> None:
    text = picture(fake.scene("loading", fake.T0, 124.0, is_demo=True), fake.T0, 100, use_ascii=use_ascii)
    for part in ("DEMO", "LOADING", "26/64", "GPUs", "Jobs", "serve kimi-k25", "Board", "Benchmarks", "1,512"):
        assert part in text
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 100


def test_a_watched_log_that_nothing_answers_for_is_a_log_only() -> None:
    from dataclasses import replace

    from k2tui.tui.panels.server import readiness

    ours = fake.loading(fake.T0, 30)
    assert readiness(ours).text == "no answer"
    assert readiness(replace(ours, job=None, log_key="/x/server.log")).text == "log only"
    assert readiness(replace(ours, job=None, log_key="")).text == "no answer"


def test_the_report_leaves_out_what_is_not_known() -> None:
    from dataclasses import replace

    from k2tui.monitor import server_report

    seen = fake.serving(fake.T0, 30)
    assert "cause" not in server_report(seen) and "engine: sglang 0.5.12; model: " in server_report(seen)
    bare = replace(seen, load=replace(seen.load, engine="", version="", model=""), http=None)
    assert "engine" not in server_report(bare) and "?" not in server_report(bare)
    assert "cause: cuda-oom (G08)" in server_report(fake.failed(fake.T0, 30))


def test_the_command_is_named_as_it_was_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from k2tui.tui.launch import own_command

    found = tmp_path / "bin" / "k2tui"
    found.parent.mkdir()
    found.write_text("#!/bin/sh\n")
    found.chmod(0o755)
    monkeypatch.setenv("PATH", str(found.parent))
    for started, said in ((str(found), "k2tui"), (".venv/bin/k2tui", ".venv/bin/k2tui"), ("/x/k2tui/__main__.py", "k2tui")):
        monkeypatch.setattr("sys.argv", [started])
        assert own_command() == said


def test_a_cell_too_small_keeps_what_tells_labels_apart() -> None:
    """Rows of a tuning run begin alike: in 12 cells their ends must be seen."""
    from k2tui.tui.benchtext import name_cell

    texts = [name_cell(f"tune max-running-requests={n}", "", UNICODE)(12)[0].text for n in (1, 2)]
    assert texts[0] != texts[1] and all(len(t) == 12 and t.startswith("tune") for t in texts)


def test_a_damaged_job_says_so_in_its_row() -> None:
    from k2tui.core.job import Job, JobSpec, JobState
    from k2tui.tui.panels.jobs import describe

    job = Job(JobSpec("1", "d", "(damaged)", ()), JobState.RUNNING, pid=1, damage="spec.json is missing")
    assert describe(job, 0.0).text == "damaged: spec.json is missing"


def test_a_jobs_result_is_told_without_ids() -> None:
    from k2tui.tui.panels.jobs import told

    sweep = "01M8PAYXQF9ZK2V6T7R8S9ABCD"
    rows = [{"concurrency": c, "output_throughput": 100.0 * c} for c in (1, 4)]
    assert told({"rows": rows, "sweep": sweep, "url": "http://h:1"}) == "C=1 100 tok/s  C=4 400 tok/s"
    assert told({"sweep": sweep, "serve_job": "0k3jd92x-serve", "loss": 1.5, "draft": "/d"}) == "loss 1.50  draft /d"


@pytest.mark.parametrize("width", [38, 64, 78, 116, 196])
def test_a_jobs_row_says_why_there_are_no_figures(width: int) -> None:
    """In rooms without a column for it too: what a measurement waits for, what a job died of."""
    from k2tui.core.job import Job, JobSpec, JobState, Progress
    from k2tui.core.loads import WAITS

    spec = JobSpec("1", "bench", "bench C=1", ("x",))
    waits = Job(spec, JobState.RUNNING, pid=1, started_s=fake.T0 - 9, progress=Progress(0, None, "points", f"{WAITS} job 0-train (train it)"))
    died = Job(spec, JobState.FAILED, reason="exit 3", result={"ok": False, "cause": "no server answers"}, progress=Progress(0, None, "points"))
    some = Job(spec, JobState.RUNNING, pid=1, progress=Progress(12, None, "rows", "asks the server, many at once, for a long while yet"))
    rows = panels.get("jobs").draw(View(Snapshot(0.0, jobs=(waits, some, died)), fake.T0), width, 9).rows
    first, second, last = ("".join(s.text for s in row.line) for row in rows)
    assert "waits for job 0" in first and "0 points" not in first
    assert "12 rows" in second and (width < 64 or "asks the ser" in second)
    assert "exit 3: no se" in last
    if width >= 64:
        assert "waits for job 0-train (train it)" in first and "exit 3: no server answers" in last


@pytest.mark.parametrize("name", ["server", "jobs", "tune", "pipeline", "train", "report"])
def test_nothing_is_said_to_be_missing_before_it_was_looked_for(name: str) -> None:
    for is_whole in (False, True):
        drawn = panels.get(name).draw(View(Snapshot(0.0, is_whole=is_whole), 0.0), 78, 5)
        text = "".join(s.text for row in drawn.rows for s in row.line)
        assert (text == "looking ...") is not is_whole
