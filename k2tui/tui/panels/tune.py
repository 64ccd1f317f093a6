"""The newest tuning run: every trial with its interval, its change against the baseline, and the cause where it failed."""

from __future__ import annotations

from collections.abc import Sequence

from k2tui.core.stats import Estimate, Verdict
from k2tui.core.tuning import Trial, TuneStep, TuneView, label_of
from k2tui.core.tuning_text import best_text, change_text, value_text
from k2tui.core.tuning_verdict import Ranked, drift, no_baseline, ranked, winner
from k2tui.tui import format as fmt
from k2tui.tui.lines import (
    Cell,
    Column,
    Glyphs,
    Line,
    Picture,
    Row,
    Seg,
    fit_line,
    middle,
    table,
    text_line,
    wrap,
)
from k2tui.tui.panels import LOOKING, Panel
from k2tui.tui.view import View

STEPS = {"check": "is checked", "start": "starts", "bench": "is measured", "stop": "stops"}
STATES = {"slower": "bad", "failed": "bad", "stalled": "bad", "refused": "warn", "skipped": "dim"}
NAMES = {
    "tok_s_user": "tok/s/user",
    "output_throughput": "out tok/s",
    "ttft_p50_ms": "TTFT p50 ms",
    "tpot_p50_ms": "TPOT p50 ms",
}
VERDICTS = {
    Verdict.FASTER: "ok",
    Verdict.SLOWER: "bad",
    Verdict.SAME: "dim",
    Verdict.UNCLEAR: "warn",
    Verdict.NOT_COMPARABLE: "dim",
}


def _columns(metric: str) -> tuple[Column, ...]:
    return (
        Column("", 1, keep=10),
        Column("setting", 26, weight=3, keep=10, limit=60),
        Column(NAMES.get(metric, metric), 13, keep=10, align=">"),
        Column("change", 14, keep=9, align=">"),
        Column("verdict or cause", 16, weight=3, keep=8, limit=120),
        Column("accept", 6, keep=6, align=">"),
        Column("ready", 6, keep=5, align=">"),
        Column("stop", 5, keep=2, align=">"),
    )


def sign(row: Ranked, g: Glyphs) -> Seg:
    """Best, baseline, baseline again, failed: told apart by sign, then by colour."""
    if row.estimate is None and row.trial.state != "slower":
        return Seg(g.skip if row.trial.state == "skipped" else g.bad, STATES.get(row.trial.state, "bad"))
    return {
        "best": Seg(g.star, "ok bold"),
        "base": Seg(g.run, "accent"),
        "again": Seg(g.wait, "accent"),
    }.get(row.mark, Seg(" "))


def figure(e: Estimate, g: Glyphs) -> str:
    """ "90.1 ±1.2": the mean and half of its 95 % interval."""
    return value_text(e, g.plus_minus)


def change(row: Ranked, g: Glyphs) -> Seg:
    if row.ratio is None:
        return Seg("baseline" if row.mark == "base" else "", "dim")
    return Seg(change_text(row.ratio, g.plus_minus), "dim" if row.verdict is None else VERDICTS[row.verdict])


def cause(trial: Trial) -> str:
    """Why it has no figure, in one line."""
    return trial.cause or "no cause is known"


def step_words(step: TuneStep, now_s: float) -> str:
    label = label_of(step.setting, step.is_again)
    whole, planned = step.passes
    at = f", pass {min(whole + 1, planned)} of {planned}" if planned else ""
    return f"{label} {STEPS.get(step.step, step.step)}{at}, {fmt.duration(max(0.0, now_s - step.since_s))}"


def _cells(row: Ranked, g: Glyphs) -> Sequence[Cell]:
    trial = row.trial
    failed = row.estimate is None
    held = f", {fmt.size(trial.held_b)} of GPU memory still held after it" if trial.held_b else ""
    said = row.said or (cause(trial) if failed else "")
    return (
        sign(row, g),
        lambda cells: (Seg(middle(row.label, cells, g.ellipsis), "bold" if row.mark == "best" else ""),),
        Seg(
            trial.state if row.estimate is None else figure(row.estimate, g),
            STATES.get(trial.state, "bad") if failed else "bold" if row.mark == "best" else "",
        ),
        change(row, g),
        Seg(
            said + held,
            STATES.get(trial.state, "warn")
            if failed or held
            else "dim"
            if row.verdict is None
            else VERDICTS[row.verdict],
        ),
        Seg(f"{trial.accept_length:.2f}" if trial.accept_length else ""),
        Seg("" if trial.ready_s is None else fmt.duration(trial.ready_s), "dim"),
        Seg("" if trial.stop_s is None else fmt.duration(trial.stop_s), "dim"),
    )


def summary(run: TuneView) -> list[tuple[str, str]]:
    """(words, role): what was found so far, and how far it can be trusted."""
    if run.space is None or not run.trials:
        return []
    if why := no_baseline(run.trials):
        return [(why, "bad")]
    out: list[tuple[str, str]] = []
    best = winner(run.space, run.trials)
    if best is not None and best.setting and best.estimate is not None:
        said = best_text(run.space, run.trials, best)
        if run.now is None:
            said += f"; k2tui tune best {run.name} prints it as a profile"
        out.append((said, "ok"))
    elif run.now is None and best is not None:
        out.append(("no setting is really faster than the profile as it is", "dim"))
    moved = drift(run.trials)
    if moved is not None:
        out.append(
            (f"the baseline measured again: {100 * moved:+.1f} %; a gain no larger than that is none", "dim")
        )
    return out


def draw(view: View, width: int, height: int) -> Picture:
    run, g = view.snap.tune, view.glyphs
    if run is None and not view.snap.is_whole:
        return LOOKING
    if run is None:
        return Picture(
            (
                Row(
                    "",
                    (
                        Seg("No tuning run yet. ", "dim"),
                        Seg("U", "key", "stage('tune')"),
                        Seg(" starts one from a space file (docs/tune.md).", "dim"),
                    ),
                ),
            )
        )
    if run.space is None:
        return Picture(
            tuple(Row("", text_line(t, "warn")) for t in wrap(run.error, width)), title=f"Tuning: {run.name}"
        )
    rows = ranked(run.space, run.trials)
    columns, cells = _columns(run.space.metric), [(r.trial.key, list(_cells(r, g))) for r in rows]
    if not any(t.accept_length for t in run.trials):  # no draft: its room goes to the setting
        at = next(n for n, c in enumerate(columns) if c.title == "accept")
        columns = columns[:at] + columns[at + 1 :]
        for _, row in cells:
            del row[at]
    header, lines = table(columns, cells, width, g)
    out: list[Row] = list(lines)
    if run.now is not None:
        out.append(
            Row("", fit_line((Seg(f"{g.up} ", "info"), Seg(step_words(run.now, view.now_s), "info")), width))
        )
    elif not rows:
        out.append(
            Row("", text_line("nothing was measured yet, and nobody is at it: k2tui tune resume", "dim"))
        )
    for text, role in summary(run):
        if len(out) + 1 < height:
            out += [Row("", text_line(t, role)) for t in wrap(text, width, 2, g.ellipsis)]
    return Picture(tuple(out), header, _note(run, view.now_s), title=f"Tuning: {run.name}")


def _note(run: TuneView, now_s: float) -> Line:
    measured = len(run.trials)
    if run.now is None:
        return (Seg(f"{measured} trials, not running", "dim"),)
    left = "" if run.now.ends_s is None else f", {fmt.duration(max(0.0, run.now.ends_s - now_s))} left"
    return (Seg(f"{measured} done, {run.now.left + 1} or more to come{left}", "info"),)


PANEL = Panel(
    "tune",
    "Tuning",
    draw,
    needs=("tune", "is_whole"),
    ticks=True,
    order=70,
    selectable=True,
    enter="open_trial",
    keys=(("Y", "screen.tune_copy", "copy table"),),
    help="The newest tuning run, best trial first, then those that failed with their cause. A circle marks the baseline, a star the best.",
)
