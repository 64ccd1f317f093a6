"""Reads a states folder: memory-maps shards, hands out samples by position, shuffles. Never copies a whole shard."""

from __future__ import annotations

import mmap
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from k2tui.errors import K2Error
from k2tui.regular import open_regular
from k2tui.states import layout
from k2tui.states.layout import Manifest, ShardHeader, TensorAt

if TYPE_CHECKING:
    import torch

_NUMPY = {
    "I32": np.int32,
    "U8": np.uint8,
    "BF16": np.uint16,
    "F8_E4M3": np.uint8,
    "F32": np.float32,
    "I64": np.int64,
}


@dataclass(frozen=True)
class Sample:
    """index: line of the data file, from 0. input_ids, loss_mask: int64 [T]. aux: bf16 [T, B*H], low to high boundary.
    last: bf16 [T, H] after the target's final norm, zeros in rows that were not stored; last_rows: bool [T], which were."""

    index: int
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    aux: torch.Tensor
    last: torch.Tensor
    last_rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class Entry:
    """One sample's place."""

    index: int
    length: int
    last_rows: int
    shard: int  # position in StatesReader.shards


class StatesReader:
    """Samples of one folder, or of several with equal identity (parts made by several servers). `len(reader)` samples.

    A sample that lies in two shards (a lease that was given twice) counts once: the first shard by name wins.
    Raises K2Error for a damaged shard header, for folders that do not fit, and for an empty set.
    """

    def __init__(self, *folders: Path | str, allow_empty: bool = False) -> None:
        self.folders = [Path(f) for f in folders]
        self.manifest: Manifest = layout.read_manifest(self.folders[0])
        for other in self.folders[1:]:
            theirs = layout.read_manifest(other).identity()
            mine = self.manifest.identity()
            if theirs != mine:
                keys = ", ".join(k for k in mine if mine[k] != theirs[k])
                raise K2Error(
                    f"{other} and {self.folders[0]} hold states of different kinds ({keys})",
                    "read them apart",
                )
        self.shards: list[ShardHeader] = []
        self.entries: list[Entry] = []
        self.shadowed = 0
        self._maps: dict[int, mmap.mmap] = {}
        seen: set[int] = set()
        for folder in self.folders:
            for path in layout.shard_paths(folder):
                header = layout.read_header(path)
                for index, info in header.samples.items():
                    if index in seen:
                        self.shadowed += 1
                        continue
                    seen.add(index)
                    self.entries.append(Entry(index, int(info["t"]), int(info["r"]), len(self.shards)))
                self.shards.append(header)
        self.entries.sort(key=lambda e: e.index)
        self._by_index = {e.index: n for n, e in enumerate(self.entries)}
        if not self.entries and not allow_empty:
            raise K2Error(
                f"{self.folders[0]}: no samples",
                "k2tui extract writes them; `k2tui states check` shows what is there",
            )

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sample, by position."""
        return [e.length for e in self.entries]

    def indices(self) -> list[int]:
        """Data-file lines that are here, ascending."""
        return [e.index for e in self.entries]

    def position(self, index: int) -> int:
        """Position of a data-file line. Raises K2Error when it is not here."""
        if index not in self._by_index:
            raise K2Error(
                f"{self.folders[0]}: sample {index} is not there",
                "`k2tui states check` lists what is missing",
            )
        return self._by_index[index]

    def raw(self, position: int) -> dict[str, np.ndarray]:
        """Arrays of one sample, straight from the memory map (read-only): bf16 as uint16 bit patterns, fp8 as uint8."""
        entry = self.entries[position]
        header = self.shards[entry.shard]
        out: dict[str, np.ndarray] = {}
        for name in ("input_ids", "loss_mask", "aux", "aux_scale", "last", "last_scale"):
            at = header.tensors.get(f"{entry.index}.{name}")
            if at is not None:
                out[name] = self._array(entry.shard, at)
        return out

    def __getitem__(self, position: int) -> Sample:
        """One sample as torch tensors. bf16 tensors share the memory map: copy before writing into them."""
        import torch

        entry = self.entries[position]
        raw = self.raw(position)
        mask = raw["loss_mask"]
        input_ids = torch.from_numpy(raw["input_ids"].astype(np.int64))
        boundaries = len(self.manifest.boundaries)
        aux = _feature(raw["aux"], raw.get("aux_scale"), boundaries)
        hidden = self.manifest.hidden_size
        if "last" not in raw:
            last = torch.zeros((entry.length, hidden), dtype=torch.bfloat16)
            rows = np.zeros(entry.length, dtype=bool)
        else:
            last = _feature(raw["last"], raw.get("last_scale"), 1)
            rows = np.ones(entry.length, dtype=bool)
            if self.manifest.last_rows == "loss":
                rows = layout.loss_rows(mask)
                full = torch.zeros((entry.length, hidden), dtype=torch.bfloat16)
                full[torch.from_numpy(rows)] = last
                last = full
        return Sample(
            entry.index, input_ids, torch.from_numpy(mask.astype(np.int64)), aux, last, torch.from_numpy(rows)
        )

    def __iter__(self) -> Iterator[Sample]:
        for position in range(len(self)):
            yield self[position]

    def order(self, seed: int, epoch: int = 0, positions: Sequence[int] | None = None) -> list[int]:
        """Positions in the shuffled order of that epoch: the same for the same seed, on every machine."""
        picked = list(range(len(self))) if positions is None else list(positions)
        random.Random(f"{seed}/{epoch}").shuffle(picked)
        return picked

    def shuffled(self, seed: int, epoch: int = 0) -> Iterator[Sample]:
        for position in self.order(seed, epoch):
            yield self[position]

    def prefetch(self, position: int) -> None:
        """Ask the kernel to read this sample soon (a hint; returns at once)."""
        entry = self.entries[position]
        at = self.shards[entry.shard].tensors.get(f"{entry.index}.aux")
        if at is not None and hasattr(mmap, "MADV_WILLNEED"):
            start = at.start - at.start % mmap.PAGESIZE
            self._map(entry.shard).madvise(mmap.MADV_WILLNEED, start, at.end - start)

    def close(self) -> None:
        """Drop the maps (arrays handed out keep theirs alive)."""
        self._maps.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": {}}  # each worker process maps for itself

    def _map(self, shard: int) -> mmap.mmap:
        found = self._maps.get(shard)
        if found is None:
            with open_regular(self.shards[shard].path) as fh:
                found = mmap.mmap(fh.fileno(), 0, access=mmap.ACCESS_READ)
            self._maps[shard] = found
        return found

    def _array(self, shard: int, at: TensorAt) -> np.ndarray:
        dtype = _NUMPY[at.dtype]
        count = (at.end - at.start) // np.dtype(dtype).itemsize
        return np.frombuffer(self._map(shard), dtype=dtype, count=count, offset=at.start).reshape(at.shape)


def _feature(stored: np.ndarray, scale: np.ndarray | None, groups: int) -> torch.Tensor:
    """bf16 [T, F] from bit patterns, or from fp8 codes and one scale for each of `groups` equal column blocks."""
    import warnings

    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        bits = torch.from_numpy(stored)
    if scale is None:
        return bits.view(torch.bfloat16)
    values = bits.view(torch.float8_e4m3fn).to(torch.float32)
    rows, width = values.shape
    wide = values.view(rows, groups, width // groups) * torch.from_numpy(scale.copy())[:, :, None]
    return wide.view(rows, width).to(torch.bfloat16)
