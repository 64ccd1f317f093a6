"""The model card of an exported draft: what it was made from, what it scored, how to serve it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from k2tui import __version__
from k2tui.eagle3.draft import DraftConfig
from k2tui.eagle3.evaluate import ChainReport, EvalReport

if TYPE_CHECKING:
    from k2tui.eagle3.trainer import TrainOptions


def model_card(
    options: TrainOptions,
    config: DraftConfig,
    facts: Mapping[str, Any],
    report: EvalReport | None,
    chain: ChainReport | None,
) -> str:
    """Markdown. Figures are those of the held-out split at the moment of export."""
    states = facts.get("states") or {}
    start = (
        f"warm start from `{options.init}`" if options.init else "from scratch (head from the target's rows)"
    )
    o = options.optim
    lines = [
        "---", "library_name: sglang", "tags: [eagle3, speculative-decoding]", "---", "",
        "# EAGLE-3 draft", "",
        f"Draft model for `{options.target}`; {start}.", "",
        "| | |", "|---|---|",
        f"| shape | hidden {config.hidden_size}, intermediate {config.intermediate_size}, {config.num_attention_heads} heads, draft vocabulary {config.draft_vocab_size} of {config.vocab_size} |",
        f"| states | {states.get('engine') or 'unknown engine'} {states.get('engine_version') or ''}, boundaries {states.get('boundaries') or 'unknown'} |",
        f"| target | model hash {states.get('model_hash') or 'unknown'}, chat template {states.get('template_hash') or 'unknown'} |",
        f"| training | {facts.get('step')} steps, {facts.get('tokens'):,} tokens ({facts.get('loss_tokens'):,} loss-bearing), {options.ttt.ttt_length} test-time steps, lr {o.learning_rate:g} {o.schedule}, batch {options.batch_size} |",
        f"| versions | k2tui {__version__}, torch {torch.__version__} |", "",
    ]  # fmt: skip
    if report is not None:
        lines += [
            "## Held-out figures", "",
            f"Expected accept length with {report.num_steps} draft steps: **{report.accept_length:.3f}** (bonus token included; 1.0 = nothing accepted), over {report.positions} drafts.", "",
            "| step | accuracy | given all before | whole prefix | acceptance when sampling |", "|---|---|---|---|---|",
        ]  # fmt: skip
        for k in range(len(report.acc)):
            lines.append(
                f"| {k} | {report.acc[k]:.3f} | {report.cond_acc[k]:.3f} | {report.full_acc[k]:.3f} | {report.alpha[k]:.3f} |"
            )
        lines += [""]
    if chain is not None:
        lines += [
            f"Chain drafting replayed on {chain.samples} held-out samples: accept length **{chain.accept_length:.3f}** ({chain.verify_ct} drafts).",
            "",
        ]
    lines += [
        "## Serving", "", "```",
        "python -m sglang.launch_server --model-path TARGET --speculative-algorithm EAGLE3 --speculative-draft-model-path THIS \\",
        "  --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4", "",
        """vllm serve TARGET --speculative-config '{"method": "eagle3", "model": "THIS", "num_speculative_tokens": 3}'""", "```", "",
        f"`eagle_aux_hidden_state_layer_ids` {list(config.aux_layer_ids)} are written for SGLang {options.served_version}; the same numbers may mean other layers in other releases. vLLM reads those at the top of config.json, as boundaries.", "",
    ]  # fmt: skip
    return "\n".join(lines)
