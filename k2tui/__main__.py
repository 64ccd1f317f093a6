"""`python -m k2tui` is the same as `k2tui`."""

import sys

from k2tui.cli import main

if __name__ == "__main__":
    sys.exit(main())
