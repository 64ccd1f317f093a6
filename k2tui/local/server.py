"""SGLang's HTTP dialect over the scheduler. Knows requests and answers, no tensors.

Shapes and wordings follow SGLang 0.5.23: errors of /generate are {"error": {"message"}}, those of /v1/* are
{"object": "error", "message", "type", "param", "code"}; streams are `data: {...}` events ended by `data: [DONE]`.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from k2tui.capture.request import is_capture
from k2tui.local.arguments import VERSION, ServerArgs, launch_command
from k2tui.local.log import log
from k2tui.local.metrics import Metrics, render
from k2tui.local.request import Output, Request
from k2tui.local.sampling import SamplingParams, parse
from k2tui.local.scheduler import Scheduler
from k2tui.local.text import TextStream, Tokenizer

MAX_BODY_B = 16 * 1024 * 1024
HEARTBEAT_TIMEOUT_S = 20.0


class BadRequest(Exception):
    def __init__(self, message: str, status: int = 400, kind: str = "BadRequestError") -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind


@dataclass
class Service:
    """Everything a handler needs. status: "starting", "ready" or "draining"."""

    args: ServerArgs
    model_path: str
    model_name: str
    architectures: list[str]
    model_type: str
    tokenizer: Tokenizer
    scheduler: Scheduler
    metrics: Metrics
    startup_time: dict[str, float]
    weight_gb: float
    kv_gb: float
    default_sampling: dict[str, Any] = field(default_factory=dict)
    capture_root: Path | None = None  # where hidden states are captured; None = off
    status: str = "starting"
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    # ---- from a body to scheduler requests

    def make(
        self,
        input_ids: list[int],
        params: SamplingParams,
        deliver: Callable[[Output], None],
        *,
        rid: str = "",
        stream: bool = False,
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        top_logprobs_num: int = 0,
    ) -> Request:
        if not input_ids:
            raise BadRequest("The prompt is empty: at least one token is needed.")
        vocab = self.scheduler.decoder.vocab_size
        for token in input_ids:
            if not 0 <= token < vocab:
                raise BadRequest(f"The input_ids {token} is out of range: the vocabulary has {vocab} tokens.")
        limit = self.scheduler.context_len
        if len(input_ids) >= limit:
            raise BadRequest(
                f"The input ({len(input_ids)} tokens) is longer than the model's context length ({limit} tokens)."
            )
        if len(input_ids) + params.max_new_tokens > limit:
            raise BadRequest(
                f"Requested token count exceeds the model's maximum context length of {limit} tokens. You requested a total of "
                f"{len(input_ids) + params.max_new_tokens} tokens: {len(input_ids)} tokens from the input messages and "
                f"{params.max_new_tokens} tokens for the completion. Please reduce the number of tokens in the input "
                "messages or the completion to fit within the limit."
            )
        if len(input_ids) + params.max_new_tokens > self.scheduler.max_total_num_tokens:
            raise BadRequest(
                f"Requested {len(input_ids) + params.max_new_tokens} tokens, the whole KV cache holds "
                f"{self.scheduler.max_total_num_tokens} (--max-total-tokens)."
            )
        if self.args.max_queued_requests and len(self.scheduler.waiting) >= self.args.max_queued_requests:
            raise BadRequest("The request queue is full.", 503, "ServiceUnavailableError")
        generator = None
        if params.seed is not None:
            generator = torch.Generator(device=self.scheduler.decoder.device).manual_seed(params.seed)
        return Request(
            rid=rid or uuid.uuid4().hex,
            input_ids=input_ids,
            params=params,
            text=TextStream(self.tokenizer, params.stop, skip_special_tokens=params.skip_special_tokens),
            deliver=deliver,
            stream=stream,
            return_logprob=return_logprob,
            logprob_start_len=logprob_start_len,
            top_logprobs_num=top_logprobs_num,
            generator=generator,
        )

    async def outputs(self, build: Callable[[Callable[[Output], None]], Request]) -> AsyncIterator[Output]:
        """Submit one request and yield its Outputs; leaving early aborts it."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Output] = asyncio.Queue()

        def deliver(output: Output) -> None:
            try:
                loop.call_soon_threadsafe(queue.put_nowait, output)
            except RuntimeError:
                pass  # the loop is closed: nobody is waiting any more

        request = build(deliver)
        self.scheduler.submit(request)
        ended = False
        try:
            while not ended:
                output = await queue.get()
                while not queue.empty() and output.finish_reason is None:
                    output = (
                        queue.get_nowait()
                    )  # the reader is behind: outputs are cumulative, the newest is enough
                ended = output.finish_reason is not None
                yield output
        finally:
            if not ended:
                self.scheduler.abort(request.rid)

    # ---- facts

    def load(self) -> dict[str, Any]:
        scheduler, metrics = self.scheduler, self.metrics
        running, waiting = len(scheduler.running), len(scheduler.waiting)
        used = scheduler.num_used_tokens
        facts: dict[str, Any] = {
            "timestamp": time.time(),
            "dp_rank": 0,
            "num_running_reqs": running,
            "num_waiting_reqs": waiting,
            "num_waiting_uncached_tokens": sum(len(r.input_ids) for r in list(scheduler.waiting)),
            "num_used_tokens": used,
            "num_total_tokens": used,
            "max_total_num_tokens": scheduler.max_total_num_tokens,
            "max_running_requests": scheduler.max_running_requests,
            "token_usage": round(scheduler.token_usage, 4),
            "gen_throughput": round(metrics.gen_throughput, 2),
            "cache_hit_rate": 0.0,
            "utilization": round(running / scheduler.max_running_requests, 4),
            "memory": {
                "weight_gb": round(self.weight_gb, 3),
                "kv_cache_gb": round(self.kv_gb, 3),
                "graph_gb": 0.0,
                "token_capacity": scheduler.max_total_num_tokens,
            },
            "queues": {"waiting": waiting, "grammar": 0, "paused": 0, "retracted": 0},
        }
        if scheduler.speculator is not None:
            facts["speculative"] = {
                "accept_length": round(metrics.spec_accept_length, 4),
                "accept_rate": round(metrics.spec_accept_rate, 4),
            }
        return facts

    def model_info(self) -> dict[str, Any]:
        return {
            "model_path": self.model_path,
            "served_model_name": self.model_name,
            "tokenizer_path": str(self.tokenizer.folder),
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": "default",
            "load_format": "safetensors",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": self.model_type,
            "architectures": self.architectures,
            "embedded_engine": True,
        }

    def server_info(self) -> dict[str, Any]:
        from k2tui import __version__

        state = {
            "effective_max_running_requests_per_dp": self.scheduler.max_running_requests,
            "last_gen_throughput": self.metrics.gen_throughput,
            "memory_usage": {
                "weight": round(self.weight_gb, 3),
                "kvcache": round(self.kv_gb, 3),
                "token_capacity": self.scheduler.max_total_num_tokens,
                "graph": {"prefill": 0.0, "decode": 0.0},
            },
        }
        if self.metrics.avg_spec_accept_length is not None:
            state["avg_spec_accept_length"] = self.metrics.avg_spec_accept_length
        return {
            **self.args.shown(),
            "served_model_name": self.model_name,
            "context_length": self.scheduler.context_len,
            "launch_command": launch_command(),
            "status": self.status,
            "max_total_num_tokens": self.scheduler.max_total_num_tokens,
            "max_req_input_len": self.scheduler.context_len - 1,
            "startup_time": self.startup_time,
            "internal_states": [state],
            "version": f"k2tui-{__version__}",
            "dialect": f"sglang {VERSION}",
            "embedded_engine": True,
            "about": "k2tui's embedded engine, for trying the pipeline and for tests; SGLang is what to serve real models with",
        }


# ---- reading requests


async def _body(http: HttpRequest) -> dict[str, Any]:
    size = http.headers.get("content-length", "0")
    if size.isdigit() and int(size) > MAX_BODY_B:
        raise BadRequest(f"The request body is larger than {MAX_BODY_B} bytes.", 413)
    raw = bytearray()
    async for chunk in http.stream():
        raw += chunk
        if len(raw) > MAX_BODY_B:
            raise BadRequest(f"The request body is larger than {MAX_BODY_B} bytes.", 413)
    try:
        value = json.loads(bytes(raw))
    except (ValueError, RecursionError) as err:
        raise BadRequest(f"The request body is not valid JSON: {str(err)[:200]}")
    if not isinstance(value, dict):
        raise BadRequest("The request body must be a JSON object.")
    if (
        b"\\ud" in raw.lower()
    ):  # an escaped surrogate: half a character can neither be tokenized nor sent back
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise BadRequest("The request body holds a lone surrogate (half a character).")
    return value


def _flag(body: Mapping[str, Any], key: str) -> bool:
    value = body.get(key)
    if value is not None and not isinstance(value, bool):
        raise BadRequest(f"{key} must be true or false, got {value!r}.")
    return bool(value)


def _params(service: Service, raw: Mapping[str, Any], default_max: int = 128) -> SamplingParams:
    try:
        return parse(raw, vocab_size=service.scheduler.decoder.vocab_size, default_max_new_tokens=default_max)
    except ValueError as err:
        raise BadRequest(str(err))
    except OverflowError:
        raise BadRequest("a sampling parameter is a number too large to compute with.")


def _gate(service: Service) -> None:
    if service.status == "draining":
        raise BadRequest("The server is shutting down.", 503, "ServiceUnavailableError")
    if not service.scheduler.is_alive:
        raise BadRequest(
            f"The scheduler has stopped: {service.scheduler.failure}", 503, "ServiceUnavailableError"
        )


def _raise_abort(output: Output) -> None:
    reason = output.finish_reason or {}
    if reason.get("type") == "abort" and reason.get("status_code"):
        raise BadRequest(str(reason["message"]), int(reason["status_code"]), str(reason["err_type"]))


async def _until_disconnect(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _answer(http: HttpRequest, outputs: list[AsyncIterator[Output]]) -> list[Output]:
    """The last Output of each; if the client goes away first, everything is aborted."""

    async def last(items: AsyncIterator[Output]) -> Output:
        final: Output | None = None
        try:
            async for item in items:
                final = item
        finally:
            await items.aclose()  # type: ignore[attr-defined]  (they are generators: closing one aborts its request)
        assert final is not None
        return final

    work = asyncio.gather(*(last(items) for items in outputs))
    gone = asyncio.ensure_future(_until_disconnect(http))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        results = work.result()
    finally:
        gone.cancel()
        if not work.done():
            work.cancel()
            try:
                await work
            except asyncio.CancelledError:
                pass
    for output in results:
        _raise_abort(output)
    return results


def _event(value: Any) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _stream(events: AsyncIterator[bytes]) -> StreamingResponse:
    return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})


# ---- /generate


def _spread(value: Any, count: int, name: str) -> list[Any]:
    if isinstance(value, list):
        if len(value) != count:
            raise BadRequest(f"The length of {name} ({len(value)}) is not the number of prompts ({count}).")
        return value
    return [value] * count


async def generate(http: HttpRequest) -> Response:
    service: Service = http.app.state.service
    _gate(service)
    body = await _body(http)
    text, ids = body.get("text"), body.get("input_ids")
    if (text is None) == (ids is None):
        raise BadRequest(
            "Either text, input_ids or input_embeds should be provided."
            if text is None
            else "Give text or input_ids, not both."
        )
    if text is not None:
        single = isinstance(text, str)
        texts = [text] if single else text
        if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
            raise BadRequest("text must be a string or a non-empty list of strings.")
        prompts = [service.tokenizer.encode(t) for t in texts]
    else:
        if not isinstance(ids, list) or not ids:
            raise BadRequest("input_ids must be a non-empty list of token ids, or a list of such lists.")
        single = not isinstance(ids[0], list)
        prompts = [ids] if single else ids
        for prompt in prompts:
            if not isinstance(prompt, list) or not all(
                isinstance(t, int) and not isinstance(t, bool) for t in prompt
            ):
                raise BadRequest("input_ids must be a non-empty list of token ids, or a list of such lists.")
    if body.get("return_hidden_states"):
        raise BadRequest("return_hidden_states is not supported by the embedded engine.")
    count = len(prompts)
    streaming = _flag(body, "stream")
    raw = [p or {} for p in _spread(body.get("sampling_params"), count, "sampling_params")]
    if not all(isinstance(p, dict) for p in raw):
        raise BadRequest("sampling_params must be an object or a list of objects.")
    params = [_params(service, {**service.default_sampling, **p}) for p in raw]
    rids = _spread(body.get("rid"), count, "rid")
    if not all(r is None or (isinstance(r, str) and 0 < len(r) <= (16384 if is_capture(r) else 200)) for r in rids):
        raise BadRequest("rid must be a string of at most 200 characters, or a list of them.")
    logprobs = _spread(body.get("return_logprob"), count, "return_logprob")
    starts = _spread(body.get("logprob_start_len", -1), count, "logprob_start_len")
    tops = _spread(body.get("top_logprobs_num", 0) or 0, count, "top_logprobs_num")
    if not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= 100 for n in tops):
        raise BadRequest("top_logprobs_num must be an integer from 0 to 100, or a list of them.")

    for start, prompt in zip(starts, prompts, strict=True):
        if isinstance(start, bool) or not isinstance(start, int) or not -1 <= start <= len(prompt):
            raise BadRequest(
                f"logprob_start_len must be an integer from -1 to the prompt's length {len(prompt)}, got {start!r}."
            )

    def begin(i: int) -> AsyncIterator[Output]:
        def build(deliver: Callable[[Output], None]) -> Request:
            return service.make(
                prompts[i],
                params[i],
                deliver,
                rid=rids[i] or "",
                stream=streaming,
                return_logprob=bool(logprobs[i]),
                logprob_start_len=starts[i],
                top_logprobs_num=tops[i],
            )

        build(lambda _: None)  # a bad request is refused before anything starts
        return service.outputs(build)

    def shown(output: Output) -> dict[str, Any]:
        return {"text": output.text, "output_ids": output.output_ids, "meta_info": output.meta_info}

    parts = [begin(i) for i in range(count)]
    if not streaming:
        results = [shown(output) for output in await _answer(http, parts)]
        return JSONResponse(results[0] if single else results)

    async def events() -> AsyncIterator[bytes]:
        async for i, output in _merge(parts):
            yield _event(shown(output) if single else {"index": i, **shown(output)})
        yield b"data: [DONE]\n\n"

    return _stream(events())


async def _merge(parts: list[AsyncIterator[Output]]) -> AsyncIterator[tuple[int, Output]]:
    """Outputs of several requests as they come."""
    if len(parts) == 1:
        try:
            async for output in parts[0]:
                yield 0, output
        finally:
            await parts[0].aclose()  # type: ignore[attr-defined]
        return
    queue: asyncio.Queue[tuple[int, Output] | None] = asyncio.Queue()

    async def pump(i: int) -> None:
        try:
            async for output in parts[i]:
                await queue.put((i, output))
        finally:
            await parts[i].aclose()  # type: ignore[attr-defined]
            queue.put_nowait(None)

    tasks = [asyncio.ensure_future(pump(i)) for i in range(len(parts))]
    try:
        left = len(parts)
        while left:
            item = await queue.get()
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# ---- /v1/*


def _openai_params(service: Service, body: Mapping[str, Any], max_tokens: int) -> SamplingParams:
    raw: dict[str, Any] = {**service.default_sampling, "max_new_tokens": max_tokens}
    for key in (
        "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens",
        "frequency_penalty", "presence_penalty", "repetition_penalty", "n", "logit_bias", "no_stop_trim", "regex", "ebnf",
    ):  # fmt: skip
        if body.get(key) is not None:
            raw[key] = body[key]
    if body.get("min_tokens") is not None:
        raw["min_new_tokens"] = body["min_tokens"]
    if (
        isinstance(body.get("response_format"), dict)
        and body["response_format"].get("type", "text") != "text"
    ):
        raise BadRequest("response_format is not supported by the embedded engine (SGLang does it).")
    return _params(service, raw)


def _max_tokens(
    service: Service, body: Mapping[str, Any], keys: tuple[str, ...], prompt: list[int], default: int
) -> int:
    for key in keys:
        value = body.get(key)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise BadRequest(f"{key} must be a non-negative integer, got {value!r}.")
            return value
    room = min(service.scheduler.context_len, service.scheduler.max_total_num_tokens) - len(prompt)
    return max(0, min(default, room)) if default else max(0, room)


def _reason(output: Output) -> str | None:
    return output.finish_reason["type"] if output.finish_reason else None


def _usage(prompt: int, completion: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": None,
        "reasoning_tokens": 0,
        "completion_tokens_details": None,
    }


def _matched(output: Output) -> Any:
    return (output.finish_reason or {}).get("matched")


def _check_model(service: Service, body: Mapping[str, Any]) -> str:
    """SGLang answers under whatever name it is asked; so does this engine."""
    model = body.get("model", service.model_name)
    if not isinstance(model, str):
        raise BadRequest(f"model must be a string, got {model!r}.")
    return model


def _wants_usage(body: Mapping[str, Any]) -> bool:
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise BadRequest("stream_options must be an object.")
    return bool(options.get("include_usage"))


def _render(service: Service, body: Mapping[str, Any]) -> list[int]:
    """Token ids of a body's messages, through the chat template, with the assistant's turn opened."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a non-empty list.")
    plain: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRequest(f"messages[{i}] must be an object with a role.")
        content = message.get("content")
        if isinstance(content, list):  # OpenAI's parts
            if not all(
                isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str)
                for p in content
            ):
                raise BadRequest(f"messages[{i}]: only text parts are supported.")
            content = "".join(part["text"] for part in content)
        if content is None:
            content = ""
        if not isinstance(content, str):
            raise BadRequest(f"messages[{i}].content must be a string or a list of text parts.")
        plain.append({**message, "content": content})
    extra = body.get("chat_template_kwargs") or {}
    if not isinstance(extra, dict):
        raise BadRequest("chat_template_kwargs must be an object.")
    try:
        tools = {"tools": body["tools"]} if body.get("tools") else {}
        return service.tokenizer.chat(plain, {**tools, **extra})
    except ValueError as err:
        raise BadRequest(str(err))


async def tokenize(http: HttpRequest) -> Response:
    """Ids of a prompt, or of chat messages exactly as /v1/chat/completions renders them."""
    service: Service = http.app.state.service
    body = await _body(http)
    if body.get("messages") is not None:
        kwargs = dict(body.get("chat_template_kwargs") or {})
        if body.get("add_generation_prompt") is not None:
            kwargs["add_generation_prompt"] = bool(body["add_generation_prompt"])
        ids = _render(service, {**body, "chat_template_kwargs": kwargs})
    elif isinstance(body.get("prompt"), str):
        ids = service.tokenizer.encode(
            body["prompt"], add_special_tokens=bool(body.get("add_special_tokens", True))
        )
    else:
        raise BadRequest("prompt (a string) or messages is needed.")
    return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": service.scheduler.context_len})


async def chat_completions(http: HttpRequest) -> Response:
    service: Service = http.app.state.service
    _gate(service)
    body = await _body(http)
    model = _check_model(service, body)
    prompt = _render(service, body)
    params = _openai_params(
        service, body, _max_tokens(service, body, ("max_completion_tokens", "max_tokens"), prompt, 0)
    )
    streaming = _flag(body, "stream")
    rid = uuid.uuid4().hex

    def build(deliver: Callable[[Output], None]) -> Request:
        return service.make(prompt, params, deliver, rid=rid, stream=streaming)

    build(lambda _: None)
    created = int(time.time())
    if not streaming:
        (output,) = await _answer(http, [service.outputs(build)])
        return JSONResponse(
            {
                "id": rid,
                "object": "chat.completion",
                "created": created,
                "model": model,
                "choices": [
                    {
                        "index": 0,
                        "message": {
                            "role": "assistant",
                            "content": output.text,
                            "reasoning_content": None,
                        },
                        "logprobs": None,
                        "finish_reason": _reason(output),
                        "matched_stop": _matched(output),
                    }
                ],
                "usage": _usage(len(prompt), len(output.output_ids)),
                "metadata": {"weight_version": "default"},
            }
        )
    include_usage = _wants_usage(body)

    def chunk(choices: list[dict[str, Any]], **more: Any) -> bytes:
        return _event(
            {
                "id": rid,
                "object": "chat.completion.chunk",
                "created": created,
                "model": model,
                "choices": choices,
                **more,
            }
        )

    def choice(delta: dict[str, Any], reason: str | None = None, matched: Any = None) -> dict[str, Any]:
        return {
            "index": 0,
            "delta": {"reasoning_content": None, **delta},
            "logprobs": None,
            "finish_reason": reason,
            "matched_stop": matched,
        }

    async def events() -> AsyncIterator[bytes]:
        yield chunk([choice({"role": "assistant", "content": ""})])
        sent = 0
        output: Output | None = None
        async for _, output in _merge([service.outputs(build)]):
            if len(output.text) > sent:
                yield chunk([choice({"content": output.text[sent:]})])
                sent = len(output.text)
        assert output is not None
        yield chunk([choice({}, _reason(output), _matched(output))])
        if include_usage:
            yield chunk([], usage=_usage(len(prompt), len(output.output_ids)))
        yield b"data: [DONE]\n\n"

    return _stream(events())


async def completions(http: HttpRequest) -> Response:
    service: Service = http.app.state.service
    _gate(service)
    body = await _body(http)
    model = _check_model(service, body)
    raw = body.get("prompt")
    prompts: list[list[int]]
    if isinstance(raw, str):
        prompts = [service.tokenizer.encode(raw)]
    elif isinstance(raw, list) and raw and all(isinstance(p, str) for p in raw):
        prompts = [service.tokenizer.encode(p) for p in raw]
    elif isinstance(raw, list) and raw and all(isinstance(p, int) and not isinstance(p, bool) for p in raw):
        prompts = [raw]
    elif (
        isinstance(raw, list)
        and raw
        and all(isinstance(p, list) and all(isinstance(t, int) for t in p) for p in raw)
    ):
        prompts = raw
    else:
        raise BadRequest(
            "prompt must be a non-empty string, a list of strings, a list of token ids, or a list of such lists."
        )
    if body.get("logprobs"):
        raise BadRequest(
            "logprobs is not supported on /v1/completions by the embedded engine: /generate has return_logprob."
        )
    params = [
        _openai_params(service, body, _max_tokens(service, body, ("max_tokens",), prompt, 16))
        for prompt in prompts
    ]
    streaming = _flag(body, "stream")
    echo = _flag(body, "echo")
    rid = uuid.uuid4().hex
    created = int(time.time())

    def begin(i: int) -> AsyncIterator[Output]:
        def build(deliver: Callable[[Output], None]) -> Request:
            return service.make(prompts[i], params[i], deliver, stream=streaming)

        build(lambda _: None)
        return service.outputs(build)

    prefix = [service.tokenizer.decode(p) if echo else "" for p in prompts]
    parts = [begin(i) for i in range(len(prompts))]
    prompt_tokens = sum(map(len, prompts))

    def choice(i: int, text: str, reason: str | None, matched: Any) -> dict[str, Any]:
        return {"index": i, "text": text, "logprobs": None, "finish_reason": reason, "matched_stop": matched}

    if not streaming:
        results = await _answer(http, parts)
        return JSONResponse(
            {
                "id": rid,
                "object": "text_completion",
                "created": created,
                "model": model,
                "choices": [
                    choice(i, prefix[i] + o.text, _reason(o), _matched(o)) for i, o in enumerate(results)
                ],
                "usage": _usage(prompt_tokens, sum(len(o.output_ids) for o in results)),
                "metadata": {"weight_version": "default"},
            }
        )
    include_usage = _wants_usage(body)

    def chunk(choices: list[dict[str, Any]], **more: Any) -> bytes:
        return _event(
            {
                "id": rid,
                "object": "text_completion",
                "created": created,
                "model": model,
                "choices": choices,
                **more,
            }
        )

    async def events() -> AsyncIterator[bytes]:
        sent = [0] * len(prompts)
        count = [0] * len(prompts)
        for i, text in enumerate(prefix):
            if text:
                yield chunk([choice(i, text, None, None)])
        async for i, output in _merge(parts):
            count[i] = len(output.output_ids)
            if len(output.text) > sent[i] or output.finish_reason:
                yield chunk([choice(i, output.text[sent[i] :], _reason(output), _matched(output))])
                sent[i] = len(output.text)
        if include_usage:
            yield chunk([], usage=_usage(prompt_tokens, sum(count)))
        yield b"data: [DONE]\n\n"

    return _stream(events())


# ---- facts and orders


async def health(http: HttpRequest) -> Response:
    service: Service = http.app.state.service
    late = time.monotonic() - service.scheduler.beat_s > HEARTBEAT_TIMEOUT_S
    return Response(
        status_code=200 if service.status == "ready" and service.scheduler.is_alive and not late else 503
    )


async def health_generate(http: HttpRequest) -> Response:
    service: Service = http.app.state.service
    if service.status != "ready" or not service.scheduler.is_alive:
        return Response(status_code=503)
    params = SamplingParams(max_new_tokens=1, temperature=0.0)
    try:
        async with asyncio.timeout(HEARTBEAT_TIMEOUT_S):
            async for output in service.outputs(
                lambda deliver: service.make([0], params, deliver, rid=f"HEALTH_CHECK_{time.time()}")
            ):
                if _reason(output) == "abort":
                    return Response(status_code=503)
    except TimeoutError:
        log(f"Health check failed. The scheduler gave no answer for {HEARTBEAT_TIMEOUT_S:.0f} seconds.")
        return Response(status_code=503)
    return Response(status_code=200)


async def model_info(http: HttpRequest) -> Response:
    return JSONResponse(http.app.state.service.model_info())


async def server_info(http: HttpRequest) -> Response:
    return JSONResponse(http.app.state.service.server_info())


async def loads(http: HttpRequest) -> Response:
    service: Service = http.app.state.service
    return JSONResponse(
        {
            "timestamp": datetime.now(UTC).isoformat(),
            "version": service.server_info()["version"],
            "accelerator": torch.cuda.get_device_name()
            if service.scheduler.decoder.device.type == "cuda"
            else None,
            "num_accelerators": 1,
            "loads": [service.load()],
        }
    )


async def models(http: HttpRequest) -> Response:
    service: Service = http.app.state.service
    return JSONResponse(
        {
            "object": "list",
            "data": [
                {
                    "id": service.model_name,
                    "object": "model",
                    "created": int(time.time()),
                    "owned_by": "k2tui-embedded",
                    "root": service.model_path,
                    "parent": None,
                    "max_model_len": service.scheduler.context_len,
                }
            ],
        }
    )


async def metrics(http: HttpRequest) -> Response:
    service: Service = http.app.state.service
    scheduler = service.scheduler
    used = scheduler.num_used_tokens
    gauges: dict[str, tuple[str, float]] = {
        "num_running_reqs": ("The number of running requests.", len(scheduler.running)),
        "num_queue_reqs": ("The number of requests in the waiting queue.", len(scheduler.waiting)),
        "num_used_tokens": ("The number of used tokens.", used),
        "token_usage": ("The token usage.", scheduler.token_usage),
        "full_token_usage": ("The token usage for full attention layers.", scheduler.token_usage),
        "max_total_num_tokens": (
            "Maximum total number of tokens in the KV cache pool.",
            scheduler.max_total_num_tokens,
        ),
        "context_len": ("Maximum context length of the model.", scheduler.context_len),
        "weight_memory_usage_gb": ("Memory of the weights in GB.", service.weight_gb),
        "kv_cache_memory_usage_gb": ("Memory of the KV cache in GB.", service.kv_gb),
        "utilization": ("The utilization.", len(scheduler.running) / scheduler.max_running_requests),
        "spec_num_steps": ("Currently active speculative_num_steps.", scheduler.num_steps),
        "spec_num_draft_tokens": (
            "Currently active speculative_num_draft_tokens.",
            scheduler.num_steps + 1 if scheduler.num_steps else 0,
        ),
    }
    text = render(service.metrics, model_name=service.model_name, gauges=gauges)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


async def flush_cache(http: HttpRequest) -> Response:
    service: Service = http.app.state.service
    if service.scheduler.num_open_requests:
        return Response(
            "Cache not flushed: there are running or waiting requests.\n", 400, media_type="text/plain"
        )
    log("Cache flushed successfully!")
    return Response(
        "Cache flushed.\nThe embedded engine keeps no prefix cache between requests.\n",
        media_type="text/plain",
    )


async def abort_request(http: HttpRequest) -> Response:
    service: Service = http.app.state.service
    body = await _body(http)
    everything = _flag(body, "abort_all")
    rid = body.get("rid", "")
    if not isinstance(rid, str) or not (rid or everything):
        raise BadRequest("rid (a string) or abort_all is needed.")
    service.scheduler.abort(rid, all_requests=everything)
    return Response(status_code=200)


async def freeze_gc(http: HttpRequest) -> Response:
    import gc

    gc.collect()
    gc.freeze()
    return Response(status_code=200)


def _deprecated(handler: Callable[[HttpRequest], Any], old: str, new: str) -> Callable[[HttpRequest], Any]:
    async def wrapped(http: HttpRequest) -> Response:
        log(
            f"Endpoint '{old}' is deprecated and will be removed in a future version. Please use '{new}' instead."
        )
        return await handler(http)

    return wrapped


async def _on_bad_request(http: HttpRequest, err: Exception) -> Response:
    assert isinstance(err, BadRequest)
    if http.url.path.startswith("/v1/"):
        return JSONResponse(
            {"object": "error", "message": err.message, "type": err.kind, "param": None, "code": err.status},
            err.status,
        )
    return JSONResponse({"error": {"message": err.message}}, err.status)


async def _on_http_error(_: HttpRequest, err: Exception) -> Response:
    assert isinstance(err, HTTPException)
    return JSONResponse({"detail": err.detail}, err.status_code, headers=err.headers)


async def _on_disconnect(_: HttpRequest, __: Exception) -> Response:
    return Response(status_code=499)  # nobody is there to read it


async def _on_defect(http: HttpRequest, err: Exception) -> Response:
    log(f"Unhandled error in {http.method} {http.url.path}: {type(err).__name__}: {err}")
    return JSONResponse({"error": {"message": f"Internal error: {type(err).__name__}"}}, 500)


class _Counted:
    """Counts answers by endpoint. An error that was already answered and logged goes no further: no traceback."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = False

        async def watched(message: Any) -> None:
            nonlocal began
            if message["type"] == "http.response.start":
                began = True
                path = scope["path"]
                self.metrics.answered(scope["method"], path if path in _PATHS else "other", message["status"])
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except Exception:
            if not began:
                raise


_ROUTES = [
    Route("/health", health),
    Route("/health_generate", health_generate),
    Route("/model_info", model_info),
    Route("/get_model_info", _deprecated(model_info, "/get_model_info", "/model_info")),
    Route("/server_info", server_info),
    Route("/get_server_info", _deprecated(server_info, "/get_server_info", "/server_info")),
    Route("/v1/loads", loads),
    Route("/v1/models", models),
    Route("/metrics", metrics),
    Route("/generate", generate, methods=["POST", "PUT"]),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/v1/tokenize", tokenize, methods=["POST"]),
    Route("/flush_cache", flush_cache, methods=["GET", "POST"]),
    Route("/abort_request", abort_request, methods=["POST"]),
    Route("/freeze_gc", freeze_gc, methods=["GET", "POST"]),
]
_PATHS = frozenset(route.path for route in _ROUTES)


def make_app(service: Service) -> ASGIApp:
    routes = list(_ROUTES)
    if service.capture_root is not None:
        from k2tui.local.capture import routes as capture_routes

        routes += capture_routes(service.capture_root)
    app = Starlette(
        routes=routes,
        exception_handlers={
            BadRequest: _on_bad_request,
            HTTPException: _on_http_error,
            ClientDisconnect: _on_disconnect,
            Exception: _on_defect,
        },
    )
    app.state.service = service
    return _Counted(app, service.metrics)
