"""`k2tui doctor [PROFILE]`: what would go wrong, before it does."""

from __future__ import annotations

import argparse
import json
import sys

HELP = "check this machine and a profile before a start"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("profile", nargs="?", help="also check this profile's start")
    parser.add_argument("--config", help="config file to read last")
    parser.add_argument("--json", action="store_true", help="findings as JSON")


def run(args: argparse.Namespace) -> int:
    from k2tui import config, doctor

    found = doctor.check(config.load(args.config), args.profile)
    bad = any(f.severity is doctor.Severity.ERROR for f in found)
    if args.json:
        print(json.dumps({"schema": 1, "ok": not bad, "findings": [f.as_json() for f in found]}, ensure_ascii=False, indent=1))
        return 1 if bad else 0
    from k2tui.plain import mark
    from k2tui.verbs._launch_text import print_findings

    print_findings(found)
    if bad:
        print(f"A start would fail: see the lines marked {mark(doctor.Severity.ERROR)}.", file=sys.stderr)
    return 1 if bad else 0
