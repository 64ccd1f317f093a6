"""What vLLM's /metrics says of load and drafting: its text -> counters, and figures of the time between two readings. Pure."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_POSITION = re.compile(r'position="(\d{1,3})"')
_PREFIX = "vllm:"
_USAGE = ("kv_cache_usage_perc", "gpu_cache_usage_perc")  # the second in older releases


@dataclass(frozen=True, slots=True)
class VllmMetrics:
    """Counters since the server's start, summed over its engines; gauges of now. None: the server does not say it.

    num_drafts: target passes that checked drafts. num_draft_tokens: tokens proposed to them. num_accepted_tokens: without the bonus
    token. accepted_per_pos[k]: passes whose first k+1 drafts were all accepted. token_usage: 0..1, mean of the engines.
    """

    num_running_reqs: int | None = None
    num_queue_reqs: int | None = None
    token_usage: float | None = None
    generation_tokens: float | None = None
    prefix_cache_queries: float | None = None
    prefix_cache_hits: float | None = None
    num_drafts: float | None = None
    num_draft_tokens: float | None = None
    num_accepted_tokens: float | None = None
    accepted_per_pos: tuple[float, ...] = ()

    def accept_length(self, since: VllmMetrics | None = None) -> float | None:
        """Tokens a target pass yields, bonus token included: 1 + accepted / passes. None: no pass checked a draft."""
        drafts = _grown(self.num_drafts, since and since.num_drafts)
        accepted = _grown(self.num_accepted_tokens, since and since.num_accepted_tokens)
        return 1 + accepted / drafts if drafts and accepted is not None else None

    def cache_hit_rate(self, since: VllmMetrics) -> float | None:
        """Share of prompt tokens found in the prefix cache, 0..1; None when nothing was asked."""
        asked = _grown(self.prefix_cache_queries, since.prefix_cache_queries)
        hits = _grown(self.prefix_cache_hits, since.prefix_cache_hits)
        return hits / asked if asked and hits is not None else None

    def is_restart_of(self, old: VllmMetrics) -> bool:
        """A counter went back: another process answers."""
        pairs = ((self.generation_tokens, old.generation_tokens), (self.num_drafts, old.num_drafts))
        return any(a is not None and b is not None and a < b for a, b in pairs)


def _grown(new: float | None, old: float | None) -> float | None:
    return None if new is None else new - (old or 0.0)


def read_metrics(text: str) -> VllmMetrics | None:
    """The Prometheus text of /metrics; None when no line of it is vLLM's."""
    sums: dict[str, list[float]] = {}
    positions: dict[int, float] = {}
    for line in text.splitlines():
        if not line.startswith(_PREFIX):
            continue
        head, _, number = line.rpartition(" ")
        try:
            value = float(number)
        except ValueError:
            continue
        if not math.isfinite(value):
            continue
        name = head.partition("{")[0].removeprefix(_PREFIX).removesuffix("_total")
        sums.setdefault(name, []).append(value)
        if name == "spec_decode_num_accepted_tokens_per_pos" and (found := _POSITION.search(head)):
            at = int(found[1])
            positions[at] = positions.get(at, 0.0) + value
    if not sums:
        return None

    def total(name: str) -> float | None:
        return sum(sums[name]) if name in sums else None

    usage = next((sums[n] for n in _USAGE if n in sums), None)
    running, waiting = total("num_requests_running"), total("num_requests_waiting")
    return VllmMetrics(
        num_running_reqs=None if running is None else int(running),
        num_queue_reqs=None if waiting is None else int(waiting),
        token_usage=sum(usage) / len(usage) if usage else None,
        generation_tokens=total("generation_tokens"),
        prefix_cache_queries=total("prefix_cache_queries"),
        prefix_cache_hits=total("prefix_cache_hits"),
        num_drafts=total("spec_decode_num_drafts"),
        num_draft_tokens=total("spec_decode_num_draft_tokens"),
        num_accepted_tokens=total("spec_decode_num_accepted_tokens"),
        accepted_per_pos=tuple(positions[k] for k in sorted(positions)),
    )
