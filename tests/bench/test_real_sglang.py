"""A benchmark of a real SGLang that speculates (EAGLE-3 on this CPU): acceptance comes from each request's meta_info.

Needs the CPU kit (K2TUI_SGLANG_KIT, K2TUI_SGLANG_VENV). The draft is not trained: few drafts are right, all are counted.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from k2tui.benchdb import BenchDb

ROOT = Path(__file__).resolve().parents[2]
KIT = Path(os.environ.get("K2TUI_SGLANG_KIT", ROOT.parent / "shared" / "sglang-cpu"))

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not KIT.is_dir(), reason=f"no SGLang CPU kit at {KIT} (set K2TUI_SGLANG_KIT)"),
]
STEPS = 3  # speculative_num_steps; a chain, so 4 tokens are verified and 3 are drafts


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, sglang_venv: Path) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("spec")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "VENV": str(sglang_venv), "PORT": str(_free_port())}
    make = [str(sglang_venv / "bin/python"), str(KIT / "tiny_models.py")]
    target, draft = str(folder / "target"), str(folder / "draft")
    for words in (("llama", target, "6"), ("draft", target, draft)):
        subprocess.run([*make, *words], check=True, capture_output=True, env=env)
    log = folder / "server.log"
    up = subprocess.run(
        [str(KIT / "up.sh"), str(log), target, "--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", draft,
         "--speculative-num-steps", str(STEPS), "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(STEPS + 1)],
        capture_output=True, text=True, env=env,
    )  # fmt: skip
    assert "READY" in up.stdout, up.stdout + log.read_text(errors="replace")[-3000:]
    yield f"http://127.0.0.1:{env['PORT']}"
    pid = int((folder / "server.log.pid").read_text())
    os.killpg(pid, signal.SIGTERM)
    time.sleep(2)
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def ask(url: str, ids: list[int], tokens: int) -> dict[str, Any]:
    body = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
    }
    request = urllib.request.Request(
        f"{url}/generate", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["meta_info"]


def test_acceptance_is_what_the_server_says_of_each_request(url: str, tmp_path: Path) -> None:
    db = tmp_path / "runs.db"
    data = tmp_path / "prompts.jsonl"
    prompts = [[17 + 3 * i + k for k in range(12)] for i in range(4)]
    data.write_text("".join(json.dumps({"input_ids": ids, "output_len": 16}) + "\n" for ids in prompts))
    for api in ("generate", "completions"):
        argv = [sys.executable, "-m", "k2tui.loadgen", "--url", url, "--db", str(db), "--json", "--api", api, "--concurrency", "2",
                "--dataset", f"jsonl:{data}", "--num-prompts", "4", "--warmup", "1"]  # fmt: skip
        done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        (row,) = json.loads(done.stdout)["runs"]
        assert row["completed"] == 4 and row["count"] == "server" and row["total_output_tokens"] == 64
        with BenchDb(db, readonly=True) as store:
            records = store.records(row["run_id"])
        said = [ask(url, ids, 16) for ids in prompts]
        verify = sum(m["spec_verify_ct"] for m in said)
        assert [sum(x) for x in zip(*((r.spec_verify_ct, r.spec_num_correct_drafts, r.spec_num_proposed_drafts) for r in records), strict=True)] == [
            verify, sum(m["spec_num_correct_drafts"] for m in said), sum(m["spec_num_proposed_drafts"] for m in said),
        ]  # fmt: skip
        assert sum(r.spec_num_proposed_drafts for r in records) == STEPS * verify
        assert row["accept_length"] == pytest.approx(64 / verify)
        assert 0 <= row["accept_rate"] < 1
        assert row["tokens_per_chunk"] >= 1
