"""The SGLang plug-in: installs the capture hooks in every SGLang process. Knows SGLang's inside; writes through `sink`.

Off unless K2TUI_CAPTURE_DIR is set; then nothing is hooked and nothing costs. Entry point group `sglang.srt.plugins`
(0.5.11 and newer) calls `activate`; older releases start through `python -m k2tui.capture.launch`.

Needs the standard library, torch, numpy and SGLang itself. Laws: rank 0 of each attention-TP group writes, the others only
capture the same layers (their collectives must agree); rows are copied in the forward pass itself, on a stream of their own, so
neither the overlap scheduler nor chunked prefill can reorder or lose them; a captured request never takes a prefix-cache hit.
The scheduler only copies and tells: whether rows are whole and in order is judged, and the disk written, by a process of its own.
"""

# sglang and fastapi are not in the development environment
# pyright: reportMissingImports=false

from __future__ import annotations

import atexit
import importlib
import importlib.util
import logging
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k2tui.capture import ids as layer_ids
from k2tui.capture.features import stored
from k2tui.capture.link import WriterLink
from k2tui.capture.request import is_capture, parse_rid
from k2tui.capture.ring import PinnedRing
from k2tui.errors import K2Error
from k2tui.states import layout

log = logging.getLogger("k2tui.capture")

DIR_ENV = "K2TUI_CAPTURE_DIR"
BOUNDARIES_ENV = "K2TUI_CAPTURE_BOUNDARIES"
PINNED_ENV = "K2TUI_CAPTURE_PINNED_MB"
THREADS_ENV = "K2TUI_CAPTURE_THREADS"
SHARD_ENV = "K2TUI_CAPTURE_SHARD_MB"
MIN_FREE_ENV = "K2TUI_CAPTURE_MIN_FREE_MB"
PATIENCE_ENV = "K2TUI_CAPTURE_PATIENCE_S"

_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_LOGITS = "sglang.srt.layers.logits_processor.LogitsProcessor"
_REQ = "sglang.srt.managers.schedule_batch.Req"
_BATCH = "sglang.srt.model_executor.forward_batch_info.ForwardBatch"
_HTTP = "sglang.srt.entrypoints.http_server"
# prefill graphs by release: 0.5.6..0.5.12, then 0.5.13 and newer
_PREFILL_GRAPHS = (
    ("sglang.srt.model_executor.piecewise_cuda_graph_runner", "PiecewiseCudaGraphRunner", "can_run"),
    ("sglang.srt.model_executor.breakable_cuda_graph_runner", "BreakableCudaGraphRunner", "can_run"),
    ("sglang.srt.model_executor.runner.prefill_cuda_graph_runner", "PrefillCudaGraphRunner", "can_run_graph"),
)

_capturer: Any = None


def activate() -> None:
    """Entry point: register the hooks with SGLang's HookRegistry. Does nothing when K2TUI_CAPTURE_DIR is not set."""
    if not os.environ.get(DIR_ENV):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, before, hook in _hooks():
        HookRegistry.register(target, hook, HookType.BEFORE if before else HookType.AFTER)


def install() -> None:
    """The same hooks by plain assignment, for releases without a plug-in system. Call it in every process."""
    if not os.environ.get(DIR_ENV):
        return
    for target, before, hook in _hooks():
        _wrap(target, before=hook if before else None, after=None if before else hook)


def _hooks() -> list[tuple[str, bool, Callable[..., Any]]]:
    """(what, before it or after it, hook), only what this release has."""
    found: list[tuple[str, bool, Callable[..., Any]]] = [
        (f"{_RUNNER}.load_model", False, _after_load),
        (f"{_LOGITS}.forward", True, _before_logits),
        (f"{_REQ}.__init__", False, _after_req),
        (f"{_BATCH}.init_new", False, _after_batch),
        (f"{_HTTP}.set_global_state", False, _after_http),
    ]
    for module, cls, method in _PREFILL_GRAPHS:
        if _exists(module):
            found.append((f"{module}.{cls}.{method}", False, _after_can_run))
    return found


def _exists(module: str) -> bool:
    """Whether this release has the module; its parent package may be missing too."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _resolve(path: str) -> Any:
    """The module or class of a dotted path. What a module misses while it is imported is raised, not taken for an attribute that is not there."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        name = ".".join(parts[:count])
        try:
            found: Any = importlib.import_module(name)
        except ModuleNotFoundError as err:
            if err.name is None or not f"{name}.".startswith(f"{err.name}."):
                raise
            continue
        for part in parts[count:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(f"no module named {parts[0]!r}", name=parts[0])


def _wrap(
    target: str, before: Callable[..., Any] | None = None, after: Callable[..., Any] | None = None
) -> None:
    import functools

    owner_path, name = target.rsplit(".", 1)
    owner = _resolve(owner_path)
    raw = owner.__dict__.get(name) if isinstance(owner, type) else None
    original = raw.__func__ if isinstance(raw, classmethod | staticmethod) else getattr(owner, name)
    if getattr(original, "_k2tui_capture", False):
        return

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if before:
            changed = before(*args, **kwargs)
            if changed is not None:
                args, kwargs = changed
        result = original(*args, **kwargs)
        if after:
            replaced = after(result, *args, **kwargs)
            if replaced is not None:
                return replaced
        return result

    wrapper._k2tui_capture = True  # type: ignore[attr-defined]
    kind = type(raw) if isinstance(raw, classmethod | staticmethod) else None
    setattr(owner, name, kind(wrapper) if kind else wrapper)


# ---- hooks


def _after_can_run(result: Any, self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> bool | None:
    """A prefill that is captured runs as Python: a replayed graph calls no hook. All ranks see the same rids, so all agree."""
    if result and any(map(is_capture, getattr(forward_batch, "rids", None) or ())):
        return False
    return None


def _after_load(result: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    global _capturer
    if getattr(self, "is_draft_worker", False) or _capturer is not None:
        return
    _capturer = Capturer(self, Path(os.environ[DIR_ENV]))


def _after_batch(result: Any, *args: Any, **kwargs: Any) -> None:
    """Older releases keep no rids in a ForwardBatch: add them."""
    if getattr(result, "rids", None) is None:
        batch = next((a for a in (*args, *kwargs.values()) if getattr(a, "reqs", None)), None)
        if batch is not None:
            result.rids = [req.rid for req in batch.reqs]


def _after_req(result: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """A cache namespace of its own: no prefix hit, so no row is missing. Chunked prefill still finds its own chunks."""
    if is_capture(getattr(self, "rid", None)) and hasattr(self, "extra_key"):
        self.extra_key = self.rid


def _before_logits(
    self: Any,
    input_ids: Any = None,
    hidden_states: Any = None,
    lm_head: Any = None,
    logits_metadata: Any = None,
    aux_hidden_states: Any = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    if _capturer is None or _capturer.link is None:
        return
    rids = getattr(logits_metadata, "rids", None)
    if rids is None:
        return
    mode = logits_metadata.forward_mode
    if not mode.is_extend() or mode.is_target_verify() or not any(map(is_capture, rids)):
        return
    # a multimodal wrapper hands embeddings on and no ids
    tokens = (
        logits_metadata.input_ids if getattr(logits_metadata, "input_ids", None) is not None else input_ids
    )
    _capturer.take(tokens, hidden_states, aux_hidden_states, logits_metadata)


def _after_http(result: Any, *args: Any, **kwargs: Any) -> None:
    """Adds the status routes to the server's own app."""
    from fastapi import Body
    from fastapi.responses import JSONResponse
    from sglang.srt.entrypoints.http_server import app

    from k2tui.capture.control import ROUTE, Control

    if any(getattr(r, "path", "") == ROUTE for r in app.routes):
        return
    root = Path(os.environ[DIR_ENV])
    root.mkdir(parents=True, exist_ok=True)
    control = Control(root)

    def answer(call: Callable[[], Any]) -> JSONResponse:
        try:
            return JSONResponse(call())
        except K2Error as err:
            return JSONResponse({"error": err.message, "hint": err.hint}, status_code=400)

    async def status(run: str = "", cursor: int = 0, epoch: str = "") -> JSONResponse:
        return answer(lambda: control.status(run, cursor, epoch))

    async def begin(body: dict[str, Any] = Body()) -> JSONResponse:  # noqa: B008
        return answer(lambda: control.begin(str(body.get("run", "")), body.get("manifest", {})))

    async def flush(body: dict[str, Any] = Body()) -> JSONResponse:  # noqa: B008
        return answer(lambda: control.flush(str(body.get("run", ""))))

    # the annotations are strings in this module: FastAPI needs the real types
    status.__annotations__ = {"run": str, "cursor": int, "epoch": str}
    begin.__annotations__ = {"body": dict}
    flush.__annotations__ = {"body": dict}
    app.add_api_route(ROUTE, status, methods=["GET"])
    app.add_api_route(f"{ROUTE}/begin", begin, methods=["POST"])
    app.add_api_route(f"{ROUTE}/flush", flush, methods=["POST"])


# ---- the scheduler's side


def _inner(model: Any) -> Any:
    """The module that owns `layers_to_capture`, below wrappers such as language_model."""
    seen = model
    for _ in range(4):
        if hasattr(seen, "layers_to_capture"):
            return seen
        for name in ("model", "language_model"):
            deeper = getattr(seen, name, None)
            if deeper is not None:
                seen = deeper
                break
        else:
            return None
    return seen if hasattr(seen, "layers_to_capture") else None


def set_boundaries(model: Any, boundaries: Sequence[int]) -> None:
    """Make an SGLang model capture exactly these boundaries; what it was set to is read back, never trusted."""
    setter = getattr(model, "set_eagle3_layers_to_capture", None)
    if setter is None:
        raise RuntimeError(
            f"k2tui capture: {type(model).__name__} cannot capture layers in this SGLang (no set_eagle3_layers_to_capture)"
        )
    want = list(boundaries)
    # ids b - 1 are right for most classes; then raw ids; then the attribute itself
    for candidate in ([b - 1 for b in want], want):
        setter(candidate)
        owner = _inner(model)
        if owner is None or sorted(owner.layers_to_capture) == want:
            break
    owner = _inner(model)
    if owner is None:
        raise RuntimeError(f"k2tui capture: {type(model).__name__} has no layers_to_capture to read back")
    owner.layers_to_capture = want
    holder = model
    while holder is not None and not hasattr(holder, "capture_aux_hidden_states"):
        holder = getattr(holder, "language_model", None)
    if holder is None or not holder.capture_aux_hidden_states:
        raise RuntimeError(f"k2tui capture: {type(model).__name__} did not switch its layer capture on")


def refuse_unfit(server_args: Any) -> None:
    """Raises RuntimeError, in words, for set-ups under which states would be wrong or missing."""
    if getattr(server_args, "speculative_algorithm", None):
        raise RuntimeError("k2tui capture: start the capture server without --speculative-algorithm")
    if int(getattr(server_args, "pp_size", 1) or 1) > 1:
        raise RuntimeError("k2tui capture: pipeline parallelism is not supported (use --pp-size 1)")
    if getattr(server_args, "enable_two_batch_overlap", False):
        raise RuntimeError("k2tui capture: start without --enable-two-batch-overlap")
    if int(getattr(server_args, "attn_cp_size", 1) or 1) > 1 or getattr(
        server_args, "enable_prefill_context_parallel", False
    ):
        raise RuntimeError(
            "k2tui capture: context parallel attention splits a sequence over ranks; start without it"
        )
    if str(getattr(server_args, "disaggregation_mode", "null") or "null") == "decode":
        raise RuntimeError(
            "k2tui capture: a decode server computes no prefill; capture on the prefill server"
        )


@dataclass(frozen=True, slots=True)
class _Run:
    """What a run's manifest says that bears on the copy. sign: of the manifest that this was read from."""

    columns: tuple[int, ...]  # of its boundaries among those that the model captures
    dtype: str
    last_rows: str
    sign: tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Rows [row, row + count) of a batch are rows [start, start + count) of one sample. spans: its loss mask."""

    rid: str
    run: _Run
    row: int
    start: int
    count: int
    spans: tuple[tuple[int, int], ...]

    def last_ranges(self, low: int, high: int) -> list[tuple[int, int]]:
        """Rows of the batch inside [low, high) whose last hidden state is kept; as `layout.loss_rows` has it."""
        if self.run.last_rows == "none":
            return []
        if self.run.last_rows == "all":
            return [(low, high)]
        shift = self.row - self.start
        found: list[tuple[int, int]] = []
        for a, b in self.spans:
            a, b = max(low, a - 1 + shift), min(high, b + 1 + shift)
            if found and a <= found[-1][1]:
                found[-1] = (found[-1][0], max(b, found[-1][1]))
            elif a < b:
                found.append((a, b))
        return found


class Capturer:
    """Copies captured rows off the device, from inside the forward pass. One per scheduler process."""

    def __init__(self, runner: Any, root: Path) -> None:
        import torch

        from k2tui.states.writer import WriterLimits

        self.torch: Any = torch
        server_args = runner.server_args
        refuse_unfit(server_args)
        config = runner.model_config
        text = getattr(config, "hf_text_config", None) or config.hf_config
        layers = int(getattr(text, "num_hidden_layers", 0) or config.num_hidden_layers)
        self.hidden_size = int(getattr(text, "hidden_size", 0) or config.hidden_size)
        self.boundaries = layer_ids.wanted_boundaries(layers, os.environ.get(BOUNDARIES_ENV))
        set_boundaries(runner.model, self.boundaries)
        self.root = root
        self.link: Any = None
        self.patience_s = float(os.environ.get(PATIENCE_ENV, "20"))
        self.device = torch.device(runner.device) if isinstance(runner.device, str) else runner.device
        self._runs: dict[str, _Run] = {}
        self._looked: set[str] = set()  # runs whose manifest was looked at for this batch
        self._lost: dict[str, None] = {}  # newest rids of which a piece found no room: the rest is not copied
        rank, dp_rank = _ranks(runner)
        if rank != 0:
            return
        pinned_b = int(os.environ.get(PINNED_ENV, "2048")) << 20
        threads = int(os.environ.get(THREADS_ENV, "0")) or max(2, min(8, (os.cpu_count() or 4) // 4))
        limits = WriterLimits(
            shard_bytes=int(os.environ.get(SHARD_ENV, "1024")) << 20,
            pending_bytes=2 * pinned_b,  # the ring is the bound
            min_free_b=int(os.environ.get(MIN_FREE_ENV, "2048")) << 20,
            threads=threads,
        )
        from importlib.metadata import version

        facts = {
            "model_path": str(server_args.model_path),
            "architectures": list(getattr(config.hf_config, "architectures", None) or []),
            "hidden_size": self.hidden_size,
            "num_hidden_layers": layers,
            "vocab_size": int(config.vocab_size),
            "boundaries": list(self.boundaries),
            "engine": "sglang",
            "engine_version": version("sglang"),
            "engine_args": {
                "dtype": str(config.dtype).removeprefix("torch."),
                "tp_size": int(server_args.tp_size),
                "attention_backend": str(getattr(server_args, "attention_backend", None)),
                "quantization": str(getattr(server_args, "quantization", None)),
                "chunked_prefill_size": getattr(server_args, "chunked_prefill_size", None),
            },
            "dp_rank": dp_rank,
        }
        host = re.sub(r"[^A-Za-z0-9]", "", os.uname().nodename)[:12] or "host"
        root.mkdir(parents=True, exist_ok=True)
        self.stream: Any = None
        self.piece_b = min(64 << 20, pinned_b // 8)
        if self.device.type == "cuda":
            self.stream = torch.cuda.Stream(device=self.device)
        self.link = WriterLink(root, f"{host}-{dp_rank}", facts, limits, pinned_b, self._make_ring)
        atexit.register(self.link.close)
        log.info("k2tui capture: boundaries %s of %d layers, into %s", list(self.boundaries), layers, root)

    def _make_ring(self, memory: Any) -> PinnedRing:
        """The ring over shared bytes, pinned for a GPU so that its copies do not wait for one another."""
        buffer = self.torch.frombuffer(memory, dtype=self.torch.uint8)
        if self.stream is not None:
            code = int(self.torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0))
            if code:
                log.warning(
                    "k2tui capture: the ring could not be pinned (CUDA error %d): copies are slower", code
                )
        return PinnedRing(buffer)

    def take(self, input_ids: Any, hidden: Any, aux: Any, batch: Any) -> None:
        """Start the copies of every captured row of one prefill batch. Never raises: a failure gives the samples up."""
        rids = batch.rids
        try:
            prefix = _cpu_list(batch, "extend_prefix_lens_cpu", "extend_prefix_lens")
            lengths = _cpu_list(batch, "extend_seq_lens_cpu", "extend_seq_lens")
            if aux is None:
                raise RuntimeError("the model gave no aux hidden states")
            count = len(self.boundaries)
            packed = isinstance(aux, self.torch.Tensor)
            if packed and aux.shape[-1] != count * self.hidden_size:
                raise RuntimeError(
                    f"aux states of width {aux.shape[-1]} for {count} boundaries of {self.hidden_size}"
                )
            if not packed and len(aux) != count:
                raise RuntimeError(f"{len(aux)} aux states for {count} boundaries")
            row = 0
            self._looked.clear()
            groups: list[list[_Chunk]] = []
            for rid, start, length in zip(rids, prefix, lengths, strict=False):
                chunk = self._chunk(rid, row, int(start), int(length)) if is_capture(rid) else None
                row += int(length)
                if chunk is None:
                    continue
                # neighbours of one run travel together: few launches and copies a batch, however many requests
                before = groups[-1][-1] if groups else None
                if before and before.row + before.count == chunk.row and before.run is chunk.run:
                    groups[-1].append(chunk)
                else:
                    groups.append([chunk])
            if not groups:
                return
            columns = (
                [aux[:, i * self.hidden_size : (i + 1) * self.hidden_size] for i in range(count)]
                if packed
                else list(aux)
            )
            if self.stream is None:
                for group in groups:
                    self._take_group(input_ids, hidden, columns, group)
                return
            self.stream.wait_stream(self.torch.cuda.current_stream(self.device))
            with self.torch.cuda.stream(self.stream):
                for group in groups:
                    self._take_group(input_ids, hidden, columns, group)
            # the model's tensors must outlive the copies, though the model has done with them
            for tensor in (input_ids, hidden, *columns):
                tensor.record_stream(self.stream)
        except Exception as err:
            log.exception("k2tui capture")
            for rid in rids:
                if is_capture(rid):
                    self.link.refuse(rid, f"{type(err).__name__}: {err}")

    def _chunk(self, rid: str, row: int, start: int, count: int) -> _Chunk | None:
        """None when this sample is not (or no longer) wanted; the writer hears why."""
        if start == 0:
            self._lost.pop(rid, None)
        elif rid in self._lost:
            return None
        request = parse_rid(rid)
        if request is None:
            return None
        try:
            run = self._run(request.run, fresh=start == 0)
        except (K2Error, OSError) as err:
            self._lose(rid, str(err))
            return None
        return _Chunk(rid, run, row, start, count, request.spans)

    def _run(self, name: str, fresh: bool) -> _Run:
        """The run's manifest; looked at again when a sample begins, since a folder can be made anew under its old name."""
        found = self._runs.get(name)
        if found is not None and (name in self._looked or not fresh):
            return found
        self._looked.add(name)
        folder = self.root / name
        sign = layout.manifest_sign(folder)
        if found is not None and found.sign == sign:
            return found
        man = layout.read_manifest(folder)
        missing = [b for b in man.boundaries if b not in self.boundaries]
        if missing:
            raise K2Error(f"boundaries {missing} are not captured here, only {list(self.boundaries)}")
        columns = tuple(self.boundaries.index(b) for b in man.boundaries)
        run = self._runs[name] = _Run(columns, man.dtype, man.last_rows, sign)
        return run

    def _lose(self, rid: str, reason: str) -> None:
        self._lost[rid] = None
        while len(self._lost) > 10_000:
            self._lost.pop(next(iter(self._lost)))
        self.link.refuse(rid, reason)

    def _take_group(self, input_ids: Any, hidden: Any, columns: list[Any], group: list[_Chunk]) -> None:
        """Rows that lie side by side, of one run, cut into pieces of `piece_b`."""
        torch, run = self.torch, group[0].run
        picked = [columns[c] for c in run.columns]
        first, end = group[0].row, group[-1].row + group[-1].count
        step = max(1, self.piece_b // (self.hidden_size * 2 * (len(picked) + 1) + 64))
        for a in range(first, end, step):
            b = min(a + step, end)
            # of each sample: its rows inside this piece as places in the sample, in the piece, and among the kept rows of `last`
            shares: list[tuple[str, int, int, int, int]] = []
            kept: list[tuple[int, int]] = []
            kept_count = 0
            for chunk in group:
                low, high = max(a, chunk.row), min(b, chunk.row + chunk.count)
                if low >= high or chunk.rid in self._lost:
                    continue
                shares.append((chunk.rid, chunk.start + low - chunk.row, high - low, low - a, kept_count))
                ranges = chunk.last_ranges(low, high)
                kept += ranges
                kept_count += sum(q - p for p, q in ranges)
            if not shares:
                continue
            parts = [
                ("input_ids", input_ids[a:b].to(torch.int32)),
                *self._features("aux", run, torch.cat([c[a:b] for c in picked], -1)),
            ]
            if kept_count:
                last = hidden[a:b] if kept_count == b - a else torch.cat([hidden[p:q] for p, q in kept])
                parts += self._features("last", run, last)
            if not self._copy(parts, shares):
                for rid, *_ in shares:
                    self._lose(rid, self.link.gone or "no room for the copy: the disk is too slow or full")

    def _copy(self, parts: list[tuple[str, Any]], shares: list[tuple[str, int, int, int, int]]) -> bool:
        """Device -> ring, all parts of one piece with one event; then word to the writer."""
        torch, ring = self.torch, self.link.ring
        flats = [(name, len(t), t.contiguous().view(torch.uint8).reshape(-1)) for name, t in parts]
        size = sum(f.numel() + -f.numel() % 64 for _, _, f in flats)
        region = ring.take(size, self.patience_s)
        if region is None:
            return False
        whole = ring.view(region, size)
        offset = 0
        told: list[tuple[str, int, int]] = []
        for name, rows, flat in flats:
            whole[offset : offset + flat.numel()].copy_(flat, non_blocking=True)
            told.append((name, offset, flat.numel() // rows))
            offset += flat.numel() + -flat.numel() % 64
        event = None
        if self.stream is not None:
            event = torch.cuda.Event(blocking=True)  # the sending thread sleeps until the copy has ended
            event.record(self.stream)
        self.link.piece(region, {"parts": told, "shares": shares}, event)
        return True

    def _features(self, name: str, run: _Run, tensor: Any) -> list[tuple[str, Any]]:
        return stored(name, run.dtype, self.hidden_size, tensor)


def _cpu_list(batch: Any, *names: str) -> list[int]:
    for name in names:
        found = getattr(batch, name, None)
        if found is not None:
            return found.tolist() if hasattr(found, "tolist") else list(found)
    raise RuntimeError(f"this SGLang's batch has none of {', '.join(names)}")


def _ranks(runner: Any) -> tuple[int, int]:
    """(rank inside the attention-TP group, data-parallel rank)."""
    try:
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        return int(parallel.attn_tp_rank), int(parallel.attn_dp_rank or getattr(runner, "dp_rank", None) or 0)
    except ImportError:
        from sglang.srt.layers import dp_attention

        dp_rank = (
            getattr(dp_attention, "get_attention_dp_rank", lambda: 0)()
            or getattr(runner, "dp_rank", None)
            or 0
        )
        return int(dp_attention.get_attention_tp_rank()), int(dp_rank)
