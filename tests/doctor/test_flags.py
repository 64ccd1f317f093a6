"""Flags against the installed engine's own sources: both ways in which SGLang declares them, and presets that hold for both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from k2tui import config, engines, paths
from k2tui.engine_flags import find_engine, read_flags, unknown_flags
from k2tui.parsing import parse_toml

FLAGS = Path(__file__).parents[1] / "fixtures" / "flags"
VERSIONS = ("0.5.12", "0.5.23")

OLD = """
class ServerArgs:
    model_path: str
    rpc_ipc_name: str = ""
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--model-path", "--model", help="see --rpc-ipc-name")
        parser.add_argument('--cuda-graph-max-bs', type=int)
"""
NEW = """
class Exec(msgspec.Struct):
    _NS_PATH = "exec"
    model_path: A[str, "The model. See --nothing"]
    max_bs: A[
        Optional[int],
        Arg(help="x", aliases=["--max-batch"]),
    ] = None
    hidden: A[bool, Arg(no_cli=True, resolvable=True)] = False
    gemm_runner: A[str, Arg(help="y", cli_name="--gemm-backend")] = "auto"
    plain: int = 0

def hook(server_args):
    found: A[int, "no field"] = 1
"""


def known(version: str) -> frozenset[str]:
    """What `read_flags` gave for the published sglang of that version."""
    return frozenset((FLAGS / f"sglang-{version}.txt").read_text().split())


def test_both_ways_of_declaring_are_read(tmp_path: Path) -> None:
    srt = tmp_path / "srt"
    (srt / "arg_groups" / "fields").mkdir(parents=True)
    (srt / "server_args.py").write_text(OLD)
    assert read_flags("sglang", tmp_path) == {"--model-path", "--model", "--cuda-graph-max-bs"}
    (srt / "server_args.py").write_text("")
    (srt / "arg_groups" / "fields" / "exec_.py").write_text(NEW)
    assert read_flags("sglang", tmp_path) == {"--model-path", "--max-bs", "--max-batch", "--gemm-backend"}


@pytest.mark.parametrize(
    ("version", "flag", "near"),
    [
        ("0.5.12", "--cuda-graph-max-bs", None),
        ("0.5.23", "--cuda-graph-max-bs", "--cuda-graph-max-bs-decode"),
        ("0.5.12", "--cuda-graph-max-bs-decode", "--cuda-graph-max-bs"),
        ("0.5.12", "--disable-piecewise-cuda-graph", None),
        # by spelling alone it would be --disable-decode-cuda-graph: another thing
        ("0.5.23", "--disable-piecewise-cuda-graph", "--disable-prefill-cuda-graph"),
        ("0.5.12", "--disable-prefill-cuda-graph", "--disable-piecewise-cuda-graph"),
        ("0.5.12", "--attention-backendd", "--attention-backend"),
        ("0.5.23", "--eagle-topk", ""),
    ],
)
def test_a_flag_of_another_version_is_named_with_its_name_here(
    version: str, flag: str, near: str | None
) -> None:
    assert unknown_flags([flag, "4"], known(version)) == ([] if near is None else [(flag, near)])


def test_the_opposite_is_never_offered() -> None:
    assert unknown_flags(["--disable-x-graph"], frozenset({"--enable-x-graph", "--port"})) == [
        ("--disable-x-graph", "")
    ]


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_shipped_has_only_flags_of_both_versions(version: str) -> None:
    flags = known(version)
    shipped = [p for p in config.load().profiles.values() if p.engine == "sglang"]
    assert len(shipped) >= 5
    for profile in shipped:
        assert unknown_flags(engines.get("sglang").launch(profile).argv, flags) == [], profile.name
    knobs = parse_toml((paths.assets_dir() / "tune-sglang.toml").read_text())["knob"]
    assert unknown_flags([k["flag"] for k in knobs if "flag" in k], flags) == []


def test_an_engine_is_found_where_the_profile_s_own_environment_has_it(tmp_path: Path) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    assert find_engine("sglang", env={"PYTHONPATH": str(tmp_path)}).package == str(tmp_path / "sglang")
    assert find_engine("sglang", env={"PYTHONPATH": ""}).package != str(tmp_path / "sglang")
