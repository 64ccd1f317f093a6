"""The embedded engine as a server to launch. It writes SGLang's log grammar and speaks SGLang's HTTP dialect."""

from __future__ import annotations

from k2tui.config import Profile
from k2tui.core.gpu import visible_gpus
from k2tui.engines import Engine, LaunchPlan, no_nodes
from k2tui.errors import UsageError
from k2tui.paths import model_path, own_module


def launch(profile: Profile) -> LaunchPlan:
    """argv of `python -m k2tui.local` for a profile. Raises UsageError for a profile that cannot be launched."""
    if not profile.model:
        raise UsageError(
            f"profile {profile.name!r} has no model", "set model = a checkpoint folder, or asset:tiny-target"
        )
    no_nodes(profile)
    argv = [
        *own_module("k2tui.local", profile.python),
        "--model-path",
        model_path(profile.model),
        "--host",
        profile.host,
        "--port",
        str(profile.port),
    ]
    if profile.served_model_name:
        argv += ["--served-model-name", profile.served_model_name]
    if profile.tp_size != 1:
        argv += ["--tp-size", str(profile.tp_size)]
    if profile.draft:
        argv += [
            "--speculative-algorithm",
            "EAGLE3",
            "--speculative-draft-model-path",
            model_path(profile.draft),
            "--speculative-num-steps",
            str(profile.speculative_num_steps),
            "--speculative-eagle-topk",
            str(profile.speculative_eagle_topk),
            "--speculative-num-draft-tokens",
            str(profile.speculative_num_draft_tokens),
        ]
    env = {**visible_gpus(profile.gpus), **profile.env}
    return LaunchPlan((*argv, *profile.args), env, profile.host, profile.port)


ENGINE = Engine(
    name="local",
    title="k2tui embedded engine (for trying the pipeline and for tests)",
    launch=launch,
    ready_line="The server is fired up and ready to roll!",
)
