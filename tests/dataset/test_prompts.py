"""Prompts in every known shape, chosen and balanced; answers that are not worth learning from."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from k2tui.dataset.filters import FilterRules, is_degenerate, reason_to_drop
from k2tui.dataset.prompts import Prompt, read_prompts, select, to_prompt
from k2tui.errors import K2Error, UsageError


@pytest.mark.parametrize(
    ("raw", "roles"),
    [
        ({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]}, "system user"),
        ({"conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}, {"from": "human", "value": "v"}]}, "user assistant user"),
        ({"prompt": "u", "system": "s"}, "system user"),
        ({"instruction": "do", "input": "this", "output": "x"}, "user"),
        ({"question": "q", "answer": "a"}, "user"),
        ("plain text", "user"),
        ({"conversation": ["u", "a", "v"]}, "user assistant user"),
        ({"messages": json.dumps([{"role": "user", "content": "u"}]), "tools": '[{"type": "function"}]'}, "user"),
    ],
)
def test_every_known_shape(raw: Any, roles: str) -> None:
    prompt = to_prompt(raw, "f:1", "f")
    assert " ".join(m["role"] for m in prompt.messages) == roles


def test_tool_calls_and_tools_are_kept() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    raw = {
        "messages": [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "42"},
        ],
        "tools": [{"type": "function", "function": {"name": "f"}}],
    }
    prompt = to_prompt(raw, "f:1", "f")
    assert prompt.messages[1]["tool_calls"] == [call] and prompt.messages[-1]["role"] == "tool" and prompt.tools


@pytest.mark.parametrize("raw", [{"messages": [{"role": "king", "content": "x"}]}, {"foo": 1}, 7, {"messages": [{"role": "system", "content": "s"}]}])
def test_what_holds_no_prompt_is_named(raw: Any) -> None:
    with pytest.raises(K2Error, match="file:9"):
        to_prompt(raw, "file:9", "f")


def test_files(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "one"}\n\n{"prompt": "two"}\n')
    (tmp_path / "b.json").write_text('[{"prompt": "three"}]')
    (tmp_path / "c.txt").write_text("four\n")
    found = [p.messages[-1]["content"] for p in read_prompts(tmp_path / "a.jsonl")]
    assert found == ["one", "two"]
    assert len(list(read_prompts(tmp_path))) == 3
    (tmp_path / "d.jsonl").write_text('{"prompt": "x"}\nbroken\n')
    with pytest.raises(K2Error, match=r"d\.jsonl:2"):
        list(read_prompts(tmp_path / "d.jsonl"))
    with pytest.raises(UsageError):
        list(read_prompts(tmp_path / "e.doc"))


def test_parquet_and_datasets_folder(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    table = pa.table({"messages": [[{"role": "user", "content": "p"}], [{"role": "user", "content": "q"}]]})
    pq.write_table(table, tmp_path / "a.parquet")
    folder = tmp_path / "ds"
    folder.mkdir()
    with pa.OSFile(str(folder / "data-00000-of-00001.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as out:
        out.write_table(table)
    (folder / "dataset_info.json").write_text("{}")
    for path in (tmp_path / "a.parquet", folder):
        assert [p.messages[0]["content"] for p in read_prompts(path)] == ["p", "q"]


def test_without_pyarrow_the_hint_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(K2Error) as err:
        list(read_prompts(tmp_path / "a.parquet"))
    assert "pyarrow" in err.value.message and "[data]" in err.value.hint


def prompts(source: str, count: int) -> list[Prompt]:
    return [Prompt(({"role": "user", "content": f"{source} {i}"},), (), source) for i in range(count)]


def test_sources_take_turns_and_duplicates_go() -> None:
    found, left = select([*prompts("a", 50), *prompts("b", 3), *prompts("a", 2)], 10, balance=True, per_source=None, seed=1)
    assert [p.source for p in found[:6]] == ["a", "b"] * 3
    assert left["duplicate prompt"] == 2 and left["more than --count"] == 43
    again, _ = select([*prompts("a", 50), *prompts("b", 3)], 10, balance=True, per_source=None, seed=1)
    assert found == again
    few, left = select(prompts("a", 50), None, balance=False, per_source=7, seed=1)
    assert len(few) == 7 and left["more than --per-source"] == 43


def test_case_and_spacing_make_no_new_prompt() -> None:
    one = Prompt(({"role": "user", "content": "Write  a poem."},))
    assert one.key() == Prompt(({"role": "user", "content": "write a POEM."},)).key()
    assert one.key() != Prompt(({"role": "user", "content": "write a poem"},)).key()


RULES = FilterRules(max_seq_len=200)


@pytest.mark.parametrize(
    ("ids", "text", "finish", "told"),
    [
        (range(50), "fine", "stop", ""),
        (range(50), "fine", "length", "truncated"),
        (range(50), "fine", "abort", "aborted"),
        (range(2), "x", "stop", "too short"),
        ([1, 2, 3] * 30, "a b c", "stop", "degenerate repetition"),
        ([5] * 60, "....", "stop", "degenerate repetition"),
        (range(50), "I'm sorry, but I can't help with that.", "stop", "refusal"),
        (range(50), "<think>hm</think>\n\nI cannot assist with that request.", "stop", "refusal"),
        (range(50), "I can help: first, ...", "stop", ""),
    ],
)
def test_answers_that_teach_nothing(ids: Any, text: str, finish: str, told: str) -> None:
    assert reason_to_drop(RULES, 100, list(ids), text, finish) == told


def test_length_and_switches() -> None:
    assert reason_to_drop(RULES, 201, list(range(50)), "x", "stop") == "too long"
    loose = FilterRules(keep_truncated=True, keep_refusals=True)
    assert reason_to_drop(loose, 60, list(range(50)), "I cannot help with that", "length") == ""


def test_ordinary_text_and_a_list_are_no_loops() -> None:
    rng = random.Random(0)
    assert not is_degenerate([rng.randrange(300) for _ in range(500)])
    table = [t for i in range(40) for t in (7, 8, 100 + i, 200 + i, 9)]  # rows of a table share their frame
    assert not is_degenerate(table)
    assert is_degenerate([rng.randrange(300) for _ in range(100)] + [1, 2, 3, 4, 5] * 100)
