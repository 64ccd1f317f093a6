"""Which of the proving lines wins, and what state that makes: the order of precedence. Knows no file, clock or engine.

1. A named cause beats any silence; the strongest, then the earliest, wins; wrappers and advice are no causes.
2. A taken port beats the ready line. 3. A wanted stop is no failure. 4. Ready must be proved. 5. Silence is judged against
the log's own rhythm and the evidence around it. 6. A start whose last word is an exception that nobody caught has failed. 7. When
nothing decides, "cause not in this log".
"""

from __future__ import annotations

import re

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


NO_LOG = "not a log of a server, a trainer or a benchmark client"


def decide(collector: Collector, facts: Facts) -> Verdict:
    """One verdict from all that was seen. Pure: the same collector and facts give the same verdict."""
    nobody_told = facts.alive is None and facts.exit_code is None
    if nobody_told and facts.dying is None and _ends_in_trace(collector, facts):
        facts = facts._replace(dying=collector.trace_end)
    if nobody_told and facts.lines >= 12 and facts.marks * 20 < facts.lines:
        return Verdict(State.UNKNOWN, "", confidence=0.9, sentence=NO_LOG)
    verdict = _decide(collector, facts)
    return verdict._replace(confidence=round(verdict.confidence * _weight(facts), 3))


_OURS = re.compile(r"sglang|vllm|k2tui|specforge|torch/distributed|transformers|huggingface_hub")
_ENDS_WITHIN = 12  # lines of an exception's own message


def _ends_in_trace(collector: Collector, facts: Facts) -> bool:
    """Is an exception that nobody caught the last word of a start?"""
    end, last = collector.trace_end, facts.last_line
    if end is None or last is None or collector.last_trace is None or facts.ready_line is not None or facts.phase is Phase.SERVING:
        return False
    if not (facts.votes or facts.phase_seen or any(_OURS.search(f) for f in collector.last_trace.files)):
        return False  # of another program
    later = (facts.work_line, facts.bar_line, facts.heartbeat_line, facts.end_line, facts.stop_line)
    if last.order - end.order > _ENDS_WITHIN or any(line is not None and line.order > end.order for line in later):
        return False
    return last.order == end.order or last.level in ("ERROR", "CRITICAL") or not (last.level or last.at_s is not None)


def _weight(facts: Facts) -> float:
    """0.5 to 1: how much there is to judge by. One bare sentence may come from anywhere; an engine's own log may not."""
    if facts.alive is not None or facts.exit_code is not None:
        return 1.0  # it is known what the log belongs to
    if facts.votes or facts.phase_seen:
        return min(1.0, 0.8 + 0.02 * (facts.marks + facts.votes))
    return min(0.8, 0.5 + 0.03 * facts.marks)


def _decide(collector: Collector, facts: Facts) -> Verdict:
    chosen = _choose(collector, facts)
    if chosen is not None and CLASSES[chosen.root_cause].group in ("G26", "G25"):
        # what the client counted says more than one refused connection, unless the server is known to be gone
        client = _client(collector, facts)
        if client is not None and (facts.alive is True or client.root_cause != "bench_partial_failure"):
            return client
    if facts.bind_failed is not None and (chosen is None or chosen.root_cause == "port_in_use"):
        text = facts.bind_failed.text
        phase = Phase.HTTP if "Errno" in text or facts.phase_seen else Phase.BOOT
        return _verdict(State.FAILED, "port_in_use", facts.bind_failed, phase, 0.97, collector, facts)
    if chosen is not None:
        return _from_finding(chosen, collector, facts)
    if facts.wanted_stop or (facts.stop_line is not None and not facts.dying):
        return _stopped(facts)
    client = _client(collector, facts)
    if client is not None:
        return client
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
    chosen = min((f for f in candidates if f.strength == best), key=lambda f: f.order)
    told = re.sub(r"[^a-z]", "", str(facts.extra.get("nvml_error", "")).lower()).removeprefix("nvmlerror")
    if told:  # NVML's own error code was given: the line that names it proves more than an earlier one
        for finding in candidates:
            if finding.root_cause == chosen.root_cause and told in re.sub(
                r"[^a-z]", "", finding.line.text.lower()
            ):
                return finding
    return chosen


_SERVER_PHASES = (
    Phase.DIST_INIT,
    Phase.WEIGHT_LOAD,
    Phase.DRAFT_LOAD,
    Phase.AFTER_LOAD,
    Phase.KV_ALLOC,
    Phase.GRAPH_CAPTURE,
)
_STEP_OF = {
    phase: n for n, phase in enumerate((Phase.BOOT, *_SERVER_PHASES, Phase.HTTP, Phase.WARMUP, Phase.SERVING))
}


def _refine(finding: Finding, collector: Collector, facts: Facts) -> Finding | None:
    """The finding in its context: another class, another strength, or None when the context takes it back."""
    cause = finding.root_cause
    group = CLASSES[cause].group
    client = facts.phase in _CLIENTS
    dead = _is_dead(facts)
    if cause != "port_in_use" and not dead:
        if facts.ready_line is not None and finding.line.order < facts.ready_line.order:
            return None  # the server became ready after it
        if (
            group not in ("G27", "G28")
            and _STEP_OF.get(facts.phase, -1) > _STEP_OF.get(finding.phase, 99)
            and finding.phase is not Phase.BOOT
        ):
            return None  # the start went on after it
    if group == "G27":
        return _refine_nvml(finding, facts)
    if cause == "gpu_mem_unbalanced" and facts.extra.get("foreign_gpu_procs"):
        return finding._replace(root_cause="gpu_mem_held")
    if cause == "gpu_oom_weights":
        return _refine_oom(finding, collector, facts)
    if cause == "host_oom_kill":
        # the clean-up after "Received sigquit" kills with -9 itself
        if finding.strength != WEAK:
            return finding
        if finding.after_death:
            return None
        return (
            finding._replace(root_cause="killed_from_outside")
            if facts.extra.get("oom_kills") == 0
            else finding
        )
    if cause == "disk_full" and collector.of("shm_too_small"):
        return None
    if (
        cause == "illegal_memory_access"
        and "device-side assert" in finding.line.text
        and collector.of("draft_context_mismatch")
    ):
        return None
    if cause == "custom_allreduce_failed":
        seen = " ".join((*finding.frames, *finding.near, *finding.files, finding.line.text))
        return finding if "register_graph_buffers" in seen or "custom_all_reduce" in seen else None
    if cause == "native_import_error" and "native import" in collector.lines:
        return finding._replace(line=collector.lines["native import"], strength=CAUSE)
    if cause == "arch_unsupported":
        return _refine_arch(finding, collector)
    if cause in ("server_died_under_client", "rendezvous_unreachable") and group == "G26":
        if (
            facts.phase_seen
            and not client
            and (finding.phase is not Phase.BOOT or facts.ready_line is not None or facts.alive is not True)
        ):
            return None  # a server that talks to its own port while it starts
        return finding._replace(root_cause="client_connection_errors") if facts.alive is True else finding
    if (
        cause == "serving_hang"
        and finding.strength == WEAK
        and facts.ready_line is None
        and facts.phase not in (Phase.SERVING, Phase.BOOT)
    ):
        return None  # a probe that asked while it started
    if cause == "vocab_map_mismatch" and "load_vocab_mapping" in finding.frames:
        return finding._replace(strength=CAUSE)
    if (
        cause == "hidden_state_mismatch"
        and "mat1 and mat2" in finding.line.text
        and (finding.round or finding.in_draft)
        and not client
    ):
        return finding._replace(root_cause="draft_arch_mismatch", strength=CAUSE)
    if cause == "orphan_processes" and finding.strength == WEAK and facts.alive is not False:
        return None
    if (
        cause in ("permission_denied", "hub_access_denied", "fd_limit", "quant_mismatch", "spec_config_invalid")
        and finding.strength == WEAK
        and not dead
    ):
        return None
    return finding


def _refine_nvml(finding: Finding, facts: Facts) -> Finding | None:
    cause = finding.root_cause
    if cause == "nvml_struct_mismatch" and facts.extra.get("in_container"):
        return finding._replace(root_cause="nvml_pid_namespace")
    if (
        cause in ("nvml_pid_namespace", "nvml_mig", "nvml_unified_memory")
        and finding.strength <= WEAK
        and facts.phase_seen
        and facts.phase is not Phase.MONITOR
    ):
        return None
    return finding


def _refine_oom(finding: Finding, collector: Collector, facts: Facts) -> Finding:
    text = finding.line.text
    stage = stage_of(finding)
    if "apture" in text:
        stage = Phase.GRAPH_CAPTURE
    if stage is None and _is_training(finding, facts):
        stage = Phase.TRAIN
    if stage is None and finding.phase is not Phase.BOOT:
        stage = finding.phase
    other = re.search(r"Process (\d+) has (\d+(?:\.\d+)?) (GiB|MiB) memory in use", text)
    own = re.search(r"this process has (\d+(?:\.\d+)?) (GiB|MiB) memory in use", text)
    total = re.search(r"total capacity of (\d+(?:\.\d+)?) GiB", text)
    if other is not None and own is not None:
        theirs = float(other[2]) / (1024 if other[3] == "MiB" else 1)
        ours = float(own[1]) / (1024 if own[2] == "MiB" else 1)
        if theirs > ours and theirs > 0.4 * (float(total[1]) if total else 2 * theirs):
            return finding._replace(root_cause="gpu_mem_held")
    if (
        collector.avail_gb is not None
        and total is not None
        and collector.avail_gb < 0.5 * float(total[1])
        and stage in (Phase.WEIGHT_LOAD, None)
        and not finding.round
    ):
        return finding._replace(root_cause="gpu_mem_held")
    if facts.extra.get("foreign_gpu_procs") and other is not None:
        return finding._replace(root_cause="gpu_mem_held")
    if stage in (Phase.TRAIN, Phase.EXTRACT):
        return finding._replace(root_cause="gpu_oom_train")
    if stage in (Phase.GRAPH_CAPTURE, Phase.KV_ALLOC, Phase.HTTP, Phase.WARMUP, Phase.SERVING):
        return finding._replace(root_cause="gpu_oom_capture")
    return finding


def _is_training(finding: Finding, facts: Facts) -> bool:
    if facts.phase in (Phase.TRAIN, Phase.EXTRACT):
        return True
    names = " ".join(finding.frames)
    files = " ".join(finding.files)
    return bool(
        re.search(r"\bbackward\b|\boptimizer|padding|\btrain|collat", names)
        or re.search(r"train|specforge|trainer|accelerate|deepspeed", files, re.I)
    )


_LONG_KNOWN = frozenset(
    [
        "llama",
        "mistral",
        "mixtral",
        "qwen",
        "qwen2",
        "qwen2moe",
        "gemma",
        "gemma2",
        "chatglm",
        "baichuan",
        "cohere",
        "dbrx",
        "stablelm",
        "internlm2",
        "llavallama",
        "yivl",
        "minicpm",
        "deepseek",
        "deepseekv2",
        "deepseekv3",
        "gptbigcode",
        "grok1",
        "phi3",
        "opt",
        "gpt2",
    ]
)
_SAME_MODULE = {"deepseekv3": "deepseekv2", "kimik2": "deepseekv2"}


def _refine_arch(finding: Finding, collector: Collector) -> Finding:
    """The model's own module failed to import: then that is the cause, and its line the proof."""
    match = re.search(r"\[['\"](\w+?)(?:For[A-Z]\w+|LMHeadModel|Model)?['\"]", finding.line.text)
    wanted = re.sub(r"[^a-z0-9]", "", (match[1] if match else "").lower())
    for module, line in collector.ignored_imports.items():
        last = re.sub(r"[^a-z0-9]", "", module.rsplit(".", 1)[-1].lower())
        if (
            wanted
            and last
            and (
                last == wanted
                or last == _SAME_MODULE.get(wanted)
                or (len(last) > 4 and (last.startswith(wanted) or wanted.startswith(last)))
            )
        ):
            return finding._replace(root_cause="model_import_failed", line=line)
    if match is not None and wanted in _LONG_KNOWN:
        return finding._replace(
            root_cause="model_import_failed"
        )  # every release has it: its module did not import here
    return finding


def _from_finding(finding: Finding, collector: Collector, facts: Facts) -> Verdict:
    cause = finding.root_cause
    info = CLASSES[cause]
    state = info.state
    if cause == "serving_hang" and facts.alive is True and facts.dying is None:
        state = State.STALLED
    if cause == "disk_full" and "Warning" in finding.line.text and not _is_dead(facts):
        state = State.STALLED  # only a warning is printed, and the download waits for ever
    phase = stage_of(finding)
    seen = finding.phase if facts.phase_seen and finding.phase is not Phase.BOOT else None
    if phase is None:
        phase = seen or info.phase
    if seen is Phase.KV_ALLOC and info.phase is Phase.GRAPH_CAPTURE and stage_of(finding) is None:
        phase = (
            Phase.GRAPH_CAPTURE
        )  # after the pool come the first forward passes, and those are the capture's
    if cause == "kv_pool_too_small" and phase is Phase.SERVING:
        pass  # requests outgrew the pool
    elif cause in ("gpu_oom_capture", "kv_pool_too_small", "gpu_oom_train") or info.group in (
        "G22",
        "G27",
        "G28",
    ):
        phase = info.phase or phase
    if cause == "warmup_failed" or info.group in ("G25", "G26"):
        phase = info.phase
    if info.group == "G24":
        prepares = any("prepare" in f or "hidden_states" in f or "extract" in f for f in finding.files)
        phase = facts.phase if facts.phase in _CLIENTS else Phase.EXTRACT if prepares else info.phase
    if cause == "draft_context_mismatch" and "ssert" in finding.line.text:
        phase = Phase.SERVING
    if cause == "gpu_oom_capture" and (seen is Phase.SERVING or stage_of(finding) is Phase.SERVING):
        phase = Phase.SERVING
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


# --- clients: what a benchmark or a trainer really achieved ------------------------------------------------------------------


def _client(collector: Collector, facts: Facts) -> Verdict | None:
    """A benchmark whose numbers are void, a training that learns nothing. None: nothing wrong is seen."""
    numbers, lines = collector.numbers, collector.lines

    def bad(cause: str, *names: str) -> Verdict:
        proof = next((lines[n] for n in names if n in lines), facts.last_line)
        return _verdict(CLASSES[cause].state, cause, proof, CLASSES[cause].phase, 0.85, collector, facts)

    dead = collector.dead_steps
    if dead is not None and (dead[1] - dead[0] > 50 or collector.dead_lines > 50):
        return bad("train_no_signal", "dead step")
    if "nan loss" in lines:
        return bad("hidden_state_nan", "nan loss")
    if facts.end_line is not None and facts.phase is Phase.TRAIN and facts.exit_code in (None, 0):
        done = f"{facts.target.done} steps" if facts.target is not None else "training"
        return Verdict(
            State.READY, "healthy", facts.end_line, Phase.TRAIN, 0.85, sentence=f"finished: {done}"
        )
    if facts.phase is not Phase.BENCH and not numbers:
        return None
    total, good, made = numbers.get("total"), numbers.get("successful"), numbers.get("generated")
    if collector.server_errors and (
        made == 0
        or numbers.get("throughput") == 0
        or good is None
        or good == 0
        or (total and good < total)
        or not made
    ):
        return bad("bench_partial_failure", "server error")
    if made == 0 or (numbers.get("throughput") == 0 and good):
        return bad("bench_zero_tokens", "generated", "throughput")
    if numbers.get("failed") or (total and good is not None and good < total):
        return bad("bench_partial_failure", "successful", "failed")
    if good and made is not None and made <= good * 1.05:
        return bad("bench_degenerate", "generated")
    length = numbers.get("accept_length")
    if length is not None and length < 1.1 and not facts.decodes:
        return bad("draft_zero_acceptance", "accept_length")._replace(phase=Phase.BENCH)
    if collector.client_errors and facts.alive is True:
        return bad("client_connection_errors", "client error")
    if (
        good
        and (made or numbers.get("throughput"))
        and facts.exit_code in (None, 0)
        and facts.alive is not False
    ):
        tokens = f", {made:.0f} tokens" if made else ""
        return Verdict(
            State.READY,
            "healthy",
            lines["successful"],
            Phase.BENCH,
            0.85,
            sentence=f"finished: {good:.0f} requests{tokens}",
        )
    return None


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
    is_trace = facts.dying is not None and facts.dying is collector.trace_end
    first = collector.last_trace if is_trace else collector.first_exception
    if (
        first is not None
        and facts.ready_line is not None
        and first.line.order < facts.ready_line.order
        and not facts.dying
    ):
        first = None
    code = facts.exit_code
    if code in (-9, 137) and collector.sigquit is None and not (first and first.strength >= WEAK):
        kills = facts.extra.get("oom_kills")  # the kernel's own count of this run, where it can be read
        if kills == 0:
            return _verdict(State.FAILED, "killed_from_outside", facts.last_line, None, 0.9, collector, facts)
        sure = 0.6 if kills is None else 0.9
        return _verdict(State.FAILED, "host_oom_kill", facts.last_line, None, sure, collector, facts)
    if (
        code in (-1, 129)
        or facts.extra.get("signal") in (1, "SIGHUP")
        or facts.extra.get("exit_signal") in (1, "SIGHUP")
    ):
        return _verdict(State.FAILED, "terminal_hangup", facts.last_line, None, 0.8, collector, facts)
    if first is not None and (facts.dying is not None or first.strength >= WEAK):
        stage = stage_of(first)
        phase = stage or (first.phase if facts.phase_seen else None)
        if stage is Phase.DRAFT_LOAD or (first.round and phase in (Phase.DRAFT_LOAD, Phase.WEIGHT_LOAD)):
            cause = (
                "draft_arch_mismatch"
                if first.note.endswith("KeyError") or "size mismatch" in first.line.text
                else "draft_load_failed"
            )
            return _verdict(State.FAILED, cause, first.line, Phase.DRAFT_LOAD, 0.75, collector, facts)
        return _verdict(State.FAILED, "child_exception", first.line, phase, 0.6, collector, facts)
    if facts.dying is not None:
        cut = collector.scheduler_exception
        if cut is not None:
            # frames came after that line: judge by what the trace went through until it was cut
            whole = cut._replace(frames=tuple(collector.frames), files=tuple(collector.files))
            verdict = _verdict(
                State.FAILED,
                "child_exception",
                cut.line,
                stage_of(whole) or (cut.phase if facts.phase_seen else None),
                0.6,
                collector,
                facts,
            )
            return verdict._replace(
                sentence="a scheduler hit an exception; its cause is cut off: not in this log"
            )
        return _verdict(State.FAILED, "child_exception", facts.dying, None, 0.5, collector, facts)
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
            if facts.health is None and facts.is_proved:
                return Verdict(
                    State.DEGRADED, "serving_hang", proof, Phase.SERVING, 0.5, remedy_for("serving_hang"), "it was ready, and does not answer over HTTP now"
                )  # fmt: skip
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
    low = _acceptance(collector, facts)
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
    if newest is not None and facts.health_ok_s is not None and facts.health_ok_s > newest.at_s:
        quiet = max(quiet, facts.health_ok_s - newest.at_s)  # probes are answered, no batch is worked on
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


def _acceptance(collector: Collector, facts: Facts) -> Verdict | None:
    told = [d for d in facts.decodes if d[0].accept_length is not None]
    rated = [d for d in facts.decodes if d[1] is not None]
    if (
        not told
        and len(rated) >= 1
        and all((d[1] or 0.0) < 0.02 for d in rated)
        and (len(rated) >= 2 or facts.is_complete)
    ):
        return Verdict(
            State.DEGRADED, "draft_zero_acceptance", rated[-1][3], Phase.SERVING, 0.8, remedy_for("draft_zero_acceptance"),
            "speculating in vain: no draft token is accepted",
        )  # fmt: skip
    if not told:
        return None
    recent = told[-8:]
    lengths = [d[0].accept_length or 0.0 for d in recent]
    mean = sum(lengths) / len(lengths)
    proof = collector.lines.get("accept_length") or recent[-1][3]
    if mean < 1.1 and (len(recent) >= 2 or facts.decode_count >= 2 or facts.is_complete):
        return Verdict(
            State.DEGRADED, "draft_zero_acceptance", proof, Phase.SERVING, 0.85,
            remedy_for("draft_zero_acceptance"), f"speculating in vain: accept length {mean:.2f}",
        )  # fmt: skip
    rates = [d[1] for d in recent if d[1] is not None]
    drafted = next((d[2] for d in reversed(recent) if d[2]), None)
    if mean >= 1.1 and mean < 1.4 and len(recent) >= 3:
        return Verdict(
            State.DEGRADED, "draft_low_acceptance", proof, Phase.SERVING, 0.7, remedy_for("draft_low_acceptance"),
            f"the draft hardly pays: accept length {mean:.2f}",
        )  # fmt: skip
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
    if facts.compile_line is not None and facts.bar_kind != "jit":
        return 1800.0  # DeepGEMM says itself that it takes 10 to 20 minutes
    if facts.cpu_pct is not None and facts.cpu_pct < 5 and not facts.gpu_util:
        least = min(least, 120.0)  # neither the CPU nor a GPU does anything
    if facts.phase in (Phase.WEIGHT_LOAD, Phase.DRAFT_LOAD, Phase.GRAPH_CAPTURE, *_CLIENTS):
        if facts.gaps_s:
            return max(120.0, 20 * sorted(facts.gaps_s)[len(facts.gaps_s) // 2], 4 * max(facts.gaps_s))
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
    if not facts.phase_seen and facts.work_line is None and facts.heartbeats < 6:
        is_engine = facts.votes > 0 and (facts.marks > 0 or facts.votes * 2 >= facts.lines)
        is_known = facts.last_line is not None and (facts.alive is True or is_engine)
        return Verdict(
            State.LOADING if is_known else State.UNKNOWN,
            "healthy" if is_known else "",
            facts.last_line,
            None,
            0.3,
            sentence="starting" if is_known else NO_LOG if facts.last_line else "no log yet",
        )
    quiet = facts.silence_s
    limit = stall_after_s(facts)
    beats = facts.heartbeat_line is not None and (
        facts.work_line is None or facts.heartbeat_line.order > facts.work_line.order
    )
    if beats and facts.heartbeat_line is not None:
        since = facts.heartbeat_line.at_s
        base = facts.work_line.at_s if facts.work_line and facts.work_line.at_s is not None else None
        if since is not None and base is not None:
            quiet = max(quiet or 0.0, since - base + (facts.silence_s or 0.0))
            proof = facts.heartbeat_line
        elif facts.heartbeat_span_s is not None:
            quiet = max(quiet or 0.0, facts.heartbeat_span_s + (facts.silence_s or 0.0))
            proof = facts.heartbeat_line
        if facts.phase in (Phase.BOOT, Phase.DIST_INIT) and facts.heartbeats >= 6:
            limit = min(limit, 60.0)  # joining takes seconds; a minute of nothing but heartbeats is no work
    reading = (facts.read_bytes_s or 0.0) + (facts.net_bytes_s or 0.0) > IO_ALIVE_B_S
    moving = abs(facts.gpu_memory_b_s or 0.0) > IO_ALIVE_B_S
    if quiet is None or quiet <= limit:
        if facts.milestone_line is not None and proof is facts.work_line:
            proof = facts.milestone_line
        proof = facts.metrics_line or proof
        return Verdict(
            State.LOADING,
            "healthy_slow_jit" if facts.bar_kind == "jit" or facts.compile_line else "healthy",
            proof,
            None,
            0.85,
        )
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
    phase = Phase.AFTER_LOAD if cause == "after_load_hang" and facts.phase is Phase.WEIGHT_LOAD else None
    return Verdict(State.STALLED, cause, proof, phase, 0.8, remedy_for(cause), sentence)


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
    if (
        facts.phase is Phase.WEIGHT_LOAD
        and facts.target is not None
        and facts.target.done >= facts.target.total
    ):
        return "after_load_hang"
    if facts.phase in (Phase.WEIGHT_LOAD, Phase.DRAFT_LOAD, Phase.BOOT):
        return "load_stall_unknown"
    if facts.phase is Phase.GRAPH_CAPTURE:
        return "graph_capture_hang"
    if facts.phase in (Phase.HTTP, Phase.WARMUP, Phase.SERVING):
        return "serving_hang"
    return "after_load_hang"
