"""A training run as its metrics.jsonl tells it: curves of bounded length and the newest figures. Pure; line by line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from k2tui.parsing import parse_json

STEP_NOTE = "loss "  # the job's note begins so while steps are done; else it names what goes on
POINTS = 400  # a curve is thinned to between this many points and half of it


@dataclass(frozen=True, slots=True)
class Evaluation:
    """step 0 = before training. full_acc[k]: drafts whose first k+1 guesses are all right."""

    step: int
    accept_length: float
    full_acc: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class TrainView:
    """One training. Curves from the first step to the newest, each point a mean over equally many steps.

    accuracy[k]: curve of draft step k. tok_s: tokens per second. eta_s: seconds left at the newest line. mfu: 0..1.
    """

    job_id: str
    title: str
    is_running: bool
    step: int = 0
    total: int | None = None
    epoch: int = 0
    loss: tuple[float, ...] = ()
    accuracy: tuple[tuple[float, ...], ...] = ()
    tok_s: tuple[float, ...] = ()
    evals: tuple[Evaluation, ...] = ()
    learning_rate: float | None = None
    grad_norm: float | None = None
    loss_tok_s: float | None = None
    loss_tokens: int | None = None
    mfu: float | None = None
    memory_b: int | None = None
    wait_share: float | None = None
    eta_s: float | None = None
    doing: str = ""  # what goes on beside the steps, with its own count and time left


def _num(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _nums(value: Any) -> tuple[float, ...]:
    items = cast("list[Any]", value) if isinstance(value, list) else []
    return tuple(n for v in items if (n := _num(v)) is not None)


class TrainFold:
    """Folds lines of metrics.jsonl. Torn or foreign lines are passed over; a step that comes again starts the curves anew."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._points: list[list[float]] = []  # [loss, tok/s, accuracy of step 0, 1, ...]
        self._part: list[list[float]] = []  # rows of the point that is not full yet
        self._stride = 1
        self._evals: list[Evaluation] = []
        self._last: Mapping[str, Any] = {}
        self._step = 0

    def feed(self, line: str) -> None:
        try:
            raw: Any = parse_json(line)
        except ValueError:
            return
        if not isinstance(raw, dict):
            return
        row = cast("dict[str, Any]", raw)
        step = row.get("step")
        if not isinstance(step, int):
            return
        if row.get("kind") == "eval" and (length := _num(row.get("accept_length"))) is not None:
            if step < self._step:
                self._clear()
            self._evals.append(Evaluation(step, length, _nums(row.get("full_acc"))))
        elif row.get("kind") == "step":
            if step <= self._step:
                kept = [e for e in self._evals if e.step < step]
                self._clear()
                self._evals = kept
            self._step, self._last = step, row
            loss = _num(row.get("loss"))
            if loss is not None:
                self._add([loss, _num(row.get("tok_s")) or 0.0, *_nums(row.get("accuracy"))])

    def _add(self, values: list[float]) -> None:
        if self._points and len(values) != len(self._points[0]):
            return
        self._part.append(values)
        if len(self._part) < self._stride:
            return
        self._points.append(_mean(self._part))
        self._part = []
        if len(self._points) >= POINTS:
            pairs = zip(self._points[::2], self._points[1::2], strict=False)
            self._points = [_mean([a, b]) for a, b in pairs]
            self._stride *= 2

    def view(
        self, job_id: str, title: str, *, is_running: bool, total: int | None, note: str = ""
    ) -> TrainView:
        """note: the job's newest word."""
        points = [*self._points, *([_mean(self._part)] if self._part else [])]
        columns = [tuple(c) for c in zip(*points, strict=True)] if points else []
        last = self._last
        tokens, memory = last.get("loss_tokens"), last.get("memory_b")
        return TrainView(
            job_id=job_id,
            title=title,
            is_running=is_running,
            step=self._step,
            total=total,
            epoch=int(_num(last.get("epoch")) or 0),
            loss=columns[0] if columns else (),
            tok_s=columns[1] if columns else (),
            accuracy=tuple(columns[2:]),
            evals=tuple(self._evals),
            learning_rate=_num(last.get("learning_rate")),
            grad_norm=_num(last.get("grad_norm")),
            loss_tok_s=_num(last.get("loss_tok_s")),
            loss_tokens=tokens if isinstance(tokens, int) else None,
            mfu=_num(last.get("mfu")),
            memory_b=memory if isinstance(memory, int) else None,
            wait_share=_num(last.get("wait_share")),
            eta_s=_num(last.get("eta_s")) if is_running else None,
            doing=note if is_running and not note.startswith(STEP_NOTE) else "",
        )


def _mean(rows: list[list[float]]) -> list[float]:
    return [sum(c) / len(rows) for c in zip(*rows, strict=True)]
