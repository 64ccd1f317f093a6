"""A server on two machines: a job each, the second started, followed and stopped over a real SSH on loopback (a "node" of its own home)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from k2tui import config, doctor
from k2tui.core.job import JobState
from k2tui.errors import K2Error
from k2tui.jobs import folder, procs
from k2tui.jobs.chain import load_chain, open_run
from k2tui.lifecycle import stop_servers
from k2tui.nodes import remote_argv
from k2tui.orders import retry_job, submit_stage

from .sshd import Sshd, why_not
from .world import until

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is an sshd")

ENGINE = '''
"""Stands for SGLang: says its arguments and its environment, serves until it is told to end."""
import os, signal, sys, time
args = dict(zip(sys.argv[1::2], sys.argv[2::2]))
print("server_args=ServerArgs(nnodes=%s)" % args["--nnodes"], flush=True)
print("rank", args["--node-rank"], "proto", os.environ.get("NCCL_PROTO"), "home", os.environ.get("K2TUI_HOME"), flush=True)
if os.environ.get("DIES") == args["--node-rank"]:
    sys.exit("RuntimeError: no peer")
def end(*_):
    print("rank", args["--node-rank"], "ends", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
while True:
    time.sleep(0.2)
'''


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Cluster:
    """This machine, and another one that is this machine over SSH with a home of its own."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.other = tmp_path / "other-home"
        self.sshd = Sshd(tmp_path / "sshd", free_port(), f"SetEnv K2TUI_HOME={self.other}\n")
        self.sshd.start()
        key = tmp_path / "sshd" / "user"
        ssh_config = tmp_path / "ssh_config"
        ssh_config.write_text(
            f"Host gpu-b\n HostName 127.0.0.1\n Port {self.sshd.port}\n IdentityFile {key}\n IdentitiesOnly yes\n"
            " StrictHostKeyChecking no\n UserKnownHostsFile /dev/null\n LogLevel ERROR\nHost *\n StrictHostKeyChecking yes\n"
        )
        tools = tmp_path / "tools"
        tools.mkdir()
        self.script(tools / "ssh", f'exec /usr/bin/env -u LD_LIBRARY_PATH {_ssh()} -F {ssh_config} "$@"')
        monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
        package = tmp_path / "site" / "sglang"
        (package / "srt").mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "launch_server.py").write_text(ENGINE)
        flags = ("model-path", "host", "port", "tp-size", "nnodes", "dist-init-addr", "node-rank")
        (package / "srt" / "server_args.py").write_text("\n".join(f'"--{f}"' for f in flags))
        self.script(tmp_path / "python", f'PYTHONPATH={tmp_path}/site:{ROOT} exec {sys.executable} "$@"')
        model = tmp_path / "model"
        model.mkdir()
        (model / "config.json").write_text("{}")
        (tmp_path / "k.toml").write_text(
            f'[profile.two]\nengine = "sglang"\nmodel = "{model}"\nport = {free_port()}\ntp_size = 2\npython = "{tmp_path}/python"\n'
            f'nodes = ["gpu-b"]\ndist_init_addr = "127.0.0.1:{free_port()}"\nnode_python = "{tmp_path}/python"\nenv = {{ NCCL_PROTO = "LL" }}\n'
            f'[profile.lone]\ninherit = "two"\nnodes = ["gpu-c"]\n'
        )
        self.config = config.load(str(tmp_path / "k.toml"))

    @staticmethod
    def script(path: Path, line: str) -> None:
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)

    def jobs(self) -> tuple[str, str]:
        """(the server's job, the node's job), both of this machine."""
        found = {j.spec.stage: j.spec.id for j in folder.list_jobs()}
        return found["serve"], found["node"]

    def there(self, *argv: str) -> str:
        """k2tui on the other machine."""
        env = {**os.environ, "K2TUI_HOME": str(self.other)}
        done = subprocess.run(
            [sys.executable, "-m", "k2tui", *argv], env=env, capture_output=True, text=True, cwd=ROOT
        )
        return done.stdout


def _ssh() -> str:
    import shutil

    return shutil.which("ssh") or "ssh"


@pytest.fixture
def cluster(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    made = Cluster(tmp_path, monkeypatch)
    yield made
    stop_servers([j.spec.id for j in folder.list_jobs() if not j.state.is_final])
    made.there("down", "--all")
    made.sshd.stop()


def log(job_id: str) -> str:
    path = folder.log_path(job_id)
    return path.read_text() if path.exists() else ""


def test_two_jobs_are_started_watched_and_stopped_over_ssh(cluster: Cluster) -> None:
    submit_stage(cluster.config, "serve", {"profile": "two"})
    server, node = cluster.jobs()
    until(lambda: "rank 0 proto LL" in log(server) and "rank 1 proto LL" in log(node), 60)
    assert f"home {cluster.other}" in log(node) and f"home {os.environ['K2TUI_HOME']}" in log(server)
    (far,) = json.loads(cluster.there("jobs", "list", "--json"))["jobs"]
    assert far["state"] == "running" and far["title"] == "node 1 of two on gpu-b" and far["id"] in log(node)
    pid = int(far["pid"])
    assert procs.birth(pid)
    # the connection breaks: the job there goes on and is followed again, each line once
    assert cluster.sshd.kill_sessions() >= 1
    until(lambda: "the connection is lost" in log(node), 30)
    (end,) = stop_servers([server])
    assert end.is_clean, end.words
    assert (
        not procs.birth(pid)
        and "rank 1 ends" in (cluster.other / "jobs" / far["id"] / "output.log").read_text()
    )
    assert log(node).count("rank 1 proto") == 1
    assert folder.get(node).state is JobState.STOPPED
    assert [j["state"] for j in json.loads(cluster.there("jobs", "list", "--json"))["jobs"]] == ["stopped"]


def test_a_node_that_dies_ends_the_server_with_its_name(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = cluster.config.profiles["two"]
    params = {"profile": "two", "env": {"DIES": "1"}}
    assert profile.nnodes == 2
    submit_stage(cluster.config, "serve", params)
    server, node = cluster.jobs()
    until(lambda: folder.get(server).state.is_final and folder.get(node).state.is_final, 60)
    assert "RuntimeError: no peer" in log(node)
    assert folder.get(node).state is JobState.FAILED
    assert (
        folder.get(server).state is JobState.STOPPED
        and "node 1 (gpu-b): its job" in folder.get(server).reason
    )


def test_a_server_that_ends_takes_its_node_along(cluster: Cluster) -> None:
    submit_stage(cluster.config, "serve", {"profile": "two"})
    server, node = cluster.jobs()
    until(lambda: "rank 1" in log(node), 60)
    folder.stop(server, wait_s=30)  # by itself, not by `down`
    until(lambda: folder.get(node).state.is_final, 60)
    assert folder.get(node).state is JobState.SUCCEEDED
    assert [j["state"] for j in json.loads(cluster.there("jobs", "list", "--json"))["jobs"]] == ["stopped"]


def test_a_pipeline_starts_and_stops_all_machines_and_a_retry_of_one_is_refused(
    cluster: Cluster, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    (tmp_path / "p.toml").write_text(
        f"""name = "two"
[defaults]
profile = "two"
[[step]]
name = "serve"
needs = []
gate = ["file:{model}/config.json"]
[[step]]
name = "look"
needs = ["serve"]
argv = ["sh", "-c", "for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do grep -l 'rank 1' $K2TUI_HOME/jobs/*-node/output.log && exit 0; sleep 1; done; exit 1"]
"""
    )
    summary = open_run(cluster.config, load_chain(tmp_path / "p.toml")).run()
    assert summary["steps"]["look"]["action"] == "run"
    server, node = cluster.jobs()
    assert folder.get(server).state is folder.get(node).state is JobState.STOPPED
    assert "stopped by the first node" in log(node)
    for job_id in (server, node):
        with pytest.raises(K2Error, match="one machine of a server on several") as caught:
            retry_job(job_id)
        assert caught.value.hint == "k2tui up two starts all of them"


def test_doctor_asks_the_other_machines(cluster: Cluster) -> None:
    found = {f.check: f for f in doctor.check_profile(cluster.config.profiles["two"])}
    assert found["node gpu-b"].severity == "ok" and "reachable" in found["node gpu-b"].evidence
    with pytest.raises(K2Error, match="gpu-c is not reachable"):
        submit_stage(cluster.config, "serve", {"profile": "lone"})
    assert folder.list_jobs() == []


def test_no_host_becomes_an_option_of_ssh() -> None:
    for bad in ("-oProxyCommand=touch /tmp/x", "a b", ""):
        with pytest.raises(K2Error, match="no host name"):
            remote_argv(bad, "python3", "check")
    assert "BatchMode=yes" in remote_argv("u@h", "python3", "check")
