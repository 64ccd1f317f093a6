"""Real failures with the right answer: the score on all of them, plain and in every wrapping. `python -m` prints the table.

python tests/load/test_cases.py            every style
python tests/load/test_cases.py plain -v   one style, with each miss
"""

from __future__ import annotations

import collections
import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from wrap import STYLES

from k2tui.core.tracker import Evidence
from k2tui.engines._reading import read_whole

CASES = sorted((Path(__file__).parent.parent / "fixtures" / "cases").glob("[0-9][0-9][0-9].json"))
NOW = 1_796_000_000.0
_NAMES = set(Evidence._fields) - {"extra", "is_complete"}
_STAMP = re.compile(r"\[(?:20\d\d-\d\d-\d\d )?\d\d:\d\d:\d\d(?:\.\d+)?(?: [A-Z_]+\d+)*\] ?")


def norm(text: str | None) -> str:
    return re.sub(r"\s+", " ", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text or "")).strip()


def score(style: str, *, verbose: bool = False) -> tuple[collections.Counter[str], collections.Counter[str]]:
    """(hits, out of) for each mark, as the cases' own score.py counts them."""
    hit: collections.Counter[str] = collections.Counter()
    of: collections.Counter[str] = collections.Counter()
    for path in CASES:
        case = json.loads(path.read_text())
        want, context = case["expected"], case["context"]
        data = case["log"].encode()
        proof = want.get("proof_match") or want["proof_line"]
        if style != "plain":
            data = STYLES[style](data)
            if style in ("no_stamps", "ranks_only"):
                proof = _STAMP.sub("", proof)  # the style took it out of the log
        known = {k: v for k, v in context.items() if k in _NAMES}
        got = read_whole(data, NOW, Evidence(**known, extra=context, is_complete=True)).answer()
        marks = {
            "state": got["state"] == want["state"],
            "group": got["root_cause_group"][:3] == want["root_cause_group"][:3],
            "class": got["root_cause"] == want["root_cause"],
            "phase": got["phase"] == want["phase"],
            "proof": norm(proof) in norm(got["proof_line"]),
        }
        if want.get("shards"):
            shards = got["shards"] or {}
            marks["shards"] = all(shards.get(k) == v for k, v in want["shards"].items())
        marks["state+group"] = marks["state"] and marks["group"]
        for name, ok in marks.items():
            of[name] += 1
            hit[name] += ok
        if verbose and not all(marks.values()):
            print(
                f"  {style} {path.stem} {case['kind']}: {[n for n, ok in marks.items() if not ok]} {got['state']} {got['root_cause']} {got['proof_line'][:150]!r}"
            )
    return hit, of


@pytest.mark.parametrize("style", ["plain", *STYLES])
def test_score(style):
    hit, of = score(style)
    missed = {name: of[name] - hit[name] for name in of}
    assert missed["state+group"] <= (0 if style == "plain" else 1)
    assert missed["class"] <= (0 if style == "plain" else 1)
    assert missed["proof"] <= (2 if style == "plain" else 4)
    assert hit["shards"] >= 0.9 * of["shards"]
    assert hit["phase"] >= 0.93 * of["phase"]


if __name__ == "__main__":
    wanted = [a for a in sys.argv[1:] if not a.startswith("-")] or ["plain", *STYLES]
    for name in wanted:
        hits, total = score(name, verbose="-v" in sys.argv)
        print(f"{name:20}", " ".join(f"{k} {hits[k]}/{total[k]}" for k in total))
