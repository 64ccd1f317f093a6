"""`k2tui diagnose LOG`: what a server's log says: state, phase, cause, the proving line, what to do."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

from k2tui.errors import K2Error, UsageError
from k2tui.parsing import ParseError, parse_json
from k2tui.regular import read_regular

READS = ("",)  # goes on with a broken config
HELP = "find the cause in a log: state, phase, proving line, remedy"
DESCRIPTION = (
    "Reads the log of an SGLang or vLLM server, a trainer or a benchmark client and says what happened. LOG is a file or - for "
    "standard input. Exit code 0: healthy, 1: failed, 3: loading, stalled or degraded, 4: no such log."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", metavar="LOG", help="log file, or - for standard input")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument(
        "--context",
        metavar="FILE",
        help="JSON with what is known besides the log (silence_s, alive, exit_code, gpu_util, ...)",
    )
    parser.add_argument(
        "--all", action="store_true", help="also print every other proving line that was found"
    )


def read_context(path: str | None) -> dict[str, Any]:
    """The facts of --context. Raises UsageError naming the file and what is wrong with it."""
    if path is None:
        return {}
    try:
        value = parse_json(read_regular(path))
    except OSError as err:
        raise UsageError(f"{path}: {err.strerror or err}", "give the path of a JSON file") from None
    except ParseError as err:
        raise UsageError(
            err.at(path), 'expected an object such as {"silence_s": 600, "alive": true}'
        ) from None
    if not isinstance(value, dict):
        raise UsageError(
            f"{path}: expected a JSON object, not {type(value).__name__}", '{"silence_s": 600, "alive": true}'
        )
    return value


def run(args: argparse.Namespace) -> int:
    from k2tui.core.job_mask import mask_text, mask_value
    from k2tui.core.tracker import Evidence
    from k2tui.engines._reading import read_whole

    context = read_context(args.context)
    now = time.time()
    try:
        data, silence, first_line_no = _read_log(args.log, now)
    except K2Error as err:
        err.exit_code = 4  # there is no log: a script must not take that for a server that failed
        raise
    if args.context is None and silence is not None:
        context.setdefault("silence_s", silence)
    names = set(Evidence._fields) - {"extra", "is_complete"}
    known = {k: v for k, v in context.items() if k in names and _fits(k, v)}
    extra: Mapping[str, object] = {k: v for k, v in context.items() if k not in known}
    evidence = Evidence(**known, extra=extra, is_complete=True)
    reading = read_whole(data, now, evidence, first_line_no=first_line_no)
    answer: dict[str, Any] = mask_value(reading.answer())  # only what is shown: the log was read as it is
    if args.json:
        print(json.dumps({"schema": 1, **answer}, ensure_ascii=False))
    else:
        _print(answer, mask_text(reading.view.verdict))
        if args.all:
            for finding in reading.findings:
                print(f"  line {finding.line.no}: {finding.root_cause}: {mask_text(finding.line.raw)[:300]}")
    state = answer["state"]
    return {"failed": 1, "ready": 0, "stopped": 0, "unknown": 4}.get(state, 3)


def _fits(key: str, value: object) -> bool:
    if key in ("alive", "http_checked", "wanted_stop"):
        return isinstance(value, bool) or value is None
    if key in ("model_path", "served_model_name", "expected_model"):
        return isinstance(value, str) or value is None
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _read_log(name: str, now_s: float) -> tuple[Iterable[bytes], float | None, int]:
    """The bytes that decide, how long ago the file last changed (None for a stream), and the number of their first line."""
    from k2tui.sources.logindex import chunks, count_lines, newest_start_at
    from k2tui.sources.tail import Tail

    if name == "-":
        return iter(lambda: sys.stdin.buffer.read(1 << 20), b""), None, 1
    with Tail(name) as tail:
        if tail.is_missing:
            raise K2Error(f"no such file: {name}", "check the path")
        if tail.size() is None:
            raise K2Error(
                f"{name} is not a regular file", f"read it through standard input: k2tui diagnose - < {name}"
            )
        modified = tail.modified_s()
    begin = newest_start_at(name)
    silence = None if modified is None else max(0.0, now_s - modified)
    return chunks(name, begin), silence, 1 + count_lines(name, 0, begin)


def _print(answer: dict[str, Any], sentence: str) -> None:
    software = " ".join(str(answer[k]) for k in ("software", "version") if answer[k])
    state, words = str(answer["state"]), sentence or str(answer["root_cause"])
    print(words if words.startswith(state) else f"{state}: {words}")
    if answer["state"] == "unknown":
        return
    print(f"  phase       {answer['phase']}" + (f"   ({software})" if software else ""))
    shards = answer["shards"]
    if shards and shards.get("total"):
        draft = f", draft {shards['draft_done']}/{shards['draft_total']}" if shards.get("draft_total") else ""
        print(f"  shards      {shards['done']}/{shards['total']}{draft}")
    is_stopped = (
        state == "stopped" and answer["root_cause"] == "healthy"
    )  # nothing is wrong, and nothing is running
    if not is_stopped:
        cause = f"{answer['root_cause']} ({answer['root_cause_group']})"
        print(f"  cause       {cause}, confidence {answer['confidence']:.0%}")
    if answer["proof_line"]:
        print(f"  line {answer['proof_line_no']:<6} {answer['proof_line'][:500]}")
    if answer["remedy"] and not is_stopped:
        print(f"  what to do  {answer['remedy']}")
