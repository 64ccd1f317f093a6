"""The doctor's GPU answers on made-up scenes."""

from __future__ import annotations

from k2tui.doctor_gpu import check_gpus, check_links
from k2tui.sources.nvml_topology import read_topology


def test_a_healthy_box_is_one_line(fake):
    fake.show(fake.make.idle(8))
    answers = list(check_gpus())
    assert answers == [("GPU driver", "ok", "8 GPUs (H200), driver 580.159.04", "")]
    links = list(check_links(read_topology(), (), 8))
    assert [severity for _, severity, _, _ in links] == ["ok"] and "NVLink" in links[0][2]
    assert list(check_links(None, (), 1)) == []


def test_sick_gpus_are_named_with_what_to_do(fake):
    fake.show(fake.make.throttled(8).fail(3, "*", 15))
    answers = {(check, severity): (evidence, todo) for check, severity, evidence, todo in check_gpus()}
    assert "fallen off the bus" in answers["GPU 3", "error"][0]
    assert (
        "uncorrected ECC" in answers["GPU 7", "error"][0]
        and "nvidia-smi -q -i 7" in answers["GPU 7", "error"][1]
    )
    assert "PCIe Gen1 x4" in answers["GPU 6", "warning"][0]


def test_links_that_will_hurt(fake):
    fake.show(fake.make.busy(2).gpu("*", "links", -1).say("link 0 1 30 1"))
    texts = [(severity, evidence) for _, severity, evidence, _ in check_links(read_topology(), (0, 1), 2)]
    assert texts[0][0] == "warning" and "no peer access" in texts[0][1] and "no NVLink" in texts[1][1]
    assert ("error", "no GPU 5 here; there are 2") in [(s, e) for _, s, e, _ in check_links(read_topology(), (0, 5), 2)]


def test_no_driver_is_information(fake):
    fake.show(fake.make.mismatch(2))
    ((check, severity, evidence, todo),) = list(check_gpus())
    assert (check, severity) == ("GPU driver", "info") and "mismatch" in evidence and todo
    assert list(check_links(read_topology(), (), 8)) == []
