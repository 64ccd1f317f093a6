"""The table of faults tried: real processes, killed at random moments; what the state read back says; what is left over.

    python tests/benchmarks/faults.py                # some 15 minutes on two cores
    python tests/benchmarks/faults.py --scale 0.1    # a quick look
    python tests/benchmarks/faults.py --only keeper --markdown

Every job notes the truth about itself in files of its own (started, ended with which code), which the state read back is
compared with. Exit code 1 when anything was lost, wrong, started twice or left over.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from k2tui.core.job import Job, JobSpec, JobState  # noqa: E402
from k2tui.errors import K2Error  # noqa: E402
from k2tui.jobs import folder, procs  # noqa: E402
from k2tui.sources.plan import load_plan  # noqa: E402

PORT = 32260
WORK = """
import os, subprocess, sys, time
d, how, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
open(f"{d}/start.{os.getpid()}", "w").close()
if "kids" in how:
    subprocess.Popen(["sleep", "300"])
    subprocess.Popen(["sleep", "301"], start_new_session=True)
end = time.monotonic() + seconds
n = 0
while time.monotonic() < end:
    print("line", n, flush=True)
    n += 1
    time.sleep(0.01)
code = 3 if "fail" in how else 0
if "result" in how:
    with open(os.environ["K2TUI_JOB_DIR"] + "/result.tmp", "w") as fh:
        fh.write('{"n": %d}' % n)
    os.rename(os.environ["K2TUI_JOB_DIR"] + "/result.tmp", os.environ["K2TUI_JOB_DIR"] + "/result.json")
with open(f"{d}/end.tmp", "w") as fh:
    fh.write(f"{code} {n}")
os.rename(f"{d}/end.tmp", f"{d}/end")
sys.exit(code)
"""


@dataclass
class Fault:
    """One row of the table."""

    name: str
    tried: int = 0
    jobs: int = 0
    seen: dict[str, int] = field(default_factory=dict)  # states read back
    wrong: list[str] = field(default_factory=list)
    note: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def saw(self, state: str) -> None:
        with self.lock:
            self.seen[state] = self.seen.get(state, 0) + 1

    def fail(self, words: str) -> None:
        with self.lock:
            self.wrong.append(words)


class World:
    """A home of its own, and the truth about the jobs in it."""

    def __init__(self, seed: int) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="k2tui-faults-"))
        self.home = self.root / "home"
        self.truth = self.root / "truth"
        self.home.mkdir()
        self.truth.mkdir()
        self.random = random.Random(seed)
        self.count = 0
        self.lock = threading.Lock()
        os.environ["K2TUI_HOME"] = str(self.home)

    def place(self) -> Path:
        with self.lock:
            self.count += 1
            path = self.truth / str(self.count)
        path.mkdir()
        return path

    def spec(self, truth: Path, how: str, seconds: float, **fields: object) -> JobSpec:
        argv = (sys.executable, "-S", "-c", WORK, str(truth), how, str(seconds))
        return JobSpec(id="", stage="f", title="fault", argv=argv, cwd=str(self.root), grace_s=1.0, **fields)  # type: ignore[arg-type]

    def any_how(self) -> str:
        return self.random.choice(["ok", "ok result", "fail", "ok kids", "fail kids", "ok result kids"])

    def left_over(self) -> list[int]:
        """Processes of any job of this home that live now: by their environment, their work lock, their keeper's command."""
        ids = (
            [p.name for p in (self.home / "jobs").glob("*") if not p.name.startswith(".")]
            if (self.home / "jobs").exists()
            else []
        )
        found = {pid for pids in procs.by_job(ids).values() for pid in pids}
        mark = os.fsencode(str(self.root))
        for pid in procs.all_pids():
            if pid == os.getpid():
                continue
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            if (
                mark in line
                and (b"k2tui.jobs.keeper" in line or WORK[:40].encode() in line)
                and procs.birth(pid)
            ):
                found.add(pid)
        return sorted(found)

    def close(self, fault: Fault) -> None:
        end = time.monotonic() + 8
        while (left := self.left_over()) and time.monotonic() < end:
            time.sleep(0.1)
        if left:
            fault.fail(f"{len(left)} processes left over")
            procs.signal_all(left, signal.SIGKILL)
        shutil.rmtree(self.root, ignore_errors=True)


def wait_final(job_id: str, seconds: float = 30.0) -> Job:
    """The job's end as any reader sees it; an orphan is looked at until its work has ended."""
    return folder.wait(job_id, seconds)


def judge(fault: Fault, job: Job, truth: Path, *, may_be: set[JobState], complete_log: bool = True) -> None:
    """Compare what is read back with what really happened."""
    starts = len(list(truth.glob("start.*")))
    try:
        code, lines = (int(w) for w in (truth / "end").read_text().split())
    except (OSError, ValueError):
        code, lines = None, -1
    state = job.state
    fault.saw(str(state))
    what = f"{job.spec.id} {state} ({job.reason}); truth: {starts} starts, end {code}"
    if starts > 1:
        fault.fail(f"started twice: {what}")
    if state not in may_be:
        fault.fail(f"wrong state: {what}")
    if state is JobState.SUCCEEDED and code != 0 and job.result is None:
        fault.fail(f"succeeded without an end: {what}")
    if state is JobState.FAILED and job.exit_code == 3 and code != 3:
        fault.fail(f"an exit that never was: {what}")
    if state is JobState.FAILED and code == 0 and "kill" not in job.reason and "signal" not in job.reason:
        fault.fail(f"failed, but it ended well: {what}")
    if not state.is_final:
        fault.fail(f"no end after waiting: {what}")
    if code is not None and complete_log:
        log = folder.log_path(job.spec.id).read_text().splitlines()
        if [w for w in log if w.startswith("line ")] != [f"line {n}" for n in range(lines)]:
            fault.fail(f"log lines lost: {what}")
    if procs.by_job([job.spec.id])[job.spec.id]:
        end = time.monotonic() + 5
        while procs.by_job([job.spec.id])[job.spec.id] and time.monotonic() < end:
            time.sleep(0.05)
        if left := procs.by_job([job.spec.id])[job.spec.id]:
            fault.fail(f"left over {left}: {what}")


def each(count: int, work: Callable[[int], None], threads: int = 4) -> None:
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work, n) for n in range(count)]:
            done.result()


def end_orphan(fault: Fault, job_id: str) -> None:
    """What `stop` makes of a job whose keeper is dead."""
    job = folder.stop(job_id, wait_s=30)
    if not job.state.is_final:
        fault.fail(f"{job_id} could not be stopped: {job.state}")


# ---- the faults


def kill_keeper(fault: Fault, world: World, count: int) -> None:
    """SIGKILL to the keeper; half of the orphans are stopped (adopted for it), the others end by themselves."""

    def one(n: int) -> None:
        truth = world.place()
        job_id = folder.submit(world.spec(truth, world.any_how(), world.random.uniform(0.05, 0.6)))
        time.sleep(world.random.uniform(0, 0.4))
        job = folder.get(job_id)
        if job.keeper_pid:
            procs.signal_all([job.keeper_pid], signal.SIGKILL)
        if n % 2:
            end_orphan(fault, job_id)
        elif "kids" in job.spec.argv[5]:
            end_orphan(fault, job_id)  # its sleepers would go on for minutes: that is no fault of the state
        judge(
            fault,
            wait_final(job_id),
            truth,
            may_be={JobState.SUCCEEDED, JobState.FAILED, JobState.LOST, JobState.STOPPED},
        )

    fault.jobs = count
    each(count, one)


def kill_work(fault: Fault, world: World, count: int) -> None:
    """SIGKILL to the work itself."""

    def one(n: int) -> None:
        truth = world.place()
        job_id = folder.submit(world.spec(truth, world.any_how(), world.random.uniform(0.05, 0.6)))
        time.sleep(world.random.uniform(0, 0.4))
        job = folder.get(job_id)
        if job.pid and not job.state.is_final:
            procs.signal_all([job.pid], signal.SIGKILL)
        judge(fault, wait_final(job_id), truth, may_be={JobState.SUCCEEDED, JobState.FAILED})

    fault.jobs = count
    each(count, one)


def kill_both(fault: Fault, world: World, count: int) -> None:
    """SIGKILL to keeper and work in the same moment, in either order."""

    def one(n: int) -> None:
        truth = world.place()
        job_id = folder.submit(
            world.spec(truth, world.any_how().replace("kids", ""), world.random.uniform(0.1, 0.6))
        )
        time.sleep(world.random.uniform(0, 0.4))
        job = folder.get(job_id)
        pids = [p for p in (job.keeper_pid, job.pid) if p]
        procs.signal_all(reversed(pids) if n % 2 else pids, signal.SIGKILL)
        judge(fault, wait_final(job_id), truth, may_be={JobState.SUCCEEDED, JobState.FAILED, JobState.LOST})

    fault.jobs = count
    each(count, one)


def kill_submitter(fault: Fault, world: World, count: int) -> None:
    """SIGKILL to the process that submits: afterwards there is no job, or one whole job; never half of one."""
    code = (
        "import json, sys; from k2tui.core import journal; from k2tui.jobs import folder\n"
        "print('up', flush=True)\nfolder.submit(journal.spec_of(json.loads(sys.argv[1])))\nprint('done', flush=True)"
    )
    from k2tui.core import journal

    def one(n: int) -> None:
        truth = world.place()
        spec = world.spec(truth, "ok", 0.2)
        spec_json = json.dumps(journal.spec_to_json(spec))
        process = subprocess.Popen([sys.executable, "-c", code, spec_json], cwd=ROOT, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(world.random.uniform(0, 0.5))
        process.kill()
        process.communicate()
        time.sleep(0.8)  # a keeper that has everything goes on without its submitter
        mine = [j for j in folder.list_jobs() if str(truth) in j.spec.argv]
        if not mine:
            fault.saw("no job")
            time.sleep(0.3)
            if list(truth.glob("start.*")):
                fault.fail("work without a job")
            return
        judge(fault, wait_final(mine[0].spec.id), truth, may_be={JobState.SUCCEEDED})

    fault.jobs = count
    each(count, one, threads=2)


def kill_reader(fault: Fault, world: World, count: int) -> None:
    """SIGKILL to readers like a dashboard (list, settle, adopt, write the plan) while jobs and keepers end around them."""
    plan = world.root / "plan.json"
    names = [f"t{n}" for n in range(20)]
    plan.write_text(
        json.dumps(
            [{"id": n, "content": n, "status": "pending", "stage": "f" if n == "t0" else ""} for n in names]
        )
    )
    code = (
        "import random, sys; from k2tui.jobs import folder; from k2tui.sources.plan import PlanFile\n"
        "p = PlanFile(sys.argv[1]); p.poll(); print('up', flush=True)\n"
        "while True:\n"
        "    jobs = folder.list_jobs(); p.sync(jobs)\n"
        "    p.set_task(f't{random.randrange(1, 20)}', note='n' * random.randrange(1, 3000)); folder.adopt_orphans()\n"
    )
    stop = threading.Event()
    truths: list[tuple[str, Path]] = []

    def submit() -> None:
        while not stop.is_set():
            truth = world.place()
            job_id = folder.submit(
                world.spec(truth, world.any_how().replace("kids", ""), world.random.uniform(0.05, 0.4))
            )
            truths.append((job_id, truth))
            if world.random.random() < 0.3:
                time.sleep(world.random.uniform(0, 0.2))
                job = folder.get(job_id)
                if job.keeper_pid:
                    procs.signal_all([job.keeper_pid], signal.SIGKILL)
            time.sleep(0.1)

    other = threading.Thread(target=submit)
    other.start()
    try:
        for _ in range(count):
            process = subprocess.Popen(
                [sys.executable, "-c", code, str(plan)],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(world.random.uniform(0, 0.25))
            process.kill()
            process.communicate()
            try:
                if {t.id for t in load_plan(plan).tasks} != set(names):
                    fault.fail("a task was lost from the plan")
            except K2Error as err:
                fault.fail(f"the plan is broken: {err.message}")
    finally:
        stop.set()
        other.join()
    fault.jobs = len(truths)
    for job_id, truth in truths:
        judge(fault, wait_final(job_id), truth, may_be={JobState.SUCCEEDED, JobState.FAILED, JobState.LOST})
    if {j.spec.id for j in folder.list_jobs()} != {i for i, _ in truths}:
        fault.fail("the list lost a job")


def at_once(fault: Fault, world: World, count: int) -> None:
    """Three submitters and two readers at once; all jobs want the same lock, which only one may have at a time."""
    busy = world.root / "busy"
    log = world.root / "order"
    work = (
        "import os, sys, time\n"
        f"fd = os.open({str(busy)!r}, os.O_CREAT | os.O_EXCL)\n"
        f"open({str(log)!r}, 'a').write('x')\ntime.sleep(0.02)\nos.unlink({str(busy)!r})\n"
    )
    submitter = (
        "import sys; from k2tui.core.job import JobSpec; from k2tui.jobs import folder\n"
        "for _ in range(int(sys.argv[2])):\n"
        "    print(folder.submit(JobSpec(id='', stage='f', title='', argv=(sys.executable, '-S', '-c', sys.argv[1]), locks=('gpu:0', 'port:1'))))\n"
    )
    reader = "from k2tui.jobs import folder\nimport time\nend = time.time() + 600\nwhile time.time() < end: folder.list_jobs(); time.sleep(0.05)\n"
    per = max(1, count // 3)
    readers = [subprocess.Popen([sys.executable, "-c", reader], cwd=ROOT) for _ in range(2)]
    writers = [
        subprocess.Popen([sys.executable, "-c", submitter, work, str(per)], cwd=ROOT, stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    ids: list[str] = []
    for process in writers:
        out, _ = process.communicate()
        ids += out.decode().split()
    fault.jobs = len(ids)
    for job_id in ids:
        job = folder.wait(job_id, 300)
        fault.saw(str(job.state))
        if job.state is not JobState.SUCCEEDED:
            fault.fail(f"{job_id} {job.state}: {job.reason} (two held the lock at once?)")
    for process in readers:
        process.kill()
        process.wait()
    ran = len(log.read_text()) if log.exists() else 0
    if ran != per * 3 or len(set(ids)) != per * 3:
        fault.fail(f"{ran} runs and {len(set(ids))} ids for {per * 3} jobs")


def hang_up(fault: Fault, world: World, count: int) -> None:
    """The terminal goes away (its master is closed, as sshd does) under a shell that has just submitted a job."""

    def one(n: int) -> None:
        truth = world.place()
        words = shlex.join(
            [sys.executable, "-m", "k2tui", "jobs", "submit", "--", *world.spec(truth, "ok", 1.0).argv]
        )
        pid, master = pty.fork()
        if pid == 0:
            os.chdir(ROOT)
            os.execv("/bin/sh", ["/bin/sh", "-c", f"{words}; exec sleep 300"])
        end = time.monotonic() + 30
        while (
            not (mine := [j for j in folder.list_jobs() if str(truth) in j.spec.argv])
            and time.monotonic() < end
        ):
            time.sleep(0.05)
        time.sleep(world.random.uniform(0, 0.5))
        os.close(master)
        os.waitpid(pid, 0)
        if not mine:
            fault.fail("no job came of it")
            return
        judge(fault, wait_final(mine[0].spec.id), truth, may_be={JobState.SUCCEEDED})

    fault.jobs = count
    each(count, one, threads=1)  # fork in one thread only


def ssh_dropped(fault: Fault, world: World, count: int) -> None:
    """A real sshd on loopback; its session (or the client) is killed while the job runs."""
    from tests.jobs.sshd import Sshd, why_not

    if why_not():
        fault.note = f"skipped: {why_not()}"
        return
    server = Sshd(world.root / "sshd", PORT)
    server.start()
    try:
        for n in range(count):
            truth = world.place()
            words = shlex.join(
                [sys.executable, "-m", "k2tui", "jobs", "submit", "--", *world.spec(truth, "ok", 2.0).argv]
            )
            client = server.login(
                f"cd {shlex.quote(str(ROOT))} && export K2TUI_HOME={shlex.quote(str(world.home))} && {words} && exec sleep 300"
            )
            end = time.monotonic() + 30
            while (
                not (mine := [j for j in folder.list_jobs() if str(truth) in j.spec.argv])
                and time.monotonic() < end
            ):
                time.sleep(0.05)
            time.sleep(world.random.uniform(0, 0.5))
            if n % 2:
                server.kill_sessions()
            else:
                client.kill()
            client.kill()
            client.communicate()
            fault.jobs += 1
            if not mine:
                fault.fail("no job came of it")
                continue
            judge(fault, wait_final(mine[0].spec.id), truth, may_be={JobState.SUCCEEDED})
    finally:
        server.stop()


def _fill(path: Path) -> None:
    """Write until the disk is full."""
    with open(path, "ab", buffering=0) as fh:
        try:
            while fh.write(b"x" * 4096):
                pass
        except OSError:
            pass


def full_disk(fault: Fault, world: World, count: int) -> None:
    """A tmpfs of 1 MiB is filled at a random moment of a job; later there is room again."""
    if os.geteuid() != 0:
        fault.note = "skipped: mounting a tmpfs needs root"
        return
    point = world.root / "small"
    point.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(point)], capture_output=True
    ).returncode:
        fault.note = "skipped: a tmpfs cannot be mounted here"
        return
    os.environ["K2TUI_HOME"] = str(point)
    refused = 0
    try:
        for _ in range(count):
            truth = world.place()
            filler = point / "filler"

            early = world.random.random() < 0.3
            if early:
                _fill(filler)
            try:
                job_id = folder.submit(
                    world.spec(truth, "ok" if world.random.random() < 0.5 else "fail", 0.3)
                )
            except K2Error:
                refused += 1
                fault.saw("refused")
                filler.unlink()
                if list(truth.glob("start.*")):
                    fault.fail("refused, but it ran")
                continue
            time.sleep(world.random.uniform(0, 0.5))
            if not early:
                _fill(filler)
            time.sleep(world.random.uniform(0, 0.6))
            filler.unlink(missing_ok=True)
            fault.jobs += 1
            # print() into a full disk makes the work itself fail: its log is not judged then
            judge(
                fault,
                wait_final(job_id),
                truth,
                may_be={JobState.SUCCEEDED, JobState.FAILED},
                complete_log=False,
            )
            job = folder.get(job_id)
            if job.unknown_events:
                fault.fail(f"{job_id}: something half written was believed or counted")
            folder.delete(job_id)
        fault.note = f"{refused} submissions refused with a message"
    finally:
        os.environ["K2TUI_HOME"] = str(world.home)
        end = time.monotonic() + 20
        while (
            subprocess.run(["umount", str(point)], capture_output=True).returncode and time.monotonic() < end
        ):
            time.sleep(0.2)


def clock_jumps(fault: Fault, world: World, count: int) -> None:
    """The wall clock jumps by up to a year, both ways, while jobs run: durations, time limits and order stay right."""
    clock = world.root / "clock"
    clock.write_text("0")
    os.environ["K2TUI_FAKE_CLOCK"] = str(clock)
    stop = threading.Event()

    def jump() -> None:
        while not stop.is_set():
            tmp = clock.with_suffix(".tmp")
            tmp.write_text(str(world.random.uniform(-3e7, 3e7)))
            os.replace(tmp, clock)
            time.sleep(0.05)

    other = threading.Thread(target=jump)
    other.start()

    def one(n: int) -> None:
        truth = world.place()
        limited = n % 3 == 0
        spec = world.spec(truth, "ok", 30.0 if limited else 0.5, timeout_s=1.0 if limited else 60.0)
        job_id = folder.submit(spec)
        job = wait_final(job_id)
        judge(
            fault,
            job,
            truth,
            may_be={JobState.FAILED} if limited else {JobState.SUCCEEDED},
            complete_log=not limited,
        )
        if job.took_s is None or not (0.9 if limited else 0.45) <= job.took_s <= 15:
            fault.fail(f"{job_id} took {job.took_s} s")

    try:
        each(count, one)
    finally:
        stop.set()
        other.join()
        del os.environ["K2TUI_FAKE_CLOCK"]
    ids = [j.spec.id for j in folder.list_jobs()]
    if ids != sorted(ids, reverse=True):
        fault.fail("the order of the list is wrong")
    fault.jobs = count


def reboots(fault: Fault, world: World, count: int) -> None:
    """Everything is killed, then the boot id is another one: as after a power cut."""

    def one(n: int) -> None:
        truth = world.place()
        job_id = folder.submit(
            world.spec(
                truth, world.random.choice(["ok", "fail", "ok result"]), world.random.uniform(0.1, 0.5)
            )
        )
        time.sleep(world.random.uniform(0, 0.5))
        job = folder.get(job_id)
        procs.signal_all([p for p in (job.keeper_pid, job.pid) if p], signal.SIGKILL)
        if world.random.random() < 0.5:  # the last line was only half on the disk
            path = folder.folder_of(job_id) / "journal.jsonl"
            raw = path.read_bytes()
            path.write_bytes(raw[: len(raw) - world.random.randrange(1, 30)])

    each(count, one)
    time.sleep(1)
    os.environ["K2TUI_FAKE_BOOT_ID"] = "another-boot"
    try:
        for job in folder.list_jobs():
            fault.saw(str(job.state))
            if not job.state.is_final:
                fault.fail(f"{job.spec.id} is {job.state} after a reboot")
            if (
                job.state is JobState.LOST
                and "rebooted" not in job.reason
                and "without a word" not in job.reason
                and "before the work began" not in job.reason
            ):
                fault.fail(f"{job.spec.id}: {job.reason}")
    finally:
        del os.environ["K2TUI_FAKE_BOOT_ID"]
    fault.jobs = count


def kill_pipeline(fault: Fault, world: World, count: int) -> None:
    """SIGKILL to the runner of a pipeline; the next run takes its step over and every step runs once."""
    for n in range(count):
        place = world.place()
        steps = ""
        for name in ("a", "b", "c"):
            program = f"import os, time; open('{name}.runs', 'a').write('x'); time.sleep(0.4); open('{name}.done', 'w').close()"
            steps += f'[[step]]\nname = "{name}"\nargv = [{json.dumps(sys.executable)}, "-S", "-c", {json.dumps(program)}]\n'
        (place / "pipeline.toml").write_text(f'name = "p{n}"\n{steps}')
        argv = [sys.executable, "-m", "k2tui", "pipeline", "run", "--here", "--file", "pipeline.toml"]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        for _ in range(2):
            process = subprocess.Popen(
                argv, cwd=place, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            time.sleep(world.random.uniform(0.3, 1.6))
            process.kill()
            process.wait()
        done = subprocess.run(argv, cwd=place, env=env, capture_output=True, text=True)
        fault.saw("whole" if done.returncode == 0 else "failed")
        if done.returncode:
            fault.fail(done.stderr.strip() or done.stdout.strip())
        runs = [(place / f"{name}.runs").read_text() for name in "abc"]
        if runs != ["x"] * 3:
            fault.fail(f"runs of the steps: {runs}")
        fault.jobs += 3


FAULTS: dict[str, tuple[str, Callable[[Fault, World, int], None], int]] = {
    "keeper": ("keeper killed (SIGKILL, random moment)", kill_keeper, 240),
    "work": ("work killed (SIGKILL, random moment)", kill_work, 160),
    "both": ("keeper and work killed together", kill_both, 160),
    "submitter": ("submitting process killed", kill_submitter, 100),
    "reader": ("dashboard-like reader and plan writer killed", kill_reader, 60),
    "runner": ("pipeline runner killed, twice each", kill_pipeline, 10),
    "together": ("3 submitters, 2 readers, one lock, all at once", at_once, 90),
    "hangup": ("terminal hung up (pty closed)", hang_up, 30),
    "ssh": ("ssh session or client killed (real sshd)", ssh_dropped, 20),
    "disk": ("disk full at a random moment (tmpfs)", full_disk, 60),
    "clock": ("wall clock jumps by up to a year", clock_jumps, 60),
    "reboot": ("power cut: all killed, journal torn, new boot id", reboots, 80),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", type=float, default=1.0, help="how many times as often as usual")
    parser.add_argument("--only", action="append", choices=list(FAULTS), default=[])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--markdown", action="store_true", help="the table as in docs/reliability.md")
    args = parser.parse_args()
    bar = "|" if args.markdown else " "
    print(
        f"{bar} fault {bar} tried {bar} jobs {bar} read back as {bar} lost, wrong or left over {bar}",
        flush=True,
    )
    if args.markdown:
        print("|---|---|---|---|---|")
    is_bad = False
    for name, (words, work, usual) in FAULTS.items():
        if args.only and name not in args.only:
            continue
        fault = Fault(words)
        world = World(args.seed)
        begun = time.monotonic()
        count = max(1, round(usual * args.scale))
        work(fault, world, count)
        fault.tried = 0 if fault.note.startswith("skipped") else count
        world.close(fault)
        seen = ", ".join(f"{n} {s}" for s, n in sorted(fault.seen.items(), key=lambda kv: -kv[1]))
        seen += f" ({fault.note})" if fault.note else ""
        verdict = str(len(fault.wrong) or "nothing")
        print(
            f"{bar} {words} {bar} {fault.tried} {bar} {fault.jobs} {bar} {seen} {bar} {verdict} {bar}",
            flush=True,
        )
        print(f"{words}: {count} in {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
        for w in fault.wrong[:10]:
            print(f"   {w}", file=sys.stderr, flush=True)
        is_bad = is_bad or bool(fault.wrong)
    return 1 if is_bad else 0


if __name__ == "__main__":
    sys.exit(main())
