"""What a panel is given to draw from: the snapshot, short histories, the time, the character set and what is selected."""

from __future__ import annotations

from dataclasses import dataclass, field

from k2tui.core.load import LoadView, State
from k2tui.core.snapshot import ServerView, Snapshot
from k2tui.tui.history import History
from k2tui.tui.lines import UNICODE, Glyphs

STATE_ROLES = {
    State.UNKNOWN: "dim",
    State.LOADING: "info",
    State.READY: "ok",
    State.STALLED: "warn",
    State.DEGRADED: "warn",
    State.FAILED: "bad",
    State.STOPPED: "dim",
}


@dataclass(frozen=True, slots=True)
class BenchPick:
    """What the user looks at on the benchmark screen: the selected run, the run that others are measured against ("" = the
    stored baseline), order and filter of the list."""

    run_id: str = ""
    base_id: str = ""
    sort: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class ProcessPick:
    """GPU processes as the user wants them: order ("" = by GPU), tagged rows ("pid/gpu"), and the one whose curves are shown."""

    sort: str = ""
    tagged: frozenset[str] = frozenset()
    key: str = ""


@dataclass(frozen=True, slots=True)
class BoardPick:
    """What of the board is shown: words, a status ("open" = not ended) and a priority that tasks must have; "" = all."""

    text: str = ""
    status: str = ""
    priority: str = ""

    @property
    def is_all(self) -> bool:
        return not (self.text or self.status or self.priority)


@dataclass(frozen=True, slots=True)
class View:
    snap: Snapshot
    now_s: float
    history: History = field(default_factory=History)
    glyphs: Glyphs = UNICODE
    server_key: str = ""  # the server that the user chose to look at; "" = see `server`
    task_id: str = ""  # the task that the user looks at
    gpu_sort: str = ""  # a name of panels.gpus.SORTS
    gpu_index: int = -1  # the GPU that the user looks at; -1 = all of them
    gpu_span: int = 0  # which of panels.gpu.SPANS its curves show
    bench: BenchPick = field(default_factory=BenchPick)
    trial_key: str = ""  # the trial of the tuning run that the user looks at
    board: BoardPick = field(default_factory=BoardPick)
    process: ProcessPick = field(default_factory=ProcessPick)
    job_filter: str = ""  # words that a job must have to be listed; "" = all
    job_sort: str = ""  # one of panels.jobs.SORTS

    @property
    def server(self) -> ServerView | None:
        """The server in focus: the chosen one, else the newest that is not stopped, else the newest; one of a tuning trial only when
        there is no other."""
        return min(
            self.snap.servers,
            key=lambda s: (s.key != self.server_key, s.is_trial, s.load.state in (State.STOPPED, State.UNKNOWN)),
            default=None,
        )

    def state_mark(self, load: LoadView) -> str:
        """A sign beside the word: states are told apart without colour."""
        g = self.glyphs
        return {
            State.UNKNOWN: g.wait,
            State.LOADING: g.up,
            State.READY: g.run,
            State.STALLED: g.warn,
            State.DEGRADED: g.warn,
            State.FAILED: g.bad,
            State.STOPPED: g.skip,
        }[load.state]
