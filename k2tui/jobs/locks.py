"""Locks on names ("gpu:0", "port:30000"): flock on files under state/locks. Knows no job states.

Law: the descriptor of a name's lock is handed to the child, so that a GPU stays taken while any process of an orphaned job
lives. The waiting room (one file a waiter) makes the order fair; `k2tui.core.job_queue` decides whose turn it is.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from k2tui.core.job_queue import Waiter, may_go
from k2tui.parsing import parse_json
from k2tui.regular import read_regular

_BAD = re.compile(r"[^A-Za-z0-9_.:-]")


def lock_file(root: Path, name: str) -> Path:
    return root / (_BAD.sub("_", name) + ".lock")


def try_flock(path: Path) -> int | None:
    """Open (and create) the file and lock it; the descriptor, or None when someone else holds it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def is_held(path: Path) -> bool:
    """Whether anybody holds the lock. Takes it in shared mode for a moment; no file = not held."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(fd)


def holder(root: Path, name: str) -> str:
    """Job id last written by a holder of this name; "" when not known."""
    try:
        return read_regular(lock_file(root, name), 4096).decode().strip()
    except (OSError, UnicodeDecodeError):
        return ""


class Room:
    """One job's place among those who want names. `root`: the locks folder."""

    def __init__(self, root: Path, me: Waiter, is_waiting: Callable[[str], bool]) -> None:
        """is_waiting(job_id): whether that waiter's keeper still lives (a dead one's place does not count)."""
        self._root = root
        self._me = me
        self._is_waiting = is_waiting
        self._place = root / "waiting" / f"{me.job_id}.json"
        self._registered = False

    def try_take(self, now_s: float) -> tuple[list[int], str]:
        """All names at once or none: (descriptors, "") or ([], what it waits for). now_s: seconds since boot."""
        if not self._me.names:
            return [], ""
        (self._root / "waiting").mkdir(parents=True, exist_ok=True, mode=0o700)
        mutex = os.open(self._root / ".mutex", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(mutex, fcntl.LOCK_EX)
            ahead = may_go(self._me, self._others(), now_s)
            if ahead is not None:
                self._register()
                return [], f"{', '.join(ahead.names)}: {ahead.job_id} is before it"
            taken: list[int] = []
            for name in sorted(set(self._me.names)):
                fd = try_flock(lock_file(self._root, name))
                if fd is None:
                    for other in taken:
                        os.close(other)
                    self._register()
                    who = holder(self._root, name)
                    return [], name + (f" (held by {who})" if who else "")
                taken.append(fd)
            for fd in taken:
                try:
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, (self._me.job_id + "\n").encode(), 0)
                except OSError:
                    pass  # who holds it is a courtesy; the lock itself is what counts
            self.leave()
            return taken, ""
        finally:
            os.close(mutex)

    def leave(self) -> None:
        self._registered = False
        try:
            self._place.unlink()
        except OSError:
            pass

    def _register(self) -> None:
        if self._registered:
            return
        me = self._me
        value = {"priority": me.priority, "since_s": me.since_s, "names": list(me.names)}
        try:
            tmp = self._place.with_suffix(".tmp")
            tmp.write_text(json.dumps(value), encoding="utf-8")
            os.replace(tmp, self._place)
            self._registered = True
        except OSError:
            pass  # full disk: it waits without a place in the row, and tries again

    def _others(self) -> Sequence[Waiter]:
        found: list[Waiter] = []
        for path in sorted((self._root / "waiting").glob("*.json")):
            job_id = path.stem
            if job_id == self._me.job_id:
                continue
            try:
                raw = parse_json(read_regular(path))
                waiter = Waiter(
                    job_id, int(raw["priority"]), float(raw["since_s"]), tuple(str(n) for n in raw["names"])
                )
            except (OSError, ValueError, KeyError, TypeError):
                continue
            if self._is_waiting(job_id):
                found.append(waiter)
            else:
                path.unlink(missing_ok=True)
        return found
