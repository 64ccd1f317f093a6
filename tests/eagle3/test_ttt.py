"""The fast path equals the written-out specification: loss, guesses and every gradient, over shapes, masks, steps, packs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k2tui.eagle3.batch import Sample, count_steps, pack
from k2tui.eagle3.draft import LLAMA, MLA, DraftConfig, Eagle3Draft
from k2tui.eagle3.loss import TargetHead
from k2tui.eagle3.ttt import TttOptions, executed_flops, ttt_loss, unpruned_flops

from .reference import reference_loss

VOCAB = 37


def make_config(kind: str, **over: object) -> DraftConfig:
    base: dict[str, object] = {
        "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
        "vocab_size": VOCAB, "draft_vocab_size": 20, "rms_norm_eps": 1e-5, "architecture": LLAMA,
    }  # fmt: skip
    if kind == "mla":
        base |= {
            "architecture": MLA,
            "q_lora_rank": 10,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 6,
            "qk_rope_head_dim": 4,
            "v_head_dim": 5,
        }
    return DraftConfig(**{**base, **over})  # type: ignore[arg-type]


def make_draft(
    config: DraftConfig, seed: int, dtype: torch.dtype = torch.float32
) -> tuple[Eagle3Draft, torch.Tensor]:
    """A draft with large random weights (so that every path carries signal) and the target's head [vocab, H]."""
    gen = torch.Generator().manual_seed(seed)
    draft = Eagle3Draft(config)
    for p in draft.parameters():
        p.data = torch.randn(p.shape, generator=gen) * (0.3 if p.dim() > 1 else 0.2) + (
            1.0 if p.dim() == 1 else 0.0
        )
    draft = draft.to(dtype)
    draft.set_embedding(
        torch.randn(config.vocab_size, config.hidden_size, generator=gen, dtype=torch.float64).to(dtype)
    )
    draft.set_vocab(torch.randperm(config.vocab_size, generator=gen)[: config.draft_vocab_size].sort().values)
    return draft, torch.randn(
        config.vocab_size, config.target_hidden_size or config.hidden_size, generator=gen
    ).to(dtype)


def make_samples(
    masks: list[list[bool]], seed: int, dtype: torch.dtype = torch.float32, width: int = 16
) -> list[Sample]:
    gen = torch.Generator().manual_seed(seed)
    return [
        Sample(
            torch.randint(VOCAB, (len(m),), generator=gen),
            torch.tensor(m),
            torch.randn(len(m), 3 * width, generator=gen).to(dtype),
            torch.randn(len(m), width, generator=gen).to(dtype),
        )
        for m in masks
    ]


def check_equal(
    config: DraftConfig, masks: list[list[bool]], options: TttOptions, seed: int, denominator: str = "mask"
) -> None:
    draft, head_weight = make_draft(config, seed)
    samples = make_samples(masks, seed)
    slow, right, counts = reference_loss(
        draft,
        head_weight,
        samples,
        options.ttt_length,
        shifted=options.shifted,
        decay=options.decay,
        denominator=denominator,
    )
    if slow.requires_grad:
        slow.backward()
    want = {
        n: (p.grad if p.grad is not None else torch.zeros_like(p)).clone()
        for n, p in draft.named_parameters()
    }
    draft.zero_grad()
    host = [s.loss_mask.numpy() for s in samples]
    assert count_steps(host, options.ttt_length, shifted=options.shifted) == counts
    rows = max(len(m) for m in masks) * len(masks)
    weights = [options.decay**k / max(1, n if denominator == "mask" else rows) for k, n in enumerate(counts)]
    made = pack(samples, options.ttt_length, torch.device("cpu"), shifted=options.shifted)
    assert made.counts == tuple(counts)
    fast = ttt_loss(draft, TargetHead(head_weight, draft.target_ids()), made, weights, options)
    fast.loss.backward()
    assert fast.by_step(made.counts)[1].tolist() == right
    torch.testing.assert_close(fast.loss, slow, rtol=1e-5, atol=1e-6)
    # a gradient that is zero by cancellation (a softmax over one key) can only be compared with the whole gradient's size
    whole = float(torch.cat([g.flatten() for g in want.values()]).norm())
    for name, p in draft.named_parameters():
        got = p.grad if p.grad is not None else torch.zeros_like(p)
        assert float((got - want[name]).norm()) <= 1e-5 * max(float(want[name].norm()), 0.05 * whole), name


masks_of = st.lists(st.lists(st.booleans(), min_size=1, max_size=14), min_size=1, max_size=4)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    masks=masks_of,
    ttt_length=st.integers(1, 5),
    shifted=st.booleans(),
    kind=st.sampled_from(["llama", "mla"]),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    heads=st.sampled_from([(4, 4), (4, 2), (4, 1), (2, 2)]),
    chunk=st.sampled_from([1, 3, 64]),
    recompute=st.booleans(),
    denominator=st.sampled_from(["mask", "rows"]),
    seed=st.integers(0, 999),
)
def test_fast_path_equals_the_reference(
    masks, ttt_length, shifted, kind, flags, heads, chunk, recompute, denominator, seed
) -> None:
    fc_norm, norm_output, norm_before_fc = flags
    config = make_config(
        kind,
        fc_norm=fc_norm,
        norm_output=norm_output,
        norm_before_fc=norm_before_fc,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
    )
    options = TttOptions(ttt_length=ttt_length, shifted=shifted, recompute=recompute, chunk_rows=chunk)
    check_equal(config, masks, options, seed, denominator)


@pytest.mark.parametrize("scaling", [
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
])  # fmt: skip
@pytest.mark.parametrize("kind", ["llama", "mla"])
def test_rope_kinds(kind: str, scaling: dict[str, object]) -> None:
    check_equal(
        make_config(kind, rope_scaling=scaling), [[False] * 6 + [True] * 6], TttOptions(ttt_length=3), 5
    )


def test_every_gradient_by_finite_differences() -> None:
    """Not only equal to another program of ours: the gradient is the slope of the loss (float64)."""
    config = make_config("llama", fc_norm=True, norm_output=True)
    draft, head_weight = make_draft(config, 3, torch.float64)
    samples = make_samples([[False, False, True, True, False, True, True]], 3, torch.float64)
    options = TttOptions(ttt_length=3)
    made = pack(samples, 3, torch.device("cpu"))
    head = TargetHead(head_weight, draft.target_ids())

    def loss() -> torch.Tensor:
        return ttt_loss(draft, head, made, [0.3, 0.2, 0.1], options).loss

    loss().backward()
    gen = torch.Generator().manual_seed(0)
    for name, p in draft.named_parameters():
        direction = torch.randn(p.shape, generator=gen, dtype=torch.float64)
        assert p.grad is not None
        slope = float((p.grad * direction).sum())
        with torch.no_grad():
            p.add_(direction, alpha=1e-3)
            up = float(loss())
            p.add_(direction, alpha=-2e-3)
            down = float(loss())
            p.add_(direction, alpha=1e-3)
        # the pass keeps its softmax sums in fp32, hence not float64's own agreement
        assert slope == pytest.approx((up - down) / 2e-3, rel=1e-2, abs=1e-3), name


def test_one_pack_equals_many() -> None:
    """Packing and accumulation change nothing: the step weights carry the global denominators."""
    config = make_config("llama")
    draft, head_weight = make_draft(config, 1)
    masks = [
        [False] * 5 + [True] * 6,
        [True] * 9,
        [False, True, True, False, False, True, True, True],
        [False] * 4,
    ]
    samples = make_samples(masks, 1)
    head = TargetHead(head_weight, draft.target_ids())
    options = TttOptions(ttt_length=4)
    counts = count_steps([s.loss_mask.numpy() for s in samples], 4, shifted=True)
    weights = [0.8**k / n for k, n in enumerate(counts)]
    whole = ttt_loss(draft, head, pack(samples, 4, torch.device("cpu")), weights, options).loss
    parts = [
        ttt_loss(draft, head, pack([s], 4, torch.device("cpu")), weights, options).loss for s in samples[:3]
    ]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-6, atol=1e-7)


def test_bf16_is_near_the_reference() -> None:
    """Stated: in bf16 the loss is within 1 % and the gradient's direction within 2 % of fp32's."""
    config = make_config("llama")
    draft, head_weight = make_draft(config, 7)
    samples = make_samples([[False] * 8 + [True] * 24, [True] * 20], 7)
    head32 = TargetHead(head_weight, draft.target_ids())
    options = TttOptions(ttt_length=4)
    weights = [0.8**k / 40 for k in range(4)]
    want = ttt_loss(draft, head32, pack(samples, 4, torch.device("cpu")), weights, options).loss
    want.backward()
    exact = torch.cat([p.grad.flatten() for p in draft.parameters() if p.grad is not None])
    draft.zero_grad()
    got = ttt_loss(
        draft,
        TargetHead(head_weight.bfloat16(), draft.target_ids()),
        pack(samples, 4, torch.device("cpu"), dtype=torch.bfloat16),
        weights,
        options,
    ).loss
    got.backward()
    rounded = torch.cat([p.grad.flatten() for p in draft.parameters() if p.grad is not None])
    assert float(got) == pytest.approx(float(want), rel=0.01)
    assert float(torch.cosine_similarity(exact, rounded, dim=0)) > 0.98


def test_pruning_leaves_work_out() -> None:
    config = make_config("llama")
    half = pack(make_samples([[False] * 32 + [True] * 32], 2), 7, torch.device("cpu"))
    assert half.num_active == 32 + 6  # six positions before the first label draft into it
    assert executed_flops(config, half, 7) < 0.65 * unpruned_flops(config, half, 7)


def test_a_pack_without_labels_is_harmless() -> None:
    config = make_config("llama")
    draft, head_weight = make_draft(config, 1)
    empty = pack(make_samples([[False] * 5], 1), 3, torch.device("cpu"))
    result = ttt_loss(
        draft, TargetHead(head_weight, draft.target_ids()), empty, [1.0, 1.0, 1.0], TttOptions(ttt_length=3)
    )
    result.loss.backward()
    assert float(result.loss) == 0.0
    assert all(p.grad is None or float(p.grad.abs().max()) == 0.0 for p in draft.parameters())
