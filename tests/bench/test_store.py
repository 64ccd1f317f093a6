"""The store: what goes in comes out, baselines, crash and full disk, imports with their flags, exports that read back."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from array import array
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k2tui.benchdb import BenchDb, RunInfo, _pack, _pack_tokens, _unpack, _unpack_tokens, rows
from k2tui.cli import main
from k2tui.core.bench import BenchRow
from k2tui.core.bench_compare import Noise, compare, compare_table
from k2tui.core.bench_import import export_sglang, parse, to_csv
from k2tui.core.bench_record import RequestRecord, Slo, summarize
from k2tui.core.bench_sweep import knee_words, sweep_points, sweep_table
from k2tui.core.bench_table import cells, detail, rows_table
from k2tui.core.stats import Verdict
from k2tui.errors import K2Error, UsageError

FIXTURES = Path(__file__).parent.parent / "fixtures" / "bench"
MS = 1_000_000


def record(
    i: int, *, start_ms: float = 0, ttft_ms: float = 50, gap_ms: float = 20, n: int = 5, error: str = ""
) -> RequestRecord:
    send = int((start_ms) * MS)
    stamps = array("q", [int(send + (ttft_ms + k * gap_ms) * MS) for k in range(n)])
    return RequestRecord(
        index=i, t_sched_ns=send, t_send_ns=send, t_first_ns=stamps[0], t_last_ns=stamps[-1], t_done_ns=stamps[-1],
        prompt_tokens=10, output_tokens=n, asked_tokens=n, stamps_ns=stamps, tokens=array("i", [1] * n), http_status=200,
        finish="length", error=error,
    )  # fmt: skip


def info(**more: object) -> RunInfo:
    base = {
        "label": "a", "concurrency": 2, "num_requests": 4, "sweep": "S",
        "server": {"fp": "s1", "engine": "sglang", "version": "0.5.23", "model": "m"},
        "workload": {"fp": "w1", "title": "random in 10 out 5", "api": "generate"},
    }  # fmt: skip
    return RunInfo(**{**base, **more})  # type: ignore[arg-type]


def put(
    db: BenchDb,
    *,
    at: float = 1000.0,
    gap: float = 20,
    flags: tuple[str, ...] = (),
    n: int = 4,
    **more: object,
) -> str:
    writer = db.begin(info(**more), at)
    for i in range(n):
        writer.add(record(i, start_ms=i * 200, gap_ms=gap))
    writer.finish(flags=flags, engine={"stamps": "kernel", "count": "server"})
    return writer.run_id


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 1 << 40), max_size=50), st.lists(st.integers(1, 9), max_size=50))
def test_stamps_and_tokens_pack_and_unpack(gaps: list[int], tokens: list[int]) -> None:
    at, stamps = 0, array("q")
    for g in gaps:
        at += g
        stamps.append(at)
    assert _unpack(_pack(stamps)) == stamps
    assert _unpack_tokens(_pack_tokens(array("i", tokens))) == array("i", tokens)


def test_figures_by_hand() -> None:
    found = {
        (m.name, m.stat): m.value
        for m in summarize([record(0), record(1, start_ms=100), record(2, error="reset")], slo=Slo(60, 25))
    }
    assert found["ttft.v1", "p50"] == pytest.approx(50)
    assert found["itl.v1", "mean"] == pytest.approx(20)
    assert found["tpot.v1", "mean"] == pytest.approx(20)
    assert found["e2e.v1", "p50"] == pytest.approx(130)
    assert found["tok_s_user.v1", "value"] == pytest.approx(50)
    assert found["output_throughput.v1", "value"] == pytest.approx(10 / 0.23)
    assert found["errors.v1", "reset"] == 1 and found["completed.v1", "value"] == 2
    assert found["goodput_fraction.v1", "value"] == pytest.approx(2 / 3)  # the failed one counts against


def test_tokens_of_a_chunk_share_its_gap() -> None:
    r = RequestRecord(
        index=0, t_sched_ns=0, t_send_ns=0, t_first_ns=10 * MS, t_last_ns=50 * MS, output_tokens=7, asked_tokens=7,
        stamps_ns=array("q", [10 * MS, 20 * MS, 50 * MS]), tokens=array("i", [1, 2, 4]),
    )  # fmt: skip
    found = {(m.name, m.stat): m.value for m in summarize([r])}
    assert found["itl.v1", "mean"] == pytest.approx((2 * 5 + 4 * 7.5) / 6)
    assert found["icl.v1", "mean"] == pytest.approx(20)
    assert found["tokens_per_chunk.v1", "value"] == pytest.approx(7 / 3)


def test_the_peak_is_that_of_any_second_and_never_below_the_mean() -> None:
    def figures(*records: RequestRecord) -> tuple[float, float]:
        found = {m.name: m.value for m in summarize(records)}
        return found["peak_output_throughput.v2"], found["output_throughput.v1"]

    # 10 tokens from 0.55 to 1.45 s: in two of the run's whole seconds, but in one second
    assert figures(record(0, ttft_ms=550, gap_ms=100, n=10))[0] == 10
    assert figures(record(0, n=5)) == (pytest.approx(5 / 0.13), pytest.approx(5 / 0.13))  # all of a short run
    # a token exactly a second later is in the next second
    assert figures(record(0, ttft_ms=0, gap_ms=1000, n=4))[0] == pytest.approx(4 / 3)
    many = replace(record(0, ttft_ms=0, gap_ms=500, n=5), tokens=array("i", [1, 0, 7, 2, 1]), output_tokens=11)
    assert figures(many, record(1, ttft_ms=1200, gap_ms=2000, n=2))[0] == 10  # 7 + 2 of one, 1 of the other


@pytest.mark.parametrize("n", [0, 1, 2])
def test_few_tokens_at_one_moment_have_no_speed(n: int) -> None:
    """All tokens of a request in one read: no gap was seen, and none is made up."""
    r = RequestRecord(
        0,
        0,
        0,
        t_first_ns=MS,
        t_last_ns=MS,
        output_tokens=n,
        asked_tokens=n,
        stamps_ns=array("q", [MS] * n),
        tokens=array("i", [1] * n),
    )
    found = {(m.name, m.stat): m.value for m in summarize([r])}
    assert ("tok_s_user.v1", "value") not in found


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    path = tmp_path / "x" / "r.db"
    with BenchDb(path) as db:
        first, second = put(db, at=1000), put(db, at=2000, concurrency=4)
        assert [r.run_id for r in db.rows()] == [second, first]
        row = db.row(first)
        assert (
            row is not None and row.completed == 4 and row.workload == "random in 10 out 5" and row.is_valid
        )
        assert db.records(first)[2] == record(2, start_ms=400)
    assert [r.run_id for r in rows(1, path)] == [second]
    assert path.stat().st_mode & 0o077 == 0
    assert rows(5, tmp_path / "nowhere.db") == []


def test_reader_sees_a_change_cheaply(tmp_path: Path) -> None:
    path = tmp_path / "r.db"
    reader = BenchDb(path, readonly=True)
    assert reader.rows() == []
    with BenchDb(path) as db:
        put(db)
        assert len(reader.rows()) == 1  # opened before the file was there
        before = reader.data_version()
        assert reader.data_version() == before
        put(db, at=3000)
        assert reader.data_version() != before
    reader.close()


def test_names_of_runs(tmp_path: Path) -> None:
    with BenchDb(tmp_path / "r.db") as db:
        one = put(db)
        assert db.resolve(one) == db.resolve(one[-6:].lower()) == db.resolve("last") == db.resolve("a") == one
        with pytest.raises(UsageError, match="no benchmark run"):
            db.resolve("zzzz")


def test_only_a_valid_run_becomes_a_baseline(tmp_path: Path) -> None:
    with BenchDb(tmp_path / "r.db") as db:
        good, other = put(db), put(db, at=2000, sweep="T", label="b")
        bad = put(db, at=3000, sweep="U", flags=("errors: 1 reset",))
        with pytest.raises(K2Error, match="errors: 1 reset"):
            db.set_baseline(bad)
        assert db.set_baseline(good) == [good]
        assert db.set_baseline(other) == [other]  # one baseline a workload
        assert [r.run_id for r in db.rows() if r.is_baseline] == [other]


def test_damaged_and_foreign_files_are_clear_errors(tmp_path: Path) -> None:
    bad = tmp_path / "bad.db"
    bad.write_bytes(b"this is no database" * 100)
    with pytest.raises(K2Error, match="no k2tui store or is damaged"):
        BenchDb(bad)
    with pytest.raises(K2Error, match="is a folder"):
        BenchDb(tmp_path)
    newer = tmp_path / "newer.db"
    with BenchDb(newer) as db:
        db._write("PRAGMA user_version=99")
    with pytest.raises(K2Error, match="newer k2tui"):
        BenchDb(newer)


def test_full_disk_keeps_what_was_stored(tmp_path: Path) -> None:
    """A file size limit stands in for a full disk; what was committed before stays readable."""
    path = tmp_path / "r.db"
    with BenchDb(path) as db:
        put(db)
    code = (
        "import resource,sys,signal;from pathlib import Path;sys.path.insert(0,sys.argv[2]);"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "from test_store import BenchDb,info,record,K2Error\n"
        "db=BenchDb(Path(sys.argv[1]));w=db.begin(info(label='full'),5000.0)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE,(60000,60000))\n"
        "import array\n"
        "for i in range(4000): w.add(record(i,start_ms=i*7,gap_ms=3.3+i*0.01,n=64))\n"
        "try:\n w.flush();print('problem',bool(w.problem));w.finish()\n"
        "except K2Error as e: print('told',e.message)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), str(Path(__file__).parent)], capture_output=True, text=True
    )
    assert "problem True" in done.stdout and "measured but not stored" in done.stdout, (
        done.stdout + done.stderr
    )
    with BenchDb(path) as db:
        db.recover()
        found = db.rows()
        assert [r.label for r in found][-1] == "a" and found[-1].completed == 4
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 60000 or os.name != "posix"


def test_sglangs_real_line_is_imported_with_its_faults(tmp_path: Path) -> None:
    (one,) = parse((FIXTURES / "sglang-0.5.23-bench_serving.jsonl").read_text(), "x")
    assert one.tool == "sglang.bench_serving" and one.concurrency == 4 and one.rate is None
    figures = {(m.name, m.stat): m.value for m in one.metrics}
    assert figures["output_throughput.v1", "value"] == pytest.approx(64.93, abs=0.01)
    assert figures["itl.v1", "p99"] == pytest.approx(219.0, abs=0.1)
    assert figures["tok_s_user.v1", "value"] == pytest.approx(1000 / 48.878, rel=1e-3)
    assert "failed requests are not told" in one.flags


def test_faults_of_other_tools_are_flagged() -> None:
    asked = {
        "backend": "sglang-oai", "duration": 2.0, "completed": 4, "total_output_tokens": 256, "random_output_len": 64,
        "total_output_tokens_retokenized": 128, "median_itl_ms": 10.0, "median_tpot_ms": 4.0, "accept_length": 2.4,
    }  # fmt: skip
    (one,) = parse(json.dumps(asked), "x")
    text = "; ".join(one.flags)
    assert "asked length" in text and "one sample a chunk" in text and "lifetime" in text
    vllm = {
        "burstiness": 1.0,
        "duration": 2.0,
        "completed": 3,
        "failed": 1,
        "num_prompts": 4,
        "total_output_tokens": 9,
        "request_rate": "inf",
    }
    (one,) = parse(json.dumps(vllm), "x")
    assert one.tool == "vllm bench serve" and any("1 failed" in f for f in one.flags)
    batch = {
        "run_name": "r",
        "batch_size": 4,
        "input_len": 8,
        "output_len": 16,
        "latency": 1.0,
        "output_throughput": 80.0,
        "last_ttft": 0.2,
    }
    (one,) = parse(json.dumps(batch), "x")
    assert {m.name: m.value for m in one.metrics}["tok_s_user.v1"] == 20
    guide = {"metadata": {}, "benchmarks": [{"duration": 3.0, "metrics": {
        "request_totals": {"successful": 5, "errored": 1},
        "output_tokens_per_second": {"successful": {"mean": 50.0}},
        "inter_token_latency_ms": {"successful": {"mean": 20.0, "median": 19.0, "percentiles": {"p99": 30.0}}}}}]}  # fmt: skip
    (one,) = parse(json.dumps(guide), "x")
    figures = {(m.name, m.stat): m.value for m in one.metrics}
    assert figures["itl.v1", "p99"] == 30 and figures["errors.v1", "failed"] == 1
    aiperf: dict[str, Any] = {
        "request_count": {"avg": 5},
        "time_to_first_token": {"avg": 9.0, "p50": 8.0, "p99": 20.0},
        "inter_token_latency": {"avg": 5.0},
    }
    (one,) = parse(json.dumps(aiperf), "x")
    assert {(m.name, m.stat): m.value for m in one.metrics}["ttft.v1", "p99"] == 20
    assert one.concurrency is None
    # 0.13 says its load in phases
    aiperf["input_config"] = {
        "endpoint": {"type": "completions"},
        "models": {"items": [{"name": "m"}]},
        "phases": [
            {"kind": "warmup", "type": "concurrency", "concurrency": 2},
            {"kind": "profiling", "type": "poisson", "rate": 4.0, "concurrency": 8},
        ],
    }
    (one,) = parse(json.dumps(aiperf), "x")
    assert (one.concurrency, one.rate, one.shape, one.server["model"]) == (8, 4.0, "poisson", "m")
    assert one.workload["api"] == "completions"


@pytest.mark.parametrize("text", ["", "{}", "not json", '{"a": 1}\n{"b"', "[1, 2]"])
def test_what_is_no_result_is_a_clear_error(text: str) -> None:
    with pytest.raises(UsageError):
        parse(text, "file.json")


def test_story_table_ships_and_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    db = str(tmp_path / "r.db")
    assert main(["bench", "import", "story", "--db", db]) == 0
    assert main(["bench", "list", "--db", db]) == 0
    text = capsys.readouterr().out
    for figure in ("63.6", "82.5", "90.0", "2,370", "42 %", "25 %", "story, typed"):
        assert figure in text
    assert main(["bench", "compare", "sglang", "sglang + NCCL tuned", "--db", db]) == 0
    assert "+41.5 %" in capsys.readouterr().out
    assert main(["bench", "baseline", "sglang", "--db", db]) == 0


def test_export_reads_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.db"
    with BenchDb(path) as db:
        run = put(db, label="=cmd()")
        row = db.row(run)
        assert row is not None
        stats = {(m.name.rpartition(".")[0], m.stat): m.value for m in db.metrics(run)}
    line = export_sglang(asdict(row), stats)
    keys = list(json.loads((FIXTURES / "sglang-0.5.23-bench_serving.jsonl").read_text()))
    ours = [k for k in line if k != "k2"]
    assert ours == [k for k in keys if k in ours] and set(ours) == set(keys) & set(ours)
    assert {"duration", "completed", "median_ttft_ms", "p99_itl_ms", "accept_length"} <= set(ours)
    (back,) = parse(json.dumps(line), "x")
    assert {(m.name, m.stat): m.value for m in back.metrics}["itl.v1", "mean"] == pytest.approx(20)
    csv = to_csv([asdict(row)])
    assert "'=cmd()" in csv  # a spreadsheet must not run it
    assert (
        to_csv([{"a": "", "b": "-x", "c": "\tx", "d": -1.5, "e": None}]).splitlines()[1] == ",'-x,'\tx,-1.5,"
    )
    for name in ("sglang", "csv", "md", "json"):
        assert main(["bench", "export", "last", "--format", name, "--db", str(path)]) == 0
    assert main(["bench", "export", "-o", str(tmp_path / "out.jsonl"), "--db", str(path)]) == 0
    assert json.loads((tmp_path / "out.jsonl").read_text())["completed"] == 4


def test_compare_says_why_not(tmp_path: Path) -> None:
    with BenchDb(tmp_path / "r.db") as db:
        a = db.row(put(db))
        b = db.row(put(db, workload={"fp": "w2", "title": "random in 99 out 5", "api": "generate"}))
        assert a and b
        (c,) = compare([a], [b])
        assert c.verdict is Verdict.NOT_COMPARABLE and "random in 99" in c.why
        fast = [db.row(put(db, gap=10 + 0.01 * k, repeat=k, label="fast")) for k in range(3)]
        slow = [db.row(put(db, gap=20 + 0.01 * k, repeat=k)) for k in range(3)]
        (c,) = compare([r for r in slow if r], [r for r in fast if r])
        assert c.verdict is Verdict.FASTER and c.deltas[0].basis == "3 pairs"
        (c,) = compare([r for r in slow if r], [r for r in slow if r])
        assert c.verdict is Verdict.SAME
        assert "same" in compare_table([c], 80)
        (c,) = compare([r for r in slow if r], [r for r in fast if r])
        assert " base ● " in compare_table([c], 80) and "   new fast " in compare_table([c], 80)


def single(db: BenchDb, value: float, **more: Any) -> BenchRow:
    """A run of so many tok/s; its interval from inside is +-1 %."""
    row = db.row(put(db, **more))
    assert row is not None
    return replace(row, output_throughput=value, output_throughput_ci=(0.99 * value, 1.01 * value))


def test_one_run_each_knows_nothing_of_the_luck_from_run_to_run(tmp_path: Path) -> None:
    def told(ratio: float, noise: dict[str, Noise] | None = None) -> Verdict:
        (c,) = compare([single(db, 100)], [single(db, 100 * ratio)], noise=noise)
        return c.verdict

    with BenchDb(tmp_path / "r.db") as db:
        assert told(1 - 0.081) is Verdict.UNCLEAR
        assert told(1.0) is Verdict.UNCLEAR
        assert told(0.85) is Verdict.SLOWER and told(1.15) is Verdict.FASTER
        floor = {"output_throughput": Noise(0.03, 4)}  # the mean of four pairs: a single pair's is twice that
        assert told(1 - 0.081, floor) is Verdict.SLOWER and told(1.05, floor) is Verdict.UNCLEAR
        found = compare([single(db, 100)], [single(db, 91.9)])
        words = "1 run each: run-to-run luck is not in the interval; bench run --repeats 3 measures it"
        assert words in compare_table(found, 200) and "more than 10 % is called" in compare_table(found, 200)
        found = compare([single(db, 100)], [single(db, v, repeat=k) for k, v in enumerate((90, 91, 92))])
        assert "? -9.0 %" in compare_table(found, 200) and "1 run on one side: nothing tells" in compare_table(found, 200)
        (c,) = compare([replace(single(db, 100), output_throughput_ci=None)], [single(db, 150)])  # too few requests for an interval
        assert c.verdict is Verdict.UNCLEAR


def test_rows_of_one_run_are_told_and_the_result_names_what_was_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    db = tmp_path / "r.db"
    with BenchDb(db) as store:
        eight, four, again = (put(store, at=1000.0 + k, concurrency=c) for k, c in enumerate((8, 4, 4)))
        other = put(store, concurrency=8, sweep="T", flags=("late",))

    def compared(a: str, b: str) -> int:
        return main(["bench", "compare", a, b, "--db", str(db)])

    assert compared(eight[-6:], four[-6:]) == 2
    told = capsys.readouterr().err
    assert f"'{eight[-6:]}' and '{four[-6:]}' are rows of one run (C=8 and C=4)" in told
    assert "the same load of another run" in told
    assert compared(four[-6:], again) == 2
    told = capsys.readouterr().err
    assert "(both C=4)" in told and f"k2tui bench compare {four} {again}" in told
    assert compared(four, again) == 0
    assert compared(four, four[-6:]) == 2 and "mean the same row" in capsys.readouterr().err
    assert compared(eight[-6:], other) == 0
    out = capsys.readouterr().out
    assert f" base ● a ({eight[-6:]})   new a ({other}) " in out
    assert f" C=8: not valid: {other[-6:]}: late" in out


def test_the_list_says_how_many_rows_it_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    db = tmp_path / "r.db"
    with BenchDb(db) as store:
        for k in range(4):
            put(store, at=1000.0 + k, label="b" if k else "a")
        store.begin(info(), 2000)  # still being measured: no row yet

        def listed(*words: str) -> str:
            assert main(["bench", "list", "--db", str(db), *words]) == 0
            return capsys.readouterr().out

        assert listed("--limit", "3").splitlines()[-1] == "the newest 2 of 4 rows; --limit 0 shows all"
        assert listed("--limit", "2", "--label", "b").splitlines()[-1] == "the newest 2 of 3 rows; --limit 0 shows all"
        assert "rows;" not in listed() and "rows;" not in listed("--limit", "0")
        assert len(json.loads(listed("--limit", "0", "--json"))["runs"]) == 4
        assert json.loads(listed("--limit", "1", "--label", "a", "--json"))["total"] == 1


def test_a_large_difference_with_a_wide_interval_is_unclear(tmp_path: Path) -> None:
    with BenchDb(tmp_path / "r.db") as db:
        base = [single(db, v, repeat=k) for k, v in enumerate((735, 730, 740))]
        new = [single(db, v, repeat=k) for k, v in enumerate((499, 300, 700))]
        (c,) = compare(base, new)
        assert c.verdict is Verdict.UNCLEAR
        text = compare_table([c], 200)
        assert "735 → 500  ? -" in text and "unclear" in text and "run-to-run luck" not in text
        assert "▲ better, ▼ worse" in text


def test_sweep_marks_knee_and_bars(tmp_path: Path) -> None:
    with BenchDb(tmp_path / "r.db") as db:
        found = []
        for k, c in enumerate((1, 2, 4, 8, 16)):
            writer = db.begin(info(concurrency=c, label="s"), 1000 + k)
            for i in range(min(c, 4) * 4):  # throughput stops growing at 4
                writer.add(record(i, start_ms=(i // min(c, 4)) * 200))
            writer.finish(engine={"stamps": "kernel"})
            found.append(db.row(writer.run_id))
        rows_ = [r for r in found if r]
        points = sweep_points(rows_, rows_)
        assert [p.row.concurrency for p in points if p.is_knee] == [4]
        text = sweep_table(rows_, rows_, 100)
        assert "◆" in text and "█" in text and "? +0.0 %" in text  # one run each
        assert knee_words(rows_).startswith("◆ knee at C=4: ")
        assert knee_words(rows_[:3]) == (
            "no knee: the throughput still grew at C=4, the highest load; a higher --sweep goes on"
        )
        assert knee_words(rows_[:2]) == "no knee: it takes three loads to tell one, 2 gave figures"
        by_rate = replace(rows_[0], request_rate=2.0, concurrency=None, flags=("late",))
        assert f"⚠ {by_rate.run_id[-6:]} s 2 req/s: late" in sweep_table([by_rate]) and "C=" not in sweep_table([by_rate])


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_tables_fit_every_width(tmp_path: Path, width: int) -> None:
    with BenchDb(tmp_path / "r.db") as db:
        run = put(
            db,
            label="a very long label 日本語 \x1b[31m with escape",
            flags=("a flag that is longer than the screen is wide " * 4,),
        )
        row = db.row(run)
        assert row
        texts = [
            rows_table([row] * 3, width), sweep_table([row], [row], width), compare_table(compare([row], [row]), width),
            detail(row, db.metrics(run), db.details(run), width),
        ]  # fmt: skip
    for text in texts:
        assert "\x1b" not in text
        if width >= 60:
            assert max(cells(line) for line in text.splitlines()) <= width


def test_timeline_and_distributions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    db = tmp_path / "r.db"
    with BenchDb(db) as store:
        writer = store.begin(info(), 1000)
        for i in range(3):
            writer.add(record(i, start_ms=i * 130, error="reset" if i == 1 else ""))
        writer.finish()
    assert main(["bench", "show", "last", "--requests", "--db", str(db)]) == 0
    text = capsys.readouterr().out
    assert "✗ reset" in text and text.count("█") > 10 and "TTFT" in text and "E2E" in text
    lines = [x for x in text.splitlines() if x.lstrip().startswith(("0 ", "2 ")) and "█" in x]
    assert lines[-1].index("█") > lines[-2].index("█")  # the third request starts later
    assert max(cells(x) for x in text.splitlines()) <= 120


def test_verbs_change_and_delete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    db = tmp_path / "r.db"
    with BenchDb(db) as store:
        run = put(store)
    assert main(["bench", "label", run, "new name", "--tag", "t", "--db", str(db)]) == 0
    assert main(["bench", "list", "--json", "--tag", "t", "--db", str(db)]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["label"] == "new name"
    assert main(["bench", "delete", run, "--db", str(db)]) == 2  # no terminal to ask on
    assert main(["bench", "delete", run, "--yes", "--db", str(db)]) == 0
    assert rows(5, db) == []
    assert main(["bench", "show", "last", "--db", str(db)]) == 2
    assert "no benchmark run" in capsys.readouterr().err


def test_the_dashboards_door_to_the_store(own_home: Path) -> None:
    """What the bench screen orders, against a real store."""
    from k2tui import config
    from k2tui.monitor import Monitor

    with BenchDb() as db:
        first, second = put(db), put(db, at=2000.0, label="b", sweep="T")
    monitor = Monitor(config.load(None))
    monitor.label_run(first, "night", "july")
    assert set(monitor.set_baseline(second, True)) == {second}
    by = {r.run_id: r for r in rows()}
    assert (by[first].label, by[first].tag) == ("night", "july")
    assert by[second].is_baseline and not by[first].is_baseline
    for width in (60, 150):
        for plain in (True, False):
            lines = monitor.run_requests(first, width, plain)
            assert all(cells(line) <= width for line in lines)
            assert len([line for line in lines if line.lstrip()[:1].isdigit()]) >= 4
            assert not plain or all(line.isascii() for line in lines)
    monitor.delete_run(second)
    assert [r.run_id for r in rows()] == [first]
    with pytest.raises(K2Error):
        monitor.run_requests(second, 80, True)


def test_an_empty_text_names_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.db"
    with BenchDb(path) as db:
        put(db, label="")  # what an empty text would match as a label
        kept = put(db, at=2000.0, label="b")
    for words in (
        ["delete", "", "--yes"], ["delete", "last", " ", "--yes"], ["label", "", "x"], ["show", ""], ["baseline", ""],
        ["export", ""], ["compare", "", "last"], ["compare", "last", ""], ["label", kept, "last"],
    ):  # fmt: skip
        assert main(["bench", *words, "--db", str(path)]) == 2, words
    assert "cannot be a label" in capsys.readouterr().err
    with BenchDb(path, readonly=True) as db:
        assert [r.label for r in db.rows()] == ["b", ""]
    for words in (["tune", "show", ""], ["up", "", "--dry-run"]):
        assert main(words) == 2
        assert "an empty text names no" in capsys.readouterr().err


BASE = {"duration": 10.0, "completed": 4, "total_output_tokens": 100, "dataset_name": "random"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (json.dumps({**BASE, "duration": 10**400}), "duration is a number of 401 digits"),
        (json.dumps({**BASE, "max_concurrency": 10**30}), "max_concurrency is 1e+30: too large"),
        (json.dumps(BASE) + "\n" + json.dumps({**BASE, "completed": -4}), ":2: completed is -4: below 0"),
        (json.dumps({**BASE, "mean_ttft_ms": -1.5}), "mean_ttft_ms is -1.5: below 0"),
        (json.dumps({**BASE, "tag": "\ud800"}), "tag is no text"),
        ("[" * 100_000, ":1: nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", ":1: a number of more than 4300 digits"),
        ("[]", "holds no result"),
        ('{"format": "k2tui-table", "runs": []}', "holds no result"),
        ('{"format": "k2tui-table", "runs": [{"label": "x", "requests": 4}]}', "'x' has no figure"),
        ('{"format": "k2tui-table", "runs": [{"tok_s_user": 3, "ttft_p50_ms": "q"}]}', "ttft_p50_ms must be a number"),
        ('{"format": "k2tui-table", "runs": [{"tok_s_user": 3, "model": []}]}', "model must be a text"),
    ],
)  # fmt: skip
def test_what_is_no_result_is_refused_by_name(tmp_path: Path, text: str, words: str) -> None:
    file, store = tmp_path / "x.jsonl", tmp_path / "r.db"
    file.write_text(text)
    with pytest.raises(UsageError) as told:
        parse(text, str(file))
    assert words in told.value.message and str(file) in told.value.message
    assert main(["bench", "import", str(file), "--db", str(store)]) == 2
    assert not store.exists()


def test_import_reads_files_and_standard_input_only(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in (str(tmp_path / "pipe"), "/dev/zero", str(tmp_path)):
        assert main(["bench", "import", name, "--db", str(tmp_path / "r.db")]) == 2
    done = subprocess.run(
        [sys.executable, "-m", "k2tui", "bench", "import", "-", "--db", str(tmp_path / "r.db")],
        input=json.dumps(BASE), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0 and "imported 1 run" in done.stdout, done.stderr
