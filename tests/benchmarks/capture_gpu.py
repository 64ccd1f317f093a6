"""Capture on against capture off, on one GPU: prefill tok/s of the same requests, bytes written, and what limits it.

Run by capture_gpu.sh on a machine with a GPU. Needs SGLang on PYTHONPATH; prints a table as it goes. Standard library, torch.
With --cpu PYTHON (an interpreter whose SGLang runs on the CPU) it goes through the same steps on a tiny model: whether everything works, not how
fast it is.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import queue
import random
import shutil
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

from k2tui.capture.client import Connection, begin_run, capture_status
from k2tui.capture.request import CaptureRequest
from k2tui.capture.site import make_site

START = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - START:6.1f} s] {text}", flush=True)


def left(limit_s: float) -> float:
    return limit_s - (time.monotonic() - START)


class Server:
    def __init__(
        self,
        kit: Path,
        name: str,
        port: int,
        args: list[str],
        env: dict[str, str],
        python: str = sys.executable,
    ) -> None:
        site = os.environ.get("SITE", str(Path.home() / ".sglang-site"))
        path = os.pathsep.join(
            filter(
                None, (env.pop("EXTRA_PATH", ""), site, str(kit / "stubs"), os.environ.get("PYTHONPATH", ""))
            )
        )
        full = {
            **os.environ, **env, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
            "STUB_ROOTS": os.environ.get("STUB_ROOTS", "soundfile,xgrammar,llguidance,flashinfer"),
        }  # fmt: skip
        self.url, self.name = f"http://127.0.0.1:{port}", name
        self.log = Path(f"{name}.log")
        argv = [
            python,
            "-m",
            "sglang.launch_server",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            *args,
        ]
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                argv, stdout=out, stderr=subprocess.STDOUT, env=full, start_new_session=True
            )

    def wait(self, timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if self.process.poll() is not None:
                break
            try:
                conn = Connection(self.url, 5)
                conn.call("GET", "/health")
                return True
            except Exception:
                time.sleep(1)
        say(f"{self.name} is not ready; end of its log:")
        print(self.log.read_text(errors="replace")[-3500:], flush=True)
        return False

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, 9)
            self.process.wait()


def send_all(url: str, samples: list[list[int]], concurrency: int, run: str | None) -> float:
    """Seconds until every request is answered."""
    jobs: queue.SimpleQueue[int] = queue.SimpleQueue()
    for i in range(len(samples)):
        jobs.put(i)
    errors: list[str] = []

    def work() -> None:
        conn = Connection(url, 300)
        while True:
            try:
                i = jobs.get_nowait()
            except queue.Empty:
                return
            ids = samples[i]
            body = {
                "input_ids": ids,
                "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            }
            if run:
                body["rid"] = CaptureRequest(run, i, len(ids), ((len(ids) // 2, len(ids)),), "g").to_rid()
            try:
                conn.call("POST", "/generate", body)
            except Exception as err:
                errors.append(str(err))

    began = time.monotonic()
    threads = [threading.Thread(target=work) for _ in range(concurrency)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    took = time.monotonic() - began
    if errors:
        say(f"{len(errors)} requests failed: {errors[0][:300]}")
    return took


def captured(
    url: str,
    root: Path,
    run: str,
    hidden: int,
    layers: int,
    bounds: list[int],
    samples,
    concurrency,
    dtype,
    last,
):
    """(seconds to the last answer, seconds until all is on disk, bytes, status facts, samples published)."""
    begin_run(
        [url],
        run,
        {
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "boundaries": bounds,
            "dtype": dtype,
            "last_rows": last,
        },
    )
    began = time.monotonic()
    took = send_all(url, samples, concurrency, run)
    conn = Connection(url, 30)
    conn.call("POST", "/k2tui_capture/flush", {"run": run})
    cursor, epoch, published, size = 0, "", 0, 0
    facts: dict = {}
    while time.monotonic() - began < took + 60:
        told = capture_status(url, run, cursor, epoch)
        epoch, cursor = told["epoch"], told["run"]["cursor"]
        published += sum(len(s["samples"]) for s in told["run"]["shards"])
        size += sum(s["size_b"] for s in told["run"]["shards"])
        facts = {
            **told["writers"][0]["runs"].get(run, {}),
            "copy_stall_s": told["writers"][0]["copy_stall_s"],
        }
        if published >= len(samples):
            break
        time.sleep(0.05)
    return took, time.monotonic() - began, size, facts, published


def cpu_s(group: int) -> float:
    """CPU-seconds that the live processes of a process group have used."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[2]) == group:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def naive(server: Server, samples: list[list[int]], concurrency: int) -> None:
    """`return_hidden_states`: the states of every prompt token as JSON numbers in the answer. Last hidden only: it gives no others."""
    jobs: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    for ids in samples:
        jobs.put(ids)
    sizes: list[int] = []
    wrong: list[str] = []

    def work() -> None:
        conn = http.client.HTTPConnection("127.0.0.1", int(server.url.rsplit(":", 1)[1]), timeout=300)
        while True:
            try:
                ids = jobs.get_nowait()
            except queue.Empty:
                return
            body = {
                "input_ids": ids,
                "sampling_params": {"max_new_tokens": 1, "temperature": 0},
                "return_hidden_states": True,
            }
            conn.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
            raw = conn.getresponse().read()
            sizes.append(len(raw))
            if len(sizes) == 1:  # one is looked at: parsing all would measure this client
                rows = (json.loads(raw).get("meta_info", {}).get("hidden_states") or [[]])[0]
                if len(rows) != len(ids):
                    wrong.append(f"{len(rows)} rows for {len(ids)} tokens: {raw[:200]!r}")

    used, began = cpu_s(server.process.pid), time.monotonic()
    threads = [threading.Thread(target=work) for _ in range(concurrency)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    took, tokens = time.monotonic() - began, sum(map(len, samples))
    for why in wrong:
        say(f"return_hidden_states: {why}")
    say(
        f"{'return_hidden_states over JSON':34s} {tokens / took:9,.0f} tok/s, last hidden only, {tokens} tokens, "
        f"{sum(sizes) / tokens / 1024:.1f} KiB of JSON and {(cpu_s(server.process.pid) - used) / tokens * 1e3:.2f} ms of server CPU a token"
    )


def prove(folder: Path, model: Path, samples: list[list[int]], count: int = 6) -> None:
    """States against transformers on the same GPU."""
    import torch
    from transformers import AutoModelForCausalLM

    from k2tui.states.reader import StatesReader

    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).cuda().eval()
    reader = StatesReader(folder)
    hidden = reader.manifest.hidden_size
    worst: dict[str, float] = {}
    for index in range(0, len(samples), max(1, len(samples) // count)):
        s = reader[reader.position(index)]
        assert s.input_ids.tolist() == samples[index], f"sample {index} holds other tokens"
        with torch.no_grad():
            out = hf(s.input_ids[None].cuda(), output_hidden_states=True).hidden_states
        for k, b in enumerate(reader.manifest.boundaries):
            ref = out[b][0].float().cpu()
            err = (
                ((s.aux[:, k * hidden : (k + 1) * hidden].float() - ref).norm(dim=-1) / ref.norm(dim=-1))
                .max()
                .item()
            )
            worst[str(b)] = max(worst.get(str(b), 0.0), err)
        rows = s.last_rows
        ref = out[-1][0].float().cpu()[rows]
        err = ((s.last[rows].float() - ref).norm(dim=-1) / ref.norm(dim=-1)).max().item()
        worst["last"] = max(worst.get("last", 0.0), err)
    del hf
    torch.cuda.empty_cache()
    say(
        "largest relative error of a row against transformers: "
        + ", ".join(f"{k}: {v:.4f}" for k, v in worst.items())
    )


def common_args(model: Path, args: argparse.Namespace, dummy: bool) -> list[str]:
    """The same for every server, so that only the plug-in differs."""
    found = [
        "--model-path", str(model), "--attention-backend", args.attention, "--sampling-backend", "pytorch", "--grammar-backend", "none",
        "--mem-fraction-static", "0.8", "--max-total-tokens", "131072", "--cuda-graph-max-bs", "4", "--disable-piecewise-cuda-graph",
        "--disable-radix-cache", "--chunked-prefill-size", "8192", "--max-prefill-tokens", "16384",
    ]  # fmt: skip
    return found + (["--load-format", "dummy"] if dummy else [])


def capture_env(root: Path, bounds: list[int]) -> dict[str, str]:
    root.mkdir(parents=True, exist_ok=True)
    return {
        "K2TUI_CAPTURE_DIR": str(root), "K2TUI_CAPTURE_MIN_FREE_MB": "1000", "K2TUI_CAPTURE_PINNED_MB": "4096",
        "EXTRA_PATH": str(make_site(Path("site").absolute())),
        "K2TUI_CAPTURE_BOUNDARIES": ",".join(map(str, bounds)),
    }  # fmt: skip


def capture_answers(server: Server) -> bool:
    """The plug-in's route, asked as soon as the server is ready; what the log says when it is not there."""
    try:
        told = capture_status(server.url)
        if told["writers"]:
            say(f"{server.name}: capture answers, boundaries {told['writers'][0]['facts']['boundaries']}")
            return True
        why = "no capture writer"
    except Exception as err:
        why = str(err)
    say(f"{server.name}: the plug-in does not answer: {why}; lines of its log:")
    for line in server.log.read_text(errors="replace").splitlines():
        if (
            any(w in line for w in ("k2tui", "plugin", "hook", "Error", "Exception"))
            and "server_args=" not in line
        ):
            print("   ", line[:300], flush=True)
    return False


def measure(
    name: str, off: Server | None, on: Server, root: Path, shape: tuple[int, int], bounds: list[int], samples: list[list[int]],
    rounds: int, concurrency: int, limit_s: float, model: Path | None,
) -> None:  # fmt: skip
    """Rounds of off, idle, on. off: a server without the plug-in (None: the capture server's uncaptured requests are the base)."""
    hidden, layers = shape
    tokens = sum(map(len, samples))
    say(
        f"{name}: hidden {hidden}, {layers} layers, {len(samples)} samples of {len(samples[0])} tokens, boundaries {bounds}"
    )
    for server in filter(None, (off, on)):
        send_all(server.url, samples[:64], concurrency, None)
    # the page cache, the ring and the writer warm
    captured(on.url, root, "warm", hidden, layers, bounds, samples[:64], concurrency, "bf16", "all")
    if model:
        try:
            prove(root / "warm", model, samples[:64])
        except Exception as err:
            say(f"comparison with transformers failed: {type(err).__name__}: {err}")
    shutil.rmtree(root / "warm", ignore_errors=True)
    shm = Path(f"/dev/shm/k2-{name}")
    shm.mkdir(exist_ok=True)
    rates: dict[str, list[float]] = {}
    base_label = "off, no plug-in" if off else "plug-in loaded, not capturing"

    def note(
        label: str, took: float, durable: float | None, size: int, facts: dict, published: int | None
    ) -> None:
        rates.setdefault(label, []).append(tokens / took)
        base = rates.get(base_label)
        share = f"{tokens / took / statistics.median(base):6.1%}" if base else ""
        extra = ""
        if durable is not None:
            extra = (
                f" durable {tokens / durable:9,.0f} tok/s, {size / took / 1e9:5.2f} GB/s, {size / tokens:7,.0f} B/token, "
                f"{published}/{len(samples)} there, dropped {facts.get('dropped')}, ring waited {facts.get('copy_stall_s', 0):.2f} s, "
                f"put waited {facts.get('stall_s', 0):.2f} s, writing {facts.get('write_s', 0):.1f}, "
                f"checksums {facts.get('hash_s', 0):.1f} thread-s of {facts.get('threads')} threads"
            )
        say(f"{label:34s} {tokens / took:9,.0f} tok/s {share}{extra}")

    kinds = [
        ("bf16", "all", "shm"),
        ("bf16", "all", "disk"),
        ("fp8_e4m3", "all", "disk"),
        ("bf16", "loss", "shm"),
    ]
    for turn in range(rounds):
        if left(limit_s) < 25:
            break
        if off:
            note("off, no plug-in", send_all(off.url, samples, concurrency, None), None, 0, {}, None)
        note("plug-in loaded, not capturing", send_all(on.url, samples, concurrency, None), None, 0, {}, None)
        for dtype, last, where in kinds if turn == 0 else kinds[:2]:
            if left(limit_s) < 25:
                break
            run = f"{dtype}-{last}-{where}-{turn}"
            place = Path("/dev/shm") if where == "shm" else root
            if shutil.disk_usage(place).free < tokens * hidden * 8 * 1.2 + 2e9:
                say(f"{place}: too little room for {tokens * hidden * 8 / 1e9:.1f} GB, skipped")
                continue
            if where == "shm":
                (shm / run).mkdir()
                (root / run).symlink_to(shm / run)
            took, durable, size, facts, published = captured(
                on.url, root, run, hidden, layers, bounds, samples, concurrency, dtype, last
            )
            note(f"on, {dtype}, last {last}, {where}", took, durable, size, facts, published)
            for reason in list(facts.get("reasons", {}).items())[:2]:
                print("    refused:", reason, flush=True)
            shutil.rmtree((root / run).resolve(), ignore_errors=True)
    if off and left(limit_s) > 20:
        naive(off, [s[:256] for s in samples[:32]], 16)
    base = statistics.median(rates[base_label])
    say("medians: " + json.dumps({k: round(statistics.median(v)) for k, v in rates.items()}))
    say(
        f"share of {base_label!r}: "
        + json.dumps({k: round(statistics.median(v) / base, 3) for k, v in rates.items()})
    )
    shutil.rmtree(shm, ignore_errors=True)


def disk_speed(folder: Path, count: int = 32) -> None:
    """Plain sequential writing of this disk, 6 threads, with fsync: the ceiling."""
    block = os.urandom(64 << 20)
    folder.mkdir(parents=True, exist_ok=True)

    def work(n: int) -> None:
        fd = os.open(folder / f"speed{n}", os.O_CREAT | os.O_WRONLY)
        for _ in range(count // 6 + 1):
            os.write(fd, block)
        os.fsync(fd)
        os.close(fd)

    began = time.monotonic()
    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    took = time.monotonic() - began
    size = 6 * (count // 6 + 1) * len(block)
    for n in range(6):
        (folder / f"speed{n}").unlink()
    say(f"{folder}: {size / 1e9:.1f} GB written and synced at {size / took / 1e9:.2f} GB/s")


def on_cpu(args: argparse.Namespace) -> None:
    """The same rounds with the CPU kit (a folder with stubs/ and tiny_models.py)."""
    model, root, bounds = Path("target").absolute(), args.work / "root", [1, 3, 5]
    quiet = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "SGLANG_USE_CPU_ENGINE": "1"}
    quiet["STUB_ROOTS"] = os.environ["STUB_ROOTS"] = "torchvision,soundfile,triton"
    subprocess.run(
        [args.cpu, str(args.kit / "tiny_models.py"), "llama", str(model), "6"],
        check=True,
        env={**os.environ, **quiet},
        capture_output=True,
    )
    common = ["--model-path", str(model), "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
              "--disable-cuda-graph", "--max-total-tokens", "8192", "--disable-radix-cache", "--chunked-prefill-size", "256"]  # fmt: skip
    off = Server(
        args.kit, "off", args.port, [*common, "--enable-return-hidden-states"], dict(quiet), args.cpu
    )
    env = {
        **quiet,
        **capture_env(root, bounds),
        "K2TUI_CAPTURE_PINNED_MB": "64",
        "K2TUI_CAPTURE_THREADS": "2",
    }
    on = Server(args.kit, "on", args.port + 1, common, env, args.cpu)
    rng = random.Random(0)
    samples = [[rng.randrange(3, 1000) for _ in range(150)] for _ in range(40)]
    try:
        if on.wait(args.limit_s / 2) and capture_answers(on) and off.wait(60):
            measure("cpu", off, on, root, (128, 6), bounds, samples, 1, 8, args.limit_s, None)
    finally:
        for server in (off, on):
            server.stop()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kit", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("/tmp/k2-capture"))
    parser.add_argument("--samples", type=int, default=640)
    parser.add_argument("--length", type=int, default=1536)
    parser.add_argument("--concurrency", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--attention", default="triton")
    parser.add_argument("--limit-s", type=float, default=455)
    parser.add_argument("--big", action="store_true", help="then a model of 8B, too")
    parser.add_argument("--cpu", metavar="PYTHON", help="a tiny model on the CPU: function, not speed")
    parser.add_argument("--port", type=int, default=31201)
    args = parser.parse_args()
    args.kit = args.kit.absolute()
    args.work.mkdir(parents=True, exist_ok=True)
    os.chdir(args.work)
    if args.cpu:
        on_cpu(args)
        return
    import torch

    say(f"{torch.cuda.get_device_name()}, {os.cpu_count()} cores, torch {torch.__version__}")
    disk_speed(args.work / "root")
    disk_speed(Path("/dev/shm/k2-speed"))
    site = os.environ.get("SITE", str(Path.home() / ".sglang-site"))
    env = {**os.environ, "PYTHONPATH": site}
    small, big = Path("target-1b").absolute(), Path("target-8b").absolute()
    subprocess.run(
        [sys.executable, str(args.kit / "random_target.py"), str(small), "2048", "16", "500MB"],
        check=True,
        env=env,
        stderr=subprocess.DEVNULL,
    )
    bounds_1b, bounds_8b = [2, 8, 13], [2, 16, 29]
    root_1b, root_8b = args.work / "root-1b", args.work / "root-8b"
    off = Server(
        args.kit, "1b-off", 31201, [*common_args(small, args, False), "--enable-return-hidden-states"], {}
    )
    on = Server(args.kit, "1b-on", 31202, common_args(small, args, False), capture_env(root_1b, bounds_1b))
    servers = [off, on]
    on_8b: Server | None = None
    if args.big:
        # config and tokenizer only: the weights are random in the server
        shutil.copytree(small, big, ignore=shutil.ignore_patterns("*.safetensors*"), dirs_exist_ok=True)
        config = json.loads((big / "config.json").read_text())
        config.update(
            hidden_size=4096,
            num_hidden_layers=32,
            intermediate_size=14336,
            num_attention_heads=32,
            num_key_value_heads=8,
        )
        (big / "config.json").write_text(json.dumps(config))
        on_8b = Server(
            args.kit, "8b-on", 31203, common_args(big, args, True), capture_env(root_8b, bounds_8b)
        )
        servers.append(on_8b)
    rng = random.Random(0)
    samples = [[rng.randrange(3, 32000) for _ in range(args.length)] for _ in range(args.samples)]
    try:
        if not on.wait(190) or not capture_answers(on) or not off.wait(40):
            return
        big_ready = on_8b is not None and on_8b.wait(60) and capture_answers(on_8b)
        try:
            measure(
                "1b", off, on, root_1b, (2048, 16), bounds_1b, samples, args.rounds, args.concurrency,
                args.limit_s - (70 if big_ready else 0), small,
            )  # fmt: skip
        except Exception as err:
            say(f"1b: {type(err).__name__}: {err}")
        if big_ready and on_8b and left(args.limit_s) > 45:
            measure(
                "8b", None, on_8b, root_8b, (4096, 32), bounds_8b, samples[: max(96, args.samples // 4)], 2, args.concurrency,
                args.limit_s, None,
            )  # fmt: skip
        say("end")
    finally:
        for server in servers:
            server.stop()
        out = os.environ.get("OUT")
        if out:
            for server in servers:
                (Path(out) / server.log.name).write_bytes(server.log.read_bytes()[-3_000_000:])


if __name__ == "__main__":
    main()
