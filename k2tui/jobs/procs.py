"""Processes by identity (pid + birth + boot), descent and environment. Knows nothing of job folders.

On Linux everything comes from /proc without an import; elsewhere psutil is asked.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

_LINUX = sys.platform.startswith("linux")
JOB_VAR = "K2TUI_JOB_ID"
KEEPER_VAR = "K2TUI_KEEPER_OF"


def boot_id() -> str:
    """One text per boot of this machine. K2TUI_FAKE_BOOT_ID replaces it, for trying out a reboot."""
    fake = os.environ.get("K2TUI_FAKE_BOOT_ID")
    if fake:
        return fake
    if _LINUX:
        try:
            return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            return ""
    import psutil

    return f"{psutil.boot_time():.0f}"


def pid_space() -> str:
    """The pid namespace: a pid means nothing to a reader in another container."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def wall_s() -> float:
    """Unix seconds. K2TUI_FAKE_CLOCK names a file with an offset in seconds, for trying out a clock that jumps."""
    fake = os.environ.get("K2TUI_FAKE_CLOCK")
    if fake:
        try:
            return time.time() + float(Path(fake).read_text())
        except (OSError, ValueError):
            pass
    return time.time()


def host() -> str:
    """This machine's name: another boot id under the same name is a reboot, under another name another machine."""
    return os.uname().nodename


def since_boot_s() -> float:
    """Seconds since boot: never jumps, the same clock for every process of one boot."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from `state` on; None when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as fh:
            raw = fh.read()
    except OSError:
        return None
    return raw[raw.rindex(")") + 2 :].split()


def birth(pid: int) -> str:
    """When the process was born, as a text to compare; "" when it does not exist (or is a zombie)."""
    if _LINUX:
        fields = _stat(pid)
        return "" if fields is None or fields[0] in ("Z", "X") else fields[19]
    import psutil

    try:
        process = psutil.Process(pid)
        return "" if process.status() == psutil.STATUS_ZOMBIE else f"{process.create_time():.2f}"
    except psutil.Error:
        return ""


def is_alive(pid: int | None, born: str, boot: str) -> bool:
    """Whether exactly this process lives: same boot, same pid, same birth."""
    return bool(pid and born) and boot == boot_id() and birth(pid or 0) == born


def all_pids() -> list[int]:
    if _LINUX:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    import psutil

    return psutil.pids()


def by_job(job_ids: Iterable[str]) -> dict[str, list[int]]:
    """Living processes whose environment carries K2TUI_JOB_ID, by job id. One pass over all processes of this user."""
    wanted = {i.encode(): i for i in job_ids}
    found: dict[str, list[int]] = {i: [] for i in wanted.values()}
    if not wanted:
        return found
    marker = JOB_VAR.encode() + b"="
    for pid in all_pids():
        value = _variable(_environ(pid), marker)
        if value in wanted and birth(pid):
            found[wanted[value]].append(pid)
    return found


def job_id_of(pid: int) -> str:
    """The job that a process belongs to, by its environment; "" for any other process, and for those of other users."""
    return (_variable(_environ(pid), JOB_VAR.encode() + b"=") or b"").decode(errors="replace")


def holders(path: Path) -> list[int]:
    """Living processes that have this file open. Linux only: elsewhere nobody is found."""
    found: list[int] = []
    if not _LINUX:
        return found
    try:
        wanted = os.stat(path)
    except OSError:
        return found
    for pid in all_pids():
        if pid == os.getpid():
            continue
        try:
            for fd in os.listdir(f"/proc/{pid}/fd"):
                facts = os.stat(f"/proc/{pid}/fd/{fd}")
                if (facts.st_ino, facts.st_dev) == (wanted.st_ino, wanted.st_dev):
                    found.append(pid)
                    break
        except OSError:
            continue
    return found


def _variable(environ: bytes, marker: bytes) -> bytes | None:
    """The value that stands after `NAME=` in a process's environment."""
    at = 0 if environ.startswith(marker) else environ.find(b"\0" + marker) + 1
    if not environ.startswith(marker, at):
        return None
    return environ[at + len(marker) :].split(b"\0", 1)[0]


def is_keeper_of_another(pid: int, job_id: str) -> bool:
    """Whether the process is the keeper of a job other than this one (a job may submit jobs)."""
    value = _variable(_environ(pid), KEEPER_VAR.encode() + b"=")
    return value is not None and value != job_id.encode()


def _environ(pid: int) -> bytes:
    if _LINUX:
        try:
            with open(f"/proc/{pid}/environ", "rb") as fh:
                return fh.read()
        except OSError:
            return b""
    import psutil

    try:
        return b"\0".join(f"{k}={v}".encode() for k, v in psutil.Process(pid).environ().items())
    except (psutil.Error, OSError):
        return b""


def family(leaders: Iterable[int], *, sessions: Iterable[int] = (), spare_keepers_but: str = "") -> set[int]:
    """Living processes that are one of `leaders`, belong to one of `sessions`, or descend from such a one.

    spare_keepers_but: a job id; keepers of other jobs, and all below them, are left out.
    """
    roots = {p for p in leaders if p > 0}
    sids = {s for s in sessions if s > 0}
    if not roots and not sids:
        return set()
    children: dict[int, list[int]] = {}
    todo: list[int] = []
    for pid in all_pids():
        if _LINUX:
            fields = _stat(pid)
            if fields is None or fields[0] in ("Z", "X"):
                continue
            parent, session = int(fields[1]), int(fields[3])
        else:
            import psutil

            try:
                parent, session = psutil.Process(pid).ppid(), os.getsid(pid)
            except (psutil.Error, OSError):
                continue
        children.setdefault(parent, []).append(pid)
        if pid in roots or session in sids:
            todo.append(pid)
    found: set[int] = set()
    while todo:
        pid = todo.pop()
        if pid in found or (spare_keepers_but and is_keeper_of_another(pid, spare_keepers_but)):
            continue
        found.add(pid)
        todo += children.get(pid, ())
    return found


def rss_b(pids: Iterable[int]) -> int:
    """Resident bytes of these processes together (pages shared between them count for each)."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = 0
    for pid in pids:
        if _LINUX:
            try:
                with open(f"/proc/{pid}/statm", encoding="ascii") as fh:
                    total += int(fh.read().split()[1]) * page
            except (OSError, IndexError, ValueError):
                continue
        else:
            import psutil

            try:
                total += psutil.Process(pid).memory_info().rss
            except psutil.Error:
                continue
    return total


def own_peak_rss_b() -> int:
    """The largest resident size that this process ever had."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1024 if _LINUX else 1)


def signal_all(pids: Iterable[int], number: signal.Signals) -> int:
    """Send a signal to each; returns how many took it."""
    sent = 0
    for pid in pids:
        try:
            os.kill(pid, number)
            sent += 1
        except OSError:
            continue
    return sent


def oom_kills() -> int | None:
    """How many processes the kernel's OOM killer has ended since boot (this container's own count where there is one). None: no
    counter can be read here."""
    best: int | None = None
    for path in ("/sys/fs/cgroup/memory.events", "/proc/vmstat"):
        try:
            with open(path, encoding="ascii") as fh:
                for line in fh:
                    if line.startswith("oom_kill "):
                        best = max(best or 0, int(line.split()[1]))
        except (OSError, ValueError, IndexError):
            continue
    return best


def be_subreaper() -> bool:
    """Make orphaned descendants come to this process instead of init, so that none escapes unseen. Linux only."""
    if not _LINUX:
        return False
    try:
        import ctypes

        return ctypes.CDLL(None, use_errno=True).prctl(36, 1, 0, 0, 0) == 0
    except (OSError, AttributeError):
        return False
