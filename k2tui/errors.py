"""The one family of errors that a user sees: what is wrong, where, and what to do."""

from __future__ import annotations


class K2Error(Exception):
    """An error for people.

    message: what is wrong, naming the file, line and key. hint: what to do. exit_code: the CLI's (docs/cli.md).
    Shown once: one stderr line (two with the hint) in the CLI, a toast in the dashboard. Never a traceback.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "", *, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if exit_code is not None:
            self.exit_code = exit_code


class UsageError(K2Error):
    """The command line or a file that the user wrote is off."""

    exit_code = 2


class NotReadyError(K2Error):
    """A server is not there, not ready or stalled."""

    exit_code = 3
