"""What trainers, data preparation, benchmark clients and NVML tools print. Returns values; knows no server."""

from __future__ import annotations

import re

from k2tui.core.events import Bar, Event, PhaseEdge
from k2tui.core.load import Phase
from k2tui.core.patterns import Pattern, whole
from k2tui.engines._grammar import parse_bar

# what a client prints at a line's beginning and nobody else does
_BENCH_HEAD = Pattern(
    r"\s*(?:benchmark_args=)?Namespace\(|\s*(?:#Input tokens:|Starting (?:initial single prompt|main benchmark|warmup with \d+ seq|request \d+|benchmark)|Initial test run completed"
    r"|Warmup completed with|Traffic request rate|Burstiness factor|=+ ?(?:Serving|Offline)?.{0,20}Benchmark Result|Benchmarking|Warming up with)"
)
_TRAIN_HEAD = Pattern(
    r"\s*(?:\*+ Running (?:training|Evaluation|Prediction)|Total optimization steps = \d|Train Epoch \[\d+/\d+\])"
)
_TRAIN_END = Pattern(r"\s*(?:\{'train_runtime': |Training completed\b|draft: \S+  expected accept length )")
_STEP = Pattern(r"\s*(?:\[[^\]]{1,60}\]:? *)*(?:train(?:ing)? )?step[ :=]+(\d+) ?/ ?(\d+)\b.*\bloss\b", re.I)
_POINT = Pattern(r"(?:C=\d+|rate=[\d.]+) repeat=\d+ completed=(\d+)/(\d+) ")
# what may also stand in the middle of a sentence
_BENCH = Pattern(
    r"['\"]?total_requests['\"]?:|HTTP Request: (?:POST|GET) http|benchmark_args=|Successful requests:|Total generated tokens:|bench_serving"
)
_TRAIN = Pattern(
    r"\b(?:[Gg]lobal [Ss]tep|[Ee]poch[ :=\[]+\d+|train_loss|training step|Training|torch/distributed/elastic|torch\.distributed\.elastic|torch\.distributed\.run)\b|'loss': |\bloss[=:] ?\d"
)
_METRICS = Pattern(r"\bstep[=: ]+\d+\b.*\b(?:train_)?loss[=: ]+[\d.]+|\{'loss': [\d.]+")
_EXTRACT = Pattern(
    r"\b(?:dataset cache|Extracting|extract(?:ing)? hidden|hidden states? (?:generation|extraction)|prepare_hidden_states|prepare_data)\b"
)
_LINES = (
    (("bench", "requests", "http request", "total gen"), _BENCH, Phase.BENCH),
    (("cache", "extract", "hidden", "prepare"), _EXTRACT, Phase.EXTRACT),
    (("step", "epoch", "train", "torch", "loss"), _TRAIN, Phase.TRAIN),
)


def parse_line(line: str) -> Event | None:
    """One clean line -> what it says of a client, None for a line that is not known. Edges: begin (only such a client writes
    so), in (it may be about one), metrics (a logged loss), end."""
    low = line.lower()
    if "loss" in low:
        found = _STEP.match(line)
        if found and 0 < whole(found[2]) < 10**12:
            return Bar("train", "step", min(whole(found[1]), whole(found[2])), whole(found[2]))
        if ("step" in low or "{'loss" in low) and "%|" not in line and _METRICS.search(line):
            return PhaseEdge(Phase.TRAIN, "metrics")
    if "%" in line and "|" in line:
        bar = parse_bar(line)
        if bar is not None:
            return bar._replace(kind="train") if bar.kind == "work" and "{'loss': " in line else bar
    if "train" in low or "step" in low:
        if _TRAIN_END.match(line):
            return PhaseEdge(Phase.TRAIN, "end")
        if _TRAIN_HEAD.match(line):
            return PhaseEdge(Phase.TRAIN, "begin")
    elif "draft: " in low and _TRAIN_END.match(line):
        return PhaseEdge(Phase.TRAIN, "end")
    if "repeat=" in line and (found := _POINT.match(line)) and whole(found[2]):
        return Bar("bench", "requests", min(whole(found[1]), whole(found[2])), whole(found[2]))
    if _BENCH_HEAD.match(line):
        return PhaseEdge(Phase.BENCH, "begin")
    for (
        words,
        pattern,
        phase,
    ) in _LINES:  # the words are a cheap gate: every match of the pattern holds one of them
        for word in words:
            if word in low:
                if pattern.search(line):
                    return PhaseEdge(phase, "in")
                break
    return None
