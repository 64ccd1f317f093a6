"""`systemd-run --user --scope`: out of reach of a login manager that kills by cgroup at logout. Knows no jobs.

A keeper and its child have sessions of their own, which is enough against a hang-up. With `KillUserProcesses=yes` systemd
kills the login's cgroup instead: a scope of the user's own manager (with lingering) outlives that.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from k2tui.errors import UsageError

_WITHOUT = (
    "leave the scope out: jobs outlive a dropped connection without it, unless the system kills by cgroup"
)


def check() -> None:
    """Raises UsageError when scopes cannot work here."""
    if shutil.which("systemd-run") is None:
        raise UsageError("there is no systemd-run here", _WITHOUT)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if not runtime or not os.path.exists(os.path.join(runtime, "systemd")):
        raise UsageError("this login has no user manager of systemd (XDG_RUNTIME_DIR)", _WITHOUT)


def wrap(argv: Sequence[str], job_id: str) -> list[str]:
    """The command inside a scope of its own; systemd-run replaces itself by it, so descriptors and pid stay."""
    return ["systemd-run", "--user", "--scope", "--quiet", "--collect", f"--unit=k2tui-{job_id}", "--", *argv]


def kills_at_logout(root: Path = Path("/")) -> bool | None:
    """Whether logind's files say KillUserProcesses=yes; None without systemd-logind."""
    files = [root / "usr/lib/systemd/logind.conf", root / "etc/systemd/logind.conf"]
    for folder in ("usr/lib/systemd/logind.conf.d", "run/systemd/logind.conf.d", "etc/systemd/logind.conf.d"):
        files += sorted((root / folder).glob("*.conf"))
    seen: bool | None = None
    for path in files:
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        seen = False if seen is None else seen
        for m in re.finditer(r"(?mi)^[ \t]*KillUserProcesses[ \t]*=[ \t]*(\w+)", text):
            seen = m[1].lower() in ("yes", "true", "1", "on")
    return seen


def advice() -> str:
    """One sentence for `doctor` and docs; "" when nothing has to be done."""
    if not kills_at_logout():
        return ""
    return (
        "KillUserProcesses=yes: this system kills your processes at logout, jobs too; submit with --scope and run "
        "`loginctl enable-linger` once"
    )
