"""`k2tui demo`: the whole pipeline at tiny scale on this machine, with the embedded engine. Works without a GPU and offline."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

HELP = "try k2tui here and now: a real tiny server on this machine's CPU"
DESCRIPTION = (
    "Starts the embedded engine on the small trained model that k2tui ships, as a job, and opens the dashboard on it. There 8 shows "
    "the pipeline: Enter shows a step, u runs up to it, A runs all of it, to the draft's figures. "
    "--headless does the same without a terminal: waits until the server is ready, benchmarks it, prints what happened, "
    "stops what it started, and exits 0. --pipeline runs every step to the final report (some minutes)."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--headless", action="store_true", help="no dashboard: start, benchmark, print, stop")
    parser.add_argument(
        "--pipeline",
        action="store_true",
        help="run the whole pipeline to the final report; with --headless print it",
    )
    parser.add_argument(
        "--port",
        type=int,
        help="port of the tiny server, with --pipeline of each (default: the profile's, or the next free one)",
    )
    parser.add_argument("--keep", action="store_true", help="with --headless: leave the server running")
    parser.add_argument(
        "--timeout",
        type=float,
        default=0.0,
        metavar="S",
        help="with --headless: give up after S seconds (default 180; 1800 with --pipeline)",
    )
    parser.add_argument("--config", help="config file to read last")
    parser.add_argument("--json", action="store_true", help="with --headless: the figures as JSON")


def _live_demo_server() -> Any:
    """A tiny server of an earlier demo that still runs, or None."""
    from k2tui.core.server_jobs import demo_server
    from k2tui.jobs import folder

    return demo_server(folder.list_jobs())


def start_server(config: Any, port: int | None, args: Sequence[str] = ()) -> tuple[str, bool]:
    """(job id of the tiny server, whether it was started now). Takes the next free port when none is asked for."""
    from k2tui import doctor
    from k2tui.errors import K2Error
    from k2tui.orders import submit_stage

    running = _live_demo_server()
    if running is not None and (port is None or running.spec.params.get("port") == port):
        return running.spec.id, False
    profile = config.get_profile("tiny")
    chosen = port or doctor.free_port(profile.host, profile.port)
    try:
        return submit_stage(config, "serve", {"profile": "tiny", "port": chosen, "args": list(args)}), True
    except K2Error as err:
        if "needs the package" in err.message:
            from k2tui import paths

            raise K2Error(
                err.message,
                "install it: " + paths.install_hint("local"),
            ) from None
        raise


def headless(args: argparse.Namespace) -> int:
    from k2tui import benchdb, config
    from k2tui.core.job import JobState
    from k2tui.core.load import State
    from k2tui.jobs import folder
    from k2tui.lifecycle import stop_servers
    from k2tui.orders import submit_stage
    from k2tui.verbs.up import check_port, wait_ready

    check_port(args.port)
    loaded = config.load(args.config)
    timeout_s = args.timeout or 180.0
    began = time.monotonic()
    job_id, started = start_server(loaded, args.port)
    try:
        if not args.json:
            print(
                "k2tui demo: the embedded engine on the tiny shipped model (for trying the pipeline; SGLang is what you outgrow it to)"
            )
        view = wait_ready(job_id, timeout_s=timeout_s, quiet=args.json)
        load = view.load
        if load.state is not State.READY:
            print(f"k2tui: the server is not ready: {load.verdict}", file=sys.stderr)
            print(f"  whole log: k2tui jobs logs {job_id}", file=sys.stderr)
            return 1 if load.state is State.FAILED else 3
        ready_s = time.monotonic() - began
        shards = f"{load.target.done}/{load.target.total}" if load.target else "?"
        if not args.json:
            print(
                f"server ready after {ready_s:.1f} s, {shards} shards, {view.http.url if view.http else load.url} (job {job_id})"
            )
        url = view.http.url if view.http else load.url
        bench_id = submit_stage(
            loaded,
            "bench",
            {
                "url": url,
                "concurrency": [1, 4],
                "num_prompts": 8,
                "random_input_len": 32,
                "random_output_len": 32,
                "label": "demo",
            },
        )
        bench = folder.wait(bench_id, timeout_s=timeout_s)
        if bench.state is not JobState.SUCCEEDED:
            print(f"k2tui: the benchmark did not succeed: {bench.reason or bench.state}", file=sys.stderr)
            print(f"  whole log: k2tui jobs logs {bench_id}", file=sys.stderr)
            return 1
        rows = [r for r in benchdb.rows(20) if r.job_id == bench_id or r.label == "demo"][:2]
        rows.reverse()
        if args.json:
            facts = {
                "schema": 1,
                "ready_s": round(ready_s, 2),
                "shards": {"done": load.target.done, "total": load.target.total} if load.target else None,
                "server_job": job_id,
                "bench_job": bench_id,
                "url": url,
                "bench": [
                    {
                        "concurrency": r.concurrency,
                        "output_throughput": r.output_throughput,
                        "tok_s_user": r.tok_s_user,
                        "ttft_p50_ms": r.ttft_p50_ms,
                        "errors": r.errors,
                    }
                    for r in rows
                ],
            }
            print(json.dumps(facts))
        else:
            for r in rows:
                print(
                    f"benchmark at concurrency {r.concurrency}: {r.output_throughput or 0:,.1f} tok/s output, "
                    f"{r.tok_s_user or 0:,.1f} tok/s a user, TTFT p50 {r.ttft_p50_ms or 0:,.1f} ms, {r.errors} errors"
                )
        return 0
    finally:
        if started and not args.keep:
            (end,) = stop_servers([job_id], timeout_s=30)
            if not end.is_clean:
                print(f"k2tui: {job_id}: {end.words}", file=sys.stderr)
            elif not args.json:
                print(f"server stopped: {end.words}")


def ports_from(port: int | None) -> list[str]:
    """Settings of the demo's pipeline: each of its servers on this port, or on the next free one while that is held."""
    from k2tui.jobs.chain import load_chain

    steps = load_chain("asset:demo").steps if port else ()
    return [f"{s.name}.port=free:{port}" for s in steps if s.params.get("port") == "free"]


def whole(args: argparse.Namespace) -> int:
    """The demo's pipeline as a job, followed to its end; prints the final report."""
    from k2tui import config
    from k2tui.core.job import JobState
    from k2tui.core.job_text import plain
    from k2tui.jobs import folder
    from k2tui.orders import submit_stage
    from k2tui.verbs.up import check_port

    check_port(args.port)
    loaded = config.load(args.config)
    settings = [*ports_from(args.port), f"serve.port={args.port}"] if args.port else []
    job_id = submit_stage(loaded, "pipeline", {"file": "asset:demo", "name": "demo", "set": settings})
    if not args.json:
        print(
            f"k2tui demo: the whole pipeline on the embedded engine (job {job_id}; k2tui pipeline report shows how far it is)"
        )
    end = time.monotonic() + (args.timeout or 1800.0)
    shown = 0
    while True:
        job = folder.wait(job_id, timeout_s=1.0)
        if not args.json:
            text = _read(folder.log_path(job_id))
            for line in text[shown:].splitlines(keepends=True):
                if line.endswith("\n"):
                    print(plain(line.rstrip("\n")), flush=True)
                    shown += len(line)
        if job.state.is_final:
            break
        if time.monotonic() > end:
            folder.stop(job_id, wait_s=90)
            print(
                f"k2tui: the pipeline did not end in time; its log: k2tui jobs logs {job_id}", file=sys.stderr
            )
            return 1
    if job.state is not JobState.SUCCEEDED:
        print(f"k2tui: the pipeline did not succeed: {job.reason or job.state}", file=sys.stderr)
        print(f"  whole log: k2tui jobs logs {job_id}", file=sys.stderr)
        return 1
    if args.json:
        from k2tui.jobs.chain import load_chain, open_run, parse_settings

        print(
            json.dumps(
                open_run(loaded, load_chain("asset:demo"), settings=parse_settings(settings)).report(),
                ensure_ascii=False,
            )
        )
    return 0


def _read(path: Any) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def run(args: argparse.Namespace) -> int:
    if args.headless:
        return whole(args) if args.pipeline else headless(args)
    import os
    from dataclasses import replace

    from k2tui import config
    from k2tui.errors import UsageError
    from k2tui.verbs.dashboard import show

    if os.environ.get("TERM", "") in ("", "dumb") or not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("the demo's dashboard needs a terminal", "without one: k2tui demo --headless")
    loaded = replace(config.load(args.config), default_profile="tiny")
    # a slow disk is played (0.06 s a shard), so that there is a load to watch
    start_server(loaded, args.port, ["--load-delay-s", "0.06"])
    if args.pipeline:
        from k2tui.orders import submit_stage

        submit_stage(
            loaded, "pipeline", {"file": "asset:demo", "name": "demo", "set": ports_from(args.port)}
        )
    return show(loaded, is_demo=True)  # says at its end that the server goes on, and how to stop it
