"""Where k2tui keeps its files. Pure path arithmetic: nothing is created here, except by `ensure_dir`.

`K2TUI_HOME` puts everything under one folder (tests, demos); else the XDG folders are used.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

_SAFE = ("-P",) if hasattr(sys.flags, "safe_path") else ()  # the capture hooks also run in an engine's older Python


def _home(env: str, default: str) -> Path:
    root = os.environ.get("K2TUI_HOME")
    if root:
        return Path(root)
    xdg = os.environ.get(env)
    return Path(xdg) / "k2tui" if xdg else Path.home() / default / "k2tui"


def config_dir() -> Path:
    return _home("XDG_CONFIG_HOME", ".config")


def state_dir() -> Path:
    return _home("XDG_STATE_HOME", ".local/state")


def jobs_dir() -> Path:
    """Job folders. On this machine's own disk, also when the home is on the network (docs/jobs.md)."""
    from k2tui.jobs.place import local_root

    return local_root(state_dir()) / "jobs"


def bench_db() -> Path:
    return state_dir() / "runs.db"


def loads_file() -> Path:
    """History of server starts, one JSON line each; the ETA learns from it."""
    return state_dir() / "loads.jsonl"


def assets_dir() -> Path:
    """The `assets` folder: inside the wheel, or beside the package in a checkout."""
    here = Path(__file__).resolve().parent
    packed = here / "_assets"
    return packed if packed.is_dir() else here.parent / "assets"


def install_hint(extra: str) -> str:
    """The command that installs k2tui with an extra of pyproject.toml; it is on no package index, so this is from a checkout."""
    import shlex

    checkout = Path(__file__).resolve().parent.parent
    if (checkout / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{checkout}[{extra}]')}"
    return f"pip install -e '.[{extra}]' in a checkout of k2tui"


def model_path(name: str) -> str:
    """A profile's model or draft: "asset:NAME" is the folder of one that k2tui ships, ~ is the home; anything else stays. Raises UsageError."""
    if not name.startswith("asset:"):
        return os.path.expanduser(name)
    folder = assets_dir() / name.removeprefix("asset:")
    if not folder.is_dir():
        from k2tui.errors import UsageError

        shipped = sorted(p.parent.name for p in assets_dir().glob("*/config.json"))
        raise UsageError(f"k2tui ships no model {name!r}", "shipped models: " + ", ".join(f"asset:{n}" for n in shipped))
    return str(folder)


def own_module(module: str, python: str = "") -> list[str]:
    """How a module of k2tui is started: without the working folder on the path, where a random.py would shadow the library's own.

    python: another interpreter that can run k2tui (so it is 3.11 or newer, and has -P). PYTHONPATH stays.
    """
    return [python or sys.executable, *_SAFE, "-m", module]


def safely(argv: Sequence[str]) -> list[str]:
    """The command, as `own_module` has it where it starts a module of k2tui with this interpreter; else as it is."""
    words = list(argv)
    is_own = words[:2] == [sys.executable, "-m"] and words[2:] and words[2].partition(".")[0] == "k2tui"
    return [*own_module(words[2]), *words[3:]] if is_own else words


def ensure_dir(path: Path) -> Path:
    """Create a private folder (0700 for what is new)."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path
