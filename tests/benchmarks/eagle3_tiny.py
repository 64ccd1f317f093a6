"""The whole way to a draft on a CPU: the shipped tiny target answers prompts, its states are kept, a draft is trained and judged.

    python tests/benchmarks/eagle3_tiny.py --out DIR [--prompts 240] [--epochs 12]

Needs transformers (the extra `local`). Prompts ask about functions of this Python's standard library, which is what the target
has read. Prints the accept length of the untrained and the trained draft on held-out prompts, and the seconds of each part.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sysconfig
import time
from pathlib import Path

import torch

from k2tui.capture.ids import usual_boundaries
from k2tui.capture.model import model_facts
from k2tui.eagle3.train import main as train
from k2tui.paths import assets_dir
from k2tui.states import Manifest, StatesWriter, WriterLimits
from k2tui.states.writer import write_sample

HELD = 32


def make_prompts(count: int, seed: int = 0) -> list[str]:
    """Questions about functions of the standard library, each function once."""
    found: list[str] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError, OSError):
            continue
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
                found.append(f"{path.stem}.{node.name}")
    random.Random(seed).shuffle(found)
    ask = ("Describe {}.", "Write the function {}.")
    return [ask[i % 2].format(name) for i, name in enumerate(found[:count])]


@torch.no_grad()
def answer(model, prompts: list[list[int]], tokens: int, eos: int) -> list[list[int]]:  # type: ignore[no-untyped-def]
    """Greedy answers of a left-padded batch."""
    longest = max(len(p) for p in prompts)
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    answers: list[list[int]] = []
    for row in out[:, longest:].tolist():
        answers.append(row[: row.index(eos) + 1] if eos in row else row)
    return answers


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=240)
    parser.add_argument("--answer-tokens", type=int, default=96)
    parser.add_argument("--epochs", type=int, default=12)
    args, rest = parser.parse_known_args()
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    folder = assets_dir() / "tiny-target"
    facts = model_facts(folder)
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    eos = int(model.config.eos_token_id)
    prompts = [
        tokenizer.encode(f"<|begin|><|user|>\n{p}<|end|>\n<|assistant|>\n", add_special_tokens=False).ids
        for p in make_prompts(args.prompts)
    ]
    start = time.perf_counter()
    answers: list[list[int]] = []
    for at in range(0, len(prompts), 32):
        answers += answer(model, prompts[at : at + 32], args.answer_tokens, eos)
    print(
        f"{len(prompts)} answers, {sum(map(len, answers))} tokens in {time.perf_counter() - start:.0f} s",
        flush=True,
    )
    start = time.perf_counter()
    boundaries = usual_boundaries(facts.num_hidden_layers)
    manifest = Manifest(
        hidden_size=facts.hidden_size, num_hidden_layers=facts.num_hidden_layers, boundaries=boundaries, vocab_size=facts.vocab_size, model_path=str(folder),
        model_hash=facts.model_hash, tokenizer_hash=facts.tokenizer_hash, template_hash=facts.template_hash, engine="transformers",
    )  # fmt: skip
    sets = {"states": range(HELD, len(prompts)), "held": range(min(HELD, len(prompts)))}
    for name, picked in sets.items():
        writer = StatesWriter(args.out / name, manifest, writer="bench", limits=WriterLimits(min_free_b=0))
        for i in picked:
            ids = torch.tensor(prompts[i] + answers[i])
            mask = torch.zeros(len(ids), dtype=torch.int64)
            mask[len(prompts[i]) :] = 1
            with torch.no_grad():
                got = model(ids[None], output_hidden_states=True)
            aux = torch.cat([got.hidden_states[b][0] for b in boundaries], 1).bfloat16()
            last = got.hidden_states[-1][0].bfloat16()  # the last one is after the final norm
            write_sample(
                writer,
                i,
                ids.numpy(),
                mask.numpy(),
                aux.contiguous().view(torch.uint16).numpy(),
                last.contiguous().view(torch.uint16).numpy(),
            )
        writer.close()
    with (args.out / "held.jsonl").open("w") as fh:
        for i in sets["held"]:
            fh.write(json.dumps({"input_ids": prompts[i]}) + "\n")
    print(f"states of {len(prompts)} samples in {time.perf_counter() - start:.0f} s", flush=True)
    start = time.perf_counter()
    train(
        [
            "--states", str(args.out / "states"), "--eval-states", str(args.out / "held"), "--target", str(folder), "--out", str(args.out / "run"), "--epochs", str(args.epochs),
            "--lr", "2e-3", "--ttt-length", "5", "--draft-vocab-size", "1024", "--batch-size", "16", "--max-tokens", "2048", "--chains", "32", *rest,
        ]
    )  # fmt: skip
    print(f"training in {time.perf_counter() - start:.0f} s")
    rows = [json.loads(line) for line in (args.out / "run" / "metrics.jsonl").read_text().splitlines()]
    evals = [r for r in rows if r["kind"] == "eval"]
    print(
        f"expected accept length on held-out prompts: {evals[0]['accept_length']:.3f} untrained, {max(e['accept_length'] for e in evals):.3f} trained"
    )


if __name__ == "__main__":
    main()
