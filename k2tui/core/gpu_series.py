"""GPU curves over time: a bounded memory of samples and what is read out of it; time comes with the samples, no clock here."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from k2tui.core.gpu import GpuSample, GpuView

METRICS = (
    "gpu_utilization",
    "memory_utilization",
    "memory_used_mb",
    "power_usage_w",
    "temperature_c",
    "sm_clock_mhz",
    "throttle_bits",
)
_NONE = -1
# Bits that cost speed; "application clocks", "sync boost" and "display clocks" are settings.
SLOW_BITS = 0x4 | 0x8 | 0x20 | 0x40 | 0x80


def figures_of(sample: GpuSample) -> tuple[int, ...]:
    """One sample as whole numbers in the order of METRICS, -1 = unknown. Memory in MiB, power in W."""
    return (
        _NONE if sample.gpu_utilization is None else sample.gpu_utilization,
        _NONE if sample.memory_utilization is None else sample.memory_utilization,
        _NONE if sample.memory_used_b is None else sample.memory_used_b >> 20,
        _NONE if sample.power_usage_mw is None else round(sample.power_usage_mw / 1000),
        _NONE if sample.temperature_c is None else sample.temperature_c,
        _NONE if sample.sm_clock_mhz is None else sample.sm_clock_mhz,
        _NONE if sample.throttle_bits is None else sample.throttle_bits & 0x1FF,
    )


@dataclass(frozen=True, slots=True)
class GpuCurve:
    """One GPU's curves: per metric one value a step, None = no sample in it. throttled: share of samples slowed down, 0..1."""

    index: int
    uuid: str = ""
    name: str = ""
    gpu_utilization: tuple[float | None, ...] = ()
    memory_utilization: tuple[float | None, ...] = ()
    memory_used_mb: tuple[float | None, ...] = ()
    power_usage_w: tuple[float | None, ...] = ()
    temperature_c: tuple[float | None, ...] = ()
    sm_clock_mhz: tuple[float | None, ...] = ()
    throttled: tuple[float | None, ...] = ()


@dataclass(frozen=True, slots=True)
class GpuCurves:
    """Curves of all GPUs over [start_s, end_s), step_s seconds a value (Unix seconds)."""

    start_s: float
    end_s: float
    step_s: float
    gpus: tuple[GpuCurve, ...] = ()


@dataclass(frozen=True, slots=True)
class GpuSummary:
    """One GPU over a span. energy_j: power times time over the part that was sampled (coverage, 0..1)."""

    index: int
    coverage: float
    gpu_utilization_mean: float | None = None
    memory_used_mb_max: float | None = None
    power_usage_w_mean: float | None = None
    power_usage_w_max: float | None = None
    temperature_c_max: float | None = None
    sm_clock_mhz_mean: float | None = None
    throttled_share: float | None = None
    energy_j: float | None = None


class CurveBuilder:
    """Averages samples that come in any order into the steps of one span."""

    def __init__(self, start_s: float, end_s: float, steps: int) -> None:
        if end_s <= start_s or steps < 1:
            raise ValueError("a span needs a length and at least one step")
        self.start_s, self.end_s, self.steps = start_s, end_s, steps
        self.step_s = (end_s - start_s) / steps
        self._sums: dict[int, list[array[float]]] = {}
        self._counts: dict[int, list[array[int]]] = {}
        self._names: dict[int, tuple[str, str]] = {}

    def add(self, at_s: float, index: int, figures: Sequence[int], uuid: str = "", name: str = "") -> None:
        """One sample, figures in the order of METRICS. Outside the span it is left out."""
        step = int((at_s - self.start_s) / self.step_s)
        if at_s < self.start_s or step >= self.steps:
            return
        if index not in self._sums:
            self._sums[index] = [array("d", [0.0]) * self.steps for _ in METRICS]
            self._counts[index] = [array("l", [0]) * self.steps for _ in METRICS]
            self._names[index] = (uuid, name)
        sums, counts = self._sums[index], self._counts[index]
        for metric, value in enumerate(figures):
            if value >= 0:
                sums[metric][step] += float(bool(value & SLOW_BITS)) if metric == 6 else value
                counts[metric][step] += 1

    def build(self) -> GpuCurves:
        curves: list[GpuCurve] = []
        for index in sorted(self._sums):
            columns = [
                tuple(s / c if c else None for s, c in zip(sums, counts, strict=True))
                for sums, counts in zip(self._sums[index], self._counts[index], strict=True)
            ]
            uuid, name = self._names[index]
            curves.append(GpuCurve(index, uuid, name, *columns))
        return GpuCurves(self.start_s, self.end_s, self.step_s, tuple(curves))


def summarize(curves: GpuCurves) -> tuple[GpuSummary, ...]:
    """One line a GPU for the table beside a benchmark or a load."""
    out: list[GpuSummary] = []
    for gpu in curves.gpus:
        power = _known(gpu.power_usage_w)
        filled = sum(
            1
            for values in zip(gpu.gpu_utilization, gpu.memory_used_mb, gpu.power_usage_w, strict=True)
            if any(v is not None for v in values)
        )
        out.append(
            GpuSummary(
                index=gpu.index,
                coverage=filled / max(1, len(gpu.gpu_utilization)),
                gpu_utilization_mean=_mean(_known(gpu.gpu_utilization)),
                memory_used_mb_max=max(_known(gpu.memory_used_mb), default=None),
                power_usage_w_mean=_mean(power),
                power_usage_w_max=max(power, default=None),
                temperature_c_max=max(_known(gpu.temperature_c), default=None),
                sm_clock_mhz_mean=_mean(_known(gpu.sm_clock_mhz)),
                throttled_share=_mean(_known(gpu.throttled)),
                energy_j=sum(power) * curves.step_s if power else None,
            )
        )
    return tuple(out)


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


MEMORY_METRICS = (*METRICS[:-1], "throttled_percent")


class _Ring:
    """Means of the newest `size` steps of `step_s` seconds each; the running step is a mean of what came so far."""

    __slots__ = ("_counts", "_open", "_stamps", "_sums", "_values", "size", "step_s")

    def __init__(self, step_s: int, size: int) -> None:
        self.step_s = step_s
        self.size = size
        self._stamps = array("q", [-1]) * size
        self._values = [array("i", [_NONE]) * size for _ in METRICS]
        self._sums = [0] * len(METRICS)
        self._counts = [0] * len(METRICS)
        self._open = -1  # the step that is being filled

    def put(self, second: int, figures: Sequence[int]) -> None:
        step = second // self.step_s
        slot = step % self.size
        if step < self._open:
            self._put_old(step, slot, figures)
            return
        if step > self._open:
            self._open = step
            self._stamps[slot] = step
            self._sums = [0] * len(METRICS)
            self._counts = [0] * len(METRICS)
            for values in self._values:
                values[slot] = _NONE
        for metric, value in enumerate(figures):
            if value >= 0:
                self._sums[metric] += value
                self._counts[metric] += 1
                self._values[metric][slot] = round(self._sums[metric] / self._counts[metric])

    def _put_old(self, step: int, slot: int, figures: Sequence[int]) -> None:
        """A figure from before, read from disk: it never replaces what was seen later."""
        if self._stamps[slot] > step or step <= self._open - self.size:
            return
        is_new = self._stamps[slot] != step
        self._stamps[slot] = step
        for values, value in zip(self._values, figures, strict=True):
            old = _NONE if is_new else values[slot]
            values[slot] = value if old < 0 else old if value < 0 else (old + value) // 2

    def last(self, metric: int, end_step: int, steps: int) -> tuple[int | None, ...]:
        """The steps (end_step - steps, end_step], oldest first."""
        values, stamps, size = self._values[metric], self._stamps, self.size
        return tuple(
            [
                values[at % size] if at >= 0 and stamps[at % size] == at and values[at % size] >= 0 else None
                for at in range(end_step - steps + 1, end_step + 1)
            ]
        )


class GpuMemory:
    """The newest samples of every GPU at several grains: (seconds a step, steps) of TIERS. About 160 KB a GPU.

    push() and values() belong to one thread. A GPU is known by its index; another board at that index starts anew.
    """

    TIERS: tuple[tuple[int, int], ...] = (
        (1, 900),
        (5, 720),
        (15, 1440),
        (60, 1440),
    )  # 15 min, 1 h, 6 h, 24 h

    def __init__(self) -> None:
        self._rings: dict[int, tuple[str, dict[int, _Ring]]] = {}
        self.newest_s = 0.0
        self._first_s = 0.0

    def push(self, view: GpuView) -> None:
        """Take in a view; GPUs in error leave a hole. The same view again changes nothing."""
        if view.taken_s <= self.newest_s:
            return
        self.newest_s = view.taken_s
        self._first_s = self._first_s or view.taken_s
        for sample in view.gpus:
            if not sample.error:
                *figures, bits = figures_of(sample)
                slowed = _NONE if bits < 0 else 100 * bool(bits & SLOW_BITS)
                self._put(int(view.taken_s), sample.index, sample.uuid, (*figures, slowed))

    def load(self, curves: GpuCurves) -> None:
        """Take in curves read from disk, at their own grain and coarser ones. What was pushed already stays."""
        for gpu in curves.gpus:
            columns = (
                gpu.gpu_utilization,
                gpu.memory_utilization,
                gpu.memory_used_mb,
                gpu.power_usage_w,
                gpu.temperature_c,
                gpu.sm_clock_mhz,
                tuple(None if share is None else share * 100 for share in gpu.throttled),
            )
            for step, figures in enumerate(zip(*columns, strict=True)):
                second = int(curves.start_s + step * curves.step_s)
                if any(value is not None for value in figures) and (not self._first_s or second < int(self._first_s)):
                    self._put(second, gpu.index, gpu.uuid, tuple(_NONE if v is None else round(v) for v in figures), curves.step_s)

    def _put(self, second: int, index: int, uuid: str, figures: Sequence[int], grain_s: float = 1.0) -> None:
        known = self._rings.get(index)
        if known is None or (uuid and known[0] and known[0] != uuid):
            known = (uuid, {step_s: _Ring(step_s, size) for step_s, size in self.TIERS})
            self._rings[index] = known
        for ring in known[1].values():
            if ring.step_s >= grain_s * 0.99:
                ring.put(second, figures)

    def values(
        self, index: int, metric: str, step_s: int, steps: int, now_s: float | None = None
    ) -> tuple[int | None, ...]:
        """The last `steps` means of step_s seconds (one of TIERS), oldest first, None where nothing was sampled.

        They end at an odd step, so that pairs of them (a braille cell) stay pairs while time goes on; the newest may be empty.
        """
        known = self._rings.get(index)
        if known is None or steps < 1:
            return (None,) * max(0, steps)
        end = (int(self.newest_s if now_s is None else now_s) // step_s) | 1
        return known[1][step_s].last(MEMORY_METRICS.index(metric), end, steps)
