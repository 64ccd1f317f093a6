"""A capture server of one's own: started from a profile's command with the plug-in visible, stopped whatever happens.

It installs nothing into the server's environment (`site.py`); SGLang from before its plug-in system is
started through `launch.py`, which installs the same hooks. The server ends with this process, also when that is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from k2tui.capture.client import Connection
from k2tui.capture.control import ROUTE
from k2tui.capture.ids import version_tuple
from k2tui.capture.site import make_site
from k2tui.core.load import State
from k2tui.errors import K2Error, NotReadyError
from k2tui.jobs.report import report_progress
from k2tui.lifecycle import free_memory, stop_child
from k2tui.servers import Follower, Target
from k2tui.sources.procs import listener

PLUGINS_SINCE = "0.5.11"
_PR_SET_PDEATHSIG = 1
_STOP_S = 20.0


@dataclass(frozen=True, slots=True)
class OwnServer:
    """url of a server that was started here. ended(): "" while it lives, else in words that it does not."""

    url: str
    ended: Callable[[], str]


def capture_argv(argv: Sequence[str], version: str) -> list[str]:
    """The server's command with capture hooks. version: SGLang's, "" when unknown (then it is taken to be a new one)."""
    found = list(argv)
    if version and version_tuple(version) < version_tuple(PLUGINS_SINCE) and "sglang.launch_server" in found:
        found[found.index("sglang.launch_server")] = "k2tui.capture.launch"
    return found


def sglang_version(python: str) -> str:
    """Version of the SGLang that this interpreter would import; "" when it cannot be told."""
    code = "import importlib.metadata as m; print(m.version('sglang'))"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


@contextlib.contextmanager
def own_server(
    argv: Sequence[str],
    env: Mapping[str, str],
    url: str,
    gpus: Sequence[int],
    root: Path,
    log_path: Path,
    site: Path,
    *,
    ready_timeout_s: float = 0.0,
    boundaries: Sequence[int] = (),
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[OwnServer]:
    """Start the server, wait until it captures below `root`, stop it at the end.

    argv, env, url, gpus: the profile's. site: folder for the entry point. ready_timeout_s: 0 = as long as it loads. Raises
    NotReadyError in words when the port is taken, the server ends, its plug-in does not load, or the time is over.
    """
    port = int(url.rsplit(":", 1)[1])
    with contextlib.suppress(OSError), socket.create_connection((urlsplit(url).hostname, port), 2):
        raise NotReadyError(
            f"port {port} is taken by another server{_who(listener(port))}",
            "give --port, stop that server, or use it with --url if it captures",
        )
    free_before = free_memory(gpus)
    root.mkdir(parents=True, exist_ok=True)
    told = {**os.environ, **env, "K2TUI_CAPTURE_DIR": str(root)}
    path = (str(make_site(site)), env.get("PYTHONPATH", ""), os.environ.get("PYTHONPATH", ""))
    told["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, path)))
    if boundaries:
        told["K2TUI_CAPTURE_BOUNDARIES"] = ",".join(map(str, boundaries))
    say(f"starting a capture server on {url}, log {log_path}")
    with log_path.open("ab") as log:
        start_b = log.tell()
        process = subprocess.Popen(
            list(argv),
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=told,
            start_new_session=True,
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )
    try:
        _wait(process, url, root, log_path, start_b, ready_timeout_s)
        yield OwnServer(url, lambda: _ended(process, log_path, start_b) if process.poll() is not None else "")
    finally:
        rest = stop_child(process, gpus=gpus, free_before=free_before, grace_s=_STOP_S)
        if not rest.is_clean:
            say(f"warning: the capture server is stopped; {rest.words}")


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def _wait(
    process: subprocess.Popen[bytes], url: str, root: Path, log_path: Path, start_b: int, limit_s: float
) -> None:
    follower = Follower(Target("", "", log_path, url, process.pid), learns=True)
    try:
        _wait_on(process, url, root, log_path, start_b, limit_s, follower)
    finally:
        follower.close()
    report_progress(0, None, "samples", "its server is ready", force=True)


def _tell(follower: Follower) -> None:
    """Tell the job how far the server's start is."""
    now = time.time()
    follower.step(now)
    follower.look(now)
    follower.join(now, None)
    load = follower.view(now, None).load
    words = f": {load.verdict}" if load.state is State.LOADING and load.verdict else ""
    report_progress(0, None, "samples", f"starting its server{words}")


def _wait_on(
    process: subprocess.Popen[bytes],
    url: str,
    root: Path,
    log_path: Path,
    start_b: int,
    limit_s: float,
    follower: Follower,
) -> None:
    began = time.monotonic()
    look = f"`k2tui watch {log_path}` says why"
    while True:
        if process.poll() is not None:
            raise NotReadyError(_ended(process, log_path, start_b), look)
        _tell(follower)
        conn = Connection(url, 5)
        try:
            status: dict[str, Any] = conn.call("GET", ROUTE)
            _refuse_stranger(process, url)
            if status["writers"] and Path(status["root"]).resolve() == root.resolve():
                return
        except OSError:
            pass  # it loads
        except K2Error as err:
            _refuse_stranger(process, url)
            if "HTTP 404" in err.message:
                raise NotReadyError(
                    "the server is up and does not capture: the plug-in was not loaded",
                    _own_words(log_path, start_b) or f"look for lines of k2tui in {log_path}",
                )
        finally:
            conn.close()
        if limit_s and time.monotonic() - began > limit_s:
            raise NotReadyError(f"the server was not ready in {limit_s:.0f} s", look)
        time.sleep(0.3)


def _refuse_stranger(process: subprocess.Popen[bytes], url: str) -> None:
    """Raise NotReadyError when what answers at url is another process than the server that was started here."""
    port = int(url.rsplit(":", 1)[1])
    pid = listener(port)
    if pid is None:
        return
    with contextlib.suppress(OSError):
        if os.getsid(pid) != process.pid:  # the server leads a session of its own; its workers are in it
            raise NotReadyError(
                f"port {port} is held by another process{_who(pid)}: the answer is not from the server started here",
                'give --port (in a pipeline step: port = "free"), or stop that process',
            )


def _who(pid: int | None) -> str:
    """ " (pid 17, python)"; "" when it is not known."""
    if pid is None:
        return ""
    try:
        name = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return f" (pid {pid})"
    return f" (pid {pid}, {''.join(c for c in name if c.isprintable())})"


def _ended(process: subprocess.Popen[bytes], log_path: Path, start_b: int) -> str:
    why = _own_words(log_path, start_b)
    return f"the server ended with code {process.returncode}" + (f": {why}" if why else "")


def _own_words(log_path: Path, start_b: int) -> str:
    """The last line in which the plug-in itself says why it does not capture; "" when there is none."""
    with log_path.open("rb") as fh:
        fh.seek(start_b)
        lines = fh.read()[-4_000_000:].decode(errors="replace").splitlines()
    said = [line for line in lines if "k2tui capture: " in line and "Error" in line]
    return said[-1].split("k2tui capture: ", 1)[1][:300] if said else ""
