"""Reader of the host's GPU topology through NVML and sysfs, once, on demand; it costs tens of ms and is never polled."""

from __future__ import annotations

import ctypes
import importlib
from pathlib import Path
from typing import Any

from k2tui.core.topology import Topology, TopologyGpu, TopologyPair
from k2tui.sources.nvml import explain_start
from k2tui.sources.procs import clean

_LEVELS = {0: "INT", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
_P2P_READ, _P2P_WRITE, _P2P_NVLINK = 0, 1, 2
_P2P_REASONS = {
    1: "the chipset does not allow it",
    2: "the GPU does not support it",
    3: "the path between the CPUs does not allow it",
    4: "switched off by a driver setting",
    5: "not supported",
}
_FABRIC = {1: "not started", 2: "in progress", 3: "ready"}
_DEVICE_SWITCH = 2


def read_topology(*, proc: str = "/proc", sys: str = "/sys") -> Topology:
    """All GPUs, their pairs and places. Without a driver: a Topology whose error and hint say why. Never raises for the driver."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return Topology(error="nvidia-ml-py is not installed", hint="pip install nvidia-ml-py")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as err:
        error, hint = explain_start(int(err.value), clean(str(err)), proc)
        return Topology(error=error, hint=hint)
    try:
        handles: dict[int, Any] = {}
        for index in range(int(nvml.nvmlDeviceGetCount())):
            handle = _ask(nvml, nvml.nvmlDeviceGetHandleByIndex, index)
            if handle is not None:
                handles[index] = handle
        gpus = tuple(_read_gpu(nvml, index, handle, Path(sys)) for index, handle in handles.items())
        direct = {gpu.index: _direct_links(nvml, handles[gpu.index], gpu) for gpu in gpus}
        pairs = tuple(
            _read_pair(nvml, a, b, handles, direct) for i, a in enumerate(gpus) for b in gpus[i + 1 :]
        )
        return Topology(gpus, pairs)
    except nvml.NVMLError as err:
        return Topology(error=f"the topology cannot be read: {clean(str(err))}")
    finally:
        try:
            nvml.nvmlShutdown()
        except nvml.NVMLError:
            pass  # the driver went away in between


def _ask(nvml: Any, call: Any, *args: Any) -> Any:
    try:
        return call(*args)
    except nvml.NVMLError:
        return None


def _read_gpu(nvml: Any, index: int, handle: Any, sys: Path) -> TopologyGpu:
    pci = _ask(nvml, nvml.nvmlDeviceGetPciInfo, handle)
    bus_id = clean(str(pci.busId)) if pci is not None else ""
    numa, cpus = _read_place(sys, bus_id)
    if not cpus:
        mask = _ask(nvml, nvml.nvmlDeviceGetCpuAffinity, handle, 16)
        if mask is not None:
            cpus = _ranges(
                [
                    word * 64 + bit
                    for word, bits in enumerate(mask)
                    for bit in range(64)
                    if int(bits) >> bit & 1
                ]
            )
    active = switches = 0
    for link in range(int(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18))):
        state = _ask(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link)
        if state is None:
            break
        if int(state) == 1:
            active += 1
            switches += _ask(nvml, nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link) == _DEVICE_SWITCH
    return TopologyGpu(
        index=index,
        name=clean(str(_ask(nvml, nvml.nvmlDeviceGetName, handle) or "")),
        uuid=str(_ask(nvml, nvml.nvmlDeviceGetUUID, handle) or ""),
        bus_id=bus_id,
        numa_node=numa,
        cpus=cpus,
        nvlinks=active,
        has_switch=switches > 0,
        fabric=_read_fabric(nvml, handle),
    )


def _read_place(sys: Path, bus_id: str) -> tuple[int | None, str]:
    """(NUMA node, near CPUs) of a PCI device as the kernel tells them; the node -1 means that there is only one."""
    if not bus_id:
        return None, ""
    domain, _, rest = bus_id.lower().partition(":")
    folder = sys / "bus" / "pci" / "devices" / f"{domain[-4:]}:{rest}"
    try:
        node: int | None = int((folder / "numa_node").read_text())
    except (OSError, ValueError):
        node = None
    try:
        cpus = clean((folder / "local_cpulist").read_text())
    except OSError:
        cpus = ""
    return (None if node is None or node < 0 else node), cpus


def _read_fabric(nvml: Any, handle: Any) -> str:
    info = nvml.c_nvmlGpuFabricInfo_t()
    try:
        nvml.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(info))
    except (nvml.NVMLError, AttributeError):
        return ""
    state = _FABRIC.get(int(info.state), "")
    return "failed" if state == "ready" and int(info.status) != 0 else state


def _direct_links(nvml: Any, handle: Any, gpu: TopologyGpu) -> dict[str, int]:
    """Links that end at another GPU, by its PCI address; {} when they end at a switch or the driver does not tell."""
    found: dict[str, int] = {}
    if gpu.has_switch:
        return found
    for link in range(gpu.nvlinks):
        pci = _ask(nvml, nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
        if pci is not None:
            address = clean(str(pci.busId)).lower()
            found[address] = found.get(address, 0) + 1
    return found


def _read_pair(
    nvml: Any, a: TopologyGpu, b: TopologyGpu, handles: dict[int, Any], direct: dict[int, dict[str, int]]
) -> TopologyPair:
    first, second = handles[a.index], handles[b.index]
    level = _ask(nvml, nvml.nvmlDeviceGetTopologyCommonAncestor, first, second)
    status = [
        _ask(nvml, nvml.nvmlDeviceGetP2PStatus, first, second, what) for what in (_P2P_READ, _P2P_WRITE)
    ]
    over_nvlink = _ask(nvml, nvml.nvmlDeviceGetP2PStatus, first, second, _P2P_NVLINK) == 0
    links = direct[a.index].get(b.bus_id.lower(), 0)
    if not links and over_nvlink and not direct[a.index]:
        links = min(a.nvlinks, b.nvlinks)  # through a switch every link reaches every GPU
    known = [int(s) for s in status if s is not None]
    bad = next((s for s in known if s != 0), None)
    return TopologyPair(
        first=a.index,
        second=b.index,
        path=_LEVELS.get(-1 if level is None else int(level), ""),
        nvlinks=links,
        p2p=None if not known else bad is None,
        p2p_reason="" if bad is None else _P2P_REASONS.get(bad, ""),
    )


def _ranges(numbers: list[int]) -> str:
    out: list[list[int]] = []
    for number in sorted(numbers):
        if out and number == out[-1][1] + 1:
            out[-1][1] = number
        else:
            out.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in out)
