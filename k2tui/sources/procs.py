"""Reader of /proc for the processes that hold GPU memory: who they are, whose child, which rank and job; and their orderly end.

It knows no GPU and no NVML. Birth time and pid together name one process: nothing is signalled on a pid alone.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
import re
import select
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from k2tui.core.gpu import GpuProcess, parse_rank
from k2tui.core.job_mask import mask_argv, mask_env
from k2tui.errors import K2Error, UsageError

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]+")
_MAX_COMMAND = 512
_MAX_ANCESTORS = 24
# A process title is set some seconds after the start: slow facts are read again this often while a process is young, and seldom
# afterwards. A parent that dies shows at once, by another parent's pid.
_REFRESH_S, _REFRESH_OLD_S = 5.0, 30.0
_YOUNG_S = 60.0
# The boot time in /proc/stat is whole seconds and moves with the clock, so a birth time told by another program may differ by
# one; a pid cannot come round again within that.
BIRTH_TOLERANCE_S = 2.0


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """One living process. cpu_s: user and system seconds since birth. command: clean, secrets masked."""

    pid: int
    started_s: float
    ppid: int
    session: int
    uid: int
    user: str
    title: str  # argv[0], clean
    command: str
    host_rss_b: int
    cpu_s: float
    rank: str = ""
    job_id: str = ""
    orphan_reason: str = ""  # "" = its parent lives, or it needs none


@dataclass(slots=True)
class _Slow:
    """What does not change each second, with the time it was read."""

    start_ticks: int
    read_at: float
    ppid: int
    uid: int
    user: str
    title: str
    command: str
    rank: str
    job_id: str
    orphan_reason: str


class ProcessTable:
    """Facts of given pids, cheap to ask every second: one small read a pid, the rest is kept and refreshed now and then.

    proc: the /proc folder (another one in tests). Not safe to share between threads.
    """

    def __init__(self, proc: str = "/proc") -> None:
        self._proc = proc
        self._slow: dict[int, _Slow] = {}
        self._users: dict[int, str] = {}
        # of one round: the ranks of a server have the same parents
        self._jobs_above: dict[int, str] = {}
        self._argvs: dict[int, list[str]] = {}
        self._ticks = os.sysconf("SC_CLK_TCK")
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._boot_s = _boot_time_s(proc)

    def read(self, pids: Iterable[int]) -> dict[int, ProcessFacts]:
        """Facts of the pids that exist here; one that does not (another PID namespace, already gone) is left out."""
        now, wall_s = time.monotonic(), time.time()
        out: dict[int, ProcessFacts] = {}
        wanted = set(pids)
        self._jobs_above.clear()
        self._argvs.clear()
        for pid in wanted:
            stat = read_stat(self._proc, pid)
            if stat is None:
                continue
            ppid, session, cpu_ticks, start_ticks, rss_pages = stat
            started_s = self._boot_s + start_ticks / self._ticks
            slow = self._slow.get(pid)
            if (
                slow is None
                or slow.start_ticks != start_ticks
                or slow.ppid != ppid
                or now - slow.read_at > (_REFRESH_S if wall_s - started_s < _YOUNG_S else _REFRESH_OLD_S)
            ):
                slow = self._read_slow(pid, stat, now, slow)
                self._slow[pid] = slow
            out[pid] = ProcessFacts(
                pid=pid,
                started_s=started_s,
                ppid=ppid,
                session=session,
                uid=slow.uid,
                user=slow.user,
                title=slow.title,
                command=slow.command,
                host_rss_b=rss_pages * self._page,
                cpu_s=cpu_ticks / self._ticks,
                rank=slow.rank,
                job_id=slow.job_id,
                orphan_reason=slow.orphan_reason,
            )
        for pid in [p for p in self._slow if p not in wanted]:
            del self._slow[pid]
        return out

    def _read_slow(
        self, pid: int, stat: tuple[int, int, int, int, int], now: float, old: _Slow | None
    ) -> _Slow:
        ppid, session, _, start_ticks, _ = stat
        argv = _read_argv(self._proc, pid)
        title = clean(argv[0]) if argv else clean(_read_text(f"{self._proc}/{pid}/comm"))
        command = clean(" ".join(mask_argv(argv)))[:_MAX_COMMAND] if argv else title
        try:
            uid = os.stat(f"{self._proc}/{pid}").st_uid
        except OSError:
            uid = -1
        same = old is not None and old.start_ticks == start_ticks
        environ = _read_environ(self._proc, pid)
        job_id = (old.job_id if same and old else "") or _job_in(environ) or self._job_above(ppid)
        rank = parse_rank(title) or _rank_of(environ)
        return _Slow(
            start_ticks,
            now,
            ppid,
            uid,
            self._user(uid),
            title,
            command,
            rank,
            job_id,
            self._orphan(pid, session, argv, title, ppid, old if same else None),
        )

    def _user(self, uid: int) -> str:
        if uid not in self._users:
            try:
                self._users[uid] = pwd.getpwuid(uid).pw_name
            except KeyError:
                self._users[uid] = str(uid) if uid >= 0 else ""
        return self._users[uid]

    def _job_above(self, ppid: int) -> str:
        """The job id in the environment of the nearest ancestor that has one, beginning with this parent.

        A process that sets its title writes over its own environment, so the ancestors matter.
        """
        chain: list[int] = []
        job_id = ""
        while not job_id and ppid > 1 and ppid not in chain and len(chain) < _MAX_ANCESTORS:
            if ppid in self._jobs_above:
                job_id = self._jobs_above[ppid]
                break
            chain.append(ppid)
            job_id = _job_in(_read_environ(self._proc, ppid))
            stat = read_stat(self._proc, ppid)
            ppid = stat[0] if stat else 0
        self._jobs_above.update(dict.fromkeys(chain, job_id))
        return job_id

    def _orphan(
        self, pid: int, session: int, argv: Sequence[str], title: str, ppid: int, old: _Slow | None
    ) -> str:
        """Why the process is left over, or "". Only processes that a parent must feed are judged: a server's ranks, and
        children of Python's multiprocessing. Their parent is the server: a Python program of the same session, which neither
        an init process is nor whatever else adopts the children of the dead."""
        if old is not None and old.orphan_reason:
            return old.orphan_reason  # nobody gets a dead parent back
        is_rank = bool(parse_rank(title))
        is_child = any("multiprocessing" in part for part in argv[1:])
        if not (is_rank or is_child) or ppid <= 0:
            return ""  # a parent outside this namespace cannot be judged
        parent = self._argvs.get(ppid)
        if parent is None:
            parent = self._argvs[ppid] = _read_argv(self._proc, ppid)
        words = " ".join(parent) or _read_text(f"{self._proc}/{ppid}/comm")
        above = read_stat(self._proc, ppid)
        is_adopted = above is not None and session not in (above[1], pid)
        if "supervisord" in words or is_adopted or (old is not None and old.ppid != ppid):
            alive = False
        else:
            alive = any(
                mark in words for mark in ("python", "sglang", "SGLang", "vllm", "VLLM", "ray::", "k2tui")
            )
        if alive:
            return ""
        what = "rank" if is_rank else "worker"
        return f"{what} without its server (parent is now {clean(os.path.basename(parent[0])) if parent else 'gone'}, pid {ppid})"


def as_process(
    pid: int,
    index: int,
    memory_b: int | None,
    kind: str,
    slice_id: int | None,
    share: int | None,
    fact: ProcessFacts | None,
    cpu_percent: float | None,
    uid: int,
) -> GpuProcess:
    """A process for the screen and for JSON. index: of its GPU, -1 for one that is shown as the host's. fact None: not visible here."""
    if fact is None:
        return GpuProcess(
            pid,
            gpu_index=index,
            memory_used_b=memory_b,
            kind=kind,
            gpu_instance=slice_id,
            sm_utilization=share,
            is_visible=False,
            is_own=False,
        )
    return GpuProcess(
        pid=pid,
        name=short_name(fact.title, fact.command),
        user=fact.user,
        gpu_index=index,
        memory_used_b=memory_b,
        sm_utilization=share,
        host_rss_b=fact.host_rss_b,
        started_s=fact.started_s,
        rank=fact.rank,
        job_id=fact.job_id,
        is_orphan=bool(fact.orphan_reason),
        command=fact.command,
        kind=kind,
        ppid=fact.ppid,
        is_own=fact.uid == uid,
        gpu_instance=slice_id,
        host_cpu_percent=cpu_percent,
        orphan_reason=fact.orphan_reason,
    )


@functools.lru_cache(maxsize=256)
def short_name(title: str, command: str) -> str:
    """What a narrow column shows: the title a server gave itself, the module of `python -m`, the script, or the program."""
    if "::" in title:
        return title.split()[0]
    words = command.split()
    base = os.path.basename(words[0]) if words else title
    if re.fullmatch(r"python[\d.]*", base):
        for number, word in enumerate(words[1:], 1):
            if word == "-m" and number + 1 < len(words):
                return words[number + 1]
            if word == "-c":
                break
            if not word.startswith("-"):
                return os.path.basename(word)
    return base


def clean(text: str) -> str:
    """The text without control characters, so that nothing in a process name reaches the terminal as an order."""
    return _CONTROL.sub(" ", text).strip()


def _read_text(path: str) -> str:
    try:
        with open(path, "rb") as fh:
            return fh.read(65536).decode("utf-8", "replace")
    except OSError:
        return ""


def _read_argv(proc: str, pid: int) -> list[str]:
    raw = _read_text(f"{proc}/{pid}/cmdline").rstrip("\0 ")
    return raw.split("\0") if raw else []


def _read_environ(proc: str, pid: int) -> dict[str, str]:
    raw = _read_text(f"{proc}/{pid}/environ")
    return dict([part.split("=", 1) for part in raw.split("\0") if "=" in part])


def _job_in(environ: dict[str, str]) -> str:
    job_id = environ.get("K2TUI_JOB_ID", "") or Path(environ.get("K2TUI_JOB_DIR", "")).name
    return clean(job_id)[:128]


def _rank_of(environ: dict[str, str]) -> str:
    """Rank as torchrun and its like give it to a worker."""
    rank = environ.get("RANK", "")
    return f"rank {rank}" if rank.isdigit() and "WORLD_SIZE" in environ else ""


def read_stat(proc: str, pid: int) -> tuple[int, int, int, int, int] | None:
    """(ppid, session, cpu ticks, start ticks, rss pages); None when there is no such process (a zombie counts as none)."""
    try:
        fd = os.open(f"{proc}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            raw = os.read(fd, 4096)
        finally:
            os.close(fd)
    except OSError:
        return None
    rest = raw[raw.rfind(b")") + 2 :].split()
    if len(rest) < 22 or rest[0] in (b"Z", b"X"):
        return None
    return int(rest[1]), int(rest[3]), int(rest[11]) + int(rest[12]), int(rest[19]), int(rest[21])


def _boot_time_s(proc: str) -> float:
    for line in _read_text(f"{proc}/stat").splitlines():
        if line.startswith("btime "):
            return float(line.split()[1])
    return 0.0


def birth_time_s(pid: int, proc: str = "/proc") -> float | None:
    """Unix seconds at which the process was born; None when it does not exist."""
    stat = read_stat(proc, pid)
    return None if stat is None else _boot_time_s(proc) + stat[3] / os.sysconf("SC_CLK_TCK")


def describe_process(pid: int, born_s: float, *, proc: str = "/proc") -> tuple[str, ...]:
    """One process for people: command, where, cost, parents, children, environment; secrets masked, one fact a line.

    Raises K2Error when it has ended, or the pid belongs to another process now.
    """
    if not _is_alive(pid, born_s):
        raise K2Error(f"pid {pid} has ended")
    stat = read_stat(proc, pid)
    table = ProcessTable(proc)
    fact = table.read([pid]).get(pid)
    if stat is None or fact is None:
        raise K2Error(f"pid {pid} has ended")
    age_s = max(0.0, time.time() - fact.started_s)
    status = dict(
        line.split(":", 1) for line in _read_text(f"{proc}/{pid}/status").splitlines() if ":" in line
    )
    lines = [
        f"pid {pid}, {fact.user}, started {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(fact.started_s))}",
        f"command {fact.command}",
        f"folder {clean(_link(f'{proc}/{pid}/cwd')) or 'not readable'}",
        f"host memory {fact.host_rss_b >> 20} MiB, swapped {clean(status.get('VmSwap', '0 kB'))}, "
        f"{clean(status.get('Threads', '?'))} threads, {_count(f'{proc}/{pid}/fd')} open files",
        f"CPU {fact.cpu_s:.1f} s in all, {100 * fact.cpu_s / age_s if age_s else 0:.0f}% of a core over its life",
    ]
    lines += [f"rank {fact.rank}"] if fact.rank else []
    lines += [f"job {fact.job_id}"] if fact.job_id else []
    lines += [f"orphan: {fact.orphan_reason}"] if fact.orphan_reason else []
    lines += ["", "parents and children"]
    chain: list[int] = []
    parent = fact.ppid
    while parent > 0 and len(chain) < _MAX_ANCESTORS:
        chain.append(parent)
        above = read_stat(proc, parent)
        parent = above[0] if above else 0
    for depth, number in enumerate([*reversed(chain), pid]):
        lines.append(f"{'  ' * depth}{number} {_command_of(proc, number)}"[:200])
    for child in _read_text(f"{proc}/{pid}/task/{pid}/children").split()[:50]:
        lines.append(f"{'  ' * (len(chain) + 1)}{child} {_command_of(proc, int(child))}"[:200])
    environ = mask_env(_read_environ(proc, pid))
    lines += [
        "",
        "environment"
        if environ
        else "environment not readable (another user's, or overwritten by its title)",
    ]
    lines += [clean(f"{name}={value}")[:300] for name, value in sorted(environ.items())]
    return tuple(lines)


def _command_of(proc: str, pid: int) -> str:
    argv = _read_argv(proc, pid)
    return clean(" ".join(mask_argv(argv))) if argv else clean(_read_text(f"{proc}/{pid}/comm"))


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _count(folder: str) -> int | str:
    try:
        return len(os.listdir(folder))
    except OSError:
        return "?"


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of one process. outcome: "ended" (by SIGTERM), "killed" (SIGKILL was needed), "already gone", "still there"."""

    pid: int
    outcome: str


def end_processes(
    targets: Iterable[tuple[int, float]],
    *,
    grace_s: float = 5.0,
    kill_s: float = 5.0,
    allow_others: bool = False,
    how: str = "end",
) -> tuple[Ended, ...]:
    """End exactly these processes, each named by (pid, birth time in Unix seconds): SIGTERM, then SIGKILL after grace_s.

    how: "end" as said, or one signal alone: "TERM", "INT" or "KILL" (UsageError for anything else).

    All are checked before the first signal: a pid that now belongs to another process, to another user (unless allow_others),
    or that is this program or one of its ancestors refuses the whole order with K2Error and nothing is signalled. The check and
    the signals go through pidfds where the kernel has them, so a pid that comes round again is never hit.
    """
    term, kill = (signal.SIGTERM, grace_s, "ended"), (signal.SIGKILL, kill_s, "killed")
    known = {
        "end": (term, kill),
        "TERM": (term,),
        "INT": ((signal.SIGINT, grace_s, "ended"),),
        "KILL": (kill,),
    }
    steps = known.get(how)
    if steps is None:
        raise UsageError(f"{how!r} is no way to end a process", "ways: " + ", ".join(known))
    wanted = dict(targets)
    protected = _self_and_ancestors()
    handles: dict[int, int | None] = {}
    results: dict[int, str] = {}
    try:
        for pid, born_s in wanted.items():
            if pid in protected or pid <= 1:
                raise K2Error(f"pid {pid} is this program, one of its ancestors or init: nothing was ended")
            try:
                handles[pid] = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
            except ProcessLookupError:
                results[pid] = "already gone"
                continue
            except OSError:
                handles[pid] = None  # an old kernel: the birth time is checked again before each signal
            now_born_s = birth_time_s(pid)
            if now_born_s is None:
                results[pid] = "already gone"
            elif abs(now_born_s - born_s) > BIRTH_TOLERANCE_S:
                raise K2Error(
                    f"pid {pid} now belongs to another process (born {now_born_s - born_s:+.0f} s apart): nothing was ended",
                    "look at the list again and repeat the order",
                )
            elif not allow_others and os.stat(f"/proc/{pid}").st_uid != os.getuid():
                raise K2Error(
                    f"pid {pid} belongs to another user: nothing was ended", "ask its owner to end it"
                )
        waiting = [pid for pid in wanted if pid not in results]
        for number, seconds, outcome in steps:
            for pid in waiting:
                _signal(pid, wanted[pid], handles.get(pid), number)
            deadline = time.monotonic() + seconds
            while waiting and time.monotonic() < deadline:
                _wait(waiting, handles, min(0.1, max(0.0, deadline - time.monotonic())))
                for pid in [p for p in waiting if not _is_alive(p, wanted[p])]:
                    results[pid] = outcome
                    waiting.remove(pid)
        for pid in waiting:
            results[pid] = "still there"
    finally:
        for handle in handles.values():
            if handle is not None:
                os.close(handle)
    return tuple(Ended(pid, results[pid]) for pid in wanted)


def _signal(pid: int, born_s: float, handle: int | None, number: signal.Signals) -> None:
    try:
        if handle is not None:
            signal.pidfd_send_signal(handle, number)
        elif _is_alive(pid, born_s):
            os.kill(pid, number)
    except ProcessLookupError:
        pass
    except PermissionError:
        raise K2Error(
            f"no permission to end pid {pid}", "it belongs to another user; ask its owner, or use sudo"
        )


def _is_alive(pid: int, born_s: float) -> bool:
    now_born_s = birth_time_s(pid)
    return now_born_s is not None and abs(now_born_s - born_s) <= BIRTH_TOLERANCE_S


def _wait(pids: Sequence[int], handles: dict[int, int | None], seconds: float) -> None:
    ready = [handle for pid in pids if (handle := handles.get(pid)) is not None]
    if len(ready) == len(pids):
        select.select(ready, [], [], seconds)
    else:
        time.sleep(seconds)


def _self_and_ancestors() -> set[int]:
    out = {os.getpid()}
    pid = os.getppid()
    while pid > 0 and pid not in out:
        out.add(pid)
        stat = read_stat("/proc", pid)
        pid = stat[0] if stat else 0
    return out


def listener(port: int) -> int | None:
    """Process id of who listens on this TCP port; None when nobody does, or it cannot be told (another user's process)."""
    if sys.platform != "linux":
        import psutil

        try:
            found = (c.pid for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == port and c.status == psutil.CONN_LISTEN)
            return next((pid for pid in found if pid), None)
        except (psutil.Error, OSError):
            return None
    inodes: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and int(words[1].rsplit(":", 1)[1], 16) == port:  # 0A = LISTEN
                    inodes.add(f"socket:[{words[9]}]")
    for folder in Path("/proc").glob("[0-9]*/fd") if inodes else ():
        with contextlib.suppress(OSError):
            for entry in folder.iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(entry) in inodes:
                        return int(folder.parent.name)
    return None
