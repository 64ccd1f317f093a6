"""Reads a Hugging Face checkpoint folder: config, index, safetensors shards with SGLang's progress bar. Knows no model."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k2tui.errors import K2Error

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
# As in SGLang >= 0.5.10: no new line at the end of a refresh.
BAR_FORMAT = "{desc}: {percentage:3.0f}% Completed | {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}]"


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose files were found. names: tensor -> shard, None for a checkpoint without an index."""

    folder: Path
    config: dict[str, Any]
    shards: tuple[Path, ...]
    names: dict[str, str] | None

    @property
    def architecture(self) -> str:
        found = self.config.get("architectures")
        return str(found[0]) if isinstance(found, list) and found else ""

    @property
    def size_bytes(self) -> int:
        return sum(shard.stat().st_size for shard in self.shards)


def read_json(path: Path) -> dict[str, Any]:
    """Raises K2Error naming file and line."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise K2Error(f"{path}: {err.strerror or err}", "check the path and its permissions")
    except UnicodeDecodeError:
        raise K2Error(f"{path}: not UTF-8 text", "copy or download the file again")
    except json.JSONDecodeError as err:
        raise K2Error(
            f"{path} line {err.lineno}: not valid JSON: {err.msg}", "copy or download the file again"
        )
    if not isinstance(value, dict):
        raise K2Error(f"{path}: must hold a JSON object", "copy or download the file again")
    return value


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Look at a model folder without reading weights. Raises K2Error for a folder that cannot be served."""
    folder = Path(path).expanduser()
    if not folder.exists():
        raise K2Error(
            f"model folder {folder} does not exist",
            "check --model-path; the embedded engine downloads nothing",
        )
    if not folder.is_dir():
        raise K2Error(f"{folder} is not a folder", "--model-path must be the folder that holds config.json")
    if not (folder / "config.json").is_file():
        raise K2Error(f"{folder} has no config.json", "--model-path must be a Hugging Face checkpoint folder")
    config = read_json(folder / "config.json")
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise K2Error(
                f"{folder / INDEX}: key 'weight_map' is missing or empty", "copy or download the file again"
            )
        wanted = sorted({str(shard) for shard in weight_map.values()})
        missing = [shard for shard in wanted if not (folder / shard).is_file()]
        if missing:
            # SGLang's own words, so that one rule recognises both engines
            raise K2Error(
                f"{INDEX} references {len(missing)} shard file(s) missing from {folder} (incomplete download?): {missing}",
                "download or copy the missing files",
            )
        return Checkpoint(
            folder,
            config,
            tuple(folder / shard for shard in wanted),
            {str(k): str(v) for k, v in weight_map.items()},
        )
    shards = tuple(sorted(folder.glob("*.safetensors")))
    if not shards:
        raise K2Error(
            f"Cannot find any model weights with `{folder}`",
            "the embedded engine reads *.safetensors files only",
        )
    return Checkpoint(folder, config, shards, None)


def _cut_short(path: Path) -> str:
    """Why a shard cannot be read, in words: its header says how many bytes there should be."""
    size = path.stat().st_size
    try:
        with path.open("rb") as fh:
            length = int.from_bytes(fh.read(8), "little")
            if size < 8 or length > size:
                return f"{size} bytes on disk, too short for its own header"
            header = json.loads(fh.read(length))
        end = max((v["data_offsets"][1] for k, v in header.items() if k != "__metadata__"), default=0)
        wanted = 8 + length + end
        if size != wanted:
            return (
                f"{size} bytes on disk, {wanted} expected: the file was cut short"
                if size < wanted
                else f"{size} bytes on disk, {wanted} expected"
            )
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        pass
    return "not a safetensors file"


def read_tensors(
    checkpoint: Checkpoint, *, dtype: torch.dtype, device: str, delay_s: float = 0.0
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) shard by shard, one step of the bar a shard really read.

    Floating-point tensors come in `dtype`, others as stored. Raises K2Error naming the shard.
    """
    import torch
    from safetensors import SafetensorError, safe_open
    from tqdm import tqdm

    sys.stderr.write("\n")  # SGLang's bar starts on a fresh line
    bar = tqdm(
        total=len(checkpoint.shards),
        desc="Loading safetensors checkpoint shards",
        bar_format=BAR_FORMAT,
        mininterval=0.05,
        file=sys.stderr,
        disable=False,
    )
    try:
        for path in checkpoint.shards:
            try:
                with safe_open(path, framework="pt", device=device) as shard:
                    for name in shard.keys():  # noqa: SIM118 (not a mapping)
                        tensor = shard.get_tensor(name)
                        yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor
            except (SafetensorError, OSError) as err:
                raise K2Error(
                    f"cannot read {path}: {_cut_short(path)} ({str(err)[:120]})",
                    "copy or download this shard again",
                )
            except torch.cuda.OutOfMemoryError as err:
                raise K2Error(
                    f"CUDA out of memory while reading {path.name}: {str(err)[:160]}",
                    "use a smaller model, or --device cpu",
                )
            if delay_s:
                time.sleep(delay_s)
            bar.update()
    finally:
        bar.close()
