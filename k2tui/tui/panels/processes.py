"""Processes on the GPUs: which server's rank, whose, how much memory."""

from __future__ import annotations

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
    Column("since", 6, keep=3, align=">"),
    Column("command", 16, weight=2, keep=7, limit=120),
    Column("job", 10, weight=0.5, keep=2, limit=30),
)


def draw(view: View, width: int, height: int) -> Picture:
    gpu = view.snap.gpu
    if gpu is None or not gpu.processes:
        text = "No process holds GPU memory." if gpu is not None and gpu.gpus else "No GPU, so no GPU process."
        return Picture((Row("", text_line(text, "dim")),))
    rows = []
    for p in gpu.processes:
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
                    "" if p.started_s is None else fmt.age(view.now_s - p.started_s),
                    Seg(("orphan: its server is dead  " if p.is_orphan else "") + p.name, "warn" if p.is_orphan else ""),
                    Seg(p.job_id, "faint"),
                ),
            )
        )
    header, lines = table(COLUMNS, rows, width, view.glyphs)
    orphans = sum(1 for p in gpu.processes if p.is_orphan)
    note = (Seg(f"{orphans} orphaned", "warn"),) if orphans else (Seg(str(len(gpu.processes)), "dim"),)
    return Picture(lines, header, note)


PANEL = Panel("processes", "GPU processes", draw, needs=("gpu",), ticks=True, order=25, selectable=True, help="Processes that hold GPU memory, as NVML tells them.")
