"""Bytes of one log + evidence -> LoadView. Folds events; knows no grammar (parsers are passed in), no clock, no file.

Laws: any slicing of the bytes gives the same view; a phase never moves backwards inside one start; readiness is proved, not
believed; a verdict about silence needs the log's own rhythm.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from k2tui.core.barlines import BarLines, Run
from k2tui.core.diagnosis import Collector, Facts, Finding, Verdict, advice_for, decide, same_model
from k2tui.core.diagnosis_rules import signal
from k2tui.core.eta import EtaModel, LinearEta, Progress, StartRecord
from k2tui.core.events import (
    Answered,
    Bar,
    BindFailed,
    Decoded,
    Dying,
    EngineArgs,
    Event,
    Heartbeat,
    Listening,
    PhaseEdge,
    Prefilled,
    ReadyLine,
    Stopping,
)
from k2tui.core.knownlines import Known, KnownLines, Told, says_digits, shape_of, text_shape
from k2tui.core.load import DecodeBatch, LoadView, Phase, PhaseSpan, RankLoad, ShardCount, State
from k2tui.core.loadlines import Line, LineCutter, LineReader, clean, parse
from k2tui.core.patterns import Pattern, whole
from k2tui.core.plainlines import PlainLines

Parser = Callable[[str], Event | None]

_ORDER = {
    Phase.BOOT: 0,
    Phase.DIST_INIT: 1,
    Phase.WEIGHT_LOAD: 2,
    Phase.DRAFT_LOAD: 2,
    Phase.AFTER_LOAD: 3,
    Phase.KV_ALLOC: 4,
    Phase.GRAPH_CAPTURE: 5,
    Phase.HTTP: 7,
    Phase.WARMUP: 8,
    Phase.SERVING: 9,
    Phase.SHUTDOWN: 10,
}
_CLIENT_PHASES = frozenset({Phase.TRAIN, Phase.EXTRACT, Phase.BENCH, Phase.MONITOR})
_KEEP_STARTS = 50
_KEPT_SHAPES = 2048
_STEP_B = 8 << 10  # read line by line; then: does it serve by now?
_PARSED_CHARS = 8192  # of a longer line, both ends are looked at (the line with the arguments is read whole)


class Evidence(NamedTuple):
    """What the world around the log says. Every field is optional; None = not known.

    alive: the engine's main process lives. cpu_pct: of all its processes, 100 = one core. read_bytes_s, net_bytes_s: rates of
    the loader's own I/O counters. gpu_util: highest of its GPUs, percent. gpu_memory_b_s: slope of its GPU memory.
    http_checked: somebody asked the server; then model_path is what /model_info answered (None = nothing) and expected_model
    is what it should be. health: status of /health. requests_waiting: queue length that the server or a client told.
    children, expected_children: scheduler processes seen and wanted. wanted_stop: the user stopped it.
    extra: other facts as in a case's context (compute_cap, shm_used_pct, foreign_gpu_procs, nvml_error, dmesg ...).
    """

    alive: bool | None = None
    exit_code: int | None = None
    silence_s: float | None = None
    cpu_pct: float | None = None
    read_bytes_s: float | None = None
    net_bytes_s: float | None = None
    gpu_util: float | None = None
    gpu_memory_b_s: float | None = None
    http_checked: bool = False
    model_path: str | None = None
    served_model_name: str | None = None
    expected_model: str | None = None
    health: int | None = None
    requests_waiting: int | None = None
    children: int | None = None
    expected_children: int | None = None
    wanted_stop: bool = False
    bytes_done: int | None = None
    bytes_total: int | None = None
    is_complete: bool | None = None  # the log is whole and will not grow (a file given to `diagnose`)
    extra: Mapping[str, object] = MappingProxyType({})


class StartSummary(NamedTuple):
    """One earlier start in the same log."""

    started_s: float | None
    ended_s: float | None
    state: State
    phase: Phase
    model: str = ""
    engine: str = ""
    first_line_no: int = 1
    ready_s: float | None = None


@dataclass(slots=True)
class _BarState:
    kind: str
    title: str
    done: int
    total: int
    elapsed_s: float | None
    at_s: float | None
    rate: float | None
    line: Line
    t0: float | None = None


class _Start:
    """Everything about one start of one engine."""

    def __init__(self, first_line_no: int) -> None:
        self.first_line_no = first_line_no
        self.args: EngineArgs | None = None
        self.phase = Phase.BOOT
        self.round = 0  # 1 = the draft
        self.phase_seen = False
        self.spans: list[PhaseSpan] = []
        self.first_s: float | None = None
        self.last_s: float | None = None
        self.rank_loads: dict[str, int] = {}
        self.rank_ends: dict[str, int] = {}
        self.rank_bars: dict[
            tuple[str, bool], ShardCount
        ] = {}  # (rank, is it the draft's?) -> shards, where bars tell
        self.rank_nodes: dict[str, str] = {}
        self.milestone: tuple[Phase, str, int, str] | None = None
        self.compile_line: Line | None = None
        self.health_ok_s: float | None = None
        self.metrics_line: Line | None = None
        self.end_line: Line | None = None  # a trainer's last word, while nothing came after it
        self.milestone_line: Line | None = None  # the first rank that reached it
        self.ranks: set[str] = set()
        self.target: ShardCount | None = None
        self.draft: ShardCount | None = None
        self.bar: _BarState | None = None
        self.rhythm: deque[tuple[float, int]] = deque(maxlen=64)  # (log seconds, done) of the current bar
        self.curve: list[tuple[float, float]] = []  # (share of the target's shards, log seconds), at most 400
        self.work_line: Line | None = None  # newest line that showed progress
        self.load_end_line: Line | None = None
        self.types: list[str] = []
        self.url = ""
        self.ready_line: Line | None = None
        self.ready_at: float | None = None
        self.answered = False
        self.bind_failed: Line | None = None
        self.stop_line: Line | None = None
        self.stop_how = ""
        self.stop_over = False
        self.dying: Line | None = None
        self.dying_what = ""
        self.decodes: deque[tuple[DecodeBatch, float | None, int | None, Line]] = deque(maxlen=16)
        self.decode_count = 0
        self.heartbeats = 0
        self.heartbeat_line: Line | None = None
        self.first_heartbeat_s: float | None = None
        self.last_line: Line | None = None
        self.skipped: tuple[int, bytes] | None = None
        self.is_proved = False  # it once answered as our model
        self.bad_status: int = 0
        self.served_engine = ""
        self.drafting = False


class _Lane:
    """One engine's stream of lines: its newest start, its earlier ones, and what they proved."""

    def __init__(
        self,
        parsers: Mapping[str, Parser],
        detect: Callable[[Line], str] | None,
        clients: Parser | None,
        eta: EtaModel,
        stall_s: float,
    ) -> None:
        self._parsers = parsers
        self._detect = detect
        self._clients = clients
        self._eta = eta
        self._stall_s = stall_s
        self._start = _Start(1)
        self._history: deque[StartSummary] = deque(maxlen=_KEEP_STARTS)
        self._past_starts = 0
        self._engine = ""
        self._version = ""
        self._evidence = Evidence()
        self._arrived_s: float | None = None
        self._year = 1970  # of stamps that have none
        self._log_s: float | None = None
        self._collector = Collector()
        self._known = KnownLines()
        self._told: dict[tuple[str, bytes], Told] = {}  # by (engine, shape of the text)
        self._orders: dict[tuple[str, str], tuple[str, ...]] = {}  # whom to ask: by (writer, engine)
        self._votes: dict[str, int] = {}
        self._lines = self._marks = 0  # lines read, and those that have a log line's form
        self._is_told = False  # the arguments' line named the engine
        self._wrap_offset: float | None = None
        self._own_stamps = False
        self._phase_left_s: float | None = None
        self._newest: tuple[Line, Event | None, str] | None = (
            None  # line, what it says, the engine it looks like
        )
        self.provisional: Callable[[], Bar | None] = lambda: None
        self.before_event: Callable[[], None] = lambda: None

    @property
    def is_engine(self) -> bool:
        """Did it say anything that an engine, a client or a fault says?"""
        return bool(self._engine) or self._start.phase_seen or self._collector.has_cause

    # --- folding ---------------------------------------------------------------------------------------------------

    def arrived(self, now_s: float) -> None:
        self._arrived_s = now_s
        self._year = _year_of(now_s)

    @property
    def is_serving(self) -> bool:
        return self._start.phase is Phase.SERVING

    def skipped(self, no: int, piece: bytes) -> None:
        """A plain line was passed over: it is the newest one all the same."""
        self._start.skipped = (no, piece)

    def pass_known(self, no: int, piece: bytes, shape: bytes) -> Known | None:
        """Take a line that is known to change nothing but the newest time, without reading it. None: it must be read."""
        self._known.enter(self._engine)
        known = self._known.find(shape)
        if known is None or (
            known.module is not None and not self._collector.has_ignored(piece[known.module])
        ):
            return None
        head, start = self._known.head(piece, known, self._year), self._start
        if head is None or (start.first_s is None and head.at_s is not None):
            return None
        start.skipped = no, piece
        if head.at_s is not None:
            self._log_s = start.last_s = head.at_s
        if head.rank:
            start.ranks.add(head.rank)
        if known.writer:
            self._vote(known.writer)
        self._lines += 1
        self._marks += known.has_form
        if known.is_near:
            self._collector.pass_by(piece)
        return known

    def learn(self, piece: bytes, shape: bytes) -> None:
        """That line was taken last: may others of its shape be passed?"""
        assert self._newest is not None
        line, event, writer = self._newest
        known, prefix, head = None, _before(piece, line.text), _before(piece, line.body)
        if event is None and prefix is not None and head is not None:
            module, at = self._collector.ignored_import(line).encode(), None
            if module:
                begin = piece.find(_IGNORED) + len(_IGNORED)
                at = slice(begin, begin + len(module)) if piece[begin:].startswith(module) else None
            told = self._told.get((self._engine, text_shape(line.text)))
            if at is not None or (told.is_mute if told is not None else self._collector.is_mute(line.text)):
                is_near = bool(line.body) and at is None
                known = Known(prefix, head, writer, _has_form(line, None), line.at_s is not None, is_near, at)
        self._known.enter(self._engine)
        self._known.learn(shape, piece, line, known)

    def is_unknown(self, shape: bytes) -> bool:
        """Was no line of that shape looked at yet?"""
        return self._known.is_new(shape)

    def client_bar(self) -> tuple[int, int, object] | None:
        """While a trainer or another client draws a bar: its count, its total, and the place that decides what its lines say."""
        start, bar = self._start, self._start.bar
        if (
            bar is None
            or bar.elapsed_s is None
            or start.phase not in _CLIENT_PHASES
            or bar.kind != start.phase
        ):
            return None
        return bar.done, bar.total, (start.first_line_no, start.phase, self._engine, start.phase_seen)

    @property
    def newest(self) -> Line | None:
        """The line that was taken last."""
        return self._newest[0] if self._newest else None

    def can_pass(self, run: Run) -> bool:
        """Is nothing lost with the older lines? The newest loss must show that the training learns, or the run's unbroken end
        must hold one that does: how long it has learned nothing is counted in lines."""
        if run.lines == len(run.kept):
            return True
        is_dead = False
        for place in range(len(run.kept) - 1, -1, -1):
            told = signal(run.kept[place][1].decode("utf-8", "replace").lower())
            if told == "alive" and (place >= run.tail or not is_dead):
                return True
            is_dead = is_dead or told == "dead"
        return not is_dead

    def passed(self, lines: int, marks: int) -> None:
        """So many lines of a client's bar were passed over, `marks` of them with a log line's form."""
        self._lines += lines
        self._marks += marks

    def repeats(self) -> tuple[Bar | None, bool] | None:
        """Would an older line like the newest one change nothing, if this one came after it? Then its bar, and whether it
        has a log line's form."""
        assert self._newest is not None
        line, event, writer = self._newest
        start = self._start
        if writer or line.at_s is not None or not self._collector.says_nothing(line.text, in_training=True):
            return None
        if isinstance(event, Bar):
            is_noted = start.bar is not None and start.bar.kind == start.phase and start.target is not None
            is_noted = is_noted and start.target == ShardCount(event.done, event.total)
            return (event, True) if is_noted else None
        if isinstance(event, PhaseEdge):
            if event.phase is not start.phase or event.edge not in ("in", "metrics"):
                return None
        elif event is not None:
            return None
        return None, _has_form(line, event)

    def evidence(self, evidence: Evidence) -> None:
        self._evidence = evidence
        start = self._start
        wanted = evidence.expected_model or (start.args.model if start.args else "")
        if (
            start.ready_line is not None
            and evidence.model_path
            and (not wanted or same_model(evidence.model_path, wanted))
        ):
            start.is_proved = True

    def says_nothing(self) -> bool:
        """Did the newest line say nothing, and would a line say nothing that differs from it in its digits only?"""
        return (
            self._newest is not None
            and self._newest[1] is None
            and self._collector.says_nothing(self._newest[0].text)
        )

    def take(self, line: Line, *, is_plain: bool = False) -> None:
        """is_plain: a batch or health line out of thousands, of which only the newest were kept."""
        if line.wrap_s is not None:
            line = self._timed(line)
        start = self._start
        if is_plain:
            event = self._parse(line, self._detect(line) if self._detect else "")
            if event is not None:
                if line.at_s is not None:
                    self._log_s = start.last_s = line.at_s
                self._apply(event, line)
            return
        start.last_line, start.skipped = line, None
        if line.at_s is not None:
            self._log_s = line.at_s
            start.last_s = line.at_s
            if start.first_s is None:
                start.first_s = self._birth(line.at_s)
        if line.rank:
            start.ranks.add(line.rank)
            if line.node:
                start.rank_nodes[line.rank] = line.node
        key = (self._engine, text_shape(line.text))
        told = self._told.get(key)
        found = told.writer if told is not None else self._detect(line) if self._detect else ""
        if found:
            self._vote(found)
        event = None if told is not None and told.is_silent else self._parse(line, found)
        self._newest = line, event, found
        self._lines += 1
        self._marks += _has_form(line, event)
        if event is not None:
            self.before_event()
            if start.compile_line is not None and isinstance(event, PhaseEdge | ReadyLine | Listening):
                start.compile_line = None
            self._apply(event, line)
            if isinstance(event, PhaseEdge) and _COMPILES.search(line.body):
                self._start.compile_line = line
        if told is None and key[1]:
            told = self._tell(key, line, event, found)
        if told is not None and told.is_mute:
            self._collector.pass_by(line)
        else:
            self._collector.note(line, self._start.phase, self._start.round, self._engine)

    def _tell(self, key: tuple[str, bytes], line: Line, event: Event | None, writer: str) -> Told:
        """What all lines of that shape say, as this one does."""
        is_mute = "loss" not in line.text.lower() and self._collector.is_mute(line.text)
        is_silent = event is None and is_mute and not says_digits(key[1])
        if len(self._told) >= _KEPT_SHAPES:
            self._told.clear()
        told = self._told[key] = Told(writer, is_mute, is_silent)
        return told

    def _vote(self, writer: str) -> None:
        """A line looks like that engine's."""
        votes = self._votes[writer] = self._votes.get(writer, 0) + 1
        if not self._engine or (not self._is_told and votes > self._votes.get(self._engine, 0)):
            self._engine = writer

    def _timed(self, line: Line) -> Line:
        """A line without a stamp of its own takes its wrapper's, moved by the time zones' difference; a wrapper whose
        stamps do not run with the log's own is not believed."""
        wrap_s = line.wrap_s
        assert wrap_s is not None
        if line.at_s is not None:
            delta = line.at_s - wrap_s
            zone = round(delta / 900) * 900
            self._wrap_offset = float(zone) if abs(delta - zone) < 120 else None
            self._own_stamps = True
            return line
        if self._own_stamps and self._wrap_offset is None:
            return line
        return line._replace(at_s=wrap_s + (self._wrap_offset or 0.0))

    def _birth(self, stamp: float) -> float:
        """When the start began: its first stamp, or the arrival of earlier lines without one if that is near before it."""
        spans = self._start.spans
        if len(spans) == 1 and spans[0].phase is Phase.BOOT:
            # stamps are whole seconds mostly: a line that came in the same second came before
            began = spans[0].started_s if stamp % 1 else float(int(spans[0].started_s))
            spans[0] = replace(spans[0], started_s=began if 0 <= stamp - began < 3600 else stamp)
            return spans[0].started_s
        return stamp

    def _parse(self, line: Line, writer: str) -> Event | None:
        """writer: the engine that this line itself looks like; two engines may share a log."""
        text = line.text if line.text.startswith("[k2tui") else line.body
        if len(text) > _PARSED_CHARS and "server_args" not in text[:200]:
            text = text[: _PARSED_CHARS // 2] + " " + text[-_PARSED_CHARS // 2 :]
        order = self._orders.get((writer, self._engine))
        if order is None:
            names = (writer, self._engine or "sglang", *self._parsers)
            order = tuple(dict.fromkeys("sglang" if name == "local" else name for name in names if name))
            self._orders[writer, self._engine] = order
        for name in order:
            event = self._parsers[name](text) if name in self._parsers else None
            if event is not None:
                if writer and isinstance(event, Decoded | ReadyLine):
                    self._engine = self._engine if self._engine == "local" else writer
                return event
            if name == self._engine and not writer:
                break  # a line without a hand of its own belongs to the engine that is known
        return self._clients(text) if self._clients is not None else None

    def _apply(self, event: Event, line: Line) -> None:
        start = self._start
        match event:
            case EngineArgs():
                self._on_args(event, line)
            case PhaseEdge():
                self._on_edge(event, line)
            case Bar():
                self._on_bar(event, line)
            case Decoded():
                self._on_decode(event, line)
            case Prefilled():
                if start.phase in (Phase.HTTP, Phase.WARMUP) and not start.ready_line:
                    self._enter(Phase.WARMUP, line)
                elif not start.phase_seen:
                    self._enter(Phase.SERVING, line)
                start.work_line = line
            case Listening():
                if event.url:
                    start.url = event.url
                if not start.ready_line and start.phase not in (Phase.WARMUP, Phase.SHUTDOWN):
                    self._enter(Phase.HTTP, line)
            case ReadyLine():
                if start.phase is Phase.SHUTDOWN or (start.ready_line and event.is_proof is False):
                    return
                start.ready_line = line
                start.answered = start.answered or event.is_proof
                start.ready_at = line.at_s if line.at_s is not None else self._log_s
                self._enter(Phase.SERVING, line)
            case BindFailed():
                start.bind_failed = start.bind_failed or line
            case Answered():
                if event.path.startswith("/health") and event.status == 200 and line.at_s is not None:
                    start.health_ok_s = line.at_s
                if event.status < 400 and event.path in _REQUEST_PATHS:
                    start.answered = True
                elif event.status >= 500:
                    start.bad_status += 1
            case Stopping():
                if event.how == "clean up" and not start.stop_line:
                    return
                if not start.dying:
                    start.stop_line = start.stop_line or line
                    start.stop_how = start.stop_how or event.how
                    start.stop_over = start.stop_over or event.is_over
                    if start.phase_seen:
                        self._enter(Phase.SHUTDOWN, line)
            case Dying():
                # a group-wide SIGTERM also makes the children die: a wanted stop stays one
                if not start.stop_line and start.dying is None:
                    start.dying = line
                    start.dying_what = event.what
            case Heartbeat():
                start.heartbeats += 1
                if start.heartbeat_line is None:
                    start.first_heartbeat_s = line.at_s
                start.heartbeat_line = line

    def _on_args(self, event: EngineArgs, line: Line) -> None:
        start = self._start
        if event.is_start and (
            start.phase_seen
            or start.dying
            or start.stop_line
            or (start.args and start.args.model and event.model)
        ):
            self._new_start(line)
            start = self._start
        if event.engine and not (self._engine == "local" and event.engine == "sglang"):
            self._engine, self._is_told = event.engine, True
        if event.version:
            self._version = event.version
        old = start.args
        if old is None:
            start.args = event
        else:
            start.args = event._replace(
                model=event.model or old.model,
                draft=event.draft or old.draft,
                tp_size=event.tp_size or old.tp_size,
                host=event.host or old.host,
                port=event.port or old.port,
                version=event.version or old.version,
                nnodes=event.nnodes or old.nnodes,
                values={**old.values, **event.values},
            )
        if not start.spans:
            self._enter(Phase.BOOT, line)

    def _new_start(self, line: Line) -> None:
        old = self._start
        state = (
            State.FAILED
            if old.dying or old.bind_failed
            else State.STOPPED
            if old.stop_line
            else State.READY
            if old.ready_line
            else State.UNKNOWN
        )
        self._history.append(
            StartSummary(
                old.first_s, old.last_s, state, old.phase, old.args.model if old.args else "", self._engine, old.first_line_no,
                old.ready_at - old.first_s if old.ready_at is not None and old.first_s is not None else None,
            )
        )  # fmt: skip
        self._past_starts += 1
        self._start = _Start(line.no)
        self._start.first_s = self._start.last_s = line.at_s
        if line.rank:
            self._start.ranks.add(line.rank)
        self._start.last_line = line
        self._collector.restart(line)

    def _enter(self, phase: Phase, line: Line, round_: int | None = None) -> None:
        start = self._start
        if round_ is not None and round_ > start.round:
            start.round = round_
        elif (
            start.spans and phase in _ORDER and start.phase in _ORDER and _ORDER[phase] < _ORDER[start.phase]
        ):
            return
        if phase is not Phase.BOOT:
            start.phase_seen = True
        if start.spans and start.phase is phase:
            return
        at = (
            line.at_s
            if line.at_s is not None
            else (self._log_s if self._log_s is not None else self._arrived_s or 0.0)
        )
        if start.spans:
            start.spans[-1] = replace(start.spans[-1], ended_s=at)
        elif phase is not Phase.BOOT and start.first_s is not None and start.first_line_no < line.no:
            # whatever came before is the boot, also when it took less than the stamps can tell
            start.spans.append(PhaseSpan(Phase.BOOT, start.first_s, at, start.first_line_no))
        if len(start.spans) < 64:
            start.spans.append(PhaseSpan(phase, at, line_no=line.no))
        start.phase = phase
        start.bar = None
        start.rhythm.clear()

    def _on_edge(self, event: PhaseEdge, line: Line) -> None:
        start, rank = self._start, line.rank
        if (
            (start.dying or start.stop_over)
            and event.edge == "begin"
            and event.phase is Phase.DIST_INIT
            and not rank.strip("TP0")
        ):
            self._new_start(line)
            start = self._start
        phase = event.phase
        if phase in _CLIENT_PHASES:
            if not start.phase_seen or start.phase in _CLIENT_PHASES:
                self._enter(phase, line)
                if event.edge == "metrics":
                    start.metrics_line = line
                start.end_line = line if event.edge == "end" else None
            return
        if phase is Phase.WEIGHT_LOAD:
            self._on_load_edge(event, line)
            return
        if phase is Phase.DRAFT_LOAD or event.opens_draft:
            start.drafting = True
            if event.opens_draft and start.rank_loads and start.rank_ends.get(rank, 0) < 1:
                return
            self._enter(Phase.DRAFT_LOAD, line, 1)
            start.work_line = line
            return
        if phase is Phase.DIST_INIT:
            # a second init by a rank that has loaded its target is the draft's
            if start.rank_ends.get(rank) or (event.edge == "begin" and start.phase is Phase.GRAPH_CAPTURE):
                if event.edge == "begin":
                    self._enter(Phase.DRAFT_LOAD, line, 1)
                start.work_line = line
                return
            self._enter(phase, line)
            start.work_line = line
            return
        if event.edge == "hint":
            if _ORDER.get(start.phase, 0) >= _ORDER[Phase.KV_ALLOC]:
                self._enter(phase, line)
            start.work_line = line
            start.milestone = None
            return
        self._enter(phase, line)
        if "Using KV cache dtype" not in line.body:
            start.work_line = line
            milestone = (phase, event.edge, start.round, line.body[:24])
            if milestone != start.milestone:
                start.milestone, start.milestone_line = milestone, line

    def _on_load_edge(self, event: PhaseEdge, line: Line) -> None:
        start, rank = self._start, line.rank
        if event.edge in ("begin", "in"):
            speculates = (
                start.drafting
                or start.args is None
                or not start.args.values
                or bool(start.args.draft)
                or (start.args.values.get("speculative_algorithm", "None") != "None")
            )
            second = start.rank_loads.get(rank, 0) >= 1 and start.rank_ends.get(rank, 0) >= 1
            if event.edge == "begin":
                start.rank_loads[rank] = start.rank_loads.get(rank, 0) + 1
            if second and speculates:
                self._enter(Phase.DRAFT_LOAD, line, 1)
            else:
                self._enter(Phase.WEIGHT_LOAD, line)
        else:
            start.rank_ends[rank] = start.rank_ends.get(rank, 0) + 1
            if event.model_type:
                start.types.append(event.model_type) if len(start.types) < 64 else None
            start.load_end_line = line
            if start.phase in (Phase.BOOT, Phase.DIST_INIT):
                self._enter(Phase.WEIGHT_LOAD, line)
            waiting = [r for r, n in start.rank_loads.items() if start.rank_ends.get(r, 0) < n]
            if start.phase is Phase.WEIGHT_LOAD and not waiting:
                count = start.target
                if count and count.done < count.total:
                    start.target = ShardCount(
                        count.total, count.total
                    )  # tqdm's last refresh can be swallowed
                self._enter(Phase.AFTER_LOAD, line)
            elif (
                start.phase is Phase.DRAFT_LOAD
                and not waiting
                and start.draft
                and start.draft.done < start.draft.total
            ):
                start.draft = ShardCount(start.draft.total, start.draft.total)
        start.work_line = line
        milestone = (Phase.WEIGHT_LOAD, event.edge, start.round, "")
        if milestone != start.milestone:
            start.milestone, start.milestone_line = milestone, line

    def _on_bar(self, event: Bar, line: Line) -> None:
        start = self._start
        kind = event.kind
        if kind == "work" and start.phase is Phase.GRAPH_CAPTURE:
            kind = "capture"
        elif kind == "work" and start.phase in _CLIENT_PHASES:
            kind = start.phase.value
        if kind == "shards":
            if not self._on_shards(event, line):
                return
        elif kind == "capture" or kind == "jit":
            if start.phase in _CLIENT_PHASES or start.phase in (Phase.SERVING, Phase.SHUTDOWN):
                return
            self._enter(Phase.GRAPH_CAPTURE, line)
        elif kind in ("train", "extract", "bench"):
            server = start.phase_seen and start.phase not in _CLIENT_PHASES
            if server and (
                kind == "bench"
                or start.ready_line
                or start.phase in (Phase.HTTP, Phase.WARMUP, Phase.SERVING)
            ):
                return
            self._enter(Phase(kind), line)
            start.target = ShardCount(event.done, event.total)
        else:
            self._on_download(event, line)
            return
        start.end_line = None
        if kind == "train" and "loss" in line.text and _LOGGED_STEP.search(line.text):
            start.metrics_line = line
        self._note_bar(event, kind, line)

    def _on_download(self, event: Bar, line: Line) -> None:
        """A file of the checkpoint is fetched: its name tells how many there are; none is loaded yet."""
        start = self._start
        name = _DOWNLOAD.search(event.title)
        if (
            name is None
            or start.target is not None
            or _ORDER.get(start.phase, 99) > _ORDER[Phase.WEIGHT_LOAD]
        ):
            return
        start.target = ShardCount(0, whole(name[1]))
        start.work_line = line

    def _on_shards(self, event: Bar, line: Line) -> bool:
        """A shard bar: of the target, or of the draft once the target is whole. False: of neither."""
        start = self._start
        if start.round == 0 and start.phase in (Phase.BOOT, Phase.DIST_INIT):
            self._enter(Phase.WEIGHT_LOAD, line)
        whole = start.target is not None and start.target.done >= start.target.total
        if (
            start.round == 0
            and start.phase is Phase.WEIGHT_LOAD
            and whole
            and event.done == 0
            and not start.rank_loads
        ):
            self._enter(
                Phase.DRAFT_LOAD, line, 1
            )  # a bar that begins anew after a whole one: the second model
        elif start.round == 0 and start.phase is not Phase.WEIGHT_LOAD and whole:
            if start.drafting or (start.args is not None and start.args.draft):
                self._enter(Phase.DRAFT_LOAD, line, 1)
            elif _ORDER.get(start.phase, 99) > _ORDER[Phase.AFTER_LOAD]:
                return False
        is_draft = start.phase is Phase.DRAFT_LOAD
        if is_draft:
            start.draft = _newer(start.draft, event)
        elif start.round == 0:
            start.target = _newer(start.target, event)
        else:
            return False
        if line.rank:
            place = (line.rank, is_draft)
            start.rank_bars[place] = _newer(start.rank_bars.get(place), event)
        return True

    def _note_bar(self, event: Bar, kind: str, line: Line) -> None:
        start, bar = self._start, self._start.bar
        same = bar is not None and bar.kind == kind and bar.total == event.total and event.done >= bar.done
        base = line.at_s if line.at_s is not None else self._log_s
        t0 = bar.t0 if same and bar else None
        if event.elapsed_s is not None and base is not None and t0 is None:
            # the stamp of the line before a bar is at or before the bar's birth
            t0 = base if line.at_s is None else base - event.elapsed_s
        at = base
        took = event.elapsed_s
        if took is not None and event.rate_per_s:
            # the bar's clock shows whole seconds; its rate tells where inside the second it stands
            took = min(max(took, event.done / event.rate_per_s), took + 0.99)
        if t0 is not None and took is not None and line.at_s is None:
            at = t0 + took
        elif at is None and event.elapsed_s is not None:
            at = event.elapsed_s  # no stamp anywhere: the bar's own clock
        if at is not None and self._log_s is not None and at > self._log_s:
            self._log_s = at
            start.last_s = at
        progressed = not same or (bar is not None and event.done > bar.done)
        if not same:
            start.rhythm.clear()
        start.bar = _BarState(
            kind, event.title, event.done, event.total, event.elapsed_s, at, event.rate_per_s, line, t0
        )
        if progressed:
            if at is not None:
                start.rhythm.append((at, event.done))
                if kind == "shards" and start.phase is Phase.WEIGHT_LOAD and len(start.curve) < 400:
                    start.curve.append((event.done / event.total, at))
            start.work_line = line
        elif bar is not None:
            start.bar.line = bar.line  # the first refresh that reached this count
            if start.work_line is None:
                start.work_line = line

    def _on_decode(self, event: Decoded, line: Line) -> None:
        start = self._start
        batch = replace(event.batch, at_s=line.at_s if line.at_s is not None else (self._log_s or 0.0))
        if start.decodes and batch.accept_length is not None and batch.gen_throughput is None:
            batch = _merged(start.decodes[-1][0], batch)  # vLLM tells acceptance in a line of its own
        elif start.decodes and batch.accept_length is None and self._engine == "vllm":
            batch = replace(batch, accept_length=start.decodes[-1][0].accept_length)
        start.decodes.append((batch, event.accept_rate, event.drafted_to, line))
        start.decode_count = min(start.decode_count + 1, 16)
        if start.phase in (Phase.HTTP, Phase.WARMUP) and not start.ready_line:
            self._enter(Phase.WARMUP, line)
        elif not start.phase_seen:
            self._enter(Phase.SERVING, line)
        start.answered = True
        start.work_line = line

    # --- output ----------------------------------------------------------------------------------------------------

    @property
    def history(self) -> tuple[StartSummary, ...]:
        """Earlier starts of the same log, oldest first (at most 50)."""
        return tuple(self._history)

    @property
    def start_count(self) -> int:
        return self._past_starts + 1

    def view(self, now_s: float) -> LoadView:
        """The picture at now_s. Pure: two calls with the same arguments give the same view."""
        start, seen = self._start, self._evidence
        bar, target, draft = start.bar, start.target, start.draft
        rhythm: list[tuple[float, int]] = list(start.rhythm)
        hot = self.provisional()
        if (
            hot is not None
            and hot.kind == "shards"
            and start.phase in (Phase.WEIGHT_LOAD, Phase.DRAFT_LOAD, Phase.BOOT, Phase.DIST_INIT)
        ):
            if start.phase is Phase.DRAFT_LOAD:
                draft = _newer(draft, hot)
            else:
                target = _newer(target, hot)
            if (
                bar is not None
                and bar.t0 is not None
                and hot.elapsed_s is not None
                and hot.done > bar.done
                and hot.total == bar.total
            ):
                rhythm.append((bar.t0 + hot.elapsed_s, hot.done))
        silence = seen.silence_s
        if silence is None and self._arrived_s is not None:
            silence = max(0.0, now_s - self._arrived_s)
        log_now = (self._log_s + (silence or 0.0)) if self._log_s is not None else None
        verdict = decide(self._collector, self._facts(silence, log_now))
        phase = verdict.phase or start.phase
        if phase is Phase.BENCH:
            target = _bench_count(self._collector.numbers, target)
        spans = tuple(start.spans)
        view = LoadView(
            state=verdict.state,
            phase=phase,
            phases=spans,
            target=target,
            draft=draft,
            started_s=start.first_s,
            ready_s=(start.ready_at - start.first_s)
            if start.ready_at is not None and start.first_s is not None
            else None,
            silence_s=silence,
            hint=verdict.remedy,
            root_cause="" if verdict.is_healthy else verdict.root_cause,
            root_cause_group="" if verdict.is_healthy else verdict.group,
            proof_line=verdict.proof.raw if verdict.proof else "",
            proof_line_no=verdict.proof.no if verdict.proof else None,
            confidence=verdict.confidence,
            engine=self._engine,
            version=self._version,
            model=start.args.model if start.args else "",
            tp_size=self._tp_size(),
            url=self._url(),
            decode=start.decodes[-1][0] if start.decodes else None,
            warnings=tuple(verdict.warnings),
            ranks=tuple(sorted(start.ranks, key=_rank_key)),
            rank_loads=self._rank_loads(),
            bytes_done=seen.bytes_done,
            bytes_total=seen.bytes_total,
        )
        rate: float | None = None
        if len(rhythm) >= 2 and rhythm[-1][0] > rhythm[0][0]:
            # the last 8 steps, and never less than 3 s: several states of a fast bar arrive together
            since = next(
                (i for i in range(len(rhythm) - 1, -1, -1) if rhythm[-1][0] - rhythm[i][0] >= 3.0), 0
            )
            recent = rhythm[min(since, max(0, len(rhythm) - 8)) :]
            if recent[-1][0] > recent[0][0]:
                rate = (recent[-1][1] - recent[0][1]) / (recent[-1][0] - recent[0][0])
        view = replace(view, shards_per_s=rate if phase in (Phase.WEIGHT_LOAD, Phase.DRAFT_LOAD) else None)
        if verdict.state in (State.LOADING, State.READY):
            progress = self._progress(view, rhythm, log_now)
            estimate = self._eta.estimate(progress) if verdict.state is State.LOADING else None
            self._phase_left_s = estimate.phase_s if estimate else None
            if estimate is not None:
                view = replace(view, eta_s=estimate.eta_s, eta_error_s=estimate.error_s)
            view = replace(view, eta_accuracy=self._eta.accuracy(progress))
        return replace(view, verdict=_sentence(view, verdict))

    def _rank_loads(self) -> tuple[RankLoad, ...]:
        start = self._start
        ranks = {*start.rank_loads, *start.rank_ends, *(rank for rank, _ in start.rank_bars)} - {""}
        if len(ranks) < 2:
            return ()
        return tuple(
            RankLoad(
                rank,
                start.rank_nodes.get(rank, ""),
                start.rank_bars.get((rank, False)),
                start.rank_bars.get((rank, True)),
                start.rank_ends.get(rank, 0) > 0,
            )
            for rank in sorted(ranks, key=_rank_key)
        )

    def record(self, predictions: Mapping[str, tuple[float, float]]) -> StartRecord | None:
        """The newest start as history keeps it: None while it is not ready, or when its log was not seen from its beginning."""
        start = self._start
        args = start.args
        if (
            start.ready_at is None
            or start.first_s is None
            or args is None
            or not args.model
            or start.bind_failed
        ):
            return None
        phases = [
            (s.phase, s.ended_s - s.started_s)
            for s in start.spans
            if s.ended_s is not None and s.phase not in (Phase.SERVING, Phase.SHUTDOWN)
        ]
        if not phases or phases[0][0] is not Phase.BOOT or start.ready_at <= start.first_s:
            return None
        begin = next((s.started_s for s in start.spans if s.phase is Phase.WEIGHT_LOAD), start.first_s)
        step = max(1, len(start.curve) // 40)
        points = [*start.curve[:-1:step], *start.curve[-1:]]
        return StartRecord(
            id=f"{self._engine} {args.model} {start.first_s:.0f}",
            at_s=start.first_s,
            engine=self._engine,
            model=args.model,
            ready_s=start.ready_at - start.first_s,
            tp_size=self._tp_size(),
            has_draft=bool(args.draft) or start.drafting,
            version=self._version,
            shards=start.target.total if start.target else None,
            phases=tuple(phases),
            curve=tuple((share, max(0.0, at - begin)) for share, at in points),
            predictions=dict(predictions),
        )

    def phase_left_s(self, now_s: float) -> float | None:
        self._phase_left_s = None
        self.view(now_s)
        return self._phase_left_s

    def verdict(self, now_s: float) -> Verdict:
        """The diagnosis behind view(now_s), with its findings."""
        silence = self._evidence.silence_s
        if silence is None and self._arrived_s is not None:
            silence = max(0.0, now_s - self._arrived_s)
        return decide(self._collector, self._facts(silence, None))

    def findings(self) -> tuple[Finding, ...]:
        """Every proving line found so far in the newest start, oldest first."""
        return self._collector.findings()

    def _progress(self, view: LoadView, rhythm: list[tuple[float, int]], log_now: float | None) -> Progress:
        start = self._start
        elapsed = (log_now - start.first_s) if log_now is not None and start.first_s is not None else None
        bar = start.bar
        return Progress(
            phase=view.phase,
            spans=view.phases,
            target=view.target,
            draft=view.draft,
            rhythm=tuple(rhythm),
            log_now_s=log_now,
            elapsed_s=elapsed,
            model=view.model,
            engine=view.engine,
            tp_size=view.tp_size,
            has_draft=bool(start.args and start.args.draft) or start.drafting,
            capture=ShardCount(bar.done, bar.total) if bar and bar.kind == "capture" else None,
            bytes_done=view.bytes_done,
            bytes_total=view.bytes_total,
            read_bytes_s=self._evidence.read_bytes_s,
        )

    def _tp_size(self) -> int | None:
        start = self._start
        if start.args and start.args.tp_size:
            return start.args.tp_size
        tags = [whole(m[1]) for r in start.ranks if (m := re.search(r"TP(\d+)", r))]
        return max(tags) + 1 if tags else None

    def _url(self) -> str:
        start = self._start
        if start.url:
            return start.url.replace("//0.0.0.0", "//127.0.0.1").replace("//[::]", "//127.0.0.1")
        if start.args and start.args.port:
            host = start.args.host or "127.0.0.1"
            return f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{start.args.port}"
        return ""

    def _newest_line(self) -> Line | None:
        skipped = self._start.skipped
        return (
            parse(skipped[0], clean(skipped[1].decode("utf-8", "replace")), self._year)
            if skipped
            else self._start.last_line
        )

    def _facts(self, silence_s: float | None, log_now: float | None) -> Facts:
        start, seen = self._start, self._evidence
        decodes = [(d[0], d[1], d[2], d[3]) for d in start.decodes]
        moves = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(start.rhythm) if b[0] > a[0]]
        nodes = start.args.nnodes if start.args else None
        return Facts(
            engine=self._engine,
            phase=start.phase,
            round=start.round,
            phase_seen=start.phase_seen,
            target=start.target,
            draft=start.draft,
            bar_kind=start.bar.kind if start.bar else "",
            bar_line=start.bar.line if start.bar else None,
            bar_done=start.bar.done if start.bar else None,
            bar_total=start.bar.total if start.bar else None,
            gaps_s=tuple(m[0] for m in moves),
            steps=tuple(m[1] for m in moves),
            bar_elapsed_s=start.bar.elapsed_s if start.bar else None,
            work_line=start.work_line,
            metrics_line=start.metrics_line,
            end_line=start.end_line,
            compile_line=start.compile_line,
            health_ok_s=start.health_ok_s,
            milestone_line=start.milestone_line
            if start.work_line and start.milestone and not start.bar
            else None,
            load_end_line=start.load_end_line,
            last_line=self._newest_line(),
            ready_line=start.ready_line,
            answered=start.answered,
            is_proved=start.is_proved,
            bind_failed=start.bind_failed,
            stop_line=start.stop_line,
            stop_how=start.stop_how,
            stop_over=start.stop_over,
            dying=start.dying,
            dying_what=start.dying_what,
            decodes=tuple(decodes),
            decode_count=start.decode_count,
            heartbeats=start.heartbeats,
            heartbeat_line=start.heartbeat_line,
            heartbeat_span_s=(
                start.heartbeat_line.at_s - start.first_heartbeat_s
                if start.heartbeat_line
                and start.heartbeat_line.at_s is not None
                and start.first_heartbeat_s is not None
                else None
            ),
            load_types=tuple(start.types),
            ranks=tuple(sorted(start.ranks, key=_rank_key)),
            rank_loads=dict(start.rank_loads),
            rank_ends=dict(start.rank_ends),
            tp_size=self._tp_size(),
            nnodes=nodes,
            model=start.args.model if start.args else "",
            silence_s=silence_s,
            stall_s=self._stall_s,
            alive=seen.alive,
            exit_code=seen.exit_code,
            cpu_pct=seen.cpu_pct,
            read_bytes_s=seen.read_bytes_s,
            net_bytes_s=seen.net_bytes_s,
            gpu_util=seen.gpu_util,
            gpu_memory_b_s=seen.gpu_memory_b_s,
            http_checked=seen.http_checked,
            model_path=seen.model_path,
            served_model_name=seen.served_model_name,
            expected_model=seen.expected_model,
            health=seen.health,
            requests_waiting=seen.requests_waiting,
            children=seen.children,
            expected_children=seen.expected_children,
            wanted_stop=seen.wanted_stop,
            is_complete=bool(seen.is_complete),
            extra=seen.extra,
            lines=self._lines,
            marks=self._marks,
            votes=sum(self._votes.values()),
        )


class LoadTracker:
    """feed(bytes), evidence(facts), view(). One log; the newest start counts, earlier ones are `history`.

    parsers: engine name -> parse_line. detect: line -> engine name or "". eta: learned from earlier starts, else linear.
    first_line_no: of the first line that is fed, when the log is not read from its beginning.
    A log that several containers share is read as several engines; the view is the one in the worst state.
    """

    def __init__(
        self,
        parsers: Mapping[str, Parser],
        detect: Callable[[Line], str] | None = None,
        *,
        clients: Parser | None = None,
        eta: EtaModel | None = None,
        stall_s: float = 0.0,
        first_line_no: int = 1,
    ) -> None:
        model: EtaModel = eta or LinearEta()
        self._parsers = parsers
        self._make = lambda: _Lane(parsers, detect, clients, model, stall_s)
        self._cutter = LineCutter()
        self._cutter.line_no = first_line_no
        self._reader = LineReader()
        self._lanes: dict[str, _Lane] = {}
        self._lane = self._open_lane("")
        self._evidence = Evidence()
        self._words: dict[str, int] = {}
        self._plain = PlainLines()
        self._bars = BarLines()
        self.bytes_fed = 0

    @property
    def line_no(self) -> int:
        """Number of the line that the next byte belongs to."""
        return self._cutter.line_no

    # --- input -----------------------------------------------------------------------------------------------------

    def feed(self, data: bytes, now_s: float) -> None:
        """More bytes of the log, in order, as they came at now_s (Unix seconds)."""
        if not data:
            return
        self.bytes_fed += len(data)
        self._reader.year = _year_of(now_s)
        for lane in self._lanes.values():
            lane.arrived(now_s)
        at, size, bars = 0, len(data), (-1, 0)
        if b"\r" in data and data.count(b"\r") != data.count(b"\r\n"):
            bars = data.find(b"\r"), data.rfind(b"\r") + 1  # between them a line's end is not the only cut
        while at < size:
            if self._can_skip():
                if at >= bars[1]:
                    at = self._feed_runs(data, at, data.rfind(b"\n") + 1, now_s)
                elif at < bars[0]:
                    at = self._feed_runs(data, at, data.rfind(b"\n", 0, bars[0]) + 1, now_s)
            elif self._lane.client_bar() is not None:
                at = self._feed_bars(data, at, now_s)
            stop = data.find(b"\n", at + _STEP_B) + 1 or size
            if at < bars[1]:
                stop = data.find(b"\r", at + _STEP_B, stop) + 1 or stop
            self._feed_pieces(data[at:stop] if stop - at < size else data, now_s)
            at = stop

    def _feed_pieces(self, data: bytes, now_s: float) -> None:
        for no, piece in self._cutter.feed(data):
            self._piece(no, piece, now_s)

    def _can_skip(self) -> bool:
        """A serving log of one engine is nearly all batch lines, access lines and chatter: the newest say everything."""
        return self._lane.is_serving and len(self._lanes) == 1 and not self._reader.is_joining

    def _can_know(self) -> bool:
        """One engine's log, and no client's bar: that has its own way to pass its lines over."""
        return len(self._lanes) == 1 and not self._reader.is_joining and self._lane.client_bar() is None

    def _feed_runs(self, data: bytes, at: int, end: int, now_s: float) -> int:
        """Lines of a serving log from `at` to at most `end` (the end of a line), runs of plain ones at once. How far it went:
        to a line's beginning."""
        cutter = self._cutter
        if at < end and cutter.is_open:
            stop = data.find(b"\n", at) + 1
            self._feed_pieces(data[at:stop], now_s)
            at = stop
        while at < end and self._can_skip():
            at, lines = self._plain.skim(cutter.line_no, data, at, end)
            if lines:
                cutter.line_no += lines
                self._lane.skipped(cutter.line_no - 1, data[data.rfind(b"\n", 0, at - 1) + 1 : at - 1])
            if at < end:
                stop = data.find(b"\n", at) + 1
                self._feed_pieces(data[at:stop], now_s)
                at = stop
        return at

    def _feed_bars(self, data: bytes, at: int, now_s: float) -> int:
        """While a client draws a bar: runs of its refreshes from `at`, of which the newest count. How far it went: to a
        piece's beginning."""
        cutter, lane, bars = self._cutter, self._lane, self._bars
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        while at < end and (drawn := lane.client_bar()) is not None:
            if lane is not self._lane or len(self._lanes) != 1 or self._reader.is_joining:
                break
            done, total, place = drawn
            bars.enter(place)
            run = None if cutter.is_open else bars.skim(data, at, end, done, total)
            if run is None:
                stop = bars.piece_end(data, at)
                before, piece, is_whole = lane.newest, data[at : stop - 1], not cutter.is_open
                self._feed_pieces(data[at:stop], now_s)
                newest = lane.newest
                is_read = (
                    is_whole and newest is not None and newest is not before and newest.raw.encode() == piece
                )
                drawn = lane.client_bar()
                if is_read and drawn is not None and drawn[2] == place:  # the line itself changed no phase
                    bars.learn(piece, lane.repeats)
                at = stop
            elif lane.can_pass(run):
                lane.passed(run.lines - len(run.kept), run.marks - sum(form for _, _, form in run.kept))
                for start, piece, _ in run.kept:
                    cutter.line_no += data.count(b"\n", at, start)
                    at = start
                    self._piece(cutter.line_no, piece, now_s)
                cutter.line_no += data.count(b"\n", at, run.stop)
                at = run.stop
            else:
                self._feed_pieces(data[at : run.stop], now_s)
                at = run.stop
        return at

    def _piece(self, no: int, piece: bytes, now_s: float) -> None:
        if not piece:
            return
        if self._can_skip() and self._plain.skim(no, piece + b"\n", 0, len(piece) + 1)[1]:
            self._lane.skipped(no, piece)
            return
        can_skip = self._can_skip()
        can_know = not (can_skip and self._plain.is_headed(piece)) and self._can_know()
        shape = shape_of(piece) if can_know else b""
        if can_know and (known := self._lane.pass_known(no, piece, shape)):
            if can_skip:
                self._plain.usual(piece[: known.prefix])
            return
        lines = self._reader.read(no, piece)
        if lines:
            text = lines[-1].text.encode()
            self._plain.usual(piece[: -len(text)] if piece.endswith(text) else b"\x00")
        for line in lines:
            self._take(line, now_s)
        if len(lines) != 1:
            return
        if can_skip and self._lane.says_nothing():
            self._plain.learn(piece)
        if can_know and self._can_know() and self._lane.is_unknown(shape):
            self._lane.learn(piece, shape)

    def _flush(self) -> None:
        """The plain lines that were kept, in order, before anything else changes the state or is asked for it."""
        for no, piece in self._plain.newest():
            for line in self._reader.read(no, piece):
                self._lane.take(line, is_plain=True)

    def feed_lines(self, lines: list[Line], now_s: float) -> None:
        """Lines that were cut and ordered by somebody else (a newest-first export turned round)."""
        for lane in self._lanes.values():
            lane.arrived(now_s)
        for line in lines:
            self._take(line, now_s)

    def _take(self, line: Line, now_s: float) -> None:
        if line.source and line.source in self._lanes:
            self._lane = self._lanes[line.source]
        elif line.source and self._is_name(line.source):
            if len(self._lanes) == 1 and "" in self._lanes and not self._lanes[""].is_engine:
                self._lanes = {}  # what came before the first name was nobody's
            if len(self._lanes) < _MAX_LANES:
                self._lane = self._open_lane(line.source)
                self._lane.arrived(now_s)
        self._lane.take(line)

    def _is_name(self, source: str) -> bool:
        """Is it a container's name? "sglang-1" is; any other word must come twice ("GPU | ..." may be a table)."""
        if _REPLICA.search(source):
            return True
        self._words[source] = self._words.get(source, 0) + 1 if len(self._words) < 64 else 0
        return self._words[source] >= 2 or not any(lane.is_engine for lane in self._lanes.values())

    def _open_lane(self, source: str) -> _Lane:
        lane = self._lanes[source] = self._make()
        lane.provisional, lane.before_event = self._provisional, self._flush
        return lane

    def finish(self, now_s: float) -> None:
        """The log will not grow: an unfinished last line counts as a line."""
        if self._cutter.pending():
            self.feed(b"\n", now_s)
        for line in self._reader.flush():
            self._take(line, now_s)

    def evidence(self, evidence: Evidence) -> None:
        """The newest facts; they replace the former ones whole."""
        self._evidence = evidence
        if len(self._lanes) == 1:
            self._lane.evidence(evidence)

    def _provisional(self) -> Bar | None:
        """A bar that is drawn without a newline stands in the unfinished piece."""
        rest = self._cutter.pending()
        if not rest or b"%" not in rest:
            return None
        text = clean(rest[-3000:].decode("utf-8", "replace"))
        for parser in self._parsers.values():
            event = parser(text)
            if isinstance(event, Bar):
                return event
        return None

    # --- output ----------------------------------------------------------------------------------------------------

    def _engines(self) -> list[tuple[str, _Lane]]:
        self._flush()
        found = [(name, lane) for name, lane in self._lanes.items() if lane.is_engine]
        return found or list(self._lanes.items())

    def _worst(self, now_s: float) -> tuple[str, _Lane, LoadView]:
        engines = self._engines()
        if len(engines) == 1:
            name, lane = engines[0]
            lane.evidence(self._evidence)
            return name, lane, lane.view(now_s)
        # whose process the evidence is about is not known: the engine that is worst by its own words gets it
        for _, lane in engines:
            lane.evidence(Evidence())
        views = [(lane.view(now_s), name, lane) for name, lane in engines]
        # of equals, the one that holds a proving line, though it did not decide
        _, name, lane = max(
            views, key=lambda v: (_SEVERITY[v[0].state], bool(v[2].findings()), v[0].confidence or 0.0)
        )
        lane.evidence(self._evidence)
        return name, lane, lane.view(now_s)

    def view(self, now_s: float) -> LoadView:
        """The picture at now_s. Pure: two calls with the same arguments give the same view."""
        name, _, view = self._worst(now_s)
        engines = self._engines()
        if len(engines) > 1:
            others = ", ".join(
                f"{n or 'unnamed'} {lane.view(now_s).state}" for n, lane in engines if n != name
            )
            view = replace(
                view,
                warnings=(
                    *view.warnings,
                    f"this log holds {len(engines)} engines; shown: {name}; also: {others}",
                ),
            )
        return view

    def views(self, now_s: float) -> dict[str, LoadView]:
        """Every engine of a shared log by its container's name ("" = the log has one)."""
        return {name: lane.view(now_s) for name, lane in self._engines()}

    def verdict(self, now_s: float) -> Verdict:
        """The diagnosis behind view(now_s)."""
        return self._worst(now_s)[1].verdict(now_s)

    def phase_left_s(self, now_s: float) -> float | None:
        """Seconds until the present phase ends, by the same model as the view's eta_s."""
        return self._worst(now_s)[1].phase_left_s(now_s)

    def record(self, predictions: Mapping[str, tuple[float, float]] | None = None) -> StartRecord | None:
        """The newest start as history keeps it, None while it is not ready (one engine a log only)."""
        engines = self._engines()
        return engines[0][1].record(predictions or {}) if len(engines) == 1 else None

    def findings(self) -> tuple[Finding, ...]:
        """Every proving line found so far in the newest start, oldest first."""
        return tuple(f for _, lane in self._engines() for f in lane.findings())

    @property
    def history(self) -> tuple[StartSummary, ...]:
        """Earlier starts of the same log, oldest first (at most 50)."""
        return tuple(s for _, lane in self._engines() for s in lane.history)

    @property
    def start_count(self) -> int:
        return max(lane.start_count for _, lane in self._engines())


_IGNORED = b"Ignore import error when loading "
_LOGGED_STEP = Pattern(r"\bstep[=: ]+\d+\b.{0,200}\bt?\w*loss[=: ]+[\d.]+|\{'loss': [\d.]+")
_COMPILES = Pattern(
    r"DeepGEMM JIT|torch\.compile|[Cc]ompiling a graph|Dynamo bytecode|autotune with|JIT Pre-Compile"
)
_DOWNLOAD = Pattern(r"-of-0*(\d{1,6})\.(?:safetensors|bin|pt)")
_REPLICA = Pattern(r"[-_]\d+$|/")
_MAX_LANES = 16
_SEVERITY = {
    State.UNKNOWN: 0,
    State.STOPPED: 1,
    State.READY: 2,
    State.LOADING: 3,
    State.DEGRADED: 4,
    State.STALLED: 5,
    State.FAILED: 6,
}


_REQUEST_PATHS = frozenset(
    {
        "/generate",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/embeddings",
        "/v1/responses",
        "/v1/messages",
    }
)


_FORM = Pattern(  # an exception, a row of a result table, a trainer's dict
    r"\s*(?:(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit)\b|[A-Z][\w ()/%-]+: {2,}-?[\d.]+\s*$|={8,}|\{'\w+': |\S+\.py:\d+: \w*Warning: )"
)


def _has_form(line: Line, event: Event | None) -> bool:
    """Does it look like a line of a log (stamp, level, rank, wrapper, trace, bar, an engine's own sentence), not like prose?"""
    if line.at_s is not None or line.level or line.rank or line.process or line.source:
        return True
    body = line.body
    if isinstance(event, Bar):
        return True
    if isinstance(event, PhaseEdge):
        return (
            event.edge in ("begin", "metrics", "end") if event.phase in _CLIENT_PHASES else body[:1].isalnum()
        )
    if event is not None and body[:1].isalnum():
        return True
    return 'File "' in body or body.startswith("Traceback") or _FORM.match(body) is not None


def _year_of(now_s: float) -> int:
    import time

    return time.localtime(now_s).tm_year


def _before(piece: bytes, text: str) -> int | None:
    """How many bytes of the piece stand before the text that ends it; None when it was not written as it is read."""
    end = text.encode()
    return len(piece) - len(end) if piece.endswith(end) else None


def _newer(old: ShardCount | None, bar: Bar) -> ShardCount:
    """The highest count of bars with the same total: two engines or a re-drawn bar never count twice."""
    if old is not None and old.total == bar.total:
        return ShardCount(max(old.done, bar.done), bar.total)
    if (
        old is not None
        and old.total > bar.total
        and old.done < old.total
        and bar.done < bar.total
        and bar.done == 0
    ):
        return old  # a side bar (one rank's extra file) starts while the main one runs
    return ShardCount(bar.done, bar.total)


def _bench_count(numbers: Mapping[str, float], bar: ShardCount | None) -> ShardCount | None:
    """Requests that succeeded, of all that were asked for; replies without a token are no successes."""
    told = numbers.get("successful", 0) + numbers.get("failed", 0)
    total = numbers.get("total") or told or (bar.total if bar else None)
    if total is None:
        return bar
    good = numbers.get("successful")
    done = good if good is not None else (bar.done if bar else 0)
    if numbers.get("throughput") == 0 or numbers.get("generated") == 0:
        done = 0
    return ShardCount(int(done), int(total))


def _merged(old: DecodeBatch, new: DecodeBatch) -> DecodeBatch:
    return replace(old, at_s=new.at_s, accept_length=new.accept_length)


def _rank_key(rank: str) -> tuple[object, ...]:
    return tuple(whole(p) if p.isdigit() else p for p in re.split(r"(\d+)", rank))


def duration(seconds: float) -> str:
    """90 -> "1:30", 3700 -> "1:01:40", 8 -> "8 s"."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


_PHASE_WORDS = {
    Phase.BOOT: "starting",
    Phase.DIST_INIT: "joining the ranks",
    Phase.WEIGHT_LOAD: "loading weights",
    Phase.DRAFT_LOAD: "loading the draft",
    Phase.AFTER_LOAD: "finishing the load",
    Phase.KV_ALLOC: "allocating the KV cache",
    Phase.GRAPH_CAPTURE: "capturing CUDA graphs",
    Phase.HTTP: "HTTP server up, not ready yet",
    Phase.WARMUP: "warming up",
    Phase.SERVING: "serving",
    Phase.SHUTDOWN: "shutting down",
    Phase.TRAIN: "training",
    Phase.EXTRACT: "preparing data",
    Phase.BENCH: "running a benchmark",
    Phase.MONITOR: "watching GPUs",
}


def _sentence(view: LoadView, verdict: Verdict) -> str:
    if verdict.sentence:
        return verdict.sentence
    if view.state is State.READY:
        took = f" after {duration(view.ready_s)}" if view.ready_s is not None else ""
        return f"ready{took}"
    if view.state is State.LOADING:
        parts: list[str] = []
        count = view.draft if view.phase is Phase.DRAFT_LOAD else view.target
        if count is not None and view.phase in (Phase.WEIGHT_LOAD, Phase.DRAFT_LOAD):
            what = "draft shards" if view.phase is Phase.DRAFT_LOAD else "shards"
            parts.append(f"{what} {count.done}/{count.total}")
            if view.shards_per_s:
                rate = view.shards_per_s
                parts.append(f"{rate:.1f} shards/s" if rate >= 1 else f"{1 / rate:.1f} s a shard")
        elif count is not None and view.phase in _CLIENT_PHASES:
            parts.append(f"{_PHASE_WORDS[view.phase]}, {count.done}/{count.total}")
        else:
            parts.append(_PHASE_WORDS[view.phase])
        if view.eta_s is not None:
            parts.append(f"ready in about {duration(view.eta_s)}")
        return ", ".join(parts)
    return advice_for(verdict.root_cause) or _PHASE_WORDS[view.phase]
