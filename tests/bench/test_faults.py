"""What real servers do: every figure stays right, every fault becomes a counted class, no run with faults is valid."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from k2tui.benchdb import BenchDb
from k2tui.loadgen import options
from k2tui.loadgen.dialect import Dialect
from k2tui.loadgen.engine import EpollEngine, Work
from k2tui.loadgen.runner import run
from k2tui.loadgen.stream import Exchange

FAST = {"ttft_us": 4000, "itl_us": 2000}


def measure(url: str, tmp_path: Path, *extra: str) -> tuple[Any, dict[str, float]]:
    """One point in this process: (row, error classes)."""
    import argparse

    parser = argparse.ArgumentParser()
    options.add_arguments(parser)
    db = tmp_path / "r.db"
    args = parser.parse_args(
        ["--url", url, "--db", str(db), "--concurrency", "8", "--num-prompts", "16", "--random-output-len", "64",
         "--warmup", "0", "--idle-timeout", "3", "--json", *extra]
    )  # fmt: skip
    run(args)
    with BenchDb(db, readonly=True) as store:
        (row,) = store.rows(1)
        errors = {m.stat: m.value for m in store.metrics(row.run_id) if m.name.startswith("errors.")}
    return row, errors


@pytest.mark.parametrize("engine", ["epoll", "asyncio"])
@pytest.mark.parametrize(
    ("api", "settings", "completed", "classes"),
    [
        ("completions", {"error_at": 32}, 0, {"in_band": 16}),
        ("generate", {"error_at": 32}, 0, {"in_band": 16}),
        ("completions", {"truncate_at": 32}, 0, {"truncated": 16}),
        ("completions", {"empty_every": 2}, 8, {"empty": 8}),
        ("completions", {"http500_every": 2}, 8, {"http_500": 8}),
        ("completions", {"reset_every": 4}, 12, {"reset": 4}),
        ("chat", {"reasoning": 1}, 16, {}),
        ("completions", {"crlf": 1, "comment": 1}, 16, {}),
        ("chat", {"crlf": 1, "comment": 1, "split": 1}, 16, {}),
        ("completions", {"split": 1}, 16, {}),
    ],
)
def test_what_counts_as_a_success(
    mock: Any,
    tmp_path: Path,
    capsys: Any,
    api: str,
    settings: dict[str, int],
    completed: int,
    classes: dict[str, int],
    engine: str,
) -> None:
    mock.configure(**FAST, **settings)
    row, errors = measure(mock.url, tmp_path, "--api", api, "--engine", engine)
    assert row.completed == completed
    assert errors == classes
    assert row.total_output_tokens in (None, completed * 64)
    assert row.is_valid is False if classes else True
    if classes:
        assert any("errors" in f for f in row.flags)


@pytest.mark.parametrize("api", ["generate", "chat", "completions"])
@pytest.mark.parametrize("usage", [{}, {"no_usage": 1}])
def test_several_tokens_in_a_chunk(
    mock: Any, tmp_path: Path, capsys: Any, api: str, usage: dict[str, int]
) -> None:
    mock.configure(ttft_us=4000, itl_us=5000, spec="1,4,2,3", **usage)
    for _ in range(4):  # as long as the machine stops the client for whole steps
        mock.reset()
        row, _ = measure(mock.url, tmp_path, "--api", api, "--usage-each", "off")
        truth = mock.truth()
        if not row.coalesced and row.icl_max_ms == pytest.approx(truth["icl_ms"]["max"], rel=0.06):
            break
    assert row.completed == 16
    # without usage the server still says that max_tokens was reached: that is a count
    assert row.count == ("finish" if usage and api != "generate" else "server")
    assert row.total_output_tokens == truth["tokens"] == 1024
    assert row.tokens_per_chunk == pytest.approx(truth["tokens"] / truth["chunks"])
    with BenchDb(tmp_path / "r.db", readonly=True) as store:
        assert all(list(r.tokens)[:8] == [1, 4, 2, 3] * 2 for r in store.records(row.run_id))
    if (
        not row.coalesced
    ):  # else the machine stopped the client for whole steps: the tokens are right, their times bounds
        assert row.itl_mean_ms == pytest.approx(truth["itl_ms"]["mean"], rel=0.06)
        assert row.icl_max_ms == pytest.approx(truth["icl_ms"]["max"], rel=0.06)
    if api == "generate":
        assert row.accept_length == pytest.approx(truth["accept_length"], abs=0.01)


def test_running_usage_gives_tokens_of_every_chunk(mock: Any, tmp_path: Path, capsys: Any) -> None:
    mock.configure(**FAST, spec="1,4,2,3", usage_each=1)
    row, _ = measure(mock.url, tmp_path, "--api", "chat")
    with BenchDb(tmp_path / "r.db", readonly=True) as store:
        records = store.records(row.run_id)
    assert all(r.spread == "exact" and list(r.tokens)[:4] == [1, 4, 2, 3] for r in records)


def test_early_role_chunk_is_not_the_first_token(mock: Any, tmp_path: Path, capsys: Any) -> None:
    mock.configure(ttft_us=200000, itl_us=2000, role_early=1)
    row, _ = measure(mock.url, tmp_path, "--api", "chat")
    assert row.ttft_p50_ms > 195  # the role chunk came at once


def test_early_stop_is_counted_by_the_server_and_flagged(mock: Any, tmp_path: Path, capsys: Any) -> None:
    mock.configure(**FAST, eos_at=32)
    row, errors = measure(mock.url, tmp_path)
    assert errors == {} and row.completed == 16
    assert row.total_output_tokens == 512  # not the 1,024 that were asked for
    assert row.short_outputs == 16 and not row.is_valid


def test_chunks_are_counted_only_when_nobody_tells_and_then_the_run_is_not_valid(
    mock: Any, tmp_path: Path, capsys: Any
) -> None:
    mock.configure(**FAST, no_usage=1, eos_at=32)
    row, _ = measure(mock.url, tmp_path, "--api", "completions", "--no-ignore-eos")
    assert row.completed == 16 and row.count == "client" and row.total_output_tokens == 512
    assert any("no token counts" in f for f in row.flags)


def test_silent_stream_ends_as_idle_timeout(mock: Any, tmp_path: Path, capsys: Any) -> None:
    mock.configure(ttft_us=60_000_000, itl_us=2000)
    row, errors = measure(mock.url, tmp_path, "--num-prompts", "3", "--idle-timeout", "0.5")
    assert errors == {"idle_timeout": 3} and row.completed == 0


@pytest.mark.skipif(sys.platform != "linux", reason="kernel stamps")
def test_open_loop_meets_the_rate_and_shows_the_wait(mock: Any, tmp_path: Path, capsys: Any) -> None:
    mock.configure(ttft_us=2000, itl_us=1000)
    row, _ = measure(
        mock.url, tmp_path, "--request-rate", "100", "--num-prompts", "150", "--random-output-len", "2"
    )
    # the schedule is absolute: being late once moves no later request, whatever the machine does
    assert 0.8 < row.achieved < 1.1
    # 4 slots of 100 ms serve 40/s; 80/s come in: the last waits about as long as half the run
    mock.configure(ttft_us=50000, itl_us=50000)
    row, _ = measure(
        mock.url,
        tmp_path,
        "--request-rate",
        "80",
        "--max-concurrency",
        "4",
        "--num-prompts",
        "80",
        "--random-output-len",
        "2",
    )
    assert row.ttft_sched_p99_ms > row.ttft_p99_ms + 500


@pytest.mark.skipif(sys.platform != "linux", reason="epoll")
def test_events_larger_than_one_read_are_read_whole_and_stamped() -> None:
    """Edge-triggered: what is behind a full read must be fetched at once, for the edge does not come again."""
    said: list[dict[str, Any]] = [
        {"text": "w" * 150_000 * (k + 1), "meta_info": {"completion_tokens": k + 1, "finish_reason": None}}
        for k in range(5)
    ]
    said[-1]["meta_info"] = {"completion_tokens": 5, "finish_reason": {"type": "length"}}
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            peer, _ = server.accept()
            with peer:
                peer.recv(1 << 16)
                peer.sendall(
                    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
                )
                for event in said:
                    data = b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"
                    peer.sendall(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                    time.sleep(0.02)
                peer.sendall(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        engine = EpollEngine("127.0.0.1", server.getsockname()[1], "generate", idle_timeout_s=5)
        done: list[Exchange] = []
        try:
            payload = Dialect("generate", "h").request({"text": "x"})
            facts = engine.run([Work(0, payload, 5)], limit=1, on_done=done.append)
        finally:
            engine.close()
        thread.join(5)
    (one,) = done
    assert not one.error and one.record(facts.t0).output_tokens == 5
    assert len(one.stamps) == 5 and one.stamps == sorted(one.stamps)


@pytest.mark.parametrize(
    ("api", "settings"),
    [
        ("completions", {"batch": 1}),
        ("completions", {"jitter_us": 1500}),
        ("completions", {"itl_us": 0, "coalesce": 16}),  # as fast as it is read, many events in one write
        ("chat", {"itl_us": 0, "coalesce": 16, "spec": "1,4,2,3"}),
        ("generate", {"cumulative": 0}),
        ("generate", {"out_ids": 0}),
        ("generate", {"draft": 4, "accept": 0.6, "seed": 3}),
        ("completions", {"ttft_per_ktok_us": 100_000}),
        ("completions", {"slots": 4, "itl_per_us": 100, "batch": 1}),
        ("completions", {"stall_at_ms": 350, "stall_ms": 120}),
    ],
)
def test_every_other_way_of_the_server_is_counted_and_timed_right(
    mock: Any, tmp_path: Path, capsys: Any, api: str, settings: dict[str, Any]
) -> None:
    """Tokens, acceptance and, where no two tokens shared a read, times: the server's own."""
    for _ in range(6):  # as long as the machine stops client or server for whole steps
        mock.configure(**{"ttft_us": 10_000, "itl_us": 4000, **settings})
        row, errors = measure(mock.url, tmp_path, "--api", api)
        truth = mock.truth()
        assert errors == {} and row.completed == truth["ok"] == 16
        assert row.count == "server" and row.total_output_tokens == truth["tokens"] == 1024
        told = (row.itl_mean_ms, row.ttft_p99_ms, row.icl_max_ms)
        true = pytest.approx(
            (truth["itl_ms"]["mean"], truth["ttft_ms"]["p99"], truth["icl_ms"]["max"]), rel=0.03, abs=0.5
        )
        if (told == true and not row.coalesced) or "coalesce" in settings:
            break
    if "coalesce" in settings:
        assert row.coalesced > 0.5 and not row.is_valid  # their times are bounds, and the row says so
    elif not row.coalesced:
        assert told == true
    if "draft" in settings:
        assert row.accept_length == pytest.approx(truth["accept_length"], abs=0.02)
