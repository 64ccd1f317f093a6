"""Plan files on disk: read, watched, and edited without ever overwriting what somebody else wrote. Knows no screen.

An edit is an operation ("task X: status completed"), applied to the text as it is now and swapped in atomically; when the
file changed between reading and swapping, the operation is applied again to the newer text.
"""

from __future__ import annotations

import fcntl
import os
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from k2tui.core import board_plan
from k2tui.core.board import Board, Seen, Task, TaskStatus, link, look, news, with_times
from k2tui.core.board_plan import PlanError, default_plan
from k2tui.core.job import Job
from k2tui.errors import K2Error, UsageError
from k2tui.files import write_json
from k2tui.parsing import parse_json
from k2tui.regular import NotRegularError, open_regular
from k2tui.sources.chain import Done

__all__ = ["PlanFile", "default_plan", "find_plans", "load_plan"]

MAX_BYTES = 8 << 20


def _read(path: Path) -> bytes:
    try:
        with open_regular(path) as fh:
            raw = fh.read(MAX_BYTES + 1)
    except IsADirectoryError:
        raise UsageError(f"{path} is a folder, not a plan file", "give a .json, .md or .toml file")
    except NotRegularError as err:
        raise UsageError(f"{path}: {err.strerror}", "give a .json, .md or .toml file")
    except OSError as err:
        raise UsageError(f"{path}: {err.strerror or err}", "check the path and its permissions")
    if len(raw) > MAX_BYTES:
        raise UsageError(f"{path}: larger than {MAX_BYTES >> 20} MiB, that is no plan")
    return raw


def _text(path: Path, raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as err:
        line = raw[: err.start].count(b"\n") + 1
        raise PlanError(f"{path} line {line}: not UTF-8 text", line)


def _parse(path: Path, raw: bytes) -> Board:
    text = _text(path, raw)
    fmt = board_plan.format_of(path.name, text)
    try:
        plan = board_plan.parse(text, fmt)
    except PlanError as err:
        raise PlanError(f"{path}" + (f" line {err.line}" if err.line else "") + f": {err.message}", err.line)
    return Board(path=str(path), tasks=plan.tasks, title=plan.title, format=plan.format)


def load_plan(path: Path | str) -> Board:
    """The board of a plan file. Raises UsageError (no file) or PlanError (file and line)."""
    where = Path(path).expanduser()
    return _parse(where, _read(where))


def find_plans(cwd: Path | None = None, home: Path | None = None) -> list[Path]:
    """Plan files that may be meant: in the working folder, then where coding agents keep theirs (newest first)."""
    here = cwd or Path.cwd()
    mine = [
        here / n for n in ("plan.json", "plan.toml", "plan.md", "PLAN.md", "TODO.md", "todo.md", "todos.json")
    ]
    found = [p for p in mine if p.is_file()]
    base = (home or Path.home()) / ".claude"
    theirs: list[tuple[float, Path]] = []
    for pattern in ("tasks/*.json", "todos/*.json"):
        for p in base.glob(pattern):
            try:
                facts = p.stat()
            except OSError:
                continue
            if facts.st_size > 4:  # "[]" is no plan
                theirs.append((facts.st_mtime, p))
    return found + [p for _, p in sorted(theirs, reverse=True)]


def _exchange(a: Path, b: Path) -> bool:
    """Swap two files in one step (RENAME_EXCHANGE). False where the system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    import ctypes  # 4 ms, for edits only

    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    return libc.renameat2(-100, os.fsencode(a), -100, os.fsencode(b), 2) == 0


class PlanFile:
    """One plan file, mirrored. `poll` when a second has passed; every edit goes to the file and comes back by it."""

    def __init__(
        self, path: Path | str, *, default_text: Callable[[], str] | None = None, times: Path | None = None
    ) -> None:
        """default_text: asked for what to write when there is no such file yet (None = a missing file is an error on the board).
        times: where to keep when tasks were seen to begin and end (None = nowhere); a plan itself holds no times."""
        self._times = times
        self._done = Done()
        self._seen: dict[str, Seen] | None = None
        self.path = Path(path).expanduser()
        self._key: tuple[int, int, int] | None = None
        self._board = Board(path=str(self.path))
        self._lock = threading.RLock()
        self._spare = (
            ""  # the default's text where it could not be written: shown, and written with the first edit
        )
        if default_text is not None and self._is_blank():
            text = default_text()
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                done = self._swap(self.path.resolve(), b"", text.encode())
            except (OSError, K2Error):
                done = False
            if not done and self._is_blank():
                self._spare = text

    def _is_blank(self) -> bool:
        """Whether there is no such file yet, or an empty one (of a disk that was full)."""
        try:
            facts = os.stat(self.path)
        except FileNotFoundError:
            return True
        except OSError:
            return False  # reading tells
        return stat.S_ISREG(facts.st_mode) and facts.st_size == 0

    @property
    def board(self) -> Board:
        """The newest good tasks; `error` says what is wrong with the file now."""
        return self._board

    def _stat(self) -> tuple[int, int, int] | None:
        try:
            facts = os.stat(self.path)
        except OSError:
            return None
        return facts.st_mtime_ns, facts.st_size, facts.st_ino

    def poll(self) -> bool:
        """Look at the file; True when the board changed. A broken file keeps the last good tasks and sets `error`."""
        with self._lock:
            key = self._stat()
            if key is not None and key == self._key:
                return False
            before = self._board
            try:
                is_spare = bool(self._spare) and self._is_blank()
                self._board = _parse(self.path, self._spare.encode() if is_spare else _read(self.path))
            except K2Error as err:
                self._board = replace(before, error=err.message)
            self._key = key
            if self._board.tasks and not self._board.error:
                self._look()
            return self._board != before

    def _look(self) -> None:
        """Note what began and ended since the last look, of whichever k2tui process that was."""
        if self._times is None:
            return
        name = str(self.path.resolve())
        every: dict[str, dict[str, list[Any]]] = {}
        stored: dict[str, Seen] = {}
        try:
            every = dict(parse_json(self._times.read_bytes()))
            stored = {i: Seen(*facts) for i, facts in every.get(name, {}).items()}
        except (OSError, ValueError, TypeError, AttributeError):
            every = {}  # not there yet, or not ours: it is made anew
        before = stored or self._seen
        self._seen = look(before, self._board.tasks, time.time())
        if self._seen != stored:
            kept = {n: facts for n, facts in every.items() if n != name and os.path.exists(n)}
            kept[name] = {i: [str(s.status), s.started_s, s.ended_s] for i, s in self._seen.items()}
            try:
                self._times.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                write_json(self._times, kept)
            except OSError:
                pass  # a full disk or a folder that cannot be written: times are a courtesy

    def linked(self, jobs: Sequence[Job], ready: Iterable[str] = ()) -> Board:
        """The board with what the jobs made of it. jobs: newest first."""
        return link(with_times(self._board, self._seen or {}), jobs, ready, self._steps_done())

    def _steps_done(self) -> dict[tuple[str, str], str]:
        return self._done.look((t.chain, t.stage or t.id) for t in self._board.tasks if t.chain)

    def sync(self, jobs: Sequence[Job], ready: Iterable[str] = ()) -> list[str]:
        """Write into the plan what jobs really did (started, completed); returns the ids of the tasks that changed."""
        self.poll()
        served = frozenset(ready)
        done = self._steps_done()
        changes = news(self._board, link(self._board, jobs, served, done), jobs, served, done)
        for task_id, change in changes.items():
            # read again under the lock: a task changed by hand in the meantime is looked at anew with the next call
            now = {t.id: t for t in self._board.tasks}
            if task_id in now:
                self._edit(lambda text, fmt, i=task_id, c=change: board_plan.set_task(text, fmt, i, c))
        return list(changes)

    def set_task(self, task_id: str, **changes: str) -> None:
        """Change content, status, priority, note, stage, job_id or depends of one task. Raises K2Error."""
        board_plan.checked(changes)
        self._edit(lambda text, fmt: board_plan.set_task(text, fmt, task_id, changes))

    def add_task(
        self,
        content: str,
        priority: str = "medium",
        *,
        id: str = "",
        stage: str = "",
        depends: Sequence[str] = (),
        note: str = "",
        status: str = "pending",
    ) -> str:
        """Add a task at the end; returns its id."""
        fields = board_plan.checked({"status": status, "priority": priority, "content": content})
        task = Task(
            id, fields["content"], TaskStatus(fields["status"]), priority, note, stage, depends=tuple(depends)
        )
        made = ""

        def change(text: str, fmt: str) -> str:
            nonlocal made
            out, made = board_plan.add_task(text, fmt, task)
            return out

        self._edit(change)
        return made

    def move_task(self, task_id: str, place: int) -> None:
        """Make a task number `place` (from 0) of the list."""
        self._edit(lambda text, fmt: board_plan.move_task(text, fmt, task_id, place))

    def take_place(self, task_id: str, other_id: str) -> None:
        """Move a task to the place that another one has at that moment; the others close up."""

        def change(text: str, fmt: str) -> str:
            ids = [t.id for t in board_plan.parse(text, fmt).tasks]
            if other_id not in ids:
                raise UsageError(f"task {other_id!r} is not in the plan any more", "look at the board again")
            return board_plan.move_task(text, fmt, task_id, ids.index(other_id))

        self._edit(change)

    def _edit(self, change: Callable[[str, str], str]) -> None:
        with self._lock:
            target = self.path.resolve()  # a link stays a link
            guard = self._guard(target)
            try:
                for _ in range(50):
                    try:
                        raw = _read(target) if os.path.exists(target) else b""
                        text = _text(target, raw) or self._spare
                        new = change(text, board_plan.format_of(target.name, text)).encode()
                    except UnicodeEncodeError:
                        raise UsageError(
                            f"{self.path}: a task's words have to be UTF-8 text", "nothing was written"
                        )
                    except PlanError as err:
                        where = f"{self.path}" + (f" line {err.line}" if err.line else "")
                        raise K2Error(
                            err.message if str(self.path) in err.message else f"{where}: {err.message}",
                            err.hint,
                            exit_code=2,
                        )
                    if new == raw or self._swap(target, raw, new):
                        self.poll()
                        return
                raise K2Error(f"{self.path} is being changed all the time", "try again")
            finally:
                if guard is not None:
                    os.close(guard)

    def _guard(self, target: Path) -> int | None:
        """Edits of several k2tui processes go one after the other: a lock on the folder, which needs no extra file."""
        try:
            fd = os.open(target.parent, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(fd, fcntl.LOCK_EX)
            return fd
        except OSError:
            return None  # some network file systems cannot: the swap still notices a change

    def _swap(self, target: Path, old: bytes, new: bytes) -> bool:
        """Put `new` in place of `old`; False (and nothing lost) when the file was not `old` any more."""
        try:
            mode = os.stat(target).st_mode & 0o777 if os.path.exists(target) else 0o600
            fd, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
        except OSError as err:
            raise K2Error(f"{target}: {err.strerror or err}", "the plan was left as it is")
        tmp = Path(name)
        try:
            with os.fdopen(fd, "wb") as fh:
                fh.write(new)
                fh.flush()
                os.fsync(fh.fileno())
            os.chmod(tmp, mode)
            now = _read(target) if os.path.exists(target) else b""
            if now != old:
                return False
            if not os.path.exists(target):
                os.link(tmp, target)  # fails when somebody made it in this moment
                return True
            if not _exchange(tmp, target):
                os.replace(tmp, target)
                return True
            # the former file now lies under the other name: what somebody wrote in the last microseconds is seen there
            if not tmp.is_fifo() and tmp.read_bytes() == old:
                return True
            _exchange(tmp, target)
            return False
        except FileExistsError:
            return False
        except OSError as err:
            raise K2Error(f"{target}: {err.strerror or err}", "the plan was left as it is")
        finally:
            tmp.unlink(missing_ok=True)
