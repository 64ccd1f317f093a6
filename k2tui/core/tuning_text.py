"""A tuning run's table and figures as text. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from k2tui.core.stats import Estimate
from k2tui.core.tuning import Setting, Space, Trial, words
from k2tui.core.tuning_verdict import gain, is_confirmed, ranked

_MARKS = {"best": "★", "base": "●", "again": "○", "": ""}


def table(space: Space, trials: Sequence[Trial]) -> tuple[list[str], list[list[str]]]:
    """(header, rows) for people: best first, then what failed; delta against the baseline with its interval and verdict."""
    rows: list[list[str]] = []
    for r in ranked(space, trials):
        trial, e = r.trial, r.estimate
        if e is None:
            figure = "–" if trial.state == "slower" else trial.state
            rows.append(["", r.label, figure, "", "", "", r.said])
            continue
        delta = change_text(r.ratio) if r.ratio is not None else ""
        accept = f"{trial.accept_length:.2f}" if trial.accept_length else ""
        rows.append(
            [
                _MARKS[r.mark],
                r.label,
                value_text(e),
                delta,
                _s(trial.ready_s),
                accept,
                r.said or "baseline",
            ]
        )
    return ["", "setting", space.metric, "Δ", "ready s", "accept", "verdict / cause"], rows


def short(value: float, digits: int = 4) -> str:
    """A figure with that many significant digits and never an exponent above 1: 348.8, 12345, 0.0123."""
    return f"{value:.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def value_text(e: Estimate, sign: str = "±") -> str:
    """ "90.1 ±1.2": the mean and half of its 95 % interval."""
    return short(e.value) + (f" {sign}{short(e.half_width, 3)}" if e.half_width is not None else "")


def change_text(ratio: Estimate, sign: str = "±") -> str:
    """ "+41.5 ±2.1 %" of a ratio to the baseline; whole per cent from 100 on."""

    def per_cent(value: float, plus: str = "") -> str:
        return f"{100 * value:{plus}.{0 if abs(value) >= 1 else 1}f}"

    half = f" {sign}{per_cent(ratio.half_width)}" if ratio.half_width is not None else ""
    return f"{per_cent(ratio.value - 1, '+')}{half} %"


def gain_text(space: Space, trials: Sequence[Trial], setting: Setting) -> str:
    """How the later starts of a setting compare: "confirmed by 2 more starts: +14.9 % (95 % +12.8 to +17.0 %)"; "" while it was started once."""
    ratio = gain(space, trials, setting)
    if ratio is None:
        return ""
    confirmed = is_confirmed(space, trials, setting)
    said = "confirmed by" if confirmed else "not confirmed by" if confirmed is False else "so far"
    span = (
        ""
        if ratio.lo is None or ratio.hi is None
        else f" (95 % {100 * (ratio.lo - 1):+.1f} to {100 * (ratio.hi - 1):+.1f} %)"
    )
    return f"{said} {ratio.n} more start{'s' if ratio.n > 1 else ''}: {100 * (ratio.value - 1):+.1f} %{span}"


def best_text(space: Space, trials: Sequence[Trial], best: Trial) -> str:
    """The winner in words; "best so far" while no later start has confirmed it."""
    so_far = "" if space.confirm == 0 or is_confirmed(space, trials, best.setting) else " so far"
    over = gain_text(space, trials, best.setting)
    return f"best{so_far}: {words(best.setting)}{f', {over}' if over else ''}"


def _s(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"
