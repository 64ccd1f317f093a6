"""The final report of a chain: every step's figures and what they come to, as one value and as Markdown. Pure; knows no file.

Laws: a figure stands here only when a step of this chain, with this chain's settings, reported it; what was not measured is None
and shown as n/a. Accept length counts the bonus token: 1.0 means that nothing was accepted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from k2tui.core.chain import Chain, Record, Step
from k2tui.core.job_text import plain
from k2tui.core.stats import EFFECT, Estimate, mean_interval, ratio_of_means

SCHEMA = 1
ROLES = (
    "baseline",
    "untrained",
    "draft",
)  # of a benchmark step: the target alone, with the untrained draft, with the trained one

_SIDES = {
    "baseline": "target",
    "untrained": "untrained draft",
    "draft": "draft",
}  # role -> its name beside a figure

_ROW = (
    "concurrency",
    "request_rate",
    "completed",
    "errors",
    "tok_s_user",
    "output_throughput",
    "ttft_p50_ms",
    "accept_length",
    "run_id",
    "flags",
)
_KEPT: Mapping[str, tuple[str, ...]] = {
    "serve": ("ready_s", "shards_done", "shards_total", "engine", "version"),
    "prepare": ("rows", "response_tokens", "outcomes", "refused"),
    "extract": ("samples", "tokens", "seconds", "tokens_s", "boundaries", "failed", "proofs"),
    "train": (
        "step", "total", "best_step", "tokens", "loss_tokens", "seconds", "expected_accept_length", "chain_accept_length",
        "untrained_accept_length", "untrained_chain_accept_length", "full_acc", "stopped", "draft",
    ),
}  # fmt: skip


_NOTHING: Mapping[str, Any] = {}


def _map(value: Any) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else _NOTHING


def _rows(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    rows = result.get("rows")
    return [_map(r) for r in cast("list[Any]", rows)] if isinstance(rows, list) else []


def _num(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def figures_of(step: Step, result: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of one step's result that people ask for."""
    if step.stage == "bench":
        return {"rows": [{k: row.get(k) for k in _ROW} for row in _rows(result)]}
    kept = _KEPT.get(step.stage)
    return {k: result[k] for k in (kept or result) if k in result}


def build(
    chain: Chain, prints: Mapping[str, str], records: Mapping[str, Record], made_s: float
) -> dict[str, Any]:
    """The report as a JSON object. Steps whose record is of other settings say so and lend no figures."""
    steps: list[dict[str, Any]] = []
    results: dict[str, Mapping[str, Any]] = {}
    for step in chain.steps:
        record = records.get(step.name)
        row: dict[str, Any] = {"step": step.name, "title": step.title, "stage": step.stage or "command"}
        if record is None or record.fingerprint != prints.get(step.name):
            row["state"] = "not run" if record is None else "of other settings"
        else:
            results[step.name] = record.result
            row |= {
                "state": "done",
                "job_id": record.job_id,
                "took_s": record.took_s,
                "ended_s": record.ended_s,
                "figures": figures_of(step, record.result),
            }
        steps.append(row)
    return {
        "schema": SCHEMA,
        "pipeline": chain.name,
        "made_s": made_s,
        "complete": all(s["state"] == "done" for s in steps),
        "took_s": sum(s.get("took_s") or 0.0 for s in steps),
        "outcome": _outcome(chain, results),
        "steps": steps,
    }


def _outcome(chain: Chain, results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    by_role: dict[str, list[Mapping[str, Any]]] = {}
    for step in chain.steps:
        if step.role in ROLES and step.name in results:
            by_role[step.role] = _rows(results[step.name])
    train = next((results[s.name] for s in chain.steps if s.stage == "train" and s.name in results), _NOTHING)
    loads: list[dict[str, Any]] = []
    for row in by_role.get("draft") or by_role.get("baseline") or ():
        if any(_is_same_load(row, load) for load in loads):
            continue  # another pass of a load that stands here already
        same = {role: [r for r in rows if _is_same_load(r, row)] for role, rows in by_role.items()}
        speeds = {role: _mean(same.get(role, ()), "tok_s_user") for role in ("baseline", "draft")}
        base, draft = speeds["baseline"], speeds["draft"]
        ratio = ratio_of_means(base, draft) if base and draft and base.value > 0 else None
        loads.append(
            {
                "concurrency": row.get("concurrency"),
                "request_rate": row.get("request_rate"),
                "baseline_tok_s_user": base.value if base else None,
                "draft_tok_s_user": draft.value if draft else None,
                "speedup": ratio.value if ratio else None,
                "speedup_lo": ratio.lo if ratio else None,
                "speedup_hi": ratio.hi if ratio else None,
                "passes": ratio.n if ratio else None,
                "baseline_output_throughput": _value(same.get("baseline", ()), "output_throughput"),
                "draft_output_throughput": _value(same.get("draft", ()), "output_throughput"),
                "accept_length": _value(same.get("draft", ()), "accept_length"),
                "untrained_accept_length": _value(same.get("untrained", ()), "accept_length"),
                "not_valid": {
                    name: why for role, name in _SIDES.items() if (why := not_valid(same.get(role, ())))
                },
            }
        )
    loads.sort(key=lambda x: (x["concurrency"] or 0, x["request_rate"] or 0))
    first = loads[0] if loads else {}
    served = first.get("untrained_accept_length")
    return {
        "accept_length": first.get("accept_length"),
        "untrained_accept_length": served
        if served is not None
        else _num(train.get("untrained_chain_accept_length")),
        "untrained_how": "served" if served is not None else "chain drafting along the training's held-out answers",
        "expected_accept_length": _num(train.get("expected_accept_length")),
        "expected_untrained": _num(train.get("untrained_accept_length")),
        "chain_accept_length": _num(train.get("chain_accept_length")),
        **{k: first.get(k) for k in ("speedup", "speedup_lo", "speedup_hi", "passes", "not_valid")},
        "loads": loads,
    }


def not_valid(rows: Sequence[Mapping[str, Any]]) -> str:
    """Why the passes of one load are not to be trusted: "57% of the chunks came several at a time ... (3 of 3 passes)"; "" = all are valid."""
    bad = [[str(f) for f in cast("Sequence[Any]", flags)] for r in rows if (flags := r.get("flags"))]
    if not bad:
        return ""
    kinds = {
        f.lstrip("0123456789.% "): f for flags in bad for f in flags
    }  # one of each kind, whatever its figure
    passes = f" ({len(bad)} of {len(rows)} passes)" if len(rows) > 1 else ""
    return "; ".join(kinds.values()) + passes


def _is_same_load(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return all(a.get(k) == b.get(k) for k in ("concurrency", "request_rate"))


def _mean(rows: Sequence[Mapping[str, Any]], key: str) -> Estimate | None:
    """Mean of the passes of one load, with its 95 % interval (none for a single pass); None when nobody measured it."""
    values = [v for r in rows if (v := _num(r.get(key))) is not None]
    return mean_interval(values) if values else None


def _value(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    found = _mean(rows, key)
    return found.value if found else None


# ---- words


def number(value: Any, digits: int = 1, unit: str = "") -> str:
    """A figure for people; "n/a" for what was not measured."""
    found = _num(value)
    return "n/a" if found is None else f"{found:,.{digits}f}{unit}"


def verdict(report: Mapping[str, Any]) -> str:
    """What the whole run comes to, in one or two sentences."""
    o = _map(report.get("outcome"))
    length, before, speed = (
        _num(o.get("accept_length")),
        _num(o.get("untrained_accept_length")),
        _num(o.get("speedup")),
    )
    if length is None:
        expected = _num(o.get("expected_accept_length"))
        if expected is None:
            return "No draft was served yet."
        return f"No draft was served yet; {expected:.2f} is the accept length to expect of it."
    words = f"With the draft each verification yields {length:.2f} tokens on held-out prompts"
    words += f" (untrained: {before:.2f})." if before is not None else "."
    if length < 1.05:
        words += ' Nothing is accepted: see docs/story.md, "why does the draft not help?".'
    if speed is None:
        return words
    bad = _map(o.get("not_valid"))
    why = "; ".join(f"{side}: {bad[side]}" for side in ("target", "draft") if side in bad)
    mark = f" That speed is of benchmarks that are NOT VALID ({why})." if why else ""
    return f"{words} {_speed_words(o, speed, length)}{mark}"


def _speed_words(outcome: Mapping[str, Any], speed: float, length: float) -> str:
    """One user's speed against the target alone; what lies within the spread of the passes is said to be so."""
    low, high = _num(outcome.get("speedup_lo")), _num(outcome.get("speedup_hi"))
    count = _num(outcome.get("passes")) or 1
    if (low is None or high is None) and count > 1:
        return f"Whether one user's speed differs is unclear: {speed:.2f} times that without a draft, but the {count:.0f} passes differ too much for an interval."
    if low is None or high is None:
        return f"One user's speed was {speed:.2f} times that without a draft in a single pass: its spread is not known (repeats = 3 tells it)."
    passes = f"95 % {low:.2f} to {high:.2f}, {count:.0f} passes of one start each"
    if low <= 1 <= high and (high - low) / 2 > EFFECT:
        return f"Whether one user's speed differs is unclear: {speed:.2f} times that without a draft, but the passes differ too much to tell ({passes})."
    if low <= 1 <= high:
        return f"One user's speed differs within noise: {speed:.2f} times that without a draft ({passes})."
    words = f"One user's speed is {speed:.2f} times that without a draft ({passes})."
    return words + (" Here a draft pass costs more than it saves." if speed < 1 and length >= 1.05 else "")


def _by_load(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """One row a load: the means of its passes, the sum of their errors."""
    out: list[Mapping[str, Any]] = []
    for row in rows:
        if any(_is_same_load(row, seen) for seen in out):
            continue
        same = [r for r in rows if _is_same_load(r, row)]
        means = {
            k: _value(same, k) for k in ("tok_s_user", "output_throughput", "ttft_p50_ms", "accept_length")
        }
        errors = sum(int(_num(r.get("errors")) or 0) for r in same)
        out.append({**row, **means, "errors": errors, "not_valid": not_valid(same)})
    return out


def step_words(row: Mapping[str, Any]) -> str:
    """One step's figures in a line."""
    if row.get("state") != "done":
        return str(row.get("state", ""))
    f, stage = _map(row.get("figures")), str(row.get("stage", ""))
    if stage == "serve":
        shards = f", {f['shards_done']}/{f['shards_total']} shards" if f.get("shards_total") else ""
        return f"ready after {number(f.get('ready_s'))} s{shards}"
    if stage == "bench":
        parts = [
            f"C={r.get('concurrency')}: {number(r.get('tok_s_user'))} tok/s a user, {number(r.get('output_throughput'))} in all, TTFT {number(r.get('ttft_p50_ms'))} ms"
            + (
                f", accept length {number(r.get('accept_length'), 2)}"
                if r.get("accept_length") is not None
                else ""
            )
            + (f", {r['errors']} errors" if r.get("errors") else "")
            + (" (NOT VALID)" if r.get("not_valid") else "")
            for r in _by_load(_rows(f))
        ]
        return "; ".join(parts)
    if stage == "prepare":
        left_out = {k: v for k, v in _map(f.get("outcomes")).items() if k != "kept"}
        more = "".join(f", {v} {k}" for k, v in left_out.items())
        return f"{f.get('rows')} rows, {number(f.get('response_tokens'), 0)} answer tokens{more}"
    if stage == "extract":
        proof = str(_map(_map(f.get("proofs")).get("head")).get("verdict") or "")
        return (
            f"{f.get('samples')} samples, {number(f.get('tokens'), 0)} tokens, {number(f.get('tokens_s'), 0)} tok/s"
            + (f"; {proof}" if proof else "")
        )
    if stage == "train":
        return (
            f"{f.get('step')} steps in {number(f.get('seconds'), 0)} s; expected accept length {number(f.get('untrained_accept_length'), 3)} untrained, "
            f"{number(f.get('expected_accept_length'), 3)} trained; chain drafting {number(f.get('untrained_chain_accept_length'), 3)} and {number(f.get('chain_accept_length'), 3)}"
        )
    if "losses" in f:
        accuracy = cast("list[float]", f.get("accuracy") or [])
        more = (
            f"; first guess right {100 * accuracy[0]:.0f} % at first, {100 * accuracy[-1]:.0f} % at last"
            if accuracy
            else ""
        )
        return f"loss {number(f.get('first'), 3)} at first, {number(f.get('last'), 3)} at last{more}"
    parts = [
        f"{k} {v}" for k, v in f.items() if k != "schema" and isinstance(v, int | float | str) and str(v)
    ]
    return ", ".join(parts[:6])


def load_name(load: Mapping[str, Any]) -> str:
    """ "C=4", or "2.0 req/s"."""
    return f"C={load['concurrency']}" if load.get("concurrency") else f"{load.get('request_rate')} req/s"


def bad_loads(report: Mapping[str, Any]) -> list[str]:
    """A sentence for each load whose figures are of runs that are not valid: "C=4, target: 57% of ... (3 of 3 passes)"."""
    return [
        f"{load_name(load)}, {side}: {why}"
        for load in cast("list[Mapping[str, Any]]", _map(report.get("outcome")).get("loads") or [])
        for side, why in _map(load.get("not_valid")).items()
    ]


def loads_table(report: Mapping[str, Any], mark: str = "▲") -> list[tuple[str, ...]]:
    """Header and rows of the comparison: with and without the draft at each load. mark: before the figures that are not valid."""
    rows: list[tuple[str, ...]] = [
        (
            "load",
            "tok/s a user, target",
            "with the draft",
            "ratio",
            "in all, target",
            "with the draft",
            "accept length",
            "untrained",
        )
    ]
    for load in cast("list[Mapping[str, Any]]", _map(report.get("outcome")).get("loads") or []):
        bad = _map(load.get("not_valid"))

        def told(
            side: str, key: str, digits: int = 1, load: Mapping[str, Any] = load, bad: Mapping[str, Any] = bad
        ) -> str:
            figure = number(load.get(key), digits)
            return f"{mark} {figure}" if side in bad and load.get(key) is not None else figure

        ratio = _ratio(load)
        rows.append(
            (
                load_name(load), told("target", "baseline_tok_s_user"), told("draft", "draft_tok_s_user"),
                f"{mark} {ratio}" if load.get("speedup") is not None and {"target", "draft"} & set(bad) else ratio,
                told("target", "baseline_output_throughput"), told("draft", "draft_output_throughput"),
                told("draft", "accept_length", 2), told("untrained draft", "untrained_accept_length", 2),
            )
        )  # fmt: skip
    return rows


def _ratio(load: Mapping[str, Any]) -> str:
    """ "1.30 (1.22 to 1.38)": the ratio and its 95 % interval, which is one of factors, where more than one pass was measured."""
    low, high = _num(load.get("speedup_lo")), _num(load.get("speedup_hi"))
    interval = f" ({low:.2f} to {high:.2f})" if low is not None and high is not None else ""
    return number(load.get("speedup"), 2) + interval


def curve_table(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Header and rows of the evaluations during the training."""
    rows: list[tuple[str, ...]] = [("step", "expected accept length", "all right up to step 1, 2, 3, ...")]
    for step in cast("list[Mapping[str, Any]]", report.get("steps") or []):
        for e in cast("list[Mapping[str, Any]]", _map(step.get("figures")).get("evals") or []):
            full = " ".join(f"{a:.3f}" for a in cast("list[float]", e.get("full_acc") or []))
            rows.append((str(e.get("step")), number(e.get("accept_length"), 3), full))
    return rows


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    head, *body = ["| " + " | ".join(plain(c).replace("|", "\\|") for c in row) + " |" for row in rows]
    return [head, "|" + "---|" * len(rows[0]), *body]


def _run_words(report: Mapping[str, Any]) -> str:
    """What the run that wrote the report did itself: the steps' time is that of the runs that measured them."""
    run = _map(report.get("run"))
    ran, skipped = _num(run.get("ran")), _num(run.get("skipped"))
    if ran is None or not skipped:
        return ""
    return f" when they ran (the last run: {ran:.0f} steps run, {skipped:.0f} skipped as still valid)"


def markdown(report: Mapping[str, Any], made: str) -> str:
    """The report for people. made: date and time in words."""
    steps = cast("list[Mapping[str, Any]]", report.get("steps") or [])
    lines = [f"# Pipeline {report.get('pipeline')}", "", verdict(report), ""]
    words = (
        "whole"
        if report.get("complete")
        else "not whole: some steps have not run, or ran with other settings"
    )
    lines += [
        f"Made {made}; {words}; the steps took {number(report.get('took_s'), 0)} s{_run_words(report)}.",
        "",
    ]
    loads, curve = loads_table(report), curve_table(report)
    if len(loads) > 1:
        lines += ["## With and without the draft", "", *_table(loads), ""]
        if bad := bad_loads(report):
            lines += ["▲ NOT VALID, so not to be relied on:", "", *(f"- {plain(b)}" for b in bad), ""]
        how = str(_map(report.get("outcome")).get("untrained_how"))
        before = _map(report.get("outcome")).get("untrained_accept_length")
        lines += [
            f"Accept length counts the bonus token: 1.0 = nothing accepted. Untrained draft: {number(before, 2)} ({how}).",
            "",
        ]
    lines += ["## Steps", ""]
    lines += _table(
        [
            ("step", "took", "figures", "job"),
            *(
                (str(s["step"]), number(s.get("took_s"), 1, " s"), step_words(s), str(s.get("job_id", "")))
                for s in steps
            ),
        ]
    )
    if len(curve) > 1:
        lines += ["", "## Evaluations on the training's held-out samples", "", *_table(curve)]
    return "\n".join(lines) + "\n"
