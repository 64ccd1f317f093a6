"""One optimiser step: micro-batches in, new weights and a report out. Knows no files, no epochs, no data order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from k2tui.eagle3.batch import Pack
from k2tui.eagle3.draft import Eagle3Draft
from k2tui.eagle3.loss import TargetHead
from k2tui.eagle3.ranks import Ranks
from k2tui.eagle3.ttt import TttOptions, TttResult, executed_flops, ttt_loss


@dataclass(frozen=True)
class OptimOptions:
    """AdamW. learning_rate: the peak. warmup_ratio: of total steps, linear. schedule: "cosine" (to min_ratio of the peak) or
    "constant". clip: largest global gradient norm."""

    learning_rate: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 0.5
    warmup_ratio: float = 0.015
    schedule: str = "cosine"
    min_ratio: float = 0.0

    def rate(self, step: int, total: int) -> float:
        """Learning rate of step 0, 1, ... of `total`."""
        warm = max(1, round(total * self.warmup_ratio)) if self.warmup_ratio > 0 else 0
        if step < warm:
            return self.learning_rate * (step + 1) / warm
        if self.schedule == "constant" or total <= warm:
            return self.learning_rate
        part = min(1.0, (step - warm) / max(1, total - warm))
        return self.learning_rate * (
            self.min_ratio + (1 - self.min_ratio) * 0.5 * (1 + math.cos(math.pi * part))
        )


@dataclass(frozen=True)
class StepReport:
    """What one step saw, over all ranks. losses[k]: mean CE of step k over its denominator; accuracy[k]: right guesses over
    loss-bearing positions (guesses outside the draft vocabulary count as wrong); flops: of this rank's matrix products."""

    loss: float
    losses: tuple[float, ...]
    accuracy: tuple[float, ...]
    grad_norm: float
    learning_rate: float
    tokens: int
    loss_tokens: int
    flops: float
    is_finite: bool


class TttModule(nn.Module):
    """The draft wrapped so that FSDP2's hooks see one forward: module(pack, step_weights) -> (loss, TttResult).

    The loss stands beside the result that holds it, since FSDP2 of torch 2.11 looks for what to hook in tuples, not in
    dataclasses: without that hook no gradient reaches the sharded parameters."""

    def __init__(self, draft: Eagle3Draft, head: TargetHead, options: TttOptions) -> None:
        super().__init__()
        self.draft = draft
        self.head = head
        self.options = options

    def forward(self, pack: Pack, step_weights: list[float], full: bool = False) -> tuple[Tensor, TttResult]:
        result = ttt_loss(self.draft, self.head, pack, step_weights, self.options, full=full)
        return result.loss, result


class _ScaleGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss: Tensor, factor: float) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.factor = factor
        return loss.clone()

    @staticmethod
    def backward(ctx, *grads: Tensor):  # type: ignore[no-untyped-def]
        return grads[0] * ctx.factor, None


class Stepper:
    """Owns the optimiser. Parameters stay fp32 (the masters); the compute dtype is the pack's, cast at every forward."""

    def __init__(self, module: TttModule, optim: OptimOptions, ranks: Ranks) -> None:
        self.module = module
        self.optim = optim
        self.ranks = ranks
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        fused = ranks.device.type == "cuda"
        self.adam = torch.optim.AdamW(
            self.parameters,
            lr=optim.learning_rate,
            betas=optim.betas,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            fused=fused,
            foreach=False if not fused else None,
        )

    def run(
        self,
        packs: Iterable[Pack],
        denominators: list[float],
        step: int,
        total: int,
        on_pack: Callable[[Pack], None] | None = None,
    ) -> StepReport:
        """One step over this rank's packs. denominators[k]: global number of step k's positions (0 = step bears none).

        A step whose loss or gradient is not finite changes no weight; the report says so.
        """
        k_total = self.module.options.ttt_length
        weights = [self.module.options.decay**k / d if d else 0.0 for k, d in enumerate(denominators)]
        device = self.ranks.device
        sums = torch.zeros(3 * k_total + 3, dtype=torch.float64, device=device)
        flops = 0.0
        for pack in packs:
            loss, result = self.module(pack, weights)
            if self.ranks.sharded:  # FSDP2 averages over ranks; we want the sum
                loss = _ScaleGrad.apply(loss, float(self.ranks.size))
            loss.backward()
            losses, right = result.by_step(pack.counts)
            sums[:k_total] += losses
            sums[k_total : 2 * k_total] += right
            host = torch.tensor([*pack.counts, pack.num_tokens, pack.num_loss_tokens], dtype=torch.float64)
            sums[2 * k_total : 3 * k_total + 2] += host.to(device, non_blocking=True)
            sums[-1] += result.loss.detach()
            flops += executed_flops(self.module.draft.config, pack, k_total)
            if on_pack is not None:
                on_pack(pack)
        self.ranks.sum_(sums)
        self.ranks.sum_gradients(self.parameters)
        rate = self.optim.rate(step, total)
        norm = nn.utils.clip_grad_norm_([p for p in self.parameters if p.grad is not None], self.optim.clip)
        if hasattr(norm, "full_tensor"):
            norm = norm.full_tensor()  # type: ignore[union-attr]
        values = torch.cat((sums, norm.reshape(1).to(sums.dtype))).tolist()
        finite = math.isfinite(values[-1]) and math.isfinite(values[-2])
        if finite:
            for group in self.adam.param_groups:
                group["lr"] = rate
            self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        counts = values[2 * k_total : 3 * k_total]
        return StepReport(
            loss=values[-2],
            losses=tuple(x / d if d else 0.0 for x, d in zip(values[:k_total], denominators, strict=True)),
            accuracy=tuple(
                x / n if n else 0.0 for x, n in zip(values[k_total : 2 * k_total], counts, strict=True)
            ),
            grad_norm=values[-1],
            learning_rate=rate,
            tokens=int(values[3 * k_total]),
            loss_tokens=int(values[3 * k_total + 1]),
            flops=flops,
            is_finite=finite,
        )
