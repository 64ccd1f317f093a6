"""A stream (stdin or a command's output) written to a private file, so that it can be followed like any log."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from k2tui.errors import UsageError

_KEEP_B = 1 << 30  # a stream that writes more is cut from the front by starting the file anew


class Spool:
    """command None = this process's stdin. The file goes away with close(); a command is ended with it."""

    def __init__(self, command: Sequence[str] | None) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="k2tui-watch-"))
        self.path = self._folder / "stream.log"
        self.path.touch(mode=0o600)
        self._child: subprocess.Popen[bytes] | None = None
        if command is None:
            source = os.dup(0)
        else:
            try:
                self._child = subprocess.Popen(
                    list(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
                )
            except OSError as err:
                shutil.rmtree(self._folder, ignore_errors=True)
                raise UsageError(f"cannot run {command[0]!r}: {err.strerror or err}", "check the command after --") from None
            assert self._child.stdout is not None
            source = self._child.stdout.fileno()
        self._done = threading.Event()
        threading.Thread(target=self._copy, args=(source,), name="spool", daemon=True).start()

    def _copy(self, source: int) -> None:
        try:
            with self.path.open("r+b", buffering=0) as out:
                written = 0
                while data := os.read(source, 1 << 16):
                    if written > _KEEP_B:
                        out.truncate(0)
                        out.seek(0)
                        written = 0
                    out.write(data)
                    written += len(data)
        except OSError:
            pass
        finally:
            self._done.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the stream's end."""
        return self._done.wait(timeout_s)

    def close(self) -> None:
        if self._child is not None and self._child.poll() is None:
            self._child.terminate()
        shutil.rmtree(self._folder, ignore_errors=True)
