"""GPU samples on disk, bounded: one writer appends fixed records to hourly segments, any number of readers ask for a span.

A segment is one line of JSON (what GPUs, format, version) and records of equal size after it. A record cut short by a crash is
the last one and is not read; a segment of another format is skipped and counted. The figures are those of core.gpu_series.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from k2tui import paths
from k2tui.core.gpu import GpuView
from k2tui.core.gpu_series import METRICS, CurveBuilder, GpuCurves, figures_of
from k2tui.regular import open_regular

_FORMAT, _VERSION = "k2tui-gpu-history", 1
_GPU = struct.Struct("<bbihhhh")  # the order of METRICS; -1 = unknown
_TIME = struct.Struct("<d")
_SEGMENT_S = 3600.0
_FLUSH_S = 10.0
_RETRY_S = 30.0
_MAX_HEADER = 65536
_MAX_READ = 50_000  # figures of one GPU that a question reads; a longer span is read in equal leaps
DEFAULT_MAX_B = 32 << 20  # eight GPUs for three days


def history_dir() -> Path:
    return paths.state_dir() / "gpu-history"


@dataclass(frozen=True, slots=True)
class _Header:
    gpus: tuple[tuple[int, str, str], ...]  # (index, uuid, name)
    size_b: int  # of the header itself

    @property
    def record_b(self) -> int:
        return _TIME.size + len(self.gpus) * _GPU.size


class GpuHistory:
    """The writer. push(view) is quick (one file append every 10 s); several programs may hold one, the first one writes.

    max_b: bound of the whole folder; the oldest segments go first. A full disk stops the writing for a while, never the caller.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        max_b: int = DEFAULT_MAX_B,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder or history_dir()
        self.error = ""  # why nothing is written, in words
        self._max_b = max_b
        self._clock = clock
        self._lock_fd = -1
        self._fd = -1
        self._header: _Header | None = None
        self._started_s = 0.0
        self._buffer = bytearray()
        self._flush_at = 0.0
        self._retry_at = 0.0
        self._last_s = 0.0

    @property
    def is_writer(self) -> bool:
        return self._lock_fd >= 0

    def push(self, view: GpuView) -> None:
        """Keep a view, at most one a second. Views without GPUs and repeated ones are left out."""
        now = self._clock()
        if view.error or not view.gpus or view.taken_s < self._last_s + 0.5 or now < self._retry_at:
            return
        try:
            if not self.is_writer and not self._acquire():
                self._retry_at = now + _RETRY_S
                return
            gpus = tuple((g.index, g.uuid, g.name) for g in view.gpus)
            if (
                self._header is None
                or self._header.gpus != gpus
                or view.taken_s - self._started_s > _SEGMENT_S
            ):
                self._open_segment(gpus, view.taken_s)
            self._buffer += _TIME.pack(view.taken_s)
            for sample in view.gpus:
                self._buffer += _pack((-1,) * len(METRICS) if sample.error else figures_of(sample))
            self._last_s = view.taken_s
            if now >= self._flush_at:
                self.flush()
                self._flush_at = now + _FLUSH_S
        except OSError as err:
            self.error = f"GPU history is not written: {err.strerror or err}"
            self._retry_at = now + _RETRY_S
            self._buffer.clear()
            self._close_segment()

    def flush(self) -> None:
        """Write what is buffered. Raises OSError."""
        if self._fd < 0 or not self._buffer:
            return
        whole = bytes(self._buffer)
        self._buffer.clear()
        written = os.write(self._fd, whole)
        if written != len(whole):
            # a record cut in the middle would shift all that follow
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
            raise OSError(28, "no space left on the disk")
        self.error = ""

    def close(self) -> None:
        """Write the rest and let another program be the writer."""
        try:
            self.flush()
        except OSError as err:
            self.error = f"GPU history is not written: {err.strerror or err}"
        self._close_segment()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _acquire(self) -> bool:
        paths.ensure_dir(self.folder)
        fd = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            return False
        self._lock_fd = fd
        return True

    def _open_segment(self, gpus: tuple[tuple[int, str, str], ...], at_s: float) -> None:
        self.flush()
        self._close_segment()
        head = {
            "format": _FORMAT,
            "version": _VERSION,
            "metrics": METRICS,
            "gpus": [list(gpu) for gpu in gpus],
        }
        raw = json.dumps(head, separators=(",", ":")).encode() + b"\n"
        self._prune()
        path = self.folder / f"{int(at_s * 1000):015d}.gpu"
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.write(self._fd, raw)
        self._header = _Header(gpus, len(raw))
        self._started_s = at_s

    def _close_segment(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
        self._header = None

    def _prune(self) -> None:
        """Remove the oldest segments until what is left leaves room for one more hour."""
        sizes = [(path, path.stat().st_size) for path in _segments(self.folder)]
        room = self._max_b - int(_SEGMENT_S) * (_TIME.size + 16 * _GPU.size)
        total = sum(size for _, size in sizes)
        for path, size in sizes:
            if total <= max(0, room):
                break
            path.unlink(missing_ok=True)
            total -= size


def _pack(figures: tuple[int, ...]) -> bytes:
    util, memory_util, memory_mb, power_w, temperature, clock, bits = figures
    return _GPU.pack(
        min(util, 127),
        min(memory_util, 127),
        min(memory_mb, 2**31 - 1),
        min(power_w, 32767),
        max(-1, min(temperature, 32767)),
        min(clock, 32767),
        bits,
    )


def _segments(folder: Path) -> list[Path]:
    try:
        return sorted(folder.glob("*.gpu"))
    except OSError:
        return []


def _read_header(raw: bytes) -> _Header | None:
    line, newline, _ = raw.partition(b"\n")
    if not newline:
        return None
    try:
        data = json.loads(line)
        if data["format"] != _FORMAT or data["version"] != _VERSION:
            return None
        return _Header(tuple((int(i), str(uuid), str(name)) for i, uuid, name in data["gpus"]), len(line) + 1)
    except (ValueError, KeyError, TypeError):
        return None


def _start_s(path: Path) -> float:
    try:
        return int(path.stem) / 1000.0
    except ValueError:
        return 0.0


def _records(path: Path, header: _Header, start_s: float, end_s: float, leap: int) -> Iterator[tuple[float, bytes]]:
    """(time, figures of all GPUs) of every leap-th record in the span; the first is found by halving, times only grow."""
    size = header.record_b
    with open_regular(path) as fh:
        count = (os.fstat(fh.fileno()).st_size - header.size_b) // size
        low, high = 0, count
        while low < high:
            middle = (low + high) // 2
            fh.seek(header.size_b + middle * size)
            if _TIME.unpack(fh.read(_TIME.size))[0] < start_s:
                low = middle + 1
            else:
                high = middle
        fh.seek(header.size_b + low * size)
        for _ in range(low, count, leap):
            raw = fh.read(size)
            if leap > 1:
                fh.seek((leap - 1) * size, os.SEEK_CUR)
            if len(raw) < size:
                return
            at_s = float(_TIME.unpack_from(raw)[0])
            if at_s >= end_s:
                return
            yield at_s, raw[_TIME.size :]


def read_curves(start_s: float, end_s: float, *, steps: int = 0, folder: Path | None = None) -> GpuCurves:
    """Curves over [start_s, end_s) from disk, at most 600 values each (steps = 0: one a second up to that).

    Without any record in the span: GpuCurves without GPUs. Damaged or foreign segments are left out. A long span costs no more
    than a short one: records are left out evenly, some per step stay.
    """
    if end_s <= start_s:
        return GpuCurves(start_s, end_s, 0.0)
    builder = CurveBuilder(start_s, end_s, steps or max(1, min(600, round(end_s - start_s))))
    segments = _segments(folder or history_dir())
    starts = [_start_s(path) for path in segments]
    for number, path in enumerate(segments):
        if starts[number] >= end_s or (number + 1 < len(starts) and starts[number + 1] <= start_s):
            continue
        try:
            with open_regular(path) as fh:
                header = _read_header(fh.read(_MAX_HEADER))
            if header is None:
                continue
            leap = max(1, int((end_s - start_s) * max(1, len(header.gpus)) / _MAX_READ))
            for at_s, raw in _records(path, header, start_s, end_s, leap):
                for place, (index, uuid, name) in enumerate(header.gpus):
                    builder.add(at_s, index, _GPU.unpack_from(raw, place * _GPU.size), uuid, name)
        except OSError:
            continue  # removed by the writer in between, or not readable
    return builder.build()
