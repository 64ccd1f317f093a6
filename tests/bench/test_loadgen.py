"""The load generator as a process against the C server: figures equal the truth, faults become error classes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from array import array
from pathlib import Path
from typing import Any

import pytest

from k2tui.benchdb import BenchDb
from k2tui.core.bench_record import RequestRecord
from k2tui.loadgen.__main__ import main
from k2tui.loadgen.engine import Facts
from k2tui.loadgen.runner import Point, engine_facts, validity


def bench(
    db: Path, url: str, *extra: str, code: int = 0, env: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    argv = [
        sys.executable,
        "-m",
        "k2tui.loadgen",
        "--url",
        url,
        "--db",
        str(db),
        "--json",
        "--warmup",
        "0",
        *extra,
    ]
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=100, env={**os.environ, **(env or {})}
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout)["runs"] if done.stdout.strip() else []


@pytest.mark.parametrize("api", ["generate", "completions", "chat"])
@pytest.mark.parametrize("engine", ["epoll", "asyncio"])
def test_figures_are_the_servers_truth(mock: Any, tmp_path: Path, api: str, engine: str) -> None:
    mock.configure(ttft_us=20000, itl_us=8000)
    # Two events in one read have one stamp: on a machine that stops the client for whole steps no client can be exact.
    # Such a run says so (coalesced), and is measured again; so is one whose server was stopped between its note and its
    # sending. A client that measures wrongly is wrong each time.
    for _ in range(6):
        mock.reset()
        (row,) = bench(
            tmp_path / "r.db", mock.url, "--api", api, "--concurrency", "4", "--num-prompts", "8",
            "--random-output-len", "12", "--engine", engine,
        )  # fmt: skip
        truth = mock.truth()
        assert row["completed"] == truth["ok"] == 8
        assert row["total_output_tokens"] == truth["tokens"] == 8 * 12
        assert row["count"] == "server"
        assert row["stamps"] == ("kernel" if engine == "epoll" and sys.platform == "linux" else "user")
        rel = 0.01 if engine == "epoll" and not row["coalesced"] else 0.2
        told = (row["itl_mean_ms"], row["tpot_p50_ms"])
        true = pytest.approx((truth["itl_ms"]["mean"], truth["tpot_ms"]["p50"]), rel=rel)
        if not row["coalesced"] and told == true:
            break
    assert told == true


def test_rows_are_stored_newest_first(mock: Any, tmp_path: Path) -> None:
    db = tmp_path / "r.db"
    bench(
        db, mock.url, "--concurrency", "1,2", "--num-prompts", "4", "--random-output-len", "4", "--label", "x"
    )
    with BenchDb(db, readonly=True) as store:
        rows = store.rows(10)
        assert [r.concurrency for r in rows] == [2, 1]
        assert {r.label for r in rows} == {"x"}
        assert rows[0].sweep == rows[1].sweep != ""
        records = store.records(rows[0].run_id)
        assert len(records) == 4
        assert all(len(r.stamps_ns) == 4 and r.output_tokens == 4 for r in records)
        assert all(list(r.stamps_ns) == sorted(r.stamps_ns) for r in records)


def test_no_server_is_exit_3_with_clear_words_and_a_job_keeps_them(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "k2tui.loadgen", "--url", "http://127.0.0.1:9", "--db", str(tmp_path / "r.db")],
        capture_output=True, text=True, env={**os.environ, "K2TUI_JOB_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 3
    assert "no server answers at http://127.0.0.1:9" in done.stderr
    assert done.stdout == ""
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["ok"] is False and "no server answers at http://127.0.0.1:9" in result["cause"]


def test_the_cause_in_a_jobs_result_has_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K2TUI_JOB_DIR", str(tmp_path))
    assert main(["--url", "ftp://user:S3CR1@host:21"]) == 2
    cause = json.loads((tmp_path / "result.json").read_text())["cause"]
    assert "is no http:// or https:// URL" in cause and "S3CR1" not in cause


def test_a_job_in_which_nothing_completed_says_why(mock: Any, tmp_path: Path) -> None:
    mock.configure(http500_every=1)
    bench(
        tmp_path / "r.db", mock.url, "--concurrency", "1", "--num-prompts", "2", code=1, env={"K2TUI_JOB_DIR": str(tmp_path)}
    )  # fmt: skip
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["ok"] is False and "no request completed" in result["cause"] and len(result["rows"]) == 1


def test_kill_in_the_middle_keeps_what_was_measured(mock: Any, tmp_path: Path) -> None:
    mock.configure(ttft_us=2000, itl_us=2000)
    db = tmp_path / "r.db"
    process = subprocess.Popen(
        [sys.executable, "-m", "k2tui.loadgen", "--url", mock.url, "--db", str(db), "--concurrency", "2",
         "--num-prompts", "5000", "--random-output-len", "8", "--label", "killed"],
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        for _ in range(200):
            time.sleep(0.05)
            if db.exists():
                with BenchDb(db, readonly=True) as store:
                    rows = store.rows(5, include_running=True)
                    if rows and rows[0].completed >= 20:
                        break
        with BenchDb(db, readonly=True) as store:
            assert store.rows(5) == []  # still being measured
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    with BenchDb(db, readonly=True) as store:
        (seen,) = store.rows(5)  # a reader shows it although nobody recovered it yet
        assert seen.is_partial and seen.completed >= 20
    with BenchDb(db) as store:
        assert store.recover() == 1
        (row,) = store.rows(5)
        assert row.is_partial and row.completed == seen.completed
        assert row.output_throughput and row.output_throughput > 0
        assert "interrupted" in row.flags[0]
        assert not row.is_valid


def test_chunks_that_came_several_at_a_time_are_told_in_plain_words() -> None:
    stamps = array("q", [1, 2, 2, 3])
    done = RequestRecord(0, 0, 0, 1, 3, output_tokens=4, stamps_ns=stamps, tokens=array("i", [1] * 4), coalesced=1)
    facts = Facts(engine="epoll", stamps="kernel", t0=0, t1=10, peak_in_flight=1)
    (flag,) = validity(engine_facts(facts, [done], Point(1), 1), [done], Point(1))
    assert flag.startswith("25% of the chunks came several at a time (a busy machine or a slow link), ")
    assert flag.endswith("repeat it when the machine is quieter")


def test_progress_and_result_of_a_job(mock: Any, tmp_path: Path) -> None:
    job = tmp_path / "job-7"
    job.mkdir()
    bench(
        tmp_path / "r.db", mock.url, "--concurrency", "2", "--num-prompts", "4", "--random-output-len", "4",
        env={"K2TUI_JOB_DIR": str(job)},
    )  # fmt: skip
    result = json.loads((job / "result.json").read_text())
    assert result["rows"][0]["completed"] == 4
    assert result["rows"][0]["job_id"] == "job-7"
    progress = json.loads((job / "progress.json").read_text())
    assert progress["done"] == progress["total"] == 1
