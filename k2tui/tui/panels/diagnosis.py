"""What is wrong with the server and what to try, with the proving line."""

from __future__ import annotations

from k2tui.core.load import State
from k2tui.tui.lines import Line, Picture, Row, Seg, text_line, wrap
from k2tui.tui.panels import Panel
from k2tui.tui.view import STATE_ROLES, View


def draw(view: View, width: int, height: int) -> Picture:
    server = view.server
    if server is None:
        return Picture((Row("", text_line("No server.", "dim")),))
    load = server.load
    role = STATE_ROLES[load.state]
    lines: list[Line] = [text_line(t, f"{role} bold") for t in wrap(load.verdict or load.state.value, width, 3, view.glyphs.ellipsis)]
    wrong = load.state in (State.FAILED, State.STALLED, State.DEGRADED)
    if load.root_cause:
        sure = "" if load.confidence is None else f"  {load.confidence * 100:.0f}% sure"
        lines.append((Seg("cause  ", "dim"), Seg(load.root_cause, "bold"), Seg(f"  {load.root_cause_group}{sure}", "dim")))
    if load.hint:
        lines += [(Seg("try    " if n == 0 else "       ", "dim"), Seg(t)) for n, t in enumerate(wrap(load.hint, max(10, width - 7), 4, view.glyphs.ellipsis))]
    if load.proof_line:
        number = "" if load.proof_line_no is None else f"line {load.proof_line_no}"
        lines.append((Seg("proof  ", "dim"), Seg(number, "accent", "proof"), Seg("  p jumps to it", "dim", "proof")))
        lines += [(Seg("       "), Seg(t, "dim", "proof")) for t in wrap(load.proof_line, max(10, width - 7), 3, view.glyphs.ellipsis)]
    if load.silence_s is not None and load.silence_s >= 10 and load.state in (State.LOADING, State.STALLED):
        lines.append((Seg("silent ", "dim"), Seg(f"{load.silence_s:.0f} s since the log grew")))
    for note in load.warnings:
        lines.append((Seg(f"{view.glyphs.warn} ", "warn"), *text_line(note)))
    if load.ranks:
        lines.append((Seg("ranks  ", "dim"), Seg(" ".join(load.ranks), "dim")))
    if server.http is not None and server.http.error and not wrong:
        lines.append((Seg("http   ", "dim"), Seg(server.http.error, "dim")))
    return Picture(tuple(Row("", x) for x in lines[:height]))


PANEL = Panel("diagnosis", "Diagnosis", draw, needs=("servers",), ticks=True, order=75, help="The cause as a class of known failures, what to try, and the line that proves it.")
