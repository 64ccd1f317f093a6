"""The host: CPU, memory, page cache, disk, network, shared memory; one line where room is short, all figures where there is more."""

from __future__ import annotations

from collections.abc import Sequence

from k2tui.core.gpu_text import curve
from k2tui.core.host import HostSample, describe_host
from k2tui.tui import format as fmt
from k2tui.tui.lines import Glyphs, Line, Picture, Row, Seg, bar, fit_line, line_width, text_line
from k2tui.tui.panels import Panel
from k2tui.tui.view import View

METER = 8


def _share(used: int | None, total: int | None) -> float | None:
    return None if used is None or not total else used / total


def _rate(value: float | None) -> str:
    return fmt.size(value, "?")


def _groups(host: HostSample, g: Glyphs) -> list[Line]:
    """The figures by importance; each group stands or falls as a whole."""
    memory = _share(host.memory_used_b, host.memory_total_b)
    swap: list[Line] = []
    if host.swap_used_b:
        swap.append((Seg("swap ", "dim"), Seg(f"{fmt.size(host.swap_used_b)}/{fmt.size(host.swap_total_b)}", "warn")))
    limit: list[Line] = []
    if host.memory_limit_b:
        full = _share(host.memory_limit_used_b, host.memory_limit_b) or 0.0
        limit.append(
            (
                Seg("container ", "dim"),
                Seg(f"{fmt.size(host.memory_limit_used_b)}/{fmt.size(host.memory_limit_b)}", "warn" if full > 0.95 else ""),
            )
        )
    shm = _share(host.shm_used_b, host.shm_total_b) or 0.0
    return [
        (
            Seg("cpu ", "dim"),
            *bar(None if host.cpu_percent is None else host.cpu_percent / 100, METER, "bar", g),
            Seg(f" {host.cpu_percent:>3.0f}%" if host.cpu_percent is not None else " n/a"),
        ),
        (
            Seg("ram ", "dim"),
            *bar(memory, METER, "mem" if (memory or 0) < 0.95 else "warn", g),
            Seg(f" {fmt.size(host.memory_used_b)}/{fmt.size(host.memory_total_b)}"),
        ),
        *swap,
        *limit,
        (Seg("load ", "dim"), Seg("n/a" if host.load_1m is None else f"{host.load_1m:.1f}")),
        (Seg("disk ", "dim"), Seg(f"{g.down}{_rate(host.disk_read_b_s):>5} {g.up}{_rate(host.disk_write_b_s):>5}")),
        (Seg("net ", "dim"), Seg(f"{g.down}{_rate(host.net_rx_b_s):>5} {g.up}{_rate(host.net_tx_b_s):>5}")),
        (Seg("cache ", "dim"), Seg(fmt.size(host.page_cache_b))),
        (Seg("shm ", "dim"), Seg(f"{fmt.size(host.shm_used_b)}/{fmt.size(host.shm_total_b)}", "warn" if shm > 0.9 else "")),
        (Seg("free ", "dim"), Seg(fmt.size(host.disk_free_b))),
        (Seg("files ", "dim"), Seg("no limit" if host.fd_limit is None else str(host.fd_limit))),
        *([(Seg("io wait ", "dim"), Seg(f"{host.io_pressure_percent:.0f}%"))] if host.io_pressure_percent is not None else []),
        *([(Seg("dirty ", "dim"), Seg(fmt.size(host.dirty_b)))] if host.dirty_b is not None else []),
    ]


def _flow(groups: Sequence[Line], width: int, height: int) -> list[Line]:
    """The groups side by side over at most `height` lines; what does not fit is left out."""
    lines: list[list[Seg]] = [[]]
    for group in groups:
        need = line_width(group) + (2 if lines[-1] else 0)
        if line_width(lines[-1]) + need > width:
            if len(lines) >= height:
                if height > 1:
                    break
                continue
            lines.append([])
        if lines[-1]:
            lines[-1].append(Seg("  "))
        lines[-1] += group
    return [fit_line(line, width) for line in lines]


def _cores(cores: Sequence[float], width: int, lines: int, g: Glyphs) -> list[Line]:
    """One column a core, 4 levels a line in braille (two cores a cell); as many as fit."""
    label = f"{len(cores)} cores "
    room = max(0, width - len(label)) * (1 if g.ascii else 2)
    drawn = curve(list(cores[:room]), lines, ascii_only=g.ascii)
    return [
        fit_line((Seg(label if number == len(drawn) - 1 else " " * len(label), "dim"), Seg(text, "spark")), width)
        for number, text in enumerate(drawn)
    ]


def draw(view: View, width: int, height: int) -> Picture:
    host, g = view.snap.host, view.glyphs
    if host is None:
        return Picture((Row("", (Seg("host: waiting for the first sample", "dim"),)),))
    warnings = describe_host(host) if height > 1 else ()
    rows: list[Line] = []
    if height > 2 and host.cpu_percent_per_core:
        rows += _cores(host.cpu_percent_per_core, width, 2 if height > 5 else 1, g)
    keep = 0 if not warnings else min(len(warnings), max(1, height - len(rows) - 2))
    rows = _flow(_groups(host, g), width, max(1, height - len(rows) - keep)) + rows
    for severity, text in warnings[:keep]:
        role = "bad" if severity == "error" else "warn"
        rows.append(fit_line((Seg(f"{g.bad if severity == 'error' else g.warn} ", role), *text_line(text, role)), width))
    stale = view.now_s - host.taken_s
    note: list[Seg] = [Seg(host.hostname, "dim")]
    if stale > 10:
        note.append(Seg(f" {g.warn} {fmt.age(stale)} old", "warn"))
    return Picture(tuple(Row("", line) for line in rows[: max(1, height)]), note=tuple(note))


PANEL = Panel("host", "Host", draw, needs=("host",), order=30, help="CPU, memory, page cache, disk and network of this machine.")
