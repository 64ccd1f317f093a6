"""Jobs as folders: submit, list, stop, retry, delete. A reader of everything; a writer only where nobody else holds the lock.

FOLDER = paths.jobs_dir()/ID: spec.json (once, secrets masked), env.json (once, masked), lock, journal.jsonl, output.log,
progress.json and result.json (from the stage), stop.json (a request to the keeper).
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import re
import signal
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from k2tui import paths
from k2tui.core import journal
from k2tui.core.job import Job, JobSpec, JobState, Progress
from k2tui.errors import K2Error, NotReadyError, UsageError
from k2tui.jobs import procs
from k2tui.jobs.locks import is_held
from k2tui.jobs.start import NAME_TAKEN, keeper_argv, start_adopter
from k2tui.jobs.state import as_object, read_events, read_job, read_json, read_spec

_EPOCH_MS = 1_735_689_600_000  # 2025-01-01
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
_INDEX = ".index.json"


# ---- names


def _base36(number: int, width: int) -> str:
    out = ""
    while number:
        number, rest = divmod(number, 36)
        out = _DIGITS[rest] + out
    return out.rjust(width, "0")


def _ids(root: Path) -> list[str]:
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return []
    except OSError as err:
        hint = _DISK_HINTS.get(err.errno or 0, "that folder holds the jobs: check its permissions")
        raise K2Error(f"{root}: {err.strerror}", hint)
    return sorted(n for n in names if _ID.fullmatch(n))


def new_id(stage: str) -> str:
    """A short id that sorts by time: 8 characters of base 36 (milliseconds since 2025) and the stage.

    Never smaller than an id that is already there, so that a clock that was set back does not mix up the order.
    """
    stamp = max(0, int(time.time() * 1000) - _EPOCH_MS)
    known = _ids(paths.jobs_dir())
    if known and re.fullmatch(r"[0-9a-z]{8}", known[-1][:8]):
        stamp = max(stamp, int(known[-1][:8], 36) + 1)
    name = re.sub(r"[^a-z0-9_]+", "-", stage.lower()).strip("-")[:24] or "job"
    return f"{_base36(stamp, 8)}-{name}"


def folder_of(job_id: str) -> Path:
    """The folder of a job, by its id or any unique part of it; a stage's name or "last" means the newest such job.

    Raises K2Error naming near ones.
    """
    root = paths.jobs_dir()
    if _ID.fullmatch(job_id) and os.path.isdir(root / job_id):
        return root / job_id
    known = _ids(root)
    if job_id == "last" and known:
        return root / known[-1]
    of_stage = [k for k in known if job_id and k[9:] == job_id]
    if of_stage:
        return root / of_stage[-1]
    for found in ([k for k in known if k.startswith(job_id)], [k for k in known if job_id in k]):
        if len(found) == 1 and job_id:
            return root / found[0]
        if len(found) > 1 and job_id:
            raise UsageError(
                f"job {job_id!r} could be any of {len(found)}", "these fit: " + ", ".join(found[-6:])
            )
    import difflib

    near = difflib.get_close_matches(job_id, known, n=3, cutoff=0.4)
    hint = (
        "did you mean " + " or ".join(near) + "?"
        if near
        else ("newest: " + ", ".join(known[-3:]) if known else "there are no jobs")
    )
    raise UsageError(f"no job {job_id!r}", hint)


def log_path(job_id: str) -> Path:
    """The file that the job's output goes to (it may not be there yet)."""
    return folder_of(job_id) / "output.log"


# ---- submitting


def _check(spec: JobSpec) -> None:
    if not spec.argv or not all(isinstance(a, str) for a in spec.argv):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError("a job needs a command", "give it after --")
    if not spec.argv[0].strip():
        raise UsageError("the first word of the command is empty", "give the program's name after --")
    if any("\0" in a for a in (*spec.argv, *spec.env, *spec.env.values())):
        raise UsageError("the command or its environment has a NUL byte in it")
    for what, texts in (
        ("command", spec.argv),
        ("title", (spec.title,)),
        ("stage", (spec.stage,)),
        ("working folder", (spec.cwd,)),
        ("environment", (*spec.env, *spec.env.values())),
        ("locks", spec.locks),
        ("conditions", (*spec.requires, *spec.ensures)),
    ):
        for text in texts:
            if _is_torn(text):
                raise UsageError(
                    f"the job's {what} is not UTF-8 text: {text[:80]!a}",
                    "a job is kept as text: use names in UTF-8, or a link to that file with a plain name",
                )
    if spec.cwd and not os.path.isdir(spec.cwd):
        raise UsageError(f"working folder {spec.cwd}: no such folder")
    if any(not name.strip() for name in spec.locks):
        raise UsageError("a lock needs a name", "such as gpu:0 or port:30000")
    for what, seconds, least in (
        ("timeout", spec.timeout_s, "more than 0"),
        ("grace", spec.grace_s, "0 or more"),
    ):
        is_fine = seconds is None or (
            math.isfinite(seconds) and (seconds > 0 or (seconds == 0 and what == "grace"))
        )
        if not is_fine:
            raise UsageError(
                f"the {what} is {seconds:g} seconds", f"give a finite number of seconds, {least}"
            )
    if spec.max_restarts < 0:
        raise UsageError(f"the number of restarts is {spec.max_restarts}", "give 0 or more")
    if spec.log_cap_b < 0:
        raise UsageError(f"the log's largest size is {spec.log_cap_b} bytes", "give more than 0")
    if spec.kind not in ("task", "server"):
        raise UsageError(f"kind {spec.kind!r} is unknown", "kinds: task, server")
    if spec.restart not in ("never", "on-failure", "always"):
        raise UsageError(f"restart {spec.restart!r} is unknown", "restart: never, on-failure, always")
    from k2tui.jobs import conditions, scope

    for condition in (*spec.requires, *spec.ensures):
        conditions.check_form(condition)
    if spec.scope:
        scope.check()


def _is_torn(text: str) -> bool:
    """Whether a text has bytes in it that were no UTF-8 (the command line carries them as lone surrogates)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


_DISK_HINTS = {
    errno.ENOSPC: "make room or set K2TUI_HOME to a folder on another disk",
    errno.EDQUOT: "make room or set K2TUI_HOME to a folder on another disk",
    errno.EROFS: "set K2TUI_HOME to a folder that can be written",
    errno.EACCES: "check its owner and permissions, or set K2TUI_HOME to a folder of your own",
    errno.EPERM: "check its owner and permissions, or set K2TUI_HOME to a folder of your own",
    errno.ENOTDIR: "K2TUI_HOME has to be a folder, not a file",
    errno.EEXIST: "K2TUI_HOME has to be a folder, not a file",
}


def _disk_words(err: OSError, path: Path) -> K2Error:
    return K2Error(f"{path}: {err.strerror or err}", _DISK_HINTS.get(err.errno or 0, ""))


def _jobs_root() -> Path:
    root = paths.jobs_dir()
    try:
        return paths.ensure_dir(root)
    except OSError as err:
        raise _disk_words(err, root)


def _clean_title(spec: JobSpec) -> str:
    """One line without control characters, direction overrides or secrets; the command where there is none."""
    from k2tui.core.job_mask import mask_argv, mask_text
    from k2tui.core.job_text import plain

    title = mask_text(" ".join(plain(spec.title).split()))
    # masked before it is cut: half a token has not a token's shape any more
    return title or " ".join(plain(" ".join(mask_argv(spec.argv))).split())[:60]


def _here() -> str:
    try:
        return os.getcwd()
    except OSError as err:
        raise K2Error(
            f"the working folder: {err.strerror or err}", "change to a folder that is there, or give --cwd"
        )


def submit(spec: JobSpec, *, env: Mapping[str, str] | None = None) -> str:
    """Start a job: its folder, its keeper. Returns its id once the keeper holds the lock and has written its first line.

    spec.id may be "" (one is made). env: the environment of the work, by default this process's own; spec.env comes on top.
    Raises K2Error (disk full, no permission) or UsageError; nothing is left behind then.
    """
    import shutil

    from k2tui.core.job_mask import mask_argv, mask_env, mask_params
    from k2tui.files import write_json, write_whole

    _check(spec)
    root = _jobs_root()
    after = tuple(folder_of(i).name for i in spec.after)
    base_env = dict(os.environ if env is None else env)
    for name in (procs.JOB_VAR, procs.KEEPER_VAR, "K2TUI_JOB_DIR"):
        base_env.pop(name, None)
    spec = replace(
        spec,
        after=after,
        submitted_s=spec.submitted_s or time.time(),
        cwd=spec.cwd or _here(),
        parent=os.environ.get(procs.JOB_VAR, ""),
    )
    if spec.id and not _ID.fullmatch(spec.id):
        raise UsageError(f"job id {spec.id!r} is no plain name", "letters, digits, dot, dash and underscore")
    _clear_unborn(root)
    for _ in range(100):
        job_id = spec.id or new_id(spec.stage)
        tmp = root / f".new-{job_id}-{os.getpid()}-{threading.get_ident()}"
        lock_fd = -1
        try:
            tmp.mkdir(mode=0o700)
            named = replace(spec, id=job_id, title=_clean_title(spec))
            masked = replace(
                named,
                argv=mask_argv(named.argv),
                env=mask_env(named.env),
                params=mask_params(named.params),
            )
            write_json(tmp / "spec.json", journal.spec_to_json(masked))
            # in ASCII: a variable of the environment may hold bytes that are no UTF-8
            write_whole(tmp / "env.json", json.dumps(mask_env(base_env), indent=1) + "\n")
            lock_fd = os.open(tmp / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            # taken before it is handed on, so that a fresh job never looks dead
            fcntl.flock(lock_fd, fcntl.LOCK_EX)
            if _start_keeper(tmp, named, base_env, lock_fd):
                return job_id
            if spec.id:
                raise UsageError(f"job {job_id!r} is already there")
            shutil.rmtree(
                tmp, ignore_errors=True
            )  # two submitters in one millisecond: the next number is free
        except OSError as err:
            shutil.rmtree(tmp, ignore_errors=True)
            raise _disk_words(err, root)
        except BaseException:
            shutil.rmtree(tmp, ignore_errors=True)
            raise
        finally:
            if lock_fd >= 0:
                os.close(lock_fd)
    raise K2Error(f"{root}: no free job id found")


def _is_told() -> bool:
    """Whether the configuration has a command or a webhook that wants to hear of a job's end."""
    from k2tui import config

    try:
        settings = config.load().notify
    except K2Error:
        return False  # a wrong configuration is told where it is used; a job runs all the same
    return bool(settings.command or settings.webhook)


def _clear_unborn(root: Path) -> None:
    """Remove what submitters left that were killed before there was a job."""
    import shutil

    for path in root.glob(".new-*"):
        try:
            if time.time() - path.stat().st_mtime > 3600 and not is_held(path / "lock"):
                shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue


def _start_keeper(folder: Path, spec: JobSpec, env: Mapping[str, str], lock_fd: int) -> bool:
    """Start the keeper on an unborn folder; it gives it its name. False when that name is taken. Raises K2Error.

    A job is seen only once its keeper has everything: a submitter that is killed leaves no job or a whole one. A hang-up of
    the terminal waits meanwhile.
    """
    from k2tui.jobs import scope

    handed = json.dumps({"spec": journal.spec_to_json(spec), "env": dict(env), "tell": _is_told()}).encode()
    argv = [*keeper_argv(folder), "--lock-fd", str(lock_fd)]
    if spec.scope:
        argv = scope.wrap(argv, spec.id)
    # the keeper is no part of the job that may have submitted it: an outer job's sweep has to spare it
    own = {k: v for k, v in os.environ.items() if k not in (procs.JOB_VAR, "K2TUI_JOB_DIR")}
    if threading.current_thread() is threading.main_thread():
        held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    else:
        held = None
    try:
        return _hand_over(argv, {**own, procs.KEEPER_VAR: spec.id}, handed, lock_fd, folder)
    finally:
        if held is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)


def _hand_over(argv: list[str], env: Mapping[str, str], handed: bytes, lock_fd: int, folder: Path) -> bool:
    import shutil
    import subprocess

    keeper = subprocess.Popen(
        argv,
        cwd="/",
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        pass_fds=(lock_fd,),
    )
    try:
        _, said = keeper.communicate(handed, timeout=60)
    except subprocess.TimeoutExpired:
        keeper.kill()
        keeper.communicate()
        said = b"it did not answer within 60 s"
    if keeper.returncode == NAME_TAKEN:
        return False
    if keeper.returncode != 0:
        free = os.statvfs(folder)
        full = free.f_bavail * free.f_frsize < 64 * 1024
        shutil.rmtree(folder, ignore_errors=True)
        last = said.decode("utf-8", "replace").strip().splitlines()
        why = "No space left on device" if full else (last[-1] if last else f"exit {keeper.returncode}")
        raise K2Error(
            f"the job's keeper could not start: {why}",
            "nothing was started" if not full else "make room; nothing was started",
        )
    return True


# ---- reading


@dataclass(frozen=True, slots=True)
class _Cached:
    size: int
    mtime_ns: int
    job: Job


_cache: dict[str, _Cached] = {}
_cache_lock = threading.Lock()


def get(job_id: str) -> Job:
    """One job, by id or unique part of it. Raises UsageError naming near ones."""
    return read_job(folder_of(job_id))


def _is_there(path: Path) -> bool:
    """Whether something of that name is there, also where it may not be looked at."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def list_jobs() -> list[Job]:
    """All jobs, newest first, damaged ones too (`Job.damage`). Jobs that have ended are read once: from memory, or from the index beside the folders."""
    root = paths.jobs_dir()
    names = _ids(root)
    with _cache_lock:
        known = dict(_cache)
    index: dict[str, Any] | None = None
    found: list[Job] = []
    missed = 0
    fresh: dict[str, _Cached] = {}
    base = str(root)
    for name in reversed(names):
        key = f"{base}/{name}"
        try:
            facts = os.stat(
                f"{key}/journal.jsonl"
            )  # texts, not Paths: 500 of these are looked at once a second
        except OSError:
            facts = None
        if facts is not None:
            cached = known.get(key)
            if cached is None:
                if index is None:
                    index = _read_index(root)
                cached = _from_index(index.get(name), name)
            if cached is not None and (cached.size, cached.mtime_ns) == (facts.st_size, facts.st_mtime_ns):
                fresh[key] = cached
                found.append(cached.job)
                continue
        folder = root / name
        if facts is None and not any(_is_there(folder / n) for n in ("spec.json", "lock")):
            continue  # deleted while we look, or no job at all
        job = read_job(folder)
        found.append(job)
        if job.state.is_final and facts is not None and not job.damage:
            try:
                facts = os.stat(folder / "journal.jsonl")
            except OSError:
                continue
            fresh[key] = _Cached(facts.st_size, facts.st_mtime_ns, job)
            missed += 1
    with _cache_lock:
        for key in [k for k in _cache if k.startswith(f"{root}/") and k not in fresh]:
            del _cache[key]
        _cache.update(fresh)
    if missed >= 8:
        _write_index(root, fresh)
    return found


_JOB_FIELDS = (
    "pid",
    "keeper_pid",
    "started_s",
    "ended_s",
    "exit_code",
    "reason",
    "log_bytes",
    "cpu_s",
    "peak_rss_b",
    "took_s",
)
_JOB_FIELDS_2 = ("gpu_s", "restarts", "unknown_events")


def _write_index(root: Path, fresh: Mapping[str, _Cached]) -> None:
    jobs: dict[str, Any] = {}
    for cached in fresh.values():
        job = cached.job
        entry: dict[str, Any] = {f: getattr(job, f) for f in (*_JOB_FIELDS, *_JOB_FIELDS_2)}
        entry.update(
            state=str(job.state),
            notes=list(job.notes),
            result=None if job.result is None else dict(job.result),
        )
        p = job.progress
        entry["progress"] = (
            None if p is None else [p.done, p.total, p.unit, p.note, p.eta_s, p.at_s, p.resumed]
        )
        jobs[job.spec.id] = [cached.size, cached.mtime_ns, journal.spec_to_json(job.spec), entry]
    tmp = root / f"{_INDEX}.{os.getpid()}.{threading.get_ident()}"
    try:
        # a cache: whole or not at all, but it need not survive a power cut
        tmp.write_text(
            json.dumps(
                {"v": 1, "fields": _SPEC_FIELDS, "jobs": jobs}, ensure_ascii=False, separators=(",", ":")
            ),
            encoding="utf-8",
        )
        os.replace(tmp, root / _INDEX)
    except OSError:
        tmp.unlink(missing_ok=True)


def _read_index(root: Path) -> dict[str, Any]:
    """The index's entries; none when it is of another version: its fields are taken as they are."""
    raw = as_object(read_json(root / _INDEX))
    return as_object(raw.get("jobs")) if raw.get("fields") == _SPEC_FIELDS else {}


_SPEC_FIELDS = [f.name for f in fields(JobSpec)]
_TUPLES = ("argv", "after", "locks", "requires", "ensures")


def _from_index(raw: Any, name: str) -> _Cached | None:
    try:
        size, mtime_ns, spec, entry = raw
        for key in _TUPLES:
            spec[key] = tuple(spec[key])
        spec["id"] = name
        del spec["v"]
        progress = entry.pop("progress")
        state = JobState(entry.pop("state"))
        entry["notes"] = tuple(entry["notes"])
        job = Job(
            spec=JobSpec(**spec),
            state=state,
            progress=None if progress is None else Progress(*progress),
            **entry,
        )
        return _Cached(int(size), int(mtime_ns), job) if state.is_final else None
    except (TypeError, ValueError, KeyError):
        return None


# ---- orders


def stop(job_id: str, *, wait_s: float = 0, by: str = "the user") -> Job:
    """Ask the keeper to stop the job (TERM, grace, KILL), and wait up to wait_s for its end. Returns the job as it is then.

    A job whose keeper is dead is adopted first, by a new keeper that stops it. A job that has ended stays as it is.
    """
    folder = folder_of(job_id)
    job = read_job(folder)
    if job.state.is_final:
        return job
    from k2tui.files import write_json

    try:
        write_json(folder / "stop.json", {"by": by, "at_s": time.time()})
    except OSError:
        pass  # a full disk: the signal alone says it
    until = time.monotonic() + wait_s
    pause = 0.02
    signalled = -1
    while True:
        if job.state is JobState.ORPHANED:
            adopt(folder.name)  # also when the keeper dies while we wait for it
        keeper = journal.last_of(read_events(folder)[0], "keeper", "adopted") or {}
        pid = int(keeper.get("pid") or 0)
        if pid != signalled and procs.is_alive(
            pid, str(keeper.get("birth", "")), str(keeper.get("boot", ""))
        ):
            signalled = pid
            try:
                os.kill(pid, signal.SIGUSR1 if (folder / "stop.json").exists() else signal.SIGTERM)
            except OSError:
                pass
        job = read_job(folder)
        is_told = signalled == pid and procs.birth(pid)
        if job.state.is_final or (time.monotonic() >= until and (is_told or wait_s > 0)):
            return job
        if wait_s <= 0 and time.monotonic() >= until + 2.0:
            return job  # nobody there to be told: a later look adopts it and sees the request
        time.sleep(pause)
        pause = min(0.3, pause * 1.3)


def wait(job_id: str, timeout_s: float | None = None, *, adopts: bool = False) -> Job:
    """Wait until the job has ended (or is lost), or the time is over; returns the job as it is then.

    adopts: give it a new keeper at once when its own dies meanwhile, so that a stop that was asked for is carried out.
    """
    folder = folder_of(job_id)
    until = None if timeout_s is None else time.monotonic() + timeout_s
    pause = 0.02
    while True:
        job = read_job(folder)
        if job.state.is_final or (until is not None and time.monotonic() >= until):
            return job
        if adopts and job.state is JobState.ORPHANED:
            adopt(folder.name)
        time.sleep(pause if until is None else max(0.0, min(pause, until - time.monotonic())))
        pause = min(0.3, pause * 1.3)


def adopt(job_id: str) -> bool:
    """Give an orphaned job a new keeper. True when one has it now; False when it has ended."""
    folder = folder_of(job_id)
    start_adopter(folder)
    return is_held(folder / "lock")


def adopt_orphans() -> list[str]:
    """A new keeper for every orphaned job; returns their ids. A dashboard calls it when it starts."""
    return [job.spec.id for job in list_jobs() if job.state is JobState.ORPHANED and adopt(job.spec.id)]


def retry(job_id: str, *, env: Mapping[str, str] | None = None, without: Collection[str] = ()) -> str:
    """Submit a new job with the same spec, environment and working folder; returns its id.

    Raises NotReadyError while the job has not ended: the same work twice would meet in the same files.

    without: words of the command that are left out (a stage's "begin from nothing", so that it goes on instead).

    Secrets were never stored: a masked variable is taken from `env` (default: this process's environment). A masked word of
    the command comes from K2TUI_SECRET_<FLAG> (`--api-key` -> K2TUI_SECRET_API_KEY). UsageError says which is missing.
    """
    from k2tui.core.job_mask import MASK, unmask_argv

    folder = folder_of(job_id)
    state = read_job(folder).state
    if state is JobState.ORPHANED:
        raise NotReadyError(
            f"job {folder.name} has lost its keeper, but its work goes on: it is not started a second time",
            f"give it a new keeper: k2tui jobs adopt; or end it first: k2tui jobs stop {folder.name}",
        )
    if not state.is_final:
        raise NotReadyError(
            f"job {folder.name} is {state}: it is not started a second time",
            f"stop it first: k2tui jobs stop {folder.name}",
        )
    spec = read_spec(folder)
    if not spec.argv:
        raise K2Error(f"job {folder.name} is damaged: what its command was is not known", "submit it anew")
    given = os.environ if env is None else env
    stored = {str(k): str(v) for k, v in as_object(read_json(folder / "env.json")).items()}
    base: dict[str, str] = {}
    for name, value in (stored or dict(given)).items():
        if MASK not in value:
            base[name] = value
        elif name in given:
            base[name] = given[name]
    extra: dict[str, str] = {}
    for name, value in spec.env.items():
        if MASK in value and name not in given:
            raise UsageError(
                f"{name} of job {folder.name} was a secret and is not stored",
                f"set {name} in the environment and retry",
            )
        extra[name] = given[name] if MASK in value else value
    try:
        argv = unmask_argv(spec.argv, given)
    except KeyError as err:
        flag, name = err.args
        raise UsageError(
            f"a secret in the command of job {folder.name} ({flag}) is not stored", f"set {name} and retry"
        ) from None
    fresh = replace(
        spec,
        id="",
        argv=tuple(word for word in argv if word not in without),
        env=extra,
        submitted_s=0.0,
        retry_of=folder.name,
        after=tuple(i for i in spec.after if (paths.jobs_dir() / i).is_dir()),
    )
    return submit(fresh, env=base)


def delete(job_id: str, *, force: bool = False) -> None:
    """Remove the folder of a job that has ended. Raises K2Error while it lives.

    force: also one that cannot be seen from here (of another machine or container); never one whose keeper lives.
    """
    folder = folder_of(job_id)
    job = read_job(folder)
    if not job.state.is_final and not (
        force and job.state is JobState.ORPHANED and not is_held(folder / "lock")
    ):
        raise K2Error(f"job {folder.name} is {job.state}", f"stop it first: k2tui jobs stop {folder.name}")
    import shutil

    gone = folder.with_name(f".gone-{folder.name}-{os.getpid()}")
    try:
        os.rename(folder, gone)  # no reader meets half a folder
    except OSError as err:
        raise _disk_words(err, folder)
    shutil.rmtree(gone, ignore_errors=True)
