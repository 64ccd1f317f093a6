"""The plug-in in a real SGLang on this CPU: states equal to transformers' output_hidden_states, and the whole of `k2tui extract`.

One server for all tests. Needs the CPU kit (K2TUI_SGLANG_KIT, K2TUI_SGLANG_VENV) and torch and transformers here.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
KIT = Path(os.environ.get("K2TUI_SGLANG_KIT", ROOT.parent / "shared" / "sglang-cpu"))
VENV = Path(os.environ.get("K2TUI_SGLANG_VENV", Path.home() / ".cache" / "k2tui-tests" / "sglang-0.5.23"))
PORT = int(os.environ.get("K2TUI_SGLANG_CAPTURE_PORT", "32790"))

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not KIT.is_dir(), reason=f"no SGLang CPU kit at {KIT} (set K2TUI_SGLANG_KIT)"),
]
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from k2tui.capture.client import Connection, begin_run, capture_status  # noqa: E402
from k2tui.capture.request import CaptureRequest  # noqa: E402
from k2tui.capture.site import make_site  # noqa: E402
from k2tui.dataset.rows import make_row  # noqa: E402
from k2tui.states.reader import StatesReader  # noqa: E402

LAYERS = 6


class Server:
    def __init__(self, folder: Path) -> None:
        self.model = folder / "model"
        subprocess.run(
            [str(VENV / "bin/python"), str(KIT / "tiny_models.py"), "llama", str(self.model), str(LAYERS)],
            check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.root = folder / "capture"
        self.root.mkdir()
        env = {
            **os.environ, "VENV": str(VENV), "PORT": str(PORT), "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(make_site(folder / "site")),
            "K2TUI_CAPTURE_DIR": str(self.root), "K2TUI_CAPTURE_BOUNDARIES": ",".join(map(str, range(LAYERS))),
            "K2TUI_CAPTURE_PINNED_MB": "64", "K2TUI_CAPTURE_MIN_FREE_MB": "50",
        }  # fmt: skip
        self.log = folder / "server.log"
        # a small chunk, so that most samples come in several; the overlap scheduler stays as the kit sets it
        up = subprocess.run(
            [str(KIT / "up.sh"), str(self.log), str(self.model), "--chunked-prefill-size", "64"],
            capture_output=True,
            text=True,
            env=env,
        )
        assert "READY" in up.stdout, up.stdout + self.log.read_text(errors="replace")[-3000:]
        self.url = f"http://127.0.0.1:{PORT}"
        self.pid = int((folder / "server.log.pid").read_text())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, sglang_venv: Path) -> Iterator[Server]:
    s = Server(tmp_path_factory.mktemp("sglang"))
    yield s
    os.killpg(s.pid, signal.SIGTERM)
    time.sleep(2)
    try:
        os.killpg(s.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def ask(url: str, ids: list[int], rid: str | None = None, tokens: int = 1) -> Any:
    body: dict[str, Any] = {"input_ids": ids, "sampling_params": {"max_new_tokens": tokens, "temperature": 0}}
    if rid:
        body["rid"] = rid
    conn = Connection(url, 200)
    try:
        return conn.call("POST", "/generate", body)
    finally:
        conn.close()


def test_states_are_those_of_transformers_at_every_boundary(server: Server) -> None:
    """Batching, chunks of 64 tokens, prefixes that lie in the radix cache, twins at once, ordinary traffic in between."""
    rng = random.Random(0)
    base = [rng.randrange(3, 1000) for _ in range(150)]
    samples = [[rng.randrange(3, 1000) for _ in range(rng.randrange(5, 200))] for _ in range(8)]
    samples += [base[:120], base[:120], base[:100] + samples[0], base[:140], samples[1][:]]
    begin_run(
        [server.url],
        "all",
        {
            "hidden_size": 128,
            "num_hidden_layers": LAYERS,
            "boundaries": list(range(LAYERS)),
            "last_rows": "all",
        },
    )
    ask(server.url, base)  # now in the radix cache
    answers: dict[int, Any] = {}

    def one(i: int) -> None:
        n = len(samples[i])
        answers[i] = ask(server.url, samples[i], CaptureRequest("all", i, n, ((n // 2, n),), "t").to_rid())

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(samples))]
    threads += [threading.Thread(target=ask, args=(server.url, base[: 90 + k], None, 8)) for k in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    wait_published(server, "all", len(samples))
    model = transformers.AutoModelForCausalLM.from_pretrained(server.model, dtype=torch.bfloat16).eval()
    reader = StatesReader(server.root / "all")
    assert reader.indices() == list(range(len(samples)))
    for i, ids in enumerate(samples):
        s = reader[i]
        assert s.input_ids.tolist() == ids
        with torch.no_grad():
            out = model(s.input_ids[None], output_hidden_states=True)
        for b in range(LAYERS):
            ref = out.hidden_states[b][0].float()
            mine = s.aux[:, b * 128 : (b + 1) * 128].float()
            assert (mine - ref).abs().max() <= 0.03 * ref.abs().max(), f"sample {i}, boundary {b}"
        ref = out.hidden_states[-1][0].float()
        assert (s.last.float() - ref).abs().max() <= 0.03 * ref.abs().max(), f"sample {i}, last"
        head = model.lm_head(s.last[-1])
        assert answers[i]["output_ids"][0] in head.topk(2).indices.tolist()
    # one boundary further is another thing: the tolerance above can tell
    assert (reader[0].aux[:, 128:256].float() - reader[0].aux[:, 256:384].float()).abs().max() > 0.1


def wait_published(server: Server, run: str, count: int) -> None:
    conn = Connection(server.url, 15)
    conn.call("POST", "/k2tui_capture/flush", {"run": run})
    end = time.monotonic() + 30
    while time.monotonic() < end:
        told = capture_status(server.url, run)
        if sum(len(s["samples"]) for s in told["run"]["shards"]) >= count:
            return
        time.sleep(0.1)
    raise AssertionError(f"not published: {told}")


def test_extract_survives_a_killed_client_and_proves_alignment(server: Server, tmp_path: Path) -> None:
    rng = random.Random(4)
    data = tmp_path / "tokenized_data.jsonl"
    with data.open("w") as fh:
        for _ in range(60):
            n = rng.randrange(10, 90)
            fh.write(
                make_row(
                    [rng.randrange(3, 1000) for _ in range(n)], [0] * 5 + [1] * (n - 5), 5, False, "stop"
                ).to_line()
            )
    out = server.root / "mine"
    argv = [
        sys.executable,
        "-m",
        "k2tui",
        "extract",
        "--data",
        str(data),
        "--out",
        str(out),
        "--url",
        server.url,
        "--json",
    ]
    argv += ["--keep-free-gb", "0.1", "--boundaries", "1,3,4"]
    first = subprocess.Popen([*argv, "--no-proof"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    time.sleep(2.5)
    first.kill()
    first.wait()
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["complete"] and result["samples"] == 60
    assert result["proofs"]["head"]["greedy_agreement"] >= 0.97
    reader = StatesReader(out)
    assert reader.indices() == list(range(60)) and reader.shadowed == 0
    checked = subprocess.run(
        [sys.executable, "-m", "k2tui", "states", "check", str(out), "--data", str(data)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    shutil.rmtree(out)


def test_refusals_are_in_words(server: Server, tmp_path: Path) -> None:
    from k2tui.errors import K2Error

    with pytest.raises(K2Error, match="not captured by this server"):
        begin_run(
            [server.url], "bad", {"hidden_size": 128, "num_hidden_layers": LAYERS, "boundaries": [2, 9]}
        )
    with pytest.raises(K2Error, match="run name"):
        begin_run(
            [server.url], "../bad", {"hidden_size": 128, "num_hidden_layers": LAYERS, "boundaries": [2]}
        )
    # a capture request for a run that nobody began is answered, and refused by name
    ask(server.url, [5, 6, 7], CaptureRequest("nobody", 3, 3, (), "t").to_rid())
    end = time.monotonic() + 5
    while time.monotonic() < end:
        reasons = capture_status(server.url)["writers"][0]["runs"].get("nobody", {}).get("reasons", {})
        if reasons:
            break
        time.sleep(0.1)
    assert "manifest" in reasons["3"]
