"""Verbs that only read: they go on with a broken config and say so, and their JSON has its schema."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from k2tui.cli import main

LOG = Path(__file__).parent / "fixtures" / "sglang" / "0.5.23" / "llama-ready.log"
READERS = [
    (["status"], 0),
    (["jobs", "list"], 0),
    (["bench", "list"], 0),
    (["tune", "list"], 0),
    (["gpus"], None),  # 5 where there is no GPU
    (["diagnose", str(LOG)], 0),
    (["watch", str(LOG), "--once"], 0),
]


@pytest.mark.parametrize(("argv", "code"), READERS, ids=lambda v: v[0] if isinstance(v, list) else "")
def test_a_broken_config_is_one_line_and_no_other_code(argv, code, own_home, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    fine = main(argv)
    clean = capsys.readouterr()
    assert code is None or fine == code
    assert "warning" not in clean.err
    (own_home / "config.toml").write_text("default_profile = 'tiny'\nplam = 'x'\n")
    assert main(argv) == fine
    said = capsys.readouterr()
    lines = [line for line in said.err.splitlines() if "warning" in line]
    assert (
        len(lines) == 1 and f"{own_home}/config.toml:2: unknown key 'plam'; did you mean 'plan'?" in lines[0]
    )
    assert said.out.splitlines()[:1] == clean.out.splitlines()[:1]


def test_what_changes_something_is_refused_once(own_home, capsys):
    (own_home / "config.toml").write_text("plam = 'x'\n")
    assert main(["bench", "run", "--url", ""]) == 2
    assert "warning" not in capsys.readouterr().err


def test_every_json_has_its_schema(capsys, tmp_path):
    row = {
        "input_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1], "seq_len": 4, "n_prompt_tokens": 2, "n_response_tokens": 2,
        "has_reasoning": False, "finish_reason": "stop",
    }  # fmt: skip
    data = tmp_path / "d.jsonl"
    data.write_text(json.dumps(row) + "\n")
    for argv in (
        *(words for words, _ in READERS),
        ["data", "stats", str(data)],
        ["data", "inspect", str(data)],
        ["data", "check", str(data)],
        ["config", "profiles"],
        ["doctor"],
    ):
        capsys.readouterr()
        main([*argv, "--json"])
        assert json.loads(capsys.readouterr().out)["schema"] == 1, argv
