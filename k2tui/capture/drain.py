"""The writer process of one engine: takes rows out of the shared ring and puts them on disk. Started by `link.py` only.

Messages are JSON lines on a socket. Down: first the facts; then pieces {"region", "at", "parts": [[name, offset, row_bytes]],
"shares": [[rid, start, count, row, last_row]], "stall_s"} and {"refuse": [rid, reason]}. Up: {"up": pid}, {"free": region}.
The end of the socket means that the engine is gone: what is whole is published, then this process ends too.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from k2tui.capture.sink import Sink
from k2tui.states.writer import WriterLimits


class _Hold:
    """Counts who still reads a region; tells when nobody does."""

    def __init__(self, free: Callable[[], None]) -> None:
        self._free, self._lock, self._count = free, threading.Lock(), 1

    def take(self) -> None:
        with self._lock:
            self._count += 1

    def release(self) -> None:
        with self._lock:
            self._count -= 1
            last = self._count == 0
        if last:
            self._free()


class Drain:
    """memory: the ring's bytes. tell: sends one message up (from any thread)."""

    def __init__(self, sink: Sink, memory: memoryview, tell: Callable[[dict[str, Any]], None]) -> None:
        self._sink, self._memory, self._tell = sink, memory, tell

    def handle(self, message: dict[str, Any]) -> None:
        if "refuse" in message:
            self._sink.refuse(*message["refuse"])
            return
        self._sink.copy_stall_s = message["stall_s"]
        number = message["region"]
        hold = _Hold(lambda: self._tell({"free": number}))
        try:
            for rid, start, count, row, last_row in message["shares"]:
                self._share(message, hold, rid, start, count, row, last_row)
        finally:
            hold.release()

    def _share(
        self, message: dict[str, Any], hold: _Hold, rid: str, start: int, count: int, row: int, last_row: int
    ) -> None:
        ticket = self._sink.open_chunk(rid, start, count)
        if ticket is None:
            return
        kept = count if ticket.need_last is None else int(ticket.need_last.sum())
        for name, offset, row_b in message["parts"]:
            is_last = name.startswith("last")
            first, rows, at = (last_row, kept, ticket.last_row) if is_last else (row, count, start)
            if not rows:
                continue
            begin = message["at"] + offset + first * row_b
            hold.take()
            # what may be pending is bounded by the ring itself: nothing waits here
            if not ticket.put(name, at, self._memory[begin : begin + rows * row_b], release=hold.release):
                return


def main() -> None:
    # both come to the whole process group; the end of the socket decides, so that whole samples are not lost
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sock, ring_fd = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    populate = getattr(mmap, "MAP_POPULATE", 0)  # page faults now, not while rows wait
    memory = memoryview(mmap.mmap(ring_fd, 0, mmap.MAP_SHARED | populate, mmap.PROT_READ))
    lock = threading.Lock()

    def tell(message: dict[str, Any]) -> None:
        try:
            with lock:
                sock.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # the engine is gone: the reader sees the end

    reader = sock.makefile("rb")
    hello = json.loads(reader.readline())
    sink = Sink(
        Path(hello["root"]),
        f"{hello['name']}-{os.getpid()}",
        hello["facts"],
        WriterLimits(**hello["limits"]),
    )
    drain = Drain(sink, memory, tell)
    tell({"up": os.getpid()})
    try:
        for line in reader:
            if not line.endswith(b"\n"):
                break  # the engine died in the middle of a message
            drain.handle(json.loads(line))
    except OSError:
        pass
    sink.close()


if __name__ == "__main__":
    main()
