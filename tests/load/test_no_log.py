"""What is no log is not diagnosed, and confidence falls with the evidence."""

from __future__ import annotations

from pathlib import Path

import pytest

from k2tui.core.load import State
from k2tui.core.tracker import Evidence
from k2tui.engines._reading import Reading, read_whole

ROOT = Path(__file__).parent.parent.parent
NOW = 1_796_000_000.0
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


def read(data: str | bytes, **facts: object) -> Reading:
    raw = data.encode() if isinstance(data, str) else data
    return read_whole(raw, NOW, Evidence(is_complete=True, **facts))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name",
    ["README.md", "LICENSE", "docs/load.md", "docs/diagnosis.md", "docs/training.md", "docs/glossary.md", "k2tui/core/diagnosis_rules.py", "k2tui/engines/sglang.py"],
)  # fmt: skip
def test_prose_and_code_about_failures_are_no_failures(name):
    reading = read((ROOT / name).read_bytes())
    assert (reading.view.state, reading.view.root_cause, reading.view.proof_line) == (State.UNKNOWN, "", "")


def test_a_log_of_another_program_is_unknown():
    lines = [f"2026-11-29 18:06:{n:02d} status installed libfoo:amd64 1.{n}" for n in range(50)]
    assert read("\n".join(lines)).view.state is State.UNKNOWN


def test_a_job_that_lives_and_has_printed_something_is_starting():
    assert read("hello\n", alive=True).view.state is State.LOADING


def test_confidence_falls_with_the_evidence():
    head = "".join(
        f"[2026-11-29 18:06:{n:02d} TP0] Load weight begin. avail mem=138.34 GB\n" for n in range(20)
    )
    bare, said, whole = (
        read("CUDA out of memory"),
        read(OOM),
        read(head + f"[2026-11-29 18:07:00 TP0] {OOM}\n"),
    )
    told = read(OOM, exit_code=1)
    for reading in (bare, said, whole, told):
        assert reading.view.root_cause == "gpu_oom_weights"
    assert (
        (bare.view.confidence or 1) < (said.view.confidence or 1) < 0.6 < 0.9 < (whole.view.confidence or 0)
    )
    assert (told.view.confidence or 0) > 0.9


@pytest.mark.parametrize(
    "line",
    [
        "[2026-11-29 18:06:22 TP0] Load weight end. elapsed=... s, type=X",
        "[2026-11-29 18:06:22 TP0] Capture cuda graph end. Time elapsed: .. s",
        "INFO 11-29 18:06:22 [x.py:1] Loading weights took ... seconds",
        "INFO 11-29 18:06:22 [x.py:1] SpecDecoding metrics: Mean acceptance length: .., Draft acceptance rate: ..",
        "INFO 11-29 18:06:22 [x.py:1] SpecDecoding metrics: Mean acceptance length: 2.1., Draft acceptance rate: 50.0%.",
        "[2026-11-29 18:06:22 TP0] Load weight begin. avail mem=.. GB",
        OOM
        + " Process 1 has .. GiB memory in use, this process has .. GiB memory in use; total capacity of .. GiB",
    ],
)
def test_numbers_that_are_none_do_not_crash(line):
    read(line)


def test_binary_is_passed_over_and_its_words_prove_nothing():
    junk = bytes(range(128, 256)) * 40 + b"[Errno 98] Address already in use" + bytes(range(128, 256)) * 40
    reading = read((junk + b"\n") * 20)
    assert (reading.view.state, reading.findings) == (State.UNKNOWN, ())


@pytest.mark.parametrize(
    "line",
    [
        "ServerArgs(model_path='x', tp_size={n}, port={n})",
        "[2026-01-01 00:00:00 TP{n}] Load weight begin. avail mem={n} GB",
        "Loading safetensors checkpoint shards:  {n}% Completed | {n}/{n} [00:01<00:10,  1.00s/it]",
        "[2026-01-01 00:00:00] Decode batch, #running-req: {n}, #token: {n}, token usage: {n}.0, gen throughput (token/s): {n}.5, #queue-req: {n}",
        'INFO:     127.0.0.1:{n} - "GET /health HTTP/1.1" {n}',
        "{n}/{n} [{n}:{n}<{n}:{n}, {n}it/s, loss={n}]",
        "(APIServer pid={n}) INFO 01-01 00:00:00 [core.py:{n}] world_size={n}",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {n}.00 GiB. GPU {n} has a total capacity of {n} GiB",
        "[Errno 98] error while attempting to bind on address ('127.0.0.1', {n}): address already in use",
    ],
)
def test_a_number_of_six_thousand_digits(line: str) -> None:
    """Python refuses to read such a number; a log may hold one all the same, anywhere."""
    from k2tui.engines._reading import load_tracker

    text = (line.replace("{n}", "9" * 6000) + "\n").encode()
    for block in (text, b"The server is fired up and ready to roll!\n" + 3 * text, 3 * text.replace(b"\n", b"\r")):
        tracker = load_tracker()
        tracker.feed(block, 1_800_000_000.0)
        tracker.view(1_800_000_010.0)
