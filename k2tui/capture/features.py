"""How captured rows are stored: bf16 as they are, or fp8 codes with one scale a token and boundary. Torch, any device."""

from __future__ import annotations

from typing import Any

FP8_MAX = 448.0  # largest value of e4m3


def stored(name: str, dtype: str, hidden_size: int, tensor: Any) -> list[tuple[str, Any]]:
    """(part, tensor) of [n, B*H] states: one part for bf16, codes and scales [n, B] for fp8_e4m3."""
    import torch

    if dtype == "bf16":
        return [(name, tensor.to(torch.bfloat16))]
    groups = tensor.shape[-1] // hidden_size
    wide = tensor.reshape(len(tensor), groups, hidden_size).to(torch.float32)
    scale = wide.abs().amax(-1).clamp_min(1e-12) / FP8_MAX
    codes = (wide / scale[:, :, None]).to(torch.float8_e4m3fn).reshape(len(tensor), -1)
    return [(name, codes), (f"{name}_scale", scale.contiguous())]


def flat_bytes(tensor: Any) -> Any:
    """A copy of a CPU tensor as flat uint8 numpy: safe to keep after the tensor is reused."""
    import torch

    return tensor.contiguous().clone().view(torch.uint8).numpy().reshape(-1)
