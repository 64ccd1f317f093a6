"""Benchmark rows -> plain-text tables that fit a width. Pure; no colour here (the screen adds it by the marks)."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from k2tui.core.bench import BenchRow

if TYPE_CHECKING:
    from k2tui.core.bench_record import Metric


def clean(text: str) -> str:
    """Printable text: control and format characters become '?', so that a model's name cannot write escape codes."""
    return "".join(
        "?" if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp") else c for c in text
    )


def cells(text: str) -> int:
    """Columns that a text takes in a terminal."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text
    )


def fit(text: str, width: int) -> str:
    """Cut to `width` columns with an ellipsis."""
    if cells(text) <= width:
        return text
    out, used = "", 0
    for c in text:
        w = cells(c)
        if used + w > width - 1:
            break
        out += c
        used += w
    return out + "…"


def pad(text: str, width: int, right: bool) -> str:
    gap = " " * max(width - cells(text), 0)
    return gap + text if right else text + gap


def num(value: float | None, digits: int = 3) -> str:
    """Three significant digits, thousands separators, '-' for what was not measured."""
    if value is None:
        return "–"
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 100:
        return f"{value:.0f}" if digits <= 3 else f"{value:.1f}"
    if size >= 10:
        return f"{value:.1f}"
    if size >= 0.01:
        return f"{value:.2f}"
    return f"{value:.1e}"


def ms(value: float | None) -> str:
    """A latency given in ms: ms below one second, seconds above ("1.42 s")."""
    if value is None:
        return "–"
    return f"{value / 1000:.3g} s" if value >= 1000 else num(value)


COUNTED = ("requests", "tokens")  # units of counts


@dataclass(frozen=True, slots=True)
class Column:
    """One column. priority: lower is kept longer when the width runs out. shown: leave it out when no row has a value."""

    title: str
    text: Callable[[BenchRow], str]
    right: bool = True
    priority: int = 5
    most: int = 40


def _load(row: BenchRow) -> str:
    if row.request_rate is not None:
        cap = f"/{row.concurrency}" if row.concurrency else ""
        return f"{row.request_rate:g}/s{cap}"
    if row.concurrency is not None:
        return str(row.concurrency)
    return "–" if row.load_shape == "closed" else row.load_shape


def load_words(row: BenchRow) -> str:
    """The load of a run where no column says what it is: "C=8", "2 req/s", "trace"."""
    if row.request_rate is not None:
        return f"{row.request_rate:g} req/s" + (f" of at most {row.concurrency}" if row.concurrency else "")
    return f"C={row.concurrency}" if row.concurrency is not None else _load(row)


def accept_text(row: BenchRow) -> str:
    """ "42 % 2.26": correct of proposed drafts, tokens per verify step."""
    rate = "" if row.accept_rate is None else f"{100 * row.accept_rate:.0f} %"
    length = "" if row.accept_length is None else f"{row.accept_length:.2f}"
    return f"{rate} {length}".strip() or "–"


def marks(row: BenchRow) -> str:
    """● baseline, ⚠ not valid, ½ partial, ↓ imported."""
    out = "●" if row.is_baseline else ""
    if row.is_partial:
        out += "½"
    elif row.flags:
        out += "⚠"
    return out + ("↓" if row.imported_from else "")


COLUMNS: tuple[Column, ...] = (
    Column("", marks, False, 0, 3),
    Column("label", lambda r: clean(r.label), False, 1, 24),
    Column("id", lambda r: clean(r.run_id[-6:]), False, 4, 6),
    Column("model", lambda r: clean(r.model.rsplit("/", 1)[-1]), False, 8, 18),
    Column("engine", lambda r: clean(f"{r.engine} {r.version}".strip()), False, 9, 16),
    Column("workload", lambda r: clean(r.workload), False, 7, 24),
    Column("C", _load, True, 1, 10),
    Column("tok/s/user", lambda r: num(r.tok_s_user), True, 2),
    Column("out tok/s", lambda r: num(r.output_throughput), True, 1),
    Column("TTFT p50", lambda r: ms(r.ttft_p50_ms), True, 3),
    Column("TTFT p99", lambda r: ms(r.ttft_p99_ms), True, 4),
    Column("TPOT p50", lambda r: num(r.tpot_p50_ms), True, 4),
    Column("ITL p99", lambda r: num(r.itl_p99_ms), True, 6),
    Column("E2E p50", lambda r: ms(r.e2e_p50_ms), True, 10),
    Column("req/s", lambda r: num(r.request_throughput), True, 11),
    Column("accept", accept_text, True, 3),
    Column("good %", lambda r: "–" if r.goodput_fraction is None else f"{100 * r.goodput_fraction:.0f}", True, 3),
    Column("✗", lambda r: str(r.errors) if r.errors else "–", True, 2),
    Column("ok", lambda r: str(r.completed) if r.completed else "–", True, 9),
    Column("from", lambda r: clean(r.imported_from), False, 6, 20),
)  # fmt: skip


def grid(headers: Sequence[str], body: Sequence[Sequence[str]], right: Sequence[bool]) -> list[str]:
    """Aligned lines: header first, two spaces between columns."""
    widths = [max([cells(h), *(cells(row[i]) for row in body)]) for i, h in enumerate(headers)]
    return [
        "  ".join(pad(text, widths[i], right[i]) for i, text in enumerate(line)).rstrip()
        for line in (headers, *body)
    ]


def rows_table(rows: Sequence[BenchRow], width: int = 120) -> str:
    """The list of runs. Columns without any value are left out, then the least important until it fits."""
    if not rows:
        return "no benchmark runs yet"
    table: list[tuple[Column, list[str]]] = []
    for column in COLUMNS:
        texts = [fit(column.text(r), column.most) for r in rows]
        if any(t not in ("–", "") for t in texts):
            table.append((column, texts))
    while True:
        lines = grid(
            [c.title for c, _ in table],
            [[texts[i] for _, texts in table] for i in range(len(rows))],
            [c.right for c, _ in table],
        )
        if max(map(cells, lines)) <= width or len(table) <= 3:
            break
        table.remove(max(table, key=lambda item: item[0].priority))
    lines.insert(1, "─" * min(max(map(cells, lines)), width))
    foot = footnotes(rows, width)
    return "\n".join([*lines, *foot])


def footnotes(rows: Sequence[BenchRow], width: int) -> list[str]:
    """What the marks mean and how far the figures can be trusted, under every table."""
    out: list[str] = []
    for row in rows:
        if row.flags:
            name = clean(f"{row.run_id[-6:]} {row.label}".strip())
            out.append(fit(f"⚠ {name} {load_words(row)}: {'; '.join(map(clean, row.flags))}", width))
    if len(out) > 6:
        out = [*out[:5], f"⚠ … and {len(out) - 5} more runs with flags (k2tui bench show ID)"]
    line = validity_line(rows)
    if line:
        out.append(fit(line, width))
    return out


def validity_line(rows: Sequence[BenchRow]) -> str:
    """One line of trust: who counted, whose clock, how late, how busy the client was."""
    own = [r for r in rows if not r.imported_from]
    if not own:
        return ""

    def join(values: set[str]) -> str:
        return "/".join(sorted(v for v in values if v)) or "–"

    parts = [f"count={join({r.count for r in own})}", f"stamps={join({r.stamps for r in own})}"]
    lags = [r.lag_p99_ms for r in own if r.lag_p99_ms is not None]
    if lags:
        parts.append(f"lag p99 {num(max(lags))} ms")
    cpu = [r.client_cpu for r in own if r.client_cpu is not None]
    if cpu:
        parts.append(f"client CPU {100 * max(cpu):.0f} %")
    shared = [r.coalesced for r in own if r.coalesced is not None]
    if shared:
        parts.append(f"coalesced {100 * max(shared):.1f} %")
    achieved = [r.achieved for r in own if r.achieved is not None]
    if achieved:
        parts.append(f"achieved {100 * min(achieved):.0f} %")
    short = sum(r.short_outputs for r in own)
    if short:
        parts.append(f"short outputs {short}")
    steal = [r.host_steal for r in own if r.host_steal is not None]
    if steal:
        parts.append(f"host steal {100 * max(steal):.1f} %")
    return " · ".join(parts)


def detail(row: BenchRow, metrics: Sequence[Metric], facts: Mapping[str, Any], width: int = 120) -> str:
    """One run: what was measured, every figure with its interval, and how it was measured."""
    run, server, work = facts.get("run", {}), facts.get("server", {}), facts.get("workload", {})
    head = [
        f"run {row.run_id}  {marks(row)}",
        f"  label     {clean(row.label) or '–'}" + (f"  tag {clean(row.tag)}" if row.tag else ""),
        f"  server    {clean(f'{row.engine} {row.version} {row.model}'.strip()) or '–'}"
        + (f"  tp {row.tp_size}" if row.tp_size else ""),
        f"  workload  {clean(row.workload)}  ({row.api or '?'}, fingerprint {row.workload_fp or '–'})",
        f"  load      {row.load_shape} {_load(row)}, {row.completed} of {row.num_requests} requests in {num(row.duration_s)} s",
        f"  host      {clean(row.host)}" + (f"  job {row.job_id}" if row.job_id else ""),
    ]
    if row.imported_from:
        head.append(f"  imported from {clean(row.imported_from)}")
    head += [f"  ⚠ {clean(flag)}" for flag in row.flags]
    stats = ("mean", "p50", "p90", "p95", "p99", "max")
    spread: dict[str, dict[str, Metric]] = {}
    single: list[Metric] = []
    for m in metrics:
        (
            spread.setdefault(m.name, {}).__setitem__(m.stat, m)
            if m.stat in (*stats, "std")
            else single.append(m)
        )
    body = [
        [name.rpartition(".")[0], next(iter(by.values())).unit, *(num(by[s].value) if s in by else "–" for s in stats),
         _interval(by.get("p50")), _interval(by.get("p99")) or ("?" if "p99" in by else "")]
        for name, by in sorted(spread.items())
    ]  # fmt: skip
    table = (
        grid(["", "unit", *stats, "p50 95 %", "p99 95 %"], body, [False, False, *[True] * 8]) if body else []
    )
    lines = [f"  {line}" for line in table]
    facts_lines = grid(
        ["figure", "value", "unit", "95 %"],
        [[m.name.rpartition(".")[0] + ("" if m.stat == "value" else f"[{m.stat}]"), _figure(m), m.unit, _interval(m)]
         for m in single],
        [False, True, False, False],
    )  # fmt: skip
    engine: Mapping[str, Any] = run.get("engine") or {}
    launch: Mapping[str, Any] = server.get("args") or {}
    chosen: Mapping[str, Any] = work.get("params") or {}
    how = ", ".join(f"{k}={_short(v)}" for k, v in engine.items() if v is not None)
    args = ", ".join(f"{k}={_short(v)}" for k, v in launch.items())
    params = ", ".join(f"{k}={_short(v)}" for k, v in chosen.items())
    tail = [f"  {k:<9} {clean(v)}" for k, v in (("client", how), ("args", args), ("params", params)) if v]
    return "\n".join(
        fit(x, width) for x in [*head, "", *lines, "", *(f"  {x}" for x in facts_lines), "", *tail]
    )


def _figure(m: Metric) -> str:
    """A value that stands alone; what is counted shows as a whole number."""
    if m.unit in COUNTED and float(m.value).is_integer():
        return f"{int(m.value):,}"
    return num(m.value, 4)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _interval(m: Metric | None) -> str:
    return f"{num(m.lo)}…{num(m.hi)}" if m is not None and m.lo is not None and m.hi is not None else ""


def markdown(rows: Sequence[BenchRow]) -> str:
    """The list of runs as a Markdown table; empty columns are left out."""
    table: list[tuple[Column, list[str]]] = []
    for column in COLUMNS:
        texts = [column.text(r).replace("|", "\\|") for r in rows]
        if any(t not in ("–", "") for t in texts):
            table.append((column, texts))
    lines = [
        "| " + " | ".join(c.title or " " for c, _ in table) + " |",
        "|" + "|".join("---:" if c.right else "---" for c, _ in table) + "|",
    ]
    lines += ["| " + " | ".join(texts[i] for _, texts in table) + " |" for i in range(len(rows))]
    line = validity_line(rows)
    return "\n".join(lines) + (f"\n\n{line}" if line else "")
