"""`python -m k2tui.loadgen`: one benchmark in its own process."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from k2tui.errors import K2Error
from k2tui.loadgen import options


def main(argv: Sequence[str] | None = None) -> int:
    """Run it. Exit codes: 0 measured, 1 failed or nothing completed, 2 usage, 3 server not there, 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m k2tui.loadgen", description="Benchmark a running server."
    )
    options.add_arguments(parser)
    args = parser.parse_args(argv)
    from k2tui.loadgen.runner import run

    try:
        options.check(args)
        return run(args)
    except K2Error as err:
        print(f"k2tui bench: {err.message}", file=sys.stderr)
        if err.hint:
            print(f"  {err.hint}", file=sys.stderr)
        return err.exit_code
    except KeyboardInterrupt:
        print("k2tui bench: interrupted; what was measured is stored as partial", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
