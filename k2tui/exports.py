"""What the user keeps of the screen: reports, texts, pictures. Saved off the event loop; a file is there whole or not at all."""

from __future__ import annotations

import os
import re
import tempfile
import time
from pathlib import Path

import aiofiles
import aiofiles.os

from k2tui import paths
from k2tui.errors import K2Error

_fsync = aiofiles.os.wrap(os.fsync)


def folder() -> Path:
    """Where they lie."""
    return paths.state_dir() / "saved"


async def save_text(name: str, suffix: str, text: str) -> Path:
    """Write text to `<folder>/<name>-<date>-<time><suffix>`; a file that is there already is left alone and the new one is numbered.

    name: any text; what does not fit a file name becomes "-". Returns the path. Raises K2Error that names the file.
    """
    stem = re.sub(r"[^\w.-]+", "-", name).strip("-.")[:80] or "k2tui"
    stem += time.strftime("-%Y%m%d-%H%M%S")
    at = folder()
    temp = ""
    try:
        await aiofiles.os.makedirs(at, mode=0o700, exist_ok=True)
        handle, temp = tempfile.mkstemp(prefix=f".{stem}.", suffix=".tmp", dir=at)
        async with aiofiles.open(handle, "w", encoding="utf-8", errors="replace") as out:
            await out.write(text)
            await out.flush()
            await _fsync(out.fileno())
        number = 1
        while True:
            path = at / f"{stem}{'' if number == 1 else f'-{number}'}{suffix}"
            try:
                async with aiofiles.open(path, "x"):  # the name is ours now, and nobody's file is replaced
                    pass
            except FileExistsError:
                number += 1
                continue
            await aiofiles.os.replace(temp, path)
            return path
    except OSError as err:
        raise K2Error(f"{at}: cannot save {stem}{suffix}: {err.strerror or err}", "free some space, or check the folder's permissions") from None
    finally:
        if temp:
            try:
                await aiofiles.os.unlink(temp)
            except OSError:
                pass
