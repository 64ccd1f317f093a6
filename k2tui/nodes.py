"""One node of a server on several machines: a job here that starts, follows and stops a k2tui job there, over SSH.

`python -m k2tui.nodes run HOST ... -- ARGV` is the local job's work. It calls `submit`, `follow`, `stop` and `check` of this same module on
the other machine, each a command of its own over ssh (BatchMode: a password is never asked), with what may be secret on stdin. The job there
has its own keeper, so a dropped connection loses nothing: it is followed again from where its log was left.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from k2tui.errors import K2Error
from k2tui.lifecycle import NODE_STOPPED
from k2tui.parsing import parse_json
from k2tui.paths import own_module

SSH = (
    "ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3",
    "-o", "ControlMaster=no",
)  # fmt: skip
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@%-]*")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
_BEAT_S = 2.0
_AGAIN_S = (1.0, 2.0, 5.0, 10.0)


class Halt(Exception):
    """The keeper asked for the end."""


class ServerEnded(Halt):
    """The server on the first node is over."""


def remote_argv(host: str, python: str, *words: str) -> list[str]:
    """The ssh command that runs this module there. Raises K2Error for a host that ssh could take for an option."""
    if not _HOST.fullmatch(host):
        raise K2Error(
            f"node {host!r} is no host name", "as ssh takes it: HOST, USER@HOST or a name of ~/.ssh/config"
        )
    return [*SSH, "--", host, shlex.join([*own_module("k2tui.nodes", python), *words])]


def ask(
    host: str, python: str, *words: str, given: Mapping[str, Any] | None = None, timeout_s: float = 60.0
) -> dict[str, Any]:
    """One command there, its JSON answer. Raises K2Error in words: not reachable, no k2tui there, or what it said."""
    try:
        done = subprocess.run(
            remote_argv(host, python, *words), input=json.dumps(dict(given or {})), capture_output=True, text=True,
            timeout=timeout_s, start_new_session=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise K2Error(f"node {host}: no answer within {timeout_s:g} s") from None
    except OSError as err:
        raise K2Error(
            f"node {host}: ssh cannot be run: {err.strerror}", "install an OpenSSH client"
        ) from None
    said = (done.stderr.strip().splitlines() or [""])[-1]
    if done.returncode == 255:
        raise K2Error(
            f"node {host} is not reachable: {said or 'ssh failed'}",
            f"ssh -o BatchMode=yes {host} true must work without a question",
        )
    try:
        answer = parse_json(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        answer = None
    if not isinstance(answer, dict):
        raise K2Error(
            f"node {host}: {python} -m k2tui.nodes does not answer: {said or f'exit {done.returncode}'}",
            "install k2tui there, and name its interpreter by node_python in the profile",
        )
    found = cast("dict[str, Any]", answer)
    if "error" in found:
        raise K2Error(f"node {host}: {found['error']}", str(found.get("hint") or ""))
    return found


# ---- here


class Node:
    """The local side of one node."""

    def __init__(self, host: str, python: str, rank: int, server: str) -> None:
        self.host, self.python, self.rank, self.server = host, python, rank, server
        self.job = ""
        self.offset = 0

    @property
    def name(self) -> str:
        return f"node {self.rank} ({self.host})"

    def say(self, text: str) -> None:
        sys.stdout.write(f"[k2tui] {self.name}: {text}\n")
        sys.stdout.flush()

    def submit(self, spec: Mapping[str, Any]) -> None:
        answer = ask(self.host, self.python, "submit", given=spec)
        job = str(answer.get("job"))
        if not _ID.fullmatch(job):
            raise K2Error(f"node {self.host}: it answered with no job id")
        self.job = job
        self.say(f"job {job} started there")

    def follow(self) -> dict[str, Any]:
        """Its log goes to our output until the job there has ended; then its last facts. Reconnects as long as it takes."""
        failures = 0
        while True:
            end = self._follow_once()
            if end is not None:
                return end
            pause = _AGAIN_S[min(failures, len(_AGAIN_S) - 1)]
            failures += 1
            self.say(f"the connection is lost; the job there goes on; again in {pause:g} s")
            until = time.monotonic() + pause
            while time.monotonic() < until:
                self._look_at_server()
                time.sleep(0.25)

    def _follow_once(self) -> dict[str, Any] | None:
        child = subprocess.Popen(
            remote_argv(self.host, self.python, "follow", self.job, str(self.offset)),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert child.stdout is not None and child.stderr is not None
        try:
            rest = b""
            while True:
                ready, _, _ = select.select([child.stdout], [], [], _BEAT_S)
                self._look_at_server()
                if not ready:
                    continue
                data = os.read(child.stdout.fileno(), 1 << 16)
                if not data:
                    break
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    end = self._take(line)
                    if end is not None:
                        return end
            said = child.stderr.read(2000).decode("utf-8", "replace").strip().splitlines()
            if said:
                self.say(said[-1])
            return None
        finally:
            child.kill()
            child.wait()
            child.stdout.close()
            child.stderr.close()

    def _take(self, line: bytes) -> dict[str, Any] | None:
        try:
            facts = cast("dict[str, Any]", parse_json(line))
        except ValueError:
            return None  # a banner of the login, or a half line
        if "log" in facts:
            sys.stdout.write(str(facts["log"]))
            sys.stdout.flush()
            self.offset = int(facts["offset"])
        return facts if facts.get("end") else None

    def _look_at_server(self) -> None:
        """The server on the first node has ended: this node has nothing to do any more."""
        if not self.server:
            return
        from k2tui.jobs import folder

        try:
            job = folder.get(self.server)
        except K2Error:
            return
        if job.state.is_final:
            self.say(f"the server's job {self.server} is {job.state}: this node ends too")
            raise ServerEnded

    def stop(self) -> int:
        """Stop the job there and see that nothing is left of it. Returns the exit code of this job."""
        if not self.job:
            return NODE_STOPPED
        for attempt in range(3):
            try:
                answer = ask(self.host, self.python, "stop", self.job, timeout_s=110)
            except K2Error as err:
                self.say(err.message)
                time.sleep(2.0 * (attempt + 1))
                continue
            self.say(str(answer["words"]))
            return NODE_STOPPED if answer["is_clean"] else 1
        self.say(f"it could not be stopped from here: ssh {self.host} k2tui down {self.job}")
        return 1


def _run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    from k2tui.jobs import folder
    from k2tui.jobs.report import report_result

    node = Node(args.host, args.python, args.rank, args.server)
    is_asked = False

    def on_term(*_: object) -> None:
        nonlocal is_asked
        is_asked = True
        if node.job:  # before that the job there could start without anybody knowing its id
            raise Halt

    signal.signal(signal.SIGTERM, on_term)
    signal.signal(signal.SIGINT, on_term)
    env = {name: os.environ[name] for name in args.env if name in os.environ}
    why = ""
    try:
        node.submit({"argv": list(argv), "env": env, "locks": args.lock, "title": args.title})
        if is_asked:
            raise Halt
        report_result({"host": args.host, "job": node.job})
        end = node.follow()
        why = f"{node.name}: its job {node.job} ended: {end.get('reason') or end.get('state')}"
        code = end.get("exit_code")
        result = code if isinstance(code, int) and 0 < code < 126 else 1
    except Halt as halt:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        code = node.stop()
        return 0 if code == NODE_STOPPED and isinstance(halt, ServerEnded) else code
    except K2Error as err:
        print(f"[k2tui] {err.message}\n  {err.hint}", flush=True)
        why, result = f"{node.name}: {err.message}", 1
    if args.server:  # without this node the server waits for ever
        folder.stop(args.server, by=why)
    return result


# ---- there


def _submit() -> dict[str, Any]:
    from k2tui.core.job import JobSpec
    from k2tui.jobs import folder

    raw = json.loads(sys.stdin.read())
    spec = JobSpec(
        id="", stage="node", title=str(raw["title"]), argv=tuple(map(str, raw["argv"])), kind="server",
        env={str(k): str(v) for k, v in raw["env"].items()}, locks=tuple(map(str, raw["locks"])), cwd=os.path.expanduser("~"),
    )  # fmt: skip
    return {"job": folder.submit(spec)}


def _follow(job_id: str, offset: int) -> None:
    """The log from `offset` on as JSON lines, a beat when nothing happens, the job's end last."""
    from k2tui.jobs import folder

    path = folder.log_path(job_id)
    beat = time.monotonic()

    def put(facts: Mapping[str, Any]) -> None:
        nonlocal beat
        sys.stdout.write(json.dumps(facts) + "\n")
        sys.stdout.flush()
        beat = time.monotonic()

    while True:
        job = folder.get(job_id)
        while True:
            try:
                with path.open("rb") as fh:
                    size = os.fstat(fh.fileno()).st_size
                    if size < offset:
                        offset = 0  # rotated
                    fh.seek(offset)
                    data = fh.read(1 << 16)
            except OSError:
                data = b""
            if not data:
                break
            offset += len(data)
            put({"log": data.decode("utf-8", "replace"), "offset": offset})
        if job.state.is_final:
            put({"end": True, "state": str(job.state), "reason": job.reason, "exit_code": job.exit_code})
            return
        if time.monotonic() - beat > _BEAT_S:
            put({"state": str(job.state)})
        time.sleep(0.25)


def _stop(job_id: str) -> dict[str, Any]:
    from k2tui.lifecycle import stop_servers

    (end,) = stop_servers([job_id], by="the first node", timeout_s=60)
    return {"words": end.words, "is_clean": end.is_clean, "state": str(end.job.state)}


def _check() -> dict[str, Any]:
    """What a start on this machine would meet: {python, engine, env, model, draft, gpus} on stdin."""
    from k2tui import __version__, checkpoint
    from k2tui.doctor import gpu_facts
    from k2tui.engine_flags import find_engine

    raw = json.loads(sys.stdin.read())
    found = find_engine(str(raw["engine"]), str(raw["python"]), raw.get("env"))
    models: dict[str, str] = {}
    for path in (raw.get("model"), raw.get("draft")):
        if path:
            try:
                seen = checkpoint.inspect(path)
                bad = len(seen.missing) + len(seen.broken)
                models[path] = f"{bad} of {len(seen.shards)} shards are missing or damaged" if bad else ""
            except K2Error as err:
                models[path] = err.message
    gpus = gpu_facts(tuple(raw.get("gpus") or ()))
    return {
        "k2tui": __version__, "engine": found.version, "has_engine": bool(found.package), "models": models,
        "gpus": [{"index": g.index, "name": g.name, "capability": g.capability, "free_b": g.free_b} for g in gpus],
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m k2tui.nodes")
    actions = parser.add_subparsers(dest="action", required=True)
    run = actions.add_parser("run")
    run.add_argument("host")
    run.add_argument("--python", default="python3")
    run.add_argument("--rank", type=int, default=1)
    run.add_argument("--server", default="", help="job of the server on the first node: they end together")
    run.add_argument("--title", default="node")
    run.add_argument("--env", action="append", default=[], help="name of a variable to hand on")
    run.add_argument("--lock", action="append", default=[])
    actions.add_parser("submit")
    actions.add_parser("check")
    follow = actions.add_parser("follow")
    follow.add_argument("job")
    follow.add_argument("offset", type=int)
    stop = actions.add_parser("stop")
    stop.add_argument("job")
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:cut])
    if args.action == "run":
        return _run(args, words[cut + 1 :])
    try:
        if args.action == "follow":
            _follow(args.job, args.offset)
            return 0
        answer = (
            _submit() if args.action == "submit" else _stop(args.job) if args.action == "stop" else _check()
        )
    except BrokenPipeError:
        return 1
    except K2Error as err:
        answer = {"error": err.message, "hint": err.hint}
    except (ValueError, KeyError, TypeError) as err:
        answer = {
            "error": f"what came over is not understood ({err}): another version of k2tui?",
            "hint": "install the same version on every node",
        }
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
