"""What one line of a log can say, as values. The grammar that finds them lives with the engines; time is not known here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from k2tui.core.load import DecodeBatch, Phase


@dataclass(frozen=True, slots=True)
class PhaseEdge:
    """A phase begins, ends, or is seen to be going on. role: "draft" when the line says that it is about the draft."""

    phase: Phase
    edge: str  # begin | end | in
    elapsed_s: float | None = None
    role: str = ""
    model_type: str = ""  # Load weight end: the class of what was loaded
    opens_draft: bool = False  # from here on this rank loads the draft


@dataclass(frozen=True, slots=True)
class Bar:
    """One refresh of a progress bar. kind: shards | capture | jit | train | extract | bench | work (not known yet)."""

    kind: str
    title: str
    done: int
    total: int
    elapsed_s: float | None = None
    rate_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class EngineArgs:
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
    values: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Listening:
    """The HTTP server is up. Not the same as ready."""

    url: str = ""


@dataclass(frozen=True, slots=True)
class ReadyLine:
    """The engine's own word that it is ready. is_proof: False while it only opens the door (vLLM before an answer)."""

    engine: str
    is_proof: bool = True


@dataclass(frozen=True, slots=True)
class BindFailed:
    """The port was taken: whatever is said later about readiness is about another server."""

    port: int | None = None


@dataclass(frozen=True, slots=True)
class Decoded:
    batch: DecodeBatch
    accept_rate: float | None = None
    drafted_to: int | None = None  # draft tokens a step, when the line tells


@dataclass(frozen=True, slots=True)
class Prefilled:
    num_running_reqs: int | None = None
    num_queue_reqs: int | None = None


@dataclass(frozen=True, slots=True)
class Answered:
    """A line of the HTTP server's access log."""

    path: str
    status: int


@dataclass(frozen=True, slots=True)
class Stopping:
    """A wanted stop (SIGTERM, Ctrl-C, drained)."""

    how: str
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class Dying:
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
