"""Which ranks on which nodes have their weights; how good earlier ETAs were: in the view, as JSON and on the screen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from k2tui.core.eta import LearnedEta, StartRecord
from k2tui.core.load import EtaAccuracy, LoadView, Phase, RankLoad, ShardCount
from k2tui.engines._reading import load_tracker
from k2tui.tui.lines import UNICODE
from k2tui.tui.panels.server import accuracy_text, ranks_line

FIXTURES = Path(__file__).parent.parent / "fixtures"
NOW = 1_796_000_000.0


def read(*lines: str) -> LoadView:
    tracker = load_tracker()
    tracker.feed("".join(f"{line}\n" for line in lines).encode(), NOW)
    return tracker.view(NOW)


def sg(rank: str, text: str, second: int = 0) -> str:
    return f"[2026-11-29 18:06:{second:02d} {rank}] {text}"


END = "Load weight end. elapsed=64.1 s, type=LlamaForCausalLM, avail mem=66.31 GB, mem usage=72.60 GB."


def test_each_rank_ends_by_itself():
    begin = [sg(f"TP{r}", "Load weight begin. avail mem=138.34 GB") for r in range(4)]
    view = read(*begin, sg("TP2", END, 30), sg("TP0", END, 31))
    assert [(r.rank, r.is_loaded) for r in view.rank_loads] == [
        ("TP0", True),
        ("TP1", False),
        ("TP2", True),
        ("TP3", False),
    ]
    assert view.phase is Phase.WEIGHT_LOAD  # not over before the last rank's end


def test_bars_that_name_their_rank_are_counted_for_it_and_nodes_are_told():
    ray = "(RayWorkerWrapper pid=71{0}, ip=10.0.0.{1}) [2026-11-29 18:06:0{0} TP{0}] {2}"
    bar = "Loading safetensors checkpoint shards:  {0}% Completed | {1}/64 [00:10<00:30,  1.0it/s]"
    view = read(
        *(ray.format(r, 1 + r // 2, "Load weight begin. avail mem=138.34 GB") for r in range(4)),
        ray.format(1, 1, bar.format(25, 16)),
        ray.format(3, 2, bar.format(50, 32)),
        ray.format(0, 1, END),
    )
    got = [(r.rank, r.node, r.target, r.is_loaded) for r in view.rank_loads]
    assert got == [
        ("TP0", "10.0.0.1", None, True), ("TP1", "10.0.0.1", ShardCount(16, 64), False),
        ("TP2", "10.0.0.2", None, False), ("TP3", "10.0.0.2", ShardCount(32, 64), False),
    ]  # fmt: skip
    assert json.loads(json.dumps(view.rank_loads[1].as_json())) == {
        "rank": "TP1", "node": "10.0.0.1", "done": 16, "total": 64, "draft_done": None, "draft_total": None, "is_loaded": False,
    }  # fmt: skip


def test_recorded_start_of_eight_ranks():
    tracker = load_tracker()
    tracker.feed((FIXTURES / "sglang/0.5.23/tp8-72shards.log").read_bytes(), NOW)
    assert [(r.rank, r.is_loaded) for r in tracker.view(NOW).rank_loads] == [
        (f"TP{n}", True) for n in range(8)
    ]


def test_one_rank_needs_no_list():
    assert read(sg("TP0", "Load weight begin. avail mem=1.00 GB")).rank_loads == ()


def text(line: Any) -> str:
    return "".join(seg.text for seg in line)


def test_ranks_on_the_screen_fit_and_name_the_late_ones():
    loads = tuple(
        RankLoad(f"TP{n}", f"node{n // 4}", ShardCount(4 * n, 64) if n % 2 else None, is_loaded=n < 5)
        for n in range(8)
    )
    view = cast("Any", SimpleNamespace(glyphs=UNICODE))
    whole = text(ranks_line(LoadView(rank_loads=loads), view, 120))
    assert whole == "ranks  5/8 in  node0 4/4  node1 1/4  TP6 -  TP5 20/64  TP7 28/64"
    for width in range(30, 80):
        assert len(text(ranks_line(LoadView(rank_loads=loads), view, width))) <= width
    assert "+" in text(ranks_line(LoadView(rank_loads=loads), view, 40))


def test_past_etas_are_judged_by_starts_like_this_one():
    good = StartRecord(
        "a", NOW - 9000, "sglang", "/m", 100.0, phases=((Phase.BOOT, 10.0), (Phase.WEIGHT_LOAD, 80.0), (Phase.HTTP, 10.0)),
        shards=64, curve=((0.5, 40.0), (1.0, 80.0)), predictions={"50%": (55.0, 50.0), "start": (90.0, 100.0)},
    )  # fmt: skip
    records = [good, replace(good, id="b", model="/other", predictions={"50%": (500.0, 50.0)})]
    tracker = load_tracker(eta=LearnedEta(records))
    tracker.feed(
        b"[2026-11-29 18:06:00] server_args=ServerArgs(model_path='/m', tp_size=1)\n[2026-11-29 18:06:10] Load weight begin. avail mem=1.00 GB\n",
        NOW,
    )
    view = tracker.view(NOW)
    assert view.eta_accuracy == (EtaAccuracy("start", 1, 10.0, 0.1), EtaAccuracy("50%", 1, 5.0, 0.1))
    assert accuracy_text(view) == "earlier ETAs were off by 10% at 50% of the shards (1 start)"
    assert accuracy_text(LoadView()) == ""
