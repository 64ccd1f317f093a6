"""How a request says that it wants its states captured: the grammar of its `rid`. Pure values.

    k2c:RUN:INDEX:TOKENS:SPANS:NONCE        k2c:kimi-15k:17:2048:812-2048:5f3a

RUN is a folder below the server's capture root, INDEX the line of the data file, TOKENS the number of input ids, SPANS the
loss mask (start-end, comma-separated, "-" when empty), NONCE keeps two tries apart. `rid` is used because every SGLang since
0.4 hands it unchanged to the scheduler.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

PREFIX = "k2c:"
RUN_RE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")
_SPAN_RE = re.compile(r"(\d+)-(\d+)\Z")


@dataclass(frozen=True, slots=True)
class CaptureRequest:
    run: str
    index: int
    length: int
    spans: tuple[tuple[int, int], ...]
    nonce: str = ""

    def to_rid(self) -> str:
        spans = ",".join(f"{a}-{b}" for a, b in self.spans) or "-"
        return f"{PREFIX}{self.run}:{self.index}:{self.length}:{spans}:{self.nonce}"


def is_capture(rid: object) -> bool:
    return isinstance(rid, str) and rid.startswith(PREFIX)


def parse_rid(rid: str) -> CaptureRequest | None:
    """None when it is not a well-formed capture request."""
    parts = rid.split(":")
    if len(parts) != 6 or parts[0] + ":" != PREFIX or not RUN_RE.match(parts[1]):
        return None
    if not (parts[2].isdigit() and parts[3].isdigit()) or int(parts[3]) == 0:
        return None
    length = int(parts[3])
    spans: list[tuple[int, int]] = []
    if parts[4] != "-":
        for item in parts[4].split(","):
            found = _SPAN_RE.match(item)
            if not found or not int(found[1]) < int(found[2]) <= length:
                return None
            spans.append((int(found[1]), int(found[2])))
    return CaptureRequest(parts[1], int(parts[2]), length, tuple(spans), parts[5])


def is_run_name(name: str) -> bool:
    return bool(RUN_RE.match(name))


def spans_of(mask: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """0/1 mask -> spans, without numpy (used where it may be missing)."""
    spans: list[tuple[int, int]] = []
    start = -1
    for position, value in enumerate(mask):
        if value and start < 0:
            start = position
        elif not value and start >= 0:
            spans.append((start, position))
            start = -1
    if start >= 0:
        spans.append((start, len(mask)))
    return tuple(spans)
