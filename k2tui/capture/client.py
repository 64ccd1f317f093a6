"""The extracting side: hands samples to servers that capture, and believes only what it sees on disk. Standard library only.

One thread a connection sends; one thread looks at the servers' status once a second, books what is published, takes back what a
lost server had, pauses when a disk runs full. Killed at any moment, it goes on from the shards that are there.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from k2tui.capture.control import ROUTE
from k2tui.capture.lease import LeaseTable
from k2tui.capture.request import CaptureRequest, spans_of
from k2tui.errors import K2Error, NotReadyError


class Connection:
    """Keep-alive JSON over HTTP to one server; one thread's own. Errors are OSError or K2Error."""

    def __init__(self, url: str, timeout_s: float = 600.0, headers: Mapping[str, str] | None = None) -> None:
        parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise K2Error(f"not a server address: {url!r}", "give it as http://127.0.0.1:30000")
        self.url = url
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._conn = kind(parts.hostname, parts.port, timeout=timeout_s)
        self._base = parts.path.rstrip("/")
        self._headers = {"Content-Type": "application/json", **(headers or {})}

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Parsed JSON of a 200; K2Error with the server's own words for other codes."""
        raw = None if body is None else json.dumps(body)
        try:
            answer, data = self._once(method, path, raw)
        except (http.client.RemoteDisconnected, BrokenPipeError, http.client.CannotSendRequest):
            # a kept connection that the server has closed meanwhile: once more on a new one
            self._conn.close()
            try:
                answer, data = self._once(method, path, raw)
            except http.client.HTTPException as err:
                self._conn.close()
                raise OSError(str(err) or type(err).__name__) from None
        except http.client.HTTPException as err:
            self._conn.close()
            raise OSError(str(err) or type(err).__name__) from None
        except OSError:
            self._conn.close()
            raise
        if answer.status != 200:
            try:
                told = json.loads(data)
                message = told.get("error") or told.get("message") or told
                message = message.get("message", message) if isinstance(message, dict) else message
                hint = str(told.get("hint", ""))
            except (ValueError, AttributeError, RecursionError):
                message, hint = data[:200].decode(errors="replace"), ""
            raise K2Error(f"{self.url}{path}: HTTP {answer.status}: {message}", hint)
        try:
            return json.loads(data) if data.strip() else {}
        except (ValueError, RecursionError):
            raise K2Error(f"{self.url}{path}: the answer is not JSON") from None

    def ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """`call` where the answer must be a JSON object; K2Error otherwise."""
        found = self.call(method, path, body)
        if not isinstance(found, dict):
            raise K2Error(
                f"{self.url}{path}: the answer is no JSON object, but {type(found).__name__}",
                "is this an SGLang server?",
            )
        return cast("dict[str, Any]", found)

    def _once(self, method: str, path: str, raw: str | None) -> tuple[http.client.HTTPResponse, bytes]:
        self._conn.request(method, self._base + path, raw, self._headers)
        answer = self._conn.getresponse()
        return answer, answer.read()

    def close(self) -> None:
        self._conn.close()


def capture_status(
    url: str, run: str = "", cursor: int = 0, epoch: str = "", timeout_s: float = 15.0
) -> dict[str, Any]:
    """The server's capture status. NotReadyError when nothing answers or the server captures nothing."""
    conn = Connection(url, timeout_s)
    query = urllib.parse.urlencode({"run": run, "cursor": cursor, "epoch": epoch})
    try:
        return conn.call("GET", f"{ROUTE}?{query}")
    except OSError as err:
        raise NotReadyError(f"{url}: no answer ({err})", "start the server, or check the address")
    except K2Error as err:
        if "HTTP 404" in err.message:
            raise NotReadyError(
                f"{url}: this server does not capture hidden states",
                "start it with K2TUI_CAPTURE_DIR set and the plug-in installed (docs/capture.md), or let k2tui extract start it",
            )
        raise
    finally:
        conn.close()


@dataclass
class ServerState:
    """What is known of one server. writer: identity of its writing processes; a new one means that it was restarted."""

    url: str
    cursor: int = 0
    epoch: str = ""
    writer: tuple[int, ...] = ()
    alive: bool = True
    gone_since_s: float = 0.0
    free_b: int = 0
    paused: str = ""
    bytes: int = 0
    write_s: float = 0.0
    hash_s: float = 0.0
    stall_s: float = 0.0
    threads: int = 1
    pending_b: int = 0
    folder: str = ""
    last_error: str = ""


@dataclass(frozen=True, slots=True)
class Speed:
    """One look at the whole. tokens_s: prefilled a second; bytes_s: written a second, all servers.

    limit: what the servers wait for: "prefill" (nothing holds them up), else "disk" when the writers spend most of their time in
    writing, "copy" when it goes into getting rows there and into checksums.
    """

    done: int
    total: int
    failed: int
    tokens_s: float
    bytes_s: float
    limit: str
    eta_s: float | None
    paused: str
    servers: int


@dataclass
class Extraction:
    """One run over one or more servers. `row(i)` gives (input_ids, loss_mask) of data-file line i.

    concurrency: requests at once, a server. min_free_b: below it, a server gets no new work. on_speed: called once a second.
    """

    run: str
    servers: Sequence[str]
    row: Callable[[int], tuple[Sequence[int], Sequence[int]]]
    lengths: Sequence[int]
    table: LeaseTable
    concurrency: int = 32
    min_free_b: int = 4 << 30
    on_speed: Callable[[Speed], None] | None = None
    lost_after_s: float = 30.0
    give_up_s: float = 600.0
    publish_within_s: float = 60.0
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    stop: threading.Event = field(default_factory=threading.Event)
    ended: Callable[[], str] = str  # not "": no server will come back, for this reason

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._states = {url: ServerState(url) for url in self.servers}
        self._tokens = 0
        self._tick = (time.monotonic(), 0, 0, 0.0, 0.0, 0.0)
        self._nonce = uuid.uuid4().hex[:6]
        self._error: K2Error | None = None
        self.reasons: dict[int, str] = {}

    def execute(self) -> None:
        """Until every sample is on disk or has failed. Raises K2Error when no server is left for `give_up_s`."""
        for state in self._states.values():
            self._look(state, first=True)
        threads = [
            threading.Thread(target=self._send_loop, args=(url, n), name=f"extract-{n}", daemon=True)
            for url in self.servers
            for n in range(self.concurrency)
        ]
        for thread in threads:
            thread.start()
        try:
            flushed_s = 0.0
            while not self.stop.is_set():
                time.sleep(0.25 if self.table.left < 64 else 1.0)
                for state in self._states.values():
                    self._look(state)
                now = time.monotonic()
                with self._lock:
                    self.table.expire(now)
                    only_sent = not self.table.waiting and not self.table.leased
                    left = self.table.left
                if left == 0:
                    break
                if only_sent and now - flushed_s > 2.0:
                    flushed_s = now
                    self._flush()
                if only_sent:
                    self._take_back_overdue(now)
                self._report(now)
                self._give_up_if_alone(now)
                if self._error:
                    raise self._error
            self._report(time.monotonic())
        finally:
            self.stop.set()
            for thread in threads:
                thread.join(5)

    # ---- sending

    def _send_loop(self, url: str, number: int) -> None:
        conn = Connection(url, headers=self.headers)
        state = self._states[url]
        worker = url
        while not self.stop.is_set():
            if not state.alive or state.paused or (0 < state.free_b < self.min_free_b):
                self.stop.wait(0.5)
                continue
            with self._lock:
                leased = self.table.take(worker, 1, time.monotonic())
            if not leased:
                self.stop.wait(0.2)
                continue
            index = leased[0]
            try:
                ids, mask = self.row(index)
                rid = CaptureRequest(
                    self.run,
                    index,
                    len(ids),
                    spans_of(mask),
                    f"{self._nonce}{self.table.tries.get(index, 0)}",
                ).to_rid()
                body = {
                    "input_ids": list(ids),
                    "rid": rid,
                    "sampling_params": {"max_new_tokens": 1, "temperature": 0},
                }
                conn.call("POST", "/generate", body)
                with self._lock:
                    self.table.answered(index, worker, time.monotonic())
                    self._tokens += len(ids)
            except OSError as err:
                with self._lock:
                    self.table.give_back(index, str(err), counts=False)
                    self._mark_gone(state, str(err))
                self.stop.wait(0.5)
            except K2Error as err:
                with self._lock:
                    self.reasons[index] = err.message
                    self.table.give_back(index, err.message)
                self.stop.wait(0.1)
            except Exception as err:  # a row that cannot be read ends the run, with its name
                self._error = (
                    err
                    if isinstance(err, K2Error)
                    else K2Error(f"sample {index}: {type(err).__name__}: {err}")
                )
                return
        conn.close()

    # ---- looking

    def _look(self, state: ServerState, first: bool = False) -> None:
        try:
            told = capture_status(state.url, self.run, state.cursor, state.epoch)
        except NotReadyError as err:
            if first:
                raise
            with self._lock:
                self._mark_gone(state, err.message)
            return
        except K2Error as err:
            state.last_error = err.message
            return
        with self._lock:
            pids = tuple(sorted(w["pid"] for w in told["writers"]))
            if state.writer and pids != state.writer:
                self.table.lose(state.url, "the server was restarted")
            state.writer, state.free_b, state.epoch = pids, told["free_b"], told["epoch"]
            if not pids:
                self._mark_gone(state, "no capture writer is alive")
            elif not state.alive:
                state.alive, state.gone_since_s = True, 0.0
                # what was computed while no writer was there is nowhere
                self.table.lose(state.url, "the writer was started again")
            run = told["run"]
            state.folder = run["folder"]
            state.cursor = run["cursor"]
            for shard in run["shards"]:
                self.table.published(shard["samples"])
            facts = [w["runs"][self.run] for w in told["writers"] if self.run in w.get("runs", {})]
            state.bytes = sum(f.get("bytes", 0) for f in facts)
            state.write_s = sum(f.get("write_s", 0.0) for f in facts)
            state.hash_s = sum(f.get("hash_s", 0.0) for f in facts)
            state.threads = sum(f.get("threads", 1) for f in facts) or 1
            state.pending_b = sum(f.get("pending_bytes", 0) for f in facts)
            state.stall_s = sum(f.get("stall_s", 0.0) for f in facts) + sum(
                w.get("copy_stall_s", 0.0) for w in told["writers"]
            )
            state.paused = next((f["paused"] for f in facts if f.get("paused")), "")
            for fact in facts:
                for key, reason in fact.get("reasons", {}).items():
                    index = int(key)
                    # while it is leased the answer may still come
                    if index in self.table.sent and self.table.sent[index][0] == state.url:
                        self.reasons[index] = reason
                        self.table.give_back(index, reason, counts="disk" not in reason)

    def _mark_gone(self, state: ServerState, reason: str) -> None:
        state.last_error = reason
        if state.alive:
            state.alive, state.gone_since_s = False, time.monotonic()
            self.table.lose(state.url)

    def _flush(self) -> None:
        for state in self._states.values():
            if state.alive:
                conn = Connection(state.url, 15, self.headers)
                try:
                    conn.call("POST", f"{ROUTE}/flush", {"run": self.run})
                except (OSError, K2Error) as err:
                    state.last_error = str(err)
                finally:
                    conn.close()

    def _take_back_overdue(self, now: float) -> None:
        with self._lock:
            for index in self.table.overdue(now, self.publish_within_s):
                state = self._states.get(self.table.sent[index][0])
                if state and (state.pending_b or state.paused):
                    continue  # still on its way to the disk
                self.table.give_back(index, "answered, but never seen on disk")

    def _give_up_if_alone(self, now: float) -> None:
        if any(s.alive for s in self._states.values()):
            return
        for_good = self.ended()
        if for_good:
            raise NotReadyError(for_good, "run the same command again: it goes on where it was")
        longest = min(now - s.gone_since_s for s in self._states.values())
        if longest > self.give_up_s:
            told = "; ".join(f"{s.url}: {s.last_error}" for s in self._states.values())
            raise NotReadyError(
                f"no server is left ({told})",
                "start it again and run the same command: it goes on where it was",
            )

    def _report(self, now: float) -> None:
        then, tokens, written, write_s, stall_s, hash_s = self._tick
        span = now - then
        if span < 0.9 and self.table.left:
            return
        states = list(self._states.values())
        now_written = sum(s.bytes for s in states)
        now_write_s, now_stall_s = sum(s.write_s for s in states), sum(s.stall_s for s in states)
        now_hash_s = sum(s.hash_s for s in states)
        self._tick = (now, self._tokens, now_written, now_write_s, now_stall_s, now_hash_s)
        tokens_s = (self._tokens - tokens) / span if span > 0 else 0.0
        threads = sum(s.threads for s in states)
        limit = "prefill"
        if span > 0 and (now_stall_s - stall_s) / span > 0.1 * len(states):
            writing = now_write_s - write_s
            busy = writing / span > 0.5 * threads
            limit = "disk" if busy and writing > now_hash_s - hash_s else "copy"
        if now_written < written:
            written = 0  # a server began again
        left = sum(self.lengths[i] for i in (*self.table.waiting, *self.table.leased, *self.table.sent))
        paused = "; ".join(s.paused for s in states if s.paused)
        for s in states:
            if 0 < s.free_b < self.min_free_b and not s.paused:
                paused = f"{s.folder}: {s.free_b / 1e9:.1f} GB free, {self.min_free_b / 1e9:.1f} GB are kept free: paused"
        if self.on_speed:
            self.on_speed(
                Speed(
                    len(self.table.done),
                    len(self.table.done) + self.table.left + len(self.table.failed),
                    len(self.table.failed),
                    tokens_s,
                    (now_written - written) / span if span > 0 else 0.0,
                    limit,
                    left / tokens_s if tokens_s > 0 else None,
                    paused,
                    sum(s.alive for s in states),
                )
            )

    def folders(self) -> list[Path]:
        """Where the states lie, each server's own folder (seen from that server)."""
        return sorted({Path(s.folder) for s in self._states.values() if s.folder})


def begin_run(urls: Sequence[str], run: str, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Make the run's folder on every server. Returns the first server's answer; K2Error when one refuses."""
    first: dict[str, Any] | None = None
    for url in urls:
        conn = Connection(url, 30)
        try:
            told = conn.call("POST", f"{ROUTE}/begin", {"run": run, "manifest": dict(manifest)})
        except OSError as err:
            raise NotReadyError(f"{url}: no answer ({err})", "start the server, or check the address")
        finally:
            conn.close()
        first = first or told
    if first is None:
        raise K2Error("no server was given")
    return first
