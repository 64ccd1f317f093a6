"""`k2tui jobs`: list, show, logs, stop, submit, retry, delete, wait, adopt."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from typing import TYPE_CHECKING, Any

from k2tui.errors import K2Error, UsageError

if TYPE_CHECKING:
    from k2tui.core.job import Job

READS = ("list", "show", "logs")  # these go on with a broken config
HELP = "jobs that outlive the dashboard: list, show, logs, stop, submit, retry, delete, wait, adopt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sub = parser.add_subparsers(dest="order", metavar="ORDER", required=True)

    def order(
        name: str, text: str, *, with_id: bool = True, with_json: bool = True
    ) -> argparse.ArgumentParser:
        child = sub.add_parser(name, help=text, description=text)
        if with_id:
            child.add_argument(
                "job", help="job id, a unique part of it, a stage's name (its newest job), or: last"
            )
        if with_json:
            child.add_argument("--json", action="store_true", help="print JSON")
        return child

    listing = order("list", "all jobs, newest first", with_id=False)
    listing.add_argument("--all", action="store_true", help="also the ended ones beyond the newest 20")
    listing.add_argument("--stage", help="only jobs of this stage")
    listing.add_argument("--state", help="only jobs in this state (running, failed, ...; active = not ended)")
    order("show", "one job: state, command, times, use of CPU, memory and GPUs")
    logs = order("logs", "the job's output", with_json=False)
    logs.add_argument(
        "-n", "--lines", type=int, default=200, help="how many last lines (default 200, 0 = all)"
    )
    logs.add_argument("-f", "--follow", action="store_true", help="go on until the job ends")
    logs.add_argument("--raw", action="store_true", help="bytes as they are: escape codes and secrets included")
    stop = order(
        "stop",
        "stop a job: SIGTERM, grace, then SIGKILL for the whole family; where it holds GPUs, until their memory is back",
    )
    stop.add_argument(
        "--wait",
        type=float,
        default=30.0,
        metavar="S",
        help="wait up to S seconds for its end (default 30; a server at least for its grace); 0: only ask",
    )
    submit = order("submit", "run a command as a job", with_id=False)
    submit.add_argument("--stage", default="job", help="stage name, part of the id (default: job)")
    submit.add_argument("--title", default="", help="what the list shows (default: the command)")
    submit.add_argument("--kind", choices=("task", "server"), default="task")
    submit.add_argument("--cwd", default="", help="working folder (default: this one)")
    submit.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="extra environment (may repeat)"
    )
    submit.add_argument(
        "--after",
        action="append",
        default=[],
        metavar="JOB",
        help="start when this job has succeeded (may repeat)",
    )
    submit.add_argument(
        "--lock",
        action="append",
        default=[],
        metavar="NAME",
        help="hold this name, such as gpu:0 or port:30000",
    )
    submit.add_argument(
        "--requires", action="append", default=[], metavar="COND", help="wait for file:PATH or url:http://..."
    )
    submit.add_argument(
        "--ensures",
        action="append",
        default=[],
        metavar="COND",
        help="fail if this does not hold after exit 0",
    )
    submit.add_argument("--timeout", type=float, metavar="S", help="stop and fail after S seconds of running")
    submit.add_argument(
        "--grace",
        type=float,
        default=15.0,
        metavar="S",
        help="seconds between SIGTERM and SIGKILL (default 15)",
    )
    submit.add_argument(
        "--priority", type=int, default=0, help="higher goes first among jobs that wait for the same lock"
    )
    submit.add_argument(
        "--restart",
        choices=("never", "on-failure", "always"),
        default="never",
        help="start again when it ends",
    )
    submit.add_argument(
        "--max-restarts", type=int, default=5, help="restarts in a row before it is given up (default 5)"
    )
    submit.add_argument(
        "--log-cap", type=float, metavar="MIB", help="rotate the log above this size (default 512)"
    )
    submit.add_argument(
        "--scope", action="store_true", help="run it by systemd-run --user --scope (see docs/jobs.md)"
    )
    submit.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="the command, without a shell"
    )
    retry = order("retry", "submit a job again; stages that can, go on after what the earlier run left")
    retry.add_argument(
        "--exact",
        action="store_true",
        help="with every word of its command, also those that begin from nothing",
    )
    delete = order("delete", "remove a job that has ended, with its log")
    delete.add_argument("--force", action="store_true", help="also an orphan, such as one of another machine")
    wait = order(
        "wait", "wait for a job's end; exit 0 when it succeeded, 1 when not, 124 when the time is over"
    )
    wait.add_argument("--timeout", type=float, metavar="S", help="at most S seconds")
    order(
        "adopt",
        "give jobs whose keeper was killed a new one (all of them, without being asked for one)",
        with_id=False,
    )


def run(args: argparse.Namespace) -> int:
    orders: dict[str, Any] = {
        "list": _list,
        "show": _show,
        "logs": _logs,
        "stop": _stop,
        "submit": _submit,
        "retry": _retry,
        "delete": _delete,
        "wait": _wait,
        "adopt": _adopt,
    }
    return int(orders[args.order](args))


def _print_json(value: Any) -> None:
    print(json.dumps({"schema": 1, **value}, ensure_ascii=False, indent=1))


def _list(args: argparse.Namespace) -> int:
    from k2tui.core.job_text import table, to_json
    from k2tui.jobs import folder

    jobs = folder.list_jobs()
    if args.stage:
        jobs = [j for j in jobs if j.spec.stage == args.stage]
    if args.state:
        jobs = [
            j for j in jobs if str(j.state) == args.state or (args.state == "active" and not j.state.is_final)
        ]
    if args.json:
        _print_json({"jobs": [to_json(j) for j in jobs]})
        return 0
    total = len(jobs)
    if not args.all:
        ended = 0
        kept: list[Job] = []
        for job in jobs:
            ended += job.state.is_final
            if not job.state.is_final or ended <= 20:
                kept.append(job)
        jobs = kept
    _say_place()
    if not jobs:
        print("no jobs" + (" like that" if args.stage or args.state else ""), file=sys.stderr)
        return 0
    print(table(jobs, time.time()))
    if total > len(jobs):
        print(f"{total - len(jobs)} older ones: k2tui jobs list --all", file=sys.stderr)
    return 0


def _say_place() -> None:
    from k2tui import paths
    from k2tui.jobs import place

    words = place.notice(paths.state_dir())
    if words:
        print(words, file=sys.stderr)


def _show(args: argparse.Namespace) -> int:
    from k2tui.core.job_text import card, to_json
    from k2tui.jobs import folder

    job = folder.get(args.job)
    where = str(folder.folder_of(job.spec.id))
    if args.json:
        _print_json({**to_json(job), "folder": where, "retry": _again(job)})
    else:
        print(card(job, time.time(), where))
        again = _again(job)
        if again:
            print(f"{'retry':<14} {again}")
    return 0


def _again(job: Job) -> str:
    """What a retry would do, for a job that ended early."""
    if not job.state.is_final or str(job.state) in ("succeeded", "skipped"):
        return ""
    from k2tui.orders import resumes

    kept = resumes(job.spec)
    if not kept:
        return f"begins from nothing: k2tui jobs retry {job.spec.id}"
    return f"goes on after {kept}: k2tui jobs retry {job.spec.id}"


def _logs(args: argparse.Namespace) -> int:
    from k2tui.core.job_mask import LineMask
    from k2tui.core.job_text import plain_line
    from k2tui.jobs import folder
    from k2tui.regular import NotRegularError, open_regular

    path = folder.log_path(args.job)
    job_id = path.parent.name
    out = sys.stdout.buffer
    mask = LineMask()

    def show(raw: bytes) -> None:
        if args.raw:
            out.write(raw)
        else:
            for line in raw.split(b"\n")[: -1 if raw.endswith(b"\n") else None]:
                out.write(mask(plain_line(line.decode("utf-8", "replace"))).encode() + b"\n")
        out.flush()

    at = 0
    try:
        with open_regular(path) as fh:
            start, size = _last_lines(fh, args.lines)
            fh.seek(start)
            while start < size:  # in pieces: a log may be larger than memory
                raw = fh.read(min(1 << 20, size - start))
                if not raw:
                    break
                if start + len(raw) < size and (cut := raw.rfind(b"\n")) >= 0 and not args.raw:
                    fh.seek(start + cut + 1)
                    raw = raw[: cut + 1]
                start += len(raw)
                show(raw)
            at = start
    except FileNotFoundError:
        if not args.follow:
            print(f"{job_id} has written nothing yet", file=sys.stderr)
            return 0
    except PermissionError as err:
        raise K2Error(f"{path}: {err.strerror}", "the log belongs to another user")
    except NotRegularError as err:
        raise K2Error(f"{path}: {err.strerror}", "something has put it in the place of the job's log")
    rest = b""
    while args.follow:
        job = folder.get(job_id)
        try:
            with open_regular(path) as fh:
                fh.seek(0, 2)
                if fh.tell() < at:  # rotated: a new beginning
                    at, rest = 0, b""
                fh.seek(at)
                new = fh.read(4 << 20)
        except FileNotFoundError:
            new = b""
        at += len(new)
        rest += new
        cut = rest.rfind(b"\n") + 1 if not args.raw else len(rest)
        if cut:
            show(rest[:cut])
            rest = rest[cut:]
        if job.state.is_final and not new:
            if rest:
                show(rest)
            print(f"{job_id} {job.state}: {job.reason}", file=sys.stderr)
            return 0 if str(job.state) == "succeeded" else 1
        if not new:
            time.sleep(0.2)
    return 0


def _last_lines(fh: Any, count: int) -> tuple[int, int]:
    """Where the last `count` lines of an open file begin (0 = the whole), and its size."""
    size = fh.seek(0, 2)
    if count <= 0:
        return 0, size
    at, seen = size, 0
    while at > 0:
        step = min(1 << 16, at)
        at -= step
        fh.seek(at)
        block = fh.read(step)
        if at + step == size and block.endswith(b"\n"):
            block = block[:-1]
        n = block.count(b"\n")
        if seen + n >= count:
            cut = len(block)
            for _ in range(count - seen):
                cut = block.rindex(b"\n", 0, cut)
            return at + cut + 1, size
        seen += n
    return 0, size


def _stop(args: argparse.Namespace) -> int:
    from k2tui.core.job_text import to_json
    from k2tui.jobs import folder
    from k2tui.lifecycle import holds_gpus, stop_servers

    before = folder.get(args.job)
    if before.state.is_final:
        if args.json:
            _print_json(to_json(before))
        else:
            print(f"{before.spec.id} had ended: {before.state} ({before.reason})")
        return 0
    if args.wait > 0 and holds_gpus(before.spec):
        (end,) = stop_servers([before.spec.id], timeout_s=args.wait)
        job, is_clean, words = end.job, end.is_clean, end.words
        facts = {**to_json(job), "stop": end.as_json()}
    else:
        job = folder.stop(before.spec.id, wait_s=args.wait)
        is_clean, words, facts = True, job.reason, to_json(job)
    if args.json:
        _print_json(facts)
    else:
        text = f"{job.spec.id} {job.state}" + (f": {words}" if words else "")
        print(text) if is_clean else print(f"k2tui: {text}", file=sys.stderr)
    return 124 if not job.state.is_final else 0 if is_clean else 1


def _submit(args: argparse.Namespace) -> int:
    from k2tui.core.job import JobSpec
    from k2tui.jobs import folder

    argv = list(args.command)
    if argv[:1] == ["--"]:
        argv = argv[1:]
    env: dict[str, str] = {}
    for pair in args.env:
        name, is_pair, value = pair.partition("=")
        if not name or not is_pair:
            raise UsageError(f"--env {pair!r}: write NAME=VALUE")
        env[name] = value
    cap_mib: float | None = args.log_cap
    if cap_mib is not None and not (math.isfinite(cap_mib) and cap_mib * (1 << 20) >= 1):
        raise UsageError(f"--log-cap {cap_mib:g}", "give a finite number of MiB, more than 0")
    spec = JobSpec(
        id="",
        stage=args.stage,
        title=args.title,
        argv=tuple(argv),
        kind=args.kind,
        cwd=args.cwd,
        env=env,
        after=tuple(args.after),
        locks=tuple(args.lock),
        timeout_s=args.timeout,
        grace_s=args.grace,
        priority=args.priority,
        requires=tuple(args.requires),
        ensures=tuple(args.ensures),
        restart=args.restart,
        max_restarts=args.max_restarts,
        log_cap_b=0 if cap_mib is None else int(cap_mib * (1 << 20)),
        scope=args.scope,
    )
    _say_place()
    return _submitted(args, folder.submit(spec))


def _submitted(args: argparse.Namespace, job_id: str) -> int:
    if args.json:
        _print_json({"id": job_id})
    else:
        print(job_id)
    return 0


def _retry(args: argparse.Namespace) -> int:
    from k2tui.orders import retry_job

    return _submitted(args, retry_job(args.job, exact=args.exact))


def _delete(args: argparse.Namespace) -> int:
    from k2tui.jobs import folder

    job_id = folder.folder_of(args.job).name
    if job_id != args.job:
        # nothing is deleted by a guess
        raise UsageError(f"delete wants the whole id: {job_id}")
    folder.delete(job_id, force=args.force)
    if args.json:
        _print_json({"deleted": job_id})
    else:
        print(f"deleted {job_id}")
    return 0


def _wait(args: argparse.Namespace) -> int:
    from k2tui.core.job_text import exit_code_of, to_json
    from k2tui.jobs import folder

    job = folder.wait(args.job, args.timeout)
    if args.json:
        _print_json(to_json(job))
    else:
        print(f"{job.spec.id} {job.state}" + (f": {job.reason}" if job.reason else ""))
    return exit_code_of(job) if job.state.is_final else 124


def _adopt(args: argparse.Namespace) -> int:
    from k2tui.jobs import folder

    adopted = folder.adopt_orphans()
    if args.json:
        _print_json({"adopted": adopted})
    else:
        print("\n".join(adopted) if adopted else "no job has lost its keeper")
    return 0
