"""Secrets in argv and environments are shown and stored as `***`. Pure text rules; over-masking is the safe side."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

MASK = "***"

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")  # PGPASSWORD; account, Key
_ANYWHERE = frozenset(
    {
        "secret",
        "secrets",
        "password",
        "passwd",
        "passphrase",
        "credential",
        "credentials",
        "authorization",
        "apikey",
        "pass",
        "sshpass",
        "webhook",
        "bearer",
    }
)
_ENDS = ("password", "passwd", "passphrase", "secret")  # PGPASSWORD, MYSQLPASSWORD
_LAST = frozenset({"token", "key", "pat", "pwd", "auth", "cookie"})
_NOT_BEFORE_TOKEN = frozenset(
    {"pad", "bos", "eos", "unk", "mask", "sep", "cls", "stop", "end", "per", "special", "image", "video"}
)
_SHAPES = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\bsk-[A-Za-z0-9_-]{16,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bxox[abp]-[A-Za-z0-9-]{10,}|\bAKIA[0-9A-Z]{16}\b"
    r"|(?<=hooks\.slack\.com/services/)[\w/-]{8,}"
    r"|\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*"
)
_HEADER = re.compile(
    r"(?i)(?<!--)\b((?:proxy-)?authorization|x-api-key|api-key|cookie)(\s*[:=]\s*)(?:(bearer|basic|token)\s+)?[^\"',;\s]+(?:[^\"',;]*)"
)
_BEARER = re.compile(r"(?i)\b(bearer)\s+[A-Za-z0-9._~+/=-]{6,}")
_URL = re.compile(r"(://[^/\s:@]+:)[^/\s@]+(@)")
_JSON_PAIR = re.compile(r"""(\\{0,3}["'])([A-Za-z_][\w.-]*)\1(\s*:\s*)(\\{0,3}["'])((?:(?!\4).)*)\4""")
_VALUE = r"""(?:"[^"\n]*"|'[^'\n]*'|\S+)"""
_ASSIGN = re.compile(rf"(?<![\w-])(-{{0,2}}[A-Za-z_][\w.-]{{0,120}})(=){_VALUE}")
_FLAG = re.compile(r"""(?<![\w-])(--?[A-Za-z][\w.-]*)([ \t]+)(?!--)(?:"[^"\n]*"|'[^'\n]*'|[^\s"';|&)]+)""")
# a bare colon is weak: only names that cannot be a counter ("#new-token: 512" is one)
_COLON = re.compile(
    rf"(?i)(?<![\w-])([\w-]*(?:password|passwd|passphrase|secret|api[_-]?key|(?:hf|auth|access|api)[_-]token))(\s*:\s+){_VALUE}"
)


def is_secret_name(name: str) -> bool:
    """Whether a value with this name (HF_TOKEN, --api-key, password) is a secret."""
    words = [w.lower() for w in _WORDS.findall(name)]
    if not words:
        return False
    if name in ("PWD", "OLDPWD"):
        return False  # the working folder
    if any(w in _ANYWHERE or w.endswith(_ENDS) for w in words) or "connection string" in " ".join(words):
        return words[-1] not in ("file", "path", "dir", "sock")
    if words[-1] not in _LAST:
        return False
    return not (words[-1] == "token" and len(words) > 1 and words[-2] in _NOT_BEFORE_TOKEN)


def mask_text(text: str) -> str:
    """One text (a title, a shell command, a line of a log) with the secrets in it replaced; others come back unchanged."""
    for _ in range(20):  # what one rule leaves may be a case for another: masking twice changes nothing
        out = _mask_once(text)
        if out == text:
            break
        text = out
    return text


def _mask_once(text: str) -> str:
    out = _SHAPES.sub(MASK, text)
    out = _URL.sub(rf"\g<1>{MASK}\g<2>", out)
    out = _HEADER.sub(lambda m: f"{m[1]}{m[2]}{m[3] + ' ' if m[3] else ''}{MASK}", out)
    out = _BEARER.sub(rf"\g<1> {MASK}", out)
    out = _JSON_PAIR.sub(
        lambda m: f"{m[1]}{m[2]}{m[1]}{m[3]}{m[4]}{MASK}{m[4]}" if is_secret_name(m[2]) else m[0], out
    )
    out = _hide(_ASSIGN, out)
    out = _COLON.sub(rf"\g<1>\g<2>{MASK}", out)
    return _hide(_FLAG, out)


def _hide(rule: re.Pattern[str], text: str) -> str:
    """Mask what follows a secret name; the value of another name is looked into: `sh -c "x --api-key S"`."""
    parts: list[str] = []
    at = done = 0
    while m := rule.search(text, at):
        at = m.end(2)
        if is_secret_name(m[1]):
            parts += [text[done:at], MASK]
            at = done = m.end()
    return "".join([*parts, text[done:]])


def mask_argv(argv: Sequence[str]) -> tuple[str, ...]:
    """argv with secret values masked: `--api-key X`, `--api-key=X`, `HF_TOKEN=X`, headers, URLs with a password, known shapes."""
    out: list[str] = []
    hide_next = False
    before = ""
    for item in argv:
        if hide_next and not item.startswith("--"):
            out.append(MASK)
            hide_next = False
            continue
        if before in ("-u", "--user") and (user := item.partition(":"))[2]:
            out.append(f"{user[0]}:{MASK}")
            before = item
            continue
        before = item
        hide_next = item.startswith("-") and "=" not in item and is_secret_name(item)
        out.append(mask_text(item))
    return tuple(out)


def mask_env(env: Mapping[str, str]) -> dict[str, str]:
    """Environment with secret values masked, by name first and by shape second."""
    return {k: MASK if v and is_secret_name(k) else mask_text(v) for k, v in env.items()}


def mask_value(value: Any) -> Any:
    """A JSON value with its secrets masked at any depth: dicts by name as environments, lists of words as argv."""
    if isinstance(value, str):
        return mask_text(value)
    if isinstance(value, Mapping):
        return mask_params(cast("Mapping[str, Any]", value))
    if isinstance(value, list | tuple):
        items = cast("Sequence[Any]", value)
        out: list[Any] = []
        before = ""
        for item in items:
            if isinstance(item, str):
                out.append(mask_argv((before, item))[1])
                before = item
            else:
                is_hidden = mask_argv((before, "x"))[1] == MASK
                out.append(MASK if is_hidden and _is_scalar(item) else mask_value(item))
                before = ""
        return out
    return value


def _is_scalar(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def mask_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """A stage's own inputs with their secrets masked, names first; true, false and null are no secrets."""
    out: dict[str, Any] = {}
    for key, value in params.items():
        if is_secret_name(str(key)) and value not in ("", None):
            if isinstance(value, str) or _is_scalar(value):
                out[key] = MASK
                continue
            if isinstance(value, list | tuple):
                items = cast("Sequence[Any]", value)
                out[key] = [MASK if isinstance(v, str) or _is_scalar(v) else mask_value(v) for v in items]
                continue
        out[key] = mask_value(value)
    return out


def masked_places(argv: Sequence[str], env: Mapping[str, str]) -> tuple[str, ...]:
    """Names of what masking hides: "env HF_TOKEN", "argv --api-key"."""
    places = [f"env {k}" for k, v in env.items() if mask_env({k: v})[k] != v]
    hidden = mask_argv(argv)
    for i, (old, new) in enumerate(zip(argv, hidden, strict=True)):
        if old != new:
            places.append(
                "argv "
                + (
                    argv[i - 1]
                    if new == MASK and i
                    else new.partition("=")[0].partition(MASK)[0].strip() or str(i)
                )
            )
    return tuple(places)
