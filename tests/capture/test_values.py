"""Pure parts of the capture: what a layer id means, the grammar of a request, leases."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from k2tui.capture import ids as layer_ids
from k2tui.capture.ids import (
    Rule,
    candidate_sets,
    rule_of,
    to_boundaries,
    to_ids,
    usual_boundaries,
    version_tuple,
)
from k2tui.capture.lease import LeaseTable
from k2tui.capture.request import CaptureRequest, is_capture, parse_rid
from k2tui.capture.site import make_site
from k2tui.errors import K2Error


@pytest.mark.parametrize(
    ("architecture", "version", "ids", "layers", "boundaries"),
    [
        # measured against transformers: Llama +1 always, DeepSeek and Kimi raw from 0.5.13 on unless ids begin with 1
        ("LlamaForCausalLM", "0.5.23", [0, 1, 2], 4, (1, 2, 3)),
        ("KimiK25ForConditionalGeneration", "0.5.23", [0, 1, 2], 4, (0, 1, 2)),
        ("DeepseekV3ForCausalLM", "0.5.23", [1, 29, 57], 61, (2, 30, 58)),
        ("KimiK25ForConditionalGeneration", "0.5.12.post1", [2, 30, 58], 61, (3, 31, 59)),
        ("KimiK25ForConditionalGeneration", "0.5.13", [2, 30, 58], 61, (2, 30, 58)),
        ("DeepseekV3ForCausalLM", "0.5.6", [2, 30, 58], 61, (3, 31, 59)),
        ("GptOssForCausalLM", "0.5.23", [2, 17, 33], 36, (3, 18, 34)),
        ("GptOssForCausalLM", "0.5.23", [2, 17, 36], 36, (2, 17, 36)),
        ("KimiK25ForConditionalGeneration", "0.5.23", None, 61, (2, 30, 58)),
        ("Qwen3ForCausalLM", "0.5.9", [30, 2, 15], 36, (3, 16, 31)),
    ],
)
def test_the_one_function_that_converts_layer_ids(architecture: str, version: str, ids: list[int] | None, layers: int, boundaries: tuple[int, ...]) -> None:
    assert to_boundaries(ids, layers, rule_of(architecture, "sglang", version)) == boundaries


def test_other_engines_mean_boundaries_as_they_stand() -> None:
    assert to_boundaries([2, 30, 58], 61, rule_of("KimiK25ForConditionalGeneration", "vllm", "0.32.0")) == (2, 30, 58)


def test_layers_that_fall_together_or_outside_are_refused() -> None:
    with pytest.raises(K2Error, match="twice"):
        to_boundaries([2, 2, 5], 8, Rule.RAW)
    with pytest.raises(K2Error, match="8 layers"):
        to_boundaries([2, 5, 9], 8, Rule.RAW)


@given(st.sets(st.integers(0, 59), min_size=3, max_size=3), st.sampled_from(list(Rule)))
def test_ids_for_boundaries_mean_those_boundaries(boundaries: set[int], rule_: Rule) -> None:
    ids = to_ids(sorted(boundaries), 60, rule_)
    if ids is not None:
        assert to_boundaries(ids, 60, rule_) == tuple(sorted(boundaries))
    else:
        # only what begins at 0 (no id says it under +1) or clashes with the special cases is left over
        assert 0 in boundaries or rule_ is not Rule.RAW


def test_candidates_of_the_published_kimi_draft_are_both_readings() -> None:
    assert candidate_sets([2, 30, 58], 61)[:2] == [(3, 31, 59), (2, 30, 58)]
    assert len(usual_boundaries(8)) == 3 and usual_boundaries(61) == (2, 30, 58) and usual_boundaries(6) == (1, 3, 5)


def test_versions() -> None:
    assert version_tuple("0.5.12.post1") > version_tuple("0.5.12") and version_tuple("0.5.9rc1") < (0, 5, 10)
    with pytest.raises(K2Error):
        version_tuple("main")


@given(
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True),
    st.integers(0, 10**6),
    st.lists(st.integers(0, 400), unique=True, max_size=8).map(sorted),
    st.from_regex(r"[a-f0-9]{0,8}", fullmatch=True),
)
def test_a_request_survives_its_rid(run: str, index: int, cuts: list[int], nonce: str) -> None:
    spans = tuple(zip(cuts[::2], cuts[1::2], strict=False))
    request = CaptureRequest(run, index, 400, spans, nonce)
    assert is_capture(request.to_rid()) and parse_rid(request.to_rid()) == request


@pytest.mark.parametrize(
    "rid", ["k2c:../x:1:5:-:n", "k2c:a/b:1:5:-:n", "k2c:.hid:1:5:-:n", "k2c:r:1:0:-:n", "k2c:r:1:5:3-9:n", "k2c:r:1:5:3-3:n", "k2c:r:x:5:-:n", "k2c:r:1:5:-", "other"]
)
def test_rids_that_would_leave_the_root_or_the_sample_are_no_requests(rid: str) -> None:
    assert parse_rid(rid) is None


class Leases(RuleBasedStateMachine):
    """Whatever happens to servers, no sample is lost and none is counted twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable.of(range(12), done=[0, 5], max_tries=3)
        self.now = 0.0

    @rule(worker=st.sampled_from("ab"), count=st.integers(1, 4))
    def take(self, worker: str, count: int) -> None:
        got = self.table.take(worker, count, self.now)
        assert len(set(got)) == len(got) and not set(got) & self.table.done

    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        if self.table.leased:
            index = data.draw(st.sampled_from(sorted(self.table.leased)))
            self.table.answered(index, self.table.leased[index][0], self.now)

    @rule(indices=st.sets(st.integers(0, 11), max_size=3))
    def publish(self, indices: set[int]) -> None:
        before = len(self.table.done)
        assert self.table.published(indices) == len(self.table.done) - before

    @rule(index=st.integers(0, 11), counts=st.booleans())
    def give_back(self, index: int, counts: bool) -> None:
        self.table.give_back(index, "why", counts=counts)

    @rule(worker=st.sampled_from("ab"))
    def lose(self, worker: str) -> None:
        self.table.lose(worker)
        assert not [i for i, (w, _) in self.table.leased.items() if w == worker]

    @rule(step=st.floats(0, 1000))
    def pass_time(self, step: float) -> None:
        self.now += step
        self.table.expire(self.now)

    @invariant()
    def every_sample_is_in_exactly_one_place(self) -> None:
        t = self.table
        waiting = set(t.waiting) - t.done  # a late publication is skipped when its turn comes
        places = [waiting, set(t.leased), set(t.sent), t.done, set(t.failed)]
        assert set().union(*places) == set(range(12))
        assert sum(map(len, places)) == 12


Leases.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestLeases = Leases.TestCase


def test_a_sample_that_always_fails_ends_as_failed_with_its_reason() -> None:
    table = LeaseTable.of([1], max_tries=2)
    for _ in range(2):
        assert table.take("a", 1, 0.0) == [1]
        table.give_back(1, "no such luck")
    assert table.failed == {1: "no such luck"} and table.left == 0


def test_the_plugin_is_found_by_its_entry_point(tmp_path: Path) -> None:
    import os
    import subprocess
    import sys

    site = make_site(tmp_path / "site")
    make_site(tmp_path / "site")  # again: nothing breaks
    code = (
        "import importlib.metadata as m, json, sys;"
        "e = [x for x in m.entry_points(group='sglang.srt.plugins') if x.name == 'k2tui_capture'];"
        "e[0].load()();"
        "print(json.dumps([len(e) > 0, [n for n in sys.modules if n.split('.')[0] in ('sglang', 'torch', 'httpx', 'textual')]]))"
    )
    env = {k: v for k, v in os.environ.items() if k != "K2TUI_CAPTURE_DIR"}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**env, "PYTHONPATH": str(site)}, check=True)
    # off: found, called, and nothing was imported or hooked
    assert json.loads(out.stdout) == [True, []]


def test_default_capture_holds_both_readings_of_a_draft() -> None:
    assert layer_ids.wanted_boundaries(61, None) == (2, 3, 30, 31, 58, 59)
    assert layer_ids.wanted_boundaries(61, "3, 31,59") == (3, 31, 59)
    with pytest.raises(K2Error, match=r"0\.\.60"):
        layer_ids.wanted_boundaries(61, "61")


@pytest.mark.parametrize(
    ("stall_s", "write_s", "hash_s", "limit"),
    [(0.0, 3.0, 0.5, "prefill"), (0.6, 3.0, 0.5, "disk"), (0.6, 1.0, 2.5, "copy"), (0.6, 0.1, 0.1, "copy")],
)
def test_what_limits_is_told_by_what_the_server_waits_for(stall_s: float, write_s: float, hash_s: float, limit: str) -> None:
    """Four writer threads, one second: a server that waits for none of them is limited by its own prefill."""
    from k2tui.capture.client import Extraction, Speed

    seen: list[Speed] = []
    work = Extraction("r", ["http://a"], lambda i: ([1], [1]), [1], LeaseTable.of([0]), on_speed=seen.append)
    state = work._states["http://a"]
    state.threads, state.stall_s, state.write_s, state.hash_s = 4, stall_s, write_s, hash_s
    work._report(work._tick[0] + 1.0)
    assert [s.limit for s in seen] == [limit]


def test_a_capture_root_has_one_name_whoever_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    from k2tui.capture.control import Control, root_id

    assert root_id(tmp_path / "nothing") == ""
    assert Control(tmp_path / "a").root_id == Control(tmp_path / "a").root_id == root_id(tmp_path / "a") != ""
    assert Control(tmp_path / "b").root_id != root_id(tmp_path / "a")

    def no_links(*args: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    assert Control(tmp_path / "c").root_id == Control(tmp_path / "c").root_id != ""
    assert [p.name for p in (tmp_path / "c" / ".k2tui-capture").iterdir()] == ["id"]


@pytest.mark.parametrize(("missing", "words"), [("torch", "--no-proof goes without torch"), ("numpy", "[train]")])
def test_a_base_install_is_told_what_extract_needs(tmp_path: Path, missing: str, words: str) -> None:
    import subprocess
    import sys

    code = (
        "import importlib.util as u, sys; real = u.find_spec;"
        f"u.find_spec = lambda name, *a: None if name == {missing!r} else real(name, *a);"
        "from k2tui.cli import main; sys.exit(main(['extract', '--data', 'd', '--out', 'o', '--url', 'http://127.0.0.1:9']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1 and f"extract needs {missing} here" in done.stderr and words in done.stderr
