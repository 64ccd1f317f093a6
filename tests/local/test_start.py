"""What a start looks like in the log, and every way in which it goes wrong."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest

from k2tui import paths
from k2tui.config import Profile
from k2tui.engines import get
from k2tui.errors import UsageError
from k2tui.local.arguments import parse

from .conftest import READY, Engine, Launcher

PHASES = (
    r"^\[k2tui embedded engine\] .*for trying the pipeline and for tests",
    r"server_args=\{'model_path': '",
    r"Using default HuggingFace chat template with detected content format: string",
    r"Init parallel begin\.",
    r"Init parallel ends\. elapsed=\d+\.\d\d s",
    r"Load weight begin\. avail mem=\d+\.\d\d GB",
    r"Loading safetensors checkpoint shards:   0% Completed \| 0/5 \[00:00<\?, \?it/s\]",
    r"Loading safetensors checkpoint shards: 100% Completed \| 5/5 \[",
    r"Load weight end\. elapsed=\d+\.\d\d s, type=LlamaForCausalLM, avail mem=\d+\.\d\d GB, mem usage=\d+\.\d\d GB\.",
    r"KV Cache is allocated\. dtype: torch\.float32, #tokens: 1024, K size: \d+\.\d\d GB, V size: \d+\.\d\d GB",
    r"Memory pool end\. avail mem=\d+\.\d\d GB",
    r"max_total_num_tokens=1024, chunked_prefill_size=2048, max_prefill_tokens=16384, max_running_requests=4, context_len=256, ",
    r"Engine startup timings \(s\): load_weight=\d",
    r"\] INFO:     Started server process \[\d+\]",
    r"\] INFO:     Uvicorn running on http://127\.0\.0\.1:\d+ \(Press CTRL\+C to quit\)",
    r'\] INFO:     127\.0\.0\.1:\d+ - "GET /model_info HTTP/1\.1" 200 OK',
    r"Prefill batch, #new-seq: 1, #new-token: 6, #cached-token: 0, token usage: 0\.\d\d, #running-req: 0, #queue-req: 0, "
    r"#pending-token: 0, cpu graph: False, input throughput \(token/s\): \d",
    r'\] INFO:     127\.0\.0\.1:\d+ - "POST /generate HTTP/1\.1" 200 OK',
    r"The server is fired up and ready to roll!",
)


def test_the_log_speaks_sglangs_grammar_in_order(shared: Engine) -> None:
    text = shared.log
    at = 0
    for phase in PHASES:
        found = re.compile(phase, re.MULTILINE).search(text, at)
        assert found, f"{phase} is not in the log after position {at}:\n{text[at:][:800]}"
        at = found.end()
    stamped = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] ")
    for line in text.split(READY)[0].splitlines()[1:]:
        assert not line or "shards:" in line or stamped.match(line), line
    body = {"text": "a", "sampling_params": {"max_new_tokens": 30, "ignore_eos": True, "temperature": 0}}
    shared.client.post("/generate", json=body)
    assert re.search(
        r"Decode batch, #running-req: 1, #token: \d+, token usage: 0\.\d\d, cpu graph: False, gen throughput \(token/s\): \d+\.\d\d, #queue-req: 0",
        shared.log,
    )


def test_shards_are_counted_one_by_one(launch: Launcher, model_dir: Path) -> None:
    """With a slow disk the bar shows every shard, the port is closed, and ready comes after the last."""
    engine = launch("--model-path", model_dir, "--port", "0", "--load-delay-s", "0.3", ready=False)
    engine.wait_for("5/5")
    counts = [int(n) for n in re.findall(r"Completed \| (\d)/5", engine.log)]
    assert sorted(set(counts)) == [0, 1, 2, 3, 4, 5]
    assert "Uvicorn running" not in engine.log.split("4/5")[0]
    engine.wait_for(READY)


def test_sigterm_lets_running_requests_finish(launch: Launcher, model_dir: Path) -> None:
    engine = launch("--model-path", model_dir, "--port", "0")
    body = {"text": "a", "sampling_params": {"max_new_tokens": 250, "ignore_eos": True, "temperature": 0}}
    answers: list[httpx.Response] = []
    asking = threading.Thread(
        target=lambda: answers.append(httpx.post(engine.url + "/generate", json=body, timeout=60))
    )
    asking.start()
    while engine.client.get("/v1/loads").json()["loads"][0]["num_running_reqs"] == 0 and not answers:
        time.sleep(0.01)
    assert engine.end() == 0
    asking.join()
    assert answers[0].json()["meta_info"]["completion_tokens"] == 250
    assert "SIGTERM received. signum=None frame=None. Draining requests and shutting down..." in engine.log
    assert (
        "Gracefully exiting... Remaining number of requests 0. Remaining requests remaining_rids=[]."
        in engine.log
    )
    assert "Traceback" not in engine.log


def test_a_second_sigterm_does_not_wait(launch: Launcher) -> None:
    engine = launch("--model-path", paths.assets_dir() / "tiny-target", "--port", "0")
    body = {"text": "a", "sampling_params": {"max_new_tokens": 1000, "ignore_eos": True, "temperature": 0}}
    answers: list[httpx.Response] = []
    asking = threading.Thread(
        target=lambda: answers.append(httpx.post(engine.url + "/generate", json=body, timeout=60))
    )
    asking.start()
    while engine.client.get("/v1/loads").json()["loads"][0]["num_running_reqs"] == 0:
        time.sleep(0.01)
    engine.process.send_signal(signal.SIGTERM)
    engine.wait_for("Draining requests")
    refused = engine.client.post("/v1/completions", json={"prompt": "a"})
    assert refused.status_code == 503
    assert refused.json()["message"] == "The server is shutting down."
    assert engine.client.get("/health").status_code == 503
    assert engine.end() == 0
    asking.join()
    meta = answers[0].json()["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert meta["completion_tokens"] < 1000
    assert "Traceback" not in engine.log


def test_a_stop_while_loading(launch: Launcher, model_dir: Path) -> None:
    engine = launch("--model-path", model_dir, "--port", "0", "--load-delay-s", "30", ready=False)
    engine.wait_for("0/5")
    assert engine.end(signal.SIGINT) == 0  # not after its 5 shards of 30 s: `end` waits for 30 s and kills
    assert "SIGINT received while starting" in engine.log
    assert "Traceback" not in engine.log


def broken(model_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_dir, tmp_path / "broken"))


def fails(engine: Engine, *words: str) -> None:
    assert engine.process.wait(90) == 1
    for word in words:
        assert word in engine.log, engine.log
    assert "Traceback" not in engine.log
    assert READY not in engine.log
    assert "What to do: " in engine.log


def test_missing_folder(launch: Launcher, tmp_path: Path) -> None:
    fails(
        launch("--model-path", tmp_path / "nowhere", ready=False),
        f"model folder {tmp_path / 'nowhere'} does not exist",
    )


def test_a_file_instead_of_a_folder(launch: Launcher, model_dir: Path) -> None:
    fails(launch("--model-path", model_dir / "config.json", ready=False), "config.json is not a folder")


def test_no_config(launch: Launcher, model_dir: Path, tmp_path: Path) -> None:
    folder = broken(model_dir, tmp_path)
    (folder / "config.json").unlink()
    fails(launch("--model-path", folder, ready=False), f"{folder} has no config.json")


def test_config_that_is_no_json(launch: Launcher, model_dir: Path, tmp_path: Path) -> None:
    folder = broken(model_dir, tmp_path)
    (folder / "config.json").write_text('{\n "a": 1,\n}')
    fails(launch("--model-path", folder, ready=False), "config.json line 3: not valid JSON")


def test_a_missing_shard_in_sglangs_words(launch: Launcher, model_dir: Path, tmp_path: Path) -> None:
    folder = broken(model_dir, tmp_path)
    (folder / "model-00003-of-00005.safetensors").unlink()
    fails(
        launch("--model-path", folder, ready=False),
        f"model.safetensors.index.json references 1 shard file(s) missing from {folder} (incomplete download?): "
        "['model-00003-of-00005.safetensors']",
    )


def test_a_shard_cut_short(launch: Launcher, model_dir: Path, tmp_path: Path) -> None:
    folder = broken(model_dir, tmp_path)
    shard = folder / "model-00004-of-00005.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1000])
    fails(
        launch("--model-path", folder, "--port", "0", ready=False),
        f"cannot read {shard}: {len(whole) - 1000} bytes on disk, {len(whole)} expected: the file was cut short",
    )


def test_the_wrong_tokenizer(launch: Launcher, model_dir: Path, tmp_path: Path) -> None:
    folder = broken(model_dir, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 1000}))
    fails(
        launch("--model-path", folder, ready=False),
        "wrong tokenizer: ",
        "has 2048 tokens, the model's vocab_size is 1000",
    )
    (folder / "tokenizer.json").write_text("{}")
    fails(launch("--model-path", folder, ready=False), "tokenizer.json: not a tokenizer")
    (folder / "tokenizer.json").unlink()
    fails(launch("--model-path", folder, ready=False), "has no tokenizer.json")


def test_a_port_in_use(launch: Launcher, model_dir: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        engine = launch("--model-path", model_dir, "--port", str(port), ready=False)
        fails(
            engine,
            f"ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', {port}): address already in use",
        )
        assert "Load weight begin" not in engine.log  # known before the load, not after


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*argv: str) -> str:
        with pytest.raises(SystemExit) as stop:
            parse(argv)
        assert stop.value.code == 2
        return capsys.readouterr().err

    assert "--model-path" in refused()
    assert "unrecognized arguments: --modle" in refused("--model-path", "x", "--modle")
    assert "0 (any free port) to 65535" in refused("--model-path", "x", "--port", "70000")
    assert "needs --speculative-draft-model-path" in refused(
        "--model-path", "x", "--speculative-algorithm", "EAGLE3"
    )
    eagle = ("--model-path", "x", "--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "d")
    assert "drafts a chain" in refused(*eagle, "--speculative-eagle-topk", "2")
    assert "must be num_steps + 1 = 4" in refused(*eagle, "--speculative-num-draft-tokens", "8")
    args, ignored = parse(
        [
            *eagle,
            "--tp-size",
            "8",
            "--trust-remote-code",
            "--mem-fraction-static",
            "0.9",
            "--attention-backend=fa3",
        ]
    )
    assert args.speculative_num_draft_tokens == 4
    assert ignored == ("--trust-remote-code", "--mem-fraction-static", "--attention-backend", "--tp-size 8")


def test_engine_plan() -> None:
    engine = get("local")
    plan = engine.launch(
        Profile(
            name="t",
            engine="local",
            model="asset:tiny-target",
            port=32401,
            python="/p",
            draft="/d",
            tp_size=2,
            args=("--x",),
        )
    )
    text = " ".join(plan.argv)
    assert text.startswith("/p -P -m k2tui.local --model-path ")
    assert "/tiny-target --host 127.0.0.1 --port 32401" in text
    assert (
        "--tp-size 2 --speculative-algorithm EAGLE3 --speculative-draft-model-path /d --speculative-num-steps 3"
        in text
    )
    assert text.endswith("--x")
    with pytest.raises(UsageError, match="ships no model 'asset:none'"):
        engine.launch(Profile(name="t", model="asset:none"))
    with pytest.raises(UsageError, match="has no model"):
        engine.launch(Profile(name="t"))
