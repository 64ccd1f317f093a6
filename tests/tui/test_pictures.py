"""A few screens as pictures. A wanted change: pytest tests/tui/test_pictures.py --snapshot-update, and look at the SVG files."""

from __future__ import annotations

import sys
from typing import Any

import fake
import pytest
from conftest import text_of

from k2tui.tui.settings import Settings

pytestmark = pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="pictures are made with one Python")

PICTURES = {
    "overview_loading_80x24": ("loading", (80, 24), (), Settings()),
    "overview_serving_120x40": ("serving", (120, 40), (), Settings()),
    "server_failed_120x40": ("failed", (120, 40), ("6",), Settings()),
    "jobs_and_log_80x24": ("loading", (80, 24), ("3",), Settings()),
    "board_light_120x40": ("loading", (120, 40), ("4",), Settings(theme="k2-light")),
    "start_server_80x24": ("loading", (80, 24), ("s",), Settings()),
    "ascii_80x24": ("loading", (80, 24), ("4",), Settings(ascii=True)),
    "too_small_60x10": ("loading", (60, 10), (), Settings()),
}
WORDS = {"s": "mem-fraction-static", "3": "following", "4": "stage", "6": "proof"}


@pytest.mark.parametrize("name", sorted(PICTURES))
def test_picture(name: str, make_app: Any, snap_compare: Any) -> None:
    kind, size, keys, settings = PICTURES[name]
    app = make_app(kind, settings=settings)
    for second in range(60):
        app.history.add(fake.scene(kind, fake.T0 - 60 + second, 64.0 + second))

    async def before(pilot: Any) -> None:
        words = ["Kimi" if kind != "serving" else "kimi"]
        for key in ("", *keys):
            if key:
                await pilot.press(key)
                words = [WORDS[key]]
            for _ in range(100):
                if all(w in text_of(app) for w in words) or (size[1] < 24 and "LOADING" in text_of(app)):
                    break
                await pilot.pause(0.05)
        await pilot.pause(0.7)
        app.draw_now()
        await pilot.pause(0.2)

    assert snap_compare(app, terminal_size=size, run_before=before)
