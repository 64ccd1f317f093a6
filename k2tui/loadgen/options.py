"""The load generator's command line, shared by `python -m k2tui.loadgen` and `k2tui bench run`. Parses, does nothing."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

from k2tui.errors import UsageError
from k2tui.parsing import ParseError, parse_json


class OptionParser(argparse.ArgumentParser):
    """One that says what is wrong in one line: `error` raises UsageError."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message.removeprefix("argument "), f"{self.prog} --help lists the options")


def parse(argv: Sequence[str], prog: str) -> argparse.Namespace:
    """The options of one benchmark, checked as far as that is possible before it runs. Raises UsageError."""
    parser = OptionParser(prog=prog, description="Benchmark a running server.")
    add_arguments(parser)
    return parser.parse_args(argv)


def numbers(text: str) -> tuple[int, ...]:
    """ "1,4,8" -> (1, 4, 8). Raises argparse.ArgumentTypeError."""
    try:
        found = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers (example: 1,4,8)") from None
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: every number must be at least 1")
    return found


def rates(text: str) -> tuple[float, ...]:
    """ "2,4.5" -> requests per second. Raises argparse.ArgumentTypeError, UsageError."""
    try:
        found = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of rates (example: 2,4,8)") from None
    if not found or not all(math.isfinite(r) and r > 0 for r in found):
        raise UsageError(
            f"--request-rate {text}: every rate must be a number above 0",
            "to send everything at once: --concurrency N with N = --num-prompts",
        )
    return found


def number(option: str, *, least: float = 0.0, above: bool = False) -> Callable[[str], float]:
    """A parser of one finite number for `option`, at least `least`, or above it. It raises UsageError (one line)."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise UsageError(f"{option} {text}: not a number") from None
        if not math.isfinite(value) or value < least or (above and value == least):
            raise UsageError(
                f"{option} {text}: must be a number {'above' if above else 'of at least'} {least:g}"
            )
        return value

    return parse


def whole(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be at least 1")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Every option of one benchmark."""
    where = parser.add_argument_group("server")
    where.add_argument("--url", default="http://127.0.0.1:30000", help="server (default %(default)s)")
    where.add_argument(
        "--api",
        choices=("generate", "completions", "chat"),
        default="generate",
        help="route (default: SGLang's /generate)",
    )
    where.add_argument(
        "--model", default="", help="model name of the request (default: what /v1/models says)"
    )
    load = parser.add_argument_group("load")
    load.add_argument(
        "--concurrency",
        type=numbers,
        default=(1, 4, 8),
        metavar="N,N",
        help="closed loop: requests in flight, one run each (default 1,4,8)",
    )
    load.add_argument(
        "--request-rate",
        type=rates,
        default=None,
        metavar="R,R",
        help="open loop: requests per second, one run each",
    )
    load.add_argument(
        "--arrival",
        choices=("poisson", "constant", "gamma"),
        default="poisson",
        help="open loop: how requests arrive (default %(default)s)",
    )
    load.add_argument(
        "--burstiness",
        type=number("--burstiness", above=True),
        default=1.0,
        help="gamma shape: below 1 is burstier than Poisson",
    )
    load.add_argument(
        "--max-concurrency",
        type=whole,
        default=None,
        help="open loop: most requests in flight; the wait shows in ttft_sched",
    )
    load.add_argument(
        "--num-prompts",
        type=whole,
        default=32,
        help="requests of each run (default %(default)s; at least twice the concurrency is wise)",
    )
    load.add_argument(
        "--max-seconds",
        type=number("--max-seconds", above=True),
        default=None,
        help="send no new request after so long",
    )
    load.add_argument(
        "--warmup",
        type=int,
        default=None,
        metavar="N",
        help="requests before the clock (default: min(concurrency, 4))",
    )
    load.add_argument(
        "--flush-cache", action="store_true", help="empty the server's prefix cache before each run (SGLang)"
    )
    load.add_argument("--repeats", type=whole, default=1, help="runs of each point, each with new prompts")
    load.add_argument(
        "--stop-ci",
        type=number("--stop-ci", above=True),
        default=None,
        metavar="FRACTION",
        help="stop repeating a point when the 95 %% interval of output throughput is this tight (0.01)",
    )
    load.add_argument(
        "--sweep",
        type=whole,
        default=None,
        metavar="MAX",
        help="closed loop: 1, 2, 4, ... up to MAX, ends early when throughput stops growing, then looks around the knee",
    )
    load.add_argument(
        "--sweep-rate",
        type=number("--sweep-rate", above=True),
        default=None,
        metavar="MAX",
        help="open loop: 1, 2, 4, ... requests per second up to MAX, ten seconds each or longer, with the same ends",
    )
    load.add_argument(
        "--against",
        default="",
        metavar="URL",
        help="a second server, measured in turn with the first (A B A B ...)",
    )
    load.add_argument("--against-label", default="", help="label of the second server's rows")
    load.add_argument(
        "--aa",
        action="store_true",
        help="measure the server against itself and store this host's noise floor",
    )
    what = parser.add_argument_group("workload")
    what.add_argument(
        "--dataset",
        default="random",
        help="random | shared-prefix | multi-turn | mooncake:FILE | sharegpt:FILE | tokenized:FILE | jsonl:FILE (default %(default)s)",
    )
    what.add_argument("--random-input-len", type=whole, default=64, metavar="TOKENS")
    what.add_argument("--random-output-len", type=whole, default=32, metavar="TOKENS")
    what.add_argument(
        "--random-range-ratio",
        type=number("--random-range-ratio", above=True),
        default=1.0,
        help="lengths between ratio*len and len (default 1: all equal)",
    )
    what.add_argument(
        "--output-len", type=whole, default=None, help="tokens asked for with files (default: the file's own)"
    )
    what.add_argument("--prefix-len", type=whole, default=256, help="shared-prefix: tokens of each prefix")
    what.add_argument("--prefix-groups", type=whole, default=4, help="shared-prefix: how many prefixes")
    what.add_argument(
        "--zipf",
        type=number("--zipf"),
        default=0.0,
        help="shared-prefix: popularity exponent of the prefixes (0 = even)",
    )
    what.add_argument("--turns", type=whole, default=3, help="multi-turn: user turns of each session")
    what.add_argument(
        "--think-s", type=number("--think-s"), default=0.0, help="multi-turn: pause before the next turn"
    )
    what.add_argument(
        "--trace-speed",
        type=number("--trace-speed", above=True),
        default=1.0,
        help="mooncake: 2 = twice as fast as recorded",
    )
    what.add_argument(
        "--vocab-size",
        type=whole,
        default=None,
        help="random ids stay below 90 %% of it (default: the model's config, else 1000)",
    )
    what.add_argument("--seed", type=int, default=1)
    what.add_argument("--temperature", type=number("--temperature"), default=0.0)
    what.add_argument("--extra-body", default="", metavar="JSON", help="merged into every request's body")
    what.add_argument("--no-ignore-eos", action="store_true", help="let the model stop by itself")
    what.add_argument(
        "--goodput",
        default="",
        metavar="SLO",
        help="a preset (deepseek-r1, llama3.1-8b-interactive, ...) or ttft:2000,tpot:80,e2e:10000 in ms",
    )
    out = parser.add_argument_group("result")
    out.add_argument("--label", default="", help="name of the setting, shown in tables")
    out.add_argument("--tag", default="")
    out.add_argument(
        "--db", default="", metavar="PATH", help="store (default: runs.db in k2tui's state folder)"
    )
    out.add_argument(
        "--anyway",
        action="store_true",
        help="measure although another k2tui load runs on this host; the rows say so and are not valid",
    )
    out.add_argument("--no-store", action="store_true", help="print only")
    out.add_argument("--json", action="store_true", help="rows as JSON on stdout")
    client = parser.add_argument_group("client")
    client.add_argument(
        "--engine",
        choices=("auto", "epoll", "asyncio"),
        default="auto",
        help="auto: epoll with kernel stamps on Linux over http, else asyncio",
    )
    client.add_argument(
        "--idle-timeout",
        type=number("--idle-timeout", above=True),
        default=120.0,
        metavar="S",
        help="a stream silent for so long is an error",
    )
    client.add_argument(
        "--usage-each",
        choices=("auto", "on", "off"),
        default="auto",
        help="running token count with every chunk on OpenAI routes (auto: up to 32 in flight)",
    )
    client.add_argument("--proxy", default="", metavar="URL", help="http:// proxy (uses the asyncio engine)")
    client.add_argument("--insecure", action="store_true", help="do not check the TLS certificate")
    client.add_argument("--ca-file", default="", help="TLS certificates to trust")


MOST_INPUT = 10_000_000  # tokens of one prompt: above every model's context
MOST_TOKENS = (
    50_000_000  # of all prompts of one run together: they are made before the clock starts (about 2 GB)
)
MOST_PER_SECOND = 2000  # requests that a closed loop can finish a second; bounds what --max-seconds can use


def prompt_len(args: argparse.Namespace) -> int:
    """Most tokens of one made prompt's input."""
    extra = args.prefix_len if args.dataset.startswith("shared-prefix") else 0
    return int(args.random_input_len + extra)


def bounded_prompts(args: argparse.Namespace) -> int:
    """--num-prompts, but never more than --max-seconds could send. Raises UsageError when that is still too many."""
    n = int(args.num_prompts)
    each = prompt_len(args) * (args.turns if args.dataset.startswith("multi-turn") else 1)
    room = max(MOST_TOKENS // each, 1)
    if args.max_seconds is not None:
        if args.request_rate:
            n = min(n, math.ceil(max(args.request_rate) * args.max_seconds) + 1)
        else:
            n = min(n, max(math.ceil(MOST_PER_SECOND * args.max_seconds), 2 * max(args.concurrency)), room)
    if n > room and ":" not in args.dataset:
        raise UsageError(
            f"--num-prompts {n} of {each} tokens are more than fit in memory (at most {room})",
            "fewer or shorter prompts, or --max-seconds with a lower --request-rate",
        )
    return n


def extra_body(args: argparse.Namespace) -> dict[str, Any]:
    """The object of --extra-body; {} without one. Raises UsageError, also for what JSON itself has no word for (NaN)."""
    if not args.extra_body:
        return {}
    try:
        found: Any = parse_json(args.extra_body)
        json.dumps(found, allow_nan=False)
    except ParseError as err:
        raise UsageError(f"--extra-body: {err.message}") from None
    except ValueError:
        raise UsageError("--extra-body: NaN and Infinity are no JSON") from None
    if not isinstance(found, dict):
        raise UsageError("--extra-body must be a JSON object")
    return cast("dict[str, Any]", found)


def check(args: argparse.Namespace) -> None:
    """Combinations that argparse cannot see. Raises UsageError."""
    extra_body(args)
    if prompt_len(args) > MOST_INPUT:
        raise UsageError(
            f"--random-input-len {prompt_len(args)}: more than any model's context (at most {MOST_INPUT} tokens)"
        )
    bounded_prompts(args)
    if args.warmup is not None and args.warmup < 0:
        raise UsageError("--warmup must not be negative")
    if args.max_seconds is not None and args.max_seconds <= 0:
        raise UsageError("--max-seconds must be above 0")
    if args.idle_timeout <= 0:
        raise UsageError("--idle-timeout must be above 0")
    if args.aa and (args.against or args.sweep or args.sweep_rate):
        raise UsageError("--aa measures one server against itself: leave --against and --sweep out")
    if args.sweep and args.sweep_rate:
        raise UsageError("--sweep goes over concurrency and --sweep-rate over arrivals: give one of them")
    if args.sweep and args.request_rate:
        raise UsageError(
            "--sweep is a closed-loop search: leave --request-rate out", "--sweep-rate MAX sweeps arrivals"
        )
    if args.sweep_rate and (args.request_rate or args.sweep_rate < 1):
        raise UsageError("--sweep-rate MAX starts at 1 request per second and takes no --request-rate")
    if args.sweep_rate and args.dataset.startswith("mooncake:"):
        raise UsageError("a trace has its own arrivals: --trace-speed makes it faster")
    if args.burstiness <= 0:
        raise UsageError("--burstiness must be above 0")
    if not 0 < args.random_range_ratio <= 1:
        raise UsageError("--random-range-ratio must be above 0 and at most 1")
