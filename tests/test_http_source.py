"""The HTTP poller against real little servers: starting, ready, hanging, foreign, gone."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from k2tui.cli import main
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
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()


INFO = {"model_path": "/m", "served_model_name": "m"}
LOADS = {"loads": [{"num_running_reqs": 2, "num_waiting_reqs": 1, "token_usage": 0.5, "gen_throughput": 90.0, "speculative": {"accept_length": 2.5}}, {"num_running_reqs": 1, "gen_throughput": 10.0}]}
VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{{engine="0",model_name="a b}}"}} 1.0
vllm:num_requests_running{{engine="1",model_name="a b}}"}} 2.0
vllm:num_requests_waiting{{engine="0",model_name="m"}} 4.0
vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} 0.25
vllm:generation_tokens_total{{engine="0",model_name="m"}} {tokens}
vllm:generation_tokens_created{{engine="0",model_name="m"}} 1.7960451344119461e+09
vllm:prefix_cache_queries_total{{engine="0",model_name="m"}} {tokens}
vllm:prefix_cache_hits_total{{engine="0",model_name="m"}} 10.0
vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {drafts}
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} 66.0
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {accepted}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="0"}} {accepted}
vllm:num_preemptions_total{{engine="0",model_name="m"}} NaN
"""


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


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n", b"HTTP/1.1 200 OK\r\nX-A: ", b""])
def test_a_server_that_drips_is_left(head: bytes) -> None:
    """A byte at a time, for ever: no single read ever times out."""
    over = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"

    def drip(conn: socket.socket) -> None:
        with contextlib.suppress(OSError), conn:
            conn.sendall(head)
            while not over.wait(0.05):
                conn.sendall(b"1")

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=drip, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    found: list[HttpStatus] = []
    asking = threading.Thread(target=lambda: found.append(ServerProbe(url, 0.5).poll(1.0)), daemon=True)
    asking.start()
    try:
        asking.join(60)
        assert found and found[0].model_path is None and "no whole answer in 0.5 s" in found[0].error
        assert main(["watch", url, "--once"]) == 3
    finally:
        over.set()
        listener.close()


def test_numbers_that_no_float_holds_and_endless_bodies(server: Server) -> None:
    huge = b'{"loads": [{"num_running_reqs": 1' + b"0" * 400 + b', "num_waiting_reqs": Infinity, "token_usage": NaN}]}'
    server.answers = {"/model_info": (200, INFO), "/v1/loads": (200, huge)}
    status = ServerProbe(server.url).poll(1.0)
    assert status.model_path == "/m" and status.num_running_reqs is None and status.num_queue_reqs is None and status.token_usage is None
    server.answers = {"/model_info": (200, b" " * (5 << 20))}
    assert "more than 4 MiB" in ServerProbe(server.url).poll(1.0).error


def test_watch_once_says_when_nothing_answers(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert main(["watch", f"http://127.0.0.1:{port}", "--once"]) == 3
    assert "refused" in capsys.readouterr().out
    server.answers = {"/model_info": (200, INFO), "/server_info": (200, {"version": "0.5.23"}), "/v1/loads": (200, LOADS), "/health": (200, {})}
    assert main(["watch", server.url, "--once", "--json"]) == 0


def test_vllm_counters_between_two_polls(server: Server) -> None:
    """Accept length is that of the newest interval with drafts: since the start at first, kept while nothing is drafted."""

    def poll(now_s: float, tokens: int, drafts: int, accepted: int) -> HttpStatus:
        server.answers["/metrics"] = (200, VLLM.format(tokens=float(tokens), drafts=float(drafts), accepted=float(accepted)).encode())
        return probe.poll(now_s)

    server.answers = {"/v1/models": (200, {"data": [{"id": "m", "root": "/m", "owned_by": "vllm"}]}), "/version": (200, {"version": "0.32.0"})}
    probe = ServerProbe(server.url)
    first = poll(100.0, 100, 40, 20)
    assert (first.num_running_reqs, first.num_queue_reqs, first.token_usage, first.accept_length) == (3, 4, 0.25, 1.5)
    assert first.gen_throughput is None and first.version == "0.32.0"
    second = poll(110.0, 300, 140, 120)
    assert second.gen_throughput == 20.0 and second.accept_length == 2.0 and second.cache_hit_rate == 0.0
    idle = poll(120.0, 300, 140, 120)
    assert idle.gen_throughput == 0.0 and idle.accept_length == 2.0
    again = poll(130.0, 10, 4, 1)
    assert again.gen_throughput is None and again.accept_length == 1.25, "its counters went back: a new process"


def test_another_server_is_asked_for_its_metrics_once(server: Server) -> None:
    server.answers = {"/v1/models": (200, {"data": [{"id": "m"}]}), "/metrics": (200, b"process_cpu_seconds_total 1.0\n")}
    probe = ServerProbe(server.url)
    for at in range(3):
        assert probe.poll(float(at)).accept_length is None
    assert server.asked.count("/metrics") == 1
