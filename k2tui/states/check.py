"""Is a states folder whole? Checksums, shapes, finite numbers, every row present, tokens equal to the data file. Numpy only."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from k2tui.errors import K2Error
from k2tui.states import layout
from k2tui.states.reader import StatesReader

RowOf = Callable[[int], tuple[Sequence[int], Sequence[int]]]


@dataclass
class CheckReport:
    """problems: one line each, worst first to be found. missing: data-file rows without states."""

    samples: int = 0
    tokens: int = 0
    shards: int = 0
    bytes: int = 0
    shadowed: int = 0  # copies of a sample in a second shard; read never
    partial: int = 0  # shards that a killed writer left; harmless, removed by the next run
    missing: list[int] = field(default_factory=list[int])
    problems: list[str] = field(default_factory=list[str])

    @property
    def ok(self) -> bool:
        return not self.problems and not self.missing


def check_states(
    folders: Sequence[Path],
    rows: RowOf | None = None,
    row_count: int | None = None,
    *,
    deep: bool = True,
    on_progress: Callable[[int, int], None] | None = None,
) -> CheckReport:
    """Look at everything. rows(i), row_count: the data file, to compare tokens and masks and to name missing rows.

    deep: also read every value (checksums, NaN and infinity), about 2 GB/s a core; else headers, ids and masks only.
    Raises K2Error when the folder has no manifest.
    """
    report = CheckReport()
    manifest = layout.read_manifest(folders[0])
    for folder in folders:
        report.partial += len(list(folder.glob(f".{layout.SHARD_PREFIX}*{layout.PARTIAL_SUFFIX}")))
        for path in layout.shard_paths(folder):
            report.shards += 1
            report.bytes += path.stat().st_size
            try:
                layout.read_header(path)
            except K2Error as err:
                report.problems.append(err.message)
    if report.problems:
        return report  # a reader would stop at the first of them
    reader = StatesReader(*folders, allow_empty=True)
    report.shadowed = reader.shadowed
    report.samples = len(reader)
    boundaries, hidden = len(manifest.boundaries), manifest.hidden_size
    for position, entry in enumerate(reader.entries):
        if on_progress and position % 64 == 0:
            on_progress(position, len(reader))
        header = reader.shards[entry.shard]
        where = f"{header.path.name}: sample {entry.index}"
        told = header.samples[entry.index]
        tensors = {n: header.tensors.get(f"{entry.index}.{n}") for n in told["crc"]}
        if any(t is None for t in tensors.values()):
            report.problems.append(
                f"{where}: {', '.join(n for n, t in tensors.items() if t is None)} is not in the shard"
            )
            continue
        raw = reader.raw(position)
        length = entry.length
        report.tokens += length
        want: dict[str, tuple[int, ...]] = {
            "input_ids": (length,),
            "loss_mask": (length,),
            "aux": (length, boundaries * hidden),
        }
        if "last" in raw:
            want["last"] = (entry.last_rows, hidden)
        for name, shape in want.items():
            if name not in raw:
                report.problems.append(f"{where}: no {name}")
            elif raw[name].shape != shape:
                report.problems.append(
                    f"{where}: {name} is {list(raw[name].shape)}, {list(shape)} was expected"
                )
        if (
            manifest.last_rows == "loss"
            and "loss_mask" in raw
            and int(layout.loss_rows(raw["loss_mask"]).sum()) != entry.last_rows
        ):
            report.problems.append(
                f"{where}: {entry.last_rows} rows of last, the loss mask needs another number"
            )
        if rows is not None and (row_count is None or entry.index < row_count):
            ids, mask = rows(entry.index)
            if raw["input_ids"].tolist() != list(ids):
                report.problems.append(f"{where}: other tokens than line {entry.index + 1} of the data file")
            elif raw["loss_mask"].tolist() != list(mask):
                report.problems.append(
                    f"{where}: another loss mask than line {entry.index + 1} of the data file"
                )
        if deep:
            _check_values(raw, told["crc"], where, report)
        if len(report.problems) > 200:
            report.problems.append("more than 200 problems: stopped")
            break
    if row_count is not None:
        there = set(reader.indices())
        report.missing = [i for i in range(row_count) if i not in there]
        beyond = [i for i in there if i >= row_count]
        if beyond:
            report.problems.append(
                f"{len(beyond)} samples beyond the data file's {row_count} rows, the first {min(beyond)}"
            )
    reader.close()
    return report


def _check_values(
    raw: Mapping[str, np.ndarray], crc: Mapping[str, int], where: str, report: CheckReport
) -> None:
    for name, values in raw.items():
        flat = values.reshape(-1).view(np.uint8)
        if name in crc and zlib.crc32(flat.data) != crc[name]:
            report.problems.append(f"{where}: {name} does not match its checksum")
            continue
        bad = _not_finite(values)
        if bad:
            report.problems.append(f"{where}: {bad} values of {name} are NaN or infinite")


def _not_finite(values: np.ndarray) -> int:
    """NaN and infinity, counted on the bit patterns: bf16 (uint16), fp8 e4m3 (uint8), fp32."""
    if values.dtype == np.uint16:
        return int(((values & 0x7F80) == 0x7F80).sum())
    if values.dtype == np.uint8 and values.ndim == 2:
        return int(((values & 0x7F) == 0x7F).sum())
    if values.dtype == np.float32:
        return int((~np.isfinite(values)).sum())
    return 0
