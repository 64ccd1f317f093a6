"""Tells the user: bell, terminal notification, a command of their own, a webhook. Never blocks who asks it to.

`python -m k2tui.notify job FOLDER` is what a keeper runs after its job's last words, so that a webhook or command speaks up
with no dashboard open; the dashboard itself rings the bell and shows terminal notifications.
"""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from k2tui.core.job_mask import mask_text
from k2tui.core.notices import (
    Filter,
    Kind,
    Note,
    Rules,
    fill_command,
    note_of_job,
    notes_between,
    parse_kinds,
    parse_quiet,
    terminal_code,
)
from k2tui.errors import UsageError

if TYPE_CHECKING:
    from k2tui.config import NotifyConfig
    from k2tui.core.snapshot import Snapshot

RETRIES_S = (1.0, 4.0, 15.0)  # pauses between a webhook's attempts
COMMAND_LIMIT_S = 30.0
# the keeper's own process tells these by command and webhook, also with no dashboard open
BY_KEEPER = frozenset({Kind.JOB_ENDED, Kind.JOB_FAILED})


def rules_of(config: NotifyConfig) -> Rules:
    """Rules from the configuration. Raises UsageError naming the key."""
    try:
        return Rules(
            kinds=parse_kinds(config.kinds, "notify.kinds"),
            quiet=parse_quiet(config.quiet),
            quiet_except=parse_kinds(config.quiet_except, "notify.quiet_except"),
        )
    except ValueError as err:
        raise UsageError(str(err), "see [notify] in your configuration")


def minute_of_day(now_s: float) -> int:
    local = time.localtime(now_s)
    return local.tm_hour * 60 + local.tm_min


def run_command(config: NotifyConfig, note: Note) -> str:
    """Run the user's command; "" or why it failed."""
    argv = fill_command(config.command, note)
    env = {
        **os.environ,
        "K2TUI_NOTE_KIND": str(note.kind),
        "K2TUI_NOTE_TITLE": note.title,
        "K2TUI_NOTE_TEXT": note.text,
        "K2TUI_NOTE_JOB": note.job_id,
    }
    try:
        done = subprocess.run(
            argv,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=COMMAND_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{argv[0]} did not end within {COMMAND_LIMIT_S:g} s"
    except OSError as err:
        return f"{argv[0]}: {err.strerror}"
    if done.returncode == 0:
        return ""
    said = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return f"{argv[0]} ended with {done.returncode}" + (f": {said[-1][:200]}" if said else "")


def post(
    config: NotifyConfig,
    note: Note,
    *,
    pauses_s: tuple[float, ...] = RETRIES_S,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """POST the note as JSON, again after a pause when the other side is away or busy; "" or why it was given up.

    `text` and `content` carry the words for chat servers. The URL is a secret: it is in no message.
    """
    import httpx

    words = f"{note.title}: {note.text} ({socket.gethostname()})"
    body = {
        "kind": str(note.kind), "title": note.title, "detail": note.text, "at_s": note.at_s, "host": socket.gethostname(),
        "job_id": note.job_id, "text": words, "content": words,
    }  # fmt: skip
    why = ""
    for attempt in range(len(pauses_s) + 1):
        if attempt:
            sleep(pauses_s[attempt - 1])
        try:
            answer = httpx.post(config.webhook, json=body, timeout=10.0, follow_redirects=False)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as err:
            why = type(err).__name__
            if isinstance(err, httpx.InvalidURL | httpx.UnsupportedProtocol):
                return f"webhook: {why}"
            continue
        if answer.is_success:
            return ""
        why = f"HTTP {answer.status_code}"
        if answer.status_code < 500 and answer.status_code not in (408, 425, 429):
            break  # asking again would not help
    return f"webhook: {why}"


class Notifier:
    """For a dashboard: give it snapshots, it tells what is new. write: puts text on the user's terminal (called by `look`)."""

    def __init__(
        self,
        config: NotifyConfig,
        *,
        write: Callable[[str], None] | None = None,
        on_error: Callable[[str], None] = lambda text: None,
        env: dict[str, str] | None = None,
    ) -> None:
        self._config = config
        self._filter = Filter(rules_of(config))
        self._write = write
        self._on_error = on_error
        self._env = dict(os.environ) if env is None else env
        self._before: Snapshot | None = None
        self._queue: queue.Queue[Note | None] = queue.Queue(maxsize=100)
        self._thread: threading.Thread | None = None

    def look(self, snapshot: Snapshot, now_s: float) -> list[Note]:
        """Compare with the last snapshot; tell what is new and allowed. Returns what was told. Takes no time."""
        notes = self._filter.allow(notes_between(self._before, snapshot), minute_of_day(now_s))
        self._before = snapshot
        for note in notes:
            self.tell(note)
        return notes

    def tell(self, note: Note) -> None:
        if self._write is not None:
            text = ("\a" if self._config.bell else "") + (
                terminal_code(note, self._env) if self._config.terminal else ""
            )
            if text:
                self._write(text)
        if (self._config.command or self._config.webhook) and note.kind not in BY_KEEPER:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="notify", daemon=True)
                self._thread.start()
            try:
                self._queue.put_nowait(note)
            except queue.Full:
                self._on_error("too many notifications at once: one was dropped")

    def _work(self) -> None:
        while (note := self._queue.get()) is not None:
            for why in send(self._config, note):
                self._on_error(why)

    def close(self, wait_s: float = 2.0) -> None:
        """Let what is under way go out, for at most wait_s."""
        if self._thread is not None:
            try:
                self._queue.put_nowait(None)
            except queue.Full:
                return
            self._thread.join(wait_s)


def send(config: NotifyConfig, note: Note) -> list[str]:
    """Command and webhook, one after the other; what went wrong, in words without secrets."""
    problems: list[str] = []
    if config.command:
        problems.append(run_command(config, note))
    if config.webhook:
        problems.append(post(config, note))
    return [mask_text(p) for p in problems if p]


def tell_of_job(folder: Path) -> list[str]:
    """Command and webhook for a job that has ended, if the configuration wants them. Returns what went wrong."""
    from k2tui import config
    from k2tui.jobs.state import read_job

    settings = config.load().notify
    if not settings.command and not settings.webhook:
        return []
    now = time.time()
    note = note_of_job(read_job(folder), now)
    if note is None or not Filter(rules_of(settings)).allow([note], minute_of_day(now)):
        return []
    return send(settings, note)


def main(argv: list[str]) -> int:
    if len(argv) != 2 or argv[0] != "job":
        print("usage: python -m k2tui.notify job FOLDER", file=sys.stderr)
        return 2
    folder = Path(argv[1])
    try:
        problems = tell_of_job(folder)
    except Exception as err:  # a wrong configuration must not be silent, and there is no terminal here
        problems = [f"{type(err).__name__}: {err}"]
    if problems:
        with open(folder / "notify.log", "a", encoding="utf-8") as fh:
            fh.writelines(f"{p}\n" for p in problems)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
