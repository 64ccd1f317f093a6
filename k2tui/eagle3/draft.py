"""The EAGLE-3 draft model: its config, its weights under the servers' names, and a plain forward for serving.

One decoder layer on [embedding; hidden]. Laws: the residual is the un-normalised hidden state; the state handed to the
next draft step is the one before `norm` (after it with EAGLE-3.1's `norm_output`); row order of `fc` is low, mid, high.
Knows nothing of training, files of states or servers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from k2tui.eagle3.rope import rotary_table, rotate
from k2tui.errors import K2Error
from k2tui.parsing import parse_json

LLAMA = "LlamaForCausalLMEagle3"
MLA = "Eagle3DeepseekV2ForCausalLM"


@dataclass(frozen=True)
class DraftConfig:
    """Shape of a draft. aux_layer_ids: as the server's flag reads them (the boundary they mean differs by server and
    version: docs/training.md). head_dim: of q and k in a Llama-type draft; v_head_dim, qk_* and *_lora_rank: MLA only.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int = 0  # 0 = hidden_size
    num_aux: int = 3
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    max_position_embeddings: int = 4096
    aux_layer_ids: tuple[int, ...] = ()
    fc_norm: bool = False  # EAGLE-3.1: RMSNorm of each third before fc
    norm_output: bool = False  # EAGLE-3.1: the next step reads the normed state
    norm_before_fc: bool = False  # one RMSNorm over all thirds before fc
    architecture: str = LLAMA
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    bos_token_id: int = 0
    eos_token_id: int | tuple[int, ...] = 0

    @property
    def is_mla(self) -> bool:
        return self.architecture == MLA

    @property
    def aux_size(self) -> int:
        return self.num_aux * (self.target_hidden_size or self.hidden_size)

    @property
    def qk_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim if self.is_mla else self.head_dim

    @property
    def v_dim(self) -> int:
        return self.v_head_dim if self.is_mla else self.head_dim

    @property
    def kv_heads(self) -> int:
        return self.num_attention_heads if self.is_mla else self.num_key_value_heads

    @staticmethod
    def load(folder: Path) -> DraftConfig:
        """Read folder/config.json (SGLang, SpecForge and speculators spell some keys differently). Raises K2Error."""
        path = Path(folder) / "config.json"
        try:
            raw = parse_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            inside = sorted(p.parent.name for p in Path(folder).glob("*/config.json"))  # a training's run folder
            hint = "a draft checkpoint is a folder with config.json and safetensors"
            if inside:
                hint = f"drafts inside: {', '.join(inside)}; give {Path(folder) / inside[0]}"
            raise K2Error(f"{path}: no such file", hint)
        except (OSError, ValueError) as err:
            raise K2Error(f"{path}: cannot be read: {err}", "check the file")
        return DraftConfig.from_dict(raw, str(path))

    @staticmethod
    def from_dict(raw: Mapping[str, Any], where: str = "config.json") -> DraftConfig:
        """From the dict of a config.json. Raises K2Error naming the key."""
        whole = raw
        if isinstance(raw.get("transformer_layer_config"), dict):  # speculators nests the layer's shape
            raw = {
                **raw["transformer_layer_config"],
                **{k: v for k, v in raw.items() if k != "transformer_layer_config"},
            }
        archs = [str(a) for a in whole.get("architectures") or []]
        is_mla = MLA in archs or bool(raw.get("kv_lora_rank"))
        for key in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
            if not isinstance(raw.get(key), int) or int(raw[key]) < 1:
                raise K2Error(
                    f"{where}: key {key!r} must be a whole number above 0, not {raw.get(key)!r}",
                    "is this a draft's config?",
                )
        if int(raw.get("num_hidden_layers", 1)) != 1:
            raise K2Error(
                f"{where}: num_hidden_layers is {raw['num_hidden_layers']}: an EAGLE-3 draft has one layer",
                "give the draft's folder, not the target's",
            )
        if raw.get("attention_bias") or raw.get("bias"):
            raise K2Error(
                f"{where}: a draft with biases is not supported", "set attention_bias and bias to false"
            )
        rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
        theta = float(raw.get("rope_theta") or rope.get("rope_theta") or 10000.0)
        kind = rope.get("rope_type", rope.get("type", "default"))
        eagle = raw.get("eagle_config") or {}
        ids = (
            eagle.get("eagle_aux_hidden_state_layer_ids") or raw.get("eagle_aux_hidden_state_layer_ids") or ()
        )
        heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
        vocab = int(raw["vocab_size"])
        eos = raw.get("eos_token_id") or 0
        return DraftConfig(
            hidden_size=hidden,
            intermediate_size=int(raw["intermediate_size"]),
            num_attention_heads=heads,
            num_key_value_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or hidden // heads),
            vocab_size=vocab,
            draft_vocab_size=int(raw.get("draft_vocab_size") or vocab),
            target_hidden_size=int(raw.get("target_hidden_size") or 0),
            num_aux=int(raw.get("num_aux_hidden_states") or len(ids) or 3),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling={k: v for k, v in rope.items() if k != "rope_theta"} if kind != "default" else None,
            max_position_embeddings=int(raw.get("max_position_embeddings") or 4096),
            aux_layer_ids=tuple(int(i) for i in ids),
            fc_norm=bool(raw.get("fc_norm") or raw.get("use_aux_norm")),
            norm_output=bool(raw.get("norm_output")),
            norm_before_fc=bool(eagle.get("norm_before_fc", raw.get("norm_before_fc", False))),
            architecture=MLA if is_mla else LLAMA,
            q_lora_rank=int(raw.get("q_lora_rank") or 0) if is_mla else 0,
            kv_lora_rank=int(raw.get("kv_lora_rank") or 0) if is_mla else 0,
            qk_nope_head_dim=int(raw.get("qk_nope_head_dim") or 0) if is_mla else 0,
            qk_rope_head_dim=int(raw.get("qk_rope_head_dim") or 0) if is_mla else 0,
            v_head_dim=int(raw.get("v_head_dim") or 0) if is_mla else 0,
            bos_token_id=int(raw.get("bos_token_id") or 0),
            eos_token_id=tuple(int(i) for i in eos) if isinstance(eos, list) else int(eos),
        )

    def to_dict(self) -> dict[str, Any]:
        """config.json as SGLang and vLLM read it. rope is written both ways: transformers 5 reads `rope_parameters`."""
        rope = {
            "rope_type": "default",
            **(dict(self.rope_scaling) if self.rope_scaling else {}),
            "rope_theta": self.rope_theta,
        }
        out: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": "kimi_k2" if self.is_mla else "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_attention_heads if self.is_mla else self.num_key_value_heads,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "rms_norm_eps": self.rms_norm_eps,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position_embeddings,
            "rope_theta": self.rope_theta,
            "rope_scaling": dict(self.rope_scaling) if self.rope_scaling else None,
            "rope_parameters": rope,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "torch_dtype": "bfloat16",
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(self.eos_token_id)
            if isinstance(self.eos_token_id, tuple)
            else self.eos_token_id,
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": list(self.aux_layer_ids),
                "use_aux_hidden_state": True,
                "norm_before_fc": self.norm_before_fc,
            },
        }
        if self.target_hidden_size and self.target_hidden_size != self.hidden_size:
            out["target_hidden_size"] = self.target_hidden_size
        if self.num_aux != 3:
            out["num_aux_hidden_states"] = self.num_aux
        if self.fc_norm:
            out["fc_norm"] = True
        if self.norm_output:
            out["norm_output"] = True
        if self.is_mla:
            for key in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
                out[key] = getattr(self, key)
        else:
            out["head_dim"] = self.head_dim
        return out

    def changed(self, **values: Any) -> DraftConfig:
        known = {f.name for f in fields(self)}
        return replace(self, **{k: v for k, v in values.items() if k in known})


class Weight(nn.Module):
    """One matrix or vector under the name `<module>.weight`; how it is applied is written where it is used."""

    def __init__(self, *shape: int, ones: bool = False, std: float = 0.02) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape) if ones else torch.empty(shape).normal_(std=std))


class _LlamaAttention(nn.Module):
    def __init__(self, c: DraftConfig) -> None:
        super().__init__()
        self.q_proj = Weight(c.num_attention_heads * c.head_dim, 2 * c.hidden_size)
        self.k_proj = Weight(c.num_key_value_heads * c.head_dim, 2 * c.hidden_size)
        self.v_proj = Weight(c.num_key_value_heads * c.head_dim, 2 * c.hidden_size)
        self.o_proj = Weight(c.hidden_size, c.num_attention_heads * c.head_dim)


class _MlaAttention(nn.Module):
    def __init__(self, c: DraftConfig) -> None:
        super().__init__()
        heads = c.num_attention_heads
        self.q_a_proj = Weight(c.q_lora_rank, 2 * c.hidden_size)
        self.q_a_layernorm = Weight(c.q_lora_rank, ones=True)
        self.q_b_proj = Weight(heads * c.qk_dim, c.q_lora_rank)
        self.kv_a_proj_with_mqa = Weight(c.kv_lora_rank + c.qk_rope_head_dim, 2 * c.hidden_size)
        self.kv_a_layernorm = Weight(c.kv_lora_rank, ones=True)
        self.kv_b_proj = Weight(heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
        self.o_proj = Weight(c.hidden_size, heads * c.v_head_dim)


class _Mlp(nn.Module):
    def __init__(self, c: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = Weight(c.intermediate_size, c.hidden_size)
        self.up_proj = Weight(c.intermediate_size, c.hidden_size)
        self.down_proj = Weight(c.hidden_size, c.intermediate_size)


class _Layer(nn.Module):
    def __init__(self, c: DraftConfig) -> None:
        super().__init__()
        self.input_layernorm = Weight(c.hidden_size, ones=True)
        self.hidden_norm = Weight(c.hidden_size, ones=True)
        self.post_attention_layernorm = Weight(c.hidden_size, ones=True)
        self.self_attn = _MlaAttention(c) if c.is_mla else _LlamaAttention(c)
        self.mlp = _Mlp(c)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm in fp32, result in x's dtype."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * weight.float()).to(x.dtype)


class DraftCache:
    """Keys and values of one sequence, by position. Grows by doubling."""

    def __init__(self) -> None:
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add rows [T, kv_heads, dim]; returns all keys and values so far."""
        need = self.length + keys.shape[0]
        if self._keys is None or self._values is None or self._keys.shape[0] < need:
            room = max(64, 2 * need)
            grown_k = keys.new_empty(room, *keys.shape[1:])
            grown_v = values.new_empty(room, *values.shape[1:])
            if self._keys is not None and self._values is not None:
                grown_k[: self.length] = self._keys[: self.length]
                grown_v[: self.length] = self._values[: self.length]
            self._keys, self._values = grown_k, grown_v
        self._keys[self.length : need] = keys
        self._values[self.length : need] = values
        self.length = need
        return self._keys[:need], self._values[:need]


class Eagle3Draft(nn.Module):
    """A draft. Its state_dict holds exactly the tensors that SGLang loads, under its names, plus d2t and t2d.

    The embedding [vocab, hidden] is the target's: frozen, not saved, set with `set_embedding`.
    d2t [draft_vocab] int64: target id = draft id + d2t[draft id]. t2d [vocab] bool: which target ids the draft knows.
    """

    d2t: Tensor
    t2d: Tensor
    embedding: Tensor
    inv_freq: Tensor

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = c = config
        self.fc = Weight(c.hidden_size, c.aux_size)
        if c.norm_before_fc:
            self.input_norm = Weight(c.aux_size, ones=True)
        if c.fc_norm:
            self.fc_norm = nn.ModuleList(Weight(c.aux_size // c.num_aux, ones=True) for _ in range(c.num_aux))
        self.midlayer = _Layer(c)
        self.norm = Weight(c.hidden_size, ones=True)
        self.lm_head = Weight(c.draft_vocab_size, c.hidden_size)
        step = max(1, c.vocab_size // c.draft_vocab_size)
        ids = torch.arange(c.draft_vocab_size) * step
        known = torch.zeros(c.vocab_size, dtype=torch.bool)
        known[ids] = True
        self.register_buffer("d2t", ids - torch.arange(c.draft_vocab_size))
        self.register_buffer("t2d", known)
        self.register_buffer("embedding", torch.empty(0), persistent=False)
        dim = c.qk_rope_head_dim if c.is_mla else c.head_dim
        inv_freq, self.rope_factor, on_softmax = rotary_table(
            dim, c.rope_theta, c.rope_scaling, deepseek=c.is_mla
        )
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.scale = c.qk_dim**-0.5 * on_softmax

    def set_embedding(self, weight: Tensor) -> None:
        """Share the target's embedding [vocab, hidden]; it is never trained. Raises K2Error on another shape."""
        want = (self.config.vocab_size, self.config.hidden_size)
        if tuple(weight.shape) != want:
            raise K2Error(
                f"the target's embedding is {tuple(weight.shape)}, the draft needs {want}",
                "is this the draft's target?",
            )
        self.embedding = weight.detach()

    def set_vocab(self, ids: Tensor) -> None:
        """Use these target ids [draft_vocab], ascending, as the draft's vocabulary."""
        c = self.config
        if (
            ids.shape != (c.draft_vocab_size,)
            or bool((ids[1:] <= ids[:-1]).any())
            or int(ids[-1]) >= c.vocab_size
            or int(ids[0]) < 0
        ):
            raise K2Error(
                "a draft vocabulary must hold draft_vocab_size target ids, ascending and within the vocabulary"
            )
        self.d2t = (ids - torch.arange(len(ids), device=ids.device)).to(self.d2t.device, torch.int64)
        known = torch.zeros(c.vocab_size, dtype=torch.bool, device=self.t2d.device)
        known[ids.to(known.device)] = True
        self.t2d = known

    def target_ids(self) -> Tensor:
        """[draft_vocab] int64: the target id of every draft id."""
        return self.d2t + torch.arange(self.config.draft_vocab_size, device=self.d2t.device)

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin [rows, rotary_dim/2] fp32 of positions [rows]."""
        angle = positions.float()[:, None] * self.inv_freq.float()[None]
        return angle.cos() * self.rope_factor, angle.sin() * self.rope_factor

    def fuse(self, aux: Tensor) -> Tensor:
        """The target's three states [..., 3H] (low, mid, high) -> the first hidden state [..., H]."""
        c = self.config
        if c.norm_before_fc:
            aux = rms_norm(aux, self.input_norm.weight, c.rms_norm_eps)
        if c.fc_norm:
            thirds = aux.chunk(c.num_aux, -1)
            weights = (cast(Weight, w).weight for w in self.fc_norm)
            aux = torch.cat(
                [rms_norm(x, w, c.rms_norm_eps) for x, w in zip(thirds, weights, strict=True)], -1
            )
        return aux.to(self.fc.weight.dtype) @ self.fc.weight.t()

    def _project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, heads, qk], k [T, kv_heads, qk], v [T, kv_heads, v] of inputs x [T, 2H]."""
        c, a, rows = self.config, self.midlayer.self_attn, x.shape[0]
        cos, sin = self.cos_sin(positions)
        if isinstance(a, _LlamaAttention):
            q = (x @ a.q_proj.weight.t()).view(rows, c.num_attention_heads, c.head_dim)
            k = (x @ a.k_proj.weight.t()).view(rows, c.num_key_value_heads, c.head_dim)
            v = (x @ a.v_proj.weight.t()).view(rows, c.num_key_value_heads, c.head_dim)
            return rotate(q, cos, sin, interleaved=False), rotate(k, cos, sin, interleaved=False), v
        assert isinstance(a, _MlaAttention)
        heads, nope = c.num_attention_heads, c.qk_nope_head_dim
        low = rms_norm(x @ a.q_a_proj.weight.t(), a.q_a_layernorm.weight, c.rms_norm_eps)
        q = (low @ a.q_b_proj.weight.t()).view(rows, heads, c.qk_dim)
        q = torch.cat((q[..., :nope], rotate(q[..., nope:], cos, sin, interleaved=True)), -1)
        both = x @ a.kv_a_proj_with_mqa.weight.t()
        latent = rms_norm(both[:, : c.kv_lora_rank], a.kv_a_layernorm.weight, c.rms_norm_eps)
        turned = rotate(both[:, None, c.kv_lora_rank :], cos, sin, interleaved=True)
        kv = (latent @ a.kv_b_proj.weight.t()).view(rows, heads, nope + c.v_head_dim)
        return q, torch.cat((kv[..., :nope], turned.expand(-1, heads, -1)), -1), kv[..., nope:]

    def extend(self, tokens: Tensor, hidden: Tensor, cache: DraftCache, start: int) -> Tensor:
        """Run the layer over T new positions of one sequence; positions start, start+1, ... go into the cache.

        tokens [T]: at position t the token t+1 (shifted by one). hidden [T, H]: `fuse(aux)` of committed positions, or
        `carry(...)` of the step before while drafting. Returns the layer's output [T, H], before `norm`.
        """
        c, rows = self.config, tokens.shape[0]
        positions = torch.arange(start, start + rows, device=tokens.device)
        q, k, v = self._project(self._inputs(tokens, hidden), positions)
        past = cache.length
        keys, values = cache.append(k, v)
        group = c.num_attention_heads // c.kv_heads
        keys = keys.repeat_interleave(group, 1)
        values = values.repeat_interleave(group, 1)
        logits = torch.einsum("qhd,khd->hqk", q.float(), keys.float()) * self.scale
        hidden_keys = (
            torch.arange(keys.shape[0], device=q.device)[None]
            > torch.arange(past, past + rows, device=q.device)[:, None]
        )
        weights = logits.masked_fill(hidden_keys, -math.inf).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", weights, values.float())
        return self._close(hidden, mixed)

    def _inputs(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """The layer's input [T, 2H] of tokens [T] and hidden states [T, H]."""
        layer, eps = self.midlayer, self.config.rms_norm_eps
        embedded = self.embedding[tokens].to(hidden.dtype)
        return torch.cat(
            (
                rms_norm(embedded, layer.input_layernorm.weight, eps),
                rms_norm(hidden, layer.hidden_norm.weight, eps),
            ),
            -1,
        )

    def _close(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        """The layer's output [T, H] of hidden states [T, H] and what attention made of them [T, heads, v]."""
        layer, a = self.midlayer, self.midlayer.self_attn
        residual = hidden + mixed.to(hidden.dtype).flatten(1) @ a.o_proj.weight.t()  # type: ignore[union-attr]
        normed = rms_norm(residual, layer.post_attention_layernorm.weight, self.config.rms_norm_eps)
        gate, up = normed @ layer.mlp.gate_proj.weight.t(), normed @ layer.mlp.up_proj.weight.t()
        return residual + (nn.functional.silu(gate) * up) @ layer.mlp.down_proj.weight.t()

    def carry(self, out: Tensor) -> Tensor:
        """What the next draft step takes as hidden: `out` itself, or its norm in EAGLE-3.1."""
        return rms_norm(out, self.norm.weight, self.config.rms_norm_eps) if self.config.norm_output else out

    def logits(self, out: Tensor) -> Tensor:
        """[..., draft_vocab] of the layer's output [..., H]."""
        return rms_norm(out, self.norm.weight, self.config.rms_norm_eps) @ self.lm_head.weight.t()

    @torch.no_grad()
    def draft_chains(self, tokens: Tensor, aux: Tensor, at: Tensor, num_steps: int) -> Tensor:
        """Greedy chains after positions `at` [A] of one sequence, all of them at once.

        tokens [T], aux [T, 3H]: position t's state with the token at t+1. A chain sees the states up to its own position and
        then its own guesses, so no chain depends on another and what is verified in between changes none. Returns target ids
        [A, num_steps]: row i is what a server drafts once the token at at[i] + 1 is the newest one.
        """
        hidden = self.fuse(aux)
        q, keys, values = self._project(
            self._inputs(tokens, hidden), torch.arange(len(tokens), device=tokens.device)
        )
        keys, values, ids = keys.float(), values.float(), self.target_ids()
        # as many chains at once as keep the attention scores within 128 MB
        rows = max(1, min(512, 2**25 // max(1, self.config.num_attention_heads * len(tokens))))
        found: list[Tensor] = []
        for some in at.split(rows):
            now, out, own_k, own_v = q[some], hidden[some], [], []
            guesses: list[Tensor] = []
            for step in range(num_steps):
                if step:
                    carried = self.carry(out)
                    now, k, v = self._project(self._inputs(guesses[-1], carried), some + step)
                    own_k.append(k.float())
                    own_v.append(v.float())
                    out = self._close(carried, self._attend(now, keys, values, some, own_k, own_v))
                else:
                    out = self._close(out, self._attend(now, keys, values, some, own_k, own_v))
                guesses.append(ids[self.logits(out).argmax(-1)])
            found.append(torch.stack(guesses, 1))
        return torch.cat(found) if found else at.new_zeros(0, num_steps)

    def _attend(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        at: Tensor,
        own_keys: list[Tensor],
        own_values: list[Tensor],
    ) -> Tensor:
        """q [A, heads, qk] over keys [T, kv_heads, qk] of positions up to at [A], then each row's own [A, kv_heads, qk]. fp32."""
        wide = q.float().unflatten(1, (keys.shape[1], -1))
        scores = torch.einsum("angd,tnd->angt", wide, keys)
        later = torch.arange(keys.shape[0], device=at.device)[None] > at[:, None]
        parts = [scores.masked_fill_(later[:, None, None], -math.inf)]
        parts += [torch.einsum("angd,and->ang", wide, k)[..., None] for k in own_keys]
        weights = (torch.cat(parts, -1) * self.scale).softmax(-1)
        mixed = torch.einsum("angt,tnd->angd", weights[..., : keys.shape[0]], values)
        for n, v in enumerate(own_values):
            mixed = mixed + weights[..., keys.shape[0] + n, None] * v[:, :, None]
        return mixed.flatten(1, 2)
