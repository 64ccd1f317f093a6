"""A retry goes on after what the earlier run left: real jobs, stopped in the middle, and the words that would throw it away."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from k2tui import orders, stages
from k2tui.core.job import JobState
from k2tui.jobs import folder

from .world import until

Submit = Callable[..., str]

# writes rows 0, 1, 2, ... of 60; what is in its file is kept
ROWS = """
import sys, time
from pathlib import Path
from k2tui.jobs.report import report_progress, report_result
path = Path(sys.argv[1])
had = len(path.read_text().splitlines()) if path.exists() else 0
with path.open("a") as out:
    for row in range(had, 60):
        out.write(f"{row}\\n")
        out.flush()
        report_progress(row + 1, 60, "rows", resumed=f"row {had}" if had else "", force=True)
        time.sleep(0.03)
report_result({"rows": 60, "had": had})
"""
SAY = (sys.executable, "-S", "-c", "import sys; print(sys.argv[1:]); sys.exit(3)")


def cli(*words: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "k2tui", *words], capture_output=True, text=True, check=True, timeout=60
    ).stdout


def test_a_stopped_stage_goes_on_where_it_was_and_says_so(submit: Submit, tmp_path: Path) -> None:
    out = tmp_path / "rows"
    job_id = submit(
        "", argv=(sys.executable, "-c", ROWS, str(out)), stage="prepare", params={"out": str(out)}
    )
    until(lambda: out.exists() and len(out.read_text().splitlines()) > 5)
    folder.stop(job_id, wait_s=30)
    left = len(out.read_text().splitlines())
    assert left < 60
    shown = cli("jobs", "show", job_id)
    assert f"goes on after rows that are in its file: k2tui jobs retry {job_id}" in shown
    assert "\nresumed " not in shown
    again = cli("jobs", "retry", job_id).strip()
    until(lambda: (job := folder.get(again)).progress is not None and job.progress.done > left)
    assert f"resumed from row {left}" in cli("jobs", "list") or folder.get(again).state.is_final
    job = folder.wait(again, 60)
    assert job.state is JobState.SUCCEEDED and job.result == {"rows": 60, "had": left}
    assert out.read_text().split() == [str(n) for n in range(60)]
    assert f"\nresumed        from row {left}" in cli("jobs", "show", again)
    facts = json.loads(cli("jobs", "show", again, "--json"))
    assert facts["progress"]["resumed"] == f"row {left}" and facts["retry_of"] == job_id


@pytest.mark.parametrize("exact", [False, True])
def test_words_that_begin_from_nothing_are_left_out_unless_asked_for(submit: Submit, exact: bool) -> None:
    job_id = submit("", argv=(*SAY, "--no-resume", "--seed"), stage="train", params={"out": "x"})
    folder.wait(job_id, 20)
    again = orders.retry_job(job_id, exact=exact)
    folder.wait(again, 20)
    want = "['--no-resume', '--seed']\n" if exact else "['--seed']\n"
    assert folder.log_path(again).read_text() == want


def test_a_command_of_ones_own_is_repeated_to_the_letter(submit: Submit) -> None:
    job_id = submit("", argv=(*SAY, "--no-resume"), stage="train")
    folder.wait(job_id, 20)
    again = orders.retry_job(job_id)
    folder.wait(again, 20)
    assert folder.log_path(again).read_text() == "['--no-resume']\n"
    assert "begins from nothing" in cli("jobs", "show", again)


def test_the_stages_that_resume_say_so() -> None:
    assert {n for n in stages.names() if stages.get(n).resumes} >= {"prepare", "extract", "train", "tune"}
    for name in stages.names():
        assert not stages.get(name).fresh or stages.get(name).resumes, name
