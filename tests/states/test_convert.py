"""To SpecForge's and speculators' layouts and back: the same tokens and bits, pre- and post-norm told apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import load_file, save_file  # noqa: E402

from k2tui.errors import K2Error  # noqa: E402
from k2tui.states import convert  # noqa: E402
from k2tui.states.layout import Manifest  # noqa: E402
from k2tui.states.reader import StatesReader  # noqa: E402
from k2tui.states.writer import StatesWriter, WriterLimits, write_sample  # noqa: E402

H = 8


def make(folder: Path, count: int = 4, **fields: object) -> StatesReader:
    writer = StatesWriter(
        folder, Manifest(**{"hidden_size": H, "num_hidden_layers": 4, "boundaries": (1, 2, 3), **fields}), "a", WriterLimits(min_free_b=0)  # type: ignore[arg-type]
    )
    g = torch.Generator().manual_seed(1)
    for i in range(count):
        t = 5 + i
        wide = torch.randn(t, 4 * H, generator=g).to(torch.bfloat16).view(torch.uint16).numpy()
        ids = torch.randint(0, 50, (t,), generator=g).int().numpy()
        write_sample(writer, i * 1500, ids, (torch.arange(t) > 2).int().numpy(), wide[:, : 3 * H], wide[:, 3 * H :])
    writer.close()
    return StatesReader(folder)


def test_specforge_and_back(tmp_path: Path) -> None:
    ours = make(tmp_path / "s")
    assert convert.to_specforge(tmp_path / "s", tmp_path / "sf") == 4
    raw = torch.load(tmp_path / "sf" / "rows_2000-4000" / "data_3000.ckpt", weights_only=True)
    assert set(raw) == {"input_ids", "loss_mask", "aux_hidden_state", "hidden_state"}
    assert raw["aux_hidden_state"].shape == (1, 7, 3 * H) and raw["hidden_state"].dtype == torch.bfloat16
    assert raw["input_ids"].dtype == torch.int64 and raw["input_ids"].shape == (7,)
    convert.from_specforge(tmp_path / "sf", tmp_path / "back", (1, 2, 3), 4)
    back = StatesReader(tmp_path / "back")
    assert back.indices() == ours.indices()
    for a, b in zip(ours, back, strict=True):
        assert torch.equal(a.aux, b.aux) and torch.equal(a.last, b.last) and torch.equal(a.loss_mask, b.loss_mask)


def test_specforge_needs_every_last_row(tmp_path: Path) -> None:
    make(tmp_path / "s", last_rows="loss")
    with pytest.raises(K2Error, match="only some rows"):
        convert.to_specforge(tmp_path / "s", tmp_path / "sf")


def test_specforge_files_are_never_unpickled_as_code(tmp_path: Path) -> None:
    import pickle

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (open, (str(tmp_path / "owned"), "w"))  # type: ignore[return-value]

    (tmp_path / "sf").mkdir()
    (tmp_path / "sf" / "data_0.ckpt").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(K2Error, match="data_0"):
        convert.from_specforge(tmp_path / "sf", tmp_path / "out", (1, 2, 3), 4)
    assert not (tmp_path / "owned").exists()


def test_speculators_tells_pre_and_post_norm_apart(tmp_path: Path) -> None:
    ours = make(tmp_path / "s")
    with pytest.raises(K2Error, match="after the target's final norm"):
        convert.to_speculators(tmp_path / "s", tmp_path / "sp")
    convert.to_speculators(tmp_path / "s", tmp_path / "sp", allow_post_norm=True)
    assert load_file(tmp_path / "sp" / "hs_1500.safetensors")["hidden_states"].shape == (6, 4, H)
    # marked post-norm: taken as it is, no norm needed
    convert.from_speculators(tmp_path / "sp", tmp_path / "back", (1, 2, 3), 4, None)
    for a, b in zip(ours, StatesReader(tmp_path / "back"), strict=True):
        assert torch.equal(a.aux, b.aux) and torch.equal(a.last, b.last)


def test_pre_norm_states_get_the_targets_own_norm(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    weight = torch.linspace(0.5, 2, H).to(torch.bfloat16)
    save_file({"model.norm.weight": weight}, model / "model.safetensors")
    (model / "config.json").write_text(json.dumps({"rms_norm_eps": 1e-5}))
    wide = torch.randn(6, 4, H).to(torch.bfloat16)
    (tmp_path / "sp").mkdir()
    save_file({"input_ids": torch.arange(6), "hidden_states": wide}, tmp_path / "sp" / "hs_0.safetensors")
    with pytest.raises(K2Error, match="before the target's final norm"):
        convert.from_speculators(tmp_path / "sp", tmp_path / "no", (1, 2, 3), 4, None)
    convert.from_speculators(tmp_path / "sp", tmp_path / "out", (1, 2, 3), 4, convert.final_norm(model))
    got = StatesReader(tmp_path / "out")[0]
    norm = torch.nn.RMSNorm(H, eps=1e-5)
    norm.weight.data = weight.float()
    assert torch.allclose(got.last.float(), norm(wide[:, -1].float()), atol=0.02)
    assert torch.equal(got.aux, wide[:, :3].reshape(6, -1))


def test_merge_joins_parts_of_several_servers_by_index(tmp_path: Path) -> None:
    make(tmp_path / "a", 3)
    make(tmp_path / "b", 5)
    assert convert.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "all") == 5
    assert StatesReader(tmp_path / "all").indices() == [0, 1500, 3000, 4500, 6000]
    make(tmp_path / "c", 2, boundaries=(0, 1, 2))
    with pytest.raises(K2Error, match="different kinds"):
        convert.merge([tmp_path / "a", tmp_path / "c"], tmp_path / "no")
