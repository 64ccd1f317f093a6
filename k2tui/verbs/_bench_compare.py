"""Rows of both sides of `k2tui bench compare`, from the store."""

from __future__ import annotations

import argparse
import platform

from k2tui.benchdb import BenchDb, given
from k2tui.core.bench import BenchRow
from k2tui.core.bench_compare import METRICS, Comparison, Noise, compare
from k2tui.errors import UsageError


def side(db: BenchDb, text: str) -> list[BenchRow]:
    """A full run id: that run. Anything shorter (label, part of an id): every point of its sweep under its label."""
    run_id = db.resolve(text)
    row = db.row(run_id)
    assert row is not None
    if row.sweep and text != run_id:
        return [r for r in db.rows(1000, sweep=row.sweep) if r.label == row.label]
    return [row]


def load_comparison(args: argparse.Namespace) -> list[Comparison]:
    with given(args.db) as db:
        base, new = side(db, args.base), side(db, args.new)
        if {r.run_id for r in base} & {r.run_id for r in new}:
            raise UsageError(f"{args.base!r} and {args.new!r} mean the same run", "give two runs: k2tui bench list shows their ids")
        noise: dict[str, Noise] = {}
        for metric in METRICS:
            found = db.noise(platform.node(), base[0].workload_fp, metric)
            if found is not None:
                noise[metric] = Noise(*found)
        return compare(base, new, noise=noise)
