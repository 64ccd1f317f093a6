"""What the dashboard is told at its start: looks, defaults of its forms. Filled by the verb from the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Settings:
    """theme: name or "" for the default. bench: the benchmark form's fields and their first values."""

    theme: str = ""
    ascii: bool = False
    mouse: bool = True
    refresh_s: float = 1.0
    bench: Mapping[str, str] = field(
        default_factory=lambda: {
            "concurrency": "1,4,8",
            "num_prompts": "32",
            "random_input_len": "64",
            "random_output_len": "32",
            "seed": "1",
        }
    )
    notice: str = ""  # shown once at the start
    banner: str = ""  # shown for ever in the top line: "REPLAY file"
