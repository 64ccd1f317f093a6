"""Draft checkpoints read: SGLang's, SpecForge's and speculators' naming, checked name by name. Knows files, no training."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from k2tui.eagle3.draft import DraftConfig, Eagle3Draft
from k2tui.errors import K2Error

_SKIPPED = {"embed_tokens.weight"}  # the target's; frozen and shared
_LEGACY = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}


def our_name(name: str) -> str:
    """A checkpoint's tensor name in ours (`midlayer.`, no `model.` prefix)."""
    name = re.sub(r"^(draft_model|model)\.", "", name)
    name = re.sub(r"^(draft_model|model)\.", "", name)
    name = re.sub(r"^layers\.0\.", "midlayer.", name)
    for old, new in _LEGACY.items():
        name = name.replace(old, new)
    return name


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint folder under our names. Raises K2Error."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = sorted(Path(folder).glob("*.safetensors"))
    out: dict[str, Tensor] = {}
    try:
        for path in files:
            for name, value in load_file(str(path)).items():
                out[our_name(name)] = value
    except (SafetensorError, OSError) as err:
        raise K2Error(f"{folder}: cannot be read: {err}", "was it cut while it was written?")
    legacy = Path(folder) / "pytorch_model.bin"
    if not files and legacy.exists():
        try:
            found = torch.load(legacy, map_location="cpu", weights_only=True)
        except Exception as err:  # torch raises many kinds for a damaged or unsafe file
            raise K2Error(f"{legacy}: cannot be read: {err}", "convert it to safetensors")
        out = {our_name(k): v for k, v in found.items()}
    if not out:
        raise K2Error(f"{folder}: no weights (*.safetensors)", "give a draft checkpoint's folder")
    return out


def fill_draft(draft: Eagle3Draft, tensors: Mapping[str, Tensor], where: str) -> list[str]:
    """Copy tensors into the draft. Missing or unknown names and other shapes raise K2Error; returns notes for people."""
    own = dict(draft.named_parameters())
    notes: list[str] = []
    unknown = [n for n in tensors if n not in own and n not in _SKIPPED and n not in ("d2t", "t2d")]
    if unknown:
        raise K2Error(
            f"{where}: tensors that this draft has no place for: {', '.join(sorted(unknown)[:6])}",
            "is it an EAGLE-3 draft of this kind?",
        )
    missing = [n for n in own if n not in tensors]
    if missing == ["lm_head.weight"]:
        raise K2Error(
            f"{where}: no lm_head.weight: the draft shares the target's head",
            "such drafts cannot be trained yet; start from scratch",
        )
    if missing:
        raise K2Error(f"{where}: no {', '.join(missing[:6])}", "is it an EAGLE-3 draft of this kind?")
    for name, parameter in own.items():
        value = tensors[name]
        if value.shape != parameter.shape:
            raise K2Error(
                f"{where}: {name} is {tuple(value.shape)}, config.json says {tuple(parameter.shape)}",
                "config and weights do not belong together",
            )
        parameter.data.copy_(value)
    c = draft.config
    if "d2t" in tensors:
        ids = tensors["d2t"].to(torch.int64) + torch.arange(c.draft_vocab_size)
        if "t2d" in tensors and not torch.equal(tensors["t2d"].bool().nonzero().flatten(), ids):
            raise K2Error(
                f"{where}: d2t and t2d name different tokens", "the checkpoint's vocabulary map is damaged"
            )
        draft.set_vocab(ids)
    elif c.draft_vocab_size == c.vocab_size:
        draft.set_vocab(torch.arange(c.vocab_size))
    else:
        raise K2Error(
            f"{where}: no d2t, and the draft vocabulary is smaller than the target's",
            "without it every draft id is misread",
        )
    return notes


def load_draft(
    folder: Path, embedding: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> Eagle3Draft:
    """A draft from a checkpoint folder. embedding: the target's, when known. Raises K2Error."""
    config = DraftConfig.load(folder)
    draft = Eagle3Draft(config)
    fill_draft(draft, read_tensors(folder), str(folder))
    draft = draft.to(dtype)
    if embedding is not None:
        draft.set_embedding(embedding)
    return draft
