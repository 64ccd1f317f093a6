"""Draft checkpoints: names, shapes and vocabulary maps, both ways; the draft's own serving forward."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from k2tui.eagle3.batch import pack
from k2tui.eagle3.checkpoint import load_draft, our_name
from k2tui.eagle3.draft import DraftCache, DraftConfig, Eagle3Draft
from k2tui.eagle3.export import check_export, export_draft
from k2tui.eagle3.loss import TargetHead
from k2tui.eagle3.ttt import TttOptions, ttt_loss
from k2tui.eagle3.vocab import choose_vocab, special_ids
from k2tui.errors import K2Error

from .test_ttt import VOCAB, make_config, make_draft, make_samples


def configs() -> list[DraftConfig]:
    return [
        make_config("llama", aux_layer_ids=(0, 2, 4)),
        make_config("llama", fc_norm=True, norm_output=True, norm_before_fc=True, num_key_value_heads=4),
        make_config("mla", num_key_value_heads=4, head_dim=4, fc_norm=True, norm_output=True, eos_token_id=(1, 2), rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0}),
    ]  # fmt: skip


@pytest.mark.parametrize("config", configs())
def test_export_and_back(config: DraftConfig, tmp_path: Path) -> None:
    draft, _ = make_draft(config, 1)
    export_draft(draft, tmp_path / "draft", "# card\n", extra={"step": 3})
    assert check_export(tmp_path / "draft") == []
    again = load_draft(tmp_path / "draft")
    assert again.config == config
    for name, p in draft.named_parameters():
        assert torch.equal(again.get_parameter(name), p.bfloat16().float()), name
    assert torch.equal(again.d2t, draft.d2t) and torch.equal(again.t2d, draft.t2d)
    stored = load_file(tmp_path / "draft" / "model.safetensors")
    assert (
        "embed_tokens.weight" not in stored
        and stored["d2t"].dtype == torch.int64
        and stored["t2d"].dtype == torch.bool
    )
    assert torch.equal(
        stored["t2d"].nonzero().flatten(), torch.arange(config.draft_vocab_size) + stored["d2t"]
    )
    raw = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert (
        raw["k2tui"] == {"step": 3}
        and raw["rope_parameters"]["rope_theta"] == raw["rope_theta"]
        and raw["tie_word_embeddings"] is False
    )


def test_vllm_finds_every_weight_and_the_same_layers(tmp_path: Path) -> None:
    """By the rules of vLLM's llama_eagle3 loader: t2d is left out, d2t renamed, "model." put before all but the head, midlayer is
    layer 0, q, k, v and gate, up are fused; the layers stand at the top of config.json and are read raw."""
    config = make_config("llama", aux_layer_ids=(1, 3, 4))
    draft, _ = make_draft(config, 1)
    export_draft(draft, tmp_path / "draft", extra={"states": {"boundaries": [2, 4, 5]}})
    raw = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert raw["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert (
        raw["architectures"] == ["LlamaForCausalLMEagle3"]
        and raw["draft_vocab_size"] == config.draft_vocab_size
    )
    rows: dict[str, int] = {}
    for name, tensor in load_file(tmp_path / "draft" / "model.safetensors").items():
        if name == "t2d":
            continue
        place = "draft_id_to_target_id" if name == "d2t" else name if "lm_head" in name else f"model.{name}"
        place = place.replace("midlayer.", "layers.0.")
        for part, fused in (
            (".q_proj", ".qkv_proj"),
            (".k_proj", ".qkv_proj"),
            (".v_proj", ".qkv_proj"),
            (".gate_proj", ".gate_up_proj"),
            (".up_proj", ".gate_up_proj"),
        ):
            if part in place:
                place = place.replace(part, fused)
                break
        rows[place] = rows.get(place, 0) + tensor.shape[0]
    heads = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    h = config.hidden_size
    assert rows == {
        "model.fc.weight": h, "model.norm.weight": h, "lm_head.weight": config.draft_vocab_size, "draft_id_to_target_id": config.draft_vocab_size,
        "model.layers.0.input_layernorm.weight": h, "model.layers.0.hidden_norm.weight": h, "model.layers.0.post_attention_layernorm.weight": h,
        "model.layers.0.self_attn.qkv_proj.weight": heads, "model.layers.0.self_attn.o_proj.weight": h,
        "model.layers.0.mlp.gate_up_proj.weight": 2 * config.intermediate_size, "model.layers.0.mlp.down_proj.weight": h,
    }  # fmt: skip
    assert load_draft(tmp_path / "draft").config == config, "SGLang's ids are read back, not vLLM's"


def test_a_draft_that_knows_every_token_has_no_map(tmp_path: Path) -> None:
    """vLLM 0.32 makes no place for d2t when both vocabularies have one size, and refuses the checkpoint that brings one."""
    config = make_config("llama").changed(draft_vocab_size=make_config("llama").vocab_size)
    draft, _ = make_draft(config, 1)
    export_draft(draft, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert "d2t" not in stored and "t2d" not in stored
    again = load_draft(tmp_path)
    assert torch.equal(again.target_ids(), torch.arange(config.vocab_size)) and bool(again.t2d.all())
    save_file(stored | {"d2t": draft.d2t}, str(tmp_path / "model.safetensors"))
    assert any("vLLM refuses" in p for p in check_export(tmp_path))
    assert torch.equal(load_draft(tmp_path).d2t, draft.d2t), "drafts exported earlier still open"


def test_the_check_sees_what_a_server_would_skip(tmp_path: Path) -> None:
    draft, _ = make_draft(make_config("llama"), 1)
    export_draft(draft, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file(
        {("midlayer.attn.q_proj.weight" if "q_proj" in n else n): t for n, t in tensors.items()}, str(path)
    )
    problems = check_export(tmp_path)
    assert any("midlayer.attn.q_proj.weight is a name the server does not know" in p for p in problems)
    assert any("qkv_proj" in p and "rows" in p for p in problems)
    save_file(tensors | {"d2t": tensors["d2t"] + 1}, str(path))
    assert any("different tokens" in p for p in check_export(tmp_path))
    save_file({n: t for n, t in tensors.items() if n != "norm.weight"}, str(path))
    assert any("model.norm.weight gets 0" in p for p in check_export(tmp_path))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("midlayer.mlp.up_proj.weight", "midlayer.mlp.up_proj.weight"),
        ("layers.0.self_attn.q_proj.weight", "midlayer.self_attn.q_proj.weight"),
        ("model.layers.0.hidden_norm.weight", "midlayer.hidden_norm.weight"),
        ("draft_model.midlayer.hidden_norm.weight", "midlayer.hidden_norm.weight"),
        ("aux_norm_mid.weight", "fc_norm.1.weight"),
        ("model.fc.weight", "fc.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_names_of_other_trainers(theirs: str, ours: str) -> None:
    assert our_name(theirs) == ours


def rewrite(folder: Path, change) -> None:  # type: ignore[no-untyped-def]
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), str(folder / "model.safetensors"))


def test_speculators_layout_loads(tmp_path: Path) -> None:
    draft, _ = make_draft(make_config("llama"), 1)
    export_draft(draft, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    layer = {
        k: raw.pop(k)
        for k in (
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "rms_norm_eps",
            "vocab_size",
            "rope_parameters",
            "rope_theta",
        )
    }
    (tmp_path / "config.json").write_text(json.dumps(raw | {"transformer_layer_config": layer}))
    rewrite(
        tmp_path,
        lambda t: (
            {n.replace("midlayer.", "layers.0."): v for n, v in t.items()}
            | {"embed_tokens.weight": torch.zeros(VOCAB, 16)}
        ),
    )
    assert torch.equal(load_draft(tmp_path).fc.weight, draft.fc.weight.bfloat16().float())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t | {"midlayer.extra.weight": torch.zeros(2)}, "no place for: midlayer.extra"),
        (lambda t: {n: v for n, v in t.items() if n != "fc.weight"}, "no fc.weight"),
        (lambda t: t | {"fc.weight": torch.zeros(3, 3)}, r"fc.weight is \(3, 3\)"),
        (lambda t: {n: v for n, v in t.items() if n not in ("d2t", "t2d")}, "no d2t"),
        (lambda t: t | {"t2d": torch.zeros(VOCAB, dtype=torch.bool)}, "different tokens"),
        (lambda t: {n: v for n, v in t.items() if n != "lm_head.weight"}, "shares the target's head"),
    ],
)
def test_damaged_checkpoints_are_refused_in_words(change, words: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    draft, _ = make_draft(make_config("llama"), 1)
    export_draft(draft, tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(K2Error, match=words):
        load_draft(tmp_path)


def test_a_cut_file_and_a_foreign_config_are_said_in_words(tmp_path: Path) -> None:
    draft, _ = make_draft(make_config("llama"), 1)
    export_draft(draft, tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(K2Error, match="cannot be read"):
        load_draft(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "hidden_size": 8,
                "num_hidden_layers": 32,
                "intermediate_size": 8,
                "num_attention_heads": 2,
                "vocab_size": 9,
            }
        )
    )
    with pytest.raises(K2Error, match="one layer"):
        load_draft(tmp_path)
    with pytest.raises(K2Error, match="no such file"):
        load_draft(tmp_path / "none")
    for name in ("draft-first", "draft-best", "draft-last"):
        export_draft(draft, tmp_path / "run" / name)
    (tmp_path / "run" / "saves").mkdir()
    with pytest.raises(K2Error, match="no such file") as caught:
        load_draft(tmp_path / "run")
    best = tmp_path / "run" / "draft-best"
    assert caught.value.hint == f"drafts inside: draft-best, draft-first, draft-last; give {best}"


def test_a_failed_export_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft, _ = make_draft(make_config("llama"), 1)
    export_draft(draft, tmp_path / "d")
    before = (tmp_path / "d" / "model.safetensors").read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    other, _ = make_draft(make_config("llama"), 2)
    with pytest.raises(K2Error, match="No space left"):
        export_draft(other, tmp_path / "d")
    assert (tmp_path / "d" / "model.safetensors").read_bytes() == before
    assert not list(tmp_path.glob(".d.*"))


@pytest.mark.parametrize("kind", ["llama", "mla"])
@pytest.mark.parametrize("norm_output", [False, True])
def test_serving_says_what_training_saw(kind: str, norm_output: bool) -> None:
    """extend + draft steps on the true prefix give the logits of the training-time test, step by step."""
    config = make_config(kind, norm_output=norm_output, fc_norm=norm_output)
    draft, head_weight = make_draft(config, 4)
    sample = make_samples([[False] * 3 + [True] * 9], 4)[0]
    steps, at = 4, 5
    made = pack([sample], steps, torch.device("cpu"))
    result = ttt_loss(
        draft, TargetHead(head_weight, draft.target_ids()), made, [1.0] * steps, TttOptions(ttt_length=steps)
    )
    rows = result.head_rows.split(made.counts)
    cache = DraftCache()
    with torch.no_grad():
        out = draft.extend(sample.input_ids[1 : at + 2], draft.fuse(sample.aux[: at + 1]), cache, 0)[-1:]
        for k in range(steps):
            if k:
                out = draft.extend(sample.input_ids[at + 1 + k][None], draft.carry(out), cache, at + k)
            place = int((made.active[made.loss_rows[k]] == at).nonzero())
            torch.testing.assert_close(
                draft.logits(out)[0], rows[k][place] @ draft.lm_head.weight.t(), rtol=1e-4, atol=1e-4
            )


def test_vocabulary_holds_specials_and_the_most_frequent() -> None:
    counts = np.array([0, 5, 0, 9, 9, 1, 0, 2])
    ids, covered = choose_vocab(counts, 4, always=[0, 6])
    assert ids.tolist() == [0, 3, 4, 6] and covered == pytest.approx(18 / 26)
    ids, covered = choose_vocab(counts, 8)
    assert ids.tolist() == list(range(8)) and covered == 1.0
    with pytest.raises(K2Error, match="special"):
        choose_vocab(counts, 1, always=[0, 6])
    with pytest.raises(K2Error, match="does not fit"):
        choose_vocab(counts, 9)


def test_special_ids_come_from_tokenizer_and_config(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 7}, {"id": 99}]}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"5": {}}}))
    (tmp_path / "config.json").write_text(
        json.dumps({"text_config": {"eos_token_id": [1, 2]}, "pad_token_id": 0})
    )
    assert special_ids(tmp_path, 50) == [0, 1, 2, 5, 7]


def test_shapes_of_published_drafts_read() -> None:
    k2 = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 7168, "intermediate_size": 18432, "num_attention_heads": 64, "num_key_value_heads": 64,
        "head_dim": 128, "num_hidden_layers": 1, "vocab_size": 163840, "draft_vocab_size": 32000, "rope_theta": 1000000.0, "rope_scaling": None, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58], "use_aux_hidden_state": True},
    }  # fmt: skip
    config = DraftConfig.from_dict(k2)
    assert (config.aux_size, config.qk_dim, config.kv_heads, config.aux_layer_ids) == (
        21504,
        128,
        64,
        (2, 30, 58),
    )
    with torch.device("meta"):
        count = sum(p.numel() for p in Eagle3Draft(config).parameters())
    assert count == pytest.approx(1.19e9, rel=0.01)
    for key in ("hidden_size", "vocab_size"):
        with pytest.raises(K2Error, match=key):
            DraftConfig.from_dict({**k2, key: None})
