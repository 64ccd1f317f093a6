"""Rows of both sides of `k2tui bench compare`, from the store."""

from __future__ import annotations

import argparse
import platform
from pathlib import Path

from k2tui.benchdb import BenchDb
from k2tui.core.bench import BenchRow
from k2tui.core.bench_compare import METRICS, Comparison, compare


def side(db: BenchDb, text: str) -> list[BenchRow]:
    """A run, or every point of its sweep; a label: its newest sweep."""
    run_id = db.resolve(text)
    row = db.row(run_id)
    assert row is not None
    if text == row.label and row.sweep:
        return db.rows(1000, sweep=row.sweep)
    if row.sweep and len(text) < 20:
        return db.rows(1000, sweep=row.sweep)
    return [row]


def load_comparison(args: argparse.Namespace) -> list[Comparison]:
    with BenchDb(Path(args.db) if args.db else None, readonly=True) as db:
        base, new = side(db, args.base), side(db, args.new)
        noise: dict[str, float] = {}
        for metric in METRICS:
            found = db.noise(platform.node(), base[0].workload_fp, metric)
            if found is not None:
                noise[metric] = found
        return compare(base, new, noise=noise)
