"""States folders from and to the layouts of other trainers: SpecForge's `.ckpt`, speculators' safetensors. Torch, late.

SpecForge:    FOLDER/rows_0-2000/data_17.ckpt      torch.save of input_ids [T], loss_mask [T], aux_hidden_state [1, T, 3H],
                                                   hidden_state [1, T, H], the last one *after* the target's final norm
speculators:  FOLDER/hs_17.safetensors             input_ids [T], loss_mask [T], hidden_states [T, B+1, H]: the aux layers and,
                                                   last, the output of the last layer *before* the final norm
Post-norm states cannot be made pre-norm again (the norm forgets each row's length), so a folder of ours is exported to
speculators with the norm told in the file's metadata, and refused unless the caller says that its trainer is told too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from k2tui.errors import K2Error
from k2tui.states.layout import Manifest
from k2tui.states.reader import StatesReader
from k2tui.states.writer import StatesWriter, WriterLimits, write_sample

GROUP = 2000  # files a SpecForge sub-folder
Progress = Callable[[int, int], None]


def to_specforge(folder: Path, out: Path, on_progress: Progress | None = None) -> int:
    """Write SpecForge's layout. Returns the number of files. K2Error unless every row of `last` is there."""
    import torch

    reader = StatesReader(folder)
    _need_three(reader, "SpecForge")
    if reader.manifest.last_rows != "all":
        raise K2Error(
            f"{folder}: only some rows of the last hidden state are kept",
            "extract with --last all for SpecForge",
        )
    for position, entry in enumerate(reader.entries):
        sample = reader[position]
        start = entry.index // GROUP * GROUP
        sub = out / f"rows_{start}-{start + GROUP}"
        sub.mkdir(parents=True, exist_ok=True)
        _save_whole(
            sub / f"data_{entry.index}.ckpt",
            lambda path, s=sample: torch.save(
                {
                    "input_ids": s.input_ids.clone(),
                    "loss_mask": s.loss_mask.clone(),
                    "aux_hidden_state": s.aux[None].clone(),
                    "hidden_state": s.last[None].clone(),
                },
                path,
            ),
        )
        if on_progress:
            on_progress(position + 1, len(reader))
    return len(reader)


def from_specforge(
    source: Path, out: Path, boundaries: tuple[int, ...], num_layers: int, on_progress: Progress | None = None
) -> int:
    """Read SpecForge's `.ckpt` files (plain tensors only) into a new states folder. boundaries: what their aux states are."""
    import torch

    files = {
        int(m[1]): p for p in source.rglob("data_*.ckpt") if (m := re.fullmatch(r"data_(\d+)\.ckpt", p.name))
    }
    if not files:
        raise K2Error(f"{source}: no data_N.ckpt files", "give the folder that holds rows_*/")
    writer: StatesWriter | None = None
    for number, (index, path) in enumerate(sorted(files.items()), 1):
        try:
            raw = torch.load(path, map_location="cpu", weights_only=True)
            ids, mask = raw["input_ids"].reshape(-1), raw["loss_mask"].reshape(-1)
            aux, last = raw["aux_hidden_state"], raw["hidden_state"]
        except Exception as err:
            raise K2Error(
                f"{path}: {type(err).__name__}: {str(err)[:120]}", "not a SpecForge feature file, or damaged"
            )
        aux, last = aux.reshape(len(ids), -1), last.reshape(len(ids), -1)
        if writer is None:
            hidden = last.shape[-1]
            if aux.shape[-1] != hidden * len(boundaries):
                raise K2Error(
                    f"{path}: aux states of width {aux.shape[-1]} for {len(boundaries)} boundaries of {hidden}"
                )
            writer = _writer(out, hidden, num_layers, boundaries, "post", f"specforge:{source}")
        write_sample(writer, index, ids.numpy().astype(np.int32), mask.numpy(), _bits(aux), _bits(last))
        if on_progress:
            on_progress(number, len(files))
    assert writer is not None
    writer.close()
    return len(files)


def to_speculators(
    folder: Path, out: Path, *, allow_post_norm: bool = False, on_progress: Progress | None = None
) -> int:
    """Write speculators' layout. allow_post_norm: the caller's trainer is told that the last state is after the norm."""
    import torch
    from safetensors.torch import save_file

    reader = StatesReader(folder)
    if reader.manifest.last_rows != "all":
        raise K2Error(
            f"{folder}: only some rows of the last hidden state are kept",
            "extract with --last all for speculators",
        )
    if reader.manifest.last_norm == "post" and not allow_post_norm:
        raise K2Error(
            f"{folder}: the last hidden states are after the target's final norm, speculators expects them before it",
            "--allow-post-norm writes them as they are, marked; set your trainer so that it does not norm again",
        )
    out.mkdir(parents=True, exist_ok=True)
    hidden = reader.manifest.hidden_size
    meta = {
        "last_norm": reader.manifest.last_norm,
        "boundaries": json.dumps(list(reader.manifest.boundaries)),
    }
    for position, entry in enumerate(reader.entries):
        sample = reader[position]
        wide = torch.cat((sample.aux.view(entry.length, -1, hidden), sample.last[:, None]), 1).contiguous()
        _save_whole(
            out / f"hs_{entry.index}.safetensors",
            lambda path, s=sample, w=wide: save_file(
                {"input_ids": s.input_ids.clone(), "loss_mask": s.loss_mask.clone(), "hidden_states": w},
                path,
                metadata=meta,
            ),
        )
        if on_progress:
            on_progress(position + 1, len(reader))
    return len(reader)


def from_speculators(
    source: Path,
    out: Path,
    boundaries: tuple[int, ...],
    num_layers: int,
    norm: Callable[[Any], Any] | None,
    on_progress: Progress | None = None,
) -> int:
    """Read hs_N.safetensors. norm: the target's final norm, put over pre-norm last states ([T, H] -> [T, H]); files that say
    last_norm "post" in their metadata are taken as they are. K2Error when a norm is needed and none is given."""
    import torch
    from safetensors import safe_open

    files = {
        int(m[1]): p
        for p in source.rglob("hs_*.safetensors")
        if (m := re.fullmatch(r"hs_(\d+)\.safetensors", p.name))
    }
    if not files:
        raise K2Error(f"{source}: no hs_N.safetensors files")
    writer: StatesWriter | None = None
    for number, (index, path) in enumerate(sorted(files.items()), 1):
        try:
            with safe_open(path, "pt") as fh:  # type: ignore[no-untyped-call]
                meta = fh.metadata() or {}
                ids, wide = fh.get_tensor("input_ids").reshape(-1), fh.get_tensor("hidden_states")
                names = set(fh.keys())
                mask = (
                    fh.get_tensor("loss_mask").reshape(-1) if "loss_mask" in names else torch.ones_like(ids)
                )
        except Exception as err:
            raise K2Error(
                f"{path}: {type(err).__name__}: {str(err)[:120]}",
                "not a speculators feature file, or damaged",
            )
        if wide.ndim != 3 or wide.shape[1] != len(boundaries) + 1:
            raise K2Error(
                f"{path}: hidden_states is {list(wide.shape)}, [T, {len(boundaries) + 1}, H] was expected"
            )
        last = wide[:, -1]
        if meta.get("last_norm") != "post":
            if norm is None:
                raise K2Error(
                    f"{path}: its last hidden state is before the target's final norm",
                    "give the target with --model",
                )
            last = norm(last)
        if writer is None:
            writer = _writer(out, wide.shape[-1], num_layers, boundaries, "post", f"speculators:{source}")
        aux = wide[:, :-1].reshape(len(ids), -1)
        write_sample(writer, index, ids.numpy().astype(np.int32), mask.numpy(), _bits(aux), _bits(last))
        if on_progress:
            on_progress(number, len(files))
    assert writer is not None
    writer.close()
    return len(files)


def final_norm(model: Path) -> Callable[[Any], Any]:
    """The target's final RMSNorm [T, H] -> [T, H], from its checkpoint. K2Error when it has none."""
    import torch

    from k2tui.capture.model import NORM_NAMES, load_tensor, text_config

    weight = load_tensor(model, NORM_NAMES)
    if weight is None:
        raise K2Error(f"{model}: no {NORM_NAMES[0]}", "give the folder of the target model")
    config = text_config(json.loads((model / "config.json").read_text(encoding="utf-8")))
    eps = float(config.get("rms_norm_eps", 1e-6))

    def norm(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(
            torch.bfloat16
        )

    return norm


def merge(sources: list[Path], out: Path, on_progress: Progress | None = None) -> int:
    """One folder from the parts that several servers wrote, by index; shards are linked when they can be, else copied.

    Raises K2Error when the parts are of different kinds. A sample that several parts hold is read from the first.
    """
    import os
    import shutil

    from k2tui.states import layout
    from k2tui.states.writer import prepare_folder

    reader = StatesReader(*sources)
    out.mkdir(parents=True, exist_ok=True)
    prepare_folder(out, reader.manifest)
    for number, header in enumerate(reader.shards, 1):
        target = out / header.path.name
        if target.exists():
            target = (
                out
                / f"{layout.SHARD_PREFIX}m{number:05d}-{header.path.name.removeprefix(layout.SHARD_PREFIX)}"
            )
        try:
            os.link(header.path, target)
        except OSError:
            partial = target.with_name(f".{target.name}{layout.PARTIAL_SUFFIX}")
            shutil.copyfile(header.path, partial)
            os.replace(partial, target)
        if on_progress:
            on_progress(number, len(reader.shards))
    return len(reader)


def _need_three(reader: StatesReader, who: str) -> None:
    if len(reader.manifest.boundaries) != 3:
        raise K2Error(f"{who} needs three aux layers, this set has {len(reader.manifest.boundaries)}")


def _writer(
    out: Path, hidden: int, layers: int, boundaries: tuple[int, ...], norm: str, origin: str
) -> StatesWriter:
    manifest = Manifest(
        hidden_size=int(hidden),
        num_hidden_layers=layers,
        boundaries=boundaries,
        last_norm=norm,
        engine=origin,
        last_rows="all",
    )
    return StatesWriter(out, manifest, "convert", WriterLimits(min_free_b=0))


def _bits(tensor: Any) -> np.ndarray:
    import torch

    return tensor.to(torch.bfloat16).contiguous().view(torch.uint16).numpy()


def _save_whole(path: Path, save: Callable[[Path], None]) -> None:
    import os

    partial = path.with_name(f".{path.name}.partial")
    save(partial)
    os.replace(partial, path)
