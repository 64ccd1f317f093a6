"""Puts the parsers of every engine and the tracker together. The one place that names them all."""

from __future__ import annotations

import re

from k2tui.core.eta import EtaModel
from k2tui.core.loadlines import Line
from k2tui.core.tracker import LoadTracker
from k2tui.engines import _clients, sglang, vllm

_VLLM = re.compile(
    r"^\s*(?:\((?:APIServer|EngineCore|Worker|VllmWorker|StageEngine)\w*[ :-]?.{0,20}pid=\d+\)|(?:INFO|WARNING|ERROR|DEBUG) \d\d-\d\d \d\d:\d\d:\d\d (?!__init__)\[?[\w/.]+:\d+\])|/vllm/|\bvllm\.|VLLM::|vLLM"
)
_SGLANG = re.compile(
    r"/sglang/|\bsglang\b|sgl[-_]kernel|SGLang|server_args=|^\s*\[(?:\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d(?:\.\d+)?(?: (?:DP|PP|TP|EP)\d+)+\]|Load weight begin|#running-req|Init (?:torch distributed|parallel) begin"
)


def detect(line: Line) -> str:
    """Which engine writes like this? "" = this line does not tell."""
    text = line.text[:2000]
    if text.startswith(sglang.BANNER):
        return "local"
    if _VLLM.search(text):
        return "vllm"
    if _SGLANG.search(text):
        return "sglang"
    return ""


def load_tracker(*, eta: EtaModel | None = None, stall_s: float = 0.0) -> LoadTracker:
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
    )
