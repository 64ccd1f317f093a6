"""How the GPUs of one host are joined: paths, NVLink, peer access, NUMA; values and what follows from them, no NVML here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# From near to far, in nvidia-smi's words. NVLink stands before all of them.
PATHS = ("INT", "PIX", "PXB", "PHB", "NODE", "SYS")
PATH_WORDS = {
    "NV": "NVLink",
    "INT": "same board",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches, no CPU between",
    "PHB": "through the CPU's PCIe host bridge",
    "NODE": "through the CPU of one NUMA node",
    "SYS": "through the link between CPUs",
}


@dataclass(frozen=True, slots=True)
class TopologyGpu:
    index: int
    name: str = ""
    uuid: str = ""
    bus_id: str = ""
    numa_node: int | None = None
    cpus: str = ""  # "0-31,64-95": the CPUs near this GPU
    nvlinks: int = 0  # active links
    has_switch: bool = False  # its links end at an NVSwitch
    fabric: str = ""  # NVSwitch fabric: "", "not started", "in progress", "ready", "failed"


@dataclass(frozen=True, slots=True)
class TopologyPair:
    """Two GPUs, first < second. path: one of PATHS, "" = unknown. nvlinks: links between them (through a switch: of each).

    p2p: whether one can read and write the other's memory; None = unknown. p2p_reason: why not, in words.
    """

    first: int
    second: int
    path: str = ""
    nvlinks: int = 0
    p2p: bool | None = None
    p2p_reason: str = ""

    @property
    def label(self) -> str:
        """ "NV18", "PIX", ... as nvidia-smi topo -m prints it; "?" when unknown."""
        return f"NV{self.nvlinks}" if self.nvlinks else self.path or "?"


@dataclass(frozen=True, slots=True)
class Topology:
    gpus: tuple[TopologyGpu, ...] = ()
    pairs: tuple[TopologyPair, ...] = ()
    error: str = ""  # why there is nothing, in words
    hint: str = ""

    def pair(self, a: int, b: int) -> TopologyPair | None:
        low, high = min(a, b), max(a, b)
        return next((p for p in self.pairs if (p.first, p.second) == (low, high)), None)


def matrix_lines(topology: Topology) -> tuple[str, ...]:
    """The matrix as text: one column a GPU, then NUMA node and near CPUs; a legend of the words used; ASCII only."""
    if not topology.gpus:
        return (topology.error or "no GPU",)
    indices = [gpu.index for gpu in topology.gpus]
    head = ["", *[f"GPU{i}" for i in indices], "NUMA", "CPUs"]
    rows: list[list[str]] = []
    used: list[str] = []
    for gpu in topology.gpus:
        cells = [f"GPU{gpu.index}"]
        for other in indices:
            pair = topology.pair(gpu.index, other)
            label = "X" if other == gpu.index else pair.label if pair else "?"
            if pair and pair.p2p is False and label != "X":
                label += "!"
            word = "NV" if label.startswith("NV") else label.rstrip("!")
            if word in PATH_WORDS and word not in used:
                used.append(word)
            cells.append(label)
        rows.append([*cells, "-" if gpu.numa_node is None else str(gpu.numa_node), gpu.cpus or "-"])
    widths = [max(len(row[c]) for row in [head, *rows]) for c in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [head, *rows]
    ]
    legend = [f"  {'NV#' if word == 'NV' else word:5} {PATH_WORDS[word]}" for word in used]
    if any(pair.p2p is False for pair in topology.pairs):
        legend.append("  !     no peer-to-peer access")
    return tuple(lines + legend)


def describe_topology(topology: Topology, indices: Sequence[int] = ()) -> tuple[tuple[str, str], ...]:
    """What matters for running one model over these GPUs (() = all): (severity, words); "error", "warning" or "ok"."""
    chosen = [gpu for gpu in topology.gpus if not indices or gpu.index in indices]
    wanted = [gpu.index for gpu in chosen]
    if topology.error:
        return (("warning", topology.error),)
    out: list[tuple[str, str]] = []
    missing = [i for i in indices if i not in wanted]
    if missing:
        out.append(("error", f"no GPU {', '.join(map(str, missing))} here; there are {len(topology.gpus)}"))
    not_ready = [gpu for gpu in chosen if gpu.fabric in ("not started", "in progress", "failed")]
    if not_ready:
        out.append(
            (
                "error",
                f"the NVSwitch fabric of GPU {', '.join(str(g.index) for g in not_ready)} is {not_ready[0].fabric}: "
                "CUDA will not start; check that nvidia-fabricmanager runs and has the driver's version",
            )
        )
    pairs = [p for p in topology.pairs if p.first in wanted and p.second in wanted]
    blocked = [p for p in pairs if p.p2p is False]
    if blocked:
        first = blocked[0]
        out.append(
            (
                "warning",
                f"no peer access between GPU {first.first} and {first.second}"
                + (f" and {len(blocked) - 1} more pairs" if len(blocked) > 1 else "")
                + (f" ({first.p2p_reason})" if first.p2p_reason else "")
                + ": traffic goes through host memory; custom all-reduce will be off",
            )
        )
    if len(wanted) > 1:
        linked = [p for p in pairs if p.nvlinks]
        if len(linked) == len(pairs):
            counts = {p.nvlinks for p in pairs}
            out.append(("ok", f"all {len(wanted)} GPUs joined by NVLink ({_span(counts)} links)"))
            if len(counts) > 1:
                weak = min(pairs, key=lambda p: p.nvlinks)
                out.append(
                    (
                        "warning",
                        f"GPU {weak.first} and {weak.second} have only {weak.nvlinks} of {max(counts)} NVLinks up",
                    )
                )
        elif linked:
            lone = next(p for p in pairs if not p.nvlinks)
            out.append(
                (
                    "warning",
                    f"NVLink joins only some: GPU {lone.first} and {lone.second} talk over {lone.label} ({PATH_WORDS.get(lone.path, 'unknown path')})",
                )
            )
        else:
            worst = max((p.path for p in pairs), key=lambda path: PATHS.index(path) if path in PATHS else -1)
            out.append(
                ("warning", f"no NVLink: all-reduce goes over PCIe ({PATH_WORDS.get(worst, 'unknown path')})")
            )
        nodes = {gpu.numa_node for gpu in chosen if gpu.numa_node is not None}
        if len(nodes) > 1:
            out.append(
                (
                    "ok",
                    f"GPUs on NUMA nodes {', '.join(map(str, sorted(nodes)))}: bind each rank's CPUs to its GPU's node",
                )
            )
    return tuple(out)


def _span(counts: set[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"


def choose_gpus(topology: Topology, count: int, free: Sequence[int] = ()) -> tuple[int, ...]:
    """The `count` best joined GPUs among `free` (() = all), as indices; () when there are not that many.

    Greedy from every start: most NVLinks first, then the shortest paths, then the lowest indices.
    """
    candidates = [g.index for g in topology.gpus if not free or g.index in free]
    if count <= 0 or len(candidates) < count:
        return ()

    def nearness(a: int, b: int) -> tuple[int, int]:
        pair = topology.pair(a, b)
        if pair is None:
            return (0, -len(PATHS))
        return (pair.nvlinks, -(PATHS.index(pair.path) if pair.path in PATHS else len(PATHS)))

    best: tuple[tuple[int, int], tuple[int, ...]] | None = None
    for start in candidates:
        group = [start]
        while len(group) < count:
            rest = [c for c in candidates if c not in group]
            group.append(max(rest, key=lambda c: (_sum(nearness(c, g) for g in group), -c)))
        score = _sum(nearness(a, b) for i, a in enumerate(group) for b in group[i + 1 :])
        found = tuple(sorted(group))
        if best is None or score > best[0] or (score == best[0] and found < best[1]):
            best = (score, found)
    return best[1] if best else ()


def _sum(values: Iterable[tuple[int, int]]) -> tuple[int, int]:
    links = path = 0
    for a, b in values:
        links += a
        path += b
    return links, path
