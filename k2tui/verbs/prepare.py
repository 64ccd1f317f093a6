"""`k2tui prepare`: prompts -> tokenized_data.jsonl, answered by the running server."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from k2tui import plain

SAY_S = 5.0  # a line of progress this often where stderr is no terminal

HELP = "make tokenized_data.jsonl from prompts, answered by the running server"
DESCRIPTION = (
    "Sends prompts to the server as token ids and keeps its answers as token ids. Adds to an existing --out: what is there stays as "
    "it is and is not asked for again. Survives a server restart; run again, it goes on where it stopped."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", action="append", required=True, metavar="PATH",
                        help="JSONL, JSON, TXT, Parquet, or a datasets folder; may be given several times")  # fmt: skip
    parser.add_argument(
        "--out", required=True, metavar="FILE", help="tokenized_data.jsonl to make or to add to"
    )
    parser.add_argument(
        "--url", default="", help="server (default: http://127.0.0.1:PORT of the default profile)"
    )
    parser.add_argument(
        "--count", type=int, metavar="N", help="rows wanted in all, those that are there included"
    )
    parser.add_argument("--balance", action="store_true", help="sources take turns")
    parser.add_argument("--per-source", type=int, metavar="N", help="at most N prompts of one source")
    parser.add_argument(
        "--first-turn", action="store_true", help="only the first user message of a conversation"
    )
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--top-k", type=int, default=-1)
    parser.add_argument("--max-new-tokens", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-seq-len", type=int, default=4096, help="longer samples are dropped")
    parser.add_argument("--min-response", type=int, default=4, metavar="TOKENS")
    parser.add_argument("--keep-truncated", action="store_true", help="keep answers cut by --max-new-tokens")
    parser.add_argument("--keep-refusals", action="store_true")
    parser.add_argument(
        "--repetition",
        type=float,
        default=0.5,
        metavar="SHARE",
        help="drop answers of which a loop fills so much",
    )
    parser.add_argument(
        "--no-thinking",
        action="store_true",
        help='chat_template_kwargs {"enable_thinking": false, "thinking": false}',
    )
    parser.add_argument(
        "--verify-every",
        type=int,
        default=1,
        metavar="N",
        help="ask the chat API's token count of one prompt in N (0: never)",
    )
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--give-up-s", type=float, default=900.0, help="end when the server is away so long")
    parser.add_argument("--json", action="store_true", help="result on stdout as JSON")


def run(args: argparse.Namespace) -> int:
    from k2tui.dataset.filters import FilterRules
    from k2tui.dataset.prepare import Preparation, Sampling, Speed
    from k2tui.dataset.prompts import read_prompts, select
    from k2tui.jobs.report import report_progress, report_result

    url = args.url
    if not url:
        from k2tui import config

        url = config.load().get_profile("").url
    out = Path(args.out)
    every = (p for path in args.prompts for p in read_prompts(Path(path), multi_turn=not args.first_turn))
    prompts, left_out = select(every, None, balance=args.balance, per_source=args.per_source, seed=args.seed)
    say = plain.Teller(sys.stderr)
    wanted = args.count
    began = said = time.monotonic()
    if not say.is_live:  # a job's log is not empty while it works
        print(f"{len(prompts)} prompts for {url}; a line of progress every {SAY_S:g} s, after a minute every {6 * SAY_S:g}", file=sys.stderr, flush=True)

    def tell(speed: Speed) -> None:
        nonlocal said
        note = speed.waiting or f"{speed.tokens_s:,.0f} tok/s, {speed.kept} kept"
        note += f", {speed.refused} refused" if speed.refused else ""
        resumed = f"row {work.existing}" if work.existing else ""
        report_progress(speed.done, speed.total, "prompts", note, speed.eta_s, resumed=resumed)
        eta = (
            f", {int(speed.eta_s) // 60}:{int(speed.eta_s) % 60:02d} left" if speed.eta_s is not None else ""
        )
        line = f"{speed.done}/{speed.total} prompts, {note}{eta}"
        now = time.monotonic()
        if say.is_live:
            say(line, passing=True)
        elif now - said >= (SAY_S if now - began < 60 else 6 * SAY_S):
            said = now
            say(line)

    work = Preparation(
        url, out, prompts,
        Sampling(args.temperature, args.top_p, args.top_k, args.max_new_tokens, args.seed),
        FilterRules(args.max_seq_len, args.min_response, args.keep_truncated, args.keep_refusals, args.repetition),
        args.concurrency, args.verify_every, args.give_up_s, tell,
        {"enable_thinking": False, "thinking": False} if args.no_thinking else {},
        target_rows=wanted,
    )  # fmt: skip
    try:
        work.execute()
    finally:
        if say.is_live:
            sys.stderr.write("\n")
    there = work.existing
    outcomes = {**{k: v for k, v in work.outcomes.items() if v}, **dict(left_out)}
    result: dict[str, Any] = {
        "rows": there + work.kept,
        "had": there,
        "kept": work.kept,
        "response_tokens": work.new_tokens,
        "outcomes": outcomes,
        "refused": dict(list(work.refused.items())[:50]),
        "refused_count": work.refused_count,
        "complete": there + work.kept >= wanted if wanted is not None else not work.refused_count,
    }
    report_result(result)
    if args.json:
        import json

        print(json.dumps({"schema": 1, **result}, indent=1))
    else:
        print(
            f"{result['rows']} rows in {out}: {there} were there, {work.kept} new ({work.new_tokens:,} response tokens)"
        )
        for reason, number in sorted(outcomes.items(), key=lambda kv: -kv[1]):
            if reason != "kept":
                print(f"  {number:6} {reason}")
        for name, why in list(work.refused.items())[:10]:
            print(plain.clean(f"  refused: {name}: {why}"))
        if work.refused_count:
            print("refused prompts are not done: the same command asks for them again")
        if wanted is not None and not result["complete"]:
            print(f"{wanted} rows were wanted: give more prompts")
    return 0 if result["complete"] else 1
