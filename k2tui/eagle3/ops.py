"""Small differentiable operations that save their inputs and nothing else, with bodies that torch.compile may fuse.

Each is exact; memory is what they are for: plain autograd would keep several fp32 copies of every row.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_compiled: dict[str, Callable[..., Any]] = {}
_compile = False


def set_compile(on: bool) -> None:
    """Compile the pointwise bodies (GPU) or run them as they are."""
    global _compile
    _compile = on
    if on:  # a body is compiled for each width and layout that it meets; past the limit it would silently run uncompiled
        settings = torch._dynamo.config
        if hasattr(settings, "recompile_limit"):  # older releases call it otherwise
            settings.recompile_limit = max(64, settings.recompile_limit)


def _rows(x: Any) -> Any:
    """A matrix as the compiler shall see it: any number of rows, every width fixed, the same in evaluation as in training."""
    if not isinstance(x, Tensor):
        return x
    x = x.detach()  # whether a gradient is asked for would be one more thing to compile for
    if x.dim() > 1:
        torch._dynamo.maybe_mark_dynamic(x, 0)
    return x


def _body(fn: Callable[..., Any]) -> Callable[..., Any]:
    name = fn.__name__

    def call(*args: Any) -> Any:
        if not _compile:
            return fn(*args)
        if name not in _compiled:
            _compiled[name] = torch.compile(fn, dynamic=False)  # what `_rows` marks is symbolic all the same
        return _compiled[name](*map(_rows, args))

    return call


def _norm_fwd(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def _norm_bwd(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide, g = x.float(), grad.float()
    r = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    unit = wide * r
    gw = g * weight.float()
    dx = r * (gw - unit * (gw * unit).mean(-1, keepdim=True))
    return dx.to(x.dtype), (g * unit).sum(0)


def _swiglu_fwd(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    wide = gate.float()
    return (wide * torch.sigmoid(wide) * up.float()).to(both.dtype)


def _swiglu_both(grad: Tensor, both: Tensor) -> tuple[Tensor, Tensor]:
    """The SwiGLU's output again, and the gradient of its input: one pass over the largest rows there are."""
    gate, up = (x.float() for x in both.chunk(2, -1))
    g = grad.float()
    s = torch.sigmoid(gate)
    slope = torch.cat((g * up * s * (1 + gate * (1 - s)), g * gate * s), -1)
    return (gate * s * up).to(both.dtype), slope.to(both.dtype)


def _rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    c, s = cos[:, None, :], sin[:, None, :]
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * c - second * s, second * c + first * s), -1).to(x.dtype)


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    c, s = cos[:, None, :], sin[:, None, :]
    wide = x.float()
    first, second = wide[..., 0::2], wide[..., 1::2]
    return torch.stack((first * c - second * s, second * c + first * s), -1).flatten(-2).to(x.dtype)


norm_fwd, norm_bwd = _body(_norm_fwd), _body(_norm_bwd)
swiglu_fwd, swiglu_both = _body(_swiglu_fwd), _body(_swiglu_both)
rotate_half, rotate_pairs = _body(_rotate_half), _body(_rotate_pairs)


class RmsNorm(torch.autograd.Function):
    """apply(x [rows, H], weight [H], eps)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return norm_fwd(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dx, dw = norm_bwd(grads[0], x, weight, ctx.eps)
        return dx, dw.to(weight.dtype), None


class Rotary(torch.autograd.Function):
    """apply(x [rows, heads, dim], cos, sin [rows, dim/2] fp32, interleaved)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return (rotate_pairs if interleaved else rotate_half)(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return (rotate_pairs if ctx.interleaved else rotate_half)(grads[0], cos, -sin), None, None, None


class GatherUnique(torch.autograd.Function):
    """apply(x [N, ...], index [A]): x[index]; the index names each row at most once, so the backward is a copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = x.shape[0]
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (index,) = ctx.saved_tensors
        g = grads[0]
        return g.new_zeros(ctx.rows, *g.shape[1:]).index_copy_(0, index, g), None


class MlpBlock(torch.autograd.Function):
    """apply(r [A, H], norm [H], gate_up [2I, H], down [H, I], eps, recompute): r + SwiGLU(RMSNorm(r)).

    Saves r and the gate-up product (only r when `recompute`); the norm and the SwiGLU are made again in the backward.
    """

    @staticmethod
    def forward(
        ctx: Any, r: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor, eps: float, recompute: bool
    ) -> Tensor:
        both = norm_fwd(r, norm, eps) @ gate_up.t()
        ctx.save_for_backward(r, norm, gate_up, down, None if recompute else both)
        ctx.eps = eps
        return torch.addmm(r, swiglu_fwd(both), down.t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        r, norm, gate_up, down, both = ctx.saved_tensors
        g = grads[0].contiguous()
        normed = norm_fwd(r, norm, ctx.eps)
        if both is None:
            both = normed @ gate_up.t()
        act, d_both = swiglu_both(g @ down, both)
        d_down = g.t() @ act
        del act, both
        d_gate_up = d_both.t() @ normed
        d_normed = d_both @ gate_up
        dr, d_norm = norm_bwd(d_normed, r, norm, ctx.eps)
        return dr + g, d_norm.to(norm.dtype), d_gate_up, d_down, None, None


def fit_threads(hidden_size: int) -> None:
    """One thread for a narrow target on a CPU: its products gain nothing from a second one, and lose much where other work runs.
    OMP_NUM_THREADS, when it is set, decides instead."""
    if hidden_size <= 512 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
