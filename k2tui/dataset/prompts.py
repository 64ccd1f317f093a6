"""Prompts from files: JSONL, Parquet, or a Hugging Face datasets folder on disk. Turns every known shape into chat messages."""

from __future__ import annotations

import hashlib
import io
import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k2tui.errors import K2Error, UsageError
from k2tui.parsing import parse_json
from k2tui.paths import install_hint
from k2tui.regular import open_regular

_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system", "tool": "tool",
          "function": "tool", "observation": "tool", "developer": "system", "bot": "assistant", "chatgpt": "assistant"}  # fmt: skip
_TEXT_KEYS = ("prompt", "question", "instruction", "problem", "query", "text")


@dataclass(frozen=True, slots=True)
class Prompt:
    """messages: role and content, the last one from the user (or a tool). tools: as the chat API takes them."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    source: str = ""
    name: str = ""  # where it stands: file and line

    def key(self) -> str:
        """Equal for prompts that say the same: case and spacing do not count."""
        told = [(m["role"], " ".join(str(m.get("content") or "").lower().split())) for m in self.messages]
        return hashlib.sha256(
            json.dumps([told, list(self.tools)], sort_keys=True, default=str).encode()
        ).hexdigest()[:16]


def read_prompts(path: Path, *, multi_turn: bool = True) -> Iterator[Prompt]:
    """Every prompt of one file or folder. multi_turn=False: only up to the first user message.

    Raises UsageError for an unknown kind of file, K2Error naming file and line for a row that holds no prompt.
    """
    for number, raw in enumerate(_raw_rows(path), 1):
        where = f"{path}:{number}"
        prompt = to_prompt(raw, where, path.stem)
        if not multi_turn:
            first = next(
                (i for i, m in enumerate(prompt.messages) if m["role"] == "user"), len(prompt.messages) - 1
            )
            prompt = Prompt(prompt.messages[: first + 1], prompt.tools, prompt.source, prompt.name)
        yield prompt


def to_prompt(raw: Any, where: str, source: str) -> Prompt:
    """One row of any known shape. Trailing assistant messages are dropped: the server answers anew."""
    if isinstance(raw, str):
        raw = {"prompt": raw}
    if not isinstance(raw, Mapping):
        raise K2Error(f"{where}: not an object with a prompt")
    messages: list[dict[str, Any]] = []
    turns = next((raw[k] for k in ("messages", "conversations", "conversation", "turns") if raw.get(k)), None)
    if isinstance(turns, str):
        turns = _nested(turns, where)
    if turns is not None:
        for turn in turns:
            if isinstance(turn, str):  # alternating texts
                messages.append({"role": "assistant" if len(messages) % 2 else "user", "content": turn})
                continue
            role = str(turn.get("role") or turn.get("from") or "").lower()
            if role not in _ROLES:
                raise K2Error(f"{where}: unknown role {role!r}", f"roles: {', '.join(sorted(set(_ROLES)))}")
            kept = {
                k: v
                for k, v in turn.items()
                if k not in ("role", "from", "value", "content", "weight", "loss") and v is not None
            }
            messages.append({"role": _ROLES[role], "content": turn.get("content", turn.get("value")), **kept})
    else:
        text = next((raw[k] for k in _TEXT_KEYS if raw.get(k)), None)
        if text is None:
            raise K2Error(
                f"{where}: no messages and none of {', '.join(_TEXT_KEYS)}",
                f"its keys: {', '.join(map(str, raw))[:200]}",
            )
        if raw.get("input") and "instruction" in raw:
            text = f"{text}\n\n{raw['input']}"
        messages.append({"role": "user", "content": str(text)})
    system = raw.get("system") or raw.get("system_prompt")
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": str(system)})
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not any(m["role"] == "user" for m in messages):
        raise K2Error(f"{where}: no user message")
    tools = raw.get("tools") or ()
    if isinstance(tools, str):
        tools = _nested(tools, where)
    told = raw.get("source") or raw.get("dataset") or raw.get("category") or source
    return Prompt(tuple(messages), tuple(tools), str(told), where)


def _nested(text: str, where: str) -> Any:
    """What a column of a row holds that is a JSON text itself."""
    try:
        return parse_json(text)
    except ValueError as err:
        raise K2Error(f"{where}: {err}") from None


def _raw_rows(path: Path) -> Iterator[Any]:
    if path.is_dir():
        files = sorted(path.glob("*.arrow"))
        if files:
            yield from _arrow(files)
            return
        files = sorted(
            p
            for p in path.rglob("*")
            if p.suffix in (".parquet", ".jsonl", ".json") and not p.name.startswith(".")
        )
        files = [p for p in files if p.name not in ("dataset_info.json", "state.json", "dataset_dict.json")]
        nested = sorted(path.glob("*/*.arrow"))
        if nested:
            yield from _arrow(nested)
            return
        if not files:
            raise UsageError(
                f"{path}: no .arrow, .parquet or .jsonl files",
                "give a file, or a folder saved by datasets.save_to_disk",
            )
        for file in files:
            yield from _raw_rows(file)
        return
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        pq = _pyarrow("pyarrow.parquet", path)
        for batch in pq.ParquetFile(path).iter_batches(256):
            yield from batch.to_pylist()
    elif suffix == ".arrow":
        yield from _arrow([path])
    elif suffix == ".json":
        raw = _load(path)
        if not isinstance(raw, list):
            raise UsageError(
                f"{path}: a .json file must hold a list", "one object a line belongs into .jsonl"
            )
        yield from raw
    elif suffix in (".jsonl", ".ndjson", ".txt"):
        try:
            with io.TextIOWrapper(open_regular(path), encoding="utf-8") as fh:
                for number, line in enumerate(fh, 1):
                    if not line.strip():
                        continue
                    if suffix == ".txt":
                        yield line.strip()
                        continue
                    try:
                        yield parse_json(line)
                    except ValueError as err:
                        raise K2Error(f"{path}:{number}: {err}")
        except (OSError, UnicodeDecodeError) as err:
            raise K2Error(f"{path}: {err}", "check the path")
    else:
        raise UsageError(
            f"{path}: unknown kind of file {suffix!r}", ".jsonl, .json, .txt, .parquet, or a datasets folder"
        )


def _load(path: Path) -> Any:
    try:
        with open_regular(path) as fh:
            return parse_json(fh.read())
    except (OSError, ValueError) as err:
        raise K2Error(f"{path}: {err}")


def _arrow(files: Sequence[Path]) -> Iterator[Any]:
    pa = _pyarrow("pyarrow", files[0])
    for path in files:
        with pa.memory_map(str(path)) as source:
            try:
                reader = pa.ipc.open_stream(source)
            except pa.ArrowInvalid:
                reader = pa.ipc.open_file(source)
                for i in range(reader.num_record_batches):
                    yield from reader.get_batch(i).to_pylist()
                continue
            for batch in reader:
                yield from batch.to_pylist()


def _pyarrow(name: str, path: Path) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError:
        raise K2Error(
            f"{path}: Parquet and Arrow files need pyarrow, which is not installed",
            install_hint("data") + " (or pip install pyarrow); or use JSONL",
        )


def select(
    prompts: Iterable[Prompt], count: int | None, *, balance: bool, per_source: int | None, seed: int
) -> tuple[list[Prompt], Counter[str]]:
    """Distinct prompts, shuffled by `seed`; balance: sources take turns. Returns them and how many were left out, by reason."""
    out: Counter[str] = Counter()
    seen: set[str] = set()
    by_source: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        key = prompt.key()
        if key in seen:
            out["duplicate prompt"] += 1
            continue
        seen.add(key)
        by_source.setdefault(prompt.source, []).append(prompt)
    for source, found in sorted(by_source.items()):
        random.Random(f"{seed}/{source}").shuffle(found)
        if per_source is not None and len(found) > per_source:
            out["more than --per-source"] += len(found) - per_source
            del found[per_source:]
    if balance:
        picked: list[Prompt] = []
        queues = [found for _, found in sorted(by_source.items())]
        depth = max((len(q) for q in queues), default=0)
        for row in range(depth):
            picked += [q[row] for q in queues if row < len(q)]
    else:
        picked = [p for _, found in sorted(by_source.items()) for p in found]
        random.Random(seed).shuffle(picked)
    if count is not None and len(picked) > count:
        out["more than --count"] += len(picked) - count
        del picked[count:]
    return picked, out
