"""The tuning run on the screen: trials with interval and change, failed ones with their cause, marks, a bar each, keys and mouse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import fake
import pytest
from conftest import text_of

from k2tui.core.snapshot import Snapshot
from k2tui.core.tuning import Space, Trial, TuneStep, TuneView
from k2tui.tui import panels
from k2tui.tui.lines import ASCII, UNICODE, line_width
from k2tui.tui.panels.tunechart import axis, bar_line
from k2tui.tui.view import View

LL = ("env", "NCCL_PROTO", "LL")
STEPS = ("flag", "--num-continuous-decode-steps", 4)
TRIALS = (
    Trial((), values=(63.6, 63.2, 63.9), at_s=1.0, ready_s=601, stop_s=12, job_id="serve-1"),
    Trial((("flag", "--attention-backend", "flashinfer"),), "stalled", cause="G07: silent for 300 s in graph capture", at_s=2.0, job_id="serve-2"),
    Trial((LL,), values=(81.2, 80.8, 81.9), at_s=3.0, ready_s=590, held_b=3 << 30),
    Trial((("flag", "--bogus", True),), "refused", cause="no argument --bogus 草稿 [red]", at_s=4.0),
    Trial((LL, STEPS), values=(90.1, 89.6, 90.4), at_s=5.0, ready_s=590),
)  # fmt: skip
RUN = TuneView(
    "20261130-kimi",
    Space("kimi", ()),
    TRIALS,
    "tune-1",
    TuneStep((), "start", fake.T0 - 42, True, "serve-9", 0),
)


def test_a_low_chart_shows_the_newest_and_always_the_selected_trial() -> None:
    many = tuple(
        Trial((("env", f"A{n:02}", "1"),), values=(50.0 + n, 51.0 + n), at_s=float(n)) for n in range(12)
    )
    run = replace(RUN, trials=(TRIALS[0], *many), now=None)
    newest = words_of("tunechart", run, 38, 5)[1:]
    assert [line.split()[0][:3] for line in newest] == ["A07", "A08", "A09", "A10", "A11"]
    chosen = words_of("tunechart", run, 38, 5, trial_key=many[2].key)[1:]
    assert chosen[0].split()[0].startswith("A02") and len(chosen) == 5


async def until(pilot: Any, true: Any, seconds: float = 20.0) -> None:
    for _ in range(int(seconds / 0.05)):
        if true():
            return
        await pilot.pause(0.05)
    raise AssertionError(f"did not come true; the screen:\n{text_of(pilot.app)}")


def words_of(name: str, run: TuneView | None, width: int = 118, height: int = 16, **more: Any) -> list[str]:
    picture = panels.get(name).draw(View(Snapshot(0.0, tune=run), fake.T0, **more), width, height)
    return ["".join(s.text for s in line) for line in (picture.header or (), *(r.line for r in picture.rows))]


def test_table_has_marks_intervals_changes_and_causes() -> None:
    lines = words_of("tune", RUN)
    best, second, base, stalled, refused, now = lines[1:7]
    assert (
        best.startswith("★ NCCL_PROTO=LL, num")
        and "decode-steps=4" in best  # cut in the middle: the end tells settings apart
        and "90.03 ±1" in best
        and "+41.6 ±" in best
        and "faster" in best
    )
    assert "81.3 ±1.38" in second and "3.0G of GPU" in second
    assert base.startswith("● as the profile") and "baseline" in base
    assert (
        stalled.startswith("✗ attention-backend=flashinfer")
        and "stalled" in stalled
        and "silent for 300 s" in stalled
    )
    assert "refused" in refused and "--bogus" in refused and "[red]" in refused
    assert now.startswith("↑ as the profile (again) starts, 42s")
    assert any("best so far: NCCL_PROTO=LL, num" in line for line in lines) and "tune best" not in " ".join(lines)
    assert any("k2tui tune best 20261130-kimi" in line for line in words_of("tune", replace(RUN, now=None)))
    ended = words_of("tune", replace(RUN, now=None, trials=TRIALS[:1]))
    assert "no setting is really faster" in " ".join(ended)


def test_a_failed_baseline_and_a_skipped_setting_say_why() -> None:
    why = "ignored by this engine: --attention-backend"
    skipped = Trial((("flag", "--attention-backend", "triton"),), "skipped", cause=why, at_s=2.0)
    lines = words_of("tune", replace(RUN, now=None, trials=(TRIALS[0], skipped)), 150)
    row = next(line for line in lines if "attention-backend=triton" in line)
    assert row.startswith("–") and "skipped" in row and why in row
    failed = Trial((), "failed", cause="benchmark: http_400: too long", at_s=1.0)
    text = " ".join(words_of("tune", replace(RUN, now=None, trials=(failed,))))
    assert "http_400: too long; there is nothing to compare with" in text


def test_a_trial_that_was_ended_early_is_slower_and_the_run_tells_its_pass_and_its_end() -> None:
    one = Trial((LL,), "slower", (40.3,), "1 of 3 passes", at_s=2.0)
    none = Trial((STEPS,), "slower", cause="0 of 3 passes: 1 of 4 requests at 25.3 after 5.2 s", at_s=3.0)
    failed = Trial((("flag", "--bogus", True),), "failed", cause="no such argument", at_s=1.0)
    step = TuneStep((), "bench", fake.T0 - 4, True, "serve-9", 0, (3, 6), fake.T0 + 95)
    run = replace(RUN, now=step, trials=(TRIALS[0], one, none, failed))
    lines = words_of("tune", run, 150)
    assert "40.3 " in lines[2] and "±" not in lines[2] and "slower, 1 of 3 passes" in lines[2]
    assert lines[3].startswith("  num-continuous") and "slower, 0 of 3 passes: 1 of 4 requests" in lines[3]
    assert lines[4].startswith("✗") and "is measured, pass 4 of 6, 4.0s" in lines[5]
    note = panels.get("tune").draw(View(Snapshot(0.0, tune=run), fake.T0), 150, 16).note
    assert "1 or more to come, 1:35 left" in "".join(seg.text for seg in note)
    assert "ended early" in "\n".join(words_of("tunetrial", run, trial_key=one.key))
    assert "25.3 after 5.2 s" in " ".join(words_of("tunetrial", run, trial_key=none.key))


def test_a_wide_interval_is_not_cut() -> None:
    wide = Trial((LL,), values=(420.0, 348.0, 280.0), at_s=2.0)
    base = Trial((), values=(300.0, 420.0, 180.0), at_s=1.0)
    for width in (78, 118):
        lines = words_of("tune", replace(RUN, now=None, trials=(base, wide)), width)
        assert any("349.3 ±174" in line and "%" in line for line in lines)
        assert not any("e+0" in line for line in lines)


@pytest.mark.parametrize("name", ["tune", "tunechart", "tunetrial"])
@pytest.mark.parametrize(
    "run", [RUN, None, TuneView("r", None, error="space.toml: not valid TOML"), TuneView("r", Space("p", ()))]
)
def test_every_room_is_enough(name: str, run: TuneView | None) -> None:
    for width, height in ((76, 1), (78, 6), (118, 12), (196, 30)):
        for glyphs in (UNICODE, ASCII):
            picture = panels.get(name).draw(
                View(Snapshot(0.0, tune=run), fake.T0, glyphs=glyphs), width, height
            )
            for row in picture.rows:
                text = "".join(s.text for s in row.line)
                assert line_width(row.line) <= width and text.isprintable()
                assert not glyphs.ascii or text.replace("草稿", "").isascii(), text


def test_bars_start_at_zero_unless_all_lie_close_together() -> None:
    from k2tui.core.tuning_verdict import ranked

    rows = ranked(Space("p", ()), TRIALS)
    low, high = axis(rows)
    assert 0 < low < 63 and high > 90  # close together: said in the panel's corner
    far = ranked(Space("p", ()), [*TRIALS, Trial((("env", "A", "1"),), values=(5.0, 5.1), at_s=9.0)])
    assert axis(far)[0] == 0.0
    base = next(r for r in rows if r.mark == "base").estimate
    assert base is not None
    cells = 50
    best = "".join(s.text for s in bar_line(rows[0], base.value, low, high, cells, UNICODE))
    assert len(best) == cells and best.index("│") == round((base.value - low) / (high - low) * (cells - 1))
    assert "stalled" in "".join(
        s.text
        for s in bar_line(next(r for r in rows if r.trial.state == "stalled"), None, low, high, 50, UNICODE)
    )


def test_selected_trial_shows_its_whole_cause() -> None:
    text = "\n".join(words_of("tunetrial", RUN, trial_key=TRIALS[1].key))
    assert (
        "--attention-backend" in text
        and "flashinfer" in text
        and "silent for 300 s in graph capture" in text
        and "serve-2" in text
    )
    text = "\n".join(words_of("tunetrial", RUN, trial_key=TRIALS[0].key))
    assert "63.6  63.2  63.9" in text and "ready after" in text


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_screen_seven_shows_the_run_and_opens_a_trials_log(
    make_app: Any, size: tuple[int, int]
) -> None:
    app = make_app("serving")
    script = app.backend.script
    app.backend.script = lambda now: replace(script(now), tune=RUN)
    async with app.run_test(size=size) as pilot:
        await pilot.press("7")
        await until(pilot, lambda: "★ NCCL_PROTO" in text_of(app) and "─ tok_s_user" in text_of(app))
        text = text_of(app)  # headers whole, a bar for each trial at 80x24 too
        assert "verdict or cause" in text
        chart = text[text.index("─ tok_s_user") :]
        assert all(
            word in chart for word in ("as the profile", "stalled", "NCCL_PROTO=LL", "refused", "steps=4")
        )
        await pilot.press("down", "down", "down")
        await until(
            pilot, lambda: "graph capture" in text_of(app)
        )  # the whole cause, in two lines where it is narrow
        await pilot.press("enter")
        await until(pilot, lambda: "serve-2" in app.backend.logs)
        await pilot.press("escape")
        await pilot.press("down", "enter")
        await until(
            pilot, lambda: any("no server was started for this trial" in m for _, _, m in app.messages)
        )


async def test_tune_button_starts_a_run_from_a_space_file(make_app: Any) -> None:
    from k2tui import stages
    from k2tui.core.snapshot import StageInfo

    stage = stages.get("tune")
    app = make_app("serving")
    script = app.backend.script
    info = StageInfo(stage.name, stage.title, stage.key, "", stage.help, stage.fields)
    app.backend.script = lambda now: replace(script(now), stages=(*script(now).stages, info))
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: "Tune" in text_of(app))
        await pilot.press("U")
        await until(pilot, lambda: "asset:tune-tiny" in text_of(app))
        await pilot.press("enter")
        await until(pilot, lambda: ("submit", "tune", {"space": "asset:tune-tiny"}) in app.backend.orders)
