"""Values of foreign JSON, narrowed: what is not of the wanted kind reads as empty."""

from __future__ import annotations

from typing import Any, cast


def mapping(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def listing(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []
