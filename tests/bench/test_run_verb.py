"""`k2tui bench run` as people start it: defaults, bad options, signals; and how the store fails."""

from __future__ import annotations

import argparse
import errno
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from k2tui import paths
from k2tui.benchdb import BenchDb
from k2tui.cli import main
from k2tui.core.bench import BenchRow
from k2tui.core.bench_record import Metric
from k2tui.core.bench_table import detail, rows_table
from k2tui.errors import K2Error

K2TUI = [sys.executable, "-m", "k2tui.cli", "bench"]


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "K2TUI_HOME": str(home), "K2TUI_CONFIG": ""}


def k2tui(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*K2TUI, *words], capture_output=True, text=True, timeout=60, env=environment(home), cwd=home
    )
    assert "Traceback" not in done.stderr
    return done


def configure(home: Path, port: int) -> None:
    (home / "config.toml").write_text(
        f'[profile.tiny]\nhost = "127.0.0.1"\nport = {port}\n'
        "[bench]\nconcurrency = [2]\nnum_prompts = 3\nrandom_input_len = 7\nrandom_output_len = 5\nseed = 9\n"
    )


def test_the_config_gives_the_defaults_and_options_win(mock: Any, tmp_path: Path) -> None:
    configure(tmp_path, mock.port)
    done = k2tui(tmp_path, "run", "--json", "--warmup", "0")
    assert done.returncode == 0, done.stderr
    assert f"measuring {mock.url}" in done.stderr  # the default profile's place, not a fixed port
    (row,) = json.loads(done.stdout)["runs"]
    assert (row["concurrency"], row["num_requests"]) == (2, 3)
    assert row["workload"] == "random in 7 out 5"
    done = k2tui(tmp_path, "run", "--json", "--warmup", "0", "--conc", "1", "--num-prompts=2")
    (row,) = json.loads(done.stdout)["runs"]
    assert (row["concurrency"], row["num_requests"], row["workload"]) == (1, 2, "random in 7 out 5")


@pytest.mark.parametrize(
    "words",
    [
        ("--request-rate", "nan"), ("--request-rate", "2,inf"), ("--request-rate=-1",), ("--max-seconds", "nan"),
        ("--max-seconds", "inf"), ("--max-seconds", "0"), ("--idle-timeout", "nan"), ("--temperature", "inf"),
        ("--random-input-len", "99999999"), ("--num-prompts", "99999999999"), ("--burstiness", "nan"),
    ],
)  # fmt: skip
def test_senseless_numbers_are_one_line_and_exit_2(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = k2tui(tmp_path, "run", "--url", "http://127.0.0.1:9", *words)
    assert done.returncode == 2
    first, *rest = done.stderr.strip().splitlines()
    assert words[0].partition("=")[0] in first
    assert all(line.startswith("  ") for line in rest) and len(rest) <= 1  # at most a hint


def test_max_seconds_holds_with_any_number_of_prompts(mock: Any, tmp_path: Path) -> None:
    done = k2tui(
        tmp_path, "run", "--url", mock.url, "--num-prompts", "99999999999", "--max-seconds", "1", "--concurrency", "2",
        "--warmup", "0", "--json",
    )  # fmt: skip
    assert json.loads(done.stdout)["runs"][0]["completed"] > 2


def test_a_secret_of_the_body_is_sent_and_not_stored(mock: Any, tmp_path: Path) -> None:
    body = '{"api_key": "S3CR1", "nested": {"token": "S3CR2"}, "top_k": 3}'
    done = k2tui(
        tmp_path,
        "run",
        "--url",
        mock.url,
        "--num-prompts",
        "2",
        "--concurrency",
        "1",
        "--warmup",
        "0",
        "--extra-body",
        body,
        "--json",
    )
    assert done.returncode == 0, done.stderr
    shown = k2tui(tmp_path, "show", "last", "--json").stdout
    assert '"top_k"' in shown and '"***"' in shown
    assert not any(b"S3CR" in p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())
    assert "S3CR" not in shown + done.stdout + done.stderr


@pytest.mark.parametrize("body", ['{"a": NaN}', '{"a": [1, -Infinity]}', '{"a": 1e999}', "[1]", "{"])
def test_a_body_that_is_no_json_object_is_refused(tmp_path: Path, body: str) -> None:
    done = k2tui(tmp_path, "run", "--url", "http://127.0.0.1:9", "--extra-body", body)
    assert done.returncode == 2 and done.stderr.startswith("k2tui: --extra-body")


class _Short(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps({"data": [{"id": "m", "max_model_len": 100}]}).encode()
        self.send_response(200 if self.path in ("/health", "/v1/models") else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def short_server() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Short)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_prompt_longer_than_the_context_is_told_before_anything_is_sent(
    short_server: str, tmp_path: Path
) -> None:
    done = k2tui(tmp_path, "run", "--url", short_server, "--random-input-len", "101")
    assert done.returncode == 2
    assert "prompts of 101 tokens do not fit" in done.stderr and "at most 100" in done.stderr


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(c) for c in found]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition: Callable[[], bool], seconds: float = 30) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


def test_an_interrupted_run_without_a_store_says_that_nothing_is_kept(mock: Any, tmp_path: Path) -> None:
    job = tmp_path / "job"
    job.mkdir()
    process = subprocess.Popen(
        [*K2TUI, "run", "--url", mock.url, "--no-store", "--num-prompts", "20000", "--concurrency", "2"],
        env={**environment(tmp_path), "K2TUI_JOB_DIR": str(job)}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert until((job / "progress.json").exists), "it measures"
    os.killpg(process.pid, signal.SIGINT)
    _, told = process.communicate(timeout=20)
    assert process.returncode == 130 and "nothing was stored (--no-store)" in told, told
    assert "partial" not in told and not list(tmp_path.rglob("runs.db"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("signum", "to", "code"),
    [
        (signal.SIGINT, "parent", 130), (signal.SIGTERM, "parent", 143), (signal.SIGKILL, "parent", -9),
        (signal.SIGKILL, "child", 1), (signal.SIGINT, "group", 130),
    ],
)  # fmt: skip
def test_a_signal_ends_both_processes(mock: Any, tmp_path: Path, signum: int, to: str, code: int) -> None:
    db = tmp_path / "r.db"
    process = subprocess.Popen(
        [*K2TUI, "run", "--url", mock.url, "--db", str(db), "--num-prompts", "20000", "--concurrency", "2"],
        env=environment(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip

    def is_measuring() -> bool:
        if not db.exists():
            return False
        with BenchDb(db, readonly=True) as store:
            rows = store.rows(1, include_running=True)
            return bool(rows and rows[0].completed)

    child = 0
    try:
        assert until(is_measuring)
        (child,) = children(process.pid)
        if to == "group":  # what a terminal does
            os.killpg(process.pid, signum)
        else:
            os.kill(process.pid if to == "parent" else child, signum)
        _, told = process.communicate(timeout=20)
        assert process.returncode == code
        assert until(lambda: not alive(child))
        assert "Traceback" not in told
        if to == "child":
            assert "the load generator was ended by SIGKILL" in told
        with BenchDb(db, readonly=True) as store:
            assert store.rows(1)[0].is_partial
    finally:
        if process.poll() is None:
            process.kill()
        if child and alive(child):
            os.kill(child, signal.SIGKILL)


def test_a_folder_without_permission_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, **_: object) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(K2Error, match="cannot be read: Permission denied") as told:
        BenchDb(tmp_path / "runs.db", readonly=True)
    assert "permissions" in told.value.hint


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_list_without_permission(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o000)
    done = subprocess.run([*K2TUI, "list"], capture_output=True, text=True, env=environment(home))
    assert done.returncode == 1 and "Permission denied" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words", ["disk I/O error", "unable to open database file", "database or disk is full"]
)
def test_disk_errors_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    path = tmp_path / "runs.db"
    BenchDb(path).close()

    def broken(*_: object, **__: object) -> Any:
        raise sqlite3.OperationalError(words)

    monkeypatch.setattr(sqlite3, "connect", broken)
    with pytest.raises(K2Error) as told:
        BenchDb(path, readonly=True)
    assert str(path) in told.value.message and told.value.hint


def test_the_list_keeps_labels_and_ids_apart() -> None:
    rows = [
        BenchRow("01J00000000000000000AAAAAA", 1.0, label="base", concurrency=1),
        BenchRow("01J00000000000000000BBBBBB", 2.0, concurrency=1),
    ]
    head, _, first, second, *_ = rows_table(rows, 120).splitlines()
    at = head.index("label")
    assert first[at:].startswith("base") and second[at : at + 4].strip() == ""
    assert second[head.index("id") :].startswith("BBBBBB")


def test_a_wrong_value_is_told_in_one_line(tmp_path: Path) -> None:
    for words, said in (
        (("--concurrency", "^"), "--concurrency: '^' is no list of whole numbers (example: 1,4,8)"),
        (("--num-prompts", "0"), "--num-prompts: '0' must be at least 1"),
        (("--seed", "x"), "--seed: invalid int value: 'x'"),
    ):
        done = k2tui(tmp_path, "run", *words)
        assert done.returncode == 2
        assert done.stderr.splitlines() == [f"k2tui: {said}", "  k2tui bench run --help lists the options"]
        job = subprocess.run(
            [sys.executable, "-m", "k2tui.loadgen", *words], capture_output=True, text=True, timeout=60
        )
        assert job.returncode == 2 and job.stderr.splitlines()[0] == f"k2tui bench: {said}"


def test_the_stage_refuses_a_wrong_value_before_there_is_a_job() -> None:
    from k2tui.config import Config
    from k2tui.stages.bench import plan

    with pytest.raises(K2Error, match="--concurrency: '\\^' is no list"):
        plan(Config(), {"concurrency": "^", "url": "http://127.0.0.1:1"})
    with pytest.raises(K2Error, match="--random-output-len"):
        plan(Config(), {"random_output_len": "-3", "url": "http://127.0.0.1:1"})
    assert "1,2" in plan(Config(), {"concurrency": "1,2", "url": "http://127.0.0.1:1"}).argv


def test_counts_are_whole_numbers() -> None:
    row = BenchRow("01J00000000000000000AAAAAA", 1.0, num_requests=32)
    text = detail(row, [Metric("completed.v1", "value", 32.0, "requests", n=32)], {})
    assert any(line.split()[:3] == ["completed", "32", "requests"] for line in text.splitlines())


def test_every_action_answers_in_json_and_with_its_exit_code(mock: Any, tmp_path: Path) -> None:
    """One store through all actions: measured, compared, kept, written out, taken in again."""
    mock.configure(ttft_us=2000, itl_us=1000)
    db = str(tmp_path / "runs.db")
    small = (
        "--url",
        mock.url,
        "--num-prompts",
        "4",
        "--random-output-len",
        "8",
        "--warmup",
        "0",
        "--db",
        db,
        "--json",
    )

    def answer(code: int, *words: str) -> Any:
        done = k2tui(tmp_path, *words)
        assert done.returncode == code, (words, done.stderr)
        return json.loads(done.stdout) if done.stdout else done.stderr

    swept = answer(0, "sweep", "--sweep", "4", "--label", "swept", *small)
    assert [r["concurrency"] for r in swept["runs"]][:3] == [1, 2, 4] and "knee" in swept
    by_rate = answer(0, "sweep", "--sweep-rate", "2", "--max-seconds", "0.6", "--label", "rates", *small)
    assert [r["request_rate"] for r in by_rate["runs"]] == [1, 2] and "knee" in by_rate
    assert "give one of them" in answer(2, "sweep", "--sweep-rate", "2", "--sweep", "4", *small)
    noise = answer(0, "aa", "--repeats", "3", "--concurrency", "2", *small)
    assert len(noise["runs"]) == 6
    assert {n["metric"] for n in noise["noise"]} >= {"output_throughput", "tpot_p50"}
    assert all(n["relative"] >= 0 and n["pairs"] == 3 for n in noise["noise"])
    both = answer(
        0, "run", "--against", mock.url, "--repeats", "3", "--concurrency", "2", "--label", "a", *small
    )
    assert len(both["runs"]) == 6 and both["comparisons"][0]["verdict"] in (
        "same",
        "faster",
        "slower",
        "unclear",
    )

    runs = answer(0, "list", "--json", "--db", db)["runs"]
    run_id = runs[0]["run_id"]
    with sqlite3.connect(
        db
    ) as store:  # a busy machine may flag any run: the baseline's own rule has its own test
        store.execute("UPDATE run SET flags='[]'")
    assert run_id in answer(0, "baseline", run_id, "--json", "--db", db)["runs"]
    assert all(r["is_baseline"] for r in answer(0, "baseline", "--json", "--db", db)["runs"])
    assert run_id in answer(0, "baseline", run_id, "--off", "--json", "--db", db)["runs"]
    assert answer(0, "baseline", "--json", "--db", db)["runs"] == []
    assert answer(0, "label", run_id, "named", "--tag", "t", "--json", "--db", db)["run"] == run_id
    (named,) = answer(0, "export", "named", "--json", "--db", db)["runs"]
    assert (named["label"], named["tag"]) == ("named", "t")
    out = tmp_path / "runs.jsonl"
    assert "1 runs ->" in answer(0, "export", "named", "--format", "sglang", "-o", str(out), "--db", db)
    again = answer(0, "import", str(out), "--label", "again", "--json", "--db", db)["runs"]
    assert len(again) == 1
    assert answer(0, "delete", again[0], "--yes", "--json", "--db", db)["deleted"] == again

    for words in (
        ("baseline", "nobody"),
        ("export", "nobody"),
        ("show", "nobody"),
        ("delete", "nobody", "--yes"),
        ("label", "nobody", "x"),
    ):
        told = answer(2, *words, "--db", db)
        assert "nobody" in told and "Traceback" not in told
    assert "nowhere" in answer(2, "import", str(tmp_path / "nowhere.json"), "--db", db)
    bad = tmp_path / "bad.json"
    bad.write_text('{"what": 1}')
    assert "bad.json" in answer(2, "import", str(bad), "--db", db)
    assert "--yes" in answer(2, "delete", run_id, "--db", db)


def test_the_stage_asks_for_nothing_that_the_load_generator_lacks() -> None:
    """Every parameter of the stage is an option, every default passes its check, and an IPv6 place is a URL."""
    import argparse
    from dataclasses import replace

    from k2tui.config import Config, Profile
    from k2tui.loadgen import options
    from k2tui.stages import bench as stage

    parser = argparse.ArgumentParser()
    options.add_arguments(parser)
    assert set(stage._OPTIONS) <= {action.dest for action in parser._actions}
    config = replace(Config(), profiles={"p": Profile(name="p", host="::1", port=31499)}, default_profile="p")
    plan = stage.plan(config, {"label": "x", "flush_cache": True})
    args = parser.parse_args(plan.argv[plan.argv.index("k2tui.loadgen") + 1 :])
    options.check(args)
    assert (args.url, args.label, args.flush_cache, args.concurrency) == (
        "http://[::1]:31499",
        "x",
        True,
        (1, 4, 8),
    )


def test_a_broken_store_takes_nothing_else_of_status_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("K2TUI_HOME", str(tmp_path))
    store = paths.bench_db()
    store.parent.mkdir(parents=True, exist_ok=True)
    store.write_text("no store at all, " * 100)
    assert main(["status", "--no-ask"]) == 0
    told = capsys.readouterr().out
    assert "no server of k2tui's" in told and told.count("cannot read benchmarks: ") == 1
    assert main(["status", "--no-ask", "--json"]) == 0
    assert str(store) in json.loads(capsys.readouterr().out)["bench_error"]
    assert main(["dashboard", "--plain"]) == 0
    told = capsys.readouterr().out
    assert "Cannot read benchmarks: " in told and "No benchmark yet" not in told


def test_a_named_store_must_be_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["list"], ["show", "last"], ["compare", "a", "b"], ["delete", "a", "--yes"], ["export"]):
        assert main(["bench", *words, "--db", str(tmp_path / "x.db")]) == 2
        assert "no such file" in capsys.readouterr().err
    assert not (tmp_path / "x.db").exists()


def test_a_full_or_read_only_disk(tmp_path: Path) -> None:
    """On a small tmpfs of its own; where no mount is allowed the test is skipped."""
    script = f"""
set -e
mount -t tmpfs -o size=1m none {tmp_path} || exit 77
run() {{ {sys.executable} -m k2tui "$@" || echo "rc $?"; }}
run bench import story >/dev/null
mount -o remount,ro {tmp_path}
run status --no-ask 2>&1; run bench label last x 2>&1
mount -o remount,rw {tmp_path}
dd if=/dev/zero of={tmp_path}/fill bs=1k 2>/dev/null || true
echo "== full"; run status --no-ask 2>&1; run bench label last x 2>&1
"""
    env = environment(tmp_path)
    done = subprocess.run(
        ["unshare", "-rm", "bash", "-c", script], capture_output=True, text=True, env=env, timeout=120
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"no mount here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    read_only, _, full = done.stdout.partition("== full")
    for told in (read_only, full):
        assert "no server of k2tui's" in told and "newest benchmark: " in told and "rc 1" in told
    assert "cannot be opened" in read_only and "the disk is full" in full


def test_a_server_whose_answers_are_nested_without_end(tmp_path: Path) -> None:
    class Deep(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(200)
            self.send_header("Content-Length", "100000")
            self.end_headers()
            self.wfile.write(b"[" * 100_000)

        do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Deep)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        done = k2tui(tmp_path, "run", "--url", url, "--num-prompts", "2", "--concurrency", "1")
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 1 and "every warm-up request failed" in done.stderr


def test_status_says_that_the_newest_run_has_no_figures(mock: Any, tmp_path: Path) -> None:
    mock.configure(http500_every=1)
    options = ("--concurrency", "2", "--num-prompts", "2", "--warmup", "0", "--label", "broken")
    assert k2tui(tmp_path, "run", "--url", mock.url, *options).returncode == 1
    said = subprocess.run(
        [*K2TUI[:-1], "status"], capture_output=True, text=True, timeout=60, env=environment(tmp_path), cwd=tmp_path
    )  # fmt: skip
    assert "newest benchmark: broken: no figures (nothing completed)" in said.stdout


def test_status_names_a_run_without_a_label_as_the_lists_do(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from k2tui.verbs import status

    run_id = "01KBA7X4P9ZQ3V5N8M2TCDEFGH"
    bench = {"run_id": run_id, "label": "", "concurrency": 1, "output_throughput": None, "ttft_p50_ms": None}
    facts = {"servers": [], "jobs": [], "bench_error": None, "bench": bench}
    monkeypatch.setattr(status, "collect", lambda ask: facts)
    for is_json, words in ((False, "newest benchmark: CDEFGH: "), (True, run_id)):
        assert status.run(argparse.Namespace(json=is_json, no_ask=True)) == 0
        said = capsys.readouterr().out
        assert words in said and (is_json or run_id not in said)
