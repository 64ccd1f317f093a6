"""Run the dashboard on the scripted world: `python tests/tui/play.py loading --log-rate 5` (for the eye and for probes)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


async def longest_gap(path: str) -> None:
    """For ever: the longest time in seconds that the event loop stood still so far, written to path."""
    import asyncio
    import time

    worst, last = 0.0, time.monotonic()
    while True:
        await asyncio.sleep(0.05)
        now = time.monotonic()
        if now - last - 0.05 > worst:
            worst = now - last - 0.05
            Path(path).write_text(str(worst))
        last = now


def watch_gaps(path: str) -> None:
    """Measure how long the event loop ever stands still."""
    import asyncio

    from k2tui.tui.app import Dashboard

    class Watched(Dashboard):
        def on_mount(self) -> None:
            super().on_mount()
            self.call_later(self.begin)

        def begin(self) -> None:
            self.set_timer(1.0, lambda: setattr(self, "_gap_task", asyncio.ensure_future(longest_gap(path))))

    import k2tui.tui.app

    k2tui.tui.app.Dashboard = Watched  # type: ignore[misc]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", nargs="?", default="loading")
    parser.add_argument("--still", action="store_true")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--log-rate", type=float, default=0.0)
    parser.add_argument("--period", type=float, default=0.5)
    parser.add_argument("--theme", default="")
    parser.add_argument("--ascii", action="store_true")
    parser.add_argument("--child", action="store_true", help="start a sleeping child in its own session (as a job would be)")
    parser.add_argument("--gaps", default="", help="write the longest pause of the event loop (s) to this file")
    args = parser.parse_args()
    import fake

    from k2tui.tui.launch import run_app
    from k2tui.tui.settings import Settings

    if args.child:
        import subprocess

        subprocess.Popen(["sleep", "300"], start_new_session=True)
    make = fake.still if args.still else fake.live
    options = {} if args.still else {"log_rate": args.log_rate, "period_s": args.period}
    backend = make(args.kind, gpu_count=args.gpus, **options)
    if args.gaps:
        watch_gaps(args.gaps)
    return run_app(backend, Settings(theme=args.theme, ascii=args.ascii), clock=backend.clock)


if __name__ == "__main__":
    sys.exit(main())
