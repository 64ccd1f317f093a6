"""Trains the tiny target's byte-level BPE on the corpus and writes tokenizer.json and tokenizer_config.json.

    python tokenizer.py CORPUS.jsonl.xz OUT_DIR [--vocab-size 2048]
"""

from __future__ import annotations

import argparse
import json
import lzma
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SPECIAL = ("<|pad|>", "<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")  # ids 0..5
CONTEXT = 1024
# One role marker, a new line, the text, <|end|>, a new line. <|end|> is also the end of a plain document: one EOS for all.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)


def dialogue(turns: list[list[str]]) -> str:
    """The same text as the chat template gives, without the leading <|begin|>."""
    return "".join(f"<|user|>\n{q}<|end|>\n<|assistant|>\n{a}<|end|>\n" for q, a in turns)


def read(corpus: Path) -> Iterator[dict]:
    with lzma.open(corpus, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def train(corpus: Path, vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()

    def texts() -> Iterator[str]:
        for record in read(corpus):
            if record["split"] != "train" or record["path"].startswith("test/"):
                continue
            if "turns" in record:
                yield "\n".join(part for turn in record["turns"] for part in turn)
            else:
                yield record["text"]

    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<|begin|> $A", pair="<|begin|> $A $B", special_tokens=[("<|begin|>", 1)]),
        ]
    )
    return tokenizer


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("corpus", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--vocab-size", type=int, default=2048)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = train(args.corpus, args.vocab_size)
    tokenizer.save(str(args.out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "additional_special_tokens": ["<|system|>", "<|user|>", "<|assistant|>"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
        "chat_template": CHAT_TEMPLATE,
    }
    (args.out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    sample = "def total(values):\n    return sum(values)  # 12 names\n"
    ids = tokenizer.encode(sample, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == sample
    print(f"{args.out}: {tokenizer.get_vocab_size()} tokens; a line of code takes {len(ids)} for {len(sample)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
