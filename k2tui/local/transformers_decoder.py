"""Any Llama-shaped decoder through transformers' own model class, driven layer by layer over the engine's KV cache.

For architectures that the quick decoder does not compute (Qwen, biases, other rope types). Imported only when needed:
transformers' modelling code takes several seconds to import.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from k2tui.errors import K2Error
from k2tui.local.checkpoint import Checkpoint
from k2tui.local.kv import Window

_ATTENTION = "k2tui_window"


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    k2tui_window: Window,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query, key, value [n, heads, q, d], new tokens only: the window stores them and sees the rest."""
    n, heads, length, dim = query.shape
    scale = dim**-0.5 if scaling is None else scaling
    flat = torch.cat((query, key, value), 1).transpose(1, 2).reshape(n * length, -1, dim)
    out = k2tui_window.attend(module.layer_idx, flat, heads, scale)
    return out.view(n, length, heads, dim), None


class TransformersDecoder:
    def __init__(
        self,
        checkpoint: Checkpoint,
        tensors: Iterable[tuple[str, torch.Tensor]],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        where = str(checkpoint.folder)
        from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

        AttentionInterface.register(_ATTENTION, _attention)
        try:
            config = AutoConfig.from_pretrained(where, local_files_only=True)
            if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
                raise K2Error(
                    f"{where}/config.json: sliding-window attention is not supported", "SGLang serves it"
                )
            with torch.device(device):
                model = AutoModelForCausalLM.from_config(config, attn_implementation=_ATTENTION, dtype=dtype)
        except (ValueError, KeyError, OSError, ImportError, AttributeError, TypeError) as err:
            raise K2Error(
                f"{where}: transformers cannot build this model: {str(err)[:200]}", "use SGLang for it"
            )
        self.model = model.eval()
        self.body = getattr(model, "model", None)
        if self.body is None or not all(
            hasattr(self.body, part) for part in ("layers", "embed_tokens", "norm", "rotary_emb")
        ):
            raise K2Error(
                f"{where}: {checkpoint.architecture} is not a Llama-shaped decoder", "use SGLang for it"
            )
        wanted = dict(model.named_parameters())
        missing = set(wanted)
        for name, tensor in tensors:
            if name not in wanted:
                continue
            if wanted[name].shape != tensor.shape:
                raise K2Error(
                    f"{where}: {name} has shape {list(tensor.shape)}, config.json says {list(wanted[name].shape)}",
                    "config.json and the shards are not of one model",
                )
            wanted[name].data.copy_(tensor)
            missing.discard(name)
        if missing:
            raise K2Error(
                f"{where}: the shards hold no tensor {min(missing)!r}", "the checkpoint is not whole"
            )
        attention = self.body.layers[0].self_attn
        self.num_layers = len(self.body.layers)
        self.hidden_size = int(config.hidden_size)
        self.vocab_size = int(config.vocab_size)
        self.head_dim = int(attention.head_dim)
        self.num_kv_heads = int(config.num_key_value_heads)
        self.dtype = dtype
        self.device = device
        self.embedding: torch.Tensor = self.body.embed_tokens.weight

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, window: Window, boundaries: tuple[int, ...] = ()
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        body: Any = self.body
        x = body.embed_tokens(ids)
        rotary = body.rotary_emb(x, positions)
        aux: list[torch.Tensor] = []
        for layer, block in enumerate(body.layers):
            if layer in boundaries:
                aux.append(x)
            x = block(
                x,
                attention_mask=None,
                position_ids=positions,
                position_embeddings=rotary,
                k2tui_window=window,
            )
        if self.num_layers in boundaries:
            aux.append(x)
        return body.norm(x), torch.cat(aux, -1) if aux else None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.lm_head(hidden)
