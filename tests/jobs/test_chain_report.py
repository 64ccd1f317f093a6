"""The report of a pipeline: figures only from steps of these settings, words for people, the view that the dashboard draws."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from k2tui.core import chain_report
from k2tui.core.chain import Chain, Record, Step, needed_by, parse_chain, record_of
from k2tui.core.chain_view import StepState, chain_view
from k2tui.core.job import Job, JobSpec, JobState, Progress
from k2tui.core.training import POINTS, STEP_NOTE, TrainFold
from k2tui.errors import UsageError


def bench(name: str, role: str, speed: float, accept: float | None) -> tuple[Step, dict[str, Any]]:
    rows = [
        {"concurrency": c, "tok_s_user": speed / c, "output_throughput": speed, "ttft_p50_ms": 5.0, "accept_length": accept, "completed": 8, "errors": 0}
        for c in (4, 1)
    ]  # fmt: skip
    return Step(name, stage="bench", role=role), {"rows": rows}


STEPS: list[tuple[Step, dict[str, Any]]] = [
    (Step("serve", stage="serve"), {"ready_s": 6.6, "shards_done": 64, "shards_total": 64}),
    bench("bench", "baseline", 100.0, None),
    (Step("train", stage="train"), {"step": 9, "seconds": 3.0, "expected_accept_length": 1.5, "untrained_accept_length": 1.002, "untrained_chain_accept_length": 1.004, "chain_accept_length": 1.4}),
    (Step("losses", argv=("x",)), {"losses": [3.0, 1.0], "first": 3.0, "last": 1.0, "accuracy": [0.1, 0.5], "evals": [{"step": 0, "accept_length": 1.0, "full_acc": [0.0]}, {"step": 9, "accept_length": 1.5, "full_acc": [0.4, 0.1]}]}),
    bench("bench-draft", "draft", 130.0, 1.5),
]  # fmt: skip
CHAIN = Chain("t", tuple(s for s, _ in STEPS))
PRINTS = {s.name: f"print-{s.name}" for s in CHAIN.steps}
RECORDS = {s.name: Record(PRINTS[s.name], f"job-{s.name}", result, took_s=2.0) for s, result in STEPS}


def test_the_outcome_pairs_the_same_load() -> None:
    report = chain_report.build(CHAIN, PRINTS, RECORDS, 0.0)
    outcome = report["outcome"]
    assert report["complete"] and report["took_s"] == 10.0
    assert [load["concurrency"] for load in outcome["loads"]] == [1, 4]
    assert outcome["speedup"] == pytest.approx(1.3) and outcome["accept_length"] == 1.5
    assert outcome["untrained_accept_length"] == 1.004 and outcome["untrained_how"].startswith(
        "chain drafting"
    )
    assert json.loads(json.dumps(report)) == report
    text = chain_report.markdown(report, "today")
    assert "yields 1.50 tokens on held-out prompts (untrained: 1.00). One user's speed was 1.30 times" in text
    assert "in a single pass: its spread is not known" in text, "one pass has no interval"
    assert "| C=1 | 100.0 | 130.0 | 1.30 |" in text and "ready after 6.6 s, 64/64 shards" in text
    assert "| 9 | 1.500 | 0.400 0.100 |" in text


@pytest.mark.parametrize(
    ("speeds", "words"),
    [
        (
            (100.1, 99.9, 101.0),
            "One user's speed differs within noise: 1.00 times that without a draft (95 % ",
        ),
        (
            (110.0, 90.0, 103.0),
            "is unclear: 1.01 times that without a draft, but the passes differ too much to tell (95 % ",
        ),
        (
            (150.0, 60.0, 110.0),
            "is unclear: 1.07 times that without a draft, but the 3 passes differ too much",
        ),
        ((150.0, 151.0, 149.0), "One user's speed is 1.50 times that without a draft (95 % 1.4"),
        ((50.0, 51.0, 49.0), "3 passes of one start each). Here a draft pass costs more than it saves."),
    ],
)
def test_a_speed_is_told_with_the_spread_of_its_passes(speeds: tuple[float, ...], words: str) -> None:
    def passes(name: str, role: str, values: tuple[float, ...]) -> tuple[Step, Record]:
        rows = [
            {
                "concurrency": 1,
                "tok_s_user": v,
                "accept_length": 1.5 if role == "draft" else None,
                "errors": 1,
            }
            for v in values
        ]
        return Step(name, stage="bench", role=role), Record(f"print-{name}", "j", {"rows": rows})

    made = [passes("bench", "baseline", (100.0, 101.0, 99.0)), passes("bench-draft", "draft", speeds)]
    chain = Chain("t", tuple(s for s, _ in made))
    records = {s.name: r for s, r in made}
    report = chain_report.build(chain, {n: r.fingerprint for n, r in records.items()}, records, 0.0)
    assert len(report["outcome"]["loads"]) == 1 and report["outcome"]["passes"] == 3
    assert words in chain_report.verdict(report)
    told = chain_report.step_words(report["steps"][0])
    assert told.count("C=1") == 1 and "100.0 tok/s a user" in told and "3 errors" in told
    text = chain_report.markdown({**report, "took_s": 302.0, "run": {"ran": 0, "skipped": 2}}, "today")
    assert "the steps took 302 s when they ran (the last run: 0 steps run, 2 skipped as still valid)" in text


@pytest.mark.parametrize(
    "words",
    [
        "of token events shared a read: their times are bounds",  # what rows stored before say
        "of the chunks came several at a time (a busy machine or a slow link), so the times between tokens are not exact",
    ],
)
def test_figures_of_runs_that_are_not_valid_are_marked(words: str) -> None:
    """In the table, in the words below it, in the verdict and in the step's line; the interval is one of factors, never below 0."""
    shared = [f"{n}% {words}" for n in (57, 58, 59)]

    def rows(speeds: tuple[float, ...], flags: list[str], concurrency: int) -> list[dict[str, Any]]:
        return [
            {"concurrency": concurrency, "tok_s_user": v, "accept_length": 1.5, "flags": [f] if f else []}
            for v, f in zip(speeds, flags, strict=True)
        ]

    fine = ["", "", ""]
    base = [*rows((100.0, 101.0, 99.0), fine, 1), *rows((100.0, 55.0, 110.0), shared, 4)]
    draft = [*rows((150.0, 151.0, 149.0), fine, 1), *rows((16.0, 20.0, 18.0), ["", shared[0], ""], 4)]
    made = [("bench", "baseline", base), ("bench-draft", "draft", draft)]
    chain = Chain("t", tuple(Step(n, stage="bench", role=r) for n, r, _ in made))
    records = {n: Record(n, "j", {"rows": r}) for n, _, r in made}
    report = chain_report.build(chain, {n: n for n in records}, records, 0.0)
    one, four = report["outcome"]["loads"]
    assert one["not_valid"] == {} and four["not_valid"] == {
        "target": f"{shared[2]} (3 of 3 passes)",
        "draft": f"{shared[0]} (1 of 3 passes)",
    }
    table = chain_report.loads_table(report, "!")
    assert not any("!" in c for c in table[1])
    assert table[2][1:3] == ("! 88.3", "! 18.0") and table[2][3].startswith("! 0.20 (0.")
    text = chain_report.markdown(report, "today")
    assert f"- C=4, target: 59% {words} (3 of 3 passes)" in text
    assert "NOT VALID" not in chain_report.verdict(report), "its speed is that of C=1, which is valid"
    assert chain_report.step_words(report["steps"][0]).endswith("(NOT VALID)")
    only = {n: replace(r, result={"rows": r.result["rows"][3:]}) for n, r in records.items()}
    said = chain_report.verdict(chain_report.build(chain, {n: n for n in only}, only, 0.0))
    assert f"That speed is of benchmarks that are NOT VALID (target: 59% {words}" in said
    for load in (one, four):
        assert load["speedup_lo"] is None or 0 < load["speedup_lo"] < load["speedup"]


def test_an_untrained_draft_that_was_served_comes_before_a_replayed_one() -> None:
    step, result = bench("bench-untrained", "untrained", 50.0, 1.03)
    chain = replace(CHAIN, steps=(*CHAIN.steps, step))
    records = {**RECORDS, step.name: Record("p", "j", result)}
    outcome = chain_report.build(chain, {**PRINTS, step.name: "p"}, records, 0.0)["outcome"]
    assert outcome["untrained_accept_length"] == 1.03 and outcome["untrained_how"] == "served"


def test_figures_of_other_settings_are_not_lent() -> None:
    report = chain_report.build(CHAIN, {**PRINTS, "bench-draft": "changed"}, RECORDS, 0.0)
    assert not report["complete"] and report["steps"][-1]["state"] == "of other settings"
    assert report["outcome"]["accept_length"] is None and report["outcome"]["speedup"] is None
    assert (
        chain_report.verdict(report) == "No draft was served yet; 1.50 is the accept length to expect of it."
    )
    empty = chain_report.build(CHAIN, PRINTS, {}, 0.0)
    assert chain_report.verdict(empty) == "No draft was served yet." and "not run" in chain_report.markdown(
        empty, ""
    )


def test_nothing_accepted_is_said() -> None:
    step, result = bench("bench-draft", "draft", 90.0, 1.01)
    records = {**RECORDS, step.name: Record(PRINTS[step.name], "j", result)}
    words = chain_report.verdict(chain_report.build(CHAIN, PRINTS, records, 0.0))
    assert "Nothing is accepted" in words and "0.90 times" in words and "saves" not in words


def job(name: str, state: JobState, **more: Any) -> Job:
    return Job(
        spec=JobSpec(
            id=f"new-{name}", stage=name, title=name, argv=("x",), params={"chain": "t", "step": name}
        ),
        state=state,
        **more,
    )


def test_the_view_joins_records_and_jobs() -> None:
    running = job("train", JobState.RUNNING, started_s=5.0, progress=Progress(done=3, total=9, note="loss 2"))
    failed = job("bench-draft", JobState.FAILED, reason="exit 1")
    run = Job(spec=JobSpec(id="p1", stage="pipeline", title="", argv=("x",)), state=JobState.RUNNING)
    records = {k: v for k, v in RECORDS.items() if k in ("serve", "bench")}
    view = chain_view(CHAIN, records, [run, failed, running])
    states = {s.name: s.state for s in view.steps}
    assert states == {"serve": StepState.DONE, "bench": StepState.DONE, "train": StepState.RUNNING, "losses": StepState.PENDING, "bench-draft": StepState.FAILED}  # fmt: skip
    train = next(s for s in view.steps if s.name == "train")
    assert train.share == pytest.approx(1 / 3) and train.words == "loss 2" and view.job_id == "p1"


def test_steps_up_to_one() -> None:
    chain = parse_chain(
        '[[step]]\nname="a"\nargv=["x"]\n[[step]]\nname="b"\nargv=["x"]\nneeds=[]\n[[step]]\nname="c"\nargv=["x"]\nneeds=["a"]\n',
        "p",
    )
    assert needed_by(chain, "c") == {"a", "c"}
    with pytest.raises(UsageError, match="no step"):
        needed_by(chain, "d")


def test_a_role_is_one_of_three() -> None:
    with pytest.raises(UsageError, match="role must be baseline, untrained or draft"):
        parse_chain('[[step]]\nname="a"\nargv=["x"]\nrole="winner"\n', "p")


def test_records_of_any_age_are_read() -> None:
    assert record_of({"fingerprint": "f", "future": 1}) == Record("f")
    assert record_of([]) is None and record_of({"fingerprint": 3}) is None


def line(step: int, loss: float = 1.0, **more: Any) -> str:
    return json.dumps(
        {
            "kind": "step",
            "step": step,
            "loss": loss,
            "accuracy": [0.5, 0.25],
            "tok_s": 10.0,
            "eta_s": 4.0,
            **more,
        }
    )


def test_a_training_is_folded_into_curves_of_bounded_length() -> None:
    fold = TrainFold()
    fold.feed(json.dumps({"kind": "eval", "step": 0, "accept_length": 1.0, "full_acc": [0.0]}))
    for n in range(1, 10_001):
        fold.feed(line(n, loss=20_000 - n))
    fold.feed("torn {")
    fold.feed(json.dumps({"kind": "eval", "step": 10_000, "accept_length": 1.8, "full_acc": [0.5, 0.3]}))
    view = fold.view("j", "t", is_running=True, total=20_000)
    assert POINTS // 2 <= len(view.loss) <= POINTS + 1
    assert list(view.loss) == sorted(view.loss, reverse=True) and view.step == 10_000
    assert sum(view.loss) / len(view.loss) == pytest.approx(15_000, rel=0.01), "means, not samples"
    assert len(view.accuracy) == 2 and view.accuracy[1][0] == 0.25
    assert [e.accept_length for e in view.evals] == [1.0, 1.8] and view.eta_s == 4.0
    assert fold.view("j", "t", is_running=False, total=None).eta_s is None


def test_a_training_says_what_goes_on_beside_its_steps() -> None:
    fold = TrainFold()

    def doing(note: str, *, is_running: bool = True) -> str:
        return fold.view("j", "t", is_running=is_running, total=740, note=note).doing

    assert doing("judging the untrained draft: 120/263 samples, 2.0 s left").startswith("judging")
    assert doing(f"{STEP_NOTE}9.48, acc 0.820, 85241 tok/s") == "", "the panel shows these figures already"
    assert doing("saving", is_running=False) == ""


def test_a_resumed_training_starts_its_curves_anew() -> None:
    fold = TrainFold()
    for n in (1, 2, 3):
        fold.feed(line(n, loss=9.0))
    for n in (2, 3, 4):
        fold.feed(line(n, loss=5.0))
    view = fold.view("j", "t", is_running=True, total=4)
    assert view.loss == (5.0, 5.0, 5.0) and view.step == 4
