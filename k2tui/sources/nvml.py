"""Reader of NVIDIA's management library: a thread of its own turns it into a frozen GpuView each second; it knows no screen.

Laws of this room:
- every figure stands alone: what one getter or one GPU cannot tell never hides the others;
- a getter that is not supported is not asked again each second, and one that costs much is asked seldom;
- no NVIDIA driver is a state with words, not an error, and it ends by itself when the driver comes;
- readers never wait: they get the newest view, and its age (taken_s) shows when NVML is slow.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import os
import platform
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from k2tui.core.gpu import GpuProcess, GpuSample, GpuView, MigSlice, describe_throttle, explain_processes
from k2tui.sources.nvml_calls import Calls
from k2tui.sources.procs import ProcessTable, as_process, clean

_ALL_LINKS = 0xFFFFFFFF
_FI_MEMORY_TEMP = 82
_FI_NVLINK_TX_KIB, _FI_NVLINK_RX_KIB = 138, 139
_FI_PCIE_TX_BYTES, _FI_PCIE_RX_BYTES = 197, 198
_FIELDS = (
    (_FI_MEMORY_TEMP, 0),
    (_FI_NVLINK_TX_KIB, _ALL_LINKS),
    (_FI_NVLINK_RX_KIB, _ALL_LINKS),
    (_FI_PCIE_TX_BYTES, 0),
    (_FI_PCIE_RX_BYTES, 0),
)

# counter, field, factor to KB
_COUNTERS = (
    ("nvlink_tx", _FI_NVLINK_TX_KIB, 1.024),
    ("nvlink_rx", _FI_NVLINK_RX_KIB, 1.024),
    ("pcie_tx", _FI_PCIE_TX_BYTES, 0.001),
    ("pcie_rx", _FI_PCIE_RX_BYTES, 0.001),
)

_UNINITIALIZED, _INVALID, _NOT_SUPPORTED, _NO_PERMISSION, _NOT_FOUND = 1, 2, 3, 4, 6
_DRIVER_NOT_LOADED, _LIBRARY_NOT_FOUND, _FUNCTION_NOT_FOUND, _LOST, _RESET = 9, 12, 13, 15, 16
_MISMATCH, _VERSION, _DEPRECATED, _NOT_READY, _GPU_NOT_FOUND = 18, 25, 26, 27, 28
# Answers that will stay what they are on this board and driver.
_FINAL = frozenset({_INVALID, _NOT_SUPPORTED, _FUNCTION_NOT_FOUND, _VERSION, _DEPRECATED})

_RETRY_UNSUPPORTED_S = 300.0  # MIG mode and the like change under a running sampler
_RETRY_FAILED_S = 5.0
_RETRY_S = {_NO_PERMISSION: 60.0}
_SLOW_CALL_S = 0.05  # a call that took longer is asked so seldom that it costs at most 1 % of the time
_SLOW_FACTOR = 100.0
_SLOWEST_S = 60.0
_PCIE_EVERY_S = 20.0  # the call samples for 20 ms, twice
_WATCHED_S = 1.9  # of 2 s, so that a round which begins early still counts
_WATCHED = ("pcie", "usage", "fields")  # what a closer look at one GPU asks often, whatever it costs
# A getter waits at least cost x GPUs x this x the number of costly kinds: together they then cost 0.1 % of a core, on any number of GPUs.
_SLOW_SHARE = 1000.0
_FAST_SHARE = 800.0  # for figures that are wanted each second: skipped now and then only where they cost much
_COSTLY_S = 1e-4
_EACH_SECOND = ("memory", "utilization", "power", "compute")
_OFTEN_S = 1.5  # a shorter wait than this is no other than asking each second
_STUCK_S = 1.0
_BACKOFF_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
_LOST_RETRY_S = (10.0, 20.0, 60.0, 300.0)
_HOTPLUG_EVERY_S = 5.0

OnSample = Callable[[GpuView], None]


class _Restart(Exception):
    """The library must be initialised again."""


@dataclass(slots=True)
class _Slot:
    """One getter of one GPU: when it is due, and what it said last."""

    label: str
    every_s: float
    call: Callable[[Any], Any]
    due: float = 0.0
    value: Any = None
    error: str = ""
    code: int = 0
    share: float = _SLOW_SHARE
    cost_s: float = 0.0  # of the last call
    asked: int = 0
    is_watched: bool = False
    needs_two: bool = False  # two calls make its first figure: a rate


class _Rate:
    """A counter that only grows, as a rate; a counter that went back (driver reload, overflow) gives None once."""

    __slots__ = ("_at", "_value")

    def __init__(self) -> None:
        self._at = 0.0
        self._value: int | None = None

    def push(self, value: int | None, at: float) -> float | None:
        """Units a second since the last push; None for the first one."""
        old, old_at = self._value, self._at
        self._value, self._at = value, at
        if value is None or old is None or value < old or at <= old_at:
            return None
        return (value - old) / (at - old_at)

    def span(self, at: float) -> float | None:
        """Seconds since the last push."""
        return at - self._at if self._value is not None else None


class _Device:
    """One GPU of one initialisation of the library."""

    def __init__(self, nvml: Any, index: int, handle: Any, sampler: NvmlSampler) -> None:
        self.nvml = nvml
        self.calls = sampler.calls
        self.index = index
        self.handle = handle
        self.sampler = sampler
        self.lost = ""
        self.last: GpuSample | None = None
        self.last_xid: int | None = None
        self.last_xid_s: float | None = None
        self.mig_handles: list[Any] = []
        self.usage: dict[int, int] = {}
        self.usage_of: frozenset[int] = frozenset()  # processes that were there when it was asked
        self.usage_taken_s: float | None = None
        self.rates_span_s: float | None = None
        self.has_usage = False
        self.rates = {name: _Rate() for name in ("nvlink_tx", "nvlink_rx", "pcie_tx", "pcie_rx")}
        self.rate_values: dict[str, int | None] = {}
        self.processes: list[tuple[int, int | None, str, int | None]] = []
        n, c = nvml, sampler.calls
        always, seldom, once = 0.0, 10.0, math.inf
        table: tuple[tuple[str, str, float, Callable[[Any], Any]], ...] = (
            ("name", "name", once, lambda h: clean(str(n.nvmlDeviceGetName(h)))),
            ("uuid", "uuid", once, n.nvmlDeviceGetUUID),
            ("pci", "PCI address", once, lambda h: clean(str(n.nvmlDeviceGetPciInfo(h).busId))),
            ("virtualization", "virtualisation mode", once, n.nvmlDeviceGetVirtualizationMode),
            ("slowdown", "slow-down temperature", once, lambda h: n.nvmlDeviceGetTemperatureThreshold(h, 1)),
            ("shutdown", "shut-down temperature", once, lambda h: n.nvmlDeviceGetTemperatureThreshold(h, 0)),
            ("gpu_max", "highest temperature", once, lambda h: n.nvmlDeviceGetTemperatureThreshold(h, 3)),
            ("sm_max", "highest SM clock", once, lambda h: n.nvmlDeviceGetMaxClockInfo(h, 1)),
            ("mem_max", "highest memory clock", once, lambda h: n.nvmlDeviceGetMaxClockInfo(h, 2)),
            ("gen_max", "highest PCIe generation", once, n.nvmlDeviceGetMaxPcieLinkGeneration),
            ("width_max", "highest PCIe width", once, n.nvmlDeviceGetMaxPcieLinkWidth),
            ("limit_default", "default power limit", once, n.nvmlDeviceGetPowerManagementDefaultLimit),
            ("numa", "NUMA node", once, n.nvmlDeviceGetNumaNodeId),
            ("c2c", "chip-to-chip link", once, n.nvmlDeviceGetC2cModeInfoV),
            ("memory", "memory", always, self._memory),
            ("utilization", "utilisation", always, c.utilization),
            ("power", "power usage", always, c.power),
            ("temperature", "temperature", always, c.temperature),
            ("sm", "SM clock", always, c.sm_clock),
            ("reasons", "throttle reasons", always, self._reasons),
            ("compute", "processes", always, c.compute),
            ("pstate", "performance state", 2.0, c.pstate),
            ("graphics", "graphics processes", 5.0, c.graphics),
            ("mps", "MPS processes", 5.0, c.mps),
            ("usage", "process utilisation", 2.0, self._usage),
            ("mem", "memory clock", 2.0, c.memory_clock),
            ("fields", "field values", 2.0, self._fields),
            ("gen", "PCIe generation", 5.0, c.pcie_generation),
            ("width", "PCIe width", 5.0, c.pcie_width),
            ("limit", "power limit", seldom, n.nvmlDeviceGetEnforcedPowerLimit),
            ("fan", "fan", 5.0, c.fan),
            ("encoder", "encoder", 5.0, c.encoder),
            ("decoder", "decoder", 5.0, c.decoder),
            ("energy", "energy", seldom, n.nvmlDeviceGetTotalEnergyConsumption),
            ("ecc", "ECC mode", 60.0, lambda h: n.nvmlDeviceGetEccMode(h)[0]),
            ("ecc_unc", "ECC errors", seldom, lambda h: n.nvmlDeviceGetTotalEccErrors(h, 1, 0)),
            ("ecc_corr", "corrected ECC errors", seldom, lambda h: n.nvmlDeviceGetTotalEccErrors(h, 0, 0)),
            ("ecc_unc_total", "ECC errors in all", 60.0, lambda h: n.nvmlDeviceGetTotalEccErrors(h, 1, 1)),
            ("remapped", "remapped rows", 60.0, n.nvmlDeviceGetRemappedRows),
            ("retired", "retired pages", 60.0, self._retired),
            ("persistence", "persistence mode", 60.0, n.nvmlDeviceGetPersistenceMode),
            ("replays", "PCIe replays", seldom, n.nvmlDeviceGetPcieReplayCounter),
            ("links", "NVLink links", 60.0, self._links),
            ("bar1", "BAR1 memory", seldom, self._bar1),
            ("mig", "MIG mode", seldom, self._mig),
            ("slices", "MIG slices", 2.0, self._slices),
            ("pcie", "PCIe throughput", _PCIE_EVERY_S, self._pcie),
        )
        self.slots = {
            key: _Slot(label, every, call, share=_FAST_SHARE if every == always else _SLOW_SHARE)
            for key, label, every, call in table
        }
        for key in _EACH_SECOND:
            self.slots[key].share = 0.0
        self.slots["fields"].needs_two = True
        self.costly = 10  # kinds of slow figures that cost something: a guess until they were asked
        self.order = list(self.slots.values())
        self.fast = [slot for slot in self.order if slot.every_s == always]
        self.slow = [slot for slot in self.order if slot.every_s != always]
        self.slow_due = 0.0
        self.slow_figures: dict[str, Any] = {}
        self.reset_until = 0.0
        self.is_watched = False
        # The slow one is left out of the first sample, and not all GPUs ask it in the same second.
        self.slots["pcie"].due = time.monotonic() + 3.0 + index

    # -- getters that need more than one call --------------------------------------------------------------------------------

    def _memory(self, handle: Any) -> tuple[int, int, int | None]:
        """(total, used, reserved) in bytes. The second version of the call reports reserved apart, as nvidia-smi does."""
        try:
            return self.calls.memory(handle)
        except self.nvml.NVMLError as err:
            if err.value not in _FINAL:
                raise
            info = self.nvml.nvmlDeviceGetMemoryInfo(handle)
            return int(info.total), int(info.used), None

    def _bar1(self, handle: Any) -> tuple[int, int]:
        """(total, used) bytes that the host can map."""
        info = self.nvml.nvmlDeviceGetBAR1MemoryInfo(handle)
        return int(info.bar1Total), int(info.bar1Used)

    def _reasons(self, handle: Any) -> int:
        try:
            return self.calls.event_reasons(handle)
        except self.nvml.NVMLError as err:
            if err.value != _FUNCTION_NOT_FOUND:
                raise
            return self.calls.throttle_reasons(handle)

    def _usage(self, handle: Any) -> bool:
        since_us = int((time.time() - 3.0) * 1e6)
        try:
            usage = self.calls.usage(handle, since_us)
        except self.nvml.NVMLError as err:
            if err.value != _NOT_FOUND:  # "not found" = no process did anything since then
                raise
            usage = {}
        self.usage = usage
        self.usage_of = frozenset(pid for pid, *_ in self._list_processes()) | usage.keys()
        self.usage_taken_s = time.time()
        self.has_usage = self.has_usage or bool(usage)
        return True

    def _retired(self, handle: Any) -> int:
        return sum(len(self.nvml.nvmlDeviceGetRetiredPages(handle, cause)) for cause in (0, 1))

    def _links(self, handle: Any) -> int:
        """Active NVLink links. The first link that the board does not have ends the count."""
        active = 0
        for link in range(int(getattr(self.nvml, "NVML_NVLINK_MAX_LINKS", 18))):
            try:
                active += int(self.nvml.nvmlDeviceGetNvLinkState(handle, link)) == 1
            except self.nvml.NVMLError as err:
                if link == 0 or err.value not in _FINAL:
                    raise
                break
        return active

    def _mig(self, handle: Any) -> bool:
        enabled = int(self.nvml.nvmlDeviceGetMigMode(handle)[0]) == 1
        handles: list[Any] = []
        if enabled:
            for number in range(int(self.nvml.nvmlDeviceGetMaxMigDeviceCount(handle))):
                try:
                    handles.append(self.nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number))
                except self.nvml.NVMLError as err:
                    if err.value in (_LOST, _UNINITIALIZED):
                        raise
        if len(handles) != len(self.mig_handles):
            self.slots["slices"].due = 0.0  # it comes after this one in the same round
        self.mig_handles = handles
        return enabled

    def _slices(self, _handle: Any) -> tuple[MigSlice, ...]:
        n = self.nvml
        out: list[MigSlice] = []
        for handle in self.mig_handles:
            name = _try(n, lambda h: str(n.nvmlDeviceGetName(h)), handle) or ""
            total_used = _try(n, self._memory, handle)
            attributes = _try(n, n.nvmlDeviceGetAttributes_v2, handle)
            out.append(
                MigSlice(
                    gpu_instance=_try(n, n.nvmlDeviceGetGpuInstanceId, handle) or 0,
                    compute_instance=_try(n, n.nvmlDeviceGetComputeInstanceId, handle) or 0,
                    name=clean(name.partition(" MIG ")[2] or name),
                    uuid=_try(n, lambda h: str(n.nvmlDeviceGetUUID(h)), handle) or "",
                    memory_total_b=total_used[0] if total_used else None,
                    memory_used_b=total_used[1] if total_used else None,
                    sm_count=int(attributes.multiprocessorCount) if attributes else None,
                )
            )
        return tuple(out)

    def _fields(self, handle: Any) -> int | None:
        """Take the counters into rates. Returns the memory's temperature, None on boards without the sensor (they say 0)."""
        self.rate_values = {}
        found = self.calls.fields(handle)
        at = time.monotonic()
        self.rates_span_s = self.rates["nvlink_tx"].span(at) or self.rates["pcie_tx"].span(at)
        for name, field_id, to_kb in _COUNTERS:
            rate = self.rates[name].push(found.get(field_id), at)
            self.rate_values[name] = None if rate is None else round(rate * to_kb)
        return found.get(_FI_MEMORY_TEMP) or None

    def _pcie(self, handle: Any) -> tuple[int, int] | None:
        """(received, sent) in KB/s. Not asked while the cheap counters answer."""
        if self.rate_values.get("pcie_rx") is not None:
            return None
        return int(self.nvml.nvmlDeviceGetPcieThroughput(handle, 1)), int(
            self.nvml.nvmlDeviceGetPcieThroughput(handle, 0)
        )

    # -- one round -----------------------------------------------------------------------------------------------------------

    def ask_again(self, *keys: str) -> None:
        """These getters are due at the next sample, whatever their period."""
        for key in keys:
            self.slots[key].due = 0.0
        self.slow_due = 0.0

    def sample(self, now: float, wall_s: float) -> GpuSample:
        """Ask what is due and compose the figures. A lost GPU keeps what is known of it and says so."""
        self.lost = self._ask(self.fast, now)
        if (self.index in self.sampler.watched) != self.is_watched:
            self.is_watched = not self.is_watched
            for slot in (self.slots[key] for key in _WATCHED):
                slot.is_watched = self.is_watched
                if self.is_watched and slot.due > now + _WATCHED_S and not slot.code:
                    slot.due = now + _WATCHED_S
                    self.slow_due = min(self.slow_due, slot.due)
        if not self.lost and self.slow_due <= now:
            self.lost = self._ask(self.slow, now)
            self.slow_due = min([slot.due for slot in self.slow])
            self.costly = max(
                1, sum([slot.cost_s > _COSTLY_S and slot.due != math.inf for slot in self.slow])
            )
            self.slow_figures = self._slow_figures()
        self.last = self._compose_lost(wall_s) if self.lost else self._compose(now, wall_s)
        return self.last

    def _ask(self, slots: list[_Slot], now: float) -> str:
        """Ask those that are due. Returns why the GPU is lost, "" while it answers."""
        nvml, sampler, handle, clock = self.nvml, self.sampler, self.handle, time.perf_counter
        for slot in slots:
            if slot.due > now:
                continue
            began = clock()
            sampler.calling = (slot.label, self.index, began)
            try:
                slot.value = slot.call(handle)
                slot.error = ""
                slot.code = 0
                slot.due = now + slot.every_s
                slot.asked += 1
            except nvml.NVMLError as err:
                code = int(err.value)
                slot.value, slot.code = None, code
                slot.error = "" if code in _FINAL else _error_words(nvml, err)
                slot.due = now + _RETRY_S.get(
                    code, _RETRY_UNSUPPORTED_S if code in _FINAL else _RETRY_FAILED_S
                )
                if code in (_LOST, _GPU_NOT_FOUND):
                    return "fallen off the bus (NVML: GPU is lost)"
                if code in (_UNINITIALIZED, _DRIVER_NOT_LOADED, _MISMATCH):
                    raise _Restart
                if code == _RESET:
                    self.reset_until = now + 2 * _RETRY_FAILED_S
            except (UnicodeDecodeError, ValueError, OverflowError) as err:
                # a name or figure that is not what the header promises: only this one is lost
                slot.value, slot.error, slot.due = None, clean(str(err)), now + _SLOWEST_S
            finally:
                sampler.calling = None
            cost = clock() - began
            if slot.due == math.inf:
                continue
            if slot.share == 0.0 and cost <= _SLOW_CALL_S:
                slot.cost_s = cost
                continue
            # the smaller of two: a call that was only interrupted is no costly one
            known = min(cost, slot.cost_s) if slot.asked != 1 or slot.needs_two else cost
            kinds = self.costly if slot.share == _SLOW_SHARE else 1
            wait = min(_SLOWEST_S, known * len(self.sampler.devices) * slot.share * kinds)
            slot.cost_s = cost
            if slot.asked > 1 and not slot.code:
                cost = known
            if cost > _SLOW_CALL_S:
                wait = max(wait, min(_SLOWEST_S, cost * _SLOW_FACTOR))
            if slot.is_watched and cost < _SLOW_CALL_S:
                wait = min(wait, _WATCHED_S)
                slot.due = min(slot.due, now + _WATCHED_S) if not slot.code else slot.due
            if wait > slot.every_s and wait > _OFTEN_S:
                if slot.asked == 2 or (
                    slot.asked == 1 and not slot.needs_two
                ):  # from here on the GPUs take turns
                    wait *= 0.5 + self.index / max(1, len(self.sampler.devices)) / 2
                slot.due = max(slot.due, now + wait)
        return ""

    def _compose_lost(self, wall_s: float) -> GpuSample:
        kept = self.last
        name = self.slots["name"].value or ""
        uuid = str(self.slots["uuid"].value or "")
        self.processes = []
        return GpuSample(
            self.index,
            uuid=kept.uuid if kept and kept.uuid else uuid,
            name=kept.name if kept and kept.name else name,
            error=self.lost,
            memory_total_b=kept.memory_total_b if kept else None,
            bus_id=kept.bus_id if kept else "",
            taken_s=wall_s,
            last_xid=self.last_xid,
            last_xid_s=self.last_xid_s,
        )

    def _slow_figures(self) -> dict[str, Any]:
        """The part of a sample that is not read each second."""
        value = {key: slot.value for key, slot in self.slots.items()}
        pcie, remapped, rates = value["pcie"], value["remapped"], self.rate_values
        rx, tx = rates.get("pcie_rx"), rates.get("pcie_tx")
        if rx is None and pcie is not None:
            rx, tx = pcie
        return {
            "index": self.index,
            "uuid": str(value["uuid"] or ""),
            "name": value["name"] or "",
            "enforced_power_limit_mw": value["limit"],
            "temperature_slowdown_c": value["slowdown"],
            "sm_clock_max_mhz": value["sm_max"],
            "memory_clock_mhz": value["mem"],
            "pcie_gen": value["gen"],
            "pcie_gen_max": value["gen_max"],
            "pcie_width": value["width"],
            "pcie_width_max": value["width_max"],
            "pcie_rx_kb_s": rx,
            "pcie_tx_kb_s": tx,
            "nvlink_rx_kb_s": rates.get("nvlink_rx"),
            "nvlink_tx_kb_s": rates.get("nvlink_tx"),
            "fan_percent": value["fan"],
            "ecc_uncorrected": value["ecc_unc"],
            "energy_mj": value["energy"],
            "memory_clock_max_mhz": value["mem_max"],
            "memory_temperature_c": value["fields"],
            "temperature_shutdown_c": value["shutdown"],
            "temperature_max_c": value["gpu_max"],
            "power_limit_default_mw": value["limit_default"],
            "pstate": value["pstate"],
            "ecc_enabled": None if value["ecc"] is None else bool(value["ecc"]),
            "ecc_corrected": value["ecc_corr"],
            "ecc_uncorrected_total": value["ecc_unc_total"],
            "remapped_rows": None if remapped is None else (remapped[0], remapped[1]),
            "remap_pending": None if remapped is None else bool(remapped[2]),
            "remap_failed": None if remapped is None else bool(remapped[3]),
            "retired_pages": value["retired"],
            "mig_enabled": value["mig"],
            "mig": value["slices"] or (),
            "virtualization": _VIRTUALIZATION.get(value["virtualization"] or 0, ""),
            "nvlink_count": value["links"],
            "bus_id": value["pci"] or "",
            "encoder_utilization": value["encoder"],
            "decoder_utilization": value["decoder"],
            "persistence": None if value["persistence"] is None else bool(value["persistence"]),
            "pcie_replays": value["replays"],
            "bar1_total_b": None if value["bar1"] is None else value["bar1"][0],
            "bar1_used_b": None if value["bar1"] is None else value["bar1"][1],
            "rates_span_s": self.rates_span_s,
            "usage_taken_s": self.usage_taken_s,
        }

    def _compose(self, now: float, wall_s: float) -> GpuSample:
        slots = self.slots
        memory, util, bits = slots["memory"].value, slots["utilization"].value, slots["reasons"].value
        total, used, reserved = memory or (None, None, None)
        kind = "coherent" if slots["numa"].value is not None and _c2c_enabled(slots["c2c"].value) else ""
        if memory is None and slots["memory"].code in _FINAL and slots["virtualization"].value != 2:
            total, used = self.sampler.host_memory()
            kind = "unified" if total is not None else ""
        self.processes = self._list_processes()
        compute = slots["compute"]
        return GpuSample(
            **self.slow_figures,
            error="needs a reset (NVML: GPU requires reset)" if now < self.reset_until else "",
            memory_total_b=total,
            memory_used_b=used,
            memory_reserved_b=reserved,
            gpu_utilization=None if util is None else util[0],
            memory_utilization=None if util is None else util[1],
            power_usage_mw=slots["power"].value,
            temperature_c=slots["temperature"].value,
            sm_clock_mhz=slots["sm"].value,
            throttle_reasons=() if bits is None else describe_throttle(bits),
            throttle_bits=bits,
            taken_s=wall_s,
            last_xid=self.last_xid,
            last_xid_s=self.last_xid_s,
            memory_kind=kind,
            missing=tuple([f"{slot.label}: {slot.error}" for slot in self.order if slot.error]),
            process_error=compute.error or ("not supported here" if compute.code in _FINAL else ""),
        )

    def _list_processes(self) -> list[tuple[int, int | None, str, int | None]]:
        """(pid, GPU memory in bytes, kind, MIG slice), a pid once a slice; MPS and graphics give their kind to one in both."""
        out: dict[tuple[int, int | None], tuple[int, int | None, str, int | None]] = {}
        for key, kind in (("graphics", "G"), ("compute", "C"), ("mps", "M")):
            for pid, used, slice_id in self.slots[key].value or ():
                old = out.get((pid, slice_id))
                both = old is not None and {old[2], kind} == {"C", "G"}
                out[pid, slice_id] = (
                    pid,
                    used if used is not None else (old[1] if old else None),
                    "C+G" if both else kind,
                    slice_id,
                )
        return list(out.values())


_VIRTUALIZATION = {1: "passthrough", 2: "vGPU", 3: "vGPU host", 4: "vSGA host"}


def _try(nvml: Any, call: Callable[[Any], Any], handle: Any) -> Any:
    try:
        return call(handle)
    except nvml.NVMLError as err:
        if err.value in (_LOST, _UNINITIALIZED):
            raise
        return None


def _c2c_enabled(info: Any) -> bool:
    return info is not None and bool(int(getattr(info, "isC2cEnabled", 0)))


def _error_words(nvml: Any, err: Any) -> str:
    if int(err.value) == _NO_PERMISSION:
        return "no permission"
    return clean(str(err)) or f"NVML error {err.value}"


class NvmlSampler:
    """Samples every GPU each `interval_s` seconds in a thread of its own.

    start(on_sample): on_sample gets each view in that thread; it must be quick and not raise. latest() never blocks.
    take() samples once in the caller's thread, for one-shot commands; do not mix it with start().
    proc, clock: replaced in tests.
    """

    def __init__(
        self,
        interval_s: float = 1.0,
        *,
        with_processes: bool = True,
        proc: str = "/proc",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.interval_s = interval_s
        self.calling: tuple[str, int, float] | None = None
        self.calls: Calls  # bound at each initialisation
        self.watched: frozenset[int] = frozenset()
        self._with_processes = with_processes
        self._proc = proc
        self._clock = clock
        self._table = ProcessTable(proc)
        self._cpu_seen: dict[tuple[int, float], tuple[float, float]] = {}
        self._nvml: Any = None
        self.devices: list[_Device] = []
        self._is_ready = False
        self._error = ""
        self._hint = ""
        self._retry_at = 0.0
        self._failures = 0
        self._lost_round = 0
        self._next_hotplug = 0.0
        self._known: dict[str, tuple[int, str]] = {}
        self._driver = ""
        self._cuda = ""
        self._events: Any = None
        self._view = GpuView(taken_s=0.0)
        self._published_at = 0.0
        self._on_sample: OnSample | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    # -- for readers ---------------------------------------------------------------------------------------------------------

    def start(self, on_sample: OnSample | None = None) -> None:
        """Begin sampling. Calling it again replaces on_sample only."""
        self._on_sample = on_sample
        if self._thread is None or not self._thread.is_alive():
            self._stop.clear()
            self._thread = threading.Thread(target=self._run, name="k2tui-nvml", daemon=True)
            self._thread.start()

    def stop(self, timeout_s: float = 1.0) -> None:
        """End the thread. One that waits for the driver is left behind: it is a daemon and holds nothing of ours."""
        self._stop.set()
        thread = self._thread
        if thread is None:
            self._shutdown()
        elif thread is not threading.current_thread():
            thread.join(timeout_s)

    def latest(self) -> GpuView:
        """The newest view, at once. taken_s is 0.0 until the first sample; waiting_for names a call that has not come back."""
        view, calling = self._view, self.calling
        if calling is not None and time.perf_counter() - calling[2] > _STUCK_S:
            return replace(
                view, waiting_for=f"{calling[0]} of GPU {calling[1]}" if calling[1] >= 0 else calling[0]
            )
        return view

    def watch_pcie(self, *indices: int) -> None:
        """Ask these GPUs' costly figures (throughput, SM shares) every 2 s; () = seldom, as usual."""
        self.watched = frozenset(indices)

    def take(self) -> GpuView:
        """One sample now, in this thread."""
        self._view = self._sample()
        return self._view

    # -- the thread ----------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                self._publish(self._sample())
            except Exception:
                # a fault of ours must not end the sampling: the age of the view shows that something is off
                _log_exception("GPU sample failed")
                self._drop("GPU sampling failed inside k2tui", "see the log file", began)
            self._stop.wait(max(0.05, self.interval_s - (time.monotonic() - began)))
        self._shutdown()

    def _publish(self, view: GpuView) -> None:
        self._view = view
        self._published_at = time.monotonic()
        if self._on_sample is not None and not self._stop.is_set():
            self._on_sample(view)

    def _sample(self) -> GpuView:
        began, cpu = time.monotonic(), time.thread_time()
        if not self._is_ready and began >= self._retry_at:
            self._initialize(began)
        if self._is_ready and began >= self._next_hotplug:
            self._next_hotplug = began + _HOTPLUG_EVERY_S
            if self._hotplugged() or self._lost_is_due(began):
                self._shutdown()
                self._initialize(began)
        if not self._is_ready:
            return GpuView(
                taken_s=self._clock(), error=self._error, hint=self._hint, driver_version=self._driver
            )
        samples: list[GpuSample] = []
        try:
            for number, device in enumerate(self.devices):
                samples.append(device.sample(began, self._clock()))
                if (
                    self._on_sample is not None
                    and time.monotonic() - max(self._published_at, began) > _STUCK_S
                ):
                    rest = [d.last or GpuSample(d.index) for d in self.devices[number + 1 :]]
                    self._publish(self._compose(samples + rest, began, cpu))
        except _Restart:
            self._shutdown()
            self._drop("the NVIDIA driver went away", "it is asked again until it is back", began)
            return GpuView(taken_s=self._clock(), error=self._error, hint=self._hint)
        self._read_events()
        if any(sample.error.startswith("fallen") for sample in samples):
            if self._lost_round == 0:
                self._lost_round = 1
                self._lost_at = began + _LOST_RETRY_S[0]
        elif len(samples) >= len(self._known):
            self._lost_round = 0
        return self._compose(samples, began, cpu)

    def _compose(self, samples: list[GpuSample], began: float, cpu: float) -> GpuView:
        gpus = samples + self._missing(samples)
        processes = self._processes() if self._with_processes else ()
        return GpuView(
            taken_s=self._clock(),
            gpus=tuple(gpus),
            processes=processes,
            driver_version=self._driver,
            sample_ms=(time.thread_time() - cpu) * 1000.0,
            cuda_version=self._cuda,
            notes=explain_processes(gpus, processes) if self._with_processes else (),
        )

    def _missing(self, samples: list[GpuSample]) -> list[GpuSample]:
        """GPUs that an earlier initialisation had and this one has not, after the living ones."""
        here = {sample.uuid for sample in samples if sample.uuid}
        for sample in samples:
            if sample.uuid:
                self._known[sample.uuid] = (sample.index, sample.name)
        out: list[GpuSample] = []
        for uuid, (index, name) in self._known.items():
            if uuid not in here:
                number = len(samples) + len(out)
                error = f"missing: was GPU {index}; fallen off the bus or removed"
                out.append(GpuSample(number, uuid=uuid, name=name, error=error, taken_s=self._clock()))
        return out

    # -- the library ---------------------------------------------------------------------------------------------------------

    def _initialize(self, now: float) -> None:
        self.calling = ("the start of NVML", -1, time.perf_counter())
        try:
            self._nvml = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            self.calls = Calls(self._nvml, _FIELDS)
        except ImportError:
            self._drop("nvidia-ml-py is not installed", "pip install nvidia-ml-py", now)
            return
        except self._nvml.NVMLError as err:
            error, hint = explain_start(int(err.value), _error_words(self._nvml, err), self._proc)
            self._drop(error, hint, now)
            if int(err.value) == _MISMATCH:
                _unload(self._nvml)
            return
        finally:
            self.calling = None
        try:
            self._driver = _try_system(self._nvml, self._nvml.nvmlSystemGetDriverVersion)
            version = _try_system(self._nvml, self._nvml.nvmlSystemGetCudaDriverVersion)
            self._cuda = f"{int(version) // 1000}.{int(version) % 1000 // 10}" if version else ""
            count = int(self._nvml.nvmlDeviceGetCount())
            self.devices = []
            for index in range(count):
                self.devices.append(self._open(index))
        except self._nvml.NVMLError as err:
            self._shutdown()
            error, hint = explain_start(int(err.value), _error_words(self._nvml, err), self._proc)
            self._drop(error, hint, now)
            return
        if not self.devices and not self._known:
            self._shutdown()
            self._drop(
                "the NVIDIA driver sees no GPU",
                "lspci | grep -i nvidia shows whether the board is there",
                now,
            )
            return
        self._is_ready = True
        self._failures = 0
        self._error = self._hint = ""
        self._next_hotplug = now + _HOTPLUG_EVERY_S
        self._open_events()

    def _open(self, index: int) -> _Device:
        """A device; one whose handle cannot be had is there too, lost."""
        nvml = self._nvml
        try:
            return _Device(nvml, index, nvml.nvmlDeviceGetHandleByIndex(index), self)
        except nvml.NVMLError as err:
            if err.value in (_UNINITIALIZED, _DRIVER_NOT_LOADED, _MISMATCH):
                raise
            return _DeadDevice(nvml, index, self, _error_words(nvml, err), int(err.value))

    def _drop(self, error: str, hint: str, now: float) -> None:
        self._is_ready = False
        self.devices = []
        self._error, self._hint = error, hint
        self._retry_at = now + _BACKOFF_S[min(self._failures, len(_BACKOFF_S) - 1)]
        self._failures += 1

    def _shutdown(self) -> None:
        nvml = self._nvml
        if nvml is None or not self._is_ready:
            return
        self._is_ready = False
        for call in (
            lambda: nvml.nvmlEventSetFree(self._events) if self._events is not None else None,
            nvml.nvmlShutdown,
        ):
            try:
                call()
            except nvml.NVMLError:
                pass  # the library is gone or was never up: either way there is nothing to close
        self._events = None
        self.devices = []

    def _hotplugged(self) -> bool:
        """Whether the kernel knows another number of GPUs than the library counted when it was initialised."""
        try:
            count = len(os.listdir(f"{self._proc}/driver/nvidia/gpus"))
        except OSError:
            return False
        changed = count != len(self.devices) and count != self._seen_by_kernel
        self._seen_by_kernel = count
        return changed

    _seen_by_kernel: int = -1
    _lost_at: float = 0.0

    def _lost_is_due(self, now: float) -> bool:
        """A lost or missing GPU: initialise again now and then, because only that finds it when it is back."""
        if self._lost_round == 0 or now < self._lost_at:
            return False
        self._lost_at = now + _LOST_RETRY_S[min(self._lost_round, len(_LOST_RETRY_S) - 1)]
        self._lost_round += 1
        return True

    def _open_events(self) -> None:
        """Critical errors (Xid) come as events; without permission or support there are none, and nothing else changes."""
        nvml = self._nvml
        try:
            events = nvml.nvmlEventSetCreate()
        except nvml.NVMLError:
            return
        registered = 0
        for device in self.devices:
            try:
                nvml.nvmlDeviceRegisterEvents(device.handle, nvml.nvmlEventTypeXidCriticalError, events)
                registered += 1
            except nvml.NVMLError:
                continue
        if registered:
            self._events = events
        else:
            nvml.nvmlEventSetFree(events)

    def _read_events(self) -> None:
        if self._events is None:
            return
        nvml = self._nvml
        for _ in range(32):
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
            except nvml.NVMLError:
                return  # time-out: nothing new
            address = ctypes.cast(event.device, ctypes.c_void_p).value
            for device in self.devices:
                if device.handle is not None and ctypes.cast(device.handle, ctypes.c_void_p).value == address:
                    device.last_xid, device.last_xid_s = int(event.eventData), self._clock()

    # -- processes and host --------------------------------------------------------------------------------------------------

    def _processes(self) -> tuple[GpuProcess, ...]:
        facts = self._table.read({pid for device in self.devices for pid, *_ in device.processes})
        now = time.monotonic()
        uid = os.getuid()
        percents: dict[int, float | None] = {}
        seen: dict[tuple[int, float], tuple[float, float]] = {}
        for pid, fact in facts.items():
            key = (pid, fact.started_s)
            old = self._cpu_seen.get(key)
            percents[pid] = (
                None if old is None or now <= old[0] else 100.0 * (fact.cpu_s - old[1]) / (now - old[0])
            )
            seen[key] = (now, fact.cpu_s)
        self._cpu_seen = seen
        out: list[GpuProcess] = []
        for device in self.devices:
            for pid, memory_b, kind, slice_id in device.processes:
                share = device.usage.get(pid, 0) if device.has_usage and pid in device.usage_of else None
                out.append(
                    as_process(
                        pid,
                        device.index,
                        memory_b,
                        kind,
                        slice_id,
                        share,
                        facts.get(pid),
                        percents.get(pid),
                        uid,
                    )
                )
        return tuple(out)

    def host_memory(self) -> tuple[int | None, int | None]:
        """(total, used) of the host in bytes, for GPUs that have no memory of their own."""
        return read_host_memory(self._proc)


class _DeadDevice(_Device):
    """A GPU that the library counts but gives no handle for."""

    def __init__(self, nvml: Any, index: int, sampler: NvmlSampler, words: str, code: int) -> None:
        super().__init__(nvml, index, None, sampler)
        self._words = (
            "fallen off the bus (NVML: GPU is lost)" if code == _LOST else f"does not answer ({words})"
        )

    def sample(self, now: float, wall_s: float) -> GpuSample:
        self.last = GpuSample(self.index, error=self._words, taken_s=wall_s)
        return self.last


def read_host_memory(proc: str = "/proc") -> tuple[int | None, int | None]:
    """(total, used) bytes of /proc/meminfo, used = total - available; (None, None) where it cannot be read."""
    found: dict[str, int] = {}
    try:
        with open(f"{proc}/meminfo") as fh:
            for line in fh:
                name, _, rest = line.partition(":")
                if name in ("MemTotal", "MemAvailable"):
                    found[name] = int(rest.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        return None, None
    if len(found) < 2:
        return None, None
    return found["MemTotal"], found["MemTotal"] - found["MemAvailable"]


def _try_system(nvml: Any, call: Callable[[], Any]) -> str:
    try:
        return clean(str(call()))
    except nvml.NVMLError:
        return ""


def _unload(nvml: Any) -> None:
    """Forget the library so that the next start loads the one that belongs to the new driver."""
    library = getattr(nvml, "nvmlLib", None)
    cache = getattr(nvml, "_nvmlGetFunctionPointer_cache", None)
    if library is None or not isinstance(cache, dict) or platform.system() != "Linux":
        return
    import _ctypes

    cache.clear()
    nvml.nvmlLib = None
    try:
        _ctypes.dlclose(library._handle)
    except OSError:
        pass


def _is_container(proc: str) -> bool:
    if os.path.exists("/.dockerenv") or os.path.exists("/run/.containerenv"):
        return True
    try:
        return any(
            word in Path(f"{proc}/1/cgroup").read_text()
            for word in ("docker", "kubepods", "containerd", "lxc")
        )
    except OSError:
        return False


def explain_start(code: int, words: str, proc: str) -> tuple[str, str]:
    """(what is wrong, what to do) when the library does not start."""
    if code == _LIBRARY_NOT_FOUND:
        error = "no NVIDIA driver here: libnvidia-ml.so.1 was not found"
        if platform.system() != "Linux":
            return error, f"NVIDIA GPUs are read on Linux; on {platform.system()} everything else works"
        if os.path.exists("/etc/nv_tegra_release"):
            return error, "this Jetson's software has no NVML; tegrastats shows its GPU"
        if os.path.exists("/usr/lib/wsl/lib/libnvidia-ml.so.1"):
            return error, "WSL: add /usr/lib/wsl/lib to LD_LIBRARY_PATH"
        if os.path.exists("/dev/nvidiactl"):
            return (
                error,
                "the devices are there, the library is not: start the container with NVIDIA_DRIVER_CAPABILITIES=utility,compute",
            )
        if _is_container(proc):
            return (
                error,
                "in a container: start it with --gpus all (Docker) or the NVIDIA runtime class (Kubernetes)",
            )
        return (
            error,
            "install the NVIDIA driver; on a machine without a GPU this is normal and everything else works",
        )
    if code == _DRIVER_NOT_LOADED:
        return (
            "no NVIDIA driver here: the library is installed, the kernel module is not loaded",
            "sudo modprobe nvidia, then nvidia-smi; after a kernel update the module may need a rebuild (dkms status)",
        )
    if code == _MISMATCH:
        kernel = _kernel_module_version(proc)
        module = f" (kernel module {kernel})" if kernel else ""
        return (
            f"NVIDIA driver/library version mismatch{module}",
            "the driver was updated under the running kernel module: running servers go on; reload the module or reboot",
        )
    if code == _NO_PERMISSION:
        return (
            "no permission to use the NVIDIA driver",
            "check ls -l /dev/nvidiactl; in a container pass the device on",
        )
    if code == _GPU_NOT_FOUND:
        return "the NVIDIA driver sees no GPU", "lspci | grep -i nvidia shows whether the board is there"
    return (
        f"NVML does not start: {words}",
        "nvidia-smi and `dmesg | grep -i nvrm` say more; it is tried again",
    )


def _kernel_module_version(proc: str) -> str:
    try:
        found = re.search(
            r"Kernel Module\D*?(\d+(?:\.\d+)+)", Path(f"{proc}/driver/nvidia/version").read_text()
        )
    except OSError:
        return ""
    return found[1] if found else ""


def _log_exception(text: str) -> None:
    import logging  # costs a one-shot command more than all its other imports, and is needed when something is broken only

    logging.getLogger(__name__).exception(text)
