"""Train: an EAGLE-3 draft on captured states, on one GPU, several, or the CPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any, cast

from k2tui.core.gpu import visible_gpus
from k2tui.errors import UsageError
from k2tui.paths import install_hint, own_module
from k2tui.stages import COUNT, Span, Stage, StagePlan, check_numbers

_FLAGS = (
    "init", "eval_states", "held_out", "epochs", "max_steps", "batch_size", "max_tokens", "max_length", "ttt_length", "decay", "mask", "denominator",
    "lr", "warmup_ratio", "schedule", "clip", "weight_decay", "beta2", "seed", "draft_vocab_size", "draft_config", "boundaries", "dtype", "device",
    "chunk_rows", "eval_every", "save_every", "log_every", "keep", "patience", "num_steps", "chains", "accept", "served_version",
)  # fmt: skip
_SWITCHES = ("shard", "no_compile", "recompute", "tensorboard", "no_resume", "keep_first", "json")
_OWN = ("states", "target", "out", "profile", "gpus", "nproc")

_SHARE = Span(0, 1, whole=False)
NUMBERS = {
    "nproc": COUNT, "held_out": _SHARE, "epochs": COUNT, "max_steps": Span(0), "batch_size": COUNT, "max_tokens": COUNT,
    "max_length": COUNT, "ttt_length": COUNT, "decay": _SHARE, "lr": Span(0, whole=False), "warmup_ratio": _SHARE,
    "clip": Span(0, whole=False), "weight_decay": Span(0, whole=False), "beta2": _SHARE, "seed": Span(0, 10**18), "draft_vocab_size": Span(0),
    "chunk_rows": COUNT, "eval_every": Span(0), "save_every": Span(0), "log_every": COUNT, "keep": COUNT, "patience": Span(0),
    "num_steps": COUNT, "chains": Span(0),
}  # fmt: skip


def _gpus(value: Any) -> list[int]:
    """[0, 1] of "0,1" or of a list. Raises UsageError."""
    text = (
        ",".join(str(v) for v in cast(list[Any], value))
        if isinstance(value, list | tuple)
        else str(value or "")
    )
    try:
        found = [int(p) for p in text.replace(" ", "").split(",") if p]
        if all(i >= 0 for i in found):
            return found
    except ValueError:
        pass
    raise UsageError(f"train: gpus must be numbers such as 0,1, not {value!r}")


def _plan(config: Any, params: Mapping[str, Any]) -> StagePlan:
    """params: states and out (needed), target (default: the profile's model), gpus ("0,1": one rank each), nproc, the verb's flags."""
    unknown = sorted(set(params) - {*_FLAGS, *_SWITCHES, *_OWN})
    if unknown:
        raise UsageError(
            f"train: unknown parameter {unknown[0]!r}", "known: " + ", ".join((*_OWN, *_FLAGS, *_SWITCHES))
        )
    for key in ("states", "out"):
        if not params.get(key):
            raise UsageError(
                f"train needs {key}",
                "states = the folder that extract wrote, out = a folder for saves and drafts",
            )
    check_numbers("train", params, NUMBERS)
    target = str(params.get("target") or config.get_profile(str(params.get("profile") or "")).model)
    if not target:
        raise UsageError(
            "train needs target", "the folder of the model that the draft is for (or a profile with `model`)"
        )
    gpus = _gpus(params.get("gpus"))
    ranks = int(params.get("nproc") or len(gpus) or 1)
    argv: list[str] = []
    if ranks > 1:  # --no-python: torchrun's own start of a module would put the working folder on the path
        argv = [*own_module("torch.distributed.run"), "--standalone", "--nproc-per-node", str(ranks), "--no-python"]
    argv += [
        *own_module("k2tui.eagle3.train"),
        "--states",
        str(params["states"]),
        "--target",
        target,
        "--out",
        str(params["out"]),
    ]
    for key in _FLAGS:
        if params.get(key) not in (None, ""):
            argv.append(f"--{key.replace('_', '-')}={params[key]}")
    argv += [f"--{key.replace('_', '-')}" for key in _SWITCHES if params.get(key)]
    return StagePlan(
        title=f"train {params['out']}",
        argv=tuple(argv),
        env=visible_gpus(gpus),
        locks=tuple(f"gpu:{i}" for i in gpus),
        params={k: v for k, v in params.items() if v is not None},
        grace_s=120.0,  # a save of a large draft takes a while
    )


def _unavailable(config: Any) -> str:
    return "" if importlib.util.find_spec("torch") else "needs torch: " + install_hint("train")


STAGE = Stage(
    name="train",
    title="Train the draft",
    help="train an EAGLE-3 draft on captured states; resumes by itself, exports what SGLang and vLLM load",
    order=50,
    fields=(
        ("states", "states", "what extract wrote"),
        ("target", "", "folder of the target model; empty = the profile's"),
        ("out", "draft", "a folder for saves and drafts"),
    ),
    plan=_plan,
    key="t",
    resumes="its last save",
    fresh=("--no-resume",),
    unavailable=_unavailable,
)
