"""`watch --once` ends with the code of the state that it prints, as docs/cli.md says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from k2tui.cli import main

LOGS = Path(__file__).parent.parent / "fixtures" / "sglang" / "0.5.23"
BAR = "Loading safetensors checkpoint shards:  21% Completed | 21/99 [00:29<02:01,  1.55s/it]\n"


@pytest.mark.parametrize(("name", "code"), [("port-in-use.log", 1), ("llama-ready.log", 0)])
def test_a_log_gives_its_states_code(name: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(LOGS / name), "--once"]) == code
    assert capsys.readouterr().out.startswith("failed" if code else "ready")


def test_loading_is_not_ready_and_no_log_is_no_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "server.log"
    log.write_text("")
    assert main(["watch", str(log), "--once"]) == 4
    log.write_text(BAR)
    assert main(["watch", str(log), "--once"]) == 3
    assert "loading" in capsys.readouterr().out


def test_a_pid_without_a_log_says_so() -> None:
    """It writes to a pipe; its command line names a port on which nobody answers."""
    words = [sys.executable, "-S", "-c", "import time; time.sleep(60)", "--port", "9"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            run = subprocess.run(
                [sys.executable, "-m", "k2tui", "watch", "--once", str(process.pid)],
                capture_output=True,
                text=True,
                timeout=60,
            )
        finally:
            process.kill()
    assert run.returncode == 3 and f"pid {process.pid} writes to no file" in run.stdout, run.stdout
