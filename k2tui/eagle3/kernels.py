# pyright: reportOptionalMemberAccess=false, reportInvalidTypeForm=false, reportMissingImports=false
"""Triton kernels for the two places where plain torch moves too many bytes: the diagonal merge and the head's loss.

Importing this file needs no Triton; `available()` says whether the kernels can run. Each has a plain-torch twin in the room
that calls it, and must equal it.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU wheels of torch come without it
    triton = None
    tl = None


def available() -> bool:
    """True when the kernels can run here. K2TUI_NO_TRITON=1 turns them off."""
    if triton is None or os.environ.get("K2TUI_NO_TRITON") == "1":
        return False
    return torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"


def _jit(fn: Any) -> Any:
    return triton.jit(fn) if triton is not None else fn


@_jit
def _merge_fwd(
    Q, A0, L, OUT, LOUT, K, V, scale, rows, heads, group, columns,
    D: tl.constexpr, DV: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    # one program: BT rows of one key head, all its query heads
    row = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    head = tl.program_id(1)
    d = tl.arange(0, BD)
    e = tl.arange(0, BV)
    ok = row < rows
    mk = ok[:, None] & (d < D)[None, :]
    mv = ok[:, None] & (e < DV)[None, :]
    kat = (row * heads + head)[:, None]
    total = tl.full([], 1, tl.int64) * rows * heads
    for g in range(group):
        at = row * (heads * group) + head * group + g
        q = tl.load(Q + at[:, None] * D + d[None, :], mask=mk, other=0.0).to(tl.float32) * scale
        acc = tl.load(A0 + at[:, None] * DV + e[None, :], mask=mv, other=0.0).to(tl.float32)
        m = tl.load(L + at, mask=ok, other=0.0)
        z = tl.full([BT], 1.0, tl.float32)
        for i in range(columns):
            k = tl.load(K + (i * total + kat) * D + d[None, :], mask=mk, other=0.0).to(tl.float32)
            v = tl.load(V + (i * total + kat) * DV + e[None, :], mask=mv, other=0.0).to(tl.float32)
            s = tl.sum(q * k, 1)
            top = tl.maximum(m, s)
            keep = tl.exp(m - top)
            new = tl.exp(s - top)
            acc = acc * keep[:, None] + v * new[:, None]
            z = z * keep + new
            m = top
        tl.store(OUT + at[:, None] * DV + e[None, :], (acc / z[:, None]).to(OUT.dtype.element_ty), mask=mv)
        tl.store(LOUT + at, m + tl.log(z), mask=ok)


@_jit
def _merge_bwd(
    Q, A0, L, DO, DQIN, DQOUT, K, V, DK, DVV, scale, rows, heads, group, columns,
    D: tl.constexpr, DV: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    # Twice over the same small tiles: once by column (its gradients sum over the group of query heads), once by query head
    # (dQ sums over the columns); the second pass finds its tiles in the caches.
    row = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    head = tl.program_id(1)
    d = tl.arange(0, BD)
    e = tl.arange(0, BV)
    ok = row < rows
    mk = ok[:, None] & (d < D)[None, :]
    mv = ok[:, None] & (e < DV)[None, :]
    kat = (row * heads + head)[:, None]
    total = tl.full([], 1, tl.int64) * rows * heads
    for i in range(columns):
        k = tl.load(K + (i * total + kat) * D + d[None, :], mask=mk, other=0.0).to(tl.float32)
        v = tl.load(V + (i * total + kat) * DV + e[None, :], mask=mv, other=0.0).to(tl.float32)
        dk = tl.zeros([BT, BD], tl.float32)
        dv = tl.zeros([BT, BV], tl.float32)
        for g in range(group):
            at = row * (heads * group) + head * group + g
            q = tl.load(Q + at[:, None] * D + d[None, :], mask=mk, other=0.0).to(tl.float32)
            o = tl.load(A0 + at[:, None] * DV + e[None, :], mask=mv, other=0.0).to(tl.float32)
            do = tl.load(DO + at[:, None] * DV + e[None, :], mask=mv, other=0.0).to(tl.float32)
            lse = tl.load(L + at, mask=ok, other=0.0)
            w = tl.exp(tl.sum(q * k, 1) * scale - lse)
            slope = w * (tl.sum(do * v, 1) - tl.sum(do * o, 1)) * scale
            dk += slope[:, None] * q
            dv += w[:, None] * do
        tl.store(DK + (i * total + kat) * D + d[None, :], dk.to(DK.dtype.element_ty), mask=mk)
        tl.store(DVV + (i * total + kat) * DV + e[None, :], dv.to(DVV.dtype.element_ty), mask=mv)
    for g in range(group):
        at = row * (heads * group) + head * group + g
        q = tl.load(Q + at[:, None] * D + d[None, :], mask=mk, other=0.0).to(tl.float32)
        o = tl.load(A0 + at[:, None] * DV + e[None, :], mask=mv, other=0.0).to(tl.float32)
        do = tl.load(DO + at[:, None] * DV + e[None, :], mask=mv, other=0.0).to(tl.float32)
        lse = tl.load(L + at, mask=ok, other=0.0)
        dq = tl.load(DQIN + at[:, None] * D + d[None, :], mask=mk, other=0.0).to(tl.float32)
        delta = tl.sum(do * o, 1)
        for i in range(columns):
            k = tl.load(K + (i * total + kat) * D + d[None, :], mask=mk, other=0.0).to(tl.float32)
            v = tl.load(V + (i * total + kat) * DV + e[None, :], mask=mv, other=0.0).to(tl.float32)
            w = tl.exp(tl.sum(q * k, 1) * scale - lse)
            slope = w * (tl.sum(do * v, 1) - delta) * scale
            dq += slope[:, None] * k
        tl.store(DQOUT + at[:, None] * D + d[None, :], dq.to(DQOUT.dtype.element_ty), mask=mk)


def merge_forward(
    q: Tensor, out: Tensor, lse: Tensor, keys: Tensor, values: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Fold diagonal columns (keys [C, rows, kv_heads, d], values [C, rows, kv_heads, dv], contiguous) into out
    [rows, heads, dv] and lse [rows, heads] fp32; returns new ones."""
    columns, rows, heads, d = keys.shape
    dv = values.shape[3]
    q, out, lse = q.contiguous(), out.contiguous(), lse.contiguous()
    merged, total = torch.empty_like(out), torch.empty_like(lse)
    _merge_fwd[(triton.cdiv(rows, 16), heads)](
        q, out, lse, merged, total, keys, values, scale, rows, heads, q.shape[1] // heads, columns,
        D=d, DV=dv, BT=16, BD=triton.next_power_of_2(d), BV=triton.next_power_of_2(dv), num_warps=4,
    )  # fmt: skip
    return merged, total


def merge_backward(
    grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, dq: Tensor, keys: Tensor, values: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq with the diagonal part added, and the gradients of the columns' keys and values."""
    columns, rows, heads, d = keys.shape
    dv = values.shape[3]
    q, out, lse, grad, dq = (x.contiguous() for x in (q, out, lse, grad, dq))
    dk, dval, total = torch.empty_like(keys), torch.empty_like(values), torch.empty_like(dq)
    _merge_bwd[(triton.cdiv(rows, 16), heads)](
        q, out, lse, grad, dq, total, keys, values, dk, dval, scale, rows, heads, q.shape[1] // heads, columns,
        D=d, DV=dv, BT=16, BD=triton.next_power_of_2(d), BV=triton.next_power_of_2(dv), num_warps=4,
    )  # fmt: skip
    return total, dk, dval


@_jit
def _row_stats(X, LSE, TOP, ARG, stride, cols: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    m = -float("inf")
    z = 0.0
    best = 0
    for start in range(0, cols, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(X + row * stride + at, mask=at < cols, other=-float("inf")).to(tl.float32)
        top = tl.max(x, 0)
        where = tl.argmax(x, 0) + start
        best = tl.where(top > m, where, best)
        new = tl.maximum(m, top)
        z = z * tl.exp(m - new) + tl.sum(tl.exp(x - new), 0)
        m = new
    tl.store(LSE + row, m + tl.log(z))
    tl.store(TOP + row, m)
    tl.store(ARG + row, best)


def row_stats(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log-sum-exp, maximum (fp32 [rows]) and its place (int32 [rows]) of x [rows, cols], in one pass."""
    rows, cols = x.shape
    lse = torch.empty(rows, dtype=torch.float32, device=x.device)
    top, arg = torch.empty_like(lse), torch.empty(rows, dtype=torch.int32, device=x.device)
    _row_stats[(rows,)](x, lse, top, arg, x.stride(0), cols, BLOCK=4096, num_warps=8)
    return lse, top, arg


@_jit
def _loss_kernel(
    X, T, TROW, TLSE, W, LOSS, ARG, x_stride, t_stride, cols: tl.constexpr, BLOCK: tl.constexpr, GRAD: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    trow = tl.load(TROW + row).to(tl.int64)
    tlse = tl.load(TLSE + trow)
    m = -float("inf")
    z = 0.0
    dot = 0.0
    mass = 0.0
    best = 0
    for start in range(0, cols, BLOCK):
        at = start + tl.arange(0, BLOCK)
        ok = at < cols
        x = tl.load(X + row * x_stride + at, mask=ok, other=-float("inf")).to(tl.float32)
        t = tl.load(T + trow * t_stride + at, mask=ok, other=-float("inf")).to(tl.float32)
        p = tl.exp(t - tlse)
        dot += tl.sum(tl.where(ok, p * x, 0.0), 0)
        mass += tl.sum(p, 0)
        top = tl.max(x, 0)
        where = tl.argmax(x, 0) + start
        best = tl.where(top > m, where, best)
        new = tl.maximum(m, top)
        z = z * tl.exp(m - new) + tl.sum(tl.exp(x - new), 0)
        m = new
    lse = m + tl.log(z)
    tl.store(LOSS + row, lse * mass - dot)
    tl.store(ARG + row, best)
    if GRAD:
        w = tl.load(W + row)
        for start in range(0, cols, BLOCK):
            at = start + tl.arange(0, BLOCK)
            ok = at < cols
            x = tl.load(X + row * x_stride + at, mask=ok, other=-float("inf")).to(tl.float32)
            t = tl.load(T + trow * t_stride + at, mask=ok, other=-float("inf")).to(tl.float32)
            g = (tl.exp(x - lse) - tl.exp(t - tlse)) * w
            tl.store(X + row * x_stride + at, g.to(X.dtype.element_ty), mask=ok)


def soft_loss(
    logits: Tensor, teacher: Tensor, teacher_row: Tensor, teacher_lse: Tensor, weight: Tensor, *, grad: bool
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of logits [M, V] with softmax(teacher[teacher_row]); loss [M] fp32 un-weighted, argmax [M] int32.

    grad: the logits are overwritten by weight * d loss / d logits.
    """
    rows, cols = logits.shape
    loss = torch.empty(rows, dtype=torch.float32, device=logits.device)
    arg = torch.empty(rows, dtype=torch.int32, device=logits.device)
    _loss_kernel[(rows,)](
        logits, teacher, teacher_row, teacher_lse, weight, loss, arg, logits.stride(0), teacher.stride(0), cols,
        BLOCK=4096, GRAD=grad, num_warps=8,
    )  # fmt: skip
    return loss, arg
