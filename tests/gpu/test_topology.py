"""Topology read through the real nvidia-ml-py, and what is concluded from it."""

from __future__ import annotations

import pytest

from k2tui.core.topology import (
    Topology,
    TopologyGpu,
    TopologyPair,
    choose_gpus,
    describe_topology,
    matrix_lines,
)
from k2tui.sources.nvml_topology import read_topology


def pcie_box() -> Topology:
    """Four boards, two a socket, NVLink bridges between 0-1 and 2-3."""
    gpus = tuple(
        TopologyGpu(i, "A100", numa_node=i // 2, cpus=f"{i // 2 * 8}-{i // 2 * 8 + 7}", nvlinks=4)
        for i in range(4)
    )
    pairs = tuple(
        TopologyPair(
            a, b, "PIX" if a // 2 == b // 2 else "SYS", 4 if a // 2 == b // 2 else 0, p2p=a // 2 == b // 2
        )
        for a in range(4)
        for b in range(a + 1, 4)
    )
    return Topology(gpus, pairs)


def test_eight_gpus_behind_a_switch(fake, tmp_path):
    fake.show(fake.make.busy(8))
    for index in range(8):
        folder = tmp_path / "bus" / "pci" / "devices" / f"0000:{0x10 + index:02x}:00.0"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{index // 4}\n")
        (folder / "local_cpulist").write_text("0-47,96-143\n" if index < 4 else "48-95,144-191\n")
    topology = read_topology(sys=str(tmp_path))
    assert len(topology.gpus) == 8 and len(topology.pairs) == 28
    gpu = topology.gpus[5]
    assert (gpu.numa_node, gpu.cpus, gpu.nvlinks, gpu.has_switch, gpu.fabric) == (
        1,
        "48-95,144-191",
        18,
        True,
        "ready",
    )
    pair = topology.pair(6, 1)
    assert pair and (pair.label, pair.path, pair.p2p) == ("NV18", "SYS", True)
    lines = matrix_lines(topology)
    assert lines[1].split()[:4] == ["GPU0", "X", "NV18", "NV18"] and lines[1].endswith("0     0-47,96-143")
    remarks = describe_topology(topology)
    assert (
        remarks[0] == ("ok", "all 8 GPUs joined by NVLink (18 links)") and "NUMA nodes 0, 1" in remarks[1][1]
    )
    assert choose_gpus(topology, 4) == (0, 1, 2, 3)


def test_direct_links_are_counted_by_pair(fake):
    fake.show(fake.make.busy(4).gpu("*", "links", 12).gpu("*", "remote", 0))
    topology = read_topology()
    assert topology.pair(0, 3).nvlinks == 4 and topology.gpus[0].has_switch is False


def test_no_peer_access_over_pcie_is_said_with_its_reason(fake):
    fake.show(fake.make.busy(2).gpu("*", "links", -1).say("link 0 1 30 1"))
    topology = read_topology()
    pair = topology.pair(0, 1)
    assert (pair.label, pair.p2p, pair.p2p_reason) == ("PHB", False, "the chipset does not allow it")
    texts = [text for _, text in describe_topology(topology)]
    assert "no peer access between GPU 0 and 1" in texts[0] and "no NVLink" in texts[1]
    assert "PHB!" in matrix_lines(topology)[1]


def test_a_fabric_that_is_not_ready_is_an_error(fake):
    fake.show(fake.make.busy(2).gpu(1, "fabric", 2))
    severity, text = describe_topology(read_topology())[0]
    assert severity == "error" and "GPU 1 is in progress" in text and "nvidia-fabricmanager" in text


def test_the_gpus_affinity_comes_from_nvml_without_sysfs(fake, tmp_path):
    fake.show(fake.make.busy(2))
    topology = read_topology(sys=str(tmp_path))
    assert [g.cpus for g in topology.gpus] == ["0-7", "8-15"] and topology.gpus[0].numa_node is None


def test_no_driver_is_a_topology_with_words(fake):
    fake.show(fake.make.mismatch(2))
    topology = read_topology()
    assert topology.gpus == () and "mismatch" in topology.error and topology.hint
    assert matrix_lines(topology) == (topology.error,) and describe_topology(topology) == (
        ("warning", topology.error),
    )


def test_a_lost_gpu_leaves_the_others(fake):
    fake.show(fake.make.still(4).fail(2, "*", 15))
    topology = read_topology()
    assert [g.index for g in topology.gpus] == [0, 1, 3] and len(topology.pairs) == 3


@pytest.mark.parametrize(
    ("count", "free", "chosen"),
    [
        (2, (), (0, 1)),
        (2, (1, 2, 3), (2, 3)),
        (1, (3,), (3,)),
        (4, (), (0, 1, 2, 3)),
        (5, (), ()),
        (2, (0,), ()),
        (0, (), ()),
    ],
)
def test_the_best_joined_group(count, free, chosen):
    assert choose_gpus(pcie_box(), count, free) == chosen


def test_a_mixed_box_is_described():
    texts = [text for _, text in describe_topology(pcie_box())]
    assert any("joins only some: GPU 0 and 2 talk over SYS" in text for text in texts)
    assert describe_topology(pcie_box(), [0, 1])[0] == ("ok", "all 2 GPUs joined by NVLink (4 links)")
    assert describe_topology(pcie_box(), [0, 7])[0] == ("error", "no GPU 7 here; there are 4")
