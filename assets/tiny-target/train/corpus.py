"""Builds the text that the tiny target model is trained on, from one Python's standard library and nothing else.

What goes in: the library's own sources (comments and docstrings with them), the language reference topics that `pydoc`
carries, and question/answer samples made from docstrings, short functions and those topics. All of it is covered by the
PSF licence (LICENSE.txt beside the library; a few files carry their own permissive notice, which stays in their text).
No network, no clock, no chance: the same library gives the same bytes.

    python corpus.py OUT.jsonl.xz [--stdlib DIR]

Output: xz-compressed JSON lines. {"split": "train"|"heldout", "path": ..., "weight": n, "text": ...} or
{"split", "path", "weight", "turns": [[question, answer], ...]}. The split is by file: every 50th file by hash is held out
with everything that was made from it.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import inspect
import json
import lzma
import sys
import sysconfig
import textwrap
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

SKIP_PARTS = {"site-packages", "__pycache__", "_bundled", "idle_test", "encodings", "lib2to3", "pydoc_data"}
MAX_FILE_B = 200_000  # larger files are tables, not prose or code
MAX_ANSWER = 700  # characters
MAX_CODE_LINES = 24


def digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def split_of(path: str) -> str:
    return "heldout" if digest(path) % 50 == 0 else "train"


def library_files(root: Path) -> Iterator[tuple[str, str]]:
    """(relative path, text) of every source that reads like code or prose, sorted by path."""
    for file in sorted(root.rglob("*.py")):
        rel = file.relative_to(root)
        if SKIP_PARTS & set(rel.parts):
            continue
        raw = file.read_bytes()
        if not 200 <= len(raw) <= MAX_FILE_B:
            continue
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            continue  # test data in other encodings
        if text.isascii() or sum(ch.isascii() for ch in text) >= 0.98 * len(text):
            yield rel.as_posix(), text.replace("\r\n", "\n")


def module_name(rel: str) -> str:
    parts = rel.removesuffix(".py").split("/")
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def shorten(text: str) -> str:
    """Whole paragraphs up to MAX_ANSWER characters; always at least the first."""
    kept: list[str] = []
    size = 0
    for paragraph in text.strip().split("\n\n"):
        if kept and size + len(paragraph) > MAX_ANSWER:
            break
        kept.append(paragraph)
        size += len(paragraph)
    return "\n\n".join(kept).strip()[: 2 * MAX_ANSWER]


def pick(options: tuple[str, ...], key: str) -> str:
    return options[digest(key) % len(options)]


DOC_QUESTIONS = (
    "What does {name} do?",
    "Describe {name}.",
    "Give me the docstring of {name}.",
    "Explain {name} in a few words.",
    "What is {name} for?",
    "How does {name} work?",
    "Tell me about {name}.",
)
CODE_QUESTIONS = (
    "Write the function {name}.",
    "Show me the source of {name}.",
    "How is {name} written?",
    "Give me the code of {name}.",
)
TOPIC_QUESTIONS = (
    "Explain {name} in Python.",
    "Tell me about {name}.",
    "What does the Python reference say about {name}?",
    "Describe {name}.",
)


def samples(rel: str, text: str) -> Iterator[tuple[str, str]]:
    """(question, answer) pairs of one file: every documented name, and every short documented function's source."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    lines = text.splitlines()
    module = module_name(rel)

    def walk(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
        doc = ast.get_docstring(node, clean=True)  # type: ignore[arg-type]
        if doc and len(doc) > 20:
            yield pick(DOC_QUESTIONS, name).format(name=name), shorten(doc)
            if isinstance(node, ast.FunctionDef) and node.end_lineno and node.end_lineno - node.lineno < MAX_CODE_LINES:
                code = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
                yield pick(CODE_QUESTIONS, name).format(name=name), code[: 2 * MAX_ANSWER]
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                yield from walk(child, f"{name}.{child.name}")

    yield from walk(tree, module)


def topics(root: Path) -> dict[str, str]:
    file = root / "pydoc_data" / "topics.py"
    if not file.exists():
        return {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "topics":
            return {k: inspect.cleandoc(v) for k, v in sorted(ast.literal_eval(node.value).items())}
    return {}


def records(root: Path) -> Iterator[dict[str, object]]:
    for rel, text in library_files(root):
        is_test = "test" in rel.split("/")[0]
        split = split_of(rel)
        yield {"split": split, "path": rel, "weight": 1 if is_test else 2, "text": text}
        if is_test:
            continue
        pairs = list(samples(rel, text))
        start = 0
        while start < len(pairs):
            count = 1 + digest(f"{rel}#{start}") % 3  # one to three turns a dialogue
            yield {"split": split, "path": rel, "weight": 1, "turns": pairs[start : start + count]}
            start += count
    for name, text in topics(root).items():
        path = f"pydoc_data/topics/{name}"
        split = split_of(path)
        yield {"split": split, "path": path, "weight": 4, "text": text}
        question = pick(TOPIC_QUESTIONS, name).format(name=name)
        yield {"split": split, "path": path, "weight": 4, "turns": [(question, shorten(text))]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    parser.add_argument("--also", type=Path, action="append", default=[], metavar="DIR", help="more Python sources, for a larger model (may repeat)")
    args = parser.parse_args()
    if not (args.stdlib / "ast.py").exists():
        print(f"{args.stdlib} is not a Python standard library (no ast.py in it)", file=sys.stderr)
        return 2
    total = {"train": [0, 0, 0], "heldout": [0, 0, 0]}  # documents, dialogues, bytes
    with lzma.open(args.out, "wt", encoding="utf-8", preset=6) as out:
        for record in chain.from_iterable(records(root) for root in (args.stdlib, *args.also)):
            line = json.dumps(record, ensure_ascii=False)
            out.write(line + "\n")
            entry = total[str(record["split"])]
            entry[1 if "turns" in record else 0] += 1
            entry[2] += len(line.encode())
    for split, (documents, dialogues, size) in total.items():
        print(f"{split}: {documents} documents, {dialogues} dialogues, {size / 1e6:.1f} MB")
    print(f"{args.out}: {args.out.stat().st_size / 1e6:.1f} MB from {args.stdlib}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
