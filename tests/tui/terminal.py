"""A program in a real pseudo-terminal, looked at through pyte: keys in, screen text out, freeze and hang-up."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Sequence

import pyte

_STRIP = re.compile(
    rb"\x1b\[[<>=?][0-9;]*u|\x1b\[[?>]?[0-9;]*\$p|\x1b\[>[0-9;]*[a-zA-Z]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1bP[^\x1b]*\x1b\\|\x1b\[[0-9;]*t"
)
_CLOCK = os.sysconf("SC_CLK_TCK")


class Terminal:
    """Runs argv in a pty of columns x lines. Everything read is kept in `raw`."""

    def __init__(self, argv: Sequence[str], columns: int = 80, lines: int = 24, *, env: dict[str, str] | None = None, ignore_hup: bool = False) -> None:
        self.columns, self.lines = columns, lines
        self.raw = b""
        self.status: int | None = None
        self.master, slave = pty.openpty()
        self.resize(columns, lines, fd=slave)
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
            for fd in (0, 1, 2):
                os.dup2(slave, fd)
            os.closerange(3, 256)
            if ignore_hup:
                signal.signal(signal.SIGHUP, signal.SIG_IGN)
            base = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "TMUX", "LINES", "COLUMNS", "CI")}
            base |= {"TERM": "xterm-256color", "COLORTERM": "truecolor", "LC_ALL": "C.UTF-8", **(env or {})}
            os.execve(argv[0], list(argv), base)
        os.close(slave)

    def resize(self, columns: int, lines: int, fd: int | None = None) -> None:
        fcntl.ioctl(self.master if fd is None else fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.columns, self.lines = columns, lines

    def pump(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if not select.select([self.master], [], [], min(0.05, left))[0]:
                continue
            try:
                data = os.read(self.master, 65536)
            except OSError:
                data = b""
            if not data:
                return
            self.raw += data

    def screen(self) -> list[str]:
        """The visible text now."""
        screen = pyte.Screen(self.columns, self.lines)
        pyte.ByteStream(screen).feed(_STRIP.sub(b"", self.raw))
        return ["".join(screen.buffer[y][x].data for x in range(self.columns)) for y in range(self.lines)]

    def wait_for(self, text: str, seconds: float = 20.0) -> list[str]:
        """Until the text is on the screen; fails with the screen otherwise."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.pump(0.1)
            shown = self.screen()
            if any(text in line for line in shown):
                return shown
            if self.is_over():
                break
        raise AssertionError(f"{text!r} did not appear (status {self.status}):\n" + "\n".join(self.screen()) + f"\n{self.raw[-500:]!r}")

    def send(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def is_over(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status is not None

    def wait_end(self, seconds: float) -> int | None:
        """Exit code, or None when it still runs after that time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.is_over():
                return self.status
            if self.master >= 0:
                self.pump(0.02)
            else:
                time.sleep(0.02)
        return None

    def hang_up(self) -> None:
        """What sshd does when the connection drops."""
        os.close(self.master)
        self.master = -1

    def cpu_s(self) -> float:
        with open(f"/proc/{self.pid}/stat") as fh:
            text = fh.read()
        fields = text[text.rindex(")") + 2 :].split()
        return (int(fields[11]) + int(fields[12])) / _CLOCK

    def close(self) -> None:
        if not self.is_over():
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
        if self.master >= 0:
            os.close(self.master)
