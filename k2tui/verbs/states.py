"""`k2tui states`: check, show, convert and merge folders of hidden states."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

READS = ("check", "show")  # these go on with a broken config
HELP = "check, show, convert and merge hidden states"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    check = actions.add_parser(
        "check", help="every row present and finite, checksums, tokens against the data file"
    )
    check.add_argument(
        "folder", nargs="+", type=Path, help="folder of states, or the parts that several servers wrote"
    )
    check.add_argument(
        "--data", type=Path, metavar="FILE", help="tokenized_data.jsonl (default: the one the manifest names)"
    )
    check.add_argument("--quick", action="store_true", help="headers, tokens and masks only, no checksums")
    show = actions.add_parser("show", help="the manifest and what is there")
    show.add_argument("folder", type=Path)
    conv = actions.add_parser("convert", help="to or from SpecForge's and speculators' layouts")
    conv.add_argument("source", type=Path)
    conv.add_argument("out", type=Path)
    conv.add_argument(
        "--to", choices=("specforge", "speculators"), help="write that layout from a folder of k2tui"
    )
    conv.add_argument(
        "--from", dest="source_kind", choices=("specforge", "speculators"), help="read that layout"
    )
    conv.add_argument(
        "--boundaries", default="", metavar="A,B,C", help="what the foreign aux states are (with --from)"
    )
    conv.add_argument(
        "--model",
        type=Path,
        metavar="FOLDER",
        help="the target, for its layer count and final norm (with --from)",
    )
    conv.add_argument(
        "--allow-post-norm", action="store_true", help="write post-norm last states for speculators, marked"
    )
    merge = actions.add_parser("merge", help="one folder from the parts of several servers")
    merge.add_argument("out", type=Path)
    merge.add_argument("folder", nargs="+", type=Path)
    for p in (check, show, conv, merge):
        p.add_argument("--json", action="store_true", help="data on stdout as JSON")


def run(args: argparse.Namespace) -> int:
    return {"check": _check, "show": _show, "convert": _convert, "merge": _merge}[args.action](args)


def _need_numpy() -> None:
    from k2tui.errors import K2Error
    from k2tui.paths import install_hint

    try:
        import numpy  # noqa: F401
    except ImportError:
        raise K2Error("hidden states need numpy", install_hint("train") + " (or pip install numpy)")


def _progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{done}/{total} " + ("\n" if done >= total else ""))
        sys.stderr.flush()


def _check(args: argparse.Namespace) -> int:
    _need_numpy()
    from k2tui.states.check import check_states
    from k2tui.states.layout import read_manifest

    manifest = read_manifest(args.folder[0])
    data: Path | None = args.data
    count: int | None = None
    rows: Any = None
    if data is None and manifest.data_path and Path(manifest.data_path).is_file():
        data, count = Path(manifest.data_path), manifest.data_rows
    if data is not None:
        from k2tui.dataset.rows import RowFile

        file = RowFile(data)
        count = (
            len(file)
            if args.data is not None and not manifest.data_rows
            else min(len(file), manifest.data_rows or len(file))
        )

        def row_of(index: int) -> tuple[Any, Any]:
            row = file.row(index)
            return row.input_ids, row.loss_mask

        rows = row_of

    report = check_states(args.folder, rows, count, deep=not args.quick, on_progress=_progress)
    if args.json:
        import json
        from dataclasses import asdict

        print(json.dumps({"schema": 1, **asdict(report), "ok": report.ok}, indent=1))
    else:
        print(
            f"{report.samples} samples, {report.tokens:,} tokens, {report.shards} shards, {report.bytes / 1e9:.3f} GB"
        )
        print("compared with " + (str(data) if data else "no data file (give --data)"))
        if report.shadowed:
            print(f"{report.shadowed} copies of samples in a second shard: never read")
        if report.partial:
            print(f"{report.partial} unfinished shards of killed or running writers: never read")
        if report.missing:
            some = ", ".join(map(str, report.missing[:10]))
            print(
                f"{len(report.missing)} rows have no states: {some}{' ...' if len(report.missing) > 10 else ''}"
            )
        for line in report.problems:
            print(line)
        print("clean" if report.ok else "NOT clean")
    return 0 if report.ok else 1


def _show(args: argparse.Namespace) -> int:
    _need_numpy()
    from k2tui.states.reader import StatesReader

    reader = StatesReader(args.folder, allow_empty=True)
    told = reader.manifest.to_json()
    facts = {
        "samples": len(reader),
        "tokens": sum(reader.lengths),
        "shards": len(reader.shards),
        "bytes": sum(s.size_b for s in reader.shards),
    }
    if args.json:
        import json

        print(json.dumps({**told, **facts, "schema": 1}, indent=1))
        return 0
    for key, value in {**facts, **told}.items():
        if value not in ("", 0, [], {}, None):
            print(f"{key:18} {value:,}" if isinstance(value, int) else f"{key:18} {value}")
    return 0


def _convert(args: argparse.Namespace) -> int:
    _need_numpy()
    from k2tui.errors import UsageError
    from k2tui.states import convert

    if bool(args.to) == bool(args.source_kind):
        raise UsageError("give one of --to and --from")
    if args.to == "specforge":
        count = convert.to_specforge(args.source, args.out, _progress)
    elif args.to == "speculators":
        count = convert.to_speculators(
            args.source, args.out, allow_post_norm=args.allow_post_norm, on_progress=_progress
        )
    else:
        if not args.boundaries or not args.model:
            raise UsageError(
                "--from needs --boundaries and --model",
                "what the foreign aux states are, and the target they come from",
            )
        from k2tui.capture.model import model_facts

        boundaries = tuple(sorted(int(b) for b in args.boundaries.split(",")))
        layers = model_facts(args.model).num_hidden_layers
        if args.source_kind == "specforge":
            count = convert.from_specforge(args.source, args.out, boundaries, layers, _progress)
        else:
            count = convert.from_speculators(
                args.source, args.out, boundaries, layers, convert.final_norm(args.model), _progress
            )
    _tell(args, count)
    return 0


def _merge(args: argparse.Namespace) -> int:
    _need_numpy()
    from k2tui.states.convert import merge

    _tell(args, merge(args.folder, args.out, _progress))
    return 0


def _tell(args: argparse.Namespace, count: int) -> None:
    if args.json:
        import json

        print(json.dumps({"schema": 1, "samples": count, "out": str(args.out)}))
    else:
        print(f"{count} samples in {args.out}")
