"""Cuts a one-file checkpoint into N safetensors shards with an index, and copies the small files beside them.

    python shard.py IN_DIR OUT_DIR [--shards 64]

Whole tensors only, in the model's order; every shard holds at least one. Neighbours are joined, the smallest pair first,
until N groups are left, so that the shards are as even as whole tensors allow.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

SMALL = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "training.json")


def order(name: str) -> tuple[int, int, str]:
    layer = re.search(r"layers\.(\d+)\.", name)
    place = 0 if "embed" in name else 1 if layer else 2
    return place, int(layer.group(1)) if layer else 0, name


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shards", type=int, default=64)
    args = parser.parse_args()
    with safe_open(args.source / "model.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in sorted(file.keys(), key=order)}
    groups = [([name], t.numel() * t.element_size()) for name, t in tensors.items()]
    if len(groups) < args.shards:
        print(f"{len(groups)} tensors cannot fill {args.shards} shards", file=sys.stderr)
        return 1
    while len(groups) > args.shards:
        at = min(range(len(groups) - 1), key=lambda i: groups[i][1] + groups[i + 1][1])
        groups[at : at + 2] = [(groups[at][0] + groups[at + 1][0], groups[at][1] + groups[at + 1][1])]
    args.out.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for number, (names, _) in enumerate(groups, 1):
        shard = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        save_file({name: tensors[name].contiguous() for name in names}, args.out / shard, metadata={"format": "pt"})
        (args.out / shard).chmod(0o644)
        weight_map.update(dict.fromkeys(names, shard))
    total = sum(size for _, size in groups)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (args.out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    for name in SMALL:
        if (args.source / name).exists():
            shutil.copy(args.source / name, args.out / name)
    print(f"{args.out}: {len(groups)} shards, {total / 1e6:.2f} MB, the largest {max(s for _, s in groups) / 1e3:.0f} KB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
