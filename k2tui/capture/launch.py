"""Starts SGLang with the capture hooks in releases that have no plug-in system: python -m k2tui.capture.launch ARGS...

SGLang starts its workers with `spawn`, and every spawned process imports this module again (as `__mp_main__`): so the hooks are
installed at import, in each of them.
"""

# sglang and fastapi are not in the development environment
# pyright: reportMissingImports=false

from __future__ import annotations

import sys

from k2tui.capture.plugin import install

install()


def main() -> None:
    """ARGS are those of `python -m sglang.launch_server`."""
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    server_args = prepare_server_args(sys.argv[1:])
    try:
        launch_server(server_args)
    finally:
        import os

        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
