from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k2tui.core import journal
from k2tui.core.job import Job, JobSpec, JobState

FIXTURE = Path(__file__).parents[1] / "fixtures" / "jobs" / "from_another_version"
SPEC = JobSpec(id="x", stage="t", title="t", argv=("true",))
NAMES = sorted({name for _, name in journal.MOVES} | {"ended", "unheard_of", ""})

VALUES: list[Any] = [None, True, 0, -1, 2**70, 10**400, 1.5, float("inf"), "", "x", "gpu:0", [1], {"a": 1}]
KEYS = (
    "t",
    "m",
    "pid",
    "for",
    "since",
    "code",
    "cpu_s",
    "peak_rss_b",
    "took_s",
    "gpu_s",
    "reason",
    "text",
    "exit_code",
)
STATES: list[Any] = [*(str(s) for s in JobState), "unheard_of", None, 3]


def event(name: str, state: Any, key: str, value: Any) -> dict[str, Any]:
    return {"e": name, "state": state, key: value}


# cheap to draw: any event, any state in it, any value under one of the fields
facts = st.builds(
    event, st.sampled_from(NAMES), st.sampled_from(STATES), st.sampled_from(KEYS), st.sampled_from(VALUES)
)


@given(state=st.sampled_from(list(JobState)), event=facts)
def test_every_state_and_event_moves_or_refuses(state: JobState, event: dict[str, Any]) -> None:
    job = Job(spec=SPEC, state=state)
    try:
        after = journal.apply(job, event)
    except journal.IllegalMoveError:
        return
    assert isinstance(after.state, JobState)
    if state.is_final:
        assert after.state is state, "an ended job stays ended"
    if event["e"] == "ended":
        assert after.state.is_final
    else:
        assert not after.state.is_final or after.state is state, "only `ended` ends a job"


@given(st.lists(facts, max_size=12))
def test_folding_never_fails_and_counts_what_does_not_fit(events: list[dict[str, Any]]) -> None:
    job = journal.fold(SPEC, events)
    fitting = len(events) - job.unknown_events
    assert 0 <= fitting <= len(events)
    ends = [
        e for e in events if e["e"] == "ended" and e.get("state") in {str(s) for s in JobState if s.is_final}
    ]
    assert job.state.is_final == bool(ends)
    if ends:
        assert job.state == ends[0]["state"], "the first end counts"


@given(st.lists(facts, max_size=8), st.integers(0, 2000))
def test_a_journal_cut_anywhere_is_a_prefix_of_its_events(events: list[dict[str, Any]], cut: int) -> None:
    raw = b"".join(json.dumps(e).encode() + b"\n" for e in events)
    got, bad = journal.parse(raw[:cut])
    assert bad == 0
    assert got == events[: len(got)]
    assert len(got) == raw[:cut].count(b"\n")


def test_a_torn_last_line_is_ignored_and_zeroes_of_a_power_cut_too() -> None:
    line = b'{"t":1,"e":"keeper","pid":5}\n'
    assert journal.parse(line + b'{"t":2,"e":"ended","sta') == ([{"t": 1, "e": "keeper", "pid": 5}], 0)
    assert journal.parse(line + b"\0" * 200 + b"\n") == ([{"t": 1, "e": "keeper", "pid": 5}], 0)
    assert journal.parse(b"") == ([], 0)


def test_a_file_of_another_version_still_loads() -> None:
    spec = journal.spec_of(json.loads((FIXTURE / "spec.json").read_text()))
    assert spec.argv == ("bench", "--fast") and spec.locks == ("gpu:0",) and spec.priority == 0
    events, bad = journal.parse((FIXTURE / "journal.jsonl").read_bytes())
    job = journal.fold(spec, events, bad)
    assert (
        job.state is JobState.SUCCEEDED
        and job.took_s == 6.0
        and job.peak_rss_b == 1 << 20
        and job.started_s == 1700000003.0
    )
    assert job.unknown_events == 3  # an invented event, no JSON, no object


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text("ab=*", max_size=4)),
    lambda c: st.lists(c, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from([*journal.spec_to_json(SPEC), "invented"]), json_values))
def test_any_object_becomes_a_spec(raw: dict[str, Any]) -> None:
    spec = journal.spec_of(raw)
    assert journal.spec_of(journal.spec_to_json(spec)) == spec


@pytest.mark.parametrize("raw", [None, [], "x", {}, {"done": "3"}, {"done": True}])
def test_unusable_progress_is_none(raw: Any) -> None:
    assert journal.progress_of(raw) is None


def test_a_waiting_job_keeps_since_when_it_waits() -> None:
    job = journal.fold(
        SPEC, [{"e": "waiting", "t": 5.0, "for": "gpu:0"}, {"e": "waiting", "t": 9.0, "for": "gpu:0"}]
    )
    assert (job.state, job.waiting_for, job.waiting_since_s) == (JobState.WAITING, "gpu:0", 5.0)
    job = journal.apply(job, {"e": "waiting", "t": 11.0, "for": "gpu:1"})
    assert job.waiting_since_s == 11.0
