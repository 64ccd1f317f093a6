"""One row a GPU: utilisation, memory, power, temperature, and the last minutes as a sparkline."""

from __future__ import annotations

from collections.abc import Sequence

from k2tui.core.gpu import GpuSample
from k2tui.tui import format as fmt
from k2tui.tui.lines import Cell, Column, Picture, Row, Seg, bar, spark, table, text_line, wrap
from k2tui.tui.panels import Panel
from k2tui.tui.view import View

STALE_S = 5.0
SECONDS_A_CELL = 10  # at one sample a second

COLUMNS = (
    Column("#", 2, keep=9, align=">"),
    Column("util", 12, weight=2, keep=8, limit=40),
    Column("", 4, keep=8, align=">"),
    Column("memory", 12, weight=2, keep=7, limit=40),
    Column("", 9, keep=8, align=">"),
    Column("power", 8, keep=6, align=">"),
    Column("temp", 5, keep=6, align=">"),
    Column("MHz", 5, keep=3, align=">"),
    Column("history 10s", 8, weight=3, keep=4, limit=60),
    Column("notes", 6, weight=1, keep=2, limit=40),
)


def load_role(percent: float | None) -> str:
    return "dim" if percent is None else ("bar" if percent < 90 else "bar2")


def _row(gpu: GpuSample, view: View) -> Sequence[Cell]:
    g = view.glyphs
    util = gpu.gpu_utilization
    used, total = gpu.memory_used_b, gpu.memory_total_b
    share = used / total if used is not None and total else None
    power = "n/a" if gpu.power_usage_mw is None else f"{gpu.power_usage_mw / 1000:.0f}"
    limit = "" if gpu.enforced_power_limit_mw is None else f"/{gpu.enforced_power_limit_mw / 1000:.0f}W"
    temp = gpu.temperature_c
    hot = temp is not None and gpu.temperature_slowdown_c is not None and temp >= gpu.temperature_slowdown_c - 5
    notes = gpu.error or ", ".join(gpu.throttle_reasons)
    history = view.history.get(f"gpu.{gpu.index}.util", SECONDS_A_CELL)
    return (
        Seg(str(gpu.index), "bold"),
        lambda w: bar(None if util is None else util / 100, w, load_role(util), g),
        "n/a" if util is None else f"{util}%",
        lambda w: bar(share, w, "mem" if (share or 0) < 0.97 else "warn", g),
        f"{fmt.size(used, 'n/a')}/{fmt.size(total, '?')}",
        power + limit,
        Seg("n/a" if temp is None else f"{temp}{g.degree}", "warn" if hot else ""),
        "n/a" if gpu.sm_clock_mhz is None else str(gpu.sm_clock_mhz),
        lambda w: (Seg(spark(history, w, 100.0, g), "spark"),),
        Seg(notes, "bad" if gpu.error else "warn"),
    )


def draw(view: View, width: int, height: int) -> Picture:
    gpu = view.snap.gpu
    if gpu is None:
        return Picture((Row("", text_line("waiting for the first sample", "dim")),))
    if not gpu.gpus:
        rows = [Row("", text_line(t, "")) for t in wrap(gpu.error or "no GPU on this machine", width)]
        if gpu.hint:
            rows += [Row("", text_line(t, "dim")) for t in wrap(gpu.hint, width)]
        return Picture(tuple(rows))
    header, rows_ = table(COLUMNS, [(str(x.index), _row(x, view)) for x in gpu.gpus], width, view.glyphs)
    names = sorted({x.name for x in gpu.gpus if x.name})
    note: list[Seg] = [Seg(f"{len(gpu.gpus)} x {names[0]}" if len(names) == 1 else f"{len(gpu.gpus)}", "dim")]
    total_w = sum(x.power_usage_mw or 0 for x in gpu.gpus) / 1000
    if total_w:
        note.append(Seg(f" {view.glyphs.dot} {total_w:,.0f} W", "dim"))
    stale = view.now_s - gpu.taken_s
    if stale > STALE_S:
        note.append(Seg(f" {view.glyphs.warn} {fmt.age(stale)} old", "warn"))
    return Picture(rows_, header if height > len(rows_) else None, tuple(note))


PANEL = Panel("gpus", "GPUs", draw, needs=("gpu",), order=20, selectable=True, help="One row a GPU, as NVML tells it; n/a is what it cannot tell.")
