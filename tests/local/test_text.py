"""Decoding token by token gives the text of decoding at once; stop strings; sampling parameters and draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k2tui import paths
from k2tui.local.sampling import SamplingParams, draw, parse
from k2tui.local.text import TextStream, Tokenizer

TOKENIZER = Tokenizer(paths.assets_dir() / "tiny-target")


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60), cuts=st.lists(st.integers(1, 5), max_size=60))
def test_any_slicing_gives_the_same_text(text: str, cuts: list[int]) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    stream = TextStream(TOKENIZER, (), skip_special_tokens=True)
    at, shown = 0, ""
    for cut in cuts:
        at = min(len(ids), at + cut)
        stream.push(ids[:at])
        assert stream.ready.startswith(shown)  # what was shown is never taken back
        shown = stream.ready
    stream.push(ids, last=True)
    assert stream.ready == TOKENIZER.decode(ids)
    assert stream.ready.startswith(shown)


def test_a_character_of_several_tokens_is_shown_whole() -> None:
    ids = TOKENIZER.encode("é漢😀", add_special_tokens=False)
    assert len(ids) > 4
    stream = TextStream(TOKENIZER, (), skip_special_tokens=True)
    seen = set()
    for end in range(1, len(ids) + 1):
        stream.push(ids[:end])
        seen.add(stream.ready)
    assert seen == {"", "é", "é漢", "é漢😀"}


@settings(max_examples=60, deadline=None)
@given(
    before=st.text("abé\n ", max_size=12),
    stop=st.text("ab\n", min_size=1, max_size=4),
    after=st.text("abc", max_size=8),
)
def test_stop_strings_end_the_text_and_never_show(before: str, stop: str, after: str) -> None:
    text = before + stop + after
    want = text[: text.index(stop)]
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    stream = TextStream(TOKENIZER, (stop,), skip_special_tokens=True)
    for end in range(1, len(ids) + 1):
        stream.push(ids[:end], last=end == len(ids))
        assert want.startswith(stream.ready)
        if stream.stopped_by is not None:
            break
    assert stream.stopped_by == stop
    assert stream.text == want


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"temperature": -1}, "temperature must be a non-negative finite number"),
        ({"temperature": "hot"}, "temperature must be a finite number"),
        ({"temperature": float("nan")}, "temperature must be a finite number"),
        ({"top_p": 0}, r"top_p must be in \(0, 1\]"),
        ({"min_p": 2}, r"min_p must be in \[0, 1\]"),
        ({"top_k": 0}, r"top_k must be -1 \(disable\) or at least 1"),
        ({"max_new_tokens": -1}, "max_new_tokens must be at least 0"),
        ({"max_new_tokens": 1.5}, "max_new_tokens must be an integer"),
        ({"max_new_tokens": True}, "max_new_tokens must be an integer"),
        ({"min_new_tokens": 9, "max_new_tokens": 3}, "min_new_tokens must be in"),
        ({"stop": 5}, "stop must be a string or a list of strings"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must be a list of token ids"),
        ({"sampling_seed": 2**63}, "sampling_seed must be an integer"),
        ({"frequency_penalty": 0.5}, "not supported by the embedded engine"),
        ({"n": 2}, "not supported by the embedded engine"),
        ({"temprature": 1}, "unknown sampling parameter 'temprature'"),
    ],
)
def test_bad_sampling_parameters(raw: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse(raw, vocab_size=100)


def test_neutral_values_that_clients_send_are_fine() -> None:
    parsed = parse(
        {"n": 1, "frequency_penalty": 0, "repetition_penalty": 1.0, "stop": None, "top_k": None},
        vocab_size=100,
    )
    assert parsed == SamplingParams()


def shares(params: SamplingParams, logits: list[float], count: int = 2000) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    drawn = [draw(torch.tensor(logits), params, generator) for _ in range(count)]
    return [drawn.count(i) / count for i in range(len(logits))]


def test_draws_follow_the_distribution_and_its_cuts() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().tolist()
    assert shares(SamplingParams(), logits) == pytest.approx([0.4, 0.3, 0.2, 0.1], abs=0.04)
    hot = torch.softmax(torch.tensor(logits) / 2, -1).tolist()
    assert shares(SamplingParams(temperature=2), logits) == pytest.approx(hot, abs=0.04)
    assert shares(SamplingParams(top_k=2), logits) == pytest.approx([4 / 7, 3 / 7, 0, 0], abs=0.04)
    assert shares(SamplingParams(top_p=0.75), logits) == pytest.approx([4 / 9, 3 / 9, 2 / 9, 0], abs=0.04)
    assert shares(SamplingParams(min_p=0.6), logits) == pytest.approx([4 / 7, 3 / 7, 0, 0], abs=0.04)
    assert shares(SamplingParams(temperature=0), logits, 50) == [1, 0, 0, 0]
    assert shares(SamplingParams(top_k=1), logits, 50) == [1, 0, 0, 0]
