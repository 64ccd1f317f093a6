"""One file a CLI verb. `verbs/x.py` exports HELP (one line), `add_arguments(parser)` and `run(args) -> int` (exit code).

Modules import late: nothing heavy at the top, so that `k2tui --help` and every answer stay quick. Verb names with a dash
use an underscore in the file name. Every verb takes --json where it prints data; stdout is data, stderr is for people.
"""
