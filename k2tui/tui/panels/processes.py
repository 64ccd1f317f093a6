"""Processes on the GPUs: which server's rank, whose, how much memory."""

from __future__ import annotations

from k2tui.core.gpu import GpuProcess
from k2tui.tui import format as fmt
from k2tui.tui.lines import Column, Picture, Row, Seg, table, text_line
from k2tui.tui.panels import Panel
from k2tui.tui.view import View

COLUMNS = (
    Column("gpu", 3, keep=8, align=">"),
    Column("pid", 8, keep=9, align=">"),
    Column("user", 9, keep=4),
    Column("rank", 7, keep=6),
    Column("memory", 7, keep=8, align=">"),
    Column("sm", 4, keep=5, align=">"),
    Column("ram", 6, keep=3, align=">"),
    Column("cpu", 5, keep=2, align=">"),
    Column("since", 6, keep=3, align=">"),
    Column("command", 16, weight=2, keep=7, limit=120),
    Column("job", 10, weight=0.5, keep=2, limit=30),
)


def draw(view: View, width: int, height: int) -> Picture:
    gpu = view.snap.gpu
    found = [p for p in gpu.processes if view.gpu_index in (-1, p.gpu_index)] if gpu is not None else []
    notes = [Row("", text_line(f"{view.glyphs.warn} {note}", "warn")) for note in gpu.notes] if gpu is not None else []
    if gpu is None or not found:
        text = "No process holds GPU memory." if gpu is not None and gpu.gpus else "No GPU, so no GPU process."
        return Picture((*notes, *(() if notes else (Row("", text_line(text, "dim")),))))
    rows = []
    for p in sorted(found, key=lambda p: (not p.is_orphan, p.gpu_index, -(p.memory_used_b or 0))):
        rows.append(
            (
                f"{p.pid}/{p.gpu_index}",
                (
                    str(p.gpu_index),
                    Seg(str(p.pid), "bold"),
                    p.user,
                    Seg(p.rank, "accent"),
                    fmt.size(p.memory_used_b),
                    "" if p.sm_utilization is None else f"{p.sm_utilization}%",
                    fmt.size(p.host_rss_b, ""),
                    "" if p.host_cpu_percent is None else f"{p.host_cpu_percent:.0f}%",
                    "" if p.started_s is None else fmt.age(view.now_s - p.started_s),
                    _command(p),
                    Seg(p.job_id, "faint"),
                ),
            )
        )
    header, lines = table(COLUMNS, rows, width, view.glyphs)
    orphans = sum(1 for p in found if p.is_orphan)
    note = (Seg(f"{orphans} orphaned", "warn"),) if orphans else (Seg(str(len(found)), "dim"),)
    return Picture((*lines, *notes), header, note)


def _command(process: GpuProcess) -> Seg:
    if not process.is_visible:
        return Seg("not visible in this PID namespace", "dim")
    if process.is_orphan:
        return Seg(f"orphan: {process.orphan_reason or 'its server is dead'}", "warn")
    return Seg(process.name, "" if process.is_own else "dim")


PANEL = Panel("processes", "GPU processes", draw, needs=("gpu",), order=25, selectable=True, enter="open_process", keys=(("K", "end_process", "end it"),), help="Processes that hold GPU memory, as NVML tells them.")
