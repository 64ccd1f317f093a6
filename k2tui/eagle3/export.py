"""Draft checkpoints written as SGLang and vLLM load them, and read back the way SGLang reads.

SGLang skips tensors whose names it does not know, without an error: so every name is checked here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from k2tui.eagle3.checkpoint import load_draft
from k2tui.eagle3.draft import DraftConfig, Eagle3Draft
from k2tui.errors import K2Error
from k2tui.files import write_json, write_whole

__all__ = ["check_export", "export_draft", "load_draft", "server_parameters"]


def export_draft(
    draft: Eagle3Draft,
    folder: Path,
    card: str = "",
    extra: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write config.json, model.safetensors and README.md into a new folder, whole or not at all; then read it back.

    extra: keys added to config.json under "k2tui". An existing folder of that name is replaced. The layers are written twice: under
    eagle_config as SGLang's ids, and at the top as physical boundaries, which is what vLLM reads there (both name the same layers).
    d2t and t2d are written only when the draft knows fewer tokens than the target: without them every server counts the draft's ids as
    the target's, and vLLM refuses a map that maps nothing (it has no place for it).
    """
    from safetensors.torch import save_file

    tensors = {n: p.detach().to("cpu", dtype).contiguous() for n, p in draft.named_parameters()}
    if draft.config.draft_vocab_size != draft.config.vocab_size:
        tensors |= {"d2t": draft.d2t.cpu(), "t2d": draft.t2d.cpu()}
    tensors = {n: t.clone() for n, t in tensors.items()}
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        save_file(tensors, str(part / "model.safetensors"), metadata={"format": "pt"})
        config = draft.config.to_dict() | ({"k2tui": dict(extra)} if extra else {})
        boundaries = ((extra or {}).get("states") or {}).get("boundaries")
        if boundaries:
            config["eagle_aux_hidden_state_layer_ids"] = list(boundaries)
        write_json(part / "config.json", config, mode=0o644)
        if card:
            write_whole(part / "README.md", card, mode=0o644)
        problems = check_export(part)
        if problems:
            raise K2Error(
                f"{folder}: the export would not load: {'; '.join(problems)}",
                "nothing was written; report this with the draft's config",
            )
        _sync(part)
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            os.replace(folder, old)
        os.replace(part, folder)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as err:
        raise K2Error(
            f"{folder}: cannot be written: {err.strerror or err}",
            "free space or choose another --out; the last export is untouched",
        )
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def server_parameters(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of what SGLang's class for this config registers (its own fused names)."""
    c, h = config, config.hidden_size
    names: dict[str, tuple[int, ...]] = {
        "model.fc.weight": (h, c.aux_size),
        "model.norm.weight": (h,),
        "lm_head.weight": (c.draft_vocab_size, h),
    }
    layer = "model.midlayer" if c.is_mla else "model.layers.0"
    for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        names[f"{layer}.{norm}.weight"] = (h,)
    names[f"{layer}.mlp.gate_up_proj.weight"] = (2 * c.intermediate_size, h)
    names[f"{layer}.mlp.down_proj.weight"] = (h, c.intermediate_size)
    attn = f"{layer}.self_attn"
    if c.is_mla:
        names[f"{attn}.fused_qkv_a_proj_with_mqa.weight"] = (
            c.q_lora_rank + c.kv_lora_rank + c.qk_rope_head_dim,
            2 * h,
        )
        names[f"{attn}.q_a_layernorm.weight"] = (c.q_lora_rank,)
        names[f"{attn}.kv_a_layernorm.weight"] = (c.kv_lora_rank,)
        names[f"{attn}.q_b_proj.weight"] = (c.num_attention_heads * c.qk_dim, c.q_lora_rank)
        names[f"{attn}.kv_b_proj.weight"] = (
            c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim),
            c.kv_lora_rank,
        )
        names[f"{attn}.o_proj.weight"] = (h, c.num_attention_heads * c.v_head_dim)
    else:
        rows = (c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim
        names[f"{attn}.qkv_proj.weight"] = (rows, 2 * h)
        names[f"{attn}.o_proj.weight"] = (h, c.num_attention_heads * c.head_dim)
    if c.fc_norm:
        names |= {f"model.fc_norm.{i}.weight": (c.aux_size // c.num_aux,) for i in range(c.num_aux)}
    if c.norm_before_fc:
        names["model.input_norm.weight"] = (c.aux_size,)
    return names


_STACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}  # fmt: skip


def check_export(folder: Path) -> list[str]:
    """Read a draft folder the way SGLang does; returns what is wrong (names it would skip, weights it would leave random)."""
    from safetensors import safe_open

    config = DraftConfig.from_dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    want = server_parameters(config)
    got: dict[str, int] = {}
    problems: list[str] = []
    shapes: dict[str, tuple[int, ...]] = {}
    with safe_open(str(folder / "model.safetensors"), "pt") as file:
        for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
            shapes[name] = tuple(file.get_slice(name).get_shape())
        d2t = file.get_tensor("d2t") if "d2t" in shapes else None
        t2d = file.get_tensor("t2d") if "t2d" in shapes else None
    for name, shape in shapes.items():
        if name in ("d2t", "t2d"):
            continue
        place = (
            name
            if name.startswith("lm_head.")
            else "model."
            + re.sub(r"^(midlayer|layers\.0)\.", "midlayer." if config.is_mla else "layers.0.", name)
        )
        for fused, parts in _STACKED.items():
            for part in parts:
                if f".{part}." in place:
                    place = place.replace(f".{part}.", f".{fused}.")
                    break
        if place not in want:
            problems.append(f"{name} is a name the server does not know")
            continue
        got[place] = got.get(place, 0) + shape[0]
        if shape[1:] != want[place][1:]:
            problems.append(f"{name} has shape {shape}")
    for place, shape in want.items():
        if got.get(place) != shape[0]:
            problems.append(f"{place} gets {got.get(place, 0)} of {shape[0]} rows")
    if config.draft_vocab_size == config.vocab_size:
        if d2t is not None or t2d is not None:
            problems.append("d2t or t2d is there although the draft knows every token: vLLM refuses it")
    elif d2t is None or t2d is None:
        problems.append("d2t or t2d is missing")
    else:
        ids = d2t + torch.arange(len(d2t))
        if len(d2t) != config.draft_vocab_size or len(t2d) != config.vocab_size:
            problems.append("d2t or t2d has another length than the config says")
        elif not torch.equal(t2d.nonzero().flatten(), ids):
            problems.append("d2t and t2d name different tokens")
    return problems
