"""Extract: the server's own hidden states of a data file, onto disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k2tui.errors import UsageError
from k2tui.paths import own_module
from k2tui.stages import COUNT, PORT, Span, Stage, StagePlan, check_numbers
from k2tui.stages.serve import resolve_profile

_FLAGS = (
    ("boundaries", "--boundaries"), ("dtype", "--dtype"), ("last", "--last"), ("limit", "--limit"), ("draft", "--draft"),
    ("profile", "--profile"), ("port", "--port"), ("concurrency", "--concurrency"), ("model", "--model"), ("probe", "--probe"),
)  # fmt: skip

_NUMBERS = {"limit": COUNT, "port": PORT, "concurrency": COUNT, "probe": Span(0)}


def server_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """The part of this stage's params that says how its own server starts. Its `draft` is one to be checked, never one to serve with."""
    return {
        **{k: params[k] for k in ("profile", "port", "model", "gpus") if params.get(k) not in (None, "")},
        "draft": "",
    }


def _plan(config: Any, params: Mapping[str, Any]) -> StagePlan:
    """params: data, out (both needed), url (one or a list) of a running capture server, or profile (and gpus) to start one; the
    verb's flags."""
    for key in ("data", "out"):
        if not params.get(key):
            raise UsageError(
                f"extract needs {key}", "data = tokenized_data.jsonl, out = a new folder for the states"
            )
    check_numbers("extract", params, _NUMBERS)
    argv = [
        *own_module("k2tui"),
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
        profile = resolve_profile(config, server_params(params))
        locks = (f"port:{profile.port}", *(f"gpu:{i}" for i in profile.gpus))
        if (
            params.get("gpus") is not None and profile.gpus
        ):  # with a comma also after one: an index, not a number of GPUs
            argv += ["--gpus", "".join(f"{i}," for i in profile.gpus)]
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
