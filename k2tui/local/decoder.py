"""The target model's forward pass over the KV cache: a quick Llama decoder, or transformers' own model class.

The quick one exists for two figures (docs/embedded-engine.md): importing transformers' modelling code costs several
seconds, and its per-token overhead on a small model is about as large as the arithmetic. Both are held to the same
tokens by tests. "Boundary b" is the residual stream that enters layer b (b = number of layers: leaves the last one),
before any norm: EAGLE-3's auxiliary hidden states.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from k2tui.errors import K2Error
from k2tui.local.checkpoint import Checkpoint, read_tensors
from k2tui.local.kv import Window


class Decoder(Protocol):
    """What the scheduler asks of a model."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    embedding: torch.Tensor  # [vocab_size, hidden_size]

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, window: Window, boundaries: tuple[int, ...] = ()
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """ids, positions [n, q] -> (hidden states after the final norm [n, q, H], boundaries side by side [n, q, B*H])."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., vocab_size]."""
        ...


def need(config: Mapping[str, Any], key: str, where: str) -> Any:
    if config.get(key) is None:
        raise K2Error(f"{where}: key {key!r} is missing", "the folder is not a whole Llama-type checkpoint")
    return config[key]


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """transformers 5 writes `rope_parameters`, older ones `rope_theta` and `rope_scaling`."""
    found = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or {}
    merged = {"rope_type": scaling.get("type", "default"), **scaling, **found}
    merged.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    return merged


def rope_table(
    config: Mapping[str, Any], head_dim: int, length: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos, and sin with the first half negated, [length, head_dim] float32: x*cos + roll(x, d/2)*sin rotates x."""
    rope = rope_parameters(config)
    inverse = 1.0 / (
        float(rope["rope_theta"]) ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    )
    if rope["rope_type"] == "linear":
        inverse = inverse / float(rope["factor"])
    elif rope["rope_type"] == "llama3":
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        original = float(rope["original_max_position_embeddings"])
        wavelength = 2 * math.pi / inverse
        smooth = (original / wavelength - low) / (high - low)
        scaled = torch.where(wavelength > original / low, inverse / float(rope["factor"]), inverse)
        between = (wavelength <= original / low) & (wavelength >= original / high)
        inverse = torch.where(
            between, (1 - smooth) * inverse / float(rope["factor"]) + smooth * inverse, scaled
        )
    angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse)
    cos = torch.cat((angles, angles), -1).cos()
    sin = angles.sin()
    return cos.to(device), torch.cat((-sin, sin), -1).to(device)


def is_plain_llama(config: Mapping[str, Any]) -> bool:
    """Whether the quick decoder computes this architecture exactly."""
    return (
        (config.get("architectures") or [""])[0] == "LlamaForCausalLM"
        and config.get("hidden_act", "silu") == "silu"
        and not config.get("attention_bias")
        and not config.get("mlp_bias")
        and not config.get("quantization_config")
        and rope_parameters(config)["rope_type"] in ("default", "linear", "llama3")
    )


class Block:
    """One Llama layer's weights. Matrices are kept as [in, out], contiguous: for one token that is the quicker side to read."""

    __slots__ = ("down", "gate_up", "norm_attention", "norm_mlp", "out", "qkv")

    def __init__(self, take: Any, prefix: str, *, norm_attention: str = "input_layernorm.weight") -> None:
        def columns(*names: str) -> torch.Tensor:
            return torch.cat([take(prefix + name) for name in names]).t().contiguous()

        self.norm_attention = take(prefix + norm_attention)
        self.norm_mlp = take(prefix + "post_attention_layernorm.weight")
        self.qkv = columns("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
        self.out = columns("self_attn.o_proj.weight")
        self.gate_up = columns("mlp.gate_proj.weight", "mlp.up_proj.weight")
        self.down = columns("mlp.down_proj.weight")


class Rotary:
    """cos and sin of one forward pass, and the rotation."""

    __slots__ = ("cos", "half", "sin")

    def __init__(
        self, table: tuple[torch.Tensor, torch.Tensor], positions: torch.Tensor, dtype: torch.dtype
    ) -> None:
        flat = positions.reshape(-1)
        self.cos = F.embedding(flat, table[0]).to(dtype).unsqueeze(1)  # [n * q, 1, head_dim]
        self.sin = F.embedding(flat, table[1]).to(dtype).unsqueeze(1)
        self.half = self.cos.shape[-1] // 2

    def turn(self, x: torch.Tensor) -> None:
        """x [n * q, heads, head_dim], changed in place."""
        torch.addcmul(x * self.cos, x.roll(self.half, -1), self.sin, out=x)


class LlamaDecoder:
    """Llama as in transformers' `LlamaForCausalLM`, with joined projections and two-dimensional activations."""

    def __init__(
        self,
        config: Mapping[str, Any],
        tensors: Iterable[tuple[str, torch.Tensor]],
        *,
        capacity: int,
        device: torch.device,
        where: str,
    ) -> None:
        self.hidden_size = int(need(config, "hidden_size", where))
        self.num_layers = int(need(config, "num_hidden_layers", where))
        self.heads = int(need(config, "num_attention_heads", where))
        self.num_kv_heads = int(config.get("num_key_value_heads") or self.heads)
        self.head_dim = int(config.get("head_dim") or self.hidden_size // self.heads)
        self.vocab_size = int(need(config, "vocab_size", where))
        self.eps = float(config.get("rms_norm_eps", 1e-6))
        self.scale = self.head_dim**-0.5
        self.device = device
        weights = dict(tensors)

        def take(name: str) -> torch.Tensor:
            if name not in weights:
                raise K2Error(
                    f"{where}: the shards hold no tensor {name!r}",
                    "the checkpoint is not whole, or not a Llama",
                )
            return weights.pop(name)

        embedding = take("model.embed_tokens.weight")
        if tuple(embedding.shape) != (self.vocab_size, self.hidden_size):
            raise K2Error(
                f"{where}: model.embed_tokens.weight has shape {list(embedding.shape)}, "
                f"config.json says [{self.vocab_size}, {self.hidden_size}]",
                "config.json and the shards are not of one model",
            )
        self.embedding = embedding
        self.dtype = embedding.dtype
        head = embedding if config.get("tie_word_embeddings") else take("lm_head.weight")
        self.head = head.t().contiguous()
        self.norm = take("model.norm.weight")
        try:
            self.blocks = [Block(take, f"model.layers.{i}.") for i in range(self.num_layers)]
        except RuntimeError as err:  # shapes that do not fit together
            raise K2Error(f"{where}: {str(err)[:200]}", "config.json and the shards are not of one model")
        wanted = (self.hidden_size, (self.heads + 2 * self.num_kv_heads) * self.head_dim)
        if tuple(self.blocks[0].qkv.shape) != wanted:
            raise K2Error(
                f"{where}: attention projections have shape {list(self.blocks[0].qkv.shape)}, config.json says {list(wanted)}",
                "config.json and the shards are not of one model",
            )
        self.rope = rope_table(config, self.head_dim, capacity, device)

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, window: Window, boundaries: tuple[int, ...] = ()
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        n, q = ids.shape
        heads, kv, dim = self.heads, self.num_kv_heads, self.head_dim
        shape, eps, scale = (self.hidden_size,), self.eps, self.scale
        rotary = Rotary(self.rope, positions, self.dtype)
        x = F.embedding(ids.view(-1), self.embedding)  # [n*q, H]
        aux: list[torch.Tensor] = []
        for layer, block in enumerate(self.blocks):
            if layer in boundaries:
                aux.append(x)
            qkv = torch.mm(F.rms_norm(x, shape, block.norm_attention, eps), block.qkv).view(
                -1, heads + 2 * kv, dim
            )
            rotary.turn(qkv[:, : heads + kv])
            mixed = window.attend(layer, qkv, heads, scale)
            x = torch.addmm(x, mixed, block.out)
            gate, up = torch.mm(F.rms_norm(x, shape, block.norm_mlp, eps), block.gate_up).chunk(2, -1)
            x = torch.addmm(x, F.silu(gate).mul_(up), block.down)
        if self.num_layers in boundaries:
            aux.append(x)
        out = F.rms_norm(x, shape, self.norm, eps).view(n, q, -1)
        return out, torch.cat(aux, -1).view(n, q, -1) if aux else None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.matmul(hidden, self.head)


def make_decoder(
    checkpoint: Checkpoint,
    *,
    impl: str,
    dtype: torch.dtype,
    device: torch.device,
    capacity: int,
    delay_s: float = 0.0,
) -> Decoder:
    """Read the shards into the quick decoder where it fits (impl "auto"), else into transformers' class.

    Raises K2Error: unsupported architecture, tensors that do not fit the config.
    """
    where = str(checkpoint.folder)
    if checkpoint.config.get("quantization_config"):
        raise K2Error(
            f"{where}/config.json: quantized checkpoints are not supported",
            "use SGLang, or an unquantized checkpoint",
        )
    plain = is_plain_llama(checkpoint.config)
    if impl == "embedded" and not plain:
        raise K2Error(
            f"{where}: --model-impl embedded serves plain LlamaForCausalLM only",
            "use --model-impl transformers",
        )
    tensors = read_tensors(checkpoint, dtype=dtype, device=str(device), delay_s=delay_s)
    if plain and impl != "transformers":
        return LlamaDecoder(checkpoint.config, tensors, capacity=capacity, device=device, where=where)
    from k2tui.local.transformers_decoder import TransformersDecoder

    return TransformersDecoder(checkpoint, tensors, dtype=dtype, device=device)
