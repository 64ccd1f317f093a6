"""What the doctor says before a start: each rule fires on its kind, and a good start is left in peace."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from k2tui.core.launch_rules import GpuFact, LaunchFacts, boundaries_of, check_all

from .test_modelmath import KIMI, LLAMA_8B

PCIE = tuple(GpuFact(i, "NVIDIA RTX PRO 6000", 120, int(96e9), int(95.5e9)) for i in range(8))
H200 = tuple(GpuFact(i, "NVIDIA H200", 90, int(150e9), int(149e9)) for i in range(8))
STORY = ["--attention-backend", "triton", "--disable-custom-all-reduce", "--num-continuous-decode-steps", "4", "--mem-fraction-static", "0.9"]
DRAFT: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 7168, "vocab_size": 163840, "draft_vocab_size": 4, "max_position_embeddings": 262144,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58]},
}  # fmt: skip
GOOD = LaunchFacts(engine="sglang", version="0.5.23", argv=STORY, tp_size=8, gpus=PCIE, has_nvlink=False, has_p2p=True, config=KIMI)
WITH_DRAFT = replace(GOOD, draft_config=DRAFT, draft_d2t=[0, 0, 1, 5])


def worst(facts: LaunchFacts) -> str:
    order = ["ok", "info", "warning", "error"]
    return max((r.severity for r in check_all(facts)), key=order.index, default="ok")


def said(facts: LaunchFacts, check: str, severity: str) -> str:
    return " | ".join(f"{r.evidence} -> {r.todo}" for r in check_all(facts) if r.check == check and r.severity == severity)


def test_the_storys_own_start_is_left_in_peace() -> None:
    assert worst(GOOD) == "ok"
    assert "tokens" in said(GOOD, "GPU memory", "ok")


@pytest.mark.parametrize(
    ("change", "check", "severity", "words"),
    [
        ({"argv": ["--attention-backend", "flashinfer", "--disable-custom-all-reduce"]}, "attention back end", "error", "triton"),
        ({"argv": ["--disable-custom-all-reduce"]}, "attention back end", "error", "no --attention-backend"),
        ({"argv": ["--attention-backend=trtllm_mla", "--disable-custom-all-reduce"]}, "attention back end", "error", "SM100 only"),
        ({"argv": ["--attention-backend", "fa3", "--disable-custom-all-reduce"]}, "attention back end", "error", "SM80 to SM90"),
        ({"argv": ["--attention-backend", "triton"]}, "all-reduce", "warning", "--disable-custom-all-reduce"),
        ({"gpus": PCIE[:4]}, "GPUs", "error", "needs 8 GPUs"),
        ({"tp_size": 6, "gpus": PCIE[:6]}, "tensor parallel", "error", "64 attention heads"),
        ({"gpus": PCIE[:4], "tp_size": 4}, "GPU memory", "error", "no room for the KV cache"),
        ({"gpus": tuple(replace(g, free_b=int(60e9)) for g in PCIE)}, "GPU memory", "warning", "held already"),
        ({"env": {"NCCL_P2P_LEVEL": "SYS"}, "has_p2p": False}, "NCCL", "warning", "peer access"),
        ({"argv": [*STORY, "--context-length", "999999"]}, "context", "warning", "longer than the model's"),
    ],
)
def test_each_fault_is_named(change: dict[str, Any], check: str, severity: str, words: str) -> None:
    assert words in said(replace(GOOD, **change), check, severity)


def test_hopper_takes_fa3_and_gqa_refuses_mla_kernels() -> None:
    llama = LaunchFacts(engine="sglang", argv=["--attention-backend", "fa3"], gpus=H200[:1], config=LLAMA_8B)
    assert worst(llama) == "ok"
    assert "grouped-query" in said(replace(llama, argv=["--attention-backend", "flashmla"]), "attention back end", "error")


@pytest.mark.parametrize(
    ("change", "check", "severity", "words"),
    [
        ({"draft_config": {**DRAFT, "hidden_size": 4096}}, "draft", "error", "belongs to another model"),
        ({"draft_config": {**DRAFT, "vocab_size": 32000}}, "draft", "error", "vocabulary"),
        ({"draft_config": {**DRAFT, "architectures": ["LlamaForCausalLM"]}}, "draft", "error", "no EAGLE-3 draft"),
        ({"argv": [*STORY, "--speculative-algorithm", "EAGLE"]}, "draft", "error", "EAGLE3"),
        ({"draft_d2t": [0, 1, 2, 163839]}, "draft vocabulary", "error", "outside"),
        ({"draft_d2t": [0, 0, 1]}, "draft vocabulary", "error", "3 entries"),
        ({"draft_d2t": [5, 0, 1, 5]}, "draft vocabulary", "warning", "ascending"),
        ({"draft_config": {**DRAFT, "max_position_embeddings": 2048}}, "draft context", "error", "2,048"),
        ({"draft_config": {**DRAFT, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 61]}}, "version": "0.5.12"}, "aux layers", "error", "outside"),
        ({"num_draft_tokens": 8}, "draft shape", "warning", "4 tokens"),
        ({"draft_names": ["fc.weight", "norm.weight"]}, "draft weights", "error", "midlayer.self_attn.q_proj.weight"),
    ],
)
def test_each_fault_of_a_draft_is_named(change: dict[str, Any], check: str, severity: str, words: str) -> None:
    assert worst(WITH_DRAFT) in ("ok", "info")
    assert words in said(replace(WITH_DRAFT, **change), check, severity)


def test_a_draft_for_vllm() -> None:
    """vLLM reads the ids at the top, raw, and has no place for a vocabulary map that maps nothing."""
    llama = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4, "vocab_size": 4}
    draft = {
        "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 64, "vocab_size": 4, "draft_vocab_size": 4,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5], "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
    }  # fmt: skip
    facts = LaunchFacts(engine="vllm", version="0.32.0", config=llama, draft_config=draft, draft_d2t=[0, 0, 0, 0])
    assert "no place for it" in said(facts, "draft vocabulary", "error")
    assert "[2, 4, 5] mean boundaries [2, 4, 5] in vLLM 0.32.0" in said(facts, "aux layers", "ok")
    assert "4 of 4" in said(replace(facts, engine="sglang", version="0.5.23"), "draft vocabulary", "ok")
    assert "[1, 3, 4] mean boundaries [2, 4, 5] in SGLang" in said(replace(facts, engine="sglang", version="0.5.23"), "aux layers", "ok")
    assert all(r.check != "draft vocabulary" for r in check_all(replace(facts, draft_d2t=None)))


@pytest.mark.parametrize(
    ("target", "version", "ids", "want"),
    [
        ("KimiK25ForConditionalGeneration", "0.5.12", [2, 30, 58], (3, 31, 59)),
        ("KimiK25ForConditionalGeneration", "0.5.12.post1", [2, 30, 58], (3, 31, 59)),
        ("KimiK25ForConditionalGeneration", "0.5.13", [2, 30, 58], (2, 30, 58)),
        ("DeepseekV3ForCausalLM", "0.5.23", [1, 29, 57], (2, 30, 58)),
        ("LlamaForCausalLM", "0.5.23", [0, 1, 2], (1, 2, 3)),
        ("GptOssForCausalLM", "0.5.23", [1, 17, 36], (1, 17, 36)),
    ],
)
def test_aux_ids_mean_what_this_release_makes_of_them(target: str, version: str, ids: list[int], want: tuple[int, ...]) -> None:
    assert boundaries_of(ids, target_class=target, version=version, num_layers=36) == want


def test_kernels_are_looked_at_against_the_engine_s_own_pins_and_the_driver() -> None:
    gpus = (replace(H200[0], driver_cuda="12.8"),)
    facts = LaunchFacts(
        engine="sglang", version="0.5.12", gpus=gpus, torch_cuda="13.0",
        packages={"torch": "2.11.0", "flashinfer-python": "0.6.9", "transformers": "5.6.0"},
        wants={"torch": "2.11.0", "flashinfer-python": "0.6.11.post1", "sglang-kernel": "0.4.2.post2", "transformers": "5.6.0"},
    )  # fmt: skip
    found = [(r.check, r.severity, r.evidence) for r in check_all(facts) if r.check in ("packages", "CUDA")]
    assert found == [
        ("packages", "ok", "torch 2.11.0 for CUDA 13.0, flashinfer-python 0.6.9, transformers 5.6.0"),
        ("packages", "warning", "flashinfer-python 0.6.9 is older than 0.6.11.post1, which sglang 0.5.12 wants"),
        ("packages", "warning", "sglang-kernel is not installed; sglang 0.5.12 wants 0.4.2.post2"),
        ("CUDA", "warning", "torch is built for CUDA 13.0, the driver supports up to 12.8"),
    ]
    cpu = replace(facts, packages={"torch": "2.11.0+cpu"}, wants={}, torch_cuda="")
    assert [r.severity for r in check_all(cpu) if r.check == "CUDA"] == ["error"]
    for silent in (replace(cpu, argv=["--device", "cpu"]), replace(cpu, gpus=()), replace(cpu, packages={})):
        assert not [r for r in check_all(silent) if r.check in ("packages", "CUDA")]
