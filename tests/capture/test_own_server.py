"""A capture server of one's own: an answer from another process on its port is not taken for it."""

from __future__ import annotations

import http.server
import os
import socket
import sys
import threading
from pathlib import Path

import pytest

from k2tui.capture.server import own_server
from k2tui.errors import NotReadyError
from k2tui.sources.procs import listener


@pytest.mark.skipif(sys.platform != "linux", reason="who listens is read from /proc")
def test_a_stranger_on_the_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    assert listener(port) is None
    strangers: list[http.server.HTTPServer] = []

    def open_other(_: str) -> None:  # told just before the child starts, after the port was looked at
        other = http.server.ThreadingHTTPServer(("127.0.0.1", port), http.server.BaseHTTPRequestHandler)
        strangers.append(other)
        threading.Thread(target=other.serve_forever, daemon=True).start()

    argv = [sys.executable, "-c", "import time; time.sleep(60)"]  # a server that is slow to load
    url = f"http://127.0.0.1:{port}"
    try:
        with (
            pytest.raises(
                NotReadyError, match=rf"port {port} is held by another process \(pid {os.getpid()}, "
            ),
            own_server(
                argv, {}, url, (), tmp_path / "root", tmp_path / "log", tmp_path / "site", say=open_other
            ),
        ):
            raise AssertionError("it captures nothing")
        assert listener(port) == os.getpid()
        with (
            pytest.raises(
                NotReadyError, match=rf"port {port} is taken by another server \(pid {os.getpid()}"
            ),
            own_server(argv, {}, url, (), tmp_path / "root", tmp_path / "log", tmp_path / "site"),
        ):
            raise AssertionError("the port is taken")
    finally:
        for other in strangers:
            other.shutdown()
            other.server_close()
