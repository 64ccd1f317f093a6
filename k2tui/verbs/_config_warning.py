"""What only reads goes on with a broken config, but says so."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def warn_of_config() -> None:
    """One line on stderr (file, line, key) when a config file of the user's is off; nothing is read when there is none."""
    from k2tui import paths

    own = (paths.config_dir() / "config.toml", Path("k2tui.toml"))
    if not os.environ.get("K2TUI_CONFIG") and not any(os.path.exists(path) for path in own):
        return
    from k2tui import config
    from k2tui.errors import K2Error
    from k2tui.plain import clean

    try:
        config.load()
    except K2Error as err:
        print(f"k2tui: warning: {clean(err.message)}", file=sys.stderr)
