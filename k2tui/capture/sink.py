"""Takes chunks of captured rows from an engine and sees to it that only whole samples are written. Knows no engine.

An engine calls `open_chunk(rid, start, count)` for each piece of a captured prefill and, when it gets a ticket, hands the
rows over with `put`. Chunks must come in order and without gaps; a prefix-cache hit, a lost chunk or a repeated one gives the
whole sample up with a reason, and it is asked for again. The sink also writes the status file that `control` answers from.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from k2tui.capture.request import CaptureRequest, parse_rid
from k2tui.errors import K2Error
from k2tui.states import layout
from k2tui.states.writer import Slot, StatesWriter, WriterLimits

CONTROL_DIR = ".k2tui-capture"
STALE_S = 300.0  # a sample that got no chunk for so long is given up (the client went away)


@dataclass(slots=True)
class _Open:
    request: CaptureRequest
    slot: Slot
    writer: StatesWriter
    next_row: int
    touched_s: float


@dataclass(frozen=True, slots=True)
class Ticket:
    """Rows [start, start + count) of one sample are wanted. boundaries: the run's, ascending. need_last: bool [count], or
    None for all, or an empty array when `last` is not kept. last_row: where the first kept row of `last` goes."""

    request: CaptureRequest
    slot: Slot
    writer: StatesWriter
    start: int
    count: int
    boundaries: tuple[int, ...]
    dtype: str
    need_last: np.ndarray | None
    last_row: int

    def put(
        self,
        part: str,
        row: int,
        buffer: Any,
        ready: Callable[[], None] | None = None,
        release: Callable[[], None] | None = None,
        patience_s: float | None = 20.0,
    ) -> bool:
        return self.writer.put(
            self.slot, part, row, buffer, ready=ready, release=release, patience_s=patience_s
        )


class Sink:
    """root: folder that every run lies under. name: unique among live writers of that root, [A-Za-z0-9_-]. facts: what the
    status tells about the engine (model_path, hidden_size, num_hidden_layers, boundaries, engine, engine_version ...)."""

    def __init__(
        self, root: Path, name: str, facts: Mapping[str, Any], limits: WriterLimits | None = None
    ) -> None:
        self.root, self.name, self.facts = root, name, dict(facts)
        self.limits = limits or WriterLimits()
        self.boundaries: tuple[int, ...] = tuple(facts["boundaries"])
        self._open: dict[str, _Open] = {}
        self._writers: dict[str, StatesWriter] = {}
        self._signs: dict[str, tuple[int, int]] = {}  # which manifest a run's writer was opened with
        self._given_up: dict[str, None] = {}  # newest 10,000 rids of which no more rows are wanted
        self._refused: dict[str, dict[int, str]] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._flushed: set[str] = set()
        self._status_text = ""
        self.copy_stall_s = 0.0  # time that the engine waited for room, set by the engine's side
        (root / CONTROL_DIR).mkdir(parents=True, exist_ok=True)
        self._status_path = root / CONTROL_DIR / f"{name}.json"
        self._thread = threading.Thread(target=self._tend, name="capture-status", daemon=True)
        self._thread.start()

    def open_chunk(self, rid: str, start: int, count: int) -> Ticket | None:
        """A ticket for rows [start, start + count), or None when the sample is not (or no longer) wanted."""
        request = parse_rid(rid)
        if request is None:
            self._refuse("?", -1, f"not a capture request: {rid[:80]}")
            return None
        with self._lock:
            found = self._open.get(rid)
            if start == 0:
                self._given_up.pop(rid, None)
                if found:  # the engine began again (retraction): what came before is void
                    found.writer.abandon(found.slot, "the engine computed it again")
                    del self._open[rid]
                found = self._begin(rid, request)
            elif found is None:
                if rid not in self._given_up:
                    self._give_up(
                        rid,
                        request,
                        f"rows 0..{start} were not computed: they came from the prefix cache (start the server with "
                        "--disable-radix-cache) or the writer was started again",
                    )
                return None
            if found is None:
                return None
            if start != found.next_row or start + count > request.length:
                self._give_up(
                    rid, request, f"rows {start}..{start + count} after {found.next_row} of {request.length}"
                )
                return None
            found.next_row += count
            found.touched_s = time.monotonic()
            if found.next_row == request.length:
                del self._open[rid]
            need = found.slot.last_need
            last_row = start
            if found.writer.manifest.last_rows == "none":
                need = np.zeros(0, dtype=bool)
            elif need is not None:
                last_row = int(need[:start].sum())
                need = need[start : start + count]
            man = found.writer.manifest
            return Ticket(
                request, found.slot, found.writer, start, count, man.boundaries, man.dtype, need, last_row
            )

    def refuse(self, rid: str, reason: str) -> None:
        """The engine could not deliver: the sample is given up."""
        request = parse_rid(rid)
        with self._lock:
            if request:
                self._give_up(rid, request, reason)

    def _give_up(self, rid: str, request: CaptureRequest, reason: str) -> None:
        found = self._open.pop(rid, None)
        if found:
            found.writer.abandon(found.slot, reason)
        self._refuse(request.run, request.index, reason)
        self._given_up[rid] = None
        while len(self._given_up) > 10_000:
            self._given_up.pop(next(iter(self._given_up)))

    def flush(self, run: str | None = None, timeout_s: float | None = 30.0) -> None:
        for name, writer in list(self._writers.items()):
            if run in (None, name):
                writer.flush(timeout_s)

    def close(self) -> None:
        """Publish what is whole, end the threads, remove the status file."""
        self._stop.set()
        self._thread.join(5)
        with self._lock:
            writers = list(self._writers.values())
            self._open.clear()
        for writer in writers:
            writer.close()
        self._status_path.unlink(missing_ok=True)

    def status(self) -> dict[str, Any]:
        """What `control` tells about this writer."""
        runs = {
            run: {
                **asdict(w.stats),
                "reasons": {**self._refused.get(run, {}), **w.reasons},
                "threads": w.limits.threads,
                "pending_limit": w.limits.pending_bytes,
            }
            for run, w in list(self._writers.items())
        }
        for run, reasons in list(self._refused.items()):
            runs.setdefault(run, {"reasons": reasons})
        return {
            "name": self.name,
            "pid": os.getpid(),
            "host": os.uname().nodename,
            "facts": self.facts,
            "copy_stall_s": self.copy_stall_s,
            "runs": runs,
        }

    def _begin(self, rid: str, request: CaptureRequest) -> _Open | None:
        try:
            folder = self.root / request.run
            sign = layout.manifest_sign(folder)
            writer = self._writers.get(request.run)
            if writer is not None and self._signs.get(request.run) != sign:
                # the folder was made anew under the same name, or its data file has grown
                if layout.read_manifest(folder).identity() != writer.manifest.identity():
                    self._writers.pop(request.run).close(5.0)
                    writer = None
                self._signs[request.run] = sign
            if writer is None:
                manifest = layout.read_manifest(folder)
                missing = [b for b in manifest.boundaries if b not in self.boundaries]
                if missing:
                    raise K2Error(f"boundaries {missing} are not captured here, only {list(self.boundaries)}")
                if manifest.hidden_size != self.facts["hidden_size"]:
                    raise K2Error(
                        f"the run is for hidden size {manifest.hidden_size}, the model has {self.facts['hidden_size']}"
                    )
                writer = self._writers[request.run] = StatesWriter(folder, manifest, self.name, self.limits)
                self._signs[request.run] = sign
            slot = writer.begin(
                request.index, request.length, layout.from_spans(request.spans, request.length)
            )
        except (K2Error, OSError) as err:
            self._give_up(rid, request, str(err))
            return None
        self._refused.get(request.run, {}).pop(request.index, None)
        writer.reasons.pop(request.index, None)
        opened = _Open(request, slot, writer, 0, time.monotonic())
        self._open[rid] = opened
        return opened

    def _refuse(self, run: str, index: int, reason: str) -> None:
        reasons = self._refused.setdefault(run, {})
        reasons[index] = reason
        while len(reasons) > 10_000:
            reasons.pop(next(iter(reasons)))

    def _tend(self) -> None:
        """Status file, flush orders, idle shards, stale samples: every 0.2 s."""
        while not self._stop.wait(0.2):
            try:
                self._tend_once()
            except Exception as err:  # the tender must live as long as the engine
                self.facts["tender_error"] = f"{type(err).__name__}: {err}"

    def _tend_once(self) -> None:
        now = time.monotonic()
        with self._lock:
            for rid, found in list(self._open.items()):
                if now - found.touched_s > STALE_S:
                    self._give_up(rid, found.request, "no more rows came (request aborted?)")
            writers = dict(self._writers)
        for run, writer in writers.items():
            writer.close_idle()
            for order in (self.root / CONTROL_DIR).glob(f"flush-{run}-*"):
                if order.name not in self._flushed:
                    self._flushed.add(order.name)
                    writer.flush(0.0)
        text = json.dumps(self.status())
        if text != self._status_text:
            self._status_text = text
            tmp = self._status_path.with_suffix(".tmp")
            tmp.write_text(text, encoding="utf-8")
            os.replace(tmp, self._status_path)
