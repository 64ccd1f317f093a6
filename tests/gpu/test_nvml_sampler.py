"""The sampler against the real nvidia-ml-py and a library that answers from scenes."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from k2tui.core.gpu import GpuView
from k2tui.sources.nvml import NvmlSampler
from k2tui.sources.nvml_calls import Calls

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures" / "nvml"


def take(fake, scene, **kwargs) -> GpuView:
    fake.show(scene)
    sampler = NvmlSampler(**kwargs)
    try:
        return sampler.take()
    finally:
        sampler.stop()


@pytest.mark.parametrize("count", [1, 8, 16])
def test_every_gpu_with_its_own_figures(fake, count):
    view = take(fake, fake.make.still(count))
    assert view.error == "" and view.driver_version == "580.159.04" and view.cuda_version == "13.0"
    assert [g.index for g in view.gpus] == list(range(count))
    last = view.gpus[-1]
    assert last.gpu_utilization == 12 + 11 * (count - 1)
    assert last.power_usage_mw == 210_000 + 61_000 * (count - 1)
    assert last.temperature_c == 41 + 5 * (count - 1) and last.temperature_slowdown_c == 89
    assert last.enforced_power_limit_mw == 700_000 and last.nvlink_count == 18
    assert (last.pcie_gen, last.pcie_width) == (5, 16) and last.fan_percent is None
    assert last.remapped_rows == (0, 0) and last.ecc_uncorrected == 0 and last.virtualization == "passthrough"
    assert last.missing == () and last.bar1_total_b == 274877906944


def test_memory_used_is_nvidia_smis_with_reserved_apart(fake):
    idle = take(fake, fake.make.idle(1)).gpus[0]
    assert (idle.memory_used_b, idle.memory_reserved_b) == (0, 644939776)


def test_memory_of_an_old_driver_without_the_second_call(fake):
    gpu = take(fake, fake.make.idle(1).fail(0, "MemoryInfo_v2", 13)).gpus[0]
    assert gpu.memory_used_b == 644939776 and gpu.memory_reserved_b is None


def test_recorded_serving_equals_what_nvidia_smi_said_then(fake):
    row = (FIXTURES / "h200x2_serving_nvidia_smi.csv").read_text().splitlines()[1].split(", ")
    recording = json.loads((FIXTURES / "h200x2_serving.json").read_text())["trace"][0]["g"][0]
    scene = fake.make.recorded("h200x2_serving")(2)
    # its first moment, for ever
    scene.lines = [
        s.replace("frame 1 ", "frame 0 ") for s in scene.lines if s.startswith("frame 1 ") or "frame" not in s
    ]
    gpu = take(fake, scene).gpus[0]
    assert gpu.memory_used_b == recording["mem2"]["ok"]["used"]
    assert gpu.power_usage_mw == recording["power_mw"]["ok"]
    assert gpu.memory_total_b >> 20 == int(row[5].split()[0])
    # nvidia-smi shows 616 MiB: it rounds up, NVML has 615.06
    assert -(-gpu.memory_reserved_b // (1 << 20)) == int(row[4].split()[0])


def test_one_failing_field_hides_nothing_else(fake):
    view = take(fake, fake.make.na(4))
    poor, odd = view.gpus[1], view.gpus[2]
    assert poor.power_usage_mw is None and poor.gpu_utilization is None
    assert poor.temperature_c == 61 and poor.memory_used_b is not None and poor.missing == ()
    assert odd.temperature_c is None and odd.sm_clock_mhz is None and odd.gpu_utilization == 82
    assert any("temperature" in m for m in odd.missing) and "SM clock: no permission" in odd.missing
    assert view.gpus[3].power_usage_mw == 560_000


def test_a_lost_gpu_is_named_and_hides_no_other(fake):
    view = take(fake, fake.make.lost(8).say("wave 0"))
    assert "fallen off the bus" in view.gpus[3].error
    assert [g.index for g in view.gpus if g.error] == [3]
    assert all(g.power_usage_mw for g in view.gpus if not g.error)


def test_a_gpu_that_is_lost_while_running_keeps_its_name_and_comes_back(fake, monkeypatch):
    monkeypatch.setattr("k2tui.sources.nvml._HOTPLUG_EVERY_S", 0.0)
    monkeypatch.setattr("k2tui.sources.nvml._LOST_RETRY_S", (0.0, 0.0, 0.0))
    sampler = NvmlSampler()
    try:
        fake.show(fake.make.still(4))
        uuid = sampler.take().gpus[2].uuid
        fake.show(fake.make.still(4).gpu(2, "gone", 1))
        lost = sampler.take()
        assert "fallen off the bus" in lost.gpus[2].error and lost.gpus[2].uuid == uuid
        assert lost.gpus[3].temperature_c == 56
        missing = sampler.take()  # initialised again: the library counts three now
        assert [g.error == "" for g in missing.gpus] == [True, True, True, False]
        assert "was GPU 2" in missing.gpus[3].error and missing.gpus[3].uuid == uuid
        fake.show(fake.make.still(4))
        back = sampler.take()
        assert all(g.error == "" for g in back.gpus) and len(back.gpus) == 4
    finally:
        sampler.stop()


def test_hot_plug_is_seen_by_the_kernels_list(fake, tmp_path, monkeypatch):
    monkeypatch.setattr("k2tui.sources.nvml._HOTPLUG_EVERY_S", 0.0)
    gpus = tmp_path / "proc" / "driver" / "nvidia" / "gpus"
    gpus.mkdir(parents=True)
    (gpus / "0000:10:00.0").mkdir()
    sampler = NvmlSampler(proc=str(tmp_path / "proc"))
    try:
        fake.show(fake.make.still(1))
        assert len(sampler.take().gpus) == 1
        fake.show(fake.make.still(2))
        assert len(sampler.take().gpus) == 1  # NVML counts at its start only
        (gpus / "0000:11:00.0").mkdir()
        assert len(sampler.take().gpus) == 2
    finally:
        sampler.stop()


@pytest.mark.parametrize(
    ("code", "words", "hint"),
    [
        (9, "kernel module is not loaded", "modprobe"),
        (18, "version mismatch", "reboot"),
        (4, "no permission", "/dev/nvidiactl"),
        (999, "does not start", "dmesg"),
    ],
)
def test_a_library_that_does_not_start_is_explained(fake, code, words, hint):
    view = take(fake, fake.make.idle(2).say(f"init {code}"))
    assert view.gpus == () and words in view.error and hint in view.hint


def test_no_gpu_at_all(fake):
    view = take(fake, fake.make.idle(0))
    assert "sees no GPU" in view.error and view.hint


def test_mismatch_recovers_by_itself(fake, monkeypatch):
    monkeypatch.setattr("k2tui.sources.nvml._BACKOFF_S", (0.0,))
    fake.show(fake.make.mismatch(8))
    sampler = NvmlSampler()
    try:
        assert "mismatch" in sampler.take().error
        fake.show(fake.make.still(8))
        assert len(sampler.take().gpus) == 8
    finally:
        sampler.stop()


def test_back_off_grows_and_a_dead_start_is_not_tried_each_second(fake):
    fake.show(fake.make.mismatch(8))
    sampler = NvmlSampler()
    sampler.take()
    fake.show(fake.make.still(8))
    assert sampler.take().gpus == ()  # the first retry is a second away
    sampler.stop()


def test_the_driver_that_goes_away_is_a_state_and_comes_back(fake, monkeypatch):
    monkeypatch.setattr("k2tui.sources.nvml._BACKOFF_S", (0.0,))
    sampler = NvmlSampler()
    try:
        fake.show(fake.make.still(2))
        assert len(sampler.take().gpus) == 2
        fake.show(fake.make.still(2).fail("*", "*", 9))
        assert "went away" in sampler.take().error
        fake.show(fake.make.still(2))
        assert len(sampler.take().gpus) == 2
    finally:
        sampler.stop()


def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)


def test_a_slow_call_blocks_no_reader_and_shows_in_the_age(fake):
    fake.show(fake.make.slow(2))
    seen: list[GpuView] = []
    sampler = NvmlSampler(interval_s=0.2)
    sampler.start(seen.append)
    try:
        # a reader that had to wait for the call would find it over: nothing to wait for
        until(lambda: "power usage of GPU 1" in sampler.latest().waiting_for)
        until(lambda: seen and len(seen[-1].gpus) == 2 and seen[-1].gpus[1].power_usage_mw)
        assert seen[-1].gpus[0].power_usage_mw
        # having cost 2 s it is not asked again at once: the other figures go on at their own pace
        count, power = len(seen), sampler.devices[1].slots["power"]
        until(lambda: len(seen) >= count + 3)
        assert power.asked == 1
    finally:
        sampler.stop(timeout_s=3)


def test_with_one_slow_gpu_the_others_are_published_before_it_answers(fake):
    fake.show(fake.make.still(3).delay(1, "Temperature", 1300).delay(2, "Temperature", 1300))
    seen: list[GpuView] = []
    sampler = NvmlSampler(interval_s=0.2)
    sampler.start(seen.append)
    try:
        until(lambda: seen)
        first = seen[0]
        assert first.gpus[0].temperature_c == 41
        assert first.gpus[2].temperature_c is None  # still being asked
    finally:
        sampler.stop(timeout_s=4)


def test_stop_does_not_wait_for_a_driver_that_hangs(fake):
    fake.show(fake.make.idle(1).say("delay_ms 2000"))
    sampler = NvmlSampler()
    sampler.start()
    until(lambda: sampler.calling)
    sampler.stop(timeout_s=0.1)
    assert sampler.calling, "the call was waited for"
    fake.show(fake.make.idle(1))
    for thread in threading.enumerate():
        if thread.name == "k2tui-nvml":
            thread.join(10)


def test_unsupported_getters_are_not_asked_again(fake):
    fake.show(fake.make.idle(1))
    sampler = NvmlSampler()
    asked: list[str] = []
    try:
        sampler.take()
        for key in ("fan", "power"):
            slot = sampler.devices[0].slots[key]
            slot.call = lambda h, key=key, real=slot.call: asked.append(key) or real(h)
        for _ in range(4):
            sampler.take()
    finally:
        sampler.stop()
    assert asked == ["power"] * 4


def test_pcie_throughput_is_asked_on_request_only(fake, monkeypatch):
    import pynvml

    calls: list[int] = []
    real = pynvml.nvmlDeviceGetPcieThroughput
    monkeypatch.setattr(pynvml, "nvmlDeviceGetPcieThroughput", lambda h, c: calls.append(c) or real(h, c))
    fake.show(fake.make.idle(2))
    sampler = NvmlSampler()
    try:
        assert sampler.take().gpus[0].pcie_rx_kb_s is None and calls == []
        monkeypatch.setattr("k2tui.sources.nvml._WATCHED_S", 0.0)
        sampler.watch_pcie(1)
        sampler.take()
        view = sampler.take()
        assert (view.gpus[1].pcie_rx_kb_s, view.gpus[1].pcie_tx_kb_s) == (449, 600)
        assert view.gpus[0].pcie_rx_kb_s is None
    finally:
        sampler.stop()


def test_counters_become_rates(fake, monkeypatch):
    sampler = NvmlSampler()
    try:
        fake.show(fake.make.idle(1).gpu(0, "pcie_count_rx", 1_000_000).gpu(0, "pcie_count_tx", 0))
        assert sampler.take().gpus[0].nvlink_rx_kb_s is None
        sampler.devices[0].ask_again("fields")
        at = sampler.devices[0].rates["pcie_rx"]._at
        fake.show(
            fake.make.idle(1)
            .gpu(0, "pcie_count_rx", 51_000_000)
            .gpu(0, "pcie_count_tx", 0)
            .gpu(0, "nvlink_tx", 14678)
        )
        gpu = sampler.take().gpus[0]
        seconds = sampler.devices[0].rates["pcie_rx"]._at - at
        assert gpu.pcie_rx_kb_s == pytest.approx(50_000 / seconds, rel=0.02) and gpu.pcie_tx_kb_s == 0
        assert gpu.nvlink_tx_kb_s == pytest.approx(10_000 * 1.024 / seconds, rel=0.02)
    finally:
        sampler.stop()


def test_mig_slices(fake):
    gpu = take(fake, fake.make.mig(2)).gpus[0]
    assert gpu.mig_enabled and gpu.gpu_utilization is None
    assert [(s.name, s.sm_count) for s in gpu.mig] == [("3g.71gb", 60), ("2g.35gb", 32), ("1g.18gb", 16)]
    assert gpu.mig[0].memory_used_b == 35 << 30 and gpu.mig[1].gpu_instance == 2


def test_unified_memory_is_the_hosts(fake, tmp_path):
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "meminfo").write_text("MemTotal: 125829120 kB\nMemFree: 5 kB\nMemAvailable: 41943040 kB\n")
    gpu = take(fake, fake.make.spark(1), proc=str(proc)).gpus[0]
    assert gpu.memory_kind == "unified" and gpu.memory_total_b == 120 << 30 and gpu.memory_used_b == 80 << 30


def test_grace_memory_is_its_own_and_coherent(fake):
    gpu = take(fake, fake.make.grace(1)).gpus[0]
    assert gpu.memory_kind == "coherent" and gpu.memory_total_b == 150754820096


def test_vgpu_is_named_and_its_memory_is_not_the_hosts(fake):
    gpu = take(fake, fake.make.vgpu(1).fail(0, "MemoryInfo", 3).fail(0, "MemoryInfo_v2", 3)).gpus[0]
    assert gpu.virtualization == "vGPU" and gpu.memory_kind == "" and gpu.memory_total_b is None
    assert gpu.power_usage_mw is None and gpu.temperature_c is None


def test_throttling_and_errors_in_words(fake):
    view = take(fake, fake.make.throttled(8))
    assert view.gpus[2].throttle_reasons == ("heat (software)",)
    assert view.gpus[5].throttle_reasons == ("power cap",)
    assert view.gpus[7].throttle_reasons == ("hardware slowdown", "heat (hardware)", "power brake")
    assert view.gpus[7].ecc_uncorrected == 2 and view.gpus[7].remap_pending is True
    assert take(fake, fake.make.idle(1)).gpus[0].throttle_reasons == ()


def test_xid_events_are_kept_with_their_gpu(fake):
    sampler = NvmlSampler(clock=lambda: 1234.0)
    try:
        fake.show(fake.make.still(4).gpu(2, "xid", 79).gpu(2, "xid_seq", 0))
        sampler.take()
        fake.show(fake.make.still(4).gpu(2, "xid", 79).gpu(2, "xid_seq", 1))
        sampler.take()
        view = sampler.take()
        assert [g.last_xid for g in view.gpus] == [None, None, 79, None] and view.gpus[2].last_xid_s == 1234.0
    finally:
        sampler.stop()


def test_processes_unknown_for_want_of_permission_are_said_so(fake):
    view = take(fake, fake.make.noperm(2))
    assert view.processes == () and view.gpus[0].process_error == "no permission"
    assert view.notes == ("GPU 0-1: processes unknown (no permission)",)


def test_memory_without_a_visible_owner_is_explained(fake):
    assert "--pid=host" in take(fake, fake.make.still(1)).notes[0]
    assert take(fake, fake.make.idle(1)).notes == ()


def test_costly_figures_are_asked_seldom_in_turns_and_say_how_old_they_are(fake, monkeypatch):
    """A call of 8 ms on 4 GPUs is due after 0.5 to 1 times 48 s, not every 2 s; what is watched is asked often all the same."""
    import pynvml

    spent = 0.0  # the clock of costs: a real one would charge a call for what else the machine does

    def costly(real):
        def call(*args):
            nonlocal spent
            spent += 0.008
            return real(*args)

        return call

    class Costly(Calls):
        def __init__(self, *args):
            super().__init__(*args)
            self.usage, self.fields = costly(self.usage), costly(self.fields)

    monkeypatch.setattr("k2tui.sources.nvml.Calls", Costly)
    energy = costly(pynvml.nvmlDeviceGetTotalEnergyConsumption)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTotalEnergyConsumption", energy)
    monkeypatch.setattr(time, "perf_counter", lambda: spent)
    fake.show(fake.make.busy(4).proc(0, os.getpid(), 5 << 30, sm=12))
    sampler = NvmlSampler()
    now = time.monotonic()
    shift = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now + shift)
    calls = {"usage": 0, "energy": 0, "memory": 0}
    watched = 0
    for second in range(60):
        shift = float(second)
        before = [{key: d.slots[key].asked for key in calls} for d in sampler.devices] or [
            dict.fromkeys(calls, 0)
        ] * 4
        if second == 40:
            sampler.watch_pcie(0)
        sampler.take()
        for device, seen in zip(sampler.devices, before, strict=True):
            for key in calls:
                calls[key] += device.slots[key].asked - seen[key]
            if second >= 40 and device.index == 0:
                watched += device.slots["usage"].asked - seen["usage"]
    assert calls["memory"] == 4 * 60
    assert 4 * 2 <= calls["energy"] <= 4 * 4
    assert watched >= 8 and calls["usage"] - watched <= 4 * 4
    assert len({round(d.slots["energy"].due) for d in sampler.devices}) > 1  # in turns
    sample = sampler.latest().gpus[0]
    assert sample.usage_taken_s is not None and sample.rates_span_s is not None and sample.rates_span_s >= 1.0
    sampler.stop()


def test_the_bound_getters_answer_as_nvidia_ml_pys_own(fake):
    """A list longer than the kept buffer, MIG slices' ids, values of all kinds; and an unknown function is said to be unknown."""
    import pynvml

    scene = fake.make.busy(2).gpu(1, "memtemp", 61)
    for number in range(30):
        scene.proc(1, 1000 + number, (number + 1) << 20 if number else -1, sm=number, mem=1)
    scene.proc(0, 77, 5 << 30, at="1 0")
    fake.show(scene)
    pynvml.nvmlInit()
    try:
        fields = ((82, 0), (138, 0xFFFFFFFF), (9999, 0))
        calls = Calls(pynvml, fields)
        for index in (1, 0, 1):  # buffers are shared: the shorter answer must not show the longer one's rest
            h = pynvml.nvmlDeviceGetHandleByIndex(index)
            own = pynvml.nvmlDeviceGetComputeRunningProcesses(h)
            ids = [None if p.gpuInstanceId == 0xFFFFFFFF else p.gpuInstanceId for p in own]
            assert calls.compute(h) == tuple(
                (p.pid, p.usedGpuMemory, i) for p, i in zip(own, ids, strict=True)
            )
            assert calls.usage(h, 0) == {
                s.pid: s.smUtil for s in pynvml.nvmlDeviceGetProcessUtilization(h, 0)
            }
            memory = pynvml.nvmlDeviceGetMemoryInfo(h, version=pynvml.nvmlMemory_v2)
            assert calls.memory(h) == (memory.total, memory.used, memory.reserved)
            told = pynvml.nvmlDeviceGetFieldValues(h, list(fields))
            assert calls.fields(h) == {
                f.fieldId: f.value.uiVal if f.fieldId == 82 else f.value.ullVal
                for f in told
                if f.nvmlReturn == 0
            }
            assert calls.encoder(h) == pynvml.nvmlDeviceGetEncoderUtilization(h)[0]
            assert calls.event_reasons(h) == pynvml.nvmlDeviceGetCurrentClocksEventReasons(h)
        assert len(calls.compute(h)) == 30 and calls.compute(h)[0][1] is None
        with pytest.raises(pynvml.NVMLError_FunctionNotFound):
            calls._bind("NoSuchThing")(h)
        with pytest.raises(pynvml.NVMLError_NotSupported):
            calls.fan(h)
    finally:
        pynvml.nvmlShutdown()
