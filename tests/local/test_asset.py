"""The shipped tiny target: its shape on disk, its tokenizer, and that it has really learnt."""

from __future__ import annotations

import importlib.util
import json
import math
import sysconfig
from pathlib import Path
from types import ModuleType

import torch

from k2tui import paths
from k2tui.local.checkpoint import open_checkpoint
from k2tui.local.text import Tokenizer

from .inprocess import load
from .test_decoder import full_forward

FOLDER = paths.assets_dir() / "tiny-target"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tiny_target_{name}", FOLDER / "train" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_shape_on_disk() -> None:
    checkpoint = open_checkpoint(FOLDER)
    assert len(checkpoint.shards) == 64
    assert sum(file.stat().st_size for file in FOLDER.glob("*") if file.is_file()) <= 12_000_000
    assert checkpoint.config["num_hidden_layers"] >= 7  # EAGLE-3's three auxiliary layers are distinct
    assert (FOLDER / "LICENSE").is_file()
    assert (FOLDER / "README.md").is_file()


def test_tokenizer() -> None:
    tokenizer = Tokenizer(FOLDER)
    for text in ("def f(x):\n    return x\n", "  spaces   and 12345 é 漢字 😀\t"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert tokenizer.encode("x")[0] == tokenizer.token_id("<|begin|>")
    ids = tokenizer.chat([{"role": "user", "content": "Hi"}])
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|begin|><|user|>\nHi<|end|>\n<|assistant|>\n"


def test_transformers_reads_the_same_tokenizer() -> None:
    from transformers import PreTrainedTokenizerFast

    theirs, ours = PreTrainedTokenizerFast.from_pretrained(FOLDER), Tokenizer(FOLDER)
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "What does os do?"}]
    assert theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"] == ours.chat(
        messages
    )
    assert theirs("import os").input_ids == ours.encode("import os")


def test_loss_is_far_below_a_unigram_model() -> None:
    """On files that the split keeps out of training. (Another Python's library differs a little from the one trained on.)"""
    corpus = script("corpus")
    tokenizer, decoder = Tokenizer(FOLDER), load(FOLDER)
    root = Path(sysconfig.get_paths()["stdlib"])
    total = count = 0.0
    for rel, text in corpus.library_files(root):
        if rel.startswith("test/") or corpus.split_of(rel) != "heldout":
            continue
        ids = tokenizer.encode(text)[:120]
        with torch.inference_mode():
            logits, _ = full_forward(decoder, ids[:-1])
        total += float(torch.nn.functional.cross_entropy(logits[0], torch.tensor(ids[1:]), reduction="sum"))
        count += len(ids) - 1
        if count > 1500:
            break
    assert count > 500
    figures = json.loads((FOLDER / "training.json").read_text())
    unigram = figures["baseline_nats_per_token"]["text"]["unigram"]
    assert total / count < unigram - 2.5, f"{total / count:.2f} nats per token against {unigram:.2f}"
    assert math.isfinite(total)
