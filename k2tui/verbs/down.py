"""`k2tui down [JOB ...]`: stop servers that k2tui started, and say what is left."""

from __future__ import annotations

import argparse
import json
import sys

HELP = "stop the server (or the given jobs; --all stops every job)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", nargs="*", help="job ids; default: every running server")
    parser.add_argument("--all", action="store_true", help="every live job, not only servers")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="wait at most S seconds for the end (default 60)")
    parser.add_argument("--json", action="store_true")


def run(args: argparse.Namespace) -> int:
    from k2tui.core.server_jobs import is_live, server_jobs
    from k2tui.jobs import folder

    if args.job:
        chosen = [folder.get(j) for j in args.job]
    else:
        jobs = folder.list_jobs()
        chosen = [j for j in (jobs if args.all else server_jobs(jobs)) if is_live(j)]
    if not chosen:
        print(json.dumps({"schema": 1, "stopped": []}) if args.json else "nothing is running", file=sys.stdout if args.json else sys.stderr)
        return 0
    for job in chosen:
        if is_live(job):
            folder.stop(job.spec.id)
    ended = []
    code = 0
    for job in chosen:
        last = folder.wait(job.spec.id, timeout_s=args.timeout)
        ended.append({"job": last.spec.id, "state": str(last.state), "reason": last.reason})
        if not last.state.is_final:
            code = 124
            print(f"k2tui: {last.spec.id} has not ended after {args.timeout:g} s ({last.state})", file=sys.stderr)
        elif not args.json:
            print(f"{last.spec.id}: {last.reason or last.state}")
    if args.json:
        print(json.dumps({"schema": 1, "stopped": ended}, ensure_ascii=False))
    return code
