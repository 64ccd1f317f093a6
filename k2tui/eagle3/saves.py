"""Training states on disk: fp32 masters, both Adam moments, and where the run stands. Plain safetensors and JSON.

Whole tensors are written, by rank 0, so a save opens at any number of ranks and with or without sharding. A save is a folder
that appears by one rename; `last.json` and `best.json` name one and are replaced whole. A crash at any point leaves the save
before it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k2tui.eagle3.ranks import Ranks
from k2tui.eagle3.step import Stepper
from k2tui.errors import K2Error
from k2tui.files import write_json

FORMAT = 1


def _full(value: Tensor) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value  # type: ignore[operator]


def _names(stepper: Stepper) -> list[tuple[str, Tensor]]:
    return [(n.removeprefix("draft."), p) for n, p in stepper.module.named_parameters() if p.requires_grad]


def gather(stepper: Stepper) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(weights, moments) as whole fp32 CPU tensors. Every rank must call it."""
    weights: dict[str, Tensor] = {}
    moments: dict[str, Tensor] = {}
    for name, p in _names(stepper):
        weights[name] = _full(p.detach()).float().cpu().clone()
        state = stepper.adam.state.get(p, {})
        for key in ("exp_avg", "exp_avg_sq"):
            if key in state:
                moments[f"{key}.{name}"] = _full(state[key]).float().cpu().clone()
        if "step" in state:
            moments[f"step.{name}"] = _full(torch.as_tensor(state["step"])).float().cpu().reshape(1).clone()
    return weights, moments


def write_save(
    folder: Path, stepper: Stepper, facts: Mapping[str, Any], ranks: Ranks, *, keep: int = 2
) -> Path | None:
    """Write folder/step-N and point last.json at it; older saves beyond `keep` go, except the best. Returns the save.

    A full disk leaves the save before it and returns None: training goes on. Every rank must call it.
    """
    weights, moments = gather(stepper)
    done: Path | None = None
    if ranks.is_first:
        done = _write(folder, weights, moments, facts, keep)
    ranks.wait()
    return done


def _write(
    folder: Path, weights: dict[str, Tensor], moments: dict[str, Tensor], facts: Mapping[str, Any], keep: int
) -> Path | None:
    from safetensors.torch import save_file

    name = f"step-{int(facts['step']):08d}"
    part, final = folder / f".{name}.part", folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        save_file(weights, str(part / "weights.safetensors"))
        if moments:
            save_file(moments, str(part / "moments.safetensors"))
        write_json(part / "state.json", {"format": FORMAT, **facts})
        for path in part.iterdir():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(part, final)
        write_json(folder / "last.json", {"save": name, "step": facts["step"]})
    except Exception as err:  # safetensors wraps an OSError in its own kind
        shutil.rmtree(part, ignore_errors=True)
        if isinstance(err, OSError) or type(err).__name__ == "SafetensorError":
            return None
        raise
    kept = {name, *(_pointed(folder, p) for p in ("best.json", "last.json"))}
    for old in sorted(folder.glob("step-*"), reverse=True)[keep:]:
        if old.name not in kept:
            shutil.rmtree(old, ignore_errors=True)
    return final


def _pointed(folder: Path, pointer: str) -> str:
    try:
        return str(json.loads((folder / pointer).read_text(encoding="utf-8"))["save"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def last_save(folder: Path) -> Path | None:
    """The newest whole save: the one that last.json names, else the newest folder that opens."""
    named = _pointed(folder, "last.json")
    for candidate in [folder / named] if named else []:
        if (candidate / "state.json").exists():
            return candidate
    for candidate in sorted(folder.glob("step-*"), reverse=True):
        if (candidate / "state.json").exists():
            return candidate
    return None


def read_facts(save: Path) -> dict[str, Any]:
    """state.json of a save. Raises K2Error."""
    path = save / "state.json"
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise K2Error(f"{path}: cannot be read: {err}", "delete that save; the one before it is used then")
    if int(facts.get("format", 0)) > FORMAT:
        raise K2Error(f"{path}: written by a newer k2tui (format {facts['format']})", "update k2tui")
    return facts


def restore(save: Path, stepper: Stepper) -> None:
    """Load weights and moments into the stepper, whatever the number of ranks. Raises K2Error."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        weights = load_file(str(save / "weights.safetensors"))
        moments = (
            load_file(str(save / "moments.safetensors")) if (save / "moments.safetensors").exists() else {}
        )
    except (OSError, SafetensorError) as err:
        raise K2Error(f"{save}: cannot be read: {err}", "delete that save; the one before it is used then")
    for name, p in _names(stepper):
        if name not in weights or tuple(weights[name].shape) != tuple(p.shape):
            raise K2Error(
                f"{save}: {name} is missing or has another shape",
                "this save belongs to another draft: choose another --out",
            )
        p.data.copy_(_like(weights[name], p))
        if f"exp_avg.{name}" in moments:
            stepper.adam.state[p] = {
                "step": moments[f"step.{name}"].reshape(()).to(p.device if p.is_cuda else "cpu"),
                "exp_avg": _like(moments[f"exp_avg.{name}"], p),
                "exp_avg_sq": _like(moments[f"exp_avg_sq.{name}"], p),
            }


def _like(value: Tensor, p: Tensor) -> Tensor:
    value = value.to(p.device)
    if hasattr(p, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(value, p.device_mesh, p.placements)  # type: ignore[attr-defined]
    return value
