"""Orders: a stage becomes a job. Used by the monitor and by the CLI; watches nothing and imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from k2tui import stages
from k2tui.config import Config, Profile
from k2tui.core.job import Job, JobSpec, JobState
from k2tui.core.job_mask import mask_argv
from k2tui.errors import K2Error
from k2tui.jobs import folder
from k2tui.stages import StagePlan
from k2tui.stages.extract import server_params
from k2tui.stages.serve import node_plans, resolve_profile


def submit_stage(config: Config, stage_name: str, params: Mapping[str, Any], after: Sequence[str] = ()) -> str:
    """Start one stage as a job; a server start is checked first. Returns the job id. Raises K2Error in words."""
    stage = stages.get(stage_name)
    reason = stage.unavailable(config)
    if reason:
        raise K2Error(f"{stage.name}: {reason}")
    spec = _spec(stage.name, stage.plan(config, settled(config, stage.name, params)), after)
    return start_server(config, spec) if stage.name == "serve" else folder.submit(spec)


def start_server(config: Config, spec: JobSpec) -> str:
    """A server's start, checked first: its job and, of a profile with `nodes`, those of its other machines. Returns the first one's id.

    spec: of a plan of stage "serve", its GPUs chosen (`settled`). Raises K2Error; nothing runs on then.
    """
    from k2tui import doctor

    profile = resolve_profile(config, spec.params)
    doctor.refuse_if_hopeless(profile)
    job_id = folder.submit(spec)
    try:
        for node in node_plans(profile, job_id):
            folder.submit(_spec("node", node))
    except BaseException:
        folder.stop(job_id, by="a node that could not be started")  # without it the server would wait for ever
        raise
    return job_id


def settled(config: Config, stage_name: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
    """The params of a stage; of one that starts a server, with the GPUs chosen that its profile leaves to the start. Raises K2Error."""
    if stage_name == "serve":
        return settle(config, params)[1]
    if stage_name == "extract" and not params.get("url"):
        return {**params, **{k: v for k, v in settle(config, server_params(params))[1].items() if k == "gpus"}}
    return params


def settle(config: Config, params: Mapping[str, Any]) -> tuple[Profile, Mapping[str, Any]]:
    """The profile of a server's start with its GPUs chosen, and the params that say so. Raises K2Error when not enough are free."""
    profile = resolve_profile(config, params)
    if not profile.auto_gpus:
        return profile, params
    from k2tui.doctor_gpu import settle_gpus

    chosen = settle_gpus(profile)
    return chosen, {**params, "gpus": list(chosen.gpus)}


def _spec(name: str, plan: StagePlan, after: Sequence[str] = ()) -> JobSpec:
    return JobSpec(
        id="",
        stage=name,
        title=plan.title,
        argv=plan.argv,
        kind=plan.kind,
        env=plan.env,
        after=tuple(after),
        locks=plan.locks,
        timeout_s=plan.timeout_s,
        grace_s=plan.grace_s,
        params=plan.params or {},
    )


def retry_job(job_id: str, *, exact: bool = False) -> str:
    """Submit a job again; returns the new id. A stage that goes on after what an earlier run left does so: the words of its command
    that throw it away are left out, unless exact. Raises K2Error, also for one machine of a server on several: alone it would wait
    for ever."""
    spec = folder.get(job_id).spec
    nodes = [j.spec.id for j in folder.list_jobs() if spec.params and j.spec.params.get("server") == spec.id]
    if nodes or (spec.stage == "node" and spec.params):
        name = spec.params.get("profile")
        raise K2Error(f"{spec.id} is one machine of a server on several", f"k2tui up {name} starts all of them")
    is_stage = bool(spec.params) and spec.stage in stages.names()  # jobs of `jobs submit` have no params
    return folder.retry(spec.id, without=stages.get(spec.stage).fresh if is_stage and not exact else ())


def resumes(spec: JobSpec) -> str:
    """What a retry of this job goes on after, in words; "" when it begins from nothing."""
    return stages.get(spec.stage).resumes if spec.params and spec.stage in stages.names() else ""


def newest_made(jobs: Sequence[Job], stage: str) -> Job | None:
    """The newest job of that stage that succeeded. jobs: newest first."""
    return next((j for j in jobs if j.spec.stage == stage and j.state is JobState.SUCCEEDED), None)


def first_values(extraction: Job | None, training: Job | None) -> dict[str, dict[str, str]]:
    """What the forms of train and evaluate begin with, by stage and parameter: what these jobs made, as far as it is still there."""
    states = _there(extraction, "out")
    out: dict[str, dict[str, str]] = {"train": {"states": states}, "evaluate": {"states": states}}
    if training is not None:
        used, argv = _there(training, "states"), training.spec.argv
        target = _there(training, "target", argv[argv.index("--target") + 1]) if "--target" in argv[:-1] else ""
        folder_ = _there(training, "out")
        draft = (training.result or {}).get("draft") or (folder_ and f"{folder_}/draft-best")
        out["evaluate"] = {"draft": _there(training, "draft", draft), "target": target, "states": _there(training, "eval_states") or used}
        out["train"] = {"states": states or used, "target": target if states in ("", used) else ""}
    return {stage: {k: v for k, v in values.items() if v} for stage, values in out.items()}


def _there(job: Job | None, name: str, value: object = None) -> str:
    """That parameter of a job (or `value`) as a whole path; "" when there is none or nothing lies there."""
    given = str((value or job.spec.params.get(name) or "") if job is not None else "")
    if job is None or not given or given.startswith("asset:"):
        return given
    path = Path(job.spec.cwd, Path(given).expanduser())
    return str(path) if path.exists() else ""


def preview_stage(config: Config, stage_name: str, params: Mapping[str, Any]) -> list[str]:
    """The argv that submit_stage would run, secrets masked; a server's with the GPUs that are free now."""
    return list(mask_argv(stages.get(stage_name).plan(config, settled(config, stage_name, params)).argv))
