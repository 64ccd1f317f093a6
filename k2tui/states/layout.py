"""The on-disk layout of a states folder: names, manifest, shard header. Pure values; opens files only to read a header.

    FOLDER/manifest.json                        identity and settings, written before the first sample
    FOLDER/states-WRITER-00001.safetensors      shards: whole or absent (a `.partial` is never read)

A shard is a plain safetensors file, and its header is the index: which samples it holds, their lengths and checksums. Sample 17 of the data file is the tensors
    17.input_ids [T] I32, 17.loss_mask [T] U8, 17.aux [T, B*H] BF16 (or F8_E4M3), 17.last [R, H] BF16 (or F8_E4M3)
and, for fp8, 17.aux_scale [T, B] F32 and 17.last_scale [R, 1] F32 (value = stored * scale, one scale a token and boundary).
B boundaries in ascending order; boundary b is the residual stream that enters layer b, Hugging Face's hidden_states[b].
`last` is the output of the target's final norm. R = T, or the rows that `loss_rows` names when the manifest says
last_rows "loss". What a crashed writer left of a sample is a tensor `dropped.N`: nobody reads it.
`__metadata__["samples"]` is JSON: {"17": {"t": T, "r": R, "crc": {"aux": crc32, ...}}}.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from k2tui.errors import K2Error
from k2tui.parsing import parse_json
from k2tui.regular import open_regular, read_regular

FORMAT = "k2tui-states"
VERSION = 1
MANIFEST = "manifest.json"
SHARD_PREFIX = "states-"
SHARD_SUFFIX = ".safetensors"
PARTIAL_SUFFIX = ".partial"

DTYPES = ("bf16", "fp8_e4m3")
LAST_ROWS = ("all", "loss", "none")
ITEM_B = {"I32": 4, "U8": 1, "BF16": 2, "F8_E4M3": 1, "F32": 4, "I64": 8, "F16": 2}
FEATURE_TAG = {"bf16": "BF16", "fp8_e4m3": "F8_E4M3"}


@dataclass(frozen=True, slots=True)
class Manifest:
    """What the states are and where they come from. Two sets may be mixed only when `identity()` is equal.

    boundaries: physical, ascending, 0..num_hidden_layers-1. last_norm: "post" (after the target's final norm).
    model_hash: of config and weight headers (`k2tui.checkpoint`); "" when unknown. data_sha256: of the data file's rows
    that were asked for. engine_args: what bears on the numbers (dtype, attention back end, tp).
    """

    hidden_size: int
    num_hidden_layers: int
    boundaries: tuple[int, ...]
    dtype: str = "bf16"
    last_rows: str = "all"
    last_norm: str = "post"
    model_path: str = ""
    model_hash: str = ""
    architectures: tuple[str, ...] = ()
    vocab_size: int = 0
    engine: str = ""
    engine_version: str = ""
    engine_args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tokenizer_hash: str = ""
    template_hash: str = ""
    loss_mask_rule: str = ""
    data_path: str = ""
    data_rows: int = 0
    data_sha256: str = ""
    created_s: float = 0.0
    format: str = FORMAT
    version: int = VERSION

    def __post_init__(self) -> None:
        if self.hidden_size <= 0:
            raise K2Error(f"manifest: hidden_size must be positive, not {self.hidden_size}")
        if self.dtype not in DTYPES:
            raise K2Error(f"manifest: dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        if self.last_rows not in LAST_ROWS:
            raise K2Error(f"manifest: last_rows {self.last_rows!r} is not one of {', '.join(LAST_ROWS)}")
        if (
            not self.boundaries
            or list(self.boundaries) != sorted(set(self.boundaries))
            or self.boundaries[0] < 0
        ):
            raise K2Error(f"manifest: boundaries {list(self.boundaries)} must be distinct and ascending")

    def identity(self) -> dict[str, Any]:
        """What must agree between sets that are read as one."""
        keys = (
            "hidden_size",
            "num_hidden_layers",
            "boundaries",
            "dtype",
            "last_rows",
            "last_norm",
            "model_hash",
        )
        return {k: list(v) if isinstance(v := getattr(self, k), tuple) else v for k in keys}

    def to_json(self) -> dict[str, Any]:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_json(cls, raw: Any, where: str) -> Manifest:
        """Unknown fields are ignored (a newer writer). Raises K2Error naming file and key."""
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise K2Error(f"{where}: not a k2tui states manifest", "give the folder that k2tui extract wrote")
        if int(raw.get("version", 0)) > VERSION:
            raise K2Error(
                f"{where}: written by a newer k2tui (layout version {raw['version']})", "update k2tui"
            )
        known = {f.name for f in fields(cls)}
        kept: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in raw.items() if k in known
        }
        try:
            return cls(**kept)
        except TypeError as err:
            raise K2Error(f"{where}: {err}", "the manifest is damaged; run k2tui extract again")


def read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    try:
        raw = parse_json(read_regular(path))
    except FileNotFoundError:
        raise K2Error(f"{folder}: no {MANIFEST}", "give the folder that k2tui extract wrote")
    except (OSError, ValueError) as err:
        raise K2Error(f"{path}: {err}", "the manifest is damaged; run k2tui extract again")
    return Manifest.from_json(raw, str(path))


def manifest_sign(folder: Path) -> tuple[int, int]:
    """Changes whenever the manifest is written anew. Raises K2Error when there is none."""
    try:
        told = os.stat(folder / MANIFEST)
    except OSError:
        raise K2Error(f"{folder}: no {MANIFEST}", "give the folder that k2tui extract wrote")
    return told.st_ino, told.st_mtime_ns


def loss_rows(loss_mask: np.ndarray) -> np.ndarray:
    """bool [T]: rows whose last hidden state a draft's loss can read: mask at t, t - 1 or t + 1.

    Row u teaches the guess of token u + 1; the known mask rules ask for mask[u] (speculators) or mask[u - 1] (SpecForge), and
    row u = the last prompt token decides the first token of the answer.
    """
    mask = np.asarray(loss_mask, dtype=bool)
    need = mask.copy()
    need[:-1] |= mask[1:]
    need[1:] |= mask[:-1]
    return need


def to_spans(loss_mask: Sequence[int] | np.ndarray) -> list[tuple[int, int]]:
    """0/1 mask -> [start, end) spans of the ones."""
    mask = np.asarray(loss_mask, dtype=np.int8)
    edge = np.flatnonzero(np.diff(np.concatenate(([0], mask, [0]))))
    return [(int(a), int(b)) for a, b in zip(edge[::2], edge[1::2], strict=True)]


def from_spans(spans: Iterable[tuple[int, int]], length: int) -> np.ndarray:
    """[start, end) spans -> uint8 mask of that length. Raises K2Error for a span outside it."""
    mask = np.zeros(length, dtype=np.uint8)
    for start, end in spans:
        if not 0 <= start < end <= length:
            raise K2Error(f"loss span {start}-{end} is outside a sample of {length} tokens")
        mask[start:end] = 1
    return mask


def token_bytes(hidden_size: int, num_boundaries: int, dtype: str = "bf16") -> tuple[int, int]:
    """(bytes a token, bytes a token with a last hidden state more): aux + ids + mask, and last."""
    if dtype == "bf16":
        return 2 * hidden_size * num_boundaries + 5, 2 * hidden_size
    return (hidden_size + 4) * num_boundaries + 5, hidden_size + 4


def set_bytes(manifest: Manifest, tokens: int, last_tokens: int) -> int:
    """Bytes that a whole set takes on disk, headers left out (less than 0.1 %)."""
    per_token, per_last = token_bytes(manifest.hidden_size, len(manifest.boundaries), manifest.dtype)
    return tokens * per_token + (0 if manifest.last_rows == "none" else last_tokens * per_last)


@dataclass(frozen=True, slots=True)
class TensorAt:
    dtype: str
    shape: tuple[int, ...]
    start: int  # absolute byte offset in the file
    end: int


@dataclass(frozen=True, slots=True)
class ShardHeader:
    path: Path
    size_b: int
    tensors: Mapping[str, TensorAt]
    samples: Mapping[int, Mapping[str, Any]]
    metadata: Mapping[str, str]


def read_header(path: Path) -> ShardHeader:
    """Header of one shard (any safetensors file). Raises K2Error when it is cut or not safetensors."""
    try:
        with open_regular(path) as fh:
            size = os.fstat(fh.fileno()).st_size
            head = fh.read(8)
            if len(head) < 8:
                raise K2Error(f"{path}: cut short ({size} bytes)", "delete it and run k2tui extract again")
            (length,) = struct.unpack("<Q", head)
            if not 2 <= length <= min(size - 8, 1 << 30):
                raise K2Error(f"{path}: not a safetensors file (header of {length} bytes in {size})")
            raw = parse_json(fh.read(length))
    except OSError as err:
        raise K2Error(f"{path}: {err.strerror or err}")
    except ValueError as err:
        raise K2Error(f"{path}: damaged header: {err}", "delete it and run k2tui extract again")
    meta = raw.pop("__metadata__", {})
    base = 8 + length
    tensors: dict[str, TensorAt] = {}
    for name, info in raw.items():
        start, end = info["data_offsets"]
        at = TensorAt(info["dtype"], tuple(info["shape"]), base + start, base + end)
        if at.end > size:
            raise K2Error(
                f"{path}: cut short: {name} ends at byte {at.end} of {size}",
                "delete it and run k2tui extract again",
            )
        tensors[name] = at
    samples = {int(k): v for k, v in json.loads(meta.get("samples", "{}")).items()}
    return ShardHeader(path, size, tensors, samples, meta)


def shard_paths(folder: Path) -> list[Path]:
    """Published shards, sorted by name."""
    return sorted(p for p in folder.glob(f"{SHARD_PREFIX}*{SHARD_SUFFIX}") if not p.name.startswith("."))
