"""The whole picture at one moment, frozen: all that the dashboard and `status --json` show."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from k2tui.core.board import Board

if TYPE_CHECKING:  # whoever makes one of these imports it; a dashboard without a tuning run pays nothing for it
    from k2tui.core.bench import BenchRow
    from k2tui.core.chain_view import ChainView
    from k2tui.core.gpu import GpuProcess, GpuView
    from k2tui.core.host import HostSample
    from k2tui.core.job import Job
    from k2tui.core.load import LoadView
    from k2tui.core.server import HttpStatus
    from k2tui.core.training import TrainView
    from k2tui.core.tuning import TuneView


@dataclass(frozen=True, slots=True)
class ServerView:
    """One server: its job (if k2tui started it), its log as understood, and what it answers."""

    key: str  # job id, or the log's path / URL for a watched one
    title: str
    load: LoadView
    http: HttpStatus | None = None
    job: Job | None = None
    log_key: str = ""  # for Backend.log()

    @property
    def is_trial(self) -> bool:
        """A tuning run started it for one measurement and stops it soon."""
        return self.job is not None and "tune" in self.job.spec.params


@dataclass(frozen=True, slots=True)
class StageInfo:
    """One button: name, title, key, and why it cannot be pressed now ("" = it can)."""

    name: str
    title: str
    key: str = ""
    unavailable: str = ""
    help: str = ""
    fields: tuple[tuple[str, str, str], ...] = ()  # (parameter, first value, hint)
    resumes: str = ""  # what a retry goes on after; "" = it begins from nothing


@dataclass(frozen=True, slots=True)
class Notice:
    at_s: float
    severity: str  # information | warning | error
    text: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    taken_s: float
    servers: tuple[ServerView, ...] = ()  # newest first
    gpu: GpuView | None = None
    host: HostSample | None = None
    jobs: tuple[Job, ...] = ()  # newest first
    board: Board = field(default_factory=Board)
    bench: tuple[BenchRow, ...] = ()  # newest first
    bench_error: str = ""  # why the store of benchmarks cannot be read
    tune: TuneView | None = None  # the newest tuning run
    chain: ChainView | None = None  # the pipeline and how far it is
    training: TrainView | None = None  # the newest training
    stages: tuple[StageInfo, ...] = ()
    notices: tuple[Notice, ...] = ()
    is_demo: bool = False
    profile: str = ""
    profiles: tuple[str, ...] = ()
    host_processes: tuple[GpuProcess, ...] = ()  # the busiest, while somebody looks at them; gpu_index is -1
    is_whole: bool = True  # False until everything was looked at once
    alerts: tuple[tuple[int, str], ...] = ()  # (number, terminal code): a bell or a notification that the terminal itself shows
