"""The pointwise parts under torch.compile: how often they are compiled, and that they stay what they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from k2tui.eagle3 import ops


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounter]:
    """Counts compilations; the graphs themselves run as they are (no compiler is needed)."""
    found = CompileCounter()
    real = torch.compile

    def compile_counted(fn: Any, **given: Any) -> Any:
        return real(fn, backend=found, **given)

    monkeypatch.setattr(torch, "compile", compile_counted)
    monkeypatch.setattr(ops, "_compiled", {})
    torch._dynamo.reset()
    ops.set_compile(True)
    yield found
    ops.set_compile(False)
    torch._dynamo.reset()


def test_one_compilation_serves_any_number_of_rows_in_training_and_judging(counter: CompileCounter) -> None:
    norm = torch.nn.Parameter(torch.rand(16))
    gate_up, down = torch.nn.Parameter(torch.randn(48, 16)), torch.nn.Parameter(torch.randn(16, 24))
    for learns in (False, True):  # a run judges the untrained draft first
        for rows in (7, 12, 31):
            x = torch.randn(rows, 16, requires_grad=learns)
            with torch.set_grad_enabled(learns):
                ops.set_compile(True)
                found = ops.MlpBlock.apply(x, norm, gate_up, down, 1e-6, False)
                got = torch.autograd.grad(found.square().sum(), (x, norm)) if learns else ()
                ops.set_compile(False)
                plain = ops.MlpBlock.apply(x, norm, gate_up, down, 1e-6, False)
                want = torch.autograd.grad(plain.square().sum(), (x, norm)) if learns else ()
            assert torch.equal(found, plain)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    # the norm and the SwiGLU, forward and backward
    assert counter.frame_count == 4


def test_another_width_is_one_more_compilation_and_stays_fixed(counter: CompileCounter) -> None:
    for width in (16, 24, 32):
        for rows in (5, 9):
            ops.norm_fwd(torch.randn(rows, width), torch.ones(width), 1e-6)
    assert counter.frame_count == 3
