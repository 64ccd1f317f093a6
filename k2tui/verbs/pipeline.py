"""`k2tui pipeline`: run, plan, show, init: the whole chain from server to comparison, each step a job."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k2tui.errors import K2Error, UsageError

if TYPE_CHECKING:
    from k2tui.jobs.chain import ChainRun

HELP = (
    "run the whole pipeline (serve, bench, prepare, extract, train, compare), skipping what is already valid"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sub = parser.add_subparsers(dest="order", metavar="ORDER", required=True)

    def order(name: str, text: str) -> argparse.ArgumentParser:
        child = sub.add_parser(name, help=text, description=text)
        child.add_argument(
            "--file",
            default="",
            help="the pipeline's TOML (default: ./pipeline.toml, else the shipped one; asset:demo: the demo's)",
        )
        child.add_argument("--json", action="store_true", help="print JSON")
        return child

    run = order("run", "run it as a job of its own; Ctrl-C leaves it running")
    show = order("plan", "what a run would do, and why (the same as: run --dry-run)")
    for child in (run, show):
        child.add_argument(
            "--from",
            dest="start",
            default="",
            metavar="STEP",
            help="run this step and all after it, valid or not",
        )
        child.add_argument(
            "--to",
            default="",
            metavar="STEP",
            help="only this step and what it needs: the pipeline piece by piece",
        )
        child.add_argument(
            "--only",
            action="append",
            default=[],
            metavar="STEP",
            help="only this step (may repeat), with its servers",
        )
        child.add_argument("--force", action="store_true", help="run every step, valid or not")
        child.add_argument(
            "--set", action="append", default=[], metavar="STEP.PARAM=VALUE", help="a parameter of one step"
        )
    run.add_argument("--dry-run", action="store_true", help="print what would run, start nothing")
    run.add_argument(
        "--here", action="store_true", help="run in this process, not as a job (ends with the terminal)"
    )
    run.add_argument("--detach", action="store_true", help="print the job id and return at once")
    run.add_argument("--keep-servers", action="store_true", help="leave the last servers running")
    report = order(
        "report",
        "every step's figures so far, and what they come to (Markdown); without --file: of the newest run",
    )
    report.add_argument(
        "--set", action="append", default=[], metavar="STEP.PARAM=VALUE", help="as the run was given"
    )
    init = order("init", "write the shipped pipeline.toml into the working folder")
    init.add_argument("--force", action="store_true", help="replace the file")


def run(args: argparse.Namespace) -> int:
    if args.order == "init":
        return _init(args)
    if args.order == "report":
        return _report(args)
    if args.order == "plan" or args.dry_run:
        return _plan(args)
    return _run_here(args) if args.here else _run_as_job(args)


def _init(args: argparse.Namespace) -> int:
    from k2tui.files import write_whole
    from k2tui.jobs.chain import default_text

    path = Path(args.file or "pipeline.toml")
    if path.exists() and not args.force:
        raise UsageError(f"{path} is there already", "--force replaces it")
    write_whole(path, default_text(), mode=0o644)
    print(json.dumps({"schema": 1, "written": str(path)}) if args.json else f"wrote {path}")
    return 0


def _report(args: argparse.Namespace) -> int:
    import time

    from k2tui.core import chain_report

    report = _newest(args) if not args.file and not args.set else None
    if report is None:
        report = _open(args, quiet=True).report()
    if args.json:
        print(json.dumps(report, ensure_ascii=False, indent=1))
    else:
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(report["made_s"]))
        sys.stdout.write(chain_report.markdown(report, made))
    return 0 if any(s["state"] == "done" for s in report["steps"]) else 1


def _newest(args: argparse.Namespace) -> dict[str, Any] | None:
    """The report of the newest run of any pipeline, named on stderr; None when nothing has run yet."""
    import time

    from k2tui import paths
    from k2tui.core.job_text import plain
    from k2tui.jobs import folder
    from k2tui.jobs.state import as_object, read_json

    def stamp(path: Path) -> float:
        try:
            return path.stat().st_mtime
        except OSError:
            return 0.0

    written = max((paths.state_dir() / "chains").glob("*/report.json"), key=stamp, default=None)
    job = next((j for j in folder.list_jobs() if j.spec.stage == "pipeline"), None)  # newest first
    if (
        job is not None and not job.state.is_final
    ):  # its report is written at its end: made anew from its records
        params = job.spec.params
        again = argparse.Namespace(file=str(params.get("file") or ""), set=list(params.get("set") or ()))
        chain = _open(again, quiet=True)
        print(plain(f"pipeline {chain.chain.name}, which runs now as {job.spec.id}"), file=sys.stderr)
        return chain.report()
    found = as_object(read_json(written)) if written is not None else {}
    if written is None or not found.get("steps"):
        return None
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(stamp(written)))
    print(
        plain(f"pipeline {written.parent.name}, the newest run ({when}); another one: --file"),
        file=sys.stderr,
    )
    return found


def _open(args: argparse.Namespace, *, quiet: bool = False) -> ChainRun:
    from k2tui import config
    from k2tui.jobs.chain import load_chain, open_run, parse_settings

    def tell(text: str) -> None:
        if not quiet:
            print(text, flush=True)

    return open_run(
        config.load(), load_chain(args.file or None), tell=tell, settings=parse_settings(args.set)
    )


def _plan(args: argparse.Namespace) -> int:
    from k2tui.core.job_text import plain

    chain = _open(args, quiet=args.json)
    planned = chain.plan(start=args.start, to=args.to, only=args.only, force=args.force)
    if args.json:
        rows = [
            {
                "step": p.name,
                "action": p.action,
                "why": p.why,
                "argv": list(p.argv),
                "gate": list(p.gate),
                "needs": list(p.needs),
                "error": p.error,
            }
            for p in planned
        ]
        print(
            json.dumps(
                {"schema": 1, "pipeline": chain.chain.name, "file": chain.chain.path, "steps": rows},
                ensure_ascii=False,
                indent=1,
            )
        )
    else:
        width = max(len(p.name) for p in planned)
        for p in planned:
            print(plain(f"{p.name:<{width}}  {p.action:<5}  {p.why}"))
            if p.argv:
                print(plain(" " * (width + 9) + shlex.join(p.argv)))
            if p.error:
                print(plain(" " * (width + 9) + f"cannot run: {p.error}"))
            for gate in p.gate if p.action in ("run", "serve") else ():
                print(plain(" " * (width + 9) + f"gate: {gate}"))
    return 1 if any(p.error for p in planned) else 0


def _run_here(args: argparse.Namespace) -> int:
    import signal

    from k2tui.jobs import report

    def stopped(number: int, frame: object) -> None:
        raise K2Error("the pipeline was stopped; its current step and its servers are stopped too")

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stopped)
    chain = _open(args, quiet=args.json)

    def progress(done: int, total: int, note: str, left_s: float | None) -> None:
        report.report_progress(done, total, "steps", note, left_s, force=True)

    result = chain.run(
        start=args.start,
        to=args.to,
        only=args.only,
        force=args.force,
        keep_servers=args.keep_servers,
        progress=progress,
    )
    told = chain.report()
    figures = {k: v for k, v in told["outcome"].items() if isinstance(v, int | float)}
    report.report_result(
        {"pipeline": chain.chain.name, **figures, "report": str(chain.root / "report.md"), **result}
    )
    if args.json:
        print(json.dumps({"schema": 1, **result, "report": told}, ensure_ascii=False, indent=1))
    else:
        sys.stdout.write("\n" + (chain.root / "report.md").read_text(encoding="utf-8"))
    return 0


def _run_as_job(args: argparse.Namespace) -> int:
    from k2tui.jobs import folder
    from k2tui.orders import submit_stage

    chain = _open(args, quiet=True)
    planned = chain.plan(
        start=args.start, to=args.to, only=args.only, force=args.force
    )  # a mistake is told here, not in a job's log
    for p in planned:
        if p.error:
            raise K2Error(f"{p.name}: {p.error}", "k2tui pipeline plan shows all steps")
    job_id = submit_stage(
        chain.config,
        "pipeline",
        {
            "file": args.file, "start": args.start, "to": args.to, "only": args.only, "set": args.set, "force": args.force,
            "keep_servers": args.keep_servers, "name": chain.chain.name,
        },
    )  # fmt: skip
    if args.detach or args.json:
        print(json.dumps({"schema": 1, "id": job_id}) if args.json else job_id)
        if args.detach:
            return 0
        return 0 if str(folder.wait(job_id).state) == "succeeded" else 1
    print(f"{job_id} (Ctrl-C leaves it running; k2tui jobs logs -f {job_id} shows it again)", file=sys.stderr)
    from k2tui.verbs import jobs

    return jobs.run(argparse.Namespace(order="logs", job=job_id, lines=0, follow=True, raw=False))
