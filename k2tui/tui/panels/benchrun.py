"""One run in full: where it comes from, its figures with intervals, how far they can be trusted."""

from __future__ import annotations

from k2tui.core.bench_table import num
from k2tui.tui import benchtext as bt
from k2tui.tui import format as fmt
from k2tui.tui.lines import Line, Picture, Row, Seg, fit_line
from k2tui.tui.panels import Panel
from k2tui.tui.view import View


def _pair(label: str, *segs: Seg) -> Line:
    return (Seg(f"{label:<11}", "dim"), *segs)


def _span(ci: tuple[float, float] | None, g_dash: str) -> Seg:
    return Seg("" if ci is None else f"  95% {num(ci[0])}{g_dash}{num(ci[1])}", "faint")


def draw(view: View, width: int, height: int) -> Picture:
    row = bt.picked(view)
    if row is None:
        return Picture((Row("", (Seg("The selected run is shown here.", "dim"),)),))
    g = view.glyphs
    dash = "-" if g.ascii else "…"
    lines: list[Line] = [
        _pair("server", Seg(f"{row.engine} {row.version} ".strip()), Seg(f" {row.model}", "bold"),
              Seg(f"  tp {row.tp_size}" if row.tp_size else "", "dim")),
        _pair("workload", Seg(row.workload), Seg(f"  {row.api or bt.NONE}, {row.load_shape}, C={bt.load(row)}", "dim")),
        _pair("requests", Seg(f"{row.completed}/{row.num_requests}"), Seg(f"  errors {row.errors}", "bad" if row.errors else "dim"),
              Seg(f"  in {fmt.duration(row.duration_s)} at {bt.clock(row)}", "dim")),
        _pair("out tok/s", bt.figure(row.output_throughput, "bold"), _span(row.output_throughput_ci, dash),
              Seg("  steady ", "dim"), bt.figure(row.output_throughput_steady)),
        _pair("tok/s/user", bt.figure(row.tok_s_user, "bold"), _span(row.tok_s_user_ci, dash)),
        _pair("TTFT ms", Seg("p50 ", "dim"), bt.latency(row.ttft_p50_ms), _span(row.ttft_p50_ci, dash), Seg("  p99 ", "dim"),
              bt.latency(row.ttft_p99_ms), _span(row.ttft_p99_ci, dash), Seg("  from due p99 ", "dim"), bt.latency(row.ttft_sched_p99_ms)),
        _pair("TPOT ms", Seg("p50 ", "dim"), bt.figure(row.tpot_p50_ms), Seg("  p99 ", "dim"), bt.figure(row.tpot_p99_ms),
              Seg("  ITL p50 ", "dim"), bt.figure(row.itl_p50_ms), Seg("  p99 ", "dim"), bt.figure(row.itl_p99_ms)),
        _pair("chunks ms", Seg("p50 ", "dim"), bt.figure(row.icl_p50_ms), Seg("  p99 ", "dim"), bt.figure(row.icl_p99_ms),
              Seg("  longest ", "dim"), bt.latency(row.icl_max_ms), Seg("  tokens a chunk ", "dim"), bt.figure(row.tokens_per_chunk)),
        _pair("E2E", Seg("p50 ", "dim"), bt.latency(row.e2e_p50_ms), Seg("  p99 ", "dim"), bt.latency(row.e2e_p99_ms),
              Seg("  req/s ", "dim"), bt.figure(row.request_throughput)),
        _pair("accept", bt.accept(row), Seg("  cached ", "dim"),
              Seg(bt.NONE if row.cached_fraction is None else f"{100 * row.cached_fraction:.0f}%"),
              Seg("  tok/J ", "dim"), bt.figure(row.tokens_per_joule)),
    ]  # fmt: skip
    if row.slo:
        good = bt.NONE if row.goodput_fraction is None else f"{100 * row.goodput_fraction:.0f}%"
        lines.append(_pair("goodput", bt.figure(row.goodput), Seg(f" req/s, {good} within {row.slo}", "dim")))
    note = (Seg(row.run_id, "faint"),) if width > 70 else ()
    return Picture(
        (*(Row("", fit_line(x, width)) for x in lines), *bt.trust(row, g, width)),
        None,
        note,
        title=f"Run: {bt.name(row)}",
    )


PANEL = Panel(
    "benchrun",
    "Run",
    draw,
    needs=("bench",),
    order=64,
    help="Every figure of the selected run, with 95 % intervals from inside the run, and how it was measured.",
)
