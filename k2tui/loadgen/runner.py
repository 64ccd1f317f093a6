"""One benchmark from its options to stored rows: check, warm up, measure each point, print. Knows no screen."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from k2tui.benchdb import BenchDb, RunInfo, new_id
from k2tui.core.bench import BenchRow
from k2tui.core.bench_compare import compare, compare_table, comparison_dict, noise_floor, noise_words
from k2tui.core.bench_record import SLO_PRESETS, Metric, RequestRecord, Slo, summarize
from k2tui.core.bench_sweep import knee_words, sweep_points, sweep_table
from k2tui.core.bench_table import rows_table
from k2tui.core.job_mask import mask_params
from k2tui.core.stats import knee, mean_interval, quantile
from k2tui.core.workload import Prompt, Workload, arrivals, workload_fingerprint
from k2tui.errors import K2Error, UsageError
from k2tui.jobs.loads import Alone
from k2tui.jobs.report import report_progress, report_result
from k2tui.loadgen.control import Control, ServerFacts, api_headers, split_url
from k2tui.loadgen.datasets import Wanted, build
from k2tui.loadgen.dialect import Dialect
from k2tui.loadgen.engine import EpollEngine, Facts, Work
from k2tui.loadgen.gpuwatch import GpuWatch
from k2tui.loadgen.options import bounded_prompts, extra_body, prompt_len
from k2tui.loadgen.stream import Exchange
from k2tui.plain import table_width

USAGE_EACH_MAX = 32  # in flight; above it a running count with every chunk would cost the server
PREBUILT_BYTES = 64 << 20
SETTLE = 16  # finished requests that are stored at a time while streams run: about a millisecond


class Engine(Protocol):
    """What sends: EpollEngine, or the portable one."""

    name: str

    def open(self, n: int) -> bool: ...
    def run(
        self,
        works: Sequence[Work],
        *,
        limit: int | None,
        on_done: Callable[[Exchange], None],
        on_idle: Callable[[int], bool] | None = None,
        stop_after_s: float | None = None,
        started: Callable[[int], None] | None = None,
    ) -> Facts: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Point:
    """One point of load: closed loop (rate None) or open loop (concurrency = cap or None)."""

    concurrency: int | None
    rate: float | None = None
    shape: str = "closed"

    @property
    def title(self) -> str:
        return f"C={self.concurrency}" if self.rate is None else f"{self.rate:g} req/s"


def parse_slo(text: str) -> Slo | None:
    """A preset's name or "ttft:2000,tpot:80,e2e:10000" (ms). Raises UsageError."""
    if not text:
        return None
    if text in SLO_PRESETS:
        return SLO_PRESETS[text]
    limits: dict[str, float] = {}
    for part in text.replace(" ", ",").split(","):
        if not part:
            continue
        key, _, value = part.partition(":")
        key = {"e2el": "e2e"}.get(key, key)
        try:
            limits[key] = float(value)
        except ValueError:
            limits[key] = -1
        if key not in ("ttft", "tpot", "e2e") or not 0 < limits[key] < float("inf"):
            raise UsageError(
                f"--goodput {text!r}: {part!r} is no limit",
                "write ttft:MS,tpot:MS,e2e:MS, or a preset: " + ", ".join(SLO_PRESETS),
            )
    return Slo(limits.get("ttft"), limits.get("tpot"), limits.get("e2e"))


def make_engine(args: argparse.Namespace) -> Engine:
    """epoll with kernel stamps where it can; the portable engine for TLS, proxies and other systems."""
    scheme, host, port, _ = split_url(args.url)
    portable = scheme == "https" or bool(args.proxy) or sys.platform != "linux"
    if args.engine == "epoll" and portable:
        raise UsageError("--engine epoll needs Linux, http:// and no proxy", "leave --engine out")
    if args.engine == "asyncio" or portable:
        from k2tui.loadgen.portable import AsyncioEngine

        return AsyncioEngine(
            host, port, args.api, idle_timeout_s=args.idle_timeout, tls=scheme == "https", proxy=args.proxy,
            insecure=args.insecure, ca_file=args.ca_file,
        )  # fmt: skip
    return EpollEngine(host, port, args.api, idle_timeout_s=args.idle_timeout)


def points_of(args: argparse.Namespace, workload: Workload) -> list[Point]:
    if any(p.due_s is not None for p in workload.prompts):
        return [Point(args.max_concurrency, None, "trace")]
    if args.request_rate:
        return [Point(args.max_concurrency, r, args.arrival) for r in args.request_rate]
    return [Point(c) for c in args.concurrency]


@dataclass
class Bench:
    """Everything one benchmark needs, made once."""

    args: argparse.Namespace
    facts: ServerFacts
    control: Control
    engine: Engine
    db: BenchDb | None
    want: Wanted
    slo: Slo | None
    extra: Mapping[str, Any]
    sweep: str = ""
    alone: Alone | None = None  # None: nobody asks what else loads the host

    def dialect(self, usage_each: bool) -> Dialect:
        _, host, port, prefix = split_url(self.args.url)
        shown = f"[{host}]" if ":" in host else host
        return Dialect(
            api=self.args.api,
            host=f"{shown}:{port}",
            prefix=prefix,
            model=self.args.model or self.facts.model,
            sampling={"temperature": self.args.temperature} if self.args.temperature else {},
            ignore_eos=not self.args.no_ignore_eos,
            usage_each=usage_each,
            spec_details=self.args.api != "generate" and bool(self.facts.speculative_algorithm),
            extra=self.extra,
            headers=api_headers(),
        )


def open_bench(args: argparse.Namespace) -> Bench:
    """Check everything that can be wrong before the first request. Raises K2Error."""
    slo = parse_slo(args.goodput)
    extra = extra_body(args)
    control = Control(args.url)
    control.check()
    facts = control.facts()
    made = not any(
        args.dataset.startswith(f"{kind}:") for kind in ("mooncake", "sharegpt", "tokenized", "jsonl")
    )
    if made and facts.context_length and prompt_len(args) > facts.context_length:
        raise UsageError(
            f"prompts of {prompt_len(args)} tokens do not fit: {control.url} takes at most {facts.context_length}",
            "a smaller --random-input-len, or a server with a longer context",
        )
    size = args.vocab_size or facts.vocab_size
    vocab = (min(16, max((size or 1000) // 10, 1)), max(int((size or 1000) * 0.9), 2))
    want = Wanted(
        dataset=args.dataset, api=args.api, num_prompts=bounded_prompts(args), random_input_len=args.random_input_len,
        random_output_len=args.random_output_len, random_range_ratio=args.random_range_ratio, output_len=args.output_len,
        prefix_len=args.prefix_len, prefix_groups=args.prefix_groups, zipf=args.zipf, turns=args.turns,
        trace_speed=args.trace_speed, vocab=vocab,
    )  # fmt: skip
    build(replace(want, num_prompts=1), args.seed)  # a bad file is told before anything is sent
    db = None if args.no_store else BenchDb(Path(args.db) if args.db else None)
    if db is not None:
        db.recover()
    return Bench(args, facts, control, make_engine(args), db, want, slo, extra, sweep=new_id(time.time()))


def make_works(
    bench: Bench, workload: Workload, dialect: Dialect, dues: Sequence[float] | None
) -> list[Work]:
    """Works in sending order; requests are built beforehand while they are small enough together."""
    works: list[Work] = []
    total = 0
    for i, prompt in enumerate(workload.prompts):
        due = prompt.due_s if prompt.due_s is not None else (dues[i] if dues is not None else None)

        def make(p: Prompt = prompt) -> bytes:
            return dialect.request(dialect.body(p))

        payload: bytes | Callable[[], bytes] = make
        if total < PREBUILT_BYTES:
            payload = make()
            total += len(payload)
        work = Work(
            index=i,
            payload=payload,
            asked=prompt.output_len,
            due_ns=-1 if due is None else int(due * 1e9),
            ignore_eos=dialect.ignore_eos,
            session=i if prompt.turns else -1,
        )
        if prompt.turns:
            work.follow = _Session(bench, dialect, prompt, i).next
        works.append(work)
    return works


class _Session:
    """A talk: the server's answers become part of the next prompt."""

    def __init__(self, bench: Bench, dialect: Dialect, prompt: Prompt, index: int) -> None:
        self.bench, self.dialect, self.prompt, self.index = bench, dialect, prompt, index
        self.turn = 0
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": prompt.text}]

    def next(self, done: Exchange) -> Work | None:
        if self.turn >= len(self.prompt.turns):
            return None
        said = self.prompt.turns[self.turn]
        self.turn += 1
        self.messages += [{"role": "assistant", "content": done.text}, {"role": "user", "content": said}]
        if self.dialect.api == "chat":
            body = self.dialect.body(self.prompt, self.messages)
        else:
            talk = "\n".join(str(m["content"]) for m in self.messages)
            body = self.dialect.body(replace(self.prompt, text=talk))
        total = len(self.prompt.turns) + 1
        return Work(
            index=self.bench.want.num_prompts + self.index * total + self.turn,
            payload=self.dialect.request(body),
            asked=self.prompt.output_len,
            due_ns=int(self.bench.args.think_s * 1e9),
            ignore_eos=self.dialect.ignore_eos,
            follow=self.next,
            session=self.index,
            turn=self.turn,
        )


def warm_up(bench: Bench, dialect: Dialect, n: int) -> None:
    """n short requests that are not measured; a failing one ends the benchmark with the server's own words."""
    if n <= 0:
        return
    want = replace(
        bench.want,
        dataset="random",
        num_prompts=n,
        random_output_len=min(bench.want.random_output_len, 32),
    )
    failed: list[Exchange] = []

    def done(ex: Exchange) -> None:
        if ex.error:
            failed.append(ex)

    works = make_works(bench, build(want, bench.args.seed + 7919), dialect, None)
    bench.engine.run(works, limit=n, on_done=done)
    if len(failed) == n:
        raise K2Error(
            f"every warm-up request failed ({failed[0].error}: {failed[0].error_text})",
            f"is {bench.args.api!r} the right --api, and do prompt and output fit the model's context?",
        )


def measure_point(
    bench: Bench, point: Point, repeat: int, progress: Callable[[int, int, float], None]
) -> BenchRow:
    """Measure one point once, store it, return its row."""
    args = bench.args
    seed = args.seed + 1000 * repeat
    workload = build(bench.want, seed)
    most = point.concurrency
    each = args.usage_each == "on" or (
        args.usage_each == "auto" and most is not None and most <= USAGE_EACH_MAX
    )
    dialect = bench.dialect(each)
    n = len(workload.prompts)
    dues = None
    if point.rate is not None:
        dues = arrivals(n, rate=point.rate, shape=point.shape, seed=seed, burstiness=args.burstiness)
    works = make_works(bench, workload, dialect, dues)
    total = sum(1 + len(p.turns) for p in workload.prompts)
    warm = args.warmup if args.warmup is not None else min(most or 4, 4)
    warm_up(bench, dialect, warm)
    if args.flush_cache and not bench.control.flush_cache():
        raise K2Error(f"{bench.control.url} has no /flush_cache", "leave --flush-cache out")
    info = RunInfo(
        label=args.label, tag=args.tag, sweep=bench.sweep, repeat=repeat, seed=seed, shape=point.shape,
        concurrency=most, rate=point.rate, burst=args.burstiness if point.shape == "gamma" else None,
        num_requests=total, slo=bench.slo, warmup={"requests": warm},
        job_id=Path(os.environ["K2TUI_JOB_DIR"]).name if os.environ.get("K2TUI_JOB_DIR") else "",
        server=_server_columns(bench.facts),
        workload=_workload_columns(workload, args, dialect),
    )  # fmt: skip
    if bench.alone is not None:
        bench.alone.start()
    started_s = time.time()
    writer = bench.db.begin(info, started_s) if bench.db is not None else None
    records: list[RequestRecord] = writer.records if writer is not None else []
    t0 = 0

    def started(at: int) -> None:
        nonlocal t0
        t0 = at

    fresh: deque[Exchange] = deque()  # finished, not yet turned into records: that waits for a quiet moment

    def done(ex: Exchange) -> None:
        fresh.append(ex)

    def settle(most: int) -> None:
        for _ in range(min(len(fresh), most)):
            records.append(fresh.popleft().record(t0))
        if writer is not None:
            writer.flush()

    watch = GpuWatch(bench.control.url)
    told_ns = 0

    def idle(now: int) -> bool:
        nonlocal told_ns
        settle(SETTLE)
        if now - told_ns > 900_000_000:
            told_ns = now
            watch.look(now - t0)
            progress(len(records) + len(fresh), total, (now - t0) / 1e9)
        return bool(fresh)

    try:
        facts = bench.engine.run(
            works, limit=most, on_done=done, on_idle=idle, stop_after_s=args.max_seconds, started=started
        )
    except BaseException:
        settle(len(fresh))
        if writer is not None:
            kept = [r for r in records if r.error != "interrupted"]
            writer.records[:] = kept
            writer.finish(state="partial", flags=[f"interrupted: {len(kept)} of {total} requests"])
        raise
    finally:
        watch.close()
    settle(len(fresh))
    engine = engine_facts(facts, records, point, total)
    flags = validity(engine, records, point) + (
        bench.alone.flags(started_s) if bench.alone is not None else []
    )
    more = watch.figures(sum(r.output_tokens for r in records if r.is_ok))
    if writer is not None:
        assert bench.db is not None
        writer.finish(engine=engine, flags=flags, more=more)
        bench.db.put_samples(writer.run_id, watch.samples)
        row = bench.db.row(writer.run_id)
        assert row is not None
        return row
    return _unstored(
        info, [*summarize(records, concurrency=most, slo=bench.slo), *more], engine, flags, started_s
    )


def _unstored(
    info: RunInfo, metrics: Sequence[Metric], engine: Mapping[str, Any], flags: Sequence[str], at: float
) -> BenchRow:
    with BenchDb(Path(":memory:")) as db:
        writer = db.begin(info, at)
        db.finish(writer.run_id, metrics, engine=engine, flags=flags)
        row = db.row(writer.run_id)
        assert row is not None
        return row


def _server_columns(facts: ServerFacts) -> dict[str, Any]:
    return {
        "fp": facts.fp, "engine": facts.engine, "version": facts.version, "model": facts.model or facts.model_path,
        "tp": facts.tp_size, "args": dict(facts.args), "quant": str(facts.args.get("quantization") or ""),
        "dp": facts.args.get("dp_size"), "pp": facts.args.get("pp_size"), "ep": facts.args.get("ep_size"),
        "env": {k: v for k, v in sorted(os.environ.items()) if k.startswith(("NCCL_", "SGLANG_", "CUDA_"))
                and not any(s in k for s in ("KEY", "TOKEN", "SECRET", "PASSWORD"))},
    }  # fmt: skip


def _workload_columns(workload: Workload, args: argparse.Namespace, dialect: Dialect) -> dict[str, Any]:
    sampling = {"temperature": args.temperature, **({"extra": mask_params(dialect.extra)} if dialect.extra else {})}
    fp = workload_fingerprint(workload, api=args.api, sampling=sampling, ignore_eos=dialect.ignore_eos)
    prompts = workload.prompts
    return {
        "fp": fp, "kind": workload.kind, "title": workload.title,
        "params": {k: v for k, v in workload.params.items() if k not in ("seed", "num_prompts")},
        "api": args.api, "stream": 1, "sampling": sampling, "ignore_eos": int(dialect.ignore_eos),
        "in_tok_mean": sum(len(p.ids) for p in prompts) / max(len(prompts), 1) or None,
        "out_tok_asked": sum(p.output_len for p in prompts) / max(len(prompts), 1),
    }  # fmt: skip


def engine_facts(facts: Facts, records: Sequence[RequestRecord], point: Point, asked: int) -> dict[str, Any]:
    """How far the figures can be trusted, as plain values (stored with the run)."""
    lags = sorted(facts.lags)
    events = sum(len(r.stamps_ns) for r in records)
    out: dict[str, Any] = {
        "client": facts.engine,
        "stamps": facts.stamps,
        "count": _worst_count(records),
        "spread": "text" if any(r.spread == "text" and r.is_ok for r in records) else "exact",
        "cpu_fraction": round(facts.cpu_fraction, 4),
        "cpu_s": round(facts.cpu_s, 4),
        "lag_p50_ms": round(quantile(lags, 0.5) / 1e6, 4) if lags else None,
        "lag_p99_ms": round(quantile(lags, 0.99) / 1e6, 4) if lags else None,
        "coalesced": sum(r.coalesced for r in records) / events if events else None,
        "unstamped": facts.unstamped,
        "steal": facts.steal,
        "drift_us": facts.drift_ns / 1000,
        "retried": facts.retried,
        "peak_in_flight": facts.peak_in_flight,
        "rss_peak_b": facts.rss_peak_b,
        "short_outputs": sum(r.is_short for r in records),
        "achieved": None,
        "wall_s": (facts.t1 - facts.t0) / 1e9,
    }
    if point.rate is not None and len(records) > 1:
        sends = sorted(r.t_send_ns for r in records)
        span = (sends[-1] - sends[0]) / 1e9
        rate = (len(records) - 1) / span if span > 0 else 0.0
        out["achieved_rate"] = rate
        out["achieved"] = rate / point.rate
    elif point.shape == "closed" and point.concurrency:
        out["achieved"] = min(facts.peak_in_flight / min(point.concurrency, asked), 1.0)
    return out


def _worst_count(records: Sequence[RequestRecord]) -> str:
    """The least trusted way in which a completed request's tokens were counted."""
    ways = {r.count for r in records if r.is_ok}
    return next((w for w in ("client", "finish") if w in ways), "server")


def validity(engine: Mapping[str, Any], records: Sequence[RequestRecord], point: Point) -> list[str]:
    """Why the run is not to be trusted, in words; [] = valid."""
    flags: list[str] = []
    failed = [r for r in records if r.error]
    if failed:
        kinds: dict[str, int] = {}
        for r in failed:
            kinds[r.error] = kinds.get(r.error, 0) + 1
        flags.append("errors: " + ", ".join(f"{n} {k}" for k, n in sorted(kinds.items())))
    if not any(r.is_ok for r in records):
        flags.append("no request completed")
        return flags
    if engine["short_outputs"]:
        flags.append(f"{engine['short_outputs']} outputs shorter than asked although ignore_eos was set")
    if engine["stamps"] == "kernel, clock stepped":
        flags.append("the wall clock was stepped during the run")
    tpots = sorted(t / 1e6 for r in records if r.is_ok and (t := r.tpot_ns) is not None)
    lag = engine["lag_p99_ms"]
    if engine["stamps"] == "user" and lag is not None and tpots and lag > 0.05 * quantile(tpots, 0.5):
        flags.append(f"client lag p99 {lag:.2f} ms is more than 5 % of TPOT")
    coalesced = engine["coalesced"]
    if coalesced is not None and coalesced > 0.05:
        flags.append(
            f"{coalesced:.0%} of the chunks came several at a time (a busy machine or a slow link), so the times between tokens are "
            "not exact; repeat it when the machine is quieter"
        )
    if engine["cpu_fraction"] > 0.8:
        flags.append(f"client CPU {engine['cpu_fraction']:.0%}")
    if engine["steal"] is not None and engine["steal"] > 0.02:
        flags.append(f"host steal {engine['steal']:.1%}")
    if engine["achieved"] is not None and engine["achieved"] < 0.98:
        what = "rate" if point.rate is not None else "concurrency"
        flags.append(f"achieved {what} {engine['achieved']:.1%} of what was asked")
    if engine["count"] == "client":
        flags.append("the server gave no token counts: chunks were counted")
    return flags


class _Told:
    """Progress for the job's folder and, on a terminal, one line that rewrites itself."""

    def __init__(self) -> None:
        self.tty = sys.stderr.isatty()
        self.done = 0
        self.total = 1.0

    def within(self, title: str) -> Callable[[int, int, float], None]:
        def progress(done: int, total: int, elapsed: float) -> None:
            share = min(done / max(total, 1), 1.0)
            eta = elapsed / share * (1 - share) if share > 0 else None
            note = f"{title}: {done}/{total} requests"
            report_progress(self.done + share, max(self.total, self.done + 1), "points", note, eta)
            if self.tty:
                print(f"\r{note} ({elapsed:.0f} s)\x1b[K", end="", file=sys.stderr, flush=True)

        progress(0, 1, 0.0)
        return progress

    def finished(self) -> None:
        self.done += 1
        if self.tty:
            print("\r\x1b[K", end="", file=sys.stderr)


def run(args: argparse.Namespace) -> int:
    """The whole benchmark. Returns the exit code."""
    with contextlib.suppress(ValueError):  # not the main thread (a test): the caller keeps its own handler
        signal.signal(signal.SIGTERM, _interrupt)
        signal.signal(signal.SIGINT, _interrupt)
    sides = [open_bench(args)]
    rows: list[BenchRow] = []
    told = _Told()
    alone = Alone(sides[0].control.url, anyway=bool(args.anyway))
    try:
        alone.begin(lambda words: report_progress(0, None, "points", words))
        if args.against:
            other = argparse.Namespace(**vars(args))
            other.url, other.label = args.against, args.against_label or "against"
            sides.append(open_bench(other))
        for side in sides:
            side.alone = alone
        if args.sweep or args.sweep_rate:
            rows = _sweep(sides, told)
        elif args.aa:
            rows = _aa(sides[0], told)
        else:
            points = points_of(args, build(sides[0].want, args.seed))
            told.total = len(points) * args.repeats * len(sides)
            for point in points:
                rows += _repeat(sides, point, told)
        report_progress(told.done, told.done, "points", "done", 0.0, force=True)
    finally:
        alone.close()
        for side in sides:
            side.engine.close()
            side.control.close()
            if side.db is not None:
                side.db.close()
    is_measured = any(r.completed for r in rows)
    failed = {} if is_measured else {"ok": False, "cause": "; ".join(rows[0].flags) if rows else "nothing was measured"}
    report_result(
        {**failed, "rows": [asdict(r) for r in rows], "sweep": sides[0].sweep, "url": sides[0].control.url}
    )
    if args.json:
        print(
            json.dumps(
                {"schema": 1, "runs": [asdict(r) for r in rows], **_told_beside(sides, rows, args)}, indent=1
            )
        )
    else:
        print("\n" + _report(sides, rows, args))
    return 0 if is_measured else 1


def _told_beside(
    sides: Sequence[Bench], rows: Sequence[BenchRow], args: argparse.Namespace
) -> dict[str, Any]:
    """What the words under a table say, as data: the noise floor, the verdicts, the knee."""
    if args.aa:
        return {
            "noise": [
                {"metric": name, "relative": value, "pairs": n}
                for name, value, n in noise_floor(rows[0::2], rows[1::2])
            ]
        }
    if len(sides) == 2:
        mine, other = ([r for r in rows if r.sweep == side.sweep] for side in sides)
        return {"comparisons": [comparison_dict(c) for c in compare(other, mine)]}
    if args.sweep:
        return {"knee": next((p.row.concurrency for p in sweep_points(rows) if p.is_knee), None)}
    if args.sweep_rate:
        return {"knee": next((p.row.request_rate for p in sweep_points(rows) if p.is_knee), None)}
    return {}


def _report(sides: Sequence[Bench], rows: Sequence[BenchRow], args: argparse.Namespace) -> str:
    width = table_width()
    if args.aa:
        base, new = rows[0::2], rows[1::2]
        return compare_table(compare(base, new), width) + "\n" + noise_words(base, new)
    if len(sides) == 2:
        mine, other = ([r for r in rows if r.sweep == side.sweep] for side in sides)
        return rows_table(rows, width) + "\n\n" + compare_table(compare(other, mine), width)
    if args.sweep or args.sweep_rate:
        option = "--sweep" if args.sweep else "--sweep-rate"
        return sweep_table(rows, width=width) + "\n" + knee_words(rows, option)
    return rows_table(rows, width)


def _repeat(sides: Sequence[Bench], point: Point, told: _Told) -> list[BenchRow]:
    """One point, every repeat, the sides in turn; ends early when every side's interval is tight."""
    args = sides[0].args
    rows: list[BenchRow] = []
    values: list[list[float]] = [[] for _ in sides]
    for repeat in range(args.repeats):
        for number, side in enumerate(sides):
            title = f"{side.args.label} {point.title}".strip()
            row = measure_point(side, point, repeat, told.within(title))
            told.finished()
            rows.append(row)
            if not args.json:
                print(one_line(row), flush=True)
            if row.output_throughput:
                values[number].append(row.output_throughput)
        if args.stop_ci and all(len(v) >= 3 for v in values):
            widths = [(e.half_width or 0.0) / e.value for e in map(mean_interval, values)]
            if max(widths) < args.stop_ci:
                break
    return rows


GROWTH_END = 0.05  # a doubling that brings less throughput than this, twice in a row, ends a sweep
RATE_S = 10  # a point of a rate sweep lasts so long, or longer


def _sweep(sides: Sequence[Bench], told: _Told) -> list[BenchRow]:
    """1, 2, 4, ... in flight (or arriving a second) until MAX or until two doublings bring nothing, then the points between
    the knee's neighbours."""
    args = sides[0].args
    by_rate = args.sweep_rate is not None
    most = float(args.sweep_rate if by_rate else args.sweep)
    told.total = (int(most).bit_length() + 2) * args.repeats * len(sides)
    rows: list[BenchRow] = []
    curve: dict[float, float] = {}

    def measure(load: float) -> None:
        least = math.ceil(RATE_S * load) if by_rate else 3 * int(load)
        for side in sides:
            side.want = replace(side.want, num_prompts=max(bounded_prompts(args), least))
        point = Point(args.max_concurrency, load, args.arrival) if by_rate else Point(int(load))
        found = _repeat(sides, point, told)
        rows.extend(found)
        own = [r.output_throughput for r in found if r.sweep == sides[0].sweep and r.output_throughput]
        curve[load] = sum(own) / len(own) if own else 0.0

    load, flat = 1.0, 0
    while load <= most:
        measure(load)
        before = curve.get(load / 2)
        flat = flat + 1 if before and curve[load] < before * (1 + GROWTH_END) else 0
        if flat >= 2 or not curve[load]:
            break
        load *= 2
    at = knee(list(curve.items()))
    if at is not None:
        for between in (at * 0.75, at * 1.5):
            load = between if by_rate else float(int(between))
            if load > 1 and load not in curve and load <= most:
                measure(load)
    return rows


def _aa(bench: Bench, told: _Told) -> list[BenchRow]:
    """Pairs of runs of the same server: how large a difference is noise here. Stored by host and workload."""
    args = bench.args
    points = points_of(args, build(bench.want, args.seed))
    pairs = max(args.repeats, 3)
    told.total = len(points) * pairs * 2
    rows: list[BenchRow] = []
    for point in points:
        for repeat in range(pairs):
            for _ in range(2):
                row = measure_point(bench, point, repeat, told.within(f"A/A {point.title}"))
                told.finished()
                rows.append(row)
                if not args.json:
                    print(one_line(row), flush=True)
    if bench.db is not None:
        for name, value, n in noise_floor(rows[0::2], rows[1::2]):
            bench.db.set_noise(platform.node(), rows[0].workload_fp, name, value, time.time(), n)
    return rows


def one_line(row: BenchRow) -> str:
    """A finished point in one line, for job logs."""
    head = f"C={row.concurrency}" if row.request_rate is None else f"rate={row.request_rate:g}"

    def f(value: float | None, digits: int = 1) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    text = (
        f"{head} repeat={row.repeat} completed={row.completed}/{row.num_requests} "
        f"output_throughput={f(row.output_throughput)} tok/s ttft_p50={f(row.ttft_p50_ms)} ms "
        f"tpot_p50={f(row.tpot_p50_ms, 2)} ms itl_p99={f(row.itl_p99_ms, 2)} ms"
    )
    if row.accept_length:
        text += f" accept_length={row.accept_length:.2f}"
    return text + (f"  NOT VALID: {'; '.join(row.flags)}" if row.flags else "")


def _interrupt(signum: int, frame: object) -> None:
    # the terminal and the parent may both send one: the second must not cut off the storing of what was measured
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt
