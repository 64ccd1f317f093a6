"""Commands and findings as wide as the terminal, and still whole when they are copied."""

from __future__ import annotations

import io
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from k2tui.config import Profile
from k2tui.doctor import Finding, Severity, check_profile, free_port
from k2tui.errors import K2Error, UsageError
from k2tui.verbs._launch_text import command, print_findings
from k2tui.verbs.up import _pair, parse_gpus

ARGV = [
    "/opt/python",
    "-m",
    "sglang.launch_server",
    "--model-path",
    "/a b/model",
    "--tp-size",
    "8",
    "--trust-remote-code",
    "--mem-fraction-static",
    "0.9",
]
ENV = {"NCCL_PROTO": "LL", "A": "x y"}


@pytest.mark.parametrize("width", [0, 40, 80, 200])
def test_a_command_is_the_same_at_every_width(width: int) -> None:
    text = command(ARGV, ENV, width)
    assert shlex.split(text.replace("\\\n", "")) == ["A=x y", "NCCL_PROTO=LL", *ARGV]
    if width >= 80:
        assert all(len(line) <= width for line in text.splitlines())
    assert ("\n" in text) == (0 < width < 200)


def test_findings_are_wrapped_on_a_terminal_and_whole_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = Finding("engine", Severity.ERROR, "word " * 40, "do this " * 20)
    out = io.StringIO()
    monkeypatch.setenv("COLUMNS", "80")
    print_findings([finding], out)
    assert (
        all(len(line) <= 80 for line in out.getvalue().splitlines()) and len(out.getvalue().splitlines()) > 4
    )
    monkeypatch.delenv("COLUMNS")
    out = io.StringIO()
    print_findings([finding], out)
    assert len(out.getvalue().splitlines()) == 2


def test_dry_run_and_profiles_fit_80_columns(
    tmp_path: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for argv in (["config", "profiles"], ["up", "kimi-k2.5-int4-8gpu-pcie-eagle3", "--dry-run"]):
        done = subprocess.run([sys.executable, "-m", "k2tui", *argv], capture_output=True, text=True)
        lines = (done.stdout + done.stderr).splitlines()
        assert lines and max(map(len, lines)) <= 80, max(lines, key=len)
    assert "NCCL_PROTO=LL" in done.stdout and "--speculative-num-draft-tokens 4" in done.stdout


def test_gpus_and_env_of_the_command_line() -> None:
    assert (parse_gpus("auto"), parse_gpus("4"), parse_gpus("0,1"), parse_gpus("3,")) == ("auto", 4, [0, 1], [3])
    assert _pair("A=b=c") == ("A", "b=c")
    for bad in ("x", "1,y", ","):
        with pytest.raises(UsageError):
            parse_gpus(bad)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b"])
def test_a_host_without_an_address_is_not_a_held_port(host: str) -> None:
    found = list(check_profile(Profile(name="p", model="/nowhere", host=host, port=30000)))
    (one,) = [f for f in found if f.check == "host"]
    assert one.severity is Severity.ERROR and repr(host) in one.evidence
    assert not [f for f in found if f.check == "port"]
    with pytest.raises(K2Error, match=r"cannot be resolved|not the name"):
        free_port(host, 30000)


def test_doctor_names_the_sign_that_it_prints(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from k2tui import cli, doctor

    for utf8, sign in ((True, "✗"), (False, "x")):
        monkeypatch.setattr("k2tui.plain.use_unicode", lambda utf8=utf8: utf8)
        monkeypatch.setattr(doctor, "check", lambda *_: [Finding("port", Severity.ERROR, "is held")])
        assert cli.main(["doctor"]) == 1
        assert capsys.readouterr().err == f"A start would fail: see the lines marked {sign}.\n"
