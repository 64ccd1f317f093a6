"""A server's start followed to a verdict, and its stop followed until nothing of it is left: the one way to stop a server. Draws nothing."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from k2tui.core.gpu import GpuProcess, GpuView
from k2tui.core.job import Job, JobSpec
from k2tui.core.load import State
from k2tui.core.server_jobs import is_live
from k2tui.core.snapshot import ServerView
from k2tui.jobs import folder, procs
from k2tui.servers import Follower, target_of
from k2tui.sources.http import ServerProbe

FREE_TOLERANCE_B = 1 << 30  # other programs may take that much meanwhile; one rank of a server holds far more
FREE_WAIT_S = 30.0
_AFTER_GRACE_S = 5.0  # the keeper kills when the grace is over: it comes first
_KILL_AFTER_S = 3.0
_KILL_WAIT_S = 10.0
_NODE_WAIT_S = 250.0
NODE_STOPPED = 143  # how a node's job ends when the job over there was stopped and nothing of it is left
DECIDED = (State.READY, State.FAILED, State.STALLED)


def follow_start(
    job_id: str,
    *,
    timeout_s: float = 0.0,
    pause_s: float = 0.3,
    on_view: Callable[[ServerView], None] | None = None,
) -> ServerView:
    """Follow a server job until it is ready, failed or stalled, or timeout_s is over (0 = never). Returns the last view.

    The state of a view that is in none of `DECIDED`, of a job that lives, means that the time was over.
    """
    follower = Follower(target_of(folder.get(job_id)), learns=True)
    probe = ServerProbe(follower.target.url, 1.0)
    end = time.monotonic() + timeout_s if timeout_s else None
    try:
        while True:
            now = time.time()
            job = folder.get(job_id)
            follower.target = target_of(job)
            follower.step(now)
            follower.look(now)
            http = None if job.state.is_final else probe.poll(now)
            follower.join(now, http)
            view = follower.view(now, http)
            if on_view is not None:
                on_view(view)
            if (
                job.state.is_final
                or view.load.state in DECIDED
                or (end is not None and time.monotonic() > end)
            ):
                return view
            time.sleep(pause_s)
    finally:
        follower.close()


@dataclass(frozen=True, slots=True)
class Held:
    """GPU memory that is still taken after a stop. pid: None when no process that can be named holds it."""

    gpu_index: int
    memory_b: int | None
    pid: int | None = None
    who: str = ""  # in words: "pid 4711 (sglang::scheduler_TP0) of alice"

    def __str__(self) -> str:
        amount = "memory" if self.memory_b is None else f"{self.memory_b / (1 << 30):.1f} GiB"
        return f"GPU {self.gpu_index}: {amount} held by {self.who}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """What is left of a server that was stopped. killed: processes that outlived its own end. left: those that live even then.

    freed_b: GPU memory that its processes held before and that is free again; None when NVML did not tell.
    """

    took_s: float
    killed: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
    held: tuple[Held, ...] = ()
    freed_b: int | None = None
    note: str = ""

    @property
    def is_clean(self) -> bool:
        return not self.left and not self.held

    @property
    def held_b(self) -> int:
        return sum(h.memory_b or 0 for h in self.held)

    @property
    def words(self) -> str:
        """One line for people: what came back, what is still held and by whom; "" when there is nothing to say."""
        parts: list[str] = []
        if self.killed:
            parts.append(f"{len(self.killed)} left-over process{'es' if len(self.killed) > 1 else ''} killed")
        if self.freed_b:
            parts.append(f"{self.freed_b / (1 << 30):.1f} GiB of GPU memory are free again")
        if self.left:
            parts.append("cannot be ended (waiting in the kernel?): pid " + ", ".join(map(str, self.left)))
        parts += [f"still held: {h}" for h in self.held]
        return "; ".join([*parts, *([self.note] if self.note else [])])


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """What the stop of a job came to. nodes: what the other nodes' jobs said, where something is not as it should be."""

    job: Job
    rest: Rest
    nodes: tuple[str, ...] = ()

    @property
    def is_clean(self) -> bool:
        return self.job.state.is_final and self.rest.is_clean and not self.nodes

    @property
    def words(self) -> str:
        """One line for people: how it ended, what came back, what is still held and by whom."""
        return "; ".join(
            [self.job.reason or str(self.job.state), *filter(None, [self.rest.words]), *self.nodes]
        )

    def as_json(self) -> dict[str, Any]:
        rest = self.rest
        return {
            "job": self.job.spec.id, "state": str(self.job.state), "reason": self.job.reason, "took_s": round(rest.took_s, 2),
            "is_clean": self.is_clean, "killed": list(rest.killed), "left": list(rest.left), "freed_b": rest.freed_b, "note": rest.note,
            "nodes": list(self.nodes),
            "held": [{"gpu": h.gpu_index, "memory_b": h.memory_b, "pid": h.pid, "who": h.who} for h in rest.held],
        }  # fmt: skip


class Remains:
    """The processes of one server and the GPU memory they hold: made while it lives, asked when it should be gone.

    find: its processes as they are now. look: the newest view of the GPUs, never blocking for long. job_id, gpus: the job and the GPUs that
    it may use, where known. free_before: free bytes of each GPU before the start, where known (then they have to come back even when
    NVML names no process, as in a container).
    """

    def __init__(
        self,
        find: Callable[[], set[int]],
        look: Callable[[], GpuView],
        *,
        job_id: str = "",
        gpus: Collection[int] = (),
        free_before: Mapping[int, int] | None = None,
    ) -> None:
        self._find, self._look, self._job_id = find, look, job_id
        self._members: dict[int, str] = {}
        self._killed: set[int] = set()
        self._began = time.monotonic()
        self.remember()
        view = look()
        own = {(p.gpu_index, p.pid): p.memory_used_b for p in view.processes if self._is_own(p)}
        self._own_pids = {pid for _, pid in own}
        self._held_before = sum(b or 0 for b in own.values())
        # hidden pids on the server's own GPUs: NVML names them in another PID namespace, the server's are among them
        self._hidden = (
            {p.pid for p in view.processes if not p.is_visible and p.gpu_index in gpus}
            if not own
            else set[int]()
        )
        used = {g.index: g.memory_used_b for g in view.gpus if g.memory_used_b is not None}
        self._most: dict[int, int] = {}
        for index in {i for i, _ in own}:
            if index in used:
                self._most[index] = max(
                    0, used[index] - sum(b or 0 for (i, _), b in own.items() if i == index)
                )
        totals = {g.index: g.memory_total_b for g in view.gpus if g.memory_total_b is not None}
        for index, free in (free_before or {}).items():
            if index in totals:
                self._most.setdefault(index, max(0, totals[index] - free))

    def _is_own(self, process: GpuProcess) -> bool:
        return process.pid in self._members or bool(self._job_id and process.job_id == self._job_id)

    def remember(self) -> None:
        """Note who belongs to the server now; who was noted once belongs to it for good, also when it leaves session and family."""
        for pid in self._find():
            if pid not in self._members and (born := procs.birth(pid)):
                self._members[pid] = born

    def living(self) -> set[int]:
        return {pid for pid, born in self._members.items() if procs.birth(pid) == born}

    def kill(self) -> None:
        """SIGKILL to everything of it that lives."""
        self.remember()
        found = self.living()
        procs.signal_all(found, signal.SIGKILL)
        self._killed |= found

    def clear(self, free_wait_s: float = FREE_WAIT_S) -> Rest:
        """The server itself has ended: kill what outlived it, wait until its GPU memory is back, and say what is not."""
        self.remember()
        _until(lambda: not self.living(), _KILL_AFTER_S)
        if self.living():
            self.kill()
            _until(lambda: not self.living(), _KILL_WAIT_S)
        ended_s = time.time()
        held: tuple[Held, ...] = ()
        note = ""

        def is_free() -> bool:
            nonlocal held, note
            view = self._look()
            if not view.gpus or view.taken_s < ended_s:
                note = "whether its GPU memory is free is not known: NVML gives no figures now"
                return False
            held, note = self._held(view), ""
            return not held

        if self._own_pids or self._most or self._hidden:
            _until(is_free, free_wait_s)
        freed = None
        if self._own_pids and not note:
            freed = max(0, self._held_before - sum(h.memory_b or 0 for h in held))
        return Rest(
            took_s=time.monotonic() - self._began,
            killed=tuple(sorted(self._killed)),
            left=tuple(sorted(self.living())),
            held=held,
            freed_b=freed,
            note=note,
        )

    def _held(self, view: GpuView) -> tuple[Held, ...]:
        """What keeps the GPUs from being as free as before: the server's own processes first, then memory above what was there."""
        out: list[Held] = []
        for p in view.processes:
            if p.pid in self._own_pids or self._is_own(p):
                gone = not procs.birth(p.pid)
                who = f"pid {p.pid}" + (
                    ", which has ended: the driver still counts it"
                    if gone
                    else f" ({p.name or p.rank or 'its process'})"
                )
                out.append(Held(p.gpu_index, p.memory_used_b, p.pid, who))
            elif p.pid in self._hidden and not p.is_visible:
                who = f"pid {p.pid} of another PID namespace, there before the stop too"
                out.append(Held(p.gpu_index, p.memory_used_b, p.pid, who))
        named = {h.gpu_index for h in out}
        for gpu in view.gpus:
            most = self._most.get(gpu.index)
            if (
                most is None
                or gpu.memory_used_b is None
                or gpu.index in named
                or gpu.memory_used_b - most < FREE_TOLERANCE_B
            ):
                continue
            on_it = [p for p in view.processes if p.gpu_index == gpu.index]
            who = ", ".join(
                f"pid {p.pid} ({p.name or 'hidden'}{f' of {p.user}' if not p.is_own and p.user else ''})"
                for p in on_it
            )
            out.append(
                Held(
                    gpu.index,
                    gpu.memory_used_b - most,
                    on_it[0].pid if len(on_it) == 1 else None,
                    who or "no process that NVML names",
                )
            )
        return tuple(out)


def _until(is_done: Callable[[], bool], limit_s: float) -> None:
    end, pause = time.monotonic() + limit_s, 0.05
    while not is_done() and time.monotonic() < end:
        time.sleep(pause)
        pause = min(0.5, pause * 1.3)


class Ending:
    """One job on its way out: made before the stop, ordered, followed. look, free_before: as for `Remains`."""

    def __init__(
        self, job_id: str, look: Callable[[], GpuView], *, free_before: Mapping[int, int] | None = None
    ) -> None:
        self.job = folder.get(job_id)
        self._nodes: list[str] = []
        gpus = [int(n[4:]) for n in self.job.spec.locks if n.startswith("gpu:") and n[4:].isdigit()]
        self._remains = Remains(
            self._processes, look, job_id=self.job.spec.id, gpus=gpus, free_before=free_before
        )

    def _processes(self) -> set[int]:
        pids = set(procs.by_job([self.job.spec.id])[self.job.spec.id])
        job = folder.get(self.job.spec.id)
        if job.pid and not job.state.is_final:  # the number of an ended job may be another's by now
            pids |= procs.family({job.pid}, sessions={job.pid}, spare_keepers_but=job.spec.id)
        return pids

    def order(self, by: str = "the user") -> None:
        """Ask the keeper to stop the job: TERM, grace, KILL; and those of its other nodes. Returns at once."""
        self._nodes = [
            j.spec.id
            for j in folder.list_jobs()
            if is_live(j) and j.spec.params.get("server") == self.job.spec.id
        ]
        for job_id in self._nodes if self.job.state.is_final else [self.job.spec.id, *self._nodes]:
            folder.stop(job_id, by=by)

    def finish(self, timeout_s: float, free_wait_s: float = FREE_WAIT_S) -> Stopped:
        """Wait for the job's end, kill what outlived it, wait until its GPU memory is back, and say what is not.

        timeout_s: for the job's own end, at least the grace that it was started with; then every process of it is killed. free_wait_s:
        for the driver to give memory back.
        """
        limit_s = max(timeout_s, self.job.spec.grace_s + _AFTER_GRACE_S)
        job = folder.wait(self.job.spec.id, timeout_s=limit_s, adopts=True)
        if not job.state.is_final:
            self._remains.kill()
            job = folder.wait(job.spec.id, timeout_s=_KILL_WAIT_S, adopts=True)
        rest = self._remains.clear(free_wait_s)
        return Stopped(job=job, rest=rest, nodes=tuple(self._ends_of_nodes()))

    def _ends_of_nodes(self) -> Iterable[str]:
        for job_id in self._nodes:
            job = folder.wait(job_id, timeout_s=_NODE_WAIT_S, adopts=True)
            if not job.state.is_final or job.exit_code not in (0, NODE_STOPPED):
                yield f"{job.spec.title}: {job.reason or job.state} (k2tui jobs logs {job_id})"


def free_memory(gpus: Collection[int] = ()) -> dict[int, int]:
    """GPU -> bytes that are free now, of these GPUs or of all; to be given to a stop as free_before. {} without a driver."""
    from k2tui.doctor import gpu_facts

    return {g.index: g.free_b for g in gpu_facts(tuple(gpus)) if g.free_b is not None}


def holds_gpus(spec: JobSpec) -> bool:
    """Whether a stop of this job has to be followed to the end of its GPU memory: a server, or work that has locked a GPU."""
    return spec.kind == "server" or any(name.startswith("gpu:") for name in spec.locks)


def stop_child(
    process: subprocess.Popen[bytes],
    *,
    gpus: Collection[int] = (),
    free_before: Mapping[int, int] | None = None,
    grace_s: float = 20.0,
) -> Rest:
    """Stop a server that is a child of this process and leads a session, as a job's: TERM, grace, KILL, GPU memory back."""
    from k2tui.sources.nvml import NvmlSampler

    def find() -> set[int]:
        if process.returncode is None:
            return procs.family({process.pid}, sessions={process.pid})
        found = procs.family((), sessions={process.pid})
        return (
            set[int]() if process.pid in found else found
        )  # it was waited for: its number may be another's by now

    sampler = NvmlSampler()
    try:
        remains = Remains(find, sampler.take, gpus=gpus, free_before=free_before)
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            remains.kill()
            process.wait()
        return remains.clear()
    finally:
        sampler.stop()


def stop_servers(
    job_ids: Iterable[str],
    *,
    by: str = "the user",
    timeout_s: float = 60.0,
    free_before: Mapping[int, int] | None = None,
) -> list[Stopped]:
    """Stop these jobs together and see that nothing of them is left: processes and GPU memory. Takes seconds."""
    from k2tui.sources.nvml import NvmlSampler

    sampler = NvmlSampler()
    try:
        endings = [Ending(job_id, sampler.take, free_before=free_before) for job_id in job_ids]
        for ending in endings:
            ending.order(by)
        return [ending.finish(timeout_s) for ending in endings]
    finally:
        sampler.stop()
