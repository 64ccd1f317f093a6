"""How a job ended, in words for people. Values in, one sentence out."""

from __future__ import annotations

import signal

NO_OOM_KILL = "the kernel counted no out-of-memory kill meanwhile"  # in a job's reason: both counts were read, and are the same

_PLAIN = {
    signal.SIGKILL: "killed by signal 9",
    signal.SIGSEGV: "crashed (segmentation fault, signal 11)",
    signal.SIGABRT: "aborted itself (signal 6)",
    signal.SIGBUS: "crashed (bus error, signal 7: /dev/shm full or a file cut short while it was mapped?)",
    signal.SIGILL: "crashed (illegal instruction, signal 4: built for another CPU?)",
    signal.SIGFPE: "crashed (arithmetic error, signal 8)",
    signal.SIGXFSZ: "stopped by the file size limit (signal 25, see ulimit -f)",
    signal.SIGXCPU: "stopped by the CPU time limit (signal 24, see ulimit -t)",
    signal.SIGPIPE: "wrote to a pipe that nobody reads (signal 13)",
}


def exit_words(
    code: int | None, *, oom_kills: int | None = 0, log_tail: str = "", disk_free_b: int | None = None
) -> str:
    """`code`: exit code, negative = signal. oom_kills: how many processes the kernel's OOM killer ended while it ran; None = not known."""
    if code is None:
        return "exit code not known"
    if code < 0:
        number = -code
        try:
            sig = signal.Signals(number)
            words = _PLAIN.get(sig, f"ended by signal {number} ({sig.name})")
        except ValueError:
            return f"ended by signal {number}"
        if sig is signal.SIGKILL:
            if oom_kills:
                return f"killed by signal 9: the kernel's OOM killer ended {oom_kills} process{'es' if oom_kills > 1 else ''} while it ran"
            known = "" if oom_kills is None else f"; {NO_OOM_KILL}"
            return f"killed by signal 9, not by k2tui{known}"
        return words
    if code == 0:
        return "exit 0"
    full = "No space left on device" in log_tail or "Errno 28" in log_tail
    if full or (disk_free_b is not None and disk_free_b < 1 << 20):
        return f"exit {code}: disk full"
    if oom_kills:
        return f"exit {code}; the kernel's OOM killer ended {oom_kills} process{'es' if oom_kills > 1 else ''} while it ran"
    if code in (126, 127):
        return (
            f"exit {code}: the command could not be run" if code == 126 else f"exit {code}: command not found"
        )
    if code > 128 and code - 128 in {int(s) for s in signal.Signals}:
        return f"exit {code} (its own child ended by signal {code - 128}?)"
    return f"exit {code}"
