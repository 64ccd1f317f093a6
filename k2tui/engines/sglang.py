"""SGLang: how it is started, and what its log says (0.3 to 0.5.23). Returns values; starts and reads nothing."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable

from k2tui.config import Profile
from k2tui.core.events import (
    BindFailed,
    Decoded,
    Dying,
    EngineArgs,
    Event,
    Listening,
    PhaseEdge,
    Prefilled,
    ReadyLine,
    Stopping,
)
from k2tui.core.gpu import visible_gpus
from k2tui.core.load import DecodeBatch, Phase
from k2tui.core.patterns import Pattern, Words, whole
from k2tui.engines import Engine, LaunchPlan
from k2tui.engines._grammar import parse_shared
from k2tui.errors import UsageError
from k2tui.paths import model_path

BANNER = "[k2tui embedded engine] "  # first line of the embedded engine's log; the rest is SGLang's grammar


def launch(profile: Profile) -> LaunchPlan:
    """argv of `python -m sglang.launch_server` for this profile's node. profile.gpus become CUDA_VISIBLE_DEVICES (NVML's numbers). Raises UsageError."""
    argv = [
        os.path.expanduser(profile.python) or sys.executable,
        "-m",
        "sglang.launch_server",
        "--model-path",
        model_path(profile.model),
    ]
    argv += ["--host", profile.host, "--port", str(profile.port)]
    if profile.tp_size != 1:
        argv += ["--tp-size", str(profile.tp_size)]
    if profile.served_model_name:
        argv += ["--served-model-name", profile.served_model_name]
    if profile.nodes:
        if not profile.dist_init_addr:
            raise UsageError(
                f"profile {profile.name!r} has nodes but no dist_init_addr",
                'set dist_init_addr = "HOST:PORT" of node 0, as the others reach it',
            )
        argv += ["--nnodes", str(profile.nnodes), "--dist-init-addr", profile.dist_init_addr]
        argv += ["--node-rank", str(profile.node_rank)]
    if profile.draft:
        argv += [
            "--speculative-algorithm",
            "EAGLE3",
            "--speculative-draft-model-path",
            model_path(profile.draft),
        ]
        argv += ["--speculative-num-steps", str(profile.speculative_num_steps)]
        argv += ["--speculative-eagle-topk", str(profile.speculative_eagle_topk)]
        argv += ["--speculative-num-draft-tokens", str(profile.speculative_num_draft_tokens)]
    argv += profile.args
    env = {**visible_gpus(profile.gpus), **profile.env}
    return LaunchPlan(tuple(argv), env, profile.host, profile.port)


ENGINE = Engine(
    name="sglang",
    title="SGLang",
    launch=launch,
    ready_line="The server is fired up and ready to roll!",
    model_info_path="/model_info",
    process_titles=("sglang::", "sglang "),
)

_ELAPSED = Pattern(r"(?:elapsed=|Time elapsed: ?)(\d+(?:\.\d+)?) ?s")
_TYPE = Pattern(r"type=([\w.]+)")
_PAIR = Pattern(r"([#A-Za-z][\w #./()-]*?):\s*(-?[\d.]+(?:[eE][+-]?\d+)?|True|False|nan|inf)(?=[,\s%]|$)")
_ARG = {
    name: Pattern(rf"{name}['\"]?\s*[=:]\s*(?:'([^']*)'|\"([^\"]*)\"|([\w./:-]+))")
    for name in (
        "model_path", "speculative_draft_model_path", "speculative_algorithm", "tp_size", "dp_size", "pp_size", "nnodes",
        "host", "port", "served_model_name", "disable_cuda_graph", "skip_server_warmup", "attention_backend",
    )
}  # fmt: skip
_URL = Pattern(r"Uvicorn running on (https?://[^\s,]+)|listening on:? (\S+:\d+)")
_DEAD_CODE = Pattern(r"(?:[Ee]xit ?code:?|exited with code|terminated with|exit code) ?(-?\d+)")
_PORT = Pattern(r"\('[^']*', (\d+)[,)]|[Pp]ort[ =:]+(\d+)")
_FIRED = ENGINE.ready_line


def _edge(
    phase: Phase, edge: str, role: str = "", opens_draft: bool = False
) -> Callable[[str], Event | None]:
    def make(text: str) -> Event:
        took = _ELAPSED.search(text) if edge == "end" else None
        kind = _TYPE.search(text) if phase is Phase.WEIGHT_LOAD and edge == "end" else None
        return PhaseEdge(
            phase, edge, float(took[1]) if took else None, role, kind[1] if kind else "", opens_draft
        )

    return make


def match_word(text: str, word: str, pattern: Pattern) -> re.Match[str] | None:
    """The first match of a pattern that begins with this word, at a word's beginning: in a long line found faster than by \\b."""
    at = text.find(word)
    while at >= 0:
        is_word = at == 0 or not (text[at - 1].isalnum() or text[at - 1] == "_")
        if is_word and (match := pattern.match(text, at)):
            return match
        at = text.find(word, at + 1)
    return None


def _args(text: str) -> Event | None:
    values: dict[str, str] = {}
    for name, pattern in _ARG.items():
        match = match_word(text, name, pattern)
        if match:
            values[name] = next((g for g in match.groups() if g is not None), "")

    def number(name: str) -> int | None:
        return whole(values[name]) if values.get(name, "").isdigit() else None

    draft = values.get("speculative_draft_model_path", "")
    return EngineArgs(
        "sglang",
        values.get("model_path", ""),
        "" if draft == "None" else draft,
        number("tp_size"),
        values.get("host", ""),
        number("port"),
        nnodes=number("nnodes"),
        values=dict(values),
    )


def pairs(text: str) -> dict[str, str]:
    """`key: value` pairs of a batch line, any order, any trailing comma."""
    return {m[1].strip(): m[2] for m in _PAIR.finditer(text)}


def _f(found: dict[str, str], *names: str) -> float | None:
    for name in names:
        if name in found:
            try:
                return float(found[name])
            except ValueError:
                return None
    return None


def _i(found: dict[str, str], *names: str) -> int | None:
    value = _f(found, *names)
    return int(value) if value is not None and abs(value) < 1e15 else None


def _decode(text: str) -> Event | None:
    found = pairs(text[text.find("Decode batch") + 12 :])
    graph = next((found[k] for k in ("cuda graph", "cpu graph", "npu graph") if k in found), None)
    batch = DecodeBatch(
        0.0,
        _i(found, "#running-req"),
        _i(found, "#queue-req"),
        _i(found, "#token", "#full token"),
        _f(found, "token usage", "full token usage", "swa token usage"),
        _f(found, "gen throughput (token/s)"),
        _f(found, "accept len", "accept length"),
        None if graph is None else graph == "True",
    )
    return Decoded(batch, _f(found, "accept rate"))


def _prefill(text: str) -> Event | None:
    found = pairs(text[text.find("Prefill batch") + 13 :])
    return Prefilled(_i(found, "#running-req"), _i(found, "#queue-req"))


def _listening(text: str) -> Event | None:
    match = _URL.search(text)
    return Listening((match[1] or f"http://{match[2]}") if match else "")


def bind_failed(text: str) -> Event | None:
    match = _PORT.search(text)
    return BindFailed(whole(match[1] or match[2]) if match else None)


def _dying(what: str) -> Callable[[str], Event | None]:
    def make(text: str) -> Event:
        code = _DEAD_CODE.search(text)
        return Dying(what, whole(code[1]) if code else None)

    return make


def _kill_tree(text: str) -> Event | None:
    return Dying("kill_process_tree") if "include_parent=True" in text else Stopping("clean up")


# literal -> what it means. The first literal found in the line decides; order matters only where one contains another.
_LINES: tuple[tuple[str, Callable[[str], Event | None]], ...] = (
    ("Decode batch", _decode),
    ("Prefill batch", _prefill),
    ("server_args=", _args),
    ("Load weight begin", _edge(Phase.WEIGHT_LOAD, "begin")),
    ("Load weight end", _edge(Phase.WEIGHT_LOAD, "end")),
    ("Committed real weights", _edge(Phase.WEIGHT_LOAD, "end")),
    ("Init torch distributed begin", _edge(Phase.DIST_INIT, "begin")),
    ("Init parallel begin", _edge(Phase.DIST_INIT, "begin")),
    ("Init nccl begin", _edge(Phase.DIST_INIT, "begin")),
    ("Init nccl end", _edge(Phase.DIST_INIT, "end")),
    ("Loading JIT ops", _edge(Phase.GRAPH_CAPTURE, "hint")),
    ("Init torch distributed ends", _edge(Phase.DIST_INIT, "end")),
    ("Init parallel ends", _edge(Phase.DIST_INIT, "end")),
    ("sglang is using nccl", _edge(Phase.DIST_INIT, "in")),
    ("llreduce is disabled because", _edge(Phase.DIST_INIT, "in")),
    ("ustom all-reduce is disabled", _edge(Phase.DIST_INIT, "in")),
    ("NCCL INFO", _edge(Phase.DIST_INIT, "in")),
    ("All-reduce call path", _edge(Phase.DIST_INIT, "in")),
    ("SPECULATIVE_MOE_RUNNER_BACKEND is not initialized", _edge(Phase.DRAFT_LOAD, "in", "draft", True)),
    ("Using KV cache dtype", _edge(Phase.KV_ALLOC, "begin")),
    ("KV Cache is allocated", _edge(Phase.KV_ALLOC, "in")),
    ("is larger than the profiled value", _edge(Phase.KV_ALLOC, "in")),
    ("Post-capture KV sizing", _edge(Phase.KV_ALLOC, "in")),
    ("Memory pool end", _edge(Phase.KV_ALLOC, "end")),
    ("Registering ", lambda t: PhaseEdge(Phase.GRAPH_CAPTURE, "in") if "cuda graph addresses" in t else None),
    ("DeepGEMM JIT", _edge(Phase.GRAPH_CAPTURE, "in")),
    ("Running FlashInfer autotune", _edge(Phase.GRAPH_CAPTURE, "in")),
    (_FIRED, lambda t: ReadyLine("sglang")),
    ("Uvicorn running on", _listening),
    ("Started server process", _listening),
    ("Application startup complete", _listening),
    ("Engine startup timings", _edge(Phase.HTTP, "begin")),
    ("listening on", _listening),
    ("[Errno 98]", bind_failed),
    ("[Errno 48]", bind_failed),
    ("[Errno 10048]", bind_failed),
    ("is used by a process already", bind_failed),
    ("Port is already in use", bind_failed),
    ("SIGTERM received", lambda t: Stopping("SIGTERM")),
    ("Gracefully exiting", lambda t: Stopping("drained", True)),
    ("INFO:     Shutting down", lambda t: Stopping("shut down")),
    ("KeyboardInterrupt", lambda t: Stopping("Ctrl-C")),
    ("Application shutdown complete", lambda t: Stopping("shut down", True)),
    ("hit an exception", _dying("exception")),
    ("Received sigquit from a child proc", _dying("child failed")),
    ("SIGQUIT received", _dying("child failed")),
    ("Initialization failed", _dying("warm-up failed")),
    ("crashed with exit code", _dying("child died")),
    ("died during initialization", _dying("child died")),
    ("scheduler is dead", _dying("child died")),
    ("DataParallelController", lambda t: _dying("child died")(t) if " terminated with " in t else None),
    ("atchdog timeout (", _dying("watchdog")),
    ("kill_process_tree called", _kill_tree),
    ("is still supported, but 'sglang serve'", lambda t: EngineArgs("sglang")),
)  # fmt: skip
_MAKE: dict[str, Callable[[str], Event | None]] = dict(_LINES)
_WORDS = Words(_MAKE)
_CAPTURE = Pattern(
    r"[Cc]apture (?:\S+ ){0,3}?(?:cuda|CUDA|cpu|CPU|npu|NPU) graph (begin|end|failed|bs)", re.ASCII
)
_SGL = Pattern(r"\b(?:sglang|sgl_kernel|sgl-kernel|SGLang)\b")


def parse_line(line: str) -> Event | None:
    """One clean line (with or without its stamp) -> what it says, None for a line that is not known."""
    if line.startswith(BANNER):
        return EngineArgs("local")
    if "raph " in line:
        match = _CAPTURE.search(line)
        if match:
            role = "draft" if "draft" in line else ""
            if match[1] == "failed":
                return PhaseEdge(Phase.GRAPH_CAPTURE, "in", role=role)
            took = _ELAPSED.search(line)
            edge = {"begin": "begin", "end": "end"}.get(match[1], "in")
            return PhaseEdge(
                Phase.GRAPH_CAPTURE, edge, float(took[1]) if took and edge == "end" else None, role
            )
    for literal in _WORDS.maybe_in(line):
        if literal in line:
            event = _MAKE[literal](line)
            if event is not None:
                return event
    return parse_shared(line)
