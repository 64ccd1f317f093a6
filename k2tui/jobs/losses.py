"""`python -m k2tui.jobs.losses METRICS`: the course of a training as a result that a gate can judge and the report shows.

Reads the trainer's metrics.jsonl and knows nothing of torch. The result's `losses` are at most 40 means over equal stretches, in
order; a loss that is no finite number stays one, so that the gate sees it. `accuracy` holds the same means of the first draft step's
accuracy, `evals` what each evaluation on held-out samples said.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from k2tui.errors import K2Error
from k2tui.jobs.report import report_result
from k2tui.parsing import parse_json

STRETCHES = 40


def rows_of(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Every whole line that is an object; torn lines are passed over."""
    found: list[dict[str, Any]] = []
    for line in lines:
        try:
            raw: Any = parse_json(line)
        except ValueError:
            continue
        if isinstance(raw, dict):
            found.append(cast("dict[str, Any]", raw))
    return found


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def losses_of(rows: Iterable[dict[str, Any]]) -> list[float]:
    """Every step's loss; one that is null counts as not a number."""
    return [_number(row["loss"]) for row in rows if row.get("kind") == "step" and "loss" in row]


def evals_of(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """step, expected accept length and full-prefix accuracy of each evaluation."""
    return [
        {k: row[k] for k in ("step", "accept_length", "full_acc") if k in row}
        for row in rows
        if row.get("kind") == "eval"
    ]


def means(values: Sequence[float], stretches: int = STRETCHES) -> list[float]:
    """At most `stretches` means over equal parts of the row."""
    count = min(stretches, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)] if count else []
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def main(argv: Sequence[str]) -> int:
    if len(argv) != 1:
        print("usage: python -m k2tui.jobs.losses METRICS.jsonl", file=sys.stderr)
        return 2
    path = Path(argv[0])
    try:
        with open(path, encoding="utf-8", errors="replace") as fh:
            rows = rows_of(fh)
    except OSError as err:
        raise K2Error(f"{path}: {err.strerror}", "it is written by the train step")
    losses = losses_of(rows)
    row = means(losses)
    first_step = [a[0] for r in rows if r.get("kind") == "step" and (a := r.get("accuracy"))]
    report_result(
        {
            "steps": len(losses),
            "losses": row,
            "accuracy": means(first_step),
            "evals": evals_of(rows),
            "first": row[0] if row else None,
            "last": row[-1] if row else None,
        }
    )
    print(f"{len(losses)} steps" + (f", loss {row[0]:.4f} at first, {row[-1]:.4f} at last" if row else ""))
    return 0 if row else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except K2Error as problem:
        print(f"k2tui: {problem.message}", file=sys.stderr)
        sys.exit(1)
