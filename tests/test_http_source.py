"""The HTTP poller against real little servers: starting, ready, hanging, foreign, gone."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from k2tui.core.server import HttpStatus
from k2tui.sources.http import HttpPoller, ServerProbe, get


class Server:
    """Answers from a table of path -> (status, JSON or raw bytes); counts what it was asked."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, Any]] = {}
        self.asked: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append(self.path)
                status, body = outer.answers.get(self.path, (404, {"detail": "Not Found"}))
                raw = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()


INFO = {"model_path": "/m", "served_model_name": "m"}
LOADS = {"loads": [{"num_running_reqs": 2, "num_waiting_reqs": 1, "token_usage": 0.5, "gen_throughput": 90.0, "speculative": {"accept_length": 2.5}}, {"num_running_reqs": 1, "gen_throughput": 10.0}]}


def test_a_new_sglang(server: Server) -> None:
    server.answers = {"/model_info": (200, INFO), "/server_info": (200, {"version": "0.5.23", "speculative_algorithm": "EAGLE3"}), "/v1/loads": (200, LOADS)}
    status = ServerProbe(server.url).poll(1.0)
    assert (status.model_path, status.version, status.speculative_algorithm) == ("/m", "0.5.23", "EAGLE3")
    assert (status.num_running_reqs, status.num_queue_reqs, status.gen_throughput, status.accept_length) == (3, 1, 100.0, 2.5)


def test_an_old_sglang_is_asked_by_its_old_names_once(server: Server) -> None:
    server.answers = {"/get_model_info": (200, INFO), "/get_server_info": (200, {"version": "0.4.6", "internal_states": [{"last_gen_throughput": 7.0, "avg_spec_accept_length": 1.7}]})}
    probe = ServerProbe(server.url)
    for now in (1.0, 2.0, 3.0):
        status = probe.poll(now)
    assert (status.version, status.gen_throughput, status.accept_length) == ("0.4.6", 7.0, 1.7)
    assert server.asked.count("/v1/loads") == 1 and server.asked.count("/model_info") == 1


def test_vllm(server: Server) -> None:
    server.answers = {"/v1/models": (200, {"data": [{"id": "m", "root": "/m"}]}), "/version": (200, {"version": "0.11.0"})}
    status = ServerProbe(server.url).poll(1.0)
    assert (status.model_path, status.served_model_name, status.version, status.error) == ("/m", "m", "0.11.0", "")


@pytest.mark.parametrize("body", [b"<html>", b"[1,2]", b"null", b'{"model_path": 3}', b"", b"[" * 100_000])
def test_strange_answers_do_no_harm(server: Server, body: bytes) -> None:
    server.answers = dict.fromkeys(("/model_info", "/server_info", "/v1/loads", "/v1/models"), (200, body))
    status = ServerProbe(server.url).poll(1.0)
    assert status.model_path is None


def test_nobody_there() -> None:
    assert ServerProbe("http://127.0.0.1:9", 0.5).poll(1.0).error == "connection refused"
    assert "bad URL" in get("http://127.0.0.1:x", "/")[2] or get("http://127.0.0.1:x", "/")[0] is None


def test_poller_sees_the_start_through_and_asks_health_seldom_after(server: Server) -> None:
    server.answers = {"/model_info": (503, {})}
    poller = HttpPoller(server.url, fast_s=0.05, slow_s=0.1, health_s=1e6)

    def until(reached: Callable[[HttpStatus], bool]) -> None:
        deadline = time.time() + 30
        while (now := poller.latest()) is None or not reached(now):
            assert time.time() < deadline, now
            time.sleep(0.02)

    poller.start()
    try:
        until(lambda s: "starting" in s.error)
        server.answers = {"/model_info": (200, INFO), "/health": (503, b"")}
        until(lambda s: s.health == 503)
        server.answers["/health"] = (200, b"")
        until(lambda s: s.health == 200)
        asked = server.asked.count("/health")
        seen = len(server.asked)
        deadline = time.time() + 30
        while len(server.asked) < seen + 8 and time.time() < deadline:
            time.sleep(0.02)
        assert server.asked.count("/health") == asked  # many polls later: it costs the server a request
        server.http.shutdown()
        server.http.server_close()
        until(lambda s: bool(s.error))
    finally:
        poller.stop()
