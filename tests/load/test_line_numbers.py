"""A huge log is read from its newest start on; the line numbers are those of the file all the same."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import pytest

from k2tui.servers import Follower, Target, look_once
from k2tui.sources import logindex
from k2tui.verbs import diagnose

FIXTURES = Path(__file__).parent.parent / "fixtures"
FAILED = (FIXTURES / "sglang/0.5.23/port-in-use.log").read_bytes()
NOISE = b"[2026-11-29 18:10:00 TP0] Decode batch, #running-req: 3, #token: 21, accept len: 1.93, gen throughput (token/s): 3.12, #queue-req: 0\n"
NOW = 1_796_000_000.0


@pytest.fixture
def big(tmp_path, monkeypatch) -> tuple[Path, int]:
    """A log whose newest start is read from its middle on; the number of its proving line."""
    monkeypatch.setattr(logindex, "_WHOLE_B", 100_000)
    path = tmp_path / "big.log"
    before = (FIXTURES / "sglang/0.5.23/llama-ready.log").read_bytes() + NOISE * 20_000
    path.write_bytes(before + FAILED)
    inside = next(n for n, line in enumerate(FAILED.split(b"\n"), 1) if b"Errno 98" in line)
    assert logindex.newest_start_at(path) > 1_000_000
    return path, before.count(b"\n") + inside


def test_diagnose_numbers_lines_as_in_the_file(big, capsys):
    path, number = big
    diagnose.run(argparse.Namespace(log=str(path), json=True, context=None, all=False))
    got = json.loads(capsys.readouterr().out)
    assert (got["root_cause"], got["proof_line_no"]) == ("port_in_use", number)
    assert path.read_bytes().split(b"\n")[number - 1].decode() == got["proof_line"]


def test_one_look_numbers_lines_as_in_the_file(big):
    path, number = big
    view = look_once(Target(key="x", title="x", log=path), NOW, ask=False)
    assert (view.load.root_cause, view.load.proof_line_no) == ("port_in_use", number)


def test_a_number_that_is_not_known_yet_is_not_told(big, monkeypatch):
    path, number = big
    monkeypatch.setattr("k2tui.servers._COUNT_B", 500_000)
    follower = Follower(Target(key="x", title="x", log=path))
    follower.step(NOW)
    told = [follower.view(NOW, None).load.proof_line_no]
    while told[-1] is None and len(told) < 50:
        follower.step(NOW)
        told.append(follower.view(NOW, None).load.proof_line_no)
    assert told[0] is None and told[-1] == number
    path.write_bytes(FAILED)  # `> log` and a new start: another file's lines
    while follower.step(NOW):
        pass
    load = follower.view(NOW, None).load
    assert load.proof_line_no is not None
    assert FAILED.split(b"\n")[load.proof_line_no - 1].decode() == load.proof_line
    follower.close()


def test_a_log_put_in_place_of_another_counts_from_one(tmp_path):
    path = tmp_path / "a.log"
    path.write_bytes(b"[2026-11-29 18:10:00] hello\n" * 50)
    follower = Follower(Target(key="x", title="x", log=path))
    follower.step(NOW)
    shutil.copy(FIXTURES / "sglang/0.5.23/port-in-use.log", tmp_path / "b.log")
    (tmp_path / "b.log").replace(path)
    while follower.step(NOW):
        pass
    load = follower.view(NOW, None).load
    assert load.proof_line_no is not None
    assert FAILED.split(b"\n")[load.proof_line_no - 1].decode() == load.proof_line
    follower.close()
