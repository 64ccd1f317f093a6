"""Files written whole or not at all. The only place that knows how."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def write_whole(path: Path, data: bytes | str, *, mode: int = 0o600) -> None:
    """Replace `path` by `data`: temp file in the same folder, fsync, rename, fsync of the folder.

    On any error (full disk, no permission) the old file is untouched and the temp file is removed.
    """
    raw = data.encode() if isinstance(data, str) else data
    fd, tmp = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as fh:
            fh.write(raw)
            fh.flush()
            os.fsync(fh.fileno())
        os.chmod(tmp, mode)
        os.replace(tmp, path)
    except BaseException:
        try:
            os.unlink(tmp)
        except OSError:
            pass
        raise
    dir_fd = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(dir_fd)
    except OSError:
        pass  # some network file systems refuse fsync on a folder
    finally:
        os.close(dir_fd)


def write_json(path: Path, value: Any, *, mode: int = 0o600) -> None:
    write_whole(path, json.dumps(value, ensure_ascii=False, indent=1) + "\n", mode=mode)
