"""Chains: steps that need each other, gates on their results, and what may be skipped. Values only; nothing runs here.

A step is valid when its fingerprint (of its parts: stage, parameters, profile, inputs, and the fingerprints of what it needs) is the
one that its record was made with, its outputs are as they were then, and its gates hold for the recorded result.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

from k2tui.core.job_mask import mask_params
from k2tui.errors import UsageError
from k2tui.parsing import ParseError, parse_toml

_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")


NOT_ASKED = "not asked for"
"""Why a step beyond the asked ones is left out."""
NEVER_RAN = "has not run yet"
"""Why a step without a record is run."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step. stage: a file of k2tui/stages, or argv: any command.

    needs: names of steps; "previous" (the default) is the one above, [] none. gate: what must hold before the next step
    (see `gate_unmet`). inputs: files or folders whose content counts. outputs: files or folders that must stay as they were.
    until: last step that a server is kept for ("" = the last one that needs it). role: what a benchmark step stands for in the final
    report: baseline, untrained or draft. Texts in params, argv, gates, inputs and outputs may hold {out} (this step's own folder),
    {run} (the chain's), {assets} (what k2tui ships), {STEP.out}, {STEP.result.KEY}, {STEP.url}.
    """

    name: str
    stage: str = ""
    argv: tuple[str, ...] = ()
    kind: str = ""  # task | server; "" = as the stage says
    params: Mapping[str, Any] = field(default_factory=dict[str, Any])
    needs: tuple[str, ...] = ()
    gate: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    until: str = ""
    timeout_s: float | None = None
    retries: int = 0
    optional: bool = False  # left out, with a word, while its stage is not there
    title: str = ""
    role: str = ""


@dataclass(frozen=True, slots=True)
class Chain:
    name: str
    steps: tuple[Step, ...]  # in an order in which each comes after what it needs
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    path: str = ""

    def step(self, name: str) -> Step:
        """The step of that name. Raises UsageError naming the nearest."""
        for step in self.steps:
            if step.name == name:
                return step
        near = difflib.get_close_matches(name, [s.name for s in self.steps], n=1)
        raise UsageError(
            f"pipeline {self.name} has no step {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""),
            "steps: " + ", ".join(s.name for s in self.steps),
        )


@dataclass(frozen=True, slots=True)
class Record:
    """What is known of a step's last success."""

    fingerprint: str
    job_id: str = ""
    result: Mapping[str, Any] = field(default_factory=dict[str, Any])
    outputs: Mapping[str, str] = field(default_factory=dict[str, str])  # path -> signature
    ended_s: float = 0.0
    took_s: float | None = None
    parts: Mapping[str, str] = field(default_factory=dict[str, str])  # `kept_parts` of then; {} = not known


def record_of(value: Any) -> Record | None:
    """A record as it stands on disk; None for anything else."""
    if not isinstance(value, Mapping):
        return None
    raw = cast("Mapping[str, Any]", value)
    if not isinstance(raw.get("fingerprint"), str):
        return None
    result, ended, took = (raw.get(k) for k in ("result", "ended_s", "took_s"))

    def texts(key: str) -> dict[str, str]:
        value = raw.get(key)
        return {str(k): str(v) for k, v in cast("Mapping[Any, Any]", value).items()} if isinstance(value, Mapping) else {}

    return Record(
        fingerprint=raw["fingerprint"],
        job_id=str(raw.get("job_id", "")),
        result=cast("Mapping[str, Any]", result) if isinstance(result, Mapping) else {},
        outputs=texts("outputs"),
        ended_s=_finite(ended) or 0.0,
        took_s=_finite(took),
        parts=texts("parts"),
    )


@dataclass(frozen=True, slots=True)
class Decision:
    """action: run | skip | serve (a server, started because a step that runs needs it) | leave (a server that nobody needs)."""

    step: Step
    action: str
    why: str
    fingerprint: str


# ---- reading


def _heads(lines: Sequence[str]) -> list[int]:
    """Lines of the [[step]] heads, 1-based."""
    return [n for n, line in enumerate(lines, 1) if re.match(r"\s*\[\[\s*step\s*\]\]", line)]


def _line_of(lines: Sequence[str], heads: Sequence[int], number: int, key: str = "") -> int:
    """Line of the number-th [[step]] (from 0), or of a key in it; 0 when not found."""
    if number >= len(heads):
        return 0
    first = heads[number]
    if not key:
        return first
    last = heads[number + 1] - 1 if number + 1 < len(heads) else len(lines)
    wanted = re.compile(rf"\s*(\[step\.)?{re.escape(key)}\b")
    return next((n for n in range(first + 1, last + 1) if wanted.match(lines[n - 1])), 0)


def _texts(value: Any, where: str, key: str) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(v, str) for v in cast("list[Any]", value)):
        raise UsageError(f"{where}: {key} must be a list of texts, not {value!r}")
    return tuple(cast("list[str]", value))


def parse_chain(text: str, where: str) -> Chain:
    """A chain from its TOML. Raises UsageError naming file, line and key."""
    try:
        raw = parse_toml(text)
    except ParseError as err:
        raise UsageError(err.at(where), "fix that line")
    unknown = sorted(set(raw) - {"name", "defaults", "step"})
    if unknown:
        near = difflib.get_close_matches(unknown[0], ["name", "defaults", "step"], n=1)
        raise UsageError(
            f"{where}: unknown key {unknown[0]!r}" + (f"; did you mean {near[0]!r}?" if near else "")
        )
    name = raw.get("name", "pipeline")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(f"{where}: name must be a plain word in lower case, not {name!r}")
    defaults = raw.get("defaults", {})
    items = raw.get("step", [])
    if not isinstance(defaults, dict) or not isinstance(items, list) or not items:
        raise UsageError(
            f"{where}: a pipeline is a list of [[step]] tables, and a [defaults] table if you like"
        )
    steps: list[Step] = []
    known = {f.name for f in fields(Step)}
    lines = text.splitlines()
    heads = _heads(lines)
    for number, item in enumerate(cast("list[Any]", items)):
        here = f"{where}:{_line_of(lines, heads, number)}"
        if not isinstance(item, dict):
            raise UsageError(f"{here}: steps are written as [[step]] tables")
        table = cast("dict[str, Any]", item)
        for key in table:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                raise UsageError(
                    f"{where}:{_line_of(lines, heads, number, key)}: unknown key {key!r}"
                    + (f"; did you mean {near[0]!r}?" if near else ""),
                    "known keys: " + ", ".join(sorted(known)),
                )
        steps.append(_step(table, here, steps[-1].name if steps else ""))
    names = [s.name for s in steps]
    for number, step in enumerate(steps):
        here = f"{where}:{_line_of(lines, heads, number)}"
        if names.index(step.name) != number:
            raise UsageError(f"{here}: two steps are called {step.name!r}", "give one of them another name")
        for other in (*step.needs, *((step.until,) if step.until else ())):
            if other not in names:
                near = difflib.get_close_matches(other, names, n=1)
                raise UsageError(
                    f"{here}: step {step.name!r} names {other!r}, which does not exist"
                    + (f"; did you mean {near[0]!r}?" if near else "")
                )
    every = set(names)
    for number, step in enumerate(steps):
        for key in ("argv", "params", "inputs", "outputs"):
            hole = next(
                (
                    h
                    for h in _holes_in(getattr(step, key))
                    if not _is_hole_known(h[0], every, is_program=h[1])
                ),
                None,
            )
            if hole is not None:
                forms = [*_OWN_HOLES, *(f"{n}.{k}" for n in names for k in ("out", "id", "url"))]
                near = difflib.get_close_matches(hole[0], forms, n=1)
                raise UsageError(
                    f"{where}:{_line_of(lines, heads, number, key)}: step {step.name!r}: {key}: {{{hole[0]}}} is not known"
                    + (f"; did you mean {{{near[0]}}}?" if near else ""),
                    "placeholders: {out} {id} {run} {assets} {python} {STEP.out} {STEP.id} {STEP.url} {STEP.result.KEY}",
                )
    return Chain(name, tuple(_sorted(steps, where)), cast("dict[str, Any]", defaults), where)


def _step(raw: Mapping[str, Any], here: str, previous: str) -> Step:
    name = raw.get("name", raw.get("stage", ""))
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(f"{here}: a step needs a name: a plain word in lower case, not {name!r}")
    here = f"{here}: step {name!r}"
    stage = raw.get("stage", "" if raw.get("argv") else name)
    if not isinstance(stage, str):
        raise UsageError(f"{here}: stage must be a text")
    words: Any = raw.get("argv")
    if words is not None and (not isinstance(words, list) or not words):
        raise UsageError(
            f"{here}: argv must be a list of words, not {words!r}",
            'argv = ["PROGRAM", "WORD", ...]: no shell reads it',
        )
    argv = _texts(words or [], here, "argv")
    if argv and not argv[0].strip():
        raise UsageError(f"{here}: argv's first word is empty", "give the program's name")
    if stage and argv:
        raise UsageError(f"{here}: give a stage or an argv, not both")
    params = raw.get("params", {})
    if not isinstance(params, dict):
        raise UsageError(f"{here}: params must be a table")
    timeout = raw.get("timeout_s")
    limit_s = _finite(timeout)
    if timeout is not None and (limit_s is None or limit_s <= 0):
        raise UsageError(f"{here}: timeout_s must be a finite number of seconds, more than 0")
    role = raw.get("role", "")
    if role not in ("", "baseline", "untrained", "draft"):
        raise UsageError(f"{here}: role must be baseline, untrained or draft, not {role!r}")
    retries = raw.get("retries", 0)
    if isinstance(retries, bool) or not isinstance(retries, int) or not 0 <= retries <= 100:
        raise UsageError(f"{here}: retries must be a whole number")
    kind = raw.get("kind", "")
    if kind not in ("", "task", "server"):
        raise UsageError(f"{here}: kind must be task or server, not {kind!r}")
    needs = _texts(raw.get("needs", "previous"), here, "needs")
    if needs == ("previous",):
        needs = (previous,) if previous else ()
    gate = _texts(raw.get("gate", []), here, "gate")
    for condition in gate:
        check_gate(condition, here)
    return Step(
        name=name,
        stage=stage,
        argv=argv,
        kind=str(kind),
        params=cast("dict[str, Any]", params),
        needs=needs,
        gate=gate,
        inputs=_texts(raw.get("inputs", []), here, "inputs"),
        outputs=_texts(raw.get("outputs", []), here, "outputs"),
        until=str(raw.get("until", "")),
        timeout_s=limit_s,
        retries=retries,
        optional=raw.get("optional") is True,
        title=str(raw.get("title", "")),
        role=str(role),
    )


def _sorted(steps: Sequence[Step], where: str) -> list[Step]:
    """The written order, but each step after what it needs. Raises UsageError for a circle."""
    done: list[Step] = []
    names: set[str] = set()
    left = list(steps)
    while left:
        ready = next((s for s in left if names.issuperset(s.needs)), None)
        if ready is None:
            raise UsageError(
                f"{where}: these steps need each other in a circle: " + ", ".join(s.name for s in left)
            )
        left.remove(ready)
        done.append(ready)
        names.add(ready.name)
    return done


def without(chain: Chain, names: set[str]) -> Chain:
    """The chain without some steps; who needed them needs what they needed."""
    needs_of = {s.name: s.needs for s in chain.steps}

    def resolve(needs: Sequence[str]) -> tuple[str, ...]:
        out: list[str] = []
        for n in needs:
            for m in resolve(needs_of[n]) if n in names else (n,):
                if m not in out:
                    out.append(m)
        return tuple(out)

    kept = [s for s in chain.steps if s.name not in names]
    return replace(
        chain,
        steps=tuple(
            replace(s, needs=resolve(s.needs), until="" if s.until in names else s.until) for s in kept
        ),
    )


# ---- gates

_COMPARE = re.compile(r"\s*(result(?:\.[\w-]+)+)\s*(<=|>=|==|!=|<|>)\s*(\S+)\s*")
_UNARY = re.compile(r"\s*(finite|falling|exists|true|false)\s+(result(?:\.[\w-]+)+)\s*")
_OPS: dict[str, Callable[[float, float], bool]] = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}


def check_gate(text: str, here: str) -> None:
    """Raises UsageError when a gate is none that `gate_unmet` or the runner understands."""
    if text == "ready" or re.match(r"(file|url):.", text):
        return
    if _UNARY.fullmatch(text):
        return
    m = _COMPARE.fullmatch(text)
    if m and (re.fullmatch(r"result(\.[\w-]+)+", m[3]) or _number(m[3]) is not None):
        return
    raise UsageError(
        f"{here}: gate {text!r} is not understood",
        "gates: ready | file:PATH | url:http://... | result.rows >= 10 | result.after < result.before | finite result.loss | "
        "falling result.losses | exists result.x | true result.ok | false result.stopped",
    )


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def look_up(result: Mapping[str, Any], path: str) -> Any:
    """The value at `result.a.b`; None when it is not there. A number picks from a list (-1 = the last)."""
    value: Any = result
    for part in path.split(".")[1:]:
        if isinstance(value, Mapping):
            value = cast("Mapping[str, Any]", value).get(part)
        elif isinstance(value, list) and re.fullmatch(r"-?\d+", part):
            row = cast("list[Any]", value)
            value = row[int(part)] if -len(row) <= int(part) < len(row) else None
        else:
            return None
    return value


def _finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # a whole number of more than 308 digits
        return None
    return number if math.isfinite(number) else None


def gate_unmet(text: str, result: Mapping[str, Any]) -> str:
    """Why a gate on a result does not hold, in words; "" when it holds. A number that is not finite meets no gate."""
    m = _UNARY.fullmatch(text)
    if m:
        value = look_up(result, m[2])
        if m[1] == "exists":
            return "" if value is not None else f"{m[2]} is not there"
        if m[1] == "true":
            return "" if value is True else f"{m[2]} is {value!r}"
        if m[1] == "false":  # false, an empty text, or nothing
            return "" if value is False or value is None or value == "" else f"{m[2]} is {value!r}"
        if m[1] == "finite":
            values = cast("list[Any]", value) if isinstance(value, list) else [value]
            bad = [v for v in values if _finite(v) is None]
            return f"{m[2]} is {bad[0]!r}" if bad or not values else ""
        numbers = [_finite(v) for v in cast("list[Any]", value)] if isinstance(value, list) else []
        good = [n for n in numbers if n is not None]
        if len(good) < 2 or len(good) != len(numbers):
            return f"{m[2]} is no row of finite numbers"
        part = max(1, len(good) // 4)
        first, last = sum(good[:part]) / part, sum(good[-part:]) / part
        return "" if last < first else f"{m[2]} does not fall: {first:.4g} at first, {last:.4g} at last"
    m = _COMPARE.fullmatch(text)
    if m is None:
        return f"{text!r} is not understood"
    left = _finite(look_up(result, m[1]))
    right = _number(m[3]) if not m[3].startswith("result") else _finite(look_up(result, m[3]))
    if left is None:
        return f"{m[1]} is {look_up(result, m[1])!r}"
    if right is None:
        return f"{m[3]} is {look_up(result, m[3])!r}"
    return "" if _OPS[m[2]](left, right) else f"{m[1]} is {left:g}, not {m[2]} {right:g}"


# ---- templates

_HOLE = re.compile(r"\{([a-z][a-z0-9_-]*(?:\.[\w-]+)*)\}")

_OWN_HOLES = ("out", "id", "run", "assets", "python")


def _holes_in(value: Any) -> Iterator[tuple[str, bool]]:
    """(name, stands in a small program) of every {hole} of a value. A text with white space, quotes or brackets is a program."""
    if isinstance(value, str):
        is_program = re.search(r"[\s'\"()\[\]]", value) is not None
        yield from ((m[1], is_program) for m in _HOLE.finditer(value))
    elif isinstance(value, Mapping):
        for item in cast("Mapping[Any, Any]", value).values():
            yield from _holes_in(item)
    elif isinstance(value, list | tuple):
        for item in cast("Sequence[Any]", value):
            yield from _holes_in(item)


def _is_hole_known(name: str, steps: Set[str], *, is_program: bool) -> bool:
    """Whether `fill` can fill it, now or after the steps before. A program's own braces ({n}, {x.y}) are its own."""
    owner, is_dotted, rest = name.partition(".")
    if not is_dotted:
        return name in _OWN_HOLES or is_program
    if owner not in steps:
        return is_program
    return rest in ("out", "id", "url") or rest.startswith("result.")


_NOTHING = object()


def _known_at(name: str, known: Mapping[str, Any]) -> Any:
    """known[name], or an item of a list in it (bench.result.rows.0.run_id); _NOTHING when there is none."""
    if name in known:
        return known[name]
    owner, _, rest = name.rpartition(".")
    while owner:
        if owner in known:
            value = look_up({"x": known[owner]}, f"result.x.{rest}")
            return _NOTHING if value is None else value
        owner, _, more = owner.rpartition(".")
        rest = f"{more}.{rest}"
    return _NOTHING


def fill(value: Any, known: Mapping[str, Any], *, strict: bool = True) -> Any:
    """A value with its {holes} filled. A text that is one hole takes the value as it is (a list stays a list).

    strict: an unknown {STEP.x} raises UsageError. Other braces ({n} of a small program) stay as they are.
    """
    if isinstance(value, str):
        whole = _HOLE.fullmatch(value)
        if whole:
            found = _known_at(whole[1], known)
            if found is not _NOTHING:
                return found

        def put(m: re.Match[str]) -> str:
            found = _known_at(m[1], known)
            if found is not _NOTHING:
                return str(found)
            owner, is_dotted, _ = m[1].partition(".")
            if strict and is_dotted and any(k.startswith(owner + ".") for k in known):
                near = difflib.get_close_matches(m[1], list(known), n=1)
                raise UsageError(
                    f"{{{m[1]}}} is not known" + (f"; did you mean {{{near[0]}}}?" if near else ""),
                    "known: " + ", ".join(sorted(known)[:20]),
                )
            return m[0]

        return _HOLE.sub(put, value)
    if isinstance(value, Mapping):
        return {str(k): fill(v, known, strict=strict) for k, v in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [fill(v, known, strict=strict) for v in cast("Sequence[Any]", value)]
    return value


def holes_of(result: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """{prefix.result.a.b: value} for every leaf and list of a result."""
    out: dict[str, Any] = {}
    for key, value in result.items():
        name = f"{prefix}.{key}"
        if isinstance(value, Mapping):
            out.update(holes_of(cast("Mapping[str, Any]", value), name))
        else:
            out[name] = value
    return out


# ---- skipping


def parts_of(
    step: Step, defaults: Mapping[str, Any], facts: Mapping[str, Any], needed: Mapping[str, str]
) -> dict[str, Any]:
    """All that decides a step's result, by name. facts: signatures of inputs, the profile; needed: fingerprints of its needs.

    Where a server listens (host and port) decides nothing.
    """
    params = {k: v for k, v in {**defaults, **step.params}.items() if k not in ("host", "port")}
    parts: dict[str, Any] = {"stage": step.stage, "command": list(step.argv)}
    for name, value in _flat({**params, **facts}):
        parts[name] = value
    return {**parts, **{f"step {name}": text for name, text in needed.items()}}


def _flat(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Tables in tables by dotted names; an empty one stays itself."""
    for name, value in table.items():
        if isinstance(value, Mapping) and value:
            for inner, deep in _flat(cast("Mapping[str, Any]", value)):
                yield f"{name}.{inner}", deep
        else:
            yield name, value


def fingerprint(parts: Mapping[str, Any]) -> str:
    """Hex digest of a step's parts."""
    return _digest(parts)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def kept_parts(parts: Mapping[str, Any]) -> dict[str, str]:
    """Parts as a record keeps them: JSON, or a digest of what is long or secret."""
    out: dict[str, str] = {}
    for name, value in parts.items():
        text = json.dumps(value, sort_keys=True, default=str)
        hidden = mask_params({name.rpartition(".")[2]: json.loads(text)})
        is_shown = len(text) <= 400 and list(hidden.values()) == [json.loads(text)]
        out[name] = text if is_shown else f"digest {_digest(value)[:12]}"
    return out


def changes_of(
    name: str,
    parts: Mapping[str, Mapping[str, str]],
    records: Mapping[str, Record],
    servers: Set[str],
    again: Set[str] = frozenset(),
) -> list[str]:
    """What of a step is not as its record says, in words: "lr 0.004 -> 0.002". again: steps whose change is told otherwise."""
    record = records.get(name)
    if record is None or not record.parts:
        return []
    now = parts.get(name, {})
    words: list[str] = []
    for key in sorted({*record.parts, *now}, key=lambda k: (k.startswith("step "), k)):
        was, new = record.parts.get(key), now.get(key)
        other = key.removeprefix("step ") if key.startswith("step ") else ""
        if was == new or other in again:
            continue
        if other in servers:
            deep = changes_of(other, parts, records, servers)
            words += [f"{other}: {w}" for w in deep if w not in words] if deep else [other]
        elif (word := other or _change(key, was, new)) not in words:
            words.append(word)
    return words


def _change(key: str, was: str | None, new: str | None) -> str:
    """ "lr 0.004 -> 0.002"; of a command the words that differ; of what cannot be shown the name only."""
    if " " in key:  # signatures
        return key
    try:
        old, now = (None if t is None else json.loads(t) for t in (was, new))
    except ValueError:  # a digest
        return key
    if isinstance(old, list) and isinstance(now, list):
        before, after = cast("list[Any]", old), cast("list[Any]", now)
        at = [n for n, (a, b) in enumerate(zip(before, after, strict=False)) if a != b]
        if len(before) == len(after) and len(at) == 1:
            flag = f"{before[at[0] - 1]} " if at[0] and str(before[at[0] - 1]).startswith("-") else ""
            return f"{key}: {flag}{_short(before[at[0]])} -> {_short(after[at[0]])}"
    if key == "command":
        return key
    return f"{key} {_short(old) if was is not None else 'not set'} -> {_short(now) if new is not None else 'not set'}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = " ".join(text.split()) or '""'
    return text if len(text) <= 40 else text[:39] + "\u2026"


def decide(
    chain: Chain,
    prints: Mapping[str, str],
    records: Mapping[str, Record],
    *,
    servers: frozenset[str] | set[str],
    outputs: Callable[[Step, Record], str],
    start: str = "",
    to: str = "",
    only: Sequence[str] = (),
    force: bool = False,
    parts: Mapping[str, Mapping[str, str]] | None = None,
) -> list[Decision]:
    """What a run would do, step by step. parts: {step: its parts as they would be kept}, to name what changed.

    servers: names of steps that run until stopped. outputs(step, record): why its outputs are not as they were, "" = they are.
    start: run this step and all that (directly or not) need it, whatever is valid. to: only this step and what it needs.
    only: nothing but these (and their servers).
    """
    asked = needed_by(chain, to) if to else {s.name for s in chain.steps}
    forced: set[str] = set()
    if start:
        chain.step(start)
        forced.add(start)
        for step in chain.steps:
            if set(step.needs) & forced:
                forced.add(step.name)
    for name in only:
        chain.step(name)
    running: set[str] = set()
    fresh: set[str] = set()  # what runs again, and servers of it
    actions: dict[str, tuple[str, str]] = {}
    for step in chain.steps:
        if step.name in servers:
            if set(step.needs) & fresh or step.name in forced:
                fresh.add(step.name)
            continue
        if step.name not in asked or (only and step.name not in only):
            actions[step.name] = ("skip", NOT_ASKED)
            continue
        why = ""
        record = records.get(step.name)
        earlier = [n for n in step.needs if n in fresh]
        if force:
            why = "forced"
        elif step.name in forced:
            why = (
                "restarted from here"
                if step.name == start
                else f"needs {start}"
                if start in step.needs
                else "comes after it"
            )
        elif record is None:
            why = NEVER_RAN
        elif record.fingerprint != prints[step.name]:
            named = changes_of(step.name, parts or {}, records, servers, fresh)
            more = f" and {len(named) - 3} more" if len(named) > 3 else ""
            why = "its inputs changed" + (f": {', '.join(named[:3])}{more}" if named else "")
            if earlier:
                only_that = record.parts and parts is not None and not named
                why = f"{'' if only_that else why + ', '}{earlier[0]} runs again"
        elif earlier:
            why = f"{earlier[0]} runs again"
        else:
            why = outputs(step, record) or next(
                (
                    w
                    for g in step.gate
                    if not re.match(r"ready$|file:|url:", g) and (w := gate_unmet(g, record.result))
                ),
                "",
            )
        if why:
            running.add(step.name)
            fresh.add(step.name)
            actions[step.name] = ("run", why)
        else:
            actions[step.name] = ("skip", f"valid: {record.job_id if record else ''}".rstrip(": "))
    out: list[Decision] = []
    for step in chain.steps:
        if step.name in servers:
            users = [s.name for s in server_users(chain, step.name, servers) if s.name in running]
            action = (
                ("serve", f"for {', '.join(users)}") if users else ("leave", "no step that runs needs it")
            )
        else:
            action = actions[step.name]
        out.append(Decision(step, action[0], action[1], prints[step.name]))
    return out


def needed_by(chain: Chain, name: str) -> set[str]:
    """The step and all that it needs, directly or not. Raises UsageError for an unknown name."""
    found = {chain.step(name).name}
    for step in reversed(chain.steps):  # each comes after what it needs
        if step.name in found:
            found |= set(step.needs)
    return found


def server_users(chain: Chain, name: str, servers: frozenset[str] | set[str]) -> list[Step]:
    """Steps that a server is kept for: those that name it in `needs`, and, with `until`, all up to that one."""
    server = chain.step(name)
    users = [s for s in chain.steps if name in s.needs and s.name not in servers]
    if server.until:
        names = [s.name for s in chain.steps]
        span = chain.steps[names.index(name) + 1 : names.index(server.until) + 1]
        users += [s for s in span if s.name not in servers and s not in users]
    return users
