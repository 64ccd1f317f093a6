"""SGLang's HTTP dialect, asked of a real process."""

from __future__ import annotations

import json
import select
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import httpx
import pytest

from k2tui import paths
from k2tui.local.text import Tokenizer

from .conftest import Engine

TOKENIZER = Tokenizer(paths.assets_dir() / "tiny-target")
GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}


def events(response: httpx.Response) -> list[Any]:
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def until(condition: Any, timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def load(shared: Engine) -> dict[str, Any]:
    return shared.client.get("/v1/loads").json()["loads"][0]


def test_facts(shared: Engine, model_dir: Any) -> None:
    get = shared.client.get
    assert get("/health").status_code == 200
    assert get("/health_generate").status_code == 200
    info = get("/model_info").json()
    assert info == get("/get_model_info").json()
    assert info["model_path"] == str(model_dir)
    assert info["served_model_name"] == "small"
    assert info["is_generation"] is True
    assert info["architectures"] == ["LlamaForCausalLM"]
    server = get("/server_info").json()
    assert server["embedded_engine"] is True
    assert server["version"].startswith("k2tui-")
    assert server["status"] == "ready"
    assert server["max_total_num_tokens"] == 4 * 256
    assert server["internal_states"][0]["memory_usage"]["token_capacity"] == 4 * 256
    assert get("/get_server_info").json().keys() == server.keys()
    model = get("/v1/models").json()["data"][0]
    assert (model["id"], model["max_model_len"]) == ("small", 256)
    assert load(shared)["max_running_requests"] == 4
    assert get("/nothing").json() == {"detail": "Not Found"}
    assert get("/generate").status_code == 405
    assert shared.client.post("/flush_cache").status_code == 200


def test_generate(shared: Engine) -> None:
    prompt = "import os\n\ndef main("
    ids = TOKENIZER.encode(prompt)
    answer = shared.client.post(
        "/generate", json={"text": prompt, "sampling_params": GREEDY, "rid": "mine"}
    ).json()
    assert answer == {
        "text": answer["text"],
        "output_ids": answer["output_ids"],
        "meta_info": answer["meta_info"],
    }
    assert answer["text"] == TOKENIZER.decode(answer["output_ids"])
    meta = answer["meta_info"]
    assert meta["id"] == "mine"
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (len(ids), 12, 0)
    assert meta["finish_reason"] == {"type": "length", "length": 12}
    assert meta["e2e_latency"] > 0
    assert not any(key.startswith("spec_") for key in meta)
    by_ids = shared.client.post("/generate", json={"input_ids": ids, "sampling_params": GREEDY}).json()
    assert by_ids["output_ids"] == answer["output_ids"]


def test_generate_stream_is_cumulative(shared: Engine) -> None:
    body = {"text": "class A:", "sampling_params": GREEDY, "stream": True}
    chunks = events(shared.client.post("/generate", json=body))
    whole = shared.client.post("/generate", json={**body, "stream": False}).json()
    for before, after in pairwise(chunks):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
    assert all(chunk["meta_info"]["finish_reason"] is None for chunk in chunks[:-1])
    assert chunks[-1]["text"] == whole["text"]
    assert chunks[-1]["meta_info"]["completion_tokens"] == 12


def test_generate_batch(shared: Engine) -> None:
    texts = ["def f(x):", "import sys", "class Long(object):\n    pass\n" * 3]
    single = [
        shared.client.post("/generate", json={"text": t, "sampling_params": GREEDY}).json() for t in texts
    ]
    batch = shared.client.post("/generate", json={"text": texts, "sampling_params": [GREEDY] * 3}).json()
    assert [b["output_ids"] for b in batch] == [s["output_ids"] for s in single]
    chunks = events(
        shared.client.post("/generate", json={"text": texts, "sampling_params": GREEDY, "stream": True})
    )
    last = {chunk["index"]: chunk["output_ids"] for chunk in chunks}
    assert [last[i] for i in range(3)] == [s["output_ids"] for s in single]


def test_logprobs(shared: Engine) -> None:
    count = len(TOKENIZER.encode("def f(x):"))
    for start in (0, 1, 2, count - 1, count):
        body = {
            "text": "def f(x):",
            "sampling_params": GREEDY,
            "return_logprob": True,
            "logprob_start_len": start,
        }
        answer = shared.client.post("/generate", json=body).json()
        assert len(answer["meta_info"]["input_token_logprobs"]) == count - start
    body["logprob_start_len"] = 0
    answer = shared.client.post("/generate", json=body).json()
    out = answer["meta_info"]["output_token_logprobs"]
    assert [entry[1] for entry in out] == answer["output_ids"]
    assert all(entry[0] <= 0 for entry in out)
    given = answer["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in given] == TOKENIZER.encode("def f(x):")
    assert given[0][0] is None


def test_seed_and_stop(shared: Engine) -> None:
    params = {"temperature": 1.0, "max_new_tokens": 30, "ignore_eos": True, "sampling_seed": 5}

    def ask(**more: Any) -> Any:
        return shared.client.post(
            "/generate", json={"text": "x = ", "sampling_params": {**params, **more}}
        ).json()

    first = ask()
    assert ask()["output_ids"] == first["output_ids"]
    assert ask(sampling_seed=6)["output_ids"] != first["output_ids"]
    stop = first["text"][5:8]
    stopped = ask(stop=[stop])
    assert stopped["text"] == first["text"][: first["text"].index(stop)]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert ask(stop=stop, no_stop_trim=True)["text"].endswith(stop)
    token = first["output_ids"][4]
    ended = ask(stop_token_ids=[token], ignore_eos=False)
    assert ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}
    assert ended["output_ids"] == first["output_ids"][: first["output_ids"].index(token) + 1]


def test_chat(shared: Engine) -> None:
    messages = [{"role": "user", "content": "What does os.getcwd do?"}]
    body = {"model": "small", "messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = shared.client.post("/v1/chat/completions", json=body).json()
    choice = answer["choices"][0]
    assert answer["object"] == "chat.completion"
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "length"
    prompt = "<|begin|><|user|>\nWhat does os.getcwd do?<|end|>\n<|assistant|>\n"
    count = len(TOKENIZER.encode(prompt, add_special_tokens=False))
    assert answer["usage"]["prompt_tokens"] == count
    assert answer["usage"]["total_tokens"] == count + 8
    stream = {**body, "stream": True, "stream_options": {"include_usage": True}}
    chunks = events(shared.client.post("/v1/chat/completions", json=stream))
    assert chunks[0]["choices"][0]["delta"] == {"reasoning_content": None, "role": "assistant", "content": ""}
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])
    assert text == choice["message"]["content"]
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 8
    parts = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "What does "}, {"type": "text", "text": "os.getcwd do?"}],
        }
    ]
    assert (
        shared.client.post("/v1/chat/completions", json={**body, "messages": parts}).json()["choices"]
        == answer["choices"]
    )


def test_completions(shared: Engine) -> None:
    body = {"model": "small", "prompt": "import os\n", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = shared.client.post("/v1/completions", json=body).json()
    assert answer["object"] == "text_completion"
    text = answer["choices"][0]["text"]
    chunks = events(
        shared.client.post(
            "/v1/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}}
        )
    )
    assert "".join(c["choices"][0]["text"] for c in chunks if c["choices"]) == text
    assert chunks[-1]["usage"] == answer["usage"]
    two = shared.client.post(
        "/v1/completions",
        json={**body, "prompt": ["import os\n", TOKENIZER.decode([300, 301])], "echo": True},
    ).json()
    assert [c["index"] for c in two["choices"]] == [0, 1]
    assert two["choices"][0]["text"] == "import os\n" + text


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/generate", {}, "Either text, input_ids or input_embeds should be provided."),
        ("/generate", {"text": "a", "input_ids": [1]}, "not both"),
        ("/generate", {"text": 5}, "text must be a string"),
        ("/generate", {"text": []}, "text must be a string"),
        ("/generate", {"input_ids": []}, "input_ids must be a non-empty list"),
        ("/generate", {"input_ids": [[1], "x"]}, "input_ids must be a non-empty list"),
        ("/generate", {"input_ids": [1, 99999]}, "The input_ids 99999 is out of range"),
        ("/generate", {"input_ids": [1] * 256}, "is longer than the model's context length (256 tokens)"),
        ("/generate", {"input_ids": [1] * 200, "sampling_params": {"max_new_tokens": 100}}, "maximum context length of 256"),
        ("/generate", {"text": "a", "sampling_params": {"top_p": 7}}, "top_p must be in (0, 1], got 7.0."),
        ("/generate", {"text": ["a", "b"], "sampling_params": [{}]}, "is not the number of prompts (2)"),
        ("/generate", {"text": "a", "sampling_params": 3}, "sampling_params must be an object"),
        ("/generate", {"text": "a", "stream": "yes"}, "stream must be true or false"),
        ("/generate", {"text": "a", "return_hidden_states": True}, "not supported"),
        ("/generate", {"text": "a", "logprob_start_len": 500, "return_logprob": True}, "logprob_start_len must be an integer"),
        ("/generate", {"text": "a", "sampling_params": {"temperature": 10**400}}, "too large"),
        ("/generate", {"text": "half \ud83d"}, "lone surrogate"),
        ("/generate", {"text": "a", "rid": "x" * 201}, "rid must be a string of at most 200 characters"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"messages": 1}}, "refused"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 900}]}, "longer than the model's context"),
        ("/v1/completions", {"model": "small"}, "prompt must be a non-empty string"),
        ("/v1/completions", {"prompt": "a", "max_tokens": -3}, "max_tokens must be a non-negative integer"),
        ("/v1/completions", {"prompt": "a", "n": 4}, "not supported"),
        ("/v1/chat/completions", {"messages": []}, "messages must be a non-empty list"),
        ("/v1/chat/completions", {"messages": ["hi"]}, "messages[0] must be an object"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content must be a string"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text parts"),
        ("/abort_request", {}, "rid (a string) or abort_all is needed"),
    ],
)  # fmt: skip
def test_bad_requests(shared: Engine, path: str, body: dict[str, Any], words: str) -> None:
    answer = shared.client.post(
        path, content=json.dumps(body).encode(), headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400
    if path.startswith("/v1/"):
        error = answer.json()
        assert {k: error[k] for k in ("object", "type", "param", "code")} == {
            "object": "error", "type": "BadRequestError", "param": None, "code": 400,
        }  # fmt: skip
        assert words in error["message"]
    else:
        assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize("raw", [b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b'"text"'])
def test_bodies_that_are_no_json_object(shared: Engine, raw: bytes) -> None:
    answer = shared.client.post("/generate", content=raw)
    assert answer.status_code == 400
    assert "request body" in answer.json()["error"]["message"]


def test_a_body_that_is_too_large(shared: Engine) -> None:
    answer = shared.client.post("/generate", content=b" " * (17 * 1024 * 1024))
    assert answer.status_code == 413


def test_requests_run_together_and_queue(shared: Engine) -> None:
    """Eight at once through four rows: all answers are those of asking one by one."""
    texts = [f"def function_{i}(self, value):\n" + "    pass\n" * i for i in range(8)]
    params = {"temperature": 0, "max_new_tokens": 100, "ignore_eos": True}

    def ask(text: str) -> list[int]:
        return httpx.post(
            shared.url + "/generate", json={"text": text, "sampling_params": params}, timeout=60
        ).json()["output_ids"]

    def met() -> bool:
        mark = len(shared.log)
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(ask, texts)) == alone
        grown = shared.log[mark:]
        return "#running-req: 4" in grown and any(f"#queue-req: {n}" in grown for n in range(1, 5))

    alone = [ask(text) for text in texts]
    assert any(
        met() for _ in range(8)
    )  # where clients are slow to start, the first may be done before the fourth asks


def test_metrics_count(shared: Engine) -> None:
    def read() -> dict[str, float]:
        text = shared.client.get("/metrics").text
        rows = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
        return {
            name.split("{")[0]
            + ("|" + name.split('endpoint="')[1].split('"')[0] if 'endpoint="' in name else ""): float(v)
            for name, v in rows
        }

    before = read()
    shared.client.post("/generate", json={"text": "import os", "sampling_params": GREEDY})
    after = read()

    def grew(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert grew("sglang:num_requests_total") == 1
    assert grew("sglang:generation_tokens_total") == 12
    assert grew("sglang:prompt_tokens_total") == len(TOKENIZER.encode("import os"))
    assert grew("sglang:time_to_first_token_seconds_count") == 1
    assert grew("sglang:e2e_request_latency_seconds_count") == 1
    assert grew("sglang:http_requests_total|/generate") == 1
    assert after["sglang:max_total_num_tokens"] == 1024
    assert after["sglang:num_running_reqs"] == 0
    assert after["sglang:token_usage"] == 0


def test_a_client_that_goes_away_ends_its_request(shared: Engine) -> None:
    """Streaming and not: the row is free long before the tokens would be out."""
    aborted = "sglang:num_aborted_requests_total"

    def count() -> float:
        return float(
            next(
                line for line in shared.client.get("/metrics").text.splitlines() if line.startswith(aborted)
            ).rsplit(" ", 1)[1]
        )

    host, port = shared.url.removeprefix("http://").split(":")

    def is_ended(stream: bool) -> bool:
        before = count()
        body = json.dumps(
            {
                "text": "a",
                "stream": stream,
                "sampling_params": {"max_new_tokens": 250, "ignore_eos": True, "temperature": 0},
            }
        ).encode()
        with socket.create_connection((host, int(port))) as raw:
            raw.sendall(
                b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
                % (len(body), body)
            )
            if stream:
                raw.recv(100)
            else:
                until(lambda: load(shared)["num_running_reqs"] == 1 or select.select([raw], [], [], 0)[0])
        until(lambda: load(shared)["num_running_reqs"] == 0)
        return count() > before

    for stream in (True, False):
        # on a busy machine all tokens may be out before this client has gone
        assert any(is_ended(stream) for _ in range(10))


def test_abort_request(shared: Engine) -> None:
    params = {"max_new_tokens": 250, "ignore_eos": True, "temperature": 0}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(
            lambda: httpx.post(
                shared.url + "/generate",
                json={"text": "a", "rid": "stop-me", "sampling_params": params},
                timeout=60,
            ).json()
        )
        until(lambda: load(shared)["num_running_reqs"] == 1 or waiting.done())
        shared.client.post("/abort_request", json={"rid": "stop-me"})
        answer = waiting.result()
    if answer["meta_info"]["completion_tokens"] < 250:  # it may have been quicker than the order
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    until(lambda: load(shared)["num_running_reqs"] == 0)
