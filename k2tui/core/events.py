"""What one line of a log can say, as values. The grammar that finds them lives with the engines; time is not known here.

Tuples, not dataclasses: one is made for every line that says something, and they are quick to make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from k2tui.core.load import DecodeBatch, Phase


class PhaseEdge(NamedTuple):
    """A phase begins, ends, or is seen to be going on. role: "draft" when the line says that it is about the draft."""

    phase: Phase
    edge: str  # begin | end | in
    elapsed_s: float | None = None
    role: str = ""
    model_type: str = ""  # Load weight end: the class of what was loaded
    opens_draft: bool = False  # from here on this rank loads the draft


class Bar(NamedTuple):
    """One refresh of a progress bar. kind: shards | capture | jit | train | extract | bench | work (not known yet)."""

    kind: str
    title: str
    done: int
    total: int
    elapsed_s: float | None = None
    rate_per_s: float | None = None


class EngineArgs(NamedTuple):
    """The line where a server prints its arguments: the beginning of a start."""

    engine: str
    model: str = ""
    draft: str = ""
    tp_size: int | None = None
    host: str = ""
    port: int | None = None
    version: str = ""
    nnodes: int | None = None
    is_start: bool = True  # False: it only tells facts (a version line, a model name)
    values: Mapping[str, Any] = MappingProxyType({})


class Listening(NamedTuple):
    """The HTTP server is up. Not the same as ready."""

    url: str = ""


class ReadyLine(NamedTuple):
    """The engine's own word that it is ready. is_proof: False while it only opens the door (vLLM before an answer)."""

    engine: str
    is_proof: bool = True


class BindFailed(NamedTuple):
    """The port was taken: whatever is said later about readiness is about another server."""

    port: int | None = None


class Decoded(NamedTuple):
    batch: DecodeBatch
    accept_rate: float | None = None
    drafted_to: int | None = None  # draft tokens a step, when the line tells


class Prefilled(NamedTuple):
    num_running_reqs: int | None = None
    num_queue_reqs: int | None = None


class Answered(NamedTuple):
    """A line of the HTTP server's access log."""

    path: str
    status: int


class Stopping(NamedTuple):
    """A wanted stop (SIGTERM, Ctrl-C, drained)."""

    how: str
    is_over: bool = False


class Dying(NamedTuple):
    """The engine says that it or a child of it is dying. The reason is another line's business."""

    what: str
    exit_code: int | None = None


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A line that only says "still waiting": no progress."""


Event = (
    PhaseEdge
    | Bar
    | EngineArgs
    | Listening
    | ReadyLine
    | BindFailed
    | Decoded
    | Prefilled
    | Answered
    | Stopping
    | Dying
    | Heartbeat
)
