"""Extract: the server's own hidden states of a data file, onto disk."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from k2tui.errors import UsageError
from k2tui.stages import Stage, StagePlan

_FLAGS = (
    ("boundaries", "--boundaries"), ("dtype", "--dtype"), ("last", "--last"), ("limit", "--limit"), ("draft", "--draft"),
    ("profile", "--profile"), ("port", "--port"), ("concurrency", "--concurrency"), ("model", "--model"), ("probe", "--probe"),
)  # fmt: skip


def _plan(config: Any, params: Mapping[str, Any]) -> StagePlan:
    """params: data, out (both needed), url (one or a list) of a running capture server, or profile to start one; the verb's flags."""
    for key in ("data", "out"):
        if not params.get(key):
            raise UsageError(
                f"extract needs {key}", "data = tokenized_data.jsonl, out = a new folder for the states"
            )
    argv = [
        sys.executable,
        "-m",
        "k2tui",
        "extract",
        "--data",
        str(params["data"]),
        "--out",
        str(params["out"]),
    ]
    urls = params.get("url") or ()
    for url in [urls] if isinstance(urls, str) else urls:
        argv += ["--url", str(url)]
    for key, flag in _FLAGS:
        if params.get(key) not in (None, ""):
            argv += [flag, str(params[key])]
    argv += ["--force"] if params.get("force") else []
    locks: tuple[str, ...] = ()
    if not urls:
        profile = config.get_profile(str(params.get("profile") or ""))
        locks = (f"port:{params.get('port') or profile.port}", *(f"gpu:{i}" for i in profile.gpus))
    return StagePlan(
        title=f"extract {params['out']}",
        argv=tuple(argv),
        env={},
        locks=locks,
        params={k: v for k, v in params.items() if v is not None},
        grace_s=60.0,
    )


STAGE = Stage(
    name="extract",
    title="Extract hidden states",
    help="capture the server's own hidden states of a data file, checked and resumable",
    order=40,
    fields=(("data", "tokenized_data.jsonl", "what prepare wrote"), ("out", "states", "a new folder")),
    plan=_plan,
    key="x",
    resumes="samples that are in its folder",
)
