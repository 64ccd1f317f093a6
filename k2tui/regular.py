"""Reading regular files only: a FIFO, a device or a socket in a file's place is an error at once, never a wait without end.

Light on purpose: keepers and every CLI answer import it.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

OWN_MAX_B = 64 << 20  # of a file that k2tui itself writes and reads whole

_KINDS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


class NotRegularError(OSError):
    """What lies there is no regular file; strerror says what it is."""


def _refuse(path: str | Path, mode: int) -> None:
    if stat.S_ISREG(mode):
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
    kind = next((word for is_it, word in _KINDS if is_it(mode)), "of an unknown kind")
    raise NotRegularError(errno.EINVAL, f"no regular file ({kind})", str(path))


def open_regular(path: str | Path) -> BinaryIO:
    """The file, open for reading. Raises OSError (NotRegularError, IsADirectoryError); never blocks on what is no file."""
    _refuse(path, os.stat(path).st_mode)  # first: to open some devices is to use them
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _refuse(path, os.fstat(fd).st_mode)
        return open(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def read_regular(path: str | Path, max_b: int = OWN_MAX_B) -> bytes:
    """The whole of a regular file. Raises OSError, also (EFBIG) when it holds more than max_b bytes."""
    with open_regular(path) as fh:
        raw = fh.read(max_b + 1)
    if len(raw) > max_b:
        raise OSError(errno.EFBIG, f"larger than {max_b >> 20} MiB", str(path))
    return raw
