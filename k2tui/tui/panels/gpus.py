"""One row a GPU where room is short, one card a GPU (figures, and curves of the last minutes) where there is more."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from k2tui.core.gpu import GpuSample, GpuView, describe_health, memory_percent
from k2tui.core.gpu_text import NONE_TEXT, bytes_text, curve, short_gpu_name, state_word
from k2tui.tui import format as fmt
from k2tui.tui.lines import (
    Cell,
    Column,
    Line,
    Picture,
    Row,
    Seg,
    bar,
    fit,
    fit_line,
    line_width,
    spark,
    table,
    text_line,
    wrap,
)
from k2tui.tui.lines import width as cells_of
from k2tui.tui.panels import Panel
from k2tui.tui.view import View

STALE_S = 5.0
SECONDS_A_CELL = 10  # of a sparkline in a row, and of a curve in a card (two steps a cell)
CURVE_STEP_S = 5
CARD_LINES = (5, 4, 3)
CARD_WIDTH = 110  # less, and a card has no room for its curves
FIGURES = 62  # cells of a card's left side

COLUMNS = (
    Column("#", 2, keep=11, align=">"),
    Column("rank", 4, keep=5),
    Column("util", 8, weight=2, keep=9, limit=40),
    Column("", 4, keep=10, align=">"),
    Column("memory", 8, weight=2, keep=8, limit=40),
    Column("", 9, keep=10, align=">"),
    Column("power", 8, keep=7, align=">"),
    Column("temp", 5, keep=7, align=">"),
    Column("MHz", 4, keep=3, align=">"),
    Column("last 10s a cell", 8, weight=3, keep=4, limit=60),
    Column("state", 5, keep=6),
)
RANK, STATE = 1, 10  # columns that are as wide as what they hold
FIRST = 100.0  # weight of a column that gets what it needs before bars and curves grow
# What `o` goes through: name, the column that shows it, the figure, highest first (index: lowest first).
SORTS: tuple[tuple[str, int, Callable[[GpuSample], float]], ...] = (
    ("index", 0, lambda gpu: -gpu.index),
    ("utilisation", 2, lambda gpu: -1 if gpu.gpu_utilization is None else gpu.gpu_utilization),
    ("memory", 4, lambda gpu: memory_percent(gpu) or 0.0),
    ("power", 6, lambda gpu: gpu.power_usage_mw or 0),
    ("temperature", 7, lambda gpu: gpu.temperature_c or 0),
)


def sort_names() -> tuple[str, ...]:
    return tuple(name for name, _column, _key in SORTS)


def ordered(gpus: Sequence[GpuSample], name: str) -> list[GpuSample]:
    """Sorted by one of SORTS; equal ones by index; GPUs in error last, whatever the order."""
    key = next((k for n, _c, k in SORTS if n == name), SORTS[0][2])
    return sorted(gpus, key=lambda gpu: (bool(gpu.error), -key(gpu), gpu.index))


def load_role(percent: float | None) -> str:
    return "dim" if percent is None else ("bar" if percent < 90 else "bar2")


def memory_role(share: float | None) -> str:
    return "mem" if (share or 0.0) < 0.97 else "warn"


def heat_role(gpu: GpuSample) -> str:
    """Warning from 5 degrees below the slow-down, error at it."""
    temperature, limit = gpu.temperature_c, gpu.temperature_slowdown_c
    if temperature is None or limit is None or temperature < limit - 5:
        return ""
    return "bad" if temperature >= limit else "warn"


def fitted(column: Column, longest: int, limit: int) -> Column:
    """The column with room for its longest entry, up to `limit` cells, before others grow."""
    return column._replace(weight=FIRST, limit=max(column.cells, min(longest, limit)))


def columns_for(view: GpuView, width: int) -> tuple[Column, ...]:
    """Rank and state as wide as their entries need; an empty state leaves where the ranks would be cut."""
    good = [gpu for gpu in view.gpus if not gpu.error]
    ranks = max((cells_of(ranks_of(view, gpu.index)) for gpu in good), default=0)
    states = max((line_width(state_segs(gpu, 40)) for gpu in good), default=0)
    columns = list(COLUMNS)
    columns[RANK] = fitted(columns[RANK], ranks, max(12, width // 6))
    columns[STATE] = fitted(columns[STATE], states, 40)
    if width >= 100 and states <= 9:  # always room for "power cap", which comes and goes: nothing else moves with it
        columns[STATE] = columns[STATE]._replace(cells=9, weight=0.0)
    spare = width - sum(column.cells for column in columns) - (len(columns) - 1)
    if not states and ranks - columns[RANK].cells > spare:
        del columns[STATE]
    return tuple(columns)


def ranks_of(view: GpuView, index: int) -> str:
    """ "TP3" (or several, or the biggest process's name) of the processes on a GPU."""
    mine = [p for p in view.processes if p.gpu_index == index]
    ranks = sorted({p.rank for p in mine if p.rank})
    if ranks:
        return " ".join(ranks)
    named = sorted((p for p in mine if p.name), key=lambda p: -(p.memory_used_b or 0))
    return named[0].name if named else ""


def state_segs(gpu: GpuSample, cells: int) -> Line:
    """What is wrong in as many words as fit; nothing when nothing is."""
    health = describe_health(gpu)
    if not health and "power cap" not in gpu.throttle_reasons:
        return ()
    severity, text = health[0] if health else ("warning", "power cap")
    if len(text) > cells:
        text = state_word(gpu) if state_word(gpu) not in ("busy", "idle", "") else ("ecc" if gpu.ecc_uncorrected else "link")
    return (Seg(text, "bad" if severity == "error" else "warn"),)


def power_words(gpu: GpuSample) -> str:
    if gpu.power_usage_mw is None:
        return NONE_TEXT
    limit = "" if gpu.enforced_power_limit_mw is None else f"/{gpu.enforced_power_limit_mw / 1000:.0f}"
    return f"{gpu.power_usage_mw / 1000:.0f}{limit}W"


def memory_words(gpu: GpuSample) -> str:
    return f"{fmt.size(gpu.memory_used_b, NONE_TEXT)}/{fmt.size(gpu.memory_total_b, '?')}"


def _row(gpu: GpuSample, view: View, all_: GpuView) -> Sequence[Cell]:
    g = view.glyphs
    util = gpu.gpu_utilization
    percent = memory_percent(gpu)
    share = None if percent is None else percent / 100
    history = view.history.get(f"gpu.{gpu.index}.util", SECONDS_A_CELL)
    return (
        Seg(str(gpu.index), "bold"),
        Seg(ranks_of(all_, gpu.index), "accent"),
        lambda w: bar(None if util is None else util / 100, w, load_role(util), g),
        NONE_TEXT if util is None else f"{util}%",
        lambda w: bar(share, w, memory_role(share), g),
        memory_words(gpu),
        power_words(gpu),
        Seg(NONE_TEXT if gpu.temperature_c is None else f"{gpu.temperature_c}{g.degree}", heat_role(gpu)),
        NONE_TEXT if gpu.sm_clock_mhz is None else str(gpu.sm_clock_mhz),
        lambda w: (Seg(spark(history, w, 100.0, g), "spark"),),
        lambda w: state_segs(gpu, w),
    )


def error_line(gpu: GpuSample, width: int, glyphs_bad: str) -> Line:
    name = short_gpu_name(gpu.name)
    return fit_line((Seg(f"{gpu.index:>2} ", "bold"), Seg(f"{glyphs_bad} {name} " if name else f"{glyphs_bad} ", "bad"), Seg(gpu.error, "bad")), width)


# -- cards ---------------------------------------------------------------------------------------------------------------------


def curves(
    view: View, index: int, metric: str, cells: int, height: int, *, step_s: int = CURVE_STEP_S, top: float = 100.0
) -> list[str]:
    """A GPU's curve of that metric, `cells` wide: two steps a cell (one in ASCII)."""
    is_ascii = view.glyphs.ascii
    values = view.history.gpus.values(index, metric, step_s, cells if is_ascii else cells * 2)
    return [line.ljust(cells)[:cells] for line in curve(values, height, top=top, ascii_only=is_ascii)]


def _meter(label: str, share: float | None, role: str, text: str, cells: int, view: View) -> Line:
    width = max(4, cells - 6 - 17)
    return (Seg(f"{label:6}", "dim"), *bar(share, width, role, view.glyphs), Seg(fit(text, 17, ">", view.glyphs.ellipsis)))


def _card(gpu: GpuSample, view: View, all_: GpuView, width: int, lines: int) -> list[Line]:
    """`lines` lines: name and state, meters, clocks and links at the left; utilisation and power curves at the right."""
    g = view.glyphs
    left = FIGURES
    room = max(0, width - left - 3)
    first, second = room - room // 2, room // 2 - 1
    util, percent = gpu.gpu_utilization, memory_percent(gpu)
    limit = gpu.enforced_power_limit_mw
    power_share = None if gpu.power_usage_mw is None or not limit else gpu.power_usage_mw / limit
    jobs = sorted({p.job_id for p in all_.processes if p.gpu_index == gpu.index and p.job_id})
    title: list[Seg] = [
        Seg(f"{gpu.index:>2} ", "bold"),
        Seg(short_gpu_name(gpu.name) + "  ", "bold"),
        Seg(fit(ranks_of(all_, gpu.index), 24, ellipsis=g.ellipsis).rstrip(), "accent"),
        Seg("  " + " ".join(jobs), "faint"),
    ]
    memory_heat = "" if gpu.memory_temperature_c is None else f" mem {gpu.memory_temperature_c}{g.degree}"
    heat = (NONE_TEXT if gpu.temperature_c is None else f"{gpu.temperature_c}{g.degree}") + memory_heat
    vital: list[Seg] = [Seg(heat, heat_role(gpu)), Seg(f"  {gpu.sm_clock_mhz or NONE_TEXT} MHz")]
    state: Line = state_segs(gpu, max(5, left - line_width(title) - line_width(vital) - 3))
    if lines < 5:
        state = (*state, Seg("  "), *vital)
    meters: list[Line] = [
        _meter("util", None if util is None else util / 100, load_role(util), NONE_TEXT if util is None else f"{util}%", left, view),
        _meter(
            "mem",
            None if percent is None else percent / 100,
            memory_role(None if percent is None else percent / 100),
            f"{memory_words(gpu)} {'' if percent is None else f'{percent:.0f}%':>4}",
            left,
            view,
        ),
        _meter("power", power_share, "warn" if "power cap" in gpu.throttle_reasons else "ok", power_words(gpu), left, view),
    ]
    if gpu.memory_kind == "unified":
        meters[1] = (*meters[1][:-1], Seg(fit(f"{memory_words(gpu)} host", 17, ">"), "warn"))
    facts: list[Seg] = list(vital)
    if gpu.pcie_gen is not None and gpu.pcie_width is not None:
        facts.append(Seg(f"  Gen{gpu.pcie_gen} x{gpu.pcie_width}", "dim"))
    if gpu.nvlink_rx_kb_s is not None and gpu.nvlink_tx_kb_s is not None:
        facts.append(Seg(f"  nv {g.down}{bytes_text(gpu.nvlink_rx_kb_s * 1000)} {g.up}{bytes_text(gpu.nvlink_tx_kb_s * 1000)}", "dim"))
    if gpu.fan_percent is not None:
        facts.append(Seg(f"  fan {gpu.fan_percent}%", "dim"))
    body = [*meters[: lines - 1], facts] if lines >= 5 else meters[: lines - 1]
    sides = [fit_line((*fit_line(title, left - line_width(state)), *state), left), *[fit_line(line, left) for line in body]]
    if room < 20:
        return sides
    loads = curves(view, gpu.index, "gpu_utilization", first, lines)
    powers = curves(view, gpu.index, "power_usage_w", second, lines, top=(limit or 1_000_000) / 1000)
    return [
        (*side, Seg(" "), Seg(load, "spark"), Seg("  "), Seg(power, "mem"))
        for side, load, power in zip(sides, loads, powers, strict=True)
    ]


def card_lines(count: int, height: int, width: int) -> int:
    """Lines of a card so that all fit (with a header), 0 = rows it is."""
    if width < CARD_WIDTH or count < 1:
        return 0
    return next((lines for lines in CARD_LINES if count * lines + 1 <= height), 0)


def _cards(view: View, all_: GpuView, gpus: Sequence[GpuSample], width: int, lines: int) -> tuple[Line, tuple[Row, ...]]:
    rows: list[Row] = []
    for gpu in gpus:
        if gpu.error:
            rows.append(Row(str(gpu.index), error_line(gpu, width, view.glyphs.bad)))
            rows += [Row("", ())] * (lines - 1)
            continue
        for number, line in enumerate(_card(gpu, view, all_, width, lines)):
            rows.append(Row(str(gpu.index) if number == 0 else "", line))
    room = max(0, width - FIGURES - 3)
    first = room - room // 2
    span = fmt.age(first * CURVE_STEP_S * (1 if view.glyphs.ascii else 2))
    header = (
        Seg(fit("  GPU", FIGURES + 1), "dim"),
        Seg(fit(f"utilisation, last {span}", first), "dim"),
        Seg("  "),
        Seg(fit("power to its limit", room // 2 - 1), "dim"),
    )
    return header, tuple(rows)


# -- the panel -----------------------------------------------------------------------------------------------------------------


def note_of(view: View, gpu: GpuView) -> Line:
    """At the right of the title: how many of what, power in all, and how old the figures are when they are old."""
    g = view.glyphs
    names = sorted({short_gpu_name(x.name) for x in gpu.gpus if x.name})
    note: list[Seg] = [Seg(f"{len(gpu.gpus)} x {names[0]}" if len(names) == 1 else f"{len(gpu.gpus)}", "dim")]
    total_w = sum(x.power_usage_mw or 0 for x in gpu.gpus) / 1000
    if total_w:
        note.append(Seg(f" {g.dot} {total_w:,.0f} W", "dim"))
    lost = sum(bool(x.error) for x in gpu.gpus)
    if lost:
        note.append(Seg(f" {g.dot} {lost} lost", "bad"))
    if view.gpu_sort and view.gpu_sort != "index":
        note.append(Seg(f" {g.dot} by {view.gpu_sort}", "dim"))
    stale = view.now_s - gpu.taken_s
    if gpu.waiting_for:
        note.append(Seg(f" {g.warn} NVML is slow: {gpu.waiting_for}", "warn"))
    elif stale > STALE_S:
        note.append(Seg(f" {g.warn} {fmt.age(stale)} old", "warn"))
    return tuple(note)


def draw(view: View, width: int, height: int) -> Picture:
    gpu = view.snap.gpu
    if gpu is None:
        return Picture((Row("", text_line("waiting for the first sample", "dim")),))
    if not gpu.gpus:
        rows = [Row("", text_line(t, "")) for t in wrap(gpu.error or "no GPU on this machine", width)]
        if gpu.hint:
            rows += [Row("", text_line(t, "dim")) for t in wrap(gpu.hint, width)]
        return Picture(tuple(rows))
    gpus = ordered(gpu.gpus, view.gpu_sort)
    note = note_of(view, gpu)
    lines = card_lines(len(gpus), height, width)
    if lines:
        header, rows_ = _cards(view, gpu, gpus, width, lines)
        return Picture(rows_, header, note)
    columns = columns_for(gpu, width)
    if view.gpu_sort and view.gpu_sort != "index":
        at = next(column for name, column, _key in SORTS if name == view.gpu_sort)
        columns = tuple(
            c._replace(title=c.title + view.glyphs.down) if n == at else c for n, c in enumerate(columns)
        )
    good = [(str(x.index), _row(x, view, gpu)) for x in gpus if not x.error]
    header, made = table(columns, good, width, view.glyphs)
    rows_ = (*made, *(Row(str(x.index), error_line(x, width, view.glyphs.bad)) for x in gpus if x.error))
    return Picture(rows_, header if height > len(rows_) else None, note)


PANEL = Panel(
    "gpus",
    "GPUs",
    draw,
    needs=("gpu",),
    order=20,
    selectable=True,
    enter="open_gpu",
    keys=(("o", "gpu_sort", "sort"),),
    help="One row or card a GPU, as NVML tells it; n/a is what it cannot tell. Enter: one GPU in depth.",
)
