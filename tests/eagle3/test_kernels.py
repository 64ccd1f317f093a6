"""The Triton kernels equal their plain twins. Runs on a GPU, or anywhere Triton is installed with TRITON_INTERPRET=1."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

from k2tui.eagle3 import attention, kernels, loss

ON_GPU = torch.cuda.is_available()
if not ON_GPU and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)
DEVICE = torch.device("cuda" if ON_GPU else "cpu")


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE)


def both(monkeypatch: pytest.MonkeyPatch, plain, fast):
    monkeypatch.setenv("K2TUI_NO_TRITON", "1")
    want = plain()
    monkeypatch.delenv("K2TUI_NO_TRITON")
    return want, fast()


@pytest.mark.parametrize(
    ("heads", "kv", "d", "dv", "columns"), [(4, 2, 16, 16, 1), (4, 4, 24, 16, 3), (8, 1, 32, 32, 7)]
)
def test_merge(heads: int, kv: int, d: int, dv: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    rows = 37
    q, out, lse, grad, dq = (
        rand(rows, heads, d),
        rand(rows, heads, dv),
        rand(rows, heads),
        rand(rows, heads, dv),
        rand(rows, heads, d),
    )
    keys, values = rand(columns, rows, kv, d), rand(columns, rows, kv, dv)
    want, got = both(
        monkeypatch, lambda: attention._merge(q.cpu(), out.cpu(), lse.cpu(), keys.cpu(), values.cpu(), 0.3),
        lambda: kernels.merge_forward(q, out, lse, keys, values, 0.3),
    )  # fmt: skip
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(a, b.cpu(), rtol=1e-5, atol=1e-5)
    merged, total = got
    want, got = both(
        monkeypatch,
        lambda: attention._merge_backward(grad.cpu(), q.cpu(), merged.cpu(), total.cpu(), dq.cpu(), keys.cpu(), values.cpu(), 0.3),
        lambda: kernels.merge_backward(grad, q, merged, total, dq, keys, values, 0.3),
    )  # fmt: skip
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(a, b.cpu(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cols", [50, 5000])
def test_loss_and_stats(cols: int) -> None:
    torch.manual_seed(1)
    teacher, logits = rand(9, cols) * 3, rand(21, cols) * 3
    trow = torch.randint(9, (21,), device=DEVICE)
    weight = torch.rand(21, device=DEVICE)
    lse, top, arg = kernels.row_stats(teacher)
    torch.testing.assert_close(lse, teacher.logsumexp(-1), rtol=1e-5, atol=1e-5)
    assert torch.equal(top, teacher.amax(-1)) and torch.equal(arg.long(), teacher.argmax(-1))
    slow, fast = logits.clone(), logits.clone()
    want = loss._plain_loss(slow, teacher, trow, lse, weight, grad=True)
    got = kernels.soft_loss(fast, teacher, trow, lse, weight, grad=True)
    torch.testing.assert_close(want[0], got[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(want[1], got[1].long())
    torch.testing.assert_close(slow, fast, rtol=1e-5, atol=1e-6)


def buffer(columns: list[torch.Tensor]) -> attention.Columns:
    half = len(columns) // 2
    made = attention.Columns(half)
    for i in range(half):
        made.add(columns[i], columns[half + i])
    return made


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_flash_equals_plain_on_the_gpu() -> None:
    torch.manual_seed(2)
    spans = attention.Spans.of([20, 40, 5], [70, 40, 33], DEVICE)
    q, k, v = (rand(n, h, 64).bfloat16().requires_grad_() for n, h in ((65, 8), (143, 2), (143, 2)))
    columns = [rand(65, 2, 64).bfloat16().requires_grad_() for _ in range(4)]
    grad = rand(65, 8, 64).bfloat16()
    attention.TttAttention.apply(q, k, v, spans, 0.125, None, buffer(columns), *columns).backward(grad)
    got = [x.grad.float().cpu() for x in (q, k, v, *columns)]
    wide = [x.detach().float().cpu().requires_grad_() for x in (q, k, v, *columns)]
    host = attention.Spans.of([20, 40, 5], [70, 40, 33], torch.device("cpu"))
    attention.TttAttention.apply(*wide[:3], host, 0.125, None, buffer(wide[3:]), *wide[3:]).backward(
        grad.float().cpu()
    )
    for x, g in zip(wide, got, strict=True):
        assert float((x.grad - g).norm() / x.grad.norm()) < 2e-2
