"""Measure k2tui's load generator beside its peers, against a server that knows the truth, and write the tables.

    .venv/bin/python tests/benchmarks/loadgen_peers.py --realtime --sglang PYTHON --vllm PYTHON --aiperf PYTHON \\
        --guidellm PYTHON --render docs/benchmarks.md

One call measures everything and writes the page. Every figure is a cell of its own; with `--data FILE` each is stored as soon as
it is measured and a later call measures only what is missing. For a machine on which others measure too, `--lock FILE` holds that lock
while it measures times and lets go of it every `--slice` seconds; the table of what servers do, which asks for right or wrong,
is filled while it waits.

Server: tests/fixtures/bench/mocksse.c on core 0; client: on core 1, one after the other (`--realtime`: both in a real-time
class, for a machine on which others work; stated in the table). Every run is one process started for it. CPU is that of the
whole process tree (wait4), RSS the largest sum over the tree. "CPU/1M" is marginal: (CPU at C=256 - CPU at C=32) per 1 M more
tokens, so that start-up is out and the report is in.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import itertools
import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests" / "fixtures" / "bench"
PORT = 32340
OUTPUT_LEN = 256


class Mock:
    def __init__(self, binary: Path, port: int, tokenizer: Path, realtime: bool) -> None:
        self.url = f"http://127.0.0.1:{port}"
        argv = ["taskset", "-c", "0", *(["chrt", "-f", "20"] if realtime else [])]
        argv += [str(binary), f"port={port}", f"tokenizer={tokenizer}"]
        self.process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
        for _ in range(100):
            time.sleep(0.05)
            if self.process.poll() is not None:
                raise SystemExit(f"the mock server did not start: is port {port} free?")
            with contextlib.suppress(OSError):
                self.get("/health")
                return
        raise SystemExit("the mock server does not answer")

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return json.load(answer)

    def configure(self, **settings: object) -> None:
        self.get("/__config?defaults=1&" + "&".join(f"{k}={v}" for k, v in settings.items()))

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


@dataclass
class Run:
    """What a client reported, in one vocabulary; ms and tok/s. None = it reports no such thing."""

    rc: int = 0
    completed: int | None = None
    tokens: int | None = None
    output_throughput: float | None = None
    ttft: dict[str, Any] = field(default_factory=dict)
    itl: dict[str, Any] = field(default_factory=dict)
    tpot: dict[str, Any] = field(default_factory=dict)
    ttft_sched: dict[str, Any] = field(default_factory=dict)
    accept_length: float | None = None
    peak: float | None = None
    cpu_s: float = 0.0
    rss_mb: float = 0.0
    wall_s: float = 0.0
    note: str = ""
    truth: dict[str, Any] = field(default_factory=dict)
    load1: float = 0.0


@dataclass(frozen=True)
class Load:
    concurrency: int
    requests: int
    output_len: int = OUTPUT_LEN
    input_len: int = 16
    api: str = "completions"
    rate: float | None = None
    cap: int | None = None


def tree_rss_mb(pid: int) -> float:
    total, todo = 0, [pid]
    while todo:
        one = todo.pop()
        try:
            total += int(Path(f"/proc/{one}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            todo += [int(c) for c in Path(f"/proc/{one}/task/{one}/children").read_text().split()]
        except (OSError, ValueError, IndexError):
            continue
    return total / 1e6


def spawn(
    argv: list[str], *, realtime: bool, timeout: float, env: dict[str, str] | None = None
) -> tuple[Run, str]:
    """Run a client pinned to core 1; its whole tree's CPU and RSS."""
    full = ["taskset", "-c", "1", *(["chrt", "-r", "10"] if realtime else []), *argv]
    run = Run()
    with tempfile.TemporaryFile("w+") as out:
        started = time.monotonic()
        process = subprocess.Popen(
            full,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            run.rss_mb = max(run.rss_mb, tree_rss_mb(process.pid))
            if time.monotonic() - started > timeout:
                os.killpg(process.pid, 9)
                _, status, usage = os.wait4(process.pid, 0)
                run.note = f"stopped after {timeout:.0f} s"
                break
            time.sleep(0.1)
        process.returncode = os.waitstatus_to_exitcode(status)
        run.rc = process.returncode
        run.cpu_s = usage.ru_utime + usage.ru_stime
        run.wall_s = time.monotonic() - started
        out.seek(0)
        return run, out.read()


Client = Callable[[Load, str, Path, "Options"], Run]


@dataclass
class Options:
    port: int
    tokenizer: Path
    realtime: bool
    python: dict[str, str]
    timeout: float = 150


def k2tui(load: Load, url: str, work: Path, opt: Options, engine: str = "auto") -> Run:
    argv = [sys.executable, "-m", "k2tui.loadgen", "--url", url, "--api", load.api, "--num-prompts", str(load.requests),
            "--random-input-len", str(load.input_len), "--random-output-len", str(load.output_len), "--json", "--warmup", "1",
            "--db", str(work / "k2tui.db"), "--idle-timeout", "20", "--engine", engine]  # fmt: skip
    if load.rate is None:
        argv += ["--concurrency", str(load.concurrency)]
    else:
        argv += [
            "--request-rate",
            str(load.rate),
            *(["--max-concurrency", str(load.cap)] if load.cap else []),
        ]
    run, text = spawn(argv, realtime=opt.realtime, timeout=opt.timeout)
    start = text.find("{")
    if start < 0:
        run.note = text.strip().splitlines()[-1][:100] if text.strip() else "no output"
        return run
    row = json.loads(text[start:])["runs"][0]
    run.completed, run.tokens = row["completed"], row["total_output_tokens"]
    run.output_throughput, run.accept_length = row["output_throughput"], row["accept_length"]
    for name, into in (("ttft", run.ttft), ("itl", run.itl), ("tpot", run.tpot)):
        for stat in ("p50", "p99"):
            into[stat] = row[f"{name}_{stat}_ms"]
    run.itl["mean"], run.tpot["mean"] = row["itl_mean_ms"], row["tpot_mean_ms"]
    with contextlib.closing(sqlite3.connect(work / "k2tui.db")) as db:
        asked = "SELECT value FROM metric WHERE run_id=? AND name LIKE 'peak_output_throughput.%'"
        run.peak = (db.execute(asked, (row["run_id"],)).fetchone() or [None])[0]
    if run.peak is not None:  # in a run shorter than a second it is the run's mean; the table asks for tokens in a second
        run.peak *= min(1.0, row["duration_s"])
    run.ttft_sched["p99"] = row["ttft_sched_p99_ms"]
    run.note = f"lag p99 {row['lag_p99_ms']:.3g} ms, coalesced {100 * (row['coalesced'] or 0):.2f} %"
    return run


def k2tui_asyncio(load: Load, url: str, work: Path, opt: Options) -> Run:
    return k2tui(load, url, work, opt, engine="asyncio")


def _sglang_flags(load: Load, opt: Options, out: Path, backend: str) -> list[str]:
    flags = ["--backend", backend, "--host", "127.0.0.1", "--port", str(opt.port), "--dataset-name", "random-ids",
             "--random-input-len", str(load.input_len), "--random-output-len", str(load.output_len), "--random-range-ratio", "1",
             "--num-prompts", str(load.requests), "--tokenizer", str(opt.tokenizer), "--model", str(opt.tokenizer),
             "--output-file", str(out), "--disable-tqdm", "--warmup-requests", "1"]  # fmt: skip
    if load.rate is not None:
        flags += [
            "--request-rate",
            str(load.rate),
            *(["--max-concurrency", str(load.cap)] if load.cap else []),
        ]
    else:
        flags += ["--max-concurrency", str(load.concurrency)]
    return flags


def _backend(api: str) -> str:
    return {"completions": "sglang-oai", "chat": "sglang-oai-chat", "generate": "sglang"}[api]


def _sglang_result(run: Run, text: str, out: Path) -> Run:
    if not out.exists() or not out.read_text().strip():
        lines = [line for line in text.splitlines() if line.strip()]
        last = next((x for x in reversed(lines) if "Error" in x), lines[-1] if lines else "no output")
        run.note = (run.note or last)[:100]
        return run
    row = json.loads(out.read_text().splitlines()[-1])
    run.completed, run.tokens = row["completed"], row["total_output_tokens"]
    run.output_throughput, run.accept_length = row["output_throughput"], row.get("accept_length")
    run.peak = row.get("max_output_tokens_per_s")
    for name, into in (("ttft", run.ttft), ("itl", run.itl), ("tpot", run.tpot)):
        into.update(
            p50=row.get(f"median_{name}_ms"), p99=row.get(f"p99_{name}_ms"), mean=row.get(f"mean_{name}_ms")
        )
    return run


def sglang_python(load: Load, url: str, work: Path, opt: Options) -> Run:
    out = work / "sglang.jsonl"
    out.unlink(missing_ok=True)
    env = {
        "PYTHONPATH": opt.python.get("sglang_stubs", ""),
        "STUB_ROOTS": "torchvision,soundfile,triton,datasets",
        "HF_HUB_OFFLINE": "1",
    }
    argv = [
        opt.python["sglang"],
        "-m",
        "sglang.benchmark.serving",
        *_sglang_flags(load, opt, out, _backend(load.api)),
    ]
    return _sglang_result(*spawn(argv, realtime=opt.realtime, timeout=opt.timeout, env=env), out)


def sglang_rust(load: Load, url: str, work: Path, opt: Options) -> Run:
    out = work / "rust.jsonl"
    out.unlink(missing_ok=True)
    # straight into the extension: `python -m sglang.benchmark.rust_client` costs seconds of imports where torch is there
    code = (
        "import glob,importlib.util as u,sys;"
        "f=glob.glob(sys.argv.pop(1)+'/lib/python3*/site-packages/sglang/srt/rust_extensions/_bench.*.so')[0];"
        "s=u.spec_from_file_location('_bench',f);m=u.module_from_spec(s);s.loader.exec_module(m);"
        "m.run_argv(['sglang-bench',*sys.argv[1:]])"
    )
    argv = [
        opt.python["sglang"],
        "-S",
        "-c",
        code,
        str(Path(opt.python["sglang"]).parents[1]),
        *_sglang_flags(load, opt, out, _backend(load.api)),
        "--worker-threads",
        "1",
    ]
    return _sglang_result(*spawn(argv, realtime=opt.realtime, timeout=opt.timeout), out)


def vllm(load: Load, url: str, work: Path, opt: Options) -> Run:
    out = work / "vllm.json"
    out.unlink(missing_ok=True)
    env = {
        "PYTHONPATH": opt.python.get("vllm_stubs", ""),
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    backend, path = (
        ("openai-chat", "/v1/chat/completions") if load.api == "chat" else ("openai", "/v1/completions")
    )
    argv = [opt.python["vllm"], "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", backend, "--endpoint", path,
            "--host", "127.0.0.1", "--port", str(opt.port), "--model", str(opt.tokenizer), "--served-model-name", "mock-model",
            "--tokenizer", str(opt.tokenizer), "--dataset-name", "random", "--random-input-len", str(load.input_len),
            "--random-output-len", str(load.output_len), "--random-range-ratio", "0", "--num-prompts", str(load.requests),
            "--ignore-eos", "--disable-tqdm", "--save-result", "--result-dir", str(work), "--result-filename", out.name,
            "--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,95,99"]  # fmt: skip
    if load.rate is not None:
        argv += [
            "--request-rate",
            str(load.rate),
            *(["--max-concurrency", str(load.cap)] if load.cap else []),
        ]
    else:
        argv += ["--max-concurrency", str(load.concurrency)]
    run, text = spawn(argv, realtime=opt.realtime, timeout=opt.timeout, env=env)
    if not out.exists():
        lines = [x for x in text.splitlines() if x.strip()]
        run.note = (
            run.note
            or next((x for x in reversed(lines) if "Error" in x), lines[-1] if lines else "no output")
        )[:100]
        return run
    row = json.loads(out.read_text())
    run.completed, run.tokens = row["completed"], row["total_output_tokens"]
    run.output_throughput, run.peak = row["output_throughput"], row.get("max_output_tokens_per_s")
    for name, into in (("ttft", run.ttft), ("itl", run.itl), ("tpot", run.tpot)):
        into.update(
            p50=row.get(f"median_{name}_ms"), p99=row.get(f"p99_{name}_ms"), mean=row.get(f"mean_{name}_ms")
        )
    return run


def aiperf(load: Load, url: str, work: Path, opt: Options) -> Run:
    out = work / "aiperf"
    shutil.rmtree(out, ignore_errors=True)
    kind = {"completions": "completions", "chat": "chat"}.get(load.api)
    if kind is None:
        return Run(note="no such route")
    argv = [str(Path(opt.python["aiperf"]).parent / "aiperf"), "profile", "-m", "mock-model", "--url", url, "--endpoint-type", kind,
            "--streaming", "--request-count", str(load.requests), "--synthetic-input-tokens-mean", str(load.input_len),
            "--synthetic-input-tokens-stddev", "0", "--output-tokens-mean", str(load.output_len), "--output-tokens-stddev", "0",
            "--tokenizer", str(opt.tokenizer), "--ui", "none", "--artifact-dir", str(out)]  # fmt: skip
    if load.rate is not None:
        argv += ["--request-rate", str(load.rate), *(["--concurrency", str(load.cap)] if load.cap else [])]
    else:
        argv += ["--concurrency", str(load.concurrency)]
    run, text = spawn(argv, realtime=opt.realtime, timeout=opt.timeout)
    found = list(out.rglob("profile_export_aiperf.json")) if out.exists() else []
    if not found:
        lines = [x for x in text.splitlines() if x.strip()]
        run.note = (run.note or (lines[-1] if lines else "no output"))[:100]
        return run
    row = json.loads(found[0].read_text())
    run.completed = int((row.get("request_count") or {}).get("avg") or 0)
    run.output_throughput = (row.get("output_token_throughput") or {}).get("avg")
    for name, into in (("time_to_first_token", run.ttft), ("inter_token_latency", run.itl)):
        value = row.get(name) or {}
        into.update(p50=value.get("p50"), p99=value.get("p99"), mean=value.get("avg"))
    run.tokens = int((row.get("total_output_tokens") or row.get("total_osl") or {}).get("avg") or 0) or None
    return run


def guidellm(load: Load, url: str, work: Path, opt: Options) -> Run:
    out, prompts = work / "guidellm.json", work / "guidellm.jsonl"
    out.unlink(missing_ok=True)
    route = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}.get(load.api)
    if route is None:
        return Run(note="no such route")
    # Not its synthetic text: that is English cut by the tokenizer, of which ours knows no word, so every prompt came out empty
    # and guidellm refused each request before sending it ("missing text_column"), which it tells at log level DEBUG only.
    said = " ".join(f"w{2 + i}" for i in range(load.input_len))
    row = json.dumps({"prompt": said, "output_tokens_count": load.output_len})
    prompts.write_text(f"{row}\n" * load.requests)
    if load.rate is not None:
        profile = f"kind=poisson,rate={load.rate}" + (f",max_concurrency={load.cap}" if load.cap else "")
    else:
        profile = f"kind=concurrent,streams={load.concurrency}"
    argv = [str(Path(opt.python["guidellm"]).parent / "guidellm"), "run",
            "--backend", f"kind=openai_http,target={url},model=mock-model,request_format={route}", "--profile", profile,
            "--constraint", f"kind=max_requests,count={load.requests}", "--tokenizer", f"kind=huggingface_auto,model={opt.tokenizer}",
            "--data", f"kind=json_file,path={prompts}", "--output", f"kind=json,path={out}", "--disable-progress"]  # fmt: skip
    run, text = spawn(argv, realtime=opt.realtime, timeout=opt.timeout, env={"HF_HUB_OFFLINE": "1"})
    if not out.exists():
        lines = [x for x in text.splitlines() if x.strip()]
        run.note = (run.note or next((x for x in reversed(lines) if "Error" in x), "no output"))[:100]
        return run
    metrics = json.loads(out.read_text())["benchmarks"][0]["metrics"]
    run.completed = int(metrics["request_totals"]["successful"])
    run.tokens = int(metrics["output_token_count"]["successful"]["total_sum"])
    run.output_throughput = metrics["output_tokens_per_second"]["successful"]["mean"]
    for name, into in (("time_to_first_token_ms", run.ttft), ("inter_token_latency_ms", run.itl)):
        value = metrics[name]["successful"]
        into.update(p50=value["percentiles"]["p50"], p99=value["percentiles"]["p99"], mean=value["mean"])
    return run


CLIENTS: dict[str, Client] = {
    "k2tui": k2tui,
    "k2tui asyncio": k2tui_asyncio,
    "sglang Rust client": sglang_rust,
    "sglang.serving": sglang_python,
    "vllm bench serve": vllm,
    "aiperf": aiperf,
    "guidellm": guidellm,
}
DISTS = {"sglang": "sglang", "vllm": "vllm", "aiperf": "aiperf", "guidellm": "guidellm"}


def make_tokenizer(folder: Path, python: str) -> None:
    """A word-level tokenizer in which every word of the mock is one token."""
    code = (
        "import sys,json;from tokenizers import Tokenizer,models,pre_tokenizers,decoders;"
        "v={'<unk>':0,'tok':1};[v.setdefault(f'w{i}',i) for i in range(2,1000)];"
        "t=Tokenizer(models.WordLevel(v,unk_token='<unk>'));t.pre_tokenizer=pre_tokenizers.WhitespaceSplit();"
        "t.save(sys.argv[1]+'/tokenizer.json')"
    )
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([python, "-c", code, str(folder)], check=True)
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "model_max_length": 131072,
         "chat_template": "{% for m in messages %}{{ m['content'] }} {% endfor %}"}))  # fmt: skip
    (folder / "config.json").write_text(json.dumps(
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 1000, "hidden_size": 64,
         "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
         "max_position_embeddings": 131072}))  # fmt: skip


def measure(name: str, load: Load, mock: Mock, work: Path, opt: Options, **settings: object) -> Run:
    mock.configure(**settings)
    run = CLIENTS[name](load, mock.url, work, opt)
    run.truth = mock.get("/__truth")
    run.load1 = os.getloadavg()[0]
    print(f"  {name:20} C={load.concurrency:<5} rc={run.rc} ok={run.completed} tokens={run.tokens} "
          f"itl p99 {run.itl.get('p99')} ({run.truth['itl_ms']['p99']:.3f}) ttft p99 {run.ttft.get('p99')} "
          f"({run.truth['ttft_ms']['p99']:.2f}) cpu {run.cpu_s:.2f} s rss {run.rss_mb:.0f} MB load {run.load1:.1f} {run.note}",
          flush=True)  # fmt: skip
    return run


ENGINE: dict[str, Any] = {"batch": 1, "ttft_us": 50000, "itl_us": 20000}


@dataclass
class Cells:
    """What was measured so far, by the cell's name; every new one is stored at once."""

    store: Path
    lock: Path | None
    slice_s: float
    meanwhile: Iterator[Any] | None = None  # cells that need no quiet machine, measured on demand
    found: dict[str, Any] = field(default_factory=dict)
    _held: Any = None
    _since: float = 0.0

    def get(self, name: str, take: Callable[[], Any], quiet: bool = True) -> Any:
        if name not in self.found:
            if quiet:
                self._hold()
            self.found[name] = take()
            self.store.write_text(json.dumps(self.found))
        return self.found[name]

    def _hold(self) -> None:
        if self.lock is None or (self._held and time.monotonic() - self._since < self.slice_s):
            return
        self.let_go()
        time.sleep(0.5)  # whoever waits takes it first
        self._held = self.lock.open("w")
        waiter = threading.Thread(target=fcntl.flock, args=(self._held, fcntl.LOCK_EX), daemon=True)
        waiter.start()
        while waiter.is_alive() and self.meanwhile is not None and next(self.meanwhile, None):
            pass
        waiter.join()
        self._since = time.monotonic()

    def let_go(self) -> None:
        if self._held:
            self._held.close()
            self._held = None


@dataclass
class Bench:
    names: list[str]
    mock: Mock
    work: Path
    opt: Options
    cells: Cells

    def cell(self, part: str, name: str, key: object, load: Load, **settings: object) -> dict[str, Any]:
        def take() -> dict[str, Any]:
            return vars(measure(name, load, self.mock, self.work, self.opt, **settings))

        return self.cells.get(f"{part}/{key}/{name}", take)


def steps(c: int) -> Load:
    return Load(c, c * (1 if c >= 1024 else 2))


def part_main(b: Bench, cs: list[int]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for c in cs:
        for name in b.names:
            found.setdefault(name, {})[str(c)] = b.cell("main", name, c, steps(c), **ENGINE)
    return found


PAIR = ("k2tui", "sglang Rust client")


def part_cpu(b: Bench, pairs: int) -> list[dict[str, Any]]:
    """CPU of k2tui and of SGLang's Rust client in turn."""
    found: list[dict[str, Any]] = []
    for k in range(pairs):
        pair: dict[str, Any] = {}
        for c in (32, 256, 1024):
            for name in PAIR:
                pair.setdefault(name, {})[str(c)] = b.cell("cpu", name, f"{k}-{c}", steps(c), **ENGINE)
        found.append(pair)
    return found


@contextlib.contextmanager
def busy_loop() -> Iterator[None]:
    loop = subprocess.Popen(["taskset", "-c", "1", sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        loop.kill()
        loop.wait()


def part_busy(b: Bench) -> dict[str, Any]:
    """A busy loop of equal priority on the client's core, no client in a real-time class."""
    plain = Options(b.opt.port, b.opt.tokenizer, False, b.opt.python, b.opt.timeout)
    found: dict[str, Any] = {}
    for name in b.names:

        def take(name: str = name) -> dict[str, Any]:
            with busy_loop():
                return vars(measure(name, Load(64, 128), b.mock, b.work, plain, **ENGINE))

        found[name] = b.cells.get(f"busy/64/{name}", take)
    return found


GENERATE = ("k2tui", "sglang Rust client", "sglang.serving")  # clients that know SGLang's own route
FAULTS: list[tuple[str, str, dict[str, object], str]] = [
    # title, route, server's behaviour, what is compared
    ("1,4,2,3 tokens per chunk, chat", "chat", {"spec": "1,4,2,3", "itl_us": 10000}, "itl"),
    ("1,4,2,3 tokens per chunk, /generate", "generate", {"spec": "1,4,2,3", "itl_us": 10000}, "itl"),
    ("accept length, /generate", "generate", {"spec": "1,4,2,3", "itl_us": 10000}, "accept"),
    ("role chunk early, text at 200 ms", "chat", {"role_early": 1, "ttft_us": 200000}, "ttft"),
    ("reasoning_content only", "chat", {"reasoning": 1}, "ok"),
    ("EOS after 32 of 64", "completions", {"eos_at": 32}, "tokens"),
    ("error in the stream after 32 tokens", "completions", {"error_at": 32}, "ok"),
    ("same, /generate", "generate", {"error_at": 32}, "ok"),
    ("socket closed after 32 tokens", "completions", {"truncate_at": 32}, "ok"),
    ("every 2nd answer empty", "completions", {"empty_every": 2}, "ok"),
    ("every 2nd HTTP 500", "completions", {"http500_every": 2}, "ok"),
    ("every 4th connection reset", "completions", {"reset_every": 4}, "ok"),
    ("event split over two segments", "completions", {"split": 1}, "itl"),
    ("CRLF and SSE comments", "completions", {"crlf": 1, "comment": 1}, "ok"),
    (
        "no usage, many tokens per chunk",
        "completions",
        {"no_usage": 1, "spec": "1,4,2,3", "itl_us": 10000},
        "itl",
    ),
]


def fault_cells(b: Bench) -> Iterator[tuple[dict[str, Any], str, dict[str, Any]]]:
    """(row, client, what it said), one after the other; right or wrong needs neither a quiet machine nor a real-time class."""
    plain = Options(b.opt.port, b.opt.tokenizer, False, b.opt.python, b.opt.timeout)
    for title, api, settings, what in FAULTS:
        row: dict[str, Any] = {"title": title, "what": what}
        for name in b.names:
            if name == "k2tui asyncio" or (api == "generate" and name not in GENERATE):
                continue
            load = Load(8, 16, output_len=64, api=api)
            how = {"ttft_us": 20000, "itl_us": 5000, **settings}

            def take(name: str = name, load: Load = load, how: dict[str, Any] = how) -> dict[str, Any]:
                return vars(measure(name, load, b.mock, b.work, plain, **how))

            yield row, name, b.cells.get(f"faults/{title}/{name}", take, quiet=False)


def part_faults(b: Bench) -> list[dict[str, Any]]:
    table: dict[str, dict[str, Any]] = {}
    for row, name, said_so in fault_cells(b):
        table.setdefault(row["title"], {**row, "clients": {}})["clients"][name] = said_so
    rows = list(table.values())
    tellers = {name: run for name, run in rows[0]["clients"].items() if run["peak"] is not None}
    return [
        rows[0],
        {"title": "same, most tokens in a second", "what": "peak", "clients": tellers},
        *rows[1:],
    ]


def part_open(b: Bench) -> dict[str, Any]:
    """60/s into 4 slots (the wait must show), and 200/s Poisson as the server saw it."""
    found: dict[str, Any] = {}
    for name in b.names:
        if name == "k2tui asyncio":
            continue
        into4 = Load(4, 300, output_len=16, rate=60, cap=4)
        capped = b.cell("open", name, "capped", into4, ttft_us=20000, itl_us=5000)

        def take(name: str = name) -> dict[str, Any]:
            load = Load(0, 1000, output_len=4, rate=200)
            run = vars(measure(name, load, b.mock, b.work, b.opt, ttft_us=5000, itl_us=2000))
            dump = b.work / "truth.bin"
            b.mock.get(f"/__dump?path={dump}")
            return {"free": run, "rate": arrival_rate(dump, 1000)}

        found[name] = {"capped": capped, **b.cells.get(f"open/free/{name}", take)}
    return found


def arrival_rate(dump: Path, n: int) -> dict[str, float] | None:
    """Rate and gap CV of the last n requests as the server read them; None when fewer came."""
    import struct

    raw = dump.read_bytes()
    count, size = struct.unpack_from("QQ", raw)
    at = sorted(struct.unpack_from("IIQQ", raw, 32 + i * size)[3] for i in range(count))[-n:]
    if len(at) < n:
        return None
    gaps = [(b - a) / 1e9 for a, b in itertools.pairwise(at)]
    mean = sum(gaps) / len(gaps)
    return {"rate": 1 / mean, "cv": (sum((g - mean) ** 2 for g in gaps) / len(gaps)) ** 0.5 / mean}


def err(run: dict[str, Any], name: str, stat: str) -> str:
    got = run[name].get(stat)
    if got is None:
        return "–"
    diff = got - run["truth"][f"{name}_ms"][stat]
    return f"{diff:+.2f}"


def marginal_cpu(runs: dict[str, Any]) -> float | None:
    """CPU-s per 1 M tokens by which the run with 256 streams exceeds the one with 32; None when one of them failed."""
    small, large = runs.get("32"), runs.get("256")
    if not small or not large or not small.get("completed") or not large.get("completed"):
        return None
    return (large["cpu_s"] - small["cpu_s"]) / (large["truth"]["tokens"] - small["truth"]["tokens"]) * 1e6


def render(data: dict[str, Any]) -> str:
    """Markdown of everything measured."""
    lines: list[str] = [f"Measured {data['when']}, {data['where']}.", ""]
    main = data.get("main", {})
    if main:
        lines += [
            "Errors are the client's figure minus the server's own, in ms. `true` = what the server really did in that run. aiperf and"
            " guidellm keep one mean ITL a request, so that theirs is the p99 of means.",
            "",
        ]
        lines += ["| client | C | tok/s | ITL p99 error (true) | TTFT p50 error | TTFT p99 error | CPU-s per 1 M tokens | RSS MB | load avg |",
                  "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
        for name, runs in main.items():
            marginal = marginal_cpu(runs)
            for c, run in runs.items():
                if run.get("output_throughput") is None:
                    lines.append(f"| {name} | {c} | failed: {run['note']} | | | | | | |")
                    continue
                cpu = f"{marginal:.1f}" if marginal is not None and c == "256" else ""
                lines.append(
                    f"| {name} | {c} | {run['output_throughput']:,.0f} | {err(run, 'itl', 'p99')} ({run['truth']['itl_ms']['p99']:.2f}) "
                    f"| {err(run, 'ttft', 'p50')} | {err(run, 'ttft', 'p99')} | {cpu} | {run['rss_mb']:.0f} | {run['load1']:.1f} |"
                )
        lines.append("")
    pairs = data.get("cpu", [])
    if pairs:
        lines += ["CPU of k2tui and of SGLang's Rust client, in turn. 256 streams: CPU-s per 1 M more tokens than with 32 streams. 1,024"
                  " streams: CPU-s of the whole process (262,144 tokens), start included.", "",
                  "| pair | 256: k2tui | Rust | ratio | 1,024: k2tui | Rust | ratio |", "|---|---|---|---|---|---|---|"]  # fmt: skip
        for k, pair in enumerate(pairs, 1):
            mine, other = (marginal_cpu(pair[name]) or 0.0 for name in PAIR)
            whole, theirs = (pair[name]["1024"]["cpu_s"] for name in PAIR)
            lines.append(
                f"| {k} | {mine:.1f} | {other:.1f} | {mine / (other or 1):.2f} | {whole:.2f} | {theirs:.2f} | {whole / theirs:.2f} |"
            )
        lines.append("")
    busy = data.get("busy", {})
    if busy:
        lines += ["With a busy loop of equal priority on the client's core (C=64, no real-time class):", "",
                  "| client | ITL p99 error (true) | TTFT p50 error | TTFT p99 error | load avg |", "|---|---|---|---|---|"]  # fmt: skip
        for name, run in busy.items():
            if run.get("output_throughput") is None:
                lines.append(f"| {name} | failed: {run['note']} | | | |")
                continue
            lines.append(f"| {name} | {err(run, 'itl', 'p99')} ({run['truth']['itl_ms']['p99']:.2f}) | {err(run, 'ttft', 'p50')} "
                         f"| {err(run, 'ttft', 'p99')} | {run['load1']:.1f} |")  # fmt: skip
        lines.append("")
    faults = data.get("faults", [])
    if faults:
        names = [n for n in CLIENTS if any(n in row["clients"] for row in faults)]
        lines += ["What a server may do, and what each client says (8 in flight, 16 requests of 64 tokens). **Bold** = wrong:", "",
                  "| server does | truth | " + " | ".join(names) + " |", "|---|---|" + "---|" * len(names)]  # fmt: skip
        for row in faults:
            lines.append(
                f"| {row['title']} | {truth_of(row)} | " + " | ".join(said(row, n) for n in names) + " |"
            )
        lines.append("")
    opened = data.get("open", {})
    if opened:
        lines += ["Open loop. Left: 60 requests/s into 4 slots, 300 requests (the last ones wait for seconds). Right: 200/s Poisson,"
                  " 1,000 requests, as the server saw them.", "",
                  "| client | TTFT p99 said, ms | from the due time, ms | rate at the server | gap CV |", "|---|---|---|---|---|"]  # fmt: skip
        for name, o in opened.items():
            sched = o["capped"]["ttft_sched"].get("p99")
            said_p99 = o["capped"]["ttft"].get("p99")
            rate = o["rate"]
            came = (
                f"{rate['rate']:.1f}/s | {rate['cv']:.2f}" if rate else f"failed: {o['free']['note'][:60]} | "
            )
            lines.append(f"| {name} | {'–' if said_p99 is None else f'{said_p99:,.0f}'} | {'not told' if sched is None else f'{sched:,.0f}'} "
                         f"| {came} |")  # fmt: skip
        lines.append("")
    return "\n".join(lines)


def truth_of(row: dict[str, Any]) -> str:
    runs = list(row["clients"].values())
    truth = runs[0]["truth"] if runs else {}
    if row["what"] == "itl":
        return f"ITL mean {truth['itl_ms']['mean']:.2f}"
    if row["what"] == "accept":
        return f"{truth['accept_length']:.3f}"
    if row["what"] == "ttft":
        return f"TTFT {truth['ttft_ms']['p50']:.0f}"
    if row["what"] == "peak":
        return "1,024"  # all of them: the run takes less than a second
    if row["what"] == "tokens":
        return "512 tokens"
    return {"reasoning": "16 ok"}.get(row["title"][:9], f"{expected_ok(row['title'])} ok")


def expected_ok(title: str) -> int:
    if "error in the stream" in title or "same" in title or "socket closed" in title:
        return 0
    if "empty" in title or "500" in title:
        return 8
    if "reset" in title:
        return 12
    return 16


def said(row: dict[str, Any], name: str) -> str:
    run = row["clients"].get(name)
    if run is None:
        return ""
    truth = run["truth"]
    what = row["what"]
    if run["completed"] is None:
        ok = what == "ok" and expected_ok(row["title"]) == 0 and name == "k2tui"
        text = "no result: " + re.sub(r"[|`*<>]", "", run["note"])[:40]
        return text if ok else f"**{text}**"
    if what == "itl":
        got = run["itl"].get("mean") or 0
        text, ok = f"{got:.2f}", abs(got - truth["itl_ms"]["mean"]) < 0.05 * truth["itl_ms"]["mean"]
    elif what == "accept":
        got = run["accept_length"]
        text, ok = (
            ("not told", True) if got is None else (f"{got:.3f}", abs(got - truth["accept_length"]) < 0.03)
        )
    elif what == "ttft":
        got = run["ttft"].get("p50") or 0
        text, ok = f"{got:.0f}", abs(got - truth["ttft_ms"]["p50"]) < 20
    elif what == "peak":
        text, ok = f"{run['peak']:,.0f}", abs(run["peak"] - 1024) < 0.05 * 1024
    elif what == "tokens":
        text, ok = f"{run['tokens']} tokens", run["tokens"] == 512
    else:
        text, ok = f"{run['completed']} ok", run["completed"] == expected_ok(row["title"])
    return text if ok else f"**{text}**"


def version(python: str, dist: str) -> str:
    code = (
        "import sys,importlib.metadata as m\n"
        "for d in (sys.argv[1], sys.argv[1] + '-cpu'):\n"
        "    try: print(m.version(d)); break\n"
        "    except m.PackageNotFoundError: pass"
    )
    told = subprocess.run([python, "-c", code, dist], capture_output=True, text=True, check=False)
    return told.stdout.strip() or "?"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--sglang", default="", help="python of an environment with sglang (Python and Rust clients)"
    )
    parser.add_argument("--sglang-stubs", default="", help="PYTHONPATH that this environment needs")
    parser.add_argument("--vllm", default="", help="python of an environment with vllm")
    parser.add_argument("--vllm-stubs", default="")
    parser.add_argument("--aiperf", default="", help="python of an environment with aiperf")
    parser.add_argument("--guidellm", default="", help="python of an environment with guidellm")
    parser.add_argument("--parts", default="main,cpu,busy,faults,open")
    parser.add_argument("--concurrency", default="32,256,1024")
    parser.add_argument("--pairs", type=int, default=3, help="pairs of runs of the part cpu")
    parser.add_argument("--clients", default="", help="only these, comma separated")
    parser.add_argument("--realtime", action="store_true")
    parser.add_argument("--port", type=int, default=PORT)
    parser.add_argument(
        "--data", default="", help="JSON file of the cells: those in it are not measured again"
    )
    parser.add_argument("--lock", default="", help="hold this file's lock while measuring")
    parser.add_argument("--slice", type=float, default=200, help="let go of the lock every so many seconds")
    parser.add_argument(
        "--render", default="", help="Markdown page: the tables go between its <!-- peers --> marks"
    )
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="k2tui-peers-"))
    store = Path(args.data) if args.data else work / "cells.json"
    cells = Cells(store, Path(args.lock) if args.lock else None, args.slice)
    if store.exists():
        cells.found = json.loads(store.read_text())
    python = {k: getattr(args, k) for k in (*DISTS, "sglang_stubs", "vllm_stubs") if getattr(args, k)}
    names = ["k2tui", "k2tui asyncio"]
    names += ["sglang Rust client", "sglang.serving"] if args.sglang else []
    names += ["vllm bench serve"] if args.vllm else []
    names += [k for k in ("aiperf", "guidellm") if k in python]
    if args.clients:
        names = [n for n in names if n in args.clients.split(",")]
    binary, tokenizer = work / "mocksse", work / "tok"
    subprocess.run(["gcc", "-O2", "-w", "-o", str(binary), str(FIXTURES / "mocksse.c"), "-lm"], check=True)
    make_tokenizer(tokenizer, args.sglang or sys.executable)
    mock = Mock(binary, args.port, tokenizer, args.realtime)
    bench = Bench(names, mock, work, Options(args.port, tokenizer, args.realtime, python), cells)
    parts = [p for p in args.parts.split(",") if p]
    if cells.lock is not None and "faults" in parts:
        cells.meanwhile = fault_cells(bench)
    data: dict[str, Any] = {"when": time.strftime("%Y-%m-%d")}
    try:
        for part in parts:
            print(f"== {part}", flush=True)
            if part == "main":
                data[part] = part_main(bench, [int(c) for c in args.concurrency.split(",")])
            elif part == "cpu":
                data[part] = part_cpu(bench, args.pairs) if args.sglang else []
            else:
                data[part] = {"busy": part_busy, "faults": part_faults, "open": part_open}[part](bench)
    finally:
        cells.let_go()
        mock.close()
    peers = ", ".join(f"{k} {version(python[k], k)}" for k in DISTS if k in python)
    data["where"] = (
        f"{os.cpu_count()} cores, Linux {os.uname().release.split('-')[0]}, loopback; server on core 0, client on core 1"
        f"{', both in a real-time class' if args.realtime else ''}; load average beside each figure"
        f"{'; ' + peers if peers else ''}"
    )
    text = render(data)
    print(text)
    if args.render:
        page = Path(args.render)
        marked = r"(<!-- peers -->\n).*?(<!-- /peers -->)"
        page.write_text(re.sub(marked, lambda m: m[1] + text + "\n" + m[2], page.read_text(), flags=re.S))
    shutil.rmtree(work, ignore_errors=True)
    return 0


if __name__ == "__main__":
    socket.setdefaulttimeout(120)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server and the lock are let go of
    sys.exit(main())
