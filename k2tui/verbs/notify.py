"""`k2tui notify test`: one note by every way that is configured, and what came of it."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

HELP = "try the notifications of [notify]: bell, terminal, command, webhook"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sub = parser.add_subparsers(dest="order", metavar="ORDER", required=True)
    test = sub.add_parser(
        "test",
        help="send one note by every configured way",
        description="send one note by every configured way",
    )
    test.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    from k2tui import config, notify
    from k2tui.core.notices import Kind, Note, is_quiet, terminal_code

    settings = config.load().notify
    rules = notify.rules_of(settings)
    now = time.time()
    note = Note(Kind.READY, "k2tui", "this is a test", now, "test")
    code = terminal_code(note, os.environ)
    results: dict[str, str] = {}
    is_tty = sys.stderr.isatty()
    results["bell"] = "off" if not settings.bell else "rung" if is_tty else "no terminal"
    results["terminal"] = (
        "off"
        if not settings.terminal
        else "no terminal"
        if not is_tty
        else "sent"
        if code
        else "this terminal has none that we know"
    )
    if is_tty:
        sys.stderr.write(("\a" if settings.bell else "") + (code if settings.terminal else ""))
        sys.stderr.flush()
    results["command"] = (notify.run_command(settings, note) or "done") if settings.command else "none"
    results["webhook"] = (
        (notify.post(settings, note, pauses_s=(1.0,)) or "done") if settings.webhook else "none"
    )
    results["quiet now"] = "yes" if is_quiet(rules.quiet, notify.minute_of_day(now)) else "no"
    if args.json:
        print(json.dumps({"schema": 1, **results}, ensure_ascii=False, indent=1))
    else:
        for name, words in results.items():
            print(f"{name:<10} {words}")
    good = results["command"] in ("done", "none") and results["webhook"] in ("done", "none")
    return 0 if good else 1
