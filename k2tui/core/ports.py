"""What the dashboard asks of the world. `k2tui.monitor.Monitor` is the real one; tests pass a list of snapshots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from k2tui.core.gpu_series import GpuCurves
    from k2tui.core.snapshot import Snapshot


class LogPort(Protocol):
    """Lines of one log, cheap at any size: opened at the end, indexed in the background. Lines are clean text
    (no escape codes, no control characters, carriage-return bars folded to their newest state)."""

    @property
    def title(self) -> str: ...
    @property
    def size_b(self) -> int: ...
    def line_count(self) -> int:
        """Lines known so far (grows while the index is built and while the log grows)."""
        ...

    def lines(self, start: int, count: int) -> Sequence[str]:
        """Lines [start, start+count). Never blocks for more than a few ms."""
        ...

    def search(self, pattern: str, start: int, *, forward: bool = True) -> int | None:
        """Number of the next line matching the regex (bad regex: K2Error), None if there is none."""
        ...

    def is_complete(self) -> bool:
        """True when the whole file is indexed, so that line_count() is exact."""
        ...

    def close(self) -> None: ...


class Backend(Protocol):
    """The dashboard's only door. Every order raises K2Error with a message for people, or returns at once;
    what came of it is seen in a later snapshot, never assumed."""

    def start(self, on_change: Callable[[], None]) -> None:
        """Begin watching; on_change is called from other threads when a new snapshot is worth drawing."""
        ...

    def snapshot(self) -> Snapshot: ...
    def stop(self) -> None: ...
    def log(self, key: str) -> LogPort: ...

    def preview(self, stage: str, params: Mapping[str, Any]) -> Sequence[str]:
        """The exact argv that `submit` would run, secrets masked."""
        ...

    def submit(self, stage: str, params: Mapping[str, Any]) -> str:
        """Start a stage as a job; returns the job id."""
        ...

    def stop_job(self, job_id: str) -> None: ...
    def retry_job(self, job_id: str) -> str: ...
    def delete_job(self, job_id: str) -> None:
        """Remove a job that has ended, with its log. K2Error while it lives."""
        ...

    def set_task(self, task_id: str, **changes: str) -> None:
        """Change status, priority, content or note of a board task."""
        ...

    def add_task(self, content: str, priority: str = "medium") -> None: ...
    def move_task(self, task_id: str, other_id: str) -> None:
        """Give a board task the place that another one has now; the others close up."""
        ...

    def end_processes(self, targets: Sequence[tuple[int, float]], how: str = "end") -> str:
        """End exactly these processes, each named by pid and birth time (Unix seconds). how: "end" (TERM, after 5 s KILL), or one
        signal alone: "TERM", "INT", "KILL". Returns what became of them, in words;
        raises K2Error, and ends nobody, when one is not that process any more or belongs to somebody else. Takes seconds."""
        ...

    def describe_process(self, pid: int, started_s: float) -> Sequence[str]:
        """One process in depth, a line a fact, clean and without secrets. Raises K2Error when it has ended."""
        ...

    def watch_gpu(self, index: int | None) -> None:
        """This GPU is looked at closely: its costly figures are read more often (None: none is)."""
        ...

    def watch_host_processes(self, on: bool) -> None:
        """The host's busiest processes are read while this is on: snapshot().host_processes."""
        ...

    def gpu_curves(self, start_s: float, end_s: float, steps: int = 0) -> GpuCurves:
        """The GPUs' curves over a span of time, from the history on disk; without GPUs in it when nothing was recorded."""
        ...

    def label_run(self, run_id: str, label: str | None, tag: str | None) -> None:
        """Rename or tag a benchmark run (None: as it was)."""
        ...

    def set_baseline(self, run_id: str, on: bool) -> Sequence[str]:
        """Make the run, with its sweep, the baseline of its workload, or no longer; returns the ids. A run that is not
        valid is refused."""
        ...

    def delete_run(self, run_id: str) -> None:
        """Remove a benchmark run for good."""
        ...

    def run_requests(self, run_id: str, width: int, ascii_only: bool) -> Sequence[str]:
        """A benchmark run request by request on one time line, and its distributions; lines of at most `width` cells."""
        ...

    def report(self, server_key: str) -> str:
        """A report for an issue tracker about one server (versions, argv, proving lines; no secrets)."""
        ...
