"""Secrets in argv and environments are shown and stored as `***`. Pure text rules; over-masking is the safe side."""

from __future__ import annotations

import itertools
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
        "sshpass",
        "webhook",
        "bearer",
    }
)
_ENDS = ("password", "passwd", "passphrase", "secret")  # PGPASSWORD, MYSQLPASSWORD
_LAST = frozenset({"token", "key", "pat", "pwd", "pass", "auth", "cookie", "signature"})  # signature: of presigned URLs (S3, GCS)
_NOT_BEFORE_TOKEN = frozenset(
    {"pad", "bos", "eos", "unk", "mask", "sep", "cls", "stop", "end", "per", "special", "image", "video"}
)
_SHAPES = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\bsk-[A-Za-z0-9_-]{16,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bxox[abp]-[A-Za-z0-9-]{10,}|\bAKIA[0-9A-Z]{16}\b"
    r"|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}|(?<=/webhooks/)\d{5,}/[\w-]{8,}|(?<=api\.telegram\.org/bot)\d[\w:%-]{8,}"
    r"|(?<=hooks\.slack\.com/services/)[\w/-]{8,}"
    r"|\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*"
)
# a text without any of these holds nothing to hide: most lines of a log cost only this look
_SHAPE_HINTS = ("hf_", "sk-", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "xox", "akia", "slack", "eyj", "github_pat_", "glpat-", "/webhooks/", "telegram")
_TOLD_HINTS = ("password", "passwd", "passphrase", "secret", "apikey", "api_key", "api-key", "_token", "-token", "access_key", "access-key", "accesskey", "private_key", "account_key", "accountkey")
_NAME_HINTS = ("key", "token", "secret", "pass", "pwd", "auth", "cred", "pat", "cookie", "bearer", "webhook", "string", "signature", "sas")
_HEADER_HINTS = ("authorization", "api-key", "auth-token", "cookie")
_OPTION = re.compile(r"(?<![\w-])--?[A-Za-z]")
_HEADERS = r"(?:proxy-)?authorization|x-api-key|api-key|x-auth-token|(?:set-)?cookie"
_HEADER = re.compile(rf"(?i)(?<![\w-])(?:(?<=([\"']))|(?<![\"']))({_HEADERS})([ \t]*:[ \t]*)(?=\S)")
_HEADER_WORD = re.compile(rf"(?i)((?:{_HEADERS})[ \t]*:[ \t]*)(\S[\s\S]*)")
# how a header's value begins; a word that is none of these is a scheme when what follows looks like a credential
_SCHEME = re.compile(
    r"(?i)(?:bearer|basic|token|digest|negotiate|ntlm|apikey|key)[ \t]+(?=\S)|[a-z][a-z0-9-]{0,24}[ \t]+(?=[^\s\"']{0,99}[0-9]|[^\s\"']{12})"
)
_WHOLE_LINE = re.compile(r"(?i)(?:aws4-hmac-sha256|digest|hawk|oauth|vapid)[ \t]+([^\n]+)")  # name="value", name=value ...
_COOKIES = re.compile(r"[^\s;\"']+(?:;[ \t]*[^\s;=\"']{1,99}=[^\s;\"']*)*")
_USER = re.compile(r"(?<![\w-])(-u|--user)([ \t]+[\"']?)([^\s:\"']+:)(?!\*\*\*)[^\s\"']+")  # of curl
_BEARER = re.compile(r"(?i)(?<![\w-])(bearer)([ \t]+)(?!\*\*\*)[A-Za-z0-9._~+/=-]{6,}")
_SAS = re.compile(r"(?i)([?&]sig=)(?!\*\*\*)[^\s&\"'<>]+")  # of Azure's presigned URLs
_URL = re.compile(r"(://[^/\s:@\"']*:)[^/\s\"']+(@)")
_URL_TOKEN = re.compile(r"(://)[^/\s:@\"'?#*]{16,}(@)")  # a token in the user's place; a name of that length is none
_PROXY = re.compile(r"""(?i)(proxy["']?[ \t]?[=:][ \t]?["']?(?:[a-z][\w+.-]{0,20}://)?[^/\s:@"']{1,100}:)(?!//|\*\*\*@)[^\s"']{1,300}(@)""")  # user:password@host
_WANDB = re.compile(r"(?i)(\bwandb\b[^\n]{0,60}?[ \t:=])[0-9a-f]{40}\b")
_ENCODED = re.compile(r"(?i)%(?:25){0,3}3d|\\u003d")  # "=" in a URL within a URL, in JSON
_APART = re.compile(r"(?i)%(?:25){0,3}[0-9a-f]{2}|\\u00[0-9a-f]{2}|[^\w.-]")
_ENCODED_VALUE = re.compile(r"(?i)(?:(?!%(?:25){0,3}26|\\{1,8}(?:u00(?:26|22|27)|[\"'nrt]))[^\s\"'`<>&,;|])+")
_PEM = re.compile(r"-----(BEGIN|END) [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
_PEM_BODY = re.compile(r"(?:(?:\s|\\+[nr])*[A-Za-z0-9+/=]{20,})+")  # of a key that is cut off
_PEM_LINE = re.compile(r"\s*(?:[A-Za-z0-9+/=]+|[A-Z][\w-]*: .*)\s*")
_NAME = r"[A-Za-z_][\w.-]{0,120}"
# where a value begins: "name": | --name= name= | --name  | name:  (a bare colon is weak, so only for names that cannot be
# a counter: "#new-token: 512" is one)
_NAMED_RULES = (
    rf"""(\\{{0,3}}["'])(?P<key>{_NAME})\1[ \t]*[:=][ \t]*(?=\S)"""
    rf"""|(?<![\w-])(?P<set>-{{0,2}}{_NAME})="""
    rf"""|(?<![\w-])(?P<flag>--?{_NAME})[ \t]+(?!--)(?=\S)"""
)
_NAMED = re.compile(_NAMED_RULES)
_NAMED_OR_TOLD = re.compile(
    _NAMED_RULES
    + r"""|(?<![\w-])(?P<told>(?i:[\w-]{0,80}(?:password|passwd|passphrase|secret|(?:api|access|private|account)[_-]?key|(?:hf|auth|access|api|session|refresh|bot)[_-]token)))[ \t]*:[ \t]+(?=\S)"""
)
# where it ends: at its own quote; in brackets (a list of keys); else at a blank, a quote that closes another, or what ends a
# word in a shell or a URL; a comma before the next name ends it too
_QUOTED = re.compile(
    r"""(\\{1,3}["']|'"'"')((?:(?!\1)[^\n])+)\1|(")((?:[^"\\\n]|\\[^\n])+)"|(')((?:[^'\\\n]|\\[^\n])+(?:'"'"'[^'\n]*)*)'|(["'])([^"'\n]+)\7"""
)
_LISTED = re.compile(r"\[[^\[\]\n]+\]|\$?\([^()\n]+\)")
_BARE = re.compile(
    r"""(?:[^\s"'`;|&<>,]|,(?![A-Za-z_][\w.-]{0,120}[=:])|"(?=[\w$*])[^"\n]*"|'(?=[\w$*])[^'\n]*')+"""
)
_NOTHING = frozenset({"none", "null", "true", "false", MASK})
# prose after a flag: "--api-key is required"
_PROSE = frozenset(["is", "are", "was", "to", "and", "or", "not", "must", "for", "with", "in", "on", "as", "if", "flag", "option", "argument", "arguments", "expected", "required", "needs"])


def is_secret_name(name: str) -> bool:
    """Whether a value with this name (HF_TOKEN, --api-key, password) is a secret."""
    words = [w.lower() for w in _WORDS.findall(name)]
    if not words:
        return False
    if name in ("PWD", "OLDPWD"):
        return False  # the working folder
    if name.isupper() and (words[-1].endswith("key") or "sas" in words):
        return True  # of an environment: MYKEY, BLOB_SAS
    if any(w in _ANYWHERE or w.endswith(_ENDS) for w in words) or "connection string" in " ".join(words):
        return words[-1] not in ("file", "path", "dir", "sock", "config")
    if words[-1] not in _LAST:
        return False
    return not (words[-1] == "token" and len(words) > 1 and words[-2] in _NOT_BEFORE_TOKEN)


def mask_text(text: str) -> str:
    """One text (a title, a shell command, a line of a log) with the secrets in it replaced; others come back unchanged.

    Takes time in proportion to the length; masking twice changes nothing. Only what is secret goes: quotes and what follows stay.
    """
    for _ in range(20):  # what one rule leaves may be a case for another
        out = _mask_once(text)
        if out == text:
            break
        text = out
    return text


class LineMask:
    """mask_text for the lines of a log, one after the other: the body of a private key is over several."""

    def __init__(self) -> None:
        self._in_key = False

    def __call__(self, line: str) -> str:
        if self._in_key and (not line.strip() or _PEM_LINE.fullmatch(line)):
            return MASK
        marks = _PEM.findall(line)
        self._in_key = bool(marks) and marks[-1] == "BEGIN"
        return mask_text(line)


def _mask_once(text: str) -> str:
    low = text.lower()
    out = text
    if any(w in low for w in _SHAPE_HINTS):
        out = _SHAPES.sub(MASK, out)
    if "://" in low and "@" in low:
        out = _URL_TOKEN.sub(rf"\g<1>{MASK}\g<2>", _URL.sub(rf"\g<1>{MASK}\g<2>", out))
    if "proxy" in low and "@" in low:
        out = _PROXY.sub(rf"\g<1>{MASK}\g<2>", out)
    if "wandb" in low:
        out = _WANDB.sub(rf"\g<1>{MASK}", out)
    if "private key" in low:
        out = _mask_pem(out)
    if "3d" in low and ("%" in low or "u003d" in low):
        out = _mask_encoded(out)
    if "sig=" in low:
        out = _SAS.sub(rf"\g<1>{MASK}", out)
    if "curl" in low:
        out = _USER.sub(rf"\g<1>\g<2>\g<3>{MASK}", out)
    if not any(w in low for w in _NAME_HINTS):
        return out
    if any(w in low for w in _HEADER_HINTS):
        out = _mask_headers(out)
    if "bearer" in low:
        out = _BEARER.sub(rf"\g<1>\g<2>{MASK}", out)
    is_told = any(w in low for w in _TOLD_HINTS)
    if is_told or any(c in low for c in "=\"'") or _OPTION.search(low):
        out = _mask_named(out, _NAMED_OR_TOLD if is_told else _NAMED)
    return out


def _mask_pem(text: str) -> str:
    """Mask the body of private keys: to the end mark, or, of one that is cut off, as far as it looks like one."""
    parts: list[str] = []
    done = 0
    marks = list(_PEM.finditer(text))
    for m, after in itertools.zip_longest(marks, marks[1:]):
        if m[1] == "END":
            continue
        limit = after.start() if after else len(text)
        if after and after[1] == "END":
            end = limit
        else:
            body = _PEM_BODY.match(text, m.end(), limit)
            end = body.end() if body else m.end()
        inner = text[m.end() : end].strip()
        if inner and inner != MASK:
            start = text.index(inner, m.end())
            parts += [text[done:start], MASK]
            done = start + len(inner)
    return "".join([*parts, text[done:]])


def _mask_encoded(text: str) -> str:
    """Mask what follows a secret name and an encoded "=" (%3D, %253D, \\u003d), up to an encoded "&"."""
    parts: list[str] = []
    done = 0
    for m in _ENCODED.finditer(text):
        name = _APART.split(text[max(done, m.start() - 120) : m.start()])[-1]
        if not is_secret_name(name) and name.lower() != "sig":
            continue
        value = _ENCODED_VALUE.match(text, m.end())
        if m.start() >= done and value and value[0].lower() not in _NOTHING:
            parts += [text[done : m.end()], MASK]
            done = value.end()
    return "".join([*parts, text[done:]])


def _mask_headers(text: str) -> str:
    parts: list[str] = []
    done = 0
    for m in _HEADER.finditer(text):
        begin = m.end()
        if begin < done:
            continue
        if m[1] and (end := _line_find(text, m[1], begin)) > begin:  # "Authorization: ..." in quotes of its own
            scheme = _SCHEME.match(text, begin, end)
            parts += [text[done : scheme.end() if scheme else begin], MASK]
            done = end
        elif quoted := _QUOTED.match(text, begin):
            done = _put(parts, text, done, quoted)
        else:
            if line := _WHOLE_LINE.match(text, begin):
                parts += [text[done : line.start(1)], MASK]
                done = line.end()
                continue
            is_cookie = m[2].lower().endswith("cookie")
            scheme = None if is_cookie else _SCHEME.match(text, begin)
            value = (_COOKIES if is_cookie else _BARE).match(text, scheme.end() if scheme else begin)
            if value and (end := _bare_end(text, value)) > value.start():
                parts += [text[done : value.start()], MASK]
                done = end
    return "".join([*parts, text[done:]])


def _line_find(text: str, what: str, begin: int) -> int:
    end = text.find("\n", begin)
    return text.find(what, begin, len(text) if end < 0 else end)


def _put(parts: list[str], text: str, done: int, quoted: re.Match[str]) -> int:
    """Hide what is between the quotes; returns where the text goes on."""
    group = next(n for n in (1, 3, 5, 7) if quoted[n])
    parts += [text[done : quoted.end(group)], MASK]
    return quoted.end(group + 1)


def _bare_end(text: str, value: re.Match[str]) -> int:
    """Where a value without quotes ends: closing brackets and what ends a sentence are not its own."""
    end = value.end()
    while end > value.start() and text[end - 1] in "),]}:.\\":
        end -= 1
    return end


def _mask_named(text: str, rule: re.Pattern[str]) -> str:
    """Mask what follows a secret name; the value of another name is looked into: `sh -c "x --api-key S"`."""
    parts: list[str] = []
    at = done = 0
    while m := rule.search(text, at):
        at = m.end()
        name = m[m.lastgroup or 0]
        if not is_secret_name(name):
            if m.lastgroup == "key":
                at = m.end("key")  # its value may be the next name
            continue
        if quoted := _QUOTED.match(text, at):
            if next(v for v in quoted.groups()[1::2] if v) != MASK:
                done = _put(parts, text, done, quoted)
            at = quoted.end()
            continue
        if listed := _LISTED.match(text, at):
            parts += [text[done:at], MASK]
            at = done = listed.end()
            continue
        value = _BARE.match(text, at)
        end = _bare_end(text, value) if value else at
        word = text[at:end]
        if not word or word[0] == "{" or word.lower() in _NOTHING:  # what is in an object has names of its own
            continue
        if m.lastgroup == "flag" and (word in _PROSE or word == name.lstrip("-").replace("-", "_").upper()):
            continue  # a sentence about the flag; "[--api-key API_KEY]" of a usage
        parts += [text[done:at], MASK]
        at = done = end
    return "".join([*parts, text[done:]])


_SET = re.compile(rf"(-{{0,2}}{_NAME})=([\s\S]+)")
_FLAG = re.compile(rf"--?{_NAME}")
_SCRIPT = re.compile(r"-[a-z]*c")  # sh -c: the word after it is a text, not one value


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
        is_script = _SCRIPT.fullmatch(before) is not None
        before = item
        hide_next = _FLAG.fullmatch(item) is not None and is_secret_name(item)
        out.append(mask_text(item) if is_script else _mask_word(item))
    return tuple(out)


def _mask_word(word: str) -> str:
    """One whole word of a command: here it is known where the secret ends."""
    if (m := _SET.fullmatch(word)) and is_secret_name(m[1]) and m[2].lower() not in _NOTHING:
        return f"{mask_text(m[1])}={MASK}"
    if m := _HEADER_WORD.fullmatch(word):
        scheme = _SCHEME.match(m[2])
        return f"{m[1]}{scheme[0] if scheme else ''}{MASK}"
    return mask_text(word)


def mask_env(env: Mapping[str, str]) -> dict[str, str]:
    """Environment with secret values masked, by name first and by shape second."""
    return {k: MASK if v and is_secret_name(k) else _mask_beside(k, v) for k, v in env.items()}


def _mask_beside(name: str, value: str) -> str:
    """A variable's value; that of a proxy needs no scheme to be an address."""
    if name.lower().endswith("proxy") and "@" in value:
        return mask_text(f"proxy={value}").removeprefix("proxy=")
    return mask_text(value)


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


_FLAG_BEFORE = re.compile(r"""(--?[A-Za-z][\w.-]*)(?:[ \t]+|=)["']?$""")  # of a shell's own words
_NAME_BEFORE = re.compile(r"""([A-Za-z_][\w.-]{0,120})\\{0,3}["']?[ \t]*[:=][ \t]*\\{0,3}["']?(?:[A-Za-z][\w-]{0,24} )?$""")

_URL_BEFORE = re.compile(r"://[^/\s]*$")


def _secret_of(before: str, head: str) -> tuple[str, str]:
    """(the name that a masked place belongs to, the variable that a person gives its secret in). head: the word up to it."""
    tail = head[-400:]
    if not head and before:
        name = before
    elif m := _FLAG_BEFORE.search(tail) or (None if _URL_BEFORE.search(tail) else _NAME_BEFORE.search(tail)):
        name = m[1]
    else:
        name = head.partition("=")[0]
    name = name.lstrip("-")
    return name, "K2TUI_SECRET_" + re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_").upper()


def unmask_argv(argv: Sequence[str], given: Mapping[str, str]) -> tuple[str, ...]:
    """argv with what was masked taken from `given`: `--api-key ***`, `--api-key=***`, {"api_key": "***"} from K2TUI_SECRET_API_KEY.

    Raises KeyError(name, variable) for the first that is missing there.
    """
    out: list[str] = []
    for i, word in enumerate(argv):
        first, *rest = word.split(MASK)
        whole = first
        for part in rest:
            name, variable = _secret_of(argv[i - 1] if i and word == MASK else "", whole)
            if variable not in given:
                raise KeyError(name, variable)
            whole += given[variable] + part
        out.append(whole)
    return tuple(out)
