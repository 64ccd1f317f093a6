"""What people ask of a data file, as values: lengths, shares, histogram, duplicates; and merge, split, export."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from k2tui.dataset.rows import KEYS, RowFile, hash_ids, problem_of
from k2tui.errors import K2Error, UsageError
from k2tui.parsing import parse_json


@dataclass(frozen=True, slots=True)
class Spread:
    low: int
    p50: int
    mean: float
    p90: int
    p99: int
    high: int

    @staticmethod
    def of(values: Sequence[int]) -> Spread:
        if not values:
            return Spread(0, 0, 0.0, 0, 0, 0)
        s = sorted(values)

        def at(q: float) -> int:
            return s[min(len(s) - 1, int(q * len(s)))]

        return Spread(s[0], at(0.5), sum(s) / len(s), at(0.9), at(0.99), s[-1])


@dataclass(frozen=True, slots=True)
class Summary:
    """Lengths in tokens. histogram: (from, to, rows) of seq_len, `to` not included."""

    path: str
    size_b: int
    rows: int
    tokens: int
    response_tokens: int
    seq_len: Spread
    prompt: Spread
    response: Spread
    with_reasoning: int
    finish_reasons: dict[str, int]
    histogram: tuple[tuple[int, int, int], ...]
    first_tokens: tuple[int, ...]
    keys: tuple[str, ...]
    is_cut: bool


def summarize(path: Path, bins: int = 12) -> Summary:
    """One pass over the ends of the lines. Raises K2Error for a row that is none."""
    rows = RowFile(path)
    heads = rows.heads()
    lengths = [h.seq_len for h in heads]
    keys: tuple[str, ...] = ()
    if len(rows):
        raw = parse_json(rows.line(0))
        keys = tuple(raw) if isinstance(raw, dict) else ()
    return Summary(
        path=str(path),
        size_b=rows.size_b,
        rows=len(rows),
        tokens=sum(lengths),
        response_tokens=sum(h.n_response_tokens for h in heads),
        seq_len=Spread.of(lengths),
        prompt=Spread.of([h.n_prompt_tokens for h in heads]),
        response=Spread.of([h.n_response_tokens for h in heads]),
        with_reasoning=sum(h.has_reasoning for h in heads),
        finish_reasons=dict(Counter(str(h.finish_reason) for h in heads).most_common()),
        histogram=_histogram(lengths, bins),
        first_tokens=tuple(rows.first_tokens(0)) if len(rows) else (),
        keys=keys,
        is_cut=not rows.ends_whole,
    )


def _histogram(values: Sequence[int], bins: int) -> tuple[tuple[int, int, int], ...]:
    if not values:
        return ()
    low, high = min(values), max(values)
    step = max(1, -(-(high - low + 1) // bins))
    counts = Counter((v - low) // step for v in values)
    return tuple(
        (low + n * step, low + (n + 1) * step, counts.get(n, 0)) for n in range((high - low) // step + 1)
    )


def check_rows(path: Path, vocab_size: int | None = None, limit: int = 1000) -> tuple[int, list[str], int]:
    """(valid rows, problems by line, duplicates of a prompt). Every number of every row is looked at."""
    rows = RowFile(path)
    problems: list[str] = []
    valid = twins = 0
    seen: dict[str, int] = {}
    for number in range(len(rows)):
        try:
            raw = parse_json(rows.line(number))
            problem = problem_of(raw, vocab_size) if isinstance(raw, dict) else "not a JSON object"
        except ValueError as err:
            raw, problem = {}, f"not JSON: {str(err).removeprefix('not valid JSON: ')}"
        if problem:
            problems.append(f"{rows.where(number)}: {problem}")
            if len(problems) >= limit:
                problems.append(f"more than {limit} problems: stopped")
                break
            continue
        valid += 1
        key = hash_ids(raw["input_ids"][: raw["n_prompt_tokens"]])
        if key in seen:
            twins += 1
        else:
            seen[key] = number
    if not len(rows):
        problems.append(f"{path}: no rows")
    if not rows.ends_whole:
        problems.append(f"{path}: the last line has no end: its writer was stopped in the middle")
    return valid, problems, twins


def merge(paths: Sequence[Path], out: Path) -> tuple[int, int]:
    """Rows of all files, in order, one a prompt. Returns (rows written, duplicates left out). `out` is written whole."""
    seen: set[str] = set()
    twins = 0

    def lines() -> Iterator[bytes]:
        nonlocal twins
        for path in paths:
            rows = RowFile(path)
            for number in range(len(rows)):
                key = rows.row(number).prompt_hash()
                if key in seen:
                    twins += 1
                    continue
                seen.add(key)
                yield rows.line(number).rstrip(b"\n") + b"\n"

    count = _write_lines(out, lines(), paths)
    return count, twins


def split(path: Path, out: Path, eval_out: Path, share: float, seed: int) -> tuple[int, int]:
    """Train and evaluation rows. A prompt falls on the same side for ever: by a hash of its tokens and the seed."""
    if not 0 < share < 1:
        raise UsageError(f"--eval-share {share}", "give a number between 0 and 1, such as 0.02")
    rows = RowFile(path)
    sides: list[list[int]] = [[], []]
    for number in range(len(rows)):
        digest = hashlib.sha256(f"{seed}/{rows.row(number).prompt_hash()}".encode()).digest()
        sides[int.from_bytes(digest[:8], "big") / 2**64 < share].append(number)
    counts = [
        _write_lines(target, (rows.line(n).rstrip(b"\n") + b"\n" for n in side), [path])
        for target, side in zip((out, eval_out), sides, strict=True)
    ]
    return counts[0], counts[1]


def export(path: Path, out: Path, kind: str, decode: Callable[[list[int]], str] | None = None) -> int:
    """kind: "csv" (the scalars), "jsonl" (input_ids and loss_mask only), "text" (decoded prompt and response), "parquet"."""
    rows = RowFile(path)
    if kind == "csv":
        head = b"row," + ",".join(KEYS[2:]).encode() + b"\n"
        body = (
            f"{n},{h.seq_len},{h.n_prompt_tokens},{h.n_response_tokens},{str(h.has_reasoning).lower()},{h.finish_reason}\n".encode()
            for n, h in enumerate(rows.heads())
        )
        return _write_lines(out, (line for part in ((head,), body) for line in part), [path]) - 1
    if kind == "jsonl":
        return _write_lines(
            out,
            (
                json.dumps({"input_ids": r.input_ids, "loss_mask": r.loss_mask}).encode() + b"\n"
                for r in rows.rows()
            ),
            [path],
        )
    if kind == "text":
        if decode is None:
            raise UsageError("export to text needs the model's tokenizer", "give --model FOLDER")
        return _write_lines(
            out,
            (
                json.dumps(
                    {
                        "prompt": decode(list(r.input_ids[: r.n_prompt_tokens])),
                        "response": decode(list(r.input_ids[r.n_prompt_tokens :])),
                        "finish_reason": r.finish_reason,
                    },
                    ensure_ascii=False,
                ).encode()
                + b"\n"
                for r in rows.rows()
            ),
            [path],
        )
    if kind == "parquet":
        from k2tui.dataset.prompts import _pyarrow

        pa, pq = _pyarrow("pyarrow", out), _pyarrow("pyarrow.parquet", out)
        found = list(rows.rows())
        table = pa.table(
            {k: [list(v) if isinstance(v := getattr(r, k), tuple) else v for r in found] for k in KEYS}
        )
        partial = out.with_name(f".{out.name}.partial")
        pq.write_table(table, partial)
        os.replace(partial, out)
        return len(found)
    raise UsageError(f"unknown kind {kind!r}", "csv, jsonl, text or parquet")


def _write_lines(out: Path, lines: Iterator[bytes], sources: Sequence[Path]) -> int:
    """Into a partial file, then renamed: whole or not at all. Refuses to write over a source."""
    if any(out.resolve() == s.resolve() for s in sources):
        raise UsageError(f"{out} is one of the sources", "give another --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial")
    count = 0
    try:
        with partial.open("wb") as fh:
            for line in lines:
                fh.write(line)
                count += 1
            fh.flush()
            os.fsync(fh.fileno())
        os.replace(partial, out)
    except OSError as err:
        partial.unlink(missing_ok=True)
        raise K2Error(f"{out}: {err.strerror or err}", "nothing was written")
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return count
