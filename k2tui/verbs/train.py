"""`k2tui train`: an EAGLE-3 draft on captured states, in the foreground. As a job: the dashboard's key or `k2tui jobs`."""

from __future__ import annotations

import argparse
import os

from k2tui.eagle3.train import add_arguments as add_training_arguments

HELP = "train an EAGLE-3 draft on captured states (resumes by itself)"
DESCRIPTION = (
    "Trains an EAGLE-3 draft on the states that `k2tui extract` wrote, from scratch or from a draft (--init). Runs again with the "
    "same --out go on where the last save is. Writes draft-best and draft-last, which SGLang and vLLM load."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_training_arguments(parser)
    parser.add_argument(
        "--nproc", type=int, default=1, metavar="N", help="one rank on each of N GPUs (or N CPU processes)"
    )


def run(args: argparse.Namespace) -> int:
    from k2tui.eagle3.train import check
    from k2tui.eagle3.train import run as train

    if args.nproc == 1:
        return train(args)
    check(args)
    from k2tui import config
    from k2tui.stages import get

    chosen = {k: v for k, v in vars(args).items() if not k.startswith("_") and k not in ("verb",)}
    plan = get("train").plan(config.load(), chosen)
    os.execvpe(plan.argv[0], list(plan.argv), {**os.environ, **plan.env})
