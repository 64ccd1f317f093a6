"""NVML's most asked getters, each bound once to its function and its buffer; it knows no GPU's figures and no sampler.

nvidia-ml-py looks the function up, allocates, and wraps every field of the answer at each call, and it asks for the size of a list
before the list. Here the same library (the one that nvidia-ml-py loaded) is called once with a buffer that is kept. Errors are
nvidia-ml-py's NVMLError with the library's code. One object serves one thread and one initialisation of the library.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

_UNINITIALIZED, _INSUFFICIENT_SIZE, _FUNCTION_NOT_FOUND = 1, 7, 13
_NO_INSTANCE = 0xFFFFFFFF
_NOT_AVAILABLE = 0xFFFFFFFFFFFFFFFF
_FIRST_ROOM, _MOST_ROOM = 16, 100_000  # entries; a list that is longer makes the buffer grow
# nvml.h, in native alignment
_MEMORY_V2 = struct.Struct("@IQQQQ")  # version, total, reserved, free, used
_PROCESS_V3 = struct.Struct("@IQII")  # pid, used memory, GPU instance, compute instance
_USAGE = struct.Struct("@IQIIII")  # pid, time stamp in us, SM, memory, encoder, decoder
_FIELD = struct.Struct("@IIqqIi8s")  # field, scope, time stamp, latency, type of the value, error, value
_VALUE_TYPES: tuple[struct.Struct, ...] = tuple(
    map(struct.Struct, ("d", "I", "L", "Q", "q", "i", "H"))
)  # nvmlValueType_t

Processes = tuple[tuple[int, int | None, int | None], ...]


class Calls:
    """Bound getters; each takes a device's handle. A function that this library has not: NVMLError "function not found".

    fields: the (field, scope) pairs that the getter of that name asks in one call.
    """

    def __init__(self, nvml: Any, fields: tuple[tuple[int, int], ...]) -> None:
        self._nvml = nvml
        self.power = self._number("PowerUsage")
        self.temperature = self._number("Temperature", 0)
        self.sm_clock = self._number("ClockInfo", 1)
        self.memory_clock = self._number("ClockInfo", 2)
        self.pstate = self._number("PerformanceState")
        self.pcie_generation = self._number("CurrPcieLinkGeneration")
        self.pcie_width = self._number("CurrPcieLinkWidth")
        self.fan = self._number("FanSpeed")
        self.encoder = self._number("EncoderUtilization", with_period=True)
        self.decoder = self._number("DecoderUtilization", with_period=True)
        self.event_reasons = self._number("CurrentClocksEventReasons", of=ctypes.c_ulonglong)
        self.throttle_reasons = self._number("CurrentClocksThrottleReasons", of=ctypes.c_ulonglong)
        self.compute = self._processes("ComputeRunningProcesses_v3")
        self.graphics = self._processes("GraphicsRunningProcesses_v3")
        self.mps = self._processes("MPSComputeRunningProcesses_v3")
        self.utilization = self._utilization()
        self.memory = self._memory()
        self.usage = self._usage()
        self.fields = self._fields(fields)

    def _number(
        self, name: str, *args: int, of: type[Any] = ctypes.c_uint, with_period: bool = False
    ) -> Callable[[Any], int]:
        """nvmlDeviceGet<name>(handle, *args, out): one number. with_period: the library tells a sampling period after it."""
        call = self._bind(name)
        out, period = of(), ctypes.c_uint()
        rest = (*args, ctypes.byref(out), *((ctypes.byref(period),) if with_period else ()))

        def ask(handle: Any) -> int:
            call(handle, *rest)
            return out.value

        return ask

    def _bind(self, name: str) -> Callable[..., int]:
        """The library's function, looked up at its first call, as one that raises for an error's code."""
        nvml = self._nvml
        function: Any = None

        def call(*args: Any) -> int:
            nonlocal function
            if function is None:
                if nvml.nvmlLib is None:
                    raise nvml.NVMLError(_UNINITIALIZED)
                try:
                    function = getattr(nvml.nvmlLib, "nvmlDeviceGet" + name)
                except AttributeError:
                    raise nvml.NVMLError(_FUNCTION_NOT_FOUND) from None
            code = function(*args)
            if code:
                raise nvml.NVMLError(code)
            return code

        return call

    def _list(
        self, name: str, entry: struct.Struct, *, buffer_first: bool = False
    ) -> Callable[..., list[tuple[Any, ...]]]:
        """A getter of a list, as one call with a buffer that grows. The function takes (handle, count, buffer, *more), or the
        buffer first."""
        call, nvml = self._bind(name), self._nvml
        count = ctypes.c_uint()
        ref = ctypes.byref(count)
        room = _FIRST_ROOM
        buffer = ctypes.create_string_buffer(entry.size * room)

        def ask(handle: Any, *more: Any) -> list[tuple[Any, ...]]:
            nonlocal room, buffer
            while True:
                count.value = room
                first, second = (buffer, ref) if buffer_first else (ref, buffer)
                try:
                    call(handle, first, second, *more)
                except nvml.NVMLError as err:
                    if err.value != _INSUFFICIENT_SIZE or room > _MOST_ROOM:
                        raise
                    room = max(count.value, room) * 2
                    buffer = ctypes.create_string_buffer(entry.size * room)
                    continue
                return list(entry.iter_unpack(buffer[: entry.size * min(count.value, room)]))

        return ask

    def _processes(self, name: str) -> Callable[[Any], Processes]:
        """(pid, GPU memory in bytes, MIG slice) of each process."""
        found = self._list(name, _PROCESS_V3)

        def ask(handle: Any) -> Processes:
            return tuple(
                [
                    (pid, None if used == _NOT_AVAILABLE else used, None if gi == _NO_INSTANCE else gi)
                    for pid, used, gi, _ in found(handle)
                ]
            )

        return ask

    def _usage(self) -> Callable[[Any, int], dict[int, int]]:
        """SM share in percent by pid, the newest after since_us (microseconds of the Unix time)."""
        found = self._list("ProcessUtilization", _USAGE, buffer_first=True)

        def ask(handle: Any, since_us: int) -> dict[int, int]:
            since = ctypes.c_ulonglong(since_us)
            newest: dict[int, tuple[int, int]] = {}
            for pid, stamp, share, *_ in found(handle, since):
                if pid not in newest or stamp >= newest[pid][0]:
                    newest[pid] = (stamp, min(100, share))
            return {pid: share for pid, (_, share) in newest.items()}

        return ask

    def _utilization(self) -> Callable[[Any], tuple[int, int]]:
        """(GPU, memory) in percent of the time."""
        call = self._bind("UtilizationRates")
        out = (ctypes.c_uint * 2)()

        def ask(handle: Any) -> tuple[int, int]:
            call(handle, out)
            return out[0], out[1]

        return ask

    def _memory(self) -> Callable[[Any], tuple[int, int, int]]:
        """(total, used, reserved) in bytes. The second version of the call reports reserved apart, as nvidia-smi does."""
        call = self._bind("MemoryInfo_v2")
        buffer = ctypes.create_string_buffer(_MEMORY_V2.size)
        _MEMORY_V2.pack_into(buffer, 0, int(self._nvml.nvmlMemory_v2), 0, 0, 0, 0)

        def ask(handle: Any) -> tuple[int, int, int]:
            call(handle, buffer)
            _, total, reserved, _, used = _MEMORY_V2.unpack(buffer)
            return total, used, reserved

        return ask

    def _fields(self, fields: tuple[tuple[int, int], ...]) -> Callable[[Any], dict[int, int]]:
        """Values of these (field, scope) pairs by field, in one call; a field that this board cannot tell is left out."""
        call = self._bind("FieldValues")
        buffer = ctypes.create_string_buffer(_FIELD.size * len(fields))
        for number, (field, scope) in enumerate(fields):
            _FIELD.pack_into(buffer, number * _FIELD.size, field, scope, 0, 0, 0, 0, b"")

        def ask(handle: Any) -> dict[int, int]:
            call(handle, len(fields), buffer)
            out: dict[int, int] = {}
            for field, _, _, _, kind, error, value in _FIELD.iter_unpack(buffer):
                if error == 0 and kind < len(_VALUE_TYPES):
                    out[field] = int(_VALUE_TYPES[int(kind)].unpack_from(value)[0])
            return out

        return ask
