"""EAGLE-3 chain drafting: keeps the draft's cache in step with the target's and proposes num_steps tokens a request.

The draft's row r and position t go with the target's. After every verification the kept tokens run through the draft
once more with the target's true features, so that a guess of its own never stays in the cache.
"""

from __future__ import annotations

import torch

from k2tui.local.checkpoint import Checkpoint
from k2tui.local.decoder import Decoder
from k2tui.local.draft import Eagle3Draft
from k2tui.local.kv import KVPool, Window
from k2tui.local.request import Request


class Speculator:
    def __init__(
        self, draft: Eagle3Draft, target: Decoder, *, num_steps: int, rows: int, capacity: int
    ) -> None:
        self.model = draft
        self.num_steps = num_steps
        self.boundaries = draft.boundaries
        self.device = target.device
        self.pool = KVPool(
            num_layers=1,
            rows=rows,
            capacity=capacity,
            num_kv_heads=draft.num_kv_heads,
            head_dim=draft.head_dim,
            dtype=target.dtype,
            device=target.device,
        )

    def prefill(self, batch: list[Request], row: int, aux: torch.Tensor, lengths: list[int]) -> None:
        """After the target's prefill of rows row ..: aux [n, width, B*H], right-padded; the first token is already out."""
        n, width = aux.shape[:2]
        ids = [
            (r.input_ids[1:] + [r.output_ids[0] if r.output_ids else 0] + [0] * (width - length))
            for r, length in zip(batch, lengths, strict=True)
        ]
        positions = torch.arange(width, device=self.device).expand(n, width)
        self._run(batch, row, ids, positions, [0] * n, aux, [length - 1 for length in lengths])

    def extend(
        self, batch: list[Request], starts: list[int], kept: list[list[int]], aux: torch.Tensor
    ) -> None:
        """After a verification from positions `starts`: kept[i] are the new tokens, aux [n, width, B*H]."""
        width = aux.shape[1]
        ids = [new + [0] * (width - len(new)) for new in kept]
        positions = torch.tensor(starts, device=self.device).unsqueeze(1) + torch.arange(
            width, device=self.device
        )
        self._run(batch, 0, ids, positions, starts, aux, [len(new) - 1 for new in kept])

    def _run(
        self,
        batch: list[Request],
        row: int,
        ids: list[list[int]],
        positions: torch.Tensor,
        starts: list[int],
        aux: torch.Tensor,
        last: list[int],
    ) -> None:
        model = self.model
        window = Window(self.pool, row, positions, starts)
        hidden = model.forward(torch.tensor(ids, device=self.device), model.features(aux), positions, window)
        ends = hidden[torch.arange(len(batch)), torch.tensor(last)]  # [n, hidden_size]
        tokens = model.guess(ends).tolist()
        for i, request in enumerate(batch):
            request.feature = ends[i]
            request.guess = tokens[i]

    def draft(self, batch: list[Request], starts: list[int]) -> list[list[int]]:
        """num_steps tokens for every request, each guessed from the one before. starts: the target's cached positions."""
        model = self.model
        chains = [[request.guess] for request in batch]
        features: list[torch.Tensor] = []
        for request in batch:
            assert request.feature is not None
            features.append(request.feature)
        hidden = torch.stack(features).unsqueeze(1)  # [n, 1, hidden_size]
        for step in range(self.num_steps - 1):
            at = [start + step for start in starts]
            positions = torch.tensor(at, device=self.device).unsqueeze(1)
            ids = torch.tensor([[chain[-1]] for chain in chains], device=self.device)
            hidden = model.forward(ids, hidden, positions, Window(self.pool, 0, positions, at))
            for chain, token in zip(chains, model.guess(hidden[:, 0]).tolist(), strict=True):
                chain.append(token)
        return chains


def load_speculator(
    checkpoint: Checkpoint, target: Decoder, *, num_steps: int, rows: int, capacity: int, delay_s: float = 0.0
) -> Speculator:
    """Read a draft checkpoint beside a loaded target. Raises K2Error naming the file and the tensor."""
    draft = Eagle3Draft(checkpoint, target, capacity=capacity, delay_s=delay_s)
    return Speculator(draft, target, num_steps=num_steps, rows=rows, capacity=capacity)
