from __future__ import annotations

import http.server
import json
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k2tui import cli, notify
from k2tui.config import NotifyConfig
from k2tui.core.bench import BenchRow
from k2tui.core.job import Job, JobSpec, JobState
from k2tui.core.load import LoadView, State
from k2tui.core.notices import (
    Filter,
    Kind,
    Note,
    Rules,
    fill_command,
    is_quiet,
    is_worse,
    notes_between,
    parse_quiet,
    terminal_code,
)
from k2tui.core.snapshot import ServerView, Snapshot
from k2tui.errors import UsageError
from k2tui.jobs import folder

from .world import until

NOTE = Note(Kind.STALLED, "tiny stalled", "shard 3/64 for \x1b[31m40 s; look", 100.0, "k", "j1")


@pytest.fixture
def hook() -> Iterator[Any]:
    """A real HTTP server; `answers` says which status comes next, `got` what was posted."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            server.got.append(json.loads(body))  # type: ignore[attr-defined]
            self.send_response(server.answers.pop(0) if server.answers else 200)  # type: ignore[attr-defined]
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.got, server.answers = [], []  # type: ignore[attr-defined]
    server.url = f"http://127.0.0.1:{server.server_port}/secret-path"  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def view(state: State, key: str = "s") -> ServerView:
    return ServerView(key, "tiny", LoadView(state=state, verdict=f"is {state}", hint="do this"))


def job(state: JobState, job_id: str = "j", kind: str = "task") -> Job:
    return Job(
        spec=JobSpec(id=job_id, stage="bench", title="b", argv=("x",), kind=kind),
        state=state,
        reason="exit 1",
        took_s=3.0,
    )


def kinds(before: Snapshot | None, after: Snapshot) -> list[str]:
    return [str(n.kind) for n in notes_between(before, after)]


def test_what_is_news() -> None:
    quiet = Snapshot(1.0, servers=(view(State.LOADING),), jobs=(job(JobState.RUNNING),))
    assert kinds(None, quiet) == [] and kinds(quiet, quiet) == []
    assert kinds(quiet, Snapshot(2.0, servers=(view(State.READY),))) == ["ready"]
    assert kinds(quiet, Snapshot(2.0, servers=(view(State.STALLED),))) == ["stalled"]
    assert kinds(quiet, Snapshot(2.0, servers=(view(State.FAILED),))) == ["failed"]
    assert kinds(quiet, Snapshot(2.0, servers=(view(State.FAILED, "new"),))) == [], (
        "a server first seen as failed is no news"
    )
    assert kinds(quiet, Snapshot(2.0, jobs=(job(JobState.SUCCEEDED),))) == ["job_ended"]
    assert kinds(quiet, Snapshot(2.0, jobs=(job(JobState.FAILED),))) == ["job_failed"]
    assert kinds(quiet, Snapshot(2.0, jobs=(job(JobState.LOST),))) == ["job_failed"]
    assert kinds(quiet, Snapshot(2.0, jobs=(job(JobState.SKIPPED),))) == []


def test_a_benchmark_worse_than_its_baseline() -> None:
    base = BenchRow(
        "b",
        1.0,
        workload="w",
        concurrency=4,
        model="m",
        output_throughput=100.0,
        ttft_p50_ms=50.0,
        is_baseline=True,
    )
    same = replace(base, run_id="r", is_baseline=False)
    assert is_worse(same, base) == "" and is_worse(replace(same, output_throughput=96.0), base) == ""
    worse = replace(same, output_throughput=80.0, ttft_p50_ms=70.0)
    assert is_worse(worse, base) == "tok/s 80 instead of 100; TTFT p50 ms 70 instead of 50"
    before, after = Snapshot(1.0, bench=(base,)), Snapshot(2.0, bench=(worse, base))
    assert kinds(before, after) == ["bench_worse"] and kinds(after, after) == []
    assert kinds(before, Snapshot(2.0, bench=(replace(worse, concurrency=8), base))) == [], (
        "another load is another thing"
    )


@given(st.integers(0, 1439), st.integers(0, 1439), st.integers(0, 1439))
def test_quiet_hours_and_their_complement_make_a_day(start: int, end: int, minute: int) -> None:
    if start == end:
        assert not is_quiet((start, end), minute)
    else:
        assert is_quiet((start, end), minute) != is_quiet((end, start), minute)


def test_rules() -> None:
    assert parse_quiet("22:00-07:30") == (1320, 450) and parse_quiet("") is None
    for wrong in ("22-7", "25:00-07:00", "x"):
        with pytest.raises(ValueError, match="22:00-07:00"):
            parse_quiet(wrong)
    night = Filter(Rules(quiet=(1320, 420), quiet_except=frozenset({Kind.FAILED})))
    assert night.allow([NOTE, replace(NOTE, kind=Kind.FAILED, key="f")], 1400)[0].kind is Kind.FAILED
    assert len(night.allow([NOTE], 800)) == 1
    assert night.allow([replace(NOTE, at_s=130.0)], 800) == [], "not twice within a minute"
    assert len(night.allow([replace(NOTE, at_s=161.0)], 800)) == 1
    assert Filter(Rules(kinds=frozenset({Kind.READY}))).allow([NOTE], 800) == []
    with pytest.raises(UsageError, match="no_such"):
        notify.rules_of(NotifyConfig(kinds=("no_such",)))


@pytest.mark.parametrize(
    ("env", "begin"),
    [
        ({"TERM": "xterm-kitty"}, "\x1b]99;"),
        ({"TERM": "foot"}, "\x1b]777;notify;"),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "WezTerm"}, "\x1b]777;"),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "iTerm.app"}, "\x1b]9;"),
        ({"TERM": "foot", "TMUX": "x"}, "\x1bPtmux;\x1b\x1b]777;"),
        ({"TERM": "xterm-256color"}, ""),
        ({"TERM": "dumb", "TERM_PROGRAM": "WezTerm"}, ""),
    ],
)
def test_the_terminals_own_codes(env: dict[str, str], begin: str) -> None:
    code = terminal_code(NOTE, env)
    assert code.startswith(begin) and (begin or code == "")
    assert "[31m" not in code, "the words bring no codes of their own"
    if begin.startswith("\x1b]777"):
        assert code.count(";") == 3, "a semicolon in the words would cut them"


def test_the_users_command_gets_words_not_a_shell(tmp_path: Path) -> None:
    out = tmp_path / "out"
    code = (
        f"import os, sys; open({str(out)!r}, 'w').write(repr((sys.argv[1:], os.environ['K2TUI_NOTE_KIND'])))"
    )
    config = NotifyConfig(command=(sys.executable, "-c", code, "{title}", "{text}; rm -rf {other}"))
    assert notify.run_command(config, NOTE) == ""
    assert out.read_text() == "(['tiny stalled', 'shard 3/64 for 40 s; look; rm -rf {other}'], 'stalled')"
    assert "No such file" in notify.run_command(NotifyConfig(command=("/no/such",)), NOTE)
    assert "ended with 3" in notify.run_command(NotifyConfig(command=("sh", "-c", "exit 3")), NOTE)
    assert fill_command(["{kind}", "{job}"], NOTE) == ["stalled", "j1"]


def test_the_webhook_tries_again_and_gives_up_where_that_is_no_use(hook: Any) -> None:
    pauses: list[float] = []
    config = NotifyConfig(webhook=hook.url)
    hook.answers[:] = [503, 429, 200]
    assert notify.post(config, NOTE, sleep=pauses.append) == ""
    assert len(hook.got) == 3 and pauses == [1.0, 4.0]
    assert hook.got[0]["kind"] == "stalled" and "tiny stalled" in hook.got[0]["text"]
    hook.got.clear()
    hook.answers[:] = [404]
    assert notify.post(config, NOTE, sleep=pauses.append) == "webhook: HTTP 404" and len(hook.got) == 1
    hook.answers[:] = [500] * 9
    why = notify.post(config, NOTE, sleep=lambda s: None)
    assert why == "webhook: HTTP 500" and "secret-path" not in why
    gone = notify.post(NotifyConfig(webhook="http://127.0.0.1:32298/secret"), NOTE, pauses_s=(0.0,))
    assert gone == "webhook: ConnectError"
    assert notify.post(NotifyConfig(webhook="ftp://x"), NOTE).startswith("webhook: Unsupported")


def test_the_dashboards_notifier_writes_at_once_and_posts_in_the_background(
    hook: Any, tmp_path: Path
) -> None:
    written: list[str] = []
    problems: list[str] = []
    config = NotifyConfig(webhook=hook.url, command=("/no/such",))
    teller = notify.Notifier(config, write=written.append, on_error=problems.append, env={"TERM": "foot"})
    before = Snapshot(1.0, servers=(view(State.LOADING),), jobs=(job(JobState.RUNNING),))
    teller.look(before, 1.0)
    after = Snapshot(2.0, servers=(view(State.READY),), jobs=(job(JobState.SUCCEEDED),))
    told = teller.look(after, 2.0)
    assert [n.kind for n in told] == [Kind.READY, Kind.JOB_ENDED]
    assert len(written) == 2 and written[0].startswith("\a\x1b]777;notify;tiny ready;is ready")
    until(lambda: hook.got, 10)
    teller.close(5)
    assert [g["kind"] for g in hook.got] == ["ready"], "a job's end is told by its keeper"
    assert problems == ["/no/such: No such file or directory"]


def test_a_jobs_end_is_told_with_no_dashboard_open(submit: Callable[..., str], home: Path, hook: Any) -> None:
    (home / "config.toml").write_text(f'[notify]\nwebhook = "{hook.url}"\nkinds = ["job_failed"]\n')
    good = submit("pass")
    bad = submit("raise SystemExit(4)")
    assert folder.wait(bad, 20).state is JobState.FAILED and folder.wait(good, 20).state is JobState.SUCCEEDED
    until(lambda: hook.got, 20)
    assert [g["job_id"] for g in hook.got] == [bad] and "exit 4" in hook.got[0]["detail"]


def test_the_verb_says_what_came_of_each_way(
    home: Path, hook: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "config.toml").write_text(f'[notify]\nwebhook = "{hook.url}"\ncommand = ["false"]\n')
    assert cli.main(["notify", "test", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["webhook"] == "done" and "ended with 1" in said["command"] and said["bell"] == "no terminal"
    (home / "config.toml").write_text('[notify]\nquiet = "night"\n')
    assert cli.main(["notify", "test"]) == 2
    assert "night" in capsys.readouterr().err
