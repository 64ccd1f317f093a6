"""`python -m k2tui.tune FOLDER`: run (or go on with) a tuning run; `--space FILE`: a new one. Started as a job by `k2tui tune run` or the dashboard."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from k2tui import config, doctor
from k2tui.benchdb import BenchDb
from k2tui.core.bench import BenchRow
from k2tui.core.job import JobState
from k2tui.core.job_mask import mask_argv, mask_text
from k2tui.core.load import State
from k2tui.core.loads import FLAG
from k2tui.core.server_jobs import is_live
from k2tui.core.snapshot import ServerView
from k2tui.core.tuning import Setting, Space, Trial, TuneStep, apply, key_of, label_of, words
from k2tui.core.tuning_plan import planned, time_left, trials_left
from k2tui.core.tuning_text import gain_text, short
from k2tui.core.tuning_verdict import (
    drift,
    is_confirmed,
    is_hopeless,
    longest_pass_s,
    no_baseline,
    since_baseline,
    to_confirm,
    wants_more,
    winner,
)
from k2tui.doctor_gpu import settle_gpus
from k2tui.errors import K2Error
from k2tui.jobs import folder as jobs
from k2tui.jobs.loads import Alone
from k2tui.jobs.report import report_progress, report_result
from k2tui.lifecycle import DECIDED, Stopped, follow_start, free_memory, stop_servers
from k2tui.orders import submit_stage
from k2tui.plain import clean, duration
from k2tui.tune.check import no_change, own_port
from k2tui.tune.folder import TuneFolder
from k2tui.tune.text import table_text


def last_words(job_id: str) -> str:
    """Why a benchmark failed: the load generator's own line at the end of its log, with the error's class and the server's words."""
    try:
        with jobs.log_path(job_id).open("rb") as fh:
            fh.seek(max(0, fh.seek(0, os.SEEK_END) - 65536))
            lines = fh.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    said = [line.removeprefix("k2tui bench: ") for line in lines if line.startswith("k2tui bench: ")]
    return clean(said[-1])[:400] if said else ""


WATCH_S = 0.5  # how often a running benchmark is looked at
LOG_WIDTH = 140  # of the table at the end of the job's log


class Halt(Exception):
    """The user (or the keeper) asked for the end."""


def _values(rows: list[BenchRow], metric: str) -> tuple[float, ...]:
    return tuple(float(v) for r in rows if (v := getattr(r, metric)) is not None and not r.errors)


def _with_rows(trial: Trial, rows: list[BenchRow], metric: str) -> Trial:
    """The trial with the figures of its whole passes."""
    accepts = [r.accept_length for r in rows if r.accept_length is not None]
    figures = {
        k: sum(got) / len(got)
        for k in ("tok_s_user", "output_throughput", "ttft_p50_ms", "tpot_p50_ms")
        if (got := [float(v) for r in rows if (v := getattr(r, k)) is not None])
    }
    return replace(
        trial,
        values=_values(rows, metric),
        accept_length=sum(accepts) / len(accepts) if accepts else None,
        figures=figures,
        pass_s=max((r.duration_s for r in rows if r.duration_s), default=None),
    )


class Tuner:
    """Runs the trials of one folder, in turn, until nothing is left to try."""

    def __init__(self, run: TuneFolder, loaded: config.Config, *, anyway: bool = False) -> None:
        """anyway: measure beside other loads of this host, and keep what was measured so."""
        self.run = run
        self._anyway = anyway
        self.space: Space = run.space
        self.config = loaded
        self.profile = loaded.get_profile(self.space.profile)
        run.keep_profile(self.profile)
        if self.profile.auto_gpus:  # once: every trial on the same GPUs
            self.profile = settle_gpus(self.profile)
        self._server: str = ""  # job id of the server that runs now
        self._done: dict[str, Trial] = {}
        self._numbers: dict[str, int] = {}  # the newest later start of each setting
        self._settings = 0  # still to be measured, the one at hand included
        self._began = 0.0  # of the trial at hand
        self._resumed = ""
        self._job_id = os.environ.get("K2TUI_JOB_ID", "")

    # ---- the whole

    def go(self) -> int:
        alone = Alone("", anyway=self._anyway)
        try:
            alone.begin(lambda words: report_progress(0, None, "trials", words))
        finally:
            alone.close()
        self._clear_leftovers()
        known = self.run.trials()
        self._numbers = {key_of(t.setting): t.again_no for t in sorted(known, key=lambda t: t.again_no) if t.is_again}
        # a failed baseline and a later start that was only refused are tried again
        done = self._done = {
            t.key: t
            for t in known
            if (t.state != "refused" if t.is_again else t.setting != () or t.state == "ok")
        }
        self._resumed = f"trial {len(done)}" if done else ""
        while todo := planned(self.space, self.profile, {k: t for k, t in done.items() if not t.is_again}):
            self._settings = len(todo)
            every = self.space.baseline_every
            if every and since_baseline(done.values()) >= every:
                self._again(())
                continue
            others = {k: t.setting for k, t in done.items() if t.state != "skipped"}
            why = no_change(self.profile, todo[0], others)
            trial = (
                Trial(setting=todo[0], state="skipped", cause=why, at_s=time.time())
                if why
                else self.measure(todo[0])
            )
            self._keep(trial)
            if trial.setting == () and trial.state != "ok":
                print(f"\n{no_baseline([trial])}", flush=True)
                report_result(
                    {"ok": False, "cause": trial.cause, "folder": str(self.run.path), "trials": len(done)}
                )
                return 1
        self._settings = 0
        while True:
            if since_baseline(done.values()):
                self._again(())
            best = to_confirm(self.space, list(done.values()))
            if best is None or self._again(best).state == "refused":  # then the next would be, too
                break
        self._finish(list(done.values()))
        return 0

    def _keep(self, trial: Trial) -> Trial:
        trial = replace(trial, cause=mask_text(trial.cause))
        self.run.add(trial)
        self._done[trial.key] = trial
        self._say(trial)
        return trial

    def _again(self, setting: Setting) -> Trial:
        """Start and measure a setting once more; () = the profile as it is. Its number is one that no start of it had."""
        key = key_of(setting)
        self._numbers[key] = self._numbers.get(key, -1) + 1
        return self._keep(self.measure(setting, again_no=self._numbers[key]))

    def _clear_leftovers(self) -> None:
        """Servers of this run that an earlier, killed tuner left running."""
        for job in jobs.list_jobs():
            if is_live(job) and job.spec.params.get("tune") == self.run.path.name:
                stop_servers([job.spec.id], by="the tuner", timeout_s=120)

    def _now(self, trial: Trial, step: str, passes: tuple[int, int] = (0, 0)) -> None:
        """Tell readers of the folder and of the job what is done now and how long the whole will take."""
        done = self._done.values()
        to_come = max(1, trials_left(self.space, done, self._settings))
        left_s = time_left(done, to_come, time.monotonic() - self._began)
        ends_s = None if left_s is None else time.time() + left_s
        self.run.set_now(
            TuneStep(
                trial.setting, step, time.time(), trial.is_again, self._server, to_come - 1, passes, ends_s
            ),
            self._job_id,
        )
        note = words(trial.setting)[:60] + (
            f", pass {min(passes[0] + 1, passes[1])} of {passes[1]}" if passes[1] else ""
        )
        report_progress(
            len(done), len(done) + to_come, "trials", note, left_s, resumed=self._resumed, force=True
        )

    def _say(self, trial: Trial) -> None:
        label = label_of(trial.setting, trial.is_again)
        if trial.state == "slower":
            seen = "" if trial.estimate is None else f"{self.space.metric} {short(trial.estimate.value)}, "
            print(f"{label}: {seen}slower, {trial.cause}", flush=True)
        elif trial.estimate is None:
            print(f"{label}: {trial.state}: {trial.cause}", flush=True)
        else:
            e = trial.estimate
            spread = f" (95 % {e.lo:.4g} to {e.hi:.4g})" if e.lo is not None and e.hi is not None else ""
            passes = f"{len(trial.values)} passes" if len(trial.values) > 1 else "1 pass"
            print(
                f"{label}: {self.space.metric} {e.value:.4g}{spread}, {passes}, ready after {duration(trial.ready_s)}",
                flush=True,
            )

    def _finish(self, trials: list[Trial]) -> None:
        print("\n" + table_text(self.space, trials, LOG_WIDTH), flush=True)
        best = winner(self.space, trials)
        moved = drift(trials)
        facts: dict[str, Any] = {
            "ok": True,
            "folder": str(self.run.path),
            "trials": len(trials),
            "drift": moved,
        }
        if best is not None and best.setting:
            changed = apply(self.profile, best.setting)
            lines = [("args", json.dumps(list(mask_argv(changed["args"]))))]
            lines += [(k, json.dumps(v)) for k, v in changed.items() if k not in ("args", "env")]
            own = {n: v for kind, n, v in best.setting if kind == "env"}
            if own:
                inline = ", ".join(
                    f"{json.dumps(n)} = {json.dumps('' if v is False else '1' if v is True else str(v))}"
                    for n, v in own.items()
                )
                lines.append(("env", "{ " + inline + " }"))
            assert best.estimate is not None
            over = gain_text(self.space, trials, best.setting)
            note = (
                f"found by k2tui tune: {words(best.setting)}; {self.space.metric} {best.estimate.value:.4g}"
                + (f", {over}" if over else "")
            )
            path = self.run.write_best(f"{self.space.profile}-tuned", self.space.profile, lines, note)
            print(
                f"\nbest: {words(best.setting)}{f'; {over}' if over else ''}\nits profile: {path}", flush=True
            )
            facts |= {"best": words(best.setting), "value": best.estimate.value, "profile": str(path)}
            facts["confirmed"] = is_confirmed(self.space, trials, best.setting)
        else:
            print("\nno setting is really faster than the profile as it is", flush=True)
            self.run.no_best()
            facts["best"] = None
        report_progress(len(trials), len(trials), "trials", "", 0.0, resumed=self._resumed, force=True)
        report_result(facts)

    # ---- one trial

    def measure(self, setting: Setting, *, again_no: int | None = None) -> Trial:
        """doctor -> start -> ready or a verdict -> benchmark -> clean stop. Whatever goes wrong becomes the trial's cause.

        again_no: which of the setting's later starts; None = its first.
        """
        self._began = time.monotonic()
        trial = self._measure(setting, again_no)
        return replace(trial, took_s=round(time.monotonic() - self._began, 1))

    def _measure(self, setting: Setting, again_no: int | None) -> Trial:
        trial = Trial(
            setting=setting, is_again=again_no is not None, again_no=again_no or 0, at_s=time.time()
        )
        name = self.space.profile
        self._now(trial, "check")
        try:
            changes = apply(self.profile, setting)
            profile = own_port(replace(self.profile, **changes))
            if profile.port != self.profile.port:
                print(
                    f"port {self.profile.port} is another server's: this trial has {profile.port}", flush=True
                )
            doctor.refuse_if_hopeless(profile)
        except K2Error as err:
            return replace(trial, state="refused", cause=err.message + (f" ({err.hint})" if err.hint else ""))
        loaded = replace(self.config, profiles={**self.config.profiles, name: profile})
        before = free_memory(self.profile.gpus)
        try:
            self._server = submit_stage(loaded, "serve", {"profile": name, "tune": self.run.path.name})
        except K2Error as err:
            return replace(trial, state="refused", cause=err.message)
        self._now(trial, "start")
        try:
            view = follow_start(self._server, timeout_s=self.space.ready_timeout_s, pause_s=0.5)
            load = view.load
            if load.state is not State.READY:
                is_over = load.state not in DECIDED and not jobs.get(self._server).state.is_final
                stalled = is_over or load.state in (State.STALLED, State.LOADING)
                cause = load.verdict or str(load.state)
                if is_over:
                    cause = f"not ready after {self.space.ready_timeout_s:g} s: {cause}"
                if load.root_cause:
                    cause = f"{load.root_cause} ({load.root_cause_group}): {cause}"
                if load.proof_line and not stalled:
                    cause += f"; line {load.proof_line_no}: {load.proof_line.strip()[:200]}"
                return self._stopped(
                    replace(
                        trial, state="stalled" if stalled else "failed", cause=cause, job_id=self._server
                    ),
                    before,
                )
            trial = replace(trial, ready_s=load.ready_s, job_id=self._server)
            self._now(trial, "bench")
            return self._stopped(self._bench(trial, view), before)
        finally:
            if self._server:
                self._stop_server()

    def _bench(self, trial: Trial, view: ServerView) -> Trial:
        """Passes in groups of `repeats`, each group a job: more than one group while the interval is too wide, less while hopeless."""
        url = view.http.url if view.http is not None else view.load.url
        until = time.monotonic() + self.space.bench_timeout_s
        rows: list[BenchRow] = []
        while True:
            trial = self._passes(trial, rows, url, until)
            known = [*self._done.values(), trial]
            if trial.state != "ok" or time.monotonic() >= until or not wants_more(self.space, known, trial):
                return trial

    def _passes(self, trial: Trial, rows: list[BenchRow], url: str, until: float) -> Trial:
        """One group of passes. rows: the whole passes so far, those of this group are added."""
        space, before = self.space, len(rows)
        want = min(max(space.repeats, 3), space.max_repeats - before) if before else space.repeats
        job_id = submit_stage(self.config, "bench", {
            "url": url, "concurrency": [space.concurrency], "num_prompts": space.num_prompts, "random_input_len": space.random_input_len,
            "random_output_len": space.random_output_len, "seed": space.seed + 1000 * before, "repeats": want,
            "label": f"tune {words(trial.setting)}{f' (start {trial.again_no + 2})' if trial.is_again else ''}"[:80], "tag": self.run.path.name, "warmup": min(space.concurrency, space.num_prompts),
            "anyway": self._anyway,
        })  # fmt: skip
        told, why = -1, ""
        with BenchDb(readonly=True) as db:
            try:
                while True:
                    job = jobs.wait(job_id, timeout_s=min(WATCH_S, max(0.0, until - time.monotonic())))
                    found = [
                        r
                        for r in db.rows(want + 8, tag=self.run.path.name, include_running=True)
                        if r.job_id == job_id
                    ]
                    whole = [r for r in reversed(found) if not r.is_partial]
                    if job.state.is_final:
                        break
                    if len(whole) != told:
                        told = len(whole)
                        self._now(trial, "bench", (before + told, before + want))
                    if trial.setting != () and not before and len(whole) < want:
                        why = self._why_hopeless(whole, found, want)
                    is_over = time.monotonic() >= until
                    if why or is_over:
                        jobs.stop(job_id, by="the tuner")
                        job = jobs.wait(job_id, timeout_s=60)
                        break
            except Halt:
                jobs.stop(job_id, by="the tuner")
                raise
        rows += [
            r
            for r in whole
            if not r.errors
            and getattr(r, space.metric) is not None
            and (self._anyway or not any(f.startswith(FLAG) for f in r.flags))
        ]
        trial = _with_rows(trial, rows, space.metric)
        if why:
            return replace(trial, state="slower", cause=why)
        if len(rows) > before and job.state is JobState.SUCCEEDED:
            return trial
        if job.state is not JobState.SUCCEEDED and time.monotonic() >= until:
            if len(rows) >= space.repeats:  # only the additional passes were too many
                return trial
            cause = f"the benchmark did not end in {space.bench_timeout_s:g} s ({job.state})"
            return replace(trial, state="stalled", cause=cause, values=())
        errors = sum(r.errors for r in whole)
        said = (
            last_words(job_id)
            or "; ".join(dict.fromkeys(f for r in whole for f in r.flags))
            or job.reason
            or "no figure"
        )
        cause = f"benchmark: {said}" + (f", {errors} errors" if errors else "") + f" (job {job_id})"
        return replace(trial, state="failed", cause=cause, values=())

    def _why_hopeless(self, whole: list[BenchRow], found: list[BenchRow], want: int) -> str:
        """Why the rest of the passes need not be measured; "" while they must be. found: the newest first, with the pass that runs now."""
        space, done = self.space, self._done.values()
        values = _values(whole, space.metric)
        passes = f"{want} pass{'es' if want > 1 else ''}"
        if is_hopeless(space, done, values):
            return f"{len(whole)} of {passes}"
        limit = longest_pass_s(space, done)
        if whole or limit is None or not found or time.time() - found[0].started_s < limit:
            return ""
        now = found[0]
        seen = getattr(now, space.metric)
        figure = f" at {short(seen)}" if seen is not None and now.completed else ""
        usual = max(t.pass_s or 0.0 for t in done if t.setting == ())
        return (
            f"0 of {passes}: {now.completed} of {now.num_requests} requests{figure} after {time.time() - now.started_s:.1f} s, "
            f"a pass of the baseline takes {usual:.1f} s"
        )

    def _stop_server(self, free_before: dict[int, int] | None = None) -> Stopped:
        end = stop_servers([self._server], by="the tuner", timeout_s=180, free_before=free_before)[0]
        self._server = ""  # only now: a Halt in between must find it again
        return end

    def _stopped(self, trial: Trial, before: dict[int, int]) -> Trial:
        """Stop the server; its GPU memory is waited for, and what is still held is said."""
        self._now(trial, "stop")
        end = self._stop_server(before)
        if not end.is_clean:
            print(f"warning: {end.words}", flush=True)
        return replace(trial, stop_s=end.rest.took_s, held_b=end.rest.held_b)

    def abort(self) -> None:
        if self._server:
            self._stop_server()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m k2tui.tune")
    parser.add_argument(
        "folder", type=Path, nargs="?", help="folder of a run, to begin it or to go on with it"
    )
    parser.add_argument("--space", type=Path, help="make a new run of this space file")
    parser.add_argument("--config")
    parser.add_argument("--anyway", action="store_true", help="measure beside other loads of this host")
    args = parser.parse_args(argv)
    if (args.folder is None) == (args.space is None):
        parser.error("give the folder of a run, or --space FILE")

    def on_term(signum: int, frame: FrameType | None) -> None:
        raise Halt

    signal.signal(signal.SIGTERM, on_term)
    signal.signal(signal.SIGINT, on_term)
    try:
        run = TuneFolder(args.folder) if args.folder is not None else TuneFolder.create(args.space)
        tuner = Tuner(run, config.load(args.config), anyway=args.anyway)
    except K2Error as err:
        print(f"k2tui tune: {err.message}\n  {err.hint}", file=sys.stderr)
        return err.exit_code
    try:
        try:
            return tuner.go()
        finally:
            tuner.run.set_now(None)
    except Halt:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        tuner.abort()
        print(
            f"stopped; what was measured is kept, go on with: k2tui tune resume {run.path.name}", flush=True
        )
        return 130
    except (K2Error, OSError) as err:
        tuner.abort()
        if isinstance(err, K2Error):
            print(f"k2tui tune: {err.message}\n  {err.hint}", file=sys.stderr)
            return err.exit_code
        print(f"k2tui tune: {err}\n  what was measured is kept, go on with: k2tui tune resume {run.path.name}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
