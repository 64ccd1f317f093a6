"""Workloads from names and files: what `build` makes, what the server is sent, and what a bad file is told."""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from k2tui.core.workload import arrivals
from k2tui.errors import UsageError
from k2tui.loadgen.datasets import Wanted, build
from k2tui.loadgen.dialect import Dialect


@dataclass
class Seen:
    """What a server was sent: (seconds, path, body) in order of arrival."""

    url: str = ""
    requests: list[tuple[float, str, dict[str, Any]]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [body for _, _, body in self.requests]


@pytest.fixture
def seen() -> Iterator[Seen]:
    """A server that keeps every request and answers with `said <number>` in two tokens."""
    kept = Seen()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            body = b'{"data":[{"id":"m"}]}' if self.path == "/v1/models" else b"{}"
            self.send_response(200 if self.path in ("/health", "/v1/models") else 404)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            at = time.monotonic()
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with kept.lock:
                kept.requests.append((at, self.path, body))
                number = len(kept.requests)
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for i, text in enumerate((" said", f" {number}")):
                end = "length" if i else None
                if self.path == "/generate":
                    reason = {"type": "length"} if end else None
                    event: dict[str, Any] = {
                        "text": " said" + (text if i else ""),
                        "meta_info": {"completion_tokens": i + 1, "finish_reason": reason},
                    }
                elif self.path.endswith("/chat/completions"):
                    event = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": end}]}
                else:
                    event = {"choices": [{"index": 0, "text": text, "finish_reason": end}]}
                self.send(b"data: " + json.dumps(event).encode() + b"\n\n")
            usage = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}
            self.send(b"data: " + json.dumps(usage).encode() + b"\n\ndata: [DONE]\n\n")
            self.wfile.write(b"0\r\n\r\n")

        def send(self, data: bytes) -> None:
            self.wfile.write(b"%x\r\n" % len(data) + data + b"\r\n")
            self.wfile.flush()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    kept.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield kept
    server.shutdown()
    server.server_close()


def bench(seen: Seen, folder: Path, *options: str) -> dict[str, Any]:
    argv = [sys.executable, "-m", "k2tui.loadgen", "--url", seen.url, "--db", str(folder / "runs.db"), "--json",
            "--warmup", "0", "--no-ignore-eos", *options]  # fmt: skip
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["runs"]
    assert row["completed"] == row["num_requests"] == len(seen.requests)
    return row


def write(path: Path, *items: object) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


TRACE = (
    {"timestamp": 5000, "input_length": 600, "output_length": 2, "hash_ids": [7, 1]},
    {"timestamp": 5300, "input_length": 520, "output_length": 2, "hash_ids": [7, 2]},
    {"timestamp": 5600, "input_length": 300, "output_length": 2, "hash_ids": [9]},
)


def test_a_trace_is_replayed_at_its_times_with_its_shared_blocks(seen: Seen, tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", *TRACE)
    row = bench(seen, tmp_path, "--dataset", f"mooncake:{path}", "--num-prompts", "3")
    assert row["load_shape"] == "trace"
    ids = [body["input_ids"] for body in seen.bodies]
    assert [len(x) for x in ids] == [600, 520, 300]
    assert ids[0][:512] == ids[1][:512] and ids[0][512:520] != ids[1][512:520]
    assert ids[2] != ids[0][:300]
    at = [t for t, _, _ in seen.requests]
    # never early (a busy machine may be late); the schedule is absolute
    assert at[1] - at[0] > 0.2 and at[2] - at[0] > 0.5


def test_a_trace_can_run_faster_and_be_cut(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", *TRACE)
    made = build(Wanted(f"mooncake:{path}", trace_speed=2.0), 1)
    assert [p.due_s for p in made.prompts] == pytest.approx([0.0, 0.15, 0.3])
    assert [p.output_len for p in made.prompts] == [2, 2, 2]
    cut = build(Wanted(f"mooncake:{path}", num_prompts=2), 1)
    assert len(cut.prompts) == 2 and cut.params["sha"] != made.params["sha"]


def test_prefixes_are_shared_in_groups(seen: Seen, tmp_path: Path) -> None:
    row = bench(
        seen, tmp_path, "--dataset", "shared-prefix", "--num-prompts", "8", "--prefix-len", "40", "--prefix-groups", "2",
        "--random-input-len", "5", "--random-output-len", "2", "--concurrency", "2",
    )  # fmt: skip
    assert row["workload"] == "shared prefix 40+5 out 2"
    heads = Counter(tuple(body["input_ids"][:40]) for body in seen.bodies)
    assert sorted(heads.values()) == [4, 4]
    assert all(len(body["input_ids"]) == 45 for body in seen.bodies)
    assert len({tuple(body["input_ids"]) for body in seen.bodies}) == 8  # no whole prompt twice


def test_popular_prefixes_come_more_often(tmp_path: Path) -> None:
    made = build(Wanted("shared-prefix", num_prompts=400, prefix_len=8, prefix_groups=5, zipf=1.5), 3)
    counts = Counter(p.ids[:8] for p in made.prompts).most_common()
    assert len(counts) == 5 and counts[0][1] > 2 * counts[1][1] > 2 * counts[-1][1]
    assert build(Wanted("shared-prefix", num_prompts=400, prefix_len=8, prefix_groups=5, zipf=1.5), 3) == made
    chat = build(Wanted("shared-prefix", api="chat", num_prompts=4, prefix_len=8, prefix_groups=2), 3)
    assert (
        chat.prompts[0].text.split()[:8]
        == chat.prompts[2].text.split()[:8]
        != chat.prompts[1].text.split()[:8]
    )


@pytest.mark.parametrize("api", ["chat", "completions", "generate"])
def test_a_talk_carries_the_servers_answers(seen: Seen, tmp_path: Path, api: str) -> None:
    row = bench(
        seen, tmp_path, "--dataset", "multi-turn", "--turns", "3", "--num-prompts", "2", "--random-input-len", "4",
        "--random-output-len", "2", "--concurrency", "1", "--api", api,
    )  # fmt: skip
    assert row["num_requests"] == 6
    if api == "chat":
        first: Any = [body["messages"] for body in seen.bodies[:3]]
        assert [[m["role"] for m in talk] for talk in first] == [
            ["user"],
            ["user", "assistant", "user"],
            ["user", "assistant", "user", "assistant", "user"],
        ]
        assert first[1][1]["content"] == " said 1" and first[2][3]["content"] == " said 2"
        assert first[2][:3] == first[1]
    else:
        key = "text" if api == "generate" else "prompt"
        talks = [body[key] for body in seen.bodies[:3]]
        assert talks[1].startswith(talks[0]) and " said 1" in talks[1]
        assert talks[2].startswith(talks[1]) and " said 2" in talks[2]


SHAREGPT = [
    {"id": "a", "conversations": [{"from": "human", "value": "Why is the sky blue?"}, {"from": "gpt", "value": "x" * 40}]},
    {"id": "b", "conversations": [{"from": "system", "value": "be kind"}, {"from": "user", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    {"id": "c", "conversations": [{"from": "human", "value": "no answer"}]},
]  # fmt: skip


@pytest.mark.parametrize("api", ["chat", "completions", "generate"])
def test_sharegpt_questions_reach_the_server(seen: Seen, tmp_path: Path, api: str) -> None:
    path = tmp_path / "talks.json"
    path.write_text(json.dumps(SHAREGPT, indent=1))
    bench(
        seen,
        tmp_path,
        "--dataset",
        f"sharegpt:{path}",
        "--num-prompts",
        "4",
        "--concurrency",
        "1",
        "--api",
        api,
    )
    key = {"generate": "text", "completions": "prompt"}.get(api)
    said = [body["messages"][-1]["content"] if key is None else body[key] for body in seen.bodies]
    assert Counter(said) == {
        "Why is the sky blue?": 2,
        "Hi": 2,
    }  # the talk without an answer is left out; the rest goes round


def test_sharegpt_asks_for_as_much_as_was_answered(tmp_path: Path) -> None:
    path = tmp_path / "talks.json"
    path.write_text(json.dumps(SHAREGPT))
    made = build(Wanted(f"sharegpt:{path}", num_prompts=2), 1)
    assert {p.text: p.output_len for p in made.prompts} == {"Why is the sky blue?": 10, "Hi": 4}
    assert {
        p.output_len for p in build(Wanted(f"sharegpt:{path}", num_prompts=2, output_len=7), 1).prompts
    } == {7}
    assert build(Wanted(f"sharegpt:{path}", num_prompts=2), 1) == made  # the seed decides the order


def test_tokenized_data_splits_at_the_first_learned_token(seen: Seen, tmp_path: Path) -> None:
    path = write(
        tmp_path / "tokenized_data.jsonl",
        {"input_ids": [11, 12, 13, 14, 15], "loss_mask": [0, 0, 0, 1, 1]},
        {"input_ids": [21, 22, 23, 24], "loss_mask": [0, 0, 0, 0]},
    )
    bench(seen, tmp_path, "--dataset", f"tokenized:{path}", "--num-prompts", "2", "--concurrency", "1")
    sent = {tuple(body["input_ids"]): body["sampling_params"]["max_new_tokens"] for body in seen.bodies}
    assert sent == {(11, 12, 13): 2, (21, 22, 23, 24): 128}
    with pytest.raises(UsageError, match="chat route"):
        build(Wanted(f"tokenized:{path}", api="chat"), 1)


def test_any_jsonl(tmp_path: Path) -> None:
    path = write(
        tmp_path / "mixed.jsonl",
        {"prompt": "one", "max_tokens": 5},
        {"text": "two", "output_len": 6},
        {"question": "three"},
        {"instruction": "four"},
        {"messages": [{"role": "user", "content": "five"}, {"role": "assistant", "content": "gone"}]},
        {"input_ids": [1, 2, 3]},
        {"input_ids": [4, 5], "output_len": 9},
        {"conversations": [{"from": "human", "value": "seven"}, {"from": "gpt", "value": "yes"}]},
    )
    made = build(Wanted(f"jsonl:{path}", num_prompts=8), 1).prompts
    texts = {p.text: p.output_len for p in made if p.text}
    assert texts == {"one": 5, "two": 6, "three": 128, "four": 128, "seven": 4}
    assert {p.ids: p.output_len for p in made if p.ids} == {(1, 2, 3): 128, (4, 5): 9}
    (talk,) = [p.messages for p in made if p.messages]
    assert [m["content"] for m in talk] == ["five"]


@pytest.mark.parametrize(
    ("kind", "text", "told"),
    [
        ("jsonl", '{"prompt": "a"}\n{"nothing": 1}\n', ":2: no prompt found"),
        ("jsonl", '{"prompt": "a"}\nnot json\n', ":2: not valid JSON"),
        ("jsonl", '{"prompt": "a"}\n{"prompt": ' + "[" * 100_000 + "\n", ":2: nested too deeply"),
        ("jsonl", "[\n" + "[" * 100_000, " line 2: nested too deeply"),
        ("tokenized", '{"input_ids": [' + "1" * 5000 + "]}", ":1: a number of more than 4,300 digits"),
        ("jsonl", "[{]", ": not valid JSON"),
        ("jsonl", '{"prompt": "a", "max_tokens": 0}\n', ":1: the output length 0"),
        ("jsonl", "[1]", "item 1 is no object"),
        ("jsonl", "", "no usable prompt"),
        ("sharegpt", '{"prompt": "a"}\n', ":1: no list 'conversations'"),
        ("tokenized", '{"input_ids": ["a"]}\n', ":1: 'input_ids' must be a list"),
        ("mooncake", '{"timestamp": 1, "input_length": 2}\n', ":1: a trace line needs the number 'output_length'"),
        ("mooncake", "\n", "no trace line"),
    ],
)  # fmt: skip
def test_a_bad_file_is_told_by_line_before_anything_is_sent(
    tmp_path: Path, kind: str, text: str, told: str
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        build(Wanted(f"{kind}:{path}"), 1)
    assert told in caught.value.message and "data.jsonl" in caught.value.message


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UsageError) as caught:
        build(Wanted("randomly"), 1)
    assert "shared-prefix" in caught.value.hint


def test_workloads_differ_by_content_and_not_by_order_of_options(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", {"prompt": "one"})
    b = write(tmp_path / "b.jsonl", {"prompt": "two"})
    assert build(Wanted(f"jsonl:{a}"), 1).params["sha"] != build(Wanted(f"jsonl:{b}"), 1).params["sha"]


def test_a_prompt_that_no_request_can_hold_is_refused_in_words() -> None:
    with pytest.raises(UsageError, match="surrogate"):
        Dialect("completions", "h").request({"prompt": "\ud800"})


@pytest.mark.parametrize(("shape", "burstiness", "cv"), [("poisson", 1, 1.0), ("gamma", 0.25, 2.0), ("gamma", 4, 0.5), ("constant", 1, 0.0)])  # fmt: skip
def test_arrivals_keep_the_rate_and_their_shape(shape: str, burstiness: float, cv: float) -> None:
    at = arrivals(4000, rate=200, shape=shape, seed=5, burstiness=burstiness)
    gaps = [b - a for a, b in itertools.pairwise(at)]
    assert min(gaps) >= 0 and len(at) == 4000
    assert (len(at) - 1) / (at[-1] - at[0]) == pytest.approx(200, rel=0.01)
    assert statistics.pstdev(gaps) / statistics.mean(gaps) == pytest.approx(cv, abs=0.12)
    assert at == arrivals(4000, rate=200, shape=shape, seed=5, burstiness=burstiness)
