"""`python -m k2tui.eagle3.train`: flags -> TrainOptions -> Trainer. Also started by torchrun, one process a GPU."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from k2tui.errors import K2Error, UsageError
from k2tui.jobs.report import report_progress
from k2tui.paths import install_hint, model_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of a training run (no torch is imported here)."""
    parser.add_argument(
        "--states",
        required=True,
        metavar="DIR",
        help="states folder of `k2tui extract`, or SpecForge .ckpt files",
    )
    parser.add_argument(
        "--target",
        required=True,
        metavar="DIR",
        help="the target model's folder (embedding, head and norm are read)",
    )
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="saves, metrics.jsonl and the exported drafts"
    )
    parser.add_argument(
        "--init",
        default="",
        metavar="DIR",
        help="start from this draft (SGLang, SpecForge or speculators naming)",
    )
    parser.add_argument(
        "--eval-states", default="", metavar="DIR", help="held-out states (default: a share of --states)"
    )
    parser.add_argument(
        "--held-out", type=float, default=0.05, help="share of samples kept for evaluation (default 0.05)"
    )
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument(
        "--max-steps", type=int, default=0, help="stop after this many steps; the schedule ends there"
    )
    parser.add_argument(
        "--batch-size", type=int, default=8, help="samples of one optimiser step, over all ranks (default 8)"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=16384, help="tokens of one packed micro-batch (default 16384)"
    )
    parser.add_argument(
        "--max-length", type=int, default=None, help="cut samples to this many tokens (default: whole)"
    )
    parser.add_argument("--ttt-length", type=int, default=7, help="teacher-forced draft steps (default 7)")
    parser.add_argument("--decay", type=float, default=0.8, help="weight of step k is decay^k (default 0.8)")
    parser.add_argument(
        "--mask",
        choices=("next", "specforge"),
        default="next",
        help="next: step k counts where the predicted position's mask is set; specforge: one earlier",
    )
    parser.add_argument(
        "--denominator",
        choices=("mask", "rows"),
        default="mask",
        help="rows: divide by samples x longest, as SpecForge does",
    )
    parser.add_argument(
        "--lr",
        type=float,
        default=1e-4,
        help="peak learning rate (default 1e-4; a warm start wants 1e-5 to 2e-5)",
    )
    parser.add_argument("--warmup-ratio", type=float, default=0.015)
    parser.add_argument("--schedule", choices=("cosine", "constant"), default="cosine")
    parser.add_argument("--clip", type=float, default=0.5, help="largest gradient norm (default 0.5)")
    parser.add_argument("--weight-decay", type=float, default=0.0)
    parser.add_argument("--beta2", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--draft-vocab-size",
        type=int,
        default=0,
        help="from scratch: ids that the draft knows (default 32000, or all)",
    )
    parser.add_argument(
        "--draft-config",
        default="",
        metavar="DIR",
        help="from scratch: take the shape from this folder's config.json",
    )
    parser.add_argument(
        "--boundaries", default="", metavar="A,B,C", help="for states that do not say which layers they hold"
    )
    parser.add_argument("--dtype", choices=("auto", "bf16", "fp32"), default="auto")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--shard",
        action="store_true",
        help="split weights and moments over the ranks (FSDP2); default: each rank holds all",
    )
    parser.add_argument(
        "--no-compile", action="store_true", help="run the pointwise parts without torch.compile"
    )
    parser.add_argument(
        "--recompute", action="store_true", help="less memory: make the gate-up product again in the backward"
    )
    parser.add_argument(
        "--chunk-rows", type=int, default=8192, help="rows of logits alive at once (default 8192)"
    )
    parser.add_argument("--eval-every", type=int, default=0, metavar="STEPS", help="default: every epoch")
    parser.add_argument("--save-every", type=int, default=0, metavar="STEPS", help="default: every epoch")
    parser.add_argument("--log-every", type=int, default=1, metavar="STEPS")
    parser.add_argument("--keep", type=int, default=2, help="newest saves kept (default 2)")
    parser.add_argument(
        "--patience",
        type=int,
        default=0,
        metavar="EVALS",
        help="stop after this many evaluations without gain",
    )
    parser.add_argument(
        "--num-steps",
        type=int,
        default=3,
        help="draft steps that will be served: for the expected accept length",
    )
    parser.add_argument(
        "--chains", type=int, default=16, help="held-out samples replayed by chain drafting at the end"
    )
    parser.add_argument(
        "--keep-first",
        action="store_true",
        help="export the untrained draft too (draft-first), to serve it for comparison",
    )
    parser.add_argument(
        "--accept",
        default="",
        metavar="KINDS",
        help="go on although the states differ: model,engine,template,tokenizer,layers",
    )
    parser.add_argument(
        "--served-version",
        default="0.5.23",
        help="SGLang release that will serve the draft: layer ids are written for it",
    )
    parser.add_argument("--tensorboard", action="store_true")
    parser.add_argument("--no-resume", action="store_true", help="start again even when --out holds saves")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def check(args: argparse.Namespace) -> None:
    """Numbers and folders, before anything is loaded or written. Raises UsageError naming the flag."""
    from k2tui.stages import check_numbers
    from k2tui.stages.train import NUMBERS

    flags = {k: f"--{k.replace('_', '-')}" for k in NUMBERS}
    check_numbers("", {flag: getattr(args, k, None) for k, flag in flags.items()}, {flags[k]: s for k, s in NUMBERS.items()})
    for key in ("held_out", "beta2"):
        if getattr(args, key) >= 1:
            raise UsageError(f"{flags[key]} is a share from 0 to below 1, not {getattr(args, key)}")
    for key in ("lr", "clip"):
        if getattr(args, key) <= 0:
            raise UsageError(f"--{key} must be above 0, not {getattr(args, key)}")
    if not all(b.strip().isdecimal() for b in args.boundaries.replace("/", ",").split(",") if args.boundaries):
        raise UsageError(f"--boundaries must be numbers such as 1,3,5, not {args.boundaries!r}")
    out = Path(os.path.realpath(args.out))
    for key in ("states", "target", "init", "eval_states", "draft_config"):
        if not (given := getattr(args, key)):
            continue
        other = Path(os.path.realpath(model_path(given)))
        # beside the trainer's own folders there is room for others
        is_own = out in other.parents and other.relative_to(out).parts[0].startswith(("saves", "draft"))
        words = "is" if out == other else "is inside" if other in out.parents else "writes over" if is_own else ""
        if words:
            raise UsageError(
                f"--out {args.out} {words} --{key.replace('_', '-')} {given}: what lies there could be overwritten", "give --out a folder of its own"
            )


def run(args: argparse.Namespace) -> int:
    """Train; returns the exit code. Raises K2Error."""
    check(args)
    if os.environ.get("RANK", "0") == "0":
        report_progress(0, None, "steps", "loading torch", force=True)
    try:
        import torch  # noqa: F401
    except ImportError:
        raise K2Error(
            "training needs torch, which is not installed here",
            install_hint("train") + "; or run it in SGLang's environment",
        )
    import json

    from k2tui.eagle3.step import OptimOptions
    from k2tui.eagle3.trainer import Trainer, TrainOptions
    from k2tui.eagle3.ttt import TttOptions

    options = TrainOptions(
        states=args.states, target=args.target, out=args.out, init=args.init, eval_states=args.eval_states, held_out=args.held_out, epochs=args.epochs,
        max_steps=args.max_steps, batch_size=args.batch_size, max_tokens=args.max_tokens, max_length=args.max_length or 0, seed=args.seed,
        draft_vocab_size=args.draft_vocab_size, draft_config=args.draft_config, boundaries=args.boundaries,
        ttt=TttOptions(ttt_length=args.ttt_length, decay=args.decay, shifted=args.mask == "next", recompute=args.recompute, chunk_rows=args.chunk_rows),
        optim=OptimOptions(learning_rate=args.lr, betas=(0.9, args.beta2), weight_decay=args.weight_decay, clip=args.clip, warmup_ratio=args.warmup_ratio, schedule=args.schedule),
        denominator=args.denominator, dtype=args.dtype, device=args.device, shard=args.shard, compile=not args.no_compile, eval_every=args.eval_every,
        save_every=args.save_every, log_every=args.log_every, num_steps=args.num_steps, patience=args.patience, keep=args.keep, chains=args.chains, keep_first=args.keep_first,
        accept=tuple(a for a in args.accept.split(",") if a), tensorboard=args.tensorboard, resume=not args.no_resume, served_version=args.served_version,
    )  # fmt: skip
    trainer = Trainer(options)
    try:
        result = trainer.run()
        if trainer.ranks.is_first:
            if args.json:
                print(json.dumps({"schema": 1, **result}, indent=1))
            else:
                length = result["expected_accept_length"]
                print(
                    f"draft: {result['draft']}" + (f"  expected accept length {length:.3f}" if length else "")
                )
        return (
            143
            if result.get("stopped") == "SIGTERM"
            or (not trainer.ranks.is_first and trainer.stopping == "SIGTERM")
            else 0
        )
    finally:
        trainer.ranks.stop()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m k2tui.eagle3.train", description="Train an EAGLE-3 draft on captured states."
    )
    add_arguments(parser)
    try:
        return run(parser.parse_args(argv))
    except K2Error as err:
        print(f"k2tui train: {err.message}", file=sys.stderr)
        if err.hint:
            print(f"  {err.hint}", file=sys.stderr)
        return err.exit_code


if __name__ == "__main__":
    sys.exit(main())
