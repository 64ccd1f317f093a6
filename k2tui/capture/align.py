"""The two proofs that states belong to the server that will verify the draft, made before any training. Torch, no engine.

(a) The stored last hidden state, put through the target's head, gives the server's own next tokens and logprobs.
(b) An existing draft, run once over fresh states at each layer set that it may have been trained on, tells which set fits.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from k2tui.capture.client import Connection
from k2tui.errors import K2Error, NotReadyError
from k2tui.states.reader import Sample, StatesReader

if TYPE_CHECKING:
    import torch

AGREE_MIN = 0.97
LOGPROB_MAX = 0.1
FITS_MIN = 0.3  # first-position accuracy below which no candidate is called a fit
FITS_LEAD = 1.15  # the best must beat the next by this factor, else the verdict says so


@dataclass(frozen=True, slots=True)
class HeadProof:
    """positions: how many were compared. greedy_agreement: share whose argmax is the server's first choice (near ties, where
    the server's own two best lie within 0.02, are counted apart). logprob_error: median |difference| of the server's top-k
    logprobs, natural log."""

    positions: int
    near_ties: int
    greedy_agreement: float
    logprob_error: float
    worst_sample: int

    @property
    def ok(self) -> bool:
        return self.positions > 0 and self.greedy_agreement >= AGREE_MIN and self.logprob_error <= LOGPROB_MAX

    def verdict(self) -> str:
        if not self.positions:
            return "no position could be compared: the server gave no logprobs of its input"
        figures = (
            f"{self.greedy_agreement:.1%} of {self.positions} next tokens agree, "
            f"top-k logprobs within {self.logprob_error:.3f} (median)"
        )
        if self.ok:
            return f"the last hidden states are this server's: {figures}"
        return (
            f"the last hidden states do not lead to the server's tokens: {figures}; worst in sample {self.worst_sample}. "
            "Another model, another head, or states from before the final norm"
        )


def prove_head(
    reader: StatesReader, head: torch.Tensor, url: str, samples: int = 8, top_k: int = 5
) -> HeadProof:
    """Proof (a): ask the server for the top-k logprobs of every position of some samples, compare with head @ last.

    head: [vocab, H]. Raises K2Error when the server cannot give logprobs, NotReadyError when it does not answer.
    """
    import torch

    conn = Connection(url, 300)
    agreed = compared = ties = 0
    errors: list[float] = []
    worst = (2.0, -1)
    positions = reader.order(1)[:samples]
    for position in positions:
        sample = reader[position]
        body = {
            "input_ids": sample.input_ids.tolist(),
            "rid": f"k2align-{uuid.uuid4().hex[:12]}",
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": top_k,
        }
        try:
            meta = conn.call("POST", "/generate", body)["meta_info"]
        except OSError as err:
            raise NotReadyError(f"{url}: no answer ({err})")
        except (KeyError, TypeError):
            raise K2Error(f"{url}: /generate answered without meta_info")
        told: list[Any] = list(meta.get("input_top_logprobs") or [])
        out = meta.get("output_top_logprobs") or []
        length = len(sample.input_ids)
        # entry i of the input list is the distribution of token i, given the tokens before it; the output's first comes last
        told = (told + [None] * length)[:length] + list(out[:1])
        rows = [t for t in range(length) if t + 1 < len(told) and told[t + 1] and bool(sample.last_rows[t])]
        if not rows:
            continue
        logprobs = torch.log_softmax(sample.last[rows].float() @ head.float().t(), -1)
        mine = logprobs.argmax(-1).tolist()
        right = seen = 0
        for row, t in enumerate(rows):
            entries = told[t + 1]
            best = entries[0]
            if len(entries) > 1 and best[0] - entries[1][0] < 0.02:
                ties += 1
            else:
                seen += 1
                right += int(mine[row] == best[1])
            errors += [abs(float(logprobs[row, e[1]]) - float(e[0])) for e in entries]
        agreed, compared = agreed + right, compared + seen
        if seen and right / seen < worst[0]:
            worst = (right / seen, sample.index)
    conn.close()
    errors.sort()
    return HeadProof(
        compared,
        ties,
        agreed / compared if compared else 0.0,
        errors[len(errors) // 2] if errors else 0.0,
        worst[1],
    )


@dataclass(frozen=True, slots=True)
class FitProof:
    """accuracy: (boundaries, first-position accuracy of the draft) of each candidate, best first."""

    accuracy: tuple[tuple[tuple[int, ...], float], ...]
    positions: int

    @property
    def best(self) -> tuple[int, ...]:
        return self.accuracy[0][0]

    @property
    def ok(self) -> bool:
        return bool(self.accuracy) and self.accuracy[0][1] >= FITS_MIN

    def verdict(self) -> str:
        """ "boundary 3/31/59 fits: first-position accuracy 0.71; 2/30/58: 0.12"."""
        if not self.accuracy:
            return "no candidate layer set could be tried"
        told = [("/".join(map(str, b)), a) for b, a in self.accuracy]
        rest = "".join(f"; {name}: {a:.2f}" for name, a in told[1:])
        name, best = told[0]
        if not self.ok:
            return (
                f"no layer set fits this draft: best is boundary {name} with first-position accuracy {best:.2f}{rest}. "
                "It was trained for another target, or on other layers"
            )
        if len(told) > 1 and best < FITS_LEAD * told[1][1]:
            return f"boundary {name} fits, but hardly better than the next: first-position accuracy {best:.2f}{rest}"
        return f"boundary {name} fits: first-position accuracy {best:.2f}{rest}"


def prove_fit(
    reader: StatesReader,
    head: torch.Tensor,
    candidates: Sequence[tuple[int, ...]],
    draft_argmax: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    samples: int = 50,
) -> FitProof:
    """Proof (b). reader: states at all boundaries of every candidate. draft_argmax(tokens [T], aux [T, 3H]) -> target ids [T]:
    the draft's first guess at each position, where tokens[t] is the token after position t.

    Right = the target's own greedy token: argmax of head @ last[t + 1]. Only rows that the loss mask keeps are counted.
    """
    import torch

    boundaries = reader.manifest.boundaries
    hidden = reader.manifest.hidden_size
    usable = [c for c in candidates if all(b in boundaries for b in c)]
    right = dict.fromkeys(usable, 0)
    total = 0
    for position in reader.order(2)[:samples]:
        sample: Sample = reader[position]
        if len(sample.input_ids) < 3:
            continue
        tokens = sample.input_ids[1:]
        answer = (sample.last[1:].float() @ head.float().t()).argmax(-1)
        # row t guesses the token at t + 2, which row t + 1 of the target decides
        counted = sample.last_rows[1:].bool()
        after = torch.zeros_like(counted)
        after[:-1] = sample.loss_mask[2:].bool()
        counted &= after
        if not bool(counted.any()):
            continue
        total += int(counted.sum())
        for candidate in usable:
            columns = [boundaries.index(b) for b in candidate]
            aux = torch.cat([sample.aux[:-1, c * hidden : (c + 1) * hidden] for c in columns], -1)
            guess = draft_argmax(tokens, aux)
            right[candidate] += int(((guess == answer) & counted).sum())
    ranked = sorted(((c, right[c] / total if total else 0.0) for c in usable), key=lambda p: -p[1])
    return FitProof(tuple(ranked), total)
