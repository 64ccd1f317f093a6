"""The scheduler in this process, without HTTP, for tests that compare tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from k2tui.local.checkpoint import open_checkpoint
from k2tui.local.decoder import Decoder, make_decoder
from k2tui.local.metrics import Metrics
from k2tui.local.request import Output, Request
from k2tui.local.sampling import parse
from k2tui.local.scheduler import Scheduler
from k2tui.local.speculative import Speculator, load_speculator
from k2tui.local.text import TextStream, Tokenizer

CPU = torch.device("cpu")
CONTEXT = 256


def load(folder: Path, impl: str = "auto", dtype: torch.dtype = torch.float32) -> Decoder:
    return make_decoder(open_checkpoint(folder), impl=impl, dtype=dtype, device=CPU, capacity=CONTEXT + 8)


def load_draft(folder: Path, target: Decoder, *, num_steps: int = 3, rows: int = 4) -> Speculator:
    return load_speculator(
        open_checkpoint(folder), target, num_steps=num_steps, rows=rows, capacity=CONTEXT + 8
    )


def make(
    decoder: Decoder, speculator: Speculator | None = None, *, rows: int = 4, tokens: int = 1024
) -> Scheduler:
    return Scheduler(
        decoder,
        context_len=CONTEXT,
        max_running_requests=rows,
        max_total_num_tokens=tokens,
        chunked_prefill_size=256,
        decode_log_interval=1_000_000,
        eos_ids=frozenset({2}),
        seed=0,
        metrics=Metrics(),
        speculator=speculator,
    )


class Run:
    """Hands requests to a scheduler and steps it by hand, in this thread."""

    def __init__(self, scheduler: Scheduler, tokenizer: Tokenizer) -> None:
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.outputs: dict[str, list[Output]] = {}

    def add(self, rid: str, ids: Sequence[int], params: Mapping[str, Any], **extra: Any) -> Request:
        got = self.outputs[rid] = []
        parsed = parse(params, vocab_size=self.scheduler.decoder.vocab_size)
        request = Request(
            rid=rid,
            input_ids=list(ids),
            params=parsed,
            text=TextStream(self.tokenizer, parsed.stop, skip_special_tokens=parsed.skip_special_tokens),
            deliver=got.append,
            generator=None if parsed.seed is None else torch.Generator().manual_seed(parsed.seed),
            **extra,
        )
        self.scheduler.waiting.append(request)
        return request

    def step(self) -> None:
        with torch.inference_mode():
            admitted = self.scheduler._admit()
            if admitted:
                self.scheduler._prefill(admitted)
            elif self.scheduler.running:
                self.scheduler._decode()

    def finish(self) -> dict[str, Output]:
        while self.scheduler.running or self.scheduler.waiting:
            self.step()
        return {rid: got[-1] for rid, got in self.outputs.items()}
