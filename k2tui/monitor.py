"""The one place where sources, parsers and jobs meet: it watches everything and hands out frozen snapshots; orders go to jobs.

Threads: NVML and host (their own rooms), one HTTP poller per server, and one loop here for logs, jobs, plan and benchmark rows.
The loop asks cheap questions first (a stat, a counter) and reads only what changed. Knows no screen.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k2tui import benchdb, paths, stages
from k2tui.config import Config
from k2tui.core.bench import BenchRow
from k2tui.core.bench_timeline import request_lines
from k2tui.core.board import Board
from k2tui.core.gpu import GpuView, JobProcess, with_jobs
from k2tui.core.gpu_series import GpuCurves
from k2tui.core.job import Job
from k2tui.core.job_mask import mask_argv
from k2tui.core.load import LoadView, State
from k2tui.core.ports import LogPort
from k2tui.core.server_jobs import is_live, shown_servers
from k2tui.core.snapshot import Notice, ServerView, Snapshot, StageInfo
from k2tui.errors import K2Error, NotReadyError, UsageError
from k2tui.jobs import folder
from k2tui.notify import Notifier
from k2tui.orders import first_values, newest_made, preview_stage, retry_job, submit_stage
from k2tui.plans import open_plan
from k2tui.servers import Follower, Target, target_of
from k2tui.sources.gpuhistory import GpuHistory, read_curves
from k2tui.sources.host import HostSampler
from k2tui.sources.hostprocs import HostProcesses
from k2tui.sources.http import HttpPoller
from k2tui.sources.logindex import LogFile
from k2tui.sources.nvml import NvmlSampler
from k2tui.sources.procs import describe_process, end_processes

if TYPE_CHECKING:
    from k2tui.core.chain_view import ChainView
    from k2tui.core.training import TrainView
    from k2tui.core.tuning import TuneView
    from k2tui.lifecycle import Ending
    from k2tui.sources.chain import ChainReader
    from k2tui.sources.replay import Replay
    from k2tui.sources.training import TrainingReader

_STEP_S = 0.25  # logs
_LOOK_S = 1.0  # jobs, processes, plan, rows
_NOTICES = 50


class _Followed:
    """A follower and its poller, and what was already told about it."""

    def __init__(self, target: Target, on_change: Callable[[], None]) -> None:
        self.follower = Follower(target, learns=True)
        self._on_change = on_change
        self.poller: HttpPoller | None = None
        self.told: State | None = None
        self._poll(target.url)

    def _poll(self, url: str) -> None:
        if url and self.poller is None:
            self.poller = HttpPoller(url, self._on_change)
            self.poller.start()

    def ensure_poller(self, view: LoadView) -> None:
        """A watched log names its own address once it has printed it."""
        if view.url and self.follower.target.job is None:
            self._poll(view.url)

    def close(self) -> None:
        if self.poller is not None:
            self.poller.stop()
        self.follower.close()


class Monitor:
    """Implements `core.ports.Backend` on the real world.

    watch: what to follow beside our own server jobs (`k2tui watch`). replay: a recorded log, played as if it were written now.
    """

    def __init__(
        self, config: Config, *, watch: Sequence[Target] = (), is_demo: bool = False, profile: str = "", replay: Path | None = None
    ) -> None:
        self._config = config
        self._watch = list(watch)
        self._replay: Replay | None = None
        if replay is not None:
            from k2tui.sources.replay import Replay

            self._replay = Replay(replay)
            self._watch.append(Target(key=f"replay {self._replay.path.name}", title=f"replay of {self._replay.path.name}", log=self._replay.path))
        self._is_demo = is_demo
        self._profile = profile or config.default_profile
        self._on_change: Callable[[], None] = lambda: None
        self._nvml = NvmlSampler()
        self._gpu_history = GpuHistory()
        self._host = HostSampler()
        self._host_processes = HostProcesses()
        self._plan = open_plan(config, is_demo=is_demo)
        self._followed: dict[str, _Followed] = {}
        self._wanted: list[str] = []  # keys of what is followed, in order
        self._jobs: tuple[Job, ...] = ()
        self._board = Board()
        self._bench: tuple[BenchRow, ...] = ()
        self._bench_key: object = None
        self._tune: TuneView | None = None
        self._tune_read: tuple[object, TuneView] | None = None  # (stamp, as on the disk)
        self._servers: tuple[ServerView, ...] = ()
        self._notices: list[Notice] = []
        self._alerts: list[tuple[int, str]] = []
        self._is_whole = self._has_read = False
        self._ready: list[str] = []
        self._notifier = Notifier(config.notify, write=self._alert, on_error=lambda text: self._note("warning", text, key="notify"))
        self._errors: dict[str, str] = {}
        self._stages: tuple[StageInfo, ...] = ()
        self._made: tuple[Job | None, Job | None] = (None, None)  # the newest extraction and training that succeeded
        self._chain_file = "asset:demo" if is_demo else ""
        self._chain_reader: ChainReader | None = None
        self._chain: ChainView | None = None
        self._train_reader: TrainingReader | None = None
        self._training: TrainView | None = None
        self._lock = threading.Lock()
        self._halt = threading.Event()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._last_gpu_memory: tuple[float, int] | None = None
        self._gpu_slope: float | None = None

    # ---- the door's watching side

    def start(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._stages = self._stage_infos({})
        if self._replay is not None:
            self._replay.start()
        self._nvml.start(self._gpu_sampled)
        self._host.start(lambda sample: None)
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._halt.set()
        self._wake.set()
        for followed in list(self._followed.values()):
            followed.close()
        if self._replay is not None:
            self._replay.close()
        self._nvml.stop()
        self._gpu_history.close()
        self._host.stop()
        self._host_processes.watch(False)

    def _gpu_sampled(self, view: GpuView) -> None:
        """In the sampler's thread: keep it for the curves of jobs and benchmarks, then draw."""
        self._gpu_history.push(view)
        self._on_change()

    def snapshot(self) -> Snapshot:
        gpu = self._nvml.latest()
        if gpu.taken_s and gpu.processes:
            gpu = with_jobs(gpu, [JobProcess(j.spec.id, j.pid, j.state.is_final) for j in self._jobs])
        host = self._host.latest()
        return Snapshot(
            taken_s=time.time(),
            servers=self._servers,
            gpu=gpu if gpu.taken_s or gpu.error else None,
            host=host if host.taken_s else None,
            host_processes=self._host_processes.latest(),
            jobs=self._jobs,
            board=self._board,
            bench=self._bench,
            bench_error=self._errors.get("bench", ""),
            tune=self._tune,
            chain=self._chain,
            training=self._training,
            stages=self._stages,
            notices=tuple(self._notices),
            is_demo=self._is_demo,
            profile=self._profile,
            profiles=tuple(sorted(self._config.profiles)),
            is_whole=self._is_whole,
            alerts=tuple(self._alerts),
        )

    def log(self, key: str) -> LogPort:
        for target in self._watch:
            if target.key == key and target.log is not None:
                return LogFile(target.log, title=target.title)
        return LogFile(folder.log_path(key), title=key)

    # ---- the loop

    def _alert(self, text: str) -> None:
        """For the user's own terminal; the screen writes it between two frames."""
        self._alerts.append((self._alerts[-1][0] + 1 if self._alerts else 1, text))
        del self._alerts[:-20]

    def _adopt(self) -> None:
        """Jobs whose keeper was killed get a new one."""
        try:
            for job_id in folder.adopt_orphans():
                self._note("information", f"{job_id}: its keeper was gone, a new one watches it")
        except K2Error as err:
            self._note("warning", err.message, key="adopt")

    def _run(self) -> None:
        last_look = 0.0
        self._adopt()
        while not self._halt.is_set():
            now = time.time()
            try:
                looked = time.monotonic() - last_look >= _LOOK_S
                if looked:
                    self._look(now)
                    last_look = time.monotonic()
                changed = self._step(now)
                if not self._is_whole and self._has_read:
                    self._is_whole = all(f.poller is None or f.poller.latest() is not None for f in self._followed.values())
                    changed = changed or self._is_whole
                if looked:
                    self._notifier.look(self.snapshot(), now)
                if looked or changed:
                    self._on_change()
                if not self._has_read:  # screens of their own: they wait until the first one stands, and no longer
                    self._has_read = True
                    self._read_tune()
                    self._read_chain()
                    self._wake.set()
            except Exception as err:  # the watcher must outlive anything that a log or a file can do
                self._note("error", f"watching failed: {type(err).__name__}: {err}", key="loop")
            self._wake.wait(_STEP_S)
            self._wake.clear()

    def _look(self, now: float) -> None:
        try:
            self._jobs = tuple(folder.list_jobs())
            self._errors.pop("jobs", None)
        except K2Error as err:
            self._note("error", err.message, key="jobs")
        made = newest_made(self._jobs, "extract"), newest_made(self._jobs, "train")
        if made != self._made:
            self._made, self._stages = made, self._stage_infos(first_values(*made))
        wanted = self._targets()
        self._wanted = [t.key for t in wanted]
        keys = {t.key for t in wanted}
        for key in [k for k in self._followed if k not in keys]:
            self._followed.pop(key).close()
        for target in wanted:
            followed = self._followed.get(target.key)
            if followed is None:
                try:
                    self._followed[target.key] = _Followed(target, self._wake.set)
                except K2Error as err:
                    self._note("error", err.message, key=target.key)
                    continue
            else:
                followed.follower.target = target
            self._followed[target.key].follower.look(now)
        self._measure_gpu()
        self._ready = [s.key for s in self._servers if s.load.state in (State.READY, State.DEGRADED)]
        if self._is_whole:  # before that nobody knows what is ready, and the plan must not be told otherwise
            try:
                self._plan.sync(self._jobs, self._ready)
            except K2Error as err:
                self._note("warning", err.message, key="plan")
        self._plan.poll()
        self._board = self._plan.linked(self._jobs, self._ready)
        self._read_bench()
        if self._has_read:
            self._read_tune()
            self._read_chain()

    def _targets(self) -> list[Target]:
        """What is followed: the watched first, then our servers. A job of ours that is watched is one server, not two."""
        jobs = {j.spec.id: j for j in self._jobs}
        watched = [target_of(jobs[t.key]) if t.key in jobs else t for t in self._watch]
        keys = {t.key for t in watched}
        return [*watched, *(target_of(j) for j in shown_servers(self._jobs) if j.spec.id not in keys)]

    def _step(self, now: float) -> bool:
        changed = False
        views: list[ServerView] = []
        gpu_util = self._gpu_utilization()
        for key in self._wanted:
            followed = self._followed.get(key)
            if followed is None:
                continue
            follower = followed.follower
            changed = follower.step(now) or changed
            http = followed.poller.latest() if followed.poller is not None else None
            job = follower.target.job
            if job is not None and job.state.is_final:
                http = None
            follower.join(now, http, gpu_util, self._gpu_slope)
            view = follower.view(now, http)
            if follower.error:
                view = replace(view, load=replace(view.load, verdict=follower.error))
            followed.ensure_poller(view.load)
            self._tell(followed, view)
            views.append(view)
        servers = tuple(views)
        if servers != self._servers:
            self._servers = servers
        return changed

    def _tell(self, followed: _Followed, view: ServerView) -> None:
        """Say what changed, once."""
        load, state = view.load, view.load.state
        if state is not followed.told:
            first, followed.told = followed.told is None, state
            severity = {State.READY: "information", State.FAILED: "error", State.STALLED: "error", State.DEGRADED: "warning"}.get(state)
            if severity and not first:
                self._note(severity, f"{view.title}: {load.verdict}")

    def _note(self, severity: str, text: str, key: str = "") -> None:
        if key:
            if self._errors.get(key) == text:
                return
            self._errors[key] = text
        with self._lock:
            self._notices.append(Notice(time.time(), severity, text))
            del self._notices[:-_NOTICES]

    def _gpu_utilization(self) -> float | None:
        values = [g.gpu_utilization for g in self._nvml.latest().gpus if g.gpu_utilization is not None]
        return float(max(values)) if values else None

    def _measure_gpu(self) -> None:
        view = self._nvml.latest()
        used = [g.memory_used_b for g in view.gpus if g.memory_used_b is not None]
        if not used or view.taken_s <= 0:
            self._gpu_slope = None
            return
        total = sum(used)
        if self._last_gpu_memory is not None and view.taken_s > self._last_gpu_memory[0]:
            self._gpu_slope = (total - self._last_gpu_memory[1]) / (view.taken_s - self._last_gpu_memory[0])
        self._last_gpu_memory = (view.taken_s, total)

    def _read_bench(self) -> None:
        path = paths.bench_db()
        key: list[tuple[int, int]] = []
        for name in (path, path.with_name(path.name + "-wal")):
            try:
                facts = name.stat()
            except FileNotFoundError:
                continue
            except OSError:  # asked below: the store says what is wrong
                key.append((-1, -1))
            else:
                key.append((facts.st_mtime_ns, facts.st_size))
        if not key or tuple(key) == self._bench_key:
            return
        try:
            self._bench = tuple(benchdb.rows(200))
            self._bench_key = tuple(key)
            self._errors.pop("bench", None)
        except K2Error as err:
            self._note("error", err.message, key="bench")

    def _read_chain(self) -> None:
        """The pipeline of this folder (a run that goes on names its own), and the newest training."""
        from k2tui.jobs.chain import load_chain
        from k2tui.sources.chain import ChainReader
        from k2tui.sources.training import TrainingReader

        run = next((j for j in self._jobs if j.spec.stage == "pipeline" and not j.state.is_final), None)
        file = str(run.spec.params.get("file") or "") if run is not None else self._chain_file
        try:
            if self._chain_reader is None or file != self._chain_file:
                self._chain_reader, self._chain_file = ChainReader(load_chain(file or None)), file
            self._chain = self._chain_reader.look(self._jobs)
            self._errors.pop("chain", None)
        except K2Error as err:
            self._note("warning", err.message, key="chain")
        if self._train_reader is None:
            self._train_reader = TrainingReader()
        self._training = self._train_reader.look(self._jobs)

    def _read_tune(self) -> None:
        """The newest tuning run; what it does now counts only while its job lives."""
        from k2tui.tune.folder import TuneFolder

        run = TuneFolder.newest()
        if run is None:
            return
        stamp = run.stamp()
        if self._tune_read is None or self._tune_read[0] != stamp:
            self._tune_read = (stamp, run.view())
        seen = self._tune_read[1]
        is_running = seen.now is not None and any(j.spec.id == seen.job_id and is_live(j) for j in self._jobs)
        self._tune = seen if is_running or seen.now is None else replace(seen, now=None)

    def _stage_infos(self, first: Mapping[str, Mapping[str, str]]) -> tuple[StageInfo, ...]:
        """first: by stage and parameter, what a form begins with in place of the stage's own value."""
        found: list[StageInfo] = []
        for name in stages.names():
            stage = stages.get(name)
            fields = tuple((n, first.get(name, {}).get(n, value), hint) for n, value, hint in stage.fields)
            found.append(StageInfo(stage.name, stage.title, stage.key, stage.unavailable(self._config), stage.help, fields, stage.resumes))
        return tuple(found)

    # ---- the door's orders

    def _with_url(self, stage: str, params: Mapping[str, Any]) -> dict[str, Any]:
        """Stages that talk to a server take the newest one that is ready, unless a URL is given. Those that read states get them checked."""
        out = dict(params)
        is_offline = stage == "train" or (stage == "evaluate" and not out.get("prompts") and not out.get("url"))
        if is_offline:
            self._check_inputs(stage, out)
        if stage == "serve":
            out.setdefault("profile", self._profile)
        elif stage == "pipeline":
            out["file"] = out.get("file") or self._chain_file
            self._check_steps(out)
        elif stage in ("bench", "prepare", "extract", "evaluate") and not is_offline and not out.get("url"):
            for server in self._servers:
                if server.http is not None and server.http.model_path and server.load.state in (State.READY, State.DEGRADED):
                    out["url"] = server.http.url
                    break
            else:
                raise NotReadyError("no server is ready", "start one and wait until it says ready")
        return out

    @staticmethod
    def _check_steps(params: Mapping[str, Any]) -> None:
        """The steps that a pipeline is to run up to, or from, are steps of it. Raises UsageError naming the parameter and the nearest."""
        from k2tui.jobs.chain import load_chain

        chain = load_chain(params.get("file") or None)
        for name in ("to", "start"):
            if params.get(name):
                try:
                    chain.step(str(params[name]))
                except UsageError as err:
                    raise UsageError(f"{name}: {err.message}", err.hint) from None

    @staticmethod
    def _check_inputs(stage: str, params: Mapping[str, Any]) -> None:
        """The folders that it would read are there. Raises NotReadyError saying which is missing and what makes it."""
        made_by = {"states": "x extracts states; or give the folder they are in", "draft": "t trains a draft; or give the folder it is in"}
        for name in ("states", "draft") if stage == "evaluate" else ("states",):
            given = str(params.get(name) or "")
            if not given:
                raise NotReadyError(f"{name}: no folder is given", made_by[name])
            if not Path(given).exists():
                raise NotReadyError(f"{name}: there is no {given} in {Path.cwd()}", made_by[name])

    def preview(self, stage: str, params: Mapping[str, Any]) -> Sequence[str]:
        return preview_stage(self._config, stage, self._with_url(stage, params))

    def submit(self, stage: str, params: Mapping[str, Any]) -> str:
        job_id = submit_stage(self._config, stage, self._with_url(stage, params))
        self._hurry()
        return job_id

    def stop_job(self, job_id: str) -> None:
        from k2tui.lifecycle import Ending, holds_gpus

        if holds_gpus(folder.get(job_id).spec):
            ending = Ending(job_id, self._nvml.latest)
            ending.order()
            threading.Thread(target=self._see_out, args=(ending,), name="ending", daemon=True).start()
        else:
            folder.stop(job_id)
        self._hurry()

    def _see_out(self, ending: Ending) -> None:
        """A server is on its way out: say what is left of it, if anything is."""
        try:
            end = ending.finish(60.0)
        except (K2Error, OSError) as err:
            self._note("warning", f"{ending.job.spec.id}: {err}")
            return
        if not end.is_clean:
            self._note("error", f"{ending.job.spec.title}: {end.words}")
        self._hurry()

    def retry_job(self, job_id: str) -> str:
        new_id = retry_job(job_id)
        self._hurry()
        return new_id

    def delete_job(self, job_id: str) -> None:
        folder.delete(job_id)
        self._hurry()

    def set_task(self, task_id: str, **changes: str) -> None:
        self._plan.set_task(task_id, **changes)
        self._board = self._plan.linked(self._jobs, self._ready)
        self._hurry()

    def add_task(self, content: str, priority: str = "medium") -> None:
        self._plan.add_task(content, priority=priority)
        self._hurry()

    def move_task(self, task_id: str, other_id: str) -> None:
        self._plan.take_place(task_id, other_id)
        self._board = self._plan.linked(self._jobs, self._ready)
        self._hurry()

    def _hurry(self) -> None:
        self._wake.set()

    def end_processes(self, targets: Sequence[tuple[int, float]], how: str = "end") -> str:
        results = end_processes(targets, how=how)
        return "; ".join(f"pid {result.pid}: {result.outcome}" for result in results)

    def describe_process(self, pid: int, started_s: float) -> Sequence[str]:
        return describe_process(pid, started_s)

    def watch_gpu(self, index: int | None) -> None:
        self._nvml.watch_pcie(*(() if index is None else (index,)))

    def watch_host_processes(self, on: bool) -> None:
        self._host_processes.watch(on)

    def gpu_curves(self, start_s: float, end_s: float, steps: int = 0) -> GpuCurves:
        return read_curves(start_s, end_s, steps=steps, folder=self._gpu_history.folder)

    def label_run(self, run_id: str, label: str | None, tag: str | None) -> None:
        with benchdb.BenchDb() as db:
            db.set_label(run_id, label, tag)

    def set_baseline(self, run_id: str, on: bool) -> Sequence[str]:
        with benchdb.BenchDb() as db:
            return db.set_baseline(run_id, on)

    def delete_run(self, run_id: str) -> None:
        with benchdb.BenchDb() as db:
            db.delete(run_id)

    def run_requests(self, run_id: str, width: int, ascii_only: bool) -> Sequence[str]:
        with benchdb.BenchDb(readonly=True) as db:
            return request_lines(db.records(db.resolve(run_id)), width, ascii_only=ascii_only)

    def report(self, server_key: str) -> str:
        for server in self._servers:
            if server.key == server_key:
                return server_report(server)
        raise K2Error(f"no server {server_key!r} on the screen")


def server_report(server: ServerView) -> str:
    """What an issue tracker needs about one server: versions, argv without secrets, the verdict, the proving lines."""
    from k2tui import __version__
    from k2tui.core.job_mask import mask_env

    load, job = server.load, server.job
    version = load.version or (server.http.version if server.http is not None else None) or ""
    known = (("engine", f"{load.engine} {version}".strip()), ("model", load.model))
    lines = [
        f"state: {load.state} in phase {load.phase}",
        f"cause: {load.root_cause} ({load.root_cause_group})" if load.root_cause else "",
        f"verdict: {load.verdict}",
        "; ".join((*(f"{name}: {value}" for name, value in known if value), f"tp: {load.tp_size or 1}")),
        f"k2tui {__version__}, Python {sys.version.split()[0]}, {sys.platform}",
    ]
    lines = [line for line in lines if line]
    if load.target is not None:
        draft = f", draft {load.draft.done}/{load.draft.total}" if load.draft is not None else ""
        lines.append(f"shards: {load.target.done}/{load.target.total}{draft}")
    if job is not None:
        lines.append("argv: " + " ".join(mask_argv(job.spec.argv)))
        env = mask_env(job.spec.env)
        if env:
            lines.append("env: " + " ".join(f"{k}={v}" for k, v in sorted(env.items())))
        lines.append(f"job: {job.spec.id} {job.state} {job.reason}")
    if load.proof_line:
        lines += ["", f"proof (line {load.proof_line_no}):", "```", load.proof_line, "```"]
    if load.hint:
        lines += ["", f"suggested: {load.hint}"]
    return "\n".join(lines) + "\n"

