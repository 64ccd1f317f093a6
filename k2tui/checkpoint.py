"""A checkpoint on disk, looked at without loading it: shards of the index, headers, sizes. Standard library only."""

from __future__ import annotations

import gc
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k2tui.core.modelmath import shape_of
from k2tui.errors import K2Error
from k2tui.regular import open_regular, read_regular

_MAX_HEADER = 100 << 20  # safetensors' own limit
_PACKED = (".weight_packed", ".qweight")  # several quantised weights in a 32-bit word
_BESIDE = (".weight_scale", ".weight_shape", ".weight_zero_point", ".scales", ".qzeros", ".g_idx", ".weight_scale_inv")  # no weights themselves


@dataclass(frozen=True)
class Checkpoint:
    """What lies in a model folder.

    shards: names in load order. missing: in the index, not on disk. broken: (name, what is wrong in words).
    total_b: bytes of the shards that are there. config: config.json. params: number of weights (quantised ones unpacked, scales left out).
    """

    path: Path
    shards: tuple[str, ...]
    missing: tuple[str, ...]
    broken: tuple[tuple[str, str], ...]
    total_b: int
    config: Mapping[str, Any]
    params: int
    has_tokenizer: bool
    has_chat_template: bool

    @property
    def is_complete(self) -> bool:
        return not self.missing and not self.broken and bool(self.shards)


def read_header(path: Path) -> dict[str, Any]:
    """The JSON header of a safetensors file, checked against the file's size. Raises K2Error in words."""
    size = path.stat().st_size
    with open_regular(path) as fh:
        head = fh.read(8)
        if len(head) < 8:
            raise K2Error(f"{path.name}: {size} bytes, too short for a safetensors header")
        (length,) = struct.unpack("<Q", head)
        if length > _MAX_HEADER or length + 8 > size:
            raise K2Error(f"{path.name}: header of {length} bytes does not fit the file ({size} bytes): cut short or not safetensors")
        try:
            header = json.loads(fh.read(length))
        except (ValueError, RecursionError):
            raise K2Error(f"{path.name}: header is not JSON: not a safetensors file or damaged")
    if not isinstance(header, dict):
        raise K2Error(f"{path.name}: header is not a JSON object")
    end = max((t["data_offsets"][1] for t in header.values() if "data_offsets" in t), default=0)
    want = 8 + length + end
    if size != want:
        raise K2Error(f"{path.name}: {size:,} bytes, its header says {want:,}: cut short or still downloading")
    return header


def _has_chat_template(folder: Path) -> bool:
    """In a file of its own (since transformers 4.43), or in tokenizer_config.json."""
    if any((folder / name).exists() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    try:
        return bool(_json_file(folder / "tokenizer_config.json").get("chat_template"))
    except K2Error:
        return False


def _json_file(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_regular(path))
    except OSError as err:
        raise K2Error(f"{path}: {err.strerror or err}", "check the path and its permissions")
    except (ValueError, RecursionError) as err:
        line = getattr(err, "lineno", None)
        raise K2Error(f"{path}{f':{line}' if line else ''}: not valid JSON: {err}", "download that file again")
    if not isinstance(value, dict):
        raise K2Error(f"{path}: not a JSON object", "download that file again")
    return value


def inspect(folder: str | Path) -> Checkpoint:
    """Look at a model folder. Raises K2Error when it is no model folder at all; missing and broken shards are reported."""
    was_on = gc.isenabled()
    gc.disable()  # 208,215 headers of Kimi-K2.5 are no garbage: looking for some takes a third of the time
    try:
        return _inspect(folder)
    finally:
        if was_on:
            gc.enable()


def _inspect(folder: str | Path) -> Checkpoint:
    path = Path(folder).expanduser()
    if not path.exists():
        raise K2Error(f"model folder {path} does not exist", "check `model` in the profile, or download the model")
    if not path.is_dir():
        raise K2Error(f"{path} is a file, not a model folder", "give the folder that holds config.json")
    if not (path / "config.json").exists():
        raise K2Error(f"{path} has no config.json", "give the folder of a Hugging Face checkpoint")
    config = _json_file(path / "config.json")
    index = path / "model.safetensors.index.json"
    if index.exists():
        weight_map = _json_file(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise K2Error(f"{index}: key 'weight_map' is missing", "download that file again")
        shards = sorted({str(v) for v in weight_map.values()})
    else:
        shards = sorted(p.name for p in path.glob("*.safetensors"))
    bits = shape_of(config).quantization.removeprefix("int")
    per_word = 32 // int(bits) if bits.isdigit() and 0 < int(bits) <= 32 else 1
    missing: list[str] = []
    broken: list[tuple[str, str]] = []
    total = params = 0
    for name in shards:
        shard = path / name
        try:
            total += shard.stat().st_size
            for key, tensor in read_header(shard).items():
                if key == "__metadata__":
                    continue
                count = math.prod(tensor["shape"])
                if tensor["dtype"] == "I32" and key.endswith(_PACKED):
                    count *= per_word
                params += count if not key.endswith(_BESIDE) else 0
        except FileNotFoundError:
            missing.append(name)
        except K2Error as err:
            broken.append((name, err.message.removeprefix(f"{name}: ")))
        except (OSError, KeyError, TypeError, IndexError) as err:
            broken.append((name, str(err)))
    return Checkpoint(
        path=path,
        shards=tuple(shards),
        missing=tuple(missing),
        broken=tuple(broken),
        total_b=total,
        config=config,
        params=params,
        has_tokenizer=any((path / n).exists() for n in ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")),
        has_chat_template=_has_chat_template(path),
    )


def names_and_ints(found: Checkpoint, wanted: str) -> tuple[tuple[str, ...], list[int] | None]:
    """Every tensor name of a checkpoint, and the values of one integer tensor (I64 or I32), read without torch or numpy."""
    names: list[str] = []
    values: list[int] | None = None
    for shard in found.shards:
        path = found.path / shard
        try:
            header = read_header(path)
        except (K2Error, OSError):
            continue
        for name, tensor in header.items():
            if name == "__metadata__":
                continue
            names.append(name)
            width = {"I64": "q", "I32": "i"}.get(str(tensor.get("dtype")))
            if name.removeprefix("model.") == wanted and width:
                with open_regular(path) as fh:
                    (length,) = struct.unpack("<Q", fh.read(8))
                    begin, end = tensor["data_offsets"]
                    fh.seek(8 + length + begin)
                    raw = fh.read(end - begin)
                values = [int(v) for (v,) in struct.iter_unpack("<" + width, raw)]
    return tuple(names), values
