"""The journal's one writer. Knows files and disks that are full; knows nothing of what the events mean."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from k2tui.jobs import procs

BALLAST_B = 64 * 1024  # given back to a full disk, so that the last words can be written


class Journal:
    """Appends to FOLDER/journal.jsonl; only the holder of FOLDER/lock may have one.

    A full disk delays lines, in order, and never leaves half a line before a whole one.
    """

    def __init__(self, folder: Path) -> None:
        self._ballast = folder / ".ballast"
        self._fd = os.open(folder / "journal.jsonl", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        raw = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
        self._good = raw.rfind(b"\n") + 1  # a torn line of a killed writer is cut off by the next write
        self._waiting: list[bytes] = []

    def close(self) -> None:
        os.close(self._fd)

    def moved(self, folder: Path) -> None:
        """The folder has another name now."""
        self._ballast = folder / ".ballast"

    def load_ballast(self) -> None:
        """Keep some room that `add` may use when the disk is full."""
        try:
            fd = os.open(self._ballast, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, b"\1" * BALLAST_B)
            finally:
                os.close(fd)
        except OSError:
            pass  # the disk is full already

    def drop_ballast(self) -> None:
        try:
            self._ballast.unlink()
        except OSError:
            pass

    def add(self, name: str, **facts: Any) -> bool:
        """Append one event; True when it lies in the file, False when it waits for room (see `flush`)."""
        event = {"t": round(procs.wall_s(), 3), "m": round(procs.since_boot_s(), 3), "e": name, **facts}
        self._waiting.append(json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
        return self.flush()

    def flush(self) -> bool:
        """Write what waits; True when nothing waits any more."""
        while self._waiting:
            if not self._put(self._waiting[0]):
                self.drop_ballast()
                if not self._put(self._waiting[0]):
                    return False
            self._waiting.pop(0)
        return True

    def _put(self, line: bytes) -> bool:
        try:
            if os.fstat(self._fd).st_size != self._good:
                os.ftruncate(self._fd, self._good)
            view = memoryview(line)
            at = self._good
            while view:
                n = os.pwrite(self._fd, view, at)
                view = view[n:]
                at += n
            os.fsync(self._fd)
        except OSError:
            try:
                os.ftruncate(self._fd, self._good)
            except OSError:
                pass
            return False
        self._good += len(line)
        return True
