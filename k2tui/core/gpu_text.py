"""GPU figures as short plain text: names, sizes, bars, braille curves; shared by the CLI and the panels, no colours here."""

from __future__ import annotations

import re
from collections.abc import Sequence

from k2tui.core.gpu import GpuSample, memory_percent

NONE_TEXT = "n/a"
_BLOCKS = " ▏▎▍▌▋▊▉█"
# Braille dots of the left and the right column, from the bottom up.
_LEFT_DOTS = (0x40, 0x04, 0x02, 0x01)
_RIGHT_DOTS = (0x80, 0x20, 0x10, 0x08)
_ASCII_LEVELS = " .:-=+*#%@"


def short_gpu_name(name: str) -> str:
    """ "NVIDIA GeForce RTX 4090" -> "RTX 4090"; the maker's and family's words say nothing beside others of their kind."""
    return (
        re.sub(
            r"^(?:NVIDIA|Tesla|Quadro)\s+|(?<=\b)GeForce\s+|\s+(?:NVL|PCIe|SXM\d?)\b(?=.*\d)", "", name
        ).strip()
        or name
    )


def gib(value: int | None, digits: int = 1) -> str:
    return NONE_TEXT if value is None else f"{value / (1 << 30):.{digits}f}"


def memory_text(sample: GpuSample) -> str:
    """ "138.0/140.4G"; "n/a" when unknown."""
    if sample.memory_used_b is None:
        return NONE_TEXT
    total = "" if sample.memory_total_b is None else f"/{gib(sample.memory_total_b)}"
    return f"{gib(sample.memory_used_b)}{total}G"


def power_text(sample: GpuSample) -> str:
    """ "560/700W", "560W" without a limit."""
    if sample.power_usage_mw is None:
        return NONE_TEXT
    limit = "" if sample.enforced_power_limit_mw is None else f"/{sample.enforced_power_limit_mw / 1000:.0f}"
    return f"{sample.power_usage_mw / 1000:.0f}{limit}W"


def percent_text(value: float | None) -> str:
    return NONE_TEXT if value is None else f"{value:.0f}%"


def temperature_text(value: int | None) -> str:
    return NONE_TEXT if value is None else f"{value}C"


def link_text(sample: GpuSample) -> str:
    """ "G5x16" now; "G1x4!" where the width is below the board's maximum."""
    if sample.pcie_gen is None or sample.pcie_width is None:
        return NONE_TEXT
    mark = "!" if sample.pcie_width_max is not None and sample.pcie_width < sample.pcie_width_max else ""
    return f"G{sample.pcie_gen}x{sample.pcie_width}{mark}"


def rate_text(bytes_s: float | None) -> str:
    """Bytes a second in the unit that fits: "12 kB/s", "3.4 MB/s", "41 GB/s"."""
    return NONE_TEXT if bytes_s is None else bytes_text(bytes_s) + "/s"


def bytes_text(value: float | None) -> str:
    """Decimal units, at most four figures: "12 B", "3.4 MB", "547 GB"."""
    if value is None:
        return NONE_TEXT
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 999.5 or unit == "TB":
            return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 99.95 else f"{value:.1f} {unit}"
        value /= 1000
    return ""


def age_text(seconds: float | None) -> str:
    """ "12s", "4m", "3h12m", "5d3h"."""
    if seconds is None:
        return NONE_TEXT
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600}h"


def bar(percent: float | None, width: int, *, ascii_only: bool = False) -> str:
    """A bar of exactly `width` cells for 0..100; blank when unknown."""
    if width <= 0:
        return ""
    if percent is None:
        return " " * width
    share = min(100.0, max(0.0, percent)) / 100.0
    if ascii_only:
        full = round(share * width)
        return "#" * full + "." * (width - full)
    eighths = round(share * width * 8)
    text = _BLOCKS[8] * (eighths // 8)
    if eighths % 8:
        text += _BLOCKS[eighths % 8]
    return text.ljust(width)


def curve(
    values: Sequence[float | None], height: int = 1, *, top: float = 100.0, ascii_only: bool = False
) -> tuple[str, ...]:
    """A filled curve: `height` lines from the top down; two values a cell in braille, one in ASCII (then len(values) cells).

    A value of None leaves its column empty; 0 draws one dot, so that "idle" and "no sample" differ.
    """
    if top <= 0:
        top = 1.0
    if ascii_only:
        rows: list[str] = []
        for row in range(height):
            base = (height - 1 - row) / height
            cells: list[str] = []
            for value in values:
                if value is None:
                    cells.append(" ")
                    continue
                part = (min(1.0, max(0.0, value / top)) - base) * height
                level = round(min(1.0, max(0.0, part)) * (len(_ASCII_LEVELS) - 1))
                cells.append(_ASCII_LEVELS[max(level, 1 if row == height - 1 else 0)])
            rows.append("".join(cells))
        return tuple(rows)
    dots = [None if v is None else max(1, round(min(1.0, max(0.0, v / top)) * height * 4)) for v in values]
    if len(dots) % 2:
        dots.insert(0, None)
    lines: list[str] = []
    for row in range(height):
        low = (height - 1 - row) * 4
        cells = []
        for left, right in zip(dots[::2], dots[1::2], strict=True):
            bits = 0
            for level in range(4):
                if left is not None and left > low + level:
                    bits |= _LEFT_DOTS[level]
                if right is not None and right > low + level:
                    bits |= _RIGHT_DOTS[level]
            cells.append(chr(0x2800 + bits) if bits else " ")
        lines.append("".join(cells))
    return tuple(lines)


def state_word(sample: GpuSample) -> str:
    """One word for a narrow column: "lost", "heat", "power", "slow", "idle", "busy" or "" when nothing is known."""
    if sample.error:
        return "lost" if "bus" in sample.error or "missing" in sample.error else "error"
    reasons = " ".join(sample.throttle_reasons)
    if "heat" in reasons:
        return "heat"
    if "brake" in reasons or "slowdown" in reasons:
        return "slow"
    if "power cap" in reasons:
        return "power"
    if sample.gpu_utilization is None:
        return ""
    return "busy" if sample.gpu_utilization >= 5 else "idle"


def is_full(sample: GpuSample, limit: float = 95.0) -> bool:
    share = memory_percent(sample)
    return share is not None and share >= limit
