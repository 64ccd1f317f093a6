"""Processes on the GPUs: which server's rank, whose, how much memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from k2tui.core.gpu import GpuProcess
from k2tui.core.snapshot import Snapshot
from k2tui.tui import format as fmt
from k2tui.tui.lines import Column, Picture, Row, Seg, table, text_line
from k2tui.tui.lines import width as cells_of
from k2tui.tui.panels import Panel
from k2tui.tui.panels.gpus import fitted
from k2tui.tui.view import View

SORTS = ("gpu", "memory", "sm", "ram", "cpu", "age", "pid", "user")
RANK = 4  # column that is as wide as its longest entry needs
COLUMNS = (
    Column("", 1, keep=9),
    Column("gpu", 3, keep=8, align=">"),
    Column("pid", 8, keep=9, align=">"),
    Column("user", 9, keep=4),
    Column("rank", 4, keep=6),
    Column("memory", 7, keep=8, align=">"),
    Column("sm", 4, keep=5, align=">"),
    Column("ram", 6, keep=3, align=">"),
    Column("cpu", 5, keep=2, align=">"),
    Column("since", 6, keep=3, align=">"),
    Column("command", 16, weight=2, keep=7, limit=120),
    Column("job", 10, weight=0.5, keep=2, limit=30),
)


def ordered(processes: Iterable[GpuProcess], sort: str) -> list[GpuProcess]:
    """Orphans first, then by the figure (largest first; what is unknown comes last), then GPU by GPU."""
    figures: dict[str, Callable[[GpuProcess], float]] = {
        "memory": lambda p: p.memory_used_b or 0,
        "sm": lambda p: p.sm_utilization or 0,
        "ram": lambda p: p.host_rss_b or 0,
        "cpu": lambda p: p.host_cpu_percent or 0.0,
        "age": lambda p: -(p.started_s or 1e12),
        "pid": lambda p: -p.pid,
    }
    figure = figures.get(sort, lambda p: 0.0)
    return sorted(
        processes,
        key=lambda p: (not p.is_orphan, p.user if sort == "user" else "", -figure(p), p.gpu_index < 0, p.gpu_index, -(p.memory_used_b or 0)),
    )


def key_of(process: GpuProcess) -> str:
    return f"{process.pid}/{process.gpu_index}"


def all_of(snap: Snapshot) -> list[GpuProcess]:
    """Processes on the GPUs, and, while they are asked for, the busiest others of the host (gpu_index -1)."""
    found = list(snap.gpu.processes) if snap.gpu is not None else []
    pids = {p.pid for p in found}
    return found + [p for p in snap.host_processes if p.pid not in pids]


def draw(view: View, width: int, height: int) -> Picture:
    gpu = view.snap.gpu
    found = [p for p in all_of(view.snap) if view.gpu_index in (-1, p.gpu_index)]
    notes = [Row("", text_line(f"{view.glyphs.warn} {note}", "warn")) for note in gpu.notes] if gpu is not None else []
    if not found:
        text = "No process holds GPU memory." if gpu is not None and gpu.gpus else "No GPU, so no GPU process."
        return Picture((*notes, *(() if notes else (Row("", text_line(text, "dim")),))))
    rows = []
    for p in ordered(found, view.process.sort):
        rows.append(
            (
                key_of(p),
                (
                    Seg(view.glyphs.ok, "accent bold") if key_of(p) in view.process.tagged else "",
                    str(p.gpu_index) if p.gpu_index >= 0 else "",
                    Seg(str(p.pid), "bold"),
                    p.user,
                    Seg(p.rank, "accent"),
                    fmt.size(p.memory_used_b) if p.gpu_index >= 0 else "",
                    "" if p.sm_utilization is None else f"{p.sm_utilization}%",
                    fmt.size(p.host_rss_b, ""),
                    "" if p.host_cpu_percent is None else f"{p.host_cpu_percent:.0f}%",
                    "" if p.started_s is None else fmt.age(view.now_s - p.started_s),
                    _command(p),
                    Seg(p.job_id, "faint"),
                ),
            )
        )
    columns = list(COLUMNS)
    if any(p.rank for p in found):
        columns[RANK] = fitted(columns[RANK], max(cells_of(p.rank) for p in found), max(12, width // 6))
    else:
        del columns[RANK]
        rows = [(key, (*cells[:RANK], *cells[RANK + 1 :])) for key, cells in rows]
    header, lines = table(columns, rows, width, view.glyphs)
    orphans = sum(1 for p in found if p.is_orphan)
    note: list[Seg] = []
    tagged = sum(1 for p in found if key_of(p) in view.process.tagged)
    if tagged:
        note.append(Seg(f"{tagged} tagged  ", "accent"))
    asked = [g.usage_taken_s for g in (gpu.gpus if gpu is not None else ()) if g.usage_taken_s is not None and view.gpu_index in (-1, g.index)]
    if asked and view.now_s - min(asked) > 5:
        note.append(Seg(f"sm up to {fmt.age(view.now_s - min(asked))} old  ", "dim"))
    if view.process.sort:
        note.append(Seg(f"by {view.process.sort}  ", "dim"))
    if view.gpu_index == -1 and view.snap.host_processes:
        note.append(Seg("with the host's busiest  ", "dim"))
    note.append(Seg(f"{orphans} orphaned", "warn") if orphans else Seg(str(len(found)), "dim"))
    return Picture((*lines, *notes), header, tuple(note))


def _command(process: GpuProcess) -> Seg:
    if not process.is_visible:
        return Seg("not visible in this PID namespace", "dim")
    if process.is_orphan:
        return Seg(f"orphan: {process.orphan_reason or 'its server is dead'}", "warn")
    return Seg(process.name, "" if process.is_own else "dim")


PANEL = Panel(
    "processes",
    "GPU processes",
    draw,
    needs=("gpu", "host_processes"),
    order=25,
    selectable=True,
    enter="open_process",
    keys=(
        ("space", "tag_process", "tag"),
        ("o", "process_sort", "sort"),
        ("c", "process_curves", "curves"),
        ("K", "end_process", "end"),
        ("a", "all_processes", "all"),
    ),
    help="Processes that hold GPU memory, as NVML tells them; `a` adds the busiest others of this host. What is tagged is ended together, by the signal that you choose.",
)
