from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k2tui.core import board_plan
from k2tui.core.board import Task, TaskStatus
from k2tui.core.board_plan import PlanError, add_task, default_plan, move_task, parse, set_task
from k2tui.errors import UsageError

MARKDOWN = """# The plan

Some words, *kept*.\r
- [ ] first
  1. [x] nested <!-- k2tui id=n stage=bench priority=high -->
     text below it
\t* [/] deeper
- [-] dropped   \n
> quote

```
- [ ] no task
```
+ [X] last [stage:train] [after:n]
no end of line"""

TOML = '''title = "Mine" # kept

# a comment
[[task]]
id = "a" # the first
content = "A"
note = """
many
lines [[task]]
"""

[[task]]
id = 'b'
content = 'B'
status = "done"
depends = ["a"]
[other]
x = 1
'''

TODOS = '{"todos": [{"id": "1", "content": "a", "status": "pending", "priority": "high", "extra": {"k": [1]}}], "version": 3}'


def ids(text: str, fmt: str) -> list[str]:
    return [t.id for t in parse(text, fmt).tasks]


def test_markdown_is_read_with_nesting_links_and_fences() -> None:
    plan = parse(MARKDOWN, "markdown")
    assert plan.title == "The plan"
    assert [(t.content, str(t.status), t.depth) for t in plan.tasks] == [
        ("first", "pending", 0),
        ("nested", "completed", 1),
        ("deeper", "in_progress", 2),
        ("dropped", "cancelled", 0),
        ("last [stage:train] [after:n]", "completed", 0),
    ]
    assert plan.tasks[1].stage == "bench" and plan.tasks[1].priority == "high"
    assert plan.tasks[4].stage == "train" and plan.tasks[4].depends == ("n",)
    assert [t.line for t in plan.tasks] == [4, 5, 7, 8, 15]


def test_a_markdown_edit_changes_one_line_only() -> None:
    for task in parse(MARKDOWN, "markdown").tasks:
        out = set_task(
            MARKDOWN,
            "markdown",
            task.id,
            {"status": "completed", "note": "so --> what", "content": "new words"},
        )
        before, after = MARKDOWN.split("\n"), out.split("\n")
        assert [n for n, (a, b) in enumerate(zip(before, after, strict=True), 1) if a != b] == [task.line]
        now = next(t for t in parse(out, "markdown").tasks if t.line == task.line)
        assert (now.content, now.status, now.note) == ("new words", TaskStatus.COMPLETED, "so --> what")
    same = set_task(MARKDOWN, "markdown", "n", {"status": "completed"})
    assert same == MARKDOWN


def test_json_keeps_what_it_does_not_know() -> None:
    out = set_task(TODOS, "json", "1", {"status": "in_progress", "note": "n"})
    assert json.loads(out) == {
        "todos": [
            {
                "id": "1",
                "content": "a",
                "status": "in_progress",
                "priority": "high",
                "extra": {"k": [1]},
                "note": "n",
            }
        ],
        "version": 3,
    }
    assert "\n" not in out, "one line stays one line"
    listed = json.dumps([{"content": "x", "status": "pending", "activeForm": "Doing x"}], indent=4) + "\n"
    task = parse(listed, "json").tasks[0]
    out = set_task(listed, "json", task.id, {"status": "completed"})
    assert out == listed.replace('"pending"', '"completed"')


def test_toml_keeps_comments_and_other_tables() -> None:
    out = set_task(TOML, "toml", "b", {"status": "pending", "priority": "high", "depends": "a"})
    assert out == TOML.replace('status = "done"', 'status = "pending"').replace(
        'depends = ["a"]\n', 'depends = ["a"]\npriority = "high"\n'
    )
    with pytest.raises(PlanError, match="only a hand"):
        set_task(TOML, "toml", "a", {"note": "one line"})


@pytest.mark.parametrize(
    ("text", "fmt", "line", "words"),
    [
        ("[\n{\n", "json", 3, "not valid JSON"),
        ('[{"content": "a"},\n {"content": "b", "status": "maybe"}]', "json", 2, "status 'maybe'"),
        ('[{"id": 1, "content": "a"},\n\n {"id": 1, "content": "b"}]', "json", 3, "two tasks"),
        ('"x"', "json", 1, "a plan is a JSON list"),
        ("[1]", "json", 0, "not an object"),
        ("- [ ] a <!-- k2tui id=x -->\n- [ ] b <!-- k2tui id=x -->", "markdown", 2, "two tasks"),
        ("a = 1\nb = = 2", "toml", 2, "not valid TOML"),
        ('[[task]]\nid="a"\ncontent="a"\nstatus="?"', "toml", 1, "status"),
    ],
)
def test_a_broken_plan_is_told_with_its_line(text: str, fmt: str, line: int, words: str) -> None:
    with pytest.raises(PlanError, match=words) as caught:
        parse(text, fmt)
    assert caught.value.line == line


def test_a_plan_nested_beyond_reason_is_an_error_not_a_crash() -> None:
    with pytest.raises(PlanError):
        parse("[" * 100000, "json")


def test_wrong_changes_are_refused() -> None:
    for changes in ({"status": "maybe"}, {"priority": "top"}, {"colour": "red"}, {"content": "  "}):
        with pytest.raises(UsageError):
            set_task(TODOS, "json", "1", changes)
    with pytest.raises(UsageError, match="no task 'x'"):
        set_task(TODOS, "json", "x", {"status": "pending"})


def test_the_default_plan() -> None:
    text = default_plan(
        [("serve", "Start the server"), ("bench", "Benchmark"), ("extract", "Extract hidden states")]
    )
    tasks = parse(text, "json").tasks
    assert [(t.id, t.stage, t.depends) for t in tasks] == [
        ("serve", "serve", ()),
        ("bench", "bench", ("serve",)),
        ("extract", "extract", ()),
    ]


def test_formats_by_name_and_content() -> None:
    assert [
        board_plan.format_of(*a)
        for a in (("a.MD",), ("a.json",), ("a.toml",), ("todo", "[{}]"), ("todo", "- [ ] a"))
    ] == [
        "markdown",
        "json",
        "toml",
        "json",
        "markdown",
    ]


# ---- laws

word = st.text("abc é\"'\\#[]<>-!{}=|\u2028", min_size=1, max_size=12).filter(lambda s: s.strip())
status = st.sampled_from([str(s) for s in TaskStatus])
bullet = st.sampled_from(["- ", "* ", "+ ", "1. ", "2) "])


@st.composite
def markdown(draw: Any) -> str:
    lines: list[str] = []
    for _ in range(draw(st.integers(1, 8))):
        kind = draw(st.integers(0, 3))
        if kind == 0:
            lines.append(draw(st.text("ab *#`~>\t", max_size=10)))
        else:
            box = draw(st.sampled_from([" ", "x", "X", "/", "-"]))
            comment = draw(st.sampled_from(["", " <!-- other -->", ' <!-- k2tui note="x y" -->']))
            lines.append(
                "  " * draw(st.integers(0, 2))
                + draw(bullet)
                + f"[{box}] "
                + draw(word).replace("\u2028", " ")
                + comment
            )
    return draw(st.sampled_from(["\n", "\r\n"])).join(lines) + draw(st.sampled_from(["", "\n"]))


@st.composite
def todos(draw: Any) -> str:
    items = [
        {"content": draw(word), "status": draw(status), "priority": "low", "x": draw(st.integers())}
        for _ in range(draw(st.integers(1, 6)))
    ]
    for n, item in enumerate(items):
        if draw(st.booleans()):
            item["id"] = f"i{n}"
    value: Any = {"todos": items} if draw(st.booleans()) else items
    return json.dumps(value, indent=draw(st.sampled_from([None, 2, "\t"])), ensure_ascii=draw(st.booleans()))


@st.composite
def toml(draw: Any) -> str:
    text = draw(st.sampled_from(["", 'title = "t"\n', "# c\n\n"]))
    for n in range(draw(st.integers(1, 5))):
        text += f'[[task]] # {n}\nid = "i{n}"\ncontent = {board_plan._toml_value("content", draw(word))}\n'
        text += draw(st.sampled_from(["", "\n", 'status = "done" # yes\n', "unknown = [1,\n 2]\n"]))
    return text


plans = st.one_of(
    st.tuples(markdown(), st.just("markdown")),
    st.tuples(todos(), st.just("json")),
    st.tuples(toml(), st.just("toml")),
)


@given(plans, st.data())
def test_an_edit_changes_what_it_names_and_nothing_else(plan: tuple[str, str], data: st.DataObject) -> None:
    text, fmt = plan
    tasks = parse(text, fmt).tasks
    if not tasks:
        return
    at = data.draw(st.integers(0, len(tasks) - 1))
    changes = data.draw(
        st.fixed_dictionaries(
            {},
            optional={
                "status": status,
                "priority": st.sampled_from(["high", "low"]),
                "note": word,
                "stage": st.just("bench"),
            },
        )
    )
    new = parse(set_task(text, fmt, tasks[at].id, changes), fmt).tasks
    assert len(new) == len(tasks)
    for n, (old, now) in enumerate(zip(tasks, new, strict=True)):
        assert now.content == old.content and now.id == old.id
        if n != at:
            assert (now.status, now.priority, now.note, now.stage) == (
                old.status,
                old.priority,
                old.note,
                old.stage,
            )
        else:
            assert str(now.status) == changes.get("status", str(old.status))
            assert (
                now.note == " ".join(board_plan.checked({"note": changes["note"]})["note"].split("\n"))
                if "note" in changes
                else True
            )
            assert now.priority == changes.get("priority", old.priority)


@given(plans)
def test_setting_a_status_to_what_it_is_changes_no_byte_of_markdown_and_toml(plan: tuple[str, str]) -> None:
    text, fmt = plan
    for task in parse(text, fmt).tasks:
        out = set_task(text, fmt, task.id, {"status": str(task.status)})
        if fmt == "markdown":
            assert out == text
        else:
            assert parse(out, fmt).tasks[0].content == parse(text, fmt).tasks[0].content


@given(plans, word)
def test_an_added_task_is_there_and_the_others_stay(plan: tuple[str, str], content: str) -> None:
    text, fmt = plan
    before = parse(text, fmt).tasks
    out, made = add_task(text, fmt, Task("", content, priority="high"))
    after = parse(out, fmt).tasks
    assert [t.content for t in before] == [t.content for t in after[:-1]] or sorted(
        t.content for t in before
    ) == sorted(t.content for t in after if t.id != made)
    new = next(t for t in after if t.id == made)
    assert new.content == board_plan.checked({"content": content})["content"] and new.priority == "high"


@given(plans, st.data())
def test_moving_keeps_every_task_and_every_line(plan: tuple[str, str], data: st.DataObject) -> None:
    text, fmt = plan
    tasks = parse(text, fmt).tasks
    if not tasks:
        return
    at = data.draw(st.integers(0, len(tasks) - 1))
    place = data.draw(st.integers(0, len(tasks) - 1))
    out = move_task(text, fmt, tasks[at].id, place)
    after = parse(out, fmt).tasks
    assert sorted((t.content, str(t.status), t.note) for t in after) == sorted(
        (t.content, str(t.status), t.note) for t in tasks
    )
    if fmt == "markdown":
        assert sorted(line.rstrip("\r") for line in out.split("\n") if line.strip()) == sorted(
            line.rstrip("\r") for line in text.split("\n") if line.strip()
        )
    if fmt == "json":
        assert after[place].content == tasks[at].content


@pytest.mark.parametrize("word", ["'''", '\\"\\"\\"', "# no comment", "[[task]]"])
def test_quotes_inside_a_string_hide_no_task(word: str) -> None:
    text = "".join(f'[[task]]\nid = "i{n}"\ncontent = "{word if n == 1 else n}"\n' for n in range(3))
    moved = parse(move_task(text, "toml", "i2", 0), "toml").tasks
    assert [t.id for t in moved] == ["i2", "i0", "i1"]


def test_multi_line_strings_are_not_looked_into() -> None:
    text = '[[task]]\nid = "a"\ncontent = "1"\nnote = """x\n[[task]]\n\\"""y"""\n[[task]]\nid = "b"\ncontent = "2"\nnote = \'\'\'\n[[task]]\n\'\'\'\n'
    assert [t.id for t in parse(move_task(text, "toml", "b", 0), "toml").tasks] == ["b", "a"]


@pytest.mark.parametrize(
    "text",
    [
        'title = "x"\ntask = [{id="a",content="x"},{id="b",content="y"}]\n',
        'title = "x"\ntask = [\n  {id="a",content="x"},\n  {id="b",content="y"},\n]\n',
        "\ntask = []\n",
    ],
)
def test_a_toml_plan_in_inline_form_is_read_and_left_to_a_hand(text: str) -> None:
    ids = [t.id for t in parse(text, "toml").tasks]
    edits: list[Callable[[], object]] = [lambda: add_task(text, "toml", Task("", "new"))]
    if ids:
        edits += [
            lambda: set_task(text, "toml", "a", {"status": "in_progress"}),
            lambda: move_task(text, "toml", "a", 1),
        ]
    for edit in edits:
        with pytest.raises(PlanError, match="only a hand can edit") as told:
            edit()
        assert told.value.line == 2


@pytest.mark.parametrize(
    ("fmt", "text"), [("markdown", "- [ ] a\n"), ("toml", '[[task]]\ncontent = "a"\n'), ("json", "[]")]
)
def test_what_an_edit_writes_is_read_back_first(fmt: str, text: str) -> None:
    words = "b <!-- k2tui id=z -->"
    if fmt == "markdown":  # a comment of ours inside the words would be taken for facts
        with pytest.raises(PlanError, match="only a hand can edit"):
            add_task(text, fmt, Task("", words))
    else:
        out, made = add_task(text, fmt, Task("", words))
        assert {t.id: t.content for t in parse(out, fmt).tasks}[made] == words
