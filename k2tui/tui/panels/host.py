"""The host on one line: CPU, memory, page cache, disk, network, shared memory."""

from __future__ import annotations

from k2tui.tui import format as fmt
from k2tui.tui.lines import Picture, Row, Seg, bar, fit_line, spark
from k2tui.tui.panels import Panel
from k2tui.tui.view import View


def draw(view: View, width: int, height: int) -> Picture:
    host, g = view.snap.host, view.glyphs
    if host is None:
        return Picture((Row("", (Seg("host: waiting for the first sample", "dim"),)),))
    used, total = host.memory_used_b, host.memory_total_b
    share = used / total if used is not None and total else None
    groups: list[list[Seg]] = [
        [
            Seg("cpu ", "dim"),
            *bar(None if host.cpu_percent is None else host.cpu_percent / 100, 8, "bar", g),
            Seg(f" {host.cpu_percent:>3.0f}%" if host.cpu_percent is not None else " n/a"),
        ],
        [
            Seg("ram ", "dim"),
            *bar(share, 8, "mem" if (share or 0) < 0.95 else "warn", g),
            Seg(f" {fmt.size(used)}/{fmt.size(total)}"),
        ],
        [Seg("load ", "dim"), Seg("n/a" if host.load_1m is None else f"{host.load_1m:.1f}")],
        [
            Seg("disk ", "dim"),
            Seg(f"{g.down}{fmt.size(host.disk_read_b_s, '?'):>5} {g.up}{fmt.size(host.disk_write_b_s, '?'):>5}"),
        ],
        [
            Seg("net ", "dim"),
            Seg(f"{g.down}{fmt.size(host.net_rx_b_s, '?'):>5} {g.up}{fmt.size(host.net_tx_b_s, '?'):>5}"),
        ],
        [Seg("cache ", "dim"), Seg(fmt.size(host.page_cache_b))],
        [Seg("shm ", "dim"), Seg(f"{fmt.size(host.shm_used_b)}/{fmt.size(host.shm_total_b)}")],
        [Seg("free ", "dim"), Seg(fmt.size(host.disk_free_b))],
    ]
    if host.swap_used_b:
        groups.insert(2, [Seg("swap ", "dim"), Seg(fmt.size(host.swap_used_b), "warn")])
    line: list[Seg] = []
    left = width
    for group in groups:
        need = sum(len(s.text) for s in group) + (2 if line else 0)
        if need > left:
            break
        if line:
            line.append(Seg("  "))
        line += group
        left -= need
    rows = [Row("", fit_line(line, width))]
    if height > 1 and host.cpu_percent_per_core:
        cores = list(host.cpu_percent_per_core)
        rows.append(Row("", fit_line([Seg("cores ", "dim"), Seg(spark(cores, min(len(cores), width - 8), 100.0, g), "spark")], width)))
    return Picture(tuple(rows), note=(Seg(host.hostname, "dim"),))


PANEL = Panel("host", "Host", draw, needs=("host",), order=30, help="CPU, memory, disk and network of this machine.")
