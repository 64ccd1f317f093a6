"""`python -m k2tui.jobs.losses METRICS`: the course of a training's loss as a result that a gate can judge.

Reads the trainer's metrics.jsonl (lines with kind "step" and a loss) and knows nothing of torch. The result's `losses` are
at most 40 means over equal stretches, in order; a loss that is no finite number stays one, so that the gate sees it.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from k2tui.errors import K2Error
from k2tui.jobs.report import report_result

STRETCHES = 40


def losses_of(lines: Iterable[str]) -> list[float]:
    """Every step's loss; torn or foreign lines are passed over, a loss that is null counts as not a number."""
    found: list[float] = []
    for line in lines:
        try:
            raw: Any = json.loads(line)
        except ValueError:
            continue
        if not isinstance(raw, dict):
            continue
        row = cast("dict[str, Any]", raw)
        if row.get("kind") == "step" and "loss" in row:
            loss = row["loss"]
            good = isinstance(loss, int | float) and not isinstance(loss, bool)
            found.append(float(loss) if good else math.nan)
    return found


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
            losses = losses_of(fh)
    except OSError as err:
        raise K2Error(f"{path}: {err.strerror}", "it is written by the train step")
    row = means(losses)
    report_result(
        {
            "steps": len(losses),
            "losses": row,
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
