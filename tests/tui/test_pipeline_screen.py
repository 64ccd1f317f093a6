"""The pipeline's panels at every size, in both character sets, on the figures of a real run."""

from __future__ import annotations

import pytest

from k2tui.core import chain_report
from k2tui.core.chain import Record, parse_chain
from k2tui.core.chain_view import ChainView, StepState, StepView, chain_view
from k2tui.core.job import Job, JobSpec, JobState, Progress
from k2tui.core.snapshot import Snapshot
from k2tui.core.training import Evaluation, TrainView
from k2tui.tui import panels
from k2tui.tui.lines import ASCII, UNICODE, line_width
from k2tui.tui.panels.jobs import left_s
from k2tui.tui.view import View

CHAIN = parse_chain(
    'name="t"\n[[step]]\nname="serve"\n[[step]]\nname="bench"\nrole="draft"\n[[step]]\nname="late"\nargv=["x"]\n',
    "p",
)
ROW = {
    "concurrency": 1,
    "tok_s_user": 80.0,
    "output_throughput": 79.0,
    "ttft_p50_ms": 5.0,
    "accept_length": 1.5,
    "errors": 0,
}
RECORDS = {
    "serve": Record("s", "j1", {"ready_s": 2.0, "shards_done": 64, "shards_total": 64}),
    "bench": Record("b", "j2", {"rows": [ROW]}),
}
REPORT = chain_report.build(CHAIN, {"serve": "s", "bench": "b", "late": "l"}, RECORDS, 0.0)
TRAIN = TrainView(
    "j3", "train", True, step=40, total=80, loss=tuple(20 / n for n in range(1, 41)), accuracy=((0.1, 0.4), (0.0, 0.2)), tok_s=(300.0, 310.0),
    evals=(Evaluation(0, 1.0), Evaluation(40, 1.4, (0.3, 0.1))), learning_rate=1e-3, grad_norm=0.5, eta_s=65.0,
)  # fmt: skip


def view(*, ascii_only: bool = False) -> View:
    chain = chain_view(CHAIN, RECORDS, [], REPORT, "/x/report.md")
    return View(
        Snapshot(taken_s=0.0, chain=chain, training=TRAIN), 0.0, glyphs=ASCII if ascii_only else UNICODE
    )


def text_of(name: str, width: int, height: int, seen: View) -> str:
    drawn = panels.get(name).draw(seen, width, height)
    lines = [*([drawn.header] if drawn.header else []), *(r.line for r in drawn.rows)]
    assert all(line_width(line) <= width for line in lines)
    return "\n".join("".join(seg.text for seg in line) for line in lines)


@pytest.mark.parametrize("name", ["pipeline", "train", "report"])
@pytest.mark.parametrize("size", [(40, 1), (76, 4), (78, 8), (116, 12), (196, 40)])
def test_they_fit_every_room(name: str, size: tuple[int, int]) -> None:
    for ascii_only in (False, True):
        text = text_of(name, *size, view(ascii_only=ascii_only))
        assert text.replace("\n", "").isprintable()
        assert text.isascii() or not ascii_only


def test_what_they_say() -> None:
    steps = text_of("pipeline", 196, 12, view())
    assert "64/64 shards" in steps and "accept length 1.50" in steps and "pending" in steps
    curves = text_of("train", 116, 30, view())
    assert (
        "step 40/80" in curves
        and "1.400" in curves
        and "accuracy of draft step 1" in curves
        and "untrained 1.000" in curves
    )
    report = text_of("report", 116, 30, view())
    assert "each verification yields 1.50 tokens" in report and "80.0" in report


def test_the_report_marks_what_is_not_valid() -> None:
    bad = {
        **RECORDS,
        "bench": Record("b", "j2", {"rows": [{**ROW, "flags": ["another load ran: job x (y)"]}]}),
    }
    report = chain_report.build(CHAIN, {"serve": "s", "bench": "b", "late": "l"}, bad, 0.0)
    for glyphs in (UNICODE, ASCII):
        seen = View(Snapshot(taken_s=0.0, chain=chain_view(CHAIN, bad, [], report, "/x")), 0.0, glyphs=glyphs)
        text = text_of("report", 116, 30, seen)
        assert f"{glyphs.warn} 80.0" in text
        assert f"{glyphs.warn} not valid: C=1, draft: another load ran: job x (y)" in text


def test_the_whole_report_can_be_read() -> None:
    """However low the panel is, the rest is there to scroll to; what is long is wrapped, what is marked is not cut."""
    load = {"concurrency": 1, "speedup": 0.82, "speedup_lo": 0.42, "speedup_hi": 1.23, "not_valid": {"draft": "another load ran: job x (y)"}}
    rows = [{**ROW, "concurrency": c} for c in (1, 2, 4, 8, 16)]
    step = {"step": "bench-draft", "state": "done", "stage": "bench", "figures": {"rows": rows}}
    report = {"outcome": {"loads": [load], "speedup": 0.82, "accept_length": 1.5}, "steps": [step, {"step": "late", "state": "pending"}]}
    seen = View(Snapshot(taken_s=0.0, chain=ChainView("t", report=report)), 0.0)
    for width, height in ((116, 4), (76, 30)):
        text = text_of("report", width, height, seen)
        words = " ".join(text.split())
        assert all(f"C={c}: 80.0 tok/s a user" in words for c in (1, 2, 4, 8, 16)) and words.endswith("late pending")
        assert "…" not in text or width < 100
    assert f"{UNICODE.warn} 0.82 (0.42 to 1.23)" in text_of("report", 116, 4, seen)


def test_a_training_before_its_first_step_says_what_it_does() -> None:
    doing = "judging the untrained draft: 120/263 samples, 2.0 s left"
    seen = View(Snapshot(taken_s=0.0, training=TrainView("j3", "train", True, total=740, doing=doing)), 0.0)
    for height in (1, 4, 12):
        text = text_of("train", 116, height, seen)
        assert "step 0/740" in text and doing in text


def test_the_pace_of_a_first_step_foretells_no_training() -> None:
    """The job's list falls back on a job's pace; a training's first step, which compiles, has none to give."""
    for stage, left in (("train", None), ("extract", 2 * 99.0)):
        spec = JobSpec(id="j", stage=stage, title="t", argv=("x",))
        told = Progress(1, 100, "steps", at_s=12.0)
        assert left_s(Job(spec=spec, state=JobState.RUNNING, started_s=10.0, progress=told)) == left


def test_a_step_that_failed_says_why_and_one_that_runs_has_a_bar() -> None:
    chain = ChainView(
        "t",
        steps=(
            StepView("a", "A", StepState.FAILED, "exit 1"),
            StepView("b", "B", StepState.RUNNING, "", "j", None, 0.0, 0.5),
        ),
    )
    seen = View(Snapshot(taken_s=0.0, chain=chain), 10.0)
    text = text_of("pipeline", 100, 6, seen)
    assert "exit 1" in text and UNICODE.bar[-1] in text
    assert panels.get("pipeline").draw(seen, 100, 6).prefer == "a"
