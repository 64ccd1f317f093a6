"""Sampling parameters as SGLang takes them, and the draw of one token. Knows logits, no requests or HTTP."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

_EPS = 1e-6  # a lower temperature is greedy, as in SGLang


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """top_k -1 = all. stop: strings; stop_token_ids: more ends than the model's own. seed None = the server's stream."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False

    @property
    def is_greedy(self) -> bool:
        return self.temperature < _EPS or self.top_k == 1


_NEUTRAL = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "n": 1,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "logit_bias": None,
    "custom_params": None,
    "stop_regex": None,
    "spaces_between_special_tokens": True,
    "stream_interval": None,
    "beam_width": None,
}


def _number(raw: Mapping[str, Any], key: str, default: float) -> float:
    value = raw.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{key} must be a finite number, got {value!r}.")
    return float(value)


def _whole(raw: Mapping[str, Any], key: str, default: int) -> int:
    value = raw.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{key} must be an integer, got {value!r}.")
    return value


def _texts(raw: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = raw.get(key)
    if value is None:
        return ()
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ValueError(f"{key} must be a string or a list of strings, got {value!r}.")
    return tuple(item for item in items if item)


def parse(raw: Mapping[str, Any], *, vocab_size: int, default_max_new_tokens: int = 128) -> SamplingParams:
    """SGLang's `sampling_params` object -> SamplingParams. Raises ValueError in SGLang's words."""
    known = {*SamplingParams.__dataclass_fields__, "sampling_seed", *_NEUTRAL}
    for key, value in raw.items():
        if key not in known:
            raise ValueError(f"unknown sampling parameter {key!r}.")
        if key in _NEUTRAL and value is not None and value != _NEUTRAL[key]:
            raise ValueError(f"{key}={value!r} is not supported by the embedded engine (SGLang does it).")
    temperature = _number(raw, "temperature", 1.0)
    if temperature < 0:
        raise ValueError(f"temperature must be a non-negative finite number, got {temperature}.")
    top_p = _number(raw, "top_p", 1.0)
    if not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p must be in (0, 1], got {top_p}.")
    min_p = _number(raw, "min_p", 0.0)
    if not 0.0 <= min_p <= 1.0:
        raise ValueError(f"min_p must be in [0, 1], got {min_p}.")
    top_k = _whole(raw, "top_k", -1)
    if top_k < 1 and top_k != -1:
        raise ValueError(f"top_k must be -1 (disable) or at least 1, got {top_k}.")
    max_new = _whole(raw, "max_new_tokens", default_max_new_tokens)
    if max_new < 0:
        raise ValueError(f"max_new_tokens must be at least 0, got {max_new}.")
    min_new = _whole(raw, "min_new_tokens", 0)
    if not 0 <= min_new <= max_new:
        raise ValueError(f"min_new_tokens must be in [0, max_new_tokens({max_new})], got {min_new}.")
    seed = raw.get("sampling_seed") if raw.get("sampling_seed") is not None else raw.get("seed")
    if seed is not None and (
        isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**63
    ):
        raise ValueError(f"sampling_seed must be an integer in [-2**63, 2**63 - 1], got {seed!r}.")
    ends = raw.get("stop_token_ids") or []
    if not isinstance(ends, list) or not all(isinstance(i, int) and 0 <= i < vocab_size for i in ends):
        raise ValueError(
            f"stop_token_ids must be a list of token ids in [0, {vocab_size - 1}], got {ends!r}."
        )
    return SamplingParams(
        max_new_tokens=max_new,
        min_new_tokens=min_new,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        stop=_texts(raw, "stop"),
        stop_token_ids=tuple(ends),
        ignore_eos=bool(raw.get("ignore_eos")),
        skip_special_tokens=raw.get("skip_special_tokens") is not False,
        no_stop_trim=bool(raw.get("no_stop_trim")),
    )


def draw(logits: torch.Tensor, params: SamplingParams, generator: torch.Generator | None) -> int:
    """One token from logits [vocab_size]: temperature, then top_k, top_p and min_p on the probabilities."""
    if params.is_greedy:
        return int(logits.argmax())
    probs = torch.softmax(logits.float() / params.temperature, -1)
    if params.top_k == -1 and params.top_p == 1.0 and params.min_p == 0.0:
        return int(torch.multinomial(probs, 1, generator=generator))
    ordered, ids = probs.sort(descending=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if params.top_k != -1:
        keep[params.top_k :] = False
    if params.top_p < 1.0:
        keep &= ordered.cumsum(-1) - ordered < params.top_p
    if params.min_p > 0.0:
        keep &= ordered >= ordered[0] * params.min_p
    return int(ids[torch.multinomial(ordered * keep, 1, generator=generator)])
