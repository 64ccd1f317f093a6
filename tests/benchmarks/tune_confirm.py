"""How often the tuner crowns a setting that changes nothing, and how often it finds one that does, with and without a second start.

    python3 tests/benchmarks/tune_confirm.py [--runs 2000] [--starts 7.0] [--passes 4.5] [--gain 15]

Nothing is started: passes are drawn (seeded) as a machine gives them, a share of luck for each start, then each pass about it; what the
tuner says of them is its own code. --starts, --passes: the spread from start to start and from pass to pass, in per cent.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from k2tui.core.tuning import Setting, Space, Trial
from k2tui.core.tuning_verdict import to_confirm, wants_more, winner


class Machine:
    """Draws trials: true speed of a setting, times the luck of the start, times each pass's own."""

    def __init__(self, seed: int, starts: float, passes: float, speed: dict[Setting, float]) -> None:
        self.random, self.starts, self.passes, self.speed = random.Random(seed), starts, passes, speed

    def trial(self, space: Space, known: list[Trial], setting: Setting, again_no: int | None = None) -> Trial:
        luck = self.speed.get(setting, 1.0) * math.exp(self.random.gauss(0, self.starts))
        values: list[float] = []
        while True:
            values += [500 * luck * math.exp(self.random.gauss(0, self.passes)) for _ in range(space.repeats)]
            trial = Trial(
                setting, values=tuple(values), is_again=again_no is not None, again_no=again_no or 0
            )
            if not wants_more(space, [*known, trial], trial):
                return trial


def one_run(space: Space, machine: Machine, settings: list[Setting]) -> tuple[Setting, int]:
    """(the winner, starts after the search)"""
    known: list[Trial] = []
    for setting in [(), *settings]:
        known.append(machine.trial(space, known, setting))
    def again(setting: Setting) -> None:
        known.append(machine.trial(space, known, setting, sum(t.is_again and t.setting == setting for t in known)))

    again(())
    while (best := to_confirm(space, known)) is not None:
        again(best)
        again(())
    best_trial = winner(space, known)
    return best_trial.setting if best_trial is not None else (), len(known) - 1 - len(settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--starts", type=float, default=7.0, help="spread from start to start, per cent")
    parser.add_argument("--passes", type=float, default=4.5, help="spread from pass to pass, per cent")
    parser.add_argument("--gain", type=float, default=15.0, help="of the one setting that helps, per cent")
    args = parser.parse_args()
    settings: list[Setting] = [(("env", f"K{n}", "1"),) for n in range(6)]
    print(f"{args.runs} runs of six settings; a start's luck {args.starts} %, a pass's {args.passes} %")
    for confirm in (0, 1, 2, 3, 4):
        space = Space("p", (), confirm=confirm)
        false = found = more = 0
        for seed in range(args.runs):
            machine = Machine(seed, args.starts / 100, args.passes / 100, {})
            false += one_run(space, machine, settings)[0] != ()
            machine = Machine(seed, args.starts / 100, args.passes / 100, {settings[2]: 1 + args.gain / 100})
            best, extra = one_run(space, machine, settings)
            found += best == settings[2]
            more += extra
        print(
            f"confirm = {confirm}: a setting that changes nothing wins in {100 * false / args.runs:.1f} % of the runs; "
            f"one that brings {args.gain:g} % among five that bring nothing is found in {100 * found / args.runs:.1f} % with {more / args.runs:.1f} more starts"
        )


if __name__ == "__main__":
    main()
