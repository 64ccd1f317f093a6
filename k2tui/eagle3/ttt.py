"""The training-time test: the loss of a draft over `ttt_length` teacher-forced steps, with every exact saving.

What is saved, and why it is exact (docs/training.md): a prompt position is only ever a step-0 key and value; later steps'
keys are private to their position; the embedding half of q, k and v depends on the token alone, so one product a token
serves all steps; logits exist only on loss-bearing rows, a chunk at a time; the target's distribution of a position serves
every step that predicts it. Knows a draft, a target head and a pack; no files, no optimiser.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from k2tui.eagle3.attention import Columns, TttAttention
from k2tui.eagle3.batch import Pack
from k2tui.eagle3.draft import DraftConfig, Eagle3Draft
from k2tui.eagle3.loss import CHUNK_ROWS, HeadLoss, TargetHead, Teacher
from k2tui.eagle3.ops import GatherUnique, MlpBlock, RmsNorm, Rotary


@dataclass(frozen=True)
class TttOptions:
    """ttt_length: steps K. decay: weight of step k is decay**k. shifted: see batch.bearing. recompute: make the gate-up
    product again in the backward (less memory, about a seventh more work). chunk_rows: rows of logits alive at once."""

    ttt_length: int = 7
    decay: float = 0.8
    shifted: bool = True
    recompute: bool = False
    chunk_rows: int = CHUNK_ROWS


@dataclass(frozen=True)
class TttResult:
    """loss: scalar with a gradient. Per row, step after step (lengths = pack.counts): losses [M] fp32, correct [M] bool,
    known [M] bool (the target's maximum is in the draft vocabulary), best [M] draft ids."""

    loss: Tensor
    losses: Tensor
    correct: Tensor
    known: Tensor
    best: Tensor
    teacher: Teacher
    teacher_rows: Tensor
    head_rows: Tensor

    def by_step(self, counts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Sums of the losses (in-vocabulary rows) and of the right guesses of each step, [K] fp32 on the device."""
        counted = torch.where(self.known, self.losses, 0.0)
        loss = torch.stack([x.sum() for x in counted.split(counts)])
        right = torch.stack([x.sum() for x in self.correct.float().split(counts)])
        return loss, right


class _Weights:
    """The draft's matrices in compute dtype, fused where one product serves, split into embedding and hidden halves."""

    def __init__(self, draft: Eagle3Draft, dtype: torch.dtype) -> None:
        layer, width = draft.midlayer, draft.config.hidden_size
        a = layer.self_attn

        def cast(*names: str) -> Tensor:
            parts = [getattr(a, n).weight.to(dtype) for n in names]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        if draft.config.is_mla:
            q, kv = cast("q_a_proj"), cast("kv_a_proj_with_mqa")
            self.q_b, self.kv_b = cast("q_b_proj"), cast("kv_b_proj")
        else:
            q, kv = cast("q_proj"), cast("k_proj", "v_proj")
        self.q_e, self.q_h = q.split(width, 1)
        self.kv_e, self.kv_h = kv.split(width, 1)
        self.o = cast("o_proj")
        mlp = layer.mlp
        self.gate_up = torch.cat((mlp.gate_proj.weight.to(dtype), mlp.up_proj.weight.to(dtype)))
        self.down = mlp.down_proj.weight.to(dtype)
        self.fc = draft.fc.weight.to(dtype)


def _queries(draft: Eagle3Draft, w: _Weights, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    c = draft.config
    if not c.is_mla:
        return Rotary.apply(x.view(-1, c.num_attention_heads, c.head_dim), cos, sin, False)
    low = RmsNorm.apply(x, draft.midlayer.self_attn.q_a_layernorm.weight, c.rms_norm_eps)  # type: ignore[union-attr]
    q = (low @ w.q_b.t()).view(-1, c.num_attention_heads, c.qk_dim)
    turned = Rotary.apply(q[..., c.qk_nope_head_dim :], cos, sin, True)
    return torch.cat((q[..., : c.qk_nope_head_dim], turned), -1)


def _keys_values(
    draft: Eagle3Draft, w: _Weights, x: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    c = draft.config
    if not c.is_mla:
        k, v = x.split(c.num_key_value_heads * c.head_dim, 1)
        k = Rotary.apply(k.unflatten(1, (c.num_key_value_heads, c.head_dim)), cos, sin, False)
        return k, v.contiguous().view(-1, c.num_key_value_heads, c.head_dim)
    latent, turn = x.split((c.kv_lora_rank, c.qk_rope_head_dim), 1)
    norm: Tensor = draft.midlayer.self_attn.kv_a_layernorm.weight  # type: ignore[union-attr]
    latent = RmsNorm.apply(latent.contiguous(), norm, c.rms_norm_eps)
    turned = Rotary.apply(turn[:, None], cos, sin, True).expand(-1, c.num_attention_heads, -1)
    kv = (latent @ w.kv_b.t()).view(-1, c.num_attention_heads, c.qk_nope_head_dim + c.v_head_dim)
    return torch.cat((kv[..., : c.qk_nope_head_dim], turned), -1), kv[..., c.qk_nope_head_dim :].contiguous()


def fused_features(draft: Eagle3Draft, aux: Tensor, fc: Tensor) -> Tensor:
    """h_0 [rows, H] of aux [rows, 3H]."""
    c = draft.config
    if c.norm_before_fc:
        aux = RmsNorm.apply(aux, draft.input_norm.weight, c.rms_norm_eps)
    if c.fc_norm:
        thirds = aux.chunk(c.num_aux, -1)
        aux = torch.cat(
            [
                RmsNorm.apply(x.contiguous(), n.weight, c.rms_norm_eps)
                for x, n in zip(thirds, draft.fc_norm, strict=True)
            ],
            -1,
        )  # type: ignore[union-attr,arg-type]
    return aux @ fc.t()


def ttt_loss(
    draft: Eagle3Draft,
    head: TargetHead,
    pack: Pack,
    step_weights: list[float],
    options: TttOptions,
    *,
    full: bool = False,
) -> TttResult:
    """Loss and guesses of one pack.

    step_weights[k]: decay**k / denominator of step k; the denominators count the whole global batch, so that packs and
    ranks simply add up. Rows whose target maximum is outside the draft vocabulary bear no loss. Compute dtype: the pack's.
    full: keep the log-sum-exp over the whole vocabulary too.
    """
    c = draft.config
    layer, eps, dtype = draft.midlayer, c.rms_norm_eps, pack.aux.dtype
    w = _Weights(draft, dtype)
    teacher = head.teach(pack.last, full=full)

    embedded = RmsNorm.apply(draft.embedding[pack.ids].to(dtype), layer.input_layernorm.weight, eps)
    from_token_kv = embedded @ w.kv_e.t()
    from_token_q = GatherUnique.apply(embedded, pack.embed_rows) @ w.q_e.t()
    h0 = fused_features(draft, pack.aux, w.fc)
    normed = RmsNorm.apply(h0, layer.hidden_norm.weight, eps)
    cos, sin = draft.cos_sin(pack.position)
    k0, v0 = _keys_values(
        draft, w, torch.addmm(GatherUnique.apply(from_token_kv, pack.key_next), normed, w.kv_h.t()), cos, sin
    )

    h = GatherUnique.apply(h0, pack.active)
    normed = GatherUnique.apply(normed, pack.active)
    position = pack.position[pack.active]
    columns = Columns(options.ttt_length - 1)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    rows: list[Tensor] = []
    for step in range(options.ttt_length):
        cos, sin = draft.cos_sin(position + step)
        if step:
            normed = RmsNorm.apply(h, layer.hidden_norm.weight, eps)
            fresh = torch.addmm(GatherUnique.apply(from_token_kv, pack.step_next[step]), normed, w.kv_h.t())
            k, v = _keys_values(draft, w, fresh, cos, sin)
            columns.add(k, v)
            keys.append(k)
            values.append(v)
        q = _queries(
            draft,
            w,
            torch.addmm(GatherUnique.apply(from_token_q, pack.step_embed[step]), normed, w.q_h.t()),
            cos,
            sin,
        )
        mixed = TttAttention.apply(q, k0, v0, pack.spans, draft.scale, pack.rows, columns, *keys, *values)
        r = torch.addmm(h, mixed.flatten(1), w.o.t())
        out = MlpBlock.apply(
            r, layer.post_attention_layernorm.weight, w.gate_up, w.down, eps, options.recompute
        )
        rows.append(GatherUnique.apply(out, pack.loss_rows[step]))
        h = RmsNorm.apply(out, draft.norm.weight, eps) if c.norm_output else out

    head_rows = RmsNorm.apply(torch.cat(rows), draft.norm.weight, eps)
    teacher_rows = torch.cat(pack.teacher_rows)
    known = teacher.known[teacher_rows]
    weight = torch.cat(
        [
            torch.full((n,), s, dtype=torch.float32, device=h.device)
            for n, s in zip(pack.counts, step_weights, strict=True)
        ]
    )
    loss, losses, best = HeadLoss.apply(
        head_rows,
        draft.lm_head.weight,
        teacher,
        teacher_rows,
        torch.where(known, weight, 0.0),
        options.chunk_rows,
    )
    correct = known & (best == teacher.best[teacher_rows])
    return TttResult(loss, losses, correct, known, best, teacher, teacher_rows, head_rows.detach())


def executed_flops(c: DraftConfig, pack: Pack, ttt_length: int) -> float:
    """Floating-point operations of the matrix products that one forward and backward of `ttt_loss` does (teacher included)."""
    return _flops(c, pack, ttt_length, pruned=True)


def unpruned_flops(c: DraftConfig, pack: Pack, ttt_length: int) -> float:
    """The same work done the plain way: every kept position through every step, head included (teacher included)."""
    return _flops(c, pack, ttt_length, pruned=False)


def _flops(c: DraftConfig, pack: Pack, ttt_length: int, *, pruned: bool) -> float:
    h, heads = c.hidden_size, c.num_attention_heads
    keys = float(pack.aux.shape[0])
    tokens, active = (float(pack.ids.shape[0]), float(pack.num_active)) if pruned else (keys, keys)
    if c.is_mla:
        q_in, kv_in = c.q_lora_rank, c.kv_lora_rank + c.qk_rope_head_dim
        q_out = c.q_lora_rank * heads * c.qk_dim
        kv_out = c.kv_lora_rank * heads * (c.qk_nope_head_dim + c.v_head_dim)
    else:
        q_in, kv_in, q_out, kv_out = heads * c.head_dim, 2 * c.num_key_value_heads * c.head_dim, 0, 0
    per_row = heads * c.v_dim * h + 3 * h * c.intermediate_size + h * q_in + q_out
    total = keys * c.aux_size * h + keys * (h * kv_in + kv_out)
    total += ttt_length * active * per_row + (ttt_length - 1) * active * (h * kv_in + kv_out)
    total += tokens * h * kv_in + (
        float(pack.embed_rows.shape[0]) * h * q_in if pruned else ttt_length * active * h * q_in
    )
    if not pruned:
        total += (ttt_length - 1) * active * h * kv_in
    heads_rows = float(sum(pack.counts)) if pruned else ttt_length * keys
    total += heads_rows * h * c.draft_vocab_size
    spans = pack.spans
    pairs = 0.0
    for d in range(len(spans.q_starts) - 1):
        nk = spans.k_starts[d + 1] - spans.k_starts[d]
        nq = spans.q_starts[d + 1] - spans.q_starts[d] if pruned else nk
        pairs += nq * (nk - nq) + nq * (nq + 1) / 2
    attention = ttt_length * pairs * heads * (c.qk_dim + c.v_dim)
    teacher = (float(pack.last.shape[0]) if pruned else keys) * h * c.vocab_size
    return 6.0 * total + 2.0 * attention * 3.5 + 2.0 * teacher
