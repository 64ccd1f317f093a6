"""Servers as jobs and logs: which are there, and one picture of each. Shared by the CLI and the monitor; knows no screen."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from k2tui.core.job import Job, JobState
from k2tui.core.job_mask import mask_text
from k2tui.core.job_words import NO_OOM_KILL
from k2tui.core.load import LoadView, ShardCount, State
from k2tui.core.server import HttpStatus
from k2tui.core.snapshot import ServerView
from k2tui.core.tracker import Evidence
from k2tui.engines._reading import load_tracker
from k2tui.errors import K2Error
from k2tui.jobs import folder
from k2tui.sources import loadhistory
from k2tui.sources.http import ServerProbe
from k2tui.sources.logindex import count_lines, newest_start_at
from k2tui.sources.proctree import ProcTree, TreeSample
from k2tui.sources.tail import Tail

_CATCH_UP_B = 128 << 20  # the newest start is looked for in the last 128 MiB of a log
_COUNT_B = 64 << 20  # of what lies before it, lines are counted in such steps (50 ms)


@dataclass(frozen=True)
class Target:
    """What to follow: a job of ours, or somebody else's log, pid or URL. Every part but the key is optional."""

    key: str
    title: str
    log: Path | None = None
    url: str = ""
    pid: int | None = None
    model: str = ""  # what /model_info must name; "" = whatever it says
    stall_s: float = 0.0
    job: Job | None = None
    extra: dict[str, Any] = field(default_factory=dict[str, Any])


def target_of(job: Job) -> Target:
    params = job.spec.params
    model = ""
    for flag in ("--model-path", "--model"):
        if flag in job.spec.argv[:-1]:
            model = job.spec.argv[job.spec.argv.index(flag) + 1]
    return Target(
        key=job.spec.id,
        title=job.spec.title,
        log=folder.folder_of(job.spec.id) / "output.log",
        url=str(params.get("url") or ""),
        pid=job.pid,
        model=model,
        stall_s=float(params.get("stall_s") or 0.0),
        job=job,
    )


class Follower:
    """One target, followed: feed what its log grew by, look at its processes, join it with what it answers.

    step() reads the log; look() (once a second) reads the processes. Neither blocks. With learns, the ETA comes from this host's
    earlier starts; with records too, a start of ours that becomes ready is kept for the next ones.
    """

    def __init__(self, target: Target, *, learns: bool = False, records: bool = True) -> None:
        self.target = target
        self.tracker = load_tracker(eta=loadhistory.learned() if learns else None, stall_s=target.stall_s)
        keeps = learns and records and target.job is not None
        self._recorder = loadhistory.StartRecorder(self.tracker) if keeps else None
        self.error = ""
        self._tail: Tail | None = None
        self._tree: ProcTree | None = None
        self._tree_pid: int | None = None
        self._sample: TreeSample | None = None
        self._grew_s = time.time()
        self._last_size = -1
        self._generation = 0
        self._before_b = self._counted_b = 0  # bytes of the log that were not read, and those whose lines are counted
        self._lines_before = 0  # what a line's number in the tracker lacks to be its number in the file
        self._shards: ShardCount | None = None  # as last seen
        self._shard_sizes: list[int] = []
        if learns and target.model and Path(target.model).is_dir():
            self._shard_sizes = _sizes(Path(target.model))
        if target.log is not None:
            self._tail = Tail(target.log)
            size = self._tail.size()
            if size is not None:
                try:
                    self._tail.offset = self._before_b = newest_start_at(target.log, _CATCH_UP_B)
                except OSError:  # gone in this moment: the tail waits for it
                    pass
            self._generation = self._tail.generation
            changed = self._tail.modified_s()
            if changed is not None:
                self._grew_s = changed

    def step(self, now_s: float, budget_b: int = 16 << 20) -> bool:
        """Read what the log grew by (at most budget_b); True when there was something."""
        if self._tail is None:
            return False
        got = 0
        try:
            while got < budget_b:
                data = self._tail.poll()
                if not data:
                    break
                if got == 0 and self._last_size >= 0:
                    self._grew_s = now_s
                got += len(data)
                if self._tail.generation != self._generation:  # another file by that name: its lines count from 1
                    self._generation = self._tail.generation
                    self._before_b = self._counted_b = 0
                    self._lines_before = 1 - self.tracker.line_no
                self.tracker.feed(data, now_s)
            self.error = ""
        except K2Error as err:
            self.error = err.message
        self._last_size = got
        if self._counted_b < self._before_b:
            self.number_lines(_COUNT_B)
        return got > 0

    def number_lines(self, budget_b: int = 1 << 62) -> None:
        """Count the lines of the part that was not read, at most budget_b of it: until then a proof has no line number."""
        if self.target.log is None or self._counted_b >= self._before_b:
            return
        end = min(self._before_b, self._counted_b + budget_b)
        try:
            self._lines_before += count_lines(self.target.log, self._counted_b, end)
        except OSError:
            return
        self._counted_b = end

    def _numbered(self, load: LoadView) -> LoadView:
        """Line numbers as in the file."""
        shift, known = self._lines_before, self._counted_b >= self._before_b
        if shift == 0 and known:
            return load

        def number(no: int | None) -> int | None:
            return no + shift if known and no is not None and no + shift > 0 else None

        spans = tuple(replace(span, line_no=number(span.line_no)) for span in load.phases)
        return replace(load, proof_line_no=number(load.proof_line_no), phases=spans)

    def look(self, now_s: float) -> None:
        """Look at the processes behind the log."""
        pid = self.target.job.pid if self.target.job is not None else self.target.pid
        if pid != self._tree_pid:
            self._tree_pid = pid
            self._tree = ProcTree(pid) if pid is not None else None
            self._sample = None
        if self._tree is not None:
            self._sample = self._tree.sample(now_s)

    def join(self, now_s: float, http: HttpStatus | None, gpu_util: float | None = None, gpu_memory_b_s: float | None = None) -> None:
        """Tell the tracker what the world around the log says."""
        job, sample = self.target.job, self._sample
        alive = exit_code = None
        wanted = False
        if job is not None:
            if job.state.is_final:
                alive, exit_code = False, job.exit_code
            elif job.state in (JobState.RUNNING, JobState.STOPPING, JobState.ORPHANED):
                alive = sample.alive if sample is not None else None
            wanted = job.state in (JobState.STOPPING, JobState.STOPPED)
        elif sample is not None:
            alive = sample.alive
        # a foreign log may name an address of another host or of a server long gone: there only an answer is evidence
        ours = job is not None or bool(self.target.url) or self.target.pid is not None
        if http is not None and http.model_path is None and not ours:
            http = None
        target = self._shards
        known = self._shard_sizes if target is not None and target.total == len(self._shard_sizes) else []
        self.tracker.evidence(
            Evidence(
                bytes_total=sum(known) or None,
                bytes_done=sum(known[: target.done]) if known and target is not None else None,
                alive=alive,
                exit_code=exit_code,
                silence_s=max(0.0, now_s - self._grew_s) if self._tail is not None else None,
                cpu_pct=sample.cpu_percent if sample else None,
                read_bytes_s=sample.read_b_s if sample else None,
                gpu_util=gpu_util,
                gpu_memory_b_s=gpu_memory_b_s,
                http_checked=http is not None,
                model_path=http.model_path if http else None,
                served_model_name=http.served_model_name if http else None,
                expected_model=self.target.model or None,
                health=http.health if http else None,
                requests_waiting=http.num_queue_reqs if http else None,
                wanted_stop=wanted,
                extra={"oom_kills": 0} if job is not None and NO_OOM_KILL in job.reason else {},
            )
        )

    def load_view(self, now_s: float, http: HttpStatus | None) -> LoadView:
        if self._tail is None and self.target.job is None:
            return _view_of_http(http)
        return self.tracker.view(now_s)

    def view(self, now_s: float, http: HttpStatus | None) -> ServerView:
        load = self._numbered(self.load_view(now_s, http))
        self._shards = load.target
        load = _corrected(load, self.target.job)
        # a log may repeat a key that was on the command line: it is masked where it is shown, never while the log is read
        load = replace(load, proof_line=mask_text(load.proof_line), verdict=mask_text(load.verdict), hint=mask_text(load.hint))
        job = self.target.job
        if job is not None and job.waiting_for and not job.state.is_final:
            load = replace(load, verdict=f"waits for {job.waiting_for}")
        if self._recorder is not None:
            self._recorder.look(load, now_s)
        return ServerView(
            key=self.target.key,
            title=self.target.title,
            load=load,
            http=http,
            job=self.target.job,
            log_key=self.target.key if self.target.log is not None else "",
        )

    def close(self) -> None:
        if self._tail is not None:
            self._tail.close()


def _view_of_http(http: HttpStatus | None) -> LoadView:
    """A server known by its URL alone: no log, so no phases; what it answers is all there is."""
    if http is None:
        return LoadView(verdict="not asked yet")
    if http.model_path is None:
        return LoadView(state=State.UNKNOWN, url=http.url, verdict=f"{http.url}: {http.error or 'no answer'}")
    return LoadView(
        state=State.READY,
        url=http.url,
        model=http.model_path,
        version=http.version or "",
        verdict=f"answers as {http.served_model_name or http.model_path}",
    )


def look_once(target: Target, now_s: float | None = None, *, ask: bool = True, timeout_s: float = 0.5) -> ServerView:
    """One picture of one target, for commands that do not stay: reads the log (its newest start), asks the server once."""
    now = time.time() if now_s is None else now_s
    follower = Follower(target, learns=True, records=False)
    try:
        while follower.step(now):
            pass
        follower.look(now)
        is_over = target.job is not None and target.job.state.is_final
        url = target.url or follower.tracker.view(now).url
        http = ServerProbe(url, timeout_s).poll(now) if ask and url and not is_over else None
        follower.join(now, http)
        if follower.view(now, http).load.state is not State.READY:  # its proof is worth counting a long log's lines
            follower.number_lines()
        return follower.view(now, http)
    finally:
        follower.close()


def _sizes(folder: Path) -> list[int]:
    """Bytes of each weight file in load order (by name); [] when the folder cannot be read."""
    try:
        return [f.stat().st_size for f in sorted(folder.glob("*.safetensors"))]
    except OSError:
        return []


def _corrected(load: LoadView, job: Job | None) -> LoadView:
    """What the job knows better than the log: a wrong command line, and who stopped it."""
    if load.root_cause == "exited_no_error" and ": error: " in load.proof_line:
        told = load.proof_line.split(": error: ", 1)[1].strip()
        return replace(load, verdict=f"its command line is wrong: {told}", hint="fix the arguments; k2tui doctor PROFILE checks them before a start")
    if job is not None and job.state is JobState.STOPPED and load.state is State.STOPPED and job.reason:
        return replace(load, verdict=job.reason)
    return load
