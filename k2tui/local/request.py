"""One generation request: its tokens, its state, and what is told to whoever asked. Knows no HTTP and no tensors' home."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from k2tui.local.sampling import SamplingParams
from k2tui.local.text import TextStream


@dataclass(frozen=True, slots=True)
class Output:
    """Everything so far: text that may be shown, output token ids, why it ended (None = not yet), and SGLang's meta_info."""

    text: str
    output_ids: list[int]
    finish_reason: dict[str, Any] | None
    meta_info: dict[str, Any]


@dataclass(eq=False, slots=True)
class Request:
    """deliver: called in the scheduler's thread with each Output (only the last when `stream` is off)."""

    rid: str
    input_ids: list[int]
    params: SamplingParams
    text: TextStream
    deliver: Callable[[Output], None]
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    generator: torch.Generator | None = None
    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[tuple[float, int, None]] = field(default_factory=list)
    input_logprobs: list[tuple[float | None, int, None]] = field(default_factory=list)
    input_top_logprobs: list[list[tuple[float, int, None]] | None] = field(default_factory=list)
    output_top_logprobs: list[list[tuple[float, int, None]]] = field(default_factory=list)
    finish_reason: dict[str, Any] | None = None
    aborted: bool = False
    created_s: float = field(default_factory=time.perf_counter)
    admitted_s: float = 0.0
    first_token_s: float = 0.0
    finished_s: float = 0.0
    reserved: int = 0  # KV tokens kept for it while it runs
    # speculative decoding
    feature: torch.Tensor | None = None  # [1, H]: the draft's hidden state behind its newest guess
    guess: int = 0  # the draft's token after output_ids[-1]
    verify_ct: int = 0
    correct_drafts: int = 0
    histogram: list[int] = field(default_factory=list)  # index = drafts accepted in one verification

    @property
    def cached(self) -> int:
        """Positions whose K and V are in the cache: all but the newest token."""
        return len(self.input_ids) + len(self.output_ids) - 1

    def meta_info(self, num_steps: int) -> dict[str, Any]:
        completion = len(self.output_ids)
        info: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": self.finish_reason,
            "prompt_tokens": len(self.input_ids),
            "weight_version": "default",
            "num_retractions": 0,
            "completion_tokens": completion,
            "cached_tokens": 0,
        }
        if self.return_logprob:
            info["input_token_logprobs"] = self.input_logprobs
            info["output_token_logprobs"] = list(self.output_logprobs)
            if self.top_logprobs_num:
                info["input_top_logprobs"] = list(self.input_top_logprobs)
                info["output_top_logprobs"] = list(self.output_top_logprobs)
        if self.verify_ct:
            proposed = self.verify_ct * num_steps
            info |= {
                "spec_accept_rate": self.correct_drafts / proposed,
                "spec_accept_length": completion / self.verify_ct,
                "spec_num_correct_drafts": self.correct_drafts,
                "spec_num_proposed_drafts": proposed,
                "spec_verify_ct": self.verify_ct,
                "spec_correct_drafts_histogram": list(self.histogram),
            }
        now = self.finished_s or time.perf_counter()
        if self.admitted_s:
            info["queue_time"] = self.admitted_s - self.created_s
        if self.finish_reason is not None:
            info["e2e_latency"] = now - self.created_s
        return info

    def output(self, num_steps: int) -> Output:
        return Output(self.text.ready, list(self.output_ids), self.finish_reason, self.meta_info(num_steps))
