"""A benchmark and the other loads of this host: jobs wait, a command is refused, and what ran beside all the same is named.

Benchmarks that are no jobs (`k2tui bench run`) show themselves by a file in the locks' folder, held while they measure.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from k2tui import paths
from k2tui.core import loads
from k2tui.core.job import Job
from k2tui.errors import K2Error
from k2tui.jobs import folder, procs
from k2tui.jobs.locks import is_held, try_flock
from k2tui.jobs.state import as_object, read_json

POLL_S = 1.0


def _jobs() -> list[Job]:
    try:
        return folder.list_jobs()
    except (K2Error, OSError):
        return []  # job folders that cannot be read: nothing is known of other loads


def _commands(but: Path | None) -> list[tuple[str, bool]]:
    """Benchmarks that run by hand now: (name, whether it runs beside others knowingly)."""
    found: list[tuple[str, bool]] = []
    for path in sorted((paths.state_dir() / "locks").glob("measuring-*.lock")):
        if path != but and is_held(path):
            facts: dict[str, Any] = as_object(read_json(path))
            found.append((str(facts.get("name") or "another benchmark"), facts.get("anyway") is True))
        elif path != but:
            path.unlink(missing_ok=True)  # of one that was killed
    return found


class Alone:
    """The measuring process among the loads of this host. `close` at its end."""

    def __init__(self, url: str, *, anyway: bool = False) -> None:
        """anyway: measure beside others; the flags say so all the same."""
        self._url, self._anyway = url, anyway
        self._me = os.environ.get(procs.JOB_VAR, "")
        self._fd: int | None = None
        self._path: Path | None = None
        self._seen: list[str] = []  # commands that ran at the start of the measurement at hand
        if not self._me:
            self._show()

    def _show(self) -> None:
        path = paths.state_dir() / "locks" / f"measuring-{os.getpid()}.lock"
        try:
            paths.ensure_dir(path.parent)
            self._fd = try_flock(path)
            if self._fd is not None:
                name = f"k2tui bench run of {self._url} (pid {os.getpid()})"
                os.ftruncate(self._fd, 0)
                os.pwrite(self._fd, json.dumps({"name": name, "anyway": self._anyway}).encode(), 0)
                self._path = path
        except (K2Error, OSError):
            pass  # a state folder that cannot be written: others do not see this one

    def begin(self, tell: Callable[[str], None]) -> None:
        """Wait (in a job) until nothing older loads this host; outside of a job raise K2Error naming what does."""
        if self._anyway:
            return
        if not self._me:
            found = [loads.name_of(j) for j in loads.now(_jobs(), "", self._url)]
            found += [name for name, _ in _commands(self._path)]
            if found:
                raise K2Error(
                    f"another load runs on this host, the figures would be of both: {'; '.join(found[:3])}",
                    "wait for its end (k2tui jobs wait ID), or --anyway: the rows are then marked as not valid",
                    exit_code=3,
                )
            return
        told = ""
        while words := self._waits_for():
            if words != told:
                told = words
                print(f"{loads.WAITS} {words}", flush=True)
            tell(f"{loads.WAITS} {words}")
            time.sleep(POLL_S)
        if told:
            tell("")

    def _waits_for(self) -> str:
        job = loads.to_wait_for(_jobs(), self._me, self._url)
        if job is not None:
            return loads.name_of(job)
        return next((name for name, anyway in _commands(self._path) if not anyway), "")

    def start(self) -> None:
        """A measurement begins."""
        self._seen = [name for name, _ in _commands(self._path)]

    def flags(self, since_s: float) -> list[str]:
        """Why the measurement since then (Unix seconds) is not valid: one flag for each other load; [] = it was alone."""
        names = [loads.name_of(j) for j in loads.during(_jobs(), self._me, self._url, since_s)]
        names += dict.fromkeys([*self._seen, *(name for name, _ in _commands(self._path))])
        return [loads.FLAG + name for name in names[:5]]

    def close(self) -> None:
        if self._fd is not None:
            if self._path is not None:
                self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = None
