"""The embedded engine's arguments before a start, what is said where an engine is not installed, and where no GPU is seen."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from k2tui.config import Profile
from k2tui.doctor import Finding, Severity, check_profile, check_system
from k2tui.local import arguments
from k2tui.paths import install_hint


def found(check: str, profile: Profile) -> list[Finding]:
    return [f for f in check_profile(profile) if f.check == check]


def tiny(*args: str) -> Profile:
    return Profile(name="t", engine="local", model="asset:tiny-target", port=50520, args=args)


@pytest.mark.parametrize(
    ("args", "evidence", "todo"),
    [
        (
            ("--max-runing-requests", "4"),
            "no argument --max-runing-requests",
            "did you mean --max-running-requests?",
        ),
        (("--tp 8",), "no argument --tp 8", '"--tp", "8"'),
        (("--max-running-requests", "0"), "must be at least 1", "--help"),
        (("--max-running-requests", "x"), "must be a whole number, got 'x'", "--help"),
        (("--max-running-requests",), "expected one argument", "--help"),
        (("--speculative-algorithm", "EAGLE3"), "needs --speculative-draft-model-path", "--help"),
        (("stray",), "unrecognized arguments: stray", "--help"),
        (("--help",), "no argument --help", ""),
    ],
)
def test_what_the_embedded_engine_would_refuse_is_said_before(args, evidence, todo, capsys):
    (flags,) = found("flags", tiny(*args))
    assert flags.severity is Severity.ERROR and evidence in flags.evidence and todo in flags.todo
    assert capsys.readouterr() == ("", "")  # a question prints nothing


def test_right_arguments_pass_and_the_engine_says_the_same():
    good = tiny("--max-running-requests=4", "--trust-remote-code", "--log-level", "info")
    assert [f.severity for f in found("flags", good)] == [Severity.OK]
    arguments.parse(["--model-path", "m", *good.args])
    with pytest.raises(SystemExit):
        arguments.parse(["--model-path", "m", "--max-runing-requests", "4"])


def test_an_engine_that_is_not_there_leaves_its_flags_unchecked(tmp_path: Path):
    python = tmp_path / "python"
    bare = Profile(name="s", model="asset:tiny-target", port=50521, python=str(python), args=("--tp 8",))
    said = found("flags", bare)
    assert [f.severity for f in said] == [Severity.WARNING, Severity.INFO]
    assert (
        said[0].todo.endswith('"--tp", "8"') and said[1].evidence == "flags not checked: engine not installed"
    )


def test_a_start_without_gpus_says_how_many_are_needed(monkeypatch):
    monkeypatch.setattr(
        "k2tui.doctor.gpu_facts", lambda wanted=(): []
    )  # a machine without a driver, wherever this runs
    eight = Profile(name="s", model="asset:tiny-target", port=50521, tp_size=8)
    (gpus,) = found("GPUs", eight)
    assert gpus.severity is Severity.WARNING and gpus.evidence == "8 GPUs are needed, 0 are seen here"
    assert not found(
        "GPUs", Profile(name="c", model="asset:tiny-target", port=50521, args=("--device", "cpu"))
    )
    assert not found("GPUs", tiny())


def test_hints_name_a_command_that_works():
    """k2tui is on no package index: what is said must install from a checkout."""
    checkout = Path(__file__).resolve().parents[2]
    assert shlex.split(install_hint("sglang")) == ["pip", "install", "-e", f"{checkout}[sglang]"]
    assert not [f for f in check_system() if "install 'k2tui" in f.todo or "install k2tui" in f.todo]
    docs = [checkout / "README.md", *(checkout / "docs").glob("*.md")]
    assert not [d.name for d in docs if "install k2tui" in d.read_text() or "install 'k2tui" in d.read_text()]
