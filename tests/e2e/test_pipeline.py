"""The whole chain in real processes, from an empty folder: a draft is trained that the engine accepts, and the report says so."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("torch")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]

SMALL = (
    "serve.args=[]", "prepare.count=120", "prepare.max_new_tokens=40", "bench.num_prompts=6", "bench-untrained.num_prompts=3", "bench-draft.num_prompts=8",
    "bench.concurrency=[1]", "bench-draft.concurrency=[1]", "train.epochs=10", "train.eval_every=0", "train.chains=4",
)  # fmt: skip


def k2(where: Path, *argv: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "k2tui", *argv], capture_output=True, text=True, timeout=timeout, cwd=where
    )


def test_the_demo_pipeline_trains_a_draft_that_is_accepted(
    own_home: Path,
    own_port: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    still_there: Callable[[], list[psutil.Process]],
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    config = tmp_path / "k2tui.toml"
    config.write_text(f'[profile.tiny]\nengine = "local"\nmodel = "asset:tiny-target"\nport = {own_port}\n')
    monkeypatch.setenv("K2TUI_CONFIG", str(config))
    settings = [word for pair in SMALL for word in ("--set", pair)]
    order = ("pipeline", "run", "--file", "asset:demo")

    # piece by piece: the first three steps, then all; nothing is done twice
    first = k2(empty, *order, "--here", "--to", "split", *settings, timeout=300)
    assert first.returncode == 0, first.stdout + first.stderr
    run = k2(empty, *order, "--here", "--json", *settings, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
    told = json.loads(run.stdout)
    actions = {name: step["action"] for name, step in told["steps"].items()}
    assert [n for n, a in actions.items() if a == "skip"] == ["prepare", "split"]
    report = told["report"]
    outcome, steps = report["outcome"], {s["step"]: s for s in report["steps"]}
    assert report["complete"] is True

    assert outcome["untrained_accept_length"] < 1.1 and outcome["expected_untrained"] < 1.05
    assert outcome["accept_length"] > 1.3 and outcome["expected_accept_length"] > 1.3
    assert outcome["chain_accept_length"] > 1.2 and outcome["speedup"] > 0
    assert steps["serve"]["figures"]["shards_done"] == steps["serve"]["figures"]["shards_total"] == 64
    assert steps["serve"]["figures"]["ready_s"] > 0
    assert (
        steps["split"]["figures"]["train"] + steps["split"]["figures"]["eval"]
        == steps["prepare"]["figures"]["rows"]
    )
    assert steps["extract"]["figures"]["samples"] == steps["split"]["figures"]["train"]
    assert steps["extract"]["figures"]["proofs"]["head"]["ok"] is True
    assert steps["losses"]["figures"]["last"] < steps["losses"]["figures"]["first"]
    lengths = [e["accept_length"] for e in steps["losses"]["figures"]["evals"]]
    assert lengths[0] < 1.05 < 1.3 < max(lengths)

    shown = k2(empty, "pipeline", "report", "--file", "asset:demo", *settings)
    assert (
        shown.returncode == 0 and f"{outcome['accept_length']:.2f} tokens on held-out prompts" in shown.stdout
    )
    plan: Any = json.loads(k2(empty, "pipeline", "plan", "--file", "asset:demo", "--json", *settings).stdout)
    assert {s["action"] for s in plan["steps"]} == {"skip", "leave"}, "a second run would do nothing"
    folder = own_home / "chains" / "demo"
    assert json.loads((folder / "report.json").read_text())["outcome"] == outcome
    assert "| bench-draft |" in (folder / "report.md").read_text()
    deadline = time.time() + 20
    while time.time() < deadline and still_there():
        time.sleep(0.2)
    assert still_there() == [], "no server is left"
