"""Readiness is proved, silence is judged by evidence, stops and restarts are told apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from k2tui.core.load import Phase, State
from k2tui.core.tracker import Evidence
from k2tui.engines._reading import load_tracker

LOG = (Path(__file__).parent.parent / "fixtures/sglang/0.5.23/llama-ready.log").read_bytes()
NOW = 1_796_000_000.0
MODEL = "/srv/models/tiny"


def tracker_of(data: bytes = LOG):
    tracker = load_tracker()
    tracker.feed(data, NOW)
    return tracker


@pytest.mark.parametrize(
    ("facts", "state", "cause"),
    [
        ({}, State.READY, ""),
        ({"http_checked": True, "model_path": MODEL, "health": 200, "alive": True}, State.READY, ""),
        ({"http_checked": True, "model_path": MODEL + "/", "health": 200}, State.READY, ""),
        (
            {"http_checked": True, "model_path": "/srv/models/other", "health": 200},
            State.FAILED,
            "port_in_use",
        ),
        ({"http_checked": True}, State.LOADING, ""),
        (
            {"http_checked": True, "model_path": MODEL, "expected_model": "/srv/models/ours"},
            State.FAILED,
            "port_in_use",
        ),
        ({"alive": False, "exit_code": -9}, State.FAILED, "host_oom_kill"),
        ({"alive": False, "exit_code": -9, "extra": {"oom_kills": 1}}, State.FAILED, "host_oom_kill"),
        ({"alive": False, "exit_code": -9, "extra": {"oom_kills": 0}}, State.FAILED, "killed_from_outside"),
        ({"alive": False, "exit_code": 0, "wanted_stop": True}, State.STOPPED, ""),
    ],
)
def test_ready_needs_more_than_the_line(facts, state, cause):
    tracker = tracker_of()
    tracker.evidence(Evidence(**facts))
    view = tracker.view(NOW)
    assert (view.state, view.root_cause) == (state, cause)


def test_503_after_uvicorn_is_not_ready():
    tracker = tracker_of(LOG[: LOG.index(b"The server is fired up")])
    tracker.evidence(Evidence(http_checked=True, model_path=MODEL, health=503, alive=True))
    assert tracker.view(NOW).state is State.LOADING


def test_a_proved_server_that_falls_silent_over_http_is_degraded():
    tracker = tracker_of()
    tracker.evidence(Evidence(http_checked=True, model_path=MODEL, health=200))
    assert tracker.view(NOW).state is State.READY
    tracker.evidence(Evidence(http_checked=True))
    view = tracker.view(NOW)
    assert view.state is State.DEGRADED and view.hint


LOADING = LOG[: LOG.index(b"Load weight end")].rsplit(b"\n", 1)[0] + b"\n"


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        ({"silence_s": 20.0, "alive": True}, State.LOADING),
        ({"silence_s": 900.0, "alive": True}, State.STALLED),
        ({"silence_s": 900.0, "alive": True, "read_bytes_s": 40e6}, State.LOADING),
        ({"silence_s": 900.0, "alive": True, "gpu_memory_b_s": 30e6}, State.LOADING),
        ({"silence_s": 900.0, "alive": False}, State.FAILED),
    ],
)
def test_stall_or_work(facts, state):
    tracker = tracker_of(LOADING)
    tracker.evidence(Evidence(**facts))
    view = tracker.view(NOW)
    assert view.state is state
    if state is State.STALLED:
        assert "900 s" in view.verdict and view.hint and view.eta_s is None


def test_a_profile_may_fix_the_limit():
    tracker = load_tracker(stall_s=10)
    tracker.feed(LOADING, NOW)
    assert tracker.view(NOW + 5).state is State.LOADING
    assert tracker.view(NOW + 11).state is State.STALLED


def test_requests_that_wait_without_a_batch_are_a_hang():
    tracker = tracker_of()
    tracker.evidence(
        Evidence(
            http_checked=True, model_path=MODEL, health=200, alive=True, requests_waiting=3, silence_s=300
        )
    )
    assert tracker.view(NOW).state is State.STALLED


def test_the_newest_start_counts_and_the_older_ones_are_history():
    failed = (Path(__file__).parent.parent / "fixtures/sglang/0.5.23/missing-shard.log").read_bytes()
    tracker = tracker_of(failed + LOG)
    view = tracker.view(NOW)
    assert view.state is State.READY and view.root_cause == ""
    assert [s.state for s in tracker.history] == [State.FAILED]
    assert tracker.start_count == 2
    tracker = tracker_of(LOG + failed)
    assert tracker.view(NOW).root_cause == "checkpoint_missing_shard"


def test_the_embedded_engine_is_known_by_its_first_line():
    tracker = tracker_of(b"[k2tui embedded engine] for trying the pipeline and for tests\n" + LOG)
    view = tracker.view(NOW)
    assert view.engine == "local" and view.state is State.READY and view.phase is Phase.SERVING
    assert tracker.start_count == 1
