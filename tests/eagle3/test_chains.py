"""Chain drafting: all chains of a text at once equal a server's, one after the other."""

from __future__ import annotations

import pytest
import torch

from k2tui.eagle3.batch import Sample
from k2tui.eagle3.data import MemoryStates
from k2tui.eagle3.draft import DraftCache, Eagle3Draft
from k2tui.eagle3.evaluate import replay_chains

from .test_ttt import VOCAB, make_config, make_draft, make_samples


@torch.no_grad()
def one_chain(draft: Eagle3Draft, sample: Sample, at: int, num_steps: int) -> list[int]:
    """What a server drafts after position `at`: the whole text so far, then its own guesses, one by one."""
    cache = DraftCache()
    out = draft.extend(sample.input_ids[1 : at + 2], draft.fuse(sample.aux[: at + 1]), cache, 0)[-1:]
    found: list[int] = []
    for step in range(num_steps):
        if step:
            out = draft.extend(torch.tensor([found[-1]]), draft.carry(out), cache, at + step)
        found.append(int(draft.target_ids()[draft.logits(out)[0].argmax()]))
    return found


@pytest.mark.parametrize("kind", ["llama", "mla"])
@pytest.mark.parametrize("norm_output", [False, True])
def test_all_chains_at_once_are_those_of_one_after_the_other(kind: str, norm_output: bool) -> None:
    draft, _ = make_draft(make_config(kind, norm_output=norm_output, fc_norm=norm_output), 4)
    sample = make_samples([[True] * 12], 4)[0]
    at = torch.tensor([0, 3, 4, 5, 9])
    found = draft.draft_chains(sample.input_ids[1:11], sample.aux[:10], at, 4)
    assert found.tolist() == [one_chain(draft, sample, int(i), 4) for i in at]
    assert all(bool(draft.t2d[i]) for i in found.flatten())
    assert draft.draft_chains(sample.input_ids[1:11], sample.aux[:10], at[:0], 4).shape == (0, 4)


def test_a_replay_walks_as_a_server_does() -> None:
    """Texts that the draft itself wrote in part, so that guesses are accepted, with two answers in one and none in another."""
    draft, _ = make_draft(make_config("llama"), 5)
    masks = [[False] * 3 + [True] * 9 + [False] * 2 + [True] * 7, [False] * 6, [True] * 15]
    texts = make_samples(masks, 6)
    for text in texts:
        for at in range(1, text.length - 3, 3):
            text.input_ids[at + 2 : at + 4] = torch.tensor(one_chain(draft, text, at, 2))
    steps = 3
    histogram, tokens, verify = [0] * (steps + 1), 0, 0
    for text in texts:
        mask = text.loss_mask.tolist()
        starts = [i for i, m in enumerate(mask) if m and (i == 0 or not mask[i - 1])]
        for start in starts:
            end = next((i for i in range(start, len(mask)) if not mask[i]), len(mask))
            at = max(start - 1, 0)
            while at + 2 < end:
                wanted = text.input_ids[at + 2 : min(end, at + 2 + steps)].tolist()
                guess = one_chain(draft, text, at, steps)
                accepted = next((n for n, w in enumerate(wanted) if guess[n] != w), len(wanted))
                histogram[accepted] += 1
                verify, tokens = verify + 1, tokens + min(accepted + 1, end - at - 2)
                at += accepted + 1
    seen: list[int] = []
    report = replay_chains(draft, MemoryStates(texts), range(3), num_steps=steps, told=seen.append)
    assert report.histogram == tuple(histogram) and sum(histogram[1:]) > 0
    assert (report.tokens, report.verify_ct, report.samples) == (tokens, verify, 2)
    assert report.accept_length == tokens / verify > 1 and seen == [1, 2, 3]
    assert draft.config.draft_vocab_size < VOCAB
