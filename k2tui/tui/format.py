"""Figures as short texts for narrow columns. Knows units, not what they belong to."""

from __future__ import annotations

import time


def duration(seconds: float | None, missing: str = "n/a") -> str:
    """0.4s, 12s, 3:42, 1h04, 2d3h: never more than five cells."""
    if seconds is None:
        return missing
    seconds = max(0.0, seconds)
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d}"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}"
    return f"{whole // 86400}d{whole % 86400 // 3600}h"


def age(seconds: float | None, missing: str = "n/a") -> str:
    """Like duration, in whole seconds: for texts that are redrawn as time goes by."""
    if seconds is None:
        return missing
    return f"{max(0, int(seconds))}s" if seconds < 60 else duration(seconds)


def size(number: float | None, missing: str = "n/a") -> str:
    """Bytes with one letter: 512, 1.4K, 112G (binary units)."""
    if number is None:
        return missing
    for unit in ("", "K", "M", "G", "T"):
        if abs(number) < 1000 or unit == "T":
            return f"{number:.0f}{unit}" if unit == "" or number >= 9.95 else f"{number:.1f}{unit}"
        number /= 1024
    return missing


def count(number: float | None, missing: str = "n/a") -> str:
    """A count or rate in at most five cells: 0.31, 7, 12.4, 831, 1.2k, 34k."""
    if number is None:
        return missing
    if number != number or number in (float("inf"), float("-inf")):
        return missing
    magnitude = abs(number)
    if magnitude >= 1_000_000:
        return f"{number / 1_000_000:.1f}M"
    if magnitude >= 9_950:
        return f"{number / 1000:.0f}k"
    if magnitude >= 999.5:
        return f"{number / 1000:.1f}k"
    if number == int(number) or magnitude >= 99.95:
        return f"{number:.0f}"
    return f"{number:.1f}" if magnitude >= 9.95 else f"{number:.2f}"


def percent(share: float | None, missing: str = "n/a") -> str:
    return missing if share is None else f"{share * 100:.0f}%"


def clock(at_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at_s))
