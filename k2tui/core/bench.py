"""Benchmark rows as tables show them. Definitions: docs/benchmarks.md."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One run (one point of load). Latencies in ms, throughput in tokens/s of output; None = not measured."""

    run_id: str
    started_s: float
    label: str = ""
    engine: str = ""
    version: str = ""
    model: str = ""
    workload: str = ""  # "random in 128 out 64"
    concurrency: int | None = None
    request_rate: float | None = None
    num_requests: int = 0
    completed: int = 0
    errors: int = 0
    duration_s: float | None = None
    output_throughput: float | None = None
    tok_s_user: float | None = None  # 1 / mean TPOT: the speed one user sees
    ttft_p50_ms: float | None = None
    ttft_p99_ms: float | None = None
    tpot_p50_ms: float | None = None
    tpot_p99_ms: float | None = None
    itl_p50_ms: float | None = None
    itl_p99_ms: float | None = None
    e2e_p50_ms: float | None = None
    e2e_p99_ms: float | None = None
    request_throughput: float | None = None
    accept_length: float | None = None
    is_baseline: bool = False
    is_partial: bool = False
    imported_from: str = ""
    flags: tuple[str, ...] = ()  # why the run is not valid, in words
    job_id: str = ""
