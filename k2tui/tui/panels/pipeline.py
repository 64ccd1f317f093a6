"""The pipeline step by step: state, time, figures. Enter shows a step, u runs up to it after a form."""

from __future__ import annotations

from k2tui.core.chain_view import StepState, StepView
from k2tui.tui import format as fmt
from k2tui.tui.lines import Cell, Column, Glyphs, Picture, Row, Seg, bar, table, text_line
from k2tui.tui.panels import LOOKING, Panel
from k2tui.tui.view import View

ROLES = {
    StepState.PENDING: "dim",
    StepState.RUNNING: "info",
    StepState.DONE: "ok",
    StepState.FAILED: "bad",
    StepState.STOPPED: "warn",
}

COLUMNS = (
    Column("", 2, keep=9),
    Column("step", 15, keep=9),
    Column("state", 7, keep=5),
    Column("took", 6, keep=6, align=">"),
    Column("figures", 20, weight=4, keep=8),
    Column("what", 20, weight=1.5, keep=2, limit=56),
    Column("job", 10, keep=1, weight=0.3, limit=24),
)


def mark(state: StepState, g: Glyphs) -> str:
    return {
        StepState.PENDING: g.wait,
        StepState.RUNNING: g.run,
        StepState.DONE: g.ok,
        StepState.FAILED: g.bad,
        StepState.STOPPED: g.skip,
    }[state]


def _cells(step: StepView, view: View) -> list[Cell]:
    role = ROLES[step.state]
    took = fmt.duration(step.took_s, "")
    if step.state is StepState.RUNNING and step.started_s is not None:
        took = fmt.age(view.now_s - step.started_s, "")
    share = step.share
    figures: Cell = Seg(step.words, "bad" if step.state is StepState.FAILED else "")
    if step.state is StepState.RUNNING and share is not None and share < 1:
        figures = lambda w: bar(share, w, "bar", view.glyphs)  # noqa: E731
    return [
        Seg(mark(step.state, view.glyphs), role),
        Seg(step.name, "bold" if step.state is not StepState.PENDING else ""),
        Seg(step.state.value, role),
        Seg(took, "dim"),
        figures,
        Seg(step.title, "dim"),
        Seg(step.job_id, "faint"),
    ]


def draw(view: View, width: int, height: int) -> Picture:
    chain = view.snap.chain
    if chain is None and not view.snap.is_whole:
        return LOOKING
    if chain is None:
        return Picture(
            (Row("", text_line("No pipeline is known here: k2tui pipeline init writes one.", "dim")),)
        )
    header, rows = table(COLUMNS, [(s.name, _cells(s, view)) for s in chain.steps], width, view.glyphs)
    done = sum(1 for s in chain.steps if s.state is StepState.DONE)
    note = [Seg(f"{done}/{len(chain.steps)} steps", "ok" if done == len(chain.steps) else "dim")]
    if chain.job_id:
        note.append(Seg(f" {view.glyphs.dot} runs as {chain.job_id}", "info"))
    else:
        note += [
            Seg(f" {view.glyphs.dot} ", "dim"),
            Seg("A", "key", "stage('pipeline')"),
            Seg(" runs all", "dim"),
        ]
    now = next((s.name for s in chain.steps if s.state is not StepState.DONE), "")
    return Picture(rows, header, tuple(note), title=f"Pipeline {chain.name}", prefer=now)


PANEL = Panel(
    "pipeline",
    "Pipeline",
    draw,
    needs=("chain", "is_whole"),
    ticks=True,
    order=45,
    selectable=True,
    enter="open_step",
    keys=(("u", "run_to_step", "run to here"), ("l", "open_step_log", "log")),
    help="The steps from a served model to a measured draft. Enter shows the step's log; u asks, then runs up to it. What is valid is skipped.",
)
