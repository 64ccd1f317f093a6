"""When will it be ready? Earlier starts of the same model on this host, corrected by what this one shows.

Knows no file and no clock. A start is a row of phases; the estimate is what is left of the present phase plus the later phases
of the earlier starts that look most like this one (a start from a warm page cache is not one from a cold disk).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, cast

from k2tui.core.load import EtaAccuracy, Phase, PhaseSpan, ShardCount

CHECKPOINTS = ("start", "10%", "50%", "90%", "after shards")
_SHARD_PHASES = (Phase.WEIGHT_LOAD, Phase.DRAFT_LOAD)
_LAST = (Phase.SERVING, Phase.SHUTDOWN)
_KEEP = 12  # newest starts of a model that are looked at
_SIGMA = 0.35  # width of "looks alike", in ln(time)


class Progress(NamedTuple):
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


class Estimate(NamedTuple):
    """Seconds until ready, +- error_s (None = no earlier start to judge by). phase_s: what is left of the present phase."""

    eta_s: float
    error_s: float | None = None
    phase_s: float | None = None


class EtaModel(Protocol):
    def estimate(self, progress: Progress) -> Estimate | None: ...

    def accuracy(self, progress: Progress) -> tuple[EtaAccuracy, ...]:
        """How good the estimates of earlier starts like this one were."""
        ...


@dataclass(frozen=True, slots=True)
class StartRecord:
    """One finished start, as kept on disk. Times in seconds.

    phases: (phase, duration) in order, from the start's first line to ready. curve: (share of the target's shards, seconds
    since the shard phase began). predictions: checkpoint -> (predicted, true) seconds until ready, made while it ran.
    """

    id: str
    at_s: float
    engine: str
    model: str
    ready_s: float
    tp_size: int | None = None
    has_draft: bool = False
    version: str = ""
    shards: int | None = None
    phases: tuple[tuple[Phase, float], ...] = ()
    curve: tuple[tuple[float, float], ...] = ()
    predictions: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])

    def to_json(self) -> dict[str, Any]:
        return {
            "v": 1, "id": self.id, "at_s": round(self.at_s, 3), "engine": self.engine, "model": self.model,
            "ready_s": round(self.ready_s, 3), "tp_size": self.tp_size, "has_draft": self.has_draft, "version": self.version,
            "shards": self.shards, "phases": [[str(p), round(s, 3)] for p, s in self.phases],
            "curve": [[round(f, 4), round(s, 3)] for f, s in self.curve],
            "predictions": {k: [round(a, 2), round(b, 2)] for k, (a, b) in self.predictions.items()},
        }  # fmt: skip

    @staticmethod
    def from_json(value: object) -> StartRecord | None:
        """None for anything that is not a whole record; unknown keys and phases are ignored."""
        if not isinstance(value, dict):
            return None
        raw = cast("dict[str, Any]", value)
        try:
            known = {str(p) for p in Phase}
            record = StartRecord(
                id=str(raw["id"]),
                at_s=float(raw["at_s"]),
                engine=str(raw["engine"]),
                model=str(raw["model"]),
                ready_s=float(raw["ready_s"]),
                tp_size=None if raw.get("tp_size") is None else int(raw["tp_size"]),
                has_draft=bool(raw.get("has_draft")),
                version=str(raw.get("version") or ""),
                shards=None if raw.get("shards") is None else int(raw["shards"]),
                phases=tuple(
                    (Phase(p), float(s)) for p, s in raw.get("phases") or () if p in known and float(s) >= 0
                ),
                curve=tuple((float(f), float(s)) for f, s in raw.get("curve") or ()),
                predictions={str(k): (float(v[0]), float(v[1])) for k, v in _items(raw.get("predictions"))},
            )
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            return None
        numbers = [
            record.at_s,
            record.ready_s,
            *(s for _, s in record.phases),
            *(x for point in record.curve for x in point),
        ]
        return record if record.ready_s > 0 and all(math.isfinite(n) for n in numbers) else None


def _items(value: object) -> list[tuple[Any, Any]]:
    return list(cast("dict[Any, Any]", value).items()) if isinstance(value, dict) else []


def time_at(curve: Sequence[tuple[float, float]], share: float) -> float | None:
    """Seconds into the shard phase at which that share was loaded, interpolated; None without a curve."""
    if not curve:
        return None
    before = (0.0, 0.0)
    for point in curve:
        if point[0] >= share:
            width = point[0] - before[0]
            return (
                point[1] if width <= 0 else before[1] + (point[1] - before[1]) * (share - before[0]) / width
            )
        before = point
    return curve[-1][1]


def _clipped(gaps: Sequence[float]) -> list[float]:
    """Gaps between refreshes, each at most 5 times the mean of the others: one stall says nothing about the rate."""
    if len(gaps) < 3:
        return list(gaps)
    total = sum(gaps)
    return [min(g, 5 * (total - g) / (len(gaps) - 1)) for g in gaps]


class _Pace(NamedTuple):
    """How many times slower than planned the shards come, as ln, and how sure that is (standard deviation of the ln)."""

    ln: float
    noise: float

    @property
    def factor(self) -> float:
        return math.exp(self.ln)


def _window(seen: Sequence[float], planned: Sequence[float]) -> tuple[float, float] | None:
    """(ln of the pace, its noise) over these gaps. Noise: the gaps' own scatter over the root of their number."""
    if sum(seen) <= 0 or sum(planned) <= 0:
        return None
    pace = sum(seen) / sum(planned)
    typical = sum(seen) / len(seen)
    scatter = (
        math.sqrt(sum((s - pace * p) ** 2 for s, p in zip(seen, planned, strict=True)) / len(seen)) / typical
    )
    return math.log(min(max(pace, 1e-4), 1e6)), max(0.05, (scatter + 0.3 / len(seen)) / math.sqrt(len(seen)))


def _pace(
    rhythm: Sequence[tuple[float, int]], total: int, curve: Sequence[tuple[float, float]]
) -> _Pace | None:
    """The pace of the shards against the curve; without a curve, planned is one second a shard."""
    moves = [(b[0] - a[0], a[1], b[1]) for a, b in pairwise(rhythm) if b[1] > a[1] and b[0] >= a[0]]
    if not moves:
        return None
    seen = _clipped([m[0] for m in moves])
    planned: list[float] = []
    for _, first, last in moves:
        if curve:
            begin, end = time_at(curve, first / total), time_at(curve, last / total)
            planned.append(max(0.0, (end or 0.0) - (begin or 0.0)))
        else:
            planned.append(float(last - first))
    whole = _window(seen, planned)
    if whole is None:
        return None
    size = max(6, len(moves) // 5)
    recent = _window(seen[-size:], planned[-size:]) if len(moves) > size else None
    if recent is None:
        return _Pace(*whole)
    # the whole run is less noisy, the newest part is nearer to what comes: a curve already holds the usual drift
    drift = 0.15 if curve else 0.4
    a, b = 1 / (whole[1] ** 2 + drift**2), 1 / recent[1] ** 2
    return _Pace((whole[0] * a + recent[0] * b) / (a + b), 1 / math.sqrt(a + b))


class LinearEta:
    """Without history: what is left of the shards at the pace of this load. Says nothing outside the shard phase."""

    def estimate(self, progress: Progress) -> Estimate | None:
        count = progress.draft if progress.phase is Phase.DRAFT_LOAD else progress.target
        if progress.phase not in _SHARD_PHASES or count is None or len(progress.rhythm) < 2:
            return None
        if count.done >= count.total:
            return None  # what still comes is not the shards' business
        pace = _pace(progress.rhythm, count.total, ())
        if pace is None:
            return None
        last_s, done = progress.rhythm[-1]
        left = (count.total - done) * pace.factor
        waited = max(0.0, (progress.log_now_s or last_s) - last_s)
        left = max(left - waited, (count.total - done - 1) * pace.factor, 0.0)
        return Estimate(left, None, left)

    def accuracy(self, progress: Progress) -> tuple[EtaAccuracy, ...]:
        return ()


class LearnedEta:
    """Earlier starts on this host. Falls back to LinearEta plus the usual later phases of the same engine."""

    def __init__(self, records: Sequence[StartRecord]) -> None:
        self._records = sorted(records, key=lambda r: r.at_s)
        self._linear = LinearEta()

    def like(self, progress: Progress) -> list[StartRecord]:
        """The newest starts of the same model, engine, parallel size and draft, newest last; () when there is none."""
        return [
            r
            for r in self._records
            if r.engine == progress.engine
            and r.model == progress.model
            and (r.tp_size or 1) == (progress.tp_size or 1)
            and r.has_draft == progress.has_draft
        ][-_KEEP:]

    def accuracy(self, progress: Progress) -> tuple[EtaAccuracy, ...]:
        return accuracy(self.like(progress))

    def estimate(self, progress: Progress) -> Estimate | None:
        if progress.phase in _LAST or not progress.spans or progress.log_now_s is None:
            return None
        records = self.like(progress)
        if not records:
            return self._stranger(progress)
        rows: list[tuple[float, float, float]] = []  # (weight, until ready, left of the phase)
        for age, record in enumerate(reversed(records)):
            row = self._by(record, progress)
            if row is not None:
                rows.append((row[0] * 0.85**age, row[1], row[2]))
        weight = sum(r[0] for r in rows)
        if weight <= 0:
            return self._stranger(progress)
        eta = sum(w * t for w, t, _ in rows) / weight
        phase = sum(w * p for w, _, p in rows) / weight
        return Estimate(eta, self._error(records, progress, eta, rows), phase)

    def _by(self, record: StartRecord, progress: Progress) -> tuple[float, float, float] | None:
        """(weight, seconds until ready, seconds left of the phase) if this start went on like that one."""
        spans = progress.spans
        now = progress.log_now_s or 0.0
        turn = sum(1 for s in spans if s.phase is spans[-1].phase)
        place = -1
        for index, (phase, _) in enumerate(record.phases):
            if phase is spans[-1].phase:
                place = index
                turn -= 1
                if turn == 0:
                    break
        if place < 0:
            return None
        later = sum(s for p, s in record.phases[place + 1 :] if p not in _LAST)
        inside = max(0.0, now - spans[-1].started_s)
        planned = record.phases[place][1]
        weight = self._likeness(record, progress)
        if progress.phase is Phase.WEIGHT_LOAD and progress.target is not None and record.curve:
            left = self._shards_left(record, progress, planned)
            if left is not None:
                return weight, left + later, left
        left = planned - inside if inside < planned else 0.15 * (inside - planned)
        return weight, left + later, left

    def _shards_left(self, record: StartRecord, progress: Progress, planned: float) -> float | None:
        count, rhythm = progress.target, progress.rhythm
        if count is None or not rhythm:
            return None
        last_s, done = rhythm[-1]
        share = done / count.total
        reached, whole = time_at(record.curve, share), record.curve[-1][1]
        if reached is None or whole <= 0:
            return None
        rest = max(0.0, planned - whole)  # from the last shard to the end of the phase
        pace = _pace(rhythm, count.total, record.curve)
        slower = 1.0
        if pace is not None:
            trust = _SIGMA**2 / (_SIGMA**2 + pace.noise**2)
            slower = math.exp(trust * min(max(pace.ln, -7.0), 7.0))
        left = slower * (whole - reached)
        waited = max(0.0, (progress.log_now_s or last_s) - last_s)
        soonest = slower * (whole - (time_at(record.curve, min(1.0, (done + 1) / count.total)) or reached))
        return max(left - waited, soonest, 0.0) + rest

    def _likeness(self, record: StartRecord, progress: Progress) -> float:
        """1 = the phases so far took as long as in that start; near 0 = another kind of start."""
        distance, terms = 0.0, 0
        count, rhythm = progress.target, progress.rhythm
        span = progress.spans[-1]
        if progress.phase is Phase.WEIGHT_LOAD and count is not None and len(rhythm) >= 2 and record.curve:
            pace = _pace(rhythm, count.total, record.curve)
            if pace is not None:
                distance += pace.ln**2 / (1 + pace.noise**2 / _SIGMA**2)
                terms += 1
        for done in progress.spans[:-1]:
            if done.phase is Phase.WEIGHT_LOAD and done.ended_s is not None:
                planned = sum(s for p, s in record.phases if p is Phase.WEIGHT_LOAD)
                took = done.ended_s - done.started_s
                if planned > 0.5 and took > 0.5:
                    distance += math.log(took / planned) ** 2
                    terms += 1
        if span.phase is Phase.WEIGHT_LOAD and terms == 0:
            return 1.0
        return math.exp(-distance / (2 * _SIGMA**2)) + 1e-6

    def _stranger(self, progress: Progress) -> Estimate | None:
        """A model that was never started here: its own pace, plus what the later phases usually take with this engine."""
        linear = self._linear.estimate(progress)
        if linear is None:
            return None
        tails = [
            sum(s for p, s in r.phases[_last_index(r, Phase.WEIGHT_LOAD) + 1 :] if p not in _LAST)
            for r in self._records[-_KEEP:]
            if r.engine == progress.engine and _last_index(r, Phase.WEIGHT_LOAD) >= 0
        ]
        return Estimate(linear.eta_s + _median(tails), None, linear.phase_s)

    def _error(
        self,
        records: Sequence[StartRecord],
        progress: Progress,
        eta_s: float,
        rows: Sequence[tuple[float, float, float]],
    ) -> float | None:
        """+- seconds that held in 4 of 5 earlier starts at this point; with few of them, how far they lie apart."""
        point = checkpoint(progress)
        errors = sorted(
            abs(a - b) / max(b, 1.0) for r in records for k, (a, b) in r.predictions.items() if k == point
        )
        if len(errors) >= 3:
            return eta_s * errors[min(len(errors) - 1, math.ceil(0.8 * len(errors)) - 1)]
        heavy = [t for w, t, _ in rows if w > 0.1 * max(r[0] for r in rows)]
        if len(heavy) >= 2:
            return max((max(heavy) - min(heavy)) / 2, 0.1 * eta_s)
        return None


def _last_index(record: StartRecord, phase: Phase) -> int:
    found = [n for n, (p, _) in enumerate(record.phases) if p is phase]
    return found[-1] if found else -1


def checkpoint(progress: Progress) -> str:
    """Which of CHECKPOINTS this moment belongs to."""
    if progress.phase in (Phase.BOOT, Phase.DIST_INIT):
        return "start"
    if progress.phase is Phase.WEIGHT_LOAD and progress.target is not None:
        share = progress.target.done / progress.target.total
        return "10%" if share < 0.3 else "50%" if share < 0.7 else "90%"
    return "after shards" if progress.phase is not Phase.WEIGHT_LOAD else "start"


def accuracy(records: Sequence[StartRecord]) -> tuple[EtaAccuracy, ...]:
    """For each checkpoint that has predictions, in the order of CHECKPOINTS."""
    out: list[EtaAccuracy] = []
    for name in CHECKPOINTS:
        pairs = [r.predictions[name] for r in records if name in r.predictions]
        if pairs:
            errors = [abs(a - b) for a, b in pairs]
            shares = [abs(a - b) / max(b, 1.0) for a, b in pairs]
            out.append(EtaAccuracy(name, len(pairs), sum(errors) / len(errors), sum(shares) / len(shares)))
    return tuple(out)


def _median(values: list[float]) -> float:
    """0.0 of nothing."""
    ordered, n = sorted(values), len(values)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2 if n else 0.0
