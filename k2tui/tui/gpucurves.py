"""GPU curves of a span of time (a job's, a benchmark's) as lines for a window: one line of figures and one curve a GPU."""

from __future__ import annotations

from k2tui.core.gpu_series import GpuCurves, summarize
from k2tui.core.gpu_text import NONE_TEXT, curve, short_gpu_name
from k2tui.tui import format as fmt
from k2tui.tui.lines import Glyphs, Line, Seg, fit, text_line

FIGURES = 50


def _figure(value: float | None, unit: str, digits: int = 0) -> str:
    return NONE_TEXT if value is None else f"{value:.{digits}f}{unit}"


def steps_for(width: int, glyphs: Glyphs) -> int:
    """Values that a curve of that window can show."""
    return max(8, (width - 4) * (1 if glyphs.ascii else 2))


def lines(curves: GpuCurves, width: int, glyphs: Glyphs) -> list[Line]:
    """Figures, then utilisation and memory over the span, GPU by GPU; words when nothing was recorded."""
    span = f"{fmt.clock(curves.start_s)} to {fmt.clock(curves.end_s)}, {fmt.duration(curves.end_s - curves.start_s)}"
    out: list[Line] = [text_line(span, "dim")]
    if not curves.gpus:
        return [*out, text_line("No GPU samples in that time: the dashboard writes them while it runs, and so does"), text_line("k2tui gpus --watch --record.")]
    cells = width - 4
    for gpu, line in zip(curves.gpus, summarize(curves), strict=True):
        out.append(())
        slowed = "" if not line.throttled_share else f"  slowed {100 * line.throttled_share:.0f}% of the time"
        figures = (
            f"util {_figure(line.gpu_utilization_mean, '%')}  memory up to "
            f"{_figure(None if line.memory_used_mb_max is None else line.memory_used_mb_max / 1024, 'G', 1)}  "
            f"power {_figure(line.power_usage_w_mean, 'W')}, {_figure(None if line.energy_j is None else line.energy_j / 3600, ' Wh', 1)}  "
            f"up to {_figure(line.temperature_c_max, glyphs.degree)}"
        )
        part = "" if line.coverage > 0.95 else f"  {100 * line.coverage:.0f}% of the time sampled"
        out.append((Seg(f"{gpu.index:>2}  ", "bold"), Seg(f"{short_gpu_name(gpu.name)}  "), Seg(figures), Seg(slowed, "warn"), Seg(part, "dim")))
        top = max((v for v in gpu.memory_used_mb if v is not None), default=1.0)
        for label, values, high, role in (("util", gpu.gpu_utilization, 100.0, "spark"), ("mem", gpu.memory_used_mb, top, "mem")):
            for number, text in enumerate(curve(values, 2 if label == "util" else 1, top=high, ascii_only=glyphs.ascii)):
                out.append((Seg(fit("" if number else label, 5), "dim"), Seg(text[: cells - 1], role)))
    return out
