"""Refreshes of a bar that are passed over: everything the tracker knows is what reading piece by piece gives."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k2tui.core.diagnosis_rules import _near_text
from k2tui.core.loadlines import read_lines
from k2tui.core.tracker import LoadTracker
from k2tui.engines._reading import load_tracker

FIXTURES = Path(__file__).parent.parent / "fixtures"
NOW = 1_796_000_000.0
_GLYPHS = "▏▎▍▌▋▊▉"
_TITLES = (
    "Training Epoch 0: ", "Training Epoch 1: ", "", "Requests: ", "Map (num_proc=8): ", "Global step: ",
    "[k2tui] train  ", "Loading safetensors checkpoint shards: ", "Epoch 1 ", "エポック: ", "model-00001-of-00002.safetensors: ",
)  # fmt: skip
_TAILS = (
    "", ", loss={loss:.2f}, acc=0.{n:04d}", ", loss=0.00, acc=0.00", ", loss=nan, acc=0.00", ", lr=1e-05", ", step={n}, train_loss={loss:.4f}",
    ", loss=0.001, accuracy_0=0.9",
)  # fmt: skip
_OTHERS = (
    "{{'loss': {loss:.4f}, 'grad_norm': 1.{n}234567, 'learning_rate': 9.9e-05, 'epoch': 0.{n}}}",
    "{{'loss': {loss:.3f}, 'acc': 0.{n:03d}}}", "{{'loss': 0.0, 'acc': 0.0}}", " " * 40, "", "saving checkpoint-{n}", "Training step {n} done",
    "[2026-11-29 18:10:{n:02d}] step {n}/900 loss 3.1", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {n} MiB",
    "HTTP 50{n} Internal Server Error", "\x1b[A\x1b[1mx", "{n}/900 [00:01<00:02] 5%", "[Errno {n}]", "torch.compile of training {n}",
    "\x00\x01\x02", "Training completed", "write: No space left on device", "{{'train_runtime': 1.{n}}}",
)  # fmt: skip


def bar(title: str, done: int, total: int, seconds: float, tail: str, width: int) -> str:
    full = done / total * width
    drawn = "█" * int(full) + (_GLYPHS[int(full % 1 * 7)] if full % 1 else "")

    def clock(s: float) -> str:
        s = int(s)
        return (
            f"{s // 3600}:{s % 3600 // 60:02d}:{s % 60:02d}" if s >= 3600 else f"{s // 60:02d}:{s % 60:02d}"
        )

    rate = done / seconds if seconds else 0
    pace = "?it/s" if not rate else f"{rate:5.2f}it/s" if rate >= 1 else f"{1 / rate:5.2f}s/it"
    left = clock((total - done) / rate) if rate else "?"
    tail = tail.format(n=done % 1000, loss=3.5 - done / total)
    return f"{title}{int(100 * done / total):3d}%|{drawn:<{width}}| {done}/{total} [{clock(seconds)}<{left}, {pace}{tail}]"


def run_of(title: str, start: int, count: int, step: int, pace: float, tails: list[str], other: str, every: int, end: str) -> str:  # fmt: skip
    total, width, out = 900, 10, list[str]()
    for n in range(count):
        done = min(total + 30, start + n * step // 2)
        out.append(bar(title, done, total, done * pace, tails[n * 7 % 5 % len(tails)], width) + end)
        if every and n % every == every - 1:
            out.append(other.format(n=n % 100, loss=3.5 - n / 900) + "\n")
    return "".join(out)


def known(tracker: LoadTracker) -> tuple[object, ...]:
    lane = tracker._lane
    start, found = lane._start, lane._collector
    return (
        tracker.view(NOW), tracker.findings(), tracker.history, lane._facts(0.0, None), list(start.rhythm), start.bar, lane._log_s,
        start.last_s, found.dead_steps, found.dead_lines if found.dead_steps else 0, list(map(_near_text, found._near)), found.numbers,
        {k: v for k, v in found.lines.items() if k != "dead step" or found.dead_steps}, found.server_errors, found.client_errors,
        start.curve, tracker.line_no,
    )  # fmt: skip


def fed(data: bytes, cuts: list[int]) -> LoadTracker:
    tracker = load_tracker()
    for a, b in pairwise([0, *sorted({min(c, len(data)) for c in cuts}), len(data)]):
        tracker.feed(data[a:b], NOW)
    return tracker


def in_full(data: bytes) -> LoadTracker:
    tracker = load_tracker()
    tracker.feed_lines(read_lines(data, 2026), NOW)
    tracker._cutter.line_no = data.count(b"\n") + 1
    return tracker


_RUNS = st.builds(
    run_of,
    st.sampled_from(_TITLES),
    st.integers(0, 300),
    st.integers(1, 500),
    st.integers(0, 4),
    st.sampled_from([0.01, 0.1, 0.9, 5.0]),
    st.lists(st.sampled_from(_TAILS), min_size=1, max_size=2),
    st.sampled_from(_OTHERS),
    st.sampled_from([0, 1, 2, 10, 70]),
    st.sampled_from(["\r", "\n", "\r\n", "   \r"]),
)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(
    st.sampled_from(["", "[2026-11-29 18:00:00] start\n", "***** Running training *****\n"]),
    st.lists(_RUNS, min_size=1, max_size=4),
    st.lists(st.integers(0, 90_000), max_size=6),
)  # fmt: skip
def test_runs_of_refreshes_say_what_each_of_them_says(head, runs, cuts):
    data = (head + "".join(runs) + "end\n").encode()
    whole = known(in_full(data))
    assert known(fed(data, [])) == whole
    assert known(fed(data, cuts)) == whole


def _read_in_full(data: bytes) -> int:
    """How many lines were read in full."""
    tracker, count = load_tracker(), 0
    take = tracker._lane.take

    def counted(*args, **named):
        nonlocal count
        count += 1
        return take(*args, **named)

    tracker._lane.take = counted  # type: ignore[method-assign]
    tracker.feed(data, NOW)
    assert tracker._lane._lines > 10 * count
    return count


@pytest.mark.parametrize(
    ("tails", "other", "every"),
    [(_TAILS[1:2], "", 0), ([""], _OTHERS[0], 10), ([""], _OTHERS[0], 1), (_TAILS[4:5], "", 0)],
)
def test_most_of_a_long_training_log_is_passed_over(tails, other, every):
    data = "".join(
        bar("Training: ", n, 9000, n * 0.2, tails[0], 10) + "\r" + (other.format(n=n % 100, loss=3.5 - n / 9000) + "\n" if every and n % every == 0 else "")
        for n in range(9000)
    )  # fmt: skip
    assert _read_in_full(data.encode()) < 1200
