"""How keepers are started. Knows their command line and what they must not inherit; nothing of what they do."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from k2tui.jobs import procs

NAME_TAKEN = 17  # exit code of a keeper whose job id belongs to another job already
PACKAGE_ROOT = Path(__file__).resolve().parents[2]


# The package is looked for last: a site-packages folder in front would hide the standard library's own modules.
_MODULE = "import sys; sys.path.append(sys.argv.pop(1)); import {0}, os; sys.stdout.flush(); os._exit({0}.main(sys.argv[1:]))"


def module_argv(module: str, *words: str, bare: bool = False) -> list[str]:
    """A command that runs `main(words)` of a module of this package, wherever it is started and however it is installed.

    bare: without `site` (smaller, sooner), for modules that need nothing but the standard library.
    """
    flags = ["-P", "-S"] if bare else ["-P"]
    return [sys.executable, *flags, "-c", _MODULE.format(module), str(PACKAGE_ROOT), *words]


def keeper_argv(folder: Path) -> list[str]:
    """How a keeper is started. Elsewhere than on Linux it needs psutil, and so the installed packages."""
    return module_argv("k2tui.jobs.keeper", str(folder), bare=sys.platform.startswith("linux"))


def start_adopter(folder: Path) -> None:
    """Give a job whose keeper is dead a new one; nothing happens when it has one. Returns once that is decided."""
    import subprocess

    own = {k: v for k, v in os.environ.items() if k not in (procs.JOB_VAR, "K2TUI_JOB_DIR")}
    subprocess.run(
        [*keeper_argv(folder), "--adopt"],
        cwd="/",
        env={**own, procs.KEEPER_VAR: folder.name},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        check=False,
    )
