"""Checks before the ten minutes: each finding says what, on which evidence, how bad, and what to do. Starts nothing."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from k2tui import __version__, checkpoint, paths
from k2tui.config import Config, Profile
from k2tui.core.launch_rules import GpuFact, LaunchFacts, check_all
from k2tui.errors import K2Error


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


def resolve_model(model: str) -> Path:
    """A profile's model as a path: "asset:NAME" is one that k2tui ships."""
    return paths.assets_dir() / model.removeprefix("asset:") if model.startswith("asset:") else Path(model).expanduser()


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

    try:
        for conn in psutil.net_connections("tcp"):
            if conn.laddr and conn.laddr.port == port and conn.status == psutil.CONN_LISTEN and conn.pid:
                return f"pid {conn.pid} ({psutil.Process(conn.pid).name()})"
    except (psutil.Error, OSError):
        pass
    return "another process"


def free_port(host: str, start: int) -> int:
    """The first free port from `start` on. Raises K2Error after 100 tries."""
    for port in range(start, min(start + 100, 65536)):
        if not port_owner(host, port):
            return port
    raise K2Error(f"no free port from {start} to {start + 99}", "stop what holds them, or give --port")


def check_system() -> Iterator[Finding]:
    yield Finding("python", Severity.OK, f"Python {sys.version.split()[0]}, k2tui {__version__}")
    for package, extra in (("torch", "local"), ("transformers", "local"), ("sglang", "sglang")):
        found = importlib.util.find_spec(package) is not None
        yield Finding(
            f"package {package}",
            Severity.OK if found else Severity.INFO,
            "installed here" if found else "not in this environment",
            "" if found else f"pip install 'k2tui[{extra}]', or name another interpreter by `python` in the profile",
        )
    from k2tui.doctor_gpu import check_gpus

    for check, severity, evidence, todo in check_gpus():
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


def check_profile(profile: Profile) -> Iterator[Finding]:
    """What is known about this start before it is made."""
    if not profile.model:
        yield Finding("model", Severity.ERROR, f"profile {profile.name!r} names no model", f"set model in [profile.{profile.name}]")
        return
    yield from _check_model("model", resolve_model(profile.model))
    if profile.draft:
        yield from _check_model("draft", resolve_model(profile.draft))
    from k2tui.doctor_gpu import check_links

    for check, severity, evidence, todo in check_links(profile.gpus, profile.tp_size if profile.engine != "local" else 1):
        yield Finding(check, Severity(severity), evidence, todo)
    owner = port_owner(profile.host, profile.port)
    yield Finding(
        "port",
        Severity.ERROR if owner else Severity.OK,
        f"{profile.host}:{profile.port} is held by {owner}" if owner else f"{profile.host}:{profile.port} is free",
        "stop it (`k2tui down`), or give another --port" if owner else "",
    )
    python = Path(profile.python).expanduser() if profile.python else None
    if python is not None and not os.access(python, os.X_OK):
        yield Finding("interpreter", Severity.ERROR, f"python = {str(python)!r} is no program", f"set python in [profile.{profile.name}] to the engine's interpreter")
        return
    package = {"local": "torch", "sglang": "sglang", "vllm": "vllm"}.get(profile.engine, "")
    lacks = f"engine {profile.engine!r} needs the package {package}, which {python or 'this environment'} lacks"
    remedy = (
        f"set python in [profile.{profile.name}] to an interpreter that has it, "
        f"or pip install 'k2tui[{'local' if profile.engine == 'local' else profile.engine}]'"
    )
    version = ""
    if profile.engine in ("sglang", "vllm"):
        from k2tui.engine_flags import installed, unknown_flags

        found = installed(profile.engine, str(python or ""))
        version = found.version
        if not found.package:
            yield Finding("engine", Severity.ERROR, lacks, remedy)
        else:
            unknown = unknown_flags(_argv_of(profile), found.flags)
            for flag, near in unknown:
                yield Finding(
                    "flags", Severity.ERROR, f"{profile.engine} {version} has no argument {flag}",
                    f"did you mean {near}?" if near else "see its --help", f"{found.package}'s own sources",
                )  # fmt: skip
            if not unknown and found.flags:
                yield Finding("flags", Severity.OK, f"every argument is known to {profile.engine} {version}")
    elif package and importlib.util.find_spec(package) is None:
        yield Finding("engine", Severity.ERROR, lacks, remedy)
    for rule in check_all(gather(profile, version)):
        yield Finding(rule.check, Severity(rule.severity), rule.evidence, rule.todo, rule.source)
    yield from _check_room(profile)


def _argv_of(profile: Profile) -> list[str]:
    from k2tui import engines

    try:
        return list(engines.get(profile.engine).launch(profile).argv)
    except K2Error:
        return list(profile.args)


def gpu_facts(wanted: tuple[int, ...] = ()) -> list[GpuFact]:
    """The GPUs that a start would take (all, when none is named); [] without a driver."""
    try:
        import pynvml as nvml

        nvml.nvmlInit()
    except Exception:
        return []
    found: list[GpuFact] = []
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
            found.append(GpuFact(index, name, capability, total, free))
    except nvml.NVMLError:
        pass
    finally:
        try:
            nvml.nvmlShutdown()
        except nvml.NVMLError:
            pass
    return found


def gather(profile: Profile, version: str = "", gpus: list[GpuFact] | None = None) -> LaunchFacts:
    """What can be known about a start without making it. gpus: instead of asking NVML."""
    chosen = gpu_facts(profile.gpus) if gpus is None else gpus
    nvlink: bool | None = None
    p2p: bool | None = None
    if len(chosen) > 1 and gpus is None:
        from k2tui.sources.nvml_topology import read_topology

        pairs = [p for p in read_topology().pairs if {p.first, p.second} <= {g.index for g in chosen}]
        if pairs:
            nvlink = all(p.nvlinks for p in pairs)
            p2p = None if any(p.p2p is None for p in pairs) else all(p.p2p for p in pairs)
    config: dict[str, Any] = {}
    weights: float | None = None
    try:
        found = checkpoint.inspect(resolve_model(profile.model))
        config = dict(found.config)
        weights = float(found.total_b) if found.is_complete else None
    except K2Error:
        pass
    draft_config: dict[str, Any] = {}
    draft_b = 0.0
    names: tuple[str, ...] = ()
    d2t: list[int] | None = None
    if profile.draft:
        try:
            draft = checkpoint.inspect(resolve_model(profile.draft))
            draft_config, draft_b = dict(draft.config), float(draft.total_b)
            names, d2t = checkpoint.names_and_ints(draft, "d2t")
        except K2Error:
            pass
    return LaunchFacts(
        engine=profile.engine, version=version, argv=_argv_of(profile), env=profile.env, tp_size=profile.tp_size, gpus=chosen,
        has_nvlink=nvlink, has_p2p=p2p, config=config, weights_b=weights, draft_config=draft_config, draft_b=draft_b, draft_d2t=d2t,
        draft_names=names, num_steps=profile.speculative_num_steps, topk=profile.speculative_eagle_topk,
        num_draft_tokens=profile.speculative_num_draft_tokens,
    )  # fmt: skip


def _check_room(profile: Profile) -> Iterator[Finding]:
    """Will the weights stay in the page cache, so that the second start is quick?"""
    import psutil

    try:
        size = checkpoint.inspect(resolve_model(profile.model)).total_b
    except K2Error:
        return
    available = psutil.virtual_memory().available
    if size > available:
        yield Finding(
            "page cache", Severity.INFO,
            f"the checkpoint ({size / 1e9:.0f} GB) is larger than the free memory ({available / 1e9:.0f} GB): every start reads it from the disk again",
        )  # fmt: skip


def _check_model(what: str, path: Path) -> Iterator[Finding]:
    try:
        found = checkpoint.inspect(path)
    except K2Error as err:
        hint = err.hint.replace("`model`", "`draft`") if what == "draft" else err.hint
        yield Finding(what, Severity.ERROR, err.message, hint)
        return
    if found.missing:
        yield Finding(
            f"{what} shards", Severity.ERROR,
            f"{len(found.missing)} of {len(found.shards)} shards are missing in {path}: {', '.join(found.missing[:3])}{' …' if len(found.missing) > 3 else ''}",
            "download them again",
        )
    for name, why in found.broken[:5]:
        yield Finding(f"{what} shards", Severity.ERROR, f"{path / name}: {why}", "download that file again")
    if not found.shards:
        yield Finding(f"{what} shards", Severity.WARNING, f"no safetensors file in {path}", "other formats load, but their shards cannot be checked")
    elif found.is_complete:
        yield Finding(f"{what} shards", Severity.OK, f"{len(found.shards)} shards complete, {found.total_b / 1e9:.2f} GB, {found.params / 1e6:,.1f} M weights")
    if what == "model" and not found.has_tokenizer:
        yield Finding("tokenizer", Severity.WARNING, f"no tokenizer file in {path}", "copy tokenizer.json beside config.json")


def check(config: Config, profile_name: str | None = None) -> list[Finding]:
    """The system's findings and, with a profile, the start's. Raises UsageError for an unknown profile."""
    found = list(check_system())
    if profile_name is not None:
        found += check_profile(config.get_profile(profile_name))
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
