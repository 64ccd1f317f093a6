"""Writes samples into shards with bounded memory, from any engine: knows buffers and files, no server and no GPU.

Laws. A shard appears whole or not at all (partial file, fsync, rename). A sample is published only when every row of every
part came, in order. Memory is bounded: `put` waits while too many bytes are pending (back-pressure) and says False when
its patience ends, never drops silently. A full disk pauses the threads and goes on when there is room; nothing is lost.
One writer name = one live writer: the partial file is locked, what a killed writer left is removed by the next one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import queue
import struct
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from k2tui.errors import K2Error
from k2tui.states import layout
from k2tui.states.layout import FEATURE_TAG, ITEM_B, Manifest

_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class WriterLimits:
    """shard_bytes: a shard is closed at that size. pending_bytes: handed over and not yet on disk. min_free_b: a disk with
    less room than this counts as full. header_bytes: reserved at the head of a shard. idle_s: a shard that got no new
    sample for so long is closed. threads: writing at the same time."""

    shard_bytes: int = 1 << 30
    pending_bytes: int = 1 << 30
    min_free_b: int = 2 << 30
    header_bytes: int = 256 << 10
    idle_s: float = 2.0
    threads: int = 2


class _Shard:
    """One partial file. `lock` guards the counters; offsets are handed out once, so writes need no lock."""

    def __init__(self, folder: Path, name: str, header_bytes: int) -> None:
        self.final = folder / name
        self.partial = folder / f".{name}{layout.PARTIAL_SUFFIX}"
        self.fd = os.open(self.partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.base = header_bytes
        self.end = 0  # bytes of tensors so far
        self.tensors: dict[str, dict[str, Any]] = {}
        self.samples: dict[str, dict[str, Any]] = {}
        self.slots: set[Slot] = set()  # begun and not closed
        self.head_used = 200
        self.dropped = 0
        self.sealed = False
        self.touched_s = time.monotonic()


@dataclass(slots=True)
class _Part:
    name: str
    dtype: str
    rows: int
    row_bytes: int
    offset: int  # of row 0, absolute in the file
    next_row: int = 0
    crc: int = 0


@dataclass(slots=True, eq=False)
class Slot:
    """One sample on its way. parts: name -> row counts and place in the shard."""

    index: int
    length: int
    shard: _Shard
    parts: dict[str, _Part]
    thread: int
    begun_s: float
    pending: int = 0
    dead: str = ""  # why the sample was given up
    closed: bool = False
    queued_rows: dict[str, int] = field(default_factory=dict[str, int])  # rows handed over, by part
    last_need: np.ndarray | None = None  # bool [T] when only some rows of `last` are kept


@dataclass(slots=True)
class WriterStats:
    samples: int = 0  # complete (in a shard that is open or published)
    published: int = 0
    shards: int = 0
    tokens: int = 0
    bytes: int = 0  # written
    dropped: int = 0
    pending_bytes: int = 0
    write_s: float = 0.0  # summed over threads, writing only
    hash_s: float = 0.0  # summed over threads, checksums
    stall_s: float = 0.0  # time that producers waited for room
    paused: str = ""  # why the writer stands still, in words
    last_error: str = ""


class StatesWriter:
    """Threads that put samples on disk.

    writer: a name that no other live writer of this folder uses ([A-Za-z0-9_-]). on_published(indices): called from a
    thread after a shard is on disk. Raises K2Error when the folder's manifest differs from `manifest` (identity).
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        writer: str,
        limits: WriterLimits | None = None,
        on_published: Callable[[list[int]], None] | None = None,
    ) -> None:
        self.folder, self.manifest, self.writer = folder, manifest, writer
        self.limits = limits or WriterLimits()
        self.stats = WriterStats()
        self.reasons: dict[int, str] = {}  # why a sample was dropped, by index (newest 10,000)
        self._on_published = on_published
        self._cond = threading.Condition()
        self._shard: _Shard | None = None
        self._open: list[_Shard] = []
        self._closing = False
        self._next_thread = 0
        self._room_seen_s = 0.0
        folder.mkdir(parents=True, exist_ok=True)
        prepare_folder(folder, manifest)
        remove_stale(folder)
        taken = [p.name for p in folder.iterdir() if f"{layout.SHARD_PREFIX}{writer}-" in p.name]
        numbers = [int(n.rsplit("-", 1)[1].split(".")[0]) for n in taken]
        self._seq = max(numbers, default=0)
        self._queues: list[queue.SimpleQueue[Any]] = [
            queue.SimpleQueue() for _ in range(max(1, self.limits.threads))
        ]
        self._threads = [
            threading.Thread(target=self._work, args=(q,), name=f"states-writer-{n}", daemon=True)
            for n, q in enumerate(self._queues)
        ]
        self._publisher_queue: queue.SimpleQueue[_Shard | None] = queue.SimpleQueue()
        self._threads.append(
            threading.Thread(target=self._publish_loop, name="states-publisher", daemon=True)
        )
        for thread in self._threads:
            thread.start()

    # ---- the producer's side

    def begin(self, index: int, length: int, loss_mask: np.ndarray, patience_s: float | None = 20.0) -> Slot:
        """Reserve room for one sample of `length` tokens. loss_mask: 0/1 [T], written at once. patience_s: as in `put`."""
        man = self.manifest
        if len(loss_mask) != length or length <= 0:
            raise K2Error(f"sample {index}: loss mask of {len(loss_mask)} for {length} tokens")
        need: np.ndarray | None = None
        last_rows = length
        if man.last_rows == "none":
            last_rows = 0
        elif man.last_rows == "loss":
            need = layout.loss_rows(loss_mask)
            last_rows = int(need.sum())
        tag, h, b = FEATURE_TAG[man.dtype], man.hidden_size, len(man.boundaries)
        wanted: list[tuple[str, str, tuple[int, ...]]] = [
            ("input_ids", "I32", (length,)),
            ("loss_mask", "U8", (length,)),
            ("aux", tag, (length, b * h)),
        ]
        if man.dtype != "bf16":
            wanted.append(("aux_scale", "F32", (length, b)))
        if last_rows:
            wanted.append(("last", tag, (last_rows, h)))
            if man.dtype != "bf16":
                wanted.append(("last_scale", "F32", (last_rows, 1)))
        with self._cond:
            shard = self._room_for(sum(_nbytes(d, s) for _, d, s in wanted))
            parts: dict[str, _Part] = {}
            # widest items first, so that every tensor is aligned to its own item size
            for name, dtype, shape in sorted(wanted, key=lambda w: -ITEM_B[w[1]]):
                shard.end += -shard.end % 4 if not parts else 0
                size = _nbytes(dtype, shape)
                shard.tensors[f"{index}.{name}"] = {
                    "dtype": dtype,
                    "shape": list(shape),
                    "data_offsets": [shard.end, shard.end + size],
                }
                parts[name] = _Part(name, dtype, shape[0], size // shape[0], shard.base + shard.end)
                shard.end += size
            shard.head_used += 150 * len(parts) + 200
            shard.touched_s = time.monotonic()
            slot = Slot(index, length, shard, parts, self._next_thread, time.monotonic(), last_need=need)
            shard.slots.add(slot)
            self._next_thread = (self._next_thread + 1) % len(self._queues)
        self.put(slot, "loss_mask", 0, np.ascontiguousarray(loss_mask, dtype=np.uint8), patience_s=patience_s)
        return slot

    def put(
        self,
        slot: Slot,
        part: str,
        row: int,
        buffer: Any,
        *,
        ready: Callable[[], None] | None = None,
        release: Callable[[], None] | None = None,
        patience_s: float | None = 20.0,
    ) -> bool:
        """Hand over rows [row, ...) of one part, as a contiguous buffer that stays untouched until `release` is called.

        ready: waited for by the writing thread before it reads the buffer (a copy's event). Blocks while too many bytes are
        pending; False after patience_s (None = for ever), and the sample is then given up. A buffer for a dead slot is
        released and dropped.
        """
        view = memoryview(buffer).cast("B")
        size = view.nbytes
        where = slot.parts[part]
        expected = slot.queued_rows.get(part, 0)
        rows = size // where.row_bytes
        if size % where.row_bytes or row != expected or row + rows > where.rows:
            self.abandon(slot, f"rows {row}..{row + rows} of {part} after {expected} of {where.rows}")
        room = slot.dead != "" or self.reserve(size, patience_s)
        if slot.dead or not room:
            if not room:
                self.abandon(slot, self.stats.paused or "the disk is slower than the server's patience")
            elif not slot.dead:
                self._give_back(size)
            if release:
                release()
            return False
        slot.queued_rows[part] = row + rows
        with self._cond:
            slot.pending += 1
        self._queues[slot.thread].put((slot, where, row, view, ready, release))
        return True

    def reserve(self, size: int, patience_s: float | None) -> bool:
        """Wait until `size` more bytes may be pending."""
        with self._cond:
            limit = self.limits.pending_bytes
            if self.stats.pending_bytes and self.stats.pending_bytes + size > limit:
                start = time.monotonic()
                self._cond.wait_for(
                    lambda: (
                        self._closing
                        or not self.stats.pending_bytes
                        or self.stats.pending_bytes + size <= limit
                    ),
                    patience_s,
                )
                self.stats.stall_s += time.monotonic() - start
                if self._closing or (self.stats.pending_bytes and self.stats.pending_bytes + size > limit):
                    return False
            self.stats.pending_bytes += size
            return True

    def abandon(self, slot: Slot, reason: str) -> None:
        """Give a sample up: it will not be published. Its place in the shard becomes a `dropped` tensor."""
        with self._cond:
            if slot.dead or slot.closed:
                return
            slot.dead = reason
            self.stats.dropped += 1
            self.reasons[slot.index] = reason
            while len(self.reasons) > 10_000:
                self.reasons.pop(next(iter(self.reasons)))
            if slot.pending == 0:
                self._close_slot(slot)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Close the open shard and wait until everything that was handed over whole has been published.

        A sample of which rows are still to come keeps its shard open; it is published when the last row is in.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        with self._cond:
            if self._shard is not None:
                self._seal(self._shard)
            left = None if end is None else max(0.0, end - time.monotonic())
            return self._cond.wait_for(
                lambda: self.stats.pending_bytes == 0 and all(not s.sealed or s.slots for s in self._open),
                left,
            )

    def close(self, timeout_s: float | None = 60.0) -> None:
        """Publish what is complete and end the threads. Samples of which rows are missing are given up."""
        self.flush(timeout_s)
        for shard in list(self._open):
            for slot in list(shard.slots):
                self.abandon(slot, "the writer was closed")
        self.flush(timeout_s)
        with self._cond:
            self._closing = True
            self._cond.notify_all()
        for q in self._queues:
            q.put(None)
        for thread in self._threads[:-1]:
            thread.join(timeout_s)
        self._publisher_queue.put(None)
        self._threads[-1].join(timeout_s)
        for shard in list(self._open):
            os.close(shard.fd)
            with contextlib.suppress(OSError):
                shard.partial.unlink()
        self._open.clear()

    def close_idle(self) -> None:
        """Close a shard that got no sample for `idle_s`; call it now and then."""
        with self._cond:
            shard = self._shard
            if shard and shard.samples and time.monotonic() - shard.touched_s > self.limits.idle_s:
                self._seal(shard)

    # ---- the threads' side

    def _room_for(self, size: int) -> _Shard:
        shard = self._shard
        if (
            shard
            and (shard.end + size > self.limits.shard_bytes or shard.head_used + 2000 > shard.base)
            and shard.end
        ):
            self._seal(shard)
        if self._shard is None:
            self._seq += 1
            name = f"{layout.SHARD_PREFIX}{self.writer}-{self._seq:05d}{layout.SHARD_SUFFIX}"
            self._shard = _Shard(self.folder, name, self.limits.header_bytes)
            self._open.append(self._shard)
        return self._shard

    def _seal(self, shard: _Shard) -> None:
        if shard is self._shard:
            self._shard = None
        if not shard.sealed:
            shard.sealed = True
            if not shard.slots:
                self._publisher_queue.put(shard)

    def _give_back(self, size: int) -> None:
        with self._cond:
            self.stats.pending_bytes -= size
            self._cond.notify_all()

    def _work(self, jobs: queue.SimpleQueue[Any]) -> None:
        while True:
            job = jobs.get()
            if job is None:
                return
            slot, part, row, view, ready, release = job
            try:
                if ready:
                    ready()
                if not slot.dead:
                    self._write(slot.shard.fd, view, part.offset + row * part.row_bytes)
                    start = time.monotonic()
                    part.crc = zlib.crc32(view, part.crc)
                    with self._cond:
                        self.stats.hash_s += time.monotonic() - start
                    part.next_row = row + view.nbytes // part.row_bytes
            except Exception as err:  # the sample is lost, the writer is not
                self.stats.last_error = f"{type(err).__name__}: {err}"
                self.abandon(slot, self.stats.last_error)
            finally:
                size = view.nbytes
                del view
                if release:
                    release()
                with self._cond:
                    slot.pending -= 1
                    self.stats.pending_bytes -= size
                    if slot.pending == 0 and (
                        slot.dead or all(p.next_row == p.rows for p in slot.parts.values())
                    ):
                        self._close_slot(slot)
                    self._cond.notify_all()

    def _write(self, fd: int, view: memoryview, offset: int) -> None:
        done = 0
        while done < view.nbytes:
            self._wait_for_disk()
            start = time.monotonic()
            try:
                wrote = os.pwrite(fd, view[done : done + (16 << 20)], offset + done)
            except OSError as err:
                if err.errno not in _FULL:
                    raise
                self._room_seen_s = 0.0
                self._pause(f"{self.folder}: the disk is full")
                continue
            with self._cond:
                self.stats.write_s += time.monotonic() - start
                self.stats.bytes += wrote
            done += wrote

    def _wait_for_disk(self) -> None:
        now = time.monotonic()
        if not self.stats.paused and now - self._room_seen_s < 0.2:
            return  # a look costs a system call and, beside a busy thread, the interpreter's lock
        while not self._closing:
            disk = os.statvfs(self.folder)
            free = disk.f_bavail * disk.f_frsize
            if free >= self.limits.min_free_b:
                self._room_seen_s = time.monotonic()
                if self.stats.paused:
                    self.stats.paused = ""
                return
            self._pause(
                f"{self.folder}: {free / 1e9:.1f} GB free, {self.limits.min_free_b / 1e9:.1f} GB are kept free"
            )
        raise K2Error("the writer was closed while the disk was full")

    def _pause(self, reason: str) -> None:
        self.stats.paused = reason
        with self._cond:
            if self._closing:
                raise K2Error(reason)
            self._cond.wait(0.5)

    def _close_slot(self, slot: Slot) -> None:
        """Under the lock: the sample is whole, or given up."""
        if slot.closed:
            return
        slot.closed = True
        shard = slot.shard
        names = [f"{slot.index}.{p}" for p in slot.parts]
        if slot.dead:
            for name in names:
                info = shard.tensors.pop(name)
                start, end = info["data_offsets"]
                shard.tensors[f"dropped.{shard.dropped}"] = {
                    "dtype": "U8",
                    "shape": [end - start],
                    "data_offsets": [start, end],
                }
                shard.dropped += 1
        else:
            rows = slot.parts["last"].rows if "last" in slot.parts else 0
            crc = {p.name: p.crc for p in slot.parts.values()}
            shard.samples[str(slot.index)] = {"t": slot.length, "r": rows, "crc": crc}
            self.stats.samples += 1
            self.stats.tokens += slot.length
        shard.slots.discard(slot)
        if shard.sealed and not shard.slots:
            self._publisher_queue.put(shard)

    def _publish_loop(self) -> None:
        while True:
            shard = self._publisher_queue.get()
            if shard is None:
                return
            while True:
                try:
                    self._publish(shard)
                    break
                except OSError as err:
                    if err.errno in _FULL and not self._closing:
                        self.stats.paused = f"{self.folder}: the disk is full"
                        time.sleep(0.5)
                        continue
                    self._lose(shard, f"{shard.final.name}: {err.strerror or err}")
                    break
            with self._cond:
                self._open.remove(shard)
                self._cond.notify_all()
            if self._on_published and shard.samples:
                self._on_published([int(k) for k in shard.samples])

    def _publish(self, shard: _Shard) -> None:
        if not shard.samples:
            os.close(shard.fd)
            shard.partial.unlink(missing_ok=True)
            return
        # padding between samples must belong to a tensor: safetensors readers refuse holes
        covered = 0
        for start, end in sorted(tuple(t["data_offsets"]) for t in shard.tensors.values()):
            if start > covered:
                shard.tensors[f"dropped.{shard.dropped}"] = {
                    "dtype": "U8",
                    "shape": [start - covered],
                    "data_offsets": [covered, start],
                }
                shard.dropped += 1
            covered = end
        meta = {
            "format": layout.FORMAT,
            "writer": self.writer,
            "boundaries": json.dumps(list(self.manifest.boundaries)),
            "samples": json.dumps(shard.samples, separators=(",", ":")),
        }
        ordered = dict(sorted(shard.tensors.items(), key=lambda kv: kv[1]["data_offsets"][0]))
        raw = json.dumps({"__metadata__": meta, **ordered}, separators=(",", ":")).encode()
        room = shard.base - 8
        if len(raw) > room:
            raise OSError(errno.EFBIG, f"header of {len(raw)} bytes, {room} reserved")
        head = struct.pack("<Q", room) + raw + b" " * (room - len(raw))
        os.pwrite(shard.fd, head, 0)
        os.ftruncate(shard.fd, shard.base + shard.end)
        os.fsync(shard.fd)
        os.rename(shard.partial, shard.final)
        os.close(shard.fd)
        with contextlib.suppress(OSError):
            dir_fd = os.open(self.folder, os.O_RDONLY)
            try:
                os.fsync(dir_fd)
            finally:
                os.close(dir_fd)
        with self._cond:
            self.stats.published += len(shard.samples)
            self.stats.shards += 1

    def _lose(self, shard: _Shard, reason: str) -> None:
        """A shard that could not be published: its samples must be asked for again."""
        with self._cond:
            self.stats.last_error = reason
            for key in shard.samples:
                self.reasons[int(key)] = reason
            self.stats.dropped += len(shard.samples)
            self.stats.samples -= len(shard.samples)
            shard.samples = {}
        with contextlib.suppress(OSError):
            os.close(shard.fd)
        with contextlib.suppress(OSError):
            shard.partial.unlink()


def write_sample(
    writer: StatesWriter,
    index: int,
    input_ids: np.ndarray,
    loss_mask: np.ndarray,
    aux: np.ndarray,
    last: np.ndarray | None,
) -> None:
    """One whole sample from arrays: aux [T, B*H] and last [T, H] as uint16 bit patterns of bf16. For small engines and tests."""
    if writer.manifest.dtype != "bf16":
        raise K2Error("write_sample takes bf16 only")
    slot = writer.begin(index, len(input_ids), np.asarray(loss_mask))
    put_rows(
        writer,
        slot,
        0,
        np.asarray(input_ids, dtype=np.int32),
        {"aux": aux, **({} if last is None else {"last": last})},
    )


def put_rows(
    writer: StatesWriter,
    slot: Slot,
    row: int,
    input_ids: np.ndarray,
    features: dict[str, np.ndarray],
    patience_s: float | None = 20.0,
) -> bool:
    """Rows [row, row + n) of one sample: input_ids int32 [n]; features aux (and last, scales), n rows each, all of them.

    Rows of `last` that the manifest does not keep are left out here. False when the sample was given up.
    """
    count = len(input_ids)
    ok = writer.put(
        slot, "input_ids", row, np.ascontiguousarray(input_ids, dtype=np.int32), patience_s=patience_s
    )
    for name, values in features.items():
        if name not in slot.parts or not ok:
            continue
        at = row
        if name.startswith("last") and slot.last_need is not None:
            at = int(slot.last_need[:row].sum())
            values = values[slot.last_need[row : row + count]]
        if len(values):
            ok = writer.put(
                slot, name, at, np.ascontiguousarray(values).view(np.uint8), patience_s=patience_s
            )
    return ok


def prepare_folder(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, or check it against the one that is there. Raises K2Error when they do not agree."""
    from k2tui.files import write_json

    path = folder / layout.MANIFEST
    if path.exists():
        known = layout.read_manifest(folder)
        there = known.identity()
        want = manifest.identity()
        differing = [
            k for k in want if there[k] != want[k] and there[k] not in ("", 0) and want[k] not in ("", 0)
        ]
        if differing:
            told = "; ".join(f"{k}: there {there[k]}, now {want[k]}" for k in differing)
            raise K2Error(
                f"{path}: states of another kind are in this folder ({told})",
                "use a new folder for these states",
            )
        if manifest.data_rows and manifest.data_rows != known.data_rows:  # the data file has grown
            grown = replace(
                known,
                data_path=manifest.data_path,
                data_rows=manifest.data_rows,
                data_sha256=manifest.data_sha256,
            )
            write_json(path, grown.to_json(), mode=0o644)
        return
    write_json(path, manifest.to_json(), mode=0o644)


def remove_stale(folder: Path) -> int:
    """Delete partial shards whose writer is dead (its lock is free). Returns how many."""
    count = 0
    for path in folder.glob(f".{layout.SHARD_PREFIX}*{layout.PARTIAL_SUFFIX}"):
        try:
            fd = os.open(path, os.O_RDWR)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            count += 1
        except OSError:
            pass  # alive
        finally:
            os.close(fd)
    return count


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    count = ITEM_B[dtype]
    for n in shape:
        count *= n
    return count
