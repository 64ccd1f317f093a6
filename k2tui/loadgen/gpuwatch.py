"""GPU power beside a run, when the server runs on this host: curves and energy. Nothing here touches the stream."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any
from urllib.parse import urlsplit

from k2tui.core.bench_record import VERSION, Metric

_HERE = ("127.0.0.1", "localhost", "::1")


class GpuWatch:
    """Newest NVML view about once a second. No driver, no NVML or a far server: no samples, no figures."""

    def __init__(self, url: str) -> None:
        self.samples: list[dict[str, Any]] = []
        self._sampler: Any = None
        if urlsplit(url).hostname not in _HERE:
            return
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
        """Mean power of all GPUs here and output tokens per joule; [] without at least two samples."""
        points = [
            (s["t_ms"] / 1000, sum(g["power_mw"] or 0 for g in s["gpu"]) / 1000)
            for s in self.samples
            if any(g["power_mw"] for g in s["gpu"])
        ]
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
