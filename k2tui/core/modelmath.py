"""What a model needs, from its config.json alone: parameters, bytes of weights, bytes of KV cache, what fits. Pure arithmetic.

Conventions: bytes are per GPU where `tp` is an argument; a KV cache of MLA models is replicated on every tensor-parallel rank
(SGLang and vLLM do so), that of grouped-query attention is split by KV heads and replicated when there are fewer heads than ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

_DTYPE_B = {"bfloat16": 2.0, "float16": 2.0, "float32": 4.0, "fp8": 1.0, "fp8_e4m3": 1.0, "fp8_e5m2": 1.0, "auto": 2.0, "bf16": 2.0}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The figures that memory depends on. Groups of parameters are counts of weights, not bytes."""

    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    is_mla: bool
    kv_lora_rank: int
    qk_rope_head_dim: int
    attention_params: int  # all layers
    dense_mlp_params: int
    expert_params: int  # routed experts, all layers
    shared_expert_params: int
    embedding_params: int  # input embedding and head
    max_position_embeddings: int
    quantization: str  # "" | "int4" | "fp8" | ...
    expert_b_per_param: float
    other_b_per_param: float

    @property
    def total_params(self) -> int:
        return self.attention_params + self.dense_mlp_params + self.expert_params + self.shared_expert_params + self.embedding_params


def as_table(value: object) -> Mapping[str, Any]:
    """A JSON object, or nothing."""
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def as_list(value: object) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a multimodal config (Kimi-K2.5), else the config itself."""
    inner = as_table(config.get("text_config"))
    return inner if "hidden_size" in inner else config


def _int(config: Mapping[str, Any], *keys: str, default: int = 0) -> int:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return default


def _quantization(config: Mapping[str, Any], outer: Mapping[str, Any]) -> tuple[str, float, bool]:
    """(name, bytes a quantised weight, whether only experts are quantised)."""
    q = as_table(config.get("quantization_config")) or as_table(outer.get("quantization_config"))
    if not q:
        return "", 2.0, False
    method = str(q.get("quant_method") or q.get("quant_algo") or "")
    bits, group = _int(q, "bits", default=0), _int(q, "group_size", default=0)
    for entry in as_table(q.get("config_groups")).values():
        weights = as_table(as_table(entry).get("weights"))
        bits, group = _int(weights, "num_bits", default=bits), _int(weights, "group_size", default=group)
        break
    if not bits:
        bits = 8 if "fp8" in method or "int8" in method else 4 if any(m in method for m in ("awq", "gptq", "marlin", "int4")) else 16
    per_weight = bits / 8 + (2.0 / group if group > 0 else 0.0)  # a bf16 scale for each group
    ignored = " ".join(map(str, as_list(q.get("ignore")) or as_list(q.get("modules_to_not_convert"))))
    only_experts = "attn" in ignored or "self_attn" in ignored
    return ("fp8" if bits == 8 and "fp8" in method else f"int{bits}"), per_weight, only_experts


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """Read a Hugging Face config. Unknown fields count as absent; nothing is raised for a strange model."""
    c = text_config(config)
    names = as_list(c.get("architectures")) or as_list(config.get("architectures"))
    layers, hidden = _int(c, "num_hidden_layers", "n_layer"), _int(c, "hidden_size", "n_embd")
    heads = _int(c, "num_attention_heads", "n_head", default=1)
    kv_heads = _int(c, "num_key_value_heads", default=heads)
    head_dim = _int(c, "head_dim", default=hidden // max(1, heads))
    vocab = _int(c, "vocab_size")
    kv_lora = _int(c, "kv_lora_rank")
    is_mla = kv_lora > 0
    if is_mla:
        nope, rope, v = _int(c, "qk_nope_head_dim"), _int(c, "qk_rope_head_dim"), _int(c, "v_head_dim")
        q_lora = _int(c, "q_lora_rank")
        q = hidden * q_lora + q_lora * heads * (nope + rope) if q_lora else hidden * heads * (nope + rope)
        per_layer = q + hidden * (kv_lora + rope) + kv_lora * heads * (nope + v) + heads * v * hidden
    else:
        rope = 0
        per_layer = hidden * head_dim * (heads + 2 * kv_heads) + heads * head_dim * hidden
    inter = _int(c, "intermediate_size", "n_inner", default=4 * hidden)
    experts = _int(c, "n_routed_experts", "num_experts", "num_local_experts")
    moe_inter = _int(c, "moe_intermediate_size", default=inter)
    dense_layers = _int(c, "first_k_dense_replace") if experts else layers
    moe_layers = layers - dense_layers if experts else 0
    shared = _int(c, "n_shared_experts") * 3 * hidden * moe_inter * moe_layers
    if not shared and experts:
        shared = 3 * hidden * _int(c, "shared_expert_intermediate_size") * moe_layers
    router = hidden * experts * moe_layers
    tied = bool(c.get("tie_word_embeddings", config.get("tie_word_embeddings", False)))
    quant, per_weight, only_experts = _quantization(c, config)
    base = _DTYPE_B.get(str(c.get("torch_dtype") or c.get("dtype") or config.get("torch_dtype") or "bfloat16"), 2.0)
    return ModelShape(
        architecture=str(names[0]) if names else "",
        num_layers=layers,
        hidden_size=hidden,
        vocab_size=vocab,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        is_mla=is_mla,
        kv_lora_rank=kv_lora,
        qk_rope_head_dim=rope,
        attention_params=per_layer * layers,
        dense_mlp_params=3 * hidden * inter * dense_layers + router,
        expert_params=3 * hidden * moe_inter * experts * moe_layers,
        shared_expert_params=shared,
        embedding_params=vocab * hidden * (1 if tied else 2),
        max_position_embeddings=_int(c, "max_position_embeddings"),
        quantization=quant,
        expert_b_per_param=per_weight if quant else base,
        other_b_per_param=per_weight if quant and not only_experts else base,
    )


def weight_bytes(shape: ModelShape) -> float:
    """Bytes of all weights, computed. Where the checkpoint is on disk its own size is the better figure."""
    base = 2.0  # embeddings and head stay unquantised
    other = shape.attention_params + shape.dense_mlp_params + shape.shared_expert_params
    return shape.expert_params * shape.expert_b_per_param + other * shape.other_b_per_param + shape.embedding_params * base


def kv_bytes_per_token(shape: ModelShape, *, tp: int = 1, kv_dtype: str = "auto") -> float:
    """KV cache bytes of one token on one GPU, all layers."""
    width = _DTYPE_B.get(kv_dtype, 2.0)
    if shape.is_mla:
        return shape.num_layers * (shape.kv_lora_rank + shape.qk_rope_head_dim) * width
    heads = max(1, shape.num_kv_heads // max(1, tp))
    return 2.0 * shape.num_layers * heads * shape.head_dim * width


@dataclass(frozen=True, slots=True)
class Fit:
    """Does it fit, and how much. Bytes are per GPU. kv_tokens: capacity of the KV cache in tokens (of the whole server)."""

    weights_b: float
    pool_b: float  # what the static fraction leaves for the KV cache
    kv_b_per_token: float
    kv_tokens: int
    max_context: int  # longest single request
    running_at: Mapping[int, int]  # context length -> requests that fit side by side

    @property
    def fits(self) -> bool:
        return self.kv_tokens > 0


def fit(
    shape: ModelShape, *, gpu_memory_b: float, tp: int = 1, mem_fraction_static: float = 0.88, kv_dtype: str = "auto",
    weights_b: float | None = None, draft_b: float = 0.0, free_b: float | None = None,
) -> Fit:  # fmt: skip
    """Weights + KV cache against one GPU's memory (bytes). weights_b: of the whole checkpoint, when known from disk.

    SGLang keeps mem_fraction_static of the GPU for weights and cache together; the rest is for activations and graphs. free_b: memory
    that is free now, when somebody else holds some.
    """
    per_gpu = (weight_bytes(shape) if weights_b is None else weights_b) / max(1, tp) + draft_b
    taken = gpu_memory_b - free_b if free_b is not None else 0.0
    pool = gpu_memory_b * mem_fraction_static - taken - per_gpu
    per_token = kv_bytes_per_token(shape, tp=tp, kv_dtype=kv_dtype)
    tokens = int(pool / per_token) if pool > 0 and per_token > 0 else 0
    limit = shape.max_position_embeddings or tokens
    contexts = (2048, 8192, 32768, 131072)
    return Fit(
        weights_b=per_gpu, pool_b=max(0.0, pool), kv_b_per_token=per_token, kv_tokens=tokens, max_context=min(tokens, limit),
        running_at={n: tokens // n for n in contexts if n <= max(limit, contexts[0])},
    )  # fmt: skip
