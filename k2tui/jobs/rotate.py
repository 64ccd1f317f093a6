"""Keeps output.log below its cap while the child goes on writing to it."""

from __future__ import annotations

import os
from pathlib import Path


def rotate(log: Path) -> str:
    """Move the log's text into `NAME.1` (the former `.1` goes) and empty the log. Returns a sentence for the journal.

    The child's descriptor appends, so it goes on at the new end. The text is copied until nothing new has come, then the
    log is cut: a line written within those microseconds may be lost, and the sentence says that it was cut.
    """
    target = log.with_name(log.name + ".1")
    tmp = log.with_name(log.name + ".1.tmp")
    source = os.open(log, os.O_RDWR | os.O_CLOEXEC)
    done = 0
    try:
        copy = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            while True:
                chunk = os.pread(source, 4 << 20, done)
                if not chunk:
                    break
                view = memoryview(chunk)
                while view:
                    view = view[os.write(copy, view) :]
                done += len(chunk)
            os.ftruncate(source, 0)
        except OSError as err:
            tmp.unlink(missing_ok=True)
            os.ftruncate(source, 0)  # a full disk: the text cannot be kept, and the cap still holds
            return f"log cut at {done} bytes, not kept: {err.strerror}"
        finally:
            os.close(copy)
        os.replace(tmp, target)
        return f"log cut at {done} bytes; the former text is {target.name}"
    finally:
        os.close(source)
