"""On a GPU: the whole fast path (flash attention, Triton, torch.compile, bf16) against the written-out reference in fp32."""

from __future__ import annotations

import pytest
import torch

from k2tui.eagle3 import ops
from k2tui.eagle3.batch import pack
from k2tui.eagle3.loss import TargetHead
from k2tui.eagle3.ttt import TttOptions, ttt_loss

from .reference import reference_loss
from .test_ttt import make_config, make_draft, make_samples

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
MASKS = [[False] * 30 + [True] * 40, [True] * 25, ([False] * 6 + [True] * 9) * 4]


@pytest.mark.parametrize(
    ("kind", "masks", "compiled"),
    [("llama", MASKS, False), ("llama", MASKS[:2], True), ("llama", MASKS, True), ("mla", MASKS, False)],
)
def test_bf16_on_the_gpu_is_near_the_reference(kind: str, masks: list[list[bool]], compiled: bool) -> None:
    """Stated for bf16: loss within 1 %, direction of every gradient within 3 %."""
    over = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    if kind == "mla":
        over |= {
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
        }
    config = make_config(kind, **over)
    draft, head_weight = make_draft(config, 3)
    for p in draft.parameters():
        if p.dim() > 1:
            p.data *= 0.5
    samples = make_samples(masks, 3, width=64)
    slow, _, counts = reference_loss(
        draft, head_weight, samples, 5, shifted=True, decay=0.8, denominator="mask"
    )
    slow.backward()
    want = {n: p.grad.clone() for n, p in draft.named_parameters()}
    draft = draft.cuda()
    draft.zero_grad()
    ops.set_compile(compiled)
    try:
        head = TargetHead(head_weight.cuda().bfloat16(), draft.target_ids())
        made = pack(samples, 5, torch.device("cuda"), dtype=torch.bfloat16)
        got = ttt_loss(
            draft, head, made, [0.8**k / n for k, n in enumerate(counts)], TttOptions(ttt_length=5)
        )
        got.loss.backward()
    finally:
        ops.set_compile(False)
    assert float(got.loss) == pytest.approx(float(slow), rel=0.01)
    for name, p in draft.named_parameters():
        near = torch.cosine_similarity(p.grad.flatten().cpu(), want[name].flatten(), dim=0)
        assert float(near) > 0.97, (name, float(near))
