"""`python -m k2tui.loadgen`: one benchmark in its own process."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

from k2tui.core.job_mask import mask_text
from k2tui.errors import K2Error
from k2tui.jobs.report import report_result
from k2tui.loadgen import options

PARENT_ENV = "K2TUI_LOADGEN_PARENT"  # pid of the command that must not be outlived
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """On Linux: SIGTERM when the parent named by the environment ends, however it ends. Else nothing."""
    parent = os.environ.pop(PARENT_ENV, "")
    if not parent or sys.platform != "linux":
        return
    import ctypes

    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    except (OSError, AttributeError):  # a system without prctl: the parent still forwards its own signals
        return
    if str(os.getppid()) != parent:
        raise KeyboardInterrupt  # it ended before the request was made


def main(argv: Sequence[str] | None = None) -> int:
    """Run it. Exit codes: 0 measured, 1 failed or nothing completed, 2 usage, 3 server not there, 130 interrupted."""
    stored = "what was measured is stored as partial"
    try:
        _die_with_parent()
        args = options.parse(sys.argv[1:] if argv is None else argv, "python -m k2tui.loadgen")
        from k2tui.loadgen.runner import run

        options.check(args)
        if args.no_store:
            stored = "nothing was stored (--no-store)"
        return run(args)
    except K2Error as err:
        print(f"k2tui bench: {err.message}", file=sys.stderr)
        if err.hint:
            print(f"  {err.hint}", file=sys.stderr)
        with suppress(OSError):  # the error's own words and code come first
            report_result({"ok": False, "cause": mask_text(err.message)})
        return err.exit_code
    except KeyboardInterrupt:
        print(f"k2tui bench: interrupted; {stored}", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
