"""A tuning run on the embedded engine: a setting that helps, one that dies, one that hangs; killed in the middle and resumed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[2]


def k2(*argv: str, timeout: float = 200) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "k2tui", *argv], capture_output=True, text=True, timeout=timeout, cwd=ROOT)


@pytest.mark.timeout(300)
def test_tuning_survives_death_hang_and_kill(own_home: Path, own_port: int, tmp_path: Path) -> None:
    config = tmp_path / "k.toml"
    config.write_text(f'[profile.t]\ninherit = "tiny"\nport = {own_port}\nstall_s = 5\nargs = ["--max-running-requests", "1"]\n')
    space = tmp_path / "space.toml"
    space.write_text("""
profile = "t"
metric = "output_throughput"
repeats = 3
max_repeats = 3
concurrency = 4
num_prompts = 8
random_input_len = 16
random_output_len = 24
[[knob]]
flag = "--max-running-requests"
values = ["1", "4"]
[[knob]]
flag = "--bogus"
values = [true]
[[knob]]
flag = "--load-delay-s"
values = ["500"]
""")
    started = json.loads(k2("tune", "run", str(space), "--config", str(config), "--json").stdout)
    deadline = time.time() + 120
    while len(json.loads(k2("tune", "show", "--json").stdout)["trials"]) < 1:
        assert time.time() < deadline
        time.sleep(0.5)
    tuner = json.loads(k2("jobs", "show", started["job"], "--json").stdout)
    os.kill(tuner["pid"], signal.SIGKILL)  # in the middle of the second trial, its server running or about to
    k2("jobs", "wait", started["job"], "--timeout", "20")
    done = k2("tune", "resume", "--config", str(config), "--wait", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads(done.stdout)
    by_words = {t["words"] + ("#" if t["is_again"] else ""): t for t in facts["trials"]}
    again = {"max-running-requests=4#", "as the profile#"}
    assert set(by_words) == {"as the profile", "max-running-requests=4", "bogus", "load-delay-s=500", *again}
    assert facts["best"] == "max-running-requests=4" and facts["confirmed"] is True
    assert by_words["bogus"]["state"] == "refused" and "--bogus" in by_words["bogus"]["cause"]
    assert by_words["load-delay-s=500"]["state"] == "stalled" and "G01" in by_words["load-delay-s=500"]["cause"]
    assert len(by_words["as the profile"]["values"]) == 3
    assert by_words["max-running-requests=4"]["value"] > by_words["as the profile"]["value"]
    assert json.loads(k2("status", "--json").stdout)["jobs"] == []


@pytest.mark.timeout(300)
def test_a_hopeless_trial_ends_early_and_a_wide_interval_gets_more_passes(
    own_home: Path, own_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "k.toml"
    config.write_text(f'[profile.t]\ninherit = "tiny"\nport = {own_port}\n')
    space = tmp_path / "space.toml"
    space.write_text("""
profile = "t"
metric = "output_throughput"
repeats = 1
max_repeats = 2
min_effect = 0.0001
give_up_below = 0.9
concurrency = 8
num_prompts = 48
random_input_len = 16
random_output_len = 48
[[knob]]
flag = "--max-running-requests"
values = ["1"]
""")

    def now() -> dict[str, object]:
        try:
            return json.loads(next((own_home / "tune").glob("*/now.json")).read_bytes())
        except (StopIteration, OSError):
            return {}

    started = json.loads(k2("tune", "run", str(space), "--config", str(config), "--json").stdout)
    deadline = time.time() + 120
    while not (now().get("setting") and now().get("step") == "bench"):
        assert time.time() < deadline
        time.sleep(0.1)
    assert now()["ends_s"], "one trial has ended: the time left is known"
    tuner = json.loads(k2("jobs", "show", started["job"], "--json").stdout)
    os.kill(tuner["pid"], signal.SIGKILL)  # while the hopeless setting is measured: after the resume it is measured from the start
    k2("jobs", "wait", started["job"], "--timeout", "20")
    done = k2("tune", "resume", "--config", str(config), "--wait", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    base, slow, again = json.loads(done.stdout)["trials"]
    assert len(base["values"]) == len(again["values"]) == 2, "one pass does not tell 0.01 %"
    assert slow["state"] == "slower" and slow["values"] == [], "its first pass was ended, not kept as a figure"
    assert slow["cause"].startswith("0 of 1 pass: ") and "a pass of the baseline takes" in slow["cause"]
    rows = [r for r in json.loads(k2("bench", "list", "--json").stdout)["runs"] if "max-running" in r["label"]]
    assert rows[0]["is_partial"], "it cannot pass for a whole run"  # the killed one's own pass may have come to its end
    monkeypatch.setenv("COLUMNS", "100")
    shown = k2("tune", "show").stdout.splitlines()
    assert max(map(len, shown)) <= 100 and any("slower, 0 of 1 pass: " in line for line in shown)
    assert json.loads(k2("status", "--json").stdout)["jobs"] == []


def test_trials_run_beside_our_own_server_and_say_what_they_do(own_home: Path, own_port: int) -> None:
    """`up tiny` holds the profile's port (as the demo does): the trials take the next free one, and --wait is not silent."""
    (own_home / "config.toml").write_text(f"[profile.tiny]\nport = {own_port}\n")
    space = own_home / "s.toml"
    space.write_text("""
profile = "tiny"
repeats = 1
max_repeats = 1
baseline_every = 0
num_prompts = 2
random_input_len = 16
random_output_len = 8
[[knob]]
flag = "--chunked-prefill-size"
values = ["64"]
""")
    assert k2("up", "tiny").returncode == 0
    done = k2("tune", "run", str(space), "--wait", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads(done.stdout)
    assert [t["state"] for t in facts["trials"]] == ["ok"] * 3
    assert facts["run"] in done.stderr and "Ctrl-C leaves it running" in done.stderr
    assert "0/3 trials (0%); as the profile" in done.stderr and "chunked-prefill-size=64" in done.stderr
    (server,) = json.loads(k2("status", "--json").stdout)["servers"]
    assert server["state"] == "ready" and server["url"].endswith(f":{own_port}")
    assert k2("down").returncode == 0


def test_a_port_that_is_not_ours_is_refused_with_a_hint_that_works(own_home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        port = foreign.getsockname()[1]
        (own_home / "config.toml").write_text(f"[profile.tiny]\nport = {port}\n")
        run = k2("tune", "run", "asset:tune-tiny")
    assert run.returncode == 1 and f"{port} is held by" in run.stderr
    assert "set another port in [profile.tiny]" in run.stderr and "--port" not in run.stderr
