"""What can be known before a server is started: prompts that do not fit the model, and settings that change nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from k2tui import doctor, engines
from k2tui.config import Profile, with_secrets
from k2tui.core.tuning import Setting, Space, apply, words
from k2tui.errors import K2Error, UsageError
from k2tui.paths import model_path
from k2tui.regular import read_regular


def refuse(space: Space, profile: Profile) -> None:
    """Raise K2Error when the first trial, the profile as it is, cannot be started, lacks a secret or its prompts do not fit the model."""
    with_secrets(profile)
    limit = context_length(profile)
    asked = space.random_input_len + space.random_output_len
    if limit and asked > limit:
        raise UsageError(
            f"random_input_len {space.random_input_len} + random_output_len {space.random_output_len} = {asked} tokens; "
            f"profile {space.profile!r} has a context length of {limit}",
            "give smaller lengths in the space file",
        )
    doctor.refuse_if_hopeless(profile)


def own_port(profile: Profile) -> Profile:
    """The profile on a free port where its own is held by a server of k2tui's that trials can run beside; else as it is.

    Beside: the embedded engine, or chosen GPUs of which that server has none. Otherwise the trial and that server would want the same GPUs.
    """
    if doctor.host_problem(profile.host) or not doctor.port_owner(profile.host, profile.port):
        return profile
    holder = doctor.job_at(profile.port)
    if holder is None:
        return profile
    held = {lock for lock in holder.spec.locks if lock.startswith("gpu:")}
    is_apart = bool(held and profile.gpus) and held.isdisjoint(f"gpu:{i}" for i in profile.gpus)
    if profile.engine != "local" and not is_apart:
        return profile
    return replace(profile, port=doctor.free_port(profile.host, profile.port + 1))


def context_length(profile: Profile) -> int:
    """Tokens that one request may have: --context-length, else the model's own; 0 when it cannot be told here."""
    args = list(profile.args)
    for i, word in enumerate(args):
        name, _, inline = word.partition("=")
        if name == "--context-length":
            given = inline or (args[i + 1] if i + 1 < len(args) else "")
            return int(given) if given.isdecimal() else 0
    try:
        raw: Any = json.loads(read_regular(Path(model_path(profile.model)) / "config.json"))
        if raw.get("rope_scaling"):
            return 0  # the engine makes it longer by rules of its own
        found = raw.get("max_position_embeddings")
    except (OSError, ValueError, AttributeError, UsageError):
        return 0
    return found if isinstance(found, int) else 0


Effect = tuple[tuple[str, ...], tuple[tuple[str, str], ...]]


def effect_of(profile: Profile, setting: Setting) -> tuple[Effect, list[str]] | None:
    """((argv without what the engine ignores, environment), names of the ignored flags); None when it cannot be launched."""
    try:
        plan = engines.get(profile.engine).launch(replace(profile, **apply(profile, setting)))
    except K2Error:
        return None
    argv, ignored = list(plan.argv), list[str]()
    if profile.engine == "local":
        from k2tui.local.arguments import split_ignored

        argv, ignored = split_ignored(argv)
    return (tuple(argv), tuple(sorted(plan.env.items()))), ignored


def no_change(profile: Profile, setting: Setting, others: Mapping[str, Setting]) -> str:
    """Why measuring this setting would measure noise, in words; "" when it changes something. others: settings that were measured."""
    own = effect_of(profile, setting)
    if own is None or not setting:
        return ""
    varied = {name for kind, name, _ in setting if kind == "flag"}
    same = next(
        (
            s
            for s in ((), *others.values())
            if s != setting and (e := effect_of(profile, s)) and e[0] == own[0]
        ),
        None,
    )
    if same is None:
        return ""
    ignored = [name for name in own[1] if name in varied]
    if ignored:
        return f"ignored by this engine: {', '.join(ignored)}"
    return "same command as the baseline" if same == () else f"same command as {words(same)}"
