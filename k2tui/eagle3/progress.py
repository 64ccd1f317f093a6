"""What a training does now and how long it still takes: its phases, its steps, the seconds left. Knows no torch and no draft.

Law: a job's progress counts steps from first to last; a phase beside them (opening, judging, saving) tells its own count and
time left in the note, so that the bar never runs back.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median_low

from k2tui.core.job_text import duration
from k2tui.jobs.report import report_progress

RECENT = 64  # steps that the pace is taken from
ENOUGH, ENOUGH_S = 3, 20.0  # so many steps, or seconds of steps, make a pace
SAY_S = 10.0  # a long phase says this often how far it is
TOLD_S = 2.0  # a phase longer than this says what it took


class Pace:
    """Seconds left, from what the newest steps took and from what stands beside them. Steps of 0 are never told."""

    def __init__(self, eval_every: int, save_every: int) -> None:
        """eval_every, save_every: in steps, above 0."""
        self.every = {"eval": eval_every, "save": save_every}
        self._steps: deque[float] = deque(maxlen=RECENT)
        self._began = False
        self._costs: dict[str, float] = {}

    def step(self, seconds: float) -> None:
        """One more step. The first of a process compiles and warms up: it says nothing about the others."""
        if self._began:
            self._steps.append(seconds)
        self._began = True

    def took(self, what: str, seconds: float) -> None:
        """The newest cost of "eval", "save" or something that comes once at the end."""
        self._costs[what] = seconds

    def eta_s(self, step: int, total: int) -> float | None:
        """Seconds from after `step` to the end; None until there is a pace (0 at the end). The median, so that one step
        that waited for something moves nothing."""
        if step >= total:
            return 0.0
        if len(self._steps) < ENOUGH and sum(self._steps) < ENOUGH_S:
            return None
        left = median_low(self._steps) * (total - step)
        for what, cost in self._costs.items():
            every = self.every.get(what)
            left += cost * (1 if every is None else _times(step, total, every))
        return left


def _times(step: int, total: int, every: int) -> int:
    """How often something that is done each `every` steps, and at the end, is done after `step`."""
    return total // every - step // every + (1 if total % every else 0)


class Progress:
    """The run's voice: progress.json for the job, lines for the log. say: one line for people; clock: seconds."""

    def __init__(self, say: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self.say = say
        self.clock = clock
        self.shown = True  # False on ranks other than the first
        self.step = 0
        self.total: int | None = None
        self.resumed = ""
        self.pace: Pace | None = None

    @property
    def eta_s(self) -> float | None:
        """Seconds to the end of the run; None while nobody knows."""
        if self.pace is None or self.total is None or self.step >= self.total:
            return None
        return self.pace.eta_s(self.step, self.total)

    def note(self, text: str, *, force: bool = True) -> None:
        """Say what goes on, beside the steps done."""
        if self.shown:
            report_progress(
                self.step, self.total, "steps", text, self.eta_s, resumed=self.resumed, force=force
            )

    @contextmanager
    def phase(
        self,
        name: str,
        total: int = 0,
        unit: str = "samples",
        *,
        cost: str = "",
        whole: int = 0,
        cold: bool = False,
        quiet: bool = False,
    ) -> Iterator[Callable[[int], None]]:
        """Something beside the steps: yields what to call with the number done. total: 0 = cannot be counted.

        cost: the pace remembers under this name what `whole` of it take (0 = total). cold: its first part compiles, so that
        only the parts after it tell the cost. quiet: no line at the start (the phase comes often).
        """
        began = said = self.clock()
        first: tuple[int, float] | None = None
        last = 0
        self.note(f"{name}: 0/{total} {unit}" if total else name)
        if self.shown and not quiet:
            self.say(f"{name}: {total} {unit}" if total else name)

        def part(done: int) -> None:
            nonlocal said, first, last
            now, last = self.clock(), done
            # the first part may compile: the others go by their own pace as soon as there is one
            n, since = first if first is not None and done > first[0] else (0, began)
            first = first or (done, now)
            left = (now - since) / (done - n) * (total - done) if done > n else None
            text = f"{name}: {done}/{total} {unit}"
            if left is not None and done < total:
                text += f", {duration(left)} left"
            self.note(text, force=False)
            if self.shown and now - said >= SAY_S:
                said = now
                self.say(text)

        yield part
        seconds = self.clock() - began
        if cost and self.pace is not None:
            warm = first if cold else (0, began)
            if not cold and not total:
                self.pace.took(cost, seconds)
            elif warm is not None and last > warm[0]:
                each = (self.clock() - warm[1]) / (last - warm[0])
                self.pace.took(cost, each * (whole or total))
        if self.shown and seconds >= TOLD_S:
            self.say(f"{name}: took {duration(seconds)}")
