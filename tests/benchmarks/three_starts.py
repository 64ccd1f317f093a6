"""Three starts of a real SGLang, and what k2tui reads in their logs: a good one, a killed scheduler, a port in use.

    python tests/benchmarks/three_starts.py --venv VENV --kit KIT [--port 31090] [--keep FOLDER]
    SITE=FOLDER python3 tests/benchmarks/three_starts.py --gpu --kit KIT [--tp 2]

VENV: an environment with SGLang for the CPU. KIT: the folder with tiny_models.py and stubs/. With --gpu the starts are on GPUs, side by
side: SGLang is in $SITE, KIT holds random_target.py and stubs/. Prints a table; exit code 1 when one of the three is read wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil

FLAGS = ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-cuda-graph",
         "--disable-overlap-schedule", "--max-total-tokens", "8192"]  # fmt: skip
# three servers on one GPU: small pools, and a share that holds whatever the others have taken
GPU_FLAGS = ["--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none", "--mem-fraction-static", "0.85",
             "--max-total-tokens", "16384", "--cuda-graph-max-bs", "4", "--disable-piecewise-cuda-graph"]  # fmt: skip


def python_of(args: argparse.Namespace) -> str:
    return sys.executable if args.gpu else str(args.venv / "bin/python")


def environment(args: argparse.Namespace) -> dict[str, str]:
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if args.gpu:
        return {**offline, "PYTHONPATH": f"{os.environ['SITE']}:{args.kit / 'stubs'}", "STUB_ROOTS": "soundfile,xgrammar,llguidance,flashinfer"}  # fmt: skip
    return {
        **offline, "PYTHONPATH": str(args.kit / "stubs"), "STUB_ROOTS": "torchvision,soundfile,triton", "PYTHONDONTWRITEBYTECODE": "1",
        "TORCHDYNAMO_DISABLE": "1", "SGLANG_USE_CPU_ENGINE": "1",
    }  # fmt: skip


def start(args: argparse.Namespace, model: Path, log: Path) -> subprocess.Popen[bytes]:
    env = environment(args)
    flags = [*GPU_FLAGS, "--tp-size", str(args.tp)] if args.gpu else FLAGS
    argv = [
        python_of(args),
        "-m",
        "sglang.launch_server",
        "--model-path",
        str(model),
        "--host",
        "127.0.0.1",
        "--port",
        str(args.port),
    ]
    with log.open("wb") as out:
        return subprocess.Popen(
            [*argv, *flags], stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )


def wait(what: str, done: Callable[[], bool], limit_s: float = 420.0) -> None:
    end = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > end:
            raise SystemExit(f"waited {limit_s:.0f} s in vain for: {what}")
        time.sleep(0.02)


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/model_info", timeout=2) as reply:
            return reply.status == 200
    except OSError:
        return False


def end(server: subprocess.Popen[bytes]) -> None:
    family = psutil.Process(server.pid).children(recursive=True) if server.poll() is None else []
    for sig in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(server.pid, sig)
        except ProcessLookupError:
            break
        try:
            server.wait(20)
            break
        except subprocess.TimeoutExpired:
            continue
    for process in family:
        if process.is_running():
            process.kill()


def diagnose(log: Path, context: dict[str, object]) -> dict[str, object]:
    facts = log.with_suffix(".json")
    facts.write_text(json.dumps(context))
    run = subprocess.run(
        [sys.executable, "-m", "k2tui", "diagnose", "--json", "--context", str(facts), str(log)],
        capture_output=True,
        text=True,
    )
    return json.loads(run.stdout)


def good(args: argparse.Namespace, model: Path, log: Path) -> dict[str, object]:
    server = start(args, model, log)
    try:
        wait("an answer", lambda: answers(args.port) or server.poll() is not None)
        wait("the ready line", lambda: b"ready to roll" in log.read_bytes() or server.poll() is not None)
        return diagnose(log, {"silence_s": 0, "alive": server.poll() is None})
    finally:
        end(server)


def killed(args: argparse.Namespace, model: Path, log: Path) -> dict[str, object]:
    server = start(args, model, log)
    try:
        wait(
            "the load's beginning",
            lambda: b"Load weight begin" in log.read_bytes() or server.poll() is not None,
        )
        for child in psutil.Process(server.pid).children(recursive=True):
            if "scheduler" in " ".join(child.cmdline()):
                child.kill()
        wait("the end", lambda: server.poll() is not None, 120)
        return diagnose(log, {"alive": False, "exit_code": server.returncode})
    finally:
        end(server)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def taken(args: argparse.Namespace, model: Path, log: Path) -> dict[str, object]:
    with ThreadingHTTPServer(("127.0.0.1", args.port), Quiet) as other:  # somebody else's server
        threading.Thread(target=other.serve_forever, daemon=True).start()
        server = start(args, model, log)
        try:
            wait("the refusal", lambda: b"Errno 98" in log.read_bytes() or server.poll() is not None)
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                pass  # it does not always end: its log has said enough
            return diagnose(log, {"alive": server.poll() is None, "exit_code": server.returncode})
        finally:
            end(server)
            other.shutdown()


STARTS: tuple[tuple[str, Callable[..., dict[str, object]], str, str], ...] = (
    ("good", good, "ready", "healthy"),
    ("killed scheduler", killed, "failed", "host_oom_kill"),
    ("port in use", taken, "failed", "port_in_use"),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--venv", type=Path)
    parser.add_argument("--kit", type=Path, required=True)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel size, with --gpu")
    parser.add_argument("--port", type=int, default=31090)
    parser.add_argument("--keep", type=Path, help="keep the logs there")
    args = parser.parse_args()
    if args.venv is None and not args.gpu:
        parser.error("give --venv, or --gpu")
    folder = args.keep or Path(tempfile.mkdtemp(prefix="k2tui-starts-"))
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / "model"
    maker = ["random_target.py", str(model), "2048", "16", "24MB"] if args.gpu else ["tiny_models.py", "llama", str(model), "16", "40KB"]  # fmt: skip
    subprocess.run([python_of(args), str(args.kit / maker[0]), *maker[1:]], check=True, capture_output=True, env=environment(args))  # fmt: skip
    total = len(list(model.glob("*.safetensors")))
    wrong = 0
    print(f"{'start':18}{'state':8}{'cause':16}{'shards':>8}  line  proof")
    logs = {name: folder / f"{name.replace(' ', '-')}.log" for name, *_ in STARTS}
    with ThreadPoolExecutor(len(STARTS) if args.gpu else 1) as pool:
        runs = []
        for number, (name, run, _, _) in enumerate(STARTS):
            own = argparse.Namespace(**{**vars(args), "port": args.port + 200 * number})
            runs.append(pool.submit(run, own, model, logs[name]))
        found = [r.result() for r in runs]
    for (name, _, state, cause), got in zip(STARTS, found, strict=True):
        shards = got["shards"] if isinstance(got["shards"], dict) else {}
        is_right = (got["state"], got["root_cause"]) == (state, cause) and (
            name != "good" or shards.get("done") == total
        )
        wrong += not is_right
        count = f"{shards.get('done')}/{shards['total']}" if shards.get("total") else "-"
        print(
            f"{name:18}{got['state']:8}{got['root_cause']:16}{count:>8}  {got['proof_line_no']!s:5} {str(got['proof_line'])[:90]}"
            + ("" if is_right else "   WRONG")
        )
    print(f"{len(STARTS) - wrong} of {len(STARTS)} read right; load of this machine {os.getloadavg()[0]:.1f}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
