"""`k2tui watch WHAT`: the dashboard on a server that k2tui did not start."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

TAKES_COMMAND = True  # words after `--` are a command
HELP = "watch a log, pid, URL, command or stdin of a server that k2tui did not start"
DESCRIPTION = (
    "WHAT is a log file, a pid (its log is found through its open stdout), a URL, `-` for standard input, or a command after `--` "
    "(docker logs -f NAME, journalctl -fu UNIT, kubectl logs -f POD), whose output is read."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", default="", help="LOG | PID | URL | - | -- COMMAND ...")
    parser.add_argument("--url", default="", help="where the server answers, when the log does not say")
    parser.add_argument(
        "--once", action="store_true",
        help="print what is known now, and end: exit code 0 ready, degraded or stopped, 1 failed, 3 loading, stalled or no answer, 4 no log",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="with --once: as JSON")
    parser.add_argument("--config", help="config file to read last")
    parser.set_defaults(command=[])


def _stdout_file(pid: int) -> Path | None:
    """The regular file that a process's stdout (or stderr) goes to."""
    for fd in (1, 2):
        try:
            name = os.readlink(f"/proc/{pid}/fd/{fd}")
        except OSError:
            continue
        path = Path(name)
        if path.is_absolute() and path.is_file():
            return path
    return None


def _url_of(pid: int) -> str:
    """--host and --port of a server's command line."""
    import psutil

    try:
        argv = psutil.Process(pid).cmdline()
    except psutil.Error:
        return ""
    found = {"--host": "127.0.0.1", "--port": ""}
    for i, part in enumerate(argv):
        key, eq, value = part.partition("=")
        if key in found:
            found[key] = value if eq else (argv[i + 1] if i + 1 < len(argv) else "")
    from k2tui.config import Profile

    return Profile(host=found["--host"], port=int(found["--port"])).url if found["--port"].isdigit() else ""


def _job_of(what: str | Path) -> Any:
    """The `servers.Target` of our own server job that has this log, pid or URL, None when it is none of ours."""
    from k2tui.core.server_jobs import is_live, server_jobs
    from k2tui.jobs import folder
    from k2tui.servers import target_of

    real = what.resolve() if isinstance(what, Path) else None
    for job in server_jobs(folder.list_jobs()):
        target = target_of(job)
        if real is not None and target.log is not None and target.log.resolve() == real:
            return target
        if real is None and is_live(job) and what in (target.url, str(job.pid)):
            return target
    return None


def target_for(what: str, url: str = "") -> Any:
    """A `servers.Target` for a log, a pid or a URL. Raises UsageError in words."""
    from k2tui.errors import UsageError
    from k2tui.servers import Target

    if what.startswith(("http://", "https://")):
        if (ours := _job_of(what.rstrip("/"))) is not None:
            return ours
        return Target(key=what, title=what, url=what.rstrip("/"))
    path = Path(what).expanduser()
    if what.isdigit() and not path.exists():
        pid = int(what)
        if not Path(f"/proc/{pid}").exists():
            raise UsageError(f"no process {pid}", "give the pid of a running server, or its log")
        if (ours := _job_of(what)) is not None:
            return ours
        log, found_url = _stdout_file(pid), url or _url_of(pid)
        if log is None and not found_url:
            raise UsageError(
                f"process {pid} writes to no file and its command line names no port",
                "give its log or its URL instead (docker logs -f: k2tui watch -- docker logs -f NAME)",
            )
        return Target(key=f"pid {pid}", title=f"pid {pid}", log=log, url=found_url, pid=pid)
    if path.is_dir():
        raise UsageError(f"{path} is a folder, not a log file", "give the path of the file in it")
    if not path.exists():
        raise UsageError(f"no file {path}", "give a log file, a pid, a URL, `-`, or `-- COMMAND`")
    if not path.is_file() and not path.is_fifo():
        raise UsageError(f"{path} is no log file", "give a regular file, a pid, a URL, `-`, or `-- COMMAND`")
    if not os.access(path, os.R_OK):
        raise UsageError(f"no permission to read {path}", f"run: chmod a+r {path}, or read it as its owner")
    if (ours := _job_of(path)) is not None:
        return replace(ours, url=url) if url else ours
    return Target(key=str(path), title=path.name, log=path, url=url)


def once_code(state: str, *, has_url: bool) -> int:
    """Exit code of `--once`. has_url: somebody could have answered, so "unknown" means that nobody did and not that there is no log."""
    known = {"ready": 0, "degraded": 0, "stopped": 0, "failed": 1, "loading": 3, "stalled": 3}
    return known.get(state, 3 if has_url else 4)


def run(args: argparse.Namespace) -> int:
    from k2tui.errors import UsageError

    if not args.what and not args.command:
        raise UsageError("nothing to watch", "k2tui watch server.log | PID | http://127.0.0.1:30000 | - | -- docker logs -f NAME")
    spool = None
    if args.what == "-" or args.command:
        from k2tui.spool import Spool

        spool = Spool(args.command or None)
        from k2tui.servers import Target

        target = Target(key=str(spool.path), title=" ".join(args.command)[:60] or "stdin", log=spool.path, url=args.url)
    else:
        target = target_for(args.what, args.url)
    try:
        if args.once:
            if target.log is not None and target.log.is_fifo():
                err = UsageError(f"{target.log} is a FIFO: it may never say anything", f"k2tui watch --once - < {target.log}")
                err.exit_code = 4
                raise err
            if spool is not None:
                spool.wait(10.0)
            from k2tui.servers import look_once
            from k2tui.verbs._config_warning import warn_of_config
            from k2tui.verbs.up import describe

            warn_of_config()
            view = look_once(target)
            facts = describe(view)
            if args.json:
                print(json.dumps({"schema": 1, **facts}, ensure_ascii=False))
            else:
                from k2tui.plain import clean, paint

                print(f"{paint(str(view.load.state), str(view.load.state))}  {clean(view.load.verdict)}")
                if view.load.proof_line:
                    print(f"line {view.load.proof_line_no}: {clean(view.load.proof_line)}")
                if view.load.hint:
                    print(clean(view.load.hint))
                if target.log is None and target.pid:
                    print(f"pid {target.pid} writes to no file: give its log for more (docker logs -f: k2tui watch -- docker logs -f NAME)")
            return once_code(view.load.state, has_url=bool(target.url))
        if spool is not None and not sys.stdin.isatty():
            try:
                os.dup2(os.open("/dev/tty", os.O_RDWR), 0)  # the keys come from the terminal, the log from what was stdin
            except OSError:
                raise UsageError("no terminal to draw on", "use --once, or give the log as a file") from None
        from k2tui import config
        from k2tui.verbs.dashboard import show_backend

        loaded = config.load(args.config)

        def backend() -> Any:
            from k2tui.monitor import Monitor  # late: the first paint does not wait for it

            return Monitor(loaded, watch=[target])

        return show_backend(backend, loaded)
    finally:
        if spool is not None:
            spool.close()
