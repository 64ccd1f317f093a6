"""One run request by request: a timeline and distributions, as plain text. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from k2tui.core.bench_record import RequestRecord, inter_token_gaps
from k2tui.core.bench_sweep import bar
from k2tui.core.bench_table import fit, grid, ms

MOST_LINES = 200  # of a timeline; a longer run shows its slowest requests


def timeline(records: Sequence[RequestRecord], width: int = 100, *, ascii_only: bool = False) -> list[str]:
    """A line a request, in order of sending: waiting for a slot, prefill, decode; scaled to the whole run."""
    if not records:
        return ["no request was stored"]
    end = max(max(r.t_last_ns, r.t_done_ns) for r in records) or 1
    wait, prefill, decode, bad = (".", "-", "#", "x") if ascii_only else ("·", "░", "█", "✗")
    shown = sorted(records, key=lambda r: r.t_send_ns)
    cut = len(shown) > MOST_LINES
    if cut:
        slow = set(sorted(range(len(shown)), key=lambda i: -shown[i].e2e_ns)[:MOST_LINES])
        shown = [r for i, r in enumerate(shown) if i in slow]
    head = f"{'i':>5} {'in':>6} {'out':>6} {'TTFT':>8} {'TPOT':>7}  "
    room = max(width - len(head) - 1, 10)

    def column(t: int) -> int:
        return min(max(int(t / end * room), 0), room)

    out = [fit(head + f"0 … {end / 1e9:.1f} s   {wait} waits  {prefill} prefill  {decode} decode", width)]
    for r in shown:
        last = r.t_last_ns or r.t_done_ns
        a, b, c, d = column(r.t_sched_ns), column(r.t_send_ns), column(r.t_first_ns or last), column(last)
        line = " " * a + wait * (b - a) + prefill * (c - b) + decode * max(d - c, 1 if r.is_ok else 0)
        if r.error:
            line += f"{bad} {r.error}"
        first = f"{r.ttft_ns / 1e6:.1f}" if r.t_first_ns else "-"
        tpot = r.tpot_ns
        out.append(
            fit(
                f"{r.index:>5} {r.prompt_tokens if r.prompt_tokens is not None else '-':>6} {r.output_tokens:>6} {first:>8} "
                f"{'-' if tpot is None else f'{tpot / 1e6:.2f}':>7}  {line}",
                width,
            )
        )
    if cut:
        out.append(f"the {MOST_LINES} slowest of {len(records)} requests")
    return out


def histogram(
    values: Sequence[float], title: str, width: int = 60, bins: int = 10, *, ascii_only: bool = False
) -> list[str]:
    """Counts in `bins` equal steps up to the p99, and one line for what lies above it. values in ms."""
    if not values:
        return []
    ordered = sorted(values)
    low, high = ordered[0], ordered[min(int(len(ordered) * 0.99), len(ordered) - 1)]
    step = (high - low) / bins or 1.0
    counts = [0] * bins
    above = 0
    for v in ordered:
        if v > high:
            above += 1
        else:
            counts[min(int((v - low) / step), bins - 1)] += 1
    most = max(counts)
    body = [
        [
            f"{ms(low + k * step)} …",
            f"{n:,}",
            bar(n / most, width // 2, ascii_only=ascii_only),
        ]
        for k, n in enumerate(counts)
    ]
    if above:
        body.append([f"above {ms(high)}", f"{above:,}", f"longest {ms(ordered[-1])}"])
    return [title, *(f"  {line}" for line in grid(["ms", "n", ""], body, [True, True, False]))]


_PLAIN = str.maketrans({"…": "~", "─": "-", "–": "-"})


def request_lines(records: Sequence[RequestRecord], width: int, *, ascii_only: bool = False) -> list[str]:
    """The timeline, then the distributions, lines of at most `width` cells."""
    found = [
        *timeline(records, width, ascii_only=ascii_only),
        "",
        *distributions(records, width, ascii_only=ascii_only),
    ]
    lines = [fit(line, width) for line in found]
    return [line.translate(_PLAIN) for line in lines] if ascii_only else lines


def distributions(
    records: Sequence[RequestRecord], width: int = 100, *, ascii_only: bool = False
) -> list[str]:
    """TTFT, ITL and E2E of the completed requests."""
    ok = [r for r in records if r.is_ok]
    itl: list[int] = []
    icl: list[int] = []
    for r in ok:
        inter_token_gaps(r, itl, icl)
    parts = (
        ("TTFT", [r.ttft_ns / 1e6 for r in ok]),
        ("ITL", [v / 1e6 for v in itl]),
        ("E2E", [r.e2e_ns / 1e6 for r in ok]),
    )
    return [
        line for title, values in parts for line in histogram(values, title, width, ascii_only=ascii_only)
    ]
