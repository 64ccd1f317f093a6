#!/usr/bin/env python3
"""Makes the pictures of the docs with the program itself: a real tiny server, real jobs, GPUs played from a recording of H200s.

    python docs/images/make.py        (about two minutes; writes docs/images/*.svg)
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PORT = os.environ.get("K2TUI_PICTURES_PORT", "30470")


def k2(*argv: str) -> None:
    subprocess.run([sys.executable, "-m", "k2tui", *argv], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


async def shoot() -> None:
    from k2tui import config
    from k2tui.monitor import Monitor
    from k2tui.tui.app import Dashboard
    from k2tui.tui.settings import Settings
    from k2tui.tui.themes import make
    from k2tui.verbs.dashboard import themes

    loaded = config.load()
    app = Dashboard(Monitor(loaded, is_demo=True), Settings(), themes=[make(*table) for table in themes()])
    async with app.run_test(size=(120, 40)) as pilot:

        async def until(words: str, seconds: float = 60) -> None:
            for _ in range(int(seconds / 0.1)):
                snap = app.backend.snapshot()
                load = snap.servers[0].load if snap.servers else None
                if load is not None and ((words == "half" and load.target is not None and load.target.done >= 38) or str(load.state) == words):
                    break
                await pilot.pause(0.1)
            await pilot.pause(0.4)
            app.draw_now()
            await pilot.pause(0.3)

        def save(name: str) -> None:
            (HERE / f"{name}.svg").write_text(app.export_screenshot(title="k2tui"))
            print(f"docs/images/{name}.svg")

        await until("half")
        save("overview")
        await until("ready")
        for key, name in (("2", "gpus"), ("6", "server")):
            await pilot.press(key)
            await pilot.pause(1.5)
            save(name)
        await pilot.resize_terminal(150, 40)
        await pilot.press("5", "v")  # the sweep, beside the trade-off
        await pilot.pause(1.5)
        save("benchmarks")


def sweeps() -> None:
    """Two settings of the tiny server swept over concurrency; the first is the baseline."""
    for label, more in (("4 at once", ("--arg=--max-running-requests", "--arg=4")), ("32 at once", ())):
        k2("up", "tiny", "--port", PORT, *more)
        k2("bench", "sweep", "--sweep", "32", "--repeats", "3", "--label", label, "--url", f"http://127.0.0.1:{PORT}")
        k2("down")
    k2("bench", "baseline", "4 at once")


def main() -> None:
    if "K2TUI_HOME" not in os.environ or not os.environ.get("K2TUI_PICTURES"):
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([sys.executable, str(ROOT / "tests/gpu/fakenvml/make.py"), folder, "--gpus", "8", "--busy"], check=True, stdout=subprocess.DEVNULL)
            env = {**os.environ, "K2TUI_HOME": f"{folder}/home", "K2TUI_PICTURES": "1", "LD_LIBRARY_PATH": folder, "K2TUI_FAKE_NVML": f"{folder}/scene.txt"}
            sys.exit(subprocess.run([sys.executable, __file__], env=env, check=False).returncode)
    try:
        sweeps()
        k2("up", "tiny", "--port", PORT, "--no-wait", "--arg=--load-delay-s", "--arg=0.15")
        asyncio.run(shoot())
    finally:
        k2("down")


if __name__ == "__main__":
    main()
