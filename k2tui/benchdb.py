"""The store of benchmark runs: one SQLite file (WAL), many readers, one writer a run. Knows no server and no screen.

Laws: a request is in the file at most about a second after it finished, so a killed run keeps what it measured and shows
as partial; metric names carry the version of their definition; a run with flags never becomes a baseline; quantiles of
pooled runs are computed from requests, never averaged.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sqlite3
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import sub
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k2tui import paths
from k2tui.core.bench import BenchRow
from k2tui.errors import K2Error, UsageError

if TYPE_CHECKING:  # a list of runs is answered without them
    from k2tui.core.bench_record import Metric, RequestRecord, Slo

SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS server(id INTEGER PRIMARY KEY, fp TEXT UNIQUE, engine TEXT, version TEXT, git TEXT, model TEXT,
  quant TEXT, tp INT, dp INT, pp INT, ep INT, args TEXT, env TEXT, gpu TEXT, host TEXT, kernel TEXT);
CREATE TABLE IF NOT EXISTS workload(id INTEGER PRIMARY KEY, fp TEXT UNIQUE, kind TEXT, title TEXT, params TEXT,
  prompts_sha TEXT, tokenizer_sha TEXT, api TEXT, stream INT, sampling TEXT, ignore_eos INT, in_tok_mean REAL,
  out_tok_asked REAL);
CREATE TABLE IF NOT EXISTS run(id TEXT PRIMARY KEY, state TEXT, writer TEXT, sweep TEXT, repeat INT, server_id INT,
  workload_id INT, seed INT, shape TEXT, concurrency INT, rate REAL, burst REAL, warmup TEXT, started_s REAL, dur_s REAL,
  engine TEXT, flags TEXT, label TEXT, tag TEXT, is_baseline INT DEFAULT 0, imported TEXT, slo TEXT, job_id TEXT,
  host TEXT, num_requests INT, raw TEXT);
CREATE TABLE IF NOT EXISTS metric(run_id TEXT, name TEXT, stat TEXT, value REAL, lo REAL, hi REAL, n INT, unit TEXT,
  PRIMARY KEY(run_id, name, stat)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS request(run_id TEXT, i INT, t_sched INT, t_send INT, t_first INT, t_last INT, t_done INT,
  in_tok INT, out_tok INT, asked INT, cached INT, verify INT, correct INT, proposed INT, hist TEXT, finish TEXT, http INT,
  err TEXT, err_text TEXT, count TEXT, spread TEXT, coalesced INT, session INT, turn INT, short INT, stamps BLOB,
  tokens BLOB, PRIMARY KEY(run_id, i)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sample(run_id TEXT, t_ms INT, running INT, queued INT, gen_tps REAL, kv REAL, accept REAL,
  lag_us INT, gpu TEXT);
CREATE TABLE IF NOT EXISTS noise(host TEXT, workload_fp TEXT, metric TEXT, value REAL, at_s REAL, n INT,
  PRIMARY KEY(host, workload_fp, metric)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS run_wl ON run(workload_id, concurrency, shape);
CREATE INDEX IF NOT EXISTS run_started ON run(started_s);
CREATE INDEX IF NOT EXISTS sample_run ON sample(run_id);
"""

RESERVED = ("last", "newest")  # words that mean the newest run
_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


def new_id(at_s: float) -> str:
    """A ULID: 26 characters that sort by time."""
    value = (int(at_s * 1000) << 80) | int.from_bytes(os.urandom(10))
    return "".join(_CROCKFORD[(value >> shift) & 31] for shift in range(125, -1, -5))


@dataclass(frozen=True)
class RunInfo:
    """What is known before a run starts. server: columns of the server table; workload: of the workload table."""

    label: str = ""
    tag: str = ""
    sweep: str = ""
    repeat: int = 0
    seed: int = 0
    shape: str = "closed"
    concurrency: int | None = None
    rate: float | None = None
    burst: float | None = None
    num_requests: int = 0
    server: Mapping[str, Any] = field(default_factory=dict[str, Any])
    workload: Mapping[str, Any] = field(default_factory=dict[str, Any])
    slo: Slo | None = None
    warmup: Mapping[str, Any] = field(default_factory=dict[str, Any])
    job_id: str = ""


def _writer_mark() -> str:
    return f"{os.getpid()}:{_birth(os.getpid())}:{_boot_id()}"


def _birth(pid: int) -> str:
    """Birth time of a process in ticks since boot; "" where /proc is absent (then the pid alone decides)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
    except OSError:
        return ""


def _where(**columns: str) -> tuple[str, list[Any]]:
    """A condition on the runs, and its values; an empty text asks for nothing."""
    asked = {k: v for k, v in columns.items() if v}
    return " AND ".join(["1", *(f"r.{k}=?" for k in asked)]), list(asked.values())


def _is_alive(mark: str) -> bool:
    """Whether the process that wrote this mark still runs (on this boot)."""
    pid, _, rest = mark.partition(":")
    birth, _, boot = rest.partition(":")
    if not pid.isdigit() or boot != _boot_id():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return _birth(int(pid)) == birth


def _pack(stamps: array[int]) -> bytes:
    """Stamps as zlib of first value and gaps; 4-byte gaps when they fit."""
    if not stamps:
        return b""
    gaps = [stamps[0], *map(sub, stamps[1:], stamps)]
    if max(gaps) < 1 << 32:
        return b"I" + zlib.compress(array("I", gaps).tobytes(), 1)
    return b"Q" + zlib.compress(array("Q", gaps).tobytes(), 1)


def _unpack(blob: bytes) -> array[int]:
    out: array[int] = array("q")
    if not blob:
        return out
    gaps = array("I" if blob[:1] == b"I" else "Q")
    gaps.frombytes(zlib.decompress(blob[1:]))
    at = 0
    for g in gaps:
        at += g
        out.append(at)
    return out


def _pack_tokens(tokens: array[int]) -> bytes:
    if not tokens:
        return b""
    if tokens.count(1) == len(tokens):
        return b"1" + len(tokens).to_bytes(4, "little")
    return b"i" + zlib.compress(tokens.tobytes(), 1)


def _unpack_tokens(blob: bytes) -> array[int]:
    if not blob:
        return array("i")
    if blob[:1] == b"1":
        return array("i", [1]) * int.from_bytes(blob[1:5], "little")
    out: array[int] = array("i")
    out.frombytes(zlib.decompress(blob[1:]))
    return out


_REQUEST_COLUMNS = (
    "run_id, i, t_sched, t_send, t_first, t_last, t_done, in_tok, out_tok, asked, cached, verify, correct, proposed, hist, "
    "finish, http, err, err_text, count, spread, coalesced, session, turn, short, stamps, tokens"
)


def _request_row(run_id: str, r: RequestRecord) -> tuple[Any, ...]:
    hist = ",".join(map(str, r.spec_histogram)) if r.spec_histogram else None
    return (
        run_id, r.index, r.t_sched_ns, r.t_send_ns, r.t_first_ns, r.t_last_ns, r.t_done_ns, r.prompt_tokens,
        r.output_tokens, r.asked_tokens, r.cached_tokens, r.spec_verify_ct, r.spec_num_correct_drafts,
        r.spec_num_proposed_drafts, hist, r.finish, r.http_status, r.error, r.error_text, r.count, r.spread, r.coalesced,
        r.session, r.turn, int(r.is_short), _pack(r.stamps_ns), _pack_tokens(r.tokens),
    )  # fmt: skip


def _record(row: sqlite3.Row) -> RequestRecord:
    from k2tui.core.bench_record import RequestRecord

    return RequestRecord(
        index=row["i"], t_sched_ns=row["t_sched"], t_send_ns=row["t_send"], t_first_ns=row["t_first"],
        t_last_ns=row["t_last"], t_done_ns=row["t_done"], prompt_tokens=row["in_tok"], output_tokens=row["out_tok"],
        asked_tokens=row["asked"], stamps_ns=_unpack(row["stamps"]), tokens=_unpack_tokens(row["tokens"]),
        cached_tokens=row["cached"], spec_verify_ct=row["verify"], spec_num_correct_drafts=row["correct"],
        spec_num_proposed_drafts=row["proposed"],
        spec_histogram=tuple(int(x) for x in row["hist"].split(",")) if row["hist"] else (),
        finish=row["finish"], http_status=row["http"], error=row["err"], error_text=row["err_text"], count=row["count"],
        spread=row["spread"], coalesced=row["coalesced"], session=row["session"], turn=row["turn"],
        is_short=bool(row["short"]),
    )  # fmt: skip


def _is_full(path: Path) -> bool:
    """Whether the disk has no room for SQLite's shared index (32 KiB): it then tells of a disk that failed."""
    try:
        facts = os.statvfs(path.parent)
    except OSError:
        return False
    return facts.f_bavail * facts.f_frsize < 32768


def _connect(path: Path, more: str = "") -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?{more}" if more else str(path)
    db = sqlite3.connect(uri, timeout=10, isolation_level=None, check_same_thread=False, uri=bool(more))
    db.row_factory = sqlite3.Row
    return db


def _connect_to_read(path: Path) -> sqlite3.Connection:
    """A connection for reading. Where the disk is full or read-only SQLite cannot make the index that readers share:
    a store that nobody has open (no write-ahead log) is then read as it lies."""
    db = _connect(path)
    try:
        db.execute("PRAGMA user_version").fetchone()
    except sqlite3.OperationalError as err:
        db.close()
        log = path.with_name(path.name + "-wal")
        if not any(w in str(err) for w in ("disk I/O", "unable to open", "readonly")):
            raise
        try:
            if log.exists() and log.stat().st_size:
                raise
        except OSError:
            raise err from None
        return _connect(path, "immutable=1")
    return db


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """SQLite's errors in words for people."""
    try:
        yield
    except sqlite3.Error as err:
        text = str(err)
        if "full" in text or (("disk I/O" in text or "unable to open" in text) and _is_full(path)):
            raise K2Error(
                f"{path}: no space left: the disk is full", "free some space; what was stored before is safe"
            ) from None
        if "locked" in text:
            raise K2Error(
                f"{path}: another process holds the store for too long", "try again in a moment"
            ) from None
        if "not a database" in text or "malformed" in text:
            raise K2Error(
                f"{path} is no k2tui store or is damaged ({text})", "move it away; a new one is made"
            ) from None
        if "disk I/O" in text:
            raise K2Error(
                f"{path}: the disk failed to read or write ({text})", "check the disk, or give --db PATH"
            ) from None
        if "readonly" in text or "unable to open" in text:
            raise K2Error(
                f"{path} cannot be opened ({text})", "check the folder's permissions, or give --db PATH"
            ) from None
        raise K2Error(f"{path}: {text}") from None


class BenchDb:
    """One connection to the store. readonly: never creates or changes the file; a missing file reads as empty."""

    def __init__(self, path: Path | None = None, *, readonly: bool = False) -> None:
        self.path = path or paths.bench_db()
        self.readonly = readonly
        self._db: sqlite3.Connection | None = None
        self._open()

    def _open(self) -> None:
        """Connect if there is something to connect to; a reader tries again until there is."""
        try:
            is_there, is_folder = self.path.exists(), self.path.is_dir()
        except OSError as err:  # no permission on the folder, a broken disk
            raise K2Error(
                f"{self.path} cannot be read: {err.strerror or err}",
                "check the folder's permissions, or give --db PATH",
            ) from None
        if self.readonly and not is_there:
            return
        with _told(self.path):
            if not self.readonly and str(self.path) != ":memory:":
                try:
                    paths.ensure_dir(self.path.parent)
                except OSError as err:
                    raise K2Error(
                        f"cannot make the folder {self.path.parent}: {err.strerror}",
                        "check its permissions, or give --db PATH",
                    ) from None
            if is_folder:
                raise K2Error(f"{self.path} is a folder, not a store", "give a file with --db")
            db = _connect_to_read(self.path) if self.readonly else _connect(self.path)
            try:
                version: int = db.execute("PRAGMA user_version").fetchone()[0]
                if version > SCHEMA_VERSION:
                    raise K2Error(
                        f"{self.path} was written by a newer k2tui (schema {version}, this one knows {SCHEMA_VERSION})",
                        "update k2tui, or give another file with --db",
                    )
                if self.readonly and version == 0:
                    db.close()  # a writer is about to make the tables
                    return
                if not self.readonly:
                    db.execute("PRAGMA journal_mode=WAL")
                    db.execute("PRAGMA synchronous=NORMAL")
                    if version < SCHEMA_VERSION:
                        db.executescript(
                            f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;"
                        )
                        with contextlib.suppress(OSError):
                            os.chmod(self.path, 0o600)
            except BaseException:
                db.close()
                raise
            self._db = db

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    def __enter__(self) -> BenchDb:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _query(self, sql: str, args: Sequence[Any] = ()) -> list[sqlite3.Row]:
        if self._db is None:
            self._open()
        if self._db is None:
            return []
        with _told(self.path):
            return self._db.execute(sql, args).fetchall()

    def _write(self, sql: str, args: Sequence[Any] = ()) -> int:
        if self._db is None or self.readonly:
            raise K2Error(f"{self.path} is open for reading only")
        with _told(self.path):
            return self._db.execute(sql, args).rowcount

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        if self._db is None or self.readonly:
            raise K2Error(f"{self.path} is open for reading only")
        with _told(self.path):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def data_version(self) -> int:
        """Changes when another connection committed: one cheap pragma instead of a query."""
        found = self._query("PRAGMA data_version")
        return int(found[0][0]) if found else -1

    # writing

    def begin(self, info: RunInfo, started_s: float) -> RunWriter:
        """Start a run; its row exists from now on."""
        run_id = new_id(started_s)
        with self.transaction():
            server_id = self._intern("server", info.server)
            workload_id = self._intern("workload", info.workload)
            self._write(
                "INSERT INTO run(id, state, writer, sweep, repeat, server_id, workload_id, seed, shape, concurrency, rate, "
                "burst, warmup, started_s, label, tag, slo, job_id, host, num_requests, flags, imported) "
                "VALUES(?,'running',?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,'[]','')",
                (
                    run_id, _writer_mark(), info.sweep, info.repeat, server_id, workload_id, info.seed, info.shape,
                    info.concurrency, info.rate, info.burst, json.dumps(dict(info.warmup)), started_s, info.label,
                    info.tag, _slo_json(info.slo), info.job_id, platform.node(), info.num_requests,
                ),
            )  # fmt: skip
        return RunWriter(self, run_id, info)

    def _intern(self, table: str, values: Mapping[str, Any]) -> int | None:
        """Id of the row with this fingerprint, made when new. Unknown keys are left out."""
        if not values.get("fp"):
            return None
        found = self._query(f"SELECT id FROM {table} WHERE fp=?", (values["fp"],))
        if found:
            return int(found[0][0])
        known = {r["name"] for r in self._query(f"PRAGMA table_info({table})")} - {"id"}
        row = {
            k: json.dumps(v) if isinstance(v, dict | list | tuple) else v
            for k, v in values.items()
            if k in known
        }
        names = ", ".join(row)
        self._write(f"INSERT INTO {table}({names}) VALUES({','.join('?' * len(row))})", tuple(row.values()))
        return int(self._query("SELECT last_insert_rowid()")[0][0])

    def put_requests(self, run_id: str, records: Iterable[RequestRecord]) -> None:
        if self._db is None:
            return
        rows = [_request_row(run_id, r) for r in records]
        marks = ",".join("?" * 27)
        with self.transaction():
            self._db.executemany(f"INSERT OR REPLACE INTO request({_REQUEST_COLUMNS}) VALUES({marks})", rows)

    def put_metrics(self, run_id: str, metrics: Iterable[Metric]) -> None:
        if self._db is None:
            return
        self._db.executemany(
            "INSERT OR REPLACE INTO metric VALUES(?,?,?,?,?,?,?,?)",
            [(run_id, m.name, m.stat, m.value, m.lo, m.hi, m.n, m.unit) for m in metrics],
        )

    def put_samples(self, run_id: str, samples: Iterable[Mapping[str, Any]]) -> None:
        """Curves beside a run: dicts with t_ms and any of running, queued, gen_tps, kv, accept, lag_us, gpu."""
        if self._db is None:
            return
        names = ("t_ms", "running", "queued", "gen_tps", "kv", "accept", "lag_us", "gpu")
        with self.transaction():
            self._db.executemany(
                "INSERT INTO sample VALUES(?,?,?,?,?,?,?,?,?)",
                [
                    (
                        run_id,
                        *(json.dumps(s[k]) if isinstance(s.get(k), dict | list) else s.get(k) for k in names),
                    )
                    for s in samples
                ],
            )

    def finish(
        self,
        run_id: str,
        metrics: Sequence[Metric],
        *,
        state: str = "done",
        dur_s: float | None = None,
        engine: Mapping[str, Any] | None = None,
        flags: Sequence[str] = (),
    ) -> None:
        """Close a run with its figures. state: done | partial."""
        with self.transaction():
            self._write("DELETE FROM metric WHERE run_id=?", (run_id,))
            self.put_metrics(run_id, metrics)
            self._write(
                "UPDATE run SET state=?, dur_s=?, engine=?, flags=? WHERE id=?",
                (state, dur_s, json.dumps(dict(engine or {})), json.dumps(list(flags)), run_id),
            )

    def recover(self) -> int:
        """Turn runs whose writer died into partial ones with the figures of what was measured; returns how many."""
        dead = [
            r
            for r in self._query("SELECT * FROM run WHERE state='running'")
            if not _is_alive(r["writer"] or "")
        ]
        for row in dead:
            records = self.records(row["id"])
            from k2tui.core.bench_record import summarize

            metrics = summarize(records, concurrency=row["concurrency"], slo=_slo(row["slo"]))
            duration = next((m.value for m in metrics if m.name.startswith("duration.")), None)
            flags = [f"interrupted: {len(records)} of {row['num_requests']} requests"]
            self.finish(
                row["id"], metrics, state="partial", dur_s=duration, engine=_loads(row["engine"]), flags=flags
            )
        return len(dead)

    def set_label(self, run_id: str, label: str | None = None, tag: str | None = None) -> None:
        run_id = self.resolve(run_id)
        if label in RESERVED:
            raise UsageError(
                f"{label!r} always means the newest run: it cannot be a label", "choose another word"
            )
        if label is not None:
            self._write("UPDATE run SET label=? WHERE id=?", (label, run_id))
        if tag is not None:
            self._write("UPDATE run SET tag=? WHERE id=?", (tag, run_id))

    def set_baseline(self, run_id: str, on: bool = True) -> list[str]:
        """Make a run (with the other points of its sweep) the baseline of its workload; returns the ids.

        Raises K2Error when the run has flags: a doubtful run is no measure for others.
        """
        run_id = self.resolve(run_id)
        row = self.row(run_id)
        assert row is not None
        if on and not row.is_valid:
            why = "; ".join(row.flags) or "the run is partial"
            raise K2Error(f"run {run_id} cannot be a baseline: {why}", "measure again in a quiet moment")
        with self.transaction():
            if on:
                self._write(
                    "UPDATE run SET is_baseline=0 WHERE workload_id IS (SELECT workload_id FROM run WHERE id=?)",
                    (run_id,),
                )
            ids = [run_id]
            if row.sweep:
                points = self._query(
                    "SELECT id, flags, state FROM run WHERE sweep=? AND label=?", (row.sweep, row.label)
                )
                ids = [
                    str(r["id"])
                    for r in points
                    if not on or (r["state"] == "done" and not _loads_list(r["flags"]))
                ]
            for one in ids:
                self._write("UPDATE run SET is_baseline=? WHERE id=?", (int(on), one))
        return ids

    def delete(self, run_id: str) -> None:
        run_id = self.resolve(run_id)
        with self.transaction():
            for table, column in (
                ("run", "id"),
                ("metric", "run_id"),
                ("request", "run_id"),
                ("sample", "run_id"),
            ):
                self._write(f"DELETE FROM {table} WHERE {column}=?", (run_id,))

    def add_imported(
        self,
        info: RunInfo,
        metrics: Sequence[Metric],
        *,
        started_s: float,
        imported: str,
        flags: Sequence[str] = (),
        raw: str = "",
        engine: Mapping[str, Any] | None = None,
        dur_s: float | None = None,
        records: Sequence[RequestRecord] = (),
    ) -> str:
        """Store figures that another tool (or a person) made."""
        run_id = new_id(started_s)
        with self.transaction():
            server_id = self._intern("server", info.server)
            workload_id = self._intern("workload", info.workload)
            self._write(
                "INSERT INTO run(id, state, writer, sweep, repeat, server_id, workload_id, seed, shape, concurrency, rate, "
                "burst, started_s, dur_s, label, tag, slo, host, num_requests, engine, flags, imported, raw, job_id) "
                "VALUES(?,'done','',?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,'')",
                (
                    run_id, info.sweep, info.repeat, server_id, workload_id, info.seed, info.shape, info.concurrency,
                    info.rate, info.burst, started_s, dur_s, info.label, info.tag, _slo_json(info.slo), "",
                    info.num_requests, json.dumps(dict(engine or {})), json.dumps(list(flags)), imported, raw,
                ),
            )  # fmt: skip
            self.put_metrics(run_id, metrics)
        if records:
            self.put_requests(run_id, records)
        return run_id

    def set_noise(self, host: str, workload_fp: str, metric: str, value: float, at_s: float, n: int) -> None:
        """Store the A/A noise floor (relative half width) of one metric on one host."""
        self._write(
            "INSERT OR REPLACE INTO noise VALUES(?,?,?,?,?,?)", (host, workload_fp, metric, value, at_s, n)
        )

    def noise(self, host: str, workload_fp: str, metric: str) -> tuple[float, int] | None:
        """(the floor of set_noise, the pairs it is of)."""
        found = self._query(
            "SELECT value, n FROM noise WHERE host=? AND workload_fp=? AND metric=?", (host, workload_fp, metric)
        )
        return (float(found[0][0]), int(found[0][1])) if found else None

    # reading

    def resolve(self, text: str) -> str:
        """Full id from an id, its unique end or start (>= 4 characters), "last", or a label (its newest run). Raises UsageError."""
        if not text.strip():  # a script's unset variable must never mean some run
            raise UsageError("an empty text names no benchmark run", "k2tui bench list shows them")
        if text in RESERVED:
            found = self._query("SELECT id FROM run WHERE state<>'running' ORDER BY started_s DESC LIMIT 1")
        else:
            found = self._query("SELECT id FROM run WHERE id=?", (text,))
            if not found and len(text) >= 4:
                up = text.upper()
                found = self._query(
                    "SELECT id FROM run WHERE id LIKE ? OR id LIKE ? LIMIT 3", (f"{up}%", f"%{up}")
                )
            if not found:
                found = self._query(
                    "SELECT id FROM run WHERE label=? ORDER BY started_s DESC LIMIT 1", (text,)
                )
        if not found:
            raise UsageError(f"no benchmark run {text!r} in {self.path}", "k2tui bench list shows them")
        if len(found) > 1:
            raise UsageError(
                f"{text!r} names more than one run: {', '.join(r['id'] for r in found)}",
                "give more of the id",
            )
        return str(found[0]["id"])

    def rows(
        self,
        limit: int = 200,
        *,
        sweep: str = "",
        label: str = "",
        tag: str = "",
        include_running: bool = False,
    ) -> list[BenchRow]:
        """Newest first. A run that is still being measured is left out; one whose writer died is there, partial."""
        where, args = _where(sweep=sweep, label=label, tag=tag)
        return self._rows(where, args, limit, include_running)

    def count(self, *, label: str = "", tag: str = "") -> int:
        """How many rows there are without a limit."""
        where, args = _where(label=label, tag=tag)
        found = self._query(f"SELECT r.state, r.writer FROM run r WHERE {where}", args)
        return sum(r["state"] != "running" or not _is_alive(r["writer"] or "") for r in found)

    def row(self, run_id: str) -> BenchRow | None:
        found = self._rows("r.id=?", [run_id], 1, True)
        return found[0] if found else None

    def _rows(self, where: str, args: Sequence[Any], limit: int, include_running: bool) -> list[BenchRow]:
        runs = self._query(
            "SELECT r.*, s.engine AS s_engine, s.version AS s_version, s.model AS s_model, s.tp AS s_tp, s.fp AS s_fp, "
            "w.title AS w_title, w.fp AS w_fp, w.api AS w_api FROM run r LEFT JOIN server s ON s.id=r.server_id "
            f"LEFT JOIN workload w ON w.id=r.workload_id WHERE {where} ORDER BY r.started_s DESC, r.id DESC LIMIT ?",
            (*args, limit),
        )
        if not runs:
            return []
        figures: dict[str, dict[tuple[str, str], float]] = {}
        intervals: dict[str, dict[tuple[str, str], tuple[float, float]]] = {}
        ids = [r["id"] for r in runs]
        for i in range(0, len(ids), 500):
            part = ids[i : i + 500]
            marks = ",".join("?" * len(part))
            for m in self._query(f"SELECT * FROM metric WHERE run_id IN ({marks})", part):
                key = (m["name"].rpartition(".")[0], m["stat"])
                figures.setdefault(m["run_id"], {})[key] = m["value"]
                if m["lo"] is not None and m["hi"] is not None:
                    intervals.setdefault(m["run_id"], {})[key] = (m["lo"], m["hi"])
        out: list[BenchRow] = []
        for run in runs:
            values = figures.get(run["id"], {})
            if run["state"] == "running":
                dead = not _is_alive(run["writer"] or "")
                if not dead and not include_running:
                    continue
                from k2tui.core.bench_record import summarize

                found = summarize(
                    self.records(run["id"]), concurrency=run["concurrency"], slo=_slo(run["slo"])
                )
                values = {(m.name.rpartition(".")[0], m.stat): m.value for m in found}
            out.append(_row(run, values, intervals.get(run["id"], {})))
        return out

    def metrics(self, run_id: str) -> list[Metric]:
        from k2tui.core.bench_record import Metric

        return [
            Metric(m["name"], m["stat"], m["value"], m["unit"], m["lo"], m["hi"], m["n"])
            for m in self._query("SELECT * FROM metric WHERE run_id=? ORDER BY name, stat", (run_id,))
        ]

    def records(self, run_id: str) -> list[RequestRecord]:
        return [_record(r) for r in self._query("SELECT * FROM request WHERE run_id=? ORDER BY i", (run_id,))]

    def samples(self, run_id: str) -> list[dict[str, Any]]:
        return [dict(r) for r in self._query("SELECT * FROM sample WHERE run_id=? ORDER BY t_ms", (run_id,))]

    def details(self, run_id: str) -> dict[str, Any]:
        """Everything of one run that is no figure: server, workload, engine facts, as plain values."""
        found = self._query("SELECT * FROM run WHERE id=?", (run_id,))
        if not found:
            raise UsageError(f"no benchmark run {run_id!r}")
        run = dict(found[0])
        out: dict[str, Any] = {
            "run": {**run, "engine": _loads(run["engine"]), "flags": _loads_list(run["flags"])}
        }
        for table, key in (("server", "server_id"), ("workload", "workload_id")):
            rows = self._query(f"SELECT * FROM {table} WHERE id=?", (run[key],))
            out[table] = {k: _loads(v) if k in ("args", "env", "gpu", "params", "sampling") else v
                          for k, v in dict(rows[0]).items()} if rows else {}  # fmt: skip
        return out


def _loads(text: str | None) -> dict[str, Any]:
    try:
        value: Any = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _loads_list(text: str | None) -> list[str]:
    try:
        value: Any = json.loads(text or "[]")
    except (ValueError, RecursionError):
        return []
    return [str(v) for v in value] if isinstance(value, list) else []


def _slo_json(slo: Slo | None) -> str:
    if slo is None:
        return ""
    return json.dumps(
        {"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms, "e2e_ms": slo.e2e_ms, "name": slo.name}
    )


def _slo(text: str | None) -> Slo | None:
    value = _loads(text)
    if not value:
        return None
    from k2tui.core.bench_record import Slo

    return Slo(value.get("ttft_ms"), value.get("tpot_ms"), value.get("e2e_ms"), value.get("name", ""))


def _row(
    run: sqlite3.Row,
    values: Mapping[tuple[str, str], float],
    intervals: Mapping[tuple[str, str], tuple[float, float]],
) -> BenchRow:
    def v(name: str, stat: str = "value") -> float | None:
        return values.get((name, stat))

    engine = _loads(run["engine"])
    completed = int(v("completed") or 0)
    requests = int(v("requests") or run["num_requests"] or 0)
    errors = sum(int(n) for (name, _), n in values.items() if name == "errors")
    flags = tuple(_loads_list(run["flags"]))
    partial = run["state"] != "done"
    if run["state"] == "running":
        flags = (*flags, f"interrupted: {requests} of {run['num_requests']} requests")
    out_tokens, in_tokens = v("output_tokens"), v("input_tokens")
    slo = _slo(run["slo"])
    return BenchRow(
        run_id=run["id"],
        started_s=run["started_s"],
        label=run["label"] or "",
        engine=run["s_engine"] or "",
        version=run["s_version"] or "",
        model=run["s_model"] or "",
        workload=run["w_title"] or "",
        concurrency=run["concurrency"],
        request_rate=run["rate"],
        num_requests=max(requests, run["num_requests"] or 0),
        completed=completed,
        errors=errors,
        duration_s=v("duration") or run["dur_s"],
        output_throughput=v("output_throughput"),
        tok_s_user=v("tok_s_user"),
        ttft_p50_ms=v("ttft", "p50"),
        ttft_p99_ms=v("ttft", "p99"),
        tpot_p50_ms=v("tpot", "p50"),
        tpot_p99_ms=v("tpot", "p99"),
        itl_p50_ms=v("itl", "p50"),
        itl_p99_ms=v("itl", "p99"),
        e2e_p50_ms=v("e2e", "p50"),
        e2e_p99_ms=v("e2e", "p99"),
        request_throughput=v("request_throughput"),
        accept_length=v("accept_length"),
        is_baseline=bool(run["is_baseline"]),
        is_partial=partial,
        imported_from=run["imported"] or "",
        flags=flags,
        job_id=run["job_id"] or "",
        sweep=run["sweep"] or "",
        repeat=run["repeat"] or 0,
        tag=run["tag"] or "",
        api=run["w_api"] or "",
        load_shape=run["shape"] or "closed",
        workload_fp=run["w_fp"] or "",
        server_fp=run["s_fp"] or "",
        host=run["host"] or "",
        tp_size=run["s_tp"],
        tpot_mean_ms=v("tpot", "mean"),
        itl_mean_ms=v("itl", "mean"),
        icl_p50_ms=v("icl", "p50"),
        icl_p99_ms=v("icl", "p99"),
        icl_max_ms=v("icl", "max"),
        ttft_sched_p99_ms=v("ttft_sched", "p99"),
        tokens_per_chunk=v("tokens_per_chunk"),
        accept_rate=v("accept_rate"),
        cached_fraction=v("cached_fraction"),
        output_throughput_steady=v("output_throughput_steady"),
        total_output_tokens=int(out_tokens) if out_tokens is not None else None,
        total_input_tokens=int(in_tokens) if in_tokens is not None else None,
        goodput=v("goodput"),
        goodput_fraction=v("goodput_fraction"),
        slo=str(slo) if slo else "",
        tokens_per_joule=v("tokens_per_joule"),
        stamps=str(engine.get("stamps") or ""),
        count=str(engine.get("count") or ""),
        lag_p99_ms=engine.get("lag_p99_ms"),
        client_cpu=engine.get("cpu_fraction"),
        coalesced=engine.get("coalesced"),
        host_steal=engine.get("steal"),
        achieved=engine.get("achieved"),
        short_outputs=int(engine.get("short_outputs") or 0),
        output_throughput_ci=intervals.get(("output_throughput", "value")),
        tok_s_user_ci=intervals.get(("tok_s_user", "value")),
        ttft_p50_ci=intervals.get(("ttft", "p50")),
        ttft_p99_ci=intervals.get(("ttft", "p99")),
        tpot_p50_ci=intervals.get(("tpot", "p50")),
        tpot_p99_ci=intervals.get(("tpot", "p99")),
    )


class RunWriter:
    """One run in the making. Requests go to the file about once a second; `finish` must be called at the end."""

    def __init__(self, db: BenchDb, run_id: str, info: RunInfo) -> None:
        self.db, self.run_id, self.info = db, run_id, info
        self.records: list[RequestRecord] = []
        self._stored = 0
        self.problem = ""  # why storing failed; measuring goes on

    def add(self, record: RequestRecord) -> None:
        self.records.append(record)

    def flush(self) -> None:
        """Store what has finished since. A full disk is remembered, not raised: the measurement goes on."""
        fresh = self.records[self._stored :]
        if not fresh:
            return
        try:
            self.db.put_requests(self.run_id, fresh)
        except K2Error as err:
            self.problem = err.message
            return
        self._stored = len(self.records)
        self.problem = ""

    def finish(
        self,
        *,
        state: str = "done",
        engine: Mapping[str, Any] | None = None,
        flags: Sequence[str] = (),
        more: Sequence[Metric] = (),
    ) -> list[Metric]:
        """Compute and store the figures; raises K2Error when they could not be stored."""
        from k2tui.core.bench_record import summarize

        metrics = [*summarize(self.records, concurrency=self.info.concurrency, slo=self.info.slo), *more]
        duration = next((m.value for m in metrics if m.name.startswith("duration.")), None)
        self.flush()
        if self.problem:
            raise K2Error(f"the run was measured but not stored: {self.problem}")
        self.db.finish(self.run_id, metrics, state=state, dur_s=duration, engine=engine, flags=flags)
        return metrics


def given(text: str, *, readonly: bool = True, create: bool = False) -> BenchDb:
    """The store that --db names, "" = the default one. Raises UsageError when a named file is not there (create: made then)."""
    path = Path(text) if text else None
    if path is not None and not create:
        try:
            is_there = path.exists()
        except OSError:
            is_there = True  # BenchDb says why it cannot be read
        if not is_there:
            raise UsageError(
                f"--db {text}: there is no such file", "without --db: the store in k2tui's state folder"
            )
    return BenchDb(path, readonly=readonly)


def rows(limit: int = 200, path: Path | None = None) -> list[BenchRow]:
    """Newest runs first; [] when there is no store yet. Opens and closes the file: for polling keep a `BenchDb`."""
    with BenchDb(path, readonly=True) as db:
        return db.rows(limit)
