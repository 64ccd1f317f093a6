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
    """data: [num_layers, rows * capacity, 2 * num_kv_heads, head_dim], keys first, then values.

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
        self.num_kv_heads = num_kv_heads
        self.data = _zeros((num_layers, rows * capacity, 2 * num_kv_heads, head_dim), dtype, device)
        self.layers = list(self.data.unbind(0))
        self.by_row = self.data.view(num_layers, rows, capacity, 2, num_kv_heads, head_dim)
        self.bytes_per_token = 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of row `source` over row `target`."""
        self.by_row[:, target, :length].copy_(self.by_row[:, source, :length])


class Window:
    """Rows [row, row + n) of a pool, seen by one forward pass of n sequences with q new tokens each.

    positions: [n, q] int64; starts: the same as lists of first positions. A fresh window (every start is 0) attends
    causally to its own keys; right padding does no harm, since no earlier token sees it.
    """

    def __init__(self, pool: KVPool, row: int, positions: torch.Tensor, starts: list[int]) -> None:
        n, q = positions.shape
        self.pool = pool
        self.n = n
        self.q = q
        self.fresh = q > 1 and not any(starts)
        length = max(starts) + q
        if n == 1:
            self.index = positions.view(-1) + row * pool.capacity if row else positions.view(-1)
        else:
            rows = torch.arange(row, row + n, device=positions.device).unsqueeze(1) * pool.capacity
            self.index = (rows + positions).view(-1)
        self._views: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
        self._mask: torch.Tensor | None = None  # [n, 1, groups * q, length], added to the scores
        self._visible: torch.Tensor | None = None  # [n, q, length], True where a query may look
        if not self.fresh:
            # of each layer (keys, values), [n, kv_heads, length, dim]: views of the cache, made for all layers at once
            keys, values = pool.by_row[:, row : row + n, :length].permute(3, 0, 1, 4, 2, 5).unbind(0)
            self._views = tuple(zip(keys.unbind(0), values.unbind(0), strict=True))
            if q > 1 or min(starts) != max(starts):
                self._visible = torch.arange(length, device=positions.device) <= positions.unsqueeze(-1)

    def attend(self, layer: int, qkv: torch.Tensor, heads: int, scale: float) -> torch.Tensor:
        """qkv [n * q, heads + 2 * kv_heads, d] (queries and keys rotated) -> [n * q, heads * d]. Stores keys and values first."""
        n, length, kv_heads = self.n, self.q, self.pool.num_kv_heads
        groups, dim = heads // kv_heads, qkv.shape[-1]
        self.pool.layers[layer].index_copy_(0, self.index, qkv[:, heads:])
        if self.fresh:
            q, k, v = qkv.view(n, length, -1, dim).transpose(1, 2).split((heads, kv_heads, kv_heads), 1)
            if groups > 1:
                k = k.repeat_interleave(groups, dim=1)
                v = v.repeat_interleave(groups, dim=1)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
            return out.transpose(1, 2).reshape(n * length, heads * dim)
        # Grouped heads become extra queries of their KV head: keys are never repeated.
        queries = qkv[:, :heads].view(n, length, kv_heads, groups, dim)
        grouped = (
            queries.squeeze(1)
            if length == 1
            else queries.permute(0, 2, 3, 1, 4).reshape(n, kv_heads, -1, dim)
        )
        if self._mask is None and self._visible is not None:
            zero = torch.zeros(self._visible.shape, dtype=qkv.dtype, device=qkv.device)
            mask = zero.masked_fill_(~self._visible, float("-inf")).unsqueeze(1)
            self._mask = mask.expand(-1, groups, -1, -1).reshape(n, 1, groups * length, -1)
        keys, values = self._views[layer]
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self._mask, scale=scale)
        if length == 1:
            return out.reshape(n, heads * dim)
        return (
            out.view(n, kv_heads, groups, length, dim).permute(0, 3, 1, 2, 4).reshape(n * length, heads * dim)
        )
