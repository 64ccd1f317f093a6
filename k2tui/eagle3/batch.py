"""Packing: whole samples -> one pack of documents, with every index that the training-time test needs, made on the host.

Position t of a document has the aux state of token t and the token at t+1 as input; it predicts the token at t+2. What no
loss can reach is left out here: positions after the last loss-bearing one, and every part of a prompt position except its
step-0 key and value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from k2tui.eagle3.attention import Spans


@dataclass(frozen=True)
class Sample:
    """One captured sample. input_ids [T] int64, loss_mask [T] bool, aux [T, 3H], last [T, H] (after the target's norm)."""

    input_ids: Tensor
    loss_mask: Tensor
    aux: Tensor
    last: Tensor

    @property
    def length(self) -> int:
        return int(self.input_ids.shape[0])


def bearing(loss_mask: np.ndarray, step: int, *, shifted: bool) -> np.ndarray:
    """Positions t of one document whose step `step` bears a loss. loss_mask [T] bool.

    shifted: the mask of the position whose distribution is predicted, t+1+step (also trains the first draft after a
    prompt); else that of t+step, as SpecForge and EAGLE have it. The last token never has a label.
    """
    mask = loss_mask.copy()
    total = len(mask)
    if not shifted:
        mask[-1:] = False
    reach = step + (1 if shifted else 0)
    out = np.zeros(total, dtype=bool)
    if reach < total:
        out[: total - reach] = mask[reach:]
    # the predicted distribution must exist: t+1+step <= T-1
    out[max(total - 1 - step, 0) :] = False
    return out


BEYOND = -1  # stands for the extra token until its place is known


@dataclass(frozen=True)
class Pack:
    """One micro-batch. N: kept tokens of all documents and one extra; P: positions (keys of step 0); A: active positions
    (some step bears a loss); E: tokens that an active position reads; U: teacher rows.

    ids [N]; aux [P, 3H]; last [U, H]. position [P]: place in the own document. active [A] in P. embed_rows [E] in N.
    step_embed[k] [A] in E and step_next[k] [A] in N: the input token of each active position at step k; key_next [P] in N: that
    of every position at step 0. Each index names a row at most once, except the extra token, which no loss reaches.
    rows: None, or [A] places among the spans' query rows. loss_rows[k] [M_k] in A and teacher_rows[k] [M_k] in U.
    """

    ids: Tensor
    aux: Tensor
    last: Tensor
    position: Tensor
    active: Tensor
    embed_rows: Tensor
    step_embed: tuple[Tensor, ...]
    step_next: tuple[Tensor, ...]
    key_next: Tensor
    rows: Tensor | None
    spans: Spans
    loss_rows: tuple[Tensor, ...]
    teacher_rows: tuple[Tensor, ...]
    counts: tuple[int, ...]
    num_tokens: int  # tokens of the samples, prompts and tails included
    num_loss_tokens: int  # tokens with loss_mask set

    @property
    def num_active(self) -> int:
        return int(self.active.shape[0])

    def _each(self, change: Callable[[Tensor], Tensor]) -> Pack:
        def apply(value: Any) -> Any:
            if isinstance(value, Tensor):
                return change(value)
            if isinstance(value, tuple) and value and isinstance(value[0], Tensor):
                return tuple(change(x) for x in value)
            if isinstance(value, Spans):
                return replace(value, q_cu=change(value.q_cu), k_cu=change(value.k_cu))
            return value

        return Pack(**{f.name: apply(getattr(self, f.name)) for f in fields(self)})

    def pinned(self) -> Pack:
        """The same in page-locked memory, so that `to` does not wait."""
        return self._each(lambda x: x.pin_memory())

    def to(self, device: torch.device) -> Pack:
        return self._each(lambda x: x.to(device, non_blocking=True))


def count_steps(masks: Sequence[np.ndarray], ttt_length: int, *, shifted: bool) -> list[int]:
    """Loss-bearing positions of each step over these samples: the loss's denominators, without reading any state."""
    return [sum(int(bearing(m, k, shifted=shifted).sum()) for m in masks) for k in range(ttt_length)]


def pack(
    samples: Sequence[Sample],
    ttt_length: int,
    device: torch.device,
    *,
    shifted: bool = True,
    dtype: torch.dtype | None = None,
) -> Pack:
    """Pack samples for `ttt_length` steps. dtype: of aux and last on the device (None = as stored)."""
    ids: list[Tensor] = []
    aux: list[Tensor] = []
    last: list[Tensor] = []
    position: list[np.ndarray] = []
    active: list[np.ndarray] = []
    key_next: list[np.ndarray] = []
    embed_rows: list[np.ndarray] = []
    step_embed: list[list[np.ndarray]] = [[] for _ in range(ttt_length)]
    step_next: list[list[np.ndarray]] = [[] for _ in range(ttt_length)]
    loss_rows: list[list[np.ndarray]] = [[] for _ in range(ttt_length)]
    teacher_rows: list[list[np.ndarray]] = [[] for _ in range(ttt_length)]
    rows: list[np.ndarray] = []
    q_lengths: list[int] = []
    k_lengths: list[int] = []
    n = a = u = e = r = 0
    tokens = loss_tokens = 0
    for sample in samples:
        mask = sample.loss_mask.cpu().numpy().astype(bool)
        tokens += len(mask)
        loss_tokens += int(mask.sum())
        steps = [bearing(mask, k, shifted=shifted) for k in range(ttt_length)]
        where = np.flatnonzero(np.logical_or.reduce(steps))
        if not len(where):
            continue
        reach = max(int(np.flatnonzero(s)[-1]) + 1 + k for k, s in enumerate(steps) if s.any())
        keys = int(where[-1]) + 1  # positions 0..keys-1 are keys; tokens up to `reach` are inputs or labels
        kept = max(reach + 1, keys)
        first = int(where[0])
        # keys end with the last active position: documents are laid out as [0, keys), and the tokens after it follow
        ids.append(sample.input_ids[:kept])
        aux.append(sample.aux[:keys])
        position.append(np.arange(kept))
        used = np.zeros(kept + ttt_length, dtype=bool)
        for k in range(ttt_length):
            used[where + 1 + k] = True
        used = used[:kept]
        slots = np.concatenate((np.cumsum(used) - 1 + e, np.full(ttt_length, BEYOND)))
        places = np.concatenate((np.arange(kept) + n, np.full(ttt_length, BEYOND)))
        embed_rows.append(np.flatnonzero(used) + n)
        for k in range(ttt_length):
            step_embed[k].append(slots[where + 1 + k])
            step_next[k].append(places[where + 1 + k])
        key_next.append(places[np.arange(keys) + 1])
        taught = np.zeros(kept, dtype=bool)
        for k in range(ttt_length):
            taught[np.flatnonzero(steps[k]) + 1 + k] = True
        taught_at = np.flatnonzero(taught)
        last.append(
            sample.last[torch.from_numpy(taught_at)] if len(taught_at) < sample.length else sample.last
        )
        slot = np.cumsum(taught) - 1 + u
        place = np.full(kept, -1)
        place[where] = np.arange(len(where)) + a
        for k in range(ttt_length):
            bears = np.flatnonzero(steps[k])
            loss_rows[k].append(place[bears])
            teacher_rows[k].append(slot[bears + 1 + k])
        active.append(where + sum(k_lengths))
        rows.append(where - first + r)
        q_lengths.append(keys - first)
        k_lengths.append(keys)
        n, a, u, e, r = n + kept, a + len(where), u + len(taught_at), e + int(used.sum()), r + keys - first

    # one extra token (0) at the very end stands for everything beyond a document: the specification's zero-fill
    ids.append(torch.zeros(1, dtype=torch.int64))
    embed_rows.append(np.array([n]))

    def index(parts: list[np.ndarray], beyond: int = 0) -> Tensor:
        flat = np.concatenate(parts) if parts else np.zeros(0)
        flat = np.where(flat == BEYOND, beyond, flat)
        host = torch.from_numpy(np.ascontiguousarray(flat.astype(np.int64)))
        return _move(host, device)

    def joined(parts: list[Tensor], width: int) -> Tensor:
        host = torch.cat(parts) if parts else torch.zeros(0, width)
        moved = _move(host, device)
        return moved if dtype is None else moved.to(dtype)

    width_aux = samples[0].aux.shape[1] if samples else 0
    width_last = samples[0].last.shape[1] if samples else 0
    return Pack(
        ids=_move(torch.cat([i.to(torch.int64) for i in ids]), device),
        aux=joined(aux, width_aux),
        last=joined(last, width_last),
        position=index([np.arange(k) for k in k_lengths]),
        active=index(active),
        embed_rows=index(embed_rows),
        step_embed=tuple(index(p, e) for p in step_embed),
        step_next=tuple(index(p, n) for p in step_next),
        key_next=index(key_next, n),
        rows=None if r == a else index(rows),
        spans=Spans.of(q_lengths, k_lengths, device),
        loss_rows=tuple(index(p) for p in loss_rows),
        teacher_rows=tuple(index(p) for p in teacher_rows),
        counts=tuple(sum(len(x) for x in p) for p in loss_rows),
        num_tokens=tokens,
        num_loss_tokens=loss_tokens,
    )


def _move(host: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda" or host.is_cuda:
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
