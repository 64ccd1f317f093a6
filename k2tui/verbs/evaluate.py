"""`k2tui evaluate`: what to expect of a draft (held-out states), or what it brings on the running server."""

from __future__ import annotations

import argparse

from k2tui.eagle3.score import add_arguments as add_scoring_arguments

HELP = "judge a draft on held-out states, or on a running server"
DESCRIPTION = (
    "Offline (--draft, --target, --states): accuracy by position, whole-prefix accuracy, expected accept length, chain drafting "
    "replayed. Online (--url, --prompts): accept length, acceptance by position and tok/s, with --baseline-url the speed-up."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_scoring_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from k2tui.eagle3.score import run as score

    return score(args)
