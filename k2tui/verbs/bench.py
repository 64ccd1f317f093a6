"""`k2tui bench`: run benchmarks, list, show and compare what was measured."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

HELP = "benchmark a server; list, show and compare runs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from k2tui.loadgen import options

    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    run_ = actions.add_parser(
        "run", help="measure a running server now (k2tui jobs submit bench: in the background)"
    )
    options.add_arguments(run_)
    list_ = actions.add_parser("list", help="stored runs, newest first")
    list_.add_argument("--limit", type=int, default=30)
    list_.add_argument("--label", default="", help="only this label")
    show = actions.add_parser("show", help="one run: every figure, its interval and how it was measured")
    show.add_argument("run", help="id, its first or last characters, a label, or 'last'")
    compare = actions.add_parser("compare", help="two runs or sweeps: ratios, intervals, verdicts")
    compare.add_argument("base", help="run that the other is measured against")
    compare.add_argument("new")
    for p in (list_, show, compare):
        p.add_argument(
            "--db", default="", metavar="PATH", help="store (default: runs.db in k2tui's state folder)"
        )
        p.add_argument("--json", action="store_true", help="data on stdout as JSON")


def run(args: argparse.Namespace) -> int:
    return int(_ACTIONS[args.action](args))


def _width() -> int:
    import shutil

    return shutil.get_terminal_size((120, 24)).columns if sys.stdout.isatty() else 120


def _db(args: argparse.Namespace, *, readonly: bool = True) -> Any:
    from k2tui.benchdb import BenchDb

    return BenchDb(Path(args.db) if args.db else None, readonly=readonly)


def _print_json(value: Any) -> None:
    import json

    print(json.dumps(value, indent=1, default=str))


def _run(args: argparse.Namespace) -> int:
    """The load generator as its own process: nothing of the CLI shares its core or its memory."""
    import subprocess

    argv = sys.argv[sys.argv.index("run") + 1 :] if "run" in sys.argv else []
    argv = getattr(args, "_argv", None) or argv
    process = subprocess.Popen([sys.executable, "-m", "k2tui.loadgen", *_with_url(argv)])
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue  # the child got the same signal, stores what it has and ends


def _with_url(argv: list[str]) -> list[str]:
    """Without --url the newest running server of ours is measured; without one the load generator's own default holds."""
    if any(a == "--url" or a.startswith("--url=") for a in argv):
        return argv
    from k2tui.core.server_jobs import is_live, server_jobs
    from k2tui.jobs import folder

    for job in server_jobs(folder.list_jobs()):
        url = job.spec.params.get("url")
        if is_live(job) and url:
            return [*argv, "--url", str(url)]
    return argv


def _list(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from k2tui.core.bench_table import rows_table

    with _db(args) as db:
        rows = db.rows(args.limit, label=args.label)
    if args.json:
        _print_json({"schema": 1, "runs": [asdict(r) for r in rows]})
    else:
        print(rows_table(rows, _width()))
    return 0


def _show(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from k2tui.core.bench_table import detail

    with _db(args) as db:
        run_id = db.resolve(args.run)
        row = db.row(run_id)
        metrics = db.metrics(run_id)
        facts = db.details(run_id)
    if args.json:
        _print_json({"schema": 1, "row": asdict(row), "metrics": [asdict(m) for m in metrics], **facts})
    else:
        print(detail(row, metrics, facts, _width()))
    return 0


def _compare(args: argparse.Namespace) -> int:
    from k2tui.core.bench_compare import compare_table, comparison_dict
    from k2tui.verbs._bench_compare import load_comparison

    found = load_comparison(args)
    if args.json:
        _print_json({"schema": 1, "comparisons": [comparison_dict(c) for c in found]})
    else:
        print(compare_table(found, _width()))
    return 0


_ACTIONS = {"run": _run, "list": _list, "show": _show, "compare": _compare}
