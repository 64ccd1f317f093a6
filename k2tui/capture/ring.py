"""A ring of pinned host memory that a GPU copies into and writer threads drain. First in, first out; never grows."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any


class Region:
    """Bytes [start, end) of the ring, given back when every holder has let go."""

    __slots__ = ("end", "free", "holders", "ring", "start")

    def __init__(self, ring: PinnedRing, start: int, end: int) -> None:
        self.ring, self.start, self.end = ring, start, end
        self.holders = 1
        self.free = False

    def hold(self) -> None:
        with self.ring.cond:
            self.holders += 1

    def release(self) -> None:
        self.ring.give_back(self)


class PinnedRing:
    """buffer: a flat uint8 tensor (pinned when a GPU copies into it), `size` bytes of it in use."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer
        self.size = int(buffer.numel())
        self.cond = threading.Condition()
        self._used: deque[Region] = deque()
        self.stall_s = 0.0

    def take(self, size: int, patience_s: float | None) -> Region | None:
        """A contiguous region of `size` bytes (64-aligned); waits for room, None after patience_s or if it never fits."""
        size += -size % 64
        if size > self.size:
            return None
        start_s = time.monotonic()
        with self.cond:
            at = self._place(size)
            if at is None:
                self.cond.wait_for(lambda: self._place(size) is not None, patience_s)
                self.stall_s += time.monotonic() - start_s
                at = self._place(size)
                if at is None:
                    return None
            region = Region(self, at, at + size)
            self._used.append(region)
            return region

    def give_back(self, region: Region) -> None:
        with self.cond:
            region.holders -= 1
            if region.holders > 0:
                return
            region.free = True
            while self._used and self._used[0].free:
                self._used.popleft()
            self.cond.notify_all()

    def view(self, region: Region, size: int) -> Any:
        """Flat uint8 tensor over the first `size` bytes of a region."""
        return self.buffer[region.start : region.start + size]

    def _place(self, size: int) -> int | None:
        if not self._used:
            return 0
        head, tail = self._used[-1].end, self._used[0].start
        if head > tail:  # one block in use: free at the end, and before the tail
            if head + size <= self.size:
                return head
            return 0 if size <= tail else None
        return head if head + size <= tail else None
