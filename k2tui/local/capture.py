"""Capture of hidden states in the embedded engine: the same sink, routes and files as the SGLang plug-in's.

Off unless K2TUI_CAPTURE_DIR is set. The scheduler hands over each prefilled prompt whole, so a sample is one chunk.
"""

from __future__ import annotations

import atexit
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from k2tui.capture.control import ROUTE, Control
from k2tui.capture.features import flat_bytes, stored
from k2tui.capture.ids import wanted_boundaries
from k2tui.capture.request import is_capture
from k2tui.capture.sink import Sink
from k2tui.errors import K2Error
from k2tui.local.arguments import VERSION
from k2tui.local.log import log
from k2tui.states.writer import WriterLimits

if TYPE_CHECKING:
    from k2tui.local.request import Request
    from k2tui.local.scheduler import Scheduler

DIR_ENV = "K2TUI_CAPTURE_DIR"


def attach(scheduler: Scheduler, *, model_path: str, architectures: list[str]) -> Path | None:
    """Let the scheduler capture, before it starts. The capture root, or None when capture is off. Raises K2Error."""
    where = os.environ.get(DIR_ENV)
    if not where:
        return None
    if scheduler.speculator is not None:
        raise K2Error(
            "capture and a draft together", "start the capture server without --speculative-algorithm"
        )
    decoder = scheduler.decoder
    boundaries = wanted_boundaries(decoder.num_layers, os.environ.get("K2TUI_CAPTURE_BOUNDARIES"))
    root = Path(where)
    root.mkdir(parents=True, exist_ok=True)
    facts: dict[str, Any] = {
        "model_path": model_path,
        "architectures": architectures,
        "hidden_size": decoder.hidden_size,
        "num_hidden_layers": decoder.num_layers,
        "vocab_size": decoder.vocab_size,
        "boundaries": list(boundaries),
        "engine": "k2tui-local",
        "engine_version": VERSION,
        "engine_args": {"dtype": str(decoder.dtype).removeprefix("torch."), "tp_size": 1},
        "dp_rank": 0,
    }

    def mb(name: str, default: int) -> int:
        return int(os.environ.get(f"K2TUI_CAPTURE_{name}_MB", default)) << 20

    limits = WriterLimits(
        shard_bytes=mb("SHARD", 256),
        pending_bytes=mb("PINNED", 256),
        min_free_b=mb("MIN_FREE", 500),
        threads=1,
    )
    host = re.sub(r"[^A-Za-z0-9]", "", os.uname().nodename)[:12] or "host"
    sink = Sink(root, f"{host}-0-{os.getpid()}", facts, limits)
    atexit.register(sink.close)
    hidden_size = decoder.hidden_size

    def capture(request: Request, aux: torch.Tensor, last: torch.Tensor) -> None:
        """aux [T, B*H], last [T, H] of one prompt. A failure gives the sample up, never the engine."""
        if not is_capture(request.rid):
            return
        try:
            ticket = sink.open_chunk(request.rid, 0, len(request.input_ids))
            if ticket is None:
                return
            columns = [boundaries.index(b) for b in ticket.boundaries]
            picked = torch.cat([aux[:, c * hidden_size : (c + 1) * hidden_size] for c in columns], -1)
            parts = [("input_ids", torch.tensor(request.input_ids, dtype=torch.int32))]
            parts += stored("aux", ticket.dtype, hidden_size, picked)
            if ticket.need_last is not None:
                last = last[torch.from_numpy(ticket.need_last)] if len(ticket.need_last) else last[:0]
            if len(last):
                parts += stored("last", ticket.dtype, hidden_size, last)
            for name, tensor in parts:
                if not ticket.put(name, 0, flat_bytes(tensor.cpu())):
                    return
        except Exception as err:
            sink.refuse(request.rid, f"{type(err).__name__}: {err}")

    scheduler.capture = capture
    scheduler.capture_boundaries = boundaries
    log(f"k2tui capture: boundaries {list(boundaries)} of {decoder.num_layers} layers, into {root}")
    return root


def routes(root: Path) -> list[Route]:
    """The status, begin and flush routes, as the plug-in adds them to SGLang."""
    control = Control(root)

    def answer(call: Any) -> Response:
        try:
            return JSONResponse(call())
        except K2Error as err:
            return JSONResponse({"error": err.message, "hint": err.hint}, 400)

    async def status(http: HttpRequest) -> Response:
        query = http.query_params
        cursor = query.get("cursor", "0")
        return answer(
            lambda: control.status(
                query.get("run", ""), int(cursor) if cursor.isdigit() else 0, query.get("epoch", "")
            )
        )

    async def body_of(http: HttpRequest) -> dict[str, Any]:
        try:
            raw = await http.json()
        except ValueError:
            return {}
        return raw if isinstance(raw, dict) else {}

    async def begin(http: HttpRequest) -> Response:
        body = await body_of(http)
        return answer(lambda: control.begin(str(body.get("run", "")), body.get("manifest") or {}))

    async def flush(http: HttpRequest) -> Response:
        body = await body_of(http)
        return answer(lambda: control.flush(str(body.get("run", ""))))

    return [
        Route(ROUTE, status),
        Route(f"{ROUTE}/begin", begin, methods=["POST"]),
        Route(f"{ROUTE}/flush", flush, methods=["POST"]),
    ]
