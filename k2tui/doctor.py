"""Checks before the ten minutes: each finding says what, on which evidence, how bad, and what to do. Starts nothing."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from k2tui import __version__, checkpoint, paths
from k2tui.checkpoint import Checkpoint
from k2tui.config import Config, Profile
from k2tui.core.job import Job
from k2tui.core.launch_rules import GpuFact, LaunchFacts, check_all
from k2tui.core.topology import Topology
from k2tui.doctor_gpu import check_gpus, check_links, gpus_per_node, needs_gpus, settle_gpus
from k2tui.engine_flags import InstalledEngine, installed, nearest, unknown_flags
from k2tui.errors import K2Error
from k2tui.sources.nvml_topology import read_topology
from k2tui.sources.procs import listener


class Severity(StrEnum):
    OK = "ok"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"  # the start would fail


@dataclass(frozen=True)
class Finding:
    check: str
    severity: Severity
    evidence: str
    todo: str = ""
    source: str = ""  # where the rule comes from

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def host_problem(host: str) -> str:
    """Why nothing can listen at this name ("the name 'x' cannot be resolved (...)"), "" when it has an address."""
    try:
        socket.getaddrinfo(host, None)
    except OSError as err:
        return f"the name {host!r} cannot be resolved ({err.strerror or err})"
    except UnicodeError:
        return f"{host!r} is not the name of a machine"
    return ""


def port_owner(host: str, port: int) -> str:
    """Who listens there, in words ("pid 123 (python)"), "" when it is free, "another process" when that cannot be told."""
    probe = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        return ""
    except OverflowError:
        return "nobody: ports go from 1 to 65535"
    except PermissionError:
        return "the system: ports below 1024 need root"
    except OSError as err:
        if err.errno == 99:  # EADDRNOTAVAIL
            return f"nobody: {host} is not an address of this machine"
    finally:
        probe.close()
    import psutil

    pid = listener(port)
    try:
        if pid:
            job = _job_of(pid)
            return f"pid {pid} ({psutil.Process(pid).name()})" + (f", k2tui's own job {job.spec.id} ({job.spec.title or job.spec.stage})" if job else "")
    except (psutil.Error, OSError):
        pass
    return "another process"


def _job_of(pid: int) -> Job | None:
    """The job of ours that a process belongs to; None for any other process."""
    from k2tui.jobs import folder, procs

    job_id = procs.job_id_of(pid)
    try:
        return folder.get(job_id) if job_id else None
    except (K2Error, OSError):
        return None  # of another state folder, or deleted


def job_at(port: int) -> Job | None:
    """The job of ours that listens at this port; None when nobody does, or somebody else."""
    pid = listener(port)
    return _job_of(pid) if pid else None


def _free_the_port(profile: Profile) -> str:
    """What to do about a port that is held."""
    job = job_at(profile.port)
    other = f"or set another port in [profile.{profile.name}]"
    if job is None:
        return f"stop that process, {other}"
    by = f", started by job {job.spec.parent}" if job.spec.parent else ""
    return f"stop it (`k2tui down {job.spec.id}`{by}), {other}"


def free_port(host: str, start: int) -> int:
    """The first free port from `start` on. Raises K2Error after 100 tries, or when the host has no address."""
    if problem := host_problem(host):
        raise K2Error(problem, "set host to an address of this machine: 127.0.0.1, or 0.0.0.0 for all")
    for port in range(start, min(start + 100, 65536)):
        if not port_owner(host, port):
            return port
    raise K2Error(f"no free port from {start} to {start + 99}", "stop what holds them, or give --port")


def check_system(*, needs_gpu: bool = False) -> Iterator[Finding]:
    """This machine. needs_gpu: it is looked at for a start that cannot do without one."""
    yield Finding("python", Severity.OK, f"Python {sys.version.split()[0]}, k2tui {__version__}")
    for package, extra in (("torch", "local"), ("transformers", "local"), ("sglang", "sglang")):
        found = importlib.util.find_spec(package) is not None
        yield Finding(
            f"package {package}",
            Severity.OK if found else Severity.INFO,
            "installed here" if found else "not in this environment",
            "" if found else f"{paths.install_hint(extra)}; or name another interpreter by `python` in the profile",
        )
    for check, severity, evidence, todo in check_gpus(are_needed=needs_gpu):
        yield Finding(check, Severity(severity), evidence, todo)
    state = paths.state_dir()
    probe = state
    while not probe.exists():
        probe = probe.parent
    free = shutil.disk_usage(probe).free
    low = free < 1 << 30
    yield Finding("disk", Severity.WARNING if low else Severity.OK, f"{free / 1e9:.1f} GB free at {state}", "free some space: logs and states need it" if low else "")
    if not os.access(probe, os.W_OK):
        yield Finding("state folder", Severity.ERROR, f"{probe} cannot be written", "set K2TUI_HOME to a folder of yours")
    shm = Path("/dev/shm")
    if shm.exists():
        size = shutil.disk_usage(shm)
        small = size.free < 1 << 30
        yield Finding(
            "/dev/shm",
            Severity.WARNING if small else Severity.OK,
            f"{size.free / 1e9:.1f} of {size.total / 1e9:.1f} GB free",
            "NCCL and SGLang use it: docker run --shm-size 32g or --ipc=host" if small else "",
        )
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft < 4096
    yield Finding("open files", Severity.WARNING if few else Severity.OK, f"limit {soft} (hard {hard})", "ulimit -n 65536" if few else "")


@dataclass(frozen=True)
class Seen:
    """Everything that was looked at for one start, each thing once. A checkpoint that cannot be inspected is its error."""

    profile: Profile
    model: Checkpoint | K2Error
    draft: Checkpoint | K2Error | None
    gpus: list[GpuFact]
    topology: Topology | None  # None: one GPU, nothing to join
    engine: InstalledEngine | None  # None: the embedded engine
    python_error: str = ""


def look(profile: Profile) -> Seen:
    """Look at files, GPUs and the engine's interpreter, side by side: each of them waits for something else."""
    python = os.path.expanduser(profile.python)
    python_error = f"python = {python!r} is no program" if python and not os.access(python, os.X_OK) else ""
    wants_engine = profile.engine in ("sglang", "vllm") and not python_error
    with ThreadPoolExecutor(3) as pool:
        engine = pool.submit(installed, profile.engine, python, profile.env) if wants_engine else None
        gpus = pool.submit(gpu_facts, profile.gpus)
        topology = pool.submit(read_topology) if profile.engine != "local" and (profile.tp_size > 1 or len(profile.gpus) > 1) else None
        model = _inspect(profile.model, "model")
        draft = _inspect(profile.draft, "draft") if profile.draft else None
        return Seen(
            profile, model, draft, gpus.result(), topology.result() if topology is not None else None,
            engine.result() if engine is not None else None, python_error,
        )  # fmt: skip


def _inspect(name: str, key: str) -> Checkpoint | K2Error:
    try:
        return checkpoint.inspect(paths.model_path(name))
    except K2Error as err:
        return K2Error(err.message, err.hint.replace("`model`", f"`{key}`"))


def check_profile(profile: Profile) -> Iterator[Finding]:
    """What is known about this start before it is made. GPUs that the start would choose are chosen first."""
    if not profile.model:
        yield Finding("model", Severity.ERROR, f"profile {profile.name!r} names no model", f"set model in [profile.{profile.name}]")
        return
    if profile.auto_gpus:
        try:
            profile = settle_gpus(profile)
        except K2Error as err:
            yield Finding("GPUs", Severity.ERROR, err.message, err.hint)
            profile = replace(profile, auto_gpus=0)
        else:
            if profile.gpus:
                yield Finding("GPUs", Severity.OK, "chosen now: " + ", ".join(map(str, profile.gpus)) + ", free and best joined")
    yield from check_seen(look(profile))


def check_seen(seen: Seen) -> Iterator[Finding]:
    """The findings of what was looked at, in the order in which a start would meet them."""
    profile = seen.profile
    yield from _check_model("model", seen.model)
    if seen.draft is not None:
        yield from _check_model("draft", seen.draft)
    for check, severity, evidence, todo in check_links(seen.topology, profile.gpus, profile.tp_size // profile.nnodes):
        yield Finding(check, Severity(severity), evidence, todo)
    if not seen.gpus and needs_gpus(profile):
        need = gpus_per_node(profile)
        yield Finding(
            "GPUs", Severity.WARNING, f"{need} GPU{'s are' if need > 1 else ' is'} needed, 0 are seen here",
            "start it on the machine with the GPUs; where they should be seen, k2tui gpus says why they are not",
        )  # fmt: skip
    if problem := host_problem(profile.host):
        yield Finding("host", Severity.ERROR, problem, f"set host in [profile.{profile.name}]: 127.0.0.1, or 0.0.0.0 for every network")
    else:
        owner = port_owner(profile.host, profile.port)
        yield Finding(
            "port",
            Severity.ERROR if owner else Severity.OK,
            f"{profile.host}:{profile.port} is held by {owner}" if owner else f"{profile.host}:{profile.port} is free",
            _free_the_port(profile) if owner else "",
        )
    if seen.python_error:
        yield Finding("interpreter", Severity.ERROR, seen.python_error, f"set python in [profile.{profile.name}] to the engine's interpreter")
        yield from _check_words(profile.args)
        yield _UNCHECKED
        return
    package = {"local": "torch", "sglang": "sglang", "vllm": "vllm"}.get(profile.engine, "")
    lacks = f"engine {profile.engine!r} needs the package {package}, which {profile.python or 'this environment'} lacks"
    remedy = (
        f"set python in [profile.{profile.name}] to an interpreter that has it, "
        + ("or pip install vllm" if profile.engine == "vllm" else f"or {paths.install_hint(profile.engine)}")
    )
    argv = _argv_of(profile)
    if isinstance(argv, K2Error):
        yield Finding("command", Severity.ERROR, argv.message, argv.hint)
        argv = list(profile.args)
    version = ""
    if seen.engine is not None:
        version = seen.engine.version
        if not seen.engine.package:
            yield Finding("engine", Severity.ERROR, lacks, remedy)
            yield from _check_words(profile.args)
            yield _UNCHECKED
        else:
            unknown = unknown_flags(argv, seen.engine.flags)
            for flag, near in unknown:
                yield Finding(
                    "flags", Severity.ERROR, f"{profile.engine} {version} has no argument {flag}",
                    _meant(flag, near), f"{seen.engine.package}'s own sources",
                )  # fmt: skip
            if not unknown and seen.engine.flags:
                yield Finding("flags", Severity.OK, f"every argument is known to {profile.engine} {version}")
    elif package and importlib.util.find_spec(package) is None:
        yield Finding("engine", Severity.ERROR, lacks, remedy)
    if profile.engine == "local":
        yield from _check_own_flags(argv[argv.index("k2tui.local") + 1 :] if "k2tui.local" in argv[:4] else ["--model-path", profile.model, *argv])
    for rule in check_all(_facts(seen, argv, version)):
        yield Finding(rule.check, Severity(rule.severity), rule.evidence, rule.todo, rule.source)
    yield from _check_room(seen)
    if profile.nodes and profile.node_rank == 0:
        from k2tui.doctor_nodes import check_nodes

        yield from check_nodes(profile, version)


_UNCHECKED = Finding("flags", Severity.INFO, "flags not checked: engine not installed")


def _check_words(args: Sequence[str]) -> Iterator[Finding]:
    """What is wrong whatever the engine: a flag and its value in one item."""
    for word in args:
        name = word.split("=", 1)[0]
        if name.startswith("--") and len(name.split()) > 1:
            yield Finding("flags", Severity.WARNING, f"no engine has an argument {name!r}", _meant(name, ""))


def _meant(flag: str, near: str) -> str:
    words = flag.split()
    if len(words) > 1:
        return "args holds one word an item: " + ", ".join(f'"{word}"' for word in words)
    return f"did you mean {near}?" if near else "see its --help"


def _check_own_flags(argv: Sequence[str]) -> Iterator[Finding]:
    """The embedded engine's arguments, by its own parser."""
    from k2tui.local.arguments import known_flags, problem

    known = known_flags()
    unknown = [name for word in argv if word.startswith("--") and (name := word.split("=", 1)[0]) not in known]
    for name in unknown:
        yield Finding("flags", Severity.ERROR, f"the embedded engine has no argument {name}", _meant(name, nearest(name, known)), "its own parser")
    if unknown:
        return
    if why := problem(argv):
        yield Finding("flags", Severity.ERROR, f"the embedded engine refuses its arguments: {why}", "python -m k2tui.local --help", "its own parser")
    else:
        yield Finding("flags", Severity.OK, "every argument is known to the embedded engine")


def _argv_of(profile: Profile) -> list[str] | K2Error:
    from k2tui import engines

    try:
        return list(engines.get(profile.engine).launch(profile).argv)
    except K2Error as err:
        return err


def gpu_facts(wanted: tuple[int, ...] = ()) -> list[GpuFact]:
    """The GPUs that a start would take (all, when none is named); [] without a driver."""
    try:
        import pynvml as nvml

        nvml.nvmlInit()
    except Exception:
        return []
    found: list[GpuFact] = []
    try:
        cuda = int(nvml.nvmlSystemGetCudaDriverVersion())
        supports = f"{cuda // 1000}.{cuda % 1000 // 10}"
    except nvml.NVMLError:
        supports = ""
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            if wanted and index not in wanted:
                continue
            name, capability, total, free = "", None, None, None
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                name = str(nvml.nvmlDeviceGetName(handle))
                memory = nvml.nvmlDeviceGetMemoryInfo(handle)
                total, free = int(memory.total), int(memory.free)
                major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
                capability = int(major) * 10 + int(minor)
            except nvml.NVMLError:
                pass  # what this GPU does not tell stays unknown
            found.append(GpuFact(index, name, capability, total, free, supports))
    except nvml.NVMLError:
        pass
    finally:
        try:
            nvml.nvmlShutdown()
        except nvml.NVMLError:
            pass
    return found


def _facts(seen: Seen, argv: list[str], version: str) -> LaunchFacts:
    """What the rules look at, of what was seen."""
    profile, model = seen.profile, seen.model
    nvlink: bool | None = None
    p2p: bool | None = None
    if seen.topology is not None and len(seen.gpus) > 1:
        pairs = [p for p in seen.topology.pairs if {p.first, p.second} <= {g.index for g in seen.gpus}]
        if pairs:
            nvlink = all(p.nvlinks for p in pairs)
            p2p = None if any(p.p2p is None for p in pairs) else all(p.p2p for p in pairs)
    draft_config: dict[str, Any] = {}
    draft_b = 0.0
    names: tuple[str, ...] = ()
    d2t: list[int] | None = None
    if isinstance(seen.draft, Checkpoint):
        draft_config, draft_b = dict(seen.draft.config), float(seen.draft.total_b)
        names, d2t = checkpoint.names_and_ints(seen.draft, "d2t")
    return LaunchFacts(
        engine=profile.engine, version=version, argv=argv, env=profile.env, tp_size=profile.tp_size, nnodes=profile.nnodes, gpus=seen.gpus,
        has_nvlink=nvlink, has_p2p=p2p, config=dict(model.config) if isinstance(model, Checkpoint) else {},
        weights_b=float(model.total_b) if isinstance(model, Checkpoint) and model.is_complete else None,
        draft_config=draft_config, draft_b=draft_b, draft_d2t=d2t,
        draft_names=names, num_steps=profile.speculative_num_steps, topk=profile.speculative_eagle_topk,
        num_draft_tokens=profile.speculative_num_draft_tokens, **({} if seen.engine is None else {
            "packages": seen.engine.packages, "wants": seen.engine.wants, "torch_cuda": seen.engine.torch_cuda,
        }),
    )  # fmt: skip


def _check_room(seen: Seen) -> Iterator[Finding]:
    """Will the weights stay in the page cache, so that the second start is quick?"""
    import psutil

    if not isinstance(seen.model, Checkpoint):
        return
    size, available = seen.model.total_b, psutil.virtual_memory().available
    if size > available:
        yield Finding(
            "page cache", Severity.INFO,
            f"the checkpoint ({size / 1e9:.0f} GB) is larger than the free memory ({available / 1e9:.0f} GB): every start reads it from the disk again",
        )  # fmt: skip


def _check_model(what: str, found: Checkpoint | K2Error) -> Iterator[Finding]:
    if isinstance(found, K2Error):
        yield Finding(what, Severity.ERROR, found.message, found.hint)
        return
    path = found.path
    if found.missing:
        yield Finding(
            f"{what} shards", Severity.ERROR,
            f"{len(found.missing)} of {len(found.shards)} shards are missing in {path}: {', '.join(found.missing[:3])}{' …' if len(found.missing) > 3 else ''}",
            "download them again",
        )  # fmt: skip
    for name, why in found.broken[:5]:
        yield Finding(f"{what} shards", Severity.ERROR, f"{path / name}: {why}", "download that file again")
    if not found.shards:
        yield Finding(f"{what} shards", Severity.WARNING, f"no safetensors file in {path}", "other formats load, but their shards cannot be checked")
    elif found.is_complete:
        yield Finding(f"{what} shards", Severity.OK, f"{len(found.shards)} shards complete, {found.total_b / 1e9:.2f} GB, {_many(found.params)} weights")
    if what == "model" and not found.has_tokenizer:
        yield Finding("tokenizer", Severity.WARNING, f"no tokenizer file in {path}", "copy tokenizer.json beside config.json")
    elif what == "model" and not found.has_chat_template:
        yield Finding(
            "chat template", Severity.INFO, f"no chat template in {path}: right for a base model; /v1/chat/completions needs one",
            "copy chat_template.jinja (or tokenizer_config.json) of the model, or give --chat-template",
        )  # fmt: skip


def _many(count: int) -> str:
    return f"{count / 1e9:,.1f} B" if count >= 1e9 else f"{count / 1e6:,.1f} M"


def check(config: Config, profile_name: str | None = None) -> list[Finding]:
    """The system's findings and, with a profile, the start's. Raises UsageError for an unknown profile."""
    profile = config.get_profile(profile_name) if profile_name is not None else None
    found = list(check_system(needs_gpu=profile is not None and needs_gpus(profile)))
    if profile is not None:
        found += check_profile(profile)
    return found


def refuse_if_hopeless(profile: Profile) -> list[Finding]:
    """Raise K2Error with every error finding of a start that cannot work; return the warnings."""
    found = list(check_profile(profile))
    errors = [f for f in found if f.severity is Severity.ERROR]
    if errors:
        first = errors[0]
        more = "".join(f"\n  also: {f.evidence}" for f in errors[1:])
        raise K2Error(first.evidence + more, first.todo)
    return [f for f in found if f.severity is Severity.WARNING]
