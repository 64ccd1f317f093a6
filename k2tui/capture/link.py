"""The engine's end of the writer process: a ring that both see, a socket for words. Knows bytes and messages, no SGLang.

Why a process: beside an engine that polls without a pause, a writer *thread* waits for the interpreter after each system call,
and takes it from the engine each time. Here the engine's process only says where rows lie (one message a piece) and hears
when their place is free again. When the engine dies, the writer publishes what is whole and ends; when the writer dies, what
it had is lost (and asked for again by the client) and a new one is started.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import queue
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from k2tui.capture.ring import PinnedRing, Region
from k2tui.paths import own_module
from k2tui.states.writer import WriterLimits

log = logging.getLogger("k2tui.capture")

_UP_S = 60.0  # a writer that has not said a word for so long does not come up
_DEATHS, _WITHIN_S = (
    5,
    60.0,
)  # so many deaths in so short a time: something is wrong with the machine, not with one moment


def shared_memory(size: int) -> tuple[int, mmap.mmap]:
    """(descriptor, map) of `size` bytes that a child can map too. No name, nothing to clean up."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("k2tui-capture")
    else:
        with tempfile.TemporaryFile() as fh:
            fd = os.dup(fh.fileno())
    os.ftruncate(fd, size)
    return fd, mmap.mmap(fd, size)


class WriterLink:
    """Starts the writer process and talks to it. Raises RuntimeError when it does not come up.

    root: capture root. name: prefix of the writer's name. facts: what the status tells about the engine. make_ring: a ring over
    the shared bytes (it may pin them).
    """

    def __init__(
        self,
        root: Path,
        name: str,
        facts: Mapping[str, Any],
        limits: WriterLimits,
        ring_b: int,
        make_ring: Callable[[mmap.mmap], PinnedRing],
    ) -> None:
        self._hello = {"root": str(root), "name": name, "facts": dict(facts), "limits": asdict(limits)}
        self._fd, self.map = shared_memory(ring_b)
        self.ring = make_ring(self.map)
        self._lock = threading.Lock()
        self._flying: dict[int, Region] = {}
        self._next = 0
        self._generation = 0
        self._up = True
        self._closing = False
        self._deaths: list[float] = []
        self.gone = ""  # why there is no writer any more, in words
        self._queue: queue.SimpleQueue[tuple[int, dict[str, Any], Any] | None] = queue.SimpleQueue()
        self._process, self._sock = self._spawn()
        self._sender = threading.Thread(target=self._send_loop, name="capture-send", daemon=True)
        self._sender.start()

    @property
    def pid(self) -> int:
        """Of the writer process."""
        return self._process.pid

    def piece(self, region: Region, message: dict[str, Any], event: Any = None) -> None:
        """Rows lie in `region` once `event` (a CUDA event, or None) is over; the region is given back when they are on disk."""
        with self._lock:
            up = self._up
            if up:
                self._next += 1
                self._flying[self._next] = region
            number, generation = self._next, self._generation
        if not up:
            region.release()
            return
        message = {**message, "region": number, "at": region.start, "stall_s": round(self.ring.stall_s, 4)}
        self._queue.put((generation, message, event))

    def refuse(self, rid: str, reason: str) -> None:
        """The engine could not deliver: the sample is given up, with a reason that the client hears."""
        self._queue.put((self._generation, {"refuse": [rid, reason]}, None))

    def close(self, timeout_s: float = 60.0) -> None:
        """Everything sent so far is written and published; then the writer ends."""
        self._closing = True
        self._queue.put(None)
        self._sender.join(timeout_s)
        try:
            self._sock.shutdown(socket.SHUT_WR)
            self._process.wait(timeout_s)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._sock.close()

    # ---- the process

    def _spawn(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair()
        package = str(Path(__file__).absolute().parents[2])
        path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH", ""), package)))
        with theirs:
            process = subprocess.Popen(
                [*own_module("k2tui.capture.drain"), str(theirs.fileno()), str(self._fd)],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), self._fd),
                env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
            )
        ours.settimeout(_UP_S)
        reader = ours.makefile("rb")
        try:
            ours.sendall(json.dumps(self._hello).encode() + b"\n")
            up = reader.readline()
        except OSError:
            up = b""
        if not up:
            process.kill()
            process.wait()
            ours.close()
            raise RuntimeError("k2tui capture: the writer process did not come up (its reason stands above)")
        ours.settimeout(None)
        threading.Thread(
            target=self._listen, args=(reader, self._generation), name="capture-listen", daemon=True
        ).start()
        return process, ours

    def _listen(self, reader: Any, generation: int) -> None:
        try:
            for line in reader:
                self._free(json.loads(line)["free"])
        except (OSError, ValueError):
            pass
        if not self._closing and generation == self._generation:
            self._bury()

    def _free(self, number: int) -> None:
        with self._lock:
            region = self._flying.pop(number, None)
        if region is not None:
            region.release()

    def _bury(self) -> None:
        """The writer died: its regions are free, and a new one takes over."""
        code = self._process.wait()
        log.warning("k2tui capture: the writer process ended with code %s; a new one is started", code)
        now = time.monotonic()
        self._deaths = [t for t in self._deaths if now - t < _WITHIN_S] + [now]
        with self._lock:
            self._generation += 1
            self._up = False
            lost = list(self._flying.values())
            self._flying.clear()
            if len(self._deaths) >= _DEATHS:
                self.gone = f"the writer process ended {_DEATHS} times within {_WITHIN_S:.0f} s"
        for region in lost:
            region.release()
        self._sock.close()
        if not self.gone:
            try:
                self._process, self._sock = self._spawn()
            except (OSError, RuntimeError) as err:
                self.gone = str(err)
        if not self.gone:
            self._up = True
        else:
            log.error("k2tui capture: %s; nothing is captured until the server is started again", self.gone)

    def _send_loop(self) -> None:
        while (job := self._queue.get()) is not None:
            generation, message, event = job
            if event is not None:
                event.synchronize()
            if generation != self._generation:
                continue  # its region was freed when that writer died
            try:
                self._sock.sendall(json.dumps(message, separators=(",", ":")).encode() + b"\n")
            except OSError:
                pass  # the listener sees the same end and clears up
