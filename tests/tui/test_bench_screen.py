"""The benchmark screen: list and views of the selected run, order, filter, the run that others are measured against."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from conftest import text_of
from test_app import shows, until

from k2tui.core.bench import BenchRow
from k2tui.core.snapshot import Snapshot
from k2tui.errors import K2Error
from k2tui.tui import panels
from k2tui.tui.lines import ASCII, UNICODE
from k2tui.tui.view import BenchPick, View


def rows() -> tuple[BenchRow, ...]:
    out = []
    for label, speed in (("base", 1.0), ("tuned", 1.3)):
        for k, c in enumerate((1, 2, 4, 8, 16)):
            tok = min(c, 4) * 60.0 * speed
            out.append(
                BenchRow(
                    f"{label}-{c}", 1e9 + 100 * speed + k, label, "sglang", "0.5.23", "K2", "random in 64 out 32", c, num_requests=8,
                    completed=8, output_throughput=tok, tok_s_user=tok / c, ttft_p50_ms=50, ttft_p99_ms=60, tpot_p50_ms=1000 * c / tok,
                    sweep=label, workload_fp="w", is_baseline=label == "base", stamps="kernel", count="server",
                    output_throughput_ci=(tok * 0.99, tok * 1.01), tok_s_user_ci=(tok / c * 0.99, tok / c * 1.01),
                )
            )  # fmt: skip
    return tuple(reversed(out))


def drawn(name: str, pick: BenchPick, width: int = 120, glyphs: Any = UNICODE) -> str:
    picture = panels.get(name).draw(
        View(Snapshot(0.0, bench=rows()), 1e9, glyphs=glyphs, bench=pick), width, 16
    )
    lines = [picture.header or (), *(r.line for r in picture.rows)]
    return "\n".join("".join(s.text for s in line) for line in lines)


def test_settings_say_how_much_faster_and_that_it_is_real() -> None:
    text = drawn("benchsettings", BenchPick("tuned-1"))
    assert "+30.0%" in text and "faster" in text and "baseline" in text
    assert [line.split()[1] for line in text.splitlines()[1:3]] == ["tuned", "base"]


def test_sweep_has_knee_bars_and_deltas() -> None:
    text = drawn("benchsweep", BenchPick("tuned-4"))
    knee = next(line for line in text.splitlines() if "◆" in line)
    assert knee.split()[1] == "4" and "+30.0%" in knee and "█" in knee
    assert drawn("benchsweep", BenchPick("tuned-4"), glyphs=ASCII).isascii()


def test_chosen_base_replaces_the_stored_one() -> None:
    text = drawn("benchsettings", BenchPick("base-1", base_id="tuned-1"))
    assert "-23.1%" in text and "slower" in text


def test_trade_off_is_drawn_from_zero() -> None:
    text = drawn("benchpareto", BenchPick("tuned-4"), 60)
    assert "312" in text and "78" in text and any("⠀" < c <= "⣿" for c in text)


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
async def test_screen_walks_through_its_views(make_app: Any, size: tuple[int, int]) -> None:
    async with make_app("serving").run_test(size=size) as pilot:
        await pilot.press("5")
        await shows(pilot, "Benchmarks", "eagle3", "out tok/s")
        seen: set[str] = set()
        for _ in range(12):  # the views come round; a picture may be looked at while it is being drawn
            await pilot.pause(0.15)
            text = text_of(pilot.app)
            seen |= {
                word for word in ("Settings", "One stream", "Sweep:", "tok/s/user →", "Run:") if word in text
            }
            if {"Sweep:", "tok/s/user →", "Run:"} <= seen and seen & {"Settings", "One stream"}:
                break
            await pilot.press("v")
            await until(pilot, lambda before=text: text_of(pilot.app) != before)
        assert {"Sweep:", "tok/s/user →", "Run:"} <= seen and seen & {"Settings", "One stream"}
        await pilot.press("o")
        await shows(pilot, "by out tok/s")
        await pilot.press("down", "B")
        await shows(pilot, "●")
        assert pilot.app.screen._pick.base_id


def test_trust_is_wrapped_and_not_cut_at_80_columns() -> None:
    row = replace(
        rows()[0],
        lag_p99_ms=0.41,
        client_cpu=0.12,
        coalesced=0.001,
        achieved=1.0,
        short_outputs=2,
        host_steal=0.01,
    )
    for name in ("bench", "benchsweep", "benchrun"):
        picture = panels.get(name).draw(
            View(Snapshot(0.0, bench=(row,)), 1e9, bench=BenchPick(row.run_id)), 78, 20
        )
        text = " ".join("".join(s.text for s in r.line) for r in picture.rows)
        for word in (
            "count=server",
            "stamps=kernel",
            "lag p99",
            "client CPU 12%",
            "achieved 100%",
            "short 2",
            "steal 1.0%",
        ):
            assert word in text, (name, word)
        assert all(sum(len(s.text) for s in r.line) <= 78 for r in picture.rows)


async def typed(pilot: Any, text: str) -> None:
    for char in text:
        await pilot.press({" ": "space", "#": "number_sign"}.get(char, char))


async def test_runs_are_labelled_kept_and_removed_from_the_screen(make_app: Any) -> None:
    app = make_app("serving")
    backend = app.backend
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("5")
        await shows(pilot, "Benchmarks", "out tok/s")
        first = app.screen.selected_key("bench")
        row = next(r for r in app.snap.bench if r.run_id == first)
        await pilot.press("e")
        await shows(pilot, "label (#word: tag)")
        await pilot.press("ctrl+u")
        await typed(pilot, "night #july")
        await pilot.press("enter")
        await until(pilot, lambda: ("label_run", first, "night", "july") in backend.orders)
        await pilot.press("M")
        await until(pilot, lambda: ("set_baseline", first, not row.is_baseline) in backend.orders)
        await pilot.press("D")
        await shows(pilot, "Remove this run?", "There is no way back")
        await pilot.press("n")
        await until(pilot, lambda: "Remove this run?" not in text_of(app))
        assert not [o for o in backend.orders if o[0] == "delete_run"]
        await pilot.press("D")
        await shows(pilot, "Remove this run?")
        await pilot.press("y")
        await until(pilot, lambda: ("delete_run", first) in backend.orders)
        await pilot.press("enter")
        await shows(pilot, f"requests of {first}")


async def test_a_refused_baseline_says_why(make_app: Any) -> None:
    app = make_app("serving")
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("5")
        await shows(pilot, "Benchmarks", "out tok/s")
        app.backend.broken = K2Error("run x cannot be a baseline: 3 errors", "measure again")
        await pilot.press("M")
        await until(pilot, lambda: any("cannot be a baseline" in m[2] for m in app.messages))
