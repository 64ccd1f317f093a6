#!/usr/bin/env python3
"""How long the doctor takes on a checkpoint of Kimi-K2.5's shape: 64 shards, every tensor in their headers, 555 GiB of sparse files.

    python tests/benchmarks/doctor_speed.py [--folder DIR] [--python ENGINE'S INTERPRETER] [--runs 5]

Prints what the skeleton has, then wall and CPU seconds of `k2tui doctor PROFILE` (processes of their own) and of the parts.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HIDDEN, LAYERS, EXPERTS, INTER, MOE, VOCAB, HEADS = 7168, 61, 384, 18432, 2048, 163840, 64
CONFIG = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "text_config": {
        "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": INTER,
        "moe_intermediate_size": MOE, "n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 1,
        "vocab_size": VOCAB, "max_position_embeddings": 262144, "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32, "type": "int"}, "targets": ["Linear"]}},
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
        },
    },
}  # fmt: skip
_WIDTH = {"BF16": 2, "I32": 4, "F32": 4}


def tensors() -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype, shape) of every tensor, layer by layer; INT4 experts are packed, with a bf16 scale for each group of 32."""
    yield "language_model.model.embed_tokens.weight", "BF16", (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        at = f"language_model.model.layers.{layer}"
        for name, shape in (
            ("q_a_proj", (1536, HIDDEN)), ("q_b_proj", (HEADS * 192, 1536)), ("kv_a_proj_with_mqa", (576, HIDDEN)),
            ("kv_b_proj", (HEADS * 256, 512)), ("o_proj", (HIDDEN, HEADS * 128)),
        ):  # fmt: skip
            yield f"{at}.self_attn.{name}.weight", "BF16", shape
        for name, width in (
            ("self_attn.q_a_layernorm", 1536),
            ("self_attn.kv_a_layernorm", 512),
            ("input_layernorm", HIDDEN),
            ("post_attention_layernorm", HIDDEN),
        ):
            yield f"{at}.{name}.weight", "BF16", (width,)
        wide = INTER if layer == 0 else MOE
        dense = f"{at}.mlp" if layer == 0 else f"{at}.mlp.shared_experts"
        for name, shape in (
            ("gate_proj", (wide, HIDDEN)),
            ("up_proj", (wide, HIDDEN)),
            ("down_proj", (HIDDEN, wide)),
        ):
            yield f"{dense}.{name}.weight", "BF16", shape
        if layer == 0:
            continue
        yield f"{at}.mlp.gate.weight", "BF16", (EXPERTS, HIDDEN)
        yield f"{at}.mlp.gate.e_score_correction_bias", "F32", (EXPERTS,)
        for expert in range(EXPERTS):
            for name, (rows, columns) in (
                ("gate_proj", (MOE, HIDDEN)),
                ("up_proj", (MOE, HIDDEN)),
                ("down_proj", (HIDDEN, MOE)),
            ):
                here = f"{at}.mlp.experts.{expert}.{name}"
                yield f"{here}.weight_packed", "I32", (rows, columns // 8)
                yield f"{here}.weight_scale", "BF16", (rows, columns // 32)
                yield f"{here}.weight_shape", "I32", (2,)
    yield "language_model.model.norm.weight", "BF16", (HIDDEN,)
    yield "language_model.lm_head.weight", "BF16", (VOCAB, HIDDEN)


def make(folder: Path, shards: int = 64) -> tuple[int, int]:
    """Write the skeleton; returns (tensors, bytes of all shards as a reader sees them). Sparse: it takes about 40 MB of disk."""
    folder.mkdir(parents=True, exist_ok=True)
    every = list(tensors())
    weight_map: dict[str, str] = {}
    total = 0
    for number in range(shards):
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for key, dtype, shape in every[number * len(every) // shards : (number + 1) * len(every) // shards]:
            size = _WIDTH[dtype]
            for dim in shape:
                size *= dim
            header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
            weight_map[key] = name
            end += size
        raw = json.dumps(header, separators=(",", ":")).encode()
        with (folder / name).open("wb") as fh:
            fh.write(struct.pack("<Q", len(raw)) + raw)
            fh.truncate(8 + len(raw) + end)
        total += 8 + len(raw) + end
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
    )
    return len(every), total


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, help="where the skeleton is kept (default: a temporary folder)"
    )
    parser.add_argument("--python", default="", help="interpreter with the engine, for the flag check")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch) / "Kimi-K2.5"
        if not (folder / "model.safetensors.index.json").exists():
            make(folder)
        headers = sum(struct.unpack("<Q", p.open("rb").read(8))[0] for p in folder.glob("*.safetensors"))
        apparent = sum(p.stat().st_size for p in folder.glob("*.safetensors"))
        print(f"skeleton: {sum(1 for _ in tensors()):,} tensors, {apparent / 2**30:.0f} GiB, headers {headers / 1e6:.0f} MB, "
              f"index {(folder / 'model.safetensors.index.json').stat().st_size / 1e6:.0f} MB")  # fmt: skip
        config = Path(scratch) / "k.toml"
        python = f'python = "{args.python}"\n' if args.python else ""
        config.write_text(
            f'[profile.kimi]\ninherit = "kimi-k2.5-int4-8gpu-pcie"\nmodel = "{folder}"\nport = 31240\n{python}'
        )
        env = {**os.environ, "K2TUI_HOME": f"{scratch}/home", "PYTHONPATH": str(ROOT)}
        walls: list[float] = []
        cpus: list[float] = []
        for _ in range(args.runs):
            before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-m", "k2tui", "doctor", "kimi", "--config", str(config), "--json"],
                env=env,
                capture_output=True,
                text=True,
            )
            walls.append(time.perf_counter() - began)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpus.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
            found = {f["check"]: f["severity"] for f in json.loads(done.stdout)["findings"]}
            assert found["model shards"] == "ok", found
        print(
            f"k2tui doctor: wall median {statistics.median(walls):.2f} s, worst {max(walls):.2f} s; CPU median {statistics.median(cpus):.2f} s"
        )
        print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    return 0


if __name__ == "__main__":
    sys.exit(main())
