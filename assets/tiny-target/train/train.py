"""Trains the tiny target: a LlamaForCausalLM of 5.6 M parameters, for a given wall-clock time, on one GPU or a CPU.

    python train.py CORPUS.jsonl.xz TOKENIZER_DIR OUT_DIR --seconds 240

Prints the held-out loss as it falls, and beside it what a unigram and a bigram model reach on the same tokens. Writes a
Hugging Face folder (bf16, one file) and training.json with every figure. The schedule goes by time, so that the run ends
when it should on any machine.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizer import CONTEXT, SPECIAL, dialogue, read
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BEGIN, END = SPECIAL.index("<|begin|>"), SPECIAL.index("<|end|>")
CHAT_SHARE = 0.12  # of the training rows


def config(vocab_size: int, hidden: int = 256, layers: int = 8) -> LlamaConfig:
    """The tiny target's shape; another width or depth keeps the heads at 64 and two query heads a key head."""
    # 8 layers: EAGLE-3's default auxiliary layers 2, n//2, n-3 are distinct; 75 tensors: enough for 64 shards.
    # The head is untied because a draft model's head starts from it, and tools look for lm_head.weight.
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=480 if hidden == 256 else hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        attention_bias=False,
        bos_token_id=BEGIN,
        eos_token_id=END,
        pad_token_id=SPECIAL.index("<|pad|>"),
    )


@dataclass
class Stream:
    """One kind of text as one run of token ids. starts: where documents begin. text_bytes: of the raw text in it."""

    ids: np.ndarray
    starts: np.ndarray
    text_bytes: int


def load(corpus: Path, tokenizer: PreTrainedTokenizerFast) -> dict[str, dict[str, Stream]]:
    """{"train"|"heldout": {"text"|"chat": Stream}}. Weights repeat documents, in the training split only."""
    texts: dict[tuple[str, str], list[tuple[str, int, int]]] = {}
    for record in read(corpus):
        kind = "chat" if "turns" in record else "text"
        text = dialogue(record["turns"]) if kind == "chat" else record["text"]
        raw = sum(len(p.encode()) for t in record["turns"] for p in t) if kind == "chat" else len(text.encode())
        weight = record["weight"] if record["split"] == "train" else 1
        texts.setdefault((record["split"], kind), []).append((text, raw, weight))
    out: dict[str, dict[str, Stream]] = {"train": {}, "heldout": {}}
    for (split, kind), items in sorted(texts.items()):
        encoded = tokenizer.backend_tokenizer.encode_batch([t for t, _, _ in items], add_special_tokens=False)
        parts: list[np.ndarray] = []
        starts: list[int] = []
        at = 0
        for (_, _, weight), encoding in zip(items, encoded, strict=True):
            # a dialogue brings its own <|end|>; a document gets one
            ids = [BEGIN, *encoding.ids] if kind == "chat" else [BEGIN, *encoding.ids, END]
            for _ in range(weight):
                parts.append(np.asarray(ids, dtype=np.uint16))
                starts.append(at)
                at += len(ids)
        out[split][kind] = Stream(np.concatenate(parts), np.asarray(starts), sum(raw for _, raw, _ in items))
    return out


def batch(streams: dict[str, Stream], rows: int, length: int, rng: np.random.Generator) -> torch.Tensor:
    """[rows, length + 1] token ids: plain text from anywhere, dialogues from where one begins."""
    out = np.empty((rows, length + 1), dtype=np.int64)
    for row in range(rows):
        chat = row < round(rows * CHAT_SHARE)
        stream = streams["chat" if chat else "text"]
        last = len(stream.ids) - length - 1
        if chat or rng.random() < 0.1:
            start = int(stream.starts[rng.integers(len(stream.starts))])
        else:
            start = int(rng.integers(last + 1))
        start = min(start, last)
        out[row] = stream.ids[start : start + length + 1]
    return torch.from_numpy(out)


def windows(stream: Stream, length: int, rows: int, limit: int) -> list[torch.Tensor]:
    """The stream cut into [rows, length + 1] blocks, at most `limit` tokens; the same blocks every time."""
    count = min(len(stream.ids) - 1, limit) // length
    cut = [stream.ids[i * length : (i + 1) * length + 1].astype(np.int64) for i in range(count)]
    return [torch.from_numpy(np.stack(cut[i : i + rows])) for i in range(0, len(cut), rows)]


def simple_models(train: np.ndarray, heldout: np.ndarray, vocab: int) -> tuple[float, float]:
    """Held-out nats per token of a unigram model and of a bigram model backed off to it, both from training counts."""
    unigram = np.bincount(train, minlength=vocab).astype(np.float64) + 1.0
    p1 = unigram / unigram.sum()
    pairs = np.bincount(train[:-1].astype(np.int64) * vocab + train[1:], minlength=vocab * vocab).reshape(vocab, vocab)
    before, after = heldout[:-1].astype(np.int64), heldout[1:].astype(np.int64)
    back_off = 20.0  # pseudo-count of the unigram in each row
    p2 = (pairs[before, after] + back_off * p1[after]) / (pairs.sum(1)[before] + back_off)
    return float(-np.log(p1[after]).mean()), float(-np.log(p2).mean())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("corpus", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--rows", type=int, default=0, help="rows a step; 0 = 128 on a GPU, 4 on a CPU")
    parser.add_argument("--length", type=int, default=0, help="tokens a row; 0 = 1024 on a GPU, 256 on a CPU")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=256, help="width, a multiple of 128 (384 with 80 layers: about 140 M parameters)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    rows = args.rows or (128 if on_gpu else 4)
    length = args.length or (CONTEXT if on_gpu else 256)
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    torch.set_float32_matmul_precision("high")

    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.tokenizer)
    streams = load(args.corpus, tokenizer)
    vocab = len(tokenizer)
    mixture = np.concatenate([streams["train"]["text"].ids, streams["train"]["chat"].ids])
    for split, kinds in streams.items():
        print(split, {k: f"{len(s.ids):,} tokens of {s.text_bytes:,} bytes" for k, s in kinds.items()}, flush=True)
    baseline: dict[str, dict[str, float]] = {}
    bytes_per_token: dict[str, float] = {}
    for kind, stream in streams["heldout"].items():
        one, two = simple_models(mixture, stream.ids, vocab)
        baseline[kind] = {"unigram": one, "bigram": two}
        bytes_per_token[kind] = stream.text_bytes / len(stream.ids)

    model = LlamaForCausalLM(config(vocab, args.hidden, args.layers)).to(device)
    if args.layers > 16:  # what every layer adds to the stream starts smaller the more of them there are (GPT-2's rule), or a deep model may diverge
        with torch.no_grad():
            for layer in model.model.layers:
                for out in (layer.self_attn.o_proj, layer.mlp.down_proj):
                    out.weight.mul_((2 * args.layers) ** -0.5)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters:,} parameters, bf16 {2 * parameters / 1e6:.2f} MB, on {device}", flush=True)
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if not (p.dim() == 2 and "embed" not in n)]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=on_gpu)

    def forward_loss(block: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=on_gpu):
            logits = model(input_ids=block[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), block[:, 1:].flatten())

    if on_gpu and not args.no_compile:
        try:
            for layer in model.model.layers:  # by the layer: all share one compiled program, which is ready in seconds at any depth
                layer.compile()
            forward_loss(batch(streams["train"], rows, length, rng).to(device)).backward()
            optimizer.zero_grad(set_to_none=True)
            print("compiled", flush=True)
        except Exception as err:  # no compiler on this machine: the plain path is slower, not wrong
            print(f"not compiled: {type(err).__name__}: {str(err)[:200]}", flush=True)
            torch._dynamo.reset()
            for layer in model.model.layers:
                layer._compiled_call_impl = None
            model.zero_grad(set_to_none=True)

    held = {k: windows(s, length, rows, 400_000 if on_gpu else 20_000) for k, s in streams["heldout"].items()}

    @torch.no_grad()
    def evaluate() -> dict[str, float]:
        model.eval()
        result: dict[str, float] = {}
        for kind, blocks in held.items():
            total = tokens = 0.0
            for block in blocks:
                count = block[:, 1:].numel()
                total += float(forward_loss(block.to(device))) * count
                tokens += count
            result[kind] = total / tokens
        model.train()
        return result

    def line(losses: dict[str, float]) -> str:
        return ", ".join(
            f"{k} {v:.4f} nats/token {v / math.log(2) / bytes_per_token[k]:.3f} bits/byte "
            f"(unigram {baseline[k]['unigram']:.3f}, bigram {baseline[k]['bigram']:.3f})"
            for k, v in losses.items()
        )

    model.train()
    evaluate()  # warm, so that the clock counts training
    began = time.monotonic()
    next_report = began + args.seconds / 12
    step = seen = 0
    best = (math.inf, -1, {})
    train_loss = torch.zeros((), device=device)
    since = 0
    history: list[dict[str, float]] = []
    while True:
        elapsed = time.monotonic() - began
        if elapsed >= args.seconds:
            break
        part = elapsed / args.seconds
        scale = part / 0.02 if part < 0.02 else 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (part - 0.02) / 0.98))
        for group in optimizer.param_groups:
            group["lr"] = args.lr * scale
        block = batch(streams["train"], rows, length, rng)
        block = block.pin_memory().to(device, non_blocking=True) if on_gpu else block
        loss = forward_loss(block)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        train_loss += loss.detach()
        since += 1
        step += 1
        seen += rows * length
        if step % 8 == 0 and on_gpu:
            torch.cuda.synchronize()  # keeps the time schedule honest
        if time.monotonic() >= next_report:
            losses = evaluate()
            mean = float(train_loss) / since
            now = time.monotonic() - began
            print(f"{now:6.1f} s step {step} {seen / now / 1e3:,.0f} K tokens/s train {mean:.4f} held-out {line(losses)}", flush=True)
            history.append({"seconds": now, "step": step, "tokens": seen, "train": mean, **losses})
            train_loss.zero_()
            since = 0
            next_report += args.seconds / 12
            if losses["text"] < best[0] - 0.01 and part > 0.3:
                best = (losses["text"], step, {k: v.detach().clone() for k, v in model.state_dict().items()})
    trained_s = time.monotonic() - began
    for layer in model.model.layers:  # what follows is short, and generating would compile every layer again for its cache
        layer._compiled_call_impl = None
    losses = evaluate()
    if best[2] and best[0] < losses["text"] - 0.01:  # it began to learn by heart: the earlier weights are better
        print(f"held-out text is better at step {best[1]}: {best[0]:.4f} against {losses['text']:.4f}; those weights are kept")
        model.load_state_dict(best[2])

    # What is shipped is bf16, so the last figures are those of the rounded weights.
    model.to(torch.bfloat16).to(torch.float32)
    losses = evaluate()
    fit_blocks = windows(streams["train"]["text"], length, rows, 400_000 if on_gpu else 20_000)
    with torch.no_grad():
        model.eval()
        fit = sum(float(forward_loss(b.to(device))) * b.shape[0] for b in fit_blocks) / sum(b.shape[0] for b in fit_blocks)
    print(f"final, bf16 weights: held-out {line(losses)}; the first 400K training tokens {fit:.4f}", flush=True)

    args.out.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(bos_token_id=BEGIN, eos_token_id=END, pad_token_id=SPECIAL.index("<|pad|>"))
    model.save_pretrained(args.out, max_shard_size="1GB")
    saved = json.loads((args.out / "config.json").read_text())
    saved["rope_theta"] = 10000.0  # readers older than transformers 5 look for it here
    saved["torch_dtype"] = "bfloat16"
    (args.out / "config.json").write_text(json.dumps(saved, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (args.tokenizer / name).resolve() != (args.out / name).resolve():
            shutil.copy(args.tokenizer / name, args.out / name)
    size = (args.out / "model.safetensors").stat().st_size
    figures = {
        "parameters": parameters,
        "weights_bytes": size,
        "train_seconds": trained_s,
        "steps": step,
        "tokens_seen": seen,
        "unique_train_tokens": {k: len(s.ids) for k, s in streams["train"].items()},
        "heldout_tokens": {k: sum(b[:, 1:].numel() for b in v) for k, v in held.items()},
        "heldout_nats_per_token": losses,
        "heldout_bits_per_byte": {k: v / math.log(2) / bytes_per_token[k] for k, v in losses.items()},
        "train_nats_per_token": fit,
        "baseline_nats_per_token": baseline,
        "bytes_per_token": bytes_per_token,
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or "cpu",
        "torch": torch.__version__,
        "seed": args.seed,
        "history": history,
    }
    (args.out / "training.json").write_text(json.dumps(figures, indent=1) + "\n")
    print(f"{args.out / 'model.safetensors'}: {size / 1e6:.2f} MB", flush=True)
    if args.hidden == 256 and size > 12_000_000:
        print("the weights are larger than 12 MB", file=sys.stderr)
        return 1

    model.to(torch.float32)
    for question in ("What does textwrap.dedent do?", "Write the function os.path.join.", "Explain lambda in Python."):
        text = tokenizer.apply_chat_template([{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True)
        ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)], device=device)
        made = model.generate(ids, max_new_tokens=80, do_sample=False, attention_mask=torch.ones_like(ids))
        print(f"--- {question}\n{tokenizer.decode(made[0, ids.shape[1] :])}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
