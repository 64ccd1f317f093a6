"""Secrets in argv and environments are shown and stored as `***`. Pure text rules; over-masking is the safe side."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

MASK = "***"

_WORDS = re.compile(r"[A-Za-z]+")
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
    }
)
_LAST = frozenset({"token", "key", "pat", "pwd", "auth", "cookie"})
_NOT_BEFORE_TOKEN = frozenset(
    {"pad", "bos", "eos", "unk", "mask", "sep", "cls", "stop", "end", "per", "special", "image", "video"}
)
_SHAPES = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\bsk-[A-Za-z0-9_-]{16,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bxox[abp]-[A-Za-z0-9-]{10,}|\bAKIA[0-9A-Z]{16}\b"
    r"|\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*"
)
_HEADER = re.compile(
    r"(?i)\b((?:proxy-)?authorization|x-api-key|api-key|cookie)(\s*[:=]\s*)(?:(bearer|basic|token)\s+)?[^\"',;\s]+(?:[^\"',;]*)"
)
_BEARER = re.compile(r"(?i)\b(bearer)\s+[A-Za-z0-9._~+/=-]{6,}")
_URL = re.compile(r"(://[^/\s:@]+:)[^/\s@]+(@)")
_JSON_PAIR = re.compile(r"""(["'])([A-Za-z_][\w.-]*)\1(\s*:\s*)(["'])((?:(?!\4).)*)\4""")
_ASSIGN = re.compile(r"(?<![\w-])(-{0,2}[A-Za-z_][\w.-]*)=(\S+)")


def is_secret_name(name: str) -> bool:
    """Whether a value with this name (HF_TOKEN, --api-key, password) is a secret."""
    words = [w.lower() for w in _WORDS.findall(name)]
    if not words:
        return False
    if any(w in _ANYWHERE for w in words):
        return words[-1] not in ("file", "path", "dir", "sock")
    if words[-1] not in _LAST:
        return False
    return not (words[-1] == "token" and len(words) > 1 and words[-2] in _NOT_BEFORE_TOKEN)


def mask_text(text: str) -> str:
    """One text with the secrets in it replaced. Text without any comes back unchanged."""
    out = _SHAPES.sub(MASK, text)
    out = _URL.sub(rf"\g<1>{MASK}\g<2>", out)
    out = _HEADER.sub(lambda m: f"{m[1]}{m[2]}{m[3] + ' ' if m[3] else ''}{MASK}", out)
    out = _BEARER.sub(rf"\g<1> {MASK}", out)
    out = _JSON_PAIR.sub(
        lambda m: f"{m[1]}{m[2]}{m[1]}{m[3]}{m[4]}{MASK}{m[4]}" if is_secret_name(m[2]) else m[0], out
    )
    return _ASSIGN.sub(lambda m: f"{m[1]}={MASK}" if is_secret_name(m[1]) else m[0], out)


def mask_argv(argv: Sequence[str]) -> tuple[str, ...]:
    """argv with secret values masked: `--api-key X`, `--api-key=X`, `HF_TOKEN=X`, headers, URLs with a password, known shapes."""
    out: list[str] = []
    hide_next = False
    for item in argv:
        if hide_next and not item.startswith("--"):
            out.append(MASK)
            hide_next = False
            continue
        hide_next = item.startswith("-") and "=" not in item and is_secret_name(item)
        out.append(mask_text(item))
    return tuple(out)


def mask_env(env: Mapping[str, str]) -> dict[str, str]:
    """Environment with secret values masked, by name first and by shape second."""
    return {k: MASK if v and is_secret_name(k) else mask_text(v) for k, v in env.items()}


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
