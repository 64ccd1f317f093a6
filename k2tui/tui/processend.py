"""Ending GPU processes from the screen: which ones, by which signal, and the question before it. Ends nothing itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from k2tui.core.gpu import GpuProcess
from k2tui.tui import format as fmt
from k2tui.tui.lines import Line, Seg, text_line
from k2tui.tui.panels.processes import all_of, key_of

if TYPE_CHECKING:
    from k2tui.tui.app import Dashboard

WAYS = (
    ("end", "end: SIGTERM, after 5 s SIGKILL", "the usual way"),
    ("TERM", "SIGTERM only", "a server stops in order, if it can"),
    ("INT", "SIGINT only", "as Ctrl-C does"),
    ("KILL", "SIGKILL at once", "it cannot clean up"),
)
SAYS = {
    "end": "SIGTERM now, SIGKILL after 5 s",
    "TERM": "SIGTERM now, and nothing after it",
    "INT": "SIGINT now, and nothing after it",
    "KILL": "SIGKILL now",
}
_SHOWN = 8


def ask_end(app: Dashboard, key: str) -> None:
    """The tagged processes that are still there, or the one of that row: each must be visible and the user's own."""
    from k2tui.tui.screens.dialogs import Choice, Chooser

    everyone = all_of(app.snap)
    tagged = [p for p in everyone if key_of(p) in app.process_pick.tagged]
    found = tagged or [p for p in everyone if key_of(p) == key]
    wanted = list({p.pid: p for p in found}.values())
    if not wanted:
        app.say("this process is gone", "warning")
        return
    for process in wanted:
        if process.started_s is None:
            app.say(f"pid {process.pid} is not visible here, so it cannot be ended from here", "warning")
            return
        if not process.is_own:
            app.say(
                f"pid {process.pid} belongs to {process.user or 'another user'}; k2tui ends only your own processes",
                "warning",
            )
            return

    def chosen(how: str | None) -> None:
        if how:
            _confirm(app, wanted, everyone, how)

    what = f"{len(wanted)} processes" if len(wanted) > 1 else f"pid {wanted[0].pid}"
    app.push_screen(Chooser(f"End {what}: how?", [Choice(*way) for way in WAYS], selected="end"), chosen)


def _confirm(app: Dashboard, wanted: Sequence[GpuProcess], everyone: Sequence[GpuProcess], how: str) -> None:
    from k2tui.tui.screens.dialogs import Confirm

    lines: list[Line] = []
    for process in wanted[:_SHOWN]:
        on_gpu = [p.memory_used_b or 0 for p in everyone if p.pid == process.pid and p.gpu_index >= 0]
        held = f"{fmt.size(sum(on_gpu))} of GPU memory" if on_gpu else f"{fmt.size(process.host_rss_b)} of memory, no GPU"
        age = fmt.age(app.clock() - (process.started_s or 0.0))
        lines.append(
            (
                Seg(f"pid {process.pid}", "bold"),
                Seg(f"  {process.rank}  {held}, {age} old"),
            )
        )
        lines.append(text_line(process.command or process.name, "dim"))
        if process.is_orphan:
            lines.append(text_line(process.orphan_reason or "its server is dead", "warn"))
    if len(wanted) > _SHOWN:
        lines.append(text_line(f"and {len(wanted) - _SHOWN} more", "dim"))
    lines.append(())
    living = [p for p in wanted if not p.is_orphan]
    if any(p.rank for p in living):
        lines.append(
            text_line("There are ranks of a running server among them: the server will fail.", "bad")
        )
    jobs = sorted({p.job_id for p in living if p.job_id})
    if jobs:
        lines.append(text_line(f"Job {', '.join(jobs)}: stopping the job (S, d) is the orderly way.", "warn"))
    lines.append(text_line(f"{SAYS[how]}, only if pid and birth time still match.", "dim"))
    targets = [(p.pid, p.started_s) for p in wanted if p.started_s is not None]

    def answer(agreed: bool | None) -> None:
        if agreed:
            app.process_pick = replace(app.process_pick, tagged=frozenset())
            app.order(app.backend.end_processes, targets, how, then=lambda words: app.say(words))

    title = f"End these {len(wanted)} processes?" if len(wanted) > 1 else "End this process?"
    app.push_screen(Confirm(title, lines, "end them" if len(wanted) > 1 else "end it"), answer)
