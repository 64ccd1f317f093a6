"""What a server answers over HTTP: frozen facts, each optional."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HttpStatus:
    """One poll of a server. Every field is None when the server did not say.

    health: HTTP status of /health, None when nothing answered. model_path: from /model_info (SGLang) or /v1/models.
    """

    url: str
    checked_s: float
    health: int | None = None
    error: str = ""  # why nothing answered, in words
    model_path: str | None = None
    served_model_name: str | None = None
    version: str | None = None
    is_embedded: bool = False  # the embedded engine says so in /server_info
    num_running_reqs: int | None = None
    num_queue_reqs: int | None = None
    token_usage: float | None = None
    gen_throughput: float | None = None
    accept_length: float | None = None  # newest interval, bonus token included
    cache_hit_rate: float | None = None
    max_total_num_tokens: int | None = None
    speculative_algorithm: str | None = None
