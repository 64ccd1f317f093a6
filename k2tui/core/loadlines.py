"""Bytes of a log -> clean lines: cuts them, takes off what containers, clusters and terminals wrap around them.

Knows no engine. Law: how the bytes were sliced on their way here changes nothing.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby, pairwise
from typing import NamedTuple

from k2tui.core.patterns import Pattern, whole

HEAD_B = 64 * 1024  # of a line longer than both, the middle is dropped: a megabyte-long line costs 128 KiB
TAIL_B = 64 * 1024


class Line(NamedTuple):
    """One piece of text between two carriage returns, newlines or in-line stamps.

    no: number of the physical line, 1-based. raw: as written, without escape codes. text: without wrappers.
    body: without stamp, rank and process prefix as well. at_s: its own stamp, Unix seconds. rank: "TP0", "DP0 TP1", "".
    source: the name that a wrapper gave ("sglang-1", a pod), "". level: "ERROR" ... when the line says so.
    """

    no: int
    raw: str
    text: str
    body: str
    at_s: float | None = None
    rank: str = ""
    source: str = ""
    level: str = ""
    wrap_s: float | None = None  # the wrapper's stamp; its time zone may be another one
    process: str = ""  # "EngineCore_DP0", "Worker_TP0", "APIServer"
    turned: int | None = None  # place in time, when the text ran backwards
    node: str = ""  # the host that a wrapper named (Ray's ip=, a journal's host)

    @property
    def order(self) -> int:
        """Place in time: line numbers, unless the text ran backwards."""
        return self.no if self.turned is None else self.turned


_ANSI = Pattern(
    r"\x1b\[[0-9;:?<=>!]*[ -/]*[@-~]|\x1b\][^\x07\x1b]{0,4096}(?:\x07|\x1b\\)|\x1b[PX^_][^\x1b]{0,4096}\x1b\\|\x1b[ -/]*[0-~]"
)
# colour codes whose escape byte was eaten by a copy and paste
_ANSI_BALD = Pattern(r"\[[0-9]{1,3}(?:;[0-9]{1,3})*m(?=\S|\s|$)")
_BLANKS = "\t\xa0\u2002\u2003\u2009\u202f\u3000"
_CUT = Pattern(
    r"(?<=[^\s(\[<'\"=])(?=\[20\d\d-\d\d-\d\d \d\d:\d\d:\d\d)|(?<=\])(?= ?\[20\d\d-\d\d-\d\d \d\d:\d\d:\d\d)"
)
_INNER = Pattern(r"\[20\d\d-\d\d-\d\d \d\d:\d\d:\d\d")  # what every match of _CUT stands before: found faster
_ISO = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?"

_WRAPPERS: tuple[tuple[str, Pattern], ...] = (
    ("cri", Pattern(rf"(?P<stamp>{_ISO}) (?:stdout|stderr) (?P<flag>[FP])(?:[:\w]*)(?: |$)")),
    ("json", Pattern(r'\{"(?:log|message|msg)":\s*"(?P<json>(?:[^"\\]|\\.)*)"')),
    (
        "journal",
        Pattern(
            r"(?P<stamp>[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d+)?|"
            + _ISO
            + r") (?P<node>[\w.-]+) (?:(?P<name>[\w.@:/-]{1,80}?)\[\d+\]|kernel): ?"
        ),
    ),
    ("compose", Pattern(r"(?P<name>[A-Za-z][\w.-]{0,80}?) +\| ?(?!\s*\d+/\d+ \[)")),
    ("bracket", Pattern(r"\[[A-Za-z][\w.-]{0,80}?\] +\| ?(?!\s*\d+/\d+ \[)")),
    ("pod", Pattern(r"\[pod/(?P<name>[\w./-]+)\] ")),
    (
        "ray",
        Pattern(
            r"\((?P<name>(?!APIServer|EngineCore|Worker|VllmWorker|StageEngine|DPCoordinator|Process)[A-Za-z_][\w.:]*) (?:pid|PID)=\d+(?:, ip=(?P<node>[\w.:]+))?\)\s?"
        ),
    ),
    ("iso", Pattern(rf"\[?(?P<stamp>{_ISO})\]?\s(?=\S*\[|\(|[A-Z]+ |\S+ >> |\S+ +\|)")),
    ("job", Pattern(r"(?P<name>[\w.-]{1,120}) >> ")),
    (
        "tag",
        Pattern(
            r"\[(?P<name>(?:SGLang LOG|[\w]+(?:-(?:master|worker|head|node))+(?:-\d+)?|default\d+|\d{1,3}))\]:? ?(?=\S)"
        ),
    ),
    ("slurm", Pattern(r"(?P<name>\d{1,4}): (?=\S| )")),
    # docker's plain --timestamps: an ISO stamp before anything
    (
        "docker",
        Pattern(r"(?P<stamp>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d{3,9})?(?:Z|[+-]\d\d:?\d\d))(?: |$)"),
    ),
    ("rankmark", Pattern(r"\[rank(?P<rank>\d+)\]: ?(?!\[)")),
)
_NAMED = ("compose", "pod", "journal")
_NEEDS = {
    "cri": " std",
    "compose": "|",
    "bracket": "|",
    "pod": "[pod/",
    "ray": "=",
    "job": " >> ",
    "rankmark": "[rank",
}


def _may_begin(first: str) -> tuple[tuple[str, Pattern, str], ...]:
    """The wrappers that a text with this first character may have, in order, and what each of them must hold."""
    if not first.isascii():
        names = {name for name, _ in _WRAPPERS}
    elif first.isdigit():
        names = {"cri", "journal", "iso", "job", "slurm", "docker"}
    elif first.isalpha():
        names = {"compose", "job", "journal"} if first.isupper() else {"compose", "job"}
    else:
        other = {"{": {"json"}, "[": {"bracket", "pod", "iso", "tag", "rankmark"}, "(": {"ray"}}
        names = {"job"} if first in "_.-" else other.get(first, set[str]())
    return tuple((name, pattern, _NEEDS.get(name, "")) for name, pattern in _WRAPPERS if name in names)


_BEGIN = {chr(code): _may_begin(chr(code)) for code in range(128)}
_ANY = _may_begin("\ufffd")
_JSON_TIME = Pattern(r'"(?:time|timestamp|ts|@timestamp)":\s*"([^"]+)"')
_OUTER_STAMP = Pattern(rf"\[(?P<stamp>{_ISO})\]\s(?=\[20|\(\w+ pid|\S+ >> |\S+ +\|)")
_ESCAPED = Pattern(r"\\(?:u([0-9a-fA-F]{4})|(.))")

_STAMP = Pattern(
    r"\s*\[(?:(?P<date>\d{4}-\d\d-\d\d) )?(?P<clock>\d\d:\d\d:\d\d)(?:[.,](?P<ms>\d{1,6}))?(?P<rank>(?: [A-Z_]+\d+)*)(?: (?P<file>\S+))?\] ?"
)
# Python's logging, log viewers: 2026-11-29 18:06:22,123 and the like at the beginning
_PLAIN_STAMP = Pattern(
    r"\s*(?P<date>\d{4}[-/]\d\d[-/]\d\d)[ T](?P<clock>\d\d:\d\d:\d\d)(?:[.,](?P<ms>\d{1,6}))?(?= |$)"
)
_VLLM = Pattern(
    r"\s*(?:\((?P<proc>[\w :]+?)(?: pid=(?P<pid>\d+))?\) ?)?(?:(?P<level>INFO|WARNING|ERROR|DEBUG|CRITICAL) (?P<month>\d\d)-(?P<day>\d\d) "
    r"(?P<clock>\d\d:\d\d:\d\d)(?:\.\d+)? \[?[\w./-]+:\d+\] ?)?"
)
_LEVEL = Pattern(r"\s*(INFO|WARNING|WARN|ERROR|DEBUG|CRITICAL|FATAL)\b:?")
_RAY_REPEAT = Pattern(r"\s*\[repeated \d+x across cluster\].*$")


def _unescape(match: re.Match[str]) -> str:
    if match[1]:
        code = int(match[1], 16)
        return chr(code) if not 0xD800 <= code <= 0xDFFF else "\ufffd"
    return {"n": "\n", "t": "\t", "r": "\r"}.get(match[2], match[2])


def clean(text: str) -> str:
    """Without escape codes and control characters (a tab becomes a blank). Safe to show in a terminal."""
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    if "m" in text and "[" in text:
        text = _ANSI_BALD.sub("", text)
    if text.isprintable():
        return text
    return text.translate(_SHOWN)


class _Shown(dict[int, int | None]):
    """What a character becomes on the screen: itself, a blank, or nothing."""

    def __missing__(self, code: int) -> int | None:
        shown = code if chr(code).isprintable() else ord(" ") if chr(code) in _BLANKS else None
        if len(self) < 70_000:
            self[code] = shown
        return shown


_SHOWN = _Shown()


_POLL = Pattern(
    r'"GET /(?:health(?:_generate)?|(?:get_)?model_info|(?:get_)?server_info|get_load|v1/loads|v1/models|version|metrics)'
    r'(?:\?\S*)? HTTP/[\d.]+" (?:200|404)\b'
)


def is_poll(text: str) -> bool:
    """Is it the trace of somebody's look at the server (k2tui's own, a probe, a scraper), answered as usual?"""
    return "GET /" in text and _POLL.search(text) is not None


class _Clock:
    """Stamps -> Unix seconds, in the machine's time zone; mktime once a minute of log time, not once a line."""

    def __init__(self) -> None:
        self._minutes: dict[str, float] = {}

    def at(self, date: str, clock: str, ms: str | None = None) -> float | None:
        key = f"{date} {clock[:5]}"
        base = self._minutes.get(key)
        if base is None:
            try:
                base = time.mktime(
                    (
                        int(date[:4]),
                        int(date[5:7]),
                        int(date[8:10]),
                        int(clock[:2]),
                        int(clock[3:5]),
                        0,
                        0,
                        0,
                        -1,
                    )
                )
            except (ValueError, OverflowError):
                return None
            if len(self._minutes) > 512:
                self._minutes.clear()
            self._minutes[key] = base
        return base + int(clock[6:8]) + (int(ms.ljust(6, "0")[:6]) / 1e6 if ms else 0.0)


_clock = _Clock()
_TODAY = Pattern(r"(\d{4})-(\d\d)-(\d\d)")


@dataclass(slots=True)
class _Wrap:
    """What the wrappers said: name of the container, pod or unit; rank; CRI flag "F" | "P" | ""; stamp as written."""

    text: str
    source: str = ""
    rank: str = ""
    flag: str = ""
    stamp: str = ""
    node: str = ""
    inner: str = ""  # the text right behind a layer that quotes or splits lines (CRI, docker's JSON)


def unwrap(text: str) -> _Wrap:
    """Take off every wrapper, outermost first (at most 5)."""
    wrap = _Wrap(text)
    _peel(wrap)
    return wrap


def _peel(wrap: _Wrap) -> None:
    text = wrap.text
    for _ in range(5):
        if text[:3] == "[20" and text[5:6] == "-" and text[11:12] == " ":
            # SGLang's own stamp, unless another stamp or a job's name follows
            match = _OUTER_STAMP.match(text)
            if match is None:
                break
            wrap.stamp = wrap.stamp or match["stamp"]
            text = text[match.end() :]
            continue
        for name, pattern, needed in _BEGIN.get(text[:1], _ANY) if text else ():
            if needed not in text or (match := pattern.match(text)) is None:
                continue
            groups = match.groupdict()
            if name == "json":
                rest = text[match.end() :]
                text = clean(_ESCAPED.sub(_unescape, groups["json"] or "").rstrip("\r\n"))
                wrap.inner = text
                told = _JSON_TIME.search(rest)
                wrap.stamp = wrap.stamp or (told[1] if told else "")
                break
            if name in _NAMED:
                wrap.source = groups.get("name") or wrap.source
            wrap.flag = groups.get("flag") or wrap.flag
            wrap.stamp = wrap.stamp or groups.get("stamp") or ""
            wrap.node = groups.get("node") or wrap.node
            if groups.get("rank"):
                wrap.rank = f"TP{groups['rank']}"
            text = text[match.end() :]
            if name == "cri":
                wrap.inner = text
            break
        else:
            break
    wrap.text = text


def parse(no: int, raw: str, year: int = 1970, joined: str | None = None) -> Line:
    """One clean text -> Line. year: for stamps that have none. joined: the text when it was put together from parts."""
    wrap = unwrap(raw if joined is None else joined)
    text, rank = wrap.text, wrap.rank
    if text.endswith("across cluster]"):
        text = _RAY_REPEAT.sub("", text)
    wrap_s = _wrapper_s(wrap.stamp, year) if wrap.stamp else None
    at_s: float | None = None
    level = process = ""
    body = text
    match = _STAMP.match(text)
    if match:
        if match["date"]:
            at_s = _clock.at(match["date"], match["clock"], match["ms"])
        rank = (match["rank"] or "").strip() or rank
        body = text[match.end() :]
    else:
        plain = _PLAIN_STAMP.match(text) if text[:5].strip()[:2] == "20" else None
        if plain:
            at_s = _clock.at(plain["date"].replace("/", "-"), plain["clock"], plain["ms"])
        match = _VLLM.match(text)
        if match and match.end() > len(text) - len(text.lstrip()):
            process = match["proc"] or ""
            level = match["level"] or ""
            if match["clock"]:
                at_s = _clock.at(f"{year:04d}-{match['month']}-{match['day']}", match["clock"])
            body = text[match.end() :]
            tags = re.findall(r"(?:DP|PP|TP|EP)\d+", process)
            rank = " ".join(tags) or rank
    if not level:
        word = _LEVEL.match(body)
        if word:
            level = "WARNING" if word[1] == "WARN" else word[1]
    if joined is not None:
        raw = joined
    elif wrap.inner and not wrap.flag:
        raw = wrap.inner
    return Line(no, raw, text, body, at_s, rank, wrap.source, level, wrap_s, process, node=wrap.node)


_MONTHS = {
    name: n
    for n, name in enumerate(
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"], 1
    )
}


def _wrapper_s(stamp: str, year: int) -> float | None:
    """ISO with or without zone, or syslog's "Nov 29 18:06:22" -> Unix seconds."""
    if stamp[0].isdigit():
        try:
            return datetime.fromisoformat(stamp.replace(",", ".")).timestamp()
        except (ValueError, OverflowError):
            return None
    month = _MONTHS.get(stamp[:3])
    return _clock.at(f"{year:04d}-{month:02d}-{stamp[4:6].strip():0>2}", stamp[7:15]) if month else None


class LineCutter:
    """feed(bytes) yields the physical lines' pieces; the unfinished rest is kept, at most HEAD_B + TAIL_B of it."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._tail = bytearray()
        self._dropped = 0
        self.line_no = 1  # number of the physical line that the next byte belongs to

    def feed(self, data: bytes) -> Iterable[tuple[int, bytes]]:
        """(line number, piece) for every piece that is complete: ended by a carriage return or a newline; some are empty."""
        last = max(data.rfind(b"\n"), data.rfind(b"\r"))
        if last < 0:
            self._keep(data)
            return ()
        if b"\r" in data:
            return self._feed_returns(data, last)
        lines = data.split(b"\n")
        rest = lines.pop()
        if self._head:
            lines[0] = next((piece for _, piece in self._out(lines[0])), b"")
        first = self.line_no
        self.line_no += len(lines)
        if max(map(len, lines)) > HEAD_B + TAIL_B:
            lines = [n if len(n) <= HEAD_B + TAIL_B else n[:HEAD_B] + b" ... " + n[-TAIL_B:] for n in lines]
        self._keep(rest)
        return enumerate(lines, first)

    def _feed_returns(self, data: bytes, last: int) -> list[tuple[int, bytes]]:
        out: list[tuple[int, bytes]] = []
        longest = HEAD_B + TAIL_B
        lines = data[: last + 1].split(b"\n")
        tail = lines.pop()
        for line in lines:
            if b"\r" in line:
                for piece in line.split(b"\r"):
                    out.extend(self._out(piece))
            elif self._head or len(line) > longest:
                out.extend(self._out(line))
            elif line:
                out.append((self.line_no, line))
            self.line_no += 1
        if b"\r" in tail:
            *pieces, tail = tail.split(b"\r")
            for piece in pieces:
                out.extend(self._out(piece))
        self._keep(tail)
        self._keep(data[last + 1 :])
        return out

    def _out(self, piece: bytes) -> Iterator[tuple[int, bytes]]:
        if self._head:
            self._keep(piece)
            piece = self.pending()
            self._head.clear()
            self._tail.clear()
            self._dropped = 0
        elif len(piece) > HEAD_B + TAIL_B:
            piece = piece[:HEAD_B] + b" ... " + piece[-TAIL_B:]
        if piece:
            yield self.line_no, piece

    def _keep(self, data: bytes) -> None:
        if not data:
            return
        room = HEAD_B - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail += data
            if len(self._tail) > TAIL_B:
                self._dropped += len(self._tail) - TAIL_B
                del self._tail[:-TAIL_B]

    @property
    def is_open(self) -> bool:
        """Is a piece unfinished?"""
        return bool(self._head)

    def pending(self) -> bytes:
        """The unfinished piece as it stands."""
        if not self._tail:
            return bytes(self._head)
        return bytes(self._head) + (b" ... " if self._dropped else b"") + bytes(self._tail)


def cut_stamps(text: str) -> list[str]:
    """Cut before every in-line `[YYYY-MM-DD hh:mm:ss`: a bar without a newline and the next line share one piece."""
    if text.find("[20", 1) < 0 or not _INNER.search(text, 1):
        return [text]
    parts = _CUT.split(text)
    return [p for p in parts if p.strip()] or [text]


def read_lines(data: bytes, year: int = 1970) -> list[Line]:
    """Every line of a whole text, CRI parts joined. For texts of a few MiB; streams use LoadTracker."""
    cutter = LineCutter()
    reader = LineReader(year)
    out: list[Line] = []
    for no, piece in cutter.feed(data):
        out.extend(reader.read(no, piece))
    if rest := cutter.pending():
        out.extend(reader.read(cutter.line_no, rest))
    out.extend(reader.flush())
    return out


class LineReader:
    """Pieces -> Lines; joins the parts of lines that the container runtime split (CRI flag P)."""

    def __init__(self, year: int = 1970) -> None:
        self.year = year
        self._parts: list[str] = []
        self._part_no = 0
        self._part_chars = 0

    @property
    def is_joining(self) -> bool:
        """Does it wait for the rest of a split line?"""
        return bool(self._parts)

    def read(self, no: int, piece: bytes) -> list[Line]:
        text = piece.decode("utf-8", "replace")
        if text.count("\ufffd") * 4 > len(text):
            return []  # binary: no line of a log, whatever words it may hold
        raw = clean(text)
        if not raw or raw.isspace():
            return []
        if " P " in raw[:60] or (self._parts and " F " in raw[:60]):
            wrap = unwrap(raw)
            if wrap.flag == "P":
                if not self._parts:
                    self._part_no = no
                if self._part_chars < HEAD_B + TAIL_B:
                    self._parts.append(wrap.inner)
                    self._part_chars += len(wrap.inner)
                return []
            if wrap.flag == "F" and self._parts:
                self._parts.append(wrap.inner)
                return self.flush()
        if raw.find("[20", 1) > 0:
            inner = unwrap(raw).text
            parts = cut_stamps(inner)
            if len(parts) > 1:
                prefix = raw[: len(raw) - len(inner)] if raw.endswith(inner) else ""
                return [parse(no, prefix + part, self.year) for part in parts]
        return [parse(no, raw, self.year)]

    def flush(self) -> list[Line]:
        if not self._parts:
            return []
        whole = "".join(self._parts)
        number = self._part_no
        self._parts, self._part_chars = [], 0
        return [parse(number, part, self.year, joined=part) for part in cut_stamps(whole)]


def is_newest_first(lines: list[Line]) -> bool:
    """Does the text run backwards, as exports of log viewers do? One process's stamps, bars and traces vote; a wrapper's
    own stamps only when nothing inside tells."""
    forward = backward = 0
    newest: dict[str, float] = {}
    bars: dict[str, tuple[int, int]] = {}
    step, step_no = -1, 0
    for line in lines:
        if line.at_s is not None:
            # stamps without a year are compared among themselves; ranks may be a second apart, one process is not
            key = f"{line.rank} {line.process} {line.text[:1] == '['} {bool(line.level)}"
            if key in newest:
                forward += line.at_s > newest[key]
                backward += line.at_s < newest[key]
            newest[key] = line.at_s
        bar = _PERCENT.search(line.body)
        if bar:
            done, (before, no) = whole(bar[1]), bars.get(bar[2], (0, -1))
            if no not in (-1, line.no):  # refreshes inside one physical line always run forward
                forward += done > before
                backward += done < before
            bars[bar[2]] = (done, line.no)
        for place, mark in enumerate(_MILESTONES):
            if mark in line.body:
                if step >= 0 and line.no != step_no:
                    forward += place > step
                    backward += place < step
                step, step_no = place, line.no
                break
    for one, two in pairwise(lines):
        if "Traceback (most recent call last)" in one.body and two.body.lstrip().startswith('File "'):
            forward += 3
        elif "Traceback (most recent call last)" in two.body and one.body.lstrip().startswith('File "'):
            backward += 3
        elif (
            _RAISED.match(one.body)
            and two.body.startswith("    ")
            and not two.body.lstrip().startswith("File")
        ):
            backward += 2
    if not forward and not backward:
        stamps = [n.wrap_s for n in lines if n.wrap_s is not None]
        forward = sum(b > a for a, b in pairwise(stamps))
        backward = sum(b < a for a, b in pairwise(stamps))
    return backward >= 1 and backward > 2 * forward


# what a start prints in this order, at most once a rank
_MILESTONES = (
    "server_args=",
    "Starting vLLM API server",
    "distributed begin.",
    "is using nccl",
    "Init COMPLETE",
    "llreduce is disabled because",
    "Load weight begin",
    "Load weight end",
    "KV Cache is allocated",
    "Memory pool end",
    "graph begin",
    "graph end",
    "Application startup complete",
    "Uvicorn running on",
    "HTTP/1.1",
    "hit an exception",
    "eceived sigquit from",
)
_RAISED = Pattern(r"^[A-Za-z_][\w.]*(?:Error|Exception)\b")
_PERCENT = Pattern(r"\b(\d+)/(\d+) \[")


def turn(lines: list[Line]) -> list[Line]:
    """Newest-first lines in the order of time. Pieces of one physical line (a bar's refreshes) keep theirs."""
    out: list[Line] = []
    for _, group in groupby(reversed(lines), key=lambda n: n.no):
        out.extend(reversed(list(group)))
    return [line._replace(turned=place) for place, line in enumerate(out, 1)]
