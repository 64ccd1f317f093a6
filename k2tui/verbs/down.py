"""`k2tui down [JOB ...]`: stop servers that k2tui started, see that processes and GPU memory are gone, and say what is left."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from k2tui.core.job import Job

HELP = "stop the server (or the given jobs; --all stops every job)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", nargs="*", help="job ids; default: every running server")
    parser.add_argument("--all", action="store_true", help="every live job, not only servers")
    parser.add_argument("--force", action="store_true", help="do not ask, also for a server that a running pipeline or tuning run needs")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="after S seconds, and never before its own grace is over, every process of the job is killed (default 60)")
    parser.add_argument("--json", action="store_true")


def _is_agreed(servers: Sequence[Job], jobs: Sequence[Job]) -> bool:
    """Whether these servers may be stopped: asks when a running job needs one. Raises K2Error where nobody can be asked."""
    from k2tui.core.job_text import plain
    from k2tui.core.server_jobs import users_of
    from k2tui.errors import K2Error

    lines = [f"{u.spec.title or u.spec.stage} (job {u.spec.id}) needs the server {s.spec.id}: a step of it will fail" for s in servers for u in users_of(s, jobs)]
    if not lines:
        return True
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise K2Error(plain("; ".join(lines)), "nothing was stopped; --force, or the server's id (k2tui down ID), stops it all the same")
    print("\n".join(plain(line) for line in lines), file=sys.stderr)
    print("Stop it all the same? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def run(args: argparse.Namespace) -> int:
    from k2tui.core.server_jobs import is_live, server_jobs
    from k2tui.jobs import folder

    if args.job:
        chosen = [folder.get(j) for j in args.job]
    else:
        jobs = folder.list_jobs()
        chosen = [j for j in (jobs if args.all else server_jobs(jobs)) if is_live(j)]
        if not args.all and not args.force and not _is_agreed(chosen, jobs):
            return 1
    if not chosen:
        print(json.dumps({"schema": 1, "stopped": []}) if args.json else "nothing is running", file=sys.stdout if args.json else sys.stderr)
        return 0
    from k2tui.lifecycle import stop_servers

    code = 0
    ends = stop_servers([job.spec.id for job in chosen], timeout_s=args.timeout)
    for end in ends:
        job_id = end.job.spec.id
        if not end.job.state.is_final:
            code = 124
            print(f"k2tui: {job_id} has not ended after {args.timeout:g} s ({end.job.state}); {end.words}", file=sys.stderr)
        elif not end.is_clean:
            code = max(code, 1)
            print(f"k2tui: {job_id}: {end.words}", file=sys.stderr)
        elif not args.json:
            print(f"{job_id}: {end.words}")
    if args.json:
        print(json.dumps({"schema": 1, "stopped": [end.as_json() for end in ends]}, ensure_ascii=False))
    return code
