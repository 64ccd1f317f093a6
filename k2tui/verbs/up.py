"""`k2tui up PROFILE`: start a server as a job and, unless told not to, wait until it is ready or has failed."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from typing import Any

HELP = "start a model server by a profile and wait until it is ready"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("profile", nargs="?", default=None, help="profile name (k2tui config profiles); default: the config's")
    parser.add_argument("--port", type=int, help="another port than the profile's")
    parser.add_argument("--model", help="another model folder than the profile's")
    parser.add_argument("--draft", help="EAGLE-3 draft folder to serve with")
    parser.add_argument("--arg", action="append", default=[], dest="args", metavar="ARG", help="extra argument for the engine (repeat)")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="extra environment for the engine (repeat)")
    parser.add_argument("--gpus", help='"auto", how many, or which: 0,1 (one: 3,)')
    parser.add_argument("--node-rank", type=int, help="this machine's rank, where the other nodes are started by hand")
    parser.add_argument("--no-wait", action="store_true", help="return as soon as the job is started")
    parser.add_argument("--timeout", type=float, default=0.0, metavar="S", help="give up waiting after S seconds (the server goes on); default: the profile's ready_timeout_s, 0 = never")
    parser.add_argument("--dry-run", action="store_true", help="print the command that would run, and the checks, and start nothing")
    parser.add_argument("--config", help="config file to read last")
    parser.add_argument("--json", action="store_true")


def check_port(port: int | None) -> None:
    """Raises UsageError for a --port that is none; None = not given."""
    from k2tui.errors import UsageError

    if port is not None and not 1 <= port <= 65535:
        raise UsageError(f"--port {port} is no port", "ports go from 1 to 65535")


def parse_gpus(text: str) -> Any:
    """ "auto", "4" (how many) or "0,1,2" (which) as a profile's `gpus`."""
    from k2tui.errors import UsageError

    if text == "auto":
        return text
    parts = [p for p in text.split(",") if p]
    if not parts or not all(p.isdigit() for p in parts):
        raise UsageError(f"--gpus {text!r} is not understood", 'write auto, a number of GPUs, or indices: 0,1 (one GPU: "3,")')
    return [int(p) for p in parts] if "," in text else int(text)


def _pair(text: str) -> tuple[str, str]:
    from k2tui.errors import UsageError

    name, is_pair, value = text.partition("=")
    if not is_pair or not name:
        raise UsageError(f"--env {text!r} is not NAME=VALUE")
    return name, value


def params_of(args: argparse.Namespace) -> dict[str, Any]:
    if args.profile is not None and not args.profile.strip():
        from k2tui.errors import UsageError

        raise UsageError("an empty text names no profile", "k2tui config profiles lists them; without a name: the default one")
    return {
        "profile": args.profile or None,
        "port": args.port,
        "model": args.model,
        "draft": args.draft,
        "args": list(args.args) or None,
        "gpus": parse_gpus(args.gpus) if args.gpus else None,
        "env": dict(_pair(text) for text in args.env) or None,
        "node_rank": args.node_rank,
    }


def wait_ready(job_id: str, *, timeout_s: float = 0.0, quiet: bool = False) -> Any:
    """Follow a server job until it is ready, failed or stalled, or the time is over. Returns the last ServerView.

    Progress goes to stderr: one line that is rewritten on a terminal, a line whenever something changed elsewhere.
    """
    from k2tui.lifecycle import follow_start

    on_terminal = sys.stderr.isatty() and not quiet
    said = ""
    told: tuple[Any, ...] = ()
    told_at = 0.0

    def tell(view: Any) -> None:
        nonlocal said, told, told_at
        words = view.load.verdict or str(view.load.state)
        if words == said:
            return
        if on_terminal:
            sys.stderr.write(f"\r\x1b[K{words[:150]}")
        else:
            # a file or a pipe: a line at each new phase or state, and every 5 s in between
            point = (view.load.phase, view.load.state, view.job.waiting_for)
            if point == told and time.monotonic() - told_at < 5.0:
                return
            sys.stderr.write(words + "\n")
            told, told_at = point, time.monotonic()
        sys.stderr.flush()
        said = words

    try:
        return follow_start(job_id, timeout_s=timeout_s, on_view=None if quiet else tell)
    finally:
        if on_terminal and said:
            sys.stderr.write("\n")


def describe(view: Any) -> dict[str, Any]:
    load, job = view.load, view.job
    return {
        "job": job.spec.id if job else None,
        "state": str(load.state),
        "phase": str(load.phase),
        "ready_s": round(load.ready_s, 2) if load.ready_s is not None else None,
        "shards": {
            "done": load.target.done if load.target else None,
            "total": load.target.total if load.target else None,
            "draft_done": load.draft.done if load.draft else None,
            "draft_total": load.draft.total if load.draft else None,
        },
        "ranks": [rank.as_json() for rank in load.rank_loads],
        "eta_s": round(load.eta_s, 1) if load.eta_s is not None else None,
        "eta_error_s": round(load.eta_error_s, 1) if load.eta_error_s is not None else None,
        "eta_accuracy": [past.as_json() for past in load.eta_accuracy],
        "url": load.url or (view.http.url if view.http else None),
        "model": load.model,
        "verdict": load.verdict,
        "root_cause": load.root_cause or None,
        "proof_line": load.proof_line or None,
        "hint": load.hint or None,
    }


def _dry_run(args: argparse.Namespace, loaded: Any, params: dict[str, Any]) -> int:
    """The whole command of every node, and what the checks say; a start that cannot choose its GPUs is a finding, not the end."""
    from k2tui import doctor, stages
    from k2tui.core.job_mask import mask_argv, mask_env
    from k2tui.errors import K2Error
    from k2tui.orders import settle
    from k2tui.stages.serve import node_plans, resolve_profile
    from k2tui.verbs._launch_text import command, print_findings, room

    profile = resolve_profile(loaded, params)
    findings = list(doctor.check_profile(profile))
    try:
        profile, settled = settle(loaded, params)
        params = dict(settled)
    except K2Error:
        pass  # said by the findings
    plan = stages.get("serve").plan(loaded, params)
    nodes = [
        {"host": str((n.params or {})["host"]), "argv": list(mask_argv(n.argv[n.argv.index("--") + 1 :])), "env": dict(mask_env(n.env))}
        for n in node_plans(profile)
    ]
    argv, env = list(mask_argv(plan.argv)), dict(mask_env(plan.env))
    if args.json:
        facts = {"schema": 1, "argv": argv, "env": env, "nodes": nodes, "findings": [f.as_json() for f in findings]}
        print(json.dumps(facts, ensure_ascii=False))
    else:
        print(command(argv, env, room(sys.stdout)))
        for node in nodes:
            print(f"\n# on {node['host']}\n{command(node['argv'], node['env'], room(sys.stdout))}")
        print_findings(findings, sys.stderr)
    return 1 if any(f.severity is doctor.Severity.ERROR for f in findings) else 0


def run(args: argparse.Namespace) -> int:
    from k2tui import config
    from k2tui.core.load import State
    from k2tui.jobs import folder
    from k2tui.orders import preview_stage, submit_stage

    loaded = config.load(args.config)
    check_port(args.port)
    params = params_of(args)
    if args.dry_run:
        return _dry_run(args, loaded, params)
    argv = preview_stage(loaded, "serve", params)
    job_id = submit_stage(loaded, "serve", params)
    if args.no_wait:
        print(json.dumps({"schema": 1, "job": job_id}) if args.json else job_id)
        return 0
    print(f"job {job_id}: {shlex.join(argv)}", file=sys.stderr)
    limit_s = args.timeout or loaded.get_profile(args.profile or "").ready_timeout_s
    view = wait_ready(job_id, timeout_s=limit_s, quiet=args.json)
    facts = describe(view)
    if args.json:
        print(json.dumps({"schema": 1, **facts}, ensure_ascii=False))
    if view.load.state is State.READY:
        if not args.json:
            print(f"ready: {facts['url']} ({job_id})")
        return 0
    if not args.json:
        job = folder.get(job_id)
        waits = f"still waits for {job.waiting_for}" if job.waiting_for else ""
        print(f"k2tui: {waits or view.load.verdict or job.reason}", file=sys.stderr)
        if view.load.proof_line:
            print(f"  line {view.load.proof_line_no}: {view.load.proof_line}", file=sys.stderr)
        if view.load.hint:
            print(f"  {view.load.hint}", file=sys.stderr)
        print(f"  whole log: k2tui jobs logs {job_id}", file=sys.stderr)
    return 1 if view.load.state is State.FAILED or folder.get(job_id).state.is_final else 3
