"""`k2tui data`: look at, check, merge, split and export tokenized_data.jsonl."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

READS = ("inspect", "check", "stats")  # these go on with a broken config
HELP = "inspect, check, merge, split and export tokenized_data.jsonl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    inspect = actions.add_parser("inspect", help="one screen: rows, keys, lengths, first tokens, histogram")
    inspect.add_argument("file", type=Path)
    check = actions.add_parser("check", help="every number of every row; names each bad line")
    check.add_argument("file", type=Path)
    check.add_argument("--model", type=Path, metavar="FOLDER", help="target: ids must lie in its vocabulary")
    stats = actions.add_parser("stats", help="lengths in full, and the disk that hidden states would take")
    stats.add_argument("file", type=Path)
    stats.add_argument("--model", type=Path, metavar="FOLDER", help="target, for the disk need")
    merge = actions.add_parser("merge", help="several files into one, one row a prompt")
    merge.add_argument("out", type=Path)
    merge.add_argument("file", type=Path, nargs="+")
    split = actions.add_parser("split", help="train and evaluation rows; a prompt stays on its side for ever")
    split.add_argument("file", type=Path)
    split.add_argument("--out", type=Path, required=True)
    split.add_argument("--eval-out", type=Path, required=True)
    split.add_argument("--eval-share", type=float, default=0.02)
    split.add_argument("--seed", type=int, default=1)
    export = actions.add_parser(
        "export", help="csv of the lengths, jsonl of ids and mask, decoded text, or parquet"
    )
    export.add_argument("file", type=Path)
    export.add_argument("out", type=Path)
    export.add_argument("--to", choices=("csv", "jsonl", "text", "parquet"), required=True)
    export.add_argument("--model", type=Path, metavar="FOLDER", help="target, for its tokenizer (--to text)")
    for p in (inspect, check, stats, merge, split, export):
        p.add_argument("--json", action="store_true", help="data on stdout as JSON")


def run(args: argparse.Namespace) -> int:
    return _ACTIONS[args.action](args)


def _print(args: argparse.Namespace, value: dict[str, Any], text: str) -> None:
    if args.json:
        import json

        print(json.dumps({"schema": 1, **value}, indent=1))
    else:
        print(text)


def _count(n: int, what: str) -> str:
    """ "1 problem", "2,000 problems"."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def _summary_text(s: Any, disk: str = "") -> str:
    lines = [
        f"{s.path}: {s.rows:,} rows, {s.size_b / 1e6:,.1f} MB" + (", last line cut" if s.is_cut else ""),
        f"keys     {', '.join(s.keys)}",
        f"tokens   {s.tokens:,}, of them {s.response_tokens:,} response ({s.response_tokens / max(1, s.tokens):.0%})",
        "length            min     p50    mean     p90     p99     max",
    ]
    for name, spread in (("seq_len", s.seq_len), ("prompt", s.prompt), ("response", s.response)):
        lines.append(
            f"  {name:12} {spread.low:7,} {spread.p50:7,} {spread.mean:7,.0f} {spread.p90:7,} {spread.p99:7,} {spread.high:7,}"
        )
    reasons = ", ".join(f"{k} {v:,}" for k, v in s.finish_reasons.items())
    lines.append(f"finish   {reasons}; with reasoning {s.with_reasoning:,}")
    lines.append(f"first    {' '.join(map(str, s.first_tokens))} ...")
    most = max((n for _, _, n in s.histogram), default=0)
    for low, high, count in s.histogram:
        lines.append(f"  {low:6,}-{high - 1:<6,} {count:7,} {'#' * round(40 * count / most) if most else ''}")
    return "\n".join(lines + ([disk] if disk else []))


def _inspect(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from k2tui.dataset.stats import summarize

    found = summarize(args.file)
    _print(args, asdict(found), _summary_text(found))
    return 0


def _stats(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from k2tui.dataset.stats import summarize

    found = summarize(args.file, bins=24)
    value = asdict(found)
    disk = ""
    if args.model:
        from k2tui.capture.ids import usual_boundaries
        from k2tui.capture.model import model_facts
        from k2tui.states.layout import Manifest, set_bytes

        facts = model_facts(args.model)
        bounds = usual_boundaries(facts.num_hidden_layers)
        told: list[str] = []
        value["states_bytes"] = {}
        for dtype in ("bf16", "fp8_e4m3"):
            for last in ("all", "loss"):
                manifest = Manifest(facts.hidden_size, facts.num_hidden_layers, bounds, dtype, last)
                size = set_bytes(
                    manifest,
                    found.tokens,
                    found.tokens if last == "all" else found.response_tokens + found.rows,
                )
                value["states_bytes"][f"{dtype}/{last}"] = size
                told.append(f"{dtype}, last {last}: {size / 1e9:,.1f} GB")
        disk = f"states at {'/'.join(map(str, bounds))} of H={facts.hidden_size}: " + "; ".join(told)
    _print(args, value, _summary_text(found, disk))
    return 0


def _check(args: argparse.Namespace) -> int:
    from k2tui.dataset.stats import check_rows

    vocab: int | None = None
    if args.model:
        from k2tui.capture.model import model_facts

        vocab = model_facts(args.model).vocab_size or None
    valid, problems, twins = check_rows(args.file, vocab)
    ok = not problems
    text = "\n".join(
        [
            *problems,
            f"{_count(valid, 'valid row')}, {_count(len(problems), 'problem')}, {_count(twins, 'prompt')} there twice",
        ]
    )
    _print(args, {"valid": valid, "problems": problems, "duplicate_prompts": twins, "ok": ok}, text)
    return 0 if ok else 1


def _merge(args: argparse.Namespace) -> int:
    from k2tui.dataset.stats import merge

    count, twins = merge(args.file, args.out)
    _print(
        args,
        {"rows": count, "duplicates": twins},
        f"{count:,} rows in {args.out}; {twins:,} prompts were there already",
    )
    return 0


def _split(args: argparse.Namespace) -> int:
    from k2tui.dataset.stats import split

    train, held = split(args.file, args.out, args.eval_out, args.eval_share, args.seed)
    _print(args, {"train": train, "eval": held}, f"{train:,} rows in {args.out}, {held:,} in {args.eval_out}")
    return 0


def _export(args: argparse.Namespace) -> int:
    from k2tui.dataset.stats import export

    decode: Any = None
    if args.to == "text" and args.model:
        from k2tui.errors import K2Error

        try:
            from tokenizers import Tokenizer

            tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
        except ImportError:
            raise K2Error("decoding needs the tokenizers package", "pip install tokenizers")
        except Exception as err:
            raise K2Error(f"{args.model / 'tokenizer.json'}: {err}", "give the folder of the target model")

        def decode_ids(ids: list[int]) -> str:
            return tokenizer.decode(ids, skip_special_tokens=False)

        decode = decode_ids

    count = export(args.file, args.out, args.to, decode)
    _print(args, {"rows": count, "out": str(args.out)}, f"{count:,} rows in {args.out}")
    return 0


_ACTIONS = {
    "inspect": _inspect,
    "check": _check,
    "stats": _stats,
    "merge": _merge,
    "split": _split,
    "export": _export,
}
