"""Log lines in SGLang's own grammar, on stderr. Knows the form of a line, nothing of what is said in it."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

_lock = threading.Lock()
# What comes from a request or a folder must not reach a terminal as escape codes or extra lines.
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}


def log(message: str) -> None:
    """One line, stamped `[YYYY-MM-DD HH:MM:SS]`, written whole and flushed."""
    line = f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {message.translate(_CONTROL)}\n"
    with _lock:
        sys.stderr.write(line)
        sys.stderr.flush()


def announce(message: str) -> None:
    """The very first line, without a stamp: by its beginning a reader tells this engine from SGLang."""
    with _lock:
        sys.stderr.write(message.translate(_CONTROL) + "\n")
        sys.stderr.flush()


def uvicorn_log_config() -> dict[str, Any]:
    """uvicorn's own lines (start, access, errors) with the same stamp and stream as ours."""
    stamp = {"datefmt": "%Y-%m-%d %H:%M:%S", "use_colors": False}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "default": {
                "()": "uvicorn.logging.DefaultFormatter",
                "fmt": "[%(asctime)s] %(levelprefix)s %(message)s",
                **stamp,
            },
            "access": {
                "()": "uvicorn.logging.AccessFormatter",
                "fmt": '[%(asctime)s] %(levelprefix)s %(client_addr)s - "%(request_line)s" %(status_code)s',
                **stamp,
            },
        },
        "handlers": {
            "default": {
                "class": "logging.StreamHandler",
                "formatter": "default",
                "stream": "ext://sys.stderr",
            },
            "access": {"class": "logging.StreamHandler", "formatter": "access", "stream": "ext://sys.stderr"},
        },
        "loggers": {
            "uvicorn": {"handlers": ["default"], "level": "INFO", "propagate": False},
            "uvicorn.error": {"level": "INFO"},
            "uvicorn.access": {"handlers": ["access"], "level": "INFO", "propagate": False},
        },
    }
