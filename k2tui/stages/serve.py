"""Serve: start a model server by a profile. The job runs until it is stopped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from k2tui import engines
from k2tui.config import parse_gpus, with_secrets
from k2tui.errors import UsageError
from k2tui.paths import own_module
from k2tui.stages import COUNT, PORT, Span, Stage, StagePlan, check_numbers

_OVERRIDES = ("port", "draft", "model", "host", "tp_size", "served_model_name", "node_rank")
_NUMBERS = {"port": PORT, "tp_size": COUNT, "node_rank": Span(0)}


def resolve_profile(config: Any, params: Mapping[str, Any]) -> Any:
    """The profile of params["profile"], with the overrides in params (port, draft, model, host, tp_size, gpus, args, env) laid over it.

    Raises UsageError when it holds a secret as `***` that the environment does not give.
    """
    profile = config.get_profile(str(params.get("profile") or ""))
    known = {f.name for f in fields(profile)}
    changes = {k: params[k] for k in _OVERRIDES if params.get(k) is not None and k in known}
    changes |= check_numbers("serve", changes, _NUMBERS)
    if params.get("args"):
        changes["args"] = (*profile.args, *params["args"])
    if params.get("gpus") is not None:
        changes["gpus"], changes["auto_gpus"] = parse_gpus(params["gpus"], "gpus")
    if params.get("env"):
        changes["env"] = {**profile.env, **params["env"]}
    return with_secrets(replace(profile, **changes))


def _plan(config: Any, params: Mapping[str, Any]) -> StagePlan:
    profile = resolve_profile(config, params)
    if not profile.model:
        raise UsageError(f"profile {profile.name!r} names no model", f"set model = \"/path/to/checkpoint\" in [profile.{profile.name}]")
    launch = engines.get(profile.engine).launch(profile)
    return StagePlan(
        title=f"serve {profile.name}" + (" + draft" if profile.draft else "") + (f" on {profile.nnodes} nodes" if profile.nodes else ""),
        argv=tuple(launch.argv),
        env=dict(launch.env),
        kind="server",
        locks=(f"port:{launch.port}", *(f"gpu:{i}" for i in profile.gpus)),
        params={
            **{k: v for k, v in params.items() if v is not None},
            "profile": profile.name,
            "engine": profile.engine,
            "model": profile.model,
            "served_model_name": profile.served_model_name,
            "draft": profile.draft,
            "host": launch.host,
            "port": launch.port,
            "url": profile.url,
            "stall_s": profile.stall_s,
        },
    )


def node_plans(profile: Any, server: str = "") -> list[StagePlan]:
    """The jobs of a server's other machines, one each: they start, follow and stop a job there over SSH. server: the job of node 0.

    None on a machine that is not node 0.
    """
    plans: list[StagePlan] = []
    for rank, host in enumerate(profile.nodes if profile.node_rank == 0 else (), 1):
        there = replace(profile, node_rank=rank, python=profile.python or profile.node_python)
        launch = engines.get(profile.engine).launch(there)
        title = f"node {rank} of {profile.name} on {host}"
        argv = [*own_module("k2tui.nodes"), "run", host, "--rank", str(rank), "--python", profile.node_python, "--title", title]
        argv += ["--server", server] if server else []
        for name in sorted(launch.env):
            argv += ["--env", name]
        for lock in (f"port:{launch.port}", *(f"gpu:{i}" for i in profile.gpus)):
            argv += ["--lock", lock]
        plans.append(
            StagePlan(
                title=title, argv=(*argv, "--", *launch.argv), env=dict(launch.env), grace_s=240.0,
                params={"host": host, "node_rank": rank, "server": server, "profile": profile.name},
            )
        )  # fmt: skip
    return plans


STAGE = Stage(
    name="serve",
    title="Start the server",
    help="start a model server by a profile; it runs until it is stopped",
    order=10,
    plan=_plan,
    key="s",
)
