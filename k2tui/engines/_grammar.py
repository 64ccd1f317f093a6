"""Grammar that every engine shares: tqdm bars, access-log lines, ranks. Knows no engine's own words."""

from __future__ import annotations

import re
from functools import lru_cache

from k2tui.core.events import Answered, Bar, Event, Heartbeat
from k2tui.core.patterns import Pattern, whole

_BAR = Pattern(
    r"(?:(?P<title>[^%|\r]{0,400}?)[: ]\s*|^|(?<=\]))(?P<pct>\d{1,3}(?:\.\d+)?)%(?P<completed> ?Completed)? ?\|(?:[^|]{0,300}\|)? ?"
    r"(?P<done>[\d.,]+)(?P<dunit>[kMGT]?)/(?P<total>[\d.,]+)(?P<tunit>[kMGT]?)"
    r"(?: \[(?P<elapsed>[\d:.]+)<(?P<left>[\d:.?]+|[\d]+ days?, [\d:]+)(?:,\s*(?P<rate>[\d.?]+)\s?(?P<unit>[^\],/]*/[^\],]*|it/s|s/it)?)?)?"
)
_BAR_HINT = Pattern(r"\d%(?: Completed)? ?\|")
_SHARDS = Pattern(
    r"checkpoint shards|loading shards|Runai Model Streamer|Fastsafetensor|InstantTensor|Loading (?:safetensors|pt|np_cache)|loading pt checkpoint"
)
_CAPTURE = Pattern(r"Captur(?:ing|e)\b|cuda ?graph|CUDA graph|Compiling num tokens")
_JIT = Pattern(r"DeepGEMM|[Cc]ompil|autotun|Inductor|[Ww]arming up|[Ww]armup|JIT", re.ASCII)
_EXTRACT = Pattern(
    r"^\s*(?:Map|Filter|Tokeniz|Generating|Extract|Preparing|Processing|Building|Saving the dataset|Creating)|hidden.?states|num_proc",
    re.I,
)
_TRAIN = Pattern(r"\b(?:epoch|train(?:ing)?|loss|global step|steps?|lr|acc(?:uracy)?)\b", re.I)
_BENCH = Pattern(r"\b(?:bench\w*|requests?|prompts?|completed|evaluating|questions?|samples)\b", re.I)
_UNIT = {"": 1, "k": 1_000, "M": 1_000_000, "G": 1_000_000_000, "T": 1_000_000_000_000}

ACCESS = Pattern(
    r"\"(?:GET|POST|PUT|DELETE|HEAD|OPTIONS) (?P<path>/[^\s?\"]{0,200})\S{0,2000} HTTP/[\d.]+\" (?P<status>\d{3})\b"
)


def seconds(text: str) -> float | None:
    """ "01:02:03", "2:03", "05" -> seconds; None for "?" and anything else."""
    total = 0.0
    try:
        for part in text.split(":"):
            total = total * 60 + float(part)
    except ValueError:
        return None
    return total


def _number(text: str, unit: str) -> int | None:
    try:
        return round(float(text.replace(",", "")) * _UNIT[unit])
    except (ValueError, OverflowError):
        return None


@lru_cache(maxsize=512)
def bar_kind(title: str) -> str:
    """What a bar with that title counts; "work" = its place in the log must tell."""
    if _SHARDS.search(title):
        return "shards"
    if _CAPTURE.search(title):
        return "capture"
    if _JIT.search(title):
        return "jit"
    if _EXTRACT.search(title):
        return "extract"
    if _TRAIN.search(title):
        return "train"
    if _BENCH.search(title):
        return "bench"
    return "work"


def parse_bar(text: str) -> Bar | None:
    """The last bar refresh in the text (several may share it), None if there is none."""
    if "%" not in text or "|" not in text:
        return None
    if len(text) > 6000:
        text = text[-6000:]
    if not _BAR_HINT.search(text):
        return None  # the pattern below looks 400 characters back from every place
    found: re.Match[str] | None = None
    title = ""
    at = 0
    while text.find("%", at) >= 0 and (match := _BAR.search(text, at)):
        found, at = match, match.end()
        title = match["title"] or title
    if found is None:
        return None
    done, total = _number(found["done"], found["dunit"]), _number(found["total"], found["tunit"])
    if done is None or total is None or total <= 0 or done > total * 1.5 or total > 10**13:
        return None
    rate: float | None = None
    if found["rate"] and found["rate"] != "?" and found["unit"]:
        try:
            value = float(found["rate"])
        except ValueError:
            value = 0.0
        if value > 0:
            rate = 1 / value if found["unit"].startswith("s/") else value
    if found["completed"] is None and found["elapsed"] is None and "Loading" not in title:
        return None  # "| 12/24 |" of some table
    return Bar(bar_kind(title), title.strip(), min(done, total), total, seconds(found["elapsed"] or ""), rate)


def parse_access(text: str) -> Answered | None:
    if "HTTP/" not in text:
        return None
    match = ACCESS.search(text)
    return Answered(match["path"], whole(match["status"])) if match else None


def parse_shared(line: str) -> Event | None:
    """What every engine writes alike: bars, access-log lines, heartbeats. Asked last, after the engine's own words."""
    if "%" in line:
        bar = parse_bar(line)
        if bar:
            return bar
    if "HTTP/" in line:
        return parse_access(line)
    if "Waiting for " in line and " local" in line:
        return Heartbeat()
    return None
