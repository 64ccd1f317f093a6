"""Plans in bad places: a full or read-only disk, a pipe in the way."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from k2tui.errors import K2Error
from k2tui.sources.plan import PlanFile

DEFAULT = json.dumps([{"id": "serve", "content": "Serve", "status": "pending"}]) + "\n"


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    point = tmp_path / "small"
    point.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(point)], capture_output=True
        ).returncode
    ):
        pytest.skip("a tmpfs cannot be mounted here")
    yield point
    subprocess.run(["umount", str(point)], check=True)


def ids(plan: PlanFile) -> list[str]:
    plan.poll()
    assert plan.board.error == ""
    return [t.id for t in plan.board.tasks]


def test_a_full_disk_leaves_no_empty_plan(small: Path) -> None:
    filler = small / "filler"
    with open(filler, "ab", buffering=0) as fh:
        try:
            while fh.write(b"x" * 4096):
                pass
        except OSError:
            pass
    plan = PlanFile(small / "plan.json", default_text=lambda: DEFAULT)
    assert not (small / "plan.json").exists() and os.listdir(small) == ["filler"]
    assert ids(plan) == ["serve"], "shown from memory"
    with pytest.raises(K2Error, match="No space left"):
        plan.set_task("serve", status="completed")
    filler.unlink()
    plan.set_task("serve", status="completed")
    assert json.loads((small / "plan.json").read_text())[0]["status"] == "completed"
    assert ids(PlanFile(small / "plan.json", default_text=lambda: DEFAULT)) == ["serve"]


def test_an_empty_default_plan_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.touch()
    assert ids(PlanFile(path, default_text=lambda: DEFAULT)) == ["serve"]
    assert path.read_text() == DEFAULT and not list(tmp_path.glob(".plan*"))
    path.write_text("[]")
    assert ids(PlanFile(path, default_text=lambda: DEFAULT)) == [], "a plan that somebody emptied stays"


def test_a_pipe_is_refused_and_a_good_file_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    os.mkfifo(path)
    plan = PlanFile(path, default_text=lambda: DEFAULT)
    plan.poll()
    assert "no regular file" in plan.board.error
    with pytest.raises(K2Error, match="no regular file"):
        plan.add_task("x")
    assert path.is_fifo()
    path.unlink()
    path.write_text(DEFAULT)
    assert ids(plan) == ["serve"]
