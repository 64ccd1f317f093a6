"""Counters and gauges of the running server, and their Prometheus text with SGLang's names. Knows no HTTP."""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Mapping, Sequence

from k2tui.local.request import Request

_LATENCY_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.2,
    0.4,
    0.8,
    1.5,
    3.0,
    6.0,
    12.0,
    25.0,
    50.0,
    100.0,
)
_ITL_S = (0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)
_IDLE_S = 5.0  # after this long without work, throughput gauges say 0


class Histogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value


class Metrics:
    """Written by the scheduler's thread and the HTTP layer, read by both; every reader sees whole numbers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.ttft = Histogram(_LATENCY_S)
        self.e2e = Histogram(_LATENCY_S)
        self.tpot = Histogram(_ITL_S)
        self.queue = Histogram(_LATENCY_S)
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.num_requests = 0
        self.num_aborted = 0
        self.gen_throughput = 0.0
        self.last_input_throughput = 0.0
        self.spec_accept_length = 0.0
        self.spec_accept_rate = 0.0
        self.verified_tokens = 0
        self.verify_ct = 0
        self.prefill_busy_s = 0.0
        self.prefill_tokens = 0
        self.http: dict[tuple[str, str], int] = {}
        self.http_status: dict[tuple[str, str, int], int] = {}
        self._active_s = time.monotonic()

    def prefilled(self, tokens: int, seconds: float) -> None:
        self.prefill_tokens += tokens
        self.prefill_busy_s += seconds
        self.last_input_throughput = tokens / seconds
        self._active_s = time.monotonic()

    def decoded(self, throughput: float, accept_length: float, accept_rate: float) -> None:
        self.gen_throughput = throughput
        self.spec_accept_length = accept_length
        self.spec_accept_rate = accept_rate
        self._active_s = time.monotonic()

    def verified(self, tokens: int, verifications: int) -> None:
        self.verified_tokens += tokens
        self.verify_ct += verifications

    def idle(self) -> None:
        if time.monotonic() - self._active_s > _IDLE_S:
            self.gen_throughput = 0.0

    @property
    def avg_spec_accept_length(self) -> float | None:
        """Since the server started, bonus token included."""
        return self.verified_tokens / self.verify_ct if self.verify_ct else None

    def finished(self, request: Request) -> None:
        with self._lock:
            self.num_requests += 1
            self.prompt_tokens += len(request.input_ids)
            self.generation_tokens += len(request.output_ids)
            if request.finish_reason is not None and request.finish_reason["type"] == "abort":
                self.num_aborted += 1
                return
            self.e2e.add(request.finished_s - request.created_s)
            if request.first_token_s:
                self.ttft.add(request.first_token_s - request.created_s)
                self.queue.add(max(0.0, request.admitted_s - request.created_s))
            if len(request.output_ids) > 1:
                self.tpot.add((request.finished_s - request.first_token_s) / (len(request.output_ids) - 1))

    def answered(self, method: str, endpoint: str, status: int) -> None:
        with self._lock:
            self.http[method, endpoint] = self.http.get((method, endpoint), 0) + 1
            key = (method, endpoint, status)
            self.http_status[key] = self.http_status.get(key, 0) + 1


def _labels(values: Mapping[str, object]) -> str:
    def escape(value: object) -> str:
        return str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    return "{" + ",".join(f'{k}="{escape(v)}"' for k, v in sorted(values.items())) + "}" if values else ""


def render(metrics: Metrics, *, model_name: str, gauges: Mapping[str, tuple[str, float]]) -> str:
    """Prometheus text. gauges: name without prefix -> (help, value) of what the server knows at this moment."""
    model = {"model_name": model_name, "engine_type": "unified"}
    rank = {**model, "tp_rank": 0, "pp_rank": 0, "moe_ep_rank": 0}
    lines: list[str] = []

    def family(name: str, kind: str, text: str, rows: Sequence[tuple[Mapping[str, object], float]]) -> None:
        lines.append(f"# HELP sglang:{name} {text}")
        lines.append(f"# TYPE sglang:{name} {kind}")
        lines.extend(f"sglang:{name}{_labels(labels)} {float(value)!r}" for labels, value in rows)

    def histogram(name: str, text: str, found: Histogram, labels: Mapping[str, object]) -> None:
        lines.append(f"# HELP sglang:{name} {text}")
        lines.append(f"# TYPE sglang:{name} histogram")
        running = 0
        for bound, count in zip((*map(str, found.bounds), "+Inf"), found.counts, strict=True):
            running += count
            lines.append(f"sglang:{name}_bucket{_labels({**labels, 'le': bound})} {float(running)!r}")
        lines.append(f"sglang:{name}_sum{_labels(labels)} {found.total!r}")
        lines.append(f"sglang:{name}_count{_labels(labels)} {float(running)!r}")

    with metrics._lock:
        for name, (text, value) in gauges.items():
            family(name, "gauge", text, [(rank, value)])
        family(
            "gen_throughput",
            "gauge",
            "The generation throughput (token/s).",
            [(rank, metrics.gen_throughput)],
        )
        family(
            "cache_hit_rate",
            "gauge",
            "The prefix cache hit rate (the embedded engine has no prefix cache).",
            [(rank, 0.0)],
        )
        family(
            "spec_accept_length",
            "gauge",
            "Mean acceptance length of speculative decoding (accepted drafts + bonus token per forward).",
            [(rank, metrics.spec_accept_length)],
        )
        family(
            "spec_accept_rate",
            "gauge",
            "Accepted drafts / proposed drafts in the last interval.",
            [(rank, metrics.spec_accept_rate)],
        )
        family(
            "prompt_tokens_total",
            "counter",
            "Number of prefill tokens processed.",
            [(model, metrics.prompt_tokens)],
        )
        family(
            "generation_tokens_total",
            "counter",
            "Number of generation tokens processed.",
            [(model, metrics.generation_tokens)],
        )
        family(
            "num_requests_total", "counter", "Number of requests processed.", [(model, metrics.num_requests)]
        )
        family(
            "num_aborted_requests_total",
            "counter",
            "Number of requests aborted.",
            [(model, metrics.num_aborted)],
        )
        histogram(
            "time_to_first_token_seconds", "Histogram of time to first token in seconds.", metrics.ttft, model
        )
        histogram(
            "e2e_request_latency_seconds",
            "Histogram of End-to-end request latency in seconds",
            metrics.e2e,
            model,
        )
        histogram(
            "request_time_per_output_token_seconds", "Per-request TPOT in seconds.", metrics.tpot, model
        )
        histogram("queue_time_seconds", "Histogram of queueing time in seconds.", metrics.queue, rank)
        family(
            "http_requests_total",
            "counter",
            "Total number of HTTP requests by endpoint and method",
            [({"endpoint": e, "method": m}, n) for (m, e), n in sorted(metrics.http.items())],
        )
        family(
            "http_responses_total",
            "counter",
            "Total number of HTTP responses by endpoint and status code",
            [
                ({"endpoint": e, "method": m, "status_code": s}, n)
                for (m, e, s), n in sorted(metrics.http_status.items())
            ],
        )
    return "\n".join(lines) + "\n"
