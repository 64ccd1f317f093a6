"""The law of the stream: however the bytes were sliced on their way, the view is the same; junk never crashes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k2tui.core.loadlines import HEAD_B, TAIL_B, LineCutter, read_lines
from k2tui.core.tracker import LoadTracker
from k2tui.engines._reading import load_tracker

FIXTURES = Path(__file__).parent.parent / "fixtures"
NOW = 1_796_000_000.0
LOGS = [
    b"".join(
        line
        for line in (FIXTURES / name).read_bytes().splitlines(keepends=True)
        if b"Ignore import" not in line and b"server_args=" not in line
    )[-14_000:]
    for name in (
        "sglang/0.5.23/tp8-72shards.log",
        "sglang/0.5.12/tp2_eagle3.log",
        "sglang/0.5.23/tp2-scheduler-killed.log",
        "vllm/0.32.0/ready.log",
    )
]


def view_of(data: bytes, cuts: list[int]):
    tracker = load_tracker()
    places = [0, *sorted({min(c, len(data)) for c in cuts}), len(data)]
    for a, b in pairwise(places):
        tracker.feed(data[a:b], NOW)
    return tracker.view(NOW), tracker.findings(), tracker.history


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(LOGS), st.lists(st.integers(0, 14_000), max_size=40))
def test_any_slicing_gives_the_same_view(data, cuts):
    assert view_of(data, cuts) == view_of(data, [])


def test_byte_by_byte():
    data = LOGS[0][-3000:]
    assert view_of(data, list(range(len(data)))) == view_of(data, [])


_PIECES = st.one_of(
    st.binary(max_size=200),
    st.sampled_from(
        [
            b"\r", b"\n", b"\r\n", b"\x00", b"\xff\xfe", b"\x1b[31m", b"\x1b]0;t\x07", b"\x1b[", b"[2026-11-29 17:39:12 TP1] ",
            b"[2026-99-99 99:99:99] ", b"Load weight begin.", b"Load weight end. elapsed=1 s, type=X", b"shards:  5% Completed | 1/20 [00:01<00:02, 1.0it/s]",
            b"Decode batch, #running-req: 1, accept len: 1.00, gen throughput (token/s): 9", b"2025-07-25T07:53:08.21748708+08:00 stdout P part",
            b"2025-07-25T07:53:08.21748708+08:00 stdout F rest", b'{"log":"\\ud800x\\n"}', b"100%|##| 9999999999999/1 [", b"(EngineCore_DP0 pid=1) ERROR 13-45 99:00:00 [x.py:1] y",
            b"torch.OutOfMemoryError: CUDA out of memory. Process 1 has 9.9 GiB memory in use", b"[Errno 98]", "日本語のログ ロード中".encode(), b"server_args=ServerArgs(model_path='",
        ]
    ),
)  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(_PIECES, max_size=60), st.lists(st.integers(0, 4000), max_size=20))
def test_junk_never_crashes_and_slicing_does_not_matter(pieces, cuts):
    data = b"".join(pieces)
    whole = view_of(data, [])
    assert view_of(data, cuts) == whole
    for text in (whole[0].verdict, whole[0].proof_line, whole[0].hint):
        assert text.isprintable()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 3), st.lists(st.integers(0, 2_000_000), max_size=8))
def test_a_line_without_end_costs_bounded_memory(extra, cuts):
    data = bytes(range(14, 256)) * 1200 + b"x" * extra
    data = data * 5
    cutter, whole = LineCutter(), LineCutter()
    assert list(whole.feed(data)) == []
    places = [0, *sorted({min(c, len(data)) for c in cuts}), len(data)]
    for a, b in pairwise(places):
        assert list(cutter.feed(data[a:b])) == []
    assert cutter.pending() == whole.pending()
    assert len(cutter.pending()) <= HEAD_B + TAIL_B + 5
    assert list(cutter.feed(b"\n")) == list(whole.feed(b"\n"))


_SERVING = (FIXTURES / "sglang/0.5.23/llama-ready.log").read_bytes().splitlines(keepends=True)[-40:] + [
    b"[2026-11-29 18:10:00 TP0] Decode batch, #running-req: 3, #token: 21, accept len: 1.9%d, gen throughput (token/s): 3.12, #queue-req: %d\n"
    % (n % 9, n % 3)
    if n % 5
    else b'[2026-11-29 18:10:01] INFO:     10.0.0.7:4123%d - "GET /health HTTP/1.1" 200 OK\n' % n
    if n % 10
    else b"[2026-11-29 18:10:02 TP0] Received output for rid=%d but the state was deleted\n" % n
    if n % 20
    else b"[2026-11-29 18:10:03 TP0] KV cache pool is full. Retract requests. #%d\n" % n
    for n in range(120)
]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(
        [b"", b"sglang-1  | ", b"2026-11-29T18:10:00.123456789Z ", b"2026-11-29T18:10:00.1Z stdout F "]
    ),
    st.lists(st.integers(0, 20_000), max_size=30),
    st.integers(0, 120),
)
def test_lines_passed_over_in_bulk_change_nothing(prefix, cuts, drop):
    lines = _SERVING[: len(_SERVING) - drop]
    data = b"".join(prefix + line for line in lines)
    whole = view_of(data, [])
    assert view_of(data, cuts) == whole
    bare, _, _ = view_of(b"".join(lines), [])
    assert (whole[0].state, whole[0].phase, whole[0].decode) == (bare.state, bare.phase, bare.decode)


def test_a_second_container_is_noticed_among_bulk_lines():
    lines = [b"llm-1  | " + line for line in _SERVING]
    other = [b"llm-2  | " + line for line in _SERVING]
    tracker = load_tracker()
    tracker.feed(b"".join(lines + other), NOW)
    assert set(tracker.views(NOW)) == {"llm-1", "llm-2"}


def test_chatter_of_a_serving_log_is_read_once():
    chatter = [
        b"[2026-11-29 18:10:%02d TP0] Received output for rid=%d but the state was deleted in TokenizerManager.\n"
        % (n % 60, n)
        for n in range(3000)
    ]
    tracker = load_tracker()
    tracker.feed(b"".join(_SERVING), NOW)
    before = tracker._lane._lines
    tracker.feed(b"".join(chatter), NOW)
    assert tracker._lane._lines - before < 20
    tracker.feed(b"[2026-11-29 18:11:00 TP0] torch.OutOfMemoryError: CUDA out of memory.\n", NOW)
    assert tracker.findings()[-1].line.no == len(_SERVING) + 3001


_BULK = [
    b"[2026-11-29 18:10:00 TP0] Decode batch, #running-req: 3, #token: 21, accept len: 1.93, gen throughput (token/s): 3.12, #queue-req: 0\n",
    b"[2026-11-29 18:10:01 TP0] Decode batch, #running-req: 9, #token: 21, accept len: 1.05, gen throughput (token/s): 7.12, #queue-req: 4\n",
    b"[2026-11-29 18:10:02 TP0] Prefill batch, #new-seq: 1, #new-token: 812, #cached-token: 0, token usage: 0.30, #running-req: 12, #queue-req: 0, \n",
    b'[2026-11-29 18:10:03] INFO:     10.0.0.7:41230 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n',
    b'INFO:     10.0.0.7:41230 - "GET /health HTTP/1.1" 200 OK\n',
    b'[2026-11-29 18:10:04] INFO:     10.0.0.7:41230 - "GET /health HTTP/1.1" 200 OK\n',
    b'[2026-11-29 18:10:05] INFO:     10.0.0.7:41230 - "POST /generate HTTP/1.1" 503 Service Unavailable\n',
    b"[2026-11-29 18:10:06 TP0] Received output for rid=77 but the state was deleted in TokenizerManager.\n",
    b"[2026-11-29 18:10:06 TP0] KV cache pool is full. Retract requests. #retracted_reqs: 3\n",
    b"[2026-11-29 18:10:07 TP0] Decode batch, #running-req: 3, [2026-11-29 18:10:07 TP1] Scheduler hit an exception: Traceback\n",
    b"[2026-11-29 18:10:08 TP1] Decode batch, #running-req: 3, #token: 2\r\n",
    b"\rshards:  5% Completed | 1/20 [00:01<00:02, 1.0it/s]\r\n",
    b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n",
    b"[2026-11-29 18:10:09] SIGTERM received. signum=None frame=None. Draining requests and shutting down...\n",
    b"[2026-11-29 18:10:10] server_args=ServerArgs(model_path='/models/other', tp_size=2, port=30000)\n",
    b"[2026-11-29 18:10:11 TP0] Load weight begin. avail mem=138.34 GB\n",
    b"[2026-11-29 18:10:12] The server is fired up and ready to roll!\n",
    b"[2026-11-29 18:10:13] accept failed: too many clients, got signal: 2\n",
    b"[2026-11-29 18:10:13] accept failed: too many clients, got signal: 1\n",
    b"[2026-11-29 18:10:14] GPU 3 has fallen off the bus\n",
    b"[2026-11-29 18:10:15] write: No space left on device\n",
    b"[2026-11-29 18:10:16 TP0] write: 12 MiB left on device\n",
    b"[2026-11-29 18:10:17] Received sigquit from a child proc\n",
    b"\n",
]  # fmt: skip
_BULK_VLLM = [
    b"(APIServer pid=7) INFO 11-29 18:10:00 [loggers.py:123] Engine 000: Avg prompt throughput: 10.0 tokens/s, Avg generation throughput: 20.5 tokens/s, Running: 3 reqs, Waiting: 2 reqs, GPU KV cache usage: 1.2%, Prefix cache hit rate: 0.0%\n",
    b'(APIServer pid=7) INFO:     10.0.0.7:41230 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n',
    b'(APIServer pid=7) INFO:     10.0.0.7:41230 - "GET /health HTTP/1.1" 200 OK\n',
    b'INFO:     10.0.0.7:41230 - "GET /metrics HTTP/1.1" 200 OK\n',
    b'(APIServer pid=7) INFO:     10.0.0.7:41230 - "POST /v1/completions HTTP/1.1" 400 Bad Request\n',
    b'(APIServer pid=7) INFO:     10.0.0.7:41230 - "POST /v1/completions HTTP/1.1" 500 Internal Server Error\n',
    b"(EngineCore_DP0 pid=8) ERROR 11-29 18:10:03 [core.py:700] EngineCore encountered a fatal error.\n",
    b"(APIServer pid=7) INFO 11-29 18:10:04 [loggers.py:123] SpecDecoding metrics: Mean acceptance length: 2.31, Draft acceptance rate: 43.7%, Per-position acceptance rate: 0.7, 0.4, 0.2\n",
    b"(APIServer pid=7) INFO 11-29 18:10:05 [api_server.py:1807] vLLM API server version 0.32.0\n",
    b"\n",
]  # fmt: skip
_HEADS = {
    "SGLang": (FIXTURES / "sglang/0.5.23/llama-ready.log").read_bytes().splitlines(keepends=True)[-40:],
    "vLLM": (FIXTURES / "vllm/0.32.0/ready.log").read_bytes().splitlines(keepends=True)[-40:],
}


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(sorted(_HEADS)),
    st.sampled_from(
        [b"", b"2026-11-29T18:10:00.123456789Z ", b"2026-11-29T18:10:00.1Z stdout F ", b"llm  | "]
    ),
    st.lists(
        st.one_of(
            st.tuples(st.integers(0, 99), st.integers(1, 3)),
            st.tuples(st.integers(0, 4), st.integers(1, 90)),
        ),
        max_size=25,
    ),
    st.lists(st.integers(0, 30_000), max_size=8),
)
def test_runs_passed_over_in_bulk_say_what_line_by_line_says(head, prefix, runs, cuts):
    bulk = _BULK if head == "SGLang" else _BULK_VLLM
    lines = [*_HEADS[head], *(bulk[kind % len(bulk)] for kind, count in runs for _ in range(count))]
    data = b"".join(prefix + line for line in lines)
    one = load_tracker()
    one.feed_lines(read_lines(data, 2026), NOW)
    slow, (fast, _, history) = one.view(NOW), view_of(data, cuts)
    for name in (
        "state",
        "phase",
        "target",
        "decode",
        "root_cause",
        "proof_line",
        "proof_line_no",
        "verdict",
        "ready_s",
        "engine",
        "model",
    ):
        assert getattr(fast, name) == getattr(slow, name), name
    assert [(h.state, h.phase, h.model, h.first_line_no) for h in history] == [
        (h.state, h.phase, h.model, h.first_line_no) for h in one.history
    ]


_TWICE = [  # nothing that is serving: of its chatter neither lines nor ranks are counted
    b"/usr/lib/python3/dist-packages/sglang/srt/layers/quantization/awq/awq.py:53: UserWarning: Only CUDA, HIP and XPU support AWQ currently.\n",
    b"  warnings.warn(\n",
    b"[2026-11-29 17:33:0# TP#] Ignore import error when loading sglang.srt.models.llama#: No module named 'vllm#'\n",
    b"[2026-11-29 17:33:0# TP#] Init Unified Radix Cache. Tree Core: RustUnifiedTreeCore #\n",
    b"[1999-11-29 17:33:0# TP#] Init Unified Radix Cache. Tree Core: RustUnifiedTreeCore #\n",
    b"[2026-99-29 17:33:0#] Init Unified Radix Cache. Tree Core: RustUnifiedTreeCore #\n",
    b"[2026-11-29 17:33:0# TP#] Cuda graph is disabled[#026-11-29 17:33:0# TP1] Radix cache\n",
    b"[1999-11-29 17:33:0#] good day\n",
    b"[2026-11-29 17:33:0#] good day\n",
    b"[2026-11-29 17:33:0#] GOOD day\n",
    b"[1999-11-29 17:33:0#] GOOD day\n",
    b"(EngineCore_DP# pid=8#) INFO 11-29 18:27:1# [gpu_worker.py:#1] Using FlashAttention version #\n",
    b"(EngineCore_DP# pid=8#) ERROR 11-29 18:27:1# [core.py:#1] EngineCore failed to start.\n",
    b"INFO 11-29 18:27:1# [config.py:#1] This model supports multiple tasks: {'embed', 'generate#'}\n",
    b"rank #: a matter of GB#0\n",
    b"open: code: 2#\n",
    b"got signal: #\n",
    b"bind(): [Errno 9#] Address, code: 2#, exit code: -#\n",
    b"[2026-11-29 17:33:1# TP#] Load weight begin. avail mem=138.#4 GB\n",
    b"[2026-11-29 17:33:1# TP#] Load weight end. elapsed=#.5 s, type=LlamaForCausalLM, avail mem=12#.34 GB\n",
    b"Loading safetensors checkpoint shards:  #0% Completed | #/9 [00:0#<00:0#,  1.#it/s]\r",
    b"[2026-11-29 17:33:2#] server_args=ServerArgs(model_path='/models/m#', tp_size=2, port=3000#)\n",
    b"[2026-11-29 17:33:3# TP#] ValueError: world size # is not divisible by 3\n",
    b"train step #/9 loss 0.#1 acc 0.00\n",
    b"train step 1/# loss 0.1\n",
    b"train step 3/9 loss 0.00#1 acc 0.00\n",
    b"point C=1 repeat=1 completed=0/# \n",
    b"Loading shards:  10%|#| 1/# [00:01<00:01,  1.0it/s]\n",
    b"client: status 50#, HTTP/1.1 #03\n",
    b"2026-11-29 17:33:0# INFO waiting for #\n",
    b"\x1b[3#mcolours #\x1b[0m\n",
    b"caf\xc3\xa9 # caf\xff\n",
]  # fmt: skip


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.sampled_from(_TWICE), st.text("012345678", min_size=1, max_size=12)), max_size=60),
    st.lists(st.integers(0, 6000), max_size=8),
)
def test_lines_known_by_their_shape_say_what_they_say_when_read(rows, cuts):
    compare([(line, digit) for line, digits in rows for digit in digits], cuts)


@pytest.mark.parametrize("digits", ["012345678", "876543210"])
def test_digits_that_count_are_read(digits):
    for line in _TWICE:
        compare([(line, digit) for digit in digits], [])
    compare([(line, digit) for digit in digits for line in _TWICE], [])


def in_full(data: bytes):
    """A tracker that read every line in full and remembers no shape."""
    tracker = load_tracker()
    tracker._lane._tell = lambda *_: None  # type: ignore[method-assign]
    tracker.feed_lines(read_lines(data, 2026), NOW)
    return tracker


def compare(rows: list[tuple[bytes, str]], cuts: list[int]):
    """Known or read in full: the same."""
    data = b"".join(line.replace(b"#", digit.encode()) for line, digit in rows) + b"\n"
    slow, quick, lines = in_full(data), load_tracker(), load_tracker()
    view, findings, history = view_of(data, cuts)
    assert view == slow.view(NOW)
    assert findings == slow.findings()
    assert history == slow.history
    quick.feed(data, NOW)
    lines.feed_lines(read_lines(data, 2026), NOW)
    assert counted(quick) == counted(lines) == counted(slow)


def counted(tracker: LoadTracker):
    """What the tracker remembers beside its view."""
    found = tracker._lane._collector
    told = found.ignored_imports, found.numbers, found.server_errors, found.client_errors, found.dead_steps
    return tracker._lane._facts(0.0, None), told, tracker._lane._log_s


def test_a_line_of_a_known_shape_is_not_read_again():
    line = b"[2026-11-29 17:33:%02d TP%d] Init Unified Radix Cache. Tree Core: RustUnifiedTreeCore\n"
    tracker = load_tracker()
    read = 0
    take = tracker._lane.take

    def count(line, **options):
        nonlocal read
        read += 1
        take(line, **options)

    tracker._lane.take = count  # type: ignore[method-assign]
    tracker.feed(b"".join(line % (n % 60, n % 8) for n in range(400)), NOW)
    assert read < 5
    facts = tracker._lane._facts(0.0, None)
    assert (facts.lines, len(facts.ranks)) == (400, 8)
    assert facts.last_line is not None
    assert facts.last_line.no == 400
