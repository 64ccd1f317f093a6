"""What to expect of a draft before it is served: teacher-forced figures and real chain drafting on held-out states.

Laws: a guess outside the draft vocabulary counts as wrong. full_acc[k] is the share of drafts whose first k+1 guesses are all
right; expected accept length = 1 + full_acc[0] + ... over the served number of steps (the 1 is the bonus token).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from k2tui.eagle3.batch import Pack
from k2tui.eagle3.data import States, fill_packs, make_pack, share
from k2tui.eagle3.draft import Eagle3Draft
from k2tui.eagle3.ranks import Ranks
from k2tui.eagle3.step import TttModule
from k2tui.eagle3.ttt import TttResult


@dataclass(frozen=True)
class EvalReport:
    """Per step k: acc, cond_acc (given all earlier right), full_acc, alpha (sum of min(p, q): acceptance under sampling), ce.

    accept_length: 1 + sum of full_acc over num_steps. positions: drafts looked at. covered: share of loss-bearing positions
    whose target maximum is in the draft vocabulary.
    """

    acc: tuple[float, ...]
    cond_acc: tuple[float, ...]
    full_acc: tuple[float, ...]
    alpha: tuple[float, ...]
    ce: tuple[float, ...]
    accept_length: float
    num_steps: int
    positions: int
    covered: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def _alpha_sums(module: TttModule, result: TttResult, pack: Pack, chunk: int = 4096) -> torch.Tensor:
    """Sum over rows of sum_v min(p_on_draft, q), for each step. fp64 [K]."""
    head = module.draft.lm_head.weight.to(result.head_rows.dtype)
    assert result.teacher.lse_full is not None
    out: list[torch.Tensor] = []
    for start in range(0, result.head_rows.shape[0], chunk):
        rows = slice(start, start + chunk)
        at = result.teacher_rows[rows]
        q = (result.head_rows[rows] @ head.t()).float().softmax(-1)
        p = (result.teacher.logits[at].float() - result.teacher.lse_full[at, None]).exp()
        out.append(torch.minimum(p, q).sum(-1))
    every = torch.cat(out) if out else torch.zeros(0, device=head.device)
    return torch.stack([x.double().sum() for x in every.split(pack.counts)])


@torch.no_grad()
def evaluate(
    module: TttModule,
    states: States,
    ranks: Ranks,
    *,
    max_tokens: int,
    dtype: torch.dtype,
    num_steps: int = 3,
    told: Callable[[int], None] | None = None,
) -> EvalReport:
    """Teacher-forced figures over all samples of `states`. Every rank must call it; all get the same report.

    told: called after each pack with the number of samples that all ranks together have about done.
    """
    steps = module.options.ttt_length
    packs = fill_packs(range(len(states.lengths)), states.lengths, max_tokens)
    mine = share(packs, states.lengths, ranks.rank, ranks.size)
    most = (
        max(len(share(packs, states.lengths, r, ranks.size)) for r in range(ranks.size))
        if ranks.sharded
        else len(mine)
    )
    sums = torch.zeros(6, steps, dtype=torch.float64, device=ranks.device)
    counts = torch.zeros(steps, dtype=torch.float64, device=ranks.device)
    done = 0
    for n in range(most):
        real = n < len(mine)
        samples = [states.sample(i) for i in (mine[n] if real else packs[0][:1])]
        pack = make_pack(samples, steps, shifted=module.options.shifted, dtype=dtype).to(ranks.device)
        _, result = module(pack, [0.0] * steps, True)
        if not real:
            continue
        right = torch.zeros(pack.num_active, steps, dtype=torch.bool, device=ranks.device)
        borne = torch.zeros_like(right)
        for k, (rows, hit) in enumerate(zip(pack.loss_rows, result.correct.split(pack.counts), strict=True)):
            right[rows, k] = hit
            borne[rows, k] = True
        whole = borne.cumprod(1).bool()  # drafts whose steps 0..k all bear a loss: what serving sees
        full = right.cumprod(1).bool() & whole
        losses, hits = result.by_step(pack.counts)
        sums[0] += hits
        sums[1] += full.sum(0)
        sums[2] += whole.sum(0)
        sums[3] += losses
        sums[4] += _alpha_sums(module, result, pack)
        sums[5] += torch.stack([x.double().sum() for x in result.known.split(pack.counts)])
        counts += torch.tensor(pack.counts, dtype=torch.float64, device=ranks.device)
        done += len(samples)
        if told is not None:
            told(min(len(states.lengths), done * ranks.size))
    ranks.sum_(sums)
    ranks.sum_(counts)
    return report_of(sums.cpu().numpy(), counts.cpu().numpy(), num_steps)


def report_of(sums: np.ndarray, counts: np.ndarray, num_steps: int) -> EvalReport:
    """Figures from sums [6, K] (right, full, whole, ce, alpha, known) and counts [K]."""

    def over(a: np.ndarray, b: np.ndarray) -> tuple[float, ...]:
        return tuple(float(x / y) if y else 0.0 for x, y in zip(a, b, strict=True))

    full = over(sums[1], sums[2])
    cond = tuple(f / p if p else 0.0 for f, p in zip(full, (1.0, *full), strict=False))
    used = min(num_steps, len(full))
    return EvalReport(
        acc=over(sums[0], counts),
        cond_acc=cond,
        full_acc=full,
        alpha=over(sums[4], counts),
        ce=over(sums[3], counts),
        accept_length=1.0 + sum(full[:used]),
        num_steps=used,
        positions=int(sums[2][0]),
        covered=float(sums[5].sum() / counts.sum()) if counts.sum() else 0.0,
    )


@dataclass(frozen=True)
class ChainReport:
    """Chain drafting replayed over recorded text. accept_length = tokens / verify_ct, the first token of an answer left out,
    as servers count it. histogram[a]: drafts of which a tokens were accepted."""

    accept_length: float
    tokens: int
    verify_ct: int
    histogram: tuple[int, ...]
    samples: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def replay_chains(
    draft: Eagle3Draft,
    states: States,
    picked: Sequence[int],
    *,
    num_steps: int = 3,
    told: Callable[[int], None] | None = None,
) -> ChainReport:
    """Draft along each loss-bearing span as a greedy server would: propose num_steps tokens, keep the longest prefix that
    equals the recorded text, go on after the bonus token. The draft's own guesses feed its later steps.

    True to serving when the recorded answers are the target's own greedy text. The chains of all positions are drafted at
    once (none depends on another), and the walk then uses those that a server would have drafted. Runs where the draft is.
    told: called with the number of samples done.
    """
    device, dtype = draft.fc.weight.device, draft.fc.weight.dtype
    histogram = [0] * (num_steps + 1)
    tokens = verify = used = 0
    for number, index in enumerate(picked):
        sample = states.sample(index)
        ids = sample.input_ids.numpy()
        mask = sample.loss_mask.cpu().numpy().astype(bool)
        edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(np.int8), [0]))))
        # `at`: newest position with a known state; the token at `at + 1` is committed
        spans = [
            (max(start - 1, 0), end)
            for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
        ]
        where = np.unique(np.concatenate([np.arange(a, max(a, end - 2)) for a, end in spans] or [[]])).astype(
            int
        )
        if len(where):
            seen = int(where[-1]) + 1
            guesses = draft.draft_chains(
                sample.input_ids[1 : seen + 1].to(device),
                sample.aux[:seen].to(device, dtype),
                torch.from_numpy(where).to(device),
                num_steps,
            )
            chains = dict(zip(where.tolist(), guesses.cpu().numpy(), strict=True))
            for at, end in spans:
                while at + 2 < end:
                    left = end - (at + 2)
                    wanted = ids[at + 2 : at + 2 + num_steps]
                    same = (chains[at][: len(wanted)] == wanted).cumprod().sum()
                    accepted = min(int(same), left)
                    histogram[accepted] += 1
                    verify += 1
                    tokens += min(accepted + 1, left)
                    at += accepted + 1
            used += 1
        if told is not None:
            told(number + 1)
    return ChainReport(tokens / verify if verify else 1.0, tokens, verify, tuple(histogram), used)
