"""Rotary positions: default, linear, llama3 and yarn, as the servers apply them. Knows no model, only dimensions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from k2tui.errors import K2Error


def _mscale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn_inv_freq(dim: int, theta: float, scaling: Mapping[str, Any]) -> Tensor:
    factor = float(scaling["factor"])
    original = int(scaling.get("original_max_position_embeddings", 4096))

    def correction(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(correction(float(scaling.get("beta_fast", 32)))), 0)
    high = min(math.ceil(correction(float(scaling.get("beta_slow", 1)))), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    plain = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return plain / factor * ramp + plain * (1 - ramp)


def _llama3_inv_freq(plain: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    factor, low, high = (float(scaling[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    original = float(scaling["original_max_position_embeddings"])
    wave = 2 * math.pi / plain
    smooth = ((original / wave - low) / (high - low)).clamp(0, 1)
    return torch.where(wave > original / low, plain / factor, (1 - smooth) * plain / factor + smooth * plain)


def rotary_table(
    dim: int, theta: float, scaling: Mapping[str, Any] | None, *, deepseek: bool
) -> tuple[Tensor, float, float]:
    """(inv_freq [dim/2] fp32, factor on cos and sin, factor on the softmax scale).

    deepseek: yarn as DeepSeek's attention applies it (mscale, mscale_all_dim), else as Llama's. Raises K2Error on a rope
    type that is not known, since a wrong rotation trains and serves without any error.
    """
    plain = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    kind = str((scaling or {}).get("rope_type", (scaling or {}).get("type", "default")))
    if not scaling or kind == "default":
        return plain, 1.0, 1.0
    if kind == "linear":
        return plain / float(scaling["factor"]), 1.0, 1.0
    if kind == "llama3":
        return _llama3_inv_freq(plain, scaling), 1.0, 1.0
    if kind in ("yarn", "deepseek_yarn"):
        factor = float(scaling["factor"])
        inv_freq = _yarn_inv_freq(dim, theta, scaling)
        if deepseek:
            all_dim = float(scaling.get("mscale_all_dim", 0.0))
            on_cos = _mscale(factor, float(scaling.get("mscale", 1.0))) / _mscale(factor, all_dim)
            on_softmax = _mscale(factor, all_dim) ** 2 if all_dim else 1.0
            return inv_freq, on_cos, on_softmax
        given = scaling.get("attention_factor")
        return (
            inv_freq,
            float(given) if given else _mscale(factor) * float(scaling.get("attn_factor", 1.0)),
            1.0,
        )
    raise K2Error(f"rope type {kind!r} is not supported for a draft", "known: default, linear, llama3, yarn")


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate x [rows, heads, dim] by cos, sin [rows, dim/2] (fp32). interleaved: DeepSeek's pairs (0,1), (2,3), ..."""
    cos, sin = cos[:, None, :], sin[:, None, :]
    wide = x.float()
    if interleaved:
        first, second = wide[..., 0::2], wide[..., 1::2]
        return (
            torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2).to(x.dtype)
        )
    first, second = wide.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
