"""What a stage tells its job: progress and result, written whole into the job's folder.

A stage runs with K2TUI_JOB_DIR set by its keeper; without it both functions do nothing, so that a stage also runs by hand.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from k2tui.files import write_json

_last = 0.0


def job_dir() -> Path | None:
    folder = os.environ.get("K2TUI_JOB_DIR")
    return Path(folder) if folder else None


def report_progress(
    done: float,
    total: float | None = None,
    unit: str = "",
    note: str = "",
    eta_s: float | None = None,
    *,
    resumed: str = "",
    force: bool = False,
) -> None:
    """Write progress.json, at most twice a second (the last call of a loop should pass force=True).

    resumed: what an earlier run had left and this one goes on from ("row 812"); "" when it began from nothing.
    """
    global _last
    folder = job_dir()
    now = time.monotonic()
    if folder is None or (not force and now - _last < 0.5):
        return
    _last = now
    try:
        write_json(
            folder / "progress.json",
            {
                "done": done,
                "total": total,
                "unit": unit,
                "note": note,
                "eta_s": eta_s,
                "resumed": resumed,
                "at_s": time.time(),
            },
        )
    except OSError:
        pass  # progress is a courtesy: a full disk must not end the work


def report_result(result: Mapping[str, Any]) -> None:
    """Write result.json: the figures that later stages and gates read. Errors are raised: a result matters."""
    folder = job_dir()
    if folder is not None:
        write_json(folder / "result.json", dict(result))
