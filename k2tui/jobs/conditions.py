"""Conditions that a job asks for before it starts or promises after it ends: "file:PATH", "url:http://HOST:PORT/PATH"."""

from __future__ import annotations

import os

from k2tui.errors import UsageError


def check_form(condition: str) -> None:
    """Raises UsageError when the condition is none that `unmet` understands."""
    kind, _, rest = condition.partition(":")
    if kind == "file" and rest:
        return
    if kind == "url":
        from urllib.parse import urlsplit

        parts = urlsplit(rest)
        if parts.scheme == "http" and parts.hostname:
            return
    raise UsageError(
        f"condition {condition!r} is not understood",
        "write file:PATH (there and not empty) or url:http://HOST:PORT/PATH (answers 200)",
    )


def unmet(condition: str, cwd: str = "") -> str:
    """Why the condition does not hold, in words; "" when it holds. Blocks for at most 2 s."""
    kind, _, rest = condition.partition(":")
    if kind == "file":
        path = os.path.join(cwd, os.path.expanduser(rest))
        try:
            facts = os.stat(path)
        except OSError as err:
            return f"{rest}: {err.strerror}"
        if os.path.isdir(path):
            return "" if os.listdir(path) else f"{rest} is an empty folder"
        return "" if facts.st_size else f"{rest} is empty"
    return _http_unmet(rest)


def _http_unmet(url: str) -> str:
    import socket
    from urllib.parse import urlsplit

    # a bare socket: http.client would cost the keeper 4 MB for one status line
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        with socket.create_connection((host, port), timeout=2) as sock:
            sock.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
            line = b""
            while b"\n" not in line and len(line) < 1024:
                more = sock.recv(1024)
                if not more:
                    break
                line += more
    except OSError as err:
        return f"{url}: {err.strerror or err}"
    words = line.split(None, 2)
    status = words[1].decode("ascii", "replace") if len(words) > 1 else "no answer"
    return "" if status == "200" else f"{url}: {status}"
