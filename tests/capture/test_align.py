"""The verdict about layer sets, on states made so that one set decides the answer and the other does not."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from k2tui.capture.align import FitProof, HeadProof, prove_fit  # noqa: E402
from k2tui.states.layout import Manifest  # noqa: E402
from k2tui.states.reader import StatesReader  # noqa: E402
from k2tui.states.writer import StatesWriter, WriterLimits, write_sample  # noqa: E402

H, V = 16, 32


def make(folder: Path) -> tuple[StatesReader, torch.Tensor]:
    """Boundaries 2 and 3: the states at 3 hold, at row t, what the target will say at row t + 1; those at 2 are noise."""
    g = torch.Generator().manual_seed(0)
    head = torch.randn(V, H, generator=g)
    writer = StatesWriter(folder, Manifest(H, 4, (2, 3)), "a", WriterLimits(min_free_b=0))
    for i in range(20):
        t = 24
        last = head[torch.randint(0, V, (t,), generator=g)].to(torch.bfloat16)
        ahead = torch.cat((last[1:], last[:1]))
        noise = torch.randn(t, H, generator=g).to(torch.bfloat16)
        aux = torch.cat((noise, ahead), -1)
        mask = (torch.arange(t) > 5).int().numpy()
        write_sample(writer, i, torch.randint(0, V, (t,), generator=g).int().numpy(), mask, bits(aux), bits(last))
    writer.close()
    return StatesReader(folder), head


def bits(x: torch.Tensor) -> object:
    return x.contiguous().view(torch.uint16).numpy()


def test_the_layer_set_that_fits_is_found_and_said_in_words(tmp_path: Path) -> None:
    reader, head = make(tmp_path / "s")

    def draft(tokens: torch.Tensor, aux: torch.Tensor) -> torch.Tensor:
        assert aux.shape == (len(tokens), H)
        return (aux.float() @ head.t()).argmax(-1)

    proof = prove_fit(reader, head, [(2,), (3,), (1,)], draft)
    assert proof.best == (3,) and proof.ok and len(proof.accuracy) == 2
    assert proof.verdict().startswith("boundary 3 fits: first-position accuracy 1.00; 2: 0.0")
    # only rows whose guessed token is in the answer count: 24 - 6 = 18 tokens, the first of them guessed from row 4
    assert proof.positions == 20 * 18


def test_a_draft_of_another_target_fits_nowhere(tmp_path: Path) -> None:
    reader, head = make(tmp_path / "s")
    proof = prove_fit(reader, head, [(2,), (3,)], lambda tokens, aux: torch.zeros(len(tokens), dtype=torch.long))
    assert not proof.ok and proof.verdict().startswith("no layer set fits this draft")


def test_a_close_call_is_called_so() -> None:
    assert "hardly better" in FitProof((((3, 31, 59), 0.70), ((2, 30, 58), 0.68)), 100).verdict()
    clear = FitProof((((3, 31, 59), 0.71), ((2, 30, 58), 0.12)), 100).verdict()
    assert clear == "boundary 3/31/59 fits: first-position accuracy 0.71; 2/30/58: 0.12"


def test_head_verdicts() -> None:
    assert HeadProof(100, 2, 0.99, 0.01, 3).ok
    assert not HeadProof(0, 0, 0.0, 0.0, -1).ok
    bad = HeadProof(100, 2, 0.4, 2.0, 3)
    assert not bad.ok and "worst in sample 3" in bad.verdict()


def test_the_verb_runs_a_real_draft(tmp_path: Path) -> None:
    """An untrained draft of the shipped target: loaded, given the target's embedding, run over aux states."""
    import json

    from safetensors.torch import save_file

    from k2tui import paths
    from k2tui.eagle3.draft import DraftConfig, Eagle3Draft
    from k2tui.verbs.extract import _draft_argmax

    model = paths.assets_dir() / "tiny-target"
    if not (model / "config.json").exists():
        pytest.skip("no tiny target")
    config = DraftConfig(
        hidden_size=256, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64, vocab_size=2048,
        draft_vocab_size=512, aux_layer_ids=(1, 3, 4),
    )  # fmt: skip
    (tmp_path / "draft").mkdir()
    save_file({k: v.contiguous() for k, v in Eagle3Draft(config).state_dict().items()}, tmp_path / "draft" / "model.safetensors")
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config.to_dict()))
    guess = _draft_argmax(tmp_path / "draft", model)
    found = guess(torch.tensor([5, 6, 7]), torch.randn(3, 3 * 256).to(torch.bfloat16))
    assert found.shape == (3,) and int(found.max()) < 2048
