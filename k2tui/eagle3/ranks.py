"""More than one process: who am I, sums over all, gradients averaged or sharded. Knows torch.distributed, no model.

Started by torchrun (RANK, WORLD_SIZE, LOCAL_RANK in the environment) or alone. Data-parallel gradients are summed once an
optimiser step, after the last micro-batch: the loss is already divided by the global denominators, so a sum is the answer.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Ranks:
    """rank, size: place among the processes. device: this process's. sharded: parameters are split over ranks (FSDP2)."""

    rank: int
    size: int
    device: torch.device
    sharded: bool = False

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @staticmethod
    def start(device: str = "auto", *, sharded: bool = False, timeout_s: float = 600.0) -> Ranks:
        """Join the process group when torchrun started us; device "auto" = this rank's GPU, else the CPU."""
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        place = torch.device(device, local) if device == "cuda" else torch.device(device)
        if place.type == "cuda":
            torch.cuda.set_device(place)
        if size > 1 or sharded:
            if size == 1:  # FSDP2 alone still wants a group: one of its own, on a free port
                os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
                os.environ.setdefault("MASTER_PORT", "0")
            if not dist.is_initialized():
                backend = "nccl" if place.type == "cuda" else "gloo"
                dist.init_process_group(
                    backend, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
                )
        return Ranks(rank, size, place, sharded)

    def stop(self) -> None:
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()

    def shard(self, module: nn.Module, dtype: torch.dtype) -> None:
        """FSDP2: split the parameters, compute in dtype, reduce gradients in fp32, as sums."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(self.device.type, (self.size,))
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
            ),
        )

    def sum_(self, value: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Sum the gradients of plain (not sharded) parameters over all ranks, a few large messages at a time."""
        if self.size == 1 or self.sharded:
            return
        grads: list[Tensor] = []
        for p in parameters:
            if p.grad is None:  # a rank without a pack in this step takes part with zeros
                p.grad = torch.zeros_like(p)
            grads.append(p.grad)
        start = 0
        while start < len(grads):
            end, count = start, 0
            while end < len(grads) and (count == 0 or count + grads[end].numel() <= 64 * 2**20):
                count += grads[end].numel()
                end += 1
            flat = torch.cat([g.flatten() for g in grads[start:end]])
            dist.all_reduce(flat)
            at = 0
            for g in grads[start:end]:
                g.copy_(flat[at : at + g.numel()].view_as(g))
                at += g.numel()
            start = end

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()

    def tell(self, value: float) -> float:
        """Rank 0's number, on every rank."""
        if self.size == 1:
            return value
        box = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.broadcast(box, 0)
        return float(box)
