"""The house's walls: what each room may import, and what a CLI answer may load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("textual", "rich", "torch", "transformers", "sglang", "numpy", "httpx")


def test_import_contracts_hold() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "importlinter.cli"] if False else [str(Path(sys.executable).with_name("lint-imports"))],
        cwd=ROOT, capture_output=True, text=True,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]


@pytest.mark.parametrize("argv", [["--version"], ["--help"], ["status", "--json"], ["jobs", "list", "--json"], ["bench", "list", "--json"], ["board", "list", "--json"]])
def test_cli_answers_load_nothing_heavy(argv: list[str]) -> None:
    code = (
        "import sys\nfrom k2tui.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        f"heavy = [m for m in {HEAVY!r} if m in sys.modules]\n"
        "print('HEAVY', heavy, file=sys.stderr)\n"
    )
    run = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, cwd=ROOT)
    assert "HEAVY []" in run.stderr, run.stderr


def test_every_verb_has_its_face() -> None:
    from k2tui.cli import load_verb, verb_names

    for name in verb_names():
        module = load_verb(name)
        assert isinstance(module.HELP, str) and module.HELP, name
        assert callable(module.add_arguments) and callable(module.run), name


def test_every_engine_and_stage_has_its_face() -> None:
    from k2tui import engines, stages

    for name in engines.names():
        assert engines.get(name).name == name
    orders = [stages.get(name).order for name in stages.names()]
    assert orders == sorted(orders)
    for name in stages.names():
        assert stages.get(name).name == name


def test_readme_test_command_is_what_ci_runs() -> None:
    readme = (ROOT / "README.md").read_text()
    after = readme.split("<!-- test command -->", 1)[1]
    command = next(line for line in after.splitlines() if line.startswith("python3"))
    assert "pytest" in command and "[local,dev]" in command
    assert "README.md" in (ROOT / ".ci" / "run").read_text()


def test_every_verb_stands_in_the_docs() -> None:
    from k2tui.cli import verb_names

    text = (ROOT / "docs" / "cli.md").read_text()
    missing = [name for name in verb_names() if f"`{name}" not in text and f"k2tui {name}" not in text]
    assert missing == []


@pytest.mark.parametrize("command", ["status", "dashboard --plain", "diagnose -"])
@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_no_error(command: str, closed: str) -> None:
    run = subprocess.run(["bash", "-c", f"'{sys.executable}' -m k2tui {command} {closed}"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert run.returncode == (4 if "diagnose" in command else 0), run.stderr
    assert "Traceback" not in run.stderr
