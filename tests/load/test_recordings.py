"""Recorded starts of real servers are read as what they were."""

from __future__ import annotations

from pathlib import Path

import pytest

from k2tui.core.load import Phase, ShardCount, State
from k2tui.engines._reading import load_tracker

FIXTURES = Path(__file__).parent.parent / "fixtures"
NOW = 1_796_000_000.0


def read(path: str, upto: bytes | None = None):
    data = (FIXTURES / path).read_bytes()
    if upto is not None:
        data = data[: data.index(upto)]
    tracker = load_tracker()
    tracker.feed(data, NOW)
    if upto is None:
        tracker.finish(NOW)
    return tracker.view(NOW)


@pytest.mark.parametrize(
    ("path", "state", "phase", "target", "draft", "cause", "tp"),
    [
        ("sglang/0.5.12/tp1_ready.log", State.READY, Phase.SERVING, (34, 34), None, "", 1),
        ("sglang/0.5.12/tp2_eagle3.log", State.STOPPED, Phase.SHUTDOWN, (66, 66), (1, 1), "", 2),
        ("sglang/0.5.12/h200-good.log", State.STOPPED, Phase.SHUTDOWN, (66, 66), None, "", 1),
        ("sglang/0.5.12/h200-killed-scheduler.log", State.FAILED, Phase.WEIGHT_LOAD, None, None, "host_oom_kill", 1),
        ("sglang/0.5.12/h200-port-in-use.log", State.FAILED, Phase.HTTP, (66, 66), None, "port_in_use", 1),
        ("sglang/0.5.9/sigterm.log", State.STOPPED, Phase.SHUTDOWN, (12, 12), None, "", 1),
        ("sglang/0.5.23/llama-ready.log", State.READY, Phase.SERVING, (12, 12), None, "", 1),
        ("sglang/0.5.23/tp8-72shards.log", State.STOPPED, Phase.SHUTDOWN, (72, 72), None, "", 8),
        ("sglang/0.5.23/port-in-use.log", State.FAILED, Phase.HTTP, (12, 12), None, "port_in_use", 1),
        (
            "sglang/0.5.23/missing-shard.log",
            State.FAILED,
            Phase.WEIGHT_LOAD,
            None,
            None,
            "checkpoint_missing_shard",
            1,
        ),
        ("sglang/0.5.23/cpu-98shards-ready.log", State.READY, Phase.SERVING, (98, 98), None, "", 1),
        (
            "sglang/0.5.23/cpu-98shards-scheduler-killed.log",
            State.FAILED,
            Phase.SERVING,
            (98, 98),
            None,
            "host_oom_kill",
            1,
        ),
        ("vllm/0.32.0/ready.log", State.READY, Phase.SERVING, (72, 72), None, "", 1),
    ],
)
def test_recording(path, state, phase, target, draft, cause, tp):
    view = read(path)
    assert (view.state, view.phase) == (state, phase)
    assert view.target == (ShardCount(*target) if target else None)
    assert view.draft == (ShardCount(*draft) if draft else None)
    assert view.root_cause == cause
    assert view.tp_size == tp


def test_uvicorn_running_is_not_ready():
    view = read("sglang/0.5.23/llama-ready.log", upto=b"The server is fired up")
    assert view.state is State.LOADING
    assert view.phase is Phase.WARMUP


def test_half_way_through_the_shards_of_eight_ranks():
    view = read(
        "sglang/0.5.23/tp8-72shards.log", upto=b"Loading safetensors checkpoint shards:  54% Completed"
    )
    assert view.state is State.LOADING
    assert view.phase is Phase.WEIGHT_LOAD
    assert view.target == ShardCount(36, 72)
    assert view.ranks == tuple(f"TP{n}" for n in range(8))
    assert view.shards_per_s is not None and 15 < view.shards_per_s < 30


def test_a_bar_without_newline_is_seen_at_once():
    tracker = load_tracker()
    tracker.feed(b"[2026-11-29 18:08:03 TP0] Load weight begin. avail mem=18.85 GB\n", NOW)
    tracker.feed(b"\rMulti-thread loading shards:  34% Completed | 22/64 [00:11<00:21,  1.95it/s]", NOW + 11)
    assert tracker.view(NOW + 11).target == ShardCount(22, 64)


def test_phases_know_the_line_that_began_them():
    lines = (FIXTURES / "sglang/0.5.23/llama-ready.log").read_bytes().split(b"\n")
    for span in read("sglang/0.5.23/llama-ready.log").phases:
        assert span.line_no is not None
        if span.phase is Phase.KV_ALLOC:
            assert b"KV Cache is allocated" in lines[span.line_no - 1]
