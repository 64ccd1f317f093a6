"""The fake NVML library for tests: compiled once, loaded by the real nvidia-ml-py, its scene changed while it runs."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def _load_make() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fakenvml_make", HERE / "fakenvml" / "make.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["fakenvml_make"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def make() -> ModuleType:
    return _load_make()


@pytest.fixture(scope="session")
def library(make: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not any(shutil.which(name) for name in ("gcc", "cc", "clang")):
        pytest.skip("no C compiler to build the fake NVML library")
    return make.compile_library(tmp_path_factory.mktemp("fakenvml"))


class Fake:
    """The library inside this process. show(scene) changes what it says."""

    def __init__(self, make: ModuleType, scene_path: Path) -> None:
        self.make = make
        self.scene_path = scene_path

    def show(self, scene: object) -> None:
        scene.write(self.scene_path)  # type: ignore[attr-defined]
        time.sleep(0.025)  # the library looks at the file at most every 20 ms


@pytest.fixture
def fake(make: ModuleType, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    import pynvml

    scene = tmp_path / "scene.txt"
    monkeypatch.setenv("K2TUI_FAKE_NVML", str(scene))
    loaded = ctypes.CDLL(str(library))
    old = pynvml.nvmlLib
    pynvml.nvmlLib = loaded
    pynvml._nvmlGetFunctionPointer_cache.clear()
    yield Fake(make, scene)
    while loaded.nvmlShutdown() == 0:
        pass
    pynvml.nvmlLib = old
    pynvml._nvmlGetFunctionPointer_cache.clear()


class FakeCli:
    """k2tui and other programs in processes of their own, with the fake library on their path."""

    def __init__(self, make: ModuleType, folder: Path, home: Path) -> None:
        self.make = make
        self.scene_path = folder / "scene.txt"
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("K2TUI_", "LD_LIBRARY"))},
            "LD_LIBRARY_PATH": str(folder),
            "K2TUI_FAKE_NVML": str(self.scene_path),
            "K2TUI_HOME": str(home),
            "PYTHONPATH": str(ROOT),
        }

    def run(self, *argv: str, timeout_s: float = 30.0, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "k2tui", *argv],
            env={**self.env, **env},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )


@pytest.fixture
def cli(make: ModuleType, library: Path, tmp_path: Path) -> FakeCli:
    folder = tmp_path / "lib"
    folder.mkdir()
    shutil.copy(library, folder / library.name)
    return FakeCli(make, folder, tmp_path / "home")
