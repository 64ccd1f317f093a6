"""What trainers, data preparation, benchmark clients and NVML tools print. Returns values; knows no server."""

from __future__ import annotations

from k2tui.core.events import Event, PhaseEdge
from k2tui.core.load import Phase
from k2tui.core.patterns import Pattern
from k2tui.engines._grammar import parse_bar

_BENCH = Pattern(
    r"^\s*(?:Namespace\(backend=|#Input tokens:|Starting (?:initial single prompt|main benchmark|request \d+|benchmark)|=+ ?(?:Serving|Offline)?.{0,20}Benchmark Result|Benchmarking|Warming up with)"
    r"|['\"]?total_requests['\"]?:|HTTP Request: (?:POST|GET) http|benchmark_args=|Successful requests:|Total generated tokens:|bench_serving"
)
_TRAIN = Pattern(
    r"\b(?:[Gg]lobal [Ss]tep|[Ee]poch[ :=\[]+\d+|train_loss|training step|Training|torch/distributed/elastic|torch\.distributed\.elastic|torch\.distributed\.run)\b|'loss': |\bloss[=:] ?\d"
)
_METRICS = Pattern(r"\bstep[=: ]+\d+\b.*\b(?:train_)?loss[=: ]+[\d.]+")
_EXTRACT = Pattern(
    r"\b(?:dataset cache|Extracting|extract(?:ing)? hidden|hidden states? (?:generation|extraction)|prepare_hidden_states|prepare_data)\b"
)
_LINES = (
    (("bench", "namespace(", "#input tokens:", "starting ", "warming up", "requests", "http request", "total gen"), _BENCH, Phase.BENCH),
    (("cache", "extract", "hidden", "prepare"), _EXTRACT, Phase.EXTRACT),
    (("step", "epoch", "train", "torch", "loss"), _TRAIN, Phase.TRAIN),
)  # fmt: skip


def parse_line(line: str) -> Event | None:
    """One clean line -> what it says of a client, None for a line that is not known."""
    if "loss" in line and _METRICS.search(line):
        return PhaseEdge(Phase.TRAIN, "metrics")
    if "%" in line and "|" in line:
        bar = parse_bar(line)
        if bar is not None:
            return bar
    low = line.lower()
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
