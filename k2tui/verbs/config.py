"""`k2tui config`: what is set, from where, and the profiles."""

from __future__ import annotations

import argparse
import json

HELP = "show the config, the profiles and where files lie"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", choices=["show", "profiles", "paths"], default="show")
    parser.add_argument("--config", help="config file to read last")
    parser.add_argument("--json", action="store_true")


def run(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from k2tui import config, paths
    from k2tui.core.job_mask import mask_value

    loaded = config.load(args.config)
    places = {
        "config": str(paths.config_dir() / "config.toml"), "project": "k2tui.toml (in the working folder)", "state": str(paths.state_dir()),
        "jobs": str(paths.jobs_dir()), "runs": str(paths.bench_db()), "starts": str(paths.loads_file()), "assets": str(paths.assets_dir()),
    }
    if args.what == "paths":
        print(json.dumps({"schema": 1, "paths": places}, indent=1) if args.json else "\n".join(f"{k:<8} {v}" for k, v in places.items()))
        return 0
    if args.what == "profiles":
        if args.json:
            print(json.dumps({"schema": 1, "default": loaded.default_profile, "profiles": mask_value([asdict(p) for p in loaded.profiles.values()])}, ensure_ascii=False, indent=1))
            return 0
        import sys

        from k2tui.plain import table
        from k2tui.verbs._launch_text import room

        rows = [["*" if n == loaded.default_profile else "", n, p.engine, str(p.port), p.model, p.description] for n, p in sorted(loaded.profiles.items())]
        wide = table(["", "profile", "engine", "port", "model", "description"], rows, right=[3])
        width = room(sys.stdout)
        if not width or max(map(len, wide.splitlines())) <= width:
            print(wide)
            return 0
        import textwrap

        for star, name, engine, port, model, description in rows:  # two lines and more each, where a row does not fit
            print(f"{star or ' '} {name}\n    {engine}, port {port}, {model}")
            if description:
                print(textwrap.fill(description, width, initial_indent="    ", subsequent_indent="    "))
        return 0
    value = asdict(loaded)
    if args.json:
        print(json.dumps({"schema": 1, **mask_value(value)}, ensure_ascii=False, indent=1))
        return 0
    print(f"default_profile = {loaded.default_profile!r}\nplan = {loaded.plan!r}")
    for section in ("bench", "ui"):
        print(f"\n[{section}]")
        for key, item in value[section].items():
            print(f"{key} = {json.dumps(item)}")
    print("\nread, in order:")
    for source in loaded.sources:
        print(f"  {source}")
    return 0
