"""The quick decoder and the scheduler against transformers: same logits, same hidden states, same tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from k2tui.errors import K2Error
from k2tui.local.kv import KVPool, Window
from k2tui.local.text import Tokenizer

from .conftest import CONFIG, random_tensors, shapes, write_checkpoint
from .inprocess import CPU, Run, load, make

LENGTHS = (3, 41, 17, 1, 90, 8, 60)


def reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def llama(model_dir: Path) -> Any:
    return reference(model_dir)


def prompts(seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [[1, *rng.integers(6, 2048, n - 1).tolist()] for n in LENGTHS]


def generated(model: Any, ids: list[int], count: int) -> list[int]:
    block = torch.tensor([ids])
    out = model.generate(
        block,
        attention_mask=torch.ones_like(block),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=2,
        pad_token_id=0,
    )
    return out[0, len(ids) :].tolist()


def full_forward(decoder: Any, ids: list[int], boundaries: tuple[int, ...] = ()) -> Any:
    pool = KVPool(
        num_layers=decoder.num_layers, rows=1, capacity=128, num_kv_heads=decoder.num_kv_heads, head_dim=decoder.head_dim,
        dtype=torch.float32, device=CPU,
    )  # fmt: skip
    positions = torch.arange(len(ids)).unsqueeze(0)
    hidden, aux = decoder.forward(torch.tensor([ids]), positions, Window(pool, 0, positions, [0]), boundaries)
    return decoder.logits(hidden), aux


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "no GQA": {"num_key_value_heads": 4},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    "llama3 rope": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_boundaries_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    config = {**CONFIG, **VARIANTS[name]}
    folder = write_checkpoint(tmp_path / "m", config, random_tensors(shapes(config), 5), shards=1)
    model, decoder = reference(folder), load(folder, "embedded")
    ids = prompts()[1]
    with torch.no_grad():
        want = model(torch.tensor([ids]), output_hidden_states=True)
        logits, aux = full_forward(decoder, ids, (2, 4, 5))
    torch.testing.assert_close(logits, want.logits, rtol=1e-4, atol=1e-4)
    # transformers' hidden_states[b] is what enters layer b: the boundary
    torch.testing.assert_close(
        aux, torch.cat([want.hidden_states[b] for b in (2, 4, 5)], -1), rtol=1e-4, atol=1e-4
    )


def test_other_architectures_run_through_transformers_class(tmp_path: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    keep = {
        k: v
        for k, v in CONFIG.items()
        if k not in ("architectures", "model_type", "head_dim", "dtype", "hidden_act", "rope_theta")
    }
    made = Qwen2ForCausalLM(Qwen2Config(**{**keep, "hidden_size": 64}, use_sliding_window=False))
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    folder = tmp_path / "qwen"
    made.save_pretrained(folder)
    source = write_checkpoint(tmp_path / "tok", CONFIG, {"x": np.zeros(1, np.float32)}, shards=1)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((source / file).read_bytes())
    with pytest.raises(K2Error, match="plain LlamaForCausalLM only"):
        load(folder, "embedded")
    model, decoder = reference(folder), load(folder)
    assert type(decoder).__name__ == "TransformersDecoder"
    run = Run(make(decoder), Tokenizer(folder))
    for i, ids in enumerate(prompts()):
        run.add(str(i), ids, {"temperature": 0, "max_new_tokens": 20})
    for rid, output in run.finish().items():
        assert output.output_ids == generated(model, prompts()[int(rid)], 20)


def test_greedy_equals_generate_under_continuous_batching(llama: Any, model_dir: Path) -> None:
    """Seven prompts of different lengths through four rows: they join and leave while others decode."""
    scheduler = make(load(model_dir), rows=4)
    run = Run(scheduler, Tokenizer(model_dir))
    counts = (30, 12, 50, 5, 40, 33, 21)
    together = 0
    for i, ids in enumerate(prompts()):
        run.add(str(i), ids, {"temperature": 0, "max_new_tokens": counts[i]})
        for _ in range(4):
            run.step()
            together = max(together, len(scheduler.running))
    outputs = run.finish()
    assert together >= 3
    for i, ids in enumerate(prompts()):
        want = generated(llama, ids, counts[i])
        assert outputs[str(i)].output_ids == want
        reason = outputs[str(i)].finish_reason
        assert reason == (
            {"type": "stop", "matched": 2} if want[-1] == 2 else {"type": "length", "length": counts[i]}
        )
    assert scheduler._reserved == 0


def test_greedy_equals_generate_on_the_transformers_path(llama: Any, model_dir: Path) -> None:
    run = Run(make(load(model_dir, "transformers")), Tokenizer(model_dir))
    for i, ids in enumerate(prompts(2)):
        run.add(str(i), ids, {"temperature": 0, "max_new_tokens": 15})
    for rid, output in run.finish().items():
        assert output.output_ids == generated(llama, prompts(2)[int(rid)], 15)


def test_requests_wait_for_tokens_of_the_cache(model_dir: Path) -> None:
    """The budget holds one long request at a time: the second waits, and both come out whole."""
    scheduler = make(load(model_dir), rows=4, tokens=150)
    run = Run(scheduler, Tokenizer(model_dir))
    for rid in "ab":
        run.add(rid, prompts()[4], {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True})
    run.step()
    assert (len(scheduler.running), len(scheduler.waiting)) == (1, 1)
    outputs = run.finish()
    assert outputs["a"].output_ids == outputs["b"].output_ids
    assert len(outputs["a"].output_ids) == 40


def test_log_probabilities_are_those_of_transformers(llama: Any, model_dir: Path) -> None:
    run = Run(make(load(model_dir)), Tokenizer(model_dir))
    ids = prompts()[2]
    run.add(
        "x",
        ids,
        {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True},
        return_logprob=True,
        logprob_start_len=0,
    )
    output = run.finish()["x"]
    whole = ids + output.output_ids
    with torch.no_grad():
        table = torch.log_softmax(llama(torch.tensor([whole])).logits[0].float(), -1)
    want = [float(table[i - 1, whole[i]]) for i in range(1, len(whole))]
    given = output.meta_info["input_token_logprobs"]
    assert given[0] == (None, ids[0], None)
    got = [entry[0] for entry in given[1:] + output.meta_info["output_token_logprobs"]]
    assert got == pytest.approx(want, abs=1e-4)


def test_capture_hook_sees_hidden_states_of_every_prompt(llama: Any, model_dir: Path) -> None:
    scheduler = make(load(model_dir))
    scheduler.capture_boundaries = (2, 4, 5)
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    scheduler.capture = lambda request, aux, last: seen.update({request.rid: (aux.clone(), last.clone())})
    run = Run(scheduler, Tokenizer(model_dir))
    for i, ids in enumerate(prompts()):
        run.add(str(i), ids, {"temperature": 0, "max_new_tokens": 0})
    outputs = run.finish()
    for i, ids in enumerate(prompts()):
        with torch.no_grad():
            want = llama(torch.tensor([ids]), output_hidden_states=True)
        aux, last = seen[str(i)]
        torch.testing.assert_close(
            aux, torch.cat([want.hidden_states[b][0] for b in (2, 4, 5)], -1), rtol=1e-4, atol=1e-4
        )
        torch.testing.assert_close(last, want.hidden_states[-1][0], rtol=1e-4, atol=1e-4)
        assert outputs[str(i)].output_ids == []
        assert outputs[str(i)].finish_reason == {"type": "length", "length": 0}


def test_config_that_is_not_the_shards_own(model_dir: Path, tmp_path: Path) -> None:
    config = {**CONFIG, "hidden_size": 64}
    folder = write_checkpoint(tmp_path / "m", config, random_tensors(shapes(CONFIG), 5), shards=2)
    with pytest.raises(K2Error, match=r"embed_tokens\.weight has shape"):
        load(folder)
    (folder / "config.json").write_text(
        json.dumps({k: v for k, v in CONFIG.items() if k != "num_hidden_layers"})
    )
    with pytest.raises(K2Error, match="'num_hidden_layers' is missing"):
        load(folder)


def test_a_failing_model_answers_everybody_and_says_why(
    model_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A full GPU, say: whoever runs or waits is told, and the scheduler is seen to be dead."""
    scheduler = make(load(model_dir), rows=2)
    whole = scheduler.decoder.forward
    calls = 0

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return whole(*args)

    scheduler.decoder.forward = failing  # type: ignore[method-assign]
    run = Run(scheduler, Tokenizer(model_dir))
    for i in range(3):
        run.add(str(i), [1, 300 + i], {"temperature": 0, "max_new_tokens": 50, "ignore_eos": True})
    scheduler.start()
    scheduler._thread.join(30)
    assert not scheduler.is_alive
    assert "CUDA out of memory" in scheduler.failure
    for got in run.outputs.values():
        reason = got[-1].finish_reason
        assert reason is not None
        assert (reason["type"], reason["status_code"]) == ("abort", 503)
        assert "CUDA out of memory" in reason["message"]
    assert "Scheduler hit an exception: OutOfMemoryError: CUDA out of memory" in capfd.readouterr().err
