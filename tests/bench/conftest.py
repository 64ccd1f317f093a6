"""The C server that knows the truth, compiled once a session."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).parent.parent / "fixtures" / "bench" / "mocksse.c"


class Mock:
    """One running mocksse. configure(...) resets the truth log."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=30) as answer:
            return json.load(answer)

    def configure(self, **settings: object) -> None:
        query = "&".join(f"{k}={v}" for k, v in {"defaults": 1, **settings}.items())
        self.get(f"/__config?{query}")

    def reset(self) -> None:
        self.get("/__reset")

    def truth(self) -> dict[str, Any]:
        return self.get("/__truth")


@pytest.fixture(scope="session")
def mock_binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here: the mock server cannot be built")
    out = tmp_path_factory.mktemp("mocksse") / "mocksse"
    subprocess.run([compiler, "-O2", "-w", "-o", str(out), str(SOURCE), "-lm"], check=True)
    return out


@pytest.fixture(scope="session")
def mock_server(mock_binary: Path) -> Iterator[Mock]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([str(mock_binary), f"port={port}"], stdout=subprocess.DEVNULL)
    server = Mock(port)
    end = time.monotonic() + 30
    while True:
        try:
            server.get("/health")
            break
        except OSError:
            assert process.poll() is None and time.monotonic() < end, "the mock server did not start"
            time.sleep(0.02)
    yield server
    process.terminate()
    process.wait()


@pytest.fixture
def mock(mock_server: Mock) -> Mock:
    mock_server.configure(ttft_us=5000, itl_us=2000)
    return mock_server
