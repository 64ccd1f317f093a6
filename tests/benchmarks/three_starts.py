"""Three starts of a real SGLang on this CPU, and what k2tui reads in their logs: a good one, a killed scheduler, a port in use.

    python tests/benchmarks/three_starts.py --venv VENV --kit KIT [--port 31090] [--keep FOLDER]

VENV: an environment with SGLang for the CPU. KIT: the folder with tiny_models.py and stubs/. Prints a table; exit code 1 when one
of the three is read wrong.
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
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil

FLAGS = ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-cuda-graph",
         "--disable-overlap-schedule", "--max-total-tokens", "8192"]  # fmt: skip


def start(args: argparse.Namespace, model: Path, log: Path) -> subprocess.Popen[bytes]:
    env = {
        **os.environ, "PYTHONPATH": str(args.kit / "stubs"), "STUB_ROOTS": "torchvision,soundfile,triton", "PYTHONDONTWRITEBYTECODE": "1",
        "TORCHDYNAMO_DISABLE": "1", "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
    }  # fmt: skip
    argv = [
        str(args.venv / "bin/python"),
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
            [*argv, *FLAGS], stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True
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
    parser.add_argument("--venv", type=Path, required=True)
    parser.add_argument("--kit", type=Path, required=True)
    parser.add_argument("--port", type=int, default=31090)
    parser.add_argument("--keep", type=Path, help="keep the logs there")
    args = parser.parse_args()
    folder = args.keep or Path(tempfile.mkdtemp(prefix="k2tui-starts-"))
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / "model"
    subprocess.run(
        [str(args.venv / "bin/python"), str(args.kit / "tiny_models.py"), "llama", str(model), "16", "40KB"],
        check=True,
        capture_output=True,
    )
    total = len(list(model.glob("*.safetensors")))
    wrong = 0
    print(f"{'start':18}{'state':8}{'cause':16}{'shards':>8}  line  proof")
    for name, run, state, cause in STARTS:
        log = folder / f"{name.replace(' ', '-')}.log"
        got = run(args, model, log)
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
