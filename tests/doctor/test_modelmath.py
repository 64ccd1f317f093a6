"""Model arithmetic against published figures."""

from __future__ import annotations

from typing import Any

import pytest

from k2tui.core.modelmath import fit, kv_bytes_per_token, shape_of, weight_bytes

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
MLA: dict[str, Any] = {
    "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 1, "vocab_size": 163840,
    "max_position_embeddings": 262144, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
INT4 = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32, "type": "int"}, "targets": ["Linear"]}},
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
}
KIMI: dict[str, Any] = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": {**MLA, "quantization_config": INT4}}


def test_llama_8b_has_its_published_size() -> None:
    shape = shape_of(LLAMA_8B)
    assert shape.total_params == pytest.approx(8_030_261_248, rel=1e-4)  # norms are left out
    assert kv_bytes_per_token(shape) == 131_072
    assert kv_bytes_per_token(shape, tp=8) == 16_384
    assert kv_bytes_per_token(shape, tp=16) == 16_384  # fewer KV heads than ranks: replicated


def test_kimi_k25_is_a_trillion_in_int4() -> None:
    shape = shape_of(KIMI)
    assert shape.is_mla and shape.quantization == "int4"
    assert shape.total_params == pytest.approx(1.03e12, rel=0.01)
    assert weight_bytes(shape) / 2**30 == pytest.approx(554, rel=0.02)  # 64 shards of together 547 to 555 GiB are published
    assert kv_bytes_per_token(shape, tp=8) == 61 * 576 * 2  # replicated on every rank
    assert kv_bytes_per_token(shape, tp=8, kv_dtype="fp8_e4m3") == 61 * 576


def test_kimi_on_eight_96_gb_gpus_fits_and_on_four_does_not() -> None:
    shape = shape_of(KIMI)
    eight = fit(shape, gpu_memory_b=96e9, tp=8, mem_fraction_static=0.9)
    assert eight.fits and 100_000 < eight.kv_tokens < 250_000
    assert eight.running_at[2048] == eight.kv_tokens // 2048
    assert not fit(shape, gpu_memory_b=96e9, tp=4, mem_fraction_static=0.9).fits


def test_memory_that_somebody_holds_counts() -> None:
    shape = shape_of(LLAMA_8B)
    free = fit(shape, gpu_memory_b=80e9, weights_b=16e9)
    held = fit(shape, gpu_memory_b=80e9, weights_b=16e9, free_b=60e9)
    assert free.kv_tokens - held.kv_tokens == pytest.approx(20e9 / 131_072, rel=1e-3)


@pytest.mark.parametrize("config", [{}, {"text_config": 3}, {"hidden_size": "x"}, {"architectures": []}])
def test_strange_configs_do_no_harm(config: dict[str, Any]) -> None:
    shape = shape_of(config)
    assert fit(shape, gpu_memory_b=80e9).kv_tokens == 0
