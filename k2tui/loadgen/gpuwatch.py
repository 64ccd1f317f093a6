"""GPU power beside a run, when the server runs on this host: curves, and the energy of its GPUs. Nothing here touches the stream."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any
from urllib.parse import urlsplit

from k2tui.core.bench_record import VERSION, Metric
from k2tui.jobs.procs import family
from k2tui.sources.procs import listener

_HERE = ("127.0.0.1", "localhost", "::1")


class GpuWatch:
    """Newest NVML view about once a second. No driver, no NVML or a far server: no samples, no figures.

    The figures count the GPUs on which the server's own processes hold memory; where those cannot be told (another user's server, one in
    a container), every GPU of this host.
    """

    def __init__(self, url: str) -> None:
        self.samples: list[dict[str, Any]] = []
        self._sampler: Any = None
        self._pids: frozenset[int] = frozenset()
        self._own: set[int] = set()
        parts = urlsplit(url)
        if parts.hostname not in _HERE:
            return
        with contextlib.suppress(OSError, ValueError):
            pid = listener(parts.port or 80)
            self._pids = frozenset(family([pid])) if pid is not None else self._pids
        with contextlib.suppress(Exception):  # a broken driver must never end a benchmark
            from k2tui.sources.nvml import NvmlSampler

            sampler = NvmlSampler()
            sampler.start()
            self._sampler = sampler

    def look(self, t_ns: int) -> None:
        """Keep the newest view, `t_ns` after the run's start."""
        if self._sampler is None:
            return
        view = self._sampler.latest()
        if view is not None:
            self._own.update(p.gpu_index for p in view.processes if p.pid in self._pids)
        gpus = [
            {
                "i": g.index,
                "power_mw": g.power_usage_mw,
                "util": g.gpu_utilization,
                "memory_b": g.memory_used_b,
                "sm_mhz": g.sm_clock_mhz,
            }
            for g in (view.gpus if view is not None else ())
        ]
        if gpus:
            self.samples.append({"t_ms": t_ns // 1_000_000, "gpu": gpus})

    def close(self) -> None:
        if self._sampler is not None:
            self._sampler.stop()
            self._sampler = None

    def figures(self, output_tokens: int) -> list[Metric]:
        """Mean power of the server's GPUs and output tokens per joule; [] without at least two samples."""
        points: list[tuple[float, float]] = []
        for sample in self.samples:
            watts = [
                g["power_mw"] / 1000
                for g in sample["gpu"]
                if g["power_mw"] and (not self._own or g["i"] in self._own)
            ]
            if watts:
                points.append((sample["t_ms"] / 1000, sum(watts)))
        if len(points) < 2:
            return []
        joule = sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in itertools.pairwise(points))
        span = points[-1][0] - points[0][0]
        if joule <= 0 or span <= 0:
            return []
        mean = joule / span
        whole = mean * points[-1][0]  # the run starts before the first sample
        return [
            Metric(f"gpu_power.{VERSION}", "value", mean, "W", n=len(points)),
            Metric(f"tokens_per_joule.{VERSION}", "value", output_tokens / whole, "tok/J", n=len(points)),
        ]
