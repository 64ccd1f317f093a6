"""The online figures, from a real HTTP server that answers as SGLang does; the stages' argv; the score command offline."""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from k2tui.config import Config, Profile
from k2tui.eagle3 import online
from k2tui.eagle3.score import main as score
from k2tui.errors import K2Error, NotReadyError, UsageError
from k2tui.stages import get

from . import world


class Handler(BaseHTTPRequestHandler):
    drafts = True

    def log_message(self, *_: Any) -> None:
        pass

    def _send(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self._send({"version": "0.5.23", "speculative_num_draft_tokens": 4 if self.server.drafts else None})  # type: ignore[attr-defined]

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        count = asked["sampling_params"]["max_new_tokens"]
        meta: dict[str, Any] = {"completion_tokens": count}
        if self.server.drafts:  # type: ignore[attr-defined]
            passes = (count - 1) // 2
            meta |= {"spec_verify_ct": passes, "spec_correct_drafts_histogram": [passes - 5, 2, 2, 1]}
        ids = [7] * count if asked.get("text") == "loop" else list(range(count))
        self._send({"text": "", "output_ids": ids, "meta_info": meta})


@pytest.fixture
def servers():  # type: ignore[no-untyped-def]
    made = []
    for drafts in (True, False):
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.drafts = drafts  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        made.append(server)
    yield [f"http://127.0.0.1:{s.server_address[1]}" for s in made]
    for s in made:
        s.shutdown()


def test_figures_come_from_meta_info(servers: list[str]) -> None:
    prompts = [online.Prompt(input_ids=(1, 2)), online.Prompt(text="loop"), online.Prompt(text="x")]
    report = online.measure(servers[0], prompts, max_new_tokens=41, concurrency=2, baseline_url=servers[1])
    assert (report.requests, report.tokens, report.verify_ct) == (3, 123, 60)
    assert report.accept_length == pytest.approx(2.0) and report.server_accept_length == pytest.approx(2.05)
    assert report.by_position == pytest.approx((15 / 60, 9 / 60, 3 / 60))
    assert report.accept_rate == pytest.approx(1 / 3)
    assert (
        report.loops == 1
        and report.same_as_baseline == 1.0
        and report.speedup is not None
        and report.speedup > 0
    )


class VllmHandler(Handler):
    """As vLLM 0.32: completions without a word on drafting, counters for everybody. 3 drafts a pass, the first accepted."""

    def do_GET(self) -> None:
        made, passes = self.server.made, self.server.passes  # type: ignore[attr-defined]
        if self.path == "/v1/models":
            return self._send({"data": [{"id": "tiny", "owned_by": "vllm"}]})
        if self.path == "/version":
            return self._send({"version": "0.32.0"})
        if self.path != "/metrics":
            return self.send_error(404)
        lines = [f'vllm:generation_tokens_total{{engine="0"}} {made}.0']
        if self.server.drafts:  # type: ignore[attr-defined]
            spec = 'vllm:spec_decode_num_{}_total{{engine="0"{}}} {}.0'
            lines += [spec.format("drafts", "", passes), spec.format("draft_tokens", "", 3 * passes)]
            lines += [spec.format("accepted_tokens", "", passes)]
            lines += [
                spec.format("accepted_tokens_per_pos", f',position="{k}"', passes if k == 0 else 0)
                for k in range(3)
            ]
        body = "\n".join(lines).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["model"] == "tiny" and asked["temperature"] == 0.0
        count = asked["max_tokens"]
        self.server.made += count + self.server.others  # type: ignore[attr-defined]
        self.server.passes += (count - 1) // 2  # type: ignore[attr-defined]
        self._send({"choices": [{"token_ids": list(range(count))}], "usage": {"completion_tokens": count}})


@pytest.fixture
def vllm_servers():  # type: ignore[no-untyped-def]
    made = []
    for drafts in (True, False):
        server = ThreadingHTTPServer(("127.0.0.1", 0), VllmHandler)
        server.drafts, server.made, server.passes, server.others = drafts, 500, 70, 0  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        made.append(server)
    yield made
    for s in made:
        s.shutdown()


def test_vllm_is_counted_by_what_its_counters_grew(vllm_servers: list[Any]) -> None:
    urls = [f"http://127.0.0.1:{s.server_address[1]}" for s in vllm_servers]
    prompts = [online.Prompt(input_ids=(1, 2)), online.Prompt(text="x")]
    report = online.measure(urls[0], prompts, max_new_tokens=41, baseline_url=urls[1])
    assert (report.version, report.tokens, report.verify_ct) == ("0.32.0", 82, 40), "the warm-up is left out"
    assert report.accept_length == pytest.approx(2.0) and report.server_accept_length == pytest.approx(2.0)
    assert report.by_position == pytest.approx((1.0, 0.0, 0.0)) and report.accept_rate == pytest.approx(1 / 3)
    assert report.same_as_baseline == 1.0
    with pytest.raises(K2Error, match="without a draft"):
        online.measure(urls[1], prompts)
    vllm_servers[0].others = 5
    with pytest.raises(K2Error, match="for everybody"):
        online.measure(urls[0], prompts)


def test_a_server_without_a_draft_is_said(servers: list[str]) -> None:
    with pytest.raises(K2Error, match="without a draft"):
        online.measure(servers[1], [online.Prompt(text="x")])
    with pytest.raises(NotReadyError):
        online.measure("http://127.0.0.1:9", [online.Prompt(text="x")])


def test_prompts_of_tokenized_data(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}\n{"prompt": "hi"}\n')
    assert online.read_prompts(path, 9) == [online.Prompt(input_ids=(5, 6)), online.Prompt(text="hi")]
    path.write_text('{"a": 1}\n')
    with pytest.raises(UsageError, match=r"d\.jsonl:1"):
        online.read_prompts(path, 9)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"text": "a\\ud83d"}', "the prompt's character 2 is half of a pair (\\ud83d)"),
        (b'{"text": "\xff"}', "not UTF-8 text"),
        (b"\x00\x01", "not valid JSON"),
        (b"3", "neither input_ids nor text"),
        (b'{"input_ids": [1, "x"]}', "input_ids holds 'x'"),
        (b'{"input_ids": [1, 1e400]}', "input_ids holds 'inf'"),
        (b'{"input_ids": [-1]}', "input_ids holds '-1'"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_wrong_prompt_is_named_by_its_line(tmp_path: Path, line: bytes, said: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes('{"text": "a\u2028b"}\n\n'.encode() + line + b"\n")
    assert online.read_prompts(path, 1) == [online.Prompt(text="a\u2028b")]
    with pytest.raises(UsageError) as caught:
        online.read_prompts(path, 9)
    assert caught.value.message.startswith(f"{path}:3: {said}")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--limit", "-1"), ("--concurrency", "0"), ("--max-new-tokens", "0"), ("--temperature", "nan"), ("--temperature", "-1"), ("--num-steps", "0"),
        ("--ttt-length", "0"), ("--chains", "-1"), ("--max-tokens", "0"), ("--url", "http://[::1"), ("--url", "127.0.0.1:3"), ("--url", "ftp://a"),
        ("--url", "http://"), ("--url", "http://a:99999"), ("--baseline-url", "http://[::1"),
    ],
)  # fmt: skip
def test_a_wrong_flag_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, value: str) -> None:
    (tmp_path / "d.jsonl").write_text('{"text": "x"}\n')
    url = [] if flag == "--url" else ["--url", "http://127.0.0.1:9"]
    assert score(["--prompts", str(tmp_path / "d.jsonl"), *url, f"{flag}={value}"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"k2tui evaluate: {flag} ") and value in said


def test_a_secret_in_the_address_is_never_shown(servers: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "d.jsonl").write_text('{"text": "x"}\n')
    ask = ["--prompts", str(tmp_path / "d.jsonl"), "--max-new-tokens", "41"]
    with_user = [s.replace("//", "//u:HUSH@") for s in servers]
    assert score([*ask, "--url", with_user[0], "--baseline-url", with_user[1], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["url"] == servers[0].replace("//", "//u:***@")
    assert score([*ask, "--url", with_user[0]]) == 0
    assert "//u:***@" in (told := capsys.readouterr()).out and "HUSH" not in told.out + told.err
    for url, code in (
        (with_user[1], 1), ("http://u:HUSH@127.0.0.1:9/x", 3), ("http://127.0.0.1:9/?token=HUSH", 3), ("http://u:HUSH@[::1", 2), ("ftp://a/?token=HUSH", 2),
    ):  # fmt: skip
        assert score([*ask, "--url", url]) == code
        told = capsys.readouterr()
        assert "***" in told.err and "HUSH" not in told.out + told.err, told
    prompt = online.Prompt(text="x")
    for url, read in (("http://u:HUSH@127.0.0.1:9", lambda *_: None), (with_user[0], lambda *_: {}["x"])):
        with online._client(url, 5.0) as client, pytest.raises(K2Error) as caught:
            online._post(client, url, "/generate", {"sampling_params": {"max_new_tokens": 41}, "text": prompt.text}, read, "")  # type: ignore[arg-type]
        assert "u:***@" in caught.value.message
    with pytest.raises(K2Error, match=r"u:\*\*\*@"):
        online._vllm_metrics("http://u:HUSH@127.0.0.1:9")


def test_score_offline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from k2tui.eagle3.train import main as train

    head = world.make_target(tmp_path / "t")
    samples = world.make_samples(head, 24)
    world.write_states(tmp_path / "s", samples[:18], tmp_path / "t")
    world.write_states(tmp_path / "held", samples[18:], tmp_path / "t")
    common = ["--target", str(tmp_path / "t")]
    assert train([*common, "--states", str(tmp_path / "s"), "--eval-states", str(tmp_path / "held"), "--out", str(tmp_path / "o"), "--epochs", "4", "--lr", "3e-3", "--ttt-length", "3", "--draft-vocab-size", "64", "--device", "cpu"]) == 0  # fmt: skip
    capsys.readouterr()
    line = [
        *common,
        "--draft",
        str(tmp_path / "o" / "draft-last"),
        "--states",
        str(tmp_path / "held"),
        "--ttt-length",
        "3",
        "--device",
        "cpu",
    ]
    assert score([*line, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    rows = [json.loads(x) for x in (tmp_path / "o" / "metrics.jsonl").read_text().splitlines()]
    assert figures["accept_length"] == pytest.approx(
        rows[-1]["accept_length"], abs=0.03
    )  # the export is bf16
    assert figures["covered"] == 1.0 and figures["chain"]["verify_ct"] == sum(figures["chain"]["histogram"])
    assert score(line) == 0 and "expected accept length with 3 draft steps" in (told := capsys.readouterr()).out
    assert told.err.startswith("loading torch"), "it is not silent while it works"
    assert score(common) == 2 and "--draft, --states" in capsys.readouterr().err


CONFIG = Config(profiles={"tiny": Profile(name="tiny", model="asset:tiny-target", port=31000)})


def test_stage_argv() -> None:
    plan = get("train").plan(CONFIG, {"states": "S", "out": "O", "gpus": "0,1", "lr": 1e-5, "shard": True})
    first = (sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python")
    assert plan.argv[:12] == (*first, sys.executable, "-P", "-m", "k2tui.eagle3.train")
    assert (
        "--lr=1e-05" in plan.argv
        and "--shard" in plan.argv
        and plan.argv[plan.argv.index("--target") + 1] == "asset:tiny-target"
    )
    assert plan.locks == ("gpu:0", "gpu:1") and plan.env == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }
    with pytest.raises(UsageError, match="states"):
        get("train").plan(CONFIG, {"out": "O"})
    with pytest.raises(UsageError, match="'learning'"):
        get("train").plan(CONFIG, {"states": "S", "out": "O", "learning": 1})
    assert "--url=http://127.0.0.1:31000" in get("evaluate").plan(CONFIG, {"prompts": "P"}).argv
    assert "--target=asset:tiny-target" in get("evaluate").plan(CONFIG, {"draft": "D", "states": "S"}).argv
    with pytest.raises(UsageError, match="draft"):
        get("evaluate").plan(CONFIG, {"states": "S"})


def test_every_stage_flag_is_a_flag_of_the_program() -> None:
    import argparse

    from k2tui.eagle3 import score as score_module
    from k2tui.eagle3 import train as train_module
    from k2tui.stages import evaluate, train

    for module, stage in ((train_module, train), (score_module, evaluate)):
        parser = argparse.ArgumentParser()
        module.add_arguments(parser)
        known = {a.dest for a in parser._actions}
        assert {*stage._FLAGS, *getattr(stage, "_SWITCHES", ())} <= known


def test_the_verbs_load_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, argparse; from k2tui.verbs import train, evaluate; p = argparse.ArgumentParser(); train.add_arguments(p); assert not {'torch', 'httpx', 'textual', 'numpy'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
