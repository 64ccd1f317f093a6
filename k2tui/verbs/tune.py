"""`k2tui tune`: find the settings that are really faster, overnight and unattended."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k2tui.core.job import Job
    from k2tui.core.tuning import Space

READS = ("list", "show", "best")  # these go on with a broken config
HELP = "try settings one after the other and find the fastest"
DESCRIPTION = (
    "run SPACE.toml starts a tuning run as a job: every trial is checked, started, benchmarked and stopped; one that hangs or fails is a row "
    "with its cause. It goes on when the connection drops, and `resume` goes on after a stop or a crash."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    run_ = actions.add_parser("run", help="start a tuning run")
    run_.add_argument(
        "space",
        help="TOML file: profile, knobs, how to measure (docs/tune.md); asset:tune-tiny and asset:tune-sglang are shipped",
    )
    run_.add_argument(
        "--dry-run",
        action="store_true",
        help="print the trials that are known now and the command of each; start nothing",
    )
    resume = actions.add_parser("resume", help="go on with a run")
    show = actions.add_parser("show", help="the table of a run, also while it runs")
    best = actions.add_parser("best", help="print the winner as a profile")
    list_ = actions.add_parser("list", help="every run")
    for p in (resume, show, best):
        p.add_argument("run", nargs="?", default=None, help="name or its beginning; default: the newest")
    for p in (run_, resume):
        p.add_argument(
            "--wait",
            action="store_true",
            help="wait for the end and print the table; stderr says what is measured",
        )
        p.add_argument("--config", help="config file to read last")
        p.add_argument(
            "--anyway",
            action="store_true",
            help="measure although another k2tui load runs on this host (else the run waits for its end)",
        )
    for p in (run_, resume, show, list_):
        p.add_argument("--json", action="store_true")


def _facts(run: Any) -> dict[str, Any]:
    from k2tui.core.tuning import trial_to_json, words
    from k2tui.core.tuning_verdict import drift, is_confirmed, winner

    space, trials = run.space, run.trials()
    best = winner(space, trials)
    return {
        "schema": 1, "run": run.path.name, "folder": str(run.path), "profile": space.profile, "metric": space.metric, "drift": drift(trials),
        "best": words(best.setting) if best is not None and best.setting else None,
        "confirmed": is_confirmed(space, trials, best.setting) if best is not None and best.setting else None,
        "trials": [{**trial_to_json(t), "words": words(t.setting), "value": t.estimate.value if t.estimate else None} for t in trials],
    }  # fmt: skip


def _show(run: Any, as_json: bool) -> None:
    from k2tui.core.tuning_text import best_text
    from k2tui.core.tuning_verdict import drift, no_baseline, winner
    from k2tui.tune.text import table_text

    if as_json:
        print(json.dumps(_facts(run), ensure_ascii=False))
        return
    space, trials = run.space, run.trials()
    if not trials:
        print("no trial has ended yet", file=sys.stderr)
        return
    import shutil

    # the whole cause is in `--json`; 100 columns where neither a terminal nor COLUMNS says how many
    print(table_text(space, trials, shutil.get_terminal_size((100, 24)).columns))
    if why := no_baseline(trials):
        print(f"\n{why}")
    moved = drift(trials)
    if moved is not None:
        times = sum(t.is_again and t.setting == () for t in trials)
        print(
            f"\nthe baseline measured again{f' ({times} times, the largest change)' if times > 1 else ''}: {moved * 100:+.1f} %; a gain no larger than that is none"
        )
    best = winner(space, trials)
    if best is not None and best.setting:
        where = f" (profile: k2tui tune best {run.path.name})" if (run.path / "best.toml").exists() else ""
        print(best_text(space, trials, best) + where)


def _start(run: Any, args: argparse.Namespace) -> int:
    from pathlib import Path

    from k2tui import stages
    from k2tui.config import load
    from k2tui.core.job import JobSpec
    from k2tui.core.loads import name_of, to_wait_for
    from k2tui.jobs import folder

    config_path = str(Path(args.config).resolve()) if args.config else ""
    plan = stages.get("tune").plan(
        load(args.config), {"folder": str(run.path), "config": config_path, "anyway": args.anyway}
    )
    job_id = folder.submit(
        JobSpec(
            id="",
            stage="tune",
            title=plan.title,
            argv=plan.argv,
            env=plan.env,
            params=plan.params or {},
            grace_s=plan.grace_s,
            locks=plan.locks,
        )
    )
    if not args.anyway and (before := to_wait_for(folder.list_jobs(), job_id, "")) is not None:
        print(
            f"k2tui tune: it waits for the end of {name_of(before)}; --anyway measures beside it",
            file=sys.stderr,
        )
    if not args.wait:
        print(
            json.dumps({"schema": 1, "job": job_id, "run": run.path.name})
            if args.json
            else f"{run.path.name} (job {job_id}); look: k2tui tune show"
        )
        return 0
    job = _follow(job_id, run.path.name)
    _show(run, args.json)
    if job.exit_code != 0:
        print(f"k2tui tune: {job.reason or job.state}; k2tui jobs logs {job_id}", file=sys.stderr)
    return 0 if job.exit_code == 0 else 1


def _follow(job_id: str, name: str) -> Job:
    """Wait for the run's end and say on stderr what it does: a line for each pass."""
    import time

    from k2tui.core.job_text import detail
    from k2tui.jobs import folder

    print(
        f"{name} (job {job_id}); Ctrl-C leaves it running, then: k2tui tune show", file=sys.stderr, flush=True
    )
    said: object = None
    try:
        while True:
            job = folder.wait(job_id, 0.5)
            if job.state.is_final:
                return job
            now = (job.progress.done, job.progress.note) if job.progress is not None else job.waiting_for
            if now and now != said:
                said = now
                print(detail(job, time.time()), file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print(f"\n{name} goes on: k2tui tune show; k2tui jobs stop {job_id} ends it", file=sys.stderr)
        raise


def run(args: argparse.Namespace) -> int:
    from k2tui.tune.folder import TuneFolder, read_space, space_path

    if args.action == "list":
        return _list(args)
    if args.action == "run":
        if args.dry_run:
            return _dry(args, read_space(space_path(args.space)))
        space = space_path(args.space)
        _refuse(read_space(space), args)
        return _start(TuneFolder.create(space), args)
    if args.run is not None and not args.run.strip():
        from k2tui.errors import UsageError

        raise UsageError(
            "an empty text names no tuning run", "k2tui tune list shows them; without a name: the newest"
        )
    found = TuneFolder.find(args.run or "")
    if args.action == "resume":
        from k2tui import config

        found.keep_profile(
            config.load(args.config).get_profile(found.space.profile)
        )  # said now, not in a log
        return _start(found, args)
    if args.action == "best":
        text = found.best()
        if not text:
            print(f"k2tui tune: no winner: {_no_winner(found)}", file=sys.stderr)
            return 1
        print(text, end="")
        return 0
    _show(found, args.json)
    if not args.json and (why := _unfinished(found.path.name, *_tuner_of(found))):
        print(why, file=sys.stderr)
    return 0


def _refuse(space: Space, args: argparse.Namespace) -> None:
    """Say now, not in a job's log, that the first trial cannot start."""
    from k2tui import config
    from k2tui.doctor_gpu import settle_gpus
    from k2tui.tune.check import own_port, refuse

    profile = config.load(args.config).get_profile(space.profile)
    refuse(space, own_port(settle_gpus(profile) if profile.auto_gpus else profile))


def _no_winner(run: Any) -> str:
    """Why a run has no best.toml."""
    from k2tui.core.tuning_verdict import no_baseline

    tuner, jobs = _tuner_of(run)
    if tuner is not None and not tuner.state.is_final:
        return f"{run.path.name} has not ended; k2tui tune show tells the best so far"
    if why := no_baseline(run.trials()) or _unfinished(run.path.name, tuner, jobs):
        return why
    return f"no setting of {run.path.name} was really faster (k2tui tune show)"


def _tuner_of(run: Any) -> tuple[Job | None, Sequence[Job]]:
    """The job of a run's newest tuner, and all jobs."""
    from k2tui.jobs import folder

    jobs = folder.list_jobs()
    name = run.path.name
    mine = [
        j for j in jobs if j.spec.stage == "tune" and str(j.spec.params.get("folder")).endswith(f"/{name}")
    ]
    return (mine[0] if mine else None), jobs


def _unfinished(name: str, tuner: Job | None, jobs: Sequence[Job]) -> str:
    """What became of a run whose tuner died: a job of it that runs on, and how to go on; "" for any other run."""
    from k2tui.core.server_jobs import left_over

    left = [j.spec.id for j in left_over(jobs) if j.spec.params.get("tune") == name]
    if left:
        return f"left running: {', '.join(left)}; k2tui down {left[0]}, or k2tui tune resume {name}"
    if tuner is not None and tuner.exit_code not in (0, 1, 2) and str(tuner.state) in ("failed", "lost"):
        return f"the tuner: {tuner.reason}; k2tui tune resume {name}"
    return ""


def _list(args: argparse.Namespace) -> int:
    """Every run, the newest first: state, when it began, how many trials, the winner."""
    import time

    from k2tui.core.tuning import words
    from k2tui.core.tuning_verdict import no_baseline, winner
    from k2tui.jobs import folder
    from k2tui.plain import table as plain_table
    from k2tui.tune.folder import TuneFolder, root

    names = (
        sorted((p.name for p in root().iterdir() if (p / "space.toml").exists()), reverse=True)
        if root().is_dir()
        else []
    )
    tuners: dict[str, Job] = {}
    jobs = folder.list_jobs() if names else []
    for job in jobs:
        if job.spec.stage == "tune":  # newest first; one that made its own folder says so in its result
            where = str((job.result or {}).get("folder") or job.spec.params.get("folder") or "")
            tuners.setdefault(where.rsplit("/", 1)[-1], job)
    runs: list[dict[str, Any]] = []
    for name in names:
        view = TuneFolder(root() / name).view()
        measured = [t for t in view.trials if t.estimate is not None]
        best = winner(view.space, view.trials) if view.space is not None else None
        named = [j for j in jobs if view.now is not None and j.spec.id == view.job_id]
        job = named[0] if named else tuners.get(name)
        runs.append(
            {
                "run": name,
                "state": str(job.state) if job is not None else "ended",
                "began_s": (root() / name / "space.toml").stat().st_mtime,
                "profile": view.space.profile if view.space is not None else "",
                "trials": len(view.trials),
                "measured": len(measured),
                "best": words(best.setting) if best is not None and best.setting else None,
                "error": view.error or no_baseline(view.trials),
                "unfinished": _unfinished(name, job, jobs),
            }
        )
    if args.json:
        print(json.dumps({"schema": 1, "runs": names, "details": runs}, ensure_ascii=False))
    elif not runs:
        print("no tuning run yet")
    else:
        rows = [
            [
                r["run"], time.strftime("%Y-%m-%d %H:%M", time.localtime(r["began_s"])), r["state"], f"{r['measured']}/{r['trials']}",
                r["unfinished"] or r["best"] or (r["error"][:60] if r["error"] else "none really faster" if r["measured"] > 1 else ""),
            ]
            for r in runs
        ]  # fmt: skip
        print(plain_table(["run", "began", "state", "measured", "best"], rows))
    return 0


def _dry(args: argparse.Namespace, space: Any) -> int:
    import textwrap
    from dataclasses import replace

    from k2tui import config, engines
    from k2tui.core.job_mask import mask_argv, mask_env
    from k2tui.core.tuning import apply, words
    from k2tui.core.tuning_plan import planned
    from k2tui.tune.check import no_change
    from k2tui.verbs._launch_text import command, room

    width = max(0, room(sys.stdout) - 4)
    profile = config.load(args.config).get_profile(space.profile)
    settings = planned(space, profile, {})
    out: list[dict[str, str]] = []
    for setting in settings:
        plan = engines.get(profile.engine).launch(replace(profile, **apply(profile, setting)))
        shown = command(mask_argv(plan.argv), mask_env(plan.env), 0 if args.json else width)
        out.append({"setting": words(setting), "command": shown, "skipped": no_change(profile, setting, {})})
    if args.json:
        print(json.dumps({"schema": 1, "trials": out}, ensure_ascii=False))
    else:
        for entry in out:
            print(
                entry["setting"]
                + (f": skipped, {entry['skipped']}" if entry["skipped"] else "")
                + f"\n{textwrap.indent(entry['command'], '    ')}"
            )
        tail = (
            "then what helped, together, and the profile as it is once more"
            if space.method == "search"
            else "then the profile as it is once more"
        )
        print(f"{len(out)} trials, {tail}")
    return 0
