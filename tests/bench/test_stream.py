"""The parser: any slicing of the same bytes gives the same events; broken bytes become named errors."""

from __future__ import annotations

import itertools
import json
from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k2tui.loadgen.stream import Answer, Exchange, ProtocolError, take_plain

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(value: object, eol: bytes = b"\n", compact: bool = True) -> bytes:
    text = json.dumps(value, separators=(",", ":") if compact else None)
    return b"data: " + text.encode() + eol + eol


def completion(text: str, finish: str | None = None, **more: object) -> dict[str, object]:
    return {"id": "x", "choices": [{"index": 0, "text": text, "finish_reason": finish}], **more}


def generate(total: int, finish: object = None) -> dict[str, object]:
    return {
        "text": "w " * total,
        "output_ids": [7] * total,
        "meta_info": {
            "id": "a",
            "finish_reason": finish,
            "prompt_tokens": 5,
            "completion_tokens": total,
            "cached_tokens": 2,
        },
    }


def openai_stream(
    texts: list[str], *, eol: bytes = b"\n", compact: bool = True, usage: bool = True, each: bool = False
) -> bytes:
    out = HEAD
    total = 0
    for t in texts:
        total += 1
        more: dict[str, Any] = (
            {"usage": {"prompt_tokens": 3, "completion_tokens": total, "x": 0}} if each else {"usage": None}
        )
        out += chunk(event(completion(t, **more), eol, compact))
    out += chunk(event(completion("", "length"), eol, compact))
    if usage:
        out += chunk(
            event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": total}}, eol, compact)
        )
    return out + chunk(b"data: [DONE]" + eol + eol) + b"0\r\n\r\n"


def feed(data: bytes, cuts: list[int], api: str = "completions", asked: int = 8) -> Exchange:
    """One exchange fed piece by piece; the stamp of a read is its number."""
    ex = Exchange(0, api, asked)
    edges = sorted({c % (len(data) + 1) for c in cuts} | {0, len(data)})
    done = False
    for n, (a, b) in enumerate(itertools.pairwise(edges), 1):
        assert not done
        done = ex.receive(data[a:b], n * 1000)
    return ex


words = st.lists(
    st.sampled_from(
        ["a", " tok", "ä", "\n\n", '"error"', "data: x", '"finish_reason":null', "0\r\n\r\n", "\\"]
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=120, deadline=None)
@given(
    words,
    st.lists(st.integers(0, 5000), max_size=20),
    st.booleans(),
    st.booleans(),
    st.sampled_from([b"\n", b"\r\n"]),
)
def test_any_slicing_gives_the_same_events(
    texts: list[str], cuts: list[int], compact: bool, each: bool, eol: bytes
) -> None:
    data = openai_stream(texts, eol=eol, compact=compact, each=each)
    whole, sliced = feed(data, []), feed(data, cuts)
    assert whole.done and sliced.done
    assert (
        (whole.error, whole.finish, whole.total_tokens)
        == (sliced.error, sliced.finish, sliced.total_tokens)
        == ("", "length", len(texts))
    )
    a, b = whole.record(0), sliced.record(0)
    assert len(a.stamps_ns) == len(b.stamps_ns) == len(texts)
    assert a.tokens == b.tokens == array("i", [1] * len(texts))
    assert list(b.stamps_ns) == sorted(b.stamps_ns)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=10),
    st.lists(st.integers(0, 9000), max_size=20),
    st.booleans(),
)
def test_generate_counts_tokens_of_each_chunk(steps: list[int], cuts: list[int], one_by_one: bool) -> None:
    data, total = HEAD, 0
    bounds: list[int] = []
    for i, n in enumerate(steps):
        total += n
        data += chunk(event(generate(total, {"type": "length"} if i == len(steps) - 1 else None)))
        bounds.append(len(data))
    data += chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    ex = feed(data, bounds if one_by_one else cuts, "generate", total)
    assert ex.done and not ex.error
    record = ex.record(0)
    assert list(record.tokens) == steps
    assert record.output_tokens == total and record.prompt_tokens == 5 and record.cached_tokens == 2
    assert not record.is_short
    if one_by_one:
        assert record.coalesced == 0
        assert list(record.stamps_ns) == [1000 * (i + 1) for i in range(len(steps))]


class Spy(Exchange):
    """Remembers which reads went to the full parser."""

    def __init__(self) -> None:
        super().__init__(0, "completions", 6)
        self.slow: list[bytes] = []

    def _receive_slow(self, data: bytes, stamp: int, fresh: int) -> bool:
        self.slow.append(data)
        return super()._receive_slow(data, stamp, fresh)


def test_quick_path_is_taken_and_agrees() -> None:
    ex = Spy()
    ex.receive(HEAD, 0)
    for i in range(6):
        ex.receive(chunk(event(completion(" tok", usage=None))), 1 + i)
    assert len(ex.slow) == 2  # the head and the first event, from which it learned
    assert list(ex.stamps) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "spoiled",
    [
        chunk(event({"error": {"message": "boom"}})),  # an error
        chunk(event(completion("", "length"))),  # the end
        chunk(event(completion("a", usage=None)) + event(completion("b", usage=None))),  # two events
        chunk(event(completion("a", usage=None)))[:-2],  # not whole
        chunk(event(completion("a", usage=None))) + b"0\r\n\r\n",  # more behind it
    ],
)
def test_quick_path_leaves_everything_odd_to_the_parser(spoiled: bytes) -> None:
    ex = Spy()
    ex.receive(HEAD, 1)
    for i in range(6):
        ex.receive(chunk(event(completion("a", usage=None))), 2 + i)
    ex.slow.clear()
    good = chunk(event(completion("a", usage=None)))
    ex.receive(good + good + spoiled, 50)
    assert len(ex.slow) == 1 and spoiled.endswith(ex.slow[0])  # what came before it was taken quickly
    assert ex.coalesced >= 1


def feed_together(pieces: list[list[bytes]], api: str) -> list[Exchange]:
    """Several streams read by read, as the engine does it: plain reads of one wake-up go through take_plain."""
    found = [Exchange(i, api, 1) for i in range(len(pieces))]
    for at in range(max(map(len, pieces))):
        ready = [(ex, p[at]) for ex, p in zip(found, pieces, strict=True) if at < len(p) and not ex.done]
        way = next((ex.plain for ex, _ in ready if ex.plain is not None), None)
        batch = [(ex, d) for ex, d in ready if way and ex.plain is way and d.endswith(way.tail)]
        taken = {ex.index for ex, _ in batch}
        exchanges, reads = [ex for ex, _ in batch], [d for _, d in batch]
        if way is None or not batch or not take_plain(way, exchanges, reads, [at] * len(batch)):
            taken = set()
        for ex, data in ready:
            if ex.index not in taken:
                ex.receive(data, at)
    return found


@settings(max_examples=120, deadline=None)
@given(
    st.lists(
        st.lists(
            st.sampled_from(
                ["a", " tok", 'q"uote', "back\\", "", "nl\n", "ä", '"finish_reason":null', "x" * 250]
            ),
            min_size=1,
            max_size=20,
        ),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from(["completions", "generate"]),
    st.booleans(),
    st.data(),
)
def test_streams_taken_together_agree_with_the_parser(
    streams: list[list[str]], api: str, upper: bool, data: st.DataObject
) -> None:
    """Many streams at a time give what the full parser gives for each alone, whatever one of them holds."""
    all_pieces: list[list[bytes]] = []
    for texts in streams:
        pieces = [HEAD]
        said = ""
        for i, t in enumerate(texts):
            said += t
            body = completion(t, usage=None) if api == "completions" else generate(i + 1)
            if api == "generate":
                body["text"] = said
            piece = chunk(event(body))
            if upper:
                size, _, rest = piece.partition(b"\r\n")
                piece = size.upper() + b"\r\n" + rest
            pieces.append(piece)
        odd = data.draw(
            st.sampled_from(
                [b"", chunk(event({"error": {"message": "boom"}})), b"5\r\nxx\n\n\r\n", b"zz\r\n\n\n\r\n"]
            )
        )
        if odd:
            pieces.insert(data.draw(st.integers(1, len(pieces))), odd)
        if data.draw(st.booleans()) and len(pieces) > 3:
            k = data.draw(st.integers(1, len(pieces) - 2))
            pieces[k : k + 2] = [pieces[k] + pieces[k + 1]]  # two reads in one
        pieces.append(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        all_pieces.append(pieces)
    together = feed_together(all_pieces, api)
    for ex, pieces in zip(together, all_pieces, strict=True):
        full = Exchange(0, api, 1)
        full.keep_text = True  # never quick
        for i, piece in enumerate(pieces):
            if full.done:
                break
            full.receive(piece, i)
        assert (ex.error, ex.done, ex.t_first, ex.coalesced) == (
            full.error,
            full.done,
            full.t_first,
            full.coalesced,
        )
        assert (ex.stamps, ex.total_tokens) == (full.stamps, full.total_tokens)
        if api == "generate":
            assert ex.cumulative == full.cumulative


def test_streams_of_one_wake_up_are_taken_together_without_the_parser() -> None:
    good = chunk(event(completion("a", usage=None)))
    spies = [Spy() for _ in range(3)]
    for spy in spies:
        spy.receive(HEAD + good, 1)
        spy.slow.clear()
    way = spies[0].plain
    assert way is not None and all(spy.plain is way for spy in spies)
    assert take_plain(way, spies, [good] * 3, [5, 6, 7])
    assert [spy.stamps for spy in spies] == [[1, 5], [1, 6], [1, 7]] and not any(spy.slow for spy in spies)
    # one that is not plain: nothing is taken, each goes its own way
    for bad in (
        chunk(event({"error": "x", **completion("a", usage=None)})),
        chunk(event(completion("a", usage=None)) * 2),
        b"0" + good,
        good[:-4] + b"\n\r\n",
    ):
        assert not take_plain(way, spies, [good, bad, good], [8, 8, 8])
    assert not chunk(event(completion("", "length"))).endswith(way.tail)
    assert [len(spy.stamps) for spy in spies] == [2, 2, 2]


def test_role_chunk_is_no_token() -> None:
    def delta(**d: object) -> bytes:
        return chunk(event({"choices": [{"index": 0, "delta": d, "finish_reason": None}]}))

    ex = Exchange(0, "chat", 2)
    ex.receive(HEAD + delta(role="assistant", content=""), 10)
    assert ex.t_first == 0
    ex.receive(delta(reasoning_content="hm"), 20)
    ex.receive(delta(content="a"), 30)
    assert ex.t_first == 20 and list(ex.stamps) == [20, 30]


def test_tokens_are_shared_out_by_text_when_the_server_gives_only_a_total() -> None:
    data = HEAD
    for n in (1, 4, 2, 3):
        data += chunk(event(completion(" tok" * n, usage=None)))
    data += chunk(event(completion("", "length"))) + chunk(
        event({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 10}})
    )
    data += chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    record = feed(data, [], asked=10).record(0)
    assert list(record.tokens) == [1, 4, 2, 3] and record.spread == "text" and record.count == "server"


def test_acceptance_comes_from_the_request() -> None:
    meta = {
        "finish_reason": {"type": "length"}, "completion_tokens": 12, "prompt_tokens": 4, "spec_verify_ct": 5,
        "spec_num_correct_drafts": 7, "spec_num_proposed_drafts": 15, "spec_correct_drafts_histogram": [1, 2, 1, 1],
    }  # fmt: skip
    data = HEAD + chunk(event({"text": "x", "meta_info": meta})) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    r = feed(data, [], "generate", 12).record(0)
    assert (r.spec_verify_ct, r.spec_num_correct_drafts, r.spec_num_proposed_drafts) == (5, 7, 15)
    assert r.spec_histogram == (1, 2, 1, 1)


def test_acceptance_on_the_openai_route() -> None:
    ext = {"spec_tokens_details": [{"spec_verify_ct": 9}], "other": 1}
    ext2 = {
        "spec_tokens_details": {
            "spec_verify_ct": 5,
            "spec_num_correct_drafts": 3,
            "spec_num_proposed_drafts": 15,
        }
    }
    for one in (ext, ext2):
        data = (
            HEAD
            + chunk(event(completion("a", usage=None)))
            + chunk(event({**completion("", "length"), "sglext": one}))
        )
        data += chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
        ex = feed(data, [], asked=1)
        assert not ex.error
    assert (ex.verify, ex.correct, ex.proposed) == (5, 3, 15)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"HTTP/1.1 500 Oops\r\ncontent-length: 21\r\n\r\n" + b'{"error":{"message":1', "http_500"),
        (b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 19\r\n\r\n" + b'{"error":"no luck"}', "in_band"),
        (HEAD + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n", "empty"),
        (HEAD + chunk(event(completion("a"))) + b"0\r\n\r\n", "truncated"),
        (HEAD + chunk(event(completion("a"))) + chunk(event({"error": {"message": "x"}})) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n", "in_band"),
        (HEAD + chunk(b"data: {bad\n\n") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n", "protocol"),
        (HEAD + b"zz\r\n", "protocol"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "protocol"),
    ],
)  # fmt: skip
def test_everything_else_is_a_named_error(data: bytes, kind: str) -> None:
    for cuts in ([], list(range(0, len(data), 3))):
        ex = Exchange(0, "completions", 1)
        edges = sorted({*cuts, 0, len(data)})
        for a, b in itertools.pairwise(edges):
            if ex.receive(data[a:b], a):
                break
        assert ex.done and ex.error == kind


def test_server_that_closes() -> None:
    ex = Exchange(0, "completions", 4)
    ex.closed(5)
    assert ex.error == "reset"
    ex = Exchange(0, "completions", 4)
    ex.receive(HEAD + chunk(event(completion("a"))), 1)
    ex.closed(5)
    assert ex.error == "truncated"
    # HTTP/1.0 style: the body ends with the connection
    ex = Exchange(0, "completions", 1)
    ex.receive(
        b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
        + event(completion("a"))
        + event(completion("", "stop")),
        1,
    )
    ex.closed(9)
    assert ex.done and not ex.error and not ex.answer.keep_alive


def test_first_read_with_several_tokens_is_spread_by_the_streams_own_gap() -> None:
    event_ = chunk(event(completion("a", usage=None)))
    ex = Exchange(0, "completions", 6)
    ex.t_send = 5
    ex.receive(HEAD + event_ * 3, 1000)
    for i in range(5):
        ex.receive(event_, 1100 + 100 * i)
    record = ex.record(0)
    assert list(record.stamps_ns)[:4] == [800, 900, 1000, 1100]
    assert record.t_first_ns == 800 and record.coalesced == 2


def test_running_count_tells_tokens_without_text() -> None:
    """A model may begin with a token that has no text: the server's count is what makes it one; a role chunk is none."""

    def usage(n: int) -> dict[str, Any]:
        return {"usage": {"prompt_tokens": 1, "completion_tokens": n, "x": 0}}

    ex = Exchange(0, "completions", 2)
    ex.receive(HEAD + chunk(event(completion("", **usage(1)))), 10)
    ex.receive(chunk(event(completion("", **usage(2)))), 20)
    assert list(ex.stamps) == [10, 20] and ex.t_first == 10
    chat = Exchange(0, "chat", 2)
    role = {
        "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}],
        **usage(1),
    }
    chat.receive(HEAD + chunk(event(role)), 10)
    assert not chat.stamps


def test_endless_header_is_refused() -> None:
    answer = Answer()
    with pytest.raises(ProtocolError):
        for _ in range(100):
            answer.feed(b"x" * 1000)
