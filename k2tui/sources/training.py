"""Reads the metrics.jsonl of the newest training job as it grows. Knows the job, no torch and no screen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from k2tui.core.job import Job
from k2tui.core.training import TrainFold, TrainView

_READ_B = 4 << 20  # at most this much a look


class TrainingReader:
    """look(jobs) -> the newest training's view; None while there is none."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._fold = TrainFold()
        self._offset = 0
        self._rest = b""

    def look(self, jobs: Sequence[Job]) -> TrainView | None:
        """jobs: newest first. A running training comes before one that has ended."""
        mine = [j for j in jobs if j.spec.stage == "train" and j.spec.params.get("out")]
        job = next((j for j in mine if not j.state.is_final), mine[0] if mine else None)
        if job is None:
            return None
        path = Path(job.spec.cwd or ".") / str(job.spec.params["out"]) / "metrics.jsonl"
        if path != self._path:
            self._path = path
            self._restart()
        self._read(path)
        progress = job.progress
        total = int(progress.total) if progress is not None and progress.total else None
        note = progress.note if progress is not None else ""
        return self._fold.view(
            job.spec.id, job.spec.title, is_running=not job.state.is_final, total=total, note=note
        )

    def _restart(self) -> None:
        self._fold, self._offset, self._rest = TrainFold(), 0, b""

    def _read(self, path: Path) -> None:
        try:
            with path.open("rb") as fh:
                size = fh.seek(0, 2)
                if size < self._offset:  # cut back by a run that was resumed
                    self._restart()
                fh.seek(self._offset)
                data = fh.read(_READ_B)
        except OSError:
            return  # not there yet
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._fold.feed(line.decode("utf-8", "replace"))
