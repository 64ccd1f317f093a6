"""Training states on disk: fp32 masters, both Adam moments, and where the run stands. Plain safetensors and JSON.

A save opens at any number of ranks, with or without sharding. Without sharding rank 0 writes whole tensors; sharded ranks
(FSDP2) write their own parts through torch.distributed.checkpoint in its safetensors form, so that no rank ever holds the whole and no
pickle is made or read. A save is a folder that appears by one rename; `last.json` and `best.json` name one and are replaced whole. A
crash at any point leaves the save before it.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k2tui.eagle3.ranks import Ranks
from k2tui.eagle3.step import Stepper
from k2tui.errors import K2Error
from k2tui.files import write_json
from k2tui.parsing import ParseError, parse_json
from k2tui.regular import NotRegularError, open_regular, read_regular

FORMAT = 1
DELETE = "delete that save; the one before it is used then"
_SAVE = re.compile(r"step-\d{8,}")
_OWN = re.compile(r"\.step-\d{8,}\.part|(?:last|best)\.json|\.(?:last|best)\.json\.\w+\.tmp")  # beside the saves


def _full(value: Tensor) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value  # type: ignore[operator]


def _names(stepper: Stepper) -> list[tuple[str, Tensor]]:
    """The trained parameters. After a forward pass without a backward one FSDP2 still shows whole tensors, which the optimiser does
    not know: they are put back first."""
    reshard = getattr(stepper.module, "reshard", None)
    if reshard is not None:
        reshard()
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
    if ranks.sharded and ranks.size > 1 and _writer() is not None:
        return _write_parts(folder, stepper, facts, ranks, keep)
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
        _publish(folder, part, final, {"format": FORMAT, "moments": bool(moments), **facts})
    except Exception as err:  # safetensors wraps an OSError in its own kind
        shutil.rmtree(part, ignore_errors=True)
        if isinstance(err, OSError) or type(err).__name__ == "SafetensorError":
            return None
        raise
    _clear_old(folder, name, keep)
    return final


def _publish(folder: Path, part: Path, final: Path, facts: Mapping[str, Any]) -> None:
    """state.json, everything onto the disk, one rename, and last.json points at it."""
    write_json(part / "state.json", facts)
    for path in part.iterdir():
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    shutil.rmtree(final, ignore_errors=True)
    os.replace(part, final)
    write_json(folder / "last.json", {"save": final.name, "step": facts["step"]})


def _writer() -> Any:
    """torch's safetensors writer for parts, None in a torch that has none (before 2.9): then rank 0 writes whole tensors."""
    try:
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    except ImportError:
        return None
    return HuggingFaceStorageWriter


def _parts(stepper: Stepper, *, with_moments: bool) -> dict[str, Tensor]:
    """Names on disk -> this rank's tensors. Missing moments are made, so that a load has somewhere to go."""
    out: dict[str, Tensor] = {}
    for name, p in _names(stepper):
        out[f"weights.{name}"] = p.detach()
        state = stepper.adam.state.get(p, {})
        if with_moments:
            for key in ("exp_avg", "exp_avg_sq"):
                out[f"{key}.{name}"] = state[key] if key in state else torch.zeros_like(p.detach())
            step = torch.as_tensor(state.get("step", 0.0))
            out[f"step.{name}"] = step.detach().float().cpu().reshape(1).clone()
    return out


def _write_parts(
    folder: Path, stepper: Stepper, facts: Mapping[str, Any], ranks: Ranks, keep: int
) -> Path | None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    name = f"step-{int(facts['step']):08d}"
    part, final = folder / f".{name}.part", folder / name
    if ranks.is_first:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
        except OSError:
            pass  # the write below fails on every rank alike
    ranks.wait()
    has_moments = bool(stepper.adam.state)
    writer = _writer()(path=str(part), save_distributed=True)
    try:
        save(_parts(stepper, with_moments=has_moments), storage_writer=writer)
        done = True
    except CheckpointException:  # raised on every rank, with each rank's own trouble in it
        done = False
    if ranks.is_first:
        try:
            if done:
                _publish(
                    folder,
                    part,
                    final,
                    {"format": FORMAT, "parts": ranks.size, "moments": has_moments, **facts},
                )
                _clear_old(folder, name, keep)
        except OSError:
            done = False
        if not done:
            shutil.rmtree(part, ignore_errors=True)
    ranks.wait()
    return final if done else None


def _clear_old(folder: Path, name: str, keep: int) -> None:
    kept = {name, *(_pointed(folder, p) for p in ("best.json", "last.json"))}
    for old in _saves(folder)[keep:]:
        if old.name not in kept:
            shutil.rmtree(old, ignore_errors=True)


def _pointed(folder: Path, pointer: str) -> str:
    try:
        named = str(parse_json(read_regular(folder / pointer))["save"])
    except (OSError, ValueError, LookupError, TypeError):
        return ""
    return named if _SAVE.fullmatch(named) else ""


def _saves(folder: Path) -> list[Path]:
    """The folders (links are not ours) that are saves by their names, the newest first."""
    return sorted(
        (p for p in folder.glob("step-*") if _SAVE.fullmatch(p.name) and p.is_dir() and not p.is_symlink()), reverse=True
    )


def clear(folder: Path) -> int:
    """Remove every save and what else is written here by this module, nothing else; returns the number of saves. Raises K2Error."""
    found = _saves(folder)
    try:
        for path in [*(p for p in folder.glob("*") if _OWN.fullmatch(p.name)), *found]:
            if path.name.endswith((".json", ".tmp")):
                path.unlink()
            else:
                shutil.rmtree(path)
    except OSError as err:
        raise K2Error(f"{err.filename or folder}: {err.strerror or err}", "choose another --out, or remove the saves there by hand")
    return len(found)


def last_save(folder: Path) -> Path | None:
    """The newest whole save: the one that last.json names, else the newest folder that opens. Raises K2Error when last.json is no file."""
    try:
        open_regular(folder / "last.json").close()
    except (NotRegularError, IsADirectoryError) as err:
        raise K2Error(f"{err.filename}: {err.strerror}", "remove it: the newest save is used then")
    except OSError:
        pass
    named = _pointed(folder, "last.json")
    for candidate in [folder / named] if named else []:
        if (candidate / "state.json").exists():
            return candidate
    for candidate in _saves(folder):
        if (candidate / "state.json").exists():
            return candidate
    return None


def read_facts(save: Path) -> dict[str, Any]:
    """state.json of a save. Raises K2Error."""
    path = save / "state.json"
    try:
        facts: Any = parse_json(read_regular(path))
    except OSError as err:
        raise K2Error(f"{path}: {err.strerror or err}", DELETE)
    except ParseError as err:
        raise K2Error(err.at(str(path)), DELETE)
    if not isinstance(facts, dict):
        raise K2Error(f"{path}: no object: this is not what a run stands at", DELETE)
    if isinstance(facts.get("format"), int) and facts["format"] > FORMAT:
        raise K2Error(f"{path}: written by a newer k2tui (format {facts['format']})", "update k2tui")
    for key, kind in _FACTS.items():
        if key not in facts or not isinstance(facts[key], kind) or isinstance(facts[key], bool):
            raise K2Error(f"{path}: {key} is {'wrong' if key in facts else 'missing'}: this is not what a run stands at", DELETE)
    return facts


_FACTS = {"format": int, "step": int, "place": dict, "options": dict, "states": dict, "samples": str}


def restore(save: Path, stepper: Stepper) -> None:
    """Load weights and moments into the stepper, whatever the number of ranks now and then. Every rank must call it. Raises K2Error."""
    facts = read_facts(save)
    if facts.get("parts"):
        _read_parts(save, stepper, with_moments=bool(facts.get("moments")))
        return
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    def read(name: str) -> dict[str, Tensor]:
        path = save / name
        try:
            open_regular(path).close()
            return load_file(str(path))
        except OSError as err:
            raise K2Error(f"{path}: {err.strerror or err}", DELETE)
        except SafetensorError as err:
            raise K2Error(f"{path}: cannot be read: {err}", DELETE)

    weights = read("weights.safetensors")
    # absent only where no step was taken: all of them were not finite
    moments = read("moments.safetensors") if facts.get("moments", True) else {}
    for name, p in _names(stepper):
        if name not in weights or tuple(weights[name].shape) != tuple(p.shape):
            raise K2Error(
                f"{save}: {name} is missing or has another shape",
                "this save belongs to another draft: choose another --out",
            )
        p.data.copy_(_like(weights[name], p))
        if moments:
            shapes = [tuple(moments[k].shape) for k in (f"exp_avg.{name}", f"exp_avg_sq.{name}", f"step.{name}") if k in moments]
            if shapes != [tuple(p.shape)] * 2 + [(1,)]:
                raise K2Error(f"{save / 'moments.safetensors'}: those of {name} are missing or have another shape", DELETE)
            stepper.adam.state[p] = {
                "step": moments[f"step.{name}"].reshape(()).to(p.device if p.is_cuda else "cpu"),
                "exp_avg": _like(moments[f"exp_avg.{name}"], p),
                "exp_avg_sq": _like(moments[f"exp_avg_sq.{name}"], p),
            }


def _read_parts(save: Path, stepper: Stepper, *, with_moments: bool) -> None:
    """Each rank reads what it holds, wherever that lies in the parts."""
    import torch.distributed as dist

    if _writer() is None:
        raise K2Error(
            f"{save}: written in parts, which torch {torch.__version__} cannot read", "use torch 2.9 or newer"
        )
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    wanted = _parts(stepper, with_moments=with_moments)
    reader = HuggingFaceStorageReader(str(save))
    try:
        there = reader.read_metadata().state_dict_metadata
        for name, tensor in wanted.items():
            if name not in there or tuple(there[name].size) != tuple(tensor.shape):  # type: ignore[union-attr]
                raise K2Error(
                    f"{save}: {name} is missing or has another shape",
                    "this save belongs to another draft: choose another --out",
                )
        with warnings.catch_warnings():  # that nothing is distributed is no surprise here
            warnings.simplefilter("ignore", UserWarning)
            load(wanted, storage_reader=reader, no_dist=not dist.is_initialized())
    except (OSError, RuntimeError, CheckpointException) as err:
        raise K2Error(f"{save}: cannot be read: {err}", DELETE)
    for name, p in _names(stepper):
        if not with_moments:
            continue
        stepper.adam.state[p] = {
            "step": wanted[f"step.{name}"].reshape(()).to(p.device if p.is_cuda else "cpu"),
            "exp_avg": wanted[f"exp_avg.{name}"],
            "exp_avg_sq": wanted[f"exp_avg_sq.{name}"],
        }


def _like(value: Tensor, p: Tensor) -> Tensor:
    value = value.to(p.device)
    if hasattr(p, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(value, p.device_mesh, p.placements)  # type: ignore[attr-defined]
    return value
