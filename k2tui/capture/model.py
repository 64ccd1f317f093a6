"""A target's folder, looked at for identity: hashes of model, tokenizer and template, layer counts, single tensors. No engine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k2tui.errors import K2Error
from k2tui.parsing import parse_json
from k2tui.regular import read_regular

if TYPE_CHECKING:
    import torch

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tiktoken.model",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
)
EMBED_NAMES = ("model.embed_tokens.weight", "language_model.model.embed_tokens.weight", "embed_tokens.weight")
HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight")
NORM_NAMES = ("model.norm.weight", "language_model.model.norm.weight")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    path: str
    architecture: str
    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    model_hash: str
    tokenizer_hash: str
    template_hash: str


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config.json."""
    return config.get("text_config") or config.get("llm_config") or config


def model_facts(folder: Path) -> ModelFacts:
    """Raises K2Error when the folder is no checkpoint."""
    path = folder / "config.json"
    try:
        config = parse_json(read_regular(path))
        text = text_config(config)
        hidden, layers = int(text["hidden_size"]), int(text["num_hidden_layers"])
    except OSError as err:
        raise K2Error(f"{path}: {err.strerror or err}", "give the folder of the target model")
    except (ValueError, KeyError, TypeError) as err:
        raise K2Error(
            f"{path}: {type(err).__name__}: {err}", "this config names no hidden_size or num_hidden_layers"
        )
    return ModelFacts(
        path=str(folder),
        architecture=(config.get("architectures") or [""])[0],
        hidden_size=hidden,
        num_hidden_layers=layers,
        vocab_size=int(text.get("vocab_size", 0)),
        model_hash=model_hash(folder),
        tokenizer_hash=_files_hash(folder, _TOKENIZER_FILES),
        template_hash=template_hash(folder),
    )


def model_hash(folder: Path) -> str:
    """Hash of config.json and of every weight file's name, size and header: tells models apart without reading a terabyte."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}:".encode())
        with path.open("rb") as fh:
            length = int.from_bytes(fh.read(8), "little")
            digest.update(fh.read(min(length, size, 64 << 20)))
            # headers of two fine-tunes are equal: some of the weights are not
            for part in range(1, 5):
                fh.seek(size * part // 5)
                digest.update(fh.read(4096))
    return digest.hexdigest()[:32]


def template_hash(folder: Path) -> str:
    """Hash of the chat template; "" when the model has none."""
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        return hashlib.sha256(jinja.read_bytes()).hexdigest()[:16]
    try:
        template = parse_json((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get(
            "chat_template"
        )
    except (OSError, ValueError):
        return ""
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:16] if template else ""


def _files_hash(folder: Path, names: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    found = False
    for name in names:
        path = folder / name
        if path.is_file():
            found = True
            digest.update(name.encode() + path.read_bytes())
    return digest.hexdigest()[:16] if found else ""


def load_tensor(folder: Path, names: tuple[str, ...]) -> torch.Tensor | None:
    """The first of these tensors that the checkpoint holds (read alone, not the whole shard); None when it has none."""
    import torch

    from k2tui.states.layout import read_header

    index = folder / "model.safetensors.index.json"
    where: dict[str, str] = {}
    if index.is_file():
        where = json.loads(index.read_text(encoding="utf-8")).get("weight_map", {})
    for name in names:
        files = (
            [folder / where[name]]
            if name in where
            else ([] if where else sorted(folder.glob("*.safetensors")))
        )
        for path in files:
            at = read_header(path).tensors.get(name)
            if at is None:
                continue
            dtype = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16}.get(at.dtype)
            if dtype is None:
                raise K2Error(
                    f"{path}: {name} is stored as {at.dtype}; the check needs it in bf16, fp16 or fp32"
                )
            with path.open("rb") as fh:
                fh.seek(at.start)
                raw = bytearray(fh.read(at.end - at.start))
            return torch.frombuffer(raw, dtype=dtype).reshape(at.shape)
    return None


def load_head(folder: Path) -> torch.Tensor:
    """The target's output head [vocab, H] (the embedding, when the two are tied). Raises K2Error."""
    head = load_tensor(folder, HEAD_NAMES)
    if head is None:
        head = load_tensor(folder, EMBED_NAMES)
    if head is None:
        raise K2Error(
            f"{folder}: no {HEAD_NAMES[0]} and no {EMBED_NAMES[0]}", "give the folder of the target model"
        )
    return head
