"""Results of other benchmark tools -> our figures, with the known faults of each tool written beside them. Pure.

What each tool means by its figures, and which of them are wrong when: docs/benchmarks.md.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from k2tui.core.bench_record import VERSION, Metric
from k2tui.core.workload import fingerprint
from k2tui.errors import UsageError


@dataclass(frozen=True)
class Imported:
    """One run of another tool. tool: its name; flags: what is known to be doubtful in it."""

    tool: str
    metrics: tuple[Metric, ...]
    label: str = ""
    tag: str = ""
    concurrency: int | None = None
    rate: float | None = None
    shape: str = "closed"
    num_requests: int = 0
    server: Mapping[str, Any] = field(default_factory=dict[str, Any])
    workload: Mapping[str, Any] = field(default_factory=dict[str, Any])
    flags: tuple[str, ...] = ()
    started_s: float | None = None
    raw: str = ""


def mapping(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _listing(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


def number(value: Any) -> float | None:
    """A finite number, else None (Python's own JSON writes Infinity and NaN)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if value == value and abs(value) != float("inf") else None


def parse(text: str, where: str) -> list[Imported]:
    """Every run in a file: JSON, or one JSON object a line. Raises UsageError naming file and line."""
    whole: Any = None
    with contextlib.suppress(ValueError, RecursionError):  # then line by line, which knows the line
        whole = json.loads(text)
    found: list[Imported] = []
    if whole is not None:
        items: list[Any] = cast("list[Any]", whole) if isinstance(whole, list) else [whole]
        for n, item in enumerate(items, 1):
            found += _checked(mapping(item), f"{where} item {n}")
    else:
        for n, line in enumerate(text.splitlines(), 1):
            if not line.strip():
                continue
            try:
                item = json.loads(line)
            except json.JSONDecodeError as err:
                raise UsageError(
                    f"{where}:{n}: not JSON ({err})", "a cut-off last line can be removed"
                ) from None
            except ValueError:  # Python's limit on the digits of a number
                raise UsageError(f"{where}:{n}: a number of more than 4300 digits") from None
            except RecursionError:
                raise UsageError(f"{where}:{n}: nested too deeply") from None
            found += _checked(mapping(item), f"{where}:{n}")
    if not found:
        raise UsageError(f"{where} holds no result")
    return found


_COUNTS = ("requests", "completed", "errors")  # how many, not how fast
_MOST = 2**63 - 1  # SQLite's largest whole number


def _leaves(row: Any) -> Iterator[tuple[str, Any]]:
    """(key with the keys above it, value) of every value in a JSON object."""
    todo: list[tuple[str, Any]] = [("", row)]
    while todo:
        key, value = todo.pop()
        if isinstance(value, dict):
            todo += [(f"{key}.{k}" if key else k, v) for k, v in cast("dict[str, Any]", value).items()]
        elif isinstance(value, list):
            todo += [(f"{key}[{n}]", v) for n, v in enumerate(cast("list[Any]", value))]
        else:
            yield key, value


def _checked(row: dict[str, Any], where: str) -> list[Imported]:
    """The runs of one object. Raises UsageError naming the key of a figure that cannot be one, and for a run without figures."""
    for key, value in _leaves(row):
        if isinstance(value, int) and abs(value) > 10**100:
            raise UsageError(f"{where}: {key} is a number of {len(str(abs(value)))} digits")
        if isinstance(value, str) and not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
            raise UsageError(f"{where}: {key} is no text (half of a surrogate pair)")
    found = _one(row, where)
    for one in found:
        values = [(f"{m.name.rpartition('.')[0]} {m.stat}", m.value) for m in one.metrics]
        values += [
            ("concurrency", one.concurrency),
            ("request rate", one.rate),
            ("requests", one.num_requests),
        ]
        values.append(("tp", one.server.get("tp")))
        for name, value in values:
            if value is not None and not 0 <= value <= _MOST:
                key = next((k for k, v in _leaves(row) if number(v) == float(value)), name)
                raise UsageError(f"{where}: {key} is {value:g}: {'below 0' if value < 0 else 'too large'}")
        if all(m.name.rpartition(".")[0] in _COUNTS for m in one.metrics):
            told = f" of {one.label!r}" if one.label else ""
            raise UsageError(
                f"{where}: the run{told} has no figure", "a run needs a speed, a time or an acceptance"
            )
    return found


def _one(row: dict[str, Any], where: str) -> list[Imported]:
    if isinstance(row.get("runs"), list) and row.get("format") == "k2tui-table":
        return [
            _typed(mapping(r), mapping(row.get("workload")), where) for r in cast("list[Any]", row["runs"])
        ]
    if isinstance(row.get("benchmarks"), list) and ("args" in row or "metadata" in row):
        return [_guidellm(mapping(b), where) for b in cast("list[Any]", row["benchmarks"])]
    if "latency" in row and "batch_size" in row and "input_len" in row:
        return [_one_batch(row, where)]
    if "time_to_first_token" in row or ("input_config" in row and "request_count" in row):
        return [_aiperf(row, where)]
    if "duration" in row and "completed" in row and "total_output_tokens" in row:
        return [
            _vllm(row)
            if "burstiness" in row
            or "request_goodput" in row
            or ("failed" in row and "dataset_name" not in row)
            else _sglang(row)
        ]
    raise UsageError(
        f"{where}: no result of a tool that is known here",
        "known: sglang.bench_serving and one_batch JSONL, vllm bench serve JSON, guidellm JSON, aiperf JSON, k2tui export",
    )


class _Figures:
    """Collects metrics, leaving out what is missing."""

    def __init__(self) -> None:
        self.found: list[Metric] = []

    def put(self, name: str, value: Any, unit: str, stat: str = "value", n: int = 0) -> None:
        known = number(value)
        if known is not None:
            self.found.append(Metric(f"{name}.{VERSION}", stat, known, unit, n=n))

    def spread(self, name: str, by_stat: Mapping[str, Any], unit: str = "ms") -> None:
        for stat, value in by_stat.items():
            self.put(name, value, unit, stat)


def _serving(row: dict[str, Any]) -> _Figures:
    """Keys that sglang.bench_serving and vllm bench serve share."""
    f = _Figures()
    completed = int(number(row.get("completed")) or 0)
    f.put("completed", completed, "requests")
    f.put("requests", row.get("num_prompts") or completed, "requests")
    f.put("duration", row.get("duration"), "s")
    f.put("output_tokens", row.get("total_output_tokens"), "tokens")
    f.put("input_tokens", row.get("total_input_tokens"), "tokens")
    f.put("output_throughput", row.get("output_throughput"), "tok/s")
    f.put("input_throughput", row.get("input_throughput"), "tok/s")
    f.put("request_throughput", row.get("request_throughput"), "req/s")
    f.put("concurrency", row.get("concurrency"), "requests")
    for theirs, ours in (
        ("ttft", "ttft"),
        ("tpot", "tpot"),
        ("itl", "itl"),
        ("e2e_latency", "e2e"),
        ("e2el", "e2e"),
    ):
        f.spread(
            ours,
            {
                "mean": row.get(f"mean_{theirs}_ms"),
                "std": row.get(f"std_{theirs}_ms"),
                "p50": row.get(f"median_{theirs}_ms") or row.get(f"p50_{theirs}_ms"),
                "p90": row.get(f"p90_{theirs}_ms"),
                "p95": row.get(f"p95_{theirs}_ms"),
                "p99": row.get(f"p99_{theirs}_ms"),
            },
        )
    tpot = number(row.get("mean_tpot_ms"))
    if tpot:
        f.put("tok_s_user", 1000 / tpot, "tok/s")
    if number(row.get("request_goodput")) is not None:
        f.put("goodput", row["request_goodput"], "req/s")
        f.put("goodput_fraction", row.get("slo_attainment"), "1")
    return f


def _loads(row: dict[str, Any]) -> tuple[int | None, float | None, str]:
    most = row.get("max_concurrency")
    rate = row.get("request_rate")
    if rate == "trace":
        return (most if isinstance(most, int) else None), None, "trace"
    known = number(rate)
    return (most if isinstance(most, int) else None), known, "poisson" if known else "closed"


def _sglang(row: dict[str, Any]) -> Imported:
    f = _serving(row)
    accept = number(row.get("accept_length"))
    if accept:
        f.put("accept_length", accept, "tokens")
    f.put("peak_output_throughput", row.get("max_output_tokens_per_s"), "tok/s")
    flags = ["wall time includes the question after the run"]
    completed, asked = number(row.get("completed")) or 0, number(row.get("random_output_len"))
    total, again = (
        number(row.get("total_output_tokens")) or 0,
        number(row.get("total_output_tokens_retokenized")),
    )
    backend = str(row.get("backend") or "")
    if (
        backend.startswith(("sglang-oai", "vllm"))
        and asked
        and total == completed * asked
        and again
        and abs(again / total - 1) > 0.02
    ):
        flags.append("output tokens may be the asked length, not what came (retokenised differs)")
    itl, tpot = number(row.get("median_itl_ms")), number(row.get("median_tpot_ms"))
    if backend != "sglang" and ((accept or 1) > 1 or (itl and tpot and itl / tpot > 1.3)):
        flags.append("ITL may be one sample a chunk of several tokens")
    if accept:
        flags.append("accept length is the server's lifetime figure, not this run's")
    if row.get("num_prompts") is None:
        flags.append("failed requests are not told")
    info = mapping(row.get("server_info"))
    model = str(info.get("served_model_name") or info.get("model_path") or "")
    concurrency, rate, shape = _loads(row)
    tp = info.get("tp_size")
    i, o = row.get("random_input_len"), row.get("random_output_len")
    name = str(row.get("dataset_name") or "")
    title = f"random in {i} out {o}" if name.startswith("random") else name
    params = {
        "dataset": name,
        "random_input_len": i,
        "random_output_len": o,
        "range_ratio": row.get("random_range_ratio"),
    }
    args = {k: v for k, v in info.items() if isinstance(v, str | int | float | bool) and v not in (None, "")}
    return Imported(
        tool="sglang.bench_serving",
        metrics=tuple(f.found),
        label=str(row.get("tag") or ""),
        tag=str(row.get("tag") or ""),
        concurrency=concurrency,
        rate=rate,
        shape=shape,
        num_requests=int(number(row.get("num_prompts")) or completed),
        server={
            "fp": fingerprint({"imported": True, "model": model, "version": info.get("version"), "tp": info.get("tp_size")}),
            "engine": "sglang", "version": str(info.get("version") or ""), "model": model, "tp": tp if type(tp) is int else None,
            "args": {k: args[k] for k in sorted(args)[:400]},
        },
        workload=_workload("sglang.bench_serving", title, params, {"sglang-oai-chat": "chat", "sglang-oai": "completions"}.get(backend, "generate")),
        flags=tuple(flags),
    )  # fmt: skip


def _workload(tool: str, title: str, params: Mapping[str, Any], api: str) -> dict[str, Any]:
    return {
        "fp": fingerprint({"tool": tool, "params": dict(params), "api": api}),
        "kind": tool,
        "title": title,
        "params": dict(params),
        "api": api,
    }


def _vllm(row: dict[str, Any]) -> Imported:
    f = _serving(row)
    f.put("accept_length", row.get("spec_decode_acceptance_length"), "tokens")
    rate_ = number(row.get("spec_decode_acceptance_rate"))
    if rate_ is not None:
        f.put("accept_rate", rate_ / 100 if rate_ > 1 else rate_, "1")
    flags = ["an error inside a stream counts as a success in this tool"]
    itl, tpot = number(row.get("median_itl_ms")), number(row.get("median_tpot_ms"))
    if itl and tpot and itl / tpot > 1.3:
        flags.append("ITL is one sample a chunk of several tokens")
    failed = int(number(row.get("failed")) or 0)
    if failed:
        flags.append(f"errors: {failed} failed")
        f.put("errors", failed, "requests", "failed")
    concurrency, rate, shape = _loads(row)
    n = int(number(row.get("num_prompts")) or 0)
    total_in, total_out = number(row.get("total_input_tokens")), number(row.get("total_output_tokens"))
    done = number(row.get("completed")) or 1
    title = f"in {(total_in or 0) / done:.0f} out {(total_out or 0) / done:.0f}"
    model = str(row.get("model_id") or "")
    return Imported(
        tool="vllm bench serve",
        metrics=tuple(f.found),
        label=str(row.get("label") or ""),
        concurrency=concurrency,
        rate=rate,
        shape="gamma" if rate and number(row.get("burstiness")) not in (None, 1.0) else shape,
        num_requests=n,
        server={"fp": fingerprint({"imported": "vllm", "model": model}), "engine": "vllm", "model": model},
        workload=_workload("vllm bench serve", title, {"title": title, "n": n}, "chat" if "chat" in str(row.get("backend")) else "completions"),
        flags=tuple(flags),
    )  # fmt: skip


def _one_batch(row: dict[str, Any], where: str) -> Imported:
    f = _Figures()
    batch = int(number(row.get("batch_size")) or 1)
    f.put("requests", batch, "requests")
    f.put("completed", batch, "requests")
    f.put("duration", row.get("latency"), "s")
    f.put("input_throughput", row.get("input_throughput"), "tok/s")
    f.put("output_throughput", row.get("output_throughput"), "tok/s")
    f.put("output_throughput_steady", row.get("steady_state_output_throughput"), "tok/s")
    f.put("accept_length", row.get("acc_length"), "tokens")
    f.put("output_tokens", row.get("total_output_tokens"), "tokens")
    out = number(row.get("output_throughput"))
    if out:
        f.put("tok_s_user", out / batch, "tok/s")
        f.put("tpot", 1000 * batch / out, "ms", "p50")
        f.put("tpot", 1000 * batch / out, "ms", "mean")
    first = number(row.get("last_ttft"))
    if first is not None:
        f.put("ttft", first * 1000, "ms", "p50")
    flags = ["one batched call: TTFT is the last request's, TPOT the batch's mean"]
    early = number(row.get("num_early_stopped"))
    if early:
        flags.append(f"{early:.0f} outputs stopped early")
    i, o = row.get("input_len"), row.get("output_len")
    return Imported(
        tool="sglang.one_batch",
        metrics=tuple(f.found),
        label=str(row.get("run_name") or ""),
        concurrency=batch,
        num_requests=batch,
        server={
            "fp": fingerprint({"imported": "one_batch", "name": row.get("run_name")}),
            "engine": "sglang",
        },
        workload=_workload(
            "sglang.one_batch", f"one batch in {i} out {o}", {"input_len": i, "output_len": o}, "generate"
        ),
        flags=tuple(flags),
    )


def _stats(value: Any) -> dict[str, Any]:
    """Distribution of guidellm ({"successful": {"mean", "percentiles": {...}}}) or aiperf ({"avg", "p50", ...})."""
    one = mapping(value)
    one = mapping(one.get("successful")) or one
    inner = mapping(one.get("percentiles"))
    return {
        "mean": one.get("mean", one.get("avg")),
        "std": one.get("std_dev", one.get("std")),
        "p50": one.get("median", one.get("p50", inner.get("p50"))),
        "p90": one.get("p90", inner.get("p90")),
        "p95": one.get("p95", inner.get("p95")),
        "p99": one.get("p99", inner.get("p99")),
    }


def _guidellm(row: dict[str, Any], where: str) -> Imported:
    f = _Figures()
    m = mapping(row.get("metrics"))
    if not m:
        raise UsageError(f"{where}: a guidellm benchmark without 'metrics'")
    totals = mapping(m.get("request_totals")) or mapping(row.get("request_totals"))
    done, bad = int(number(totals.get("successful")) or 0), int(number(totals.get("errored")) or 0)
    f.put("completed", done, "requests")
    f.put("requests", done + bad, "requests")
    if bad:
        f.put("errors", bad, "requests", "failed")
    f.put("duration", row.get("duration"), "s")
    f.put("output_throughput", _stats(m.get("output_tokens_per_second"))["mean"], "tok/s")
    f.put("request_throughput", _stats(m.get("requests_per_second"))["mean"], "req/s")
    f.spread("ttft", _stats(m.get("time_to_first_token_ms")))
    f.spread("itl", _stats(m.get("inter_token_latency_ms")))
    latency = _stats(m.get("request_latency"))
    f.spread(
        "e2e", {k: (number(v) or 0) * 1000 if number(v) is not None else None for k, v in latency.items()}
    )
    itl = _stats(m.get("inter_token_latency_ms"))["mean"]
    if number(itl):
        f.spread("tpot", _stats(m.get("inter_token_latency_ms")))
        f.put("tok_s_user", 1000 / float(itl), "tok/s")
    config = mapping(row.get("config")) or mapping(row.get("args"))
    strategy = mapping(config.get("strategy")) or mapping(mapping(row.get("scheduler")).get("strategy"))
    streams = strategy.get("streams") or strategy.get("max_concurrency")
    rate = number(strategy.get("rate"))
    return Imported(
        tool="guidellm",
        metrics=tuple(f.found),
        concurrency=int(streams)
        if isinstance(streams, int)
        else (1 if strategy.get("type_") == "synchronous" else None),
        rate=rate,
        shape="poisson" if strategy.get("type_") == "poisson" else ("constant" if rate else "closed"),
        num_requests=done + bad,
        workload=_workload("guidellm", "guidellm", {"config": str(strategy.get("type_"))}, "chat"),
        flags=(
            "TPOT of this tool holds TTFT: its ITL is shown instead",
            "percentiles of ITL are over requests' means, not over tokens",
        ),
    )


def _aiperf(row: dict[str, Any], where: str) -> Imported:
    f = _Figures()
    done = int(number(mapping(row.get("request_count")).get("avg")) or 0)
    bad = int(number(mapping(row.get("error_request_count")).get("avg")) or 0)
    f.put("completed", done, "requests")
    f.put("requests", done + bad, "requests")
    if bad:
        f.put("errors", bad, "requests", "failed")
    f.put("duration", mapping(row.get("benchmark_duration")).get("avg"), "s")
    f.put("output_throughput", mapping(row.get("output_token_throughput")).get("avg"), "tok/s")
    f.put("output_tokens", mapping(row.get("total_output_tokens")).get("avg"), "tokens")
    f.put("request_throughput", mapping(row.get("request_throughput")).get("avg"), "req/s")
    f.put("accept_length", mapping(row.get("acceptance_length")).get("avg"), "tokens")
    for theirs, ours in (
        ("time_to_first_token", "ttft"),
        ("inter_token_latency", "itl"),
        ("request_latency", "e2e"),
    ):
        f.spread(ours, _stats(row.get(theirs)))
    f.spread("tpot", _stats(row.get("inter_token_latency")))
    itl = number(mapping(row.get("inter_token_latency")).get("avg"))
    if itl:
        f.put("tok_s_user", 1000 / itl, "tok/s")
    config = mapping(row.get("input_config"))
    # 0.13 lists phases; before, one "loadgen" said it
    phases = [mapping(p) for p in _listing(config.get("phases"))]
    load = next((p for p in phases if p.get("kind") == "profiling"), mapping(config.get("loadgen")))
    most, rate = load.get("concurrency"), number(load.get("rate") or load.get("request_rate"))
    route = str(mapping(config.get("endpoint")).get("type") or "chat")
    models = [mapping(m) for m in _listing(mapping(config.get("models")).get("items"))]
    model = str(models[0].get("name") or "") if models else ""
    return Imported(
        tool="aiperf",
        metrics=tuple(f.found),
        concurrency=most if isinstance(most, int) else None,
        rate=rate,
        shape=str(load.get("type") or "poisson") if rate else "closed",
        num_requests=done + bad,
        workload=_workload("aiperf", "aiperf", {"endpoint": route}, route),
        server={"fp": fingerprint({"imported": "aiperf", "model": model}), "model": model} if model else {},
        flags=(
            "percentiles of ITL are over requests' means, not over tokens",
            "output tokens are the client's own count",
            "an error inside a stream counts as a success in this tool",
        ),
    )


def _typed(row: dict[str, Any], workload: dict[str, Any], where: str) -> Imported:
    """A table that somebody typed: {"format": "k2tui-table", "workload": {...}, "runs": [{label, tok_s_user, ...}]}."""
    f = _Figures()
    known = {
        "output_throughput": "tok/s", "tok_s_user": "tok/s", "accept_length": "tokens", "accept_rate": "1",
        "request_throughput": "req/s", "peak_output_throughput": "tok/s", "duration": "s", "completed": "requests",
        "requests": "requests",
    }  # fmt: skip
    words = {
        "label",
        "tag",
        "engine",
        "version",
        "model",
        "tp",
        "concurrency",
        "request_rate",
        "note",
        "source",
    }
    for key, value in row.items():
        if key in known:
            if number(value) is None:
                raise UsageError(f"{where}: {key} must be a number, not {value!r}")
            f.put(key, value, known[key])
            continue
        name, _, rest = key.partition("_")
        if (
            name in ("ttft", "tpot", "itl", "e2e")
            and rest.endswith("_ms")
            and rest[:-3] in ("mean", "p50", "p90", "p95", "p99")
        ):
            if number(value) is None:
                raise UsageError(f"{where}: {key} must be a number, not {value!r}")
            f.put(name, value, "ms", rest[:-3])
        elif key not in words:
            raise UsageError(
                f"{where}: unknown key {key!r}",
                "known: " + ", ".join(sorted({*known, *words})) + ", ttft_p50_ms, ...",
            )
    speed = number(row.get("tok_s_user"))
    if speed and not any(m.name == f"tpot.{VERSION}" for m in f.found):
        f.put("tpot", 1000 / speed, "ms", "mean")
        f.put("tpot", 1000 / speed, "ms", "p50")
    title = str(workload.get("title") or "typed")
    server = {k: row.get(k) for k in ("engine", "version", "model", "tp") if row.get(k) is not None}
    for key, value in server.items():
        if type(value) is not (int if key == "tp" else str):
            raise UsageError(
                f"{where}: {key} must be {'a whole number' if key == 'tp' else 'a text'}, not {value!r}"
            )
    flags = [str(row["note"])] if row.get("note") else []
    rate, most = number(row.get("request_rate")), row.get("concurrency")
    return Imported(
        tool=f"{row['source']}, typed" if row.get("source") else "typed",
        metrics=tuple(f.found),
        label=str(row.get("label") or ""),
        tag=str(row.get("tag") or ""),
        concurrency=most if isinstance(most, int) else None,
        rate=rate,
        shape="poisson" if rate else "closed",
        num_requests=int(number(row.get("requests")) or 0),
        server={"fp": fingerprint({"typed": server}), **server},
        workload=_workload("typed", title, {"title": title, **workload}, str(workload.get("api") or "")),
        flags=tuple(flags),
    )


def export_sglang(
    row: Mapping[str, Any], stats: Mapping[tuple[str, str], float], extra: Sequence[tuple[str, Any]] = ()
) -> dict[str, Any]:
    """One of our runs under the keys of sglang.bench_serving 0.5.23, in its order, plus `k2`.

    row: a BenchRow as a dict; stats: (metric without version, stat) -> value.
    """

    def v(name: str, stat: str = "value") -> float | None:
        return stats.get((name, stat))

    api = {"chat": "sglang-oai-chat", "completions": "sglang-oai"}.get(str(row["api"]), "sglang")
    params = mapping(dict(extra).get("params"))
    out: dict[str, Any] = {
        "tag": row["tag"] or row["label"] or None,
        "backend": api,
        "dataset_name": "random-ids" if str(row["workload"]).startswith("random") else row["workload"],
        "request_rate": row["request_rate"] if row["request_rate"] is not None else float("inf"),
        "max_concurrency": row["concurrency"],
        "sharegpt_output_len": None,
        "random_input_len": params.get("random_input_len"),
        "random_output_len": params.get("random_output_len"),
        "random_range_ratio": params.get("range_ratio"),
        "server_info": {"version": row["version"], "model_path": row["model"], "tp_size": row["tp_size"]},
        "duration": row["duration_s"],
        "completed": row["completed"],
        "total_input_tokens": row["total_input_tokens"],
        "total_input_text_tokens": row["total_input_tokens"],
        "total_input_vision_tokens": 0,
        "total_output_tokens": row["total_output_tokens"],
        "total_output_tokens_retokenized": row["total_output_tokens"],
        "request_throughput": row["request_throughput"],
        "input_throughput": v("input_throughput"),
        "output_throughput": row["output_throughput"],
        "total_throughput": (v("input_throughput") or 0.0) + (row["output_throughput"] or 0.0),
    }
    for theirs, ours in (("e2e_latency", "e2e"), ("ttft", "ttft"), ("tpot", "tpot"), ("itl", "itl")):
        for stat in ("mean", "median", "std", "p90", "p95", "p99"):
            out[f"{stat}_{theirs}_ms"] = v(ours, "p50" if stat == "median" else stat)
    out["concurrency"] = v("concurrency")
    out["accept_length"] = row["accept_length"]
    out["max_output_tokens_per_s"] = v("peak_output_throughput")
    out["max_concurrent_requests"] = row["concurrency"]
    out["k2"] = {k: row[k] for k in ("run_id", "label", "workload_fp", "server_fp", "stamps", "count", "lag_p99_ms", "flags",
                                      "errors", "num_requests", "ttft_p50_ci", "ttft_p99_ci", "output_throughput_ci",
                                      "tok_s_user_ci", "accept_rate", "imported_from")}  # fmt: skip
    return out


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Every field of the rows as CSV with a header line; a text that a spreadsheet would run gets a leading apostrophe."""
    if not rows:
        return ""
    names = list(rows[0])

    def cell(value: Any) -> str:
        if value is None:
            return ""
        text = (
            ";".join(map(str, cast("Sequence[Any]", value)))
            if isinstance(value, list | tuple)
            else str(value)
        )
        if text.startswith(("=", "+", "@", "\t", "\r")) or (text[:1] == "-" and number(value) is None):
            text = "'" + text
        return '"' + text.replace('"', '""') + '"' if any(c in text for c in ',"\n\r') else text

    return "\n".join([",".join(names), *(",".join(cell(r[n]) for n in names) for r in rows)]) + "\n"
