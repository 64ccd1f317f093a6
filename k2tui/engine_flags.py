"""Which arguments an installed engine knows, read from its own sources: the engine is never imported (that takes 10 s and more)."""

from __future__ import annotations

import ast
import difflib
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from k2tui.parsing import parse_json

_FIND = r"""
import importlib.util as u, importlib.metadata as m, json, re, sys
def folder(name):
    s = u.find_spec(name)
    return list(s.submodule_search_locations)[0] if s and s.submodule_search_locations else ''
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return ''
name = sys.argv[1]
out = {'package': folder(name), 'version': version(name), 'wants': {}, 'cuda': ''}
try: needs = m.requires(name) or []
except m.PackageNotFoundError: needs = []
for need in needs:
    pin = re.fullmatch(r'([\w.-]+)(?:\[[^]]*\])?\s*==\s*([\w.+]+)', need.strip())
    if pin: out['wants'][pin[1].replace('_', '-').lower()] = pin[2]
out['packages'] = {p: v for p in sys.argv[2:] if (v := version(p))}
try: out['cuda'] = (re.search(r"^cuda\b[^=\n]*= '([\d.]+)'", open(folder('torch') + '/version.py').read(), re.M) or ['', ''])[1]
except OSError: pass
print(json.dumps(out))
"""
_KERNELS = ("torch", "flashinfer-python", "sglang-kernel", "sgl-kernel", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "transformers")
_SOURCES = {
    "sglang": ("srt/server_args.py", "srt/arg_groups/fields/*.py"),
    "vllm": ("engine/arg_utils.py", "entrypoints/openai/cli_args.py", "entrypoints/cli/serve.py", "entrypoints/serve/**/cli_args.py"),
}
_LITERAL = re.compile(r"""["'](--[a-z][a-zA-Z0-9-]+)["']""")
_FIELD = re.compile(r"^    ([a-z][a-z0-9_]*)\s*:", re.MULTILINE)
_DECLARED = re.compile(r"^    [a-z][a-z0-9_]*\s*:\s*A\[", re.MULTILINE)  # SGLang after 0.5.12: the fields themselves are the arguments
_RENAMED = (
    ("--cuda-graph-max-bs", "--cuda-graph-max-bs-decode"),
    ("--cuda-graph-bs", "--cuda-graph-bs-decode"),
    ("--disable-piecewise-cuda-graph", "--disable-prefill-cuda-graph"),
    ("--piecewise-cuda-graph-max-tokens", "--cuda-graph-max-seq-len-prefill"),
)
"""The same thing in SGLang 0.5.12 and in 0.5.23, where the nearest spelling would be another thing. From the help texts of both."""


@dataclass(frozen=True)
class InstalledEngine:
    """package: folder of the package ("" = not there). flags: every `--name` it declares; empty = its sources cannot be read.

    packages: versions of what does its work (kernels, torch, NCCL), where installed. wants: the versions that its own metadata pins.
    torch_cuda: the CUDA that its torch was built for, "12.8"; "" for none.
    """

    name: str
    package: str
    version: str
    flags: frozenset[str]
    packages: Mapping[str, str] = field(default_factory=dict[str, str])
    wants: Mapping[str, str] = field(default_factory=dict[str, str])
    torch_cuda: str = ""


def find_engine(engine: str, python: str = "", env: Mapping[str, str] | None = None) -> InstalledEngine:
    """Where the interpreter `python` ("" = this one) has the engine. Starts that interpreter once; imports and reads nothing of the engine.

    env: what the profile adds to the environment; its PYTHONPATH may be where the engine is.
    """
    try:
        argv = [python or sys.executable, "-c", _FIND, engine, *_KERNELS]
        run = subprocess.run(argv, capture_output=True, text=True, timeout=20, env={**os.environ, **(env or {})})
        raw = parse_json(run.stdout.strip().rpartition("\n")[2])
        return InstalledEngine(engine, raw["package"], raw["version"], frozenset(), raw["packages"], raw["wants"], raw["cuda"])
    except (OSError, ValueError, KeyError, TypeError, subprocess.TimeoutExpired):
        return InstalledEngine(engine, "", "", frozenset())  # no interpreter, or none that answers


def installed(engine: str, python: str = "", env: Mapping[str, str] | None = None) -> InstalledEngine:
    """find_engine, with the flags that its sources declare."""
    found = find_engine(engine, python, env)
    return replace(found, flags=read_flags(engine, Path(found.package))) if found.package else found


def read_flags(engine: str, package: Path) -> frozenset[str]:
    """Every flag that the sources under `package` declare: literal "--x" and the fields of their argument classes.

    The same as the engine's own parser has (compared for SGLang 0.5.23), but for the "--no-x" of its switches.
    """
    found: set[str] = set()
    for pattern in _SOURCES.get(engine, ()):
        for path in package.glob(pattern):
            try:
                text = path.read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            found.update(_LITERAL.findall(text))
            if engine == "vllm":
                found.update("--" + name.replace("_", "-") for name in _FIELD.findall(text))
            elif _DECLARED.search(text):
                found.update(_declared(text))
    return frozenset(found)


def _declared(text: str) -> Iterator[str]:
    """The flags of SGLang's `name: A[type, Arg(...)]` fields; one with its own `cli_name` stands there as a literal, `no_cli` is none."""
    try:
        classes = [n for n in ast.parse(text).body if isinstance(n, ast.ClassDef)]
    except SyntaxError:  # of a newer Python
        return
    for item in (i for c in classes for i in c.body if isinstance(i, ast.AnnAssign)):
        kind = item.annotation
        if not (isinstance(item.target, ast.Name) and isinstance(kind, ast.Subscript) and ast.unparse(kind.value) == "A"):
            continue
        given = {k.arg for n in ast.walk(kind.slice) if isinstance(n, ast.Call) and ast.unparse(n.func) == "Arg" for k in n.keywords}
        if not given & {"no_cli", "cli_name"}:
            yield "--" + item.target.id.replace("_", "-")


def nearest(flag: str, flags: frozenset[str]) -> str:
    """The flag that is meant by one that the engine lacks: its name in another version, else the nearest spelling; "" for none."""
    for pair in _RENAMED:
        if flag in pair and (other := pair[pair.index(flag) - 1]) in flags:
            return other
    opposite = {"--enable-": "--disable-", "--disable-": "--enable-"}
    against = next((o for start, o in opposite.items() if flag.startswith(start)), "\0")
    known = [f for f in flags if not f.startswith(against)]
    return next(iter(difflib.get_close_matches(flag, known, n=1, cutoff=0.72)), "")


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
        out.append((word.split("=", 1)[0], nearest(name, flags)))
    return out
