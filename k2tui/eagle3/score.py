"""`python -m k2tui.eagle3.score`: a draft judged on held-out states (before serving) or on a running server."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from k2tui.errors import K2Error, UsageError
from k2tui.jobs.report import report_progress
from k2tui.paths import install_hint
from k2tui.plain import Teller, duration


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags (no torch is imported here)."""
    parser.add_argument("--draft", default="", metavar="DIR", help="offline: the draft's folder")
    parser.add_argument("--target", default="", metavar="DIR", help="offline: the target's folder")
    parser.add_argument("--states", default="", metavar="DIR", help="offline: held-out states")
    parser.add_argument(
        "--limit", type=int, default=0, help="offline: only the first N samples; online: prompts (default 16)"
    )
    parser.add_argument(
        "--ttt-length", type=int, default=7, help="offline: draft steps looked at (default 7)"
    )
    parser.add_argument(
        "--num-steps", type=int, default=3, help="offline: draft steps that are served (default 3)"
    )
    parser.add_argument(
        "--chains", type=int, default=32, help="offline: samples replayed by chain drafting (default 32)"
    )
    parser.add_argument("--max-tokens", type=int, default=8192, help="offline: tokens of one packed batch")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--accept",
        default="",
        metavar="KINDS",
        help="offline: go on although the states differ (model,tokenizer,layers,...)",
    )
    parser.add_argument(
        "--why",
        action="store_true",
        help="why a draft does not help: its record and a trial against the target (--draft, --target, and --states with all layers)",
    )
    parser.add_argument(
        "--served-version", default="0.5.23", help="--why: the SGLang release that serves the draft"
    )
    parser.add_argument("--url", default="", help="online: a server that runs the draft")
    parser.add_argument(
        "--baseline-url", default="", help="online: the same target without a draft, for the speed-up"
    )
    parser.add_argument(
        "--prompts", default="", metavar="FILE", help="online: JSONL of prompts (tokenized_data.jsonl fits)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="online: as served (default 0: greedy)"
    )
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


class _Told:
    """What a judgement is at, for its job and on stderr: told(what, done, total), with the time left of that part."""

    def __init__(self, unit: str) -> None:
        self.say = Teller(sys.stderr)
        self._unit = unit
        self._what = ""
        self._began = 0.0

    def note(self, what: str) -> None:
        """Something that cannot be counted begins."""
        report_progress(0, None, self._unit, what, force=True)
        self.say(what, passing=True)

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if what != self._what:
            self._what, self._began = what, now
        left = (now - self._began) / done * (total - done) if done and now > self._began else None
        report_progress(done, total, self._unit, what, left, force=done >= total)
        self.say(
            f"{what}: {done}/{total} {self._unit}"
            + (f", {duration(left)} left" if left is not None and done < total else ""),
            passing=True,
        )

    def part(self, what: str, total: int) -> Callable[[int], None]:
        """What to call with the number done; 0 is told now."""
        self(what, 0, total)
        return lambda done: self(what, done, total)


def offline(args: argparse.Namespace) -> dict[str, Any]:
    """Figures of a draft on held-out states. Raises K2Error."""
    told = _Told("samples")
    try:
        return _offline(args, told)
    finally:
        told.say.wipe()


def _offline(args: argparse.Namespace, told: _Told) -> dict[str, Any]:
    told.note("loading torch, the draft and the states")
    try:
        import torch
    except ImportError:
        raise K2Error(
            "evaluation needs torch, which is not installed here",
            install_hint("train") + "; or run it in SGLang's environment",
        )
    from k2tui.eagle3 import guard, ops
    from k2tui.eagle3.checkpoint import load_draft
    from k2tui.eagle3.data import Subset, open_states
    from k2tui.eagle3.evaluate import evaluate, replay_chains
    from k2tui.eagle3.loss import TargetHead
    from k2tui.eagle3.ranks import Ranks
    from k2tui.eagle3.step import TttModule
    from k2tui.eagle3.target import load_target, target_folder
    from k2tui.eagle3.ttt import TttOptions

    ranks = Ranks.start(args.device)
    dtype = torch.bfloat16 if ranks.device.type == "cuda" else torch.float32
    folder = target_folder(args.target)
    target = load_target(folder)
    if ranks.device.type == "cpu":
        ops.fit_threads(target.hidden_size)
    states = open_states(Path(args.states), norm=target.normed)
    origin = guard.origin_of(states)
    accept = tuple(a for a in args.accept.split(",") if a)
    guard.refuse(guard.against_target(origin, folder, target.hidden_size, target.vocab_size), accept)
    draft = load_draft(Path(args.draft)).to(ranks.device)
    recorded = json.loads((Path(args.draft) / "config.json").read_text(encoding="utf-8")).get("k2tui") or {}
    guard.refuse(
        guard.against_draft(
            origin,
            draft.config,
            recorded.get("states") or {},
            target.architecture,
            target.num_layers,
            args.draft,
        ),
        accept,
    )
    draft.set_embedding(target.embedding.to(ranks.device, dtype))
    head = TargetHead(target.head.to(ranks.device, dtype), draft.target_ids())
    count = min(args.limit or len(states.lengths), len(states.lengths))
    picked = Subset(states, tuple(range(count)))
    report = evaluate(
        TttModule(draft, head, TttOptions(ttt_length=args.ttt_length)),
        picked,
        ranks,
        max_tokens=args.max_tokens,
        dtype=dtype,
        num_steps=args.num_steps,
        told=told.part("judging", count),
    )
    chains = min(args.chains, count)
    chain = (
        replay_chains(
            draft, picked, range(chains), num_steps=args.num_steps, told=told.part("chain drafting", chains)
        )
        if chains
        else None
    )
    return {
        "kind": "offline",
        "samples": count,
        **report.to_dict(),
        "chain": chain.to_dict() if chain else None,
    }


def online(args: argparse.Namespace) -> dict[str, Any]:
    """Figures of the draft that a server runs. Raises K2Error."""
    from k2tui.eagle3.online import check_url, measure, read_prompts

    check_url("--url", args.url)
    if args.baseline_url:
        check_url("--baseline-url", args.baseline_url)
    prompts = read_prompts(Path(args.prompts), args.limit or 16)
    told = _Told("requests")
    told.note("the server warms up")
    try:
        report = measure(
            args.url, prompts, max_new_tokens=args.max_new_tokens, temperature=args.temperature, concurrency=args.concurrency,
            baseline_url=args.baseline_url, told=told,
        )  # fmt: skip
    finally:
        told.say.wipe()
    return {"kind": "online", **report.to_dict()}


def reasons(args: argparse.Namespace) -> dict[str, Any]:
    """What speaks against a draft. Raises K2Error."""
    try:
        from k2tui.eagle3.why import why
    except ImportError as err:
        raise K2Error(f"--why needs {err.name}, which is not installed here", install_hint("train"))
    found = why(Path(args.draft), args.target, args.states, args.served_version, args.limit or 8)
    return {
        "kind": "why",
        "ok": not any(f.ok is False for f in found),
        "findings": [f.to_dict() for f in found],
    }


def show(figures: dict[str, Any]) -> str:
    """A small table for people."""
    lines: list[str] = []
    if figures["kind"] == "why":
        words = {True: "ok     ", False: "WRONG  ", None: "unknown"}
        return "\n".join(f"{words[f['ok']]} {f['kind']}: {f['text']}" for f in figures["findings"])
    if figures["kind"] == "offline":
        lines.append(
            f"{figures['samples']} samples, {figures['positions']} drafts, {100 * figures['covered']:.1f} % of the labels in the draft vocabulary"
        )
        lines.append("step  accuracy  given all before  whole prefix  when sampling")
        for k in range(len(figures["acc"])):
            lines.append(
                f"{k:4d}  {figures['acc'][k]:8.3f}  {figures['cond_acc'][k]:16.3f}  {figures['full_acc'][k]:12.3f}  {figures['alpha'][k]:13.3f}"
            )
        lines.append(
            f"expected accept length with {figures['num_steps']} draft steps: {figures['accept_length']:.3f} (1.0 = nothing accepted)"
        )
        if figures["chain"]:
            lines.append(
                f"chain drafting replayed: {figures['chain']['accept_length']:.3f} over {figures['chain']['verify_ct']} drafts"
            )
        return "\n".join(lines)
    lines.append(
        f"{figures['url']} {figures['version']}: {figures['requests']} requests, {figures['tokens']} tokens, {figures['verify_ct']} verifications"
    )
    rate = "n/a" if figures["accept_rate"] is None else f"{100 * figures['accept_rate']:.1f} %"
    lines.append(
        f"accept length {figures['accept_length']:.3f} (1.0 = nothing accepted); accepted draft tokens {rate}; the server counts {figures['server_accept_length']:.3f}"
    )
    if figures["by_position"]:
        lines.append(
            "accepted up to position: "
            + "  ".join(f"{k + 1}: {100 * p:.1f} %" for k, p in enumerate(figures["by_position"]))
        )
    lines.append(f"{figures['output_throughput']:.1f} tok/s in all, {figures['tok_s_user']:.1f} tok/s a user")
    if figures["speedup"] is not None:
        same = (
            ""
            if figures["same_as_baseline"] is None
            else f", {100 * figures['same_as_baseline']:.0f} % of the greedy answers equal"
        )
        lines.append(
            f"without the draft {figures['baseline_output_throughput']:.1f} tok/s: {figures['speedup']:.2f} times{same}"
        )
    if figures["loops"]:
        lines.append(
            f"warning: {figures['loops']} answers repeat a few tokens for ever: their accept length says nothing; use chat-templated prompts"
        )
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    """Judge; returns the exit code. Raises K2Error."""
    from k2tui.stages import check_numbers
    from k2tui.stages.evaluate import NUMBERS

    check_numbers("", {f"--{k.replace('_', '-')}": getattr(args, k) for k in NUMBERS}, {f"--{k.replace('_', '-')}": s for k, s in NUMBERS.items()})
    if args.why:
        missing = [f"--{k}" for k in ("draft", "target") if not getattr(args, k)]
        if missing:
            raise UsageError(f"--why needs {', '.join(missing)}")
        figures = reasons(args)
    elif args.url:
        if not args.prompts:
            raise UsageError("--url needs --prompts", "a JSONL of prompts; tokenized_data.jsonl fits")
        figures = online(args)
    else:
        missing = [f"--{k}" for k in ("draft", "target", "states") if not getattr(args, k)]
        if missing:
            raise UsageError(f"evaluate needs {', '.join(missing)} (or --url with --prompts)")
        figures = offline(args)
    from k2tui.jobs.report import report_result

    report_result(figures)
    print(json.dumps({"schema": 1, **figures}, indent=1) if args.json else show(figures))
    return 0 if figures.get("ok", True) else 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m k2tui.eagle3.score", description="Judge an EAGLE-3 draft."
    )
    add_arguments(parser)
    try:
        return run(parser.parse_args(argv))
    except K2Error as err:
        print(f"k2tui evaluate: {err.message}", file=sys.stderr)
        if err.hint:
            print(f"  {err.hint}", file=sys.stderr)
        return err.exit_code


if __name__ == "__main__":
    sys.exit(main())
