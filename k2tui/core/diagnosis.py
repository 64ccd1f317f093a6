"""Which of the proving lines wins, and what state that makes: the order of precedence. Knows no file, clock or engine.

1. A named cause beats any silence; the strongest, then the earliest, wins; wrappers and advice are no causes.
2. A taken port beats the ready line. 3. A wanted stop is no failure. 4. Ready must be proved. 5. Silence is judged against
the log's own rhythm and the evidence around it. 6. When nothing decides, "cause not in this log".
"""

from __future__ import annotations

import re
from dataclasses import replace
from statistics import median

from k2tui.core.diagnosis_classes import CLASSES, remedy_for
from k2tui.core.diagnosis_rules import (
    CAUSE,
    SYMPTOM,
    WEAK,
    Collector,
    Facts,
    Finding,
    Verdict,
    advice_for,
    stage_of,
)
from k2tui.core.load import Phase, State
from k2tui.core.loadlines import Line

__all__ = ["CLASSES", "Collector", "Facts", "Finding", "Verdict", "advice_for", "decide", "remedy_for"]

_CLIENTS = (Phase.TRAIN, Phase.EXTRACT, Phase.BENCH, Phase.MONITOR)
IO_ALIVE_B_S = 512 * 1024  # a loader that reads faster than this is not hung
MIN_STALL_S = {
    Phase.BOOT: 300.0,
    Phase.DIST_INIT: 300.0,
    Phase.WEIGHT_LOAD: 120.0,
    Phase.DRAFT_LOAD: 120.0,
    Phase.AFTER_LOAD: 600.0,
    Phase.KV_ALLOC: 300.0,
    Phase.GRAPH_CAPTURE: 600.0,
    Phase.HTTP: 300.0,
    Phase.WARMUP: 300.0,
}


def decide(collector: Collector, facts: Facts) -> Verdict:
    """One verdict from all that was seen. Pure: the same collector and facts give the same verdict."""
    chosen = _choose(collector, facts)
    if facts.bind_failed is not None and (chosen is None or chosen.root_cause == "port_in_use"):
        return _verdict(State.FAILED, "port_in_use", facts.bind_failed, Phase.HTTP, 0.97, collector, facts)
    if chosen is not None:
        return _from_finding(chosen, collector, facts)
    if facts.wanted_stop or (facts.stop_line is not None and not facts.dying):
        return _stopped(facts)
    gone = _gone(collector, facts)
    if gone is not None:
        return gone
    if facts.ready_line is not None or (facts.phase is Phase.SERVING and facts.decode_count):
        return _serving(collector, facts)
    return _silence(collector, facts)


# --- a named cause -------------------------------------------------------------------------------------------------------


def _is_dead(facts: Facts) -> bool:
    return (
        facts.alive is False
        or facts.dying is not None
        or (facts.exit_code not in (None, 0) and facts.alive is not True)
    )


def _choose(collector: Collector, facts: Facts) -> Finding | None:
    """The winning finding, None when no line names a cause that still counts."""
    candidates: list[Finding] = []
    for finding in collector.findings():
        refined = _refine(finding, collector, facts)
        if refined is not None:
            candidates.append(refined)
    if not candidates:
        return None
    best = max(f.strength for f in candidates)
    if best <= SYMPTOM:
        return None
    return min((f for f in candidates if f.strength == best), key=lambda f: f.order)


def _refine(finding: Finding, collector: Collector, facts: Facts) -> Finding | None:
    """The finding in its context: another class, another strength, or None when the context takes it back."""
    cause = finding.root_cause
    client = facts.phase in _CLIENTS
    if (
        facts.ready_line is not None
        and finding.line.no < facts.ready_line.no
        and not facts.dying
        and cause != "port_in_use"
    ):
        return None  # the server became ready after it
    if cause == "gpu_oom_weights":
        return _refine_oom(finding, facts)
    if cause == "host_oom_kill":
        if finding.strength == WEAK and finding.after_death:
            return None  # the clean-up after "Received sigquit" kills with -9 itself
        return finding
    if cause == "illegal_memory_access" and collector.of("draft_context_mismatch"):
        return None
    if cause == "custom_allreduce_failed":
        if "register_graph_buffers" in finding.frames or finding.strength == WEAK:
            return finding
        return None
    if cause == "arch_unsupported":
        return _refine_arch(finding, collector)
    if cause == "server_died_under_client" and (facts.phase_seen and not client):
        return None  # a server that talks to its own port while it starts
    if cause == "rendezvous_unreachable" and client:
        return None
    if (
        cause in ("permission_denied", "fd_limit", "quant_mismatch", "spec_config_invalid")
        and finding.strength == WEAK
        and not _is_dead(facts)
    ):
        return None
    return finding


def _refine_oom(finding: Finding, facts: Facts) -> Finding:
    text = finding.line.text
    stage = stage_of(finding)
    if "Capture cuda graph failed" in text or "apture" in text:
        stage = Phase.GRAPH_CAPTURE
    names = " ".join(finding.frames)
    if stage is None and re.search(r"\bbackward\b|\boptimizer|\bstep\b|train", names):
        stage = Phase.TRAIN
    if stage is None:
        stage = finding.phase if finding.phase not in (Phase.BOOT,) else None
    held = re.search(r"Process (\d+) has ([\d.]+) GiB memory in use", text)
    if stage in (Phase.TRAIN, Phase.EXTRACT):
        return replace(finding, root_cause="gpu_oom_train")
    if stage is Phase.GRAPH_CAPTURE:
        return replace(finding, root_cause="gpu_oom_capture")
    if held and facts.extra.get("foreign_gpu_procs"):
        return replace(finding, root_cause="gpu_mem_held")
    return finding


def _refine_arch(finding: Finding, collector: Collector) -> Finding:
    """The model's own module failed to import: then that is the cause, and its line the proof."""
    names = re.findall(r"\['?([\w]+?)(?:For\w+|Model\w*)?'?\]", finding.line.text)
    wanted = re.sub(r"[^a-z0-9]", "", (names[0] if names else "").lower())
    for module, line in collector.ignored_imports.items():
        last = re.sub(r"[^a-z0-9]", "", module.rsplit(".", 1)[-1].lower())
        if wanted and last and (last.startswith(wanted) or wanted.startswith(last)):
            return replace(finding, root_cause="model_import_failed", line=line)
    return finding


def _from_finding(finding: Finding, collector: Collector, facts: Facts) -> Verdict:
    cause = finding.root_cause
    info = CLASSES[cause]
    state = info.state
    phase = stage_of(finding)
    if phase is None:
        phase = facts.phase if facts.phase_seen and finding.phase is not Phase.BOOT else info.phase
        if finding.phase is not Phase.BOOT and facts.phase_seen:
            phase = finding.phase
    if cause in ("gpu_oom_capture", "kv_pool_too_small", "gpu_oom_train", "port_in_use") or info.group in (
        "G22",
        "G27",
        "G28",
    ):
        phase = info.phase or phase
    confidence = {CAUSE: 0.93, WEAK: 0.75}.get(finding.strength, 0.5)
    return _verdict(state, cause, finding.line, phase, confidence, collector, facts)


def _verdict(
    state: State,
    cause: str,
    proof: Line | None,
    phase: Phase | None,
    confidence: float,
    collector: Collector,
    facts: Facts,
) -> Verdict:
    return Verdict(
        state, cause, proof, phase, confidence, remedy_for(cause), warnings=_warnings(collector, facts)
    )


def _warnings(collector: Collector, facts: Facts) -> tuple[str, ...]:
    out: list[str] = []
    if facts.bind_failed is not None and facts.ready_line is not None:
        out.append('"fired up" was printed although the port belongs to another server')
    return tuple(out)


# --- ends ------------------------------------------------------------------------------------------------------------------


def _stopped(facts: Facts) -> Verdict:
    over = facts.alive is False or facts.stop_over or facts.exit_code is not None or facts.wanted_stop
    how = facts.stop_how or "on request"
    text = f"stopped ({how})" if over else f"stopping ({how})"
    return Verdict(State.STOPPED, "healthy", facts.stop_line, Phase.SHUTDOWN, 0.9, sentence=text)


def _gone(collector: Collector, facts: Facts) -> Verdict | None:
    """It died, and no line names a cause."""
    if not _is_dead(facts):
        return None
    first = collector.first_exception
    if (
        first is not None
        and facts.ready_line is not None
        and first.line.no < facts.ready_line.no
        and not facts.dying
    ):
        first = None
    if facts.exit_code in (-9, 137) and collector.sigquit is None and not (first and first.strength >= WEAK):
        return _verdict(State.FAILED, "host_oom_kill", facts.last_line, None, 0.6, collector, facts)
    if facts.exit_code in (-1, 129):
        return _verdict(
            State.FAILED, "terminal_hangup", facts.last_line, Phase.SHUTDOWN, 0.8, collector, facts
        )
    if first is not None and (facts.dying is not None or first.strength >= WEAK):
        phase = stage_of(first) or (first.phase if facts.phase_seen else None)
        return _verdict(State.FAILED, "child_exception", first.line, phase, 0.6, collector, facts)
    if facts.dying is not None:
        proof = collector.scheduler_exception or facts.dying
        return _verdict(State.FAILED, "child_exception", proof, None, 0.6, collector, facts)
    return _verdict(State.FAILED, "exited_no_error", facts.last_line, None, 0.6, collector, facts)


# --- ready -----------------------------------------------------------------------------------------------------------------


def same_model(a: str, b: str) -> bool:
    """Does the served path name the expected model? Trailing slashes and a relative spelling do not matter."""
    left, right = a.rstrip("/"), b.rstrip("/")
    return left == right or left.endswith("/" + right.lstrip("./")) or right.endswith("/" + left.lstrip("./"))


def _serving(collector: Collector, facts: Facts) -> Verdict:
    proof = facts.ready_line or facts.work_line
    expected = facts.expected_model or facts.model
    if facts.http_checked:
        if facts.model_path is None and facts.served_model_name is None:
            if facts.health is None:
                return Verdict(
                    State.LOADING,
                    "healthy",
                    proof,
                    Phase.WARMUP,
                    0.6,
                    sentence="says that it is ready; nothing answers over HTTP yet",
                )
        elif expected and facts.model_path and not same_model(facts.model_path, expected):
            return _verdict(State.FAILED, "port_in_use", proof, Phase.HTTP, 0.85, collector, facts)
        if facts.health is not None and facts.health >= 500 and not facts.decode_count:
            return Verdict(
                State.LOADING,
                "healthy",
                proof,
                Phase.WARMUP,
                0.6,
                sentence="says that it is ready; /health still answers 503",
            )
    hang = _serving_hang(facts)
    if hang is not None:
        return hang
    low = _acceptance(facts)
    if low is not None:
        return low
    if (
        facts.ready_line is not None
        and facts.engine == "vllm"
        and not facts.answered
        and not facts.http_checked
    ):
        return Verdict(State.READY, "healthy", proof, Phase.SERVING, 0.7)
    return Verdict(State.READY, "healthy", proof, Phase.SERVING, 0.95 if facts.http_checked else 0.85)


def _serving_hang(facts: Facts) -> Verdict | None:
    newest = facts.decodes[-1][0] if facts.decodes else None
    running = newest.num_running_reqs if newest else None
    waiting = (
        facts.requests_waiting
        if facts.requests_waiting is not None
        else (newest.num_queue_reqs if newest else None)
    )
    quiet = facts.silence_s or 0.0
    if facts.alive is False or quiet < 120.0:
        return None
    if not (
        waiting
        or (running and facts.requests_waiting is None and facts.health is not None and facts.health >= 500)
    ):
        return None
    proof = facts.decodes[-1][3] if facts.decodes else facts.work_line
    return Verdict(
        State.STALLED, "serving_hang", proof, Phase.SERVING, 0.75, remedy_for("serving_hang"),
        f"requests wait and nothing was decoded for {quiet:.0f} s",
    )  # fmt: skip


def _acceptance(facts: Facts) -> Verdict | None:
    told = [d for d in facts.decodes if d[0].accept_length is not None]
    if not told:
        return None
    recent = told[-8:]
    lengths = [d[0].accept_length or 0.0 for d in recent]
    mean = sum(lengths) / len(lengths)
    proof = recent[-1][3]
    if mean < 1.1 and (len(recent) >= 2 or facts.decode_count >= 2 or facts.is_complete):
        return Verdict(
            State.DEGRADED, "draft_zero_acceptance", recent[0][3] if len(recent) < 3 else proof, Phase.SERVING, 0.85,
            remedy_for("draft_zero_acceptance"), f"speculating in vain: accept length {mean:.2f}",
        )  # fmt: skip
    rates = [d[1] for d in recent if d[1] is not None]
    drafted = next((d[2] for d in reversed(recent) if d[2]), None)
    if drafted and drafted >= 6 and rates and sum(rates) / len(rates) < 0.2:
        return Verdict(
            State.DEGRADED, "draft_low_acceptance", proof, Phase.SERVING, 0.75, remedy_for("draft_low_acceptance"),
            f"only {100 * sum(rates) / len(rates):.0f} % of {drafted} draft tokens a step are accepted",
        )  # fmt: skip
    return None


# --- silence ---------------------------------------------------------------------------------------------------------------


def stall_after_s(facts: Facts) -> float:
    """Silence that counts as a stall in this phase, from this log's own rhythm."""
    if facts.stall_s > 0:
        return facts.stall_s
    least = MIN_STALL_S.get(facts.phase, 600.0)
    if facts.phase in (Phase.WEIGHT_LOAD, Phase.DRAFT_LOAD, Phase.GRAPH_CAPTURE, *_CLIENTS):
        if facts.gaps_s:
            return max(120.0, 20 * median(facts.gaps_s), 4 * max(facts.gaps_s))
        if facts.bar_elapsed_s and facts.bar_done:
            return max(120.0, 20 * facts.bar_elapsed_s / facts.bar_done)
        return max(least, 300.0)
    return least


def _silence(collector: Collector, facts: Facts) -> Verdict:
    proof = (
        facts.bar_line
        if facts.bar_line is not None and facts.work_line is facts.bar_line
        else (facts.work_line or facts.last_line)
    )
    if not facts.phase_seen and facts.work_line is None:
        return Verdict(
            State.LOADING if facts.last_line else State.UNKNOWN,
            "healthy",
            facts.last_line,
            None,
            0.3,
            sentence="starting" if facts.last_line else "no log yet",
        )
    quiet = facts.silence_s
    limit = stall_after_s(facts)
    beats = facts.heartbeat_line is not None and (
        facts.work_line is None or facts.heartbeat_line.no > facts.work_line.no
    )
    if beats and facts.heartbeat_line is not None:
        since = facts.heartbeat_line.at_s
        base = facts.work_line.at_s if facts.work_line and facts.work_line.at_s is not None else None
        if since is not None and base is not None:
            quiet = max(quiet or 0.0, since - base + (facts.silence_s or 0.0))
            proof = facts.heartbeat_line
    reading = (facts.read_bytes_s or 0.0) + (facts.net_bytes_s or 0.0) > IO_ALIVE_B_S
    moving = abs(facts.gpu_memory_b_s or 0.0) > IO_ALIVE_B_S
    if quiet is None or quiet <= limit:
        return Verdict(State.LOADING, "healthy", proof, None, 0.85)
    if reading or moving:
        what = "it still reads" if reading else "GPU memory still moves"
        return Verdict(
            State.LOADING,
            "healthy",
            proof,
            None,
            0.7,
            sentence=f"silent for {quiet:.0f} s, but {what}: slow, not hung",
        )
    cause = _stall_cause(collector, facts)
    sentence = f"{advice_for(cause)} (silent for {quiet:.0f} s; this load's own limit is {limit:.0f} s)"
    return Verdict(State.STALLED, cause, proof, None, 0.8, remedy_for(cause), sentence)


def _stall_cause(collector: Collector, facts: Facts) -> str:
    if facts.phase is Phase.DIST_INIT:
        several = (
            (facts.nnodes or 1) > 1
            or collector.spans_nodes
            or (collector.nranks and facts.tp_size and collector.nranks > facts.tp_size)
        )
        if not several and (
            (facts.gpu_util or 0) >= 90 or (collector.saw_p2p and collector.saw_init_complete)
        ):
            return "p2p_iommu_hang"
        return "dist_init_hang"
    if facts.phase in (Phase.WEIGHT_LOAD, Phase.DRAFT_LOAD, Phase.BOOT):
        return "load_stall_unknown"
    if facts.phase is Phase.GRAPH_CAPTURE:
        return "graph_capture_hang"
    if facts.phase in (Phase.HTTP, Phase.WARMUP, Phase.SERVING):
        return "serving_hang"
    return "after_load_hang"
