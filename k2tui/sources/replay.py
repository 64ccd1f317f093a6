"""A recorded log written again, at the pace of its own time stamps, into a private file: so that a past start can be watched."""

from __future__ import annotations

import re
import shutil
import tempfile
import threading
from datetime import datetime
from pathlib import Path

_STAMP = re.compile(rb"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
_LONGEST_GAP_S = 3.0  # silences are cut: nobody watches ten minutes twice
_BAR_STEP_S = 0.04  # between two states of a bar, which carry no stamp


class Replay:
    """path is the file that grows. speed: 2 = twice as fast."""

    def __init__(self, recording: Path, speed: float = 1.0) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="k2tui-replay-"))
        self.path = self._folder / recording.name
        self.path.touch(mode=0o600)
        self._recording = recording
        self._speed = max(0.01, speed)
        self._halt = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replay", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._halt.set()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self) -> None:
        last: datetime | None = None
        try:
            with self._recording.open("rb") as source, self.path.open("ab", buffering=0) as out:
                for raw in source:
                    for piece in re.split(rb"(?<=\r)", raw):
                        wait = _BAR_STEP_S if piece.endswith(b"\r") else 0.0
                        found = _STAMP.search(piece)
                        if found:
                            now = datetime.strptime(found[1].decode(), "%Y-%m-%d %H:%M:%S")
                            if last is not None:
                                wait = min(_LONGEST_GAP_S, max(0.0, (now - last).total_seconds()))
                            last = now
                        if wait and self._halt.wait(wait / self._speed):
                            return
                        out.write(piece)
        except OSError:
            return  # the folder is gone: the replay was closed
