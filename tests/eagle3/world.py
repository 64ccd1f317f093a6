"""A small world to learn: a target whose next token its states tell, its folder, and a states folder written as capture does."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from k2tui.capture.model import model_facts
from k2tui.eagle3.batch import Sample
from k2tui.states import Manifest, StatesWriter, WriterLimits
from k2tui.states.writer import write_sample

VOCAB, HIDDEN, LAYERS = 64, 32, 6


def make_target(folder: Path, seed: int = 0) -> torch.Tensor:
    """Write a target's config and the three tensors; returns the head [vocab, hidden]."""
    gen = torch.Generator().manual_seed(seed)
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": LAYERS,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 256,
        "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 0}, {"id": 1}, {"id": 63}]}))
    head = (torch.randn(VOCAB, HIDDEN, generator=gen) / math.sqrt(HIDDEN)).bfloat16()
    tensors = {
        "lm_head.weight": head,
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=gen).bfloat16(),
        "model.norm.weight": torch.ones(HIDDEN).bfloat16(),
    }
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return head.float()


def make_samples(head: torch.Tensor, count: int, seed: int = 1) -> list[Sample]:
    """Token chains x[t+1] = table[x[t]] with a few jumps; the states tell the next tokens, so a draft can learn them."""
    gen = torch.Generator().manual_seed(seed)
    table = torch.roll(torch.randperm(VOCAB, generator=torch.Generator().manual_seed(9)), 1)
    out: list[Sample] = []
    for i in range(count):
        length = 16 + int(torch.randint(24, (1,), generator=gen))
        x = [int(torch.randint(VOCAB, (1,), generator=gen))]
        for _ in range(length - 1):
            jump = float(torch.rand(1, generator=gen)) < 0.05
            x.append(int(torch.randint(VOCAB, (1,), generator=gen)) if jump else int(table[x[-1]]))
        ids = torch.tensor(x)
        one, two, three = table[ids], table[table[ids]], table[table[table[ids]]]
        unit = math.sqrt(HIDDEN)
        noise = torch.randn(length, 3 * HIDDEN, generator=gen) * 0.1
        aux = torch.cat((head[one] * unit, head[two] * unit, head[three] * unit), 1) + noise
        mask = torch.zeros(length, dtype=torch.bool)
        mask[5 + i % 4 :] = True
        out.append(Sample(ids, mask, aux.bfloat16(), (12.0 * head[one]).bfloat16()))
    return out


def write_states(folder: Path, samples: list[Sample], target: Path, **over: Any) -> Path:
    """A states folder as `k2tui extract` writes it."""
    facts = model_facts(target)
    manifest = Manifest(
        hidden_size=HIDDEN, num_hidden_layers=LAYERS, boundaries=(1, 3, 5), vocab_size=VOCAB, model_path=str(target), model_hash=facts.model_hash,
        tokenizer_hash=facts.tokenizer_hash, template_hash=facts.template_hash, engine="sglang", engine_version="0.5.23",
    )  # fmt: skip
    writer = StatesWriter(folder, replace(manifest, **over), writer="test", limits=WriterLimits(min_free_b=0))
    for i, s in enumerate(samples):
        write_sample(
            writer,
            i,
            s.input_ids.numpy(),
            s.loss_mask.numpy(),
            s.aux.contiguous().view(torch.uint16).numpy(),
            s.last.contiguous().view(torch.uint16).numpy(),
        )
    writer.close()
    return folder


def write_ckpt(folder: Path, samples: list[Sample]) -> Path:
    """The same as SpecForge's offline files."""
    (folder / "rows_0-2000").mkdir(parents=True)
    for i, s in enumerate(samples):
        item = {
            "input_ids": s.input_ids,
            "loss_mask": s.loss_mask.long(),
            "aux_hidden_state": s.aux[None],
            "hidden_state": s.last[None],
        }
        torch.save(item, folder / "rows_0-2000" / f"data_{i:04d}.ckpt")
    return folder
