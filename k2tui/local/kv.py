"""The KV cache: one row a running request, addressed by position. Knows tensors, no requests.

Laws. Row r of the cache belongs to running request r; requests that leave are replaced by the last row, so rows
0 .. n-1 are always the running ones and a batch reads views, never copies. A position is written before it is read, so
what lies beyond a request's length is never seen and going back (a rejected draft) costs nothing.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU from calloc, so that memory is taken only as positions are written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(count, dtype=np.uint8)).view(dtype).view(shape)


class KVPool:
    """k, v: one tensor a layer, [rows * capacity, num_kv_heads, head_dim].

    All zeros at first, never merely empty: what lies beyond a request's length gets weight 0, and 0 * NaN is NaN.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        rows: int,
        capacity: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.rows = rows
        self.capacity = capacity
        shape = (rows * capacity, num_kv_heads, head_dim)
        self.k = [_zeros(shape, dtype, device) for _ in range(num_layers)]
        self.v = [_zeros(shape, dtype, device) for _ in range(num_layers)]
        self.bytes_per_token = 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of row `source` over row `target`."""
        for cache in (*self.k, *self.v):
            by_row = cache.view(self.rows, self.capacity, *cache.shape[1:])
            by_row[target, :length].copy_(by_row[source, :length])


class Window:
    """Rows [row, row + n) of a pool, seen by one forward pass of n sequences with q new tokens each.

    positions: [n, q] int64; starts: the same as lists of first positions. A fresh window (every start is 0) attends
    causally to its own keys; right padding does no harm, since no earlier token sees it.
    """

    def __init__(self, pool: KVPool, row: int, positions: torch.Tensor, starts: list[int]) -> None:
        n, q = positions.shape
        self.pool = pool
        self.row = row
        self.n = n
        self.q = q
        self.fresh = q > 1 and not any(starts)
        self.length = max(starts) + q
        rows = torch.arange(row, row + n, device=positions.device).unsqueeze(1) * pool.capacity
        self.index = (rows + positions).view(-1)
        self.visible: torch.Tensor | None = None  # [n, q, length], True where a query may look
        if not self.fresh and not (q == 1 and min(starts) == max(starts)):
            keys = torch.arange(self.length, device=positions.device)
            self.visible = keys <= positions.unsqueeze(-1)
        self._mask: torch.Tensor | None = None

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """q [n, Q, heads, d], k and v [n, Q, kv_heads, d] (rotated) -> [n * Q, heads * d]. Stores k and v first."""
        n, length, heads, dim = q.shape
        kv_heads = k.shape[2]
        groups = heads // kv_heads
        pool = self.pool
        pool.k[layer].index_copy_(0, self.index, k.reshape(n * length, kv_heads, dim))
        pool.v[layer].index_copy_(0, self.index, v.reshape(n * length, kv_heads, dim))
        if self.fresh:
            if groups > 1:
                k = k.repeat_interleave(groups, dim=2)
                v = v.repeat_interleave(groups, dim=2)
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, scale=scale
            )
            return out.transpose(1, 2).reshape(n * length, heads * dim)
        keys = pool.k[layer].view(pool.rows, pool.capacity, kv_heads, dim)[
            self.row : self.row + n, : self.length
        ]
        values = pool.v[layer].view(pool.rows, pool.capacity, kv_heads, dim)[
            self.row : self.row + n, : self.length
        ]
        # Grouped heads become extra queries of their KV head: keys are never repeated.
        grouped = (
            q.view(n, length, kv_heads, groups, dim)
            .permute(0, 2, 3, 1, 4)
            .reshape(n, kv_heads, groups * length, dim)
        )
        if self._mask is None and self.visible is not None:
            mask = torch.zeros(self.visible.shape, dtype=q.dtype, device=q.device).masked_fill_(
                ~self.visible, float("-inf")
            )
            self._mask = (
                mask.unsqueeze(1)
                .expand(n, groups, length, self.length)
                .reshape(n, 1, groups * length, self.length)
            )
        out = F.scaled_dot_product_attention(
            grouped, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=self._mask, scale=scale
        )
        return (
            out.view(n, kv_heads, groups, length, dim).permute(0, 3, 1, 2, 4).reshape(n * length, heads * dim)
        )
