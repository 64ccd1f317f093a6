"""The whole of prepare and extract on the embedded engine, as real processes: kills at random moments, several servers, proofs."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the embedded engine needs the `local` extra")
pytest.importorskip("tokenizers")

from k2tui import paths  # noqa: E402
from k2tui.capture.client import Connection, capture_status  # noqa: E402
from k2tui.dataset.rows import RowFile, make_row  # noqa: E402
from k2tui.states.check import check_states  # noqa: E402
from k2tui.states.reader import StatesReader  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
MODEL = paths.assets_dir() / "tiny-target"
pytestmark = [pytest.mark.timeout(240), pytest.mark.skipif(not (MODEL / "config.json").exists(), reason="no tiny target")]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Engine:
    """One embedded engine that captures below `root`. `kill` is SIGKILL; `start` again uses the same port."""

    def __init__(self, root: Path) -> None:
        self.root, self.port = root, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        env = {**os.environ, "K2TUI_CAPTURE_DIR": str(self.root), "K2TUI_CAPTURE_MIN_FREE_MB": "10", "K2TUI_CAPTURE_SHARD_MB": "1", "OMP_NUM_THREADS": "1"}
        argv = [sys.executable, "-m", "k2tui.local", "--model-path", str(MODEL), "--port", str(self.port), "--skip-server-warmup"]
        log = (self.root / f"{self.port}.log").open("ab")
        self.process = subprocess.Popen(argv, stdout=log, stderr=log, env=env, cwd=ROOT)

    def ready(self) -> Engine:
        end = time.monotonic() + 90
        while time.monotonic() < end:
            assert self.process and self.process.poll() is None, (self.root / f"{self.port}.log").read_text()[-2000:]
            try:
                if capture_status(self.url, timeout_s=2)["writers"]:
                    return self
            except Exception:
                time.sleep(0.1)
        raise AssertionError("not ready")

    def kill(self) -> None:
        assert self.process
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    made = Engine(tmp_path_factory.mktemp("capture")).ready()
    yield made
    made.kill()


def data_file(path: Path, count: int, seed: int = 0) -> Path:
    rng = random.Random(seed)
    with path.open("w") as fh:
        for _ in range(count):
            n = rng.randrange(8, 60)
            ids = [rng.randrange(3, 2000) for _ in range(n)]
            fh.write(make_row(ids, [0] * 4 + [1] * (n - 4), 4, False, "stop").to_line())
    return path


def command(data: Path, out: Path, urls: list[str], *more: str) -> list[str]:
    argv = [sys.executable, "-m", "k2tui", "extract", "--data", str(data), "--out", str(out), "--keep-free-gb", "0.01", "--json", *more]
    for url in urls:
        argv += ["--url", url]
    return argv


def extract(data: Path, out: Path, urls: list[str], *more: str, ok: bool = True) -> dict[str, Any]:
    done = subprocess.run(command(data, out, urls, *more), capture_output=True, text=True, cwd=ROOT, timeout=200)
    if ok:
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    return {"stderr": done.stderr}


def under_way(engine: Engine, run: str, client: subprocess.Popen[str]) -> None:
    """Until this engine has taken samples of the run (or the client is through)."""
    end = time.monotonic() + 90
    while time.monotonic() < end and client.poll() is None:
        if any(w["runs"].get(run, {}).get("tokens") for w in capture_status(engine.url)["writers"]):
            return
        time.sleep(0.02)


def rows_of(data: Path) -> Any:
    file = RowFile(data)
    return lambda i: (file.row(i).input_ids, file.row(i).loss_mask)


def test_states_are_the_models_own_and_proved(engine: Engine, tmp_path: Path) -> None:
    """Against the engine's own forward pass, uncached, at each boundary; and proof (a) holds."""
    from k2tui.local.checkpoint import open_checkpoint
    from k2tui.local.decoder import make_decoder
    from k2tui.local.kv import KVPool, Window

    data = data_file(tmp_path / "d.jsonl", 20)
    out = engine.root / "own"
    result = extract(data, out, [engine.url], "--last", "all")
    assert result["complete"] and result["proofs"]["head"]["greedy_agreement"] > 0.97
    decoder = make_decoder(
        open_checkpoint(str(MODEL)), impl="auto", dtype=torch.float32, device=torch.device("cpu"), capacity=128
    )
    pool = KVPool(
        num_layers=decoder.num_layers, rows=1, capacity=128, num_kv_heads=decoder.num_kv_heads, head_dim=decoder.head_dim,
        dtype=decoder.dtype, device=decoder.device,
    )  # fmt: skip
    reader = StatesReader(out)
    assert reader.indices() == list(range(20))
    with torch.inference_mode():
        for s in reader:
            positions = torch.arange(len(s.input_ids))[None]
            hidden, aux = decoder.forward(s.input_ids[None], positions, Window(pool, 0, positions, [0]), reader.manifest.boundaries)
            assert torch.allclose(s.aux.float(), aux[0], rtol=0.01, atol=0.01)
            assert torch.allclose(s.last.float(), hidden[0], rtol=0.01, atol=0.01)
    assert check_states([out], rows_of(data), 20).ok


@pytest.mark.slow
def test_kill_9_of_server_and_client_at_random_moments_then_resume(engine: Engine, tmp_path: Path) -> None:
    data = data_file(tmp_path / "d.jsonl", 150)
    rng = random.Random(3)
    out = engine.root / "killed"
    argv = command(data, out, [engine.url], "--no-proof")
    # the client dies twice, the server twice under a living client: at its work, and while it starts again
    for _ in range(2):
        client = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
        time.sleep(rng.uniform(0.4, 1.2))
        client.kill()
        client.wait()
    client = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert client.stderr
    for line in client.stderr:
        if re.match(r"\d+/150 samples", line):
            break  # its first contact is behind it: from here on it must wait for a lost server
    for _ in range(2):
        time.sleep(rng.uniform(0.0, 0.5))
        engine.kill()
        engine.start()
    stdout, stderr = client.communicate(timeout=200)
    assert client.returncode == 0, stderr
    assert json.loads(stdout)["samples"] == 150
    report = check_states([out], rows_of(data), 150)
    assert report.ok, report.problems[:3]
    assert report.samples == 150
    # asked again: nothing is done twice
    again = extract(data, out, [engine.ready().url], "--no-proof")
    assert again["had"] == 150 and check_states([out]).shadowed == report.shadowed


def own_server_argv(data: Path, out: Path, port: int, *more: str) -> list[str]:
    return [*command(data, out, []), "--profile", "tiny", "--port", str(port), *more]


def server_of(root: Path) -> int:
    """Pid of the one writer that captures below `root`."""
    end = time.monotonic() + 90
    while time.monotonic() < end:
        for path in (root / ".k2tui-capture").glob("*.json"):
            return int(json.loads(path.read_text())["pid"])
        time.sleep(0.02)
    raise AssertionError("no server came")


def ended(pid: int) -> bool:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_a_profile_is_enough_starts_extracts_checks_and_stops(tmp_path: Path) -> None:
    data = data_file(tmp_path / "d.jsonl", 12, seed=2)
    out, port = tmp_path / "root" / "states", free_port()
    done = subprocess.run(own_server_argv(data, out, port), capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["complete"] and result["samples"] == 12 and result["proofs"]["head"]["ok"]
    assert "check: clean" in done.stderr
    assert check_states([out], rows_of(data), 12).ok
    with socket.socket() as s:
        assert s.connect_ex(("127.0.0.1", port)) != 0, "the server that extract started must be gone"
        s.close()
    # asked again while something else holds the port: refused before anything is started
    with socket.socket() as s:
        s.bind(("127.0.0.1", port))
        s.listen()
        again = subprocess.run(own_server_argv(data, out, port), capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert again.returncode == 1 and f"127.0.0.1:{port} is held by pid {os.getpid()}" in again.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_the_server_of_a_profile_does_not_outlive_the_command(tmp_path: Path, number: signal.Signals) -> None:
    if number == signal.SIGKILL and sys.platform != "linux":
        pytest.skip("only Linux ends a child with its parent")
    data = data_file(tmp_path / "d.jsonl", 400, seed=2)
    out = tmp_path / "root" / "states"
    argv = own_server_argv(data, out, free_port(), "--no-proof")
    client = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
    try:
        pid = server_of(out.parent)
        client.send_signal(number)
        assert client.wait(60) == (-9 if number == signal.SIGKILL else 130)
        assert ended(pid)
    finally:
        client.kill()


def test_two_servers_share_the_work_and_a_lost_one_loses_nothing(engine: Engine, tmp_path: Path) -> None:
    data = data_file(tmp_path / "d.jsonl", 200, seed=5)
    second = Engine(engine.root).ready()
    out = engine.root / "two"
    client = subprocess.Popen(
        command(data, out, [engine.url, second.url], "--no-proof", "--concurrency", "4"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    under_way(second, "two", client)
    second.kill()
    stdout, stderr = client.communicate(timeout=200)
    assert client.returncode == 0, stderr
    assert json.loads(stdout)["complete"]
    assert check_states([out], rows_of(data), 200).ok


def test_disks_of_their_own_are_joined_by_index(tmp_path: Path) -> None:
    """Two nodes that see nothing of one another; one dies in the middle. Its disk is merged all the same, nothing is there twice."""
    data = data_file(tmp_path / "d.jsonl", 160, seed=11)
    roots = [tmp_path / "node-a", tmp_path / "node-b"]
    for root in roots:
        root.mkdir()
    nodes = [Engine(root) for root in roots]
    try:
        urls = [node.ready().url for node in nodes]
        argv = command(data, roots[0] / "s", urls, "--no-proof", "--concurrency", "4")
        client = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        end = time.monotonic() + 90
        while not list((roots[1] / "s").glob("states-*")) and time.monotonic() < end:
            time.sleep(0.02)
        nodes[1].kill()
        stdout, stderr = client.communicate(timeout=200)
        assert client.returncode == 0, stderr
        result = json.loads(stdout)
        assert result["complete"] and len(result["parts"]) == 2 and "check: clean" in stderr and "2 parts" in stderr
        counts = [len(StatesReader(root / "s", allow_empty=True)) for root in roots]
        assert min(counts) > 0 and sum(counts) >= 160
        argv = [sys.executable, "-m", "k2tui", "states", "merge", str(tmp_path / "all"), *(str(root / "s") for root in roots)]
        merged = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, timeout=60)
        assert merged.returncode == 0, merged.stderr
        report = check_states([tmp_path / "all"], rows_of(data), 160)
        assert report.ok and report.samples == 160
    finally:
        for node in nodes:
            node.kill()


def test_a_grown_file_keeps_what_is_there_and_another_file_is_refused(engine: Engine, tmp_path: Path) -> None:
    data = data_file(tmp_path / "d.jsonl", 30, seed=6)
    out = engine.root / "grown"
    extract(data, out, [engine.url], "--no-proof", "--limit", "20")
    result = extract(data, out, [engine.url], "--no-proof")
    assert result["had"] == 20 and result["samples"] == 30
    assert subprocess.run([sys.executable, "-m", "k2tui", "states", "check", str(out)], cwd=ROOT, capture_output=True).returncode == 0
    other = data_file(tmp_path / "o.jsonl", 30, seed=7)
    assert "not line" in extract(other, out, [engine.url], "--no-proof", ok=False)["stderr"]
    assert "boundaries" in extract(data, out, [engine.url], "--no-proof", "--boundaries", "1,2,3", ok=False)["stderr"]
    assert "below" in extract(data, tmp_path / "elsewhere", [engine.url], ok=False)["stderr"]


def test_fp8_halves_the_size_and_stays_close(engine: Engine, tmp_path: Path) -> None:
    data = data_file(tmp_path / "d.jsonl", 12, seed=8)
    sizes = {}
    for dtype in ("bf16", "fp8_e4m3"):
        extract(data, engine.root / dtype, [engine.url], "--no-proof", "--dtype", dtype, "--boundaries", "2,4,5")
        sizes[dtype] = sum(t.end - t.start for s in StatesReader(engine.root / dtype).shards for t in s.tensors.values())
        assert check_states([engine.root / dtype], rows_of(data), 12).ok
    assert sizes["fp8_e4m3"] < 0.56 * sizes["bf16"]
    for a, b in zip(StatesReader(engine.root / "bf16"), StatesReader(engine.root / "fp8_e4m3"), strict=True):
        assert ((a.aux.float() - b.aux.float()).abs() <= a.aux.float().abs().amax() * 0.07).all()


def test_a_wrong_head_blocks_the_chain_in_words(engine: Engine, tmp_path: Path) -> None:
    """The same server, but the target that the user names is another model: its head does not lead to the server's tokens."""
    import shutil

    from safetensors.torch import save_file

    other = tmp_path / "other"
    shutil.copytree(MODEL, other, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json", "train"))
    config = json.loads((MODEL / "config.json").read_text())
    save_file({"lm_head.weight": torch.randn(config["vocab_size"], config["hidden_size"])}, other / "model.safetensors")
    data = data_file(tmp_path / "d.jsonl", 10, seed=9)
    told = extract(data, engine.root / "wrong", [engine.url], "--model", str(other), ok=False)["stderr"]
    assert "proof failed: the last hidden states do not lead to the server's tokens" in told
    assert not (engine.root / "wrong").exists() and not (engine.root / "wrong.probe").exists()


def test_the_disk_need_is_told_before_and_refused_when_it_does_not_fit(engine: Engine, tmp_path: Path) -> None:
    data = data_file(tmp_path / "d.jsonl", 10)
    done = subprocess.run(
        [sys.executable, "-m", "k2tui", "extract", "--data", str(data), "--out", str(tmp_path / "x"), "--dry-run", "--model", str(MODEL)],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0 and "of disk" in done.stderr and not (tmp_path / "x").exists()
    told = extract(data, engine.root / "full", [engine.url], "--keep-free-gb", "1000000", ok=False)["stderr"]
    assert "may be used" in told and "fp8" in told


@pytest.mark.slow
def test_prepare_resumes_grows_and_survives_a_restart(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    own = Engine(root).ready()
    prompts = tmp_path / "p.jsonl"
    with prompts.open("w") as fh:
        for i in range(40):
            fh.write(json.dumps({"messages": [{"role": "user", "content": f"Tell me about the number {i}."}], "source": f"s{i % 3}"}) + "\n")
        talk = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "x"}, {"role": "user", "content": "And now?"}]
        fh.write(json.dumps({"messages": talk}) + "\n")
        fh.write(json.dumps({"messages": talk}) + "\n")
    out = tmp_path / "tokenized_data.jsonl"
    argv = [sys.executable, "-m", "k2tui", "prepare", "--prompts", str(prompts), "--out", str(out), "--url", own.url, "--json"]
    argv += ["--max-new-tokens", "24", "--keep-truncated", "--repetition", "2", "--min-response", "1", "--concurrency", "4"]
    try:
        first = subprocess.Popen([*argv, "--count", "30"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
        end = time.monotonic() + 60
        while not (out.exists() and out.stat().st_size) and time.monotonic() < end:
            time.sleep(0.02)
        first.kill()
        first.wait()
        with out.open("ab") as fh:  # what a write that was cut in the middle leaves
            fh.write(b'{"input_ids": [1, 2')
        done = subprocess.run([*argv, "--count", "30"], capture_output=True, text=True, cwd=ROOT, timeout=200)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["rows"] == 30
        before = out.read_bytes()
        # grows, under a server that dies meanwhile
        growing = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        end = time.monotonic() + 60
        while out.stat().st_size == len(before) and time.monotonic() < end:
            time.sleep(0.02)
        own.kill()
        own.start()
        stdout, stderr = growing.communicate(timeout=200)
        assert growing.returncode == 0, stderr
        result = json.loads(stdout)
        assert result["rows"] == 41 and result["outcomes"]["duplicate prompt"] == 1
        assert out.read_bytes().startswith(before), "rows that were there must stay as they are"
        from k2tui.dataset.stats import check_rows

        valid, problems, twins = check_rows(out, 2048)
        assert (valid, problems, twins) == (41, [], 0)
        again = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, timeout=200)
        assert json.loads(again.stdout)["kept"] == 0 and out.read_bytes().startswith(before)
        settings = json.loads((tmp_path / "tokenized_data.jsonl.settings.json").read_text())
        assert settings["runs"][0]["sampling"]["seed"] == 1 and settings["runs"][0]["model_path"]
        _masks_are_right(out, own.url)
    finally:
        own.kill()


def _masks_are_right(out: Path, url: str) -> None:
    """Ones stand exactly on what the server generated; the prompt is the server's own rendering, checked by asking again."""
    conn = Connection(url, 30)
    rendered = {}
    for i in range(40):
        body = {"messages": [{"role": "user", "content": f"Tell me about the number {i}."}]}
        rendered[tuple(conn.call("POST", "/tokenize", body)["tokens"])] = i
    multi = 0
    for row in RowFile(out).rows():
        prompt = tuple(row.input_ids[: row.n_prompt_tokens])
        assert list(row.loss_mask[row.n_prompt_tokens :]) == [1] * row.n_response_tokens
        if prompt in rendered:
            assert not any(row.loss_mask[: row.n_prompt_tokens])
        else:
            multi += 1
    assert multi == 1
    conn.close()
