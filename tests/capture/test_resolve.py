"""What the launcher's hooks hang on: an import that fails inside the engine says what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from k2tui.capture.plugin import _resolve


def test_a_class_is_found_and_a_missing_part_of_the_engine_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tmp_path / "an_engine" / "inner"
    engine.mkdir(parents=True)
    (tmp_path / "an_engine" / "__init__.py").write_text("")
    (engine / "__init__.py").write_text("class Runner:\n    def go(self): ...\n")
    (engine / "broken.py").write_text("import no_such_kernel.part\n\nclass Runner: ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert _resolve("an_engine.inner.Runner").__name__ == "Runner"
    with pytest.raises(ModuleNotFoundError, match="no_such_kernel"):
        _resolve("an_engine.inner.broken.Runner")
    with pytest.raises(AttributeError, match="Walker"):
        _resolve("an_engine.inner.Walker")
    with pytest.raises(ModuleNotFoundError, match="not_an_engine"):
        _resolve("not_an_engine.inner")
