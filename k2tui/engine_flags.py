"""Which arguments an installed engine knows, read from its own sources: the engine is never imported (that takes 10 s and more)."""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

_FIND = (
    "import importlib.util as u, importlib.metadata as m, sys\n"
    "s = u.find_spec(sys.argv[1])\n"
    "print(list(s.submodule_search_locations)[0] if s and s.submodule_search_locations else '')\n"
    "try: print(m.version(sys.argv[1]))\n"
    "except m.PackageNotFoundError: print('')\n"
)
_SOURCES = {
    "sglang": ("srt/server_args.py", "srt/arg_groups/**/*.py"),
    "vllm": ("engine/arg_utils.py", "entrypoints/openai/cli_args.py", "entrypoints/cli/serve.py", "entrypoints/serve/**/cli_args.py"),
}
_LITERAL = re.compile(r"""["'](--[a-z][a-zA-Z0-9-]+)["']""")
_FIELD = re.compile(r"^    ([a-z][a-z0-9_]*)\s*:\s*(?!.*Derived\()", re.MULTILINE)


@dataclass(frozen=True)
class InstalledEngine:
    """package: folder of the package ("" = not there). flags: every `--name` it declares; empty = its sources cannot be read."""

    name: str
    package: str
    version: str
    flags: frozenset[str]


def find_engine(engine: str, python: str = "") -> InstalledEngine:
    """Where the interpreter `python` ("" = this one) has the engine. Starts that interpreter once; imports and reads nothing of the engine."""
    try:
        run = subprocess.run([python or sys.executable, "-c", _FIND, engine], capture_output=True, text=True, timeout=20)
        lines = run.stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        lines = []
    folder, version = [*lines, "", ""][:2]
    return InstalledEngine(engine, folder, version, frozenset())


def installed(engine: str, python: str = "") -> InstalledEngine:
    """find_engine, with the flags that its sources declare."""
    found = find_engine(engine, python)
    return replace(found, flags=read_flags(engine, Path(found.package))) if found.package else found


def read_flags(engine: str, package: Path) -> frozenset[str]:
    """Every flag that the sources under `package` declare: literal "--x" and the fields of their argument classes."""
    found: set[str] = set()
    for pattern in _SOURCES.get(engine, ()):
        for path in package.glob(pattern):
            try:
                text = path.read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            found.update(_LITERAL.findall(text))
            found.update("--" + name.replace("_", "-") for name in _FIELD.findall(text))
    return frozenset(found)


def unknown_flags(argv: Sequence[str], flags: frozenset[str]) -> list[tuple[str, str]]:
    """(flag, nearest known flag or "") for every `--flag` of argv that the engine does not declare."""
    if not flags:
        return []
    out: list[tuple[str, str]] = []
    for word in argv:
        if not word.startswith("--") or word == "--":
            continue
        name = word.split("=", 1)[0].replace("_", "-")
        if name in flags or (name.startswith("--no-") and "--" + name[5:] in flags):
            continue
        if len([f for f in flags if f.startswith(name)]) == 1:
            continue  # argparse takes an unambiguous beginning
        near = difflib.get_close_matches(name, flags, n=1, cutoff=0.72)
        out.append((word.split("=", 1)[0], near[0] if near else ""))
    return out
