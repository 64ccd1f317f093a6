"""One trial of a tuning run in full: its setting, each repeat, its other figures, and the whole cause when it failed."""

from __future__ import annotations

from k2tui.core.tuning_text import short
from k2tui.core.tuning_verdict import Ranked, ranked
from k2tui.tui import format as fmt
from k2tui.tui.lines import Line, Picture, Row, Seg, fit, fit_line, line_width, text_line, wrap
from k2tui.tui.panels import Panel
from k2tui.tui.panels.tune import NAMES, STATES, change, figure, middle
from k2tui.tui.view import View


def _pick(view: View) -> Ranked | None:
    run = view.snap.tune
    if run is None or run.space is None or not run.trials:
        return None
    rows = ranked(run.space, run.trials)
    return next((r for r in rows if r.trial.key == view.trial_key), rows[0])


def draw(view: View, width: int, height: int) -> Picture:
    row, g, run = _pick(view), view.glyphs, view.snap.tune
    if row is None or run is None or run.space is None:
        return Picture((Row("", text_line("The selected trial is shown here.", "dim")),))
    trial = row.trial
    lines: list[Line] = []

    def pair(label: str, *segs: Seg) -> None:
        """One fact; parts that the line has no room for go on below it."""
        line, used = [Seg(f"{label:<12}", "dim")], 12
        for seg in segs:
            if used > 12 and used + line_width((seg,)) > width:
                lines.append(tuple(line))
                line, used = [Seg(" " * 12)], 12
                seg = Seg(seg.text.lstrip(), seg.role, seg.action)
            line.append(seg)
            used += line_width((seg,))
        lines.append(tuple(line))

    if trial.setting:
        for kind, name, value in trial.setting:
            shown = "left out" if value in (False, "") else "set" if value is True else str(value)
            pair(
                {"env": "environment", "flag": "argument", "key": "profile"}.get(kind, kind),
                Seg(middle(name, min(len(name), max(8, width - 12)), g.ellipsis), "bold"),
                Seg(f" {shown}"),
            )
    else:
        pair("setting", Seg("the profile as it is"))
    if trial.is_again:
        pair("start", Seg(f"number {trial.again_no + 2} of this setting"))
    if row.estimate is not None:
        e = row.estimate
        span = "" if e.lo is None or e.hi is None else f"  95% {short(e.lo)} to {short(e.hi)}"
        pair(
            NAMES.get(run.space.metric, run.space.metric)[:11], Seg(figure(e, g), "bold"), Seg(span, "faint")
        )
        pair("passes", *(Seg(short(v) + "  ") for v in trial.values))
        if trial.state == "slower":
            pair("ended early", Seg(trial.cause, "bad"))
        if row.ratio is not None:
            pair("baseline", change(row, g), Seg(f"  {row.verdict}", "dim"))
        others = [(NAMES.get(k, k), v) for k, v in trial.figures.items() if k != run.space.metric]
        if others:
            pair("also", *(Seg(f"{name} {short(value)}  ") for name, value in others))
        if trial.accept_length:
            pair("accept", Seg(f"{trial.accept_length:.2f}"))
    else:
        for n, text in enumerate(wrap(trial.cause or "no cause is known", max(10, width - 12))):
            pair(trial.state if n == 0 else "", Seg(text, STATES.get(trial.state, "bad")))
    times = [f"ready after {fmt.duration(trial.ready_s)}"] if trial.ready_s is not None else []
    times += [f"stopped in {fmt.duration(trial.stop_s)}"] if trial.stop_s is not None else []
    if times:
        pair("server", *(Seg(t + (", " if t is not times[-1] else "")) for t in times))
    if trial.held_b:
        pair("held", Seg(f"{fmt.size(trial.held_b)} of GPU memory were still held after the stop", "warn"))
    if trial.job_id:
        pair(
            "job",
            Seg(trial.job_id, "", f"job_log('{trial.job_id}')"),
            Seg("  Enter in the table opens its log", "faint"),
        )
    return Picture(
        tuple(Row("", fit_line(x, width)) for x in lines),
        title=f"Trial: {fit(row.label, max(8, width - 16), ellipsis=g.ellipsis).rstrip()}",
    )


PANEL = Panel(
    "tunetrial",
    "Tuning: trial",
    draw,
    needs=("tune",),
    order=72,
    help="The selected trial: what it changes, every repeat, the interval, and the whole cause when it has no figure.",
)
