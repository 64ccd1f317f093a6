"""Earlier starts of this host on disk: one JSON line each, appended under a lock, corrupt lines skipped.

Knows records, not engines. `StartRecorder` watches one start and writes it down when it became ready.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

from k2tui import paths
from k2tui.core.eta import CHECKPOINTS, LearnedEta, StartRecord
from k2tui.core.load import LoadView, Phase, State
from k2tui.core.tracker import LoadTracker
from k2tui.regular import open_regular

READ_B = 4 << 20  # newest part of the file that is read: some thousands of starts
KEEP_B = 16 << 20  # beyond this size the older half is dropped


def read(path: Path | None = None) -> list[StartRecord]:
    """Every whole record, oldest first. A missing file, torn lines and unknown fields are no errors."""
    where = path or paths.loads_file()
    try:
        with open_regular(where) as fh:
            size = os.fstat(fh.fileno()).st_size
            fh.seek(max(0, size - READ_B))
            data = fh.read()
    except OSError:
        return []
    records: list[StartRecord] = []
    for line in data.split(b"\n"):
        if not line.strip():
            continue
        try:
            record = StartRecord.from_json(json.loads(line))
        except (ValueError, RecursionError):
            continue
        if record is not None:
            records.append(record)
    return records


def append(record: StartRecord, path: Path | None = None) -> bool:
    """Write one record, unless its id is there already (several dashboards may watch one start). False: not written.

    A full disk or a read-only home costs the memory of this start, never the start: errors are answered with False.
    """
    where = path or paths.loads_file()
    line = json.dumps(record.to_json(), ensure_ascii=False).encode() + b"\n"
    try:
        paths.ensure_dir(where.parent)
        fd = os.open(where, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        size = os.fstat(fd).st_size
        tail = os.pread(fd, READ_B, max(0, size - READ_B))
        if json.dumps(record.id, ensure_ascii=False).encode() in tail and any(
            r.id == record.id for r in read(where)
        ):
            return False
        if size and not tail.endswith(b"\n"):
            line = b"\n" + line  # the last writer died in mid-line
        if size > KEEP_B:
            half = tail[tail.find(b"\n") + 1 :]
            os.ftruncate(fd, 0)
            line = half + line
        return os.write(fd, line) == len(line)
    except OSError:
        return False
    finally:
        os.close(fd)


def learned(path: Path | None = None) -> LearnedEta:
    """The ETA model of this host."""
    return LearnedEta(read(path))


class StartRecorder:
    """Watches one start: keeps what was predicted at each checkpoint, writes the record when it is ready.

    look() is called with every view (once a second is enough); it writes at most once a start.
    """

    def __init__(self, tracker: LoadTracker, *, path: Path | None = None) -> None:
        self._tracker = tracker
        self._path = path
        self._start: float | None = None
        self._made: dict[str, tuple[float, float]] = {}  # checkpoint -> (when, predicted seconds)
        self._is_written = False

    def look(self, view: LoadView, now_s: float) -> bool:
        """True when this look wrote the record."""
        if view.started_s != self._start:
            self._start, self._made, self._is_written = view.started_s, {}, False
        if self._is_written:
            return False
        if view.state is State.LOADING and view.eta_s is not None:
            point = _point(view)
            if point and point not in self._made:
                self._made[point] = (now_s, view.eta_s)
        if view.state not in (State.READY, State.DEGRADED):
            return False
        record = self._tracker.record({k: (p, max(0.0, now_s - t)) for k, (t, p) in self._made.items()})
        self._is_written = True
        return record is not None and append(record, self._path)


def _point(view: LoadView) -> str:
    if view.phase in (Phase.BOOT, Phase.DIST_INIT):
        return CHECKPOINTS[0]
    if view.phase is Phase.WEIGHT_LOAD and view.target is not None and view.target.total:
        share = view.target.done / view.target.total
        return "90%" if share >= 0.9 else "50%" if share >= 0.5 else "10%" if share >= 0.1 else ""
    return (
        "after shards"
        if view.phase in (Phase.AFTER_LOAD, Phase.KV_ALLOC, Phase.GRAPH_CAPTURE, Phase.HTTP)
        else ""
    )
