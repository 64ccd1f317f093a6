"""EAGLE-3 in the embedded engine: the draft's chain against a written-out reference, and the text unchanged by drafting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from k2tui.errors import K2Error
from k2tui.local.draft import boundaries
from k2tui.local.request import Request
from k2tui.local.speculative import Speculator
from k2tui.local.text import Tokenizer

from .conftest import Launcher, draft_config, draft_tensors, write_checkpoint
from .inprocess import Run, load, load_draft, make
from .test_decoder import full_forward, prompts


class WrittenOut:
    """The draft as the papers write it: no cache, whole sequences, one step after the other."""

    def __init__(
        self, config: dict[str, Any], tensors: dict[str, np.ndarray], embedding: torch.Tensor
    ) -> None:
        self.c = config
        self.w = {k: torch.from_numpy(v) for k, v in tensors.items()}
        self.embedding = embedding

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.c["rms_norm_eps"]) * self.w[name]

    def layer(self, tokens: list[int], features: torch.Tensor) -> torch.Tensor:
        """tokens[t] beside features[t] at position t -> hidden states before the norm, [T, H]."""
        c, w = self.c, self.w
        heads, kv, d = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        length = len(tokens)
        both = torch.cat(
            (
                self.norm(self.embedding[tokens], "midlayer.input_layernorm.weight"),
                self.norm(features, "midlayer.hidden_norm.weight"),
            ),
            -1,
        )
        angle = torch.outer(
            torch.arange(length).float(), 1 / c["rope_theta"] ** (torch.arange(0, d, 2).float() / d)
        )
        cos, sin = torch.cat((angle, angle), -1).cos(), torch.cat((angle, angle), -1).sin()

        def heads_of(name: str, count: int, turn: bool) -> torch.Tensor:
            x = (both @ w[f"midlayer.self_attn.{name}.weight"].T).view(length, count, d).transpose(0, 1)
            if turn:
                x = x * cos + torch.cat((-x[..., d // 2 :], x[..., : d // 2]), -1) * sin
            return x.repeat_interleave(heads // count, 0)

        q, k, v = heads_of("q_proj", heads, True), heads_of("k_proj", kv, True), heads_of("v_proj", kv, False)
        score = q @ k.transpose(1, 2) / d**0.5
        score = score.masked_fill(torch.triu(torch.ones(length, length, dtype=torch.bool), 1), float("-inf"))
        mixed = (score.softmax(-1) @ v).transpose(0, 1).reshape(length, heads * d)
        x = features + mixed @ w["midlayer.self_attn.o_proj.weight"].T
        y = self.norm(x, "midlayer.post_attention_layernorm.weight")
        gate, up = y @ w["midlayer.mlp.gate_proj.weight"].T, y @ w["midlayer.mlp.up_proj.weight"].T
        return x + (torch.nn.functional.silu(gate) * up) @ w["midlayer.mlp.down_proj.weight"].T

    def chain(self, tokens: list[int], aux: torch.Tensor, num_steps: int) -> list[int]:
        """tokens x_0 .. x_T, aux of x_0 .. x_{T-1}: guesses for x_{T+1} .. x_{T+num_steps}."""
        features = aux @ self.w["fc.weight"].T
        shifted = tokens[1:]
        guesses: list[int] = []
        for _ in range(num_steps):
            hidden = self.layer(shifted, features)
            best = int((self.norm(hidden[-1:], "norm.weight") @ self.w["lm_head.weight"].T).argmax())
            guesses.append(best + int(self.w["d2t"][best]))
            shifted = [*shifted, guesses[-1]]
            features = torch.cat((features, hidden[-1:]))
        return guesses


def test_chains_equal_the_written_out_draft(model_dir: Path, draft_dir: Path) -> None:
    """Every chain of every round, with rows of different lengths and with rejected drafts left behind in the cache."""
    target = load(model_dir)
    speculator = load_draft(draft_dir, target)
    reference = WrittenOut(draft_config(), draft_tensors(draft_config()), target.embedding)
    rounds = 0
    plain = speculator.draft

    def checked(batch: list[Request], starts: list[int]) -> list[list[int]]:
        nonlocal rounds
        chains = plain(batch, starts)
        for request, chain in zip(batch, chains, strict=True):
            tokens = request.input_ids + request.output_ids
            _, aux = full_forward(target, tokens[:-1], speculator.boundaries)
            assert chain == reference.chain(tokens, aux[0], speculator.num_steps)
            rounds += 1
        return chains

    speculator.draft = checked  # type: ignore[method-assign]
    run = Run(make(target, speculator), Tokenizer(model_dir))
    for i, ids in enumerate(prompts()[:5]):
        run.add(str(i), ids, {"temperature": 0, "max_new_tokens": 10, "ignore_eos": True})
    run.finish()
    assert rounds >= 40


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.9, "top_k": 50, "seed": 7}],
    ids=["greedy", "sampled"],
)
def test_drafting_does_not_change_the_text(
    model_dir: Path, draft_dir: Path, sampling: dict[str, Any]
) -> None:
    target = load(model_dir)
    outputs = []
    for speculator in (None, load_draft(draft_dir, target)):
        run = Run(make(target, speculator), Tokenizer(model_dir))
        for i, ids in enumerate(prompts(4)):
            run.add(str(i), ids, {**sampling, "max_new_tokens": 30})
        outputs.append({rid: (o.output_ids, o.text, o.finish_reason) for rid, o in run.finish().items()})
    assert outputs[0] == outputs[1]


class Oracle(Speculator):
    """Knows the continuation and gets the first `right` guesses of every chain right: the accepting path, exactly."""

    right = 0
    known: dict[str, list[int]]

    def draft(self, batch: list[Request], starts: list[int]) -> list[list[int]]:
        chains = []
        for request in batch:
            at = len(request.output_ids)
            true = (self.known[request.rid] + [0] * 8)[at : at + self.num_steps]
            chains.append([t if k < self.right else (t + 1) % 2048 for k, t in enumerate(true)])
        return chains


@pytest.mark.parametrize("right", [0, 1, 3])
def test_accepted_drafts_are_kept_and_counted(model_dir: Path, draft_dir: Path, right: int) -> None:
    target = load(model_dir)
    plain = Run(make(target), Tokenizer(model_dir))
    params = {"temperature": 0, "max_new_tokens": 33, "ignore_eos": True}
    for i, ids in enumerate(prompts()[:4]):
        plain.add(str(i), ids, params)
    want = {rid: o.output_ids for rid, o in plain.finish().items()}
    loaded = load_draft(draft_dir, target)
    oracle = Oracle(loaded.model, target, num_steps=3, rows=4, capacity=264)
    oracle.right, oracle.known = right, want
    run = Run(make(target, oracle), Tokenizer(model_dir))
    for i, ids in enumerate(prompts()[:4]):
        run.add(str(i), ids, params)
    for rid, output in run.finish().items():
        assert output.output_ids == want[rid]
        rounds = 32 // (right + 1)  # the first token comes from the prefill
        meta = output.meta_info
        assert meta["spec_verify_ct"] == rounds
        assert meta["spec_num_correct_drafts"] == right * rounds
        assert meta["spec_num_proposed_drafts"] == 3 * rounds
        assert meta["spec_accept_rate"] == pytest.approx(right / 3)
        assert meta["spec_accept_length"] == pytest.approx(33 / rounds)
        assert meta["spec_correct_drafts_histogram"] == [*[0] * right, rounds]


def test_boundaries_follow_sglang() -> None:
    assert boundaries({}, 8) == (2, 4, 5)
    assert boundaries({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}, 8) == (2, 4, 5)
    assert boundaries({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [4, 1, 3]}}, 8) == (2, 4, 5)
    for ids in ([1, 3, 8], [-2, 1, 4], [1, 1, 4], []):
        with pytest.raises(K2Error, match="do not fit a target of 8 layers"):
            boundaries({"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}, 8)
    with pytest.raises(K2Error, match="too shallow"):
        boundaries({}, 4)


def test_a_draft_of_another_target_is_refused(model_dir: Path, tmp_path: Path) -> None:
    target = load(model_dir)
    config = draft_config()
    tensors = draft_tensors(config)

    def refused(match: str, changes: dict[str, Any], bad: dict[str, np.ndarray | None]) -> None:
        left = {k: v for k, v in {**tensors, **bad}.items() if v is not None}
        folder = write_checkpoint(tmp_path / match.replace(" ", "_"), {**config, **changes}, left, shards=1)
        with pytest.raises(K2Error, match=match):
            load_draft(folder, target)

    refused("fc.weight has shape", {}, {"fc.weight": np.zeros((48, 3 * 64), np.float32)})
    refused("holds no tensor 'norm.weight'", {}, {"norm.weight": None})
    refused("there is no d2t", {}, {"d2t": None})
    refused("points outside the target", {}, {"d2t": np.full(512, 2000, np.int64)})
    refused("is not LlamaForCausalLMEagle3", {"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, {})


def test_speculative_server_from_outside(launch: Launcher, model_dir: Path, draft_dir: Path) -> None:
    engine = launch(
        *(
            "--model-path",
            model_dir,
            "--port",
            "0",
            "--decode-log-interval",
            "4",
            "--speculative-algorithm",
            "EAGLE3",
        ),
        *(
            "--speculative-draft-model-path",
            draft_dir,
            "--speculative-num-steps",
            "3",
            "--speculative-eagle-topk",
            "1",
        ),
        *("--speculative-num-draft-tokens", "4"),
    )
    assert engine.log.count("Load weight begin.") == 2
    assert "type=LlamaForCausalLMEagle3" in engine.log
    assert engine.log.count("KV Cache is allocated.") == 2
    body = {
        "text": "def main():",
        "sampling_params": {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True},
    }
    meta = engine.client.post("/generate", json=body).json()["meta_info"]
    assert meta["completion_tokens"] == 40
    assert meta["spec_verify_ct"] >= 10
    assert meta["spec_accept_length"] == pytest.approx(40 / meta["spec_verify_ct"])
    assert sum(meta["spec_correct_drafts_histogram"]) == meta["spec_verify_ct"]
    info = engine.client.get("/server_info").json()
    assert info["speculative_algorithm"] == "EAGLE3"
    assert info["internal_states"][0]["avg_spec_accept_length"] >= 1.0
    assert engine.client.get("/v1/loads").json()["loads"][0]["speculative"]["accept_length"] >= 1.0
    lines = [line for line in engine.log.splitlines() if "Decode batch" in line]
    assert lines and all("accept len: " in line and "accept rate: " in line for line in lines)
