"""Checkpoints on disk: missing, cut and foreign files are told apart without loading anything."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest

from k2tui import checkpoint, doctor, paths
from k2tui.config import Profile
from k2tui.errors import K2Error


def shard(path: Path, name: str = "w", count: int = 4) -> None:
    header = json.dumps({name: {"dtype": "F32", "shape": [count], "data_offsets": [0, 4 * count]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4 * count)


def model(folder: Path, shards: int = 3) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    names = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    for i, name in enumerate(names):
        shard(folder / name, f"w{i}")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {f"w{i}": n for i, n in enumerate(names)}}))
    return folder


def test_complete(tmp_path: Path) -> None:
    found = checkpoint.inspect(model(tmp_path / "m"))
    assert found.is_complete and len(found.shards) == 3 and found.params == 12


def test_missing_cut_and_foreign(tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    (folder / "model-00001-of-00003.safetensors").unlink()
    cut = folder / "model-00002-of-00003.safetensors"
    cut.write_bytes(cut.read_bytes()[:-3])
    (folder / "model-00003-of-00003.safetensors").write_bytes(b"<html>not found</html>")
    found = checkpoint.inspect(folder)
    assert found.missing == ("model-00001-of-00003.safetensors",)
    assert [n for n, _ in found.broken] == ["model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors"]
    assert "cut short" in found.broken[0][1]
    assert not found.is_complete


@pytest.mark.parametrize("make", ["nothing", "file", "empty"])
def test_no_model_folder(tmp_path: Path, make: str) -> None:
    path = tmp_path / "x"
    if make == "file":
        path.write_text("")
    elif make == "empty":
        path.mkdir()
    with pytest.raises(K2Error) as err:
        checkpoint.inspect(path)
    assert str(path) in err.value.message and err.value.hint


def test_packed_weights_count_as_weights_and_scales_do_not(tmp_path: Path) -> None:
    quantised = {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4, "group_size": 32}}}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantised}))
    tensors = {
        "a.weight_packed": {"dtype": "I32", "shape": [2, 8], "data_offsets": [0, 64]},
        "a.weight_scale": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [64, 72]},
        "n.weight": {"dtype": "BF16", "shape": [4], "data_offsets": [72, 80]},
    }
    header = json.dumps(tensors).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 80)
    assert checkpoint.inspect(tmp_path).params == 2 * 8 * 8 + 4


def test_a_model_without_a_chat_template_is_told(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "model-00001-of-00064.safetensors"):
        shutil.copy(paths.assets_dir() / "tiny-target" / name, tmp_path / name)
    assert checkpoint.inspect(tmp_path).has_tokenizer and not checkpoint.inspect(tmp_path).has_chat_template
    found = {f.check: f.severity for f in doctor.check_profile(Profile(name="p", engine="local", model=str(tmp_path), port=44004))}
    assert found["chat template"] == "info"
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    assert checkpoint.inspect(tmp_path).has_chat_template
    (tmp_path / "tokenizer_config.json").write_text("[")
    (tmp_path / "chat_template.jinja").write_text("x")
    assert checkpoint.inspect(tmp_path).has_chat_template
