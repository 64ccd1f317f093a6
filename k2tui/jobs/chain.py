"""Runs a chain: each step a job, each gate on its real result, servers kept only as long as a step needs them.

The chain's own folder (state/chains/NAME) holds one record a step; a killed runner leaves the steps' jobs running, and the
next run takes them over instead of starting them twice. Knows no screen.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, cast

from k2tui import doctor, paths, stages
from k2tui.config import Config
from k2tui.core.chain import (
    NEVER_RAN,
    NOT_ASKED,
    Chain,
    Decision,
    Record,
    Step,
    check_gate,
    decide,
    fill,
    fingerprint,
    gate_unmet,
    holes_of,
    kept_parts,
    parse_chain,
    parts_of,
    record_of,
    server_users,
    without,
)
from k2tui.core.job import Job, JobSpec, JobState
from k2tui.core.job_mask import mask_argv
from k2tui.core.job_text import detail
from k2tui.errors import K2Error, UsageError
from k2tui.files import write_json, write_whole
from k2tui.jobs import conditions, folder
from k2tui.jobs.state import as_object, read_json
from k2tui.orders import settled, start_server
from k2tui.parsing import parse_json
from k2tui.regular import open_regular, read_regular

__all__ = ["ChainRun", "default_text", "load_chain", "open_run"]

WHOLE_B = 32 << 20  # files up to this size are hashed whole
PRINTED_B = 1 << 20  # a command's printed result is at most this long
READY_TIMEOUT_S = 7200.0
LEFT_S = 5.0  # how often the time left is written
SAY_S = 5.0  # a line of progress this often in a step's first five minutes, then every minute
_FREE = re.compile(r"free(?::([0-9]{1,5}))?")  # of a parameter port


def default_text() -> str:
    """The TOML of the pipeline that k2tui ships, for `k2tui pipeline init`."""
    return (Path(__file__).parent / "pipeline.toml").read_text(encoding="utf-8")


def load_chain(path: Path | str | None = None) -> Chain:
    """The chain of a file ("asset:demo": the demo's); None: ./pipeline.toml, else the shipped one. Raises UsageError naming file,
    line and key."""
    if path is None:
        here = Path.cwd() / "pipeline.toml"
        if not here.exists():
            return parse_chain(default_text(), "the shipped pipeline")
        path = here
    name = str(path)
    is_asset = name.startswith("asset:")
    where = (
        paths.assets_dir() / name.removeprefix("asset:") / "pipeline.toml"
        if is_asset
        else Path(path).expanduser()
    )
    try:
        text = read_regular(where).decode()
    except UnicodeDecodeError as err:
        raise UsageError(f"{where}: not UTF-8 text (byte {err.start})")
    except OSError as err:
        raise UsageError(f"{where}: {err.strerror or err}", "k2tui pipeline init writes one")
    return parse_chain(text, name if is_asset else str(where))


def signature(path: str) -> str:
    """What a file or folder is like now: content for files up to 32 MiB, else size and time; a folder is its sorted listing."""
    where = Path(path).expanduser()
    try:
        if where.is_dir():
            digest = hashlib.sha256()
            for root, dirs, names in os.walk(where):
                dirs.sort()
                for name in sorted(names):
                    facts = os.stat(os.path.join(root, name))
                    digest.update(
                        f"{os.path.relpath(root, where)}/{name} {facts.st_size} {facts.st_mtime_ns}\n".encode()
                    )
            return "folder:" + digest.hexdigest()[:32]
        facts = where.stat()
        if not stat.S_ISREG(facts.st_mode):
            return "none: no regular file"  # a pipe or a device may never end
        if facts.st_size > WHOLE_B:
            return f"file:{facts.st_size}:{facts.st_mtime_ns}"
        return "sha256:" + hashlib.sha256(read_regular(where)).hexdigest()[:32]
    except OSError as err:
        return f"none: {err.strerror}"


@dataclass(frozen=True)
class Planned:
    """A step as a dry run shows it. argv has secrets masked; what only a result can tell stays as {hole}."""

    name: str
    action: str
    why: str
    argv: tuple[str, ...]
    gate: tuple[str, ...]
    needs: tuple[str, ...]
    error: str = ""


class GateError(K2Error):
    """A step ended, but what the next one needs does not hold."""


def open_run(
    config: Config,
    chain: Chain,
    *,
    tell: Callable[[str], None] = lambda text: None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
) -> ChainRun:
    """A chain ready to be planned or run. settings: {step: {param: value}} on top of the file's. Raises UsageError."""
    for name in settings or {}:
        chain.step(name)
    changed = tuple(replace(s, params={**s.params, **(settings or {}).get(s.name, {})}) for s in chain.steps)
    chain = replace(chain, steps=changed)
    there = set(stages.names())
    missing = [s for s in chain.steps if s.stage and s.stage not in there]
    for step in missing:
        if not step.optional:
            with _named(chain, step):
                stages.get(step.stage)  # raises, naming the known ones
        tell(f"{step.name}: left out, there is no stage {step.stage} here yet")
    if missing:
        chain = without(chain, {s.name for s in missing})
    return ChainRun(config, chain, tell)


@contextmanager
def _named(chain: Chain, step: Step) -> Generator[None]:
    """What is wrong with a step is told with the pipeline's file and the step's name."""
    try:
        yield
    except UsageError as err:
        raise UsageError(f"{chain.path or chain.name}: step {step.name!r}: {err.message}", err.hint) from None


class ChainRun:
    """One chain with its records. `plan` changes nothing; `run` does the work."""

    def __init__(self, config: Config, chain: Chain, tell: Callable[[str], None]) -> None:
        self.config = config
        self.chain = chain
        self.tell = tell
        self.root = paths.state_dir() / "chains" / chain.name
        self.records = {s.name: r for s in chain.steps if (r := self._read_record(s.name)) is not None}
        self.servers = {s.name for s in chain.steps if self._kind(s) == "server"}
        self.prints: dict[str, str] = {}
        self.parts: dict[str, dict[str, str]] = {}
        self._outs: dict[str, str] = {}  # {STEP.out} and {STEP.id} of all steps
        self._made: list[str] = []  # the steps' own folders
        self._results: dict[str, tuple[Record, dict[str, Any]]] = {}  # what a record fills holes with
        models: dict[str, str] = {}
        for step in chain.steps:
            needed = {n: self.prints[n] for n in step.needs}
            with _named(chain, step):
                facts = self._facts(step, models)
            parts = parts_of(step, chain.defaults, facts, needed)
            self.parts[step.name] = kept_parts(parts)
            self.prints[step.name] = fingerprint(parts)
            self._made.append(str(self.out_of(step.name)))
            self._outs[f"{step.name}.out"] = self._made[-1]
            self._outs[f"{step.name}.id"] = self.prints[step.name][:6]
        self._live: dict[str, str] = {}  # server step -> job id, started (or found) by this run
        self._found: set[str] = set()  # servers that ran before: not stopped by this run
        self._urls: dict[str, str] = {}
        self._counts: dict[str, int] = {}  # {"ran": n, "skipped": n} of this object's run
        self._tail_s: float | None = (
            None  # seconds that the steps after the present one took before; None = not all known
        )
        self._report_left: Callable[[float | None], None] = lambda left_s: None

    # ---- facts

    def _kind(self, step: Step) -> str:
        if step.kind or not step.stage:
            return step.kind or "task"
        return "server" if step.stage == "serve" else "task"

    def _facts(self, step: Step, models: dict[str, str]) -> dict[str, Any]:
        """What decides a step's result beside its parameters. models: signatures that are known already, added to."""
        facts: dict[str, Any] = {}
        if step.stage:
            params = {**self.chain.defaults, **step.params}
            try:
                profile = self.config.get_profile(str(params.get("profile") or ""))
            except UsageError:
                if params.get("profile"):
                    raise
                profile = None
            if profile is not None and is_dataclass(profile):
                facts["profile"] = {
                    f.name: getattr(profile, f.name)
                    for f in fields(profile)
                    if f.name not in ("description", "host", "port")  # where it listens decides nothing
                }
                if profile.model:
                    if profile.model not in models:
                        models[profile.model] = signature(self._asset(profile.model))
                    facts["model files"] = models[profile.model]
        known = self._known(step, outs_only=True)
        for path in step.inputs:
            filled = str(fill(path, known, strict=False))
            if not filled.startswith("{"):
                where = os.path.expanduser(filled)
                if os.path.exists(where) and not os.path.isfile(where) and not os.path.isdir(where):
                    raise UsageError(
                        f"its input {filled} is no regular file (a pipe or a device)",
                        "give a file or a folder",
                    )
                facts[f"input {path}"] = signature(filled)
        return facts

    @staticmethod
    def _asset(model: str) -> str:
        return str(paths.assets_dir() / model.removeprefix("asset:")) if model.startswith("asset:") else model

    def out_of(self, name: str) -> Path:
        """The step's own folder: another one for each fingerprint, so that a change never mixes with what was."""
        return self.root / f"{name}-{self.prints[name][:10]}"

    def _known(self, step: Step, *, outs_only: bool = False) -> dict[str, Any]:
        known: dict[str, Any] = {
            "run": str(self.root),
            "python": sys.executable,
            "assets": str(paths.assets_dir()),
            **self._outs,
        }
        if not outs_only:
            for name, record in self.records.items():
                if record.fingerprint == self.prints[name]:
                    if name not in self._results or self._results[name][0] is not record:
                        self._results[name] = (record, holes_of(record.result, f"{name}.result"))
                    known.update(self._results[name][1])
            known.update({f"{name}.url": url for name, url in self._urls.items()})
        if step.name in self.prints:
            known["out"] = str(self.out_of(step.name))
            known["id"] = self.prints[step.name][:6]
        return known

    # ---- records

    def _read_record(self, name: str) -> Record | None:
        return record_of(read_json(self.root / f"{name}.json"))

    def _outputs_changed(self, step: Step, record: Record) -> str:
        for path, was in record.outputs.items():
            now = signature(path)
            if now != was:
                return f"{path} is gone" if now.startswith("none") else f"{path} was changed"
        return ""

    # ---- planning

    def decisions(
        self, *, start: str = "", to: str = "", only: Sequence[str] = (), force: bool = False
    ) -> list[Decision]:
        return decide(
            self.chain,
            self.prints,
            self.records,
            servers=self.servers,
            outputs=self._outputs_changed,
            start=start,
            to=to,
            only=only,
            force=force,
            parts=self.parts,
        )

    def plan(
        self, *, start: str = "", to: str = "", only: Sequence[str] = (), force: bool = False
    ) -> list[Planned]:
        """What `run` would do, in order. Nothing is started or written."""
        out: list[Planned] = []
        for d in self.decisions(start=start, to=to, only=only, force=force):
            argv: tuple[str, ...] = ()
            error = ""
            if d.action in ("run", "serve"):
                try:
                    argv = mask_argv(self._spec(d.step, strict=False).argv)
                    error = self._missing_input(d.step)
                except K2Error as err:
                    error = err.message
            out.append(Planned(d.step.name, d.action, d.why, argv, d.step.gate, d.step.needs, error))
        return out

    def _missing_input(self, step: Step) -> str:
        """The first input that is not there and that no step before this one makes; "" when all are."""
        known = self._known(step, outs_only=True)
        for path in step.inputs:
            where = str(fill(path, known, strict=False))
            if not os.path.exists(os.path.expanduser(where)) and not any(
                where.startswith(m) for m in self._made
            ):
                return f"its input {where} is not there (looked for in {os.getcwd()})"
        return ""

    def _spec(
        self, step: Step, *, strict: bool = True, port: int | None = None, starts: bool = False
    ) -> JobSpec:
        """port: what a parameter port = "free" becomes; None: the next free one from the profile's on ("free:N": from N on). starts: it is started now, so
        GPUs that the profile leaves to the start are chosen."""
        known = self._known(step)
        if not step.stage:
            argv = cast("list[str]", fill(list(step.argv), known, strict=strict))
            params = {"chain": self.chain.name, "step": step.name, "fingerprint": self.prints[step.name]}
            return JobSpec(
                id="",
                stage=step.name,
                title=step.title or f"{self.chain.name}: {step.name}",
                argv=tuple(paths.safely([str(a) for a in argv])),
                kind=step.kind or "task",
                env={"K2TUI_STEP_OUT": str(self.out_of(step.name))},
                timeout_s=step.timeout_s,
                params=params,
            )
        stage = stages.get(step.stage)
        reason = stage.unavailable(self.config)
        if reason:
            raise K2Error(f"{step.name}: {reason}")
        params = cast("dict[str, Any]", fill({**self.chain.defaults, **step.params}, known, strict=strict))
        if free := _FREE.fullmatch(str(params.get("port"))):
            profile = self.config.get_profile(str(params.get("profile") or ""))
            params["port"] = port or doctor.free_port(profile.host, int(free[1] or profile.port))
        if starts:
            params = settled(self.config, stage.name, params)
        plan = stage.plan(self.config, params)
        own = {"chain": self.chain.name, "step": step.name, "fingerprint": self.prints[step.name]}
        return JobSpec(
            id="",
            stage=stage.name,
            title=step.title or plan.title,
            argv=plan.argv,
            kind=plan.kind,
            env={"K2TUI_STEP_OUT": str(self.out_of(step.name)), **plan.env},
            locks=plan.locks,
            timeout_s=step.timeout_s if step.timeout_s is not None else plan.timeout_s,
            grace_s=plan.grace_s,
            params={**(plan.params or {}), **own},
        )

    # ---- running

    def run(
        self,
        *,
        start: str = "",
        to: str = "",
        only: Sequence[str] = (),
        force: bool = False,
        keep_servers: bool = False,
        progress: Callable[[int, int, str, float | None], None] = lambda done, total, note, left_s: None,
    ) -> dict[str, Any]:
        """Run what has to run; returns {step: {action, why, job_id, took_s}}. Raises K2Error at the first step that fails.

        The report of what is known then (report.json, report.md in the chain's folder) is written in both cases. Servers that this run started are stopped as soon as no step needs them, also after a failure (but for keep_servers).
        """
        paths.ensure_dir(self.root)
        guard = os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise K2Error(
                    f"pipeline {self.chain.name} is running already",
                    "k2tui jobs list --stage pipeline shows it",
                )
            return self._run(
                self.decisions(start=start, to=to, only=only, force=force), keep_servers, progress
            )
        finally:
            os.close(guard)

    def _run(
        self,
        todo: Sequence[Decision],
        keep_servers: bool,
        progress: Callable[[int, int, str, float | None], None],
    ) -> dict[str, Any]:
        summary: dict[str, Any] = {}
        beyond = {d.step.name for d in todo if d.why == NOT_ASKED}
        todo = [d for d in todo if not self._is_beyond(d.step, beyond)]  # "3/3 steps" up to the third one
        done = 0
        self._counts = {"ran": 0, "skipped": 0}
        try:
            for d in todo:
                self._tail_s = self._took_before(
                    [x.step for x in todo[done + 1 :] if x.action in ("run", "serve")]
                )
                now, name_now = done, d.step.name

                def tell_left(left_s: float | None, now: int = now, name_now: str = name_now) -> None:
                    progress(now, len(todo), name_now, left_s)

                self._report_left = tell_left
                tell_left(None)
                if d.action == "run":
                    for name in d.step.needs:
                        if name in self.servers:
                            self._serve(name)
                    for name in self.servers:
                        if d.step in server_users(self.chain, name, self.servers):
                            self._serve(name)
                    job = self._run_step(d.step, d.why)
                    self._counts["ran"] += 1
                    summary[d.step.name] = {
                        "action": "run",
                        "why": d.why,
                        "job_id": job.spec.id,
                        "took_s": job.took_s,
                    }
                elif d.action == "skip":
                    self._counts["skipped"] += 1
                    self.tell(f"{d.step.name}: skipped ({d.why})")
                    summary[d.step.name] = {"action": "skip", "why": d.why}
                done += 1
                if not keep_servers:
                    self._stop_servers({x.step.name for x in todo[done:] if x.action == "run"})
            progress(done, len(todo), "", None)
            return {"steps": summary, **{f"{n}_job": j for n, j in self._live.items() if keep_servers}}
        finally:
            try:
                if not keep_servers:
                    self._stop_servers(set())
            finally:
                self._write_report()

    def _is_beyond(self, step: Step, beyond: Set[str]) -> bool:
        """Whether a step was not asked for; a server, when none of the steps that were needs it."""
        if step.name not in self.servers:
            return step.name in beyond
        users = {u.name for u in server_users(self.chain, step.name, self.servers)}
        return bool(users) and users <= beyond

    def report(self) -> dict[str, Any]:
        """The figures of all steps so far (`core.chain_report`)."""
        from k2tui.core import chain_report

        made = chain_report.build(self.chain, self.prints, self.records, time.time())
        return {**made, "run": dict(self._counts)} if self._counts else made

    def _took_before(self, steps: Sequence[Step]) -> float | None:
        """Seconds that these steps took when they ran last, whatever their settings were; None unless all are known."""
        took = [record.took_s if (record := self.records.get(s.name)) is not None else None for s in steps]
        known = [t for t in took if t is not None]
        return sum(known) if len(known) == len(took) else None

    def _write_report(self) -> None:
        from k2tui.core import chain_report

        report = self.report()
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(report["made_s"]))
        try:
            write_json(self.root / "report.json", report)
            write_whole(self.root / "report.md", chain_report.markdown(report, made), mode=0o600)
        except OSError as err:
            self.tell(f"the report could not be written: {err.strerror or err}")

    def _stop_servers(self, still_to_run: set[str]) -> None:
        """Stop what no step needs any more, to its end: the next step may want the same GPUs."""
        stops: dict[str, str] = {}
        for name, job_id in list(self._live.items()):
            if not any(u.name in still_to_run for u in server_users(self.chain, name, self.servers)):
                del self._live[name]
                self._urls.pop(name, None)
                if name in self._found:
                    self._found.discard(name)
                    continue
                self.tell(f"{name}: stopped, no step needs it any more")
                stops[job_id] = name
        self._see_out(stops)

    def _see_out(self, jobs: Mapping[str, str]) -> None:
        """Stop these jobs (id -> step) until nothing is left of them; what is still there is told."""
        if not jobs:
            return
        from k2tui.lifecycle import stop_servers

        for end in stop_servers(jobs, by=f"pipeline {self.chain.name}", timeout_s=60):
            if not end.is_clean:
                self.tell(f"{jobs[end.job.spec.id]}: warning: {end.words}")

    def _judged(self, step: Step, job_id: str) -> None:
        """Note that a job's result was looked at: a later run does not take it for one that a killed run left behind."""
        write_json(self.root / f"{step.name}.judged.json", {"job_id": job_id})

    def _left_behind(self, step: Step) -> Job | None:
        """The job of this very step that a killed run left: still going, or ended well and never looked at."""
        seen = str(as_object(read_json(self.root / f"{step.name}.judged.json")).get("job_id", ""))
        own = {"chain": self.chain.name, "step": step.name, "fingerprint": self.prints[step.name]}
        for job in folder.list_jobs():  # newest first
            if job.spec.id <= seen:
                break
            if all(job.spec.params.get(k) == v for k, v in own.items()):
                return job if job.state is JobState.SUCCEEDED or not job.state.is_final else None
        return None

    def _serve(self, name: str) -> None:
        """Make sure that a server step runs and is ready."""
        if name in self._live:
            job = folder.get(self._live[name])
            if not job.state.is_final:
                return
            raise GateError(
                f"{name}: the server ended while it was needed: {job.reason}",
                f"k2tui jobs logs {job.spec.id}",
            )
        step = self.chain.step(name)
        for other in step.needs:
            if other in self.servers:
                self._serve(other)
        spec = self._spec(step)
        url = str(spec.params.get("url", ""))
        mine = self._left_behind(step)
        mine = mine if mine is not None and not mine.state.is_final else None
        same = mine or next((j for j in folder.list_jobs() if self._is_same(step, spec, j)), None)
        if same is not None:
            job_id = same.spec.id
            url = str(same.spec.params.get("url", url))
            if mine is None:
                self._found.add(name)
            self.tell(f"{name}: uses {job_id}, which is running already")
        else:
            if step.stage == "serve":
                spec = self._spec(step, port=spec.params.get("port"), starts=True)
                job_id = start_server(self.config, spec)
            else:
                job_id = folder.submit(spec)
            self.tell(f"{name}: started as {job_id}")
        self._live[name] = job_id
        self._urls[name] = url
        self._wait_ready(step, job_id, url)

    def _is_same(self, step: Step, spec: JobSpec, job: Job) -> bool:
        """True for a running server with this step's command (on any port, where the step leaves that free)."""
        if job.state is not JobState.RUNNING or job.spec.stage != spec.stage:
            return False
        port = job.spec.params.get("port")
        wanted = {**self.chain.defaults, **step.params}.get("port")
        if _FREE.fullmatch(str(wanted)) and isinstance(port, int):
            spec = self._spec(step, port=port)
        return job.spec.argv == mask_argv(spec.argv)

    def _wait_ready(self, step: Step, job_id: str, url: str) -> None:
        gates = step.gate or ("ready",)
        begun = time.monotonic()
        limit = step.timeout_s or READY_TIMEOUT_S
        told = ""
        while True:
            job = folder.get(job_id)
            if job.state.is_final:
                raise GateError(
                    f"{step.name}: the server ended before it was ready: {job.reason}",
                    f"k2tui jobs logs {job_id}",
                )
            why = "it has not started" if job.state is not JobState.RUNNING else ""
            for gate in gates if not why else ():
                check = (
                    f"url:{url}/health_generate" if gate == "ready" else str(fill(gate, self._known(step)))
                )
                why = (
                    conditions.unmet(check)
                    if re.match(r"(file|url):", check)
                    else gate_unmet(check, job.result or {})
                )
                if why:
                    break
            if not why:
                self.tell(f"{step.name}: ready after {time.monotonic() - begun:.1f} s")
                self._keep_server(step, job)
                return
            if job.waiting_for and job.waiting_for != told:
                told = job.waiting_for
                self.tell(f"{step.name}: waits for {told}")
            if time.monotonic() - begun > limit:
                raise GateError(
                    f"{step.name}: not ready after {limit:g} s: {why}", f"k2tui jobs logs {job_id}"
                )
            time.sleep(0.25)

    def _keep_server(self, step: Step, job: Job) -> None:
        """A server's record: what its log says of its start. Nothing is skipped because of it."""
        result: dict[str, Any] = {}
        if step.stage == "serve":
            from k2tui.servers import Follower, target_of

            follower = Follower(target_of(job))
            try:
                follower.step(time.time())
                load = follower.view(time.time(), None).load
            finally:
                follower.close()
            result = {
                "ready_s": load.ready_s,
                "engine": load.engine,
                "version": load.version,
                "model": load.model,
            }
            if load.target is not None:
                result |= {"shards_done": load.target.done, "shards_total": load.target.total}
        took_s = None if job.started_s is None else time.time() - job.started_s
        result.setdefault("ready_s", took_s)
        self._write_record(
            Record(
                self.prints[step.name],
                job.spec.id,
                result,
                {},
                time.time(),
                result["ready_s"],
                self.parts[step.name],
            ),
            step.name,
        )

    def _run_step(self, step: Step, why: str) -> Job:
        for attempt in range(step.retries + 1):
            taken = self._left_behind(step)
            if taken is not None:
                job_id = taken.spec.id
                how = "goes on as" if not taken.state.is_final else "takes"
                self.tell(f"{step.name}: {how} {job_id}, which an earlier run started")
            else:
                paths.ensure_dir(self.out_of(step.name).parent)
                spec = self._spec(step, starts=True)
                if not step.stage:
                    paths.ensure_dir(self.out_of(step.name))
                job_id = folder.submit(spec)
                self.tell(f"{step.name}: starts as {job_id}" + (f" ({why})" if why != NEVER_RAN else ""))
            job = self._watch(step, job_id)
            problem = self._problem(step, job)
            if not problem:
                self._keep(step, job)
            self._judged(step, job_id)
            if not problem:
                self.tell(
                    f"{step.name}: done" + (f" in {job.took_s:.1f} s" if job.took_s is not None else "")
                )
                return job
            if job.state is JobState.STOPPED or attempt == step.retries:
                raise GateError(f"{step.name}: {problem}", f"k2tui jobs logs {job_id}")
            self.tell(f"{step.name}: {problem}; again ({attempt + 1} of {step.retries})")
        raise AssertionError("unreachable")

    def _watch(self, step: Step, job_id: str) -> Job:
        try:
            return self._watch_on(step, job_id)
        except BaseException:
            # this run is being stopped, or the step's server has gone: the step goes too
            self._see_out({job_id: step.name})
            raise

    def _watch_on(self, step: Step, job_id: str) -> Job:
        told = ""
        began = said = time.monotonic()
        left_said = 0.0
        while True:
            job = folder.wait(job_id, 1.0)
            if job.state.is_final:
                return job
            now = time.monotonic()
            if now - left_said >= LEFT_S:
                left_said = now
                self._report_left(self._left_s(step, job))
            if now - said >= (SAY_S if now - began < 300 else 12 * SAY_S) and job.progress is not None:
                said = now
                self.tell(f"{step.name}: {detail(job, time.time())}")
            if job.state is JobState.ORPHANED:
                folder.adopt(job_id)
            if job.waiting_for and job.waiting_for != told:
                told = job.waiting_for
                self.tell(f"{step.name}: waits for {told}")
            for name, server in self._live.items():
                if name in step.needs and (gone := folder.get(server)).state.is_final:
                    raise GateError(
                        f"{step.name}: its server {name} ended: {gone.reason}", f"k2tui jobs logs {server}"
                    )

    def _left_s(self, step: Step, job: Job) -> float | None:
        """The present step's own estimate, else what it took before less what it has used, plus the steps after it; None = not known."""
        own = job.progress.eta_s if job.progress is not None else None
        if own is None and (before := self._took_before([step])) is not None and job.started_s is not None:
            own = before - (time.time() - job.started_s)
            own = own if own > 0 else None  # it takes longer than it did: nobody knows how long
        return None if own is None or self._tail_s is None else own + self._tail_s

    def _problem(self, step: Step, job: Job) -> str:
        if job.state is not JobState.SUCCEEDED:
            return f"{job.state}: {job.reason}"
        result = self._result_of(step, job)
        known = {**self._known(step), **holes_of(result, f"{step.name}.result")}
        for gate in step.gate:
            text = str(fill(gate, known))
            check_gate(text, step.name)
            why = conditions.unmet(text) if re.match(r"(file|url):", text) else gate_unmet(text, result)
            if why:
                return f"gate {gate!r} does not hold: {why}"
        for path in step.outputs:
            where = str(fill(path, known))
            if not os.path.exists(where):
                return f"its output {where} is not there"
        return ""

    def _keep(self, step: Step, job: Job) -> None:
        result = self._result_of(step, job)
        known = {**self._known(step), **holes_of(result, f"{step.name}.result")}
        record = Record(
            fingerprint=self.prints[step.name],
            job_id=job.spec.id,
            result=result,
            outputs={where: signature(where) for where in (str(fill(p, known)) for p in step.outputs)},
            ended_s=time.time(),
            took_s=job.took_s,
            parts=self.parts[step.name],
        )
        self._write_record(record, step.name)

    def _write_record(self, record: Record, name: str) -> None:
        write_json(self.root / f"{name}.json", asdict(record))
        self.records[name] = record

    @staticmethod
    def _result_of(step: Step, job: Job) -> dict[str, Any]:
        """What the step reported; for a command that reports nothing, the one JSON object that it printed."""
        if job.result or step.stage or job.state is not JobState.SUCCEEDED:
            return dict(job.result or {})
        try:
            with open_regular(folder.log_path(job.spec.id)) as fh:
                text = fh.read(PRINTED_B + 1)
            return as_object(parse_json(text)) if len(text) <= PRINTED_B else {}
        except (OSError, ValueError):
            return {}


def parse_settings(pairs: Sequence[str]) -> dict[str, dict[str, Any]]:
    """["bench.num_prompts=4"] -> {"bench": {"num_prompts": 4}}; values are JSON where they can be read so, else text."""
    out: dict[str, dict[str, Any]] = {}
    for pair in pairs:
        m = re.fullmatch(r"([a-z][a-z0-9_-]*)\.([A-Za-z_]\w*)=(.*)", pair, re.DOTALL)
        if not m:
            raise UsageError(
                f"--set {pair!r}: write STEP.PARAM=VALUE", "for example --set bench.num_prompts=8"
            )
        value: Any = m[3]
        try:
            value = parse_json(m[3])
        except ValueError:
            pass
        out.setdefault(m[1], {})[m[2]] = value
    return out
