"""Rows, files of rows, and what is asked of them: every bad line named, tens of thousands of rows at once, nothing half written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from k2tui.dataset import rows, stats
from k2tui.dataset.rows import KEYS, RowFile, make_row, parse_row
from k2tui.dataset.stats import check_rows, export, merge, split, summarize
from k2tui.errors import K2Error, UsageError
from k2tui.parsing import parse_json

ROOT = Path(__file__).resolve().parents[2]


def row(i: int, prompt: int = 5, response: int = 10, **changes: Any) -> str:
    made = make_row([i % 90 + 3] * prompt + list(range(response)), [0] * prompt + [1] * response, prompt, i % 2 == 0, "stop")
    raw = json.loads(made.to_line())
    raw.update(changes)
    return json.dumps(raw) + "\n"


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(lines))
    return path


def test_a_row_has_exactly_the_seven_keys_in_order() -> None:
    raw = json.loads(row(1))
    assert tuple(raw) == KEYS == ("input_ids", "loss_mask", "seq_len", "n_prompt_tokens", "n_response_tokens", "has_reasoning", "finish_reason")
    back = parse_row(row(1), "x")
    assert back.seq_len == 15 and back.n_response_tokens == 10


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"seq_len": 14}, "seq_len 14, but 15"),
        ({"loss_mask": [1]}, "a loss_mask of 1"),
        ({"loss_mask": [0] * 15}, "nothing to learn"),
        ({"loss_mask": [1] * 5 + [0] * 10}, "whole response"),
        ({"loss_mask": [2] * 15}, "other than 0 and 1"),
        ({"n_prompt_tokens": 4}, "is not seq_len"),
        ({"input_ids": ["a"] * 15}, "not a token id"),
        ({"input_ids": [True] * 15}, "not a token id"),
        ({"has_reasoning": 1}, "has_reasoning"),
        ({"finish_reason": 3}, "finish_reason"),
        ({"more": 1}, "unknown more"),
    ],
)
def test_every_fault_is_named_with_its_line(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    path = write(tmp_path / "d.jsonl", [row(1), row(2, **changes), row(3)])
    valid, problems, _ = check_rows(path)
    assert valid == 2 and len(problems) == 1
    assert problems[0].startswith(f"{path}:2: ") and told in problems[0]
    with pytest.raises(K2Error, match=r"d\.jsonl:2"):
        RowFile(path).row(1)


def test_ids_outside_the_vocabulary_twins_and_a_cut_end(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [row(1), row(1, response=12), row(2)[:-8]])
    valid, problems, twins = check_rows(path)
    assert valid == 2 and twins == 1
    assert any(":3: not JSON" in p for p in problems) and any("stopped in the middle" in p for p in problems)
    assert any("outside the vocabulary of 8" in p for p in check_rows(path, 8)[1])


def test_heads_are_read_without_the_numbers_and_whatever_the_order(tmp_path: Path) -> None:
    raw = json.loads(row(4))
    turned = json.dumps(dict(reversed(list(raw.items()))), separators=(",", ":")) + "\n"
    compact = json.dumps(raw, separators=(",", ":")) + "\n"
    file = RowFile(write(tmp_path / "d.jsonl", [row(4), turned, compact, "\n"]))
    assert len(file) == 3
    assert file.head(0) == file.head(1) == file.head(2)
    assert file.first_tokens(0, 6) == [7, 7, 7, 7, 7, 0]


def test_empty_missing_and_folder(tmp_path: Path) -> None:
    assert len(RowFile(write(tmp_path / "e.jsonl", []))) == 0
    assert summarize(tmp_path / "e.jsonl").rows == 0
    with pytest.raises(K2Error, match="No such file"):
        RowFile(tmp_path / "none")
    with pytest.raises(K2Error, match="folder"):
        RowFile(tmp_path)


def test_inspect_reads_the_ends_of_the_lines_and_parses_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes it quick on a file of gigabytes (tests/benchmarks/data_inspect.py)."""
    path = tmp_path / "d.jsonl"
    path.write_text(row(1, prompt=300, response=700) * 2000)
    parsed: list[int] = []
    for module in (rows, stats):
        monkeypatch.setattr(module, "parse_json", lambda line: parsed.append(len(line)) or parse_json(line))
    found = summarize(path)
    assert found.rows == 2000 and found.tokens == 2_000_000
    assert len(parsed) == 1


def test_summary_figures(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [row(i, response=10 + i) for i in range(100)])
    found = summarize(path)
    assert found.seq_len.low == 15 and found.seq_len.high == 114 and found.seq_len.p50 == 65
    assert found.with_reasoning == 50 and found.finish_reasons == {"stop": 100}
    assert sum(n for _, _, n in found.histogram) == 100 and found.keys == KEYS


def test_merge_keeps_one_row_a_prompt_and_never_its_own_source(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", [row(i) for i in range(5)])
    b = write(tmp_path / "b.jsonl", [row(i) for i in range(3, 9)])
    assert merge([a, b], tmp_path / "m.jsonl") == (9, 2)
    assert len(RowFile(tmp_path / "m.jsonl")) == 9
    with pytest.raises(UsageError):
        merge([a, b], a)
    assert len(RowFile(a)) == 5
    write(tmp_path / "bad.jsonl", [row(1), "{}\n"])
    with pytest.raises(K2Error, match=r"bad\.jsonl:2"):
        merge([a, tmp_path / "bad.jsonl"], tmp_path / "n.jsonl")
    assert not (tmp_path / "n.jsonl").exists() and not list(tmp_path.glob(".*partial"))


def test_split_is_stable_when_the_file_grows(tmp_path: Path) -> None:
    small = write(tmp_path / "s.jsonl", [row(i) for i in range(60)])
    train, held = split(small, tmp_path / "t1", tmp_path / "e1", 0.3, 1)
    assert train + held == 60 and 8 < held < 30
    big = write(tmp_path / "b.jsonl", [row(i) for i in range(90)])
    split(big, tmp_path / "t2", tmp_path / "e2", 0.3, 1)
    assert set((tmp_path / "e1").read_text().splitlines()) <= set((tmp_path / "e2").read_text().splitlines())
    assert not set((tmp_path / "t2").read_text().splitlines()) & set((tmp_path / "e2").read_text().splitlines())


def test_export(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [row(i) for i in range(3)])
    assert export(path, tmp_path / "o.csv", "csv") == 3
    assert (tmp_path / "o.csv").read_text().splitlines()[1] == "0,15,5,10,true,stop"
    assert export(path, tmp_path / "o.jsonl", "jsonl") == 3
    assert set(json.loads((tmp_path / "o.jsonl").read_text().splitlines()[0])) == {"input_ids", "loss_mask"}
    assert export(path, tmp_path / "o.txt", "text", lambda ids: " ".join(map(str, ids))) == 3


def test_the_verb(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [row(i) for i in range(3)])
    argv = [sys.executable, "-m", "k2tui", "data"]
    out = subprocess.run([*argv, "inspect", str(path)], capture_output=True, text=True, cwd=ROOT, env={**os.environ})
    assert out.returncode == 0 and "3 rows" in out.stdout and "first" in out.stdout
    write(path, [row(1), "nonsense\n"])
    out = subprocess.run([*argv, "check", str(path)], capture_output=True, text=True, cwd=ROOT)
    assert out.returncode == 1 and ":2: not JSON" in out.stdout
    out = subprocess.run([*argv, "inspect", str(tmp_path / "none")], capture_output=True, text=True, cwd=ROOT)
    assert out.returncode == 1 and "Traceback" not in out.stderr
