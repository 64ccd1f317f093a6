"""Capture on against capture off, on one GPU: prefill tok/s of the same requests, bytes written, and what limits it.

Run by capture_gpu.sh on a machine with a GPU. Needs SGLang on PYTHONPATH; prints a table as it goes. Standard library, torch.
"""

from __future__ import annotations

import argparse
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
    def __init__(self, kit: Path, name: str, port: int, args: list[str], env: dict[str, str]) -> None:
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
            sys.executable,
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


def send_all(
    url: str, samples: list[list[int]], concurrency: int, run: str | None, extra: dict | None = None
) -> float:
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
                **(extra or {}),
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


def measure(
    kit: Path,
    name: str,
    model: Path,
    root: Path,
    shape: tuple[int, int],
    args,
    limit_s: float,
    hf: bool,
    dummy: bool,
) -> None:
    hidden, layers = shape
    rng = random.Random(0)
    samples = [[rng.randrange(3, 32000) for _ in range(args.length)] for _ in range(args.samples)]
    tokens = sum(map(len, samples))
    bounds = [2, layers // 2, layers - 3]
    common = [
        "--model-path", str(model), "--attention-backend", args.attention, "--sampling-backend", "pytorch", "--grammar-backend", "none",
        "--mem-fraction-static", "0.8", "--max-total-tokens", "131072", "--cuda-graph-max-bs", "8", "--disable-piecewise-cuda-graph",
        "--disable-radix-cache", "--chunked-prefill-size", "8192", "--max-prefill-tokens", "16384",
    ]  # fmt: skip
    if dummy:
        common += ["--load-format", "dummy"]
    site = make_site(Path("site").absolute())
    root.mkdir(parents=True, exist_ok=True)
    env = {
        "K2TUI_CAPTURE_DIR": str(root), "K2TUI_CAPTURE_MIN_FREE_MB": "1000", "K2TUI_CAPTURE_PINNED_MB": "4096",
        "K2TUI_CAPTURE_THREADS": "6", "EXTRA_PATH": str(site),
        "K2TUI_CAPTURE_BOUNDARIES": ",".join(map(str, bounds)),
    }  # fmt: skip
    port = 31200 + layers
    off = Server(kit, f"{name}-off", port, [*common, "--enable-return-hidden-states"], {})
    time.sleep(3)
    on = Server(kit, f"{name}-on", port + 1, common, dict(env))
    try:
        if not (on.wait(200) and off.wait(60)):
            return
        say(
            f"{name}: hidden {hidden}, {layers} layers, {args.samples} samples of {args.length} tokens, boundaries {bounds}"
        )
        for line in on.log.read_text(errors="replace").splitlines():
            if "k2tui capture" in line:
                print("   ", line[:200], flush=True)
        send_all(off.url, samples[:64], args.concurrency, None)
        send_all(on.url, samples[:64], args.concurrency, None)
        # the page cache and both writers warm
        captured(on.url, root, "warm", hidden, layers, bounds, samples[:64], args.concurrency, "bf16", "all")
        if hf:
            try:
                prove(root / "warm", model, samples[:64])
            except Exception as err:
                say(f"comparison with transformers failed: {type(err).__name__}: {err}")
        shutil.rmtree(root / "warm", ignore_errors=True)
        shm = Path(f"/dev/shm/k2-{name}")
        shm.mkdir(exist_ok=True)
        rates: dict[str, list[float]] = {}

        def note(
            label: str, took: float, durable: float | None, size: int, facts: dict, published: int | None
        ) -> None:
            rates.setdefault(label, []).append(tokens / took)
            base = rates.get("off, no plug-in")
            share = f"{tokens / took / statistics.median(base):6.1%}" if base else ""
            extra = ""
            if durable is not None:
                extra = (
                    f" durable {tokens / durable:9,.0f} tok/s, {size / took / 1e9:5.2f} GB/s, {size / tokens:7,.0f} B/token, "
                    f"{published}/{len(samples)} there, dropped {facts.get('dropped')}, copy waited {facts.get('copy_stall_s', 0):.2f} s, "
                    f"put waited {facts.get('stall_s', 0):.2f} s, writing {facts.get('write_s', 0):.1f} thread-s"
                )
            say(f"{label:34s} {tokens / took:9,.0f} tok/s {share}{extra}")

        rounds = [
            ("bf16", "all", "disk"),
            ("bf16", "all", "shm"),
            ("fp8_e4m3", "all", "disk"),
            ("bf16", "loss", "disk"),
        ]
        for turn in range(args.rounds):
            if left(limit_s) < 20:
                break
            note("off, no plug-in", send_all(off.url, samples, args.concurrency, None), None, 0, {}, None)
            note(
                "plug-in loaded, not capturing",
                send_all(on.url, samples, args.concurrency, None),
                None,
                0,
                {},
                None,
            )
            for dtype, last, where in rounds if turn == 0 else rounds[:2]:
                if left(limit_s) < 12:
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
                    on.url, root, run, hidden, layers, bounds, samples, args.concurrency, dtype, last
                )
                note(f"on, {dtype}, last {last}, {where}", took, durable, size, facts, published)
                for reason in list(facts.get("reasons", {}).items())[:2]:
                    print("    refused:", reason, flush=True)
                shutil.rmtree((root / run).resolve(), ignore_errors=True)
        few = [s[:256] for s in samples[:48]]
        if left(limit_s) > 15:
            took = send_all(off.url, few, 16, None, {"return_hidden_states": True})
            n = sum(map(len, few))
            say(
                f"{'return_hidden_states over JSON':34s} {n / took:9,.0f} tok/s (last hidden state only, no aux; {n} tokens)"
            )
        say("medians: " + json.dumps({k: round(statistics.median(v)) for k, v in rates.items()}))
        base = statistics.median(rates["off, no plug-in"])
        say(
            "share of off: "
            + json.dumps({k: round(statistics.median(v) / base, 3) for k, v in rates.items()})
        )
        shutil.rmtree(shm, ignore_errors=True)
    finally:
        on.stop()
        off.stop()
        out = os.environ.get("OUT")
        if out:
            for server in (on, off):
                (Path(out) / f"{server.log.name}").write_bytes(server.log.read_bytes()[-3_000_000:])


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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kit", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("/tmp/k2-capture"))
    parser.add_argument("--samples", type=int, default=384)
    parser.add_argument("--length", type=int, default=1536)
    parser.add_argument("--concurrency", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--attention", default="triton")
    parser.add_argument("--limit-s", type=float, default=455)
    args = parser.parse_args()
    args.kit = args.kit.absolute()
    args.work.mkdir(parents=True, exist_ok=True)
    os.chdir(args.work)
    import torch

    say(f"{torch.cuda.get_device_name()}, {os.cpu_count()} cores, torch {torch.__version__}")
    disk_speed(args.work / "root")
    disk_speed(Path("/dev/shm/k2-speed"))
    site = os.environ.get("SITE", str(Path.home() / ".sglang-site"))
    env = {**os.environ, "PYTHONPATH": site}
    subprocess.run(
        [sys.executable, str(args.kit / "random_target.py"), "target-1b", "2048", "16", "500MB"],
        check=True,
        env=env,
    )
    measure(
        args.kit,
        "1b",
        Path("target-1b").absolute(),
        args.work / "root",
        (2048, 16),
        args,
        args.limit_s - 190,
        True,
        False,
    )
    if left(args.limit_s) > 150:
        # config and tokenizer only: the weights are random in the server
        big = Path("target-8b")
        shutil.copytree("target-1b", big, ignore=shutil.ignore_patterns("*.safetensors*"), dirs_exist_ok=True)
        config = json.loads((big / "config.json").read_text())
        config.update(
            hidden_size=4096,
            num_hidden_layers=32,
            intermediate_size=14336,
            num_attention_heads=32,
            num_key_value_heads=8,
        )
        (big / "config.json").write_text(json.dumps(config))
        args.samples = max(96, args.samples // 2)
        measure(
            args.kit, "8b", big.absolute(), args.work / "root", (4096, 32), args, args.limit_s, False, True
        )
    say("end")


if __name__ == "__main__":
    main()
