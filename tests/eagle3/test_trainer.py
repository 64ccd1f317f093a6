"""Runs of the real trainer on the small world: learning, resume, ranks, alarms, refusals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from k2tui.eagle3 import saves, trainer
from k2tui.eagle3.step import OptimOptions
from k2tui.eagle3.trainer import Trainer, TrainOptions
from k2tui.eagle3.ttt import TttOptions
from k2tui.errors import K2Error

from . import world

SHOWN = ("step", "loss", "losses", "accuracy", "learning_rate", "grad_norm", "tokens")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    head = world.make_target(root / "target")
    world.write_states(root / "states", world.make_samples(head, 40), root / "target")
    return root


def options(place: Path, out: Path, **over: object) -> TrainOptions:
    base: dict[str, object] = {
        "states": str(place / "states"), "target": str(place / "target"), "out": str(out), "held_out": 0.15, "epochs": 2, "batch_size": 8, "draft_vocab_size": 48,
        "ttt": TttOptions(ttt_length=3), "optim": OptimOptions(learning_rate=3e-3), "device": "cpu", "chains": 3, "save_every": 3, "eval_every": 100,
    }  # fmt: skip
    return TrainOptions(**{**base, **over})  # type: ignore[arg-type]


def train(chosen: TrainOptions) -> dict[str, object]:
    return Trainer(chosen, say=lambda text: None).run()


def curve(out: Path) -> list[dict[str, object]]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: r[k] for k in SHOWN} for r in rows if r["kind"] == "step"]


def flags(place: Path, out: Path, *more: str) -> list[str]:
    return [
        "--states", str(place / "states"), "--target", str(place / "target"), "--out", str(out), "--held-out", "0.15", "--epochs", "2", "--draft-vocab-size", "48",
        "--ttt-length", "3", "--lr", "3e-3", "--device", "cpu", "--chains", "0", "--save-every", "3", "--eval-every", "100", *more,
    ]  # fmt: skip


ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[2])}


@pytest.fixture(scope="module")
def whole(place: Path) -> list[dict[str, object]]:
    """The curve of a run that nobody stopped."""
    train(options(place, place / "whole", chains=0))
    return curve(place / "whole")


def test_training_learns_and_beats_the_untrained_draft(place: Path, tmp_path: Path) -> None:
    result = train(options(place, tmp_path, epochs=5, eval_every=0))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    first = next(r for r in rows if r["kind"] == "eval")
    assert first["step"] == 0 and first["accept_length"] < 1.2
    assert result["expected_accept_length"] > first["accept_length"] + 0.3  # type: ignore[operator]
    assert result["chain_accept_length"] > 1.25  # type: ignore[operator]
    assert (tmp_path / "draft-best" / "model.safetensors").exists() and (
        tmp_path / "draft-last" / "README.md"
    ).exists()
    steps = [r for r in rows if r["kind"] == "step"]
    assert all(r["tok_s"] > 0 for r in steps) and steps[-1]["eta_s"] == 0
    assert steps[0]["eta_s"] is None and all(r["eta_s"] > 0 for r in steps[3:-1])


def test_everything_beside_the_steps_is_told(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the log and in the job's progress: what goes on before the first step, between steps and after the last."""
    notes: list[tuple[str, int, int | None]] = []

    def told(done: int, total: int | None, unit: str, note: str, *_: object, **__: object) -> None:
        notes.append((note, done, total))

    monkeypatch.setattr("k2tui.eagle3.progress.report_progress", told)
    monkeypatch.setattr("k2tui.eagle3.trainer.report_progress", told)
    judged: list[int] = []
    real = trainer.evaluate
    monkeypatch.setattr(
        "k2tui.eagle3.trainer.evaluate", lambda *a, **k: (judged.append(len(a[1].lengths)), real(*a, **k))[1]
    )
    lines: list[str] = []
    Trainer(options(place, tmp_path, max_steps=4, eval_every=2, keep_first=True), say=lines.append).run()
    names = [n.split(":")[0] for n, _, _ in notes]
    order = [n for i, n in enumerate(names) if i == 0 or n != names[i - 1]]
    assert order[:8] == [
        "loading the target's embedding and head", f"opening states {place / 'states'}", "counting tokens", "moving the draft to its device",
        "judging the untrained draft", "chain drafting on held-out text", "writing draft-first", "first step",
    ]  # fmt: skip
    assert order[-3:] == ["chain drafting on held-out text", "writing draft-last", "done"]
    assert {"judging on held-out text", "saving"} <= set(order[8:-3])
    assert ("judging the untrained draft: 6/6 samples", 0, 4) in notes
    assert ("judging on held-out text: 6/6 samples", 2, 4) in notes
    assert [d for _, d, _ in notes] == sorted(d for _, d, _ in notes), "the bar never runs back"
    assert (
        any(x.startswith("judging the untrained draft: 6 samples") for x in lines) and "first step" in lines
    )
    assert judged == [6, 6, 6], "before, at step 2 and at the end: the last weights are judged once"


def test_an_untrained_draft_is_judged_on_a_bounded_number_of_tokens(place: Path, tmp_path: Path) -> None:
    one = Trainer(options(place, tmp_path, held_out=0.5), say=lambda text: None)
    lengths = one.held.lengths
    some = trainer._first(one.held, sum(lengths[:3]))
    assert some.lengths == lengths[:3] and some.mask(2).tolist() == one.held.mask(2).tolist()
    assert trainer._first(one.held, 1).lengths == lengths[:1]
    assert trainer._first(one.held, 10**6) is one.held


def test_a_resumed_run_prints_the_same_numbers(
    place: Path, tmp_path: Path, whole: list[dict[str, object]]
) -> None:
    train(options(place, tmp_path / "parts"))
    folder = tmp_path / "parts" / "saves"
    for save in folder.glob("step-*"):  # as if the run had ended after its save at step 6
        if save.name > "step-00000006":
            import shutil

            shutil.rmtree(save)
    train(options(place, tmp_path / "parts"))
    assert curve(tmp_path / "parts") == whole


def test_a_run_killed_dead_resumes_exactly(
    place: Path, tmp_path: Path, whole: list[dict[str, object]]
) -> None:
    out = tmp_path / "killed"
    line = [sys.executable, "-m", "k2tui.eagle3.train", *flags(place, out)]
    run = subprocess.Popen(line, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (out / "saves" / "last.json").exists() and time.monotonic() < deadline and run.poll() is None:
        time.sleep(0.02)
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert (out / "saves" / "last.json").exists()
    done = subprocess.run(line, env=ENV, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "resumed after step" in done.stderr or run.returncode == 0
    assert curve(out) == whole


def test_a_stop_signal_saves_and_ends(place: Path, tmp_path: Path) -> None:
    line = [
        sys.executable,
        "-m",
        "k2tui.eagle3.train",
        *flags(place, tmp_path, "--epochs", "400", "--save-every", "100000"),
    ]
    run = subprocess.Popen(line, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    metrics = tmp_path / "metrics.jsonl"
    while time.monotonic() < deadline and not (metrics.exists() and '"kind": "step"' in metrics.read_text()):
        time.sleep(0.05)
    run.send_signal(signal.SIGTERM)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 143, errors
    save = saves.last_save(tmp_path / "saves")
    assert save is not None and saves.read_facts(save)["place"]["step"] == len(curve(tmp_path))


TWO_RANKS = """
import os, sys
from k2tui.eagle3.train import main
for port, name in zip(os.environ["PORTS"].split(","), sys.argv[2].split(",")):
    os.environ["MASTER_PORT"] = port  # a group of its own: runs are processes of their own elsewhere
    args = sys.argv[3:] + ["--out", f"{sys.argv[1]}/{name}"] + ([] if name == "plain" else ["--shard"])
    assert main(args) == 0
"""


def run_two(place: Path, root: Path, names: list[str], small: list[str]) -> None:
    """Two ranks over gloo, started as torchrun starts them, train into each of these folders ("plain": not sharded)."""
    line = [
        sys.executable,
        "-c",
        TWO_RANKS,
        str(root),
        ",".join(names),
        *flags(place, root / "unused", *small),
    ]
    doors = [socket.socket() for _ in names]
    for door in doors:
        door.bind(("127.0.0.1", 0))
    ports = ",".join(str(door.getsockname()[1]) for door in doors)
    for door in doors:
        door.close()
    both = [
        subprocess.Popen(
            line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env={**ENV, "RANK": str(r), "LOCAL_RANK": str(r), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "PORTS": ports},
        )
        for r in range(2)
    ]  # fmt: skip
    try:
        errors = [p.communicate(timeout=110)[1] for p in both]
    finally:
        for p in both:
            p.kill()
    assert [p.returncode for p in both] == [0, 0], errors[0][-3000:] + errors[1][-3000:]


@pytest.mark.timeout(240)
def test_two_ranks_train_the_same_curve(place: Path, tmp_path: Path) -> None:
    """Data parallel and FSDP2: the curve of one rank; saves of either open on one rank, and go on at another world size."""
    small = ["--max-tokens", "100", "--max-steps", "6", "--save-every", "4"]
    one = options(place, tmp_path / "one", chains=0, max_tokens=100, max_steps=6, save_every=4)
    train(one)
    shutil.copytree(
        tmp_path / "one", tmp_path / "one-cut"
    )  # back to step 4, to go on from there with two ranks
    shutil.rmtree(tmp_path / "one-cut" / "saves" / "step-00000006")
    run_two(place, tmp_path, ["plain", "shard", "one-cut"], small)

    def at_the_end(name: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Weights and moments of a run's last save, read on one rank."""
        again = Trainer(
            options(place, tmp_path / name, chains=0, max_tokens=100, max_steps=6), say=lambda text: None
        )
        assert again._resume() and again.place.step == 6
        return saves.gather(again.stepper)

    weights, moments = at_the_end("one")
    assert weights and moments
    for mode in ("plain", "shard"):
        a, b = curve(tmp_path / "one"), curve(tmp_path / mode)
        assert len(a) == len(b) == 6
        for x, y in zip(a, b, strict=True):
            assert y["loss"] == pytest.approx(x["loss"], rel=1e-5) and y["grad_norm"] == pytest.approx(
                x["grad_norm"], rel=1e-4
            )
            assert y["tokens"] == x["tokens"] and y["accuracy"] == pytest.approx(x["accuracy"], abs=0.02)
        others, other_moments = at_the_end(mode)
        assert weights.keys() == others.keys() and moments.keys() == other_moments.keys()
        for name in weights:
            torch.testing.assert_close(weights[name], others[name], rtol=2e-3, atol=2e-4)
        for name in moments:
            torch.testing.assert_close(moments[name], other_moments[name], rtol=2e-3, atol=2e-4)
    parts = sorted(p.name for p in (tmp_path / "shard" / "saves" / "step-00000006").glob("*.safetensors"))
    assert len(parts) == 2, "each sharded rank wrote its own part"

    # and the other way: from two sharded ranks, at step 4, on with one
    shutil.copytree(tmp_path / "shard", tmp_path / "shard-cut")
    shutil.rmtree(tmp_path / "shard-cut" / "saves" / "step-00000006")
    train(replace(one, out=str(tmp_path / "shard-cut")))
    for name in ("shard-cut", "one-cut"):
        for x, y in zip(curve(tmp_path / "one"), curve(tmp_path / name), strict=True):
            assert y["loss"] == pytest.approx(x["loss"], rel=1e-5), (name, x["step"])
        again, _ = at_the_end(name)
        for key in weights:
            torch.testing.assert_close(weights[key], again[key], rtol=2e-3, atol=2e-4)


def test_other_options_are_refused_on_resume(place: Path, tmp_path: Path) -> None:
    train(options(place, tmp_path, max_steps=3, chains=0))
    with pytest.raises(K2Error, match="batch_size"):
        train(options(place, tmp_path, max_steps=3, batch_size=4))
    with pytest.raises(K2Error, match="other samples"):
        head = world.make_target(tmp_path / "t2")
        world.write_states(tmp_path / "s2", world.make_samples(head, 41), place / "target")
        train(options(place, tmp_path, max_steps=3, states=str(tmp_path / "s2")))
    train(options(place, tmp_path, max_steps=3, batch_size=4, resume=False, chains=0))


def test_nan_alarm_keeps_the_weights(place: Path, tmp_path: Path) -> None:
    trainer = Trainer(options(place, tmp_path, chains=0, held_out=0.0), say=lambda text: None)
    with torch.no_grad():
        trainer.head.inside.fill_(float("nan"))
    before = {n: p.detach().clone() for n, p in trainer.module.draft.named_parameters()}
    with pytest.raises(K2Error, match="not finite"):
        trainer.run()
    assert all(torch.equal(p, before[n]) for n, p in trainer.module.draft.named_parameters())


def test_no_signal_alarm(place: Path, tmp_path: Path) -> None:
    head = world.make_target(tmp_path / "t")
    blank = [
        type(s)(s.input_ids, torch.zeros_like(s.loss_mask), s.aux, s.last)
        for s in world.make_samples(head, 16)
    ]
    world.write_states(tmp_path / "blank", blank, place / "target")
    with pytest.raises(K2Error, match="no signal"):
        train(options(place, tmp_path / "out", states=str(tmp_path / "blank"), held_out=0.0, epochs=20))


def test_a_full_disk_leaves_the_save_before_it(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import safetensors.torch

    said: list[str] = []
    real = safetensors.torch.save_file
    count = {"n": 0}

    def full(tensors, path, *args, **kwargs):  # type: ignore[no-untyped-def]
        count["n"] += "saves" in str(path)
        if "saves" in str(path) and count["n"] > 2:
            raise OSError(28, "No space left on device")
        return real(tensors, path, *args, **kwargs)

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    trainer = Trainer(options(place, tmp_path, chains=0), say=said.append)
    trainer.run()
    assert any("no room" in s for s in said)
    save = saves.last_save(tmp_path / "saves")
    assert save is not None and save.name == "step-00000003"
    assert not list((tmp_path / "saves").glob(".*"))


def test_early_stop(place: Path, tmp_path: Path) -> None:
    result = train(
        options(
            place,
            tmp_path,
            epochs=30,
            optim=OptimOptions(learning_rate=1e-9),
            eval_every=2,
            patience=2,
            chains=0,
        )
    )
    assert result["stopped"] == "no gain" and result["step"] < 20  # type: ignore[operator]


def test_specforge_files_train_too(place: Path, tmp_path: Path) -> None:
    head = world.make_target(tmp_path / "t")
    world.write_ckpt(tmp_path / "hs", world.make_samples(head, 16))
    result = train(
        options(
            place,
            tmp_path / "out",
            states=str(tmp_path / "hs"),
            ttt=TttOptions(ttt_length=3, shifted=False),
            denominator="rows",
            boundaries="1,3,5",
            chains=0,
        )
    )
    config = json.loads((Path(str(result["draft"])) / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 4]


@pytest.mark.parametrize(
    ("over", "words"),
    [
        ({"model_hash": "0" * 32}, "another model"),
        ({"tokenizer_hash": "beef"}, "another tokenizer"),
        ({"template_hash": "beef"}, None),  # the target has no template: nothing to compare
        ({"hidden_size": 31}, "wide"),
        ({"vocab_size": 65}, "65 tokens"),
        ({"last_rows": "none"}, "no last hidden"),
    ],
)
def test_states_of_something_else_are_refused(
    place: Path, tmp_path: Path, over: dict[str, object], words: str | None
) -> None:
    folder = tmp_path / "states"
    folder.mkdir()
    for path in (place / "states").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | over))
    if words is None:
        Trainer(options(place, tmp_path / "out", states=str(folder)), say=lambda text: None)
        return
    with pytest.raises(K2Error, match=words):
        Trainer(options(place, tmp_path / "out", states=str(folder)), say=lambda text: None)
    if words.startswith("another"):
        Trainer(
            options(place, tmp_path / "out", states=str(folder), accept=("model", "tokenizer")),
            say=lambda text: None,
        )


def test_warm_start_keeps_the_map_and_checks_the_layers(place: Path, tmp_path: Path) -> None:
    first = train(options(place, tmp_path / "a", chains=0))
    draft = Path(str(first["draft_last"]))
    warm = Trainer(
        options(place, tmp_path / "b", init=str(draft), draft_vocab_size=0, chains=0), say=lambda text: None
    )
    from k2tui.eagle3.export import load_draft

    assert torch.equal(warm.module.draft.target_ids(), load_draft(draft).target_ids())
    result = warm.run()
    rows = [json.loads(line) for line in (tmp_path / "b" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["kind"] == "eval" and rows[0]["accept_length"] == pytest.approx(
        first["last_accept_length"], abs=0.05
    )
    assert result["step"] == result["total"]
    with pytest.raises(K2Error, match="draft vocabulary of 48"):
        Trainer(options(place, tmp_path / "c", init=str(draft), draft_vocab_size=40), say=lambda text: None)
    config = json.loads((draft / "config.json").read_text())
    config.pop("k2tui")
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, 3, 5]
    (draft / "config.json").write_text(json.dumps(config))
    with pytest.raises(K2Error, match="layers") as caught:
        Trainer(options(place, tmp_path / "d", init=str(draft), draft_vocab_size=0), say=lambda text: None)
    assert "--accept layers" in caught.value.hint
    Trainer(
        options(place, tmp_path / "e", init=str(draft), draft_vocab_size=0, accept=("layers",)),
        say=lambda text: None,
    )


def test_bad_flags_are_said_in_words(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from k2tui.eagle3.train import main

    assert main([*flags(place, tmp_path), "--batch-size", "0"]) == 2
    assert "--batch-size must be a whole number of at least 1, not '0'" in capsys.readouterr().err
    none = ["--states", str(tmp_path / "none"), "--target", str(place / "target"), "--out", str(tmp_path / "out")]
    assert main(none) == 1
    assert "no such folder" in capsys.readouterr().err
    assert main([*flags(place, tmp_path), "--accept", "vibes"]) == 1
    assert "no such check" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--lr", "nan"), ("--lr", "0"), ("--lr", "inf"), ("--clip", "nan"), ("--save-every", "-3"), ("--eval-every", "-1"), ("--max-length", "0"),
        ("--max-length", "-1"), ("--seed", "-1"), ("--max-steps", "-1"), ("--patience", "-1"), ("--chains", "-1"), ("--decay", "nan"), ("--held-out", "1"),
        ("--held-out", "nan"), ("--beta2", "1"), ("--weight-decay", "-1"), ("--warmup-ratio", "2"), ("--draft-vocab-size", "-5"), ("--boundaries", "1,x"),
    ],
)  # fmt: skip
def test_a_number_that_is_none_is_refused_by_its_flag(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, value: str
) -> None:
    from k2tui.eagle3.train import main

    assert main([*flags(place, tmp_path / "out"), f"{flag}={value}"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"k2tui train: {flag} ") and value in said and len(said.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("nproc", ["0", "-3"])
def test_ranks_are_counted_from_one(place: Path, capsys: pytest.CaptureFixture[str], nproc: str) -> None:
    from k2tui.cli import main

    assert main(["train", *flags(place, place / "out"), "--nproc", nproc]) == 2
    assert "--nproc must be a whole number of at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["states", "target", "init", "eval-states"])
def test_the_run_has_a_folder_of_its_own(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    from k2tui.eagle3.train import main

    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "draft-best").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for out, other, words in (("a", "link", "is"), ("link/b/c", "a/b", "is inside"), ("a", "a/draft-best", "writes over")):
        line = [*flags(place, tmp_path / out), f"--{flag}", str(tmp_path / other)]
        assert main(line) == 2
        assert f"--out {tmp_path / out} {words} --{flag} {tmp_path / other}" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path / "a")) == ["b", "draft-best"] and not os.listdir(tmp_path / "a" / "b")


def test_starting_again_removes_saves_only(place: Path, tmp_path: Path) -> None:
    train(options(place, tmp_path, max_steps=3, chains=0))
    folder = tmp_path / "saves"
    theirs = ["notes.txt", "step-by-step", "step-00000002", "mine/last.json", "step.part"]
    (folder / "mine").mkdir()
    for name in theirs:
        (folder / name).write_text("mine")
    (folder / "step-00000099").symlink_to(tmp_path / "elsewhere")
    (folder / ".step-00000009.part").mkdir()
    (folder / ".last.json.x1.tmp").write_text("")
    (folder / "best.json").write_text("{}")
    shutil.copytree(folder / "step-00000003", folder / "step-00000001")
    said: list[str] = []
    Trainer(options(place, tmp_path, max_steps=1, resume=False, chains=0, keep=1), say=said.append).run()
    assert "--no-resume: 2 saves of an earlier run removed" in said
    left = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if "step-00000001" not in str(p))
    assert left == sorted([*theirs, "mine", "last.json", "step-00000099"])
    train(options(place, tmp_path, max_steps=1, keep=1, chains=0))  # nor is any of it a save to go on from


@pytest.fixture(scope="module")
def stopped(place: Path) -> Path:
    """The folder of a run that stands at step 3."""
    train(options(place, place / "stopped", chains=0, max_steps=3))
    return place / "stopped"


def change_state(**over: object):  # type: ignore[no-untyped-def]
    def change(path: Path) -> None:
        raw = json.loads(path.read_text())
        raw |= {k: {**raw[k], **v} if isinstance(v, dict) and raw.get(k) else v for k, v in over.items()}
        path.write_text(json.dumps(raw))

    return change


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def put(text: str):  # type: ignore[no-untyped-def]
    return lambda path: path.write_text(text)


STATE, MOMENTS = "saves/step-00000003/state.json", "saves/step-00000003/moments.safetensors"


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("saves/last.json", fifo, "no regular file (a FIFO)"),
        ("metrics.jsonl", fifo, "no regular file (a FIFO)"),
        (STATE, fifo, "no regular file (a FIFO)"),
        (MOMENTS, fifo, "no regular file (a FIFO)"),
        (MOMENTS, Path.unlink, "No such file"),
        (MOMENTS, put("x"), "cannot be read"),
        (STATE, put("[]"), "no object"),
        (STATE, put("{}"), "format is missing"),
        (STATE, put('{\n"format": 1,}'), "line 2: not valid JSON"),
        (STATE, put("\udc80".encode("utf-8", "surrogateescape").decode("latin-1")), "not valid JSON"),
        (STATE, change_state(format=True), "format is wrong"),
        (STATE, change_state(options=[]), "options is wrong"),
        (STATE, change_state(place={"steps": 1}), "steps 1: no such place"),
        (STATE, change_state(place={"step": "3"}), "step 3: no such place"),
        (STATE, change_state(place={"best": float("inf")}), "best inf: no such place"),
        (STATE, change_state(place={"step": 4}), "step 4 of a run of 3 steps"),
        ("metrics.jsonl", put('{"step": 1}\n3\n'), "line 2: no step"),
        ("metrics.jsonl", put('{"step": "x"}\n'), "line 1: no step"),
        ("metrics.jsonl", put('{"step": 1e400}\n'), "line 1: no step"),
        ("metrics.jsonl", put("{}\n"), "line 1: no step"),
    ],
)  # fmt: skip
def test_what_a_resume_cannot_read_is_named(place: Path, stopped: Path, tmp_path: Path, file: str, change, said: str) -> None:  # type: ignore[no-untyped-def]
    shutil.copytree(stopped, tmp_path / "run")
    change(tmp_path / "run" / file)
    with pytest.raises(K2Error) as caught:
        train(options(place, tmp_path / "run", chains=0, max_steps=3))
    assert caught.value.message.startswith(f"{tmp_path / 'run' / file}") and said in caught.value.message
    assert caught.value.exit_code == 1 and caught.value.hint


def test_torn_lines_and_a_broken_pointer_are_passed_over(place: Path, stopped: Path, tmp_path: Path) -> None:
    shutil.copytree(stopped, tmp_path / "run")
    (tmp_path / "run" / "saves" / "last.json").write_text('{"save": "../../elsewhere"}')
    with (tmp_path / "run" / "metrics.jsonl").open("ab") as fh:
        fh.write(b'{"step": 4}\n{"step": 2, "lo\xff')
    train(options(place, tmp_path / "run", chains=0, max_steps=3))
    assert curve(tmp_path / "run") == curve(stopped)


def test_an_mla_draft_of_eagle_3_1_trains_from_scratch(place: Path, tmp_path: Path) -> None:
    shape = {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"], "hidden_size": world.HIDDEN, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": world.VOCAB, "draft_vocab_size": 48,
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "fc_norm": True, "norm_output": True, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (tmp_path / "shape").mkdir()
    (tmp_path / "shape" / "config.json").write_text(json.dumps(shape))
    result = train(options(place, tmp_path / "out", draft_config=str(tmp_path / "shape"), chains=2))
    config = json.loads((Path(str(result["draft"])) / "config.json").read_text())
    assert (
        config["architectures"] == ["Eagle3DeepseekV2ForCausalLM"]
        and config["norm_output"] is True
        and config["kv_lora_rank"] == 16
    )
    losses = [row["loss"] for row in curve(tmp_path / "out")]
    assert losses[-1] < losses[0]  # type: ignore[operator]


def test_states_saved_before_the_final_norm_are_normed(place: Path, tmp_path: Path) -> None:
    head = world.make_target(tmp_path / "t")
    samples = world.make_samples(head, 4)
    world.write_states(tmp_path / "pre", samples, place / "target", last_norm="pre")
    trainer = Trainer(options(place, tmp_path / "out", states=str(tmp_path / "pre")), say=lambda text: None)
    got = trainer.whole.sample(0).last.float()
    want = samples[0].last.float()
    torch.testing.assert_close(
        got, want / (want.square().mean(-1, keepdim=True) + 1e-5).sqrt(), rtol=1e-2, atol=1e-2
    )
