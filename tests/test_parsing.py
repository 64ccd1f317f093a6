"""Texts that keep to the grammar and are beyond what Python reads: one error each, with its line, in every reader."""

from __future__ import annotations

from pathlib import Path

import pytest

from k2tui import checkpoint, cli
from k2tui.core import journal
from k2tui.core.training import TrainFold
from k2tui.dataset.prompts import to_prompt
from k2tui.dataset.rows import make_row
from k2tui.errors import K2Error, UsageError
from k2tui.jobs.losses import rows_of
from k2tui.parsing import ParseError, parse_json, parse_toml
from k2tui.sources.plan import PlanFile
from k2tui.tune.folder import TuneFolder
from k2tui.verbs.diagnose import read_context

LONG = "9" * 5000
DEEP = "[" * 5000 + "]" * 5000


@pytest.mark.parametrize("value", [LONG, DEEP], ids=["long", "deep"])
def test_json_and_toml_tell_the_line(value: str) -> None:
    with pytest.raises(ParseError) as told:
        parse_json(f'{{"a": 1,\n"b": {value}}}')
    assert told.value.line == 2
    with pytest.raises(ParseError) as told:
        parse_toml(f"a = 1\n\nb = {value}\n".encode())
    assert told.value.at("x.toml").startswith("x.toml line 3: ")


@pytest.mark.parametrize(
    ("read", "text", "line", "words"),
    [
        (parse_json, b"[1,\n\xff]", 2, "not UTF-8"),
        (parse_json, '[1,\n"' + "[" * 9000 + '", x]', 2, "not valid JSON"),
        (parse_toml, "a = 1\nb = = 2\n", 2, "not valid TOML"),
        (parse_toml, "a = 1\nb = 0x" + "f" * 5000, 2, "more than 4,300 digits"),
    ],
    ids=["bytes", "json", "toml", "bits"],
)
def test_what_else_is_wrong(read: object, text: str | bytes, line: int, words: str) -> None:
    assert callable(read)
    with pytest.raises(ParseError, match=words) as told:
        read(text)
    assert told.value.line == line


@pytest.mark.parametrize("value", [LONG, DEEP], ids=["long", "deep"])
def test_readers_answer_in_words(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("K2TUI_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    toml, plan, rows = tmp_path / "x.toml", tmp_path / "p.json", tmp_path / "d.jsonl"
    toml.write_text(f"a = 1\nb = {value}\n")
    plan.write_text(f'[{{"id": "a", "content": "x"}},\n{{"id": {value}}}]')
    rows.write_text(f'{{"input_ids": {value}}}\n')
    for argv, code, place in (
        (["pipeline", "plan", "--file", str(toml)], 2, f"{toml} line 2"),
        (["tune", "run", str(toml)], 2, f"{toml} line 2"),
        (["board", "list", "--plan", str(toml)], 2, f"{toml} line 2"),
        (["board", "list", "--plan", str(plan)], 2, f"{plan} line 2"),
        (["board", "add", "new", "--plan", str(plan)], 2, f"{plan} line 2"),
        (["data", "check", str(rows)], 1, f"{rows}:1: not JSON"),
        (["data", "inspect", str(rows)], 1, f"{rows}:1: not JSON"),
    ):
        assert cli.main(argv) == code, argv
        shown = capsys.readouterr()
        assert place in shown.out + shown.err, argv
        assert "Traceback" not in shown.err, argv
    monkeypatch.setenv("K2TUI_CONFIG", str(toml))
    assert cli.main(["config", "show"]) == 2 and f"{toml} line 2" in capsys.readouterr().err
    mirror = PlanFile(plan)
    assert mirror.poll() and "line 2" in mirror.board.error
    (tmp_path / "trials.jsonl").write_text(
        f'{{"setting": {value}}}\n{{"setting": [], "at_s": 1{"0" * 400}}}\n{{"setting": []}}\n'
    )
    (tmp_path / "now.json").write_text(f'{{"setting": {value}}}')
    run = TuneFolder(tmp_path)
    assert len(run.trials()) == 1 and run.now() == (None, "")


@pytest.mark.parametrize("value", [LONG, DEEP], ids=["long", "deep"])
def test_readers_of_our_own_files_pass_over_what_python_cannot_read(value: str, tmp_path: Path) -> None:
    line = f'{{"step": 1, "loss": {value}}}'
    TrainFold().feed(line)
    assert rows_of([line, '{"step": 2}']) == [{"step": 2}]
    assert journal.parse(f'{line}\n{{"event": "note"}}\n'.encode()) == ([{"event": "note"}], 1)
    context, model = tmp_path / "facts.json", tmp_path / "config.json"
    context.write_text(f'{{"alive": true,\n"silence_s": {value}}}')
    with pytest.raises(UsageError, match=r"facts\.json line 2: "):
        read_context(str(context))
    model.write_text(line)
    with pytest.raises(K2Error, match=r"config\.json"):
        checkpoint.inspect(tmp_path)
    for key, text in (("messages", value), ("tools", value)):
        row = {"messages": [{"role": "user", "content": "x"}], key: f"[{text}]"}
        with pytest.raises(K2Error, match="rows:1: "):
            to_prompt(row, "rows:1", "")


def test_numbers_that_no_float_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("K2TUI_HOME", str(tmp_path / "home"))
    path = tmp_path / "x.toml"
    path.write_text("[ui]\nrefresh_s = " + "9" * 400)
    monkeypatch.setenv("K2TUI_CONFIG", str(path))
    assert cli.main(["config", "show"]) == 2
    assert "'ui.refresh_s' is too large a number" in capsys.readouterr().err
    monkeypatch.delenv("K2TUI_CONFIG")
    path.write_text("profile = 'x'\nbench_timeout_s = " + "9" * 400)
    assert cli.main(["tune", "run", str(path)]) == 2
    assert f"{path}:2: bench_timeout_s: must be a number of seconds" in capsys.readouterr().err


def test_a_loss_mask_of_lists_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "d.jsonl"
    row = make_row([1, 2], [0, 1], 1, False, None).to_line()
    path.write_text(row.replace("[0, 1]", "[0, [1]]"))
    assert cli.main(["data", "check", str(path)]) == 1
    assert "loss_mask holds something other than 0 and 1" in capsys.readouterr().out
