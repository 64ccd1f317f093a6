"""Which target ids the draft knows. Counts come from the training data; special tokens are always in."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from k2tui.eagle3.data import States
from k2tui.errors import K2Error
from k2tui.parsing import parse_json


def count_tokens(
    states: States, vocab_size: int, told: Callable[[int], None] = lambda done: None
) -> np.ndarray:
    """How often each target id stands at a loss-bearing position. int64 [vocab]. Raises K2Error on an id outside it.

    told: called with the number of samples done."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for i in range(len(states.lengths)):
        ids, mask = states.ids(i), states.mask(i)
        if len(ids) and (int(ids.max()) >= vocab_size or int(ids.min()) < 0):
            raise K2Error(
                f"sample {i} holds token {int(ids.max())}, the target knows {vocab_size}",
                "were these states made with another model?",
            )
        counts += np.bincount(ids[mask], minlength=vocab_size)
        told(i + 1)
    return counts


def special_ids(target: Path, vocab_size: int) -> list[int]:
    """Ids of the tokenizer's special and added tokens (end, think and tool marks), and config.json's bos, eos and pad."""
    found: set[int] = set()
    tokenizer = target / "tokenizer.json"
    if tokenizer.exists():
        try:
            raw = parse_json(tokenizer.read_text(encoding="utf-8"))
            found |= {int(t["id"]) for t in raw.get("added_tokens") or []}
        except (OSError, ValueError, KeyError, TypeError) as err:
            raise K2Error(f"{tokenizer}: cannot be read: {err}", "download that file again")
    config = target / "tokenizer_config.json"
    if config.exists():
        try:
            raw = parse_json(config.read_text(encoding="utf-8"))
            found |= {int(i) for i in (raw.get("added_tokens_decoder") or {})}
        except (OSError, ValueError, TypeError):
            pass  # tokenizer.json, where there is one, has said it already
    for name in ("config.json", "generation_config.json"):
        path = target / name
        if path.exists():
            whole = json.loads(path.read_text(encoding="utf-8"))
            for part in (whole, whole.get("text_config") or {}):
                for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
                    value = part.get(key)
                    found |= {
                        int(v) for v in (value if isinstance(value, list) else [value]) if v is not None
                    }
    return sorted(i for i in found if 0 <= i < vocab_size)


def choose_vocab(counts: np.ndarray, size: int, always: Iterable[int] = ()) -> tuple[Tensor, float]:
    """(target ids [size] ascending, share of loss-bearing tokens that they cover).

    `always` come first, then the most frequent (ties: the lower id), then unused ids from 0 up. Raises K2Error.
    """
    total = len(counts)
    keep = sorted(set(always))
    if not 0 < size <= total:
        raise K2Error(
            f"a draft vocabulary of {size} does not fit a target's of {total}",
            "choose --draft-vocab-size between 1 and the vocabulary size",
        )
    if len(keep) > size:
        raise K2Error(
            f"{len(keep)} special tokens do not fit a draft vocabulary of {size}",
            "choose a larger --draft-vocab-size",
        )
    order = np.lexsort((np.arange(total), -counts))
    chosen = np.zeros(total, dtype=bool)
    chosen[keep] = True
    rest = order[~chosen[order]][: size - len(keep)]
    chosen[rest] = True
    covered = float(counts[chosen].sum() / max(1, counts.sum()))
    return torch.from_numpy(np.flatnonzero(chosen)), covered
