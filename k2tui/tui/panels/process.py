"""One GPU process: what it is, and its curves: SM share, GPU memory, CPU, host memory."""

from __future__ import annotations

from collections.abc import Sequence

from k2tui.core.gpu import GpuProcess
from k2tui.core.gpu_text import curve
from k2tui.tui import format as fmt
from k2tui.tui.history import process_series
from k2tui.tui.lines import Line, Picture, Row, Seg, fit, fit_line, text_line
from k2tui.tui.panels import Panel
from k2tui.tui.panels.processes import key_of
from k2tui.tui.view import View

LABEL = 20


def _text(value: float | None, unit: str) -> str:
    return "n/a" if value is None else f"{value:.0f}{unit}"


def _series(view: View, process: GpuProcess) -> list[tuple[str, str, Sequence[float], float | None, str]]:
    """(label, figure now, points, value of a full curve, role)."""
    name = process_series(process)
    total = (
        next((g.memory_total_b for g in view.snap.gpu.gpus if g.index == process.gpu_index), None)
        if view.snap.gpu
        else None
    )
    return [
        ("SM share", _text(process.sm_utilization, "%"), view.history.get(f"{name}.sm"), 100.0, "spark"),
        ("GPU memory", fmt.size(process.memory_used_b), view.history.get(f"{name}.memory"), total, "mem"),
        ("CPU", _text(process.host_cpu_percent, "%"), view.history.get(f"{name}.cpu"), None, "bar"),
        ("host memory", fmt.size(process.host_rss_b), view.history.get(f"{name}.ram"), None, "bar2"),
    ]


def draw(view: View, width: int, height: int) -> Picture:
    gpu, g = view.snap.gpu, view.glyphs
    process = (
        next((p for p in gpu.processes if key_of(p) == view.process.key), None) if gpu is not None else None
    )
    if process is None:
        return Picture((Row("", text_line("This process holds no GPU memory any more.", "dim")),))
    age = "" if process.started_s is None else f"  {fmt.age(view.now_s - process.started_s)} old"
    head: list[Line] = [
        (Seg(f"pid {process.pid}", "bold"), Seg(f"  {process.user}  GPU {process.gpu_index}  "), Seg(process.rank, "accent"), Seg(age, "dim"),
         Seg(f"  job {process.job_id}" if process.job_id else "", "faint")),
        (Seg(fit(process.command or process.name, width, "<", g.ellipsis), "dim"),),
    ]  # fmt: skip
    if process.is_orphan:
        head.append((Seg(f"{g.warn} {process.orphan_reason or 'its server is dead'}", "warn"),))
    rows = [fit_line(line, width) for line in head]
    table = _series(view, process)
    each = max(1, min(6, (height - len(rows)) // len(table)))
    cells = max(1, width - LABEL)
    for label, now, points, top, role in table:
        tail = list(points)[-cells * (1 if g.ascii else 2) :]
        drawn = [
            line.rjust(cells)
            for line in curve(tail, each, top=top or max(tail, default=1.0) or 1.0, ascii_only=g.ascii)
        ]
        for number, text in enumerate(drawn or [""]):
            left = (
                fit(label, 12) + fit(now, LABEL - 13, ">", g.ellipsis) + " " if number == 0 else " " * LABEL
            )
            rows.append(fit_line((Seg(left), Seg(text, role)), width))
    seconds = max((len(points) for *_, points, _, _ in table), default=0)
    return Picture(
        tuple(Row("", line) for line in rows[: max(1, height)]),
        None,
        (Seg(f"last {fmt.duration(seconds)}", "dim"),),
        title=f"Process {process.pid}",
    )


PANEL = Panel(
    "process",
    "One GPU process",
    draw,
    needs=("gpu",),
    order=26,
    help="One process: its SM share, GPU memory, CPU and host memory since it was first seen.",
)
