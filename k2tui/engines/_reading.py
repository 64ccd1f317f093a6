"""Puts the parsers of every engine and the tracker together. The one place that names them all."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from k2tui.core.diagnosis import Finding, Verdict
from k2tui.core.eta import EtaModel
from k2tui.core.load import LoadView, Phase, State
from k2tui.core.loadlines import Line, is_newest_first, read_lines, turn
from k2tui.core.patterns import Pattern
from k2tui.core.tracker import Evidence, LoadTracker
from k2tui.engines import _clients, sglang, vllm

_VLLM_HEAD = Pattern(
    r"\s*(?:\((?:APIServer|EngineCore|Worker|VllmWorker|StageEngine)\w*[ :-]?.{0,20}pid=\d+\)|(?:INFO|WARNING|ERROR|DEBUG) \d\d-\d\d \d\d:\d\d:\d\d (?!__init__)\[?[\w/.]+:\d+\])"
)
_VLLM_MODULE = Pattern(r"\bvllm\.")
_SGLANG_HEAD = Pattern(r"\s*\[(?:\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d(?:\.\d+)?(?: (?:DP|PP|TP|EP)\d+)+\]")
_SGLANG_WORD = Pattern(r"/sglang/|\bsglang\b|sgl[-_]kernel|SGLang")
_SGLANG_SAYS = (
    "server_args=",
    "Load weight begin",
    "#running-req",
    "Init torch distributed begin",
    "Init parallel begin",
)


def detect(line: Line) -> str:
    """Which engine writes like this? "" = this line does not tell."""
    text = line.text[:2000]
    if text.startswith(sglang.BANNER):
        return "local"
    low = text.lower()
    if _VLLM_HEAD.match(text):
        return "vllm"
    if "vllm" in low and (
        "/vllm/" in text or "VLLM::" in text or "vLLM" in text or _VLLM_MODULE.search(text)
    ):
        return "vllm"
    if _SGLANG_HEAD.match(text) or ("sgl" in low and _SGLANG_WORD.search(text)):
        return "sglang"
    return "sglang" if any(words in text for words in _SGLANG_SAYS) else ""


def load_tracker(*, eta: EtaModel | None = None, stall_s: float = 0.0, first_line_no: int = 1) -> LoadTracker:
    """A LoadTracker that understands SGLang, vLLM, the embedded engine, trainers and benchmark clients.

    eta: `core.eta` model learned from earlier starts (`sources.loadhistory`); None = linear. stall_s: a fixed limit of
    silence instead of the learned one (a profile's stall_s).
    """
    return LoadTracker(
        {"sglang": sglang.parse_line, "vllm": vllm.parse_line},
        detect,
        clients=_clients.parse_line,
        eta=eta,
        stall_s=stall_s,
        first_line_no=first_line_no,
    )


@dataclass(frozen=True, slots=True)
class Reading:
    """A whole log, read: the view, the verdict behind it and every proving line."""

    view: LoadView
    verdict: Verdict
    findings: tuple[Finding, ...]

    def answer(self) -> dict[str, Any]:
        """The keys that `k2tui diagnose --json` prints."""
        view, verdict = self.view, self.verdict
        shards = None
        if view.target is not None or view.draft is not None or view.phase is Phase.WEIGHT_LOAD:
            shards = {
                "done": view.target.done if view.target else 0,
                "total": view.target.total if view.target else None,
                "draft_done": view.draft.done if view.draft else None,
                "draft_total": view.draft.total if view.draft else None,
            }
        return {
            "state": str(view.state),
            "phase": str(view.phase),
            "shards": shards,
            "root_cause": verdict.root_cause or ("unknown" if view.state is State.UNKNOWN else "healthy"),
            "root_cause_group": verdict.group,
            "proof_line": view.proof_line,
            "proof_line_no": view.proof_line_no,
            "remedy": verdict.remedy or ("" if view.state is State.UNKNOWN else "None needed."),
            "confidence": round(verdict.confidence, 2),
            "software": view.engine,
            "version": view.version,
            "ranks": [load.as_json() for load in view.rank_loads],
        }


_TURNED_PIECES = 64  # an export is turned round in memory: at most this many pieces of it


def read_whole(
    data: bytes | Iterable[bytes], now_s: float, evidence: Evidence, *, first_line_no: int = 1
) -> Reading:
    """Read a log that is not followed, in any number of pieces. A newest-first export is turned round; line numbers stay
    those of the file. first_line_no: when the data is not the file's beginning."""
    tracker = load_tracker(first_line_no=first_line_no)
    year = time.localtime(now_s).tm_year
    pieces = iter([data] if isinstance(data, bytes) else data)
    first = next(pieces, b"")
    if is_newest_first(read_lines(first[: 256 << 10], year)):
        tracker.feed_lines(turn(read_lines(first + b"".join(islice(pieces, _TURNED_PIECES)), year)), now_s)
    else:
        tracker.feed(first, now_s)
        for piece in pieces:
            tracker.feed(piece, now_s)
        tracker.finish(now_s)
    tracker.evidence(evidence)
    return Reading(tracker.view(now_s), tracker.verdict(now_s), tracker.findings())
