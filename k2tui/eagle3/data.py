"""Where samples come from: a states folder, SpecForge's .ckpt files, or memory; and which samples make one optimiser step.

The plan of an epoch depends on seed, epoch, lengths and batch size only, never on the number of ranks.
"""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from k2tui.eagle3.batch import Pack, Sample, pack
from k2tui.errors import K2Error


class States(Protocol):
    """Samples by number. `lengths`: tokens of each. `mask(i)`: its loss mask [T] bool, cheap. `sample(i)`: all of it."""

    @property
    def lengths(self) -> Sequence[int]: ...
    def mask(self, index: int) -> np.ndarray: ...
    def ids(self, index: int) -> np.ndarray: ...
    def sample(self, index: int) -> Sample: ...


class MemoryStates:
    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples = list(samples)
        self.lengths = [s.length for s in self.samples]

    def mask(self, index: int) -> np.ndarray:
        return self.samples[index].loss_mask.cpu().numpy().astype(bool)

    def ids(self, index: int) -> np.ndarray:
        return self.samples[index].input_ids.cpu().numpy()

    def sample(self, index: int) -> Sample:
        return self.samples[index]


class CkptStates:
    """SpecForge's offline files: torch.save of {input_ids [T], loss_mask [T], aux_hidden_state [1,T,3H], hidden_state [1,T,H]}.

    Read with weights_only (no code from the file) and mapped, so that a mask costs no states.
    """

    def __init__(self, folder: Path, max_length: int = 0) -> None:
        self.files = sorted(Path(folder).rglob("*.ckpt"))
        if not self.files:
            raise K2Error(f"{folder}: no .ckpt file", "give a folder of SpecForge hidden-state files")
        self.max_length = max_length
        self.lengths = [int(self._load(i)["input_ids"].shape[0]) for i in range(len(self.files))]
        if max_length:
            self.lengths = [min(n, max_length) for n in self.lengths]

    def _load(self, index: int) -> dict[str, Tensor]:
        path = self.files[index]
        try:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as err:  # torch raises many kinds for a damaged file
            raise K2Error(f"{path}: cannot be read: {err}", "was it cut while it was written?")
        missing = [
            k for k in ("input_ids", "loss_mask", "aux_hidden_state", "hidden_state") if k not in found
        ]
        if missing:
            raise K2Error(f"{path}: no {', '.join(missing)}", "this is not a SpecForge EAGLE-3 file")
        return found

    def mask(self, index: int) -> np.ndarray:
        return self._load(index)["loss_mask"][: self.lengths[index]].numpy().astype(bool)

    def ids(self, index: int) -> np.ndarray:
        return self._load(index)["input_ids"][: self.lengths[index]].numpy()

    def sample(self, index: int) -> Sample:
        raw, n = self._load(index), self.lengths[index]
        return Sample(
            raw["input_ids"][:n].long(), raw["loss_mask"][:n].bool(), raw["aux_hidden_state"].reshape(-1, raw["aux_hidden_state"].shape[-1])[:n],
            raw["hidden_state"].reshape(-1, raw["hidden_state"].shape[-1])[:n],
        )  # fmt: skip


class FolderStates:
    """A states folder of `k2tui extract` (k2tui.states). norm: the target's final norm, applied to sets that were saved
    before it (the manifest says so); such a set without it is refused."""

    def __init__(
        self, *folders: Path, max_length: int = 0, norm: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        from k2tui.states import StatesReader

        self.reader = StatesReader(*folders)
        self.manifest = self.reader.manifest
        if self.manifest.last_rows == "none":
            raise K2Error(
                f"{folders[0]}: holds no last hidden states, so there is nothing to learn from",
                "extract again with last hidden states",
            )
        self.norm = norm if self.manifest.last_norm == "pre" else None
        if self.manifest.last_norm not in ("pre", "post") or (
            self.manifest.last_norm == "pre" and norm is None
        ):
            raise K2Error(
                f"{folders[0]}: last hidden states of kind {self.manifest.last_norm!r}",
                "known: post (after the final norm), pre",
            )
        self.lengths = [min(n, max_length) if max_length else n for n in self.reader.lengths]

    def mask(self, index: int) -> np.ndarray:
        return self.reader.raw(index)["loss_mask"][: self.lengths[index]].astype(bool)

    def ids(self, index: int) -> np.ndarray:
        return self.reader.raw(index)["input_ids"][: self.lengths[index]]

    def sample(self, index: int) -> Sample:
        found, n = self.reader[index], self.lengths[index]
        last = found.last[:n] if self.norm is None else self.norm(found.last[:n])
        return Sample(found.input_ids[:n], found.loss_mask[:n].bool(), found.aux[:n], last)


def open_states(
    path: Path, max_length: int = 0, norm: Callable[[Tensor], Tensor] | None = None
) -> FolderStates | CkptStates:
    """The states in a folder, by what lies there. norm: see FolderStates. Raises K2Error."""
    if (path / "manifest.json").exists():
        return FolderStates(path, max_length=max_length, norm=norm)
    if not path.is_dir():
        raise K2Error(f"{path}: no such folder", "k2tui extract writes one")
    if next(path.rglob("*.ckpt"), None) is not None:
        return CkptStates(path, max_length)
    raise K2Error(
        f"{path}: neither a states folder (manifest.json) nor SpecForge files (.ckpt)",
        "k2tui extract writes the first",
    )


@dataclass(frozen=True)
class Subset:
    """Some of a set's samples."""

    whole: States
    picked: tuple[int, ...]

    @property
    def lengths(self) -> Sequence[int]:
        return [self.whole.lengths[i] for i in self.picked]

    def mask(self, index: int) -> np.ndarray:
        return self.whole.mask(self.picked[index])

    def ids(self, index: int) -> np.ndarray:
        return self.whole.ids(self.picked[index])

    def sample(self, index: int) -> Sample:
        return self.whole.sample(self.picked[index])


def split(states: States, held_out: float, seed: int) -> tuple[Subset, Subset]:
    """(training, held-out). held_out: share, at least one sample when above 0 and there are two."""
    order = list(range(len(states.lengths)))
    random.Random(f"{seed}/split").shuffle(order)
    count = (
        0 if held_out <= 0 or len(order) < 2 else min(len(order) - 1, max(1, round(held_out * len(order))))
    )
    return Subset(states, tuple(sorted(order[count:]))), Subset(states, tuple(sorted(order[:count])))


StepPlan = list[list[int]]  # packs of sample numbers


def fill_packs(batch: Sequence[int], lengths: Sequence[int], max_tokens: int) -> StepPlan:
    """Samples of one step -> packs of at most max_tokens tokens (first fit, longest first). A longer sample has its own."""
    packs: StepPlan = []
    room: list[int] = []
    for i in sorted(batch, key=lambda i: (-lengths[i], i)):
        for n, left in enumerate(room):
            if lengths[i] <= left:
                packs[n].append(i)
                room[n] -= lengths[i]
                break
        else:
            packs.append([i])
            room.append(max_tokens - lengths[i])
    return packs


def plan_epoch(
    lengths: Sequence[int], seed: int, epoch: int, batch_size: int, max_tokens: int
) -> list[StepPlan]:
    """Steps of one epoch: shuffled, batch_size samples each (the last may be smaller), packed."""
    order = list(range(len(lengths)))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return [
        fill_packs(order[i : i + batch_size], lengths, max_tokens) for i in range(0, len(order), batch_size)
    ]


def share(packs: StepPlan, lengths: Sequence[int], rank: int, size: int) -> StepPlan:
    """This rank's packs: the largest first to the rank with the least. Every rank computes the same answer."""
    loads = [0] * size
    mine: StepPlan = []
    for one in sorted(packs, key=lambda p: (-sum(lengths[i] for i in p), p)):
        to = min(range(size), key=lambda r: (loads[r], r))
        loads[to] += sum(lengths[i] for i in one)
        if to == rank:
            mine.append(one)
    return mine


class Loader:
    """Packs made ahead of time by one thread, pinned when they go to a GPU. Iterate once; `stop` ends it early."""

    def __init__(
        self,
        states: States,
        packs: Iterator[list[int]],
        make: Callable[[list[Sample]], Pack],
        *,
        depth: int = 2,
        pin: bool = False,
    ) -> None:
        self._queue: queue.Queue[Pack | BaseException | None] = queue.Queue(depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._work, args=(states, packs, make, pin), daemon=True, name="packs"
        )
        self._thread.start()

    def _work(
        self, states: States, packs: Iterator[list[int]], make: Callable[[list[Sample]], Pack], pin: bool
    ) -> None:
        try:
            for one in packs:
                made = make([states.sample(i) for i in one])
                self._put(made.pinned() if pin else made)
                if self._stop.is_set():
                    return
            self._put(None)
        except BaseException as err:  # shown by the consumer, where it can be handled
            self._put(err)

    def _put(self, value: Pack | BaseException | None) -> None:
        while not self._stop.is_set():
            try:
                self._queue.put(value, timeout=0.2)
                return
            except queue.Full:
                continue

    def __iter__(self) -> Iterator[Pack]:
        return self

    def __next__(self) -> Pack:
        got = self._queue.get()
        if got is None:
            raise StopIteration
        if isinstance(got, BaseException):
            raise got
        return got

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)


def make_pack(samples: Sequence[Sample], ttt_length: int, *, shifted: bool, dtype: torch.dtype) -> Pack:
    return pack(samples, ttt_length, torch.device("cpu"), shifted=shifted, dtype=dtype)
