"""The tuner's reasoning: spaces are checked, the search goes one step at a time, and only a real winner wins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from k2tui import cli, config
from k2tui.config import Profile
from k2tui.core.stats import Estimate, Verdict
from k2tui.core.tuning import Space, Trial, apply, key_of, parse_space, trial_from_json, trial_to_json, words
from k2tui.core.tuning_plan import combination, planned, time_left, trials_left
from k2tui.core.tuning_text import change_text, gain_text, short, table, value_text
from k2tui.core.tuning_verdict import (
    compare,
    drift,
    is_confirmed,
    is_hopeless,
    longest_pass_s,
    no_baseline,
    ranked,
    since_baseline,
    to_confirm,
    wants_more,
    winner,
)
from k2tui.errors import UsageError
from k2tui.tune.check import context_length, no_change, refuse
from k2tui.tune.folder import TuneFolder, read_space, space_path
from k2tui.tune.text import table_text

BASE = Profile(
    name="p", model="/m", args=("--attention-backend", "triton", "--disable-x"), env={"NCCL_PROTO": "LL"}
)
RAW: dict[str, Any] = {
    "profile": "p",
    "knob": [
        {"flag": "--attention-backend", "values": ["triton", "flashinfer"]},
        {"env": "NCCL_PROTO", "values": ["LL", "Simple", ""]},
        {"flag": "--disable-x", "values": [True, False]},
        {"key": "speculative_num_steps", "values": [3, 5]},
    ],
}


def space(**changes: Any) -> Space:
    return replace(parse_space(RAW, "s.toml"), **changes)


def trial(setting: Any, *values: float, **more: Any) -> Trial:
    return Trial(setting=setting, values=values, **more)


def test_search_goes_one_at_a_time_then_together() -> None:
    s = space()
    todo = planned(s, BASE, {})
    assert [words(t) for t in todo] == [
        "as the profile", "attention-backend=flashinfer", "NCCL_PROTO=Simple", "no NCCL_PROTO", "no disable-x", "speculative_num_steps=5",
    ]  # fmt: skip
    fast, slow, base = (110.0, 111.0, 110.5), (80.0, 81.0, 80.5), (100.0, 100.5, 99.5)
    results = {words(t): t for t in todo}
    done = {
        key_of(t): trial(
            t,
            *(
                base
                if name == "as the profile"
                else fast
                if name in ("NCCL_PROTO=Simple", "speculative_num_steps=5")
                else slow
            ),
        )
        for name, t in results.items()
    }
    assert words(combination(s, done)) == "NCCL_PROTO=Simple, speculative_num_steps=5"
    assert planned(s, BASE, done) == [combination(s, done)]
    done[key_of(combination(s, done))] = trial(combination(s, done), 119.0, 120.0, 121.0)
    assert planned(s, BASE, done) == []
    best = winner(s, list(done.values()))
    assert best is not None and words(best.setting) == "NCCL_PROTO=Simple, speculative_num_steps=5"


def test_matrix_has_every_combination_once() -> None:
    todo = planned(space(method="matrix"), BASE, {})
    assert len(todo) == len(set(todo)) == 2 * 3 * 2 * 2


def test_noise_and_drift_make_no_winner() -> None:
    s = space()
    setting = (("env", "NCCL_PROTO", "Simple"),)
    base = trial((), 100.0, 101.0, 99.0)
    noisy = trial(setting, 90.0, 103.0, 110.0)
    assert winner(s, [base, noisy]) is base
    better = trial(setting, 104.0, 104.5, 103.5)
    assert winner(s, [base, better]) is better
    moved = trial((), 108.0, 108.5, 107.5, is_again=True)  # the machine itself became 8 % faster
    assert drift([base, better, moved]) == pytest.approx(0.08)
    assert winner(s, [base, better, moved]) is base
    assert winner(s, [trial((), state="failed"), better]) is None


def test_the_largest_drift_counts_and_the_baseline_is_due_after_some_trials() -> None:
    base, other = trial((), 100.0, 100.2, 99.8), (("env", "A", "1"),)
    up = trial((), 103.0, 103.1, 102.9, is_again=True)
    down = trial((), 94.0, 94.1, 93.9, is_again=True, again_no=1)
    better = trial(other, 105.0, 105.2, 104.8)
    assert drift([base, up, down]) == pytest.approx(-0.06) and up.key != down.key
    assert winner(space(), [base, better, up]) is better  # 5 % against 3 % of drift
    assert winner(space(), [base, better, up, down]) is base
    failed = trial(other, state="failed")
    assert [
        since_baseline(t)
        for t in ([], [base], [base, better, failed], [base, better, up], [base, up, better, better])
    ] == [0, 0, 1, 0, 2]
    assert trial_from_json(trial_to_json(down)) == down


def test_a_run_keeps_its_profile_and_refuses_another(tmp_path: Path) -> None:
    file = tmp_path / "space.toml"
    file.write_text('profile = "p"\n[[knob]]\nflag = "--x"\nvalues = ["1"]\n')
    run = TuneFolder.create(file)
    own = replace(
        BASE,
        engine="local",
        auto_gpus=-1,
        description='a "b" 😀',
        env={"A": "x\x7f", "HF_TOKEN": "hf_" + "a" * 34},
    )
    run.keep_profile(own)
    run.keep_profile(replace(own, description="other words"))
    text = (run.path / "profile.toml").read_text()
    assert "hf_a" not in text
    loaded = config.load(str(run.path / "profile.toml")).profiles["p"]
    assert replace(loaded, env={}) == replace(own, env={}) and loaded.env["A"] == "x\x7f"
    with pytest.raises(UsageError, match="another one than when this run began: args, port"):
        run.keep_profile(replace(own, port=1, args=()))


def start(setting: Any, mean: float, no: int | None = None) -> Trial:
    return trial(setting, mean - 1, mean, mean + 1, is_again=no is not None, again_no=no or 0)


def test_what_seems_best_is_started_again_until_it_is_told_from_the_baseline() -> None:
    """A start has luck of its own: on two H200s three settings that should not matter were each 15 % ahead in their only start."""
    s, a, b = space(), (("env", "A", "1"),), (("env", "B", "1"),)
    known = [start((), 571), start(a, 662), start(b, 640)]
    assert to_confirm(s, known) == a and to_confirm(space(confirm=0), known) is None
    assert winner(s, known) is known[1] and gain_text(s, known, a) == "", "while nothing speaks against it"
    assert trials_left(s, known, 0) == 2
    assert {r.said for r in ranked(s, known) if r.verdict} == {"faster, one start"}

    refuted = [*known, start(a, 569, 0), start((), 572, 0)]
    assert (
        is_confirmed(s, refuted, a) is False
        and to_confirm(s, refuted) == b
        and winner(s, refuted) is known[2]
    )
    said = {r.label: r.said for r in ranked(s, refuted)}
    assert said["A=1"] == "unclear, not confirmed" and said["B=1"] == "faster, one start"
    assert trial_from_json(trial_to_json(refuted[3])) == refuted[3] and len({t.key for t in refuted}) == 5

    confirmed = [*refuted, start(b, 631, 0), start((), 573, 1)]
    assert (
        is_confirmed(s, confirmed, b)
        and to_confirm(s, confirmed) is None
        and winner(s, confirmed) is known[2]
    )
    assert next(r for r in ranked(s, confirmed) if r.mark == "best").said == "faster, confirmed"
    assert gain_text(s, confirmed, b) == "confirmed by 1 more start: +10.3 % (95 % +9.4 to +11.3 %)"


def test_starts_that_differ_need_more_of_them_and_not_without_end() -> None:
    s, a = space(), (("env", "A", "1"),)
    known = [start((), 571), start(a, 662), start(a, 655, 0), start((), 590, 0)]
    assert is_confirmed(s, known, a) is None and to_confirm(s, known) == a, (
        "two starts of the profile 3 % apart, one of A"
    )
    known += [start(a, 640, 1), start((), 575, 1)]
    assert is_confirmed(s, known, a), "11.9 %, three starts against two"
    wild = [*known[:4], start(a, 560, 1), start((), 520, 1), start(a, 700, 2), start((), 640, 2)]
    assert is_confirmed(s, wild[:6], a) is None and is_confirmed(s, wild, a) is False, (
        "three more starts do not tell it"
    )
    assert is_confirmed(space(confirm=4), wild, a) is None
    assert gain_text(s, wild, a).startswith("not confirmed by 3 more starts: +9.8 % (95 % -")
    failed = [*known[:2], Trial(a, "failed", cause="x", is_again=True)]
    assert to_confirm(s, failed) is None and winner(s, failed) is known[0]
    many = [
        start((), 571),
        *(start((("env", n, "1"),), 700) for n in "abcd"),
        *(start((("env", n, "1"),), 500, 0) for n in "abc"),
    ]
    assert to_confirm(s, [*many, start((), 571, 0)]) is None, "three settings, no more"
    late = space(metric="ttft_p50_ms")
    quick = [
        trial((), 10.0, 10.1),
        trial(a, 8.0, 8.1),
        trial(a, 8.2, 8.1, is_again=True),
        trial((), 10.1, 10.0, is_again=True),
    ]
    assert is_confirmed(late, quick, a) and gain_text(late, quick, a).startswith(
        "confirmed by 1 more start: -18.9 % (95 % -25.4"
    )


def test_a_drift_hides_a_difference_it_does_not_make_two_settings_the_same() -> None:
    a, base, moved = (("env", "A", "1"),), start((), 500), start((), 650, 0)
    down, _, up = sorted(ranked(space(), [base, start(a, 370), moved]), key=lambda r: -(r.estimate or Estimate(0)).value)[::-1]
    assert down.said == "unclear" and down.ratio is not None and up.said == "start 2" and up.verdict is None
    rows = table(space(), [base, start(a, 370), moved])[1]
    assert ["-26.0" in r[3] for r in rows] == [False, False, True], "the figure stays"
    still = [base, start(a, 502), start((), 501, 0)]
    assert compare(base, still[1], space(), 0.002) is Verdict.SAME


def test_the_usual_metric_follows_how_many_ask_at_a_time() -> None:
    assert parse_space({**RAW, "concurrency": 1}, "s").metric == "tok_s_user"
    assert parse_space({**RAW, "concurrency": 4}, "s").metric == "output_throughput"
    assert parse_space({**RAW, "concurrency": 4, "metric": "tok_s_user"}, "s").metric == "tok_s_user"


def test_less_is_better_for_latencies() -> None:
    s = space(metric="ttft_p50_ms")
    base, quick = trial((), 100.0, 101.0, 99.0), trial((("env", "A", "1"),), 80.0, 81.0, 79.0)
    assert winner(s, [base, quick]) is quick
    assert table(s, [base, quick])[1][0][0] == "★"


def test_settings_become_argv_and_env() -> None:
    changed = apply(
        BASE,
        (
            ("env", "NCCL_PROTO", ""),
            ("flag", "--attention-backend", "flashinfer"),
            ("flag", "--disable-x", False),
            ("key", "port", 5),
        ),
    )
    assert changed == {"args": ("--attention-backend", "flashinfer"), "env": {}, "port": 5}
    with pytest.raises(UsageError, match="no key 'prot'"):
        apply(BASE, (("key", "prot", 5),))
    for value in ("x", True, 1.5):
        with pytest.raises(UsageError, match=r"knob port: .* is not of the kind of 30000"):
            apply(BASE, (("key", "port", value),))


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"profile": ""}, "profile"), ({"knob": []}, "nothing to vary"), ({"metric": "tokens"}, "tok_s_user"), ({"repeats": 0}, "at least 1"),
        ({"repeat": 3}, "did you mean 'repeats'"), ({"knob": [{"flag": "x", "values": [1]}]}, "begins with --"),
        ({"knob": [{"flag": "--x", "env": "Y", "values": [1]}]}, "exactly one"), ({"knob": [{"flag": "--x"}]}, "no values"), ({"knob": [3]}, "no table"),
        ({"knob": [{"flag": "--x", "values": [[1, 2]]}]}, "is no text, number, true or false"), ({"baseline_every": -1}, "at least 0"), ({"confirm": True}, "at least 0"),
    ],
)  # fmt: skip
def test_a_wrong_space_is_named(change: dict[str, Any], part: str) -> None:
    with pytest.raises(UsageError) as err:
        parse_space({**RAW, **change}, "s.toml")
    assert "s.toml" in err.value.message and part in f"{err.value.message} {err.value.hint}"


def test_folder_keeps_trials_through_a_torn_write(tmp_path: Path) -> None:
    file = tmp_path / "space.toml"
    file.write_text('profile = "tiny"\n[[knob]]\nflag = "--x"\nvalues = ["1"]\n')
    run = TuneFolder.create(file)
    first = trial((), 1.0, 2.0, figures={"tok_s_user": 1.5}, cause="a ü")
    run.add(first)
    with (run.path / "trials.jsonl").open("ab") as fh:
        fh.write(b'{"setting": [["flag", "--x"')  # killed in the middle of a write
    second = trial((("flag", "--x", "1"),), state="stalled", cause="silent")
    run.add(second)
    assert run.trials() == [first, second]
    assert trial_from_json(trial_to_json(second)) == second
    assert TuneFolder.find().path == run.path
    file.write_text("profile = \n")
    with pytest.raises(UsageError, match="line 1"):
        read_space(file)


def test_figures_stay_short() -> None:
    """A wide interval is written out, never as 1.3e+02."""
    assert [short(x) for x in (348.81, 12345.6, 0.01234, 9.0)] == ["348.8", "12346", "0.01234", "9"]
    assert value_text(Estimate(348.8, 211.4, 486.2)) == "348.8 ±137"
    assert change_text(Estimate(1.156, -0.113, 2.425)) == "+15.6 ±127 %"


def test_a_failed_baseline_says_why_nothing_is_compared() -> None:
    failed = Trial((), "failed", cause="benchmark: http_400: too long")
    assert "http_400: too long" in no_baseline([failed])
    assert no_baseline([]) == no_baseline([trial((), 1.0, 1.1)]) == ""


def test_what_cannot_be_measured_is_known_before_the_start() -> None:
    tiny = config.load().get_profile("tiny")
    too_long = Space("tiny", (), random_input_len=1024, random_output_len=256)
    with pytest.raises(UsageError, match=r"1280 tokens.*1024"):
        refuse(too_long, tiny)
    assert context_length(replace(tiny, args=("--context-length=512",))) == 512

    def flag(name: str, value: Any) -> Any:
        return (("flag", name, value),)

    assert (
        no_change(tiny, flag("--attention-backend", "triton"), {})
        == "ignored by this engine: --attention-backend"
    )
    assert no_change(tiny, flag("--max-running-requests", "1"), {}) == ""
    one = replace(tiny, args=("--max-running-requests", "1"))
    assert no_change(one, flag("--max-running-requests", 1), {}) == "same command as the baseline"
    both = (*flag("--attention-backend", "triton"), *flag("--dtype", "bfloat16"))
    assert (
        no_change(tiny, both, {"k": flag("--dtype", "bfloat16")})
        == "ignored by this engine: --attention-backend"
    )
    assert no_change(replace(tiny, engine="sglang"), flag("--attention-backend", "triton"), {}) == ""


@pytest.mark.parametrize("name", ["tune-tiny", "tune-sglang"])
def test_shipped_spaces_are_valid_and_every_trial_changes_something(name: str) -> None:
    found = read_space(space_path(f"asset:{name}"))
    profile = config.load().get_profile(found.profile)
    settings = planned(found, profile, {})
    assert len(settings) > 3 and [no_change(profile, s, {}) for s in settings] == [""] * len(settings)
    if profile.engine == "local":
        assert found.random_input_len + found.random_output_len <= context_length(profile)


def test_a_run_that_cannot_start_is_refused_at_once_and_the_list_tells_each_run(
    own_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tmp_path / "k.toml"
    settings.write_text('[profile.gone]\ninherit = "tiny"\nmodel = "/nowhere"\n')
    path = tmp_path / "space.toml"
    knob = '[[knob]]\nflag = "--dtype"\nvalues = ["bfloat16"]\n'
    path.write_text(f'profile = "gone"\n{knob}')
    assert cli.main(["tune", "run", str(path), "--config", str(settings)]) == 1
    assert "/nowhere does not exist" in capsys.readouterr().err
    path.write_text(f'profile = "tiny"\nrandom_input_len = 2000\n{knob}')
    assert cli.main(["tune", "run", str(path)]) == 2
    assert "context length of 1024" in capsys.readouterr().err
    assert cli.main(["tune", "list"]) == 0 and capsys.readouterr().out == "no tuning run yet\n", (
        "nothing is left"
    )

    run = TuneFolder.create(path)
    run.add(Trial((), "failed", cause="benchmark: http_400: too long"))
    assert cli.main(["tune", "list"]) == 0
    assert "0/1" in (shown := capsys.readouterr().out) and "http_400" in shown
    fast = trial((("flag", "--dtype", "bfloat16"),), 200.0, 201.0, 199.0)
    run.add(trial((), 100.0, 101.0, 99.0))
    run.add(fast)
    assert cli.main(["tune", "list"]) == 0
    assert "2/2" in (shown := capsys.readouterr().out) and "dtype=bfloat16" in shown
    assert cli.main(["tune", "show"]) == 0 and "best so far: dtype=bfloat16" in capsys.readouterr().out


def test_a_hopeless_trial_is_seen_after_one_pass_and_a_near_one_never() -> None:
    s = space()
    base = trial(
        (), 516.0, 462.5, 488.4, pass_s=2.2
    )  # of a real run on two H200s: the interval begins at 422
    assert is_hopeless(s, [base], (25.3,)) and is_hopeless(s, [base], (295.0, 290.0))
    assert not is_hopeless(s, [base], (290.0, 300.0)), "the best pass counts"
    assert not is_hopeless(s, [base], ()) and not is_hopeless(s, [], (1.0,))
    assert not is_hopeless(space(give_up_below=0.0), [base], (1.0,))
    slow = trial(
        (), 240.0, 241.0, 239.0, is_again=True
    )  # the machine itself became slower: that is no setting's fault
    assert not is_hopeless(s, [base, slow], (200.0,))
    cold = trial((), 822.0, 1664.0, 1641.0, 1596.0, 1604.0, 1665.0)  # its own first pass is not hopeless
    assert not is_hopeless(s, [cold], (822.0,))
    late = space(metric="ttft_p50_ms")
    assert is_hopeless(late, [trial((), 10.0, 11.0, 10.5)], (18.0, 17.0))
    assert not is_hopeless(late, [trial((), 10.0, 11.0, 10.5)], (18.0, 15.0))
    assert longest_pass_s(s, [base]) == pytest.approx(5.2)  # 2.2 s and the grace
    assert longest_pass_s(s, [replace(base, pass_s=70.0)]) == pytest.approx(100.0)
    assert longest_pass_s(late, [base]) is longest_pass_s(s, []) is None


def test_more_passes_while_the_interval_is_too_wide_never_until_a_trial_wins() -> None:
    s, other = space(), (("env", "A", "1"),)
    wide, narrow = trial((), 516.0, 462.5, 488.4), trial((), 100.0, 100.5, 99.5)
    assert wants_more(s, [wide], wide) and not wants_more(s, [narrow], narrow)
    assert not wants_more(space(max_repeats=3), [wide], wide)
    assert wants_more(s, [narrow], trial((), 100.0)), "one pass has no interval"
    for shift in (0.95, 1.0, 1.3):  # ahead or not: only the width decides
        assert wants_more(s, [narrow], trial(other, *(shift * v for v in (94.0, 100.0, 106.0))))
    assert not wants_more(s, [narrow], trial(other, 48.0, 50.0, 53.0)), "slower for sure"
    assert not wants_more(s, [narrow], trial(other, 40.0, state="slower", cause="1 of 3 passes"))
    assert compare(narrow, trial(other, 94.0, 100.0, 107.0), s) is Verdict.UNCLEAR
    assert compare(narrow, trial(other, 100.2, 99.9, 100.4), s) is Verdict.SAME


def test_a_trial_that_was_ended_early_is_slower_in_every_table() -> None:
    s, base = space(), trial((), 100.0, 101.0, 99.0, job_id="j", took_s=90.0)
    cut = trial((("env", "A", "1"),), 40.3, state="slower", cause="1 of 3 passes", job_id="j", took_s=50.0)
    none = trial((("env", "A", "2"),), state="slower", cause="0 of 3 passes: 1 of 4 requests", at_s=9.0)
    failed = trial((("env", "A", "3"),), state="failed", cause="x " * 150 + "the end", at_s=1.0)
    assert winner(s, [base, cut, none]) is base and since_baseline([base, cut, none]) == 2
    assert trial_from_json(trial_to_json(cut)) == cut
    for width in (80, 100, 160):
        lines = table_text(s, [base, cut, none, failed], width).splitlines()
        assert all(len(line) <= width and line == line.rstrip() for line in lines)
        assert "40.3" in lines[2] and "-59.7 %" in lines[2] and lines[2].endswith("slower, 1 of 3 passes")
        assert "±" not in lines[2], "one pass has no interval"
        assert lines[3].endswith("1 of 4 requests") and lines[4].endswith("the end") and "…" in lines[4]
        assert "accept" not in lines[0]


def test_the_time_left_counts_early_ends_and_the_baseline_again() -> None:
    s, base = space(baseline_every=2), trial((), 100.0, 101.0, job_id="j", took_s=90.0)
    cut = trial((("env", "A", "1"),), 40.3, state="slower", job_id="j", took_s=30.0)
    assert time_left([], 3) is None
    assert time_left([base, cut], 3, spent_s=50.0) == pytest.approx(130.0)  # the mean is 60 s
    refused = trial((("env", "A", "4"),), state="refused", took_s=0.1)
    assert time_left([base, refused], 1, spent_s=200.0) is None, "the last takes longer than the mean"
    assert time_left([base, refused], 2, spent_s=200.0) == 90.0
    assert trials_left(s, [], 5) == 7  # itself, 4 others, once between, once at the end
    assert trials_left(s, [base, cut], 3) == 5 and trials_left(s, [base, cut], 0) == 1
    assert trials_left(s, [base], 0) == 0


@pytest.mark.parametrize(
    ("change", "part"),
    [({"max_repeats": 2}, "at least repeats (3)"), ({"min_effect": 0}, "above 0"), ({"give_up_below": 1}, "below 1")],
)  # fmt: skip
def test_how_long_to_measure_is_checked(change: dict[str, Any], part: str) -> None:
    with pytest.raises(UsageError) as err:
        parse_space({**RAW, **change}, "s.toml")
    assert part in err.value.message
    assert parse_space({**RAW, "repeats": 12, "give_up_below": 0}, "s.toml").max_repeats == 12


def test_trials_move_only_beside_a_server_that_holds_none_of_their_gpus(monkeypatch):
    from types import SimpleNamespace

    from k2tui import doctor
    from k2tui.config import Profile
    from k2tui.tune.check import own_port

    holder = {"job": SimpleNamespace(spec=SimpleNamespace(locks=("gpu:0", "gpu:1")))}
    monkeypatch.setattr(doctor, "port_owner", lambda host, port: "pid 1" if port == 50540 else "")
    monkeypatch.setattr(doctor, "job_at", lambda port: holder["job"])

    def port(**keys):
        return own_port(Profile(name="p", model="/m", port=50540, **keys)).port

    assert port(engine="local") == 50541
    assert port(gpus=(2, 3)) == 50541
    assert port(gpus=(1, 2)) == 50540  # it would wait for GPU 1
    assert port() == 50540  # no GPU is named: the same ones
    holder["job"] = None
    assert port(engine="local") == 50540  # not ours


SECRET_ARGS = (
    "--api-key", "S3CR1", "--tool-server=https://u:S3CR2@h/", "--header", "Authorization: Bearer S3CR3xx", "--json", '{"api_key": "S3CR4"}',
)  # fmt: skip


def test_no_secret_of_a_profile_lies_in_the_run_and_none_goes_to_the_engine_as_stars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = Profile(
        name="p", model="m", args=(*SECRET_ARGS, "--foo", "1"), env={"HF_TOKEN": "S3CR5", "A": "1"}
    )
    TuneFolder(tmp_path).keep_profile(profile)
    kept = tmp_path / "profile.toml"
    assert "S3CR" not in kept.read_text()
    TuneFolder(tmp_path).keep_profile(profile)  # the same profile goes on

    again = config.load(str(kept)).get_profile("p")
    assert again.args[-2:] == ("--foo", "1") and again.env == {"HF_TOKEN": "***", "A": "1"}
    with pytest.raises(UsageError, match="HF_TOKEN was a secret"):
        refuse(space(), again)
    with pytest.raises(UsageError, match="api-key") as told:
        config.with_secrets(again, {"HF_TOKEN": "S3CR5"})
    assert "K2TUI_SECRET_API_KEY" in told.value.hint
    simple = replace(again, args=("--api-key", "***", "--x", "1"))
    given = config.with_secrets(simple, {"HF_TOKEN": "S3CR5", "K2TUI_SECRET_API_KEY": "S3CR1"})
    assert given.args == ("--api-key", "S3CR1", "--x", "1") and given.env == {"HF_TOKEN": "S3CR5", "A": "1"}
    assert config.with_secrets(profile, {}) is profile


@pytest.mark.parametrize("verb", [["up", "p", "--dry-run"], ["tune", "run", "SPACE"]])
def test_a_profile_with_stars_is_refused_by_name(
    verb: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("K2TUI_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("K2TUI_SECRET_API_KEY", raising=False)
    toml, where = tmp_path / "c.toml", tmp_path / "space.toml"
    toml.write_text(
        '[profile.p]\nengine = "local"\nmodel = "asset:tiny-target"\nargs = ["--api-key", "***"]\n'
    )
    where.write_text('profile = "p"\n[[knob]]\nflag = "--draft-tokens"\nvalues = [1]\n')
    code = cli.main([*(str(where) if w == "SPACE" else w for w in verb), "--config", str(toml)])
    told = capsys.readouterr()
    assert code == 2 and "(api-key) is not stored" in told.err and "K2TUI_SECRET_API_KEY" in told.err
    assert not (tmp_path / "home" / "tune").exists()


@pytest.mark.parametrize(
    ("knob", "is_secret"),
    [
        ({"env": "MY_API_KEY", "values": ["S3CR1", "S3CR2"]}, True),
        ({"flag": "--api-key", "values": ["S3CR1"]}, True),
        ({"flag": "--header", "values": ["Authorization: Bearer S3CR1"]}, True),
        ({"flag": "--extra", "values": ['{"api_key": "S3CR1"}']}, True),
        ({"flag": "--cache-key", "values": [1, "8", True]}, False),
        ({"flag": "--attention-backend", "values": ["triton"]}, False),
    ],
)
def test_a_secret_is_nothing_to_vary(knob: dict[str, Any], is_secret: bool) -> None:
    if not is_secret:
        assert parse_space({"profile": "p", "knob": [knob]}, "s.toml").knobs
        return
    with pytest.raises(UsageError, match="secrets as values") as told:
        parse_space({"profile": "p", "knob": [knob]}, "s.toml")
    assert "S3CR" not in told.value.message + told.value.hint


def test_no_escape_code_of_a_value_reaches_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words((("flag", "--x", "a\x1b[31mb\nc"),)) == "x=ab c"
    monkeypatch.setenv("K2TUI_HOME", str(tmp_path / "home"))
    where = tmp_path / "space.toml"
    where.write_text('profile = "tiny"\n[[knob]]\nenv = "X"\nvalues = ["x\\u001b[31m", "\\u009b31m"]\n')
    assert cli.main(["tune", "run", str(where), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "X=x" in out and not any((ord(c) < 32 and c != "\n") or 127 <= ord(c) < 160 for c in out)
