"""Workloads from names and files. Reads files; sends nothing. A bad line is an error that names file, line and key."""

from __future__ import annotations

import hashlib
import io
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from k2tui.core import workload as w
from k2tui.core.workload import Prompt, Workload
from k2tui.errors import UsageError
from k2tui.loadgen.jsonvalue import listing, mapping
from k2tui.parsing import ParseError, parse_json
from k2tui.regular import open_regular

KINDS = ("random", "shared-prefix", "multi-turn", "mooncake", "sharegpt", "tokenized", "jsonl")
DEFAULT_OUTPUT = 128  # tokens, where a file says nothing


@dataclass(frozen=True)
class Wanted:
    """What the user asked for, see options.py. vocab: half-open range of safe random ids."""

    dataset: str = "random"
    api: str = "generate"
    num_prompts: int = 32
    random_input_len: int = 64
    random_output_len: int = 32
    random_range_ratio: float = 1.0
    output_len: int | None = None
    prefix_len: int = 256
    prefix_groups: int = 4
    zipf: float = 0.0
    turns: int = 3
    trace_speed: float = 1.0
    vocab: tuple[int, int] = (16, 900)
    max_input_len: int | None = None


def build(want: Wanted, seed: int) -> Workload:
    """The workload with its prompts. Raises UsageError naming what is wrong with the name or the file."""
    kind, _, name = want.dataset.partition(":")
    if kind not in KINDS:
        raise UsageError(f"unknown dataset {want.dataset!r}", "known: " + ", ".join(KINDS))
    if kind in ("mooncake", "sharegpt", "tokenized", "jsonl"):
        if not name:
            raise UsageError(f"dataset {kind!r} needs a file", f"example: --dataset {kind}:FILE")
        return _from_file(kind, Path(name).expanduser(), want, seed)
    n, i, o = want.num_prompts, want.random_input_len, want.random_output_len
    params: dict[str, Any] = {"random_input_len": i, "random_output_len": o, "num_prompts": n, "seed": seed}
    if kind == "multi-turn":
        params["turns"] = want.turns
        prompts = w.multi_turn(n, turns=want.turns, input_len=i, output_len=o, seed=seed)
    elif kind == "shared-prefix":
        params |= {"prefix_len": want.prefix_len, "groups": want.prefix_groups, "zipf": want.zipf}
        if want.api == "chat":
            rng = random.Random(seed)
            heads = [w.words(rng, want.prefix_len) for _ in range(want.prefix_groups)]
            prompts = [Prompt(o, text=f"{heads[k % len(heads)]} {w.words(rng, i)}") for k in range(n)]
        else:
            prompts = w.shared_prefix(
                n, groups=want.prefix_groups, prefix_len=want.prefix_len, input_len=i, output_len=o, seed=seed,
                vocab=want.vocab, zipf=want.zipf,
            )  # fmt: skip
    else:
        params["range_ratio"] = want.random_range_ratio
        if want.api == "chat":
            prompts = w.random_text(
                n, input_len=i, output_len=o, seed=seed, range_ratio=want.random_range_ratio
            )
        else:
            prompts = w.random_ids(
                n, input_len=i, output_len=o, seed=seed, range_ratio=want.random_range_ratio, vocab=want.vocab
            )
    return Workload(kind, params, tuple(prompts))


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of a JSONL file, or of a JSON list (the number is then the item's)."""
    try:
        with io.TextIOWrapper(open_regular(path), encoding="utf-8") as fh:
            head = fh.read(1)
            while head and head.isspace():
                head = fh.read(1)
            fh.seek(0)
            if head == "[":
                for number, item in enumerate(listing(parse_json(fh.read())), 1):
                    if not isinstance(item, dict):
                        raise UsageError(f"{path}: item {number} is no object")
                    yield number, mapping(item)
                return
            for number, line in enumerate(fh, 1):
                if not line.strip():
                    continue
                try:
                    found: Any = parse_json(line)
                except ParseError as err:
                    raise UsageError(f"{path}:{number}: {err.message}") from None
                if not isinstance(found, dict):
                    raise UsageError(f"{path}:{number}: a line must be an object {{...}}")
                yield number, mapping(found)
    except ParseError as err:
        raise UsageError(err.at(str(path))) from None
    except UnicodeDecodeError as err:
        raise UsageError(f"{path}: not UTF-8 text (byte {err.start})") from None
    except OSError as err:
        raise UsageError(f"{path}: {err.strerror}", "give an existing file after --dataset KIND:") from None


def _from_file(kind: str, path: Path, want: Wanted, seed: int) -> Workload:
    prompts: list[Prompt] = []
    digest = hashlib.sha256()
    if kind == "mooncake":
        rows: list[dict[str, Any]] = []
        for number, item in _lines(path):
            for key in ("timestamp", "input_length", "output_length"):
                if not isinstance(item.get(key), int | float):
                    raise UsageError(f"{path}:{number}: a trace line needs the number {key!r}")
            rows.append(item)
            digest.update(json.dumps(item, sort_keys=True).encode())
            if len(rows) >= want.num_prompts:
                break
        if not rows:
            raise UsageError(f"{path} holds no trace line")
        prompts = w.from_mooncake(rows, vocab=want.vocab, speed=want.trace_speed)
        params = {
            "name": path.name,
            "sha": digest.hexdigest()[:16],
            "speed": want.trace_speed,
            "num_prompts": len(rows),
        }
        return Workload("trace", params, tuple(prompts))
    for number, item in _lines(path):
        prompt = _PARSE[kind](item, f"{path}:{number}", want)
        digest.update(json.dumps(item, sort_keys=True).encode())
        if prompt is not None:
            prompts.append(prompt)
    if not prompts:
        raise UsageError(f"{path} holds no usable prompt for --dataset {kind}")
    order = random.Random(seed)
    chosen = order.sample(prompts, want.num_prompts) if len(prompts) >= want.num_prompts else [
        prompts[i % len(prompts)] for i in range(want.num_prompts)
    ]  # fmt: skip
    params = {
        "name": path.name,
        "sha": digest.hexdigest()[:16],
        "output_len": want.output_len,
        "num_prompts": len(chosen),
        "seed": seed,
    }
    return Workload(kind, params, tuple(chosen))


def _sharegpt(item: dict[str, Any], where: str, want: Wanted) -> Prompt | None:
    """{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}, ...]}: the first exchange."""
    talk = item.get("conversations")
    if talk is None:
        talk = item.get("conversation")
    if not isinstance(talk, list):
        raise UsageError(
            f"{where}: no list 'conversations'", "ShareGPT files have it; for other files use jsonl:FILE"
        )
    turns = [mapping(t) for t in listing(talk)]
    human = next((k for k, t in enumerate(turns) if t.get("from") in ("human", "user")), None)
    if human is None or human + 1 >= len(turns):
        return None
    said = str(turns[human].get("value") or turns[human].get("content") or "")
    answer = str(turns[human + 1].get("value") or turns[human + 1].get("content") or "")
    if not said.strip():
        return None
    # about four characters a token where the file counts none; --output-len makes it exact
    return Prompt(want.output_len or max(len(answer) // 4, 4), text=said)


def _tokenized(item: dict[str, Any], where: str, want: Wanted) -> Prompt | None:
    """{"input_ids": [...], "loss_mask": [...]}: ids up to the first learned token are the prompt, the rest the answer."""
    ids = listing(item.get("input_ids"))
    if not ids or not all(isinstance(t, int) for t in ids):
        raise UsageError(f"{where}: 'input_ids' must be a list of token numbers")
    mask = listing(item.get("loss_mask"))
    cut = len(ids)
    if len(mask) == len(ids) and any(mask):
        cut = next(k for k, m in enumerate(mask) if m)
    if cut == 0:
        cut = max(len(ids) // 2, 1)
    rest = len(ids) - cut
    if want.api == "chat":
        raise UsageError(
            "tokenized data cannot go over the chat route", "use --api generate or --api completions"
        )
    return Prompt(want.output_len or rest or DEFAULT_OUTPUT, ids=tuple(ids[:cut]))


def _jsonl(item: dict[str, Any], where: str, want: Wanted) -> Prompt | None:
    """Any of: input_ids, messages, prompt, text, question, instruction; optional output_len / max_tokens."""
    told = (want.output_len, item.get("output_len"), item.get("max_tokens"), DEFAULT_OUTPUT)
    asked = next(value for value in told if value is not None)
    if not isinstance(asked, int) or isinstance(asked, bool) or asked < 1:
        raise UsageError(f"{where}: the output length {asked!r} is no whole number above 0")
    if isinstance(item.get("input_ids"), list):
        made = _tokenized(item, where, want)
        is_told = item.get("output_len") is not None or item.get("max_tokens") is not None
        return replace(made, output_len=asked) if is_told and made is not None else made
    messages = listing(item.get("messages"))
    if messages:
        kept = [mapping(m) for m in messages if isinstance(m, dict)]
        while kept and kept[-1].get("role") == "assistant":
            kept.pop()
        return Prompt(asked, messages=tuple(kept)) if kept else None
    for key in ("prompt", "text", "question", "instruction"):
        if isinstance(item.get(key), str) and item[key].strip():
            return Prompt(asked, text=item[key])
    if isinstance(item.get("conversations"), list):
        return _sharegpt(item, where, want)
    raise UsageError(
        f"{where}: no prompt found",
        "a line needs one of: prompt, text, question, instruction, messages, input_ids",
    )


_PARSE = {"sharegpt": _sharegpt, "tokenized": _tokenized, "jsonl": _jsonl}
