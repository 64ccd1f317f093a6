"""The device side of the plug-in, on tensors of this machine: pieces, chunks, mixed batches, fp8, loss rows."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from k2tui.capture.control import Control  # noqa: E402
from k2tui.capture.link import WriterLink  # noqa: E402
from k2tui.capture.plugin import Capturer  # noqa: E402
from k2tui.capture.request import CaptureRequest  # noqa: E402
from k2tui.capture.ring import PinnedRing  # noqa: E402
from k2tui.states.check import check_states  # noqa: E402
from k2tui.states.layout import Manifest, loss_rows  # noqa: E402
from k2tui.states.reader import StatesReader  # noqa: E402
from k2tui.states.writer import WriterLimits, prepare_folder  # noqa: E402

H = 8
BOUNDS = (1, 2, 3, 5)


class _Stream:
    def wait_stream(self, other: Any) -> None: ...


class _Event:
    def __init__(self, blocking: bool = False) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """make(device, run, ...manifest fields) -> a capturer with a writer process; streams and events do nothing, copies are real."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: _Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda s: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, s: None)
    made: list[WriterLink] = []

    def build(gpu: bool, run: str, ring_b: int = 1 << 16, piece_b: int = 400, **fields: Any) -> Any:
        prepare_folder_of(tmp_path / run, **fields)
        facts = {"hidden_size": H, "num_hidden_layers": 6, "boundaries": list(BOUNDS)}
        limits = WriterLimits(min_free_b=0, threads=3, pending_bytes=2 * ring_b)
        link = WriterLink(tmp_path, f"w{len(made)}", facts, limits, ring_b, ring_over)
        made.append(link)
        c: Any = Capturer.__new__(Capturer)
        c.torch, c.hidden_size, c.boundaries, c.link, c.patience_s = torch, H, BOUNDS, link, 5.0
        c.root, c._runs, c._lost, c._looked = tmp_path, {}, {}, set()
        c.device = torch.device("cpu")
        c.stream = _Stream() if gpu else None
        c.piece_b = piece_b
        return c

    yield build
    for link in made:
        link.close()


def ring_over(memory: Any) -> PinnedRing:
    return PinnedRing(torch.frombuffer(memory, dtype=torch.uint8))


def told(root: Path, run: str) -> dict[str, Any]:
    """What the writer process says of a run."""
    return next((w["runs"].get(run, {}) for w in Control(root).writers()), {})


def wait_for(what: Any, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)


def prepare_folder_of(folder: Path, **fields: Any) -> None:
    folder.mkdir()
    prepare_folder(
        folder, Manifest(**{"hidden_size": H, "num_hidden_layers": 6, "boundaries": (1, 3, 5), **fields})
    )


def feed(
    c: Any, samples: dict[int, tuple[Any, Any, Any, Any]], run: str, chunk: int, packed: bool = False
) -> None:
    """Sends all samples in interleaved chunks, two strangers' rows between them."""
    starts = dict.fromkeys(samples, 0)
    while any(starts[i] < len(samples[i][0]) for i in samples):
        rids, prefix, lengths = ["a stranger"], [0], [3]
        ids, aux, last = (
            [torch.zeros(3, dtype=torch.int64)],
            [torch.full((3, len(BOUNDS) * H), 9.0)],
            [torch.full((3, H), 9.0)],
        )
        for i, (tokens, mask, a, y) in samples.items():
            s, e = starts[i], min(starts[i] + chunk, len(tokens))
            if s == e:
                continue
            starts[i] = e
            half = mask.nonzero()[0]
            spans = tuple((int(p), int(p) + 1) for p in half)
            rids.append(CaptureRequest(run, i, len(tokens), spans, "n").to_rid())
            prefix.append(s)
            lengths.append(e - s)
            ids.append(tokens[s:e])
            aux.append(a[s:e])
            last.append(y[s:e])
        wide = torch.cat(aux).to(torch.bfloat16)
        pieces = wide if packed else [wide[:, k * H : (k + 1) * H].contiguous() for k in range(len(BOUNDS))]
        batch = SimpleNamespace(rids=rids, extend_prefix_lens_cpu=prefix, extend_seq_lens_cpu=lengths)
        c.take(torch.cat(ids), torch.cat(last).to(torch.bfloat16), pieces, batch)


def random_samples(count: int = 5, seed: int = 0) -> dict[int, tuple[Any, Any, Any, Any]]:
    g = torch.Generator().manual_seed(seed)
    out = {}
    for i in range(count):
        t = int(torch.randint(4, 40, (1,), generator=g))
        mask = (torch.rand(t, generator=g) > 0.5).numpy()
        mask[-1] = True
        out[i] = (
            torch.randint(0, 99, (t,), generator=g),
            mask,
            torch.randn(t, len(BOUNDS) * H, generator=g).to(torch.bfloat16),
            torch.randn(t, H, generator=g).to(torch.bfloat16),
        )
    return out


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("last_rows", ["all", "loss", "none"])
def test_rows_arrive_as_they_were(make: Any, tmp_path: Path, gpu: bool, packed: bool, last_rows: str) -> None:
    c = make(gpu, "r", last_rows=last_rows)
    samples = random_samples()
    feed(c, samples, "r", chunk=7, packed=packed)
    c.link.close()
    reader = StatesReader(tmp_path / "r")
    assert reader.indices() == list(samples)
    for i, (tokens, mask, aux, last) in samples.items():
        s = reader[reader.position(i)]
        assert s.input_ids.tolist() == tokens.tolist()
        assert s.loss_mask.tolist() == mask.astype(int).tolist()
        columns = [BOUNDS.index(b) for b in (1, 3, 5)]
        assert torch.equal(s.aux, torch.cat([aux[:, k * H : (k + 1) * H] for k in columns], -1))
        kept = {"all": np.ones(len(mask), bool), "loss": loss_rows(mask), "none": np.zeros(len(mask), bool)}[
            last_rows
        ]
        assert s.last_rows.tolist() == kept.tolist()
        assert torch.equal(s.last[s.last_rows], last[s.last_rows])


@pytest.mark.parametrize("gpu", [False, True])
def test_fp8_keeps_each_token_within_its_step(make: Any, tmp_path: Path, gpu: bool) -> None:
    c = make(gpu, "r", dtype="fp8_e4m3", last_rows="loss")
    samples = random_samples(seed=3)
    feed(c, samples, "r", chunk=9)
    c.link.close()
    reader = StatesReader(tmp_path / "r")
    for i, (_, _, aux, last) in samples.items():
        s = reader[reader.position(i)]
        for k, b in enumerate((1, 3, 5)):
            want = aux[:, BOUNDS.index(b) * H : (BOUNDS.index(b) + 1) * H].float()
            got = s.aux[:, k * H : (k + 1) * H].float()
            assert ((got - want).abs() <= want.abs().amax(-1, keepdim=True) * 0.07).all()
        rows = s.last_rows
        assert (
            (s.last[rows].float() - last[rows].float()).abs()
            <= last[rows].float().abs().amax(-1, keepdim=True) * 0.07
        ).all()


def test_a_ring_smaller_than_the_batch_makes_the_forward_wait(make: Any, tmp_path: Path) -> None:
    c = make(True, "r", ring_b=2048, piece_b=300)
    samples = random_samples(12, seed=5)
    feed(c, samples, "r", chunk=50)
    c.link.close()
    assert StatesReader(tmp_path / "r").indices() == list(samples)


def test_a_prefix_hit_refuses_the_sample_by_name(make: Any, tmp_path: Path) -> None:
    c = make(False, "r")
    rid = CaptureRequest("r", 4, 10, ((5, 10),), "n").to_rid()
    batch = SimpleNamespace(rids=[rid], extend_prefix_lens_cpu=[6], extend_seq_lens_cpu=[4])
    c.take(torch.zeros(4, dtype=torch.int64), torch.zeros(4, H), [torch.zeros(4, H)] * len(BOUNDS), batch)
    wait_for(lambda: "prefix cache" in told(tmp_path, "r").get("reasons", {}).get("4", ""))
    c.link.close()
    assert len(StatesReader(tmp_path / "r", allow_empty=True)) == 0


def test_a_broken_batch_gives_samples_up_and_never_raises(make: Any, tmp_path: Path) -> None:
    c = make(False, "r")
    rid = CaptureRequest("r", 1, 4, (), "n").to_rid()
    batch = SimpleNamespace(rids=[rid], extend_prefix_lens_cpu=[0], extend_seq_lens_cpu=[4])
    c.take(torch.zeros(4, dtype=torch.int64), torch.zeros(4, H), [torch.zeros(4, H)], batch)
    wait_for(lambda: "1 aux states for 4 boundaries" in told(tmp_path, "r").get("reasons", {}).get("1", ""))


def test_a_folder_made_anew_under_its_old_name_is_read_anew(make: Any, tmp_path: Path) -> None:
    """What every second proof does: the run's folder goes and comes back with other boundaries."""
    c = make(False, "r")
    feed(c, random_samples(3), "r", chunk=7)
    wait_for(lambda: told(tmp_path, "r").get("samples") == 3)
    shutil.rmtree(tmp_path / "r")
    prepare_folder_of(tmp_path / "r", boundaries=(2, 3), dtype="fp8_e4m3", last_rows="none")
    feed(c, random_samples(4, seed=9), "r", chunk=7)
    c.link.close()
    reader = StatesReader(tmp_path / "r")
    assert reader.indices() == [0, 1, 2, 3] and all(s.aux.shape[1] == 2 * H for s in reader)
    assert check_states([tmp_path / "r"]).ok


def test_the_writer_killed_at_random_moments_is_replaced_and_only_its_own_samples_are_lost(make: Any, tmp_path: Path) -> None:
    c = make(True, "r", ring_b=1 << 14)
    rng = random.Random(5)
    samples = random_samples(40, seed=5)
    for _ in range(3):
        before, fatal = c.link.pid, 4 * rng.randrange(10)
        for i in range(0, 40, 4):
            feed(c, {k: samples[k] for k in range(i, i + 4)}, "r", chunk=11)
            if i == fatal:
                os.kill(before, signal.SIGKILL)
        wait_for(lambda before=before: c.link.pid != before)
        wait_for(lambda: [w["pid"] for w in Control(tmp_path).writers()] == [c.link.pid])
    # every ring region is free again, whoever held it
    feed(c, samples, "r", chunk=11)
    c.link.close()
    assert not c.link.ring._used
    reader = StatesReader(tmp_path / "r")
    assert reader.indices() == list(range(40))
    for i, (tokens, _, aux, _) in samples.items():
        s = reader[reader.position(i)]
        columns = [BOUNDS.index(b) for b in (1, 3, 5)]
        assert s.input_ids.tolist() == tokens.tolist()
        assert torch.equal(s.aux, torch.cat([aux[:, k * H : (k + 1) * H] for k in columns], -1))
    assert check_states([tmp_path / "r"]).ok


def test_an_engine_that_dies_leaves_a_writer_that_publishes_what_is_whole(tmp_path: Path) -> None:
    prepare_folder_of(tmp_path / "r")
    code = ENGINE.format(tests=str(Path(__file__).parent), root=str(tmp_path))
    engine = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert engine.stdout
    writer = int(engine.stdout.readline())
    assert engine.stdout.readline() == "sent\n"
    engine.kill()
    engine.wait()
    wait_for(lambda: not Path(f"/proc/{writer}").exists() if sys.platform == "linux" else not Control(tmp_path).writers())
    reader = StatesReader(tmp_path / "r")
    assert reader.indices() == list(range(6)) and check_states([tmp_path / "r"]).ok
    assert not list((tmp_path / "r").glob(".*partial"))


ENGINE = """
import sys, time
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_plugin_copy import *
root = Path({root!r})
facts = dict(hidden_size=H, num_hidden_layers=6, boundaries=list(BOUNDS))
c = Capturer.__new__(Capturer)
c.torch, c.hidden_size, c.boundaries, c.patience_s = torch, H, BOUNDS, 5.0
c.root, c._runs, c._lost, c._looked, c.stream, c.piece_b = root, {{}}, {{}}, set(), None, 400
c.link = WriterLink(root, "w", facts, WriterLimits(min_free_b=0), 1 << 16, ring_over)
print(c.link.pid, flush=True)
feed(c, random_samples(6), "r", chunk=7)
# of a seventh sample only the beginning comes
rid = CaptureRequest("r", 6, 30, ((5, 30),), "n").to_rid()
batch = SimpleNamespace(rids=[rid], extend_prefix_lens_cpu=[0], extend_seq_lens_cpu=[9])
c.take(torch.zeros(9, dtype=torch.int64), torch.zeros(9, H), [torch.zeros(9, H)] * len(BOUNDS), batch)
wait_for(lambda: told(root, "r").get("samples") == 6)
print("sent", flush=True)
time.sleep(60)
"""
