"""The device side of the plug-in, on tensors of this machine: pieces, chunks, mixed batches, fp8, loss rows."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from k2tui.capture.plugin import Capturer  # noqa: E402
from k2tui.capture.request import CaptureRequest  # noqa: E402
from k2tui.capture.ring import PinnedRing  # noqa: E402
from k2tui.capture.sink import Sink  # noqa: E402
from k2tui.states.layout import Manifest, loss_rows  # noqa: E402
from k2tui.states.reader import StatesReader  # noqa: E402
from k2tui.states.writer import WriterLimits, prepare_folder  # noqa: E402

H = 8
BOUNDS = (1, 2, 3, 5)


class _Stream:
    def wait_stream(self, other: Any) -> None: ...


class _Event:
    def record(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """make(device, run manifest fields) -> a capturer over a real sink; streams and events do nothing, copies are real."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: _Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda s: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, s: None)
    made: list[Sink] = []

    def build(gpu: bool, run: str, ring_b: int = 1 << 16, piece_b: int = 400, **fields: Any) -> Any:
        prepare_folder_of(tmp_path / run, **fields)
        facts = {"hidden_size": H, "num_hidden_layers": 6, "boundaries": list(BOUNDS)}
        sink = Sink(tmp_path, f"w{len(made)}", facts, WriterLimits(min_free_b=0, threads=3))
        made.append(sink)
        c: Any = Capturer.__new__(Capturer)
        c.torch, c.hidden_size, c.boundaries, c.sink, c.patience_s = torch, H, BOUNDS, sink, 5.0
        c.device = torch.device("cpu")
        c.stream = _Stream() if gpu else None
        c.ring = PinnedRing(torch.empty(ring_b, dtype=torch.uint8)) if gpu else None
        c.piece_b = piece_b
        return c

    yield build
    for sink in made:
        sink.close()


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
    c.sink.flush()
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
    c.sink.flush()
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
    c.sink.flush()
    assert StatesReader(tmp_path / "r").indices() == list(samples)


def test_a_prefix_hit_refuses_the_sample_by_name(make: Any, tmp_path: Path) -> None:
    c = make(False, "r")
    rid = CaptureRequest("r", 4, 10, ((5, 10),), "n").to_rid()
    batch = SimpleNamespace(rids=[rid], extend_prefix_lens_cpu=[6], extend_seq_lens_cpu=[4])
    c.take(torch.zeros(4, dtype=torch.int64), torch.zeros(4, H), [torch.zeros(4, H)] * len(BOUNDS), batch)
    assert "prefix cache" in c.sink.status()["runs"]["r"]["reasons"][4]
    c.sink.flush()
    assert len(StatesReader(tmp_path / "r", allow_empty=True)) == 0


def test_a_broken_batch_gives_samples_up_and_never_raises(make: Any) -> None:
    c = make(False, "r")
    rid = CaptureRequest("r", 1, 4, (), "n").to_rid()
    batch = SimpleNamespace(rids=[rid], extend_prefix_lens_cpu=[0], extend_seq_lens_cpu=[4])
    c.take(torch.zeros(4, dtype=torch.int64), torch.zeros(4, H), [torch.zeros(4, H)], batch)
    assert "1 aux states for 4 boundaries" in c.sink.status()["runs"]["r"]["reasons"][1]
