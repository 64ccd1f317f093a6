"""One measured request, and the figures of many. Pure: times are given, nothing is read or sent.

Definitions (the version is part of the metric's name in the store; a changed meaning gets a new one):

ttft.v1        first event with at least one token (content, reasoning, tool call, text) - last byte of the request sent.
               The role chunk of a chat is not a token.
ttft_sched.v1  the same - the moment the request was due (open loop): the wait for a free slot is inside.
itl.v1         gap between two token events / tokens of the later one, once per such token.
icl.v1         gap between two token events, whatever they hold: what eyes see.
tpot.v1        (last token - first token) / (output tokens - 1), per request: SGLang's, vLLM's and MLPerf's meaning.
e2e.v1         last token - last byte of the request sent.
output_throughput.v1         output tokens of completed requests / (last token - first send).
output_throughput_steady.v1  tokens / s while the asked number of requests was running, by the tokens' own stamps.
peak_output_throughput.v2    most tokens in any second, by the tokens' own stamps (the window slides); never below output_throughput,
               which it is in a run shorter than a second. (v1, and what other tools give: whole seconds from the run's start.)
tok_s_user.v1  1000 / mean tpot.
accept_length.v1  sum of tokens / sum of verify steps; accept_rate.v1  sum of correct / sum of proposed drafts.
goodput.v1     requests / s that met every limit; failed requests count against.

Failed requests give no latency and no tokens; they are counted by class.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, repeat
from operator import add, mul, sub

from k2tui.core.stats import Estimate, block_bootstrap, mean, mean_interval, quantile, quantile_interval

VERSION = "v1"
VERSIONS = {"peak_output_throughput": "v2"}  # the others are VERSION
SECOND_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request. Times in ns from the run's start; 0 = did not happen. stamps_ns and tokens: one entry a token event."""

    index: int
    t_sched_ns: int
    t_send_ns: int
    t_first_ns: int = 0
    t_last_ns: int = 0
    t_done_ns: int = 0
    prompt_tokens: int | None = None
    output_tokens: int = 0
    asked_tokens: int = 0
    stamps_ns: array[int] = field(default_factory=lambda: array("q"))
    tokens: array[int] = field(default_factory=lambda: array("i"))
    cached_tokens: int | None = None
    spec_verify_ct: int = 0
    spec_num_correct_drafts: int = 0
    spec_num_proposed_drafts: int = 0
    spec_histogram: tuple[int, ...] = ()  # [k] = verify steps that accepted k drafts
    finish: str = ""
    http_status: int = 0
    error: str = ""  # class: "" = completed
    error_text: str = ""
    count: str = (
        "server"  # who counted output_tokens: server | finish (it said max_tokens was reached) | client
    )
    spread: str = (
        "exact"  # tokens per event: exact | text (shared out by the chunks' text) | chunk (one each)
    )
    coalesced: int = 0  # token events that shared a read with a later one
    session: int = -1
    turn: int = 0
    is_short: bool = False  # ignore_eos was asked for, yet the server stopped early

    @property
    def is_ok(self) -> bool:
        return not self.error

    @property
    def ttft_ns(self) -> int:
        return self.t_first_ns - self.t_send_ns

    @property
    def e2e_ns(self) -> int:
        return self.t_last_ns - self.t_send_ns

    @property
    def tpot_ns(self) -> float | None:
        rest = self.output_tokens - 1
        return (self.t_last_ns - self.t_first_ns) / rest if rest > 0 else None


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in ms; None = no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    name: str = ""

    def __str__(self) -> str:
        parts = [("ttft", self.ttft_ms), ("tpot", self.tpot_ms), ("e2e", self.e2e_ms)]
        text = ", ".join(f"{n} {v:g} ms" for n, v in parts if v is not None)
        return f"{self.name}: {text}" if self.name else text


# MLPerf Inference limits (TTFT / TPOT in ms), https://github.com/mlcommons/inference_policies
SLO_PRESETS: Mapping[str, Slo] = {
    s.name: s
    for s in (
        Slo(2000, 200, None, "llama2-70b"),
        Slo(450, 40, None, "llama2-70b-interactive"),
        Slo(2000, 100, None, "llama3.1-8b"),
        Slo(500, 30, None, "llama3.1-8b-interactive"),
        Slo(6000, 175, None, "llama3.1-405b"),
        Slo(4500, 80, None, "llama3.1-405b-interactive"),
        Slo(2000, 80, None, "deepseek-r1"),
        Slo(1500, 15, None, "deepseek-r1-interactive"),
        Slo(3000, 80, None, "gpt-oss-120b"),
        Slo(2000, 20, None, "gpt-oss-120b-interactive"),
    )
}


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure of a run. name carries its version; stat: mean | std | p50 | p90 | p95 | p99 | max | value."""

    name: str
    stat: str
    value: float
    unit: str
    lo: float | None = None
    hi: float | None = None
    n: int = 0


def inter_token_gaps(record: RequestRecord, out: list[int], chunks: list[int]) -> None:
    """Append the request's ITL samples (one a token) to `out` and its chunk gaps to `chunks`, both in ns."""
    stamps, tokens = record.stamps_ns, record.tokens
    if len(stamps) < 2:
        return
    gaps = list(map(sub, stamps[1:], stamps))
    chunks.extend(gaps)
    if record.output_tokens == len(stamps):
        out.extend(gaps)
        return
    carry = 0
    for gap, n in zip(gaps, tokens[1:], strict=False):
        if n <= 0:
            carry += gap  # an event without a token of its own: its time belongs to the next token
            continue
        share = (gap + carry) // n
        carry = 0
        if n == 1:
            out.append(share)
        else:
            out.extend([share] * n)


def _spread(name: str, values: Sequence[float], unit: str, scale: float = 1.0) -> list[Metric]:
    """mean, std and quantiles of one distribution, divided by `scale`; p50 and p99 with their intervals."""
    ordered = sorted(values)
    if not ordered:
        return []
    n = len(ordered)
    m = sum(ordered) / n
    sd = max(sum(map(mul, ordered, ordered)) / n - m * m, 0.0) ** 0.5
    full = f"{name}.{VERSION}"
    found = [Metric(full, "mean", m / scale, unit, n=n), Metric(full, "std", sd / scale, unit, n=n)]
    for stat, q in (("p50", 0.5), ("p99", 0.99)):
        est: Estimate = quantile_interval(ordered, q)
        lo = None if est.lo is None else est.lo / scale
        hi = None if est.hi is None else est.hi / scale
        found.append(Metric(full, stat, est.value / scale, unit, lo, hi, n))
    for stat, q in (("p90", 0.9), ("p95", 0.95)):
        found.append(Metric(full, stat, quantile(ordered, q) / scale, unit, n=n))
    found.append(Metric(full, "max", ordered[-1] / scale, unit, n=n))
    return found


def tokens_until(record: RequestRecord, times_ns: Sequence[int]) -> list[int]:
    """Tokens with a stamp before each of the (ascending) times."""
    stamps = record.stamps_ns
    at = [bisect_left(stamps, t) for t in times_ns]
    if record.output_tokens == len(stamps):
        return at
    before = [0, *accumulate(record.tokens)]
    return [before[i] for i in at]


def tokens_between(records: Iterable[RequestRecord], edges_ns: Sequence[int]) -> list[int]:
    """Tokens of all requests in each stretch [edge k, edge k+1)."""
    total = [0] * len(edges_ns)
    for r in records:
        total = list(map(add, total, tokens_until(r, edges_ns)))
    return list(map(sub, total[1:], total[:-1]))


def steady_window(records: Iterable[RequestRecord], concurrency: int) -> tuple[int, int]:
    """Longest stretch [start, end) in ns in which at least `concurrency` requests were between send and last token.

    (0, 0) when that never happened.
    """
    edges: list[tuple[int, int]] = []
    for r in records:
        end = r.t_last_ns or r.t_done_ns
        if end > r.t_send_ns:
            edges.append((r.t_send_ns, 1))
            edges.append((end, -1))
    # a slot that is refilled within 5 ms counts as never empty
    edges.sort()
    best = (0, 0)
    level, start, dip = 0, 0, 0
    for t, step in edges:
        level += step
        if level >= concurrency:
            if start == 0 and dip == 0:
                start = t
            elif dip:
                if t - dip > 5_000_000:
                    if dip - start > best[1] - best[0]:
                        best = (start, dip)
                    start = t
                dip = 0
        elif start and not dip:
            dip = t
    if start and dip and dip - start > best[1] - best[0]:
        best = (start, dip)
    return best


def peak_tokens_in_a_second(records: Iterable[RequestRecord]) -> int:
    """Most tokens in any one second, wherever it begins, by token stamps."""
    times: list[int] = []  # one entry a token
    for r in records:
        if r.output_tokens == len(r.stamps_ns):
            times.extend(r.stamps_ns)
        else:
            times.extend(chain.from_iterable(map(repeat, r.stamps_ns, r.tokens)))
    times.sort()
    most = 0
    for last, t in enumerate(times):
        most += t - times[last - most] < SECOND_NS  # one token more than the fullest second so far held
    return most


def summarize(
    records: Sequence[RequestRecord], *, concurrency: int | None = None, slo: Slo | None = None
) -> list[Metric]:
    """Every figure of one run. Empty when nothing completed except the counts."""
    ok = [r for r in records if r.is_ok]
    found: list[Metric] = [
        Metric(f"requests.{VERSION}", "value", len(records), "requests", n=len(records)),
        Metric(f"completed.{VERSION}", "value", len(ok), "requests", n=len(records)),
    ]
    errors: dict[str, int] = {}
    for r in records:
        if r.error:
            errors[r.error] = errors.get(r.error, 0) + 1
    for name, n in sorted(errors.items()):
        found.append(Metric(f"errors.{VERSION}", name, n, "requests", n=len(records)))
    if not records:
        return found
    start = min(r.t_send_ns for r in records)
    end = max(max(r.t_last_ns, r.t_done_ns if r.error else 0) for r in records)
    duration = max(end - start, 0) / 1e9
    found.append(Metric(f"duration.{VERSION}", "value", duration, "s", n=len(records)))
    if not ok or duration <= 0:
        return found
    n = len(ok)
    out_tokens = sum(r.output_tokens for r in ok)
    in_known = [r.prompt_tokens for r in ok if r.prompt_tokens is not None]
    one: list[tuple[str, float, str]] = [
        ("output_throughput", out_tokens / duration, "tok/s"),
        ("request_throughput", n / duration, "req/s"),
        ("output_tokens", out_tokens, "tokens"),
        ("concurrency", sum(r.e2e_ns for r in ok) / 1e9 / duration, "requests"),
        ("peak_output_throughput", max(peak_tokens_in_a_second(ok), out_tokens / duration), "tok/s"),
    ]
    if in_known:
        one += [
            ("input_tokens", sum(in_known), "tokens"),
            ("input_throughput", sum(in_known) / duration, "tok/s"),
        ]
        cached = sum(r.cached_tokens or 0 for r in ok)
        if any(r.cached_tokens is not None for r in ok):
            one.append(("cached_fraction", cached / max(sum(in_known), 1), "1"))
    if concurrency:
        lo, hi = steady_window(ok, concurrency)
        if hi - lo > 200_000_000:
            inside = tokens_between(ok, (lo, hi))[0]
            one.append(("output_throughput_steady", inside / ((hi - lo) / 1e9), "tok/s"))
            one.append(("steady_window", (hi - lo) / 1e9, "s"))
    itl: list[int] = []
    icl: list[int] = []
    for r in ok:
        inter_token_gaps(r, itl, icl)
    events = sum(len(r.stamps_ns) for r in ok)
    if events:
        one.append(("tokens_per_chunk", out_tokens / events, "tokens"))
    verify = sum(r.spec_verify_ct for r in ok)
    if verify:
        counted = sum(r.output_tokens for r in ok if r.spec_verify_ct)
        one.append(("accept_length", counted / verify, "tokens"))
        proposed = sum(r.spec_num_proposed_drafts for r in ok)
        if proposed:
            one.append(("accept_rate", sum(r.spec_num_correct_drafts for r in ok) / proposed, "1"))
        depth = max((len(r.spec_histogram) for r in ok), default=0)
        for k in range(depth):
            total = sum(r.spec_histogram[k] for r in ok if len(r.spec_histogram) > k)
            found.append(Metric(f"accept_histogram.{VERSION}", str(k), total, "steps", n=verify))
    tpot = [t / 1e6 for r in ok if (t := r.tpot_ns) is not None]
    if tpot and mean(tpot) > 0:
        one.append(("tok_s_user", 1000 / mean(tpot), "tok/s"))
    if slo is not None:
        good = sum(1 for r in ok if meets(r, slo))
        one.append(("goodput", good / duration, "req/s"))
        one.append(("goodput_fraction", good / len(records), "1"))
    intervals = {"output_throughput": throughput_interval(ok, start, end), "tok_s_user": _speed_interval(ok)}
    for name, value, unit in one:
        lo, hi = intervals.get(name) or (None, None)
        found.append(Metric(f"{name}.{VERSIONS.get(name, VERSION)}", "value", value, unit, lo, hi, n))
    found += _spread("ttft", [r.ttft_ns / 1e6 for r in ok], "ms")
    found += _spread("ttft_sched", [(r.t_first_ns - r.t_sched_ns) / 1e6 for r in ok], "ms")
    found += _spread("queue", [max(r.t_send_ns - r.t_sched_ns, 0) / 1e6 for r in ok], "ms")
    found += _spread("tpot", tpot, "ms")
    per_token = _spread("itl", itl, "ms", 1e6)
    found += per_token
    if len(itl) == len(icl) and out_tokens == events:
        found += [
            replace(m, name=f"icl.{VERSION}") for m in per_token
        ]  # one token in every chunk: the same samples
    else:
        found += _spread("icl", icl, "ms", 1e6)
    found += _spread("e2e", [r.e2e_ns / 1e6 for r in ok], "ms")
    return found


def throughput_interval(ok: Sequence[RequestRecord], start: int, end: int) -> tuple[float, float] | None:
    """95 % interval of output throughput from inside one run: ten equal stretches of time. None below 50 requests
    or one second."""
    span = end - start
    if len(ok) < 50 or span < 1_000_000_000:
        return None
    edges = [start + span * k // 10 for k in range(11)]
    edges[-1] += 1
    rates = [b / (span / 1e10) for b in tokens_between(ok, edges)]
    est = mean_interval(rates)
    return None if est.lo is None or est.hi is None else (est.lo, est.hi)


def _speed_interval(ok: Sequence[RequestRecord]) -> tuple[float, float] | None:
    """95 % interval of tok_s_user from inside one run: blocks of requests in the order in which they ended."""
    ordered = sorted((r for r in ok if r.tpot_ns), key=lambda r: r.t_last_ns)
    if not ordered:
        return None
    est = block_bootstrap([(r.tpot_ns or 0.0) / 1e6 for r in ordered], draws=500)
    if est.lo is None or est.hi is None or est.lo <= 0:
        return None
    return 1000 / est.hi, 1000 / est.lo


def meets(record: RequestRecord, slo: Slo) -> bool:
    """Whether a completed request stayed inside every limit; TTFT counts from the moment it was due."""
    if slo.ttft_ms is not None and (record.t_first_ns - record.t_sched_ns) / 1e6 > slo.ttft_ms:
        return False
    tpot = record.tpot_ns
    if slo.tpot_ms is not None and tpot is not None and tpot / 1e6 > slo.tpot_ms:
        return False
    return not (slo.e2e_ms is not None and (record.t_last_ns - record.t_sched_ns) / 1e6 > slo.e2e_ms)
