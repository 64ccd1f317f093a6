"""A server that answers oddly: `prepare` says which URL and what was wrong, in one error."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from k2tui.cli import main

GOOD: dict[str, Any] = {
    "/model_info": {"model_path": "m"},
    "/server_info": {"version": "0.5.23"},
    "/tokenize": {"tokens": [1, 2, 3]},
    "/v1/chat/completions": {"choices": [{}], "usage": {"prompt_tokens": 3}},
    "/generate": {"output_ids": [7, 8], "text": "ab", "meta_info": {"finish_reason": {"type": "stop"}}},
}


class Odd:
    def __init__(self) -> None:
        self.answers: dict[str, bytes] = {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                body = outer.answers.get(self.path) or json.dumps(GOOD.get(self.path, {})).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 128  # 5 would refuse some of 30 first calls: they come again after 1 and 3 s

        self.http = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()


@pytest.fixture
def odd() -> Iterator[Odd]:
    made = Odd()
    yield made
    made.http.shutdown()
    made.http.server_close()


DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/model_info", b"[1]", "the answer is no JSON object, but list"),
        ("/model_info", DEEP, "the answer is not JSON"),
        ("/tokenize", b'{"no": 1}', "gave no tokens"),
        ("/tokenize", b"3", "the answer is no JSON object, but int"),
        ("/tokenize", b'{"tokens": ["a", {}]}', "tokens is no list of token ids"),
        ("/tokenize", DEEP, "the answer is not JSON"),
        ("/v1/chat/completions", b'{"choices": [3]}', "choices is no list of objects"),
        ("/v1/chat/completions", b'{"usage": {"prompt_tokens": "x"}}', "no number of prompt_tokens"),
        ("/v1/chat/completions", b'{"prompt_token_ids": 5}', "prompt_token_ids is no list of token ids"),
        ("/generate", b'{"output_ids": [null]}', "output_ids is no list of token ids"),
        ("/generate", b'{"output_ids": 4}', "no output_ids in the answer"),
        ("/generate", DEEP, "the answer is not JSON"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_an_odd_answer_is_one_error(
    odd: Odd, tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str, body: bytes, words: str
) -> None:
    odd.answers[path] = body
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(30)))
    out = tmp_path / "out"
    code = main(["prepare", "--url", odd.url, "--out", str(out), "--prompts", str(prompts)])
    told = capsys.readouterr()
    assert code == 1, told
    assert f"{odd.url}{path}: " in told.err and words in told.err and "Error:" not in told.err
