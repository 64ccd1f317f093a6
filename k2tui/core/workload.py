"""What is sent and when: prompts, lengths, arrival times, fingerprints. Pure; all chance comes from seeds."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request's content: token ids, or text, or chat messages; exactly one is set. output_len: tokens asked for.

    due_s: arrival in seconds from the start when a trace says so. turns: what the user says next in the same session.
    """

    output_len: int
    ids: tuple[int, ...] = ()
    text: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    due_s: float | None = None
    turns: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Workload:
    """prompts in sending order. params: everything that defines them, for the fingerprint and for people."""

    kind: str
    params: Mapping[str, Any] = field(default_factory=dict[str, Any])
    prompts: tuple[Prompt, ...] = ()

    @property
    def title(self) -> str:
        p = self.params
        if self.kind == "random":
            return f"random in {p.get('random_input_len')} out {p.get('random_output_len')}"
        if self.kind == "shared-prefix":
            return f"shared prefix {p.get('prefix_len')}+{p.get('random_input_len')} out {p.get('random_output_len')}"
        if self.kind == "trace":
            return f"trace {p.get('name', '')}"
        return f"{self.kind} {p.get('name', '')}".strip()


def fingerprint(value: Any) -> str:
    """16 hex digits of the canonical JSON of a value."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def workload_fingerprint(
    workload: Workload, *, api: str, sampling: Mapping[str, Any], ignore_eos: bool
) -> str:
    """Equal for runs that may be compared. The seed and the number of requests are not part of it: repeats use new
    prompts from the same distribution, and a longer run measures the same thing better."""
    params = {k: v for k, v in workload.params.items() if k not in ("seed", "num_prompts")}
    return fingerprint(
        {
            "kind": workload.kind,
            "params": params,
            "api": api,
            "sampling": dict(sampling),
            "ignore_eos": ignore_eos,
        }
    )


def _length(rng: random.Random, most: int, ratio: float) -> int:
    """A length between ratio * most and most, at least 1."""
    return most if ratio >= 1 else rng.randint(max(1, int(most * ratio)), most)


def random_ids(
    n: int,
    *,
    input_len: int,
    output_len: int,
    seed: int,
    range_ratio: float = 1.0,
    vocab: tuple[int, int] = (16, 1000),
    prefix: Sequence[int] = (),
) -> list[Prompt]:
    """n prompts of random token ids in [vocab[0], vocab[1])."""
    rng = random.Random(seed)
    lo, hi = vocab
    made: list[Prompt] = []
    for _ in range(n):
        size = _length(rng, input_len, range_ratio)
        ids = (*prefix, *(rng.randrange(lo, hi) for _ in range(size)))
        made.append(Prompt(_length(rng, output_len, range_ratio), ids=ids))
    return made


def shared_prefix(
    n: int,
    *,
    groups: int,
    prefix_len: int,
    input_len: int,
    output_len: int,
    seed: int,
    vocab: tuple[int, int] = (16, 1000),
    zipf: float = 0.0,
) -> list[Prompt]:
    """n prompts that share one of `groups` prefixes. zipf > 0: group k is drawn with weight 1 / k^zipf."""
    rng = random.Random(seed)
    lo, hi = vocab
    heads = [tuple(rng.randrange(lo, hi) for _ in range(prefix_len)) for _ in range(groups)]
    weights = [1 / (k + 1) ** zipf for k in range(groups)]
    made: list[Prompt] = []
    for i in range(n):
        head = rng.choices(heads, weights)[0] if zipf > 0 else heads[i % groups]
        tail = tuple(rng.randrange(lo, hi) for _ in range(input_len))
        made.append(Prompt(output_len, ids=head + tail))
    return made


_WORDS = [
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
    "country",
    "problem",
    "hand",
    "part",
    "place",
    "case",
    "week",
    "company",
    "system",
    "program",
    "question",
    "work",
    "government",
    "number",
    "night",
    "point",
    "home",
    "water",
    "room",
    "mother",
    "area",
    "money",
    "story",
    "fact",
    "month",
    "lot",
    "right",
    "study",
    "book",
    "eye",
    "job",
    "word",
    "business",
    "issue",
    "side",
    "kind",
    "head",
    "house",
    "service",
    "friend",
]


def words(rng: random.Random, n: int) -> str:
    """n common English words: about one token each with any large vocabulary."""
    return " ".join(rng.choice(_WORDS) for _ in range(n))


def random_text(
    n: int, *, input_len: int, output_len: int, seed: int, range_ratio: float = 1.0
) -> list[Prompt]:
    """n prompts of common words, for routes that take no token ids. The server's count is what is reported."""
    rng = random.Random(seed)
    return [
        Prompt(_length(rng, output_len, range_ratio), text=words(rng, _length(rng, input_len, range_ratio)))
        for _ in range(n)
    ]


def multi_turn(n: int, *, turns: int, input_len: int, output_len: int, seed: int) -> list[Prompt]:
    """n sessions of `turns` user turns; the server's answers become part of the next turn's prompt."""
    rng = random.Random(seed)
    made: list[Prompt] = []
    for _ in range(n):
        said = [words(rng, input_len) for _ in range(turns)]
        made.append(Prompt(output_len, text=said[0], turns=tuple(said[1:])))
    return made


def from_mooncake(
    lines: Sequence[Mapping[str, Any]],
    *,
    vocab: tuple[int, int] = (16, 1000),
    block: int = 512,
    speed: float = 1.0,
) -> list[Prompt]:
    """A Mooncake trace: {"timestamp": ms, "input_length", "output_length", "hash_ids": [...]} a line.

    Equal hash ids give equal blocks of token ids, so that the server's prefix cache sees what the trace's server saw.
    """
    lo, hi = vocab
    first = min((float(line["timestamp"]) for line in lines), default=0.0)
    blocks: dict[int, tuple[int, ...]] = {}
    made: list[Prompt] = []
    for line in lines:
        ids: list[int] = []
        length = int(line["input_length"])
        for h in line.get("hash_ids") or ():
            if h not in blocks:
                rng = random.Random(f"block {h}")
                blocks[h] = tuple(rng.randrange(lo, hi) for _ in range(block))
            ids.extend(blocks[h])
        if len(ids) < length:
            rng = random.Random(f"tail {len(made)}")
            ids.extend(rng.randrange(lo, hi) for _ in range(length - len(ids)))
        due = (float(line["timestamp"]) - first) / 1000 / speed
        made.append(Prompt(max(int(line["output_length"]), 1), ids=tuple(ids[: max(length, 1)]), due_s=due))
    return made


def arrivals(n: int, *, rate: float, shape: str, seed: int, burstiness: float = 1.0) -> list[float]:
    """n arrival times in seconds, ascending, from an absolute schedule.

    shape: constant | poisson | gamma (burstiness = shape parameter: < 1 burstier than Poisson, 1 = Poisson). The gaps are
    rescaled so that the last arrival is at exactly (n - 1) / rate: the asked rate is met in every run, only the order of
    gaps is chance.
    """
    if shape == "constant":
        return [i / rate for i in range(n)]
    k = 1.0 if shape == "poisson" else burstiness
    rng = random.Random(seed)
    gaps = [rng.gammavariate(k, 1.0) for _ in range(n - 1)]
    total = sum(gaps)
    want = (n - 1) / rate
    at = 0.0
    times = [0.0]
    for g in gaps:
        at += g / total * want
        times.append(at)
    return times[:n]
