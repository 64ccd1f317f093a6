"""A capture server of one's own: an answer from another process on its port is not taken for it."""

from __future__ import annotations

import http.server
import json
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


def test_a_job_is_told_how_far_the_start_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K2TUI_JOB_DIR", str(tmp_path))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{s.getsockname()[1]}"
    progress = tmp_path / "progress.json"
    script = f"""if True:
        import pathlib, time
        print("Loading safetensors checkpoint shards:  33% Completed | 1/3 [00:01<00:02,  1.52it/s]", flush=True)
        while "1/3" not in (pathlib.Path({str(progress)!r}).read_text() if pathlib.Path({str(progress)!r}).exists() else ""):
            time.sleep(0.05)
        raise SystemExit(3)
    """
    argv, log, site = [sys.executable, "-c", script], tmp_path / "log", tmp_path / "site"
    with (
        pytest.raises(NotReadyError, match="ended with code 3"),
        own_server(argv, {}, url, (), tmp_path / "root", log, site, ready_timeout_s=60),
    ):
        raise AssertionError("it ends first")
    assert json.loads(progress.read_text())["note"].startswith("starting its server: shards 1/3")
