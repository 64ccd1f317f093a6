"""Layer ids: what a number means in which SGLang and model class. Pure; the only place that converts.

A *boundary* b is physical: the residual stream that enters layer b, Hugging Face's hidden_states[b]. An *id* is what a
flag, a draft's config or `set_eagle3_layers_to_capture(ids)` says, and its meaning differs (docs/capture.md has the table).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum

from k2tui.errors import K2Error


class Rule(StrEnum):
    """How a model class turns the ids that it is given into boundaries."""

    PLUS_ONE = "plus-one"  # boundary = id + 1, always ("output of layer id")
    PLUS_ONE_IF_FIRST_IS_ONE = "plus-one-if-first-is-1"  # + 1 when ids[0] == 1, else raw
    PLUS_ONE_UNLESS_END = "plus-one-unless-end"  # + 1 unless max(ids) is the number of layers, then raw
    RAW = "raw"  # vLLM, speculators, ModelOpt


_DEEPSEEK = ("deepseek", "kimi", "glm4moelite", "glm4_moe_lite")


def version_tuple(version: str) -> tuple[int, ...]:
    """'0.5.12.post1' -> (0, 5, 12, 1). Text after the numbers is ignored."""
    found = re.match(r"\d+(\.\d+)*", version.strip())
    if not found:
        raise K2Error(f"not a version: {version!r}")
    numbers = [int(n) for n in found[0].split(".")]
    post = re.search(r"post(\d+)", version)
    return (*numbers, int(post[1])) if post else tuple(numbers)


def rule_of(architecture: str, engine: str = "sglang", version: str = "0.5.23") -> Rule:
    """The rule of one model class (config.json's `architectures[0]`) in one engine version."""
    if engine != "sglang":
        return Rule.RAW
    name = architecture.lower()
    if name.startswith(_DEEPSEEK):
        return Rule.PLUS_ONE_IF_FIRST_IS_ONE if version_tuple(version)[:3] >= (0, 5, 13) else Rule.PLUS_ONE
    if name.startswith(("gptoss", "gpt_oss")):
        return Rule.PLUS_ONE_UNLESS_END
    return Rule.PLUS_ONE


def default_boundaries(num_layers: int) -> tuple[int, ...]:
    """What SGLang captures when no ids are given; distinct and ascending, so fewer than three for very small models."""
    return tuple(sorted({b for b in (2, num_layers // 2, num_layers - 3) if 0 <= b < num_layers}))


def usual_boundaries(num_layers: int) -> tuple[int, ...]:
    """SGLang's default set where it has three layers; else low, middle and high of a very small model."""
    found = default_boundaries(num_layers)
    if len(found) == 3:
        return found
    return tuple(sorted({min(1, num_layers - 1), num_layers // 2, num_layers - 1}))


def wanted_boundaries(num_layers: int, text: str | None) -> tuple[int, ...]:
    """What a capture server captures. text: K2TUI_CAPTURE_BOUNDARIES ("2,30,58"); without it SGLang's default set and the
    set one layer later: the two that a draft may have been trained on, so that the proof with a draft can tell them apart.
    """
    if text:
        try:
            found = tuple(sorted({int(n) for n in re.split(r"[,\s/]+", text.strip()) if n}))
        except ValueError:
            raise K2Error(f"K2TUI_CAPTURE_BOUNDARIES={text!r}", "give layer numbers: 2,30,58")
    else:
        found = tuple(sorted({b for n in usual_boundaries(num_layers) for b in (n, n + 1) if b < num_layers}))
    if not found or not (found[0] >= 0 and found[-1] < num_layers):
        raise K2Error(
            f"boundaries {list(found)}: this model has 0..{num_layers - 1}",
            "set K2TUI_CAPTURE_BOUNDARIES anew",
        )
    return found


def to_boundaries(ids: Sequence[int] | None, num_layers: int, rule: Rule) -> tuple[int, ...]:
    """Ids as configured -> physical boundaries, in ascending order (the order in which states are concatenated).

    Raises K2Error when two ids fall together or one lies outside the model.
    """
    if ids is None:
        return default_boundaries(num_layers)
    plus = {
        Rule.PLUS_ONE: True,
        Rule.RAW: False,
        Rule.PLUS_ONE_IF_FIRST_IS_ONE: bool(ids) and ids[0] == 1,
        Rule.PLUS_ONE_UNLESS_END: not ids or max(ids) != num_layers,
    }[rule]
    out = [i + 1 if plus else i for i in ids]
    if len(set(out)) != len(out):
        raise K2Error(
            f"layer ids {list(ids)} name a layer twice", "three different layers are needed: low, mid, high"
        )
    bad = [b for b in out if not 0 <= b <= num_layers]
    if bad:
        raise K2Error(
            f"layer ids {list(ids)} mean boundaries {out} in this engine; the model has {num_layers} layers"
        )
    return tuple(sorted(out))


def to_ids(boundaries: Sequence[int], num_layers: int, rule: Rule) -> list[int] | None:
    """Ids that make this class capture those boundaries; None when no ids can say it (then the attribute must be set)."""
    for candidate in ([b - 1 for b in boundaries], list(boundaries)):
        if min(candidate, default=0) < 0:
            continue
        try:
            if to_boundaries(candidate, num_layers, rule) == tuple(sorted(boundaries)):
                return candidate
        except K2Error:
            continue
    return None


def candidate_sets(ids: Sequence[int] | None, num_layers: int) -> list[tuple[int, ...]]:
    """Boundary sets that a draft with those ids may have been trained on, likeliest first: raw ids, and one layer later."""
    base = list(ids) if ids else list(usual_boundaries(num_layers))
    found: list[tuple[int, ...]] = []
    for shift in (1, 0, -1) if ids else (0, 1, -1):
        shifted = tuple(sorted(i + shift for i in base))
        if len(set(shifted)) == len(base) and shifted[0] >= 0 and shifted[-1] < num_layers:
            found.append(shifted)
    return found
