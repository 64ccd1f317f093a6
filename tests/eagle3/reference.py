"""The specification written out slowly: one sample at a time, every position through every step, a T x (T + k) softmax."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import silu

from k2tui.eagle3.batch import Sample
from k2tui.eagle3.draft import Eagle3Draft


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rope(x: Tensor, positions: Tensor, draft: Eagle3Draft) -> Tensor:
    """x [T, heads, d]."""
    angle = positions[:, None] * draft.inv_freq[None].to(x.dtype)
    cos = (angle.cos() * draft.rope_factor)[:, None]
    sin = (angle.sin() * draft.rope_factor)[:, None]
    out = torch.empty_like(x)
    half = x.shape[-1] // 2
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if draft.config.is_mla else (i, i + half)
        out[..., a] = x[..., a] * cos[..., i] - x[..., b] * sin[..., i]
        out[..., b] = x[..., b] * cos[..., i] + x[..., a] * sin[..., i]
    return out


def project(draft: Eagle3Draft, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    c, a, total = draft.config, draft.midlayer.self_attn, x.shape[0]
    heads = c.num_attention_heads
    if not c.is_mla:
        q = (x @ a.q_proj.weight.T).view(total, heads, c.head_dim)
        k = (x @ a.k_proj.weight.T).view(total, c.num_key_value_heads, c.head_dim)
        v = (x @ a.v_proj.weight.T).view(total, c.num_key_value_heads, c.head_dim)
        group = heads // c.num_key_value_heads
        return (
            rope(q, positions, draft),
            rope(k, positions, draft).repeat_interleave(group, 1),
            v.repeat_interleave(group, 1),
        )
    nope = c.qk_nope_head_dim
    q = (norm(x @ a.q_a_proj.weight.T, a.q_a_layernorm.weight, c.rms_norm_eps) @ a.q_b_proj.weight.T).view(
        total, heads, -1
    )
    kv_a = x @ a.kv_a_proj_with_mqa.weight.T
    kv = (
        norm(kv_a[:, : c.kv_lora_rank], a.kv_a_layernorm.weight, c.rms_norm_eps) @ a.kv_b_proj.weight.T
    ).view(total, heads, -1)
    shared = rope(kv_a[:, None, c.kv_lora_rank :], positions, draft).expand(-1, heads, -1)
    q = torch.cat((q[..., :nope], rope(q[..., nope:], positions, draft)), -1)
    return q, torch.cat((kv[..., :nope], shared), -1), kv[..., nope:]


def reference_loss(
    draft: Eagle3Draft,
    head: Tensor,
    samples: list[Sample],
    ttt_length: int,
    *,
    shifted: bool,
    decay: float,
    denominator: str,
) -> tuple[Tensor, list[int], list[int]]:
    """(loss, right guesses of each step, loss-bearing positions of each step). denominator: "mask" or "rows" (B * T)."""
    c = draft.config
    eps = c.rms_norm_eps
    layer = draft.midlayer
    numerators = [torch.zeros((), dtype=head.dtype) for _ in range(ttt_length)]
    counts = [0] * ttt_length
    right = [0] * ttt_length
    longest = max(s.length for s in samples)
    for sample in samples:
        total = sample.length
        aux, last = sample.aux.to(head.dtype), sample.last.to(head.dtype)
        mask = sample.loss_mask.bool().tolist()
        if not shifted:
            mask[-1] = False
        if c.norm_before_fc:
            aux = norm(aux, draft.input_norm.weight, eps)
        if c.fc_norm:
            aux = torch.cat(
                [
                    norm(x, n.weight, eps)
                    for x, n in zip(aux.chunk(c.num_aux, -1), draft.fc_norm, strict=True)
                ],
                -1,
            )
        h = aux @ draft.fc.weight.T
        full = last @ head.T
        best = full.argmax(-1)
        soft = full[:, draft.t2d].softmax(-1)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for step in range(ttt_length):
            tokens = [
                int(sample.input_ids[t + 1 + step]) if t + 1 + step < total else 0 for t in range(total)
            ]
            x = torch.cat(
                (
                    norm(draft.embedding[tokens].to(head.dtype), layer.input_layernorm.weight, eps),
                    norm(h, layer.hidden_norm.weight, eps),
                ),
                -1,
            )
            positions = torch.arange(total, dtype=head.dtype) + step
            q, k, v = project(draft, x, positions)
            keys.append(k)
            values.append(v)
            scores = torch.einsum("qhd,khd->hqk", q, keys[0]) * draft.scale
            scores = scores.masked_fill(torch.triu(torch.ones(total, total, dtype=torch.bool), 1), -math.inf)
            own = [(q * keys[i]).sum(-1).T[..., None] * draft.scale for i in range(1, step + 1)]
            weights = torch.cat([scores, *own], -1).softmax(-1)
            mixed = torch.einsum("hqk,khd->qhd", weights[..., :total], values[0])
            for i in range(1, step + 1):
                mixed = mixed + weights[..., total + i - 1].T[..., None] * values[i]
            r = h + mixed.flatten(1) @ layer.self_attn.o_proj.weight.T
            n = norm(r, layer.post_attention_layernorm.weight, eps)
            out = (
                r
                + (silu(n @ layer.mlp.gate_proj.weight.T) * (n @ layer.mlp.up_proj.weight.T))
                @ layer.mlp.down_proj.weight.T
            )
            normed = norm(out, draft.norm.weight, eps)
            logq = (normed @ draft.lm_head.weight.T).log_softmax(-1)
            for t in range(total):
                u = t + 1 + step
                if u >= total or not mask[u if shifted else t + step]:
                    continue
                counts[step] += 1
                if not draft.t2d[best[u]]:
                    continue
                numerators[step] = numerators[step] - (soft[u] * logq[t]).sum()
                right[step] += int(draft.target_ids()[logq[t].argmax()] == best[u])
            h = normed if c.norm_output else out
    loss = torch.zeros((), dtype=head.dtype)
    for step in range(ttt_length):
        below = counts[step] if denominator == "mask" else longest * len(samples)
        if below:
            loss = loss + decay**step * numerators[step] / below
    return loss, right, counts
