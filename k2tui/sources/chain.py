"""Reads a pipeline's folder: the records of its steps and its newest report. Only what changed is read again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

from k2tui import paths
from k2tui.core.chain import Chain, Record, record_of
from k2tui.core.chain_view import ChainView, chain_view
from k2tui.core.job import Job
from k2tui.regular import read_regular


class _Files:
    """JSON files, each read again only when it changed."""

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[tuple[int, int], Any]] = {}

    def json(self, path: Path) -> Any:
        try:
            facts = path.stat()
            stamp = (facts.st_mtime_ns, facts.st_size)
            known = self._seen.get(path)
            if known is not None and known[0] == stamp:
                return known[1]
            value: Any = json.loads(read_regular(path))
        except (OSError, ValueError):
            return None
        self._seen[path] = (stamp, value)
        return value


class Done:
    """Which steps are done by their pipelines' own records."""

    def __init__(self) -> None:
        self._files = _Files()

    def look(self, steps: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
        """(pipeline, step) -> job of its last success, for those of the steps that have one."""
        root = paths.state_dir() / "chains"
        found: dict[tuple[str, str], str] = {}
        for chain, step in steps:
            if "/" in chain + step:
                continue
            record = record_of(self._files.json(root / chain / f"{step}.json"))
            if record is not None and record.job_id:
                found[chain, step] = record.job_id
        return found


class ChainReader:
    """look(jobs) -> the pipeline as it stands."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self._root = paths.state_dir() / "chains" / chain.name
        self._files = _Files()

    def look(self, jobs: Sequence[Job]) -> ChainView:
        records: dict[str, Record] = {}
        for step in self.chain.steps:
            record = record_of(self._files.json(self._root / f"{step.name}.json"))
            if record is not None:
                records[step.name] = record
        path = self._root / "report.json"
        report: Any = self._files.json(path)
        return chain_view(
            self.chain,
            records,
            jobs,
            cast("dict[str, Any]", report) if isinstance(report, dict) else None,
            str(path.with_suffix(".md")),
        )
