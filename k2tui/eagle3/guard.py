"""Refuses states that do not belong to this target, this draft or the run they are to continue; says why, in words.

Training on the wrong layers, norm, template or engine goes through without an error and gives a draft that nobody accepts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from k2tui.capture import ids as layer_ids
from k2tui.eagle3.data import States
from k2tui.eagle3.draft import DraftConfig
from k2tui.errors import K2Error

KINDS = ("model", "engine", "template", "tokenizer", "layers", "norm")
ORIGIN = (
    "model_hash",
    "engine",
    "engine_version",
    "boundaries",
    "tokenizer_hash",
    "template_hash",
    "hidden_size",
    "vocab_size",
)


def origin_of(states: States) -> dict[str, Any]:
    """What the states say of where they come from; {} for files that say nothing (SpecForge's)."""
    manifest = getattr(states, "manifest", None)
    if manifest is None:
        return {}
    out = {k: getattr(manifest, k, "") for k in ORIGIN}
    out["boundaries"] = list(manifest.boundaries)
    return out


def refuse(problems: Sequence[tuple[str, str]], accept: Sequence[str]) -> None:
    """Raise K2Error with every problem (kind, sentence) that was not accepted by name."""
    unknown = [a for a in accept if a not in KINDS]
    if unknown:
        raise K2Error(f"--accept {unknown[0]}: no such check", f"checks: {', '.join(KINDS)}")
    left = [(k, s) for k, s in problems if k not in accept]
    if left:
        kinds = ",".join(dict.fromkeys(k for k, _ in left))
        raise K2Error(
            "these states do not fit: " + "; ".join(s for _, s in left),
            f"extract again, or go on knowingly with --accept {kinds}",
        )


def against_target(
    origin: Mapping[str, Any], folder: Path, hidden_size: int, vocab_size: int
) -> list[tuple[str, str]]:
    """States against the target that will be served. Sizes that cannot work raise K2Error at once."""
    if not origin:
        return []
    if origin["hidden_size"] and origin["hidden_size"] != hidden_size:
        raise K2Error(
            f"the states are {origin['hidden_size']} wide, {folder} is {hidden_size}",
            "give the target that made them",
        )
    if origin["vocab_size"] and origin["vocab_size"] != vocab_size:
        raise K2Error(
            f"the states' model knows {origin['vocab_size']} tokens, {folder} knows {vocab_size}",
            "give the target that made them",
        )
    from k2tui.capture.model import model_facts

    facts = model_facts(folder)
    problems: list[tuple[str, str]] = []
    for key, kind, what in (
        ("model_hash", "model", "another model"),
        ("tokenizer_hash", "tokenizer", "another tokenizer"),
        ("template_hash", "template", "another chat template"),
    ):
        theirs, ours = str(origin.get(key) or ""), str(getattr(facts, key) or "")
        if theirs and ours and theirs != ours:
            problems.append((kind, f"made with {what} than {folder} ({theirs[:8]}, not {ours[:8]})"))
    return problems


def against_draft(
    origin: Mapping[str, Any],
    config: DraftConfig,
    recorded: Mapping[str, Any],
    architecture: str,
    num_layers: int,
    where: str,
) -> list[tuple[str, str]]:
    """States against the draft that training starts from: the layers its config means in the states' engine, and, for a
    draft of ours, the origin that its config records."""
    problems: list[tuple[str, str]] = []
    if not origin:
        return problems
    boundaries = tuple(origin["boundaries"])
    if len(boundaries) != config.num_aux:
        problems.append(("layers", f"{len(boundaries)} layers captured, {where} reads {config.num_aux}"))
    past = recorded.get("boundaries")
    if past:
        if tuple(past) != boundaries:
            problems.append(("layers", f"layers {list(boundaries)}, {where} was trained on {list(past)}"))
    elif config.aux_layer_ids and num_layers:
        engine, version = str(origin.get("engine") or "sglang"), str(origin.get("engine_version") or "0.5.23")
        try:
            rule = layer_ids.rule_of(
                architecture,
                "sglang" if engine == "local" else engine,
                "0.5.23" if engine == "local" else version,
            )
            meant = layer_ids.to_boundaries(config.aux_layer_ids, num_layers, rule)
        except K2Error as err:
            problems.append(("layers", f"{where}: {err.message}"))
        else:
            if meant != boundaries:
                problems.append(
                    (
                        "layers",
                        f"layers {list(boundaries)}, but the ids {list(config.aux_layer_ids)} of {where} mean {list(meant)} in {engine} {version}",
                    )
                )
    for key, kind, what in (
        ("engine", "engine", "engine"),
        ("tokenizer_hash", "tokenizer", "tokenizer"),
        ("template_hash", "template", "chat template"),
    ):
        theirs = str(recorded.get(key) or "")
        ours = str(origin.get(key) or "")
        if theirs and ours and theirs != ours:
            problems.append((kind, f"{what} {ours[:12]}, {where} was trained with {theirs[:12]}"))
    return problems


def against_other(origin: Mapping[str, Any], other: Mapping[str, Any], what: str) -> list[tuple[str, str]]:
    """Two sets (held-out states, the states of the run that is resumed): every recorded fact must agree."""
    problems: list[tuple[str, str]] = []
    if not origin or not other:
        return problems
    kinds = {
        "model_hash": "model",
        "engine": "engine",
        "engine_version": "engine",
        "boundaries": "layers",
        "tokenizer_hash": "tokenizer",
        "template_hash": "template",
    }
    for key, kind in kinds.items():
        a, b = origin.get(key), other.get(key)
        if a and b and a != b:
            problems.append((kind, f"{key.replace('_', ' ')} {a} differs from {what}'s {b}"))
    return problems


def served_ids(
    boundaries: Sequence[int], architecture: str, num_layers: int, engine_version: str = "0.5.23"
) -> tuple[int, ...]:
    """Ids for the draft's config that make SGLang capture these boundaries for this target. Raises K2Error when none can."""
    rule = layer_ids.rule_of(architecture, "sglang", engine_version)
    found = layer_ids.to_ids(boundaries, num_layers, rule)
    if found is None:
        raise K2Error(
            f"no layer ids make SGLang {engine_version} capture the boundaries {list(boundaries)} of {architecture}",
            "extract with other --boundaries",
        )
    return tuple(found)
