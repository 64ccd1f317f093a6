"""One GPU in depth: every figure that the driver tells, what is wrong with it, and its curves."""

from __future__ import annotations

from collections.abc import Sequence

from k2tui.core.gpu import GpuSample, GpuView, describe_health, describe_link, memory_percent
from k2tui.core.gpu_text import NONE_TEXT, bytes_text, curve, short_gpu_name
from k2tui.tui import format as fmt
from k2tui.tui.lines import Line, Picture, Row, Seg, fit, fit_line, text_line, wrap
from k2tui.tui.panels import Panel
from k2tui.tui.panels.gpus import curves, heat_role, memory_words, note_of, power_words, ranks_of
from k2tui.tui.view import View

SPANS: tuple[tuple[str, int], ...] = (("second", 1), ("5 s", 5), ("15 s", 15), ("minute", 60))  # a step of a curve
LABEL = 22


def _text(value: object, unit: str = "") -> str:
    return NONE_TEXT if value is None else f"{value}{unit}"


def _yes(value: bool | None, yes: str, no: str) -> str:
    return NONE_TEXT if value is None else yes if value else no


def facts(gpu: GpuSample, all_: GpuView, view: View) -> list[list[tuple[str, str, str]]]:
    """Lines of (label, text, role). What a board cannot tell stays n/a, so that its absence is seen."""
    reserved = "" if gpu.memory_reserved_b is None else f", {fmt.size(gpu.memory_reserved_b)} reserved by the driver"
    kind = {"unified": " (the host's own memory)", "coherent": " (the host can use it too)"}.get(gpu.memory_kind, "")
    remapped = gpu.remapped_rows
    lines: list[list[tuple[str, str, str]]] = [
        [
            ("util", _text(gpu.gpu_utilization, "%"), ""),
            ("memory traffic", _text(gpu.memory_utilization, "%"), ""),
            ("encoder/decoder", f"{_text(gpu.encoder_utilization, '%')}/{_text(gpu.decoder_utilization, '%')}", ""),
            ("P-state", _text(None if gpu.pstate is None else f"P{gpu.pstate}"), ""),
            ("fan", _text(gpu.fan_percent, "%"), ""),
        ],
        [
            ("memory", memory_words(gpu) + reserved + kind, ""),
            ("BAR1", f"{fmt.size(gpu.bar1_used_b, NONE_TEXT)}/{fmt.size(gpu.bar1_total_b, NONE_TEXT)}", ""),
        ],
        [
            ("power", power_words(gpu), "warn" if "power cap" in gpu.throttle_reasons else ""),
            ("default limit", _text(None if gpu.power_limit_default_mw is None else gpu.power_limit_default_mw // 1000, "W"), ""),
            ("energy", _text(None if gpu.energy_mj is None else f"{gpu.energy_mj / 3.6e9:.2f} kWh"), ""),
        ],
        [
            ("temperature", _text(gpu.temperature_c, view.glyphs.degree), heat_role(gpu)),
            ("memory", _text(gpu.memory_temperature_c, view.glyphs.degree), ""),
            ("slows at", _text(gpu.temperature_slowdown_c, view.glyphs.degree), ""),
            ("stops at", _text(gpu.temperature_shutdown_c, view.glyphs.degree), ""),
        ],
        [
            ("SM clock", f"{_text(gpu.sm_clock_mhz)}/{_text(gpu.sm_clock_max_mhz)} MHz", ""),
            ("memory clock", f"{_text(gpu.memory_clock_mhz)}/{_text(gpu.memory_clock_max_mhz)} MHz", ""),
            ("held down by", ", ".join(gpu.throttle_reasons) or "nothing", "warn" if gpu.throttle_reasons else ""),
        ],
        [
            (
                "PCIe",
                f"Gen{_text(gpu.pcie_gen)} x{_text(gpu.pcie_width)} of Gen{_text(gpu.pcie_gen_max)} x{_text(gpu.pcie_width_max)}",
                "warn" if describe_link(gpu) else "",
            ),
            ("in/out", f"{_rate(gpu.pcie_rx_kb_s)}/{_rate(gpu.pcie_tx_kb_s)}", ""),
            ("replays", _text(gpu.pcie_replays), "warn" if gpu.pcie_replays else ""),
            ("NVLink", "none" if gpu.nvlink_count == 0 else _text(gpu.nvlink_count, " links"), ""),
            ("in/out", f"{_rate(gpu.nvlink_rx_kb_s)}/{_rate(gpu.nvlink_tx_kb_s)}", ""),
        ],
        [
            ("ECC", _yes(gpu.ecc_enabled, "on", "off"), ""),
            ("uncorrected", f"{_text(gpu.ecc_uncorrected)} ({_text(gpu.ecc_uncorrected_total)} in its life)", "bad" if gpu.ecc_uncorrected else ""),
            ("corrected", _text(gpu.ecc_corrected), ""),
            (
                "remapped rows",
                _text(None if remapped is None else sum(remapped)) + (", one waits for a reset" if gpu.remap_pending else ""),
                "bad" if gpu.remap_failed else "warn" if gpu.remap_pending else "",
            ),
            *([("retired pages", str(gpu.retired_pages), "")] if gpu.retired_pages is not None else []),
            ("Xid", _text(gpu.last_xid) if gpu.last_xid is not None else "none seen", "bad" if gpu.last_xid is not None else ""),
        ],
        [
            ("bus", gpu.bus_id or NONE_TEXT, ""),
            ("driver", f"{all_.driver_version or NONE_TEXT}, CUDA {all_.cuda_version or NONE_TEXT}", ""),
            ("persistence", _yes(gpu.persistence, "on", "off"), ""),
            *([("virtualisation", gpu.virtualization, "")] if gpu.virtualization else []),
            ("MIG", _yes(gpu.mig_enabled, "on", "off"), ""),
            ("uuid", gpu.uuid or NONE_TEXT, "dim"),
        ],
    ]
    return lines


def _rate(kb_s: int | None) -> str:
    return NONE_TEXT if kb_s is None else f"{bytes_text(kb_s * 1000)}/s"


def _flow(pairs: Sequence[tuple[str, str, str]], width: int) -> list[Line]:
    """Labels and texts over as many lines as they need."""
    lines: list[list[Seg]] = [[]]
    left = width
    for label, text, role in pairs:
        need = len(label) + 1 + len(text) + (2 if lines[-1] else 0)
        if need > left and lines[-1]:
            lines.append([])
            left = width
            need -= 2
        if lines[-1]:
            lines[-1].append(Seg("  "))
        lines[-1] += [Seg(f"{label} ", "dim"), Seg(text, role)]
        left -= need
    return [tuple(line) for line in lines]


def charts(gpu: GpuSample, view: View, width: int, height: int) -> list[Line]:
    """As many curves as fit, each of equal height: utilisation, memory, power, temperature, SM clock, NVLink, PCIe."""
    step_s = SPANS[view.gpu_span % len(SPANS)][1]
    total_mb = (gpu.memory_total_b or 0) / (1 << 20)
    limit_w = (gpu.enforced_power_limit_mw or gpu.power_limit_default_mw or 0) / 1000
    percent = memory_percent(gpu)
    table: tuple[tuple[str, str, str, float, str], ...] = (
        ("util", _text(gpu.gpu_utilization, "%"), "gpu_utilization", 100.0, "spark"),
        ("memory", NONE_TEXT if percent is None else f"{percent:.0f}%", "memory_used_mb", total_mb, "mem"),
        ("power", power_words(gpu), "power_usage_w", limit_w, "bar"),
        ("temp", _text(gpu.temperature_c, view.glyphs.degree), "temperature_c", float(gpu.temperature_slowdown_c or 100), "warn"),
        ("SM clock", _text(gpu.sm_clock_mhz, " MHz"), "sm_clock_mhz", float(gpu.sm_clock_max_mhz or 2000), "bar2"),
        ("slowed", ", ".join(gpu.throttle_reasons) or "no", "throttled_percent", 100.0, "bad"),
    )
    live: list[tuple[str, str, Sequence[float]]] = []
    for label, name, now in (
        ("NVLink", "nvlink", None if gpu.nvlink_rx_kb_s is None else gpu.nvlink_rx_kb_s + (gpu.nvlink_tx_kb_s or 0)),
        ("PCIe", "pcie", None if gpu.pcie_rx_kb_s is None else gpu.pcie_rx_kb_s + (gpu.pcie_tx_kb_s or 0)),
    ):
        series = view.history.get(f"gpu.{gpu.index}.{name}", step_s)
        if series and max(series) > 0:
            span = gpu.rates_span_s or 0.0
            live.append((label, _rate(now) + (f" {span:.0f}s" if span >= 5 else ""), series))  # a mean over so many seconds
    wanted = len(table) + len(live)
    heights = [min(6, max(1, height // wanted + (number < height % wanted))) for number in range(wanted)]
    cells = max(0, width - LABEL)
    out: list[Line] = []

    def put(label: str, text: str, drawn: Sequence[str], role: str) -> None:
        for number, line in enumerate(drawn):
            head = fit(f"{label:9}", 9) + fit(text, LABEL - 10, "<", view.glyphs.ellipsis) + " " if number == 0 else " " * LABEL
            out.append((Seg(head, "dim" if number else ""), Seg(line, role)))

    for (label, text, metric, top, role), each in zip(table, heights, strict=False):
        if len(out) + each > height:
            return out
        put(label, text, curves(view, gpu.index, metric, cells, each, step_s=step_s, top=top or 1.0), role)
    for (label, text, series), each in zip(live, heights[len(table) :], strict=True):
        if len(out) + each > height:
            return out
        tail = list(series)[-cells * (1 if view.glyphs.ascii else 2) :]
        drawn = [line.rjust(cells) for line in curve(tail, each, top=max(tail), ascii_only=view.glyphs.ascii)]
        put(label, text, drawn, "info")
    return out


def draw(view: View, width: int, height: int) -> Picture:
    all_ = view.snap.gpu
    if all_ is None:
        return Picture((Row("", text_line("waiting for the first sample", "dim")),))
    gpu = next((x for x in all_.gpus if x.index == view.gpu_index), all_.gpus[0] if all_.gpus else None)
    if gpu is None:
        return Picture(tuple(Row("", text_line(t)) for t in wrap(f"{all_.error or 'no GPU'} {all_.hint}".strip(), width)))
    g = view.glyphs
    rows: list[Line] = []
    for severity, text in describe_health(gpu):
        role = "bad" if severity == "error" else "warn"
        rows += [(Seg(f"{g.bad if severity == 'error' else g.warn} ", role), *text_line(part, role)) for part in wrap(text, width - 2, 2)]
    if not gpu.error.startswith(("fallen", "missing")):
        lines = [line for pairs in facts(gpu, all_, view) for line in _flow(pairs, width)]
        lines += [
            (Seg(f"MIG {s.gpu_instance} ", "dim"), Seg(f"{s.name}  {fmt.size(s.memory_used_b)}/{fmt.size(s.memory_total_b)}  {_text(s.sm_count)} SMs"))
            for s in gpu.mig
        ]
        lines += [(Seg(f"{g.warn} not told: {text}", "dim"),) for text in gpu.missing]
        spare = height - len(rows) - len(lines)
        if spare < 6:
            # little room: the figures that the curves do not show give way first
            lines = lines[: max(4, height - len(rows) - 6)]
        rows += lines
        rows += charts(gpu, view, width, height - len(rows))
    ranks = ranks_of(all_, gpu.index)
    span = SPANS[view.gpu_span % len(SPANS)][0]
    title = f"GPU {gpu.index}  {short_gpu_name(gpu.name)}" + (f"  {ranks}" if ranks else "")
    stale = [seg for seg in note_of(view, all_) if "warn" in seg.role]
    note = (*stale, Seg(f" a {span} a step", "dim"))
    return Picture(tuple(Row("", fit_line(line, width)) for line in rows[: max(1, height)]), title=title, note=note)


PANEL = Panel("gpu", "One GPU", draw, needs=("gpu",), order=22, help="One GPU in depth: every figure that the driver tells, and its curves.")
