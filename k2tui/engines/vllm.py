"""vLLM: how it is started, and what its log says (V0 and V1). Returns values; starts and reads nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from k2tui.config import Profile
from k2tui.core.events import (
    Decoded,
    Dying,
    EngineArgs,
    Event,
    Listening,
    PhaseEdge,
    ReadyLine,
    Stopping,
)
from k2tui.core.gpu import visible_gpus
from k2tui.core.load import DecodeBatch, Phase
from k2tui.core.patterns import Pattern, Words, whole
from k2tui.engines import Engine, LaunchPlan, no_nodes
from k2tui.engines._grammar import parse_shared
from k2tui.engines.sglang import bind_failed, match_word
from k2tui.paths import model_path


def launch(profile: Profile) -> LaunchPlan:
    """argv of `vllm serve`. profile.python names the environment's interpreter; its `vllm` script lies beside it."""
    no_nodes(profile)
    python = Path(profile.python or sys.executable).expanduser()
    script = python.parent / "vllm"
    argv = [str(script) if profile.python else "vllm", "serve", model_path(profile.model)]
    argv += ["--host", profile.host, "--port", str(profile.port)]
    if profile.tp_size != 1:
        argv += ["--tensor-parallel-size", str(profile.tp_size)]
    if profile.served_model_name:
        argv += ["--served-model-name", profile.served_model_name]
    if profile.draft:
        import json

        config = {
            "method": "eagle3",
            "model": model_path(profile.draft),
            "num_speculative_tokens": profile.speculative_num_steps,
        }
        argv += ["--speculative-config", json.dumps(config)]
    argv += profile.args
    env = {**visible_gpus(profile.gpus), **profile.env}
    return LaunchPlan(tuple(argv), env, profile.host, profile.port)


ENGINE = Engine(
    name="vllm",
    title="vLLM",
    launch=launch,
    ready_line="Application startup complete.",
    model_info_path="/v1/models",
    process_titles=("VLLM::",),
)

_TOOK = Pattern(r"took (\d+(?:\.\d+)?) (?:s\b|seconds|secs)|(?:and|in) (\d+(?:\.\d+)?) (?:seconds|secs|s\b)")
_VERSION = Pattern(r"(?:version |\(v)(\d[\w.+-]*)")
_MODEL = Pattern(
    r"(?:model=|'model': |'model_tag': |speculative_config=.{0,0}|model load(?:ing)? )['\"]([^'\"]+)['\"]"
)
_TP = Pattern(r"(?:tensor_parallel_size['\"]?[=:] ?)(\d+)")
_PORT = Pattern(r"port['\"]?[=:] ?(\d+)")
_URL = Pattern(r"on (https?://[^\s,]+)")
_STATS = Pattern(r"([A-Z][A-Za-z ]+?):? ([\d.]+)(?: tokens/s| reqs|%)")
_MEAN = Pattern(
    r"Mean acceptance length: (\d+(?:\.\d+)?)|System efficiency: [\d.]+.*?Number of accepted tokens: \d+"
)
_SPEC_TOKENS = Pattern(r"Per-position acceptance rate: ([\d., ]+)")
_RATE = Pattern(r"[Dd]raft acceptance rate: (\d+(?:\.\d+)?)")


def _edge(
    phase: Phase, edge: str, role: str = "", opens_draft: bool = False
) -> Callable[[str], Event | None]:
    def make(text: str) -> Event:
        took = _TOOK.search(text) if edge == "end" else None
        value = (took[1] or took[2]) if took else None
        return PhaseEdge(phase, edge, float(value) if value else None, role, "", opens_draft)

    return make


def _facts(is_start: bool) -> Callable[[str], Event | None]:
    def make(text: str) -> Event:
        version, model, tp, port = (
            _VERSION.search(text),
            _MODEL.search(text),
            _TP.search(text),
            match_word(text, "port", _PORT),
        )
        return EngineArgs(
            "vllm",
            model[1] if model else "",
            "",
            whole(tp[1]) if tp else None,
            "",
            whole(port[1]) if port else None,
            version[1].rstrip(".") if version else "",
            is_start=is_start,
        )

    return make


def _stats(text: str) -> Event | None:
    found = {m[1].strip(): m[2] for m in _STATS.finditer(text)}

    def number(*names: str) -> float | None:
        for name in names:
            for key, value in found.items():
                if key.endswith(name):
                    try:
                        return float(value)
                    except ValueError:
                        return None
        return None

    running, waiting, usage = number("Running"), number("Waiting", "Pending"), number("KV cache usage")
    return Decoded(
        DecodeBatch(
            0.0,
            int(running) if running is not None else None,
            int(waiting) if waiting is not None else None,
            None,
            usage / 100 if usage is not None else None,
            number("generation throughput"),
        )
    )


def _spec(text: str) -> Event | None:
    mean, per, rate = _MEAN.search(text), _SPEC_TOKENS.search(text), _RATE.search(text)
    length = float(mean[1]) if mean and mean[1] else None
    return Decoded(
        DecodeBatch(0.0, accept_length=length),
        float(rate[1]) / 100 if rate else None,
        len([p for p in per[1].split(",") if p.strip()]) if per else None,
    )


def _url(text: str) -> Event | None:
    match = _URL.search(text)
    return Listening(match[1] if match else "")


_LINES: tuple[tuple[str, Callable[[str], Event | None]], ...] = (
    ("Avg prompt throughput", _stats),
    ("SpecDecoding metrics", _spec),
    ("Speculative metrics", _spec),
    ("vLLM API server version", _facts(True)),
    ("non-default args", _facts(False)),
    ("args: Namespace(", _facts(False)),
    ("LLM engine (v", _facts(False)),
    ("world_size=", _edge(Phase.DIST_INIT, "in")),
    ("in world size", _edge(Phase.DIST_INIT, "in")),
    ("vLLM is using nccl", _edge(Phase.DIST_INIT, "in")),
    ("llreduce is disabled because", _edge(Phase.DIST_INIT, "in")),
    ("NCCL INFO", _edge(Phase.DIST_INIT, "in")),
    ("Starting to load model", _edge(Phase.WEIGHT_LOAD, "begin")),
    ("Loading weights from", _edge(Phase.WEIGHT_LOAD, "in")),
    ("Loading drafter model", _edge(Phase.DRAFT_LOAD, "in", "draft", True)),
    ("Loading weights took", _edge(Phase.WEIGHT_LOAD, "end")),
    ("Model loading took", _edge(Phase.AFTER_LOAD, "begin")),
    ("Loading model weights took", _edge(Phase.AFTER_LOAD, "begin")),
    ("odel weights take", _edge(Phase.AFTER_LOAD, "begin")),
    ("torch.compile takes", _edge(Phase.GRAPH_CAPTURE, "in")),
    ("Dynamo bytecode transform", _edge(Phase.GRAPH_CAPTURE, "in")),
    ("Compiling a graph for", _edge(Phase.GRAPH_CAPTURE, "in")),
    ("Available KV cache memory", _edge(Phase.KV_ALLOC, "in")),
    ("KV cache size:", _edge(Phase.KV_ALLOC, "in")),
    ("# GPU blocks", _edge(Phase.KV_ALLOC, "in")),
    ("Memory profiling takes", _edge(Phase.KV_ALLOC, "in")),
    ("No available memory for the cache blocks", _edge(Phase.KV_ALLOC, "in")),
    ("Capturing cudagraphs for decoding", _edge(Phase.GRAPH_CAPTURE, "begin")),
    ("Capturing the model for CUDA graphs", _edge(Phase.GRAPH_CAPTURE, "begin")),
    ("Graph capturing finished", _edge(Phase.GRAPH_CAPTURE, "end")),
    ("Registering ", lambda t: PhaseEdge(Phase.GRAPH_CAPTURE, "in") if "cuda graph addresses" in t else None),
    ("init engine (profile", _edge(Phase.HTTP, "begin")),
    ("Starting vLLM", _url),
    ("Uvicorn running on", _url),
    ("Started server process", _url),
    ("Application startup complete", lambda t: ReadyLine("vllm", False)),
    ("[Errno 98]", bind_failed),
    ("[Errno 48]", bind_failed),
    ("Waiting for application shutdown", lambda t: Stopping("shut down")),
    ("Shutting down FastAPI HTTP server", lambda t: Stopping("shut down")),
    ("Application shutdown complete", lambda t: Stopping("shut down", True)),
    ("EngineCore failed to start", lambda t: Dying("engine core failed")),
    ("EngineCore encountered a fatal error", lambda t: Dying("engine core failed")),
    ("Engine core initialization failed", lambda t: Dying("engine core failed")),
    ("WorkerProc failed to start", lambda t: Dying("worker failed")),
    ("WorkerProc hit an exception", lambda t: Dying("worker failed")),
    ("Engine loop has died", lambda t: Dying("engine died")),
)  # fmt: skip
_MAKE: dict[str, Callable[[str], Event | None]] = dict(_LINES)
_WORDS = Words(_MAKE)


def parse_line(line: str) -> Event | None:
    """One clean line (with or without its prefix) -> what it says, None for a line that is not known."""
    for literal in _WORDS.maybe_in(line):
        if literal in line:
            event = _MAKE[literal](line)
            if event is not None:
                return event
    return parse_shared(line)
