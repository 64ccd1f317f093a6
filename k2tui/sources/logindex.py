"""One log file of any size as numbered clean lines: open at the end, sparse index built behind, search in blocks.

Knows no engine. Memory: one integer per BLOCK_B of file, and a few cached blocks; never one object per line.
"""

from __future__ import annotations

import bisect
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from k2tui.core.loadlines import clean
from k2tui.errors import K2Error, UsageError
from k2tui.regular import open_regular
from k2tui.sources.tail import Tail

BLOCK_B = 256 << 10
CACHED_BLOCKS = 4
LINE_MAX_B = 16 * 1024  # of one line shown; the middle of longer ones is left out
_SEARCH_CHUNK_B = 4 << 20


def fold(piece: bytes) -> str:
    """One physical line -> the text that a terminal would show: the newest state of a carriage-return bar, no escapes."""
    if piece.endswith(b"\r"):
        piece = piece[:-1]
    if b"\r" in piece:
        parts = [p for p in piece.split(b"\r") if p.strip()]
        piece = parts[-1] if parts else b""
    if len(piece) > LINE_MAX_B:
        half = LINE_MAX_B // 2
        piece = piece[:half] + b" ... " + piece[-half:]
    return clean(piece.decode("utf-8", "replace"))


class LogFile:
    """A `core.ports.LogPort` on a file that may grow, shrink or be replaced.

    Line numbers count from 0. Until the index is complete the file's lines before the tail are numbered by estimate: ask
    is_complete(). The last INSTANT_B bytes are readable at once: `tail_lines(n)`.
    """

    INSTANT_B = 1 << 20

    def __init__(self, path: str | Path, *, title: str = "") -> None:
        self._path = Path(path)
        self._title = title or self._path.name
        self._tail = Tail(self._path)
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._reset()
        self._thread = threading.Thread(target=self._build, name=f"index {self._path.name}", daemon=True)
        self._thread.start()

    # --- the index -----------------------------------------------------------------------------------------------

    def _reset(self) -> None:
        self._fd: int | None = None
        self._id: tuple[int, int] | None = None
        # _starts[i]: number of newlines before block i; _starts[-1] belongs to _indexed_b
        self._starts: list[int] = [0]
        self._indexed_b = 0
        self._newlines = 0
        self._size = 0
        self._ends_open = False  # the file's last byte is not a newline
        self._cache: OrderedDict[int, tuple[int, list[str]]] = OrderedDict()
        self._open()

    def _open(self) -> None:
        try:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            info = os.fstat(self._fd)
            self._id = (info.st_dev, info.st_ino)
            self._size = info.st_size
        except OSError:
            self._fd = None

    def _refresh(self) -> None:
        """Has the file grown, shrunk or been replaced? Called with the lock held."""
        try:
            info = os.stat(self._path)
        except OSError:
            return  # vanished: what was indexed stays readable through the open descriptor
        if self._id != (info.st_dev, info.st_ino) or info.st_size < self._indexed_b:
            if self._fd is not None:
                os.close(self._fd)
            self._reset()
        else:
            self._size = info.st_size

    def _build(self) -> None:
        while not self._closed:
            with self._lock:
                self._refresh()
                fd, offset, size = self._fd, self._indexed_b, self._size
            if fd is None or offset >= size:
                self._wake.wait(0.25)
                self._wake.clear()
                continue
            try:
                data = os.pread(fd, BLOCK_B - offset % BLOCK_B, offset)
            except OSError:
                self._wake.wait(0.25)
                continue
            if not data:
                self._wake.wait(0.25)
                continue
            count = data.count(b"\n")
            with self._lock:
                if self._fd != fd or self._indexed_b != offset:
                    continue  # replaced meanwhile
                self._indexed_b += len(data)
                self._newlines += count
                self._ends_open = not data.endswith(b"\n")
                if self._indexed_b % BLOCK_B == 0:
                    self._starts.append(self._newlines)
                # the last line of the block before may reach into this one
                self._cache.pop(offset // BLOCK_B, None)
                self._cache.pop(offset // BLOCK_B - 1, None)
            if size - offset > 8 * BLOCK_B:
                time.sleep(0)  # let the reader in between blocks

    # --- LogPort -------------------------------------------------------------------------------------------------

    @property
    def title(self) -> str:
        return self._title

    @property
    def size_b(self) -> int:
        with self._lock:
            self._refresh()
            return self._size

    def line_count(self) -> int:
        with self._lock:
            return self._newlines + (1 if self._ends_open else 0)

    def is_complete(self) -> bool:
        with self._lock:
            self._refresh()
            return self._indexed_b >= self._size

    def lines(self, start: int, count: int) -> Sequence[str]:
        if count <= 0 or start < 0:
            return []
        out: list[str] = []
        with self._lock:
            total = self._newlines + (1 if self._ends_open else 0)
            end = min(start + count, total)
            number = start
            block = self._block_of(number)
            while number < end and block < len(self._starts):
                first, texts = self._texts(block)
                take = texts[number - first : end - first] if number >= first else []
                out.extend(take)
                number += len(take)
                block += 1
        return out

    def tail_lines(self, count: int) -> list[str]:
        """The last lines of the file as it is now, without waiting for the index (reads at most INSTANT_B)."""
        with self._lock:
            self._refresh()
            fd, size = self._fd, self._size
        if fd is None:
            return []
        start = max(0, size - self.INSTANT_B)
        pieces = os.pread(fd, size - start, start).split(b"\n")
        if start:
            pieces = pieces[1:] or pieces
        if pieces and not pieces[-1]:
            pieces.pop()
        return [fold(p) for p in pieces[-count:]]

    def search(self, pattern: str, start: int, *, forward: bool = True) -> int | None:
        """The next matching line at or after (before) `start`. Case decides only when the pattern has capitals."""
        try:
            flags = 0 if any(c.isupper() for c in pattern) else re.IGNORECASE
            wanted = re.compile(pattern, flags)
        except re.error as err:
            raise UsageError(
                f"not a valid search pattern: {err}", "escape ( [ * + ? . with a backslash to search for them"
            ) from None
        needle = _literal(pattern, bool(flags))
        with self._lock:
            last = self._newlines + (1 if self._ends_open else 0) - 1
        if last < 0:
            return None
        number = max(0, min(start, last))
        with self._lock:
            blocks = len(self._starts)
            block = self._block_of(number)
            if not forward:
                block = min(block + 1, blocks - 1)
        step = 1 if forward else -1
        while 0 <= block < blocks:
            if self._closed:
                return None
            if needle is None or self._may_hold(block, needle):
                with self._lock:
                    first, texts = self._texts(block)
                order = range(len(texts)) if forward else range(len(texts) - 1, -1, -1)
                for index in order:
                    line_no = first + index
                    if (forward and line_no < number) or (not forward and line_no > number):
                        continue
                    if wanted.search(texts[index]):
                        return line_no
            block += step
        return None

    def lines_where(
        self,
        wanted: Callable[[str], bool],
        start: int,
        count: int,
        *,
        forward: bool = True,
        limit: int = 20_000,
    ) -> list[tuple[int, str]]:
        """(line number, text) of up to `count` lines that `wanted` keeps, from `start` on (or backwards); looks at most at
        `limit` lines, so that a filter that keeps nothing does not stop the screen: go on from there."""
        out: list[tuple[int, str]] = []
        step = 256
        seen = 0
        total = self.line_count()
        at = min(start, total - 1) if not forward else start
        while seen < limit and len(out) < count and 0 <= at < total:
            first = at if forward else max(0, at - step + 1)
            texts = list(enumerate(self.lines(first, step if forward else at - first + 1), first))
            if not texts:
                break
            for number, text in texts if forward else reversed(texts):
                if wanted(text):
                    out.append((number, text))
                    if len(out) >= count:
                        break
            seen += len(texts)
            at = texts[-1][0] + 1 if forward else first - 1
        return out

    def close(self) -> None:
        self._closed = True
        self._wake.set()
        self._thread.join(timeout=2)
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None
        self._tail.close()

    # --- blocks --------------------------------------------------------------------------------------------------

    def _block_of(self, number: int) -> int:
        """The block that holds the newline before line `number`: the line begins in it, or right after it."""
        return max(0, bisect.bisect_right(self._starts, number - 1) - 1) if number > 0 else 0

    def _texts(self, block: int) -> tuple[int, list[str]]:
        """(number of the first line, texts) of the lines that begin in the block. A line may reach into later blocks."""
        hit = self._cache.get(block)
        if hit is not None:
            self._cache.move_to_end(block)
            return hit
        fd = self._fd
        offset = block * BLOCK_B
        if fd is None:
            return self._starts[block], []
        size = min(BLOCK_B, self._indexed_b - offset)
        data = os.pread(fd, size, offset)
        first = self._starts[block]
        if block > 0:
            before = os.pread(fd, 1, offset - 1)
            if before != b"\n":
                cut = data.find(b"\n")
                if cut < 0:
                    return first + 1, []  # one line over the whole block: it began earlier
                data = data[cut + 1 :]
                first += 1
        quick = _plain(data)
        pieces = data.split(b"\n")
        is_last_block = offset + size >= self._indexed_b
        if not pieces[-1] and (is_last_block or offset + size >= self._size):
            pieces.pop()
        elif pieces[-1] and not is_last_block:
            rest = self._rest_of_line(fd, offset + size)
            pieces[-1] += rest
            quick = quick and _plain(rest)
        elif not pieces[-1]:
            pieces.pop()  # ends exactly at a line's end: the next line begins in the next block
        if quick and max(map(len, pieces), default=0) <= LINE_MAX_B:
            texts = [p.decode("ascii") if p.isascii() else fold(p) for p in pieces]
        else:
            texts = [fold(p) for p in pieces]
        result = (first, texts)
        self._cache[block] = result
        while len(self._cache) > CACHED_BLOCKS:
            self._cache.popitem(last=False)
        return result

    def _rest_of_line(self, fd: int, offset: int) -> bytes:
        out = b""
        while len(out) < LINE_MAX_B:
            data = os.pread(fd, 65536, offset)
            if not data:
                break
            cut = data.find(b"\n")
            if cut >= 0:
                return out + data[:cut]
            out += data
            offset += len(data)
        return out

    def _may_hold(self, block: int, needle: tuple[bytes, bool]) -> bool:
        """Could a line that begins in the block match? A byte search before any decoding; blocks with escapes always could."""
        fd = self._fd
        if fd is None:
            return False
        data = os.pread(fd, BLOCK_B + LINE_MAX_B, block * BLOCK_B)
        text, any_case = needle
        return text in (data.lower() if any_case else data) or b"\x1b" in data or b"\r" in data


_ODD = bytes(c for c in range(256) if c < 0x20 and c != 0x0A) + b"\x7f"
_BALD = re.compile(rb"\[\d{1,3}(?:;\d{1,3})*m")


def _plain(data: bytes) -> bool:
    """No control characters but newlines, and nothing that looks like a colour code without its escape."""
    return len(data.translate(None, _ODD)) == len(data) and not _BALD.search(data)


def _literal(pattern: str, any_case: bool) -> tuple[bytes, bool] | None:
    """A text that every match must hold (the longest run of plain characters), None when there is no sure one."""
    if not pattern.isascii() or re.search(r"[\\|(\[?*{]", pattern):
        return None  # escapes, alternatives, groups, optional parts: the regex itself must look
    runs = [run for run in re.split(r"[.^$+)\]}]", re.sub(r".\+", ".", pattern)) if run]
    best = max(runs, key=len, default="")
    return (best.lower() if any_case else best).encode(), any_case


START_MARKS = (b"server_args=", b"vLLM API server version", b"[k2tui embedded engine]")
_WHOLE_B = 32 << 20


def newest_start_at(path: str | Path, max_b: int = 256 << 20) -> int:
    """Offset of a line a little before a log's newest start; at most max_b from the end. 0 for small files (32 MiB):
    their earlier starts are worth knowing."""
    with open_regular(path) as fh:
        size = os.fstat(fh.fileno()).st_size
        if size <= _WHOLE_B:
            return 0
        end, found = size, -1
        while end > 0 and found < 0 and size - end < max_b:
            start = max(0, end - BLOCK_B)
            fh.seek(start)
            data = fh.read(min(end + 64, size) - start)
            at = max(data.rfind(mark) for mark in START_MARKS)
            found = start + at if at >= 0 else -1
            end = start
        begin = max(0, (found if found >= 0 else size - _WHOLE_B) - (64 << 10), size - max_b)
        if begin == 0:
            return 0
        fh.seek(begin)
        return begin + fh.read(1 << 20).find(b"\n") + 1


def count_lines(path: str | Path, start: int, end: int) -> int:
    """Newlines in the file's bytes start to end (fewer when it is shorter by now): 1 GB takes about 0.6 s."""
    block, count = bytearray(64 << 10), 0  # stays in the cache
    view = memoryview(block)
    with open(path, "rb", buffering=0) as fh:
        fh.seek(start)
        while start < end and (got := fh.readinto(view[: min(len(block), end - start)])):
            count += block.count(b"\n", 0, got)
            start += got
    return count


def chunks(path: str | Path, begin: int = 0, chunk_b: int = 1 << 20) -> Iterator[bytes]:
    """The file from `begin` to its end as it is now, in pieces."""
    with open_regular(path) as fh:
        left = os.fstat(fh.fileno()).st_size - begin
        fh.seek(begin)
        while left > 0 and (data := fh.read(min(chunk_b, left))):
            left -= len(data)
            yield data


__all__ = ["START_MARKS", "K2Error", "LogFile", "chunks", "count_lines", "fold", "newest_start_at"]
