"""What a server is doing: states, phases, shard counts. Values only; engines fill them, the screen draws them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class State(StrEnum):
    """One word for the server. The order is not a life cycle: see `docs/load.md`."""

    UNKNOWN = "unknown"
    LOADING = "loading"
    READY = "ready"
    STALLED = "stalled"
    DEGRADED = "degraded"
    FAILED = "failed"
    STOPPED = "stopped"


class Phase(StrEnum):
    BOOT = "boot"
    DIST_INIT = "dist_init"
    WEIGHT_LOAD = "weight_load"
    DRAFT_LOAD = "draft_load"
    AFTER_LOAD = "after_load"
    KV_ALLOC = "kv_alloc"
    GRAPH_CAPTURE = "graph_capture"
    WARMUP = "warmup"
    HTTP = "http"
    SERVING = "serving"
    SHUTDOWN = "shutdown"
    TRAIN = "train"
    EXTRACT = "extract"
    BENCH = "bench"
    MONITOR = "monitor"


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """One stretch of the timeline. Times are Unix seconds of the log's own stamps (or of arrival); ended_s None = now in it."""

    phase: Phase
    started_s: float
    ended_s: float | None = None
    line_no: int | None = (
        None  # the log line that began it, 1-based, counted from the first byte that was fed
    )


@dataclass(frozen=True, slots=True)
class ShardCount:
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class RankLoad:
    """How far one rank is with its weights. target, draft: None = the log draws no bar for this rank (rank 0's counts for all
    in most releases); is_loaded: it said that its (target's) weights are in. node: an address or a host's name, "" = not told.
    """

    rank: str  # "TP0", "DP0 TP1"
    node: str = ""
    target: ShardCount | None = None
    draft: ShardCount | None = None
    is_loaded: bool = False

    def as_json(self) -> dict[str, str | int | bool | None]:
        return {
            "rank": self.rank,
            "node": self.node or None,
            "done": self.target.done if self.target else None,
            "total": self.target.total if self.target else None,
            "draft_done": self.draft.done if self.draft else None,
            "draft_total": self.draft.total if self.draft else None,
            "is_loaded": self.is_loaded,
        }


@dataclass(frozen=True, slots=True)
class EtaAccuracy:
    """How good earlier estimates of the same start were at one checkpoint ("50%" of the shards)."""

    checkpoint: str
    count: int
    mean_error_s: float
    mean_error_share: float  # of the true time that was left

    def as_json(self) -> dict[str, str | int | float]:
        return {
            "checkpoint": self.checkpoint,
            "count": self.count,
            "mean_error_s": round(self.mean_error_s, 2),
            "mean_error_share": round(self.mean_error_share, 4),
        }


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """The newest `Decode batch` line. accept_length counts the bonus token (1.0 = nothing accepted)."""

    at_s: float
    num_running_reqs: int | None = None
    num_queue_reqs: int | None = None
    num_tokens: int | None = None
    token_usage: float | None = None
    gen_throughput: float | None = None
    accept_length: float | None = None
    cuda_graph: bool | None = None


@dataclass(frozen=True, slots=True)
class LoadView:
    """One frozen picture of one engine's start and life, as read from its log (and the evidence around it)."""

    state: State = State.UNKNOWN
    phase: Phase = Phase.BOOT
    phases: tuple[PhaseSpan, ...] = ()
    target: ShardCount | None = None
    draft: ShardCount | None = None
    shards_per_s: float | None = None
    bytes_done: int | None = None
    bytes_total: int | None = None
    eta_s: float | None = None  # seconds until ready, phases after the shards included
    eta_error_s: float | None = None  # +- of eta_s, from how good earlier ETAs were
    started_s: float | None = None  # Unix seconds
    ready_s: float | None = None  # seconds from start to ready, when ready
    silence_s: float | None = None  # seconds since the log last grew
    verdict: str = ""  # one sentence for people: "shards 41/64, 3.2 GB/s, ready in about 2:40"
    hint: str = ""  # what to try, when stalled, degraded or failed
    root_cause: str = ""  # class of CLASSES, "" when healthy
    root_cause_group: str = ""  # "G08"
    proof_line: str = ""
    proof_line_no: int | None = None
    confidence: float | None = None  # 0..1
    engine: str = ""  # "sglang", "vllm", "local", "" = not known yet
    version: str = ""
    model: str = ""
    tp_size: int | None = None
    url: str = ""  # "http://127.0.0.1:30000", from the log
    decode: DecodeBatch | None = None
    warnings: tuple[str, ...] = ()
    ranks: tuple[str, ...] = field(default=())  # rank tags seen: "TP0", "DP0 TP1"
    rank_loads: tuple[RankLoad, ...] = ()  # in the order of `ranks`; () while fewer than two ranks load
    eta_accuracy: tuple[EtaAccuracy, ...] = ()  # of this host's earlier starts of the same model
