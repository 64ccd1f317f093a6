"""When will it be ready? Learned medians of earlier starts, corrected by what this one shows. Knows no file and no clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from k2tui.core.load import Phase, PhaseSpan, ShardCount


@dataclass(frozen=True, slots=True)
class Progress:
    """What the estimate may look at. rhythm: (log seconds, shards done) of the bar that runs now, oldest first."""

    phase: Phase
    spans: tuple[PhaseSpan, ...] = ()
    target: ShardCount | None = None
    draft: ShardCount | None = None
    rhythm: tuple[tuple[float, int], ...] = ()
    log_now_s: float | None = None
    elapsed_s: float | None = None
    model: str = ""
    engine: str = ""
    tp_size: int | None = None
    has_draft: bool = False
    capture: ShardCount | None = None
    bytes_done: int | None = None
    bytes_total: int | None = None
    read_bytes_s: float | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds until ready, +- error_s (None = no earlier start to judge by)."""

    eta_s: float
    error_s: float | None = None


class EtaModel(Protocol):
    def estimate(self, progress: Progress) -> Estimate | None: ...


class LinearEta:
    """Without history: what is left of the shards at the recent rate. Says nothing outside the shard phase."""

    def estimate(self, progress: Progress) -> Estimate | None:
        count = progress.draft if progress.phase is Phase.DRAFT_LOAD else progress.target
        if (
            progress.phase not in (Phase.WEIGHT_LOAD, Phase.DRAFT_LOAD)
            or count is None
            or len(progress.rhythm) < 2
        ):
            return None
        (t0, d0), (t1, d1) = progress.rhythm[0], progress.rhythm[-1]
        if t1 <= t0 or d1 <= d0:
            return None
        left = (count.total - count.done) * (t1 - t0) / (d1 - d0)
        if progress.log_now_s is not None:
            left -= max(0.0, progress.log_now_s - t1)
        return Estimate(max(0.0, left))
