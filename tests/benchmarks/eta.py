"""How good is the ETA? Replays simulated and recorded starts; prints the mean error at 10, 50 and 90 % of the shards.

    python tests/benchmarks/eta.py [--seeds 20]

tqdm: what its bar itself printed at that moment. "until ready" compares both with the moment when the server is ready (what a
person waits for); "shards only" with the end of the shard bar (all that tqdm claims to know).
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean

from k2tui.core.eta import LearnedEta, StartRecord
from k2tui.engines._grammar import seconds
from k2tui.engines._reading import load_tracker

FIXTURES = Path(__file__).parent.parent / "fixtures"
T0 = 1_790_000_000.0
Chunk = tuple[float, bytes]
_BAR = re.compile(rb"\| (\d+)/(\d+) \[([\d:]+)<([\d:?]+)")


def clock(value: float) -> str:
    whole = int(value)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60:02d}:{rest % 60:02d}"


def stamp(at_s: float) -> str:
    return time.strftime("[%Y-%m-%d %H:%M:%S]", time.localtime(at_s))


class Ema:
    """tqdm's own smoothing (0.3) of seconds a shard and of shards a refresh."""

    def __init__(self) -> None:
        self.last = 0.0
        self.calls = 0

    def __call__(self, value: float) -> float:
        self.last = 0.3 * value + 0.7 * self.last
        self.calls += 1
        return self.last / (1 - 0.7**self.calls)


def start_log(
    shard_s: Sequence[float], chance: random.Random, at_s: float = T0, *, graph_s: float = 40.0
) -> tuple[list[Chunk], float, float]:
    """A start as SGLang prints it: (when, bytes) chunks, end of the shards, ready. Phases outside the shards vary by 8 %."""
    near: Callable[[float], float] = lambda s: s * chance.gauss(1, 0.08)  # noqa: E731
    out: list[Chunk] = []
    t = at_s

    def say(text: str) -> None:
        out.append((t, f"{stamp(t)} {text}\n".encode()))

    say(
        "server_args={'model_path': '/models/sim', 'tp_size': 1, 'host': '127.0.0.1', 'port': 30000, 'speculative_algorithm': None}"
    )
    t += near(22)
    say("Init torch distributed begin.")
    t += near(3)
    say("Init torch distributed ends. elapsed=3 s, mem usage=0.9 GB")
    say("Load weight begin. avail mem=138.34 GB")
    total, bar0 = len(shard_s), t
    ema_t, ema_n = Ema(), Ema()
    printed_t, printed_n = t, 0
    out.append(
        (t, f"\rLoading safetensors checkpoint shards:   0% Completed | 0/{total} [00:00<?, ?it/s]".encode())
    )
    for n, took in enumerate(shard_s, 1):
        t += took
        if t - printed_t < 0.1 and n < total:
            continue  # tqdm's mininterval
        dt, dn = ema_t(t - printed_t), ema_n(n - printed_n)
        printed_t, printed_n = t, n
        rate = dn / dt if dt > 0 else 0.0
        left = clock((total - n) / rate) if rate else "?"
        speed = f"{rate:5.2f}it/s" if rate >= 1 else f"{1 / rate:5.2f}s/it"
        text = f"\rLoading safetensors checkpoint shards: {100 * n // total:3d}% Completed | {n}/{total} [{clock(t - bar0)}<{left}, {speed}]"
        out.append((t, text.encode()))
    shards_end = t
    t += near(1)
    out.append(
        (
            t,
            f"\n{stamp(t)} Load weight end. elapsed={t - bar0:.2f} s, type=SimForCausalLM, avail mem=66.31 GB, mem usage=72.60 GB.\n".encode(),
        )
    )
    t += near(2)
    say("KV Cache is allocated. #tokens: 4478986, K size: 34.17 GB, V size: 34.17 GB")
    say("Memory pool end. avail mem=7.90 GB")
    say("Capture cuda graph begin. This can take up to several minutes. avail mem=69.01 GB")
    t += near(graph_s)
    say(f"Capture cuda graph end. Time elapsed: {graph_s:.2f} s. mem usage=0.14 GB. avail mem=68.88 GB.")
    t += near(4)
    say("INFO:     Uvicorn running on http://127.0.0.1:30000 (Press CTRL+C to quit)")
    t += near(3)
    say("The server is fired up and ready to roll!")
    return out, shards_end, t


def warm(chance: random.Random, n: int = 64) -> list[float]:
    return [0.25 * chance.lognormvariate(0, 0.15) for _ in range(n)]


def cold(chance: random.Random, n: int = 64) -> list[float]:
    disk = chance.gauss(1.6, 0.15)
    return [disk * chance.lognormvariate(0, 0.25) for _ in range(n)]


def network(chance: random.Random, n: int = 64) -> list[float]:
    """Bursts: two or three shards at once, then a long wait; the link's speed drifts and differs from day to day."""
    day = chance.gauss(6, 1.2)
    out: list[float] = []
    while len(out) < n:
        burst = chance.choice((1, 2, 3))
        out += [0.2] * (burst - 1) + [burst * day * chance.lognormvariate(0, 0.35)]
        day *= chance.lognormvariate(0, 0.02)
    return out[:n]


def stalled(chance: random.Random, n: int = 64) -> list[float]:
    out = cold(chance, n)
    out[int(n * chance.uniform(0.25, 0.45))] += 120
    return out


def half_cached(chance: random.Random, n: int = 64) -> list[float]:
    cut = int(n * 0.4)
    return warm(chance, cut) + cold(chance, n - cut)


SCENES: dict[
    str, tuple[Callable[[random.Random], list[float]], list[Callable[[random.Random], list[float]]]]
] = {
    "warm page cache": (warm, [cold, warm, cold, warm, cold, warm]),
    "cold local disk": (cold, [cold, warm, cold, warm, cold, warm]),
    "slow network disk": (network, [network, warm, network, network, warm]),
    "stall in the middle": (stalled, [cold, warm, cold, warm, cold, warm]),
    "cache half warm": (half_cached, [cold, warm, cold, warm, half_cached, warm]),
}


def record_of(chunks: Sequence[Chunk]) -> StartRecord:
    tracker = load_tracker()
    for at_s, data in chunks:
        tracker.feed(data, at_s)
    record = tracker.record()
    assert record is not None
    return record


def play(
    chunks: Sequence[Chunk], ends_s: float, ready_s: float, history: Sequence[StartRecord]
) -> dict[int, tuple[float, float, float, float]]:
    """checkpoint % -> (our error, tqdm's error until ready; our error, tqdm's error until the shards' end), seconds."""
    tracker = load_tracker(eta=LearnedEta(history))
    out: dict[int, tuple[float, float, float, float]] = {}
    for at_s, data in chunks:
        tracker.feed(data, at_s)
        bars = _BAR.findall(data)
        if not bars:
            continue
        done, total, _, left_text = bars[-1]
        left = seconds(left_text.decode())
        for mark in (10, 50, 90):
            if mark not in out and int(done) >= mark / 100 * int(total) and left is not None:
                view = tracker.view(at_s)
                ours = view.eta_s if view.eta_s is not None else left
                phase = tracker.phase_left_s(at_s)
                out[mark] = (
                    abs(ours - (ready_s - at_s)),
                    abs(left - (ready_s - at_s)),
                    abs((phase if phase is not None else left) - (ends_s - at_s)),
                    abs(left - (ends_s - at_s)),
                )
    return out


def recorded_chunks(path: Path) -> tuple[list[Chunk], float, float] | None:
    """A recorded log cut at its bar refreshes and stamps, timed by its own stamps and bars."""
    data = path.read_bytes()
    ready = data.find(b"The server is fired up")
    data = data[: data.find(b"\n", ready) + 1] if ready >= 0 else data
    pieces = re.split(rb"(?=\r)|(?<=\n)", data)
    now, bar0, ends = 0.0, 0.0, 0.0
    out: list[Chunk] = []
    for piece in pieces:
        when = re.search(rb"\[(20\d\d-\d\d-\d\d \d\d:\d\d:\d\d)", piece)
        if when:
            now = time.mktime(time.strptime(when[1].decode(), "%Y-%m-%d %H:%M:%S"))
            bar0 = now
        bar = _BAR.search(piece)
        if bar and b"shards" in piece:
            now = max(now, bar0 + (seconds(bar[3].decode()) or 0.0))
            ends = now
        out.append((now, piece))
    first = next((t for t, _ in out if t), 0.0)
    return [(t or first, p) for t, p in out], ends, out[-1][0]


def shaken(record: StartRecord, chance: random.Random) -> StartRecord:
    k = {n: chance.gauss(1, 0.15) for n in range(len(record.phases))}
    slow = chance.gauss(1, 0.15)
    return StartRecord(
        id=f"{record.id} {chance.random()}", at_s=record.at_s - 1000, engine=record.engine, model=record.model, ready_s=record.ready_s,
        tp_size=record.tp_size, has_draft=record.has_draft, shards=record.shards,
        phases=tuple((p, s * k[n]) for n, (p, s) in enumerate(record.phases)), curve=tuple((f, s * slow) for f, s in record.curve),
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=20)
    seeds = parser.parse_args().seeds
    print(
        f"mean absolute error in seconds ({seeds} starts a row; history: 5 or 6 earlier starts of the same model on the same host)"
    )
    print(f"{'':24}{'until ready: ours / tqdm':>42}{'shards only: ours / tqdm':>42}")
    print(f"{'start':24}" + "".join(f"{m:>12} %" for m in (10, 50, 90)) * 2)
    all_ours: list[float] = []
    all_tqdm: list[float] = []

    def row(
        name: str, runs: list[dict[int, tuple[float, float, float, float]]], *, counts: bool = True
    ) -> None:
        cells: list[str] = []
        for a, b in ((0, 1), (2, 3)):
            for mark in (10, 50, 90):
                got = [r[mark] for r in runs if mark in r]
                ours, theirs = mean(g[a] for g in got), mean(g[b] for g in got)
                if a == 0 and counts:
                    all_ours.append(ours)
                    all_tqdm.append(theirs)
                cells.append(f"{ours:6.1f}/{theirs:<7.1f}")
        print(f"{name:24}" + "".join(cells))

    for name, (shards, before) in SCENES.items():
        runs = []
        fresh = []
        for seed in range(seeds):
            chance = random.Random(f"{name} {seed}")
            history = [
                record_of(start_log(kind(chance), chance, T0 - 86400 * (len(before) - n))[0])
                for n, kind in enumerate(before)
            ]
            chunks, ends, ready = start_log(shards(chance), chance)
            runs.append(play(chunks, ends, ready, history))
            fresh.append(play(chunks, ends, ready, []))
        row(name, runs)
        row("  (never started here)", fresh, counts=False)
    print()
    for path in sorted((FIXTURES / "sglang").glob("*/*.log")):
        made = recorded_chunks(path)
        if made is None:
            continue
        tracker = load_tracker()
        for at_s, data in made[0]:
            tracker.feed(data, at_s)
        record = tracker.record()
        if record is None:
            continue
        chance = random.Random(path.name)
        runs = [play(*made, [shaken(record, chance) for _ in range(5)]) for _ in range(5)]
        if all(runs):
            row(f"{path.parent.name} {path.stem}"[:23], runs)
    print(
        f"\nmean of all rows until ready: ours {mean(all_ours):.1f} s, tqdm {mean(all_tqdm):.1f} s ({mean(all_ours) / mean(all_tqdm):.0%})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
