"""The dashboard (what `k2tui` without a verb does): plain checks first, then the screen; without a terminal, one plain picture."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k2tui.errors import K2Error, UsageError

if TYPE_CHECKING:
    from k2tui.config import Config
    from k2tui.core.ports import Backend
    from k2tui.tui.settings import Settings

HELP = "the dashboard: server, GPUs, jobs, board, benchmarks (the default verb)"
DESCRIPTION = "Shows the dashboard. Without a terminal (or with TERM=dumb, or --plain) it prints one plain picture. Keys: ? inside."

LEAST_USEFUL = (20, 5)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="a configuration file, read after the usual ones")
    parser.add_argument("--profile", metavar="NAME", help="the profile that `s` offers first")
    parser.add_argument("--demo", action="store_true", help="mark the screen as a demo (k2tui demo starts a server, too)")
    parser.add_argument("--replay", metavar="FILE", help="play a recorded log as if it were written now")
    parser.add_argument("--theme", metavar="NAME", help="colours: k2-dark, k2-light, k2-cvd-dark, k2-cvd-light, or one of Textual's")
    parser.add_argument("--ascii", action="store_true", help="draw with ASCII characters only")
    parser.add_argument("--no-mouse", action="store_true", help="leave the mouse to the terminal")
    parser.add_argument("--plain", action="store_true", help="print one plain picture and end")


def run(args: argparse.Namespace) -> int:
    from dataclasses import replace

    from k2tui import config as config_file

    config = config_file.load(args.config)
    if args.profile:
        config.get_profile(args.profile)  # a wrong name is told here, not on the screen
        config = replace(config, default_profile=args.profile)
    replay = None
    if args.replay:
        replay = Path(args.replay).expanduser()
        _check_replay(replay)
    return show(config, args, is_demo=args.demo, replay=replay)


def show(config: Config, args: argparse.Namespace | None = None, *, is_demo: bool = False, replay: Path | None = None) -> int:
    """Run the dashboard on a Monitor, or print one picture where a screen is impossible. Also used by `demo` and `watch`."""
    if replay is None:

        def live() -> Backend:
            from k2tui.core.server_jobs import demo_server
            from k2tui.jobs import folder
            from k2tui.monitor import Monitor

            return Monitor(config, is_demo=is_demo or demo_server(folder.list_jobs()) is not None)

        return show_backend(live, config, args)

    from k2tui.sources.replay import Replay

    player = Replay(replay)

    def played() -> Backend:
        from k2tui.monitor import Monitor
        from k2tui.servers import Target

        player.start()
        return Monitor(config, watch=[Target(key=str(player.path), title=f"replay of {replay.name}", log=player.path)], is_demo=is_demo)

    try:
        return show_backend(played, config, args, replay=replay)
    finally:
        player.close()


def show_backend(
    backend: Backend | Callable[[], Backend], config: Config, args: argparse.Namespace | None = None, *, replay: Path | None = None
) -> int:
    """The same for any backend, which is stopped at the end. A function that makes one is called when the first frame is on its
    way, so that what it imports does not delay that."""
    make: Callable[[], Backend] = backend if callable(backend) else lambda: backend
    wants_plain = bool(args is not None and getattr(args, "plain", False))
    if wants_plain or os.environ.get("TERM", "") in ("dumb", "") or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return _plain(make(), config, args)
    _check_terminal()
    from k2tui.tui.late import late
    from k2tui.tui.launch import run_app

    return run_app(late(make), _settings(config, args, replay), theme_tables=themes())


def _check_replay(path: Path) -> None:
    if path.is_dir():
        raise UsageError(f"{path} is a folder, not a log", "give a log file")
    if not path.exists():
        raise UsageError(f"{path}: no such file", "give a recorded log, for example one of a server's start")
    if not os.access(path, os.R_OK):
        raise UsageError(f"{path}: no permission to read it", "check its permissions")


def _check_terminal() -> None:
    """The screen is written to stderr (as Textual does): it must be this terminal."""
    if not sys.stderr.isatty():
        # `k2tui 2>err.log`: messages go to the file, the screen to the terminal itself
        try:
            terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
        except OSError:
            raise UsageError("stderr is not a terminal, and the screen is drawn there", "run k2tui without 2>FILE") from None
        sys.__stderr__ = os.fdopen(terminal, "w", encoding="utf-8", errors="replace")
    size = os.get_terminal_size(sys.__stderr__.fileno() if sys.__stderr__ is not None else 2)
    if 0 < size.columns < 10 or 0 < size.lines < 3:
        raise K2Error(f"this terminal is {size.columns}x{size.lines}: too small to say anything", "enlarge it, or use: k2tui status")


def _settings(config: Config, args: argparse.Namespace | None, replay: Path | None) -> Settings:
    from k2tui.tui.settings import Settings

    bench = config.bench
    fields: Mapping[str, str] = {
        "concurrency": ",".join(str(c) for c in bench.concurrency),
        "num_prompts": str(bench.num_prompts),
        "random_input_len": str(bench.random_input_len),
        "random_output_len": str(bench.random_output_len),
        "seed": str(bench.seed),
    }
    utf8 = "utf" in (sys.stdout.encoding or "").lower()
    return Settings(
        theme=(getattr(args, "theme", None) or config.ui.theme),
        ascii=bool(getattr(args, "ascii", False) or config.ui.ascii or not utf8 or os.environ.get("TERM") == "linux"),
        mouse=config.ui.mouse and not getattr(args, "no_mouse", False),
        refresh_s=config.ui.refresh_s,
        bench=fields,
        banner=f"REPLAY {replay.name}" if replay is not None else "",
    )


def themes() -> list[tuple[str, Mapping[str, Any], str]]:
    """Shipped theme files, then the user's own. A broken file of the user's is an error that names it."""
    import tomllib

    from k2tui import paths

    out: list[tuple[str, Mapping[str, Any], str]] = []
    for folder in (paths.assets_dir() / "themes", paths.config_dir() / "themes"):
        for path in sorted(folder.glob("*.toml")) if folder.is_dir() else ():
            try:
                out.append((path.stem, tomllib.loads(path.read_text(encoding="utf-8")), str(path)))
            except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as err:
                raise UsageError(f"{path}: not a readable theme: {err}", "fix or remove that file") from None
    return out


def _plain(backend: Backend, config: Config, args: argparse.Namespace | None) -> int:
    """One picture as plain text on stdout: pipes, TERM=dumb, screen readers."""
    import threading
    import time

    from k2tui.tui.plain import picture

    changed = threading.Event()
    backend.start(changed.set)
    try:
        end = time.monotonic() + 6.0
        changed.wait(1.5)
        while time.monotonic() < end and ((snap := backend.snapshot()).host is None or not snap.is_whole):
            changed.clear()
            changed.wait(0.2)
        try:
            columns = os.get_terminal_size(1).columns
        except OSError:
            columns = int(os.environ.get("COLUMNS") or 100)
        use_ascii = bool(getattr(args, "ascii", False) or config.ui.ascii or "utf" not in (sys.stdout.encoding or "").lower())
        print(picture(backend.snapshot(), time.time(), max(40, columns or 100), use_ascii=use_ascii))
    finally:
        backend.stop()
    return 0
