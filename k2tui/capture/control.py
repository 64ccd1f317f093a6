"""What a server answers about its capture, as functions over the capture root: status, begin, flush. No web framework.

Truth is what lies on disk. The process that answers HTTP need not be the one that writes: both see the same root.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from k2tui.capture.request import is_run_name
from k2tui.capture.sink import CONTROL_DIR
from k2tui.errors import K2Error
from k2tui.parsing import parse_json
from k2tui.states import layout
from k2tui.states.layout import Manifest
from k2tui.states.writer import prepare_folder

ROUTE = "/k2tui_capture"


class Control:
    """Answers for one capture root. Not thread-safe: call it from one thread or event loop."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.epoch = uuid.uuid4().hex[:12]  # a cursor is only good for the process that gave it
        self.root_id = root_id(root, make=True)
        self._found: dict[str, list[dict[str, Any]]] = {}
        self._seen: dict[str, set[str]] = {}

    def status(self, run: str = "", cursor: int = 0, epoch: str = "") -> dict[str, Any]:
        """Writers of this root that are alive and, for one run, its shards found since `cursor`.

        Shards come in the order in which they were found: {"file", "size_b", "samples": [index, ...]}. A caller whose epoch
        is another's gets everything from the start.
        """
        disk = os.statvfs(self.root)
        answer: dict[str, Any] = {
            "root": str(self.root),
            "root_id": self.root_id,
            "epoch": self.epoch,
            "free_b": disk.f_bavail * disk.f_frsize,
            "writers": self.writers(),
        }
        if run:
            found = self._scan(run)
            start = cursor if epoch == self.epoch else 0
            answer["run"] = {
                "name": run,
                "folder": str(self.root / run),
                "shards": found[start:],
                "cursor": len(found),
            }
        return answer

    def writers(self) -> list[dict[str, Any]]:
        out: list[dict[str, Any]] = []
        for path in sorted((self.root / CONTROL_DIR).glob("*.json")):
            try:
                told = parse_json(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            if told.get("host") != os.uname().nodename:
                continue  # another node writes to the same file system and answers for itself
            if _alive(int(told.get("pid", 0))):
                out.append(told)
            else:
                path.unlink(missing_ok=True)
        return out

    def begin(self, run: str, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Make the run's folder and manifest; the engine's own facts are written over what the caller says of them.

        Raises K2Error for a bad name, boundaries that are not captured here, or a folder with states of another kind.
        """
        if not is_run_name(run):
            raise K2Error(f"run name {run!r}", "letters, digits, dot, dash and underscore, at most 100")
        writers = self.writers()
        if not writers:
            raise K2Error(
                "no capture writer is alive on this server", "see the server's log for lines of k2tui capture"
            )
        facts = writers[0]["facts"]
        wanted = Manifest.from_json(
            {**manifest, "format": layout.FORMAT, "version": layout.VERSION}, "the request"
        )
        missing = [b for b in wanted.boundaries if b not in facts["boundaries"]]
        if missing:
            raise K2Error(
                f"boundaries {missing} are not captured by this server, only {facts['boundaries']}",
                f"start it with K2TUI_CAPTURE_BOUNDARIES={','.join(map(str, wanted.boundaries))}",
            )
        told = {
            k: facts[k]
            for k in (
                "hidden_size",
                "num_hidden_layers",
                "vocab_size",
                "model_path",
                "engine",
                "engine_version",
                "engine_args",
            )
            if k in facts
        }
        if "architectures" in facts:
            told["architectures"] = tuple(facts["architectures"])
        final = replace(wanted, **told, created_s=time.time())
        folder = self.root / run
        folder.mkdir(parents=True, exist_ok=True)
        prepare_folder(folder, final)
        return {"folder": str(folder), "manifest": layout.read_manifest(folder).to_json()}

    def flush(self, run: str) -> dict[str, Any]:
        """Ask the writers to publish what is complete. Returns at once; the shards show in a later status."""
        if not is_run_name(run):
            raise K2Error(f"run name {run!r}")
        folder = self.root / CONTROL_DIR
        for old in folder.glob(f"flush-{run}-*"):
            if time.time() - old.stat().st_mtime > 60:
                old.unlink(missing_ok=True)
        (folder / f"flush-{run}-{uuid.uuid4().hex[:8]}").touch()
        return {"ok": True}

    def _scan(self, run: str) -> list[dict[str, Any]]:
        if not is_run_name(run):
            raise K2Error(f"run name {run!r}")
        found = self._found.setdefault(run, [])
        seen = self._seen.setdefault(run, set())
        for path in layout.shard_paths(self.root / run):
            if path.name in seen:
                continue
            try:
                header = layout.read_header(path)
            except K2Error:
                continue  # a damaged shard holds no sample; `states check` names it
            seen.add(path.name)
            found.append({"file": path.name, "size_b": header.size_b, "samples": sorted(header.samples)})
        return found


def root_id(root: Path, *, make: bool = False) -> str:
    """A name that goes with the files: equal when two machines see one capture root, different on disks of their own; "" without."""
    path = root / CONTROL_DIR / "id"
    if make:
        path.parent.mkdir(parents=True, exist_ok=True)
        own = path.with_name(f"id.{uuid.uuid4().hex}")
        own.write_text(own.suffix[1:], encoding="utf-8")
        try:
            os.link(own, path)  # whole or not at all, the first one wins
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            if not path.exists():
                own.rename(path)
        finally:
            own.unlink(missing_ok=True)
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _alive(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
