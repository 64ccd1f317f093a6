"""The head's loss: soft cross-entropy on loss-bearing rows only, in chunks, its gradient made in the same pass.

No [rows, draft_vocab] tensor in fp32 is ever kept: a chunk's logits are turned into their own gradient in place, which is
multiplied out at once into the gradients of the hidden rows and (in fp32) of the head. Knows rows and matrices only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k2tui.eagle3 import kernels

CHUNK_ROWS = 8192


@dataclass(frozen=True)
class Teacher:
    """The target's word on U positions, over the draft vocabulary.

    logits [U, draft_vocab]; lse [U] fp32 (log-sum-exp over the draft vocabulary); best [U] int64, the draft id of the
    maximum; known [U] bool: the full-vocabulary maximum is in the draft vocabulary. lse_full [U] fp32, over the whole
    vocabulary, when asked for (acceptance needs it).
    """

    logits: Tensor
    lse: Tensor
    best: Tensor
    known: Tensor
    lse_full: Tensor | None = None


class TargetHead:
    """The target's lm_head, its rows split into those of the draft vocabulary and the others, in compute dtype.

    weight [vocab, H]; ids [draft_vocab] int64. norm: the target's final norm, for states saved before it.
    """

    def __init__(self, weight: Tensor, ids: Tensor) -> None:
        self.inside = weight[ids].contiguous()
        mask = torch.ones(weight.shape[0], dtype=torch.bool, device=weight.device)
        mask[ids] = False
        self.outside = weight[mask].contiguous()

    @torch.no_grad()
    def teach(self, last: Tensor, *, full: bool = False, chunk: int = 4096) -> Teacher:
        """Teacher rows of last [U, H] (after the target's final norm)."""
        count, vocab = last.shape[0], self.inside.shape[0]
        logits = torch.empty(count, vocab, dtype=last.dtype, device=last.device)
        lse = torch.empty(count, dtype=torch.float32, device=last.device)
        best = torch.empty(count, dtype=torch.int64, device=last.device)
        known = torch.ones(count, dtype=torch.bool, device=last.device)
        lse_full = torch.empty_like(lse) if full else None
        for start in range(0, count, chunk):
            rows = slice(start, min(start + chunk, count))
            part = logits[rows]
            torch.mm(last[rows], self.inside.t(), out=part)
            lse[rows], top, best[rows] = _stats(part)
            if self.outside.shape[0]:
                other = last[rows] @ self.outside.t()
                if lse_full is None:
                    known[rows] = top >= other.amax(-1).float()
                else:
                    other_lse, other_top, _ = _stats(other)
                    known[rows] = top >= other_top
                    lse_full[rows] = torch.logaddexp(lse[rows], other_lse)
            elif lse_full is not None:
                lse_full[rows] = lse[rows]
        return Teacher(logits, lse, best, known, lse_full)


def _stats(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if x.is_cuda and kernels.available():
        return kernels.row_stats(x)
    wide = x.float()
    top, arg = wide.max(-1)
    return wide.logsumexp(-1), top, arg


def _plain_loss(
    logits: Tensor, teacher: Tensor, trow: Tensor, tlse: Tensor, weight: Tensor, *, grad: bool
) -> tuple[Tensor, Tensor]:
    x = logits.float()
    p = (teacher[trow].float() - tlse[trow, None]).exp()
    lse = x.logsumexp(-1)
    loss = lse * p.sum(-1) - (p * x).sum(-1)
    arg = logits.argmax(-1)
    if grad:
        logits.copy_(((x - lse[:, None]).exp() - p) * weight[:, None])
    return loss, arg


def _weight_grad(slope: Tensor, rows: Tensor, into: Tensor) -> None:
    """into [V, H] fp32 += slope [M, V]^T @ rows [M, H]."""
    if slope.is_cuda and slope.dtype != torch.float32:
        into.add_(torch.mm(slope.t(), rows, out_dtype=torch.float32))
    elif slope.dtype == torch.float32:
        into.addmm_(slope.t(), rows)
    else:
        into.add_(slope.t() @ rows)


class HeadLoss(torch.autograd.Function):
    """Weighted sum of soft cross-entropies.

    apply(rows [M, H], head [V, H], teacher, teacher_row [M] int64, weight [M] fp32, chunk) ->
    (sum_m weight_m * CE_m, CE [M] fp32, argmax [M]). Only the sum carries a gradient. head may be fp32 while rows are bf16:
    the product is then in bf16 and the head's gradient stays fp32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        head: Tensor,
        teacher: Teacher,
        teacher_row: Tensor,
        weight: Tensor,
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wants = any(ctx.needs_input_grad[:2])
        cast = head.to(rows.dtype)
        count = rows.shape[0]
        losses = torch.empty(count, dtype=torch.float32, device=rows.device)
        best = torch.empty(count, dtype=torch.int64, device=rows.device)
        d_rows = torch.empty_like(rows) if wants else None
        d_head = torch.zeros(head.shape, dtype=torch.float32, device=rows.device) if wants else None
        fused = rows.is_cuda and kernels.available()
        one = kernels.soft_loss if fused else _plain_loss
        for start in range(0, count, chunk):
            at = slice(start, min(start + chunk, count))
            part = rows[at]
            logits = part @ cast.t()
            losses[at], best[at] = one(
                logits, teacher.logits, teacher_row[at], teacher.lse, weight[at], grad=wants
            )
            if d_rows is not None and d_head is not None:
                torch.mm(logits, cast, out=d_rows[at])
                _weight_grad(logits, part, d_head)
        ctx.save_for_backward(d_rows, d_head)
        ctx.dtypes = (rows.dtype, head.dtype)
        ctx.mark_non_differentiable(losses, best)
        # rows of weight 0 stay out even when their own loss is not finite
        total = torch.where(weight != 0, losses * weight, 0.0).sum()
        return total, losses, best

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        d_rows, d_head = ctx.saved_tensors
        scale = grads[0]
        return (d_rows * scale).to(ctx.dtypes[0]), (d_head * scale).to(ctx.dtypes[1]), None, None, None, None
