"""Writer and reader: whole or nothing, bounded memory, kill -9, a full disk, fp8, checks that find what is broken."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

np = pytest.importorskip("numpy")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from k2tui.errors import K2Error  # noqa: E402
from k2tui.states import layout  # noqa: E402
from k2tui.states.check import check_states  # noqa: E402
from k2tui.states.layout import Manifest, from_spans, loss_rows, to_spans  # noqa: E402
from k2tui.states.reader import StatesReader  # noqa: E402
from k2tui.states.writer import StatesWriter, WriterLimits, put_rows, remove_stale, write_sample  # noqa: E402

H = 8
FREE = WriterLimits(min_free_b=0, threads=2)


def manifest(**fields: Any) -> Manifest:
    return Manifest(**{"hidden_size": H, "num_hidden_layers": 4, "boundaries": (1, 2, 3), **fields})


def sample(index: int, length: int | None = None) -> tuple[Any, Any, Any, Any]:
    rng = np.random.default_rng(index)
    t = length or int(rng.integers(3, 40))
    # finite bf16 patterns only
    bits = rng.integers(0, 0x7F7F, (t, 4 * H)).astype(np.uint16)
    return rng.integers(0, 99, t).astype(np.int32), (rng.random(t) > 0.5).astype(np.uint8), bits[:, : 3 * H], bits[:, 3 * H :]


def fill(folder: Path, indices: Any, limits: WriterLimits = FREE, name: str = "a", **fields: Any) -> StatesWriter:
    writer = StatesWriter(folder, manifest(**fields), name, limits)
    for i in indices:
        write_sample(writer, i, *sample(i))
    writer.close()
    return writer


def same(reader: StatesReader, index: int, length: int | None = None) -> None:
    raw = reader.raw(reader.position(index))
    ids, mask, aux, last = sample(index, length)
    assert raw["input_ids"].tolist() == ids.tolist() and raw["loss_mask"].tolist() == mask.tolist()
    assert np.array_equal(raw["aux"], aux)
    kept = {"all": np.ones(len(ids), bool), "loss": loss_rows(mask)}[reader.manifest.last_rows]
    assert np.array_equal(raw["last"], last[kept])


@pytest.mark.parametrize("last_rows", ["all", "loss"])
def test_what_goes_in_comes_out_over_many_shards(tmp_path: Path, last_rows: str) -> None:
    writer = fill(tmp_path / "s", range(60), WriterLimits(shard_bytes=6000, min_free_b=0), last_rows=last_rows)
    reader = StatesReader(tmp_path / "s")
    assert reader.indices() == list(range(60)) and len(reader.shards) > 5
    assert writer.stats.published == 60 and writer.stats.dropped == 0
    for i in range(60):
        same(reader, i)
    assert check_states([tmp_path / "s"]).ok


def test_shards_are_plain_safetensors(tmp_path: Path) -> None:
    safe_open = pytest.importorskip("safetensors").safe_open
    pytest.importorskip("torch")
    fill(tmp_path / "s", range(5), last_rows="loss")
    for path in layout.shard_paths(tmp_path / "s"):
        with safe_open(path, "pt") as fh:
            names = set(fh.keys())
            assert {"0.aux", "4.last", "2.input_ids"} <= names
            assert fh.get_tensor("3.aux").shape[1] == 3 * H


def test_torch_sample_has_zeros_where_nothing_was_kept(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    fill(tmp_path / "s", range(3), last_rows="loss")
    s = StatesReader(tmp_path / "s")[1]
    assert s.aux.dtype == torch.bfloat16 and s.last.shape == (len(s.input_ids), H)
    assert s.last_rows.tolist() == loss_rows(s.loss_mask.numpy()).tolist()
    assert not s.last[~s.last_rows].any() and s.input_ids.dtype == torch.int64


def test_shuffle_is_the_same_for_a_seed_and_another_for_the_next_epoch(tmp_path: Path) -> None:
    fill(tmp_path / "s", range(30))
    reader = StatesReader(tmp_path / "s")
    assert reader.order(1) == reader.order(1) != reader.order(1, epoch=1)
    assert sorted(reader.order(1)) == list(range(30))


@given(st.lists(st.integers(0, 1), min_size=1, max_size=60))
def test_spans_are_the_mask(mask: list[int]) -> None:
    from k2tui.capture.request import spans_of

    assert from_spans(to_spans(mask), len(mask)).tolist() == mask
    assert list(spans_of(mask)) == to_spans(mask)


@given(st.lists(st.integers(0, 1), min_size=1, max_size=60), st.integers(0, 6))
def test_loss_rows_cover_both_mask_rules(mask: list[int], k: int) -> None:
    """Step k at position t is taught by row u = t + 1 + k, kept when mask[u] (speculators) or mask[u - 1] (SpecForge)."""
    need = loss_rows(np.array(mask))
    for t in range(len(mask)):
        u = t + 1 + k
        if u < len(mask) and (mask[u] or mask[u - 1]):
            assert need[u]


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_order_of_chunks_of_several_samples(data: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Samples interleaved chunk by chunk arrive whole, whatever the cuts."""
    folder = tmp_path_factory.mktemp("s")
    writer = StatesWriter(folder, manifest(last_rows="loss"), "a", WriterLimits(shard_bytes=3000, min_free_b=0, threads=3))
    open_ = {}
    for i in range(data.draw(st.integers(1, 5))):
        ids, mask, aux, last = sample(i)
        open_[i] = [writer.begin(i, len(ids), mask), 0, ids, aux, last]
    count = len(open_)
    while open_:
        i = data.draw(st.sampled_from(sorted(open_)))
        slot, at, ids, aux, last = open_[i]
        n = data.draw(st.integers(1, len(ids) - at))
        assert put_rows(writer, slot, at, ids[at : at + n], {"aux": aux[at : at + n], "last": last[at : at + n]})
        open_[i][1] += n
        if open_[i][1] == len(ids):
            del open_[i]
    writer.close()
    reader = StatesReader(folder)
    assert len(reader) == count
    for i in range(count):
        same(reader, i)


def test_a_gap_or_a_repeat_gives_the_sample_up_and_no_other(tmp_path: Path) -> None:
    writer = StatesWriter(tmp_path / "s", manifest(), "a", FREE)
    ids, mask, aux, last = sample(0, 20)
    slot = writer.begin(0, 20, mask)
    assert put_rows(writer, slot, 0, ids[:5], {"aux": aux[:5], "last": last[:5]})
    assert not put_rows(writer, slot, 9, ids[9:], {"aux": aux[9:], "last": last[9:]})
    write_sample(writer, 1, *sample(1))
    writer.close()
    reader = StatesReader(tmp_path / "s")
    assert reader.indices() == [1]
    assert "rows 9" in writer.reasons[0]
    assert check_states([tmp_path / "s"]).ok


def test_memory_is_bounded_and_the_producer_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *a: (time.sleep(0.02), real(*a))[1])
    writer = StatesWriter(tmp_path / "s", manifest(), "a", WriterLimits(pending_bytes=4000, min_free_b=0, threads=1))
    worst = 0
    for i in range(30):
        write_sample(writer, i, *sample(i, 30))
        worst = max(worst, writer.stats.pending_bytes)
    assert worst <= 4000 and writer.stats.stall_s > 0.1
    writer.close()
    assert len(StatesReader(tmp_path / "s")) == 30


def test_patience_ends_in_a_refusal_never_in_a_cut_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *a: (gate.wait(60), real(*a))[1])
    writer = StatesWriter(tmp_path / "s", manifest(), "a", WriterLimits(pending_bytes=2000, min_free_b=0, threads=1))
    outcome = []
    for i in range(4):
        ids, mask, aux, last = sample(i, 20)
        slot = writer.begin(i, 20, mask)
        outcome.append(put_rows(writer, slot, 0, ids, {"aux": aux, "last": last}, patience_s=0.1))
    gate.set()
    writer.close()
    assert False in outcome
    reader = StatesReader(tmp_path / "s", allow_empty=True)
    assert reader.indices() == [i for i, ok in enumerate(outcome) if ok]
    for i in reader.indices():
        same(reader, i, 20)


def test_a_full_disk_pauses_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real file system of 1 MB would need root: the errno is the real one, from pwrite."""
    import errno

    full = threading.Event()
    full.set()
    real = os.pwrite

    def pwrite(*args: Any) -> int:
        if full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    monkeypatch.setattr(os, "pwrite", pwrite)
    writer = StatesWriter(tmp_path / "s", manifest(), "a", FREE)
    for i in range(5):
        write_sample(writer, i, *sample(i))
    end = time.monotonic() + 30
    while not writer.stats.paused and time.monotonic() < end:
        time.sleep(0.02)
    assert "full" in writer.stats.paused
    assert not layout.shard_paths(tmp_path / "s")
    full.clear()
    writer.close()
    assert StatesReader(tmp_path / "s").indices() == list(range(5))
    assert check_states([tmp_path / "s"]).ok and not writer.stats.paused


def test_room_that_must_stay_free_pauses_too(tmp_path: Path) -> None:
    writer = StatesWriter(tmp_path / "s", manifest(), "a", WriterLimits(min_free_b=1 << 60))
    write_sample(writer, 0, *sample(0))
    end = time.monotonic() + 30
    while not writer.stats.paused and time.monotonic() < end:
        time.sleep(0.02)
    assert "kept free" in writer.stats.paused
    writer.close(timeout_s=0.2)
    assert not layout.shard_paths(tmp_path / "s")


WRITER = """
import sys, itertools, numpy as np
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from test_states import fill, sample, manifest
from k2tui.states.writer import *
w = StatesWriter(Path(sys.argv[1]), manifest(), sys.argv[2], WriterLimits(shard_bytes=4000, min_free_b=0, idle_s=0.01))
print("up", flush=True)
for i in itertools.count(int(sys.argv[4])):
    write_sample(w, i, *sample(i))
"""


def test_kill_9_at_random_moments_leaves_only_whole_samples(tmp_path: Path) -> None:
    rng = random.Random(7)
    folder, start = tmp_path / "s", 0
    for turn in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder), f"w{turn}", str(Path(__file__).parent), str(start)],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert process.stdout and process.stdout.readline() == b"up\n"
        time.sleep(rng.uniform(0.02, 0.3))
        process.send_signal(signal.SIGKILL)
        process.wait()
        reader = StatesReader(folder, allow_empty=True)
        for i in reader.indices():
            same(reader, i)
        start = max(reader.indices(), default=-1) + 1
    report = check_states([folder])
    assert report.ok and report.samples > 10 and report.shadowed == 0
    remove_stale(folder)
    assert not list(folder.glob(".*partial"))


def test_a_live_writer_is_not_cleaned_away(tmp_path: Path) -> None:
    writer = StatesWriter(tmp_path / "s", manifest(), "a", FREE)
    write_sample(writer, 0, *sample(0))
    code = "import sys; from pathlib import Path; from k2tui.states.writer import remove_stale; print(remove_stale(Path(sys.argv[1])))"
    out = subprocess.run([sys.executable, "-c", code, str(tmp_path / "s")], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "0"
    writer.close()
    assert len(StatesReader(tmp_path / "s")) == 1


def test_a_sample_in_two_shards_counts_once(tmp_path: Path) -> None:
    fill(tmp_path / "s", range(4), name="a")
    fill(tmp_path / "s", range(2, 6), name="b")
    reader = StatesReader(tmp_path / "s")
    assert reader.indices() == list(range(6)) and reader.shadowed == 2
    report = check_states([tmp_path / "s"])
    assert report.ok and report.samples == 6 and report.shadowed == 2


def test_states_of_another_kind_are_refused_by_name(tmp_path: Path) -> None:
    fill(tmp_path / "s", range(2))
    with pytest.raises(K2Error, match="boundaries"):
        StatesWriter(tmp_path / "s", manifest(boundaries=(1, 2)), "b", FREE)
    with pytest.raises(K2Error, match="model_hash"):
        fill(tmp_path / "m", range(1), model_hash="aa")
        StatesWriter(tmp_path / "m", manifest(model_hash="bb"), "b", FREE)


def test_a_grown_data_file_is_noted(tmp_path: Path) -> None:
    fill(tmp_path / "s", range(2), data_rows=10, data_path="/d")
    fill(tmp_path / "s", range(2, 4), name="b", data_rows=15, data_path="/d")
    assert layout.read_manifest(tmp_path / "s").data_rows == 15


def damage(path: Path, at: int, value: bytes) -> None:
    with path.open("r+b") as fh:
        fh.seek(at)
        fh.write(value)


def test_check_finds_every_kind_of_damage(tmp_path: Path) -> None:
    rows = {i: (sample(i)[0].tolist(), sample(i)[1].tolist()) for i in range(6)}

    def fresh(name: str) -> tuple[Path, Path, Any]:
        folder = tmp_path / name
        fill(folder, range(6))
        path = layout.shard_paths(folder)[0]
        return folder, path, layout.read_header(path)

    folder, path, head = fresh("flip")
    damage(path, head.tensors["3.aux"].start + 5, b"\x11\x11")
    assert any("sample 3: aux does not match its checksum" in p for p in check_states([folder]).problems)
    assert check_states([folder], deep=False).ok

    folder, path, head = fresh("cut")
    os.truncate(path, path.stat().st_size - 10)
    assert any("cut short" in p for p in check_states([folder]).problems)

    folder, path, head = fresh("missing")
    report = check_states([folder], lambda i: rows[i], 8)
    assert report.missing == [6, 7] and not report.ok

    folder, path, head = fresh("other")
    report = check_states([folder], lambda i: (rows[i][0][::-1], rows[i][1]) if i == 2 else rows[i], 6)
    assert len(report.problems) == 1 and "sample 2: other tokens than line 3" in report.problems[0]

    writer = StatesWriter(tmp_path / "nan", manifest(), "a", FREE)
    ids, mask, aux, last = sample(0)
    aux = aux.copy()
    aux[1, 2] = 0x7FC0
    write_sample(writer, 0, ids, mask, aux, last)
    writer.close()
    assert any("NaN" in p for p in check_states([tmp_path / "nan"]).problems)


def test_the_verb_checks_and_shows(tmp_path: Path) -> None:
    fill(tmp_path / "s", range(3))
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    argv = [sys.executable, "-m", "k2tui", "states"]
    out = subprocess.run([*argv, "check", str(tmp_path / "s"), "--json"], capture_output=True, text=True, env=env)
    assert out.returncode == 0 and json.loads(out.stdout)["samples"] == 3 and json.loads(out.stdout)["schema"] == 1
    damage(layout.shard_paths(tmp_path / "s")[0], layout.read_header(layout.shard_paths(tmp_path / "s")[0]).tensors["0.aux"].start, b"zz")
    out = subprocess.run([*argv, "check", str(tmp_path / "s")], capture_output=True, text=True, env=env)
    assert out.returncode == 1 and "NOT clean" in out.stdout
    out = subprocess.run([*argv, "check", str(tmp_path / "none")], capture_output=True, text=True, env=env)
    assert out.returncode == 1 and "manifest.json" in out.stderr and "Traceback" not in out.stderr
