"""Follows one growing file: bytes as they come, through rotation, truncation, re-creation. Understands no line."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from k2tui.errors import K2Error

READ_B = 4 << 20  # most bytes that one poll() returns: memory stays bounded with gigabytes waiting


class Tail:
    """One file, followed by its name.

    poll() never blocks: FIFOs and terminals are read without waiting. A file that is not there (yet, or any more) is waited
    for. A folder or a file that may not be read raises K2Error at once, and again from poll() if it becomes one.
    """

    def __init__(self, path: str | Path, *, from_end: bool = False) -> None:
        self.path = Path(path)
        self.offset = 0  # bytes of the present file that were returned or skipped
        self.is_missing = False
        self.generation = 0  # grows with every rotation, truncation or re-creation
        self._fd: int | None = None
        self._id: tuple[int, int] | None = None
        self._is_stream = False
        self._fresh = False
        self._last_mtime_ns = 0
        self._open()
        if from_end and self._fd is not None and not self._is_stream:
            self.offset = os.fstat(self._fd).st_size

    def _open(self) -> bool:
        try:
            info = os.stat(self.path)
            if stat.S_ISDIR(info.st_mode):
                raise K2Error(f"{self.path} is a folder, not a log file", "give the path of the file in it")
            fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            self.is_missing = True
            return False
        except PermissionError:
            raise K2Error(
                f"no permission to read {self.path}", f"run: chmod a+r {self.path}, or read it as its owner"
            ) from None
        except NotADirectoryError:
            raise K2Error(
                f"{self.path}: a part of this path is a file, not a folder", "check the path"
            ) from None
        except OSError as err:
            raise K2Error(
                f"cannot open {self.path}: {err.strerror or err}", "check the path and its permissions"
            ) from None
        info = os.fstat(fd)
        self._fd, self._id = fd, (info.st_dev, info.st_ino)
        self._is_stream = not stat.S_ISREG(info.st_mode)
        self.is_missing = False
        self.offset = 0
        return True

    def poll(self) -> bytes:
        """What came since the last call, at most READ_B; b"" when there is nothing new. Raises K2Error for a folder."""
        if self._fd is None:
            if not self._open():
                return b""
            self.generation += 1
        fd = self._fd
        assert fd is not None
        if self._is_stream:
            return self._read_stream(fd)
        data = self._read(fd)
        if data:
            return data
        self._check_name(fd)
        if self._fd is not None and self._fresh:
            self._fresh = False
            return self._read(self._fd)
        return b""

    def _read_stream(self, fd: int) -> bytes:
        try:
            data = os.read(fd, READ_B)
        except BlockingIOError:
            return b""
        except OSError as err:
            raise K2Error(f"cannot read {self.path}: {err.strerror or err}") from None
        self.offset += len(data)
        return data

    def _read(self, fd: int) -> bytes:
        try:
            info = os.fstat(fd)
            if info.st_size < self.offset:
                self.generation += 1
                self.offset = 0  # truncated (copytruncate, `> log`): what is there now is new
            data = os.pread(fd, READ_B, self.offset)
        except OSError as err:
            if (
                err.errno == 116
            ):  # ESTALE: the network file system lost the handle; the name may be back later
                self._close()
                return b""
            raise K2Error(
                f"cannot read {self.path}: {err.strerror or err}", "check the disk and the permissions"
            ) from None
        self.offset += len(data)
        return data

    def _check_name(self, fd: int) -> None:
        """The end of this file is reached: does the name still mean it?"""
        try:
            info = os.stat(self.path)
        except OSError:
            self.is_missing = True  # the open file may still grow (rotated away): keep reading it
            return
        self.is_missing = False
        if stat.S_ISDIR(info.st_mode):
            raise K2Error(f"{self.path} has become a folder", "give the path of the log file")
        if (info.st_dev, info.st_ino) != self._id:
            self._close()
            if self._open():
                self.generation += 1
                self._fresh = True

    def size(self) -> int | None:
        """Bytes of the present file; None for a stream or a missing file."""
        if self._fd is None or self._is_stream:
            return None
        return os.fstat(self._fd).st_size

    def modified_s(self) -> float | None:
        """Unix seconds of the file's last change, None when it is not there."""
        return os.fstat(self._fd).st_mtime if self._fd is not None else None

    def last(self, max_b: int) -> bytes:
        """The last max_b bytes of the file as it is now, from a line's beginning on when there is one. Moves nothing."""
        size = self.size()
        if size is None or self._fd is None:
            return self.poll()
        start = max(0, size - max_b)
        data = os.pread(self._fd, size - start, start)
        if start:
            cut = data.find(b"\n")
            if 0 <= cut < len(data) - 1:
                data = data[cut + 1 :]
        return data

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
        self._fd = self._id = None

    def close(self) -> None:
        self._close()

    def __enter__(self) -> Tail:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_from_end(path: str | Path, max_b: int) -> bytes:
    """The last max_b bytes of a regular file, cut at a line's beginning when there is one. Raises K2Error."""
    with Tail(path) as tail:
        if tail.is_missing:
            raise K2Error(f"no such file: {path}", "check the path")
        return tail.last(max_b)
