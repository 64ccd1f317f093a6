"""Small random checkpoints made on the fly, and embedded engines as real processes on free ports."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from k2tui import paths

torch = pytest.importorskip("torch", reason="the embedded engine needs the `local` extra")
torch.set_num_threads(1)  # two threads on a busy machine wait for each other: 30 times slower

READY = "The server is fired up and ready to roll!"
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 2048,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    h, m, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], h)}
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        found |= {
            p + "input_layernorm.weight": (h,),
            p + "mlp.down_proj.weight": (h, m),
            p + "mlp.gate_proj.weight": (m, h),
            p + "mlp.up_proj.weight": (m, h),
            p + "post_attention_layernorm.weight": (h,),
            p + "self_attn.k_proj.weight": (kv, h),
            p + "self_attn.o_proj.weight": (h, q),
            p + "self_attn.q_proj.weight": (q, h),
            p + "self_attn.v_proj.weight": (kv, h),
        }
    found["model.norm.weight"] = (h,)
    if not config.get("tie_word_embeddings"):
        found["lm_head.weight"] = (config["vocab_size"], h)
    return found


def random_tensors(wanted: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        name: (
            1 + 0.1 * rng.standard_normal(shape)
            if len(shape) == 1
            else rng.standard_normal(shape) / shape[-1] ** 0.5
        ).astype(np.float32)
        for name, shape in wanted.items()
    }


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], *, shards: int
) -> Path:
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for number in range(shards):
        part = names[number * len(names) // shards : (number + 1) * len(names) // shards]
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(paths.assets_dir() / "tiny-target" / name, folder / name)
    return folder


def draft_config(**changes: Any) -> dict[str, Any]:
    base = {k: v for k, v in CONFIG.items() if k != "num_hidden_layers"}
    return {
        **base,
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": 512,
        "intermediate_size": 80,
        **changes,
    }


def draft_tensors(config: Mapping[str, Any], seed: int = 3) -> dict[str, np.ndarray]:
    h, m, d, size = (
        config["hidden_size"],
        config["intermediate_size"],
        config["head_dim"],
        config["draft_vocab_size"],
    )
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    wanted: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, 3 * h),
        "lm_head.weight": (size, h),
        "midlayer.hidden_norm.weight": (h,),
        "midlayer.input_layernorm.weight": (h,),
        "midlayer.post_attention_layernorm.weight": (h,),
        "midlayer.mlp.down_proj.weight": (h, m),
        "midlayer.mlp.gate_proj.weight": (m, h),
        "midlayer.mlp.up_proj.weight": (m, h),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * h),
        "midlayer.self_attn.o_proj.weight": (h, q),
        "midlayer.self_attn.q_proj.weight": (q, 2 * h),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * h),
        "norm.weight": (h,),
    }
    tensors = random_tensors(wanted, seed)
    chosen = np.sort(np.random.default_rng(seed).choice(config["vocab_size"], size, replace=False))
    tensors["d2t"] = (chosen - np.arange(size)).astype(np.int64)
    mask = np.zeros(config["vocab_size"], dtype=bool)
    mask[chosen] = True
    tensors["t2d"] = mask
    return tensors


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random 8-layer Llama in 5 shards, with the shipped tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "target"
    return write_checkpoint(folder, CONFIG, random_tensors(shapes(CONFIG), 1), shards=5)


@pytest.fixture(scope="session")
def draft_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random EAGLE-3 draft for `model_dir`, in 2 shards."""
    config = draft_config()
    return write_checkpoint(
        tmp_path_factory.mktemp("models") / "draft", config, draft_tensors(config), shards=2
    )


@dataclass
class Engine:
    """One engine process and its log."""

    process: subprocess.Popen[bytes]
    log_file: Path
    url: str = ""
    client: httpx.Client = field(default_factory=httpx.Client)

    @property
    def log(self) -> str:
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, text: str, timeout_s: float = 90) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.log:
            if time.monotonic() > deadline or (self.process.poll() is not None and text not in self.log):
                raise AssertionError(
                    f"{text!r} did not come (exit code {self.process.poll()}):\n{self.log[-4000:]}"
                )
            time.sleep(0.02)

    def end(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(10)


def start_engine(log_file: Path, *argv: str, ready: bool = True) -> Engine:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with log_file.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "k2tui.local", *argv],
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
            env=env,
        )
    engine = Engine(process, log_file)
    if ready:
        try:
            engine.wait_for(READY)
        except AssertionError:
            engine.end(signal.SIGKILL)
            raise
        found = re.search(r"Uvicorn running on (http://\S+)", engine.log)
        assert found, engine.log
        engine.url = found.group(1)
        engine.client = httpx.Client(base_url=engine.url, timeout=60)
    return engine


Launcher = Callable[..., Engine]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launcher]:
    """Start engines that end with the test: launch("--model-path", ..., ready=False)."""
    started: list[Engine] = []

    def start(*argv: str | Path, ready: bool = True) -> Engine:
        engine = start_engine(tmp_path / f"engine{len(started)}.log", *map(str, argv), ready=ready)
        started.append(engine)
        return engine

    yield start
    for engine in started:
        engine.client.close()
        engine.end(signal.SIGKILL)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Engine]:
    """One engine for all tests that only ask; four rows, so that queueing is seen."""
    log_file = tmp_path_factory.mktemp("engine") / "engine.log"
    engine = start_engine(
        log_file,
        *("--model-path", str(model_dir), "--port", "0", "--served-model-name", "small"),
        *("--max-running-requests", "4", "--decode-log-interval", "8"),
    )
    yield engine
    engine.client.close()
    assert engine.end() == 0, engine.log[-3000:]
