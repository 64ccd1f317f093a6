"""`k2tui bench`: run benchmarks, list, show and compare what was measured."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

READS = ("list", "show", "compare", "export")  # these go on with a broken config
HELP = "benchmark a server; list, show and compare runs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from k2tui.loadgen import options

    measuring = options.OptionParser(add_help=False)  # made once: there are many options
    options.add_arguments(measuring)
    actions = parser.add_subparsers(
        dest="action", metavar="ACTION", required=True, parser_class=options.OptionParser
    )
    for name, words in (
        ("run", "measure a running server now (k2tui jobs submit bench: in the background)"),
        ("sweep", "1, 2, 4, ... in flight until throughput stops growing; finds the knee"),
        ("aa", "measure the server against itself: this host's noise floor"),
    ):
        actions.add_parser(name, help=words, parents=[measuring])
    list_ = actions.add_parser("list", help="stored runs, newest first")
    list_.add_argument("--limit", type=int, default=30, help="at most so many, the newest (default 30; 0 = all)")
    list_.add_argument("--label", default="", help="only this label")
    list_.add_argument(
        "--sort", default="", help="a column: out, user, ttft, tpot, accept, c, label (default: newest first)"
    )
    list_.add_argument("--tag", default="")
    show = actions.add_parser("show", help="one run: every figure, its interval and how it was measured")
    show.add_argument("run", help="id, its first or last characters, a label, or 'last'")
    show.add_argument(
        "--requests", action="store_true", help="distributions, and a timeline of every request"
    )
    compare = actions.add_parser("compare", help="two runs or sweeps: ratios, intervals, verdicts")
    compare.add_argument("base", help="run that the other is measured against")
    compare.add_argument("new")
    import_ = actions.add_parser(
        "import", help="take over results of sglang, vllm, guidellm, aiperf, or a typed table"
    )
    import_.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="JSON or JSONL; - = standard input; 'story' = the example that k2tui ships",
    )
    import_.add_argument("--label", default="", help="label of what is imported (default: the file's own)")
    export = actions.add_parser("export", help="runs as sglang JSONL, CSV, Markdown or JSON")
    export.add_argument("runs", nargs="*", metavar="RUN", help="ids, labels or 'last' (default: all)")
    export.add_argument("--format", choices=("sglang", "csv", "md", "json"), default="sglang")
    export.add_argument("-o", "--output", default="", metavar="FILE", help="write there (default: stdout)")
    baseline = actions.add_parser(
        "baseline", help="make a run (and its sweep) the one that others are measured against"
    )
    baseline.add_argument("run", nargs="?", default=None, help="without one: show the baselines")
    baseline.add_argument("--off", action="store_true", help="no longer a baseline")
    label = actions.add_parser("label", help="rename a run, or tag it")
    label.add_argument("run")
    label.add_argument("label", nargs="?", default=None)
    label.add_argument("--tag", default=None)
    delete = actions.add_parser("delete", help="remove runs for good")
    delete.add_argument("runs", nargs="+", metavar="RUN")
    delete.add_argument("--yes", action="store_true", help="do not ask")
    for p in (list_, show, compare, import_, export, baseline, label, delete):
        p.add_argument(
            "--db", default="", metavar="PATH", help="store (default: runs.db in k2tui's state folder)"
        )
        p.add_argument("--json", action="store_true", help="data on stdout as JSON")


def run(args: argparse.Namespace) -> int:
    return int(_ACTIONS[args.action](args))


def _width() -> int:
    from k2tui.plain import table_width

    return table_width()


def _db(args: argparse.Namespace, *, readonly: bool = True) -> Any:
    from k2tui.benchdb import given

    return given(args.db, readonly=readonly, create=args.action == "import")


def _print_json(value: Any) -> None:
    import json

    print(json.dumps(value, indent=1, default=str))


def _run(args: argparse.Namespace) -> int:
    """The load generator as its own process: nothing of the CLI shares its core or its memory."""
    from k2tui.loadgen import options

    argv = sys.argv[sys.argv.index(args.action) + 1 :] if args.action in sys.argv else []
    argv = getattr(args, "_argv", None) or argv
    if args.action == "sweep" and not any(a.startswith("--sweep") for a in argv):
        argv = [*argv, "--sweep", "256"]
    if args.action == "aa":
        argv = ["--aa", *argv, *([] if any(a.startswith("--repeats") for a in argv) else ["--repeats", "5"])]
    given = _parsed(argv)  # bad options end here, in one line
    url = given.url or _own_url()
    argv = [*_config_defaults(), "--url", url, *argv]  # the last of an option given twice holds
    options.check(_parsed(argv))
    print(f"measuring {_shown(url)}", file=sys.stderr, flush=True)
    return _wait(argv)


def _parsed(argv: list[str]) -> argparse.Namespace:
    """The options given; url is "" without --url. Raises UsageError."""
    from k2tui.loadgen import options

    return options.parse(["--url", "", *argv], "k2tui bench run")


def _shown(url: str) -> str:
    """The URL as it may be printed: without a password, without escape codes."""
    from k2tui.core.bench_table import clean

    scheme, mark, rest = url.rpartition("://")
    host, slash, path = rest.partition("/")
    return clean(scheme + mark + host.rpartition("@")[2] + slash + path)


def _config_defaults() -> list[str]:
    """[bench] of the config as options."""
    from k2tui.config import load

    bench = load().bench
    return [
        "--concurrency", ",".join(map(str, bench.concurrency)), "--num-prompts", str(bench.num_prompts),
        "--random-input-len", str(bench.random_input_len), "--random-output-len", str(bench.random_output_len),
        f"--seed={bench.seed}",
    ]  # fmt: skip


def _own_url() -> str:
    """The newest running server of ours; without one the place where the default profile serves."""
    from k2tui.config import load
    from k2tui.core.server_jobs import is_live, server_jobs
    from k2tui.errors import K2Error
    from k2tui.jobs import folder

    try:
        for job in server_jobs(folder.list_jobs()):
            url = job.spec.params.get("url")
            if is_live(job) and url:
                return str(url)
    except OSError as err:
        raise K2Error(
            f"the job folders cannot be read: {err.strerror or err}", "check their permissions, or give --url"
        ) from None
    return load().get_profile().url


STOP_S = 15.0  # how long the load generator may take to store what it has


def _wait(argv: list[str]) -> int:
    """Run the load generator to its end. A signal to this process ends it too; it is never left behind."""
    import os
    import signal
    import subprocess
    import time

    from k2tui.errors import K2Error
    from k2tui.paths import own_module

    got: list[int] = []
    child: list[subprocess.Popen[bytes]] = []

    def forward(signum: int, frame: object) -> None:
        got.append(signum)
        if child:
            child[0].send_signal(signum)

    before = {s: signal.signal(s, forward) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        process = subprocess.Popen(
            [*own_module("k2tui.loadgen"), *argv],
            env={**os.environ, "K2TUI_LOADGEN_PARENT": str(os.getpid())},
        )
        child.append(process)
        if got:  # it came while the child was being started
            process.send_signal(got[0])
        deadline = 0.0
        while True:
            try:
                code = process.wait(0.5)
                break
            except subprocess.TimeoutExpired:
                if got:
                    deadline = deadline or time.monotonic() + STOP_S
                    if time.monotonic() > deadline:
                        process.kill()
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    if got:
        return 128 + got[0]
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        kept = (
            "nothing was stored (--no-store)"
            if "--no-store" in argv
            else "what was measured is stored as partial"
        )
        raise K2Error(f"the load generator was ended by {name}; {kept}")
    return code


def _list(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from k2tui.core.bench_table import rows_table

    with _db(args) as db:
        rows = db.rows(args.limit if args.limit > 0 else -1, label=args.label, tag=args.tag)
        total = db.count(label=args.label, tag=args.tag)
    if args.sort:
        rows = _sorted(rows, args.sort)
    if args.json:
        _print_json({"schema": 1, "runs": [asdict(r) for r in rows], "total": total})
    else:
        print(rows_table(rows, _width()))
        if len(rows) < total:
            print(f"the newest {len(rows)} of {total} rows; --limit 0 shows all")
    return 0


def _show(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from k2tui.core.bench_table import detail

    with _db(args) as db:
        run_id = db.resolve(args.run)
        row = db.row(run_id)
        metrics = db.metrics(run_id)
        facts = db.details(run_id)
        records = db.records(run_id) if args.requests else []
    if args.json:
        _print_json({"schema": 1, "row": asdict(row), "metrics": [asdict(m) for m in metrics], **facts})
    else:
        print(detail(row, metrics, facts, _width()))
        if args.requests:
            from k2tui.core.bench_timeline import request_lines

            print("\n" + "\n".join(request_lines(records, _width())))
    return 0


def _compare(args: argparse.Namespace) -> int:
    from k2tui.core.bench_compare import compare_table, comparison_dict
    from k2tui.verbs._bench_compare import load_comparison

    found = load_comparison(args)
    if args.json:
        _print_json({"schema": 1, "comparisons": [comparison_dict(c) for c in found]})
    else:
        print(compare_table(found, _width(), (args.base, args.new)))
    return 0


def _sorted(rows: list[Any], key: str) -> list[Any]:
    from k2tui.errors import UsageError

    fields = {
        "out": ("output_throughput", True), "user": ("tok_s_user", True), "ttft": ("ttft_p50_ms", False),
        "tpot": ("tpot_p50_ms", False), "accept": ("accept_length", True), "c": ("concurrency", False), "label": ("label", False),
    }  # fmt: skip
    if key not in fields:
        raise UsageError(f"--sort {key}: no such column", "columns: " + ", ".join(fields))
    name, down = fields[key]
    known = [r for r in rows if getattr(r, name) is not None]
    rest = [r for r in rows if getattr(r, name) is None]
    return [*sorted(known, key=lambda r: getattr(r, name), reverse=down), *rest]


def _import(args: argparse.Namespace) -> int:
    import time

    from k2tui import paths
    from k2tui.benchdb import RunInfo, new_id
    from k2tui.core.bench_import import parse
    from k2tui.errors import UsageError
    from k2tui.regular import read_regular

    found: list[Any] = []
    for name in args.files:
        path = paths.assets_dir() / "bench" / "story.json" if name == "story" else Path(name)
        try:
            if name == "-":
                text = sys.stdin.buffer.read().decode("utf-8")
            else:
                text = read_regular(path, 1 << 30).decode()
        except OSError as err:
            raise UsageError(f"{path}: {err.strerror}") from None
        except UnicodeDecodeError:
            raise UsageError(f"{path}: not a text file") from None
        found += parse(text, str(path))  # all files are understood before anything is stored
    ids: list[str] = []
    with _db(args, readonly=False) as db:
        sweep = new_id(time.time()) if len(found) > 1 else ""
        for one in found:
            info = RunInfo(
                label=args.label or one.label, tag=one.tag, sweep=sweep, shape=one.shape, concurrency=one.concurrency,
                rate=one.rate, num_requests=one.num_requests, server=one.server, workload=one.workload,
            )  # fmt: skip
            ids.append(
                db.add_imported(
                    info, one.metrics, started_s=time.time(), imported=one.tool, flags=one.flags, raw=one.raw
                )
            )
    if args.json:
        _print_json({"schema": 1, "runs": ids})
    else:
        print(f"imported {len(ids)} run{'s' if len(ids) != 1 else ''}: {', '.join(i[-6:] for i in ids)}")
    return 0


def _export(args: argparse.Namespace) -> int:
    """--json is --format json: stdout is data in every format."""
    import json
    from dataclasses import asdict

    from k2tui.core.bench_import import export_sglang, to_csv
    from k2tui.core.bench_table import markdown

    with _db(args) as db:
        rows = [db.row(db.resolve(r)) for r in args.runs] if args.runs else db.rows(10_000)
        kind = "json" if args.json else args.format
        out = ""
        for row in rows if kind == "sglang" else ():
            stats = {(m.name.rpartition(".")[0], m.stat): m.value for m in db.metrics(row.run_id)}
            params = db.details(row.run_id)["workload"].get("params") or {}
            out += json.dumps(export_sglang(asdict(row), stats, (("params", params),))) + "\n"
    if kind == "csv":
        out = to_csv([asdict(r) for r in rows])
    elif kind == "md":
        out = markdown(rows) + "\n"
    elif kind == "json":
        out = json.dumps({"schema": 1, "runs": [asdict(r) for r in rows]}, indent=1, default=str) + "\n"
    if args.output:
        from k2tui.errors import K2Error
        from k2tui.files import write_whole

        try:
            write_whole(Path(args.output), out, mode=0o644)
        except OSError as err:
            raise K2Error(f"{args.output}: {err.strerror}") from None
        print(f"{len(rows)} runs -> {args.output}", file=sys.stderr)
    else:
        sys.stdout.write(out)
    return 0


def _baseline(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from k2tui.core.bench_table import rows_table

    if args.run is not None:
        with _db(args, readonly=False) as db:
            ids = db.set_baseline(args.run, not args.off)
        if args.json:
            _print_json({"schema": 1, "runs": ids})
        else:
            print(f"{'no longer ' if args.off else ''}baseline: {', '.join(ids)}")
        return 0
    with _db(args) as db:
        rows = [r for r in db.rows(10_000) if r.is_baseline]
    if args.json:
        _print_json({"schema": 1, "runs": [asdict(r) for r in rows]})
    else:
        print(rows_table(rows, _width()) if rows else "no baseline yet: k2tui bench baseline RUN")
    return 0


def _label(args: argparse.Namespace) -> int:
    from k2tui.errors import UsageError

    if args.label is None and args.tag is None:
        raise UsageError("nothing to change", "give a label, or --tag TAG")
    with _db(args, readonly=False) as db:
        run_id = db.resolve(args.run)
        db.set_label(run_id, args.label, args.tag)
    if args.json:
        _print_json({"schema": 1, "run": run_id})
    return 0


def _delete(args: argparse.Namespace) -> int:
    from k2tui.core.bench_table import rows_table
    from k2tui.errors import UsageError

    with _db(args, readonly=False) as db:
        ids = [db.resolve(r) for r in args.runs]
        if not args.yes:
            if not sys.stdin.isatty():
                raise UsageError("delete asks first, and there is no terminal to ask on", "add --yes")
            print(rows_table([db.row(i) for i in ids], _width()))
            if input(
                f"remove {len(ids)} run{'s' if len(ids) != 1 else ''} for good? [y/N] "
            ).strip().lower() not in ("y", "yes"):
                return 1
        for run_id in ids:
            db.delete(run_id)
    if args.json:
        _print_json({"schema": 1, "deleted": ids})
    else:
        print(f"deleted {len(ids)}")
    return 0


_ACTIONS = {
    "run": _run, "sweep": _run, "aa": _run, "list": _list, "show": _show, "compare": _compare, "import": _import,
    "export": _export, "baseline": _baseline, "label": _label, "delete": _delete,
}  # fmt: skip
