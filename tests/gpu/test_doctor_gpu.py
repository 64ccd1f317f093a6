"""The doctor's GPU answers on made-up scenes."""

from __future__ import annotations

import os

import pytest

from k2tui import config, paths
from k2tui.config import Profile
from k2tui.doctor import check_profile
from k2tui.doctor_gpu import check_gpus, check_links, gpus_per_node, settle_gpus
from k2tui.errors import K2Error
from k2tui.orders import settle
from k2tui.sources.nvml_topology import read_topology


def test_a_healthy_box_is_one_line(fake):
    fake.show(fake.make.idle(8))
    answers = list(check_gpus())
    assert answers == [("GPU driver", "ok", "8 GPUs (H200), driver 580.159.04 (CUDA up to 13.0)", "")]
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
    assert ("error", "no GPU 5 here; there are 2") in [
        (s, e) for _, s, e, _ in check_links(read_topology(), (0, 5), 2)
    ]


def test_no_driver_is_information(fake):
    fake.show(fake.make.mismatch(2))
    ((check, severity, evidence, todo),) = list(check_gpus())
    assert (check, severity) == ("GPU driver", "info") and "mismatch" in evidence and todo
    assert [(s, "embedded" in t) for _, s, _, t in check_gpus(are_needed=True)] == [("warning", False)]
    assert list(check_links(read_topology(), (), 8)) == []


def test_gpus_are_chosen_by_links_and_free_memory(fake, tmp_path):
    scene = fake.make.idle(8).gpu(0, "used", 50 << 30).proc(2, os.getpid(), 5 << 30)
    fake.show(scene)
    auto = Profile(name="p", model="/m", tp_size=2, auto_gpus=-1)
    assert settle_gpus(auto).gpus == (1, 3)  # 0 and 2 are held; both of one socket
    assert settle_gpus(Profile(name="p", model="/m", auto_gpus=4)).gpus == (4, 5, 6, 7)
    import fcntl

    from k2tui.jobs.locks import lock_file

    lock = lock_file(paths.jobs_dir().parent / "locks", "gpu:3")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as fh:  # a job that has not loaded anything yet
        fcntl.flock(fh, fcntl.LOCK_EX)
        assert 3 not in settle_gpus(auto).gpus
    with pytest.raises(K2Error, match="6 of 8 GPUs are free, 7 are wanted; 2 are held"):
        settle_gpus(Profile(name="p", model="/m", auto_gpus=7))
    (tmp_path / "c.toml").write_text(
        '[profile.a]\nengine = "sglang"\nmodel = "/m"\ntp_size = 2\ngpus = "auto"\n[profile.b]\ninherit = "a"\ngpus = [5]\n'
    )
    loaded = config.load(str(tmp_path / "c.toml"))
    profile, params = settle(loaded, {"profile": "a"})
    assert profile.gpus == (1, 3) and params["gpus"] == [1, 3]
    assert loaded.profiles["b"].gpus == (5,) and loaded.profiles["b"].auto_gpus == 0
    assert settle(loaded, {"profile": "a", "gpus": [6, 7]})[0].gpus == (6, 7)
    found = {f.check: f.evidence for f in check_profile(loaded.profiles["a"])}
    assert found["GPUs"].startswith("chosen now: 1, 3")


def test_extract_and_pipelines_choose_gpus_as_a_start_does(fake, tmp_path):
    from k2tui import stages
    from k2tui.jobs.chain import load_chain, open_run
    from k2tui.orders import preview_stage, settled

    fake.show(fake.make.idle(4).gpu(0, "used", 50 << 30))
    (tmp_path / "c.toml").write_text(
        'default_profile = "a"\n[profile.a]\nengine = "sglang"\nmodel = "/m"\nport = 44010\ngpus = "auto"\n'
    )
    loaded = config.load(str(tmp_path / "c.toml"))
    given = {"data": "d", "out": "o", "draft": "/drafts/x"}  # that draft is checked, never served
    params = settled(loaded, "extract", given)
    plan = stages.get("extract").plan(loaded, params)
    assert plan.locks == ("port:44010", "gpu:1") and plan.argv[-2:] == ("--gpus", "1,")
    assert "--gpus" in preview_stage(loaded, "extract", given)
    assert "gpus" not in settled(loaded, "extract", {**given, "url": "http://127.0.0.1:1"})
    (tmp_path / "p.toml").write_text('name = "p"\n[[step]]\nname = "serve"\nneeds = []\n')
    run = open_run(loaded, load_chain(tmp_path / "p.toml"))
    assert run._spec(run.chain.step("serve"), starts=True).env["CUDA_VISIBLE_DEVICES"] == "1"


def test_gpus_of_one_node():
    assert gpus_per_node(Profile(tp_size=16, nodes=("b",))) == 8
    assert gpus_per_node(Profile(tp_size=2, args=("--pp-size", "2"))) == 4
