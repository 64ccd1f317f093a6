"""What a draft brings on a running server: accept length, acceptance by position, tokens per second with and without it.

From SGLang everything is counted from each answer's `meta_info`, never from the printed rate: its definition changed between releases
(docs/training.md); vLLM's answers do not say it, so there it is what the counters of /metrics grew by. Knows HTTP and JSON; no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from k2tui.core.job_mask import mask_text
from k2tui.core.vllm_metrics import VllmMetrics, read_metrics
from k2tui.errors import K2Error, NotReadyError, UsageError
from k2tui.parsing import ParseError, parse_json
from k2tui.regular import OWN_MAX_B, open_regular


@dataclass(frozen=True)
class Prompt:
    """input_ids, or text when there are none (then the server tokenizes it, without a chat template)."""

    input_ids: tuple[int, ...] = ()
    text: str = ""


@dataclass(frozen=True)
class Answer:
    """One request. verify_ct: target passes that checked drafts; 0 = no draft at work. histogram[a]: passes that accepted a.
    vLLM's answers leave both empty."""

    output_ids: tuple[int, ...]
    completion_tokens: int
    verify_ct: int
    histogram: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class OnlineReport:
    """accept_length: (tokens - requests) / verify_ct, the first token of each answer (made by the prefill) left out; 1.0 = nothing
    accepted. server_accept_length: the server's own: SGLang's tokens / verify_ct, vLLM's 1 + accepted / verify_ct. by_position[k]: share of passes whose first
    k+1 drafts were all accepted. accept_rate: (accept_length - 1) / draft tokens a pass, our one definition of a rate.
    loops: answers that repeat a few tokens, whose accept length says nothing. same_as_baseline: share of equal greedy answers."""

    url: str
    version: str
    requests: int
    tokens: int
    verify_ct: int
    accept_length: float
    server_accept_length: float
    by_position: tuple[float, ...]
    accept_rate: float | None
    output_throughput: float
    tok_s_user: float
    loops: int
    baseline_output_throughput: float | None = None
    baseline_tok_s_user: float | None = None
    speedup: float | None = None
    same_as_baseline: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_prompts(path: Path, limit: int) -> list[Prompt]:
    """JSONL: rows of tokenized_data.jsonl (input_ids with loss_mask: the part before the first answer is the prompt), or
    {"input_ids": ...}, {"text": ...}, {"prompt": ...}. Raises UsageError naming the line."""
    found: list[Prompt] = []
    try:
        with open_regular(path) as fh:
            for number, line in enumerate(iter(lambda: fh.readline(OWN_MAX_B), b""), 1):
                if len(found) >= limit:
                    break
                if line.strip() and (prompt := _prompt(line, f"{path}:{number}")) is not None:
                    found.append(prompt)
    except OSError as err:
        raise UsageError(f"{path}: {err.strerror or err}", "give a JSONL file of prompts")
    if not found:
        raise UsageError(f"{path}: no prompts", "give a JSONL file with at least one row")
    return found


def _prompt(line: bytes, where: str) -> Prompt | None:
    """One line of such a file; None when it is all answer. Raises UsageError."""
    try:
        row = parse_json(line)
    except ParseError as err:
        raise UsageError(f"{where}: {err.message}", "one JSON object a line")
    ids = row.get("input_ids") if isinstance(row, dict) else None
    if isinstance(ids, list) and ids:
        mask = row.get("loss_mask")
        end = next((i for i, m in enumerate(mask) if m), len(ids)) if isinstance(mask, list) else len(ids)
        wrong = [i for i in ids[:end] if not isinstance(i, int) or isinstance(i, bool) or i < 0]
        if wrong:
            raise UsageError(f"{where}: input_ids holds {str(wrong[0])[:40]!r}, which is no token", "whole numbers of at least 0")
        return Prompt(input_ids=tuple(ids[:end])) if end else None
    if isinstance(row, dict) and isinstance(text := row.get("text", row.get("prompt")), str):
        try:
            text.encode()
        except UnicodeEncodeError as err:
            raise UsageError(
                f"{where}: the prompt's character {err.start + 1} is half of a pair (\\u{ord(text[err.start]):04x})",
                "no server can be sent that: write the whole character",
            )
        return Prompt(text=text)
    raise UsageError(f"{where}: neither input_ids nor text", "rows of tokenized_data.jsonl fit as they are")


def check_url(flag: str, url: str) -> None:
    """Raises UsageError when nothing can be asked at this address."""
    import httpx

    try:
        parts = httpx.URL(url)
        good = parts.scheme in ("http", "https") and bool(parts.host) and 0 < (parts.port or 80) < 65536
        why = ""
    except httpx.InvalidURL as err:
        good, why = False, f" ({err})"
    if not good:
        raise UsageError(mask_text(f"{flag} {url}: no address of a server{why}"), "such as http://127.0.0.1:30000")


def _client(url: str, timeout_s: float) -> Any:
    import httpx

    return httpx.Client(base_url=url.rstrip("/"), timeout=timeout_s, trust_env=False)


def server_facts(url: str) -> Mapping[str, Any]:
    """/server_info of an SGLang server; of a vLLM server {"version", "vllm_model": the name to ask for}. Raises NotReadyError."""
    import httpx

    try:
        with _client(url, 20.0) as client:
            for path in ("/server_info", "/get_server_info"):
                got = client.get(path)
                if got.status_code == 200 and "vllm_config" not in (told := got.json()):
                    return told
            got = client.get("/v1/models")
            data = got.json().get("data") if got.status_code == 200 else None
            if data and data[0].get("owned_by") == "vllm":
                return {"version": client.get("/version").json().get("version"), "vllm_model": data[0]["id"]}
            return {}
    except (httpx.HTTPError, ValueError, AttributeError, LookupError, TypeError) as err:
        raise NotReadyError(
            mask_text(f"{url}: no server answers ({type(err).__name__})"), "start it with `k2tui up`, or check --url"
        )


def _post(
    client: Any, url: str, path: str, body: Mapping[str, Any], read: Callable[[Any, float], Answer], hint: str
) -> Answer:
    """One request, timed; read: makes the answer of the JSON and the seconds. Raises K2Error naming the address, with hint when the answer is
    another server's."""
    import httpx

    start = time.perf_counter()
    try:
        got = client.post(path, json=body)
        seconds = time.perf_counter() - start
        if got.status_code != 200:
            raise K2Error(mask_text(f"{url}{path} answered {got.status_code}: {got.text[:200]}"), "see the server's log")
        return read(got.json(), seconds)
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as err:
        raise K2Error(mask_text(f"{url}{path}: {type(err).__name__}: {err}"), hint)


def _ask_vllm(
    client: Any, prompt: Prompt, max_new_tokens: int, temperature: float, url: str, model: str
) -> Answer:
    body = {
        "model": model, "prompt": list(prompt.input_ids) or prompt.text, "max_tokens": max_new_tokens, "temperature": temperature,
        "return_token_ids": True,
    }  # fmt: skip

    def read(value: Any, seconds: float) -> Answer:
        ids = tuple(int(i) for i in value["choices"][0].get("token_ids") or ())
        return Answer(ids, int(value["usage"]["completion_tokens"]), 0, (), seconds)

    return _post(client, url, "/v1/completions", body, read, "see the server's log")


def _vllm_metrics(url: str, generation_tokens: float = 0.0) -> VllmMetrics:
    """The server's counters, once they hold that many tokens (they follow an answer by some milliseconds; 5 s at most)."""
    import httpx

    until = time.monotonic() + 5.0
    while True:
        try:
            with _client(url, 20.0) as client:
                got = read_metrics(client.get("/metrics").text)
        except httpx.HTTPError as err:
            raise K2Error(mask_text(f"{url}/metrics: {type(err).__name__}: {err}"), "see the server's log")
        if got is None or got.generation_tokens is None:
            raise K2Error(mask_text(f"{url}/metrics holds no counters of vLLM"), "start it without --disable-log-stats")
        if got.generation_tokens >= generation_tokens or time.monotonic() > until:
            return got
        time.sleep(0.05)


def _ask(
    client: Any, prompt: Prompt, max_new_tokens: int, temperature: float, url: str, vllm_model: str = ""
) -> Answer:
    if vllm_model:
        return _ask_vllm(client, prompt, max_new_tokens, temperature, url, vllm_model)
    body: dict[str, Any] = {"sampling_params": {"temperature": temperature, "max_new_tokens": max_new_tokens}}
    body |= {"input_ids": list(prompt.input_ids)} if prompt.input_ids else {"text": prompt.text}

    def read(value: Any, seconds: float) -> Answer:
        meta = value["meta_info"]
        histogram = meta.get("spec_correct_drafts_histogram") or meta.get("spec_accept_histogram") or ()
        return Answer(
            tuple(int(i) for i in value.get("output_ids") or ()), int(meta["completion_tokens"]), int(meta.get("spec_verify_ct") or 0),
            tuple(int(n) for n in histogram), seconds,
        )  # fmt: skip

    return _post(client, url, "/generate", body, read, "is this an SGLang or vLLM server (or k2tui's own)?")


def ask_all(
    url: str,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    temperature: float,
    concurrency: int,
    timeout_s: float = 600.0,
    vllm_model: str = "",
    warmed: Callable[[Answer], None] = lambda _: None,
    told: Callable[[int], None] = lambda _: None,
) -> tuple[list[Answer], float]:
    """Every prompt once, `concurrency` at a time, after one warm-up request, whose answer `warmed` is given. vllm_model: the model's
    name when it is a vLLM server. told: called with the number of answers so far. Returns answers in order and the wall seconds."""
    with _client(url, timeout_s) as client:
        warmed(_ask(client, prompts[0], min(8, max_new_tokens), temperature, url, vllm_model))
        start = time.perf_counter()
        with ThreadPoolExecutor(concurrency) as pool:
            answers: list[Answer] = []
            for answer in pool.map(
                lambda p: _ask(client, p, max_new_tokens, temperature, url, vllm_model), prompts
            ):
                answers.append(answer)
                told(len(answers))
        return answers, time.perf_counter() - start


def is_loop(ids: Sequence[int], window: int = 48) -> bool:
    """True when the end of an answer repeats a block of at most 8 tokens."""
    tail = list(ids[-window:])
    if len(tail) < 24:
        return False
    return any(all(tail[i] == tail[i + period] for i in range(len(tail) - period)) for period in range(1, 9))


def _throughput(answers: Sequence[Answer], wall_s: float) -> tuple[float, float]:
    tokens = sum(a.completion_tokens for a in answers)
    return tokens / wall_s, tokens / max(sum(a.seconds for a in answers), 1e-9)


@dataclass(frozen=True)
class _Drafting:
    """verify_ct and by_position as in OnlineReport; drafts: tokens proposed a pass; server_accept_length: the server's own."""

    verify_ct: int
    by_position: tuple[float, ...]
    drafts: float | None
    server_accept_length: float


def _of_answers(facts: Mapping[str, Any], answers: Sequence[Answer]) -> _Drafting | None:
    """What SGLang's answers say; None without a draft."""
    verify = sum(a.verify_ct for a in answers)
    if not verify:
        return None
    length = max(len(a.histogram) for a in answers)
    summed = [sum(a.histogram[i] for a in answers if i < len(a.histogram)) for i in range(length)]
    passes = sum(summed)
    by_position = tuple(sum(summed[k + 1 :]) / passes for k in range(length - 1)) if passes else ()
    drafts = facts.get("speculative_num_draft_tokens")  # the bonus token is counted there
    return _Drafting(
        verify,
        by_position,
        int(drafts) - 1 if drafts and int(drafts) > 1 else None,
        sum(a.completion_tokens for a in answers) / verify,
    )


def _of_counters(url: str, old: VllmMetrics, new: VllmMetrics, tokens: int) -> _Drafting | None:
    """What vLLM's counters grew by; None without a draft. Raises K2Error when others had answers meanwhile."""
    made = (new.generation_tokens or 0) - (old.generation_tokens or 0)
    if made != tokens:
        raise K2Error(
            f"{mask_text(url)} made {made:.0f} tokens, the answers hold {tokens}: its counters count for everybody",
            "measure while nobody else asks this server",
        )
    verify = (new.num_drafts or 0) - (old.num_drafts or 0)
    length = new.accept_length(old)
    if not verify or length is None:
        return None
    before = (*old.accepted_per_pos, *[0.0] * len(new.accepted_per_pos))
    by_position = tuple((n - o) / verify for n, o in zip(new.accepted_per_pos, before, strict=False))
    proposed = (new.num_draft_tokens or 0) - (old.num_draft_tokens or 0)
    return _Drafting(int(verify), by_position, proposed / verify or None, length)


def measure(
    url: str,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    concurrency: int = 1,
    baseline_url: str = "",
    told: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> OnlineReport:
    """Ask the server that runs the draft, and (baseline_url) one without it. told: (what is asked, answers so far, of so many). Raises K2Error when no draft
    is at work."""
    facts = server_facts(url)
    base_facts = server_facts(baseline_url) if baseline_url else {}
    vllm = str(facts.get("vllm_model") or "")
    start = [_vllm_metrics(url)] if vllm else []

    def warmed(answer: Answer) -> None:
        if vllm:
            start.append(_vllm_metrics(url, (start[0].generation_tokens or 0) + answer.completion_tokens))

    answers, wall = ask_all(
        url, prompts, max_new_tokens=max_new_tokens, temperature=temperature, concurrency=concurrency, vllm_model=vllm, warmed=warmed,
        told=lambda done: told("with the draft", done, len(prompts)),
    )  # fmt: skip
    tokens = sum(a.completion_tokens for a in answers)
    if vllm:
        end = _vllm_metrics(url, (start[-1].generation_tokens or 0) + tokens)
        drafting = _of_counters(url, start[-1], end, tokens)
    else:
        drafting = _of_answers(facts, answers)
    if drafting is None:
        raise K2Error(
            f"{mask_text(url)}: {'no pass of it checked a draft' if vllm else 'no answer says spec_verify_ct'}: this server runs without a draft",
            "start it with --speculative-config"
            if vllm
            else "start it with --speculative-algorithm EAGLE3 and the draft",
        )
    accept_length = (tokens - len(answers)) / drafting.verify_ct
    throughput, user = _throughput(answers, wall)
    report = OnlineReport(
        url=mask_text(url), version=str(facts.get("version") or ""), requests=len(answers), tokens=tokens, verify_ct=drafting.verify_ct, accept_length=accept_length,
        server_accept_length=drafting.server_accept_length, by_position=drafting.by_position,
        accept_rate=(accept_length - 1) / drafting.drafts if drafting.drafts else None,
        output_throughput=throughput, tok_s_user=user, loops=sum(is_loop(a.output_ids) for a in answers),
    )  # fmt: skip
    if not baseline_url:
        return report
    plain, plain_wall = ask_all(
        baseline_url, prompts, max_new_tokens=max_new_tokens, temperature=temperature, concurrency=concurrency,
        vllm_model=str(base_facts.get("vllm_model") or ""), told=lambda done: told("without the draft", done, len(prompts)),
    )  # fmt: skip
    base, base_user = _throughput(plain, plain_wall)
    same = (
        sum(a.output_ids == b.output_ids for a, b in zip(answers, plain, strict=True)) / len(answers)
        if temperature == 0
        else None
    )
    return OnlineReport(
        **{
            **asdict(report),
            "baseline_output_throughput": base,
            "baseline_tok_s_user": base_user,
            "speedup": throughput / base,
            "same_as_baseline": same,
        }
    )
