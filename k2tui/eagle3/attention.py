"""Attention of the training-time test: one causal call against step-0 keys, merged with the diagonal terms.

A query of step k sees the step-0 keys j <= t of its document and, of each later step 1..k, only its own column. The softmax
runs over both; `log-sum-exp` merging makes that exact. The backward of the causal part is the flash backward given the
*merged* output and log-sum-exp: P = exp(S - L) and D = rowsum(dO*O) are then those of the whole softmax.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k2tui.eagle3 import kernels


@dataclass(frozen=True)
class Spans:
    """Documents of a pack. Queries of a document are a run of consecutive positions that ends where its keys end
    (bottom-right causal). q_starts, k_starts: [docs + 1] host lists and int32 device tensors of the same numbers."""

    q_starts: tuple[int, ...]
    k_starts: tuple[int, ...]
    q_cu: Tensor
    k_cu: Tensor
    max_q: int
    max_k: int

    @staticmethod
    def of(q_lengths: list[int], k_lengths: list[int], device: torch.device) -> Spans:
        q = [0]
        k = [0]
        for a, b in zip(q_lengths, k_lengths, strict=True):
            q.append(q[-1] + a)
            k.append(k[-1] + b)
        as_tensor = [torch.tensor(x, dtype=torch.int32, device=device) for x in (q, k)]
        return Spans(
            tuple(q),
            tuple(k),
            as_tensor[0],
            as_tensor[1],
            max(q_lengths, default=0),
            max(k_lengths, default=0),
        )


def _doc_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """[queries, keys] bool, True where the key is hidden: query i sits at position keys - queries + i."""
    rows = torch.arange(keys - queries, keys, device=device)[:, None]
    return torch.arange(keys, device=device)[None] > rows


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float) -> tuple[Tensor, Tensor]:
    """Per document with plain matrix products (CPU, any dtype). Returns out [Q, heads, v] and lse [Q, heads] fp32."""
    group = q.shape[1] // k.shape[1]
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    for d in range(len(spans.q_starts) - 1):
        qs, ks = (
            slice(spans.q_starts[d], spans.q_starts[d + 1]),
            slice(spans.k_starts[d], spans.k_starts[d + 1]),
        )
        if qs.start == qs.stop:
            continue
        qd = q[qs].float().unflatten(1, (k.shape[1], group))
        logits = torch.einsum("qngd,knd->ngqk", qd, k[ks].float()) * scale
        logits.masked_fill_(_doc_mask(qs.stop - qs.start, ks.stop - ks.start, q.device), -math.inf)
        total = logits.logsumexp(-1)
        weights = (logits - total[..., None]).exp_()
        out[qs] = torch.einsum("ngqk,knd->qngd", weights, v[ks].float()).flatten(1, 2).to(q.dtype)
        lse[qs] = total.permute(2, 0, 1).flatten(1)
    return out, lse


def _plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spans: Spans, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for d in range(len(spans.q_starts) - 1):
        qs, ks = (
            slice(spans.q_starts[d], spans.q_starts[d + 1]),
            slice(spans.k_starts[d], spans.k_starts[d + 1]),
        )
        if qs.start == qs.stop:
            continue
        qd = q[qs].float().unflatten(1, (k.shape[1], group))
        kd, vd = k[ks].float(), v[ks].float()
        logits = torch.einsum("qngd,knd->ngqk", qd, kd) * scale
        logits.masked_fill_(_doc_mask(qs.stop - qs.start, ks.stop - ks.start, q.device), -math.inf)
        weights = (logits - lse[qs].unflatten(1, (k.shape[1], group)).permute(1, 2, 0)[..., None]).exp_()
        gd = grad[qs].float().unflatten(1, (k.shape[1], group))
        delta = (gd * out[qs].float().unflatten(1, (k.shape[1], group))).sum(-1).permute(1, 2, 0)
        dv[ks] = torch.einsum("ngqk,qngd->knd", weights, gd).to(v.dtype)
        slope = weights * (torch.einsum("qngd,knd->ngqk", gd, vd) - delta[..., None]) * scale
        dq[qs] = torch.einsum("ngqk,knd->qngd", slope, kd).flatten(1, 2).to(q.dtype)
        dk[ks] = torch.einsum("ngqk,qngd->knd", slope, qd).to(k.dtype)
    return dq, dk, dv


def _uses_flash(q: Tensor) -> bool:
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[2] <= 256


def causal_forward(
    q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float
) -> tuple[Tensor, Tensor, tuple[Any, Any]]:
    """Causal attention of packed documents. q [Q, heads, d], k [N, kv_heads, d], v [N, kv_heads, dv].

    Returns out [Q, heads, dv], lse [Q, heads] fp32 and what the flash backward wants back.
    """
    if not _uses_flash(q) or not q.shape[0]:
        out, lse = _plain_forward(q, k, v, spans, scale)
        return out, lse, (None, None)
    pad = q.shape[2] - v.shape[2]
    wide = torch.nn.functional.pad(v, (0, pad)) if pad else v
    res = torch.ops.aten._flash_attention_forward(
        q, k, wide, spans.q_cu, spans.k_cu, spans.max_q, spans.max_k, 0.0, True, False, scale=scale
    )
    out, lse, seed, offset = res[0], res[1], res[2], res[3]
    if lse.dim() == 3:  # [docs, heads, max_q]: releases that pad it
        index = torch.repeat_interleave(
            torch.arange(lse.shape[0], device=q.device),
            (spans.q_cu[1:] - spans.q_cu[:-1]).long(),
            output_size=q.shape[0],
        )
        within = torch.arange(q.shape[0], device=q.device) - spans.q_cu[:-1].long()[index]
        lse = lse[index, :, within]
    else:
        lse = lse.t()
    return (out[..., : v.shape[2]] if pad else out), lse, (seed, offset)


def causal_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    spans: Spans,
    scale: float,
    state: tuple[Any, Any],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v of the causal part, given the merged out and lse."""
    if not _uses_flash(q) or not q.shape[0]:
        return _plain_backward(grad, q, k, v, out, lse, spans, scale)
    pad = q.shape[2] - v.shape[2]
    if pad:
        v, out, grad = (torch.nn.functional.pad(x, (0, pad)) for x in (v, out, grad))
    docs = len(spans.q_starts) - 1
    if state[0] is not None and lse_is_padded():
        index = torch.repeat_interleave(
            torch.arange(docs, device=q.device),
            (spans.q_cu[1:] - spans.q_cu[:-1]).long(),
            output_size=q.shape[0],
        )
        within = torch.arange(q.shape[0], device=q.device) - spans.q_cu[:-1].long()[index]
        shaped = lse.new_full((docs, q.shape[1], spans.max_q), math.inf)
        shaped[index, :, within] = lse
    else:
        shaped = lse.t().contiguous()
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        grad.contiguous(),
        q,
        k,
        v,
        out,
        shaped,
        spans.q_cu,
        spans.k_cu,
        spans.max_q,
        spans.max_k,
        0.0,
        True,
        *state,
        scale=scale,
    )
    return dq, dk, (dv[..., : dv.shape[2] - pad] if pad else dv)


@functools.cache
def lse_is_padded() -> bool:
    """Whether this torch keeps the packed log-sum-exp as [docs, heads, max_q]. Asked once, with a tiny call."""
    x = torch.zeros(3, 1, 64, dtype=torch.bfloat16, device="cuda")
    cu = torch.tensor([0, 1, 3], dtype=torch.int32, device="cuda")
    return torch.ops.aten._flash_attention_forward(x, x, x, cu, cu, 2, 2, 0.0, True, False)[1].dim() == 3


class Columns:
    """Keys and values of the later steps, one block a step, in one buffer that every later attention call reads.

    The buffer is outside autograd: gradients flow through the tensors that `add` copied, handed to `TttAttention` beside it.
    A block is written once and never changed, so the backward of any step finds what its forward read.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.count = 0
        self.keys = torch.empty(0)
        self.values = torch.empty(0)

    @torch.no_grad()
    def add(self, k: Tensor, v: Tensor) -> None:
        """k [A, kv_heads, d], v [A, kv_heads, dv] of the next step."""
        if self.count == 0:
            self.keys = k.new_empty(self.steps, *k.shape)
            self.values = v.new_empty(self.steps, *v.shape)
        self.keys[self.count].copy_(k)
        self.values[self.count].copy_(v)
        self.count += 1


def _merge(
    q: Tensor, out: Tensor, lse: Tensor, keys: Tensor, values: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Fold the diagonal columns (keys, values [C, Q, kv_heads, .]) into (out, lse)."""
    if q.is_cuda and q.shape[0] and kernels.available():
        return kernels.merge_forward(q, out, lse, keys, values, scale)
    group = q.shape[1] // keys.shape[2]
    wide = q.float().unflatten(1, (keys.shape[2], group))
    scores = (wide[None] * keys.float()[:, :, :, None]).sum(-1).flatten(2) * scale
    total = torch.logsumexp(torch.cat((lse[None], scores)), 0)
    mixed = out.float() * (lse - total).exp()[..., None]
    for score, v in zip(scores, values, strict=True):
        mixed = mixed + (score - total).exp()[..., None] * v.float().repeat_interleave(group, 1)
    return mixed.to(q.dtype), total


def _merge_backward(
    grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, dq: Tensor, keys: Tensor, values: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Adds the diagonal part to dq; returns dq and the gradients of keys and values."""
    if q.is_cuda and q.shape[0] and kernels.available():
        return kernels.merge_backward(grad, q, out, lse, dq, keys, values, scale)
    heads = keys.shape[2]
    group = q.shape[1] // heads
    gw, qw = grad.float(), q.float()
    delta = (gw * out.float()).sum(-1)
    total = dq.float()
    dk, dv = torch.empty_like(keys), torch.empty_like(values)
    for i in range(keys.shape[0]):
        kw, vw = keys[i].float().repeat_interleave(group, 1), values[i].float().repeat_interleave(group, 1)
        weight = ((qw * kw).sum(-1) * scale - lse).exp()
        slope = weight * ((gw * vw).sum(-1) - delta) * scale
        total = total + slope[..., None] * kw
        dk[i] = (slope[..., None] * qw).unflatten(1, (heads, group)).sum(2)
        dv[i] = (weight[..., None] * gw).unflatten(1, (heads, group)).sum(2)
    return total.to(dq.dtype), dk, dv


class TttAttention(torch.autograd.Function):
    """out [Q, heads, dv] of queries q [Q, heads, d] over packed step-0 keys and the diagonal columns of later steps.

    apply(q, k0, v0, spans, scale, rows, columns, *keys_and_values). k0 [N, kv_heads, d]; columns: None at step 0, else the
    buffer whose first blocks are the keys_and_values (all keys, then all values), each [A, kv_heads, .].
    rows: None when q's rows are the spans' query rows; else [A] int64, where q's A rows sit among them (the rest of the
    query rows get zeros and are thrown away: cheaper than splitting documents at every turn).
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k0: Tensor,
        v0: Tensor,
        spans: Spans,
        scale: float,
        rows: Tensor | None,
        columns: Columns | None,
        *diagonal: Tensor,
    ) -> Tensor:
        half = len(diagonal) // 2
        full = q if rows is None else q.new_zeros(spans.q_starts[-1], *q.shape[1:]).index_copy_(0, rows, q)
        out, lse, state = causal_forward(full, k0, v0, spans, scale)
        if rows is not None:
            out, lse = out[rows], lse[rows]
        if half and columns is not None:
            out, lse = _merge(q, out, lse, columns.keys[:half], columns.values[:half], scale)
        ctx.save_for_backward(q, k0, v0, out, lse)
        ctx.extra = (spans, scale, rows, state, half, columns)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k0, v0, out, lse = ctx.saved_tensors
        spans, scale, rows, state, half, columns = ctx.extra
        grad = grads[0].contiguous()
        if rows is None:
            dq, dk, dv = causal_backward(grad, q, k0, v0, out, lse, spans, scale, state)
        else:
            count = spans.q_starts[-1]

            def spread(x: Tensor, fill: float = 0.0) -> Tensor:
                return x.new_full((count, *x.shape[1:]), fill).index_copy_(0, rows, x)

            # rows without a query: a zero gradient and a finite lse make their part exactly zero
            dq, dk, dv = causal_backward(
                spread(grad), spread(q), k0, v0, spread(out), spread(lse, 100.0), spans, scale, state
            )
            dq = dq[rows]
        if not half:
            return dq, dk, dv, None, None, None, None
        dq, dks, dvs = _merge_backward(
            grad, q, out, lse, dq, columns.keys[:half], columns.values[:half], scale
        )
        return (dq, dk, dv, None, None, None, None, *dks, *dvs)
