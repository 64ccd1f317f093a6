from __future__ import annotations

import json
import math
import os
import signal
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k2tui import cli, config
from k2tui.core import chain as pure
from k2tui.core.chain import Record, decide, gate_unmet, parse_chain
from k2tui.core.job import JobState
from k2tui.errors import K2Error, UsageError
from k2tui.jobs import chain as runner
from k2tui.jobs import folder

from .world import until

PY = sys.executable


# ---- reading


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = = 1", "not valid TOML"),
        ("", "a list of"),
        ("nmae = 'x'", "did you mean 'name'"),
        ("[[step]]\nname='a'\nargv=['x']\ngates=[]", "p.toml:4: unknown key 'gates'; did you mean 'gate'"),
        ("[[step]]\nname='a'\nargv=['x']\n[[step]]\nname='a'\nargv=['x']", "p.toml:4: two steps"),
        ("[[step]]\nname='a'\nargv=['x']\nneeds=['b']", "names 'b', which does not exist"),
        (
            "[[step]]\nname='aa'\nargv=['x']\nneeds=['bb']\n[[step]]\nname='bb'\nargv=['x']\nneeds=['aa']",
            "circle: aa, bb",
        ),
        ("[[step]]\nname='A b'", "plain word"),
        ("[[step]]\nname='a'\nstage='x'\nargv=['y']", "not both"),
        (
            "[[step]]\nname='a'\nargv=['x']\ngate=['result.loss is fine']",
            "gate 'result.loss is fine' is not understood",
        ),
        ("[[step]]\nname='a'\nargv=['x']\ntimeout_s=-1", "timeout_s"),
        ("[[step]]\nname='a'\nargv=['x']\ntimeout_s=nan", "timeout_s"),
        pytest.param(
            "[[step]]\nname='a'\nargv=['x']\ntimeout_s=" + "9" * 400, "timeout_s", id="timeout-400-digits"
        ),
        ("[[step]]\nname='a'\nargv='rm -rf'", "step 'a': argv must be a list of words"),
        ("[[step]]\nname='a'\nargv=[]", "step 'a': argv must be a list of words"),
        ("[[step]]\nname='a'\nargv=['', 'x']", "step 'a': argv's first word is empty"),
        (
            "[[step]]\nname='a'\nargv=['x', '{b.result.x}']",
            "p.toml:3: step 'a': argv: {b.result.x} is not known",
        ),
        ("[[step]]\nname='a'\nargv=['x', '{nope}']", "p.toml:3: step 'a': argv: {nope} is not known"),
        (
            "[[step]]\nname='a'\nargv=['x', '--o={a.oot}/f']",
            "argv: {a.oot} is not known; did you mean {a.out}?",
        ),
        (
            "[[step]]\nname='a'\nargv=['x']\noutputs=['{uot}/f']",
            "p.toml:4: step 'a': outputs: {uot} is not known",
        ),
        ("[[step]]\nname='a'\nargv=['x']\nkind='daemon'", "kind"),
    ],
)
def test_a_wrong_file_is_told_with_line_and_key(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_chain(text, "p.toml")
    assert words in caught.value.message


def test_the_shipped_pipeline_is_valid_and_plans(
    own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    chain = parse_chain(runner.default_text(), "shipped")
    said: list[str] = []
    planned = {p.name: p for p in runner.open_run(config.load(), chain, tell=said.append).plan()}
    assert said == [], "every stage is there"
    words = [
        "serve",
        "prepare",
        "split",
        "bench",
        "extract",
        "check",
        "train",
        "losses",
        "serve-draft",
        "bench-draft",
        "compare",
    ]
    assert list(planned) == words
    assert planned["losses"].argv[:4] == (sys.executable, "-P", "-m", "k2tui.jobs.losses")
    assert planned["prepare"].error.startswith("its input prompts.jsonl is not there")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hello"}\n')
    planned = {p.name: p for p in runner.open_run(config.load(), chain, tell=said.append).plan()}
    assert [p.error for p in planned.values() if p.error and "torch" not in p.error] == []
    assert {p.action for p in planned.values()} == {"serve", "run"}
    assert not (own_home / "chains").exists(), "a dry run writes nothing"


def test_the_course_of_a_loss(tmp_path: Path) -> None:
    from k2tui.jobs.losses import losses_of, means, rows_of

    rows = [json.dumps({"kind": "step", "loss": 5 - n / 100}) for n in range(200)]
    found = losses_of(rows_of(['{"kind": "eval", "loss": 9}', "torn {", "[]", *rows]))
    assert len(found) == 200 and found[0] == 5
    row = means(found)
    assert len(row) == 40 and gate_unmet("falling result.losses", {"losses": row}) == ""
    assert means([3.0]) == [3.0] and means([]) == []
    assert (
        gate_unmet(
            "finite result.losses",
            {"losses": means(losses_of(rows_of(['{"kind": "step", "loss": NaN}', *rows])))},
        )
        != ""
    )


# ---- gates


@pytest.mark.parametrize(
    ("gate", "ok"),
    [
        ("result.rows >= 10", True),
        ("result.rows > 10", False),
        ("result.last < result.first", True),
        ("result.first < result.last", False),
        ("result.deep.x == 1", True),
        ("result.nan < 5", False),
        ("result.nan > 5", False),
        ("result.missing < 5", False),
        ("result.flag == 1", False),
        ("finite result.last", True),
        ("finite result.nan", False),
        ("finite result.losses", True),
        ("falling result.losses", True),
        ("falling result.rising", False),
        ("falling result.broken", False),
        ("falling result.rows", False),
        ("exists result.deep", True),
        ("exists result.none", False),
        ("true result.flag", True),
        ("false result.flag", False),
        ("false result.empty", True),
        ("false result.missing", True),
        ("false result.rows", False),
        ("result.losses.-1 < 2", True),
    ],
)
def test_gates(gate: str, ok: bool) -> None:
    result = {
        "rows": 10, "first": 5.0, "last": 2.5, "deep": {"x": 1}, "nan": math.nan, "flag": True, "empty": "",
        "losses": [5, 4, 4.5, 3, 2, 1.5], "rising": [1, 2, 3, 4], "broken": [3, math.inf, 1],
    }  # fmt: skip
    why = gate_unmet(gate, result)
    assert (why == "") == ok, why


@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.floats(), st.text("ab", max_size=2)),
        lambda c: st.dictionaries(st.sampled_from("abc"), c, max_size=3),
    )
)
def test_a_gate_answers_for_any_result(value: Any) -> None:
    result = value if isinstance(value, dict) else {"a": value}
    for gate in (
        "result.a > 0",
        "finite result.a",
        "falling result.a.b",
        "exists result.a.b.c",
        "true result.a",
    ):
        assert isinstance(gate_unmet(gate, result), str)


# ---- what may be skipped


def chain_of(*lines: str) -> pure.Chain:
    """ "a", "b<a", "s*<a": a step with argv, what it needs, * = a server."""
    text = ""
    for line in lines:
        name, _, needs = line.partition("<")
        kind = "server" if name.endswith("*") else "task"
        text += f"[[step]]\nname='{name.strip('*')}'\nargv=['x']\nkind='{kind}'\nneeds={[n for n in needs.split(',') if n]!r}\n"
    return parse_chain(text, "t")


def actions(chain: pure.Chain, valid: str = "", **kw: Any) -> str:
    prints = {s.name: f"fp-{s.name}" for s in chain.steps}
    records = {n: Record(f"fp-{n}") for n in valid}
    servers = {s.name for s in chain.steps if s.kind == "server"}
    return " ".join(
        f"{d.step.name}:{d.action}"
        for d in decide(chain, prints, records, servers=servers, outputs=lambda s, r: "", **kw)
    )


def test_valid_steps_are_skipped_and_servers_only_serve_who_runs() -> None:
    chain = chain_of("s*", "b<s", "p<b", "d*<p", "e<d", "c<b,e")
    assert actions(chain) == "s:serve b:run p:run d:serve e:run c:run"
    assert actions(chain, "bpec") == "s:leave b:skip p:skip d:leave e:skip c:skip"
    assert actions(chain, "bec") == "s:leave b:skip p:run d:serve e:run c:run", "through a server as well"
    assert actions(chain, "bp") == "s:leave b:skip p:skip d:serve e:run c:run"
    assert actions(chain, "bpec", start="e") == "s:leave b:skip p:skip d:serve e:run c:run"
    assert actions(chain, "bpec", start="d") == "s:leave b:skip p:skip d:serve e:run c:run"
    assert actions(chain, "bpec", only=["b"], force=True) == "s:serve b:run p:skip d:leave e:skip c:skip"
    with pytest.raises(UsageError, match="no step 'x'"):
        actions(chain, start="x")


@given(st.data())
def test_nothing_runs_after_a_skip_that_it_depends_on_and_reruns_spread(data: st.DataObject) -> None:
    names = "abcdef"[: data.draw(st.integers(1, 6))]
    lines = [
        n + "<" + ",".join(data.draw(st.sets(st.sampled_from(names[:i]))) if i else ())
        for i, n in enumerate(names)
    ]
    chain = chain_of(*lines)
    valid = "".join(data.draw(st.sets(st.sampled_from(names))))
    result = dict(pair.split(":") for pair in actions(chain, valid).split())
    for step in chain.steps:
        if step.name not in valid or any(result[n] == "run" for n in step.needs):
            assert result[step.name] == "run"
        else:
            assert result[step.name] == "skip"


def test_fingerprints_follow_parameters_inputs_and_what_is_needed() -> None:
    step = chain_of("a").steps[0]

    def of(params: dict[str, Any], facts: dict[str, Any], needed: dict[str, str]) -> str:
        return pure.fingerprint(pure.parts_of(step, params, facts, needed))

    base = of({}, {"in": "x"}, {"n": "1"})
    assert base == of({"port": 5, "host": "h"}, {"in": "x"}, {"n": "1"}), "where a server listens decides nothing"
    others = of({"p": 1}, {"in": "x"}, {"n": "1"}), of({}, {"in": "y"}, {"n": "1"}), of({}, {"in": "x"}, {"n": "2"})
    assert len({base, *others}) == 4


def test_what_changed_is_named() -> None:
    """Also through a server, and what is secret or long by its name only."""
    token = "hf_" + "a1" * 12

    def made(argv: str, lr: float, args: list[str], key: str, text: str) -> tuple[pure.Chain, dict[str, dict[str, Any]]]:
        chain = parse_chain(
            f"[[step]]\nname='s'\nkind='server'\nargv=['x', '--port', '{argv}']\n"
            f"[[step]]\nname='t'\nargv=['y']\nneeds=['s']\nparams={{lr={lr}, deep={{a=1}}}}\n"
            "[[step]]\nname='u'\nargv=['z']\nneeds=['t']\n",
            "t",
        )
        prints: dict[str, str] = {}
        out: dict[str, dict[str, Any]] = {}
        for step in chain.steps:
            facts = {"profile": {"args": args, "env": {"HF_TOKEN": key}}, "text": text} if step.name == "t" else {}
            parts = pure.parts_of(step, {}, facts, {n: prints[n] for n in step.needs})
            prints[step.name] = pure.fingerprint(parts)
            out[step.name] = {"print": prints[step.name], "parts": pure.kept_parts(parts)}
        return chain, out

    _, old = made("1", 0.1, ["--a", "1"], token, "x" * 500)
    records = {n: Record(f["print"], "j", parts=f["parts"]) for n, f in old.items()}
    assert token not in repr(records)

    def whys(*now: Any, **kw: Any) -> dict[str, str]:
        chain, new = made(*now)
        found = decide(
            chain,
            {n: f["print"] for n, f in new.items()},
            records,
            servers={"s"},
            outputs=lambda s, r: "",
            parts={n: f["parts"] for n, f in new.items()},
            **kw,
        )
        return {d.step.name: d.why for d in found}

    same = ["--a", "1"], token, "x" * 500
    assert whys("1", 0.1, *same)["t"] == "valid: j"
    told = whys("2", 0.1, *same)
    assert told["t"] == "its inputs changed: s: command: --port 1 -> 2" and told["u"] == "t runs again"
    assert whys("1", 0.2, *same)["t"] == "its inputs changed: lr 0.1 -> 0.2"
    assert whys("1", 0.2, *same, only=["u"])["u"] == "its inputs changed: t"
    told = whys("1", 0.1, ["--a", "2"], "other-secret", "y" * 500)
    assert told["t"] == "its inputs changed: profile.args: --a 1 -> 2, profile.env.HF_TOKEN, text"
    records = {n: Record(r.fingerprint, "j") for n, r in records.items()}
    assert whys("1", 0.2, *same)["t"] == "its inputs changed", "a record of before parts were kept"


def test_holes() -> None:
    known = {"a.out": "/x", "a.result.rows": [1, 2]}
    assert pure.fill({"p": "{a.out}/f", "q": "{a.result.rows}", "r": ["{a.out}"], "s": 3}, known) == {
        "p": "/x/f",
        "q": [1, 2],
        "r": ["/x"],
        "s": 3,
    }
    assert pure.fill("{b.out}", known, strict=False) == "{b.out}"
    with pytest.raises(UsageError, match=r"did you mean \{a.out\}"):
        pure.fill("{a.oot}", known)
    assert pure.fill("{a.result.rows.1}", known) == 2
    assert pure.fill("f'{n}' {x.y}", known) == "f'{n}' {x.y}"
    assert pure.fill('{"json": 1}', known) == '{"json": 1}'


def test_leaving_out_a_step_joins_its_neighbours() -> None:
    chain = pure.without(chain_of("a", "b<a", "c<b"), {"b"})
    assert [(s.name, s.needs) for s in chain.steps] == [("a", ()), ("c", ("a",))]


# ---- real runs


def steps(tmp_path: Path, body: str) -> Path:
    path = tmp_path / "pipeline.toml"
    path.write_text('name = "t"\n' + textwrap.dedent(body).replace("PYTHON", f'"{PY}", "-S", "-c"'))
    return path


RESULT = "import json, os; json.dump({}, open(os.environ['K2TUI_JOB_DIR'] + '/result.json', 'w'))"


def run(path: Path, **kw: Any) -> tuple[dict[str, Any], list[str]]:
    said: list[str] = []
    result = runner.open_run(config.load(), runner.load_chain(path), tell=said.append).run(**kw)
    return {n: s["action"] for n, s in result["steps"].items()}, said


THREE = """
[[step]]
name = "make"
argv = [PYTHON, "import os; open(os.environ['K2TUI_STEP_OUT'] + '/data', 'w').write(open('input').read())"]
inputs = ["input"]
outputs = ["{out}/data"]

[[step]]
name = "count"
argv = [PYTHON, "import json, os, sys; json.dump({'rows': len(open(sys.argv[1]).read())}, open(os.environ['K2TUI_JOB_DIR'] + '/result.json', 'w'))", "{make.out}/data"]
gate = ["result.rows >= 3"]

[[step]]
name = "tell"
argv = [PYTHON, "import sys; print('rows', sys.argv[1])", "{count.result.rows}"]
"""


def test_a_run_its_skips_and_what_makes_it_run_again(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = steps(tmp_path, THREE)
    (tmp_path / "input").write_text("abcd")
    assert run(path)[0] == {"make": "run", "count": "run", "tell": "run"}
    assert folder.log_path("tell").read_text() == "rows 4\n"
    assert run(path)[0] == {"make": "skip", "count": "skip", "tell": "skip"}
    (tmp_path / "input").write_text("abcd")
    assert run(path)[0]["make"] == "skip", "the content counts, not the time"
    assert run(path, start="count")[0] == {"make": "skip", "count": "run", "tell": "run"}
    (tmp_path / "input").write_text("abcde")
    told: list[tuple[int, int]] = []

    def progress(done: int, total: int, note: str, left_s: float | None) -> None:
        told.append((done, total))

    asked, said = run(path, to="count", progress=progress)
    assert asked == {"make": "run", "count": "run"} and "not asked for" not in "".join(said)
    assert any(t.startswith("make: starts as") and t.endswith("(its inputs changed: input input)") for t in said)
    assert any(t.startswith("count: starts as") and t.endswith("(make runs again)") for t in said)
    assert told[-1] == (2, 2), "what comes after the asked step is no part of the run"
    assert run(path)[0] == {"make": "skip", "count": "skip", "tell": "run"}
    made = next((home / "chains" / "t").glob("make-*/data"))
    for data in (home / "chains" / "t").glob("make-*/data"):
        data.write_text("tampered")
    assert made.exists()
    assert run(path)[0]["make"] == "run"
    path.write_text(path.read_text().replace("'rows', sys", "'ROWS', sys"))
    assert run(path)[0] == {"make": "skip", "count": "skip", "tell": "run"}


def test_where_a_profile_listens_makes_no_step_run_again(own_home: Path) -> None:
    loaded = config.load()
    chain = runner.load_chain("asset:demo")

    def opened(**changes: Any) -> runner.ChainRun:
        tiny = replace(loaded.profiles["tiny"], **changes)
        return runner.open_run(replace(loaded, profiles={**loaded.profiles, "tiny": tiny}), chain)

    assert opened(port=41499, host="0.0.0.0").prints == opened().prints
    assert not set(opened(args=("--x",)).prints.values()) & set(opened().prints.values())


def test_each_server_of_the_demos_pipeline_takes_the_given_port(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from k2tui.verbs.demo import ports_from

    held = {41400}
    monkeypatch.setattr(runner.doctor, "port_owner", lambda host, port: "x" if port in held else "")
    chain = runner.load_chain("asset:demo")
    settings = runner.parse_settings(ports_from(41400))
    assert set(settings) == {"serve", "extract", "serve-untrained", "serve-draft"} and ports_from(None) == []

    def ports() -> set[str]:
        planned = runner.open_run(config.load(), chain, settings=settings).plan()
        return {p.argv[p.argv.index("--port") + 1] for p in planned if p.name in settings}

    assert ports() == {"41401"}
    held.clear()
    assert ports() == {"41400"}


def test_a_gate_on_the_real_result_stops_the_chain(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = steps(tmp_path, THREE)
    (tmp_path / "input").write_text("ab")
    with pytest.raises(
        K2Error, match=r"count: gate 'result.rows >= 3' does not hold: result.rows is 2, not >= 3"
    ):
        run(path)
    assert [j.spec.stage for j in folder.list_jobs()] == ["count", "make"]
    (tmp_path / "input").write_text("abcdef")
    assert run(path)[0] == {"make": "run", "count": "run", "tell": "run"}


def test_a_failing_step_and_retries(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = steps(
        tmp_path,
        """
        [[step]]
        name = "shaky"
        argv = [PYTHON, "import os, sys; n = len(os.listdir('.')); open(f'try{n}', 'w'); sys.exit(n < 5)"]
        retries = 5
        [[step]]
        name = "bad"
        argv = [PYTHON, "raise SystemExit(9)"]
        [[step]]
        name = "never"
        argv = [PYTHON, "pass"]
        """,
    )
    with pytest.raises(K2Error, match="bad: failed: exit 9"):
        run(path)
    assert {j.spec.stage for j in folder.list_jobs()} == {"shaky", "bad"}


SERVER = """
[[step]]
name = "srv"
kind = "server"
argv = [PYTHON, "import time; open('up', 'w').write('x'); time.sleep(600)"]
gate = ["file:CWD/up"]
needs = []
[[step]]
name = "use"
argv = [PYTHON, "import time; time.sleep(0.2)"]
needs = ["srv"]
[[step]]
name = "later"
argv = [PYTHON, "import time; time.sleep(0.2)"]
needs = ["use"]
"""


def test_a_server_is_ready_before_it_is_used_and_stopped_when_nobody_needs_it(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = steps(tmp_path, SERVER.replace("CWD", str(tmp_path)))
    done, said = run(path)
    assert done == {"use": "run", "later": "run"}
    order = [s.split(":")[0] + ("!" if "ready" in s or "stopped" in s else "") for s in said]
    assert (
        order.index("srv!")
        < order.index("use")
        < order.index("srv!", order.index("use"))
        < order.index("later")
    )
    assert folder.get("srv").state is JobState.STOPPED and folder.get("srv").reason == "stopped by pipeline t"
    assert run(path)[0] == {"use": "skip", "later": "skip"}
    assert len([j for j in folder.list_jobs() if j.spec.stage == "srv"]) == 1, (
        "no server is started for nothing"
    )


def test_a_server_that_dies_fails_the_step(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    body = SERVER.replace("CWD", str(tmp_path)).replace(
        "time.sleep(600)", "time.sleep(0.6); raise SystemExit(5)"
    )
    path = steps(tmp_path, body.replace("import time; time.sleep(0.2)", "import time; time.sleep(600)"))
    with pytest.raises(K2Error, match="its server srv ended: exit 5"):
        run(path)
    assert folder.get("use").state is JobState.STOPPED


def test_the_command_line_runs_it_as_a_job_and_a_killed_runner_is_taken_over(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = steps(
        tmp_path,
        """
        [[step]]
        name = "slow"
        argv = [PYTHON, "import os, time\\nopen('runs', 'a').write('x')\\nwhile not os.path.exists('go'): time.sleep(0.05)"]
        [[step]]
        name = "last"
        argv = [PYTHON, "print('done')"]
        """,
    )
    assert cli.main(["pipeline", "plan", "--json"]) == 0
    assert [s["action"] for s in json.loads(capsys.readouterr().out)["steps"]] == ["run", "run"]
    assert cli.main(["pipeline", "run", "--detach"]) == 0
    first = capsys.readouterr().out.strip()
    until(lambda: (tmp_path / "runs").exists(), 20)
    job = folder.get(first)
    os.kill(job.pid or 0, signal.SIGKILL)
    assert folder.wait(first, 20).state is JobState.FAILED
    assert folder.get("slow").state is JobState.RUNNING, "the step is a job of its own"
    assert cli.main(["pipeline", "run", "--detach"]) == 0
    second = capsys.readouterr().out.strip()
    until(
        lambda: (
            "goes on as" in (folder.log_path(second).read_text() if folder.log_path(second).exists() else "")
        ),
        20,
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)  # not the pipeline's folder: the newest run is meant all the same
    assert cli.main(["pipeline", "report"]) == 1, "nothing of it is done yet"
    assert f"which runs now as {second}" in capsys.readouterr().err
    (tmp_path / "go").write_text("x")
    done = folder.wait(second, 30)
    assert done.state is JobState.SUCCEEDED, folder.log_path(second).read_text()
    assert (tmp_path / "runs").read_text() == "x", "nothing was started twice"
    assert done.result is not None and set(done.result["steps"]) == {"slow", "last"}
    path.unlink()
    assert cli.main(["pipeline", "report"]) == 0
    shown = capsys.readouterr()
    assert "# Pipeline t" in shown.out and "| slow |" in shown.out
    assert "pipeline t, the newest run" in shown.err


def test_stopping_the_runner_stops_its_step(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    steps(tmp_path, '[[step]]\nname = "slow"\nargv = [PYTHON, "import time; time.sleep(600)"]\n')
    assert cli.main(["pipeline", "run", "--detach"]) == 0
    job_id = capsys.readouterr().out.strip()
    until(lambda: any(j.spec.stage == "slow" and j.state is JobState.RUNNING for j in folder.list_jobs()), 20)
    assert folder.stop(job_id, wait_s=30).state is JobState.STOPPED
    assert folder.get("slow").state is JobState.STOPPED
    time.sleep(0.1)


def test_two_runs_at_once_do_not_mix(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = steps(tmp_path, '[[step]]\nname = "a"\nargv = [PYTHON, "pass"]\n')
    import fcntl

    root = home / "chains" / "t"
    root.mkdir(parents=True)
    with open(root / ".lock", "w") as fh:
        fcntl.flock(fh, fcntl.LOCK_EX)
        with pytest.raises(K2Error, match="running already"):
            run(path)


def test_bad_settings() -> None:
    assert runner.parse_settings(["a.b=1", "a.c=x y", 'd.e=["f"]']) == {
        "a": {"b": 1, "c": "x y"},
        "d": {"e": ["f"]},
    }
    with pytest.raises(UsageError, match=r"STEP\.PARAM"):
        runner.parse_settings(["nonsense"])


def test_a_long_step_tells_how_far_it_is_and_what_is_left(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "SAY_S", 0.0)
    monkeypatch.setattr(runner, "LEFT_S", 0.0)
    facts = "{'done': 3, 'total': 12, 'unit': 'steps', 'note': 'loss 2.5', 'eta_s': 40, 'at_s': time.time()}"
    report = f"json.dump({facts}, open(os.environ['K2TUI_JOB_DIR'] + '/progress.json', 'w'))"
    path = steps(
        tmp_path,
        f"""
        [[step]]
        name = "slow"
        argv = [PYTHON, "import json, os, time; {report}\\nwhile not os.path.exists('go'): time.sleep(0.05)"]
        [[step]]
        name = "last"
        argv = [PYTHON, "print('done')"]
        """,
    )

    def one_run(force: bool) -> tuple[list[str], list[tuple[str, float | None]]]:
        said: list[str] = []
        left: list[tuple[str, float | None]] = []

        def tell(text: str) -> None:
            said.append(text)
            if "3/12 steps" in text:
                (tmp_path / "go").write_text("x")

        chain = runner.open_run(config.load(), runner.load_chain(path), tell=tell)
        chain.run(force=force, progress=lambda done, total, note, left_s: left.append((note, left_s)))
        return said, left

    said, left = one_run(False)
    assert "slow: 3/12 steps (25%), 40 s left; loss 2.5" in said
    assert not any("has not run yet" in text for text in said)
    assert {s for _, s in left} == {None}, "the last step has never run: nobody knows how long it takes"
    (tmp_path / "go").unlink()
    record = json.loads((home / "chains" / "t" / "last.json").read_text())
    (home / "chains" / "t" / "last.json").write_text(json.dumps({**record, "took_s": 7.0}))
    said, left = one_run(True)
    assert ("slow", 47.0) in left, "its own 40 s and the 7 s that the last step took"


def test_braces_of_a_small_program_are_its_own() -> None:
    program = "print(f'{n} {x.y}')"
    chain = parse_chain(
        f"[[step]]\nname='a'\nargv=['python', '-c', \"{program}\", '{{out}}/x', '{{\"json\": 1}}']", "p.toml"
    )
    assert chain.steps[0].argv[2] == program


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("[[step]]\nname = 'a'\nstage = 'nothing'\n", "step 'a': unknown stage 'nothing'"),
        (
            "[[step]]\nname = 'a'\nstage = 'serve'\nparams = { profile = 'nothing' }\n",
            "step 'a': no profile 'nothing'",
        ),
        (
            "[[step]]\nname = 'a'\nargv = ['x']\ninputs = ['/dev/zero']\n",
            "step 'a': its input /dev/zero is no regular file",
        ),
        (
            "[[step]]\nname = 'a'\nargv = ['x']\ninputs = ['fifo']\n",
            "step 'a': its input fifo is no regular file",
        ),
    ],
)
def test_what_a_step_names_is_told_with_file_and_step(
    body: str, words: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    path = tmp_path / "p.toml"
    path.write_text(body)
    with pytest.raises(UsageError) as caught:
        runner.open_run(config.load(), runner.load_chain(path))
    assert caught.value.message.startswith(f"{path}: {words}")


def test_a_pipe_or_device_is_no_pipeline_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p.toml")
    for where in (tmp_path / "p.toml", Path("/dev/zero")):
        with pytest.raises(UsageError, match="no regular file"):
            runner.load_chain(where)
    assert runner.signature("/dev/zero") == "none: no regular file"
