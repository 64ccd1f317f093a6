"""Prompts -> whole HTTP requests in each server dialect. Knows no socket; the answers' side is stream.py."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from k2tui.core.workload import Prompt
from k2tui.errors import UsageError

PATHS = {"generate": "/generate", "completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True)
class Dialect:
    """How requests of one run look. usage_each: ask for a running count with every chunk (OpenAI routes).

    sampling: temperature, top_p, ...; extra: merged into the body as it is.
    """

    api: str
    host: str
    prefix: str = ""  # path before the route, "/v2"
    model: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    ignore_eos: bool = True
    usage_each: bool = False
    spec_details: bool = False  # SGLang's per-request acceptance on the OpenAI routes
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    def body(self, prompt: Prompt, messages: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        """The JSON body. messages: replaces the prompt's own (a session's later turn)."""
        if self.api == "generate":
            sampling: dict[str, Any] = {
                "temperature": 0,
                **self.sampling,
                "max_new_tokens": prompt.output_len,
            }
            if self.ignore_eos:
                sampling["ignore_eos"] = True
            content: dict[str, Any] = (
                {"input_ids": list(prompt.ids)} if prompt.ids else {"text": _text(prompt)}
            )
            return {**content, "sampling_params": sampling, "stream": True, **self.extra}
        options: dict[str, Any] = {"include_usage": True}
        if self.usage_each:
            options["continuous_usage_stats"] = True
        common: dict[str, Any] = {
            "model": self.model,
            "max_tokens": prompt.output_len,
            "temperature": 0,
            **self.sampling,
            "stream": True,
            "stream_options": options,
        }
        if self.ignore_eos:
            common["ignore_eos"] = True
        if self.spec_details:
            common["return_spec_tokens_details"] = True
        if self.api == "completions":
            return {**common, "prompt": list(prompt.ids) if prompt.ids else _text(prompt), **self.extra}
        talk = list(messages) or list(prompt.messages) or [{"role": "user", "content": _text(prompt)}]
        return {**common, "messages": talk, **self.extra}

    def request(self, body: Mapping[str, Any]) -> bytes:
        """The whole HTTP request. Raises UsageError for a prompt that cannot be written as JSON."""
        try:
            raw = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
        except RecursionError:
            raise UsageError("a prompt is nested too deeply to be sent") from None
        except UnicodeEncodeError:
            raise UsageError(
                "a prompt holds half a character (a lone surrogate) and cannot be sent"
            ) from None
        head = [
            f"POST {self.prefix}{PATHS[self.api]} HTTP/1.1",
            f"Host: {self.host}",
            "Content-Type: application/json",
            "Accept: text/event-stream",
            f"Content-Length: {len(raw)}",
            *(f"{k}: {v}" for k, v in self.headers.items()),
        ]
        return "\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + raw


def _text(prompt: Prompt) -> str:
    if prompt.text:
        return prompt.text
    return "\n".join(str(m.get("content") or "") for m in prompt.messages)
