"""What training needs of the target: embedding, head and final norm, read from its checkpoint without loading the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k2tui import checkpoint as files
from k2tui import paths
from k2tui.eagle3.draft import DraftConfig, rms_norm
from k2tui.errors import K2Error

_EMBED = (
    "model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "embed_tokens.weight",
)
_HEAD = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight")
_NORM = (
    "model.norm.weight",
    "language_model.model.norm.weight",
    "model.language_model.norm.weight",
    "norm.weight",
)


@dataclass(frozen=True)
class Target:
    """embedding, head [vocab, H]; norm [H] (the final norm's weight); config: the text model's part of config.json."""

    path: Path
    config: Mapping[str, Any]
    architecture: str
    embedding: Tensor
    head: Tensor
    norm: Tensor
    eps: float

    @property
    def vocab_size(self) -> int:
        return int(self.embedding.shape[0])

    @property
    def hidden_size(self) -> int:
        return int(self.embedding.shape[1])

    @property
    def num_layers(self) -> int:
        return int(self.config.get("num_hidden_layers", 0))

    def normed(self, last: Tensor) -> Tensor:
        """The final norm of a stored state that was saved before it (vLLM's and speculators' convention)."""
        return rms_norm(last, self.norm.to(last.device), self.eps)


def target_folder(name: str) -> Path:
    """The folder of a target; "asset:NAME" is one that k2tui ships."""
    return (
        paths.assets_dir() / name.removeprefix("asset:")
        if name.startswith("asset:")
        else Path(name).expanduser()
    )


def load_target(folder: Path) -> Target:
    """Read the three tensors. Raises K2Error naming what is missing or stored in a packed form."""
    found = files.inspect(folder)
    if found.missing or not found.shards:
        raise K2Error(
            f"{folder}: shards are missing: {', '.join(found.missing[:3]) or 'all'}",
            "download the model completely",
        )
    where: dict[str, str] = {}
    for name in found.shards:
        try:
            for key in files.read_header(Path(folder) / name):
                where[key] = name
        except (OSError, K2Error) as err:
            raise K2Error(f"{folder}/{name}: {getattr(err, 'message', err)}", "download that shard again")
    whole = dict(found.config)
    inner = whole.get("text_config")
    config: dict[str, Any] = inner if isinstance(inner, dict) else whole
    embedding = _tensor(folder, where, _EMBED, "embedding")
    if embedding is None:
        raise K2Error(f"{folder}: no embedding ({_EMBED[0]})", "give the target model's folder")
    tied = bool(whole.get("tie_word_embeddings", config.get("tie_word_embeddings", False)))
    head = _tensor(folder, where, _HEAD, "head")
    if head is None:
        if not tied:
            raise K2Error(
                f"{folder}: no {_HEAD[0]}, and tie_word_embeddings is not set",
                "give the target model's folder",
            )
        head = embedding
    norm = _tensor(folder, where, _NORM, "final norm")
    if norm is None:
        raise K2Error(f"{folder}: no {_NORM[0]}", "give the target model's folder")
    archs = [str(a) for a in whole.get("architectures") or [""]]
    return Target(
        Path(folder), config, archs[0], embedding, head, norm, float(config.get("rms_norm_eps", 1e-6))
    )


def _tensor(folder: Path, where: Mapping[str, str], names: tuple[str, ...], what: str) -> Tensor | None:
    from safetensors import safe_open

    for name in names:
        if name in where:
            with safe_open(str(Path(folder) / where[name]), "pt") as file:
                value = file.get_tensor(name)
            if not value.is_floating_point() or value.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
                raise K2Error(
                    f"{folder}: the {what} ({name}) is stored as {value.dtype}",
                    "training needs it in bf16, fp16 or fp32",
                )
            return value
    return None


def draft_config_for(target: Target, draft_vocab_size: int, **over: Any) -> DraftConfig:
    """A Llama-type draft of the target's width: its heads where it has plain ones, 128 wide ones where it is MLA.

    max_position_embeddings is the target's own (the length that is served), rope plain: a draft sees the same positions.
    """
    c = target.config
    heads = int(c.get("num_attention_heads", 1))
    is_mla = bool(c.get("kv_lora_rank"))
    rope = c.get("rope_parameters") or {}
    eos = c.get("eos_token_id")
    values: dict[str, Any] = {
        "hidden_size": target.hidden_size,
        "intermediate_size": int(c.get("intermediate_size") or 4 * target.hidden_size),
        "num_attention_heads": heads,
        "num_key_value_heads": heads if is_mla else int(c.get("num_key_value_heads") or heads),
        "head_dim": 128 if is_mla else int(c.get("head_dim") or target.hidden_size // heads),
        "vocab_size": target.vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "rms_norm_eps": target.eps,
        "rope_theta": float(c.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        "max_position_embeddings": int(c.get("max_position_embeddings") or 4096),
        "bos_token_id": int(c.get("bos_token_id") or 0),
        "eos_token_id": tuple(eos) if isinstance(eos, list) else int(eos or 0),
    }
    return DraftConfig(**{**values, **over})
