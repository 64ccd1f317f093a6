"""One poll of a model server over HTTP: health, model, load. Speaks SGLang's dialect (all releases since 0.4.3) and vLLM's.

Standard library only: importing httpx costs 0.21 CPU-s here against 0.06 for http.client, and both `k2tui status` and the
dashboard's first paint wait for it. Polls are few on purpose: each one is a line in the server's access log, and SGLang's
/health runs a one-token request (1 s and more).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast
from urllib.parse import urlsplit

from k2tui.core.server import HttpStatus
from k2tui.core.vllm_metrics import VllmMetrics, read_metrics

_LIMIT = 4 << 20  # a body over 4 MiB is not an answer to these questions


def get(url: str, path: str, timeout_s: float = 2.0) -> tuple[int | None, Any, str]:
    """(HTTP status or None, JSON or text, error in words). Never raises for anything that a server can do.

    timeout_s is for the whole answer: a server that sends a byte now and then does not hold anybody.
    """
    parts = urlsplit(url)
    cls = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    try:
        conn = cls(parts.hostname or "127.0.0.1", parts.port, timeout=timeout_s)
    except (http.client.InvalidURL, ValueError) as err:
        return None, None, f"bad URL: {err}"
    late = threading.Event()
    clock: threading.Timer | None = None
    try:
        until = time.monotonic() + timeout_s
        conn.connect()
        clock = threading.Timer(max(0.0, until - time.monotonic()), _hang_up, (conn.sock, late))
        clock.daemon = True
        clock.start()
        conn.request("GET", parts.path.rstrip("/") + path, headers={"Accept": "application/json", "User-Agent": "k2tui"})
        reply = conn.getresponse()
        body = reply.read(_LIMIT + 1)
        if late.is_set():  # what came until then is a part
            return None, None, f"no whole answer in {timeout_s:.2g} s"
        if len(body) > _LIMIT:
            return None, None, f"{path} answers with more than {_LIMIT >> 20} MiB"
        try:
            return reply.status, json.loads(body) if body else None, ""
        except (ValueError, RecursionError):
            return reply.status, body.decode("utf-8", "replace"), ""
    except ConnectionRefusedError:
        return None, None, "connection refused"
    except TimeoutError:
        return None, None, f"no answer in {timeout_s:.2g} s"
    except UnicodeError:
        return None, None, "bad URL: not the name of a machine"
    except (OSError, http.client.HTTPException, ValueError) as err:
        return None, None, f"no whole answer in {timeout_s:.2g} s" if late.is_set() else str(err) or type(err).__name__
    finally:
        if clock is not None:
            clock.cancel()
        conn.close()


def _hang_up(sock: socket.socket, late: threading.Event) -> None:
    """End whatever waits on this connection, from another thread. TLS is left out: its shutdown would wait for an answer."""
    late.set()
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _dict(value: Any) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


def _number(value: Any) -> float | None:
    """A finite number, else None (JSON may hold Infinity, and whole numbers that no float holds)."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _whole(value: Any) -> int | None:
    number = _number(value)
    return int(number) if number is not None else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


class ServerProbe:
    """Asks one server. Remembers which endpoints this release has, so that a missing one is asked for once.

    health() is separate because it costs the server a request.
    """

    def __init__(self, url: str, timeout_s: float = 2.0) -> None:
        self.url = url
        self._timeout_s = timeout_s
        self._until = 0.0  # monotonic: when the poll that goes on must have ended
        self._missing: set[str] = set()
        self._known: HttpStatus | None = None  # model facts: asked until they are there
        self._counted: tuple[float, VllmMetrics] | None = None  # vLLM's counters of the poll before, and when

    def _ask(self, path: str) -> tuple[int | None, Any, str]:
        if path in self._missing:
            return 404, None, ""
        left = self._until - time.monotonic()
        if left <= 0:
            return None, None, f"no whole answer in {2 * self._timeout_s:g} s"
        status, body, error = get(self.url, path, min(self._timeout_s, left))
        if status in (404, 405, 501):
            self._missing.add(path)
        return status, body, error

    def forget(self) -> None:
        """The server behind the URL changed (a restart): ask everything anew."""
        self._missing.clear()
        self._known = None
        self._counted = None

    def poll(self, now_s: float) -> HttpStatus:
        """Model facts (until known) and load facts, in twice timeout_s at most. error says in words why nothing answered."""
        self._until = time.monotonic() + 2 * self._timeout_s
        # a release without /v1/loads is asked for its facts anew each time: else nobody would notice that it has gone
        fresh = self._known is None or "/v1/loads" in self._missing
        status = self._model(now_s) if fresh or self._known is None else replace(self._known, checked_s=now_s, error="")
        if status.error or status.model_path is None:
            return status
        self._known = status
        return self._load(status)

    def _model(self, now_s: float) -> HttpStatus:
        status = HttpStatus(url=self.url, checked_s=now_s)
        for path in ("/model_info", "/get_model_info"):
            code, body, error = self._ask(path)
            if code is None:
                return replace(status, error=error)
            if code == 200 and isinstance(body, dict):
                told = _dict(body)
                status = replace(
                    status,
                    model_path=_text(told.get("model_path")),
                    served_model_name=_text(told.get("served_model_name")) or _text(told.get("model_path")),
                )
                break
            if code == 503:
                return replace(status, error="503: starting or draining")
        else:  # vLLM and other OpenAI-type servers
            code, body, error = self._ask("/v1/models")
            if code is None:
                return replace(status, error=error)
            data = _list(_dict(body).get("data"))
            first = _dict(data[0] if data else None)
            if code == 200 and first:
                status = replace(
                    status,
                    model_path=_text(first.get("root")) or _text(first.get("id")),
                    served_model_name=_text(first.get("id")),
                )
            else:
                return replace(status, error=f"HTTP {code} from /model_info and /v1/models")
            code, body, _ = self._ask("/version")
            return self._counters(replace(status, version=_text(_dict(body).get("version"))))
        return self._info(status)

    def _info(self, status: HttpStatus) -> HttpStatus:
        for path in ("/server_info", "/get_server_info"):
            code, body, _ = self._ask(path)
            if code == 200 and isinstance(body, dict):
                body = _dict(body)
                states = _list(body.get("internal_states"))
                first = _dict(states[0] if states else None)
                return replace(
                    status,
                    version=_text(body.get("version")),
                    is_embedded=bool(body.get("embedded_engine")),
                    speculative_algorithm=_text(body.get("speculative_algorithm")),
                    max_total_num_tokens=_whole(body.get("max_total_num_tokens"))
                    or _whole(_dict(first.get("memory_usage")).get("token_capacity")),
                    gen_throughput=_number(first.get("last_gen_throughput")),
                    accept_length=_number(first.get("avg_spec_accept_length")),
                )
        return status

    def _counters(self, status: HttpStatus) -> HttpStatus:
        """vLLM's load and accept length: its counters since the poll before; since the server's start at the first poll."""
        code, body, _ = self._ask("/metrics")
        found = read_metrics(body) if code == 200 and isinstance(body, str) else None
        if found is None:
            if code == 200:
                self._missing.add("/metrics")  # another server's
            return status
        before, known = self._counted, self._known
        if before is not None and found.is_restart_of(before[1]):
            before = known = None
        self._counted = (status.checked_s, found)
        status = replace(
            status, num_running_reqs=found.num_running_reqs, num_queue_reqs=found.num_queue_reqs, token_usage=found.token_usage,
            accept_length=found.accept_length(before[1] if before else None) or (known.accept_length if known else None),
        )  # fmt: skip
        if before is None or status.checked_s <= before[0] or found.generation_tokens is None or before[1].generation_tokens is None:
            return status
        speed = (found.generation_tokens - before[1].generation_tokens) / (status.checked_s - before[0])
        hits = found.cache_hit_rate(before[1])
        return replace(status, gen_throughput=speed, cache_hit_rate=hits if hits is not None else known.cache_hit_rate if known else None)

    def _load(self, status: HttpStatus) -> HttpStatus:
        code, body, error = self._ask("/v1/loads")
        if code is None:
            return replace(status, error=error)
        ranks = [_dict(x) for x in _list(_dict(body).get("loads"))]
        if code == 200 and ranks:

            def total(key: str) -> float | None:
                found = [n for n in (_number(r.get(key)) for r in ranks) if n is not None]
                return sum(found) if found else None

            def mean(key: str) -> float | None:
                found = [n for n in (_number(r.get(key)) for r in ranks) if n is not None]
                return sum(found) / len(found) if found else None

            spec = [n for n in (_number(_dict(r.get("speculative")).get("accept_length")) for r in ranks) if n is not None]
            return replace(
                status,
                num_running_reqs=_whole(total("num_running_reqs")),
                num_queue_reqs=_whole(total("num_waiting_reqs")),
                token_usage=mean("token_usage"),
                gen_throughput=total("gen_throughput"),
                cache_hit_rate=mean("cache_hit_rate"),
                max_total_num_tokens=_whole(total("max_total_num_tokens")) or status.max_total_num_tokens,
                accept_length=sum(spec) / len(spec) if spec else status.accept_length,
            )
        return status

    def health(self, timeout_s: float = 5.0) -> int | None:
        """HTTP status of /health, None when nothing answered in time. Costs the server a one-token request."""
        return get(self.url, "/health", timeout_s)[0]


class HttpPoller:
    """Polls one server in its own thread: every `fast_s` until it is known, every `slow_s` after; /health every `health_s`.

    A dead or hanging server never blocks anybody: the newest status is kept with its age.
    """

    def __init__(
        self,
        url: str,
        on_change: Callable[[], None] = lambda: None,
        *,
        fast_s: float = 1.0,
        slow_s: float = 5.0,
        health_s: float = 30.0,
    ) -> None:
        self._probe = ServerProbe(url)
        self._on_change = on_change
        self._fast_s, self._slow_s, self._health_s = fast_s, slow_s, health_s
        self._latest: HttpStatus | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"http {url}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def latest(self) -> HttpStatus | None:
        return self._latest

    def _run(self) -> None:
        health: int | None = None
        asked_health = 0.0
        while not self._stop.is_set():
            status = self._probe.poll(time.time())
            up = not status.error and status.model_path is not None
            # while it says that it is starting or ill it is asked again at once: a refusal costs the server nothing
            if up and (health != 200 or time.monotonic() - asked_health > self._health_s):
                health = self._probe.health()
                asked_health = time.monotonic()
            if not up:
                self._probe.forget()
                health = None
                asked_health = 0.0
            status = replace(status, health=health)
            old, self._latest = self._latest, status
            if old is None or replace(old, checked_s=status.checked_s) != status:
                self._on_change()
            self._stop.wait(self._slow_s if up and health == 200 else self._fast_s)
