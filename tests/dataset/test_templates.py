"""Loss masks and refusals under templates of the real world's kinds, against an HTTP server that renders them with Jinja.

The server's model is a script: it thinks and answers as a model of that kind would. Templates: tests/fixtures/templates, written for
these tests in the manner of Llama 3, Qwen3 (thinking), DeepSeek-R1 and Kimi-K2 (thinking).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

jinja2 = pytest.importorskip("jinja2")

from k2tui.dataset.rows import RowFile  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = ROOT / "tests" / "fixtures" / "templates"
END = {"llama3": "<|eot_id|>", "qwen3_thinking": "<|im_end|>", "deepseek_r1": "<｜end▁of▁sentence｜>", "kimi_k2_thinking": "<|im_end|>"}
SPECIAL = re.compile(r"(<\|[a-z_]+\|>|<｜[^｜]+｜>|</?think>)")


class Scripted:
    """One model behind SGLang's routes. strange: prompts with this word are rendered otherwise by the chat API."""

    def __init__(self, name: str, strange: str = "") -> None:
        env = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
        self.template = env.from_string((TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"))
        self.name, self.strange = name, strange
        self.specials: list[str] = []

    def encode(self, text: str) -> list[int]:
        out: list[int] = []
        for piece in SPECIAL.split(text):
            if SPECIAL.fullmatch(piece):
                if piece not in self.specials:
                    self.specials.append(piece)
                out.append(self.specials.index(piece))
            else:
                out += [100 + ord(c) for c in piece]
        return out

    def decode(self, ids: list[int], skip_special: bool = False) -> str:
        return "".join(chr(i - 100) if i >= 100 else "" if skip_special else self.specials[i] for i in ids)

    def render(self, messages: list[dict[str, Any]]) -> str:
        return self.template.render(messages=messages, add_generation_prompt=True, bos_token="<|begin_of_text|>")

    def answer(self, prompt: str) -> str:
        turn = len(re.findall("question", prompt))
        said = f"answer {turn}{END[self.name]}"
        if self.name == "llama3":
            return said
        thought = f"thought {turn}"
        return f"{thought}\n</think>\n\n{said}" if prompt.endswith("<think>\n") else f"<think>{thought}</think>{said}"

    def reply(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/model_info":
            return {"model_path": f"/models/{self.name}"}
        if path == "/server_info":
            return {"version": "0.5.23"}
        if path == "/tokenize":
            return {"tokens": self.encode(body["prompt"] if "prompt" in body else self.render(body["messages"]))}
        if path == "/v1/chat/completions":
            ids = self.encode(self.render(body["messages"]))
            if self.strange and self.strange in str(body["messages"]):
                ids[1] += 1  # as many tokens, one of them another
            return {"choices": [{"prompt_token_ids": ids}], "usage": {"prompt_tokens": len(ids)}}
        assert path == "/generate", path
        out = self.encode(self.answer(self.decode(body["input_ids"])))
        text = self.decode(out[:-1], body["sampling_params"].get("skip_special_tokens", True))
        return {"text": text, "output_ids": out, "meta_info": {"finish_reason": {"type": "stop"}}}


@contextmanager
def served(model: Scripted) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            told = json.dumps(model.reply(self.path, json.loads(raw or b"{}"))).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(told)))
            self.end_headers()
            self.wfile.write(told)

        do_GET = do_POST

        def log_message(self, format: str, *args: Any) -> None: ...

    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # 5 would refuse some of many first calls: they come again after 1 s

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def prepare(url: str, out: Path, prompts: list[list[str]], *more: str) -> tuple[int, dict[str, Any], str]:
    """(exit code, result, stderr) of `k2tui prepare`. prompts: the user's messages of each conversation."""
    path = out.with_name("prompts.jsonl")
    turns = [[m for q in qs for m in ({"role": "user", "content": q}, {"role": "assistant", "content": "old"})] for qs in prompts]
    path.write_text("".join(json.dumps({"messages": t}) + "\n" for t in turns))
    argv = [sys.executable, "-m", "k2tui", "prepare", "--prompts", str(path), "--out", str(out), "--url", url, "--json", "--min-response", "1", *more]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, timeout=60)
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


@pytest.mark.parametrize("name", sorted(END))
def test_ones_stand_on_what_was_generated_in_that_very_context(name: str, tmp_path: Path) -> None:
    model = Scripted(name)
    with served(model) as url:
        code, result, stderr = prepare(url, tmp_path / "d.jsonl", [["question one", "question two"], ["question alone"]])
    assert code == 0 and result["rows"] == 2, stderr
    rows = {row.n_response_tokens and model.decode(list(row.input_ids)): row for row in RowFile(tmp_path / "d.jsonl").rows()}
    pair = next(row for text, row in rows.items() if "question two" in text)
    whole = model.decode(list(pair.input_ids))
    learned = model.decode([t for t, m in zip(pair.input_ids, pair.loss_mask, strict=True) if m])
    # rendered again, by the template alone: the second question's context, and nothing else, is the prompt
    history: list[dict[str, Any]] = [{"role": "user", "content": "question one"}, {"role": "assistant", "content": "answer 1"}]
    if name != "llama3":
        history[1]["reasoning_content"] = "thought 1"
    prompt = model.render([*history, {"role": "user", "content": "question two"}])
    assert model.decode(list(pair.input_ids[: pair.n_prompt_tokens])) == prompt
    assert whole == prompt + model.answer(prompt)
    if name == "llama3":
        assert learned == "answer 1<|eot_id|>answer 2<|eot_id|>" and not pair.has_reasoning
    else:
        # the first turn's thinking is not in this context, so its answer was never generated here: zeros
        assert "thought 1" not in whole and "answer 1" in whole
        assert learned == model.answer(prompt) and pair.has_reasoning


def test_a_prompt_that_the_chat_api_renders_otherwise_is_refused_by_name_and_not_done(tmp_path: Path) -> None:
    out = tmp_path / "d.jsonl"
    prompts = [["question plain"], ["question strange"]]
    with served(Scripted("qwen3_thinking", strange="strange")) as url:
        code, result, _ = prepare(url, out, prompts)
    assert code == 1 and result["rows"] == 1 and not result["complete"]
    ((name, why),) = result["refused"].items()
    assert name.endswith("prompts.jsonl:2") and "renders another prompt from token 1 on" in why
    before = out.read_bytes()
    with served(Scripted("qwen3_thinking")) as url:  # the server was mended
        code, result, _ = prepare(url, out, prompts)
    assert code == 0 and result["kept"] == 1 and result["outcomes"]["done before"] == 1
    assert out.read_bytes().startswith(before) and len(RowFile(out)) == 2


def test_when_every_prompt_is_refused_it_stops_and_says_so(tmp_path: Path) -> None:
    with served(Scripted("llama3", strange="question")) as url:
        code, _, stderr = prepare(url, tmp_path / "d.jsonl", [[f"question {i}"] for i in range(60)], "--concurrency", "2")
    assert code == 1 and "were all refused" in stderr and "renders another prompt" in stderr
    assert len(RowFile(tmp_path / "d.jsonl")) == 0


def test_without_a_terminal_the_log_is_not_empty_while_it_works(tmp_path: Path) -> None:
    """A job's log: what is asked of whom, at once; the result at its end."""
    with served(Scripted(sorted(END)[0])) as url:
        code, result, stderr = prepare(url, tmp_path / "d.jsonl", [["question one"], ["question two"]])
    assert code == 0 and result["schema"] == 1
    assert stderr.splitlines()[0].startswith(f"2 prompts for {url}; a line of progress every 5 s")
