"""Rows of both sides of `k2tui bench compare`, from the store."""

from __future__ import annotations

import argparse
import platform

from k2tui.benchdb import BenchDb, given
from k2tui.core.bench import BenchRow
from k2tui.core.bench_compare import METRICS, Comparison, Noise, compare, difference
from k2tui.core.bench_table import load_words
from k2tui.errors import UsageError


def side(db: BenchDb, text: str) -> list[BenchRow]:
    """A full run id: that run. Anything shorter (label, part of an id): every point of its sweep under its label."""
    run_id = db.resolve(text)
    row = db.row(run_id)
    assert row is not None
    if row.sweep and text != run_id:
        return [r for r in db.rows(1000, sweep=row.sweep) if r.label == row.label]
    return [row]


def _same_run(db: BenchDb, base: str, new: str) -> UsageError:
    """Why two texts that lead to the same rows cannot be compared, and what to give instead."""
    a, b = (db.row(db.resolve(text)) for text in (base, new))
    assert a is not None and b is not None
    if a.run_id == b.run_id:
        return UsageError(f"{base!r} and {new!r} mean the same row", "give rows of two runs: k2tui bench list shows their ids")
    same = difference(a, b) == ""
    loads = f"both {load_words(a)}" if same else f"{load_words(a)} and {load_words(b)}"
    return UsageError(
        f"{base!r} and {new!r} are rows of one run ({loads})",
        f"whole ids compare the two alone: k2tui bench compare {a.run_id} {b.run_id}" if same
        else "a load is compared with the same load of another run: give a row of that one (k2tui bench list)",
    )  # fmt: skip


def load_comparison(args: argparse.Namespace) -> list[Comparison]:
    with given(args.db) as db:
        base, new = side(db, args.base), side(db, args.new)
        if {r.run_id for r in base} & {r.run_id for r in new}:
            raise _same_run(db, args.base, args.new)
        noise: dict[str, Noise] = {}
        for metric in METRICS:
            found = db.noise(platform.node(), base[0].workload_fp, metric)
            if found is not None:
                noise[metric] = Noise(*found)
        return compare(base, new, noise=noise)
