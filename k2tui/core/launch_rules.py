"""What is known about a start before it is made: rules over a profile's argv and env, the GPUs, the model and the draft. Pure.

Each rule names its source. A rule that lacks a fact says nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from k2tui.core.modelmath import ModelShape, as_list, as_table, fit, shape_of, text_config

GB = 1e9


@dataclass(frozen=True, slots=True)
class GpuFact:
    """One GPU as a start sees it. capability: CUDA compute capability as SM number (90, 100, 120)."""

    index: int
    name: str = ""
    capability: int | None = None
    total_b: int | None = None
    free_b: int | None = None
    driver_cuda: str = ""  # the CUDA that its driver supports, "13.0"


@dataclass(frozen=True, slots=True)
class Rule:
    """severity: ok | info | warning | error (the start would fail or be useless)."""

    check: str
    severity: str
    evidence: str
    todo: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class LaunchFacts:
    """Everything that the rules look at; what is not known is empty or None."""

    engine: str
    version: str = ""
    argv: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    tp_size: int = 1
    nnodes: int = 1  # machines; `gpus` are those of this one
    gpus: Sequence[GpuFact] = ()
    has_nvlink: bool | None = None  # between all chosen GPUs
    has_p2p: bool | None = None
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    weights_b: float | None = None
    draft_config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    draft_b: float = 0.0
    draft_d2t: Sequence[int] | None = None
    draft_names: Sequence[str] = ()  # tensors in the draft's files
    num_steps: int = 3
    topk: int = 1
    num_draft_tokens: int = 4
    packages: Mapping[str, str] = field(default_factory=dict[str, str])  # of the engine's environment: name -> version
    wants: Mapping[str, str] = field(default_factory=dict[str, str])  # what the engine's own metadata pins
    torch_cuda: str = ""  # the CUDA that its torch was built for


def option(argv: Sequence[str], *names: str) -> str | None:
    """Value of `--name value` or `--name=value`; "" for a flag without a value; None when absent."""
    for i, word in enumerate(argv):
        for name in names:
            if word == name:
                following = argv[i + 1] if i + 1 < len(argv) else ""
                return "" if following.startswith("--") else following
            if word.startswith(name + "="):
                return word[len(name) + 1 :]
    return None


def number(text: str | None, default: float) -> float:
    try:
        return float(text) if text else default
    except ValueError:
        return default


def version_tuple(text: str) -> tuple[int, ...]:
    """ "0.5.12.post1" -> (0, 5, 12); () when it is no version."""
    out: list[int] = []
    for part in text.split("."):
        digits = "".join(ch for ch in part if ch.isdigit()) if part[:1].isdigit() else ""
        if not digits:
            break
        out.append(int(digits))
    return tuple(out[:3])


def check_all(facts: LaunchFacts) -> list[Rule]:
    """Every rule, in the order in which a start would meet them."""
    found: list[Rule] = []
    for rule in (_kernels, _gpu_count, _attention_backend, _communication, _parallelism, _memory, _speculative, _draft):
        found.extend(rule(facts))
    return found


# ---- the engine's packages

_WORKERS = ("torch", "flashinfer-python", "sglang-kernel", "sgl-kernel", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "transformers")


def _kernels(facts: LaunchFacts) -> Iterator[Rule]:
    """What computes on the GPU: there, not older than the engine wants, and built for a CUDA that the driver has."""
    if not facts.gpus or not facts.packages or option(facts.argv, "--device") == "cpu":
        return
    cuda = f" for CUDA {facts.torch_cuda}" if facts.torch_cuda else ""
    there = [f"{name} {facts.packages[name]}{cuda if name == 'torch' else ''}" for name in _WORKERS if name in facts.packages]
    yield Rule("packages", "ok", ", ".join(there))
    source = f"the metadata of {facts.engine} {facts.version}"
    for name in _WORKERS:
        want, have = facts.wants.get(name, ""), facts.packages.get(name, "")
        if want and not have:
            yield Rule("packages", "warning", f"{name} is not installed; {facts.engine} {facts.version} wants {want}", f"pip install '{name}=={want}'", source)
        elif want and version_tuple(have) < version_tuple(want):
            yield Rule("packages", "warning", f"{name} {have} is older than {want}, which {facts.engine} {facts.version} wants", f"pip install '{name}=={want}'", source)
    if "torch" in facts.packages and not facts.torch_cuda and facts.packages["torch"].endswith("+cpu"):
        yield Rule("CUDA", "error", f"torch {facts.packages['torch']} is built for the CPU: it sees no GPU", "install torch with CUDA", "torch/version.py")
    driver = next((g.driver_cuda for g in facts.gpus if g.driver_cuda), "")
    if facts.torch_cuda and driver and version_tuple(facts.torch_cuda)[:1] > version_tuple(driver)[:1]:
        yield Rule(
            "CUDA", "warning", f"torch is built for CUDA {facts.torch_cuda}, the driver supports up to {driver}", "a newer driver, or torch for that CUDA",
            "CUDA minor version compatibility: any 12.x runs on a driver for 12.y, no 13.x does without the cuda-compat package",
        )  # fmt: skip


# ---- GPUs and back ends

_BACKENDS: dict[str, tuple[frozenset[int] | None, str, str]] = {
    # name: (SM numbers that it runs on, None = all; what to say; source)
    "fa3": (frozenset({80, 86, 87, 89, 90}), "FlashAttention 3 runs on SM80 to SM90", "sglang 0.5.23 layers/attention/attention_registry.py"),
    "trtllm_mla": (frozenset({100, 103}), "trtllm_mla runs on SM100 only", "TensorRT-LLM gen kernels, sglang 0.5.23 layers/attention/trtllm_mla_backend.py"),
    "trtllm_mha": (frozenset({90, 100, 103, 120, 121}), "trtllm_mha runs on SM90, SM100 and SM120", "sglang 0.5.23 arg_groups/attention_hook.py"),
    "cutlass_mla": (frozenset({100, 103}), "cutlass_mla runs on SM100 only", "sgl-kernel builds it for sm_100a"),
    "flashmla": (frozenset({90, 100, 103}), "flashmla runs on SM90 and SM100", "sgl-kernel's flashmla_ops"),
    "hpc_ops": (frozenset({90}), "hpc_ops runs on SM90 only", "sglang 0.5.23 arg_groups/choices.py"),
    "fa4": (frozenset({90, 100, 103, 110}), "fa4 runs on SM90 and SM100", "sglang 0.5.23 arg_groups/attention_hook.py"),
}  # fmt: skip
_MLA_ONLY = ("trtllm_mla", "cutlass_mla", "flashmla", "cutedsl_mla")


def _capability(facts: LaunchFacts) -> int | None:
    found = {g.capability for g in facts.gpus if g.capability is not None}
    return found.pop() if len(found) == 1 else None


def _gpu_count(facts: LaunchFacts) -> Iterator[Rule]:
    if facts.engine == "local" or not facts.gpus:
        return
    every = facts.tp_size * max(1, int(number(option(facts.argv, "--pp-size", "--pipeline-parallel-size"), 1)))
    if every % facts.nnodes:
        yield Rule("GPUs", "error", f"tensor x pipeline parallel of {every} does not divide by {facts.nnodes} nodes", "another tp_size, or other nodes")
    want = every // facts.nnodes
    if len(facts.gpus) < want:
        each = f" on each of {facts.nnodes} nodes" if facts.nnodes > 1 else ""
        yield Rule("GPUs", "error", f"tensor x pipeline parallel needs {want} GPUs{each}, {len(facts.gpus)} are there", "lower tp_size, or add other machines by `nodes`")
    kinds = {g.capability for g in facts.gpus if g.capability is not None}
    if len(kinds) > 1:
        yield Rule("GPUs", "warning", "GPUs of different compute capability: " + ", ".join(f"SM{k}" for k in sorted(kinds)), "choose equal GPUs by `gpus`")


def _attention_backend(facts: LaunchFacts) -> Iterator[Rule]:
    capability = _capability(facts)
    if facts.engine != "sglang" or capability is None:
        return
    mla = shape_of(facts.config).is_mla if facts.config else None
    chosen = [
        (flag, value)
        for flag in ("--attention-backend", "--prefill-attention-backend", "--decode-attention-backend", "--speculative-draft-attention-backend")
        if (value := option(facts.argv, flag))
    ]  # fmt: skip
    if not chosen and capability in (120, 121):
        yield Rule(
            "attention back end", "error" if mla else "warning",
            f"SM{capability} and no --attention-backend: SGLang may pick flashinfer, which was seen to hang on SM120 during the start",
            "add --attention-backend triton", "seen on 8 RTX PRO 6000 with Kimi-K2.5",
        )  # fmt: skip
    for flag, value in chosen:
        if value == "flashinfer" and capability in (120, 121):
            yield Rule(
                "attention back end", "error" if mla else "warning", f"{flag} {value} on SM{capability}: seen to hang during the start",
                f"{flag} triton", "seen on 8 RTX PRO 6000 with Kimi-K2.5",
            )  # fmt: skip
            continue
        allowed, words, source = _BACKENDS.get(value, (None, "", ""))
        if allowed is not None and capability not in allowed:
            better = "triton" if capability in (120, 121) or mla is None else "flashinfer" if capability >= 90 else "triton"
            yield Rule("attention back end", "error", f"{flag} {value}: {words}; these GPUs are SM{capability}", f"{flag} {better}", source)
        elif value in _MLA_ONLY and mla is False:
            yield Rule("attention back end", "error", f"{flag} {value} is for MLA models; this one has grouped-query attention", f"remove {flag}", "sglang 0.5.23 layers/attention/attention_registry.py")
        else:
            yield Rule("attention back end", "ok", f"{flag} {value} runs on SM{capability}")


def _communication(facts: LaunchFacts) -> Iterator[Rule]:
    if facts.tp_size < 2 or facts.engine not in ("sglang", "vllm"):
        return
    env = facts.env
    off = "--disable-custom-all-reduce" in facts.argv
    if facts.has_nvlink is False and not off:
        yield Rule("all-reduce", "warning", "no NVLink between the GPUs, and the custom all-reduce is on", "add --disable-custom-all-reduce", "it needs NVLink or fast P2P; SGLang's own check can hang on some boards")
    if facts.has_nvlink and off:
        yield Rule("all-reduce", "info", "NVLink is there, but --disable-custom-all-reduce is set", "try without it: `k2tui tune` measures the difference")
    if facts.has_nvlink and env.get("NCCL_PROTO") == "LL":
        yield Rule("NCCL", "info", "NCCL_PROTO=LL on NVLink: good for PCIe-only boxes, it halves the bandwidth of large messages", "leave NCCL_PROTO unset on NVLink")
    if facts.has_p2p is False and env.get("NCCL_P2P_LEVEL"):
        yield Rule("NCCL", "warning", f"NCCL_P2P_LEVEL={env['NCCL_P2P_LEVEL']} asks for peer access, which the GPUs do not have", "unset it, or NCCL_P2P_DISABLE=1")
    if env.get("NCCL_P2P_DISABLE") == "1" and env.get("NCCL_P2P_LEVEL"):
        yield Rule("NCCL", "warning", "NCCL_P2P_DISABLE=1 and NCCL_P2P_LEVEL contradict each other", "keep one")


def _parallelism(facts: LaunchFacts) -> Iterator[Rule]:
    if not facts.config:
        return
    shape = shape_of(facts.config)
    if facts.tp_size > 1 and shape.num_heads and shape.num_heads % facts.tp_size:
        yield Rule("tensor parallel", "error", f"{shape.num_heads} attention heads cannot be divided by tp_size {facts.tp_size}", "choose a tp_size that divides them")
    asked = number(option(facts.argv, "--context-length", "--max-model-len"), 0)
    if asked and shape.max_position_embeddings and asked > shape.max_position_embeddings:
        yield Rule("context", "warning", f"context {asked:,.0f} is longer than the model's {shape.max_position_embeddings:,}", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1, if the rope scaling allows it")


def _memory(facts: LaunchFacts) -> Iterator[Rule]:
    sizes = [g for g in facts.gpus if g.total_b]
    if not facts.config or not sizes or facts.engine == "local":
        return
    shape = shape_of(facts.config)
    smallest = min(sizes, key=lambda g: g.free_b if g.free_b is not None else g.total_b or 0)
    fraction = number(option(facts.argv, "--mem-fraction-static", "--gpu-memory-utilization"), 0.88)
    found = fit(
        shape, gpu_memory_b=float(smallest.total_b or 0), tp=facts.tp_size, mem_fraction_static=fraction,
        kv_dtype=option(facts.argv, "--kv-cache-dtype") or "auto", weights_b=facts.weights_b, draft_b=facts.draft_b,
        free_b=float(smallest.free_b) if smallest.free_b is not None else None,
    )  # fmt: skip
    held = (smallest.total_b or 0) - (smallest.free_b if smallest.free_b is not None else smallest.total_b or 0)
    if held > 2 * GB:
        yield Rule("GPU memory", "warning", f"GPU {smallest.index}: {held / GB:.1f} GB are held already", "see `k2tui gpus`: a left-over process?")
    weights = f"weights {found.weights_b / GB:.1f} GB a GPU"
    if not found.fits:
        yield Rule(
            "GPU memory", "error",
            f"{weights} leave no room for the KV cache: {(smallest.total_b or 0) / GB:.0f} GB x {fraction:g} - held {max(0, held) / GB:.1f} GB",
            "more GPUs (tp_size), a smaller or more quantised model, or free the memory that is held", "k2tui core/modelmath.py",
        )  # fmt: skip
        return
    side = ", ".join(f"{count:,} x {length // 1024}K" for length, count in found.running_at.items() if count)
    yield Rule(
        "GPU memory", "ok",
        f"{weights} + KV cache {found.pool_b / GB:.1f} GB = {found.kv_tokens:,} tokens ({found.kv_b_per_token / 1e3:.1f} kB a token); side by side: {side}",
    )  # fmt: skip
    asked = number(option(facts.argv, "--context-length", "--max-model-len"), 0)
    if asked > found.kv_tokens:
        yield Rule("GPU memory", "error", f"one request of {asked:,.0f} tokens does not fit the KV cache of {found.kv_tokens:,}", "lower --context-length, or --kv-cache-dtype fp8_e4m3")


# ---- the draft

_EAGLE3_CLASSES = ("LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM")
_NEEDED = ("fc.weight", "midlayer.self_attn.q_proj.weight", "midlayer.mlp.down_proj.weight", "norm.weight")


def _speculative(facts: LaunchFacts) -> Iterator[Rule]:
    if not facts.draft_config:
        return
    if facts.topk == 1 and facts.num_draft_tokens != facts.num_steps + 1:
        yield Rule("draft shape", "warning", f"with topk 1 SGLang verifies steps + 1 = {facts.num_steps + 1} tokens, not {facts.num_draft_tokens}", f"speculative_num_draft_tokens = {facts.num_steps + 1}")
    if facts.topk > 1 and facts.num_draft_tokens > 1 + facts.topk + facts.topk * facts.topk * max(0, facts.num_steps - 1):
        yield Rule("draft shape", "warning", f"a tree of {facts.num_steps} steps x topk {facts.topk} has fewer than {facts.num_draft_tokens} nodes", "lower speculative_num_draft_tokens")
    backend = option(facts.argv, "--attention-backend")
    if backend == "flashmla" and facts.topk > 1:
        yield Rule("draft shape", "error", "flashmla supports topk 1 only for speculative decoding", "speculative_eagle_topk = 1", "sglang 0.5.23 layers/attention/flashmla_backend.py")


def boundaries_of(ids: Sequence[int], *, target_class: str, version: str, num_layers: int) -> tuple[int, ...]:
    """What a draft's aux layer ids mean in this SGLang: the residual stream entering layer b = transformers' hidden_states[b].

    Measured and read in the released sources: llama and most classes always add one; deepseek_v2 (Kimi-K2, K2.5) adds one up to
    0.5.12, and from 0.5.13 only if the first id is 1; gpt_oss adds one unless the largest id is the number of layers.
    """
    known = version_tuple(version)
    if "Deepseek" in target_class or "Kimi" in target_class:
        shift = 1 if (known and known < (0, 5, 13)) or (ids and ids[0] == 1) else 0
    elif "GptOss" in target_class:
        shift = 0 if ids and max(ids) == num_layers else 1
    else:
        shift = 1
    return tuple(i + shift for i in ids)


def _draft(facts: LaunchFacts) -> Iterator[Rule]:
    draft = facts.draft_config
    if not draft:
        return
    names = [str(n) for n in as_list(draft.get("architectures"))]
    algorithm = (option(facts.argv, "--speculative-algorithm") or "EAGLE3").upper()
    is_eagle3 = any(n in _EAGLE3_CLASSES or "Eagle3" in n for n in names)
    if names and algorithm == "EAGLE3" and not is_eagle3:
        yield Rule("draft", "error", f"architecture {names[0]} is no EAGLE-3 draft", "EAGLE (not EAGLE3) for an EAGLE-1/2 draft, or another folder")
    if is_eagle3 and algorithm == "EAGLE":
        yield Rule("draft", "error", f"architecture {names[0]} is an EAGLE-3 draft, but --speculative-algorithm says EAGLE", "--speculative-algorithm EAGLE3")
    if not facts.config:
        return
    target = text_config(facts.config)
    shape = shape_of(facts.config)
    wide = draft.get("target_hidden_size") or draft.get("hidden_size")
    if wide and shape.hidden_size and wide != shape.hidden_size:
        yield Rule("draft", "error", f"the draft reads hidden states of width {wide}, the target's are {shape.hidden_size}: it belongs to another model", "use the draft of this target")
    if draft.get("vocab_size") and shape.vocab_size and draft["vocab_size"] != shape.vocab_size:
        yield Rule("draft", "error", f"vocabulary {draft['vocab_size']:,} of the draft against {shape.vocab_size:,} of the target", "use the draft of this target")
    yield from _vocabulary_map(facts, shape)
    yield from _aux_layers(facts, shape)
    longest, own = shape.max_position_embeddings, int(draft.get("max_position_embeddings") or 0)
    asked = int(number(option(facts.argv, "--context-length"), 0)) or longest
    if own and asked and own < asked and facts.env.get("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN") != "1":
        yield Rule("draft context", "error", f"the draft ends at {own:,} positions, the server's context is {asked:,}", "--context-length, or SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 in env", "SGLang refuses: 'Target model's context_length is greater'")
    theta, other = draft.get("rope_theta"), target.get("rope_theta")
    if theta and other and theta != other:
        yield Rule("draft rope", "info", f"rope_theta {theta:g} of the draft, {other:g} of the target", "right if the draft was trained so")
    if facts.draft_names:
        have = {n.removeprefix("model.").replace("layers.0.", "midlayer.") for n in facts.draft_names}
        lacking = [n for n in _NEEDED if n not in have] if "LlamaForCausalLMEagle3" in names else []
        if lacking:
            yield Rule("draft weights", "error", f"tensor {lacking[0]} is missing: SGLang skips unknown names without a word, and the draft would be noise", "export it in SGLang's names", "sglang models/llama_eagle3.py load_weights")


def _vocabulary_map(facts: LaunchFacts, shape: ModelShape) -> Iterator[Rule]:
    size = facts.draft_config.get("draft_vocab_size")
    if facts.draft_d2t is None or not shape.vocab_size:
        return
    ids = [i + offset for i, offset in enumerate(facts.draft_d2t)]
    if size and len(ids) != size:
        yield Rule("draft vocabulary", "error", f"d2t has {len(ids):,} entries, draft_vocab_size is {size:,}", "export the draft again")
    if facts.engine == "vllm" and len(ids) == shape.vocab_size:
        yield Rule("draft vocabulary", "error", "d2t is there although the draft knows every token: vLLM has no place for it and does not start", "export the draft again, or take d2t and t2d out", "vllm models/llama_eagle3.py draft_id_to_target_id")
        return
    outside = sum(1 for i in ids if not 0 <= i < shape.vocab_size)
    if outside:
        yield Rule("draft vocabulary", "error", f"{outside:,} of {len(ids):,} d2t entries point outside the target's vocabulary: are they ids instead of offsets?", "d2t holds offsets: target id = i + d2t[i]")
    elif any(b <= a for a, b in itertools.pairwise(ids)):
        yield Rule("draft vocabulary", "warning", "d2t is not in ascending order", "harmless for SGLang; t2d-based tools expect ascending order")
    else:
        yield Rule("draft vocabulary", "ok", f"d2t: {len(ids):,} of {shape.vocab_size:,} tokens, ascending")


def _aux_layers(facts: LaunchFacts, shape: ModelShape) -> Iterator[Rule]:
    key, is_vllm = "eagle_aux_hidden_state_layer_ids", facts.engine == "vllm"
    raw = as_table(facts.draft_config.get("eagle_config")).get(key)
    if is_vllm and as_list(facts.draft_config.get(key)):  # its ids stand at the top; those of eagle_config are its second choice
        raw = facts.draft_config[key]
    n = shape.num_layers
    if not as_list(raw):
        default = (2, n // 2, n - 3)
        if n and len(set(default)) < 3:
            yield Rule("aux layers", "error", f"the default boundaries {default} of a {n}-layer target are not three different ones", "name them in the draft's eagle_config.eagle_aux_hidden_state_layer_ids")
        return
    ids = [int(i) for i in as_list(raw)]
    means = tuple(ids) if is_vllm else boundaries_of(ids, target_class=shape.architecture, version=facts.version, num_layers=n)
    words = f"aux ids {ids} mean boundaries {list(means)} in {'vLLM' if is_vllm else 'SGLang'} {facts.version or '?'} for {shape.architecture or 'this model'}"
    if n and any(not 0 <= b <= n for b in means):
        yield Rule("aux layers", "error", f"{words}: outside the target's {n} layers", "take the ids that the draft was trained with")
    elif not is_vllm and ("Deepseek" in shape.architecture or "Kimi" in shape.architecture):
        yield Rule("aux layers", "info", words, "the meaning changed between 0.5.12 and 0.5.13: `k2tui extract`'s alignment check tells which one this draft wants", "sglang models/deepseek_v2.py, change 25454")
    else:
        yield Rule("aux layers", "ok", words)
