"""One job's keeper: starts the child, waits, writes what happened. Knows nothing of other jobs, stages or screens.

`python -m k2tui.jobs.keeper FOLDER [--lock-fd N] [--adopt]`; the spec with its secrets comes on stdin and never lies on a
disk. Laws: the holder of FOLDER/lock is the only writer of FOLDER/journal.jsonl; the child has its own session and its own
descriptor of output.log, so that neither a terminal nor this process can break it; the keeper's lock is close-on-exec, the
names' locks are handed to the child; nothing is started before the journal could say so.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from k2tui.core import journal
from k2tui.core.job import JobSpec, JobState
from k2tui.core.job_queue import Waiter
from k2tui.core.job_words import exit_words
from k2tui.jobs import conditions, procs
from k2tui.jobs.locks import Room, is_held
from k2tui.jobs.start import NAME_TAKEN, module_argv, start_adopter
from k2tui.jobs.state import WORK_LOCK, ended_alone, fold_job, read_job, read_spec
from k2tui.jobs.writer import Journal
from k2tui.parsing import parse_json
from k2tui.regular import open_regular, read_regular

TICK_S = 1.0
USAGE_EVERY_S = 5.0
LOG_CAP_B = 512 * 1024 * 1024
STEADY_S = 600.0  # a run this long makes the next restart count as the first
MAX_BACKOFF_S = 60.0


def tell(folder: Path, lock_fd: int) -> None:
    """Let the user's command and webhook hear of the end: in a process of its own, after everything was written."""
    os.close(lock_fd)
    subprocess.Popen(
        module_argv("k2tui.notify", "job", str(folder)),
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ).returncode = 0


def _nothing(*_: object) -> None:
    """A handler that only wakes the keeper up."""


class Keeper:
    def __init__(self, folder: Path, spec: JobSpec, env: Mapping[str, str]) -> None:
        self.folder = folder
        self.spec = spec
        self.env = dict(env)
        self.journal = Journal(folder)
        self.jobs_root = folder.parent
        self.locks_root = folder.parent.parent / "locks"
        self.child: int | None = None
        self.child_birth = ""
        self.lock_fds: list[int] = []
        self.cpu_s = 0.0
        self.peak_rss_b = 0
        self.exit_code: int | None = None
        self.started_m: float | None = None
        self.oom_before: int | None = None
        self.stop_reason = ""
        self._is_term = False
        self._wake_r, self._wake_w = (
            os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK) if hasattr(os, "pipe2") else os.pipe()
        )
        self._next_usage = 0.0
        self._own_peak_b = 0
        self._waiting_for: str | None = None

    def be_born(self) -> bool:
        """Give the folder its name, so that everybody sees the job; False when that name is taken."""
        born = self.folder.parent / self.spec.id
        try:
            os.rename(self.folder, born)
        except OSError as err:
            if err.errno in (17, 39):  # EEXIST, ENOTEMPTY
                return False
            raise
        self.folder = born
        self.journal.moved(born)
        return True

    # ---- signals and sleeping

    def listen(self) -> None:
        os.set_blocking(self._wake_w, False)
        os.set_blocking(self._wake_r, False)
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        for number in (signal.SIGCHLD, signal.SIGUSR1):
            signal.signal(number, _nothing)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_term)
        for number in (signal.SIGHUP, signal.SIGPIPE):
            # a handler and not SIG_IGN: an ignored signal would stay ignored in the child
            signal.signal(number, _nothing)

    def _on_term(self, *_: object) -> None:
        self._is_term = True

    def nap(self, seconds: float) -> None:
        """Sleep until a signal comes or the time is over."""
        ready, _, _ = select.select([self._wake_r], [], [], max(0.0, seconds))
        if ready:
            try:
                os.read(self._wake_r, 4096)
            except OSError:
                pass

    def is_stop_asked(self) -> bool:
        if self.stop_reason:
            return True
        try:
            raw = read_regular(self.folder / "stop.json")
        except OSError:
            raw = None
        if raw is not None:
            try:
                by = str(parse_json(raw).get("by") or "the user")
            except (ValueError, AttributeError):
                by = "the user"
            self.stop_reason = f"stopped by {by}"
        elif self._is_term:
            self.stop_reason = "stopped: its keeper got SIGTERM (shutdown of the machine?)"
        return bool(self.stop_reason)

    # ---- the way to the start

    def wait_for(self, what: str) -> None:
        if what != self._waiting_for:
            self._waiting_for = what
            self.journal.add("waiting", **{"for": what})

    def wait_for_predecessors(self) -> tuple[JobState, str] | None:
        """None when all succeeded; else how this job ends."""
        left = list(self.spec.after)
        pause = 0.1
        while left:
            if self.is_stop_asked():
                return JobState.STOPPED, self.stop_reason
            folder = self.jobs_root / left[0]
            if not folder.is_dir():
                return JobState.SKIPPED, f"its predecessor {left[0]} does not exist (deleted?)"
            job = read_job(folder)
            if job.state is JobState.SUCCEEDED:
                left.pop(0)
                continue
            if job.state.is_final:
                why = f": {job.reason}" if job.reason else ""
                return JobState.SKIPPED, f"its predecessor {left[0]} is {job.state}{why}"
            if job.state is JobState.ORPHANED:
                start_adopter(folder)  # somebody must write how it ends
            self.wait_for(f"job {left[0]} ({job.spec.title}) to succeed")
            self.nap(pause)
            pause = min(TICK_S, pause * 1.5)
        return None

    def wait_for_conditions(self) -> tuple[JobState, str] | None:
        begun = procs.since_boot_s()
        for condition in self.spec.requires:
            pause = 0.1
            while why := conditions.unmet(condition, self.spec.cwd):
                if self.is_stop_asked():
                    return JobState.STOPPED, self.stop_reason
                if procs.since_boot_s() - begun > self.spec.requires_timeout_s:
                    return JobState.FAILED, f"waited {self.spec.requires_timeout_s:g} s in vain for {why}"
                self.wait_for(why)
                self.nap(pause)
                pause = min(TICK_S, pause * 1.5)
        return None

    def take_locks(self) -> tuple[JobState, str] | None:
        me = Waiter(self.spec.id, self.spec.priority, procs.since_boot_s(), self.spec.locks)
        room = Room(self.locks_root, me, lambda job_id: is_held(self.jobs_root / job_id / "lock"))
        pause = 0.05
        try:
            while True:
                if self.is_stop_asked():
                    return JobState.STOPPED, self.stop_reason
                try:
                    fds, waits = room.try_take(procs.since_boot_s())
                except OSError as err:
                    fds, waits = [], f"the lock folder: {err.strerror}"
                if not waits:
                    self.lock_fds = fds
                    return None
                self.wait_for(waits)
                self.nap(pause)
                pause = min(0.5, pause * 1.5)
        finally:
            room.leave()

    # ---- the child

    def start_child(self) -> str:
        """Start it; "" or why it could not be started."""
        while not self.journal.flush():
            if self.is_stop_asked():
                return self.stop_reason
            self.nap(TICK_S)
        env = {
            **self.env,
            **self.spec.env,
            procs.JOB_VAR: self.spec.id,
            "K2TUI_JOB_DIR": str(self.folder),
            "PYTHONUNBUFFERED": "1",
        }
        argv = list(self.spec.argv)
        try:
            log = os.open(
                self.folder / "output.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
            )
        except OSError as err:
            return f"output.log cannot be written: {err.strerror}"
        work = os.open(self.folder / WORK_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # handed to the work: whoever of it lives holds it, from its very first moment and whatever it does to its environment
        fcntl.flock(work, fcntl.LOCK_EX)
        self.oom_before = procs.oom_kills()
        self._own_peak_b = procs.own_peak_rss_b()
        try:
            child = subprocess.Popen(
                argv,
                cwd=self.spec.cwd or None,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=[*self.lock_fds, work],
            )
        except OSError as err:
            if err.filename and self.spec.cwd and str(err.filename) == self.spec.cwd:
                return f"working folder {self.spec.cwd}: {err.strerror}"
            return f"{argv[0]}: {err.strerror}"
        except ValueError as err:
            return f"{argv[0]}: {err}"
        finally:
            os.close(log)
            os.close(work)
        self.child = child.pid
        child.returncode = 0  # this process waits for all children itself
        self.child_birth = procs.birth(child.pid)
        self.started_m = procs.since_boot_s()
        self.exit_code = None
        self.journal.add(
            "started",
            pid=child.pid,
            birth=self.child_birth,
            boot=procs.boot_id(),
            ns=procs.pid_space(),
            host=procs.host(),
        )
        return ""

    def reap(self) -> bool:
        """Collect what has ended, with its CPU seconds; True once the child itself has."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            self.cpu_s += usage.ru_utime + usage.ru_stime
            scale = 1 if sys.platform == "darwin" else 1024
            peak = usage.ru_maxrss * scale
            if (
                peak > self._own_peak_b
            ):  # a forked child begins with the keeper's own figure: below it nothing is known
                self.peak_rss_b = max(self.peak_rss_b, peak)
            if pid == self.child:
                self.exit_code = os.waitstatus_to_exitcode(status)
        return self.exit_code is not None

    def others(self) -> set[int]:
        """Every living process of this job, wherever it went: descent, session, environment."""
        found = procs.family(
            {os.getpid()}, sessions={self.child} if self.child else (), spare_keepers_but=self.spec.id
        )
        return (found | set(procs.by_job([self.spec.id])[self.spec.id])) - {os.getpid()}

    def signal_group(self, number: signal.Signals) -> None:
        if (
            self.child and self.exit_code is None
        ):  # reaped = the number may be another's by now; `sweep` sees to the rest
            try:
                os.killpg(self.child, number)
            except OSError:
                pass

    def watch(self) -> str:
        """Until the child has ended; returns "" or why it was made to end."""
        deadline = None if self.spec.timeout_s is None else (self.started_m or 0.0) + self.spec.timeout_s
        pause = 0.02
        while not self.reap():
            if self.is_stop_asked():
                return self.end_by_force(self.stop_reason)
            if deadline is not None and procs.since_boot_s() >= deadline:
                return self.end_by_force(f"timed out after {self.spec.timeout_s:g} s")
            self.journal.flush()
            self.look_after()
            left = TICK_S if deadline is None else min(TICK_S, deadline - procs.since_boot_s())
            self.nap(min(left, pause))
            pause = min(TICK_S, pause * 2)
        return ""

    def end_by_force(self, reason: str) -> str:
        """TERM to the group, grace, then KILL to the group and to every process that left it."""
        self.journal.add("stop", reason=reason)
        self.signal_group(signal.SIGTERM)
        deadline = procs.since_boot_s() + max(0.0, self.spec.grace_s)
        while not self.is_child_gone() and procs.since_boot_s() < deadline:
            self.nap(min(0.2, max(0.0, deadline - procs.since_boot_s())))
        if not self.is_child_gone():
            self.signal_group(signal.SIGKILL)
            reason += f" (killed: it did not end within {self.spec.grace_s:g} s of SIGTERM)"
            for _ in range(100):
                if self.is_child_gone():
                    break
                self.nap(0.1)
        return reason

    def is_child_gone(self) -> bool:
        return self.reap()

    def sweep(self) -> int:
        """End what the child left behind. Returns how many processes that were."""
        left = self.others()
        if not left:
            return 0
        count = len(left)
        procs.signal_all(left, signal.SIGTERM)
        deadline = procs.since_boot_s() + min(3.0, max(0.2, self.spec.grace_s))
        while procs.since_boot_s() < deadline:
            self.reap()
            left = self.others()
            if not left:
                return count
            self.nap(0.05)
        for _ in range(40):
            procs.signal_all(left, signal.SIGKILL)
            self.nap(0.05)
            self.reap()
            left = self.others()
            if not left:
                break
        return count

    def look_after(self) -> None:
        """Memory seen, and the log's size kept below its cap."""
        now = procs.since_boot_s()
        if now < self._next_usage or self.child is None:
            return
        self._next_usage = now + USAGE_EVERY_S
        self.peak_rss_b = max(self.peak_rss_b, procs.rss_b(procs.family(set(), sessions={self.child})))
        from_size = self.spec.log_cap_b or LOG_CAP_B
        try:
            if (self.folder / "output.log").stat().st_size > from_size:
                from k2tui.jobs.rotate import rotate

                self.journal.add("note", text=rotate(self.folder / "output.log"))
        except OSError:
            pass

    # ---- the end

    def stop_own(self) -> None:
        """Ask the jobs that a tuner started to stop: a trial's server and its benchmark are of use to nobody but it."""
        if self.spec.stage != "tune":
            return
        from k2tui.core.server_jobs import is_live
        from k2tui.errors import K2Error
        from k2tui.jobs import folder

        try:
            for job in folder.list_jobs():
                if job.spec.parent == self.spec.id and is_live(job):
                    folder.stop(job.spec.id, by="the keeper of its tuner, which has ended")
                    self.journal.add("note", text=f"{job.spec.id} ({job.spec.stage}) was left running: stopped")
        except (K2Error, OSError) as err:
            self.journal.add("note", text=f"what it left running could not be stopped: {err}")

    def finish(self, state: JobState, reason: str) -> None:
        self.stop_own()
        took = None if self.started_m is None else round(procs.since_boot_s() - self.started_m, 3)
        gpus = sum(1 for name in self.spec.locks if name.startswith("gpu:"))
        facts: dict[str, Any] = {"state": str(state), "reason": reason, "took_s": took}
        if self.started_m is not None:
            facts.update(
                cpu_s=round(self.cpu_s, 3), peak_rss_b=self.peak_rss_b or None, exit_code=self.exit_code
            )
            facts["gpu_s"] = round((took or 0.0) * gpus, 3) if gpus else None
        self.journal.drop_ballast()
        self.journal.add("ended", **facts)
        pause = TICK_S
        while not self.journal.flush():  # a full disk: the lock stays held until the truth is written
            self.nap(pause)
            pause = min(5.0, pause * 1.5)
        try:
            (self.folder / "stop.json").unlink()
        except OSError:
            pass

    def log_tail(self) -> str:
        try:
            with open_regular(self.folder / "output.log") as fh:
                fh.seek(max(0, os.fstat(fh.fileno()).st_size - 8192))
                return fh.read().decode("utf-8", "replace")
        except OSError:
            return ""

    def disk_free_b(self) -> int | None:
        try:
            facts = os.statvfs(self.folder)
            return facts.f_bavail * facts.f_frsize
        except OSError:
            return None

    def verdict(self, forced: str) -> tuple[JobState, str]:
        if forced:
            asked = forced.startswith("stopped")
            return (JobState.STOPPED if asked else JobState.FAILED), forced
        before, after = self.oom_before, procs.oom_kills()
        words = exit_words(
            self.exit_code,
            oom_kills=None if before is None or after is None else max(0, after - before),
            log_tail=self.log_tail() if self.exit_code else "",
            disk_free_b=self.disk_free_b() if self.exit_code else None,
        )
        if self.exit_code == 0:
            for condition in self.spec.ensures:
                why = conditions.unmet(condition, self.spec.cwd)
                if why:
                    return JobState.FAILED, f"exit 0, but its promise does not hold: {why}"
            return JobState.SUCCEEDED, words
        return JobState.FAILED, words

    def run(self) -> None:
        """The whole life of the job, from the queue to its last words."""
        self.journal.load_ballast()
        attempt = 0
        while True:
            early = self.wait_for_predecessors() or self.wait_for_conditions()
            if early is None and not self.lock_fds:
                early = self.take_locks()
            if early is not None:
                return self.finish(*early)
            why = self.start_child()
            if why:
                self.started_m = None
                stopped = why == self.stop_reason
                return self.finish(
                    JobState.STOPPED if stopped else JobState.FAILED,
                    why if stopped else f"not started: {why}",
                )
            self._next_usage = procs.since_boot_s() + TICK_S
            forced = self.watch()
            swept = self.sweep()
            if swept:
                self.journal.add(
                    "note", text=f"{swept} process{'es' if swept > 1 else ''} left behind by the work ended"
                )
            state, reason = self.verdict(forced)
            ran_s = procs.since_boot_s() - (self.started_m or 0.0)
            attempt = 0 if ran_s >= STEADY_S else attempt
            again = self.spec.restart == "always" or (
                self.spec.restart == "on-failure" and state is JobState.FAILED
            )
            if not again or forced.startswith("stopped") or attempt >= self.spec.max_restarts:
                if again and attempt and not forced.startswith("stopped"):
                    reason += f" (given up after {attempt} restart{'s' if attempt > 1 else ''})"
                return self.finish(state, reason)
            attempt += 1
            wait_s = min(MAX_BACKOFF_S, self.spec.backoff_s * 2 ** (attempt - 1))
            self.journal.add(
                "exited", code=self.exit_code, cpu_s=round(self.cpu_s, 3), peak_rss_b=self.peak_rss_b or None
            )
            self.journal.add(
                "restarting",
                reason=reason,
                **{"for": f"restart {attempt} of {self.spec.max_restarts} in {wait_s:g} s ({reason})"},
            )
            self._waiting_for = None
            until = procs.since_boot_s() + wait_s
            while procs.since_boot_s() < until:
                if self.is_stop_asked():
                    return self.finish(JobState.STOPPED, self.stop_reason)
                self.nap(min(TICK_S, until - procs.since_boot_s()))


class AdoptedKeeper(Keeper):
    """A keeper of work that another one started and left: it sees the end and can stop it, but cannot learn the exit code."""

    def adopt(self, started: Mapping[str, Any] | None) -> None:
        """Take over what `started` (the journal's event) names; None: what was begun without a word, if anything was."""
        self.known: dict[int, str] = {}
        facts = {"boot": procs.boot_id(), "ns": procs.pid_space(), "host": procs.host()}
        self.journal.add("adopted", pid=os.getpid(), birth=procs.birth(os.getpid()), **facts)
        self.began = started is not None
        if started is None:
            found = sorted(self.others())
            if found:
                self.began = True
                self.child = found[0]
                self.journal.add("started", pid=found[0], birth=procs.birth(found[0]), **facts)
            return
        self.child = int(started.get("pid", 0))
        boot = str(started.get("boot", ""))
        if procs.is_alive(self.child, str(started.get("birth", "")), boot):
            self.known[self.child] = procs.birth(self.child)
        self.started_m = float(started.get("m", 0.0)) if boot == procs.boot_id() else None

    def others(self) -> set[int]:
        # numbers come round: a pid or session counts only while someone known to be of this job still bears it
        for pid in procs.by_job([self.spec.id])[self.spec.id]:
            self.known.setdefault(pid, procs.birth(pid))
        if is_held(self.folder / WORK_LOCK):
            for pid in procs.holders(self.folder / WORK_LOCK):
                self.known.setdefault(pid, procs.birth(pid))
        alive = {pid for pid, born in self.known.items() if born and procs.birth(pid) == born}
        sessions: set[int] = set()
        for pid in alive:
            try:
                sessions.add(os.getsid(pid))
            except OSError:
                continue
        found = procs.family(alive, sessions=sessions & ({self.child} if self.child else set[int]())) - {
            os.getpid()
        }
        self.known = {pid: procs.birth(pid) for pid in found}
        return found

    def reap(self) -> bool:
        super().reap()
        return not self.others()

    def signal_group(self, number: signal.Signals) -> None:
        procs.signal_all(self.others(), number)

    def run_adopted(self) -> None:
        forced = ""
        while self.others():
            if self.is_stop_asked():
                forced = self.end_by_force(self.stop_reason)
                break
            self.look_after()
            self.nap(TICK_S)
        self.sweep()
        if forced:
            return self.finish(JobState.STOPPED, forced)
        if self.is_stop_asked():  # the former keeper's doing: it died while it waited for the work's end
            return self.finish(JobState.STOPPED, f"{self.stop_reason} (its keeper died meanwhile)")
        if not self.began:
            return self.finish(JobState.LOST, "its keeper died before the work began")
        if (alone := ended_alone(self.folder)) is not None:
            return self.finish(*alone)
        self.finish(JobState.LOST, "ended after its keeper died; exit code not known")


def _detach(ack: int) -> None:
    os.setsid()
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    if null > 2:
        os.close(null)
    os.set_inheritable(ack, False)


def main(argv: list[str]) -> int:
    folder = Path(argv[0]).absolute()
    is_adopting = "--adopt" in argv
    lock_fd = int(argv[argv.index("--lock-fd") + 1]) if "--lock-fd" in argv else None
    if lock_fd is None:
        lock_fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        for attempt in range(20):  # a reader holds it for a moment when it looks
            try:
                fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if attempt == 19:
                    return 0  # another keeper is there
                time.sleep(0.02)
    os.set_inheritable(lock_fd, False)
    handed: dict[str, Any] = {}
    if is_adopting:
        spec = read_spec(folder)
        env: dict[str, str] = {}
    else:
        handed = json.loads(sys.stdin.buffer.read())
        spec = journal.spec_of(handed["spec"])
        env = {str(k): str(v) for k, v in handed["env"].items()}
    # fork: the submitter only waits for a parent that is done once the child has written its first line
    ack_r, ack_w = os.pipe()
    if os.fork():
        os.close(ack_w)
        os.close(lock_fd)
        return {b"k": 0, b"t": NAME_TAKEN}.get(os.read(ack_r, 1), 1)
    os.close(ack_r)
    _detach(ack_w)
    try:
        keeper = AdoptedKeeper(folder, spec, env) if is_adopting else Keeper(folder, spec, env)
        keeper.listen()
        procs.be_subreaper()
        if isinstance(keeper, AdoptedKeeper):
            job, events = fold_job(folder, spec)
            started = journal.last_of(events, "started", "restarting")
            if not job.state.is_final:
                keeper.adopt(started if started is not None and started.get("e") == "started" else None)
            os.write(ack_w, b"k")
            os.close(ack_w)
            if not job.state.is_final:
                keeper.run_adopted()
            return 0
        facts = {
            "pid": os.getpid(),
            "birth": procs.birth(os.getpid()),
            "boot": procs.boot_id(),
            "ns": procs.pid_space(),
            "host": procs.host(),
        }
        # stage and kind once more: they tell what this is should spec.json be damaged one day
        if not keeper.journal.add("keeper", **facts, stage=spec.stage, kind=spec.kind):
            return 1  # nothing was started: the submitter says that the disk is full
        if not keeper.be_born():
            os.write(ack_w, b"t")
            return 0
        os.write(ack_w, b"k")
        os.close(ack_w)
        keeper.run()
        keeper.journal.close()
        if handed.get("tell"):
            tell(keeper.folder, lock_fd)
    except BaseException:
        import traceback

        try:
            # an unborn folder has another name once it is born
            place = folder if folder.exists() else folder.parent / spec.id
            with open(place / "keeper.log", "a", encoding="utf-8") as fh:
                traceback.print_exc(file=fh)
        except OSError:
            pass
        return 1
    return 0


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
