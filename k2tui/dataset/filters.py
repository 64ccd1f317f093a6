"""Which answers are worth learning from: pure judgements on token ids and text. Each says why it refuses, or nothing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_REFUSAL = re.compile(
    r"^\W*(i['’]?m sorry,? but i (can|am)|i (cannot|can['’]t|am unable to|won['’]t) (help|assist|fulfill|comply|provide|do that|answer)|"
    r"sorry,? (but )?i can(not|['’]t)|as an ai( language model)?,? i (cannot|can['’]t|am (not able|unable)))",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class FilterRules:
    """max_seq_len, min_response_tokens: in tokens. repetition: share of the answer that one repeated piece may fill."""

    max_seq_len: int = 4096
    min_response_tokens: int = 4
    keep_truncated: bool = False
    keep_refusals: bool = False
    repetition: float = 0.5


def reason_to_drop(
    rules: FilterRules, seq_len: int, response: Sequence[int], text: str, finish_reason: str | None
) -> str:
    """ "" = keep."""
    if finish_reason == "abort":
        return "aborted"
    if seq_len > rules.max_seq_len:
        return "too long"
    if len(response) < rules.min_response_tokens:
        return "too short"
    if finish_reason == "length" and not rules.keep_truncated:
        return "truncated"
    if is_degenerate(response, rules.repetition):
        return "degenerate repetition"
    if not rules.keep_refusals and _REFUSAL.match(text.rsplit("</think>", 1)[-1].strip()):
        return "refusal"
    return ""


def is_degenerate(ids: Sequence[int], share: float = 0.5) -> bool:
    """True when a loop fills the end of an answer, or one short piece more than `share` of it. Works on any alphabet."""
    n = len(ids)
    if n < 24:
        return False
    tail = ids[-min(n, 512) :]
    for period in range(1, len(tail) // 4 + 1):
        run = 0
        for i in range(len(tail) - 1, period - 1, -1):
            if tail[i] != tail[i - period]:
                break
            run += 1
        if run + period >= max(24, 4 * period) and run + period >= share * min(n, 512):
            return True
    pieces = Counter(tuple(ids[i : i + 4]) for i in range(n - 3))
    return pieces.most_common(1)[0][1] * 4 > share * n and pieces.most_common(1)[0][1] >= 8
