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
from k2tui.states.check import check_states  # noqa: E402
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


def same_as_transformers(model_folder: Path, reader: StatesReader, samples: list[list[int]], step: int = 1) -> Any:
    """Every row of every `step`th sample, at each boundary and after the final norm, within bf16's tolerance. Returns the model."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16).eval()
    for i, ids in list(enumerate(samples))[::step]:
        s = reader[i]
        assert s.input_ids.tolist() == ids
        with torch.no_grad():
            out = model(s.input_ids[None], output_hidden_states=True)
        for k, b in enumerate(reader.manifest.boundaries):
            ref = out.hidden_states[b][0].float()
            mine = s.aux[:, k * 128 : (k + 1) * 128].float()
            assert (mine - ref).abs().max() <= 0.03 * ref.abs().max(), f"sample {i}, boundary {b}"
        rows = s.last_rows
        ref = out.hidden_states[-1][0].float()[rows]
        assert (s.last[rows].float() - ref).abs().max() <= 0.03 * ref.abs().max(), f"sample {i}, last"
    return model


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
    reader = StatesReader(server.root / "all")
    assert reader.indices() == list(range(len(samples)))
    model = same_as_transformers(server.model, reader, samples)
    for i in range(len(samples)):
        head = model.lm_head(reader[i].last[-1])
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


def profile_of(folder: Path, model: Path) -> Path:
    """A config with one profile: this SGLang, taken for one from before the plug-in system (its entry point is off)."""
    python = folder / "python"
    # k2tui asks an interpreter for its SGLang's version with -c; everything else is the real one
    asks = "import importlib.metadata as m; print"  # capture.server.sglang_version; the doctor's questions get the real answers
    python.write_text(
        f'#!/bin/sh\ncase "$2" in "{asks}"*) echo 0.5.9; exit;; esac\nexec {VENV}/bin/python "$@"\n'
    )
    python.chmod(0o755)
    args = ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-cuda-graph"]
    args += ["--max-total-tokens", "8192", "--chunked-prefill-size", "64"]
    env = {
        "PYTHONPATH": str(KIT / "stubs"), "STUB_ROOTS": "torchvision,soundfile,triton", "TORCHDYNAMO_DISABLE": "1",
        "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        "SGLANG_PLUGINS": "none", "K2TUI_CAPTURE_SHARD_MB": "1", "K2TUI_CAPTURE_PINNED_MB": "64", "K2TUI_CAPTURE_MIN_FREE_MB": "50",
    }  # fmt: skip
    path = folder / "config.toml"
    path.write_text(
        f'[profile.old]\nengine = "sglang"\nmodel = "{model}"\npython = "{python}"\nport = {PORT + 1}\nargs = {json.dumps(args)}\n'
        "[profile.old.env]\n" + "".join(f'{k} = "{v}"\n' for k, v in env.items())
    )
    return path


def test_a_profile_of_an_old_release_goes_through_the_launcher_and_through_kill_9(
    server: Server, tmp_path: Path
) -> None:
    """`extract --profile` alone: its server is killed, then (second call) only the writer; the states are right all the same."""
    rng = random.Random(8)
    samples = [[rng.randrange(3, 1000) for _ in range(rng.randrange(20, 150))] for _ in range(120)]
    data = tmp_path / "tokenized_data.jsonl"
    data.write_text("".join(make_row(s, [0] * 5 + [1] * (len(s) - 5), 5, False, "stop").to_line() for s in samples))
    out = tmp_path / "root" / "mine"
    env = {**os.environ, "K2TUI_CONFIG": str(profile_of(tmp_path, server.model))}
    argv = [sys.executable, "-m", "k2tui", "extract", "--data", str(data), "--out", str(out), "--profile", "old", "--json"]
    argv += ["--keep-free-gb", "0.1", "--no-proof", "--concurrency", "8"]

    def begun() -> dict[str, Any]:
        """The writer's status, once shards of this call are on disk."""
        before = len(list(out.glob("states-*")))
        end = time.monotonic() + 240
        while time.monotonic() < end:
            for path in (out.parent / ".k2tui-capture").glob("*.json"):
                told = json.loads(path.read_text())
                if told["runs"].get("mine", {}).get("samples") and len(list(out.glob("states-*"))) > before:
                    return told
            time.sleep(0.02)
        raise AssertionError((out.parent / "mine.server.log").read_text()[-3000:])

    def parent(pid: int) -> int:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])

    first = subprocess.Popen(argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    scheduler = parent(begun()["pid"])
    os.kill(parent(scheduler), signal.SIGKILL)
    _, stderr = first.communicate(timeout=120)
    assert first.returncode == 3 and "the server ended with code -9" in stderr, stderr
    second = subprocess.Popen(argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    os.kill(begun()["pid"], signal.SIGKILL)
    stdout, stderr = second.communicate(timeout=300)
    assert second.returncode == 0, stderr
    result = json.loads(stdout)
    assert 0 < result["had"] < 120 and result["samples"] == 120 and "check: clean" in stderr
    log = (out.parent / "mine.server.log").read_text(errors="replace")
    assert "Skipping plugin k2tui_capture" in log and "the writer process ended with code -9" in log
    report = check_states([out], lambda i: (samples[i], [0] * 5 + [1] * (len(samples[i]) - 5)), 120)
    assert report.ok and report.samples == 120
    same_as_transformers(server.model, StatesReader(out), samples, step=8)
