"""`k2tui extract`: the server's own hidden states of a data file, onto disk; proved against the server before and after."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k2tui import plain

if TYPE_CHECKING:
    from k2tui.capture.server import OwnServer

HELP = "capture hidden states of a data file from the server that will verify the draft"
DESCRIPTION = (
    "Captures the hidden states of every row of --data into the folder --out, through a server that runs with the capture "
    "plug-in. Without --url it starts one by --profile and stops it at the end. Goes on where an earlier run stopped."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", required=True, metavar="FILE", help="tokenized_data.jsonl (k2tui prepare)")
    parser.add_argument(
        "--out", required=True, metavar="FOLDER", help="folder of the states; its parent is the capture root"
    )
    parser.add_argument(
        "--url", action="append", default=[], help="a running capture server; may be given several times"
    )
    parser.add_argument(
        "--profile", default="", help="start a server by this profile (default: the default profile)"
    )
    parser.add_argument("--port", type=int, help="port of the server that is started")
    parser.add_argument(
        "--gpus", help='its GPUs: "auto", how many, or which: 0,1 (one: 3,); default: the profile\'s'
    )
    parser.add_argument(
        "--model", default="", metavar="FOLDER", help="target folder, when it is not where the server says"
    )
    parser.add_argument(
        "--boundaries",
        default="",
        metavar="A,B,C",
        help="physical layer boundaries (default: by draft or SGLang's)",
    )
    parser.add_argument("--dtype", choices=("bf16", "fp8_e4m3"), default="bf16", help="fp8 halves the size")
    parser.add_argument(
        "--last",
        choices=("loss", "all", "none"),
        default="loss",
        help="rows of the last hidden state to keep",
    )
    parser.add_argument("--limit", type=int, help="only the first N rows")
    parser.add_argument(
        "--draft", default="", metavar="FOLDER", help="existing draft: its layer set is found and checked"
    )
    parser.add_argument(
        "--probe",
        type=int,
        default=0,
        metavar="N",
        help="samples of the proof (default: 50 with a draft, else 8)",
    )
    parser.add_argument("--concurrency", type=int, default=32, help="requests at once, a server")
    parser.add_argument("--keep-free-gb", type=float, default=4.0, help="pause below this room on the disk")
    parser.add_argument("--no-proof", action="store_true", help="skip the proofs of alignment")
    parser.add_argument(
        "--force", action="store_true", help="go on although a proof failed or the disk is too small"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="only say what would be done and how much disk it takes"
    )
    parser.add_argument("--json", action="store_true", help="result on stdout as JSON")


def _need(prove: bool) -> None:
    """numpy for what lies on disk, torch for the proofs; neither is in the base install."""
    from importlib.util import find_spec

    from k2tui.errors import K2Error
    from k2tui.paths import install_hint

    missing = [name for name in ("numpy", *(["torch"] if prove else [])) if find_spec(name) is None]
    if missing:
        raise K2Error(
            f"extract needs {' and '.join(missing)} here",
            install_hint("train") + ("" if "numpy" in missing else "; --no-proof goes without torch"),
        )


def run(args: argparse.Namespace) -> int:
    _need(prove=not (args.no_proof or args.dry_run))
    from k2tui.capture.extract import Plan, extract
    from k2tui.errors import UsageError

    data, out = Path(args.data), Path(args.out).absolute()
    boundaries: tuple[int, ...] | None = None
    if args.boundaries:
        try:
            boundaries = tuple(sorted(int(b) for b in args.boundaries.replace("/", ",").split(",")))
        except ValueError:
            raise UsageError(f"--boundaries {args.boundaries!r}", "give numbers: --boundaries 2,30,58")
    plan = Plan(
        data=data,
        out=out,
        urls=tuple(args.url),
        model=Path(args.model) if args.model else None,
        boundaries=boundaries,
        dtype=args.dtype,
        last_rows=args.last,
        limit=args.limit,
        draft=Path(args.draft) if args.draft else None,
        probe=args.probe,
        concurrency=args.concurrency,
        min_free_b=int(args.keep_free_gb * 1e9),
        prove=not args.no_proof,
        force=args.force,
        dry_run=args.dry_run,
    )
    say = plain.Teller(sys.stderr)
    if plan.urls or args.dry_run:
        result = extract(plan, say, _draft_argmax)
    else:
        with _own_server(args, out, boundaries, say) as own:
            result = extract(plan._replace(urls=(own.url,), ended=own.ended), say, _draft_argmax)
    if args.json:
        import json

        print(json.dumps({"schema": 1, **result}, indent=1))
    return 0 if result.get("complete") or args.dry_run else 1


def _draft_argmax(folder: Path, model: Path) -> Any:
    """The draft of `folder` as a function (tokens [T], aux [T, 3H]) -> its first guess at each position [T]."""
    import torch

    from k2tui.capture.model import EMBED_NAMES, load_tensor
    from k2tui.eagle3.checkpoint import load_draft
    from k2tui.eagle3.draft import DraftCache
    from k2tui.errors import K2Error

    draft = load_draft(folder).eval()
    embedding = load_tensor(model, EMBED_NAMES)
    if embedding is None:
        raise K2Error(f"{model}: no {EMBED_NAMES[0]}", "give the folder of the target model with --model")
    draft.set_embedding(embedding.to(next(draft.parameters()).dtype))

    @torch.no_grad()
    def guess(tokens: torch.Tensor, aux: torch.Tensor) -> torch.Tensor:
        out = draft.extend(tokens, draft.fuse(aux), DraftCache(), 0)
        return draft.target_ids()[draft.logits(out).argmax(-1)]

    return guess


@contextlib.contextmanager
def _own_server(
    args: argparse.Namespace, out: Path, boundaries: tuple[int, ...] | None, say: plain.Teller
) -> Iterator[OwnServer]:
    """A capture server started by the profile. SIGTERM and a lost terminal end the command as Ctrl-C does: the server first."""
    from k2tui import config, doctor, engines, paths
    from k2tui.capture.server import capture_argv, own_server, sglang_version
    from k2tui.errors import UsageError
    from k2tui.jobs.report import report_progress
    from k2tui.orders import settle
    from k2tui.stages.extract import server_params
    from k2tui.stages.serve import resolve_profile
    from k2tui.verbs.up import check_port, parse_gpus

    check_port(args.port)
    report_progress(0, None, "samples", "checking what its server needs", force=True)
    given = {**vars(args), "gpus": parse_gpus(args.gpus) if args.gpus else None}
    params, loaded = server_params(given), config.load()
    profile = resolve_profile(loaded, params)
    if profile.engine not in ("sglang", "local"):
        raise UsageError(
            f"profile {profile.name!r} starts {profile.engine}, which does not capture",
            "give a profile of engine sglang or local",
        )
    if profile.nodes:
        raise UsageError(
            f"profile {profile.name!r}: `nodes` is set, and extract starts its own server on one machine only",
            "give a profile without `nodes`, or start a capture server yourself and give its --url",
        )
    profile, _ = settle(loaded, params)
    doctor.refuse_if_hopeless(profile)
    launch = engines.get(profile.engine).launch(profile)
    version = sglang_version(launch.argv[0]) if profile.engine == "sglang" else ""
    before = {s: signal.signal(s, _interrupt) for s in (signal.SIGTERM, signal.SIGHUP)}
    try:
        with own_server(
            capture_argv(launch.argv, version),
            launch.env,
            profile.url,
            profile.gpus,
            out.parent,
            out.parent / f"{out.name}.server.log",
            paths.ensure_dir(paths.state_dir()) / "sglang-plugin",
            ready_timeout_s=profile.ready_timeout_s,
            boundaries=() if args.draft else boundaries or (),
            say=say,
        ) as own:
            yield own
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
