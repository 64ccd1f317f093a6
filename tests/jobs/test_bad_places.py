"""Secrets, odd words and homes that cannot be written: one clear error, never a traceback, nothing kept that should not be."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from k2tui.core.job_mask import mask_params, mask_text
from k2tui.errors import K2Error, UsageError
from k2tui.jobs import folder

ROOT = Path(__file__).parents[2]
Submit = Callable[..., str]


def k2tui(home: Path, *argv: str | bytes, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, sys.executable, "-m", "k2tui.cli", *argv],
        cwd=ROOT,
        env={**os.environ, "K2TUI_HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )


def is_one_error(done: subprocess.CompletedProcess[str], words: str) -> None:
    assert done.returncode in (1, 2), done.stdout + done.stderr
    assert "Traceback" not in done.stderr and words in done.stderr, done.stderr
    assert done.stderr.startswith("k2tui: ") and len(done.stderr.splitlines()) <= 2, done.stderr


# ---- secrets


@pytest.mark.parametrize(
    "text",
    [
        "x --api-key SECRET123",
        "x --api-key=SECRET123 --port 1",
        "x --api-key 'SECRET123 and more' --port 1",
        "x --api-key='a SECRET123' --port 1",
        'sh -c "echo --api-key SECRET123; echo"',
        "2026-11-30 ERROR password: SECRET123",
        'args={\\"api_key\\": \\"SECRET123\\"}',
        "cmd='x --api-key=SECRET123 y' -c \"a -k 'b --password SECRET123'\"",
        "ServerArgs(api_key='SECRET123', port=1)",
    ],
)
def test_a_secret_in_the_middle_of_a_line(text: str) -> None:
    shown = mask_text(text)
    assert "SECRET123" not in shown and "more" not in shown and "***" in shown
    assert mask_text(shown) == shown
    assert shown.startswith(text[:3])
    if "--port 1" in text:
        assert shown.endswith("--port 1")


@pytest.mark.parametrize(
    "line",
    [
        "Prefill batch, #new-seq: 1, #new-token: 512, #cached-token: 0, token usage: 0.01",
        "the key is here: see --tokenizer-path /m --max-total-tokens 4096",
        "loading 12 of 64 shards: 10.5 s",
    ],
)
def test_a_line_without_secrets_stays(line: str) -> None:
    assert mask_text(line) == line


@pytest.mark.parametrize(
    "part",
    [
        "-", "a", "\\", '"a":', "--key ", "a.b-", 'key="x ', "x:", "://a:", "://u:p@", "Authorization: ", 'Authorization: "', "cookie: a=b;",
        "bearer ", "key=[", 'key="\\', "password ", "--token '", ".-a", "key=a,b", "key=)", "a b=", "'key': [", "curl -u ", "token='\"'\"'",
    ],
)  # fmt: skip
def test_a_long_odd_line_is_no_trap(part: str) -> None:
    line = part * (40_000 // len(part))
    before = time.process_time()
    mask_text(line)
    assert time.process_time() - before < 5, "a line costs what its length is, not the square of it"


def test_params_are_masked_at_any_depth() -> None:
    params = {
        "args": ["--api-key", "SECRET123", "--tp", 2, "--password", 5],
        "env": {"HF_TOKEN": "SECRET123", "A": "1"},
        "deep": [{"api_key": "SECRET123"}, "sh -c 'x --api-key SECRET123'"],
        "tokens": ["SECRET"],
        "token": ["SECRET123"],
        "url": "http://127.0.0.1:1",
        "fingerprint": "abc",
        "n": 3,
        "auth": True,
    }
    shown = mask_params(params)
    assert "SECRET123" not in json.dumps(shown)
    assert shown["args"] == ["--api-key", "***", "--tp", 2, "--password", "***"]
    assert shown["env"] == {"HF_TOKEN": "***", "A": "1"}
    kept = ("url", "fingerprint", "n", "auth")
    assert {k: shown[k] for k in kept} == {k: params[k] for k in kept}
    assert mask_params(shown) == shown


def test_nothing_of_a_job_keeps_a_secret_and_the_work_has_it(
    submit: Submit, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = submit(
        "",
        argv=("sh", "-c", "test $(echo --api-key SECRET123 | wc -c) = 20"),
        title="x --api-key SECRET123",
        params={"args": ["--api-key", "SECRET123"]},
    )
    assert folder.wait(job_id, 20).state == "succeeded"
    for path in (home / "jobs" / job_id).iterdir():
        assert b"SECRET123" not in path.read_bytes(), path
    with pytest.raises(UsageError, match="api-key") as told:
        folder.retry(job_id)
    assert "K2TUI_SECRET_API_KEY" in told.value.hint
    monkeypatch.setenv("K2TUI_SECRET_API_KEY", "SECRET123")
    assert folder.wait(folder.retry(job_id), 20).state == "succeeded"


def test_a_title_made_of_the_command_is_masked_before_it_is_cut(submit: Submit) -> None:
    job_id = submit("", argv=("echo", "x" * 43, "hf_abcdefghijklmnopqrstuvwxyz"))
    assert "hf_" not in folder.get(job_id).spec.title
    folder.wait(job_id, 20)


def test_a_title_is_one_clean_line(submit: Submit) -> None:
    job_id = submit("", title="one\ntwo\r\x1b[31m \u202eevil\u200f\tend ")
    assert folder.get(job_id).spec.title == "one two evil end"
    folder.wait(job_id, 20)


# ---- places


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    point = tmp_path / "ro"
    point.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", str(point)], capture_output=True
        ).returncode
    ):
        pytest.skip("a read-only tmpfs cannot be mounted here")
    yield point
    subprocess.run(["umount", str(point)], check=True)


def test_a_read_only_home(read_only: Path) -> None:
    is_one_error(k2tui(read_only, "jobs", "submit", "--", "true"), "Read-only file system")
    is_one_error(k2tui(read_only, "board", "add", "x"), "Read-only file system")
    done = k2tui(read_only, "board", "list")
    assert done.returncode == 0 and "[ ]" in done.stdout, (
        "the default plan is shown all the same: " + done.stderr
    )


def test_a_home_that_is_a_file(tmp_path: Path) -> None:
    home = tmp_path / "file"
    home.write_text("")
    for words in (["jobs", "submit", "--", "true"], ["jobs", "list"]):
        is_one_error(k2tui(home, *words), "K2TUI_HOME has to be a folder")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("K2TUI_HOME", str(home))
        with pytest.raises(K2Error):
            folder.get("x")


@pytest.mark.parametrize("inner", ["", "jobs"])
def test_a_home_of_another_user(tmp_path: Path, inner: str) -> None:
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("another user's folder needs root and setpriv")
    home = tmp_path / "theirs"
    (home / "jobs").mkdir(parents=True)
    for path in (home, home / "jobs"):
        os.chmod(path, 0o755)
        os.chown(path, 12345, 12345)
    os.chmod(home / inner, 0o700)
    for words in (
        ["jobs", "submit", "--", "true"],
        ["jobs", "list"],
        ["jobs", "show", "x"],
        ["board", "list"],
        ["board", "add", "x"],
    ):
        # root without its right to pass permissions is a plain user to this folder
        done = k2tui(home, *words, before=("setpriv", "--bounding-set=-dac_override,-dac_read_search"))
        is_one_error(done, "Permission denied")


def test_words_that_are_no_utf8(tmp_path: Path) -> None:
    home = tmp_path / "h"
    home.mkdir()
    for words in (
        ["jobs", "submit", "--", "echo", b"\xff"],
        ["jobs", "submit", "--title", b"a\xff", "--", "true"],
        ["board", "add", b"a\xff"],
        ["board", "add", "--note", b"a\xff", "b"],
        ["board", "add", "--id", b"a\xff", "b"],
    ):
        is_one_error(k2tui(home, *words), "UTF-8")
    assert not list(home.glob("jobs/*"))
    assert "\\xff" not in (home / "plan.json").read_text()


def test_an_environment_that_is_no_utf8_is_handed_on(submit: Submit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODD", os.fsdecode(b"a\xff"))
    job_id = submit("import os; raise SystemExit(os.environb[b'ODD'] != b'a\\xff')")
    assert folder.wait(job_id, 20).state == "succeeded"
    assert folder.wait(folder.retry(job_id), 20).state == "succeeded"
