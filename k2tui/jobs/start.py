"""How keepers are started. Knows their command line and what they must not inherit; nothing of what they do."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from k2tui.jobs import procs

NAME_TAKEN = 17  # exit code of a keeper whose job id belongs to another job already
PACKAGE_ROOT = Path(__file__).resolve().parents[2]


def keeper_argv(folder: Path) -> list[str]:
    """How a keeper is started (in `PACKAGE_ROOT`, so that the package is found). Without `site` it is smaller and starts sooner."""
    bare = ["-S"] if sys.platform.startswith("linux") else []
    return [sys.executable, *bare, "-m", "k2tui.jobs.keeper", str(folder)]


def start_adopter(folder: Path) -> None:
    """Give a job whose keeper is dead a new one; nothing happens when it has one. Returns once that is decided."""
    import subprocess

    own = {k: v for k, v in os.environ.items() if k not in (procs.JOB_VAR, "K2TUI_JOB_DIR")}
    subprocess.run(
        [*keeper_argv(folder), "--adopt"],
        cwd=PACKAGE_ROOT,
        env={**own, procs.KEEPER_VAR: folder.name},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        check=False,
    )
