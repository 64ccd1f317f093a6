from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k2tui.core.job import Job, JobSpec, JobState, Progress
from k2tui.core.job_mask import is_secret_name, mask_argv, mask_env, mask_text
from k2tui.core.job_queue import AGING_S, Waiter, may_go
from k2tui.core.job_text import detail, duration, plain, plain_line, size, table
from k2tui.core.job_words import exit_words


@pytest.mark.parametrize(
    ("code", "facts", "words"),
    [
        (0, {}, "exit 0"),
        (1, {}, "exit 1"),
        (-9, {"oom_kills": 1}, "OOM killer"),
        (-9, {}, "not by k2tui"),
        (-11, {}, "segmentation fault"),
        (1, {"log_tail": "OSError: [Errno 28] No space left on device"}, "disk full"),
        (1, {"disk_free_b": 10}, "disk full"),
        (127, {}, "not found"),
        (137, {}, "signal 9"),
        (-200, {}, "signal 200"),
        (None, {}, "not known"),
    ],
)
def test_an_exit_in_words(code: int | None, facts: dict[str, object], words: str) -> None:
    assert words in exit_words(code, **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name",
    [
        "PGPASSWORD",
        "SSHPASS",
        "MY_PASS",
        "SLACK_WEBHOOK",
        "AZURE_STORAGE_CONNECTION_STRING",
        "accountKey",
        "--bearer",
        "HF_TOKEN",
        "--api-key",
        "OPENAI_API_KEY",
        "DB_PASSWORD",
        "--admin-api-key",
        "AWS_SECRET_ACCESS_KEY",
        "Authorization",
    ],
)
def test_secret_names(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "PATH",
        "PWD",
        "OLDPWD",
        "--tokenizer-path",
        "--max-total-tokens",
        "MAX_TOKENS",
        "--pad-token",
        "SSH_AUTH_SOCK",
        "KEYBOARD",
        "--tokenizer",
        "CREDENTIALS_FILE",
        "--port",
    ],
)
def test_plain_names(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    ("argv", "secret"),
    [
        (["serve", "--api-key", "s3cr3t-value", "--port", "1"], "s3cr3t-value"),
        (["serve", "--api-key=s3cr3t-value"], "s3cr3t-value"),
        (["curl", "-H", "Authorization: Bearer abc123def"], "abc123def"),
        (["env", "HF_TOKEN=hunter2", "cmd"], "hunter2"),
        (["git", "clone", "https://me:hunter2@host/x"], "hunter2"),
        (["x", "hf_abcdefghijklmnopqrst"], "hf_abc"),
        (["x", '--extra={"api_key": "hunter2", "n": 1}'], "hunter2"),
        (["bash", "-c", "export MY_TOKEN=hunter2; run"], "hunter2"),
    ],
)
def test_secrets_are_masked_in_argv(argv: list[str], secret: str) -> None:
    shown = mask_argv(argv)
    assert secret not in " ".join(shown) and "***" in " ".join(shown)
    assert len(shown) == len(argv)
    assert mask_argv(shown) == shown, "masking twice changes nothing"


def test_what_is_no_secret_stays() -> None:
    argv = (
        "sglang",
        "--model-path",
        "/m",
        "--max-total-tokens",
        "4096",
        "--json-model-override-args",
        '{"a": "b"}',
        "--tp-size=8",
    )
    assert mask_argv(argv) == argv
    assert mask_env({"PATH": "/bin", "HF_TOKEN": "x", "EMPTY_TOKEN": ""}) == {
        "PATH": "/bin",
        "HF_TOKEN": "***",
        "EMPTY_TOKEN": "",
    }


@given(st.text("ab=:*/@ \"'-_.TOKENkeyhfsk01", max_size=80))
def test_masking_any_text_ends_and_is_stable(text: str) -> None:
    once = mask_text(text)
    assert mask_text(once) == once


@given(st.text(st.characters(max_codepoint=0x2100), max_size=60))
def test_nothing_but_printable_text_reaches_a_terminal(text: str) -> None:
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in plain(text))


def test_escape_codes_and_bars_are_folded() -> None:
    assert plain("\x1b[31mred\x1b[0m \x1b]0;title\x07x\x1b]8;;http://a\x1b\\y") == "red xy"
    assert plain_line("10%|#\r50%|##\r100%|###\n") == "100%|###"
    assert plain_line("a\tb\r\n") == "a    b"


@pytest.mark.parametrize(
    ("s", "text"),
    [(None, ""), (0.44, "0.4 s"), (12.3, "12 s"), (185, "3:05"), (7800, "2:10:00"), (-5, "0 s")],
)
def test_durations(s: float | None, text: str) -> None:
    assert duration(s) == text


def test_sizes() -> None:
    assert [size(n) for n in (None, 0, 2048, 5 << 20, 3 << 40)] == [
        "",
        "0 B",
        "2.0 KiB",
        "5.0 MiB",
        "3072 GiB",
    ]


def test_the_table_says_what_a_waiting_job_waits_for_and_since_when() -> None:
    spec = JobSpec(id="j1", stage="bench", title="a\x1b[2Jb", argv=("x",))
    job = Job(spec=spec, state=JobState.WAITING, waiting_for="gpu:0 (held by j0)", waiting_since_s=100.0)
    assert detail(job, 160.0) == "waits for gpu:0 (held by j0), for 1:00"
    assert "\x1b" not in table([job], 160.0)


def test_a_job_that_does_not_know_its_size_yet_says_what_it_does() -> None:
    spec = JobSpec(id="j1", stage="train", title="train", argv=("x",))
    job = Job(spec=spec, state=JobState.RUNNING, progress=Progress(0, None, "steps", "opening states s"))
    assert detail(job, 1.0) == "opening states s"
    told = Progress(0, 740, "steps", "judging the untrained draft: 20/263 samples, 3.0 s left")
    assert detail(replace(job, progress=told), 1.0).startswith(
        "0/740 steps (0%); judging the untrained draft: 20/263"
    )


def test_a_failed_job_says_what_its_result_says() -> None:
    job = Job(JobSpec(id="j1", stage="bench", title="b", argv=("x",)), JobState.FAILED, reason="exit 3")
    assert detail(job, 1.0) == "exit 3"
    for key in ("cause", "error"):
        assert detail(replace(job, result={"ok": False, key: "no \x1b[1mserver"}), 1.0) == "exit 3: no server"
    assert detail(replace(job, result={"cause": "exit 3"}), 1.0) == "exit 3"


waiters = st.builds(
    Waiter,
    job_id=st.text("abcdef", min_size=1, max_size=4),
    priority=st.integers(-3, 3),
    since_s=st.floats(0, 1e5),
    names=st.sets(st.sampled_from(["gpu:0", "gpu:1", "port:1"]), min_size=1).map(lambda s: tuple(sorted(s))),
)


@given(st.lists(waiters, min_size=1, max_size=8, unique_by=lambda w: w.job_id), st.floats(0, 2e5))
def test_somebody_may_always_go_and_no_two_for_the_same_name(row: list[Waiter], now: float) -> None:
    free = [w for w in row if may_go(w, [o for o in row if o is not w], now) is None]
    assert free, "no stand-off"
    for a in free:
        for b in free:
            assert a is b or not set(a.names) & set(b.names)


def test_priority_goes_first_and_waiting_makes_up_for_it() -> None:
    old = Waiter("old", 0, 0.0, ("gpu:0",))
    urgent = Waiter("urgent", 1, AGING_S / 2, ("gpu:0", "gpu:1"))
    assert may_go(old, [urgent], AGING_S / 2) is urgent
    late = Waiter("late", 1, 2 * AGING_S, ("gpu:0",))
    assert may_go(late, [old], 3 * AGING_S) is old, "nobody starves"
    assert may_go(Waiter("other", -5, 0.0, ("gpu:7",)), [old, urgent], 0.0) is None
