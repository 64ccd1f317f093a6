"""`k2tui status`: servers, jobs, board and newest benchmark, at once and without the dashboard."""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

READS = ("",)  # goes on with a broken config
HELP = "what is running: servers, jobs, board, newest benchmark"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--no-ask", action="store_true", help="do not ask the servers, read only their logs")


def collect(ask: bool = True) -> dict[str, Any]:
    """Everything that `status` shows, as plain values."""
    from k2tui import paths
    from k2tui.core.server_jobs import is_live, left_over, shown_servers
    from k2tui.jobs import folder

    now = time.time()
    jobs = folder.list_jobs()
    left = {j.spec.id for j in left_over(jobs)}
    servers: list[dict[str, Any]] = []
    for job in shown_servers(jobs):
        from k2tui.servers import look_once, target_of
        from k2tui.verbs.up import describe

        view = look_once(target_of(job), now, ask=ask)
        entry = describe(view)
        entry["title"] = view.title
        entry["left_over"] = job.spec.id in left
        if view.http is not None and view.http.model_path:
            entry["num_running_reqs"] = view.http.num_running_reqs
            entry["num_queue_reqs"] = view.http.num_queue_reqs
            entry["gen_throughput"] = view.http.gen_throughput
            entry["accept_length"] = view.http.accept_length
            entry["embedded_engine"] = view.http.is_embedded
        servers.append(entry)
    live = [
        {
            "job": j.spec.id, "stage": j.spec.stage, "title": j.spec.title, "state": str(j.state),
            "since_s": round(now - j.started_s, 1) if j.started_s else None,
            "waiting_for": j.waiting_for or None,
            "progress": {"done": j.progress.done, "total": j.progress.total, "unit": j.progress.unit} if j.progress else None,
        }
        for j in jobs if is_live(j)
    ]
    bench: dict[str, Any] | None = None
    bench_error = ""
    try:
        has_store = bool(os.lstat(paths.bench_db()))
    except OSError as err:  # anything but "not there" is said below
        has_store = not isinstance(err, FileNotFoundError)
    if has_store:
        from k2tui import benchdb
        from k2tui.errors import K2Error

        rows: Any = []
        try:
            rows = benchdb.rows(1)
        except K2Error as err:  # servers and jobs are shown all the same
            bench_error = err.message
        if rows:
            row = rows[0]
            bench = {
                "run_id": row.run_id, "label": row.label, "concurrency": row.concurrency,
                "output_throughput": row.output_throughput, "tok_s_user": row.tok_s_user,
                "ttft_p50_ms": row.ttft_p50_ms, "tpot_p50_ms": row.tpot_p50_ms, "errors": row.errors,
            }
    return {
        "schema": 1, "ts": now, "servers": servers, "jobs": live,
        "jobs_ended": sum(1 for j in jobs if j.state.is_final), "bench": bench, "bench_error": bench_error or None,
    }


def run(args: argparse.Namespace) -> int:
    facts = collect(ask=not args.no_ask)
    if args.json:
        print(json.dumps(facts, ensure_ascii=False))
        return 0
    from k2tui.plain import clean, duration, paint

    if not facts["servers"]:
        print("no server of k2tui's (start one: k2tui up PROFILE, or try k2tui demo)")
    for s in facts["servers"]:
        state, verdict = str(s["state"]), clean(s["verdict"])
        rest = verdict.removeprefix(state) if verdict.startswith(f"{state} ") else ""  # "ready after 3 s" says the state already
        print(f"{paint(state, state)}{rest}  {clean(s['title'])}  {s['url'] or ''}  [{s['job']}]")
        if verdict and not rest:
            print(f"  {verdict}")
        if s["left_over"]:
            print(f"  left over by a tuning run whose tuner has ended: k2tui down {s['job']}, or k2tui tune resume")
        if s.get("hint"):
            print(f"  {clean(s['hint'])}")
    for j in facts["jobs"]:
        p = j["progress"]
        done = f"  {p['done']:g}/{p['total']:g} {p['unit']}" if p and p["total"] else ""
        wait = f"  waits for {j['waiting_for']}" if j["waiting_for"] else ""
        print(f"{paint(j['state'], j['state'])}  {clean(j['title'])}  {duration(j['since_s'])}{done}{wait}  [{j['job']}]")
    if facts["bench_error"]:
        print(f"cannot read benchmarks: {clean(facts['bench_error'])}")
    b = facts["bench"]
    if b:
        figures = [f"C={b['concurrency']}"] if b["concurrency"] else []
        if b["output_throughput"]:
            figures.append(f"{b['output_throughput']:,.1f} tok/s")
        if b["ttft_p50_ms"]:
            figures.append(f"TTFT p50 {b['ttft_p50_ms']:.1f} ms")
        told = ", ".join(figures) if b["output_throughput"] else "no figures (nothing completed)"
        print(f"newest benchmark: {clean(b['label'] or b['run_id'][-6:])}: {told}")
    return 0
