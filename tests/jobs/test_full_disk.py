"""A real full disk: a small tmpfs, mounted for the test."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from k2tui.core import journal
from k2tui.core.job import JobSpec, JobState
from k2tui.errors import K2Error
from k2tui.jobs import folder
from k2tui.jobs.writer import Journal

from .world import running, until


@pytest.fixture
def small(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    point = tmp_path / "small"
    point.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(point)], capture_output=True
    ).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    monkeypatch.setenv("K2TUI_HOME", str(point))
    yield point
    until(lambda: subprocess.run(["umount", str(point)], capture_output=True).returncode == 0, 20)


def fill(point: Path) -> Path:
    path = point / "filler"
    with open(path, "ab", buffering=0) as fh:
        try:
            while fh.write(b"x" * 4096):
                pass
        except OSError:
            pass
    return path


def spec(code: str) -> JobSpec:
    return JobSpec(
        id="", stage="t", title="", argv=(sys.executable, "-S", "-c", code), cwd="/tmp", grace_s=1.0
    )


def test_the_end_is_written_though_the_disk_is_full(small: Path) -> None:
    flag = small.parent / "go"
    job_id = folder.submit(
        spec(
            f"import os, time\nwhile not os.path.exists({str(flag)!r}): time.sleep(0.05)\nraise SystemExit(5)"
        )
    )
    running(job_id)
    fill(small)
    flag.write_text("x")
    job = folder.wait(job_id, 20)
    assert job.state is JobState.FAILED and job.exit_code == 5 and "disk full" in job.reason


def test_lines_wait_for_room_in_order_and_none_is_torn(small: Path) -> None:
    writer = Journal(small)
    writer.load_ballast()
    filler = fill(small)
    written = [writer.add("note", text="x" * 3000, n=n) for n in range(40)]
    assert written[0] and not written[-1], "the ballast carries some lines, then they wait"
    events, bad = journal.parse((small / "journal.jsonl").read_bytes())
    assert bad == 0 and [e["n"] for e in events] == list(range(written.index(False)))
    assert (small / "journal.jsonl").read_bytes().endswith(b"\n"), "no half line lies there"
    assert not writer.flush()
    filler.unlink()
    assert writer.flush()
    events, bad = journal.parse((small / "journal.jsonl").read_bytes())
    assert bad == 0 and [e["n"] for e in events] == list(range(40))
    writer.close()


def test_nothing_is_started_on_a_full_disk(small: Path) -> None:
    folder.wait(folder.submit(spec("pass")), 20)
    fill(small)
    marker = small.parent / "ran"
    with pytest.raises(K2Error, match=r"No space left|disk"):
        folder.submit(spec(f"open({str(marker)!r}, 'w')"))
    assert len(folder.list_jobs()) == 1 and not marker.exists()
    assert not [p for p in (small / "jobs").iterdir() if p.name.startswith(".new")]


def test_a_stop_reaches_a_job_on_a_full_disk(small: Path) -> None:
    job_id = folder.submit(spec("import time; time.sleep(600)"))
    running(job_id)
    fill(small)
    assert folder.stop(job_id, wait_s=20).state is JobState.STOPPED


def test_work_that_fills_the_disk_says_so(small: Path) -> None:
    job_id = folder.submit(spec("while True: print('x' * 10000)"))
    job = folder.wait(job_id, 30)
    assert job.state is JobState.FAILED and "disk full" in job.reason
