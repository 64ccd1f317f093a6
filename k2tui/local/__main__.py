"""`python -m k2tui.local`: start the embedded engine."""

import sys

from k2tui.local.launch import main

sys.exit(main())
