"""TOML -> one frozen Config. An error names file, line and key, and the nearest known key.

Sources, later wins: built-in defaults, `~/.config/k2tui/config.toml`, `k2tui.toml` of the working folder, `K2TUI_CONFIG`.
Profiles (how to start a server) live in the same files under `[profile.NAME]`, may `inherit` another, and in
`assets/profiles/*.toml` (shipped).
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast

from k2tui import paths
from k2tui.errors import UsageError
from k2tui.parsing import ParseError, parse_toml
from k2tui.regular import read_regular


@dataclass(frozen=True)
class Profile:
    """How to start one server.

    engine: a file of k2tui/engines. model: path of the checkpoint ("asset:NAME" = one that k2tui ships). args: extra argv
    of the engine, one string an item. env: extra environment. gpus: indices; () = whatever the engine takes. auto_gpus: how many
    free GPUs are chosen at the start (`gpus = "auto"`: -1, as many as it needs; `gpus = 4`: 4; 0 = none is chosen). draft: path of
    an EAGLE-3 draft ("" = none); num_steps, topk, num_draft_tokens go with it. nodes: the other machines of a server on several,
    as ssh names them; this one is node 0. dist_init_addr: HOST:PORT of node 0 as they reach it. node_rank: set by hand on a machine
    that is not node 0 (then nothing is started over SSH). node_python: interpreter there that has k2tui. stall_s: silence after which a start without
    any other evidence counts as stalled (0 = learned). ready_timeout_s: `up` and `extract` wait so long for readiness (0 = as long as
    it loads).
    """

    name: str = ""
    engine: str = "sglang"
    model: str = ""
    served_model_name: str = ""
    host: str = "127.0.0.1"
    port: int = 30000
    tp_size: int = 1
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    gpus: tuple[int, ...] = ()
    auto_gpus: int = 0
    draft: str = ""
    speculative_num_steps: int = 3
    speculative_eagle_topk: int = 1
    speculative_num_draft_tokens: int = 4
    python: str = ""  # interpreter of the engine's environment; "" = this one
    stall_s: float = 0.0
    ready_timeout_s: float = 0.0  # 0 = wait as long as it loads
    nodes: tuple[str, ...] = ()
    dist_init_addr: str = ""
    node_rank: int = 0
    node_python: str = "python3"
    inherit: str = ""
    description: str = ""

    @property
    def url(self) -> str:
        """Where this machine reaches its server."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::", "") else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def nnodes(self) -> int:
        return len(self.nodes) + 1


@dataclass(frozen=True)
class BenchConfig:
    concurrency: tuple[int, ...] = (1, 4, 8)
    num_prompts: int = 32
    random_input_len: int = 64
    random_output_len: int = 32
    seed: int = 1


@dataclass(frozen=True)
class UiConfig:
    theme: str = ""
    ascii: bool = False
    mouse: bool = True
    refresh_s: float = 1.0


@dataclass(frozen=True)
class NotifyConfig:
    """Being told. kinds: which events ("all" = every one); quiet: "22:00-07:00", quiet_except: kinds told all the same.

    command: run for each event, one string an item ({kind}, {title}, {text} are filled in). webhook: a URL that gets a JSON
    POST. bell and terminal: the dashboard's own terminal.
    """

    bell: bool = True
    terminal: bool = True
    command: tuple[str, ...] = ()
    webhook: str = ""
    kinds: tuple[str, ...] = ("all",)
    quiet: str = ""
    quiet_except: tuple[str, ...] = ()


@dataclass(frozen=True)
class Config:
    default_profile: str = "tiny"
    plan: str = ""  # plan file that the board mirrors; "" = plan.json in the state folder, made from the pipeline
    profiles: Mapping[str, Profile] = field(default_factory=dict[str, Profile])
    bench: BenchConfig = field(default_factory=BenchConfig)
    ui: UiConfig = field(default_factory=UiConfig)
    notify: NotifyConfig = field(default_factory=NotifyConfig)
    sources: tuple[str, ...] = ()  # files read, in order

    def get_profile(self, name: str = "") -> Profile:
        """The profile of that name ("" = the default one). Raises UsageError naming the nearest."""
        want = name or self.default_profile
        if want in self.profiles:
            return self.profiles[want]
        near = difflib.get_close_matches(want, list(self.profiles), n=1)
        raise UsageError(
            f"no profile {want!r}" + (f"; did you mean {near[0]!r}?" if near else ""),
            "profiles: " + ", ".join(sorted(self.profiles)),
        )


def with_secrets(profile: Profile, given: Mapping[str, str] | None = None) -> Profile:
    """The profile with what a file of k2tui holds as `***` taken from `given` (default: this process's environment).

    A variable comes from its own name, a word of `args` from K2TUI_SECRET_<FLAG> (`--api-key` -> K2TUI_SECRET_API_KEY).
    Raises UsageError naming the first that is missing: an engine is never given `***`.
    """
    from k2tui.core.job_mask import MASK, unmask_argv

    known = os.environ if given is None else given
    masked = [name for name, value in profile.env.items() if MASK in value]
    if not masked and not any(MASK in word for word in profile.args):
        return profile
    for name in masked:
        if name not in known:
            raise UsageError(
                f"profile {profile.name!r}: {name} was a secret and is not stored", f"set {name} in the environment"
            )
    try:
        args = unmask_argv(profile.args, known)
    except KeyError as err:
        flag, name = err.args
        raise UsageError(f"profile {profile.name!r}: a secret in its args ({flag}) is not stored", f"set {name}") from None
    return replace(profile, args=args, env={**profile.env, **{name: known[name] for name in masked}})


def _line_of(text: str, key: str, section: str = "") -> int:
    """Line where `key` is set inside [section], 1-based; 0 if it cannot be found."""
    current = ""
    for number, line in enumerate(text.splitlines(), 1):
        head = re.match(r"\s*\[\[?\s*([^\]]+?)\s*\]", line)
        if head:
            current = head[1].replace('"', "").replace("'", "")
            if current == f"{section}.{key}".strip("."):
                return number
            continue
        if current == section and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=", line):
            return number
    return 0


def _where(path: Path, text: str, key: str, section: str) -> str:
    line = _line_of(text, key, section)
    return f"{path}:{line}" if line else str(path)


class _Place:
    """Where a key is set, told only when it is wrong: finding its line costs more than reading the file."""

    def __init__(self, path: Path, text: str, key: str, section: str, label: str) -> None:
        self._facts = (path, text, key, section)
        self._label = label

    def __str__(self) -> str:
        return f"{_where(*self._facts)}: key {self._label!r}"


def _check(cls: type, raw: Mapping[str, Any], path: Path, text: str, section: str) -> dict[str, Any]:
    """Keys and types of one table against a dataclass. Raises UsageError naming file, line, key and the nearest key."""
    known = {f.name: f for f in fields(cls) if f.name not in ("name", "profiles", "sources", "auto_gpus")}
    out: dict[str, Any] = {}
    defaults = cls()
    for key, value in raw.items():
        label = f"{section}.{key}" if section else key
        if key not in known:
            near = difflib.get_close_matches(key, [*known, *(() if section else ("profile",))], n=1)
            raise UsageError(
                f"{_where(path, text, key, section)}: unknown key {label!r}" + (f"; did you mean {near[0]!r}?" if near else ""),
                "known keys: " + ", ".join(sorted(known)),
            )
        want = getattr(defaults, key)
        where = _Place(path, text, key, section, label)
        if cls is Profile and key == "gpus":
            out["gpus"], out["auto_gpus"] = parse_gpus(value, where)
            continue
        if isinstance(want, bool):
            if not isinstance(value, bool):
                raise UsageError(f"{where} must be true or false, not {value!r}")
        elif isinstance(want, int) and not isinstance(want, bool):
            if not isinstance(value, int) or isinstance(value, bool):
                raise UsageError(f"{where} must be a whole number, not {value!r}")
        elif isinstance(want, float):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise UsageError(f"{where} must be a number, not {value!r}")
            try:
                value = float(value)
            except OverflowError:
                raise UsageError(f"{where} is too large a number") from None
        elif isinstance(want, str):
            if not isinstance(value, str):
                raise UsageError(f"{where} must be a text in quotes, not {value!r}")
        elif isinstance(want, tuple):
            if not isinstance(value, list):
                raise UsageError(f"{where} must be a list, not {value!r}")
            number = key == "concurrency"
            for item in cast("list[Any]", value):
                if isinstance(item, bool) or not isinstance(item, int if number else str):
                    raise UsageError(f"{where} must hold {'whole numbers' if number else 'texts'}, not {item!r}")
            value = tuple(cast("list[Any]", value))
        elif isinstance(want, dict):
            if not isinstance(value, dict):
                raise UsageError(f"{where} must be a table")
            if key == "env":
                value = {str(k): v if isinstance(v, str) else str(v) for k, v in cast("dict[str, Any]", value).items()}
        wrong = _range_error(cls, key, value)
        if wrong:
            raise UsageError(f"{where} {wrong}, not {value!r}")
        out[key] = value
    return out


_AT_LEAST = {
    ("Profile", "tp_size"): 1, ("Profile", "node_rank"): 0, ("Profile", "stall_s"): 0, ("Profile", "ready_timeout_s"): 0, ("Profile", "speculative_num_steps"): 1,
    ("Profile", "speculative_eagle_topk"): 1, ("Profile", "speculative_num_draft_tokens"): 1, ("BenchConfig", "num_prompts"): 1,
    ("BenchConfig", "random_input_len"): 1, ("BenchConfig", "random_output_len"): 1, ("BenchConfig", "seed"): 0, ("UiConfig", "refresh_s"): 0.1,
}  # fmt: skip


def parse_gpus(value: object, where: object) -> tuple[tuple[int, ...], int]:
    """A profile's `gpus` -> (indices, how many to choose): "auto", a count, or a list of indices. Raises UsageError."""
    if value == "auto":
        return (), -1
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return (), value
    if isinstance(value, list):
        items = cast("list[object]", value)
        if all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in items):
            return tuple(cast("list[int]", items)), 0
        raise UsageError(f"{where} must hold whole numbers, GPU indices from 0 on, not {value!r}")
    raise UsageError(f'{where} must be a list of GPU indices, a number of GPUs, or "auto", not {value!r}')


def _range_error(cls: type, key: str, value: Any) -> str:
    """What a value of the right type must be and is not, in words; "" when it is fine."""
    name = cls.__name__
    least = _AT_LEAST.get((name, key))
    if least is not None and not (value >= least and value < 1e15):
        return f"must be at least {least:g}"
    if (name, key) == ("Profile", "port") and not 1 <= value <= 65535:
        return "must be a port from 1 to 65535"
    if (name, key) == ("BenchConfig", "concurrency") and (not value or min(value) < 1):
        return "must hold numbers of at least 1"
    if (name, key) == ("Profile", "nodes") and any(not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.:@%-]*", host) for host in value):
        return "must hold host names as ssh takes them"
    if (name, key) == ("Profile", "dist_init_addr") and value and not re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^\s:]+):\d{1,5}", value):
        return "must be HOST:PORT"
    if (name, key) == ("Profile", "engine"):
        from k2tui import engines

        if value not in engines.names():
            return "must be one of " + ", ".join(engines.names())
    if name == "NotifyConfig" and key in ("kinds", "quiet_except", "quiet"):
        from k2tui.core.notices import Kind, parse_quiet

        if key == "quiet":
            try:
                parse_quiet(value)
            except ValueError:
                return 'must be a span such as "22:00-07:00"'
        else:
            known = {str(k) for k in Kind} | {"all"}
            if any(k not in known for k in value):
                return "must hold " + ", ".join(sorted(known))
    return ""


def _read(path: Path) -> tuple[dict[str, Any], str]:
    try:
        text = read_regular(path).decode()
    except IsADirectoryError:
        raise UsageError(f"{path} is a folder, not a config file", "give the path of a TOML file")
    except UnicodeDecodeError as err:
        raise UsageError(f"{path}: not UTF-8 text (byte {err.start})", "save the file as UTF-8")
    except OSError as err:
        raise UsageError(f"{path}: {err.strerror or err}", "check the path and its permissions")
    try:
        return parse_toml(text), text
    except ParseError as err:
        hint = "fix that line; nothing was changed"
        if "Cannot overwrite" in str(err) or "Cannot declare" in str(err):
            hint += '; `profile` is the table of profiles, default_profile = "NAME" sets the default one'
        raise UsageError(err.at(str(path)), hint)


def _files(explicit: str | None) -> list[Path]:
    found = sorted((paths.assets_dir() / "profiles").glob("*.toml"))
    for candidate in (paths.config_dir() / "config.toml", Path.cwd() / "k2tui.toml"):
        try:
            there = candidate.exists()
        except OSError as err:
            raise UsageError(f"{candidate}: {err.strerror or err}", "check the folder's permissions, or set K2TUI_HOME") from None
        if there:
            found.append(candidate)
    named = explicit or os.environ.get("K2TUI_CONFIG")
    if named:
        found.append(Path(named).expanduser())
    return found


_TABLES: dict[str, type] = {"bench": BenchConfig, "ui": UiConfig, "notify": NotifyConfig}


def load(explicit: str | None = None) -> Config:
    """Read every source. explicit: a path from the command line; it must exist. Raises UsageError."""
    top: dict[str, Any] = {}
    tables: dict[str, dict[str, Any]] = {name: {} for name in _TABLES}
    raw_profiles: dict[str, tuple[dict[str, Any], str]] = {}
    sources: list[str] = []
    for path in _files(explicit):
        raw, text = _read(path)
        sources.append(str(path))
        rest: dict[str, Any] = {}
        for key, value in raw.items():
            if key == "profile" and not isinstance(value, dict):
                raise UsageError(
                    f"{_where(path, text, 'profile', '')}: `profile` is the table of profiles", 'default_profile = "NAME" sets the default one'
                )
            if key == "profile":
                for name, table in cast("dict[str, Any]", value).items():
                    if not isinstance(table, dict):
                        raise UsageError(f"{_where(path, text, name, 'profile')}: profile {name!r} must be a table [profile.{name}]")
                    checked = _check(Profile, cast("dict[str, Any]", table), path, text, f"profile.{name}")
                    old = raw_profiles.get(name, ({}, ""))[0] if not checked.get("inherit") else {}
                    raw_profiles[name] = ({**old, **checked}, _where(path, text, name, "profile"))
            elif key in _TABLES:
                if not isinstance(value, dict):
                    raise UsageError(f"{_where(path, text, key, '')}: {key!r} must be a table [{key}]")
                tables[key].update(_check(_TABLES[key], cast("dict[str, Any]", value), path, text, key))
            elif key == "sources" or key == "profiles":
                rest["__bad__" + key] = value
            else:
                rest[key] = value
        top.update(_check(Config, {k.removeprefix("__bad__"): v for k, v in rest.items()}, path, text, ""))
    profiles = {name: _resolve(name, raw_profiles, ()) for name in raw_profiles}
    built = {name: cls(**tables[name]) for name, cls in _TABLES.items()}
    top.pop("profiles", None)
    top.pop("sources", None)
    return Config(**{k: v for k, v in top.items() if k not in built}, **built, profiles=profiles, sources=tuple(sources))


def _resolve(name: str, raw: Mapping[str, tuple[dict[str, Any], str]], seen: tuple[str, ...]) -> Profile:
    table, where = raw[name]
    parent = table.get("inherit", "")
    if not parent:
        return Profile(**table, name=name)
    if name in seen or parent == name:
        raise UsageError(f"{where}: profile {name!r} inherits from itself by way of {' -> '.join((*seen, name))}")
    if parent not in raw:
        near = difflib.get_close_matches(parent, list(raw), n=1)
        raise UsageError(f"{where}: profile {name!r} inherits from {parent!r}, which does not exist" + (f"; did you mean {near[0]!r}?" if near else ""))
    base = _resolve(parent, raw, (*seen, name))
    merged = {f.name: getattr(base, f.name) for f in fields(Profile)}
    merged.update({k: v for k, v in table.items() if k != "env"})
    merged["env"] = {**base.env, **table.get("env", {})}
    merged["name"] = name
    return Profile(**merged)
