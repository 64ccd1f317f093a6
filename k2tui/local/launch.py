"""Starts the embedded engine: every phase in SGLang's order and words, then uvicorn until SIGTERM.

torch is imported after the first log lines, so that a reader sees at once that something starts.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k2tui.errors import K2Error
from k2tui.local.arguments import VERSION, ServerArgs, parse
from k2tui.local.log import announce, log, uvicorn_log_config

if TYPE_CHECKING:
    import uvicorn

    from k2tui.local.server import Service

ABOUT = (
    "[k2tui embedded engine] This is k2tui's own small model server, for trying the pipeline and for tests: one device, "
    "no tensor parallelism, no prefix cache. It speaks SGLang {version}'s log grammar and HTTP dialect; "
    "SGLang is what to serve real models with."
)
DRAIN_TIMEOUT_S = 60.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run until stopped. Returns 0 after a clean stop, 1 when the start failed; wrong usage exits with 2."""
    args, ignored = parse(sys.argv[1:] if argv is None else argv)
    # A stop that comes while the model loads ends the process at once and without a traceback.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop_early)
    announce(ABOUT.format(version=VERSION))
    for flag in ignored:
        log(f"{flag} has no effect on the embedded engine and is ignored.")
    log(f"server_args={args.shown()}")
    try:
        return _serve(args)
    except K2Error as err:
        log(f"Scheduler hit an exception: {err.message}")
        if err.hint:
            log(f"What to do: {err.hint}.")
        log("The embedded engine could not start and exits with code 1.")
        return 1


def _stop_early(number: int, _: Any) -> None:
    log(f"{signal.Signals(number).name} received while starting. Shutting down.")
    sys.stderr.flush()
    os._exit(0)


def _check_port(host: str, port: int) -> None:
    """Before minutes of loading, not after. uvicorn's own words."""
    if port == 0:
        return
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as err:
        raise K2Error(
            f"--host {host}: {err.strerror or err}", "give an address of this machine, e.g. 127.0.0.1"
        )
    family, kind, proto, _, address = found[0]
    with socket.socket(family, kind, proto) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as err:
            words = (os.strerror(err.errno) if err.errno else str(err)).lower()
            log(
                f"ERROR:    [Errno {err.errno}] error while attempting to bind on address {tuple(address[:2])!r}: {words}"
            )
            raise K2Error(
                f"cannot listen on {host}:{port}: {words}", "stop the other server or choose another --port"
            )


def _available_gb(device: str) -> float:
    """Free memory in GiB, as `avail mem` in the log."""
    if device == "cuda":
        import torch

        return torch.cuda.mem_get_info()[0] / 2**30
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) / 2**20
    except OSError:
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    except (ValueError, OSError):
        return 0.0


def _dtype(args: ServerArgs, config: dict[str, Any], device: str) -> Any:
    import torch

    name = args.dtype
    if name == "auto":
        # bfloat16 has no quick path on most CPUs; float32 also makes greedy ties as good as impossible
        name = (
            "float32"
            if device == "cpu"
            else str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
        )
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise K2Error(
            f"config.json: dtype {name!r} is not supported", "give --dtype float32, bfloat16 or float16"
        )
    return dtype


def _serve(args: ServerArgs) -> int:
    began = time.perf_counter()
    from k2tui.local.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(args.model_path)
    draft_checkpoint = open_checkpoint(args.speculative_draft_model_path) if args.is_speculative else None
    from k2tui.local.text import Tokenizer

    tokenizer = Tokenizer(
        Path(args.tokenizer_path).expanduser() if args.tokenizer_path else checkpoint.folder
    )
    vocab_size = int(checkpoint.config.get("vocab_size") or 0)
    if tokenizer.vocab_size > vocab_size:
        raise K2Error(
            f"wrong tokenizer: {tokenizer.folder} has {tokenizer.vocab_size} tokens, the model's vocab_size is {vocab_size}",
            "use the tokenizer that belongs to this checkpoint",
        )
    _check_port(args.host, args.port)
    if tokenizer.chat_template:
        log("Using default HuggingFace chat template with detected content format: string")
    else:
        log("No chat template found: /v1/chat/completions will refuse requests.")

    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        raise K2Error(
            "--device cuda: torch sees no CUDA device",
            "use --device cpu, or check the driver and torch's build",
        )
    device = "cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu"
    torch.set_num_threads(args.num_threads or (1 if device == "cpu" else 4))
    torch.set_grad_enabled(False)
    if device == "cuda":
        torch.cuda.init()

    from k2tui.local.decoder import make_decoder
    from k2tui.local.metrics import Metrics
    from k2tui.local.scheduler import Scheduler
    from k2tui.local.server import Service

    log("Init parallel begin.")
    log(f"Init parallel ends. elapsed={time.perf_counter() - began:.2f} s")
    before = _available_gb(device)
    log("Memory baseline taken. mem usage=0.00 GB")

    model_len = int(checkpoint.config.get("max_position_embeddings") or 2048)
    context_len = min(args.context_length or model_len, model_len)
    if args.context_length > model_len:
        log(
            f"--context-length {args.context_length} is more than the model's {model_len}: {context_len} is used."
        )
    dtype = _dtype(args, checkpoint.config, device)
    scheduler_began = time.perf_counter()
    capacity = context_len + args.speculative_num_draft_tokens + 1

    log(f"Load weight begin. avail mem={before:.2f} GB")
    tic = time.perf_counter()
    decoder = make_decoder(
        checkpoint,
        impl=args.model_impl,
        dtype=dtype,
        device=torch.device(device),
        capacity=capacity,
        delay_s=args.load_delay_s,
    )
    load_weight = time.perf_counter() - tic
    after = _available_gb(device)
    log(
        f"Load weight end. elapsed={load_weight:.2f} s, type={checkpoint.architecture or 'unknown'}, "
        f"avail mem={after:.2f} GB, mem usage={max(0.0, before - after):.2f} GB."
    )
    speculator = None
    if draft_checkpoint is not None:
        from k2tui.local.speculative import load_speculator

        log("Memory baseline taken. mem usage=0.00 GB")
        log(f"Load weight begin. avail mem={after:.2f} GB")
        tic = time.perf_counter()
        speculator = load_speculator(
            draft_checkpoint,
            decoder,
            num_steps=args.speculative_num_steps,
            rows=args.max_running_requests,
            capacity=capacity,
            delay_s=args.load_delay_s,
        )
        load_weight += time.perf_counter() - tic
        last = _available_gb(device)
        log(
            f"Load weight end. elapsed={time.perf_counter() - tic:.2f} s, type={draft_checkpoint.architecture}, "
            f"avail mem={last:.2f} GB, mem usage={max(0.0, after - last):.2f} GB."
        )

    tic = time.perf_counter()
    rows = args.max_running_requests
    per_token = 2 * decoder.num_layers * decoder.num_kv_heads * decoder.head_dim * dtype.itemsize
    need_gb = rows * capacity * per_token / 2**30
    if need_gb > 0.8 * _available_gb(device):
        raise K2Error(
            f"Not enough memory for the KV cache: {rows} requests of {context_len} tokens need {need_gb:.1f} GB, "
            f"{_available_gb(device):.1f} GB are free",
            "give a smaller --context-length or --max-running-requests",
        )
    tokens = min(args.max_total_tokens or rows * context_len, rows * context_len)
    metrics = Metrics()
    scheduler = Scheduler(
        decoder,
        context_len=context_len,
        max_running_requests=rows,
        max_total_num_tokens=tokens,
        chunked_prefill_size=args.chunked_prefill_size,
        decode_log_interval=args.decode_log_interval,
        eos_ids=_eos_ids(checkpoint, tokenizer),
        seed=args.random_seed,
        metrics=metrics,
        speculator=speculator,
    )
    capture_root = None
    if os.environ.get("K2TUI_CAPTURE_DIR"):
        from k2tui.local.capture import attach

        capture_root = attach(scheduler, model_path=args.model_path, architectures=[checkpoint.architecture])
    kv_gb = scheduler.pool.bytes_per_token * tokens / 2**30
    for size in (kv_gb, speculator.pool.bytes_per_token * tokens / 2**30) if speculator else (kv_gb,):
        log(
            f"KV Cache is allocated. dtype: {dtype}, #tokens: {tokens}, K size: {size / 2:.2f} GB, V size: {size / 2:.2f} GB"
        )
        log(f"Memory pool end. avail mem={_available_gb(device):.2f} GB")
    kv_time = time.perf_counter() - tic
    log(
        f"max_total_num_tokens={tokens}, chunked_prefill_size={args.chunked_prefill_size}, max_prefill_tokens=16384, "
        f"max_running_requests={rows}, context_len={context_len}, "
        f"available_{'gpu' if device == 'cuda' else 'cpu'}_mem={_available_gb(device):.2f} GB"
    )
    now = time.perf_counter()
    startup = {
        "load_weight": load_weight,
        "kv_cache_allocation": kv_time,
        "scheduler_e2e": now - scheduler_began,
        "tokenizer_e2e": now - began,
    }
    log("Engine startup timings (s): " + ", ".join(f"{k}={v:.2f}" for k, v in startup.items()))
    service = Service(
        args=args,
        model_path=args.model_path,
        model_name=args.served_model_name or args.model_path,
        architectures=[checkpoint.architecture],
        model_type=str(checkpoint.config.get("model_type", "")),
        tokenizer=tokenizer,
        scheduler=scheduler,
        metrics=metrics,
        startup_time=startup,
        weight_gb=checkpoint.size_bytes / 2**30,
        kv_gb=kv_gb,
        default_sampling=_default_sampling(checkpoint.folder),
        capture_root=capture_root,
    )
    scheduler.start()
    return _run_http(service)


def _eos_ids(checkpoint: Any, tokenizer: Any) -> frozenset[int]:
    from k2tui.local.checkpoint import read_json

    file = checkpoint.folder / "generation_config.json"
    sources = [checkpoint.config, read_json(file) if file.is_file() else {}]
    found: set[int] = set()
    for source in sources:
        value = source.get("eos_token_id")
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    extra = tokenizer.token_id(tokenizer.eos_token)
    return frozenset(found | ({extra} if extra is not None else set()))


def _default_sampling(folder: Path) -> dict[str, Any]:
    """The model's own sampling defaults, as SGLang takes them from generation_config.json."""
    from k2tui.local.checkpoint import read_json

    file = folder / "generation_config.json"
    found = read_json(file) if file.is_file() else {}
    keys = ("temperature", "top_p", "top_k", "min_p")
    values = {key: found[key] for key in keys if found.get(key) is not None}
    if values.get("top_k") == 0:
        values["top_k"] = -1
    return values


def _run_http(service: Service) -> int:
    import uvicorn

    from k2tui.local.server import make_app

    class Server(uvicorn.Server):
        """uvicorn, but a stop first lets running requests finish."""

        def handle_exit(self, sig: int, frame: Any) -> None:
            if service.status == "draining":  # asked twice: now
                service.scheduler.abort(all_requests=True)
                self.force_exit = self.should_exit = True
                return
            service.status = "draining"
            log(
                f"{signal.Signals(sig).name} received. signum=None frame=None. Draining requests and shutting down..."
            )
            threading.Thread(target=self._drain, name="drain", daemon=True).start()

        def _drain(self) -> None:
            deadline = time.monotonic() + DRAIN_TIMEOUT_S
            while (
                service.scheduler.num_open_requests
                and service.scheduler.is_alive
                and time.monotonic() < deadline
            ):
                time.sleep(0.02)
            left = [request.rid for request in (*service.scheduler.running, *service.scheduler.waiting)]
            log(
                f"Gracefully exiting... Remaining number of requests {len(left)}. Remaining requests remaining_rids={left}."
            )
            service.scheduler.abort(all_requests=True)
            self.should_exit = True

    config = uvicorn.Config(
        make_app(service),
        host=service.args.host,
        port=service.args.port,
        log_config=uvicorn_log_config(),
        timeout_graceful_shutdown=5,
        lifespan="off",
        loop="asyncio",
        http="h11",
        ws="none",
    )
    server = Server(config)
    warmup = threading.Thread(target=_warm_up, args=(service, server), name="warm-up", daemon=True)
    warmup.start()
    watch = threading.Thread(target=_watch, args=(service, server), name="watch", daemon=True)
    watch.start()
    try:
        server.run()
    except SystemExit:
        return 1  # uvicorn has said why (the port was taken in between)
    except asyncio.CancelledError:
        pass
    service.scheduler.stop()
    return 1 if service.scheduler.failure or service.status == "failed" else 0


def _watch(service: Service, server: uvicorn.Server) -> None:
    """A scheduler that died takes the server with it, as SGLang does: a dead engine must not look alive."""
    while not server.should_exit:
        time.sleep(0.2)
        if service.scheduler.failure:
            log("SIGQUIT received. signum=None, frame=None. It usually means one child failed.")
            time.sleep(0.5)  # let answers out
            server.should_exit = True


def _warm_up(service: Service, server: uvicorn.Server) -> None:
    """Ask the server itself, over HTTP, and call it ready only when it answered as itself."""
    import http.client
    import json

    while not server.started:
        if server.should_exit:
            return
        time.sleep(0.005)
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    host = str({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host))

    def call(method: str, path: str, body: Any = None) -> Any:
        connection = http.client.HTTPConnection(host, port, timeout=600)
        try:
            payload = None if body is None else json.dumps(body)
            connection.request(method, path, payload, {"content-type": "application/json"} if payload else {})
            answer = connection.getresponse()
            raw = answer.read()
            if answer.status != 200:
                raise OSError(f"{method} {path} answered {answer.status}: {raw[:200]!r}")
            return json.loads(raw) if raw else None
        finally:
            connection.close()

    try:
        if call("GET", "/model_info")["model_path"] != service.model_path:
            raise OSError(f"another server answers on {host}:{port}")
        if not service.args.skip_server_warmup:
            ids = [i % service.scheduler.decoder.vocab_size for i in (10, 11, 12, 13, 14, 15)]
            length = min(8, service.scheduler.context_len - len(ids) - 1)
            params = {"temperature": 0, "max_new_tokens": max(1, length), "ignore_eos": True}
            answer = call("POST", "/generate", {"input_ids": ids, "sampling_params": params})
            if answer["meta_info"]["completion_tokens"] != params["max_new_tokens"]:
                raise OSError(f"the warm-up request came back short: {answer['meta_info']}")
        call("POST", "/freeze_gc")
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException) as err:
        if service.status != "draining":
            service.status = "failed"
            log(f"Initialization failed. warmup error: {type(err).__name__}: {err}")
            server.should_exit = True
        return
    if service.status == "starting":
        service.status = "ready"
        log("The server is fired up and ready to roll!")
