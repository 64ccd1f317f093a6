"""What is worth telling: two snapshots in, notes out; who hears them and when. Knows no terminal, process or network."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from k2tui.core.job import Job, JobState
from k2tui.core.job_text import duration, plain

if TYPE_CHECKING:  # a keeper tells its job's end without them
    from k2tui.core.bench import BenchRow
    from k2tui.core.snapshot import Snapshot


class Kind(StrEnum):
    READY = "ready"  # a server became ready
    STALLED = "stalled"
    FAILED = "failed"  # a server failed
    JOB_ENDED = "job_ended"  # a job ended well, or was stopped
    JOB_FAILED = "job_failed"
    BENCH_WORSE = "bench_worse"  # a benchmark is worse than its baseline


@dataclass(frozen=True, slots=True)
class Note:
    """One thing to tell. key: two notes with the same key are about the same thing."""

    kind: Kind
    title: str
    text: str
    at_s: float
    key: str
    job_id: str = ""


@dataclass(frozen=True, slots=True)
class Rules:
    """kinds: those told. quiet: minutes of the day (from, to) in which only quiet_except is told; None = never quiet."""

    kinds: frozenset[Kind] = frozenset(Kind)
    quiet: tuple[int, int] | None = None
    quiet_except: frozenset[Kind] = frozenset()
    repeat_s: float = 60.0  # the same key is not told again within this time


def parse_kinds(names: Sequence[str], key: str) -> frozenset[Kind]:
    """Kinds from words; "all" is every one. Raises ValueError naming the known ones."""
    found: set[Kind] = set()
    for name in names:
        if name == "all":
            found |= set(Kind)
            continue
        try:
            found.add(Kind(name))
        except ValueError:
            raise ValueError(f"{key}: {name!r} is unknown; known: all, {', '.join(Kind)}") from None
    return frozenset(found)


def parse_quiet(text: str) -> tuple[int, int] | None:
    """ "22:00-07:00" as minutes of the day; "" is None. Raises ValueError."""
    if not text.strip():
        return None
    m = re.fullmatch(r"\s*(\d{1,2}):(\d\d)\s*-\s*(\d{1,2}):(\d\d)\s*", text)
    if not m or int(m[1]) > 23 or int(m[3]) > 23 or int(m[2]) > 59 or int(m[4]) > 59:
        raise ValueError(f"quiet: {text!r} is no span of hours; write 22:00-07:00")
    return int(m[1]) * 60 + int(m[2]), int(m[3]) * 60 + int(m[4])


def is_quiet(quiet: tuple[int, int] | None, minute: int) -> bool:
    """Whether a minute of the day (0..1439) lies in the span, which may go over midnight. Equal ends: never."""
    if quiet is None or quiet[0] == quiet[1]:
        return False
    start, end = quiet
    return start <= minute < end if start < end else minute >= start or minute < end


class Filter:
    """Lets through what the rules allow; remembers what was told."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._told: dict[str, float] = {}

    def allow(self, notes: Iterable[Note], minute: int) -> list[Note]:
        """minute: of the day, in the user's time zone."""
        out: list[Note] = []
        for note in notes:
            if note.kind not in self._rules.kinds:
                continue
            if is_quiet(self._rules.quiet, minute) and note.kind not in self._rules.quiet_except:
                continue
            last = self._told.get(note.key)
            if last is not None and 0 <= note.at_s - last < self._rules.repeat_s:
                continue
            self._told[note.key] = note.at_s
            out.append(note)
        if len(self._told) > 1000:
            self._told = dict(sorted(self._told.items(), key=lambda kv: kv[1])[-500:])
        return out


def note_of_job(job: Job, now_s: float) -> Note | None:
    """What to tell of an ended job; None when there is nothing (a skipped one)."""
    if not job.state.is_final or job.state is JobState.SKIPPED:
        return None
    good = job.state in (JobState.SUCCEEDED, JobState.STOPPED)
    took = duration(job.took_s)
    text = plain(f"{job.spec.title}: {job.reason}" + (f", {took}" if took else ""))
    return Note(
        Kind.JOB_ENDED if good else Kind.JOB_FAILED,
        f"{job.spec.stage} {job.state}",
        text,
        job.ended_s or now_s,
        f"job {job.spec.id}",
        job.spec.id,
    )


def is_worse(row: BenchRow, baseline: BenchRow, tolerance: float = 0.05) -> str:
    """Why a row is worse than its baseline by more than the tolerance, in words; "" when it is not."""
    found: list[str] = []
    more = (("output_throughput", "tok/s"), ("tok_s_user", "tok/s/user"), ("accept_length", "accept length"))
    less = (("ttft_p50_ms", "TTFT p50 ms"), ("tpot_p50_ms", "TPOT p50 ms"), ("itl_p99_ms", "ITL p99 ms"))
    for name, words in more:
        now, then = getattr(row, name), getattr(baseline, name)
        if now is not None and then and now < then * (1 - tolerance):
            found.append(f"{words} {now:.4g} instead of {then:.4g}")
    for name, words in less:
        now, then = getattr(row, name), getattr(baseline, name)
        if now is not None and then and now > then * (1 + 2 * tolerance):
            found.append(f"{words} {now:.4g} instead of {then:.4g}")
    return "; ".join(found)


def baseline_of(row: BenchRow, rows: Iterable[BenchRow]) -> BenchRow | None:
    """The baseline row that a row is compared with: same workload, load and model."""

    def load(r: BenchRow) -> tuple[object, ...]:
        return r.workload, r.concurrency, r.request_rate, r.model

    return next((r for r in rows if r.is_baseline and r.run_id != row.run_id and load(r) == load(row)), None)


_SERVER_KINDS: Mapping[str, Kind] = {
    "ready": Kind.READY,
    "stalled": Kind.STALLED,
    "failed": Kind.FAILED,
}


def notes_between(before: Snapshot | None, after: Snapshot) -> list[Note]:
    """What happened between two looks. Without an earlier one nothing is news."""
    if before is None:
        return []
    notes: list[Note] = []
    now = after.taken_s
    states = {s.key: s.load.state for s in before.servers}
    for server in after.servers:
        kind = _SERVER_KINDS.get(server.load.state)
        if kind is not None and server.key in states and states[server.key] is not server.load.state:
            text = server.load.verdict or str(server.load.state)
            if server.load.hint and kind is not Kind.READY:
                text += f" ({server.load.hint})"
            notes.append(
                Note(
                    kind,
                    f"{server.title} {server.load.state}",
                    plain(text),
                    now,
                    f"server {server.key} {kind}",
                    server.job.spec.id if server.job else "",
                )
            )
    jobs = {j.spec.id: j for j in before.jobs}
    for job in after.jobs:
        then = jobs.get(job.spec.id)
        if job.state.is_final and then is not None and not then.state.is_final:
            note = note_of_job(job, now)
            if note is not None:
                notes.append(note)
    known = {r.run_id for r in before.bench}
    for row in after.bench:
        if row.run_id in known or row.is_partial:
            continue
        baseline = baseline_of(row, after.bench)
        why = is_worse(row, baseline) if baseline is not None else ""
        if why:
            notes.append(
                Note(
                    Kind.BENCH_WORSE,
                    f"benchmark {row.label or row.run_id} is worse than its baseline",
                    plain(why),
                    now,
                    f"bench {row.run_id}",
                    row.job_id,
                )
            )
    return notes


# ---- the terminal's own languages


def terminal_code(note: Note, env: Mapping[str, str]) -> str:
    """The escape code that makes this terminal show a notification; "" when it is not known to have one.

    OSC 99 (kitty), OSC 777 (foot, WezTerm, Ghostty, rxvt-unicode), OSC 9 (iTerm2, Windows Terminal's cousins); through tmux by
    its passthrough, which tmux drops unless `allow-passthrough` is on.
    """
    term, program = env.get("TERM", ""), env.get("TERM_PROGRAM", "")
    title, body = _safe(note.title), _safe(note.text)
    if term == "dumb":
        return ""
    if env.get("KITTY_WINDOW_ID") or "kitty" in term:
        code = f"\x1b]99;i=k2tui:d=0;{title}\x1b\\\x1b]99;i=k2tui:p=body;{body}\x1b\\"
    elif program in ("WezTerm", "ghostty") or term.startswith(("foot", "rxvt-unicode", "xterm-ghostty")):
        code = f"\x1b]777;notify;{title};{body}\x1b\\"
    elif program == "iTerm.app" or env.get("LC_TERMINAL") == "iTerm2" or env.get("ConEmuPID"):
        code = f"\x1b]9;{title}: {body}\x1b\\"
    else:
        return ""
    if env.get("TMUX"):
        return "\x1bPtmux;" + code.replace("\x1b", "\x1b\x1b") + "\x1b\\"
    return code


def _safe(text: str) -> str:
    return plain(text).replace(";", ",")[:200]


def fill_command(command: Sequence[str], note: Note) -> list[str]:
    """The user's command with {kind}, {title}, {text} and {job} put in; other braces stay."""
    facts = {"kind": str(note.kind), "title": plain(note.title), "text": plain(note.text), "job": note.job_id}
    return [re.sub(r"\{(kind|title|text|job)\}", lambda m: facts[m[1]], word) for word in command]
