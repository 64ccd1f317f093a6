"""A scripted world for the dashboard: snapshots as functions of time, logs in memory, orders written down."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from k2tui.core.bench import BenchRow
from k2tui.core.board import Board, Task, TaskStatus, link
from k2tui.core.gpu import GpuProcess, GpuSample, GpuView
from k2tui.core.gpu_series import CurveBuilder, GpuCurves
from k2tui.core.host import HostSample
from k2tui.core.job import Job, JobSpec, JobState, Progress
from k2tui.core.load import DecodeBatch, LoadView, Phase, PhaseSpan, ShardCount, State
from k2tui.core.server import HttpStatus
from k2tui.core.snapshot import ServerView, Snapshot, StageInfo
from k2tui.errors import K2Error

T0 = 1_790_000_000.0  # a fixed "now" for pictures
GIB = 1 << 30
STAGES = (
    StageInfo("serve", "Start the server", "s"),
    StageInfo("bench", "Benchmark", "b"),
    StageInfo("extract", "Extract hidden states", "x", unavailable="the server must be ready first"),
    StageInfo("train", "Train the draft", "t", unavailable="no extracted states yet"),
)


def gpus(now: float, count: int = 8, *, busy: bool = True) -> GpuView:
    out = []
    for i in range(count):
        wave = 0.5 + 0.5 * math.sin(now / 7 + i)
        util = round(20 + 75 * wave) if busy else 0
        out.append(
            GpuSample(
                i,
                uuid=f"GPU-{i:08x}",
                name="NVIDIA H200",
                memory_total_b=141 * GIB,
                memory_used_b=round((60 + 50 * wave if busy else 0.5) * GIB),
                gpu_utilization=util,
                power_usage_mw=round(1000 * (90 + 550 * wave * busy)),
                enforced_power_limit_mw=700_000,
                temperature_c=round(35 + 35 * wave * busy),
                temperature_slowdown_c=87,
                sm_clock_mhz=1980 if busy else 345,
                throttle_reasons=("power cap",) if util > 93 else (),
            )
        )
    procs = tuple(
        GpuProcess(41000 + i, f"sglang::scheduler_TP{i}", "ml", i, 109 * GIB, 80, 3 * GIB, now - 700, f"TP{i}", "serve-01")
        for i in range(count)
        if busy
    )
    return GpuView(now, tuple(out), procs, "570.124.06", sample_ms=2.1)


def host(now: float) -> HostSample:
    return HostSample(
        now,
        "h200-box",
        cpu_percent=14 + 9 * math.sin(now / 5),
        cpu_percent_per_core=tuple(10 + 80 * abs(math.sin(now / 9 + c)) for c in range(32)),
        load_1m=9.41,
        memory_total_b=2003 * GIB,
        memory_used_b=412 * GIB,
        memory_available_b=1580 * GIB,
        page_cache_b=690 * GIB,
        disk_read_b_s=3.2e9,
        disk_write_b_s=1.1e6,
        net_rx_b_s=2.2e5,
        net_tx_b_s=8.1e5,
        shm_total_b=1001 * GIB,
        shm_used_b=3 * GIB,
        disk_free_b=2900 * GIB,
    )


def board() -> Board:
    return Board(
        "~/plan.json",
        (
            Task("1", "Convert prompts to the chat template", TaskStatus.COMPLETED, "medium", "12,400 prompts", "prepare"),
            Task("2", "Serve Kimi-K2.5 INT4 on 8 GPUs", TaskStatus.IN_PROGRESS, "high", "", "serve", "serve-01"),
            Task("3", "Baseline benchmark without a draft", TaskStatus.PENDING, "medium", "", "bench", depends=("2",)),
            Task("4", "Extract hidden states 🧪 from 3 layers", TaskStatus.PENDING, "medium", "", "extract", depends=("2",)),
            Task("5", "Train the EAGLE-3 draft 草稿模型", TaskStatus.PENDING, "medium", "", "train", depends=("4",)),
            Task("6", "Compare accept length at 3, 5 and 7 steps", TaskStatus.PENDING, "low", "", "bench", depends=("5",)),
            Task("7", "Ask ops about NVLink errors on GPU 3", TaskStatus.CANCELLED, "low"),
        ),
        title="EAGLE-3 for K2.5",
    )


def bench_rows(now: float) -> tuple[BenchRow, ...]:
    rows = []
    for n, (conc, tok, user, ttft, itl, acc) in enumerate(
        ((16, 1512.0, 94.5, 212.0, 9.9, 2.71), (8, 911.0, 113.9, 148.0, 8.4, 2.73), (1, 142.0, 142.0, 92.0, 6.8, 2.70), (1, 61.2, 61.2, 88.0, 16.1, None))
    ):
        rows.append(
            BenchRow(
                f"run-{9 - n}",
                now - 300 * n,
                "eagle3 3 steps" if acc else "baseline",
                "sglang",
                "0.5.12",
                "Kimi-K2.5-INT4",
                "random in 1024 out 256",
                conc,
                num_requests=64,
                completed=64 if n else 61,
                errors=0 if n else 3,
                duration_s=41.0,
                output_throughput=tok,
                tok_s_user=user,
                ttft_p50_ms=ttft,
                ttft_p99_ms=ttft * 3.1,
                itl_p50_ms=itl,
                itl_p99_ms=itl * 4,
                e2e_p50_ms=ttft + 255 * itl,
                request_throughput=tok / 256,
                accept_length=acc,
                is_baseline=acc is None,
                flags=("3 of 64 requests failed",) if n == 0 else (),
            )
        )
    return tuple(rows)


def server_job(now: float, started: float) -> Job:
    spec = JobSpec(
        "serve-01",
        "serve",
        "serve kimi-k25",
        ("python", "-m", "sglang.launch_server", "--model-path", "/models/Kimi-K2.5-INT4", "--tp-size", "8", "--port", "30000"),
        kind="server",
        submitted_s=started,
    )
    return Job(spec, JobState.RUNNING, pid=40999, started_s=started, progress=Progress(41, 64, "shards", at_s=now))


def jobs(now: float, started: float) -> tuple[Job, ...]:
    bench = JobSpec("bench-02", "bench", "bench 1,4,8 tok/s", ("k2tui", "bench", "run"), after=("serve-01",))
    prep = JobSpec("prepare-01", "prepare", "prepare 12,400 prompts", ("k2tui", "prepare"))
    old = JobSpec("train-00", "train", "train draft, lr 1e-4", ("k2tui", "train"))
    return (
        Job(bench, JobState.WAITING, waiting_for="the server to be ready", waiting_since_s=started + 5),
        server_job(now, started),
        Job(prep, JobState.SUCCEEDED, started_s=started - 900, ended_s=started - 820, exit_code=0, result={"prompts": 12400}, progress=Progress(12400, 12400, "prompts")),
        Job(old, JobState.FAILED, started_s=started - 5000, ended_s=started - 4000, exit_code=-9, reason="killed by signal 9 (out of memory?)", progress=Progress(310, 2000, "steps")),
    )


def loading(now: float, t: float) -> ServerView:
    """t: seconds since the start; 64 shards at 4 s each after 20 s."""
    started = now - t
    done = max(0, min(64, int((t - 20) / 4)))
    phases = [PhaseSpan(Phase.BOOT, started, started + 8.2, 1), PhaseSpan(Phase.DIST_INIT, started + 8.2, started + 19.9, 4)]
    phases.append(PhaseSpan(Phase.WEIGHT_LOAD, started + 19.9, line_no=9))
    load = LoadView(
        state=State.LOADING,
        phase=Phase.WEIGHT_LOAD,
        phases=tuple(phases),
        target=ShardCount(done, 64),
        draft=ShardCount(0, 1),
        shards_per_s=0.25,
        bytes_done=done * 9 * 10**9,
        bytes_total=64 * 9 * 10**9,
        eta_s=max(0.0, (64 - done) * 4 + 61),
        eta_error_s=20.0,
        started_s=started,
        verdict=f"shards {done}/64, 2.2 GB/s, ready in about {int((64 - done) * 4 + 61)} s; TP5 is 4 s behind",
        engine="sglang",
        version="0.5.12",
        model="/models/Kimi-K2.5-INT4",
        tp_size=8,
        url="http://127.0.0.1:30000",
        ranks=tuple(f"TP{i}" for i in range(8)),
    )
    return ServerView("serve-01", "serve kimi-k25", load, HttpStatus("http://127.0.0.1:30000", now, error="connection refused"), server_job(now, started), "serve-01")


def serving(now: float, t: float) -> ServerView:
    started = now - t - 318.0
    marks = (0, 8.2, 19.9, 241.0, 246.5, 248.0, 262.0, 306.0, 318.0)
    names = (Phase.BOOT, Phase.DIST_INIT, Phase.WEIGHT_LOAD, Phase.DRAFT_LOAD, Phase.AFTER_LOAD, Phase.KV_ALLOC, Phase.GRAPH_CAPTURE, Phase.WARMUP)
    phases = [PhaseSpan(p, started + a, started + b) for p, a, b in zip(names, marks, marks[1:], strict=False)]
    phases.append(PhaseSpan(Phase.SERVING, started + 318.0))
    speed = 1180 + 320 * math.sin(now / 4)
    batch = DecodeBatch(now, 12, 0, 48211, 0.34, speed, 2.71 + 0.1 * math.sin(now / 3), True)
    load = LoadView(
        state=State.READY,
        phase=Phase.SERVING,
        phases=tuple(phases),
        target=ShardCount(64, 64),
        draft=ShardCount(1, 1),
        started_s=started,
        ready_s=318.0,
        verdict="ready, serving 12 requests; start took 5:18, of which 3:41 weights",
        engine="sglang",
        version="0.5.12",
        model="/models/Kimi-K2.5-INT4",
        tp_size=8,
        url="http://127.0.0.1:30000",
        decode=batch,
        ranks=tuple(f"TP{i}" for i in range(8)),
    )
    status = HttpStatus("http://127.0.0.1:30000", now, 200, "", "/models/Kimi-K2.5-INT4", "kimi-k2.5", "0.5.12", False, 12, 0, 0.34, speed, batch.accept_length, 0.61, 141312, "EAGLE3")
    return ServerView("serve-01", "serve kimi-k25", load, status, server_job(now, started), "serve-01")


def failed(now: float, t: float) -> ServerView:
    base = loading(now, 60)
    started = base.load.started_s or 0.0
    load = replace(
        base.load,
        state=State.FAILED,
        verdict="the server died while it loaded: GPU 3 ran out of memory at shard 10/64",
        hint="lower --mem-fraction-static to 0.85, or free GPU 3: pid 3121 of user bob holds 60G there",
        root_cause="cuda-oom",
        root_cause_group="G08",
        proof_line="[2026-11-29 11:02:07 TP3] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 3 has a total capacity of 139.81 GiB",
        proof_line_no=58,
        confidence=0.97,
        eta_s=None,
        shards_per_s=None,
        phases=(*base.load.phases[:2], PhaseSpan(Phase.WEIGHT_LOAD, started + 19.9, started + 60)),
        warnings=("NCCL uses eth0: set NCCL_SOCKET_IFNAME",),
    )
    return replace(base, load=load)


class FakeLog:
    """Lines in memory; grows with time when a clock is given (rate lines a second)."""

    def __init__(self, title: str, lines: Sequence[str], *, clock: Callable[[], float] | None = None, rate: float = 0.0) -> None:
        self._title = title
        self._lines = list(lines)
        self._clock = clock
        self._rate = rate
        self._start = clock() if clock is not None else 0.0
        self._base = len(self._lines)
        self.asked: list[tuple[int, int]] = []
        self.is_closed = False

    @property
    def title(self) -> str:
        return self._title

    @property
    def size_b(self) -> int:
        return sum(len(x) + 1 for x in self._lines)

    def line_count(self) -> int:
        if self._clock is not None:
            want = self._base + int((self._clock() - self._start) * self._rate)
            while len(self._lines) < want:
                n = len(self._lines)
                self._lines.append(
                    f"[2026-11-29 11:{n // 60 % 60:02d}:{n % 60:02d} TP0] Decode batch, #running-req: {n % 13}, #token: {n * 37}, "
                    f"token usage: 0.{n % 90:02d}, accept len: 2.{n % 99:02d}, cuda graph: True, gen throughput (token/s): {1000 + n % 700}.{n % 10}, #queue-req: 0"
                )
        return len(self._lines)

    def lines(self, start: int, count: int) -> Sequence[str]:
        self.asked.append((start, count))
        return self._lines[max(0, start) : start + count]

    def search(self, pattern: str, start: int, *, forward: bool = True) -> int | None:
        try:
            rx = re.compile(pattern, 0 if any(c.isupper() for c in pattern) else re.IGNORECASE)
        except re.error as err:
            raise K2Error(f"not a regular expression: {err}") from None
        numbers = range(start, len(self._lines)) if forward else range(min(start, len(self._lines) - 1), -1, -1)
        return next((n for n in numbers if rx.search(self._lines[n])), None)

    def is_complete(self) -> bool:
        return True

    def close(self) -> None:
        self.is_closed = True


def log_lines(count: int = 120) -> list[str]:
    out = []
    for n in range(count):
        if n == 57:
            out.append(
                "[2026-11-29 11:02:07 TP3] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 3 has a total capacity of 139.81 GiB"
            )
        elif n % 17 == 5:
            out.append(f"[2026-11-29 11:00:{n % 60:02d} TP{n % 8}] WARNING: [/b] NCCL [bold]markup[/] 草稿 \U0001f9ea {n}")
        else:
            out.append(f"[2026-11-29 11:00:{n % 60:02d} TP0] Loading safetensors checkpoint shards: {n * 100 // count}% | {n}/{count}")
    return out


class FakeBackend:
    """Plays `script(now)` -> Snapshot. Orders are kept in `orders`; `broken` makes the next order fail."""

    def __init__(self, script: Callable[[float], Snapshot], clock: Callable[[], float] = time.time, *, period_s: float = 0.0, log_rate: float = 0.0) -> None:
        self.script = script
        self.clock = clock
        self.orders: list[tuple[Any, ...]] = []
        self.host_processes: tuple[GpuProcess, ...] = ()
        self.sees_host_processes = False
        self.broken: K2Error | None = None
        self.logs: dict[str, FakeLog] = {}
        self.log_rate = log_rate
        self._period = period_s
        self._end = threading.Event()
        self.on_change: Callable[[], None] | None = None
        self.changes: dict[str, dict[str, str]] = {}
        self.added: list[Task] = []
        self.moves: list[tuple[str, str]] = []

    def start(self, on_change: Callable[[], None]) -> None:
        self.on_change = on_change
        if self._period:
            threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        while not self._end.wait(self._period):
            if self.on_change is not None:
                self.on_change()

    def snapshot(self) -> Snapshot:
        snap = self.script(self.clock())
        tasks = tuple(
            replace(t, **{k: TaskStatus(v) if k == "status" else v for k, v in self.changes.get(t.id, {}).items()}) for t in snap.board.tasks
        )
        now = [*tasks, *self.added]
        for task_id, other_id in self.moves:
            ids = [t.id for t in now]
            now.insert(ids.index(other_id), now.pop(ids.index(task_id)))
        return replace(snap, board=link(replace(snap.board, tasks=tuple(now)), ()), host_processes=self.host_processes if self.sees_host_processes else ())

    def stop(self) -> None:
        self._end.set()
        self.orders.append(("stop",))

    def log(self, key: str) -> FakeLog:
        if key == "missing":
            raise K2Error("no log of job missing", "it was deleted")
        clock = self.clock if self.log_rate else None
        self.logs[key] = log = FakeLog(key, log_lines(), clock=clock, rate=self.log_rate)
        return log

    def _do(self, *order: Any) -> None:
        if self.broken is not None:
            err, self.broken = self.broken, None
            raise err
        self.orders.append(order)

    def preview(self, stage: str, params: Mapping[str, Any]) -> Sequence[str]:
        if params.get("concurrency") == "none":
            raise K2Error("concurrency 'none' is not a number", "write 1,4,8")
        if stage == "serve":
            return (
                "/opt/sglang/bin/python", "-m", "sglang.launch_server", "--model-path", f"/models/{params.get('profile')}", "--tp-size", "8",
                "--port", "30000", "--host", "127.0.0.1", "--speculative-algorithm", "EAGLE3", "--api-key", "***", "--mem-fraction-static", "0.85",
            )  # fmt: skip
        return ("k2tui", stage, "run", *(f"--{k}={v}" for k, v in params.items()))

    def submit(self, stage: str, params: Mapping[str, Any]) -> str:
        self._do("submit", stage, dict(params))
        return f"{stage}-99"

    def stop_job(self, job_id: str) -> None:
        self._do("stop_job", job_id)

    def retry_job(self, job_id: str) -> str:
        self._do("retry_job", job_id)
        return job_id + "b"

    def delete_job(self, job_id: str) -> None:
        self._do("delete_job", job_id)

    def set_task(self, task_id: str, **changes: str) -> None:
        self._do("set_task", task_id, changes)
        self.changes.setdefault(task_id, {}).update(changes)

    def add_task(self, content: str, priority: str = "medium") -> None:
        self._do("add_task", content, priority)
        self.added.append(Task(f"new{len(self.added)}", content, priority=priority))

    def move_task(self, task_id: str, other_id: str) -> None:
        self._do("move_task", task_id, other_id)
        self.moves.append((task_id, other_id))

    def end_processes(self, targets: Sequence[tuple[int, float]], how: str = "end") -> str:
        self._do("end_processes", tuple(targets), how)
        return "; ".join(f"pid {pid}: ended" for pid, _born in targets)

    def describe_process(self, pid: int, started_s: float) -> Sequence[str]:
        return (f"pid {pid}, me", "command sglang::scheduler_TP1", "", "environment", "HF_TOKEN=***")

    def watch_gpu(self, index: int | None) -> None:
        self.watched_gpu = index

    def watch_host_processes(self, on: bool) -> None:
        self.sees_host_processes = on

    def gpu_curves(self, start_s: float, end_s: float, steps: int = 0) -> GpuCurves:
        if end_s - start_s >= 900:  # what the dashboard asks for at its start: nothing was recorded
            return GpuCurves(start_s, end_s, 1.0)
        builder = CurveBuilder(start_s, end_s, steps or 60)
        for step in range(steps or 60):
            at = start_s + (step + 0.5) * builder.step_s
            builder.add(at, 0, (step % 101, 10, 1024, 400, 60, 1980, 0), "GPU-0", "NVIDIA H200")
        return builder.build()

    def label_run(self, run_id: str, label: str | None, tag: str | None) -> None:
        self._do("label_run", run_id, label, tag)

    def set_baseline(self, run_id: str, on: bool) -> Sequence[str]:
        self._do("set_baseline", run_id, on)
        return [run_id]

    def delete_run(self, run_id: str) -> None:
        self._do("delete_run", run_id)

    def run_requests(self, run_id: str, width: int, ascii_only: bool) -> Sequence[str]:
        return [f"requests of {run_id}"]

    def report(self, server_key: str) -> str:
        return f"k2tui report on {server_key}\nversion 0.5.12\nargv python -m sglang.launch_server --api-key ***"


def scene(kind: str, now: float, t: float, *, gpu_count: int = 8, is_demo: bool = False) -> Snapshot:
    servers = {
        "loading": lambda: (loading(now, t),),
        "serving": lambda: (serving(now, t),),
        "failed": lambda: (failed(now, t),),
        "two": lambda: (loading(now, t), replace(serving(now, t), key="watched", title="other", job=None)),
        "empty": lambda: (),
    }[kind]()
    return Snapshot(
        taken_s=now,
        servers=servers,
        gpu=gpus(float(int(now)), gpu_count, busy=kind != "empty") if gpu_count else GpuView(now, error="no NVIDIA driver here: NVML is not installed", hint="this is normal on a laptop: everything else works"),
        host=host(float(int(now))),
        jobs=jobs(now, now - t) if kind != "empty" else (),
        board=board() if kind != "empty" else Board(),
        bench=bench_rows(now) if kind != "empty" else (),
        stages=STAGES,
        is_demo=is_demo,
        profile="kimi-k25",
        profiles=("kimi-k25", "kimi-k25-eagle3", "tiny"),
    )


def still(kind: str, t: float = 124.0, **options: Any) -> FakeBackend:
    """A world that stands still at T0: for pictures and most tests."""
    return FakeBackend(lambda now: scene(kind, now, t, **options), clock=lambda: T0)


def live(kind: str, *, t: float = 30.0, period_s: float = 0.5, log_rate: float = 0.0, **options: Any) -> FakeBackend:
    """A world that moves with the real clock."""
    start = time.time() - t
    return FakeBackend(lambda now: scene(kind, now, now - start, **options), period_s=period_s, log_rate=log_rate)
