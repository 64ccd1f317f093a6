"""The doctor's questions to the other machines of a start on several: reachable, the same engine, the model there, enough free GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from k2tui import __version__
from k2tui.config import Profile
from k2tui.doctor_gpu import gpus_per_node
from k2tui.errors import K2Error
from k2tui.nodes import ask
from k2tui.paths import model_path

if TYPE_CHECKING:
    from k2tui.doctor import Finding


def check_nodes(profile: Profile, version: str) -> Iterator[Finding]:
    """version: of the engine on this machine; the others must have the same. All nodes are asked at once."""
    given = {
        "engine": profile.engine, "python": profile.python or profile.node_python, "env": dict(profile.env), "model": model_path(profile.model),
        "draft": model_path(profile.draft) if profile.draft else "", "gpus": list(profile.gpus),
    }  # fmt: skip

    def one(host: str) -> dict[str, Any] | K2Error:
        try:
            return ask(host, profile.node_python, "check", given=given, timeout_s=30)
        except K2Error as err:
            return err

    with ThreadPoolExecutor(min(16, len(profile.nodes))) as pool:
        for host, answer in zip(profile.nodes, pool.map(one, profile.nodes), strict=True):
            yield from _findings(profile, version, host, answer)


def _findings(
    profile: Profile, version: str, host: str, answer: dict[str, Any] | K2Error
) -> Iterator[Finding]:
    from k2tui.doctor import Finding, Severity

    check = f"node {host}"
    if isinstance(answer, K2Error):
        yield Finding(check, Severity.ERROR, answer.message, answer.hint)
        return
    wrong = False
    if not answer.get("has_engine"):
        wrong = True
        yield Finding(
            check,
            Severity.ERROR,
            f"{profile.python or profile.node_python} there has no {profile.engine}",
            "set python in the profile to an interpreter that has it on every node",
        )
    elif version and answer.get("engine") != version:
        wrong = True
        yield Finding(
            check,
            Severity.ERROR,
            f"{profile.engine} {answer.get('engine')} there, {version} here",
            "install the same version on every node",
        )
    for path, why in dict(answer.get("models") or {}).items():
        if why:
            wrong = True
            yield Finding(
                check,
                Severity.ERROR,
                f"{path} there: {why}",
                "every node needs the same files at the same path",
            )
    gpus = list(answer.get("gpus") or ())
    want = gpus_per_node(profile)
    if gpus and len(gpus) < want:
        wrong = True
        yield Finding(
            check,
            Severity.ERROR,
            f"{len(gpus)} GPUs there, {want} are needed",
            "another tp_size, or other nodes",
        )
    if answer.get("k2tui") != __version__:
        yield Finding(
            check,
            Severity.WARNING,
            f"k2tui {answer.get('k2tui')} there, {__version__} here",
            "install the same version on every node",
        )
    if not wrong:
        names = sorted({str(g.get("name")) for g in gpus})
        yield Finding(
            check,
            Severity.OK,
            f"reachable, {profile.engine} {answer.get('engine')}, {len(gpus)} GPUs{f' ({names[0]})' if len(names) == 1 else ''}, model complete",
        )
