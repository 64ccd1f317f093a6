"""Masking is precise about where a secret ends, changes nothing twice, and lets none of the planted secrets through."""

from __future__ import annotations

import json
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k2tui.core.job_mask import LineMask, mask_argv, mask_env, mask_text, mask_value, unmask_argv


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('echo "key=$HF_TOKEN"; sleep 1', 'echo "key=***"; sleep 1'),
        (
            """x --header "Authorization: Bearer S3CR" --json '{"api_key": "S3CR", "n": 1}' -v""",
            """x --header "Authorization: Bearer ***" --json '{"api_key": "***", "n": 1}' -v""",
        ),
        ("401 https://joe:S3CR@hf.co/m?token=S3CR&a=1 Authorization: Bearer S3CRxx retry", "401 https://joe:***@hf.co/m?token=***&a=1 Authorization: Bearer *** retry"),
        ("GET /f?X-Amz-Date=1&X-Amz-Signature=S3CR&a=1", "GET /f?X-Amz-Date=1&X-Amz-Signature=***&a=1"),
        ("'https://h/c/f?sv=2024&sig=S3%2FCR&se=1' exit sig=9", "'https://h/c/f?sv=2024&sig=***&se=1' exit sig=9"),
        ("postgres://u:S3@CR@h/db", "postgres://u:***@h/db"),
        ("ServerArgs(api_key='S3CR', admin_api_key=None, tp=1)", "ServerArgs(api_key='***', admin_api_key=None, tp=1)"),
        ("{'api_key': ['S3CR', 'S3CR'], 'port': 1}", "{'api_key': ***, 'port': 1}"),
        ("error: unrecognized arguments: --foo --api-key S3CR", "error: unrecognized arguments: --foo --api-key ***"),
        ("Cookie: a=S3CR; b=S3CR then more", "Cookie: *** then more"),
        ("(token=S3CR)", "(token=***)"),
        ("TOKEN=$(cat /S3CR x) run", "TOKEN=*** run"),
        ("curl -u me:S3CR http://h; docker run -u 1000:1000", "curl -u me:*** http://h; docker run -u 1000:***"),
        ("HF_TOKEN='S3'\"'\"'CR' x", "HF_TOKEN='***' x"),
        ("--password 'S3 CR'; ls", "--password '***'; ls"),
        ('args="{\\"api_key\\": \\"S3CR\\", \\"n\\": 1}"', 'args="{\\"api_key\\": \\"***\\", \\"n\\": 1}"'),
        ("api_key=S3CR,port=1", "api_key=***,port=1"),
        ("GET https%3A%2F%2Fb.s3%2Fk%3FX-Amz-Signature%3DS3CR%26a%3D1 x", "GET https%3A%2F%2Fb.s3%2Fk%3FX-Amz-Signature%3D***%26a%3D1 x"),
        ("r=h%253Ftoken%253DS3CR%2526n%253D1", "r=h%253Ftoken%253D***%2526n%253D1"),
        ("h%3Fsv%3D1%26sig%3DS3CR%26se%3D2", "h%3Fsv%3D1%26sig%3D***%26se%3D2"),
        ('{"u": "k?X-Amz-Signature\\u003dS3CR\\u0026n\\u003d1"}', '{"u": "k?X-Amz-Signature\\u003d***\\u0026n\\u003d1"}'),
        ("clone https://S3CRS3CRS3CRS3CR@github.com/a/b", "clone https://***@github.com/a/b"),
        ("AWS_SECRET_ACCESS_KEY: S3CR, n: 1", "AWS_SECRET_ACCESS_KEY: ***, n: 1"),
        ("aws_session_token: S3CR", "aws_session_token: ***"),
        ("POST https://discord.com/api/webhooks/123456/S3CRS3CR 204", "POST https://discord.com/api/webhooks/*** 204"),
        ("https://api.telegram.org/bot123456:S3CR_S3CR/sendMessage?x=1", "https://api.telegram.org/bot***/sendMessage?x=1"),
        ("glpat-S3CRS3CRS3CR1234 github_pat_S3CRS3CRS3CR12345678 x", "*** *** x"),
        ("wandb: key " + "0a1b" * 10 + " ok", "wandb: key *** ok"),
        ("HTTPS_PROXY=me:S3@CR@h:1 run; proxy: http://me:S3CR@h", "HTTPS_PROXY=me:***@h:1 run; proxy: http://me:***@h"),
        ("MYKEY=S3CR BLOB_SAS=S3CR x", "MYKEY=*** BLOB_SAS=*** x"),
        ("-----BEGIN RSA PRIVATE KEY-----\nS3CR\n\nS3CR==\n-----END RSA PRIVATE KEY-----\nafter", "-----BEGIN RSA PRIVATE KEY-----\n***\n-----END RSA PRIVATE KEY-----\nafter"),
        ("'-----BEGIN PRIVATE KEY-----\\nS3CR\\n-----END PRIVATE KEY-----\\n'", "'-----BEGIN PRIVATE KEY-----***-----END PRIVATE KEY-----\\n'"),
        ("-----BEGIN PRIVATE KEY-----\n" + "S3CR" * 16 + "\nthen more", "-----BEGIN PRIVATE KEY-----\n***\nthen more"),
        ("Authorization: Digest username=\"S3CR\", response=\"S3CR\"", "Authorization: Digest ***"),
    ],
)  # fmt: skip
def test_what_stands_beside_a_secret_stays(text: str, shown: str) -> None:
    assert mask_text(text) == shown
    assert mask_text(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "usage: serve [--api-key API_KEY] [--port PORT]",
        "--api-key is required",
        "'pass_config': {'fuse_norm': True, 'x': 1}",
        "api_key=None, token=''",
        "http://joe@h/a https://%3Dx/a%3Db%26n%3D2 ?filename%3D%22x%22",
        "monkey=1 num_access_keys: 5 no -----BEGIN PRIVATE KEY----- in x",
    ],
)
def test_names_without_a_secret_stay(text: str) -> None:
    assert mask_text(text) == text


SECRET = st.text("abcXYZ019_-+/~", min_size=8, max_size=24).map(lambda s: f"S3CR{s}3T")
QUOTED = st.text("abcXYZ 019_-+/;,&|)(", max_size=24).map(lambda s: f"S3CR{s}3T")
PLAIN = st.sampled_from(
    ["serve", "--tp-size 8", "; ls", "| cat", '"a b"', "n=1", "--max-total-tokens 12", "eos_token_id: 2", "(x)", "{'a': 1}", "http://h:1/v1", "{", "$HOME", "error:", "it's", "\n"]
)  # fmt: skip


@st.composite
def planted(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A line with secrets in it, and the secrets."""
    parts: list[str] = []
    secrets: list[str] = []
    for _ in range(draw(st.integers(1, 5))):
        parts += draw(st.lists(PLAIN, max_size=3))
        bare, quoted = draw(SECRET), draw(QUOTED)
        form, secret = draw(
            st.sampled_from(
                [
                    (f"--api-key {bare}", bare),
                    (f"--api-key={bare}", bare),
                    (f"--password '{quoted}'", quoted),
                    (f'HF_TOKEN="{quoted}"', quoted),
                    (f"MY_SECRET={bare}", bare),
                    (f'-H "Authorization: Bearer {bare}"', bare),
                    (f"'X-Api-Key: {quoted}'", quoted),
                    (f"https://me:{bare.replace('/', '')}@h/x", bare.replace("/", "")),
                    (json.dumps({"api_key": quoted, "n": 1}), quoted),
                    (json.dumps(json.dumps({"auth_token": bare})), bare),
                    (f"api_key={bare!r}, port=1", bare),
                    (f"password: {bare}", bare),
                    (f"http://h/x?token={bare}&a=1", bare),
                ]
            )
        )
        parts.append(form)
        secrets.append(secret)
    return " ".join(parts), secrets


@given(planted())
def test_no_planted_secret_survives(case: tuple[str, list[str]]) -> None:
    text, secrets = case
    shown = mask_text(text)
    for secret in secrets:
        assert secret not in shown
    assert "S3CR" not in shown
    assert mask_text(shown) == shown
    assert len(shown) <= 2 * len(text)
    if "it's" not in text:
        assert "S3CR" not in mask_text(shlex.join(["sh", "-c", text])), "a shell's quotes in quotes"


PIECES = st.lists(
    st.sampled_from(
        ["--api-key", "key", "=", " ", '"', "'", "\\", ":", "token", "a", "***", "Authorization", "Bearer", "://", "@", "u", "{", "[", "]", ",", ";", "cookie", "hf_abcdefghijklmnopqrst", "%3D", "%26", "u003d", "proxy", "-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----", "MYKEY", "\n", "Basic", ")", "$X", "--", "&"]
    ),
    max_size=30,
).map("".join)  # fmt: skip


@given(PIECES)
def test_any_text_is_masked_once_and_for_all(text: str) -> None:
    shown = mask_text(text)
    assert mask_text(shown) == shown
    assert len(shown) <= 2 * len(text)
    argv = mask_argv(text.split())
    assert mask_argv(argv) == argv


@given(st.lists(PLAIN, max_size=12), st.text(st.characters(categories=["L"]), min_size=1, max_size=30).filter(lambda s: s.isalpha() and not any(w in s.lower() for w in ("key", "token", "secret", "pass", "pwd", "auth", "cred", "pat", "cookie", "bearer", "webhook", "string", "signature", "sas"))))  # fmt: skip
def test_text_without_secret_names_stays(parts: list[str], word: str) -> None:
    text = " ".join([*parts, word, f"{word}={word}", f'"{word}": "{word}"', f"--{word} {word}"])
    assert mask_text(text) == text


def test_a_private_key_over_the_lines_of_a_log() -> None:
    mask = LineMask()
    lines = ["token=S3CR x", "-----BEGIN RSA PRIVATE KEY-----", "Proc-Type: 4,ENCRYPTED", "", "S3CR+/a", "S3CR==", "-----END RSA PRIVATE KEY-----", "word"]
    shown = [mask(line) for line in lines]
    assert shown == ["token=*** x", lines[1], "***", "***", "***", "***", lines[6], "word"]
    assert [mask(line) for line in ("-----BEGIN PRIVATE KEY-----", "S3CR", "no more of it", "word")] == ["-----BEGIN PRIVATE KEY-----", "***", "no more of it", "word"]


def test_variables_of_an_environment() -> None:
    env = {"SAS": "S3CR", "MYKEY": "S3CR", "HTTP_PROXY": "me:S3CR@h:1", "https_proxy": "http://me:S3/CR@h:1"}
    stays = {"KEYBOARD": "us", "NO_PROXY": "a,b", "ALL_PROXY": "h:1", "ftp_proxy": "http://me@h:1", "PWD": "/x"}
    shown = {"SAS": "***", "MYKEY": "***", "HTTP_PROXY": "me:***@h:1", "https_proxy": "http://me:***@h:1"}
    assert mask_env(env | stays) == shown | stays and mask_env(shown) == shown


def test_a_body_is_masked_by_the_names_of_its_keys() -> None:
    body = {
        "api_key": "S3CR",
        "a": {"password": "S3CR", "n": 1},
        "list": [{"token": "S3CR"}],
        "max_tokens": 5,
        "text": "x --api-key S3CR",
    }
    shown = mask_value(body)
    assert "S3CR" not in json.dumps(shown)
    assert shown["max_tokens"] == 5 and shown["a"]["n"] == 1


def test_a_masked_command_gets_its_secrets_back_by_name() -> None:
    argv = (
        "serve",
        "--api-key",
        "S3CR1",
        "--admin-key=S3CR2",
        "sh -c 'x --password S3CR3'",
        '{"auth_token": "S3CR4", "n": 1, "my_secret": "S3CR5"}',
        "Authorization: Bearer S3CR6",
        "--url=https://u:S3CR7@h/",
    )
    given = {
        "K2TUI_SECRET_API_KEY": "S3CR1",
        "K2TUI_SECRET_ADMIN_KEY": "S3CR2",
        "K2TUI_SECRET_PASSWORD": "S3CR3",
        "K2TUI_SECRET_AUTH_TOKEN": "S3CR4",
        "K2TUI_SECRET_MY_SECRET": "S3CR5",
        "K2TUI_SECRET_AUTHORIZATION": "S3CR6",
        "K2TUI_SECRET_URL": "S3CR7",
    }
    assert unmask_argv(mask_argv(argv), given) == argv
    for name in given:
        with pytest.raises(KeyError) as told:
            unmask_argv(mask_argv(argv), {k: v for k, v in given.items() if k != name})
        assert told.value.args[1] == name
