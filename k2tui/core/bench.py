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
    # where the run belongs and what it may be compared with
    sweep: str = ""  # id shared by the points of one sweep
    repeat: int = 0
    tag: str = ""
    api: str = ""  # generate | completions | chat
    load_shape: str = "closed"  # closed | constant | poisson | gamma | trace
    workload_fp: str = ""  # equal = same prompts, lengths and sampling
    server_fp: str = ""
    host: str = ""
    tp_size: int | None = None
    # more figures
    tpot_mean_ms: float | None = None
    itl_mean_ms: float | None = None
    icl_p50_ms: float | None = None  # between chunks: what eyes see
    icl_p99_ms: float | None = None
    icl_max_ms: float | None = None
    ttft_sched_p99_ms: float | None = None  # from the intended start (open loop)
    tokens_per_chunk: float | None = None
    accept_rate: float | None = None  # correct / proposed drafts, bonus excluded
    cached_fraction: float | None = None  # of the prompt tokens
    output_throughput_steady: float | None = None  # while the asked concurrency was running
    total_output_tokens: int | None = None
    total_input_tokens: int | None = None
    goodput: float | None = None  # requests/s inside the SLO
    goodput_fraction: float | None = None  # of all requests, errors count against
    slo: str = ""  # "ttft 2000 ms, tpot 80 ms"
    tokens_per_joule: float | None = None
    # how far the figures can be trusted
    stamps: str = ""  # kernel | user
    count: str = ""  # server | client
    lag_p99_ms: float | None = None  # kernel stamp -> read by the client
    client_cpu: float | None = None  # fraction of one core
    coalesced: float | None = None  # fraction of token events that shared one read
    host_steal: float | None = None
    achieved: float | None = None  # achieved / asked concurrency or rate
    short_outputs: int = 0
    # 95 % intervals (lo, hi) from inside the run; None = too few requests for one
    output_throughput_ci: tuple[float, float] | None = None
    tok_s_user_ci: tuple[float, float] | None = None
    ttft_p50_ci: tuple[float, float] | None = None
    ttft_p99_ci: tuple[float, float] | None = None
    tpot_p50_ci: tuple[float, float] | None = None
    tpot_p99_ci: tuple[float, float] | None = None

    @property
    def is_valid(self) -> bool:
        """No flag, not partial: only such a run may become a baseline."""
        return not self.flags and not self.is_partial
