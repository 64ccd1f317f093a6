"""Plan files as text: tasks out of it, one edit into it. Knows three formats and no file.

An edit changes only what it names: unknown JSON fields, Markdown around the tasks and TOML comments stay as they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from k2tui.core.board import PRIORITIES, Task, TaskStatus
from k2tui.errors import K2Error, UsageError
from k2tui.parsing import ParseError, parse_json, parse_toml

FORMATS = ("json", "markdown", "toml")
FIELDS = ("content", "status", "priority", "note", "stage", "job_id", "depends", "reported")

_STATUS = {
    "pending": "pending", "todo": "pending", "open": "pending", "not_started": "pending", "": "pending",
    "in_progress": "in_progress", "in-progress": "in_progress", "doing": "in_progress", "active": "in_progress",
    "completed": "completed", "complete": "completed", "done": "completed",
    "cancelled": "cancelled", "canceled": "cancelled", "deleted": "cancelled",
}  # fmt: skip
# patterns are texts: `re` compiles (and keeps) the ones that a plan's format needs, and no other
_MARK = r"\[(stage|job|after):\s*([^\]\s]+)\s*\]"


class PlanError(K2Error):
    """The plan's text is off. line: 1-based, 0 = not known."""

    exit_code = 2

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(message, "fix that line; the file was left alone")
        self.line = line


@dataclass(frozen=True, slots=True)
class Plan:
    format: str
    tasks: tuple[Task, ...] = ()
    title: str = ""


def format_of(name: str, text: str = "") -> str:
    """json | markdown | toml, from the file's name, else from how its text begins."""
    suffix = name.rpartition(".")[2].lower()
    if suffix in ("md", "markdown", "txt"):
        return "markdown"
    if suffix in ("json", "toml"):
        return suffix
    return "json" if text.lstrip()[:1] in ("[", "{") and not text.lstrip().startswith("[[") else "markdown"


def task_id_of(content: str, taken: set[str]) -> str:
    """An id for a task that has none: from its words, the same each time, so that an edit finds it again."""
    import hashlib  # 4 ms, for lists without ids only

    base = "t" + hashlib.sha1(content.strip().encode()).hexdigest()[:6]
    name, n = base, 2
    while name in taken:
        name, n = f"{base}-{n}", n + 1
    return name


def _status(value: Any, line: int) -> TaskStatus:
    word = _STATUS.get(str(value if value is not None else "").strip().lower())
    if word is None:
        raise PlanError(f"status {value!r} is unknown (pending, in_progress, completed, cancelled)", line)
    return TaskStatus(word)


def _priority(value: Any) -> str:
    word = str(value or "medium").strip().lower()
    return {"critical": "high", "urgent": "high", "normal": "medium"}.get(
        word, word if word in PRIORITIES else "medium"
    )


def _marks(content: str) -> dict[str, Any]:
    """[stage:bench], [job:ID] and [after:TASK] inside a task's words: links for lists that keep nothing but words."""
    out: dict[str, Any] = {}
    after = [m[2] for m in re.finditer(_MARK, content) if m[1] == "after"]
    for m in re.finditer(_MARK, content):
        if m[1] == "stage":
            out["stage"] = m[2]
        elif m[1] == "job":
            out["job_id"] = m[2]
    if after:
        out["depends"] = tuple(after)
    return out


def _names(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(w for w in re.split(r"[,\s]+", value) if w)
    return tuple(str(v) for v in cast("list[Any]", value)) if isinstance(value, list | tuple) else ()


def _from_table(raw: Mapping[str, Any], line: int, taken: set[str]) -> Task:
    content = str(raw.get("content") or raw.get("subject") or raw.get("title") or raw.get("text") or "")
    given = raw.get("id")
    task_id = str(given) if given not in (None, "") else task_id_of(content, taken)
    if task_id in taken:
        raise PlanError(f"two tasks have the id {task_id!r}", line)
    taken.add(task_id)
    marks = _marks(content)
    return Task(
        id=task_id,
        content=content,
        status=_status(raw.get("status"), line),
        priority=_priority(raw.get("priority")),
        note=str(raw.get("note") or ""),
        stage=str(raw.get("stage") or marks.get("stage", "")),
        chain=str(raw.get("chain") or ""),
        job_id=str(raw.get("job_id") or raw.get("job") or marks.get("job_id", "")),
        depends=_names(raw.get("depends") or raw.get("blockedBy")) or marks.get("depends", ()),
        line=line,
        reported=str(raw.get("reported") or ""),
    )


# ---- JSON


def _load_json(text: str) -> tuple[Any, list[dict[str, Any]]]:
    """The document and its list of tasks (the very objects in it)."""
    value: Any = None
    try:
        value = parse_json(text)
    except ParseError as err:
        raise PlanError(err.message, err.line)
    items: Any = value
    if isinstance(value, dict):
        table = cast("dict[str, Any]", value)
        items = next((table[k] for k in ("todos", "tasks", "items") if k in table), None)
        value = table
        if items is None and ("content" in table or "subject" in table):
            items = [table]
    if not isinstance(items, list):
        raise PlanError('a plan is a JSON list of tasks, or {"todos": [...]}', 1)
    found: list[dict[str, Any]] = []
    for number, item in enumerate(cast("list[Any]", items), 1):
        if not isinstance(item, dict):
            raise PlanError(f"task {number} is {json.dumps(item)[:40]}, not an object")
        found.append(cast("dict[str, Any]", item))
    return value, found


def _json_lines(text: str, count: int) -> list[int]:
    found: list[int] = []
    depth, in_text, line, skip = 0, False, 1, False
    want = 1 if text.lstrip().startswith("[") else 2
    for c in text:
        if c == "\n":
            line += 1
        if in_text:
            if skip:
                skip = False
            elif c == "\\":
                skip = True
            elif c == '"':
                in_text = False
            continue
        if c == '"':
            in_text = True
        elif c in "[{":
            if c == "{" and depth == want:
                found.append(line)
            depth += 1
        elif c in "]}":
            depth -= 1
    return found if len(found) == count else [0] * count


def _dump_json(value: Any, like: str) -> str:
    indent_match = re.search(r"\n([ \t]+)\S", like)
    indent: str | int | None = None
    if indent_match:
        indent = indent_match[1] if "\t" in indent_match[1] else len(indent_match[1])
    elif "\n" in like.strip():
        indent = 0
    elif not like.strip():
        indent = 2
    try:
        text = json.dumps(value, ensure_ascii=False, indent=indent)
    except RecursionError:
        raise PlanError(_BY_HAND)
    return text + ("\n" if like.endswith("\n") or not like.strip() else "")


# ---- Markdown

_ITEM = r"^(?P<indent>[ \t]*)(?P<bullet>[-*+]|\d+[.)])(?P<gap>[ \t]+)\[(?P<box>[ xX/~\->])\](?P<space>[ \t]+|$)(?P<rest>.*)$"
_COMMENT = r"[ \t]*<!--\s*k2tui\b:?(?P<body>(?:(?!-->).)*)-->"
_PAIR = r'([a-z_]+)=("(?:[^"\\]|\\.)*"|\S+)'
_BOX = {
    " ": "pending",
    "x": "completed",
    "X": "completed",
    "/": "in_progress",
    "~": "in_progress",
    ">": "in_progress",
    "-": "cancelled",
}
_BOX_OF = {"pending": " ", "completed": "x", "in_progress": "/", "cancelled": "-"}
_FENCE = r"^[ \t]{0,3}(`{3,}|~{3,})"


def _md_items(text: str) -> list[tuple[int, re.Match[str], str]]:
    """(index of the line, match, line ending) for every task outside code fences. Lines are cut at \\n only."""
    found: list[tuple[int, re.Match[str], str]] = []
    fence = ""
    for number, line in enumerate(text.split("\n")):
        body = line.removesuffix("\r")
        mark = re.match(_FENCE, body)
        if mark:
            if not fence:
                fence = mark[1]
            elif mark[1].startswith(fence):
                fence = ""
            continue
        if fence:
            continue
        m = re.match(_ITEM, body)
        if m:
            found.append((number, m, line[len(body) :]))
    return found


def _facts(rest: str) -> tuple[str, dict[str, str]]:
    m = re.search(_COMMENT, rest)
    if not m:
        return rest.rstrip(), {}
    facts: dict[str, str] = {}
    for pair in re.finditer(_PAIR, m["body"]):
        value = pair[2]
        if value.startswith('"'):
            try:
                value = str(parse_json(value))
            except ValueError:
                value = value.strip('"')
        facts[pair[1]] = value
    return (rest[: m.start()] + rest[m.end() :]).rstrip(), facts


def _md_tasks(text: str) -> list[Task]:
    tasks: list[Task] = []
    taken: set[str] = set()
    depths: list[int] = []
    for number, m, _ in _md_items(text):
        content, facts = _facts(m["rest"])
        width = len(m["indent"].expandtabs(4))
        while depths and depths[-1] >= width:
            depths.pop()
        depth = len(depths)
        depths.append(width)
        marks = _marks(content)
        task_id = facts.get("id") or task_id_of(content, taken)
        if task_id in taken:
            raise PlanError(f"two tasks have the id {task_id!r}", number + 1)
        taken.add(task_id)
        tasks.append(
            Task(
                id=task_id,
                content=content,
                status=TaskStatus(_BOX[m["box"]]),
                priority=_priority(facts.get("priority")),
                note=facts.get("note", ""),
                stage=facts.get("stage") or marks.get("stage", ""),
                chain=facts.get("chain", ""),
                job_id=facts.get("job") or marks.get("job_id", ""),
                depends=_names(facts.get("depends", "")) or marks.get("depends", ()),
                depth=depth,
                line=number + 1,
                reported=facts.get("reported", ""),
            )
        )
    return tasks


def _md_line(m: re.Match[str], changes: Mapping[str, str]) -> str:
    content, facts = _facts(m["rest"])
    had = bool(re.search(_COMMENT, m["rest"]))
    box = m["box"]
    if "status" in changes and _BOX[box] != changes["status"]:
        box = _BOX_OF[changes["status"]]
    touched = False
    for key, value in changes.items():
        if key == "content":
            content = value
            touched = True
        elif key != "status":
            name = "job" if key == "job_id" else key
            old = facts.get(name, "")
            if value != old and not (name == "priority" and value == "medium" and not old):
                facts[name] = value
                touched = True
                if not value:
                    del facts[name]
    head = f"{m['indent']}{m['bullet']}{m['gap']}[{box}]"
    if not touched:
        return head + m["space"] + m["rest"]
    comment = ""
    if facts:
        pairs = " ".join(f"{k}={_md_value(v)}" for k, v in facts.items())
        comment = f" <!-- k2tui {pairs} -->"
    elif had:
        comment = ""
    return f"{head}{m['space'] or ' '}{content}{comment}"


def _md_value(value: str) -> str:
    if re.fullmatch(r"[^\s\"<>]+", value) and "--" not in value:
        return value
    # `-->` would end the comment early
    return json.dumps(value, ensure_ascii=False).replace(">", "\\u003e").replace("--", "-\\u002d")


# ---- TOML


def _toml_tasks(text: str) -> tuple[list[Task], str]:
    try:
        raw = parse_toml(text)
    except ParseError as err:
        raise PlanError(err.message, err.line)
    items = raw.get("task", [])
    if not isinstance(items, list):
        raise PlanError("tasks are written as [[task]] tables")
    lines = [n for n, _ in _toml_blocks(text)]
    taken: set[str] = set()
    tasks: list[Task] = []
    for number, item in enumerate(cast("list[Any]", items)):
        line = lines[number] + 1 if len(lines) == len(cast("list[Any]", items)) else 0
        if not isinstance(item, dict):
            raise PlanError("tasks are written as [[task]] tables", line)
        tasks.append(_from_table(cast("dict[str, Any]", item), line, taken))
    return tasks, str(raw.get("title", ""))


def _toml_blocks(text: str) -> list[tuple[int, int]]:
    """(first line, line after the last) of each [[task]] table; text inside multi-line strings is not looked into."""
    heads: list[tuple[int, bool]] = []
    quote = ""
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if not quote and re.match(r"\s*\[", line):
            heads.append((number, bool(re.match(r"\s*\[\[\s*(task|\"task\"|'task')\s*\]\]", line))))
        quote = _open_quote(line, quote)
    heads.append((len(lines), False))
    return [(n, heads[i + 1][0]) for i, (n, is_task) in enumerate(heads[:-1]) if is_task]


_CLOSE = {'"""': r'(?:[^"\\]|\\.|"(?!""))*"""+', "'''": r"(?:[^']|'(?!''))*'''+"}
_SHORT = r'"(?:[^"\\]|\\.)*"|\'[^\']*\''


def _open_quote(line: str, quote: str) -> str:
    """The multi-line quote that is open after a line, given the one that was open before it ("" = none)."""
    at = 0
    while at < len(line):
        if quote:
            m = re.compile(_CLOSE[quote]).match(line, at)
            if m is None:
                return quote
            at, quote = m.end(), ""
        elif line[at] == "#":
            return ""
        elif line.startswith(('"""', "'''"), at):
            quote = line[at : at + 3]
            at += 3
        else:
            m = re.compile(_SHORT).match(line, at)
            at = m.end() if m else at + 1
    return quote


def _toml_value(key: str, value: str) -> str:
    if key == "depends":
        return "[" + ", ".join(json.dumps(v, ensure_ascii=False) for v in _names(value)) + "]"
    # JSON's escapes are TOML's, but for DEL
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


# ---- the doors


def parse(text: str, fmt: str) -> Plan:
    """Tasks of a plan's text. Raises PlanError with the line."""
    if text.startswith("\ufeff"):
        text = text[1:]
    if fmt == "markdown":
        title = next((m[1].strip() for m in re.finditer(r"(?m)^#\s+(.+?)\s*#*\s*$", text)), "")
        return Plan(fmt, tuple(_md_tasks(text)), title)
    if fmt == "toml":
        tasks, title = _toml_tasks(text)
        return Plan(fmt, tuple(tasks), title)
    if not text.strip():
        return Plan("json")
    value, items = _load_json(text)
    taken: set[str] = set()
    lines = _json_lines(text, len(items))
    tasks = [_from_table(item, lines[n], taken) for n, item in enumerate(items)]
    title = str(cast("dict[str, Any]", value).get("title") or "") if isinstance(value, dict) else ""
    return Plan("json", tuple(tasks), title)


def _index(plan: Plan, task_id: str) -> int:
    for n, task in enumerate(plan.tasks):
        if task.id == task_id:
            return n
    raise UsageError(
        f"no task {task_id!r} in the plan (any more)", "tasks: " + ", ".join(t.id for t in plan.tasks[:12])
    )


def checked(changes: Mapping[str, str]) -> dict[str, str]:
    """Changes with known fields and values. Raises UsageError."""
    out: dict[str, str] = {}
    for key, value in changes.items():
        if key not in FIELDS:
            raise UsageError(f"a task has no field {key!r}", "fields: " + ", ".join(FIELDS))
        text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", " ", str(value))
        if re.search(r"[\ud800-\udfff]", text):
            raise UsageError(f"the task's {key} is not UTF-8 text: {text[:80]!a}", "a plan is kept in UTF-8")
        if key in ("content", "note", "stage", "job_id", "depends", "reported"):
            text = " ".join(text.split("\n")).strip()
        if key == "status":
            word = _STATUS.get(text.strip().lower())
            if word is None or not text.strip():
                raise UsageError(
                    f"status {value!r} is unknown", "statuses: pending, in_progress, completed, cancelled"
                )
            text = word
        if key == "priority" and text not in PRIORITIES:
            raise UsageError(f"priority {value!r} is unknown", "priorities: high, medium, low")
        if key == "content" and not text:
            raise UsageError("a task needs words")
        out[key] = text
    return out


def set_task(text: str, fmt: str, task_id: str, changes: Mapping[str, str]) -> str:
    """The text with fields of one task changed. Raises UsageError (no such task or field), PlanError (broken text)."""
    new = checked(changes)
    plan = parse(text, fmt)
    at = _index(plan, task_id)
    if fmt == "markdown":
        lines = text.split("\n")
        number, m, end = _md_items(text)[at]
        lines[number] = _md_line(m, new) + end
        return _as_meant("\n".join(lines), fmt, *_wanted(plan, at, new))
    if fmt == "toml":
        return _as_meant(_toml_set(text, plan, at, new), fmt, *_wanted(plan, at, new))
    value, items = _load_json(text.removeprefix("\ufeff"))
    item = items[at]
    for key, word in new.items():
        name = "subject" if key == "content" and "content" not in item and "subject" in item else key
        name = "blockedBy" if key == "depends" and "blockedBy" in item else name
        name = "job" if key == "job_id" and "job" in item else name
        if name in ("note", "stage", "job_id", "reported") and not word:
            item.pop(name, None)
        else:
            item[name] = list(_names(word)) if key == "depends" else word
    return _as_meant(_dump_json(value, text), fmt, *_wanted(plan, at, new))


_BY_HAND = (
    "this plan is written in a form that only a hand can edit: the change would not read back as it was meant"
)

_Facts = dict[str, Any]


def _facts_of(task: Task) -> _Facts:
    return {"chain": task.chain, **{k: getattr(task, k) for k in FIELDS}}


def _wanted(plan: Plan, at: int, new: Mapping[str, str]) -> tuple[list[_Facts], int]:
    """What each task has to be after one of them was changed, and that one's line. New words may carry new links: those are free."""
    facts = [_facts_of(t) for t in plan.tasks]
    changed: _Facts = {k: _names(v) if k == "depends" else v for k, v in new.items()}
    facts[at] = changed if "content" in new else {**facts[at], **changed}
    return facts, plan.tasks[at].line


def _as_meant(out: str, fmt: str, wanted: Sequence[_Facts], line: int) -> str:
    """An edit's own output, read back before anybody writes it. Raises PlanError unless every task is what it has to be."""
    try:
        tasks = parse(out, fmt).tasks
    except PlanError:
        raise PlanError(_BY_HAND, line)
    if len(tasks) != len(wanted) or any(
        getattr(task, key) != value
        for task, facts in zip(tasks, wanted, strict=True)
        for key, value in facts.items()
    ):
        raise PlanError(_BY_HAND, line)
    return out


def _toml_list_line(text: str) -> int:
    """Line of a list of tasks that is written inline (task = [{...}]); 0 when there is none."""
    lines = enumerate(text.split("\n"), 1)
    return next((n for n, line in lines if re.match(r"\s*(task|\"task\"|'task')\s*=", line)), 0)


def _toml_tables(text: str, plan: Plan) -> list[tuple[int, int]]:
    """`_toml_blocks`, one for each task. Raises PlanError where tasks are written otherwise (task = [{...}])."""
    blocks = _toml_blocks(text)
    if len(blocks) != len(plan.tasks):
        raise PlanError(_BY_HAND, _toml_list_line(text))
    return blocks


def _toml_set(text: str, plan: Plan, at: int, new: Mapping[str, str]) -> str:
    lines = text.split("\n")
    first, last = _toml_tables(text, plan)[at]
    for key, word in new.items():
        wanted = f"{key} = {_toml_value(key, word)}"
        for n in range(first + 1, last):
            m = re.match(
                rf"(\s*){re.escape(key)}\s*=\s*(?P<v>(?:\"(?:[^\"\\]|\\.)*\"|'[^']*'|\[[^\]]*\]))(?P<tail>\s*(?:#.*)?\r?)$",
                lines[n],
            )
            if m:
                lines[n] = m[1] + wanted + m["tail"]
                break
        else:
            end = last
            while end > first + 1 and not lines[end - 1].strip():
                end -= 1
            lines.insert(end, wanted)
            last += 1
    return "\n".join(lines)


def add_task(text: str, fmt: str, task: Task) -> tuple[str, str]:
    """The text with one more task at the end (of the list), and the id that it got."""
    fields = checked({"content": task.content, "priority": task.priority, "status": str(task.status)})
    plan = parse(text, fmt)
    taken = {t.id for t in plan.tasks}
    if task.id and task.id in taken:
        raise UsageError(f"there is a task {task.id!r} already")
    extra = {k: v for k, v in (("note", task.note), ("stage", task.stage), ("job_id", task.job_id)) if v}
    if task.depends:
        extra["depends"] = ",".join(task.depends)
    given = {**fields, **extra, **({"depends": task.depends} if task.depends else {})}
    wanted: list[_Facts] = [*(_facts_of(t) for t in plan.tasks), given]
    if fmt == "markdown":
        items = _md_items(text)
        ending = items[-1][2] if items else ("\r" if "\r\n" in text else "")
        facts = {"id": task.id, **({"priority": task.priority} if task.priority != "medium" else {}), **extra}
        pairs = " ".join(f"{'job' if k == 'job_id' else k}={_md_value(v)}" for k, v in facts.items() if v)
        bullet = next(
            (m["bullet"] for _, m, _ in items if not m["indent"] and not m["bullet"][0].isdigit()), "-"
        )
        line = f"{bullet} [{_BOX_OF[fields['status']]}] {fields['content']}" + (
            f" <!-- k2tui {pairs} -->" if pairs else ""
        )
        lines = text.split("\n")
        if items:
            lines.insert(items[-1][0] + 1, line + ending)
            if items[-1][0] + 1 == len(lines) - 1 and ending:
                lines[-2] = lines[-2].removesuffix("\r") + "\r"
        elif text.strip():
            lines = [*(text.rstrip("\n") + "\n").split("\n"), line + ending, ""]
        else:
            lines = [line, ""]
        out = _as_meant("\n".join(lines), fmt, wanted, 0)
        return out, parse(out, fmt).tasks[-1].id
    task_id = task.id or task_id_of(fields["content"], taken)
    if fmt == "toml":
        _toml_tables(text, plan)
        block = ["[[task]]", f"id = {_toml_value('id', task_id)}"]
        block += [f"{k} = {_toml_value(k, v)}" for k, v in {**fields, **extra}.items()]
        head = text if not text or text.endswith("\n") else text + "\n"
        out = head + ("\n" if head.strip() else "") + "\n".join(block) + "\n"
        return _as_meant(out, fmt, wanted, _toml_list_line(text)), task_id
    value: Any = _load_json(text.removeprefix("\ufeff"))[0] if text.strip() else cast("list[Any]", [])
    item: dict[str, Any] = {"id": task_id, **fields, **extra}
    if task.depends:
        item["depends"] = list(task.depends)
    target: Any = value
    if isinstance(value, dict):
        table = cast("dict[str, Any]", value)
        key = next((k for k in ("todos", "tasks", "items") if k in table), "")
        if not key:
            raise UsageError("this plan holds one task only", "add the task to a list")
        target = table[key]
    cast("list[Any]", target).append(item)
    return _as_meant(_dump_json(value, text), fmt, wanted, 0), task_id


def move_task(text: str, fmt: str, task_id: str, place: int) -> str:
    """The text with one task (and, in Markdown, what is nested below it) moved so that it is number `place`, from 0."""
    plan = parse(text, fmt)
    out = _moved(text, fmt, plan, task_id, place)
    try:
        kept = parse(out, fmt).tasks
    except PlanError:
        kept = ()
    if sorted(repr(_facts_of(t)) for t in kept) != sorted(repr(_facts_of(t)) for t in plan.tasks):
        raise PlanError(_BY_HAND, plan.tasks[_index(plan, task_id)].line)
    return out


def _moved(text: str, fmt: str, plan: Plan, task_id: str, place: int) -> str:
    at = _index(plan, task_id)
    count = len(plan.tasks)
    place = max(0, min(count - 1, place))
    if fmt == "json":
        value, items = _load_json(text.removeprefix("\ufeff"))
        target: Any = value
        if isinstance(value, dict):
            table = cast("dict[str, Any]", value)
            target = next((table[k] for k in ("todos", "tasks", "items") if k in table), items)
        rows = cast("list[Any]", target)
        rows.insert(place, rows.pop(at))
        return _dump_json(value, text)
    lines = text.split("\n")
    spans = _md_spans(plan.tasks, lines) if fmt == "markdown" else _toml_tables(text, plan)
    first, last = spans[at]
    if fmt == "markdown":
        # only among its brothers: below the same parent
        inside = [n for n, t in enumerate(plan.tasks) if first < t.line - 1 < last]
        brothers = [
            n for n, t in enumerate(plan.tasks) if t.depth == plan.tasks[at].depth and n not in inside
        ]
        place = min(brothers, key=lambda n: (abs(n - place), n))
        if place == at:
            return text
    block = lines[first:last]
    goal_first, goal_last = spans[place]
    is_tail = bool(block) and last == len(lines)
    rest = lines[:first] + lines[last:]
    target_line = goal_first if place < at else goal_last - len(block)
    if fmt == "toml":
        while block and not block[-1].strip():
            block.pop()
        while rest and not rest[-1].strip():
            rest.pop()
        target_line = min(target_line, len(rest))
        before, behind = rest[:target_line], rest[target_line:]
        while before and not before[-1].strip():
            before.pop()
        while behind and not behind[0].strip():
            behind.pop(0)
        parts = [*before, *([""] if before else []), *block, *([""] if behind else []), *behind]
        return "\n".join(parts) + "\n"
    out = rest[:target_line] + block + rest[target_line:]
    return "\n".join(out) if not is_tail or not text.endswith("\n") else "\n".join(out).rstrip("\n") + "\n"


def _md_spans(tasks: Sequence[Task], lines: Sequence[str]) -> list[tuple[int, int]]:
    """Lines of each task with all that is nested below it (deeper tasks and indented text)."""
    spans: list[tuple[int, int]] = []
    for task in tasks:
        first = task.line - 1
        width = len(lines[first]) - len(lines[first].lstrip())
        last = first + 1
        while (
            last < len(lines) and lines[last].strip() and len(lines[last]) - len(lines[last].lstrip()) > width
        ):
            last += 1
        spans.append((first, last))
    return spans


_NEEDS = {
    "bench": ("serve",),
    "extract": ("prepare",),
    "train": ("extract",),
    "evaluate": ("train",),
    "compare": ("bench",),
}


def default_plan(
    stages: Sequence[tuple[str, str]], depends: Mapping[str, Sequence[str]] | None = None, *, chain: str = ""
) -> str:
    """A JSON todo list made of the pipeline's (name, title) pairs; each item carries its `stage` and what it depends on.

    depends: names that a name comes after (default: what the stages of k2tui need). chain: the names are steps of this chain,
    and only jobs that it started for them count.
    """
    after = _NEEDS if depends is None else depends
    names = {name for name, _ in stages}
    items: list[dict[str, Any]] = []
    for name, title in stages:
        item: dict[str, Any] = {
            "id": name,
            "content": title,
            "status": "pending",
            "priority": "medium",
            "stage": name,
        }
        if chain:
            item["chain"] = chain
        needs = [n for n in after.get(name, ()) if n in names]
        if needs:
            item["depends"] = needs
        items.append(item)
    return json.dumps(items, ensure_ascii=False, indent=2) + "\n"
