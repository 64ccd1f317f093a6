"""Config: every wrong file is an error that names file, line and key."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from k2tui import config
from k2tui.errors import UsageError


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "c.toml"
    path.write_text(text)
    return str(path)


def test_shipped_profiles_load() -> None:
    loaded = config.load()
    tiny = loaded.get_profile("tiny")
    assert tiny.engine == "local" and tiny.model == "asset:tiny-target"
    assert loaded.get_profile().name == "tiny"


def test_inheritance_and_env_merge(tmp_path: Path) -> None:
    path = write(tmp_path, """
[profile.base]
model = "/m"
tp_size = 8
[profile.base.env]
NCCL_PROTO = "LL"
[profile.child]
inherit = "base"
port = 31000
env = { NCCL_ALGO = "Ring" }
""")
    child = config.load(path).get_profile("child")
    assert (child.model, child.tp_size, child.port) == ("/m", 8, 31000)
    assert dict(child.env) == {"NCCL_PROTO": "LL", "NCCL_ALGO": "Ring"}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[profile.a]\nmodle = '/m'\n", ["c.toml:2", "profile.a.modle", "did you mean 'model'"]),
        ("[profile.a]\nport = 'x'\n", ["c.toml:2", "profile.a.port", "whole number"]),
        ("[profile.a]\nargs = 'x'\n", ["c.toml:2", "list"]),
        ("[profile.a]\nargs = [1]\n", ["c.toml:2", "texts"]),
        ("[profile.a]\nport = true\n", ["c.toml:2", "whole number"]),
        ("[bench]\nconcurency = [1]\n", ["c.toml:2", "did you mean 'concurrency'"]),
        ("bench = 3\n", ["c.toml:1", "table"]),
        ("profil = 'x'\n", ["c.toml:1", "profil", "did you mean 'profile'"]),
        ("profiles = 1\n", ["c.toml:1", "profiles"]),
        ("profile = 'a'\n", ["c.toml:1", "default_profile"]),
        ("profile = 'a'\n[profile.a]\nmodel = '/m'\n", ["line 2", "default_profile"]),
        ("[profile.a]\nport = 99999\n", ["c.toml:2", "1 to 65535"]),
        ("[profile.a]\nengine = 'foo'\n", ["c.toml:2", "local, sglang, vllm"]),
        ("[profile.a]\nstall_s = -1\n", ["c.toml:2", "at least 0"]),
        ("[bench]\nconcurrency = [0, -5]\n", ["c.toml:2", "at least 1"]),
        ("[bench]\nnum_prompts = -3\n", ["c.toml:2", "at least 1"]),
        ("[ui]\nrefresh_s = nan\n", ["c.toml:2", "at least 0.1"]),
        ("[notify]\nkinds = ['foo']\n", ["c.toml:2", "must hold"]),
        ("[notify]\nquiet = '99:99-x'\n", ["c.toml:2", "22:00-07:00"]),
        ("[profile.a\n", ["c.toml", "line 1"]),
        ("[profile.a]\ninherit = 'b'\n", ["c.toml:1", "does not exist"]),
        ("[profile.a]\ninherit = 'b'\n[profile.b]\ninherit = 'a'\n", ["inherits from itself"]),
    ],
)
def test_errors_name_the_place(tmp_path: Path, text: str, parts: list[str]) -> None:
    with pytest.raises(UsageError) as err:
        loaded = config.load(write(tmp_path, text))
        loaded.get_profile("a")
    for part in parts:
        assert part in f"{err.value.message} {err.value.hint}"


def test_default_profile_beside_profiles(tmp_path: Path) -> None:
    loaded = config.load(write(tmp_path, "default_profile = 'a'\n[profile.a]\nmodel = '/m'\n"))
    assert loaded.get_profile().model == "/m"


def test_the_example_in_the_docs_is_valid(tmp_path: Path) -> None:
    text = (Path(__file__).resolve().parent.parent / "docs" / "config.md").read_text()
    example = text.split("```toml\n", 1)[1].split("```", 1)[0]
    loaded = config.load(write(tmp_path, example))
    assert loaded.get_profile().name == "kimi" and loaded.get_profile("kimi-eagle").draft


def test_a_fifo_is_no_config(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "f.toml")
    with pytest.raises(UsageError, match="no regular file"):
        config.load(str(tmp_path / "f.toml"))


def test_missing_folder_and_bytes(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a folder"):
        config.load(str(tmp_path))
    with pytest.raises(UsageError, match=r"nope\.toml"):
        config.load(str(tmp_path / "nope.toml"))
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="not UTF-8"):
        config.load(str(tmp_path / "b.toml"))


def test_unknown_profile_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'tiny'"):
        config.load().get_profile("tinny")


def test_what_is_shown_of_the_config_holds_no_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from k2tui import cli

    text = """
[profile.p]
args = ["--api-key", "S3CR1", "--tool=https://u:S3CR2@h/", "--header", "Authorization: Bearer S3CR3", "--tp", "2"]
env = { HF_TOKEN = "S3CR4", A = "1" }
[notify]
webhook = "https://hooks.example/S3CR5"
"""
    path = write(tmp_path, text)
    for what in ("show", "profiles"):
        assert cli.main(["config", what, "--json", "--config", str(path)]) == 0
        out = capsys.readouterr().out
        assert "S3CR" not in out
        profiles = json.loads(out)["profiles"]
        mine = next(p for p in (profiles.values() if what == "show" else profiles) if p["name"] == "p")
        assert mine["args"][-2:] == ["--tp", "2"] and mine["args"][1] == "***" and mine["env"] == {"A": "1", "HF_TOKEN": "***"}
