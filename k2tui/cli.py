"""The command line: finds the verb's file, runs it, shows errors once. Imports nothing heavy (budget: docs/cli.md)."""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence
from types import ModuleType

from k2tui import __version__
from k2tui.errors import K2Error

EXIT_INTERRUPTED = 130


def verb_names() -> list[str]:
    """Every verb, sorted; the `verbs` folder is the registry."""
    from k2tui import verbs

    return sorted(m.name.replace("_", "-") for m in pkgutil.iter_modules(verbs.__path__) if not m.name.startswith("_"))


def load_verb(name: str) -> ModuleType:
    return importlib.import_module(f"k2tui.verbs.{name.replace('-', '_')}")


class _Parser(argparse.ArgumentParser):
    """argparse, but a wrong choice names the nearest right one."""

    def error(self, message: str) -> None:  # type: ignore[override]
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: {message}\n")


def _parser(verb: str | None) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="k2tui",
        description="Terminal dashboard for speculative-decoding pipelines on SGLang. Without a verb: the dashboard.",
        epilog="Exit codes: 0 ok, 1 failed, 2 usage, 3 not ready or stalled, 4 no log, 5 no GPU, 124 time-out, 130 interrupted.",
    )
    parser.add_argument("-V", "--version", action="version", version=f"k2tui {__version__}")
    sub = parser.add_subparsers(dest="verb", metavar="VERB", parser_class=_Parser)
    for name in [verb] if verb else verb_names():
        module = load_verb(name)
        child = sub.add_parser(name, help=module.HELP, description=getattr(module, "DESCRIPTION", module.HELP))
        module.add_arguments(child)
        child.set_defaults(_run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code (docs/cli.md)."""
    _open_streams()
    args_list = list(sys.argv[1:] if argv is None else argv)
    first = args_list[0] if args_list else "dashboard"
    if first in ("-V", "--version"):
        print(f"k2tui {__version__}")
        return 0
    if not args_list or (first.startswith("-") and first not in ("-h", "--help", "-V", "--version")):
        args_list.insert(0, "dashboard")
        first = "dashboard"
    known = verb_names()
    if not first.startswith("-") and first not in known:
        import difflib

        near = difflib.get_close_matches(first, known, n=1)
        print(f"k2tui: no verb {first!r}" + (f"; did you mean {near[0]!r}?" if near else ""), file=sys.stderr)
        print("k2tui --help lists them.", file=sys.stderr)
        return 2
    try:
        command: list[str] = []
        if first in known and "--" in args_list and getattr(load_verb(first), "TAKES_COMMAND", False):
            cut = args_list.index("--")
            args_list, command = args_list[:cut], args_list[cut + 1 :]
        args = _parser(first if first in known else None).parse_args(args_list)
        if command:
            args.command = command
        if (getattr(args, "action", None) or getattr(args, "order", "")) in getattr(load_verb(args.verb), "READS", ()):
            from k2tui.verbs._config_warning import warn_of_config

            warn_of_config()
        code = int(args._run(args) or 0)
        sys.stdout.flush()
        return code
    except K2Error as err:
        from k2tui.plain import clean  # a server's own words may be in it

        print(f"k2tui: {clean(err.message)}", file=sys.stderr)
        if err.hint:
            print(f"  {clean(err.hint)}", file=sys.stderr)
        return err.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except UnicodeEncodeError as err:
        if "surrogates" not in str(err):
            raise
        print("k2tui: an argument is not valid UTF-8", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # the reader (head, less) has gone: no more output, no traceback
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as err:
        # the world said no (full disk, read-only folder, no permission): one line, whatever verb it was
        words = f"{err.filename}: {err.strerror}" if err.filename else str(err.strerror or err)
        print(f"k2tui: {words}", file=sys.stderr)
        print("  check the disk and the permissions; K2TUI_HOME sets another state folder", file=sys.stderr)
        _forget_stdout()
        return 1


def _open_streams() -> None:
    """A stream that the caller closed is /dev/null: what reads it sees its end, what writes it is not heard."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))


def _forget_stdout() -> None:
    """What could not be written is dropped: Python must not try again at its end."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


if __name__ == "__main__":
    sys.exit(main())
