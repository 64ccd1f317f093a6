"""An EAGLE-3 draft head (`LlamaForCausalLMEagle3`) for serving: SGLang's file format, one layer, its own small vocabulary.

Where a token sits: position t of the draft holds the target's features of position t (or the draft's own guess of them)
beside the embedding of token t + 1, and predicts token t + 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from k2tui.errors import K2Error
from k2tui.local.checkpoint import Checkpoint, read_tensors
from k2tui.local.decoder import Block, Decoder, Rotary, need, rope_parameters, rope_table
from k2tui.local.kv import Window

ARCHITECTURE = "LlamaForCausalLMEagle3"


def boundaries(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Which residual streams of the target feed the draft, low to high.

    As SGLang 0.5.23's Llama reads them: id v of `eagle_aux_hidden_state_layer_ids` means what leaves layer v, that is
    boundary v + 1; without ids the boundaries are 2, n//2 and n-3. Raises K2Error for ids that the target has not.
    """
    ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        found = (2, num_layers // 2, num_layers - 3)
        if len(set(found)) < 3 or min(found) < 0:
            raise K2Error(
                f"a target of {num_layers} layers is too shallow for EAGLE-3: boundaries {found} are not three layers",
                "use a target of at least 7 layers, or a draft whose config.json names the layers",
            )
        return found
    if not isinstance(ids, list) or not all(isinstance(v, int) for v in ids):
        raise K2Error(
            f"draft config.json: eagle_aux_hidden_state_layer_ids must be a list of layer numbers, not {ids!r}",
            "fix config.json",
        )
    found = tuple(
        sorted(v + 1 for v in ids)
    )  # captured in the order of layers, whatever the order of the list
    if not found or found[0] < 0 or found[-1] > num_layers or len(set(found)) < len(found):
        raise K2Error(
            f"draft config.json: eagle_aux_hidden_state_layer_ids {ids} do not fit a target of {num_layers} layers",
            "the draft was made for another target",
        )
    return found


class Eagle3Draft:
    """Weights and forward pass. target_ids: draft token -> target token, [draft_vocab_size]."""

    def __init__(
        self, checkpoint: Checkpoint, target: Decoder, *, capacity: int, delay_s: float = 0.0
    ) -> None:
        config = checkpoint.config
        where = str(checkpoint.folder)
        if checkpoint.architecture != ARCHITECTURE:
            raise K2Error(
                f"{where}/config.json: architecture {checkpoint.architecture or 'not given'!r} is not {ARCHITECTURE}",
                "--speculative-draft-model-path must be a Llama-type EAGLE-3 draft",
            )
        for key in ("norm_before_fc", "norm_output"):
            if config.get(key) or (config.get("eagle_config") or {}).get(key):
                raise K2Error(
                    f"{where}/config.json: {key} is not supported", "SGLang serves EAGLE-3.1 drafts"
                )
        if int(config.get("num_hidden_layers", 1)) != 1:
            raise K2Error(
                f"{where}/config.json: num_hidden_layers must be 1", "drafts of more layers need SGLang"
            )
        if rope_parameters(config)["rope_type"] not in ("default", "linear", "llama3"):
            raise K2Error(f"{where}/config.json: this rope type is not supported", "SGLang serves it")
        self.boundaries = boundaries(config, target.num_layers)
        self.hidden_size = int(need(config, "hidden_size", where))
        self.heads = int(need(config, "num_attention_heads", where))
        self.num_kv_heads = int(config.get("num_key_value_heads") or self.heads)
        self.head_dim = int(config.get("head_dim") or self.hidden_size // self.heads)
        self.eps = float(config.get("rms_norm_eps", 1e-6))
        self.scale = self.head_dim**-0.5
        weights = dict(
            read_tensors(checkpoint, dtype=target.dtype, device=str(target.device), delay_s=delay_s)
        )
        # vLLM-style files call the layer layers.0 and the map draft_id_to_target_id; a leading model. is also seen
        weights = {k.removeprefix("model.").replace("layers.0.", "midlayer."): v for k, v in weights.items()}
        if "draft_id_to_target_id" in weights:
            weights["d2t"] = weights.pop("draft_id_to_target_id")

        def take(name: str) -> torch.Tensor:
            if name not in weights:
                raise K2Error(f"{where}: the draft holds no tensor {name!r}", "the draft is not whole")
            return weights.pop(name)

        def check(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
            if tuple(tensor.shape) != shape:
                raise K2Error(
                    f"{where}: {name} has shape {list(tensor.shape)}, {list(shape)} is needed beside this target",
                    "the draft was made for another target, or its config.json is not its own",
                )
            return tensor

        aux = len(self.boundaries) * target.hidden_size
        self.fc = check("fc.weight", take("fc.weight"), (self.hidden_size, aux)).t().contiguous()
        self.fc_norms = (
            [take(f"fc_norm.{i}.weight") for i in range(len(self.boundaries))]
            if "fc_norm.0.weight" in weights
            else []
        )
        self.norm_hidden = take("midlayer.hidden_norm.weight")
        self.block = Block(take, "midlayer.")
        joined = (2 * self.hidden_size, (self.heads + 2 * self.num_kv_heads) * self.head_dim)
        check("midlayer.self_attn.{q,k,v}_proj", self.block.qkv, joined)
        self.norm = take("norm.weight")
        own = weights.pop("embed_tokens.weight", None)
        self.embedding = target.embedding if own is None else own
        check("embed_tokens.weight", self.embedding, (target.vocab_size, self.hidden_size))
        if "lm_head.weight" in weights:
            head = take("lm_head.weight")
        else:  # SGLang: the target's head when the draft brings none
            head = target.embedding if config.get("tie_word_embeddings") else None
            if head is None:
                raise K2Error(
                    f"{where}: the draft holds no tensor 'lm_head.weight'", "the draft is not whole"
                )
        size = head.shape[0]
        offsets = weights.pop("d2t", None)
        ids = torch.arange(size, device=target.device)
        if offsets is not None:
            ids = ids + check("d2t", offsets, (size,)).to(ids)
        elif size != target.vocab_size:
            raise K2Error(
                f"{where}: lm_head has {size} rows for {target.vocab_size} tokens, and there is no d2t",
                "the draft is not whole",
            )
        if int(ids.min()) < 0 or int(ids.max()) >= target.vocab_size:
            raise K2Error(
                f"{where}: d2t points outside the target's {target.vocab_size} tokens",
                "the draft was made for another vocabulary",
            )
        self.head = check("lm_head.weight", head, (size, self.hidden_size)).t().contiguous()
        self.target_ids = ids
        self.rope = rope_table(config, self.head_dim, capacity, target.device)
        self.dtype = target.dtype

    def features(self, aux: torch.Tensor) -> torch.Tensor:
        """The target's boundaries side by side [n, q, B*H] -> the draft's input features [n, q, hidden_size]."""
        if self.fc_norms:
            parts = aux.chunk(len(self.fc_norms), -1)
            aux = torch.cat(
                [
                    F.rms_norm(p, (p.shape[-1],), w, self.eps)
                    for p, w in zip(parts, self.fc_norms, strict=True)
                ],
                -1,
            )
        return torch.matmul(aux, self.fc)

    def forward(
        self, ids: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, window: Window
    ) -> torch.Tensor:
        """ids, positions [n, q], features [n, q, hidden_size] -> hidden states before the norm [n, q, hidden_size]."""
        n, q = ids.shape
        size, heads, kv, dim = self.hidden_size, self.heads, self.num_kv_heads, self.head_dim
        block = self.block
        x = features.reshape(n * q, size)
        embedded = F.rms_norm(
            F.embedding(ids.reshape(-1), self.embedding), (size,), block.norm_attention, self.eps
        )
        both = torch.cat((embedded, F.rms_norm(x, (size,), self.norm_hidden, self.eps)), -1)
        qkv = torch.mm(both, block.qkv).view(n * q, heads + 2 * kv, dim)
        Rotary(self.rope, positions, self.dtype).turn(qkv[:, : heads + kv])
        mixed = window.attend(0, qkv, heads, self.scale)
        x = torch.addmm(x, mixed, block.out)
        gate, up = torch.mm(F.rms_norm(x, (size,), block.norm_mlp, self.eps), block.gate_up).chunk(2, -1)
        return torch.addmm(x, F.silu(gate).mul_(up), block.down).view(n, q, size)

    def guess(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states before the norm [n, hidden_size] -> the likeliest token of each, in the target's vocabulary [n]."""
        logits = torch.matmul(F.rms_norm(hidden, (self.hidden_size,), self.norm, self.eps), self.head)
        return self.target_ids[logits.argmax(-1)]
