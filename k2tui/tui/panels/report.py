"""The pipeline's final report: what it comes to, and the figures with and without the draft."""

from __future__ import annotations

from k2tui.core.chain_report import bad_loads, loads_table, step_words, verdict
from k2tui.tui.lines import Column, Line, Picture, Row, Seg, fit, fit_line, table, text_line, wrap
from k2tui.tui.lines import width as text_width
from k2tui.tui.panels import LOOKING, Panel
from k2tui.tui.view import View

COLUMNS = (
    Column("load", 6, keep=9),
    Column("target", 7, keep=8, align=">"),
    Column("draft", 7, keep=8, align=">"),
    Column("ratio", 19, keep=7, align=">"),
    Column("all", 7, keep=4, align=">"),
    Column("draft", 7, keep=4, align=">"),
    Column("accept length", 13, keep=9, align=">"),
    Column("untrained", 9, keep=6, align=">"),
)


def draw(view: View, width: int, height: int) -> Picture:
    chain = view.snap.chain
    report = chain.report if chain is not None else None
    if chain is None and not view.snap.is_whole:
        return LOOKING
    if chain is None or report is None:
        return Picture(
            (
                Row(
                    "",
                    text_line(
                        "The report of all figures is written when a run ends.",
                        "dim",
                    ),
                ),
            )
        )
    lines: list[Line] = [text_line(t, "bold") for t in wrap(verdict(report), width)]
    loads = loads_table(report, view.glyphs.warn)[1:]
    if loads:
        lines.append(text_line("tok/s a user, then in all:", "dim"))
        columns = [  # a mark before a ratio makes it wider than most
            c._replace(cells=max(c.cells, *(text_width(row[i]) for row in loads))) for i, c in enumerate(COLUMNS)
        ]
        header, rows = table(
            columns,
            [("", [Seg(c, "warn" if c.startswith(view.glyphs.warn) else "") for c in row]) for row in loads],
            width,
            view.glyphs,
        )
        lines += [header, *(r.line for r in rows)]
    for words in bad_loads(report):
        lines += [text_line(t, "warn") for t in wrap(f"{view.glyphs.warn} not valid: {words}", width)]
    for step in report.get("steps") or ():
        role = "" if step.get("state") == "done" else "dim"
        for n, part in enumerate(wrap(step_words(step), max(1, width - 16))):
            name = fit(str(step.get("step", "")) if n == 0 else "", 15, ellipsis=view.glyphs.ellipsis)
            lines.append((Seg(f"{name} ", role), Seg(part, role)))
    words = "whole" if report.get("complete") else "not whole"
    note = (
        Seg(words, "ok" if report.get("complete") else "warn"),
        Seg(f"  {chain.report_path}", "faint") if width > 100 else Seg(""),
    )
    return Picture(tuple(Row("", fit_line(x, width, pad=False)) for x in lines), None, note)


PANEL = Panel(
    "report",
    "Report",
    draw,
    needs=("chain", "is_whole"),
    order=47,
    help="What the pipeline's newest run came to; arrows scroll, k2tui pipeline report prints it as Markdown.",
)
