"""The command line of the embedded engine: SGLang's own flag names. Knows no model and no server."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import NoReturn, TypeVar

VERSION = "0.5.23"  # the SGLang release whose log grammar and HTTP dialect are spoken


@dataclass(frozen=True, slots=True)
class ServerArgs:
    """What the server was asked for. 0 or "" = not given: the model or the machine decides."""

    model_path: str
    tokenizer_path: str = ""
    served_model_name: str = ""
    host: str = "127.0.0.1"
    port: int = 30000
    device: str = "auto"
    dtype: str = "auto"
    model_impl: str = "auto"
    context_length: int = 0
    max_running_requests: int = 16
    max_total_tokens: int = 0
    max_queued_requests: int = 0
    chunked_prefill_size: int = 2048
    decode_log_interval: int = 40
    random_seed: int = 0
    num_threads: int = 0
    load_delay_s: float = 0.0
    skip_server_warmup: bool = False
    tp_size: int = 1
    speculative_algorithm: str = ""
    speculative_draft_model_path: str = ""
    speculative_num_steps: int = 3
    speculative_eagle_topk: int = 1
    speculative_num_draft_tokens: int = 4

    @property
    def is_speculative(self) -> bool:
        return bool(self.speculative_algorithm)

    def shown(self) -> dict[str, object]:
        """As SGLang's `server_args={...}` line shows them: None for what was not given."""
        optional = {
            "context_length",
            "max_total_tokens",
            "max_queued_requests",
            "speculative_algorithm",
            "speculative_draft_model_path",
        }
        values = {k: (v or None) if k in optional else v for k, v in asdict(self).items()}
        if not self.is_speculative:
            for key in ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens"):
                values[key] = None
        return {**values, "embedded_engine": True}


# Flags of SGLang that change nothing here: accepted, so that one profile works for both, and named in the log.
_WITHOUT_EFFECT = {
    "--dp-size": True,
    "--pp-size": True,
    "--mem-fraction-static": True,
    "--attention-backend": True,
    "--sampling-backend": True,
    "--schedule-policy": True,
    "--max-prefill-tokens": True,
    "--cuda-graph-max-bs": True,
    "--log-level": True,
    "--kv-cache-dtype": True,
    "--quantization": True,
    "--watchdog-timeout": True,
    "--reasoning-parser": True,
    "--tool-call-parser": True,
    "--model-loader-extra-config": True,
    "--trust-remote-code": False,
    "--disable-cuda-graph": False,
    "--disable-overlap-schedule": False,
    "--disable-radix-cache": False,
    "--enable-metrics": False,
    "--enable-return-hidden-states": False,
}


_N = TypeVar("_N", int, float)


def _number(kind: Callable[[str], _N], text: str, what: str) -> _N:
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be {what}, got {text!r}") from None


def _positive(text: str) -> int:
    value = _number(int, text, "a whole number")
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _port(text: str) -> int:
    value = _number(int, text, "a port number")
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"must be 0 (any free port) to 65535, got {value}")
    return value


def _seconds(text: str) -> float:
    value = _number(float, text, "a number of seconds")
    if not 0 <= value < 3600:
        raise argparse.ArgumentTypeError(f"must be 0 to 3600 seconds, got {text}")
    return value


class Refusal(Exception):
    """The arguments are off, in the parser's own words."""


class _Judge(argparse.ArgumentParser):
    """The same parser for somebody who only asks: nothing is printed and nothing ends."""

    def error(self, message: str) -> NoReturn:
        raise Refusal(message)


def _parser(kind: type[argparse.ArgumentParser] = argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser = kind(
        add_help=kind is not _Judge,
        prog="python -m k2tui.local",
        description="k2tui's embedded engine: a small real model server that speaks SGLang's HTTP dialect and log "
        "grammar, for trying the pipeline and for tests. For real work use SGLang itself.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--model-path",
        "--model",
        required=True,
        help="folder of a Hugging Face Llama-type checkpoint (safetensors)",
    )
    add("--tokenizer-path", default="", help="folder of the tokenizer, when it is not the model's")
    add("--served-model-name", default="", help="name in /v1/models and in answers")
    add("--host", default="127.0.0.1")
    add("--port", type=_port, default=30000, help="0 = any free port (the log says which)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto = cuda when there is one")
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="auto = float32 on a CPU, the checkpoint's on a GPU",
    )
    add(
        "--model-impl",
        choices=("auto", "embedded", "transformers"),
        default="auto",
        help="auto = the quick Llama decoder where it fits, else transformers' model class",
    )
    add("--context-length", type=_positive, default=0)
    add("--max-running-requests", type=_positive, default=16)
    add("--max-total-tokens", type=_positive, default=0, help="tokens of KV cache shared by running requests")
    add(
        "--max-queued-requests",
        type=_positive,
        default=0,
        help="answer 503 beyond this many waiting requests",
    )
    add("--chunked-prefill-size", type=_positive, default=2048)
    add("--decode-log-interval", type=_positive, default=40)
    add("--random-seed", type=int, default=0)
    add(
        "--num-threads",
        type=_positive,
        default=0,
        help="CPU threads of torch; not given = 1 (small models are quickest so)",
    )
    add(
        "--load-delay-s",
        type=_seconds,
        default=0.0,
        metavar="S",
        help="sleep S seconds a shard, to see what a slow disk looks like",
    )
    add("--skip-server-warmup", action="store_true")
    add(
        "--tp-size",
        "--tp",
        type=_positive,
        default=1,
        help="accepted and ignored: the embedded engine runs on one device",
    )
    add("--speculative-algorithm", choices=("EAGLE3",), default="")
    add("--speculative-draft-model-path", default="")
    add("--speculative-num-steps", type=_positive, default=3)
    add("--speculative-eagle-topk", type=_positive, default=1)
    add("--speculative-num-draft-tokens", type=_positive, default=0)
    return parser


def split_ignored(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """(the arguments that do something here, the names of SGLang's flags that are accepted without effect)."""
    kept: list[str] = []
    ignored: list[str] = []
    items = iter(argv)
    for item in items:
        name, _, inline = item.partition("=")
        if name in _WITHOUT_EFFECT:
            ignored.append(name)
            if _WITHOUT_EFFECT[name] and not inline:
                next(items, None)
        else:
            kept.append(item)
    return kept, ignored


def parse(argv: Sequence[str]) -> tuple[ServerArgs, tuple[str, ...]]:
    """ServerArgs and the flags that were accepted without effect. Bad usage: message on stderr, SystemExit 2."""
    return _parse(argv, _parser())


def known_flags() -> frozenset[str]:
    """Every flag that is accepted, those without effect too."""
    return frozenset(_WITHOUT_EFFECT) | frozenset(_parser(_Judge)._option_string_actions)


def problem(argv: Sequence[str]) -> str:
    """Why the engine would not start with these arguments; "" when it would. Says what `parse` would say."""
    try:
        _parse(argv, _parser(_Judge))
    except Refusal as err:
        return str(err)
    return ""


def _parse(argv: Sequence[str], parser: argparse.ArgumentParser) -> tuple[ServerArgs, tuple[str, ...]]:
    kept, ignored = split_ignored(argv)
    known = vars(parser.parse_args(kept))
    if known["tp_size"] > 1:
        ignored.append(f"--tp-size {known['tp_size']}")
    if known["speculative_algorithm"] and not known["speculative_draft_model_path"]:
        parser.error("--speculative-algorithm EAGLE3 needs --speculative-draft-model-path")
    if known["speculative_draft_model_path"] and not known["speculative_algorithm"]:
        parser.error("--speculative-draft-model-path needs --speculative-algorithm EAGLE3")
    if known["speculative_eagle_topk"] != 1:
        parser.error("--speculative-eagle-topk must be 1: the embedded engine drafts a chain, not a tree")
    chain = known["speculative_num_steps"] + 1
    if known["speculative_num_draft_tokens"] not in (0, chain):
        parser.error(f"--speculative-num-draft-tokens must be num_steps + 1 = {chain} for a chain (topk 1)")
    known["speculative_num_draft_tokens"] = chain
    return ServerArgs(**known), tuple(ignored)


def launch_command() -> str:
    return " ".join(sys.argv[1:])
