"""Questions to the server before and after a run: is it there, what does it serve. The only room of loadgen with httpx."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from k2tui.core.workload import fingerprint
from k2tui.errors import K2Error, NotReadyError, UsageError
from k2tui.loadgen.jsonvalue import listing, mapping
from k2tui.parsing import ParseError, parse_json
from k2tui.regular import read_regular


@dataclass(frozen=True)
class ServerFacts:
    """What the server says of itself. args: the launch arguments that change speed."""

    url: str
    engine: str = ""
    version: str = ""
    model: str = ""
    model_path: str = ""
    tp_size: int | None = None
    is_embedded: bool = False
    args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    vocab_size: int | None = None
    speculative_algorithm: str = ""
    max_running_requests: int | None = None
    context_length: int | None = None  # tokens of prompt and output together

    @property
    def fp(self) -> str:
        return fingerprint(
            {"engine": self.engine, "version": self.version, "model": self.model, "args": dict(self.args)}
        )


# server_info keys that change speed; the rest is noise for comparing runs
SPEED_ARGS = (
    "tp_size", "dp_size", "pp_size", "ep_size", "dtype", "quantization", "kv_cache_dtype", "attention_backend",
    "prefill_attention_backend", "decode_attention_backend", "sampling_backend", "moe_runner_backend", "moe_a2a_backend",
    "speculative_algorithm", "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens",
    "speculative_draft_model_path", "speculative_token_map", "chunked_prefill_size", "max_prefill_tokens",
    "max_running_requests", "mem_fraction_static", "schedule_policy", "disable_radix_cache", "disable_cuda_graph",
    "cuda_graph_max_bs", "disable_overlap_schedule", "enable_torch_compile", "disable_custom_all_reduce",
    "enable_dp_attention", "stream_interval", "enable_mixed_chunk", "num_continuous_decode_steps", "page_size", "device",
)  # fmt: skip


def split_url(url: str) -> tuple[str, str, int, str]:
    """(scheme, host, port, path prefix) of a server's URL. Raises UsageError."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{url!r} is no http:// or https:// URL", "example: --url http://127.0.0.1:30000")
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        raise UsageError(f"{url!r}: the port is not a number between 1 and 65535") from None
    return parts.scheme, parts.hostname, port, parts.path.rstrip("/")


def api_headers() -> dict[str, str]:
    """Authorization from K2TUI_API_KEY or OPENAI_API_KEY; never stored, never printed."""
    key = os.environ.get("K2TUI_API_KEY") or os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


class Control:
    """Short blocking questions; never used while a run's clock ticks."""

    def __init__(self, url: str, *, timeout_s: float = 10.0) -> None:
        scheme, host, port, prefix = split_url(url)
        shown = f"[{host}]" if ":" in host else host
        self.url = f"{scheme}://{shown}:{port}{prefix}"
        self._client = httpx.Client(base_url=self.url, timeout=timeout_s, headers=api_headers())

    def close(self) -> None:
        self._client.close()

    def _get(self, path: str) -> Any:
        """JSON of a GET, None when the server has no such route."""
        try:
            answer = self._client.get(path)
            return answer.json() if answer.status_code == 200 else None
        except (httpx.HTTPError, ValueError, RecursionError):
            return None

    def check(self) -> None:
        """Raises NotReadyError (exit code 3) with clear words unless the server answers and is healthy."""
        try:
            answer = self._client.get("/health")
        except httpx.TimeoutException:
            raise NotReadyError(
                f"{self.url} takes connections but /health did not answer in time",
                "it may be loading or stuck: look at its log (k2tui watch LOG)",
            ) from None
        except httpx.HTTPError as err:
            raise NotReadyError(
                f"no server answers at {self.url} ({_reason(err)})",
                "start one (k2tui up PROFILE) or give the right --url",
            ) from None
        if answer.status_code == 404 and self._get("/v1/models") is not None:
            return  # an OpenAI-compatible server without /health
        if answer.status_code != 200:
            raise NotReadyError(
                f"{self.url}/health answers {answer.status_code}: the server is not ready",
                "wait until it has loaded (k2tui status), then run again",
            )

    def facts(self) -> ServerFacts:
        """What it serves; fields stay empty when the server does not say."""
        info = mapping(self._get("/server_info") or self._get("/get_server_info"))
        model_info = mapping(self._get("/model_info") or self._get("/get_model_info"))
        listed = listing(mapping(self._get("/v1/models")).get("data"))
        data = [mapping(m) for m in listed] or [mapping(None)]
        model = str(
            data[0].get("id") or model_info.get("served_model_name") or model_info.get("model_path") or ""
        )
        owner = str(data[0].get("owned_by") or "")
        embedded = bool(info.get("is_embedded") or info.get("engine") == "k2tui" or "k2tui" in owner)
        engine, version = owner, str(info.get("version") or "")
        if embedded:
            engine = "local"
        elif info or model_info:
            engine = "sglang"
        elif owner == "vllm":
            engine = "vllm"
            version = str(mapping(self._get("/version")).get("version") or "")
        path = str(info.get("model_path") or model_info.get("model_path") or data[0].get("root") or "")
        args = {k: info[k] for k in SPEED_ARGS if info.get(k) is not None}
        most = info.get("max_running_requests")
        tp = info.get("tp_size")
        return ServerFacts(
            url=self.url,
            engine=engine,
            version=version,
            model=model,
            model_path=path,
            tp_size=tp if isinstance(tp, int) else None,
            is_embedded=embedded,
            args=args,
            vocab_size=_vocab_size(path, info, model_info),
            speculative_algorithm=str(info.get("speculative_algorithm") or ""),
            max_running_requests=most if isinstance(most, int) else None,
            context_length=_first_count(
                data[0].get("max_model_len"), info.get("context_length"), model_info.get("context_length")
            ),
        )

    def flush_cache(self) -> bool:
        """Empty the server's prefix cache (SGLang). False when it has no such route."""
        try:
            answer = self._client.post("/flush_cache", timeout=60)
        except httpx.HTTPError as err:
            raise K2Error(f"{self.url}/flush_cache did not answer ({_reason(err)})") from None
        return answer.status_code == 200


def _reason(err: httpx.HTTPError) -> str:
    text = str(err) or type(err).__name__
    return text.replace("[Errno 111] ", "")


def _first_count(*values: Any) -> int | None:
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), None)


def _vocab_size(path: str, *infos: Mapping[str, Any]) -> int | None:
    for info in infos:
        if isinstance(info.get("vocab_size"), int):
            return int(info["vocab_size"])
    try:
        config = mapping(parse_json(read_regular(Path(path) / "config.json")))
    except (OSError, ParseError):
        return None
    size = config.get("vocab_size") or mapping(config.get("text_config")).get("vocab_size")
    return size if isinstance(size, int) else None
