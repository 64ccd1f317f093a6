"""The newest training as it goes: loss, accuracy of each draft step, expected accept length, speed, time left."""

from __future__ import annotations

from collections.abc import Sequence

from k2tui.core.training import TrainView
from k2tui.tui import format as fmt
from k2tui.tui.lines import Line, Picture, Row, Seg, bar, chart, fit_line, spread, text_line
from k2tui.tui.panels import LOOKING, Panel
from k2tui.tui.view import View


def spread_out(values: Sequence[float], count: int) -> list[float]:
    """The whole curve in `count` values: means of equal stretches, or each value as often as needed."""
    if not values or count <= 0:
        return []
    out: list[float] = []
    for i in range(count):
        a = i * len(values) // count
        b = max(a + 1, (i + 1) * len(values) // count)
        out.append(sum(values[a:b]) / (b - a))
    return out


def _head(t: TrainView, view: View, width: int) -> list[Line]:
    total = f"/{fmt.count(t.total)}" if t.total else ""
    words = [Seg(f"step {fmt.count(t.step)}{total} ", "bold"), Seg(f"epoch {t.epoch + 1} ", "dim")]
    if t.total:
        words += bar(
            t.step / t.total, max(8, min(30, width // 4)), "bar" if t.is_running else "ok", view.glyphs
        )
    if t.eta_s is not None:
        words += [Seg("  left ", "dim"), Seg(fmt.age(t.eta_s, ""), "bold")]
    words.append(Seg("" if t.is_running else "  ended", "dim"))
    if t.doing:
        words.append(Seg(f"  {t.doing}", "accent"))
    facts: list[Seg] = []
    for label, text in (
        ("tok/s", fmt.count(t.tok_s[-1]) if t.tok_s else ""),
        ("bearing a loss", fmt.count(t.loss_tok_s) if t.loss_tok_s is not None else ""),
        ("MFU", "" if t.mfu is None else f"{100 * t.mfu:.{0 if t.mfu >= 0.1 else 1}f}%"),
        ("memory", fmt.size(t.memory_b) if t.memory_b is not None else ""),
        ("lr", f"{t.learning_rate:.2e}" if t.learning_rate is not None else ""),
        ("grad norm", f"{t.grad_norm:.3g}" if t.grad_norm is not None else ""),
        ("waits for data", f"{100 * t.wait_share:.0f}%" if t.wait_share is not None else ""),
    ):
        if text:
            facts += [Seg(f"{label} ", "dim"), Seg(f"{text}  ")]
    lines: list[Line] = [fit_line(words, width), fit_line(facts, width)]
    if t.evals:
        first, last = t.evals[0], t.evals[-1]
        best = max(t.evals, key=lambda e: e.accept_length)
        told = [Seg("held out: accept length ", "dim"), Seg(f"{last.accept_length:.3f}", "accent bold")]
        told += [Seg(f" at step {last.step}", "dim")]
        told += [Seg(f"  best {best.accept_length:.3f}", "")] if best is not last else []
        told += [Seg(f"  untrained {first.accept_length:.3f}", "dim")] if first.step == 0 else []
        full = " ".join(f"{a:.2f}" for a in last.full_acc)
        told += [Seg("  all right up to step: ", "dim"), Seg(full)] if full else []
        lines.append(fit_line(told, width))
    return lines


def _blocks(t: TrainView) -> list[tuple[str, Sequence[float], float | None, int]]:
    """(title, curve, top, digits), the ones that tell most first."""
    blocks: list[tuple[str, Sequence[float], float | None, int]] = [("loss", t.loss, None, 3)]
    if len(t.evals) > 1:
        blocks.append(("expected accept length", [e.accept_length for e in t.evals], None, 3))
    blocks += [(f"accuracy of draft step {k}", curve, 1.0, 3) for k, curve in enumerate(t.accuracy[:1])]
    blocks.append(("tok/s", t.tok_s, None, 0))
    blocks += [(f"accuracy of draft step {k + 1}", curve, 1.0, 3) for k, curve in enumerate(t.accuracy[1:])]
    return [b for b in blocks if b[1]]


def draw(view: View, width: int, height: int) -> Picture:
    t = view.snap.training
    if t is None and not view.snap.is_whole:
        return LOOKING
    if t is None:
        return Picture(
            (Row("", text_line("No training yet: the pipeline's train step, or t, starts one.", "dim")),)
        )
    lines = _head(t, view, width)
    known = _blocks(t)
    left = height - len(lines)
    if known and left >= 3:
        across = 1 if width < 70 else 2 if width < 150 else 3
        rows_down = max(1, min(-(-len(known) // across), left // 4))
        each = max(3, left // rows_down)
        cells = (width - (across - 1) * 3) // across
        for y in range(rows_down):
            group = [_block(*b, cells, each - 1, view) for b in known[y * across : (y + 1) * across]]
            for n in range(each - 1 if y < rows_down - 1 or each > 3 else each):
                line: list[Seg] = []
                for i, block in enumerate(group):
                    line += [Seg("   ")] if i else []
                    line += block[n] if n < len(block) else fit_line([], cells)
                lines.append(fit_line(line, width))
    return Picture(tuple(Row("", x) for x in lines[:height]), title=f"Training {t.job_id}")


def _block(
    title: str, values: Sequence[float], top: float | None, digits: int, cells: int, height: int, view: View
) -> list[Line]:
    per_cell = 1 if view.glyphs.ascii else 2
    high = top or max(values) or 1.0
    last, best = f"{values[-1]:,.{digits}f}", f"{max(values):,.{digits}f}"
    head = spread([Seg(title, "bold"), Seg(f"  {last}", "accent bold")], [Seg(f"max {best}", "dim")], cells)
    drawn = chart(spread_out(values, cells * per_cell), cells, max(1, height - 1), high, view.glyphs)
    return [head, *(fit_line([Seg(text, "spark")], cells) for text in drawn)]


PANEL = Panel(
    "train",
    "Training",
    draw,
    needs=("training", "is_whole"),
    ticks=True,
    order=46,
    help="Loss, accuracy of each draft step, expected accept length on held-out samples, speed and time left of the newest training.",
)
