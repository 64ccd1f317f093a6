"""One row of tokenized_data.jsonl, and a file of them: read, checked, and looked at without parsing every number."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from k2tui.errors import K2Error
from k2tui.parsing import ParseError, parse_json
from k2tui.regular import open_regular

KEYS = (
    "input_ids",
    "loss_mask",
    "seq_len",
    "n_prompt_tokens",
    "n_response_tokens",
    "has_reasoning",
    "finish_reason",
)
_TAIL_B = 400
_TAIL = re.compile(
    rb'"seq_len": ?(\d+), ?"n_prompt_tokens": ?(\d+), ?"n_response_tokens": ?(\d+), ?"has_reasoning": ?(true|false), ?'
    rb'"finish_reason": ?("(?:[^"\\]|\\.)*"|null)\s*\}\s*\Z'
)


@dataclass(frozen=True, slots=True)
class Row:
    """input_ids [seq_len]; loss_mask [seq_len], 1 on tokens that the draft learns to predict."""

    input_ids: Sequence[int]
    loss_mask: Sequence[int]
    seq_len: int
    n_prompt_tokens: int
    n_response_tokens: int
    has_reasoning: bool
    finish_reason: str | None

    def to_line(self) -> str:
        """JSON of exactly the seven keys, in their order, newline included."""
        return (
            json.dumps({k: list(v) if isinstance(v := getattr(self, k), tuple) else v for k in KEYS}) + "\n"
        )

    def prompt_hash(self) -> str:
        return hash_ids(self.input_ids[: self.n_prompt_tokens])


@dataclass(frozen=True, slots=True)
class RowHead:
    """The scalars of a row, without its tokens."""

    seq_len: int
    n_prompt_tokens: int
    n_response_tokens: int
    has_reasoning: bool
    finish_reason: str | None


def hash_ids(ids: Sequence[int]) -> str:
    """Name of a token sequence: sha256 of its ids, 16 hex digits."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:16]


def make_row(
    input_ids: Sequence[int],
    loss_mask: Sequence[int],
    n_prompt_tokens: int,
    has_reasoning: bool,
    finish_reason: str | None,
) -> Row:
    count = len(input_ids)
    return Row(
        list(input_ids),
        list(loss_mask),
        count,
        n_prompt_tokens,
        count - n_prompt_tokens,
        has_reasoning,
        finish_reason,
    )


def parse_row(line: bytes | str, where: str) -> Row:
    """Raises K2Error naming the place, the key and what is wrong."""
    try:
        raw = parse_json(line)
    except ParseError as err:
        raise K2Error(
            f"{where}: not JSON: {err.message.removeprefix('not valid JSON: ')}",
            "`k2tui data check` names every bad line",
        )
    if not isinstance(raw, dict):
        raise K2Error(f"{where}: not a JSON object")
    problem = problem_of(raw)
    if problem:
        raise K2Error(f"{where}: {problem}", "`k2tui data check` names every bad line")
    return Row(**{k: raw[k] for k in KEYS})


def problem_of(raw: dict[str, Any], vocab_size: int | None = None) -> str:
    """Why a row is not valid, in words; "" when it is."""
    missing = [k for k in KEYS if k not in raw]
    extra = [k for k in raw if k not in KEYS]
    if missing or extra:
        return "; ".join(
            filter(
                None,
                (
                    f"missing {', '.join(missing)}" if missing else "",
                    f"unknown {', '.join(extra)}" if extra else "",
                ),
            )
        )
    ids, mask = raw["input_ids"], raw["loss_mask"]
    for key in ("seq_len", "n_prompt_tokens", "n_response_tokens"):
        if type(raw[key]) is not int or raw[key] < 0:
            return f"{key} is not a count: {raw[key]!r}"
    if not isinstance(ids, list) or not isinstance(mask, list):
        return "input_ids and loss_mask must be lists"
    if len(ids) != raw["seq_len"]:
        return f"seq_len {raw['seq_len']}, but {len(ids)} input_ids"
    if len(mask) != len(ids):
        return f"{len(ids)} input_ids, but a loss_mask of {len(mask)}"
    if raw["n_prompt_tokens"] + raw["n_response_tokens"] != raw["seq_len"]:
        return f"n_prompt_tokens {raw['n_prompt_tokens']} + n_response_tokens {raw['n_response_tokens']} is not seq_len {raw['seq_len']}"
    if not ids:
        return "no tokens"
    if not all(type(t) is int for t in ids) or min(ids) < 0:
        return "input_ids holds something that is not a token id"
    if vocab_size is not None and max(ids) >= vocab_size:
        return f"token {max(ids)} is outside the vocabulary of {vocab_size}"
    if mask.count(0) + mask.count(1) != len(mask):
        return "loss_mask holds something other than 0 and 1"
    if not any(mask):
        return "loss_mask is all zeros: nothing to learn"
    if raw["n_response_tokens"] and not any(mask[raw["n_prompt_tokens"] :]):
        return "loss_mask leaves the whole response out"
    if type(raw["has_reasoning"]) is not bool:
        return f"has_reasoning is not true or false: {raw['has_reasoning']!r}"
    if raw["finish_reason"] is not None and not isinstance(raw["finish_reason"], str):
        return f"finish_reason is not a text: {raw['finish_reason']!r}"
    return ""


def _refuse_endless(path: Path, fh: BinaryIO) -> None:
    """Refuse what says that it is empty and is not: the kernel's own files, such as /proc/self/mem."""
    try:
        if not fh.read(1):
            return
    except OSError:
        pass
    raise K2Error(f"{path}: no regular file (of the kernel)", "give a file on a disk")


class RowFile:
    """A JSONL file of rows, memory-mapped: the place of each line is found at once, its numbers only when asked for.

    Raises K2Error when the file is not there or is a folder. An empty file has no rows.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            fh = open_regular(path)
        except IsADirectoryError:
            raise K2Error(f"{path} is a folder", "give the tokenized_data.jsonl inside it")
        except OSError as err:
            raise K2Error(
                f"{path}: {err.strerror or err}", "check the path; `k2tui prepare` makes such a file"
            )
        with fh:
            self.size_b = os.fstat(fh.fileno()).st_size
            if not self.size_b:
                _refuse_endless(path, fh)
            self._map = mmap.mmap(fh.fileno(), 0, access=mmap.ACCESS_READ) if self.size_b else None
        self.offsets: list[int] = [0]
        if self._map is not None:
            at = self._map.find(b"\n")
            while at >= 0:
                self.offsets.append(at + 1)
                at = self._map.find(b"\n", at + 1)
            if self.offsets[-1] != self.size_b:
                self.offsets.append(self.size_b)
            while len(self.offsets) > 1 and not self.line(len(self.offsets) - 2).strip():
                self.offsets.pop()  # blank lines at the end are no rows

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def ends_whole(self) -> bool:
        """False when the last line has no newline (a writer was killed in the middle of it)."""
        return self._map is None or self._map[self.offsets[-1] - 1 : self.offsets[-1]] == b"\n"

    def line(self, number: int) -> bytes:
        """Bytes of row `number` (from 0)."""
        assert self._map is not None
        return self._map[self.offsets[number] : self.offsets[number + 1]]

    def where(self, number: int) -> str:
        return f"{self.path}:{number + 1}"

    def row(self, number: int) -> Row:
        return parse_row(self.line(number), self.where(number))

    def rows(self) -> Iterator[Row]:
        for number in range(len(self)):
            yield self.row(number)

    def head(self, number: int) -> RowHead:
        """Scalars of a row, from the end of its line when the keys stand in their usual order."""
        assert self._map is not None
        start, end = self.offsets[number], self.offsets[number + 1]
        found = _TAIL.search(self._map[max(start, end - _TAIL_B) : end])
        if found:
            reason = found[5]
            return RowHead(
                int(found[1]),
                int(found[2]),
                int(found[3]),
                found[4] == b"true",
                None if reason == b"null" else json.loads(reason),
            )
        row = self.row(number)
        return RowHead(
            row.seq_len, row.n_prompt_tokens, row.n_response_tokens, row.has_reasoning, row.finish_reason
        )

    def heads(self) -> list[RowHead]:
        return [self.head(n) for n in range(len(self))]

    def first_tokens(self, number: int, count: int = 12) -> list[int]:
        """The first ids of a row without parsing the rest."""
        found = re.search(rb'"input_ids": ?\[([^\]]*)', self.line(number)[: 40 + 12 * count])
        return [int(t) for t in found[1].split(b",")[:count] if t.strip().isdigit()] if found else []

    def sha256(self, count: int | None = None) -> str:
        """Hash of the first `count` rows as they stand in the file (all when None)."""
        end = self.offsets[-1 if count is None else count]
        digest = hashlib.sha256()
        if self._map is not None:
            for at in range(0, end, 16 << 20):
                digest.update(self._map[at : min(at + (16 << 20), end)])
        return digest.hexdigest()
