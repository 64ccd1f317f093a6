"""Drafts that cannot help, made on purpose: other layers, another model. The checks name the cause before and after training."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from k2tui import cli
from k2tui.eagle3.batch import Sample
from k2tui.eagle3.step import OptimOptions
from k2tui.eagle3.trainer import Trainer, TrainOptions
from k2tui.eagle3.ttt import TttOptions
from k2tui.eagle3.why import Finding, why
from k2tui.errors import K2Error

from . import world

H = world.HIDDEN


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, its states of layers 1, 3, 5 and of all layers, another target's states, and a draft that learnt the first."""
    root = tmp_path_factory.mktemp("why")
    head = world.make_target(root / "target")
    samples = world.make_samples(head, 40)
    world.write_states(root / "states", samples, root / "target")
    wide: list[Sample] = []
    gen = torch.Generator().manual_seed(5)
    for s in world.make_samples(head, 6, seed=3):
        blocks = [torch.randn(s.length, H, generator=gen) for _ in range(6)]
        for n, b in enumerate((1, 3, 5)):
            blocks[b] = s.aux[:, n * H : (n + 1) * H].float()
        wide.append(replace(s, aux=torch.cat(blocks, 1).bfloat16()))
    world.write_states(root / "wide", wide, root / "target", boundaries=(0, 1, 2, 3, 4, 5))
    other = world.make_target(root / "other", seed=7)
    world.write_states(root / "foreign", world.make_samples(other, 30), root / "other")
    world.write_states(root / "low", samples, root / "target", boundaries=(1, 2, 4))
    train(root, "states", "good")
    return root


def train(root: Path, states: str, out: str, **over: object) -> None:
    base: dict[str, object] = {
        "states": str(root / states), "target": str(root / "target"), "out": str(root / out), "held_out": 0.15, "epochs": 5, "batch_size": 8, "draft_vocab_size": 64,
        "ttt": TttOptions(ttt_length=3), "optim": OptimOptions(learning_rate=1e-2), "device": "cpu", "chains": 0, "eval_every": 1000,
    }  # fmt: skip
    Trainer(TrainOptions(**{**base, **over}), say=lambda text: None).run()  # type: ignore[arg-type]


def wrong(found: list[Finding]) -> dict[str, str]:
    return {f.kind: f.text for f in found if f.ok is False}


def test_a_draft_that_fits_passes_every_check(place: Path) -> None:
    found = why(place / "good" / "draft-best", str(place / "target"), str(place / "wide"))
    assert wrong(found) == {}
    assert [f.kind for f in found] == ["model", "layers", "accuracy"] and "fed layers [1, 3, 5]" in found[
        -1
    ].text


def test_wrong_layers_are_named_by_the_record(place: Path, tmp_path: Path) -> None:
    draft = _copy(place, tmp_path, [1, 3, 4])
    said = wrong(why(draft, str(place / "target")))
    assert said == {
        "layers": "trained on layers [1, 3, 5], but its layer ids [1, 3, 4] make SGLang 0.5.23 feed it [2, 4, 5]"
    }


def test_wrong_layers_are_found_without_a_record(place: Path, tmp_path: Path) -> None:
    draft = _copy(place, tmp_path, [1, 3, 4], record=False)
    found = why(draft, str(place / "target"), str(place / "wide"))
    assert found[0].ok is None and "does not say what it was trained on" in found[0].text
    assert (
        "fed [1, 3, 5]" in wrong(found)["layers"]
        and "it was trained on those layers" in wrong(found)["layers"]
    )


def test_states_of_another_model_are_refused_and_such_a_draft_is_named(place: Path) -> None:
    with pytest.raises(K2Error, match="made with another model"):
        train(place, "foreign", "refused")
    train(place, "foreign", "alien", accept=("model",), epochs=1)
    said = wrong(why(place / "alien" / "draft-best", str(place / "target")))
    assert "another model" in said["model"]


def test_other_layers_are_refused_when_a_draft_is_trained_on(place: Path) -> None:
    with pytest.raises(K2Error, match=r"layers \[1, 2, 4\].* was trained on \[1, 3, 5\]"):
        train(place, "low", "refused", init=str(place / "good" / "draft-best"), draft_vocab_size=0)


def test_the_command_prints_it_and_fails(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = _copy(place, tmp_path, [1, 3, 4])
    assert cli.main(["evaluate", "--why", "--draft", str(draft), "--target", str(place / "target")]) == 1
    assert "WRONG   layers: trained on layers [1, 3, 5]" in capsys.readouterr().out
    good = str(place / "good" / "draft-best")
    assert cli.main(["evaluate", "--why", "--draft", good, "--target", str(place / "target"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    assert cli.main(["evaluate", "--why", "--draft", good]) == 2
    capsys.readouterr()
    assert (
        cli.main(
            [
                "evaluate",
                "--why",
                "--draft",
                good,
                "--target",
                str(place / "target"),
                "--states",
                str(place / "low"),
            ]
        )
        == 1
    )
    assert "extract with --boundaries 1,2,3,4,5" in capsys.readouterr().err


def _copy(place: Path, tmp_path: Path, ids: list[int], *, record: bool = True) -> Path:
    draft = tmp_path / "draft"
    shutil.copytree(place / "good" / "draft-best", draft)
    raw = json.loads((draft / "config.json").read_text())
    raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = ids
    if not record:
        del raw["k2tui"]
    (draft / "config.json").write_text(json.dumps(raw))
    return draft
