"""A tuning run on disk: space.toml as given, trials.jsonl (one writer, appended), best.toml, now.json while it runs. Resumable at any moment."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from k2tui import __version__, paths
from k2tui.config import Profile
from k2tui.core.job_mask import mask_argv, mask_env, mask_value
from k2tui.core.tuning import Space, Trial, TuneStep, TuneView, parse_space, trial_from_json, trial_to_json
from k2tui.errors import UsageError
from k2tui.files import write_whole
from k2tui.parsing import ParseError, parse_json, parse_toml
from k2tui.plain import clean
from k2tui.regular import read_regular


def root() -> Path:
    return paths.state_dir() / "tune"


def space_path(name: str) -> Path:
    """A space file by its path; "asset:tune-tiny" is one that k2tui ships. ~ is the home."""
    if name.startswith("asset:"):
        return paths.assets_dir() / f"{name.removeprefix('asset:')}.toml"
    return Path(name).expanduser().absolute()


def profile_toml(profile: Profile) -> str:
    """A profile as TOML with every key, nothing inherited, its secrets masked."""
    lines = [f"[profile.{_toml(profile.name)}]"]
    for key in (f.name for f in fields(Profile) if f.name not in ("name", "inherit", "auto_gpus")):
        value: Any = getattr(profile, key)
        if key == "gpus" and profile.auto_gpus:
            value = "auto" if profile.auto_gpus < 0 else profile.auto_gpus
        if key == "env":
            inline = ", ".join(f"{_toml(k)} = {_toml(v)}" for k, v in sorted(mask_env(value).items()))
            lines.append(f"env = {{ {inline} }}" if inline else "env = {}")
        elif key == "args":
            lines.append(f"args = {_toml(list(mask_argv(value)))}")
        else:
            lines.append(f"{key} = {_toml(mask_value(list(value) if isinstance(value, tuple) else value))}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """JSON is TOML for texts, numbers, lists of them, true and false; but for DEL, and for characters beyond 16 bits in escapes."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def read_space(path: Path) -> Space:
    """A space file. Raises UsageError naming the file and line."""
    try:
        text = read_regular(path).decode()
        raw = parse_toml(text)
    except FileNotFoundError:
        raise UsageError(
            f"no file {path}", "give a space.toml: docs/tune.md shows one, asset:tune-tiny is shipped"
        ) from None
    except ParseError as err:
        raise UsageError(err.at(str(path)), "fix that line") from None
    except (OSError, ValueError) as err:  # not UTF-8, a NUL in the name
        why = getattr(err, "strerror", None) or err
        raise UsageError(f"{path}: {why}", "check the path and its permissions") from None
    lines = {
        line.split("=", 1)[0].strip(): number
        for number, line in enumerate(text.splitlines(), 1)
        if "=" in line
    }
    return parse_space(raw, str(path), lines)


class TuneFolder:
    """One run's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, space_file: Path) -> TuneFolder:
        """A new folder with a copy of the space file (checked first)."""
        space = read_space(space_file)
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{(space.name or space.profile)[:40].replace('/', '-')}"
        path = root() / name
        paths.ensure_dir(path.parent)
        for extra in range(100):
            target = path if not extra else path.with_name(f"{name}-{extra}")
            try:
                target.mkdir(mode=0o700)
            except FileExistsError:
                continue
            shutil.copyfile(space_file, target / "space.toml")
            return cls(target)
        raise UsageError(f"{path}: no free name for a new tuning run")

    @classmethod
    def find(cls, name: str = "") -> TuneFolder:
        """A run by name or beginning of it; "" = the newest. Raises UsageError."""
        names = (
            sorted(p.name for p in root().iterdir() if (p / "space.toml").exists()) if root().is_dir() else []
        )
        if not names:
            raise UsageError("there is no tuning run", "start one: k2tui tune run SPACE.toml")
        found = [n for n in names if n.startswith(name)] if name else names[-1:]
        if len(found) != 1:
            raise UsageError(
                f"{'no' if not found else len(found)} tuning runs begin with {name!r}",
                "runs: " + ", ".join(names[-8:]),
            )
        return cls(root() / found[0])

    @classmethod
    def newest(cls) -> TuneFolder | None:
        """The run that was made last; None when there is none."""
        try:
            names = sorted(
                (n for n in os.listdir(root()) if (root() / n / "space.toml").exists()), reverse=True
            )
        except OSError:
            return None
        return cls(root() / names[0]) if names else None

    @property
    def space(self) -> Space:
        return read_space(self.path / "space.toml")

    def stamp(self) -> tuple[object, ...]:
        """Changes whenever a reader would see something else."""
        out: list[object] = [self.path.name]
        for name in ("trials.jsonl", "now.json", "space.toml"):
            try:
                facts = os.stat(self.path / name)
            except OSError:
                out.append(None)
                continue
            out.append((facts.st_mtime_ns, facts.st_size))
        return tuple(out)

    def view(self) -> TuneView:
        """The run as it stands on the disk. `now` says what was being done when now.json was written: the job's life tells whether it still is."""
        try:
            space, trials = self.space, tuple(self.trials())
        except UsageError as err:
            return TuneView(self.path.name, error=err.message)
        step, job_id = self.now()
        return TuneView(self.path.name, space, trials, job_id, step)

    def now(self) -> tuple[TuneStep | None, str]:
        """(what the tuner does, its job id); (None, "") between runs."""
        try:
            raw = parse_json(read_regular(self.path / "now.json"))
            setting = trial_from_json({"setting": raw["setting"]}).setting
            step = TuneStep(
                setting,
                str(raw["step"]),
                float(raw["since_s"]),
                bool(raw["is_again"]),
                str(raw["server_job"]),
                int(raw["left"]),
                (int(raw["passes"][0]), int(raw["passes"][1])) if raw.get("passes") else (0, 0),
                None if raw.get("ends_s") is None else float(raw["ends_s"]),
            )
            return step, str(raw["job_id"])
        except (OSError, ValueError, KeyError, IndexError, TypeError, OverflowError):
            return None, ""

    def set_now(self, step: TuneStep | None, job_id: str = "") -> None:
        """Say what is done now, for readers; None: nothing any more."""
        path = self.path / "now.json"
        if step is None:
            with contextlib.suppress(OSError):  # for readers only: no reason to fail
                path.unlink(missing_ok=True)
            return
        facts = {
            "setting": [list(s) for s in step.setting], "step": step.step, "since_s": step.since_s, "is_again": step.is_again,
            "server_job": step.server_job, "left": step.left, "job_id": job_id, "passes": list(step.passes), "ends_s": step.ends_s,
        }  # fmt: skip
        write_whole(path, json.dumps(facts, ensure_ascii=False) + "\n")

    def keep_profile(self, profile: Profile) -> None:
        """profile.toml: the whole profile as it was when the run began. Raises UsageError when it is another one now."""
        path = self.path / "profile.toml"
        text = profile_toml(profile)
        try:
            kept = parse_toml(read_regular(path))
        except FileNotFoundError:
            write_whole(path, f"# as it was when this run began, k2tui {__version__}\n{text}")
            return
        except (OSError, ParseError) as err:
            raise UsageError(
                f"{path}: {err}", "remove that file to go on with the profile as it is now"
            ) from None
        was, now = (table["profile"].get(profile.name, {}) for table in (kept, parse_toml(text)))
        changed = sorted(k for k in {*was, *now} - {"description"} if was.get(k) != now.get(k))
        if changed:
            raise UsageError(
                f"profile {profile.name!r} is another one than when this run began: {', '.join(changed)}",
                f"its figures would not compare: start a new run, or go on with --config {path}",
            )

    def trials(self) -> list[Trial]:
        """Every whole line, the newest of each key; a torn last line (a crash in mid-write) is left out. Raises UsageError."""
        found: dict[str, Trial] = {}
        try:
            data = read_regular(self.path / "trials.jsonl")
        except FileNotFoundError:
            return []
        except OSError as err:
            raise UsageError(
                f"{err.filename}: {err.strerror}", "the trials of this run cannot be read"
            ) from None
        for line in data.split(b"\n"):
            try:
                trial = trial_from_json(parse_json(line))
            except (ValueError, KeyError, TypeError, OverflowError):
                continue
            found[trial.key] = trial
        return list(found.values())

    def add(self, trial: Trial) -> None:
        """Append one trial and put it on the disk."""
        line = json.dumps(trial_to_json(trial), ensure_ascii=False).encode() + b"\n"
        fd = os.open(self.path / "trials.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            size = os.fstat(fd).st_size
            if size:
                with (self.path / "trials.jsonl").open("rb") as fh:
                    fh.seek(size - 1)
                    if fh.read(1) != b"\n":
                        line = b"\n" + line
            try:
                left = memoryview(line)
                while left:  # a full disk takes a part of it before it says so
                    left = left[os.write(fd, left) :]
                os.fsync(fd)
            except OSError:
                os.ftruncate(fd, size)
                raise
        finally:
            os.close(fd)

    def no_best(self) -> None:
        """Nothing won: a winner that an earlier end of this run wrote is one no more."""
        (self.path / "best.toml").unlink(missing_ok=True)

    def best(self) -> str:
        """The winner's profile as text; "" while there is none. Raises UsageError when it cannot be read."""
        path = self.path / "best.toml"
        try:
            return clean(read_regular(path).decode())
        except FileNotFoundError:
            return ""
        except (OSError, ValueError) as err:
            raise UsageError(f"{path}: {getattr(err, 'strerror', None) or err}", "k2tui tune resume writes it anew") from None

    def write_best(self, name: str, base: str, changes: Sequence[tuple[str, str]], note: str) -> Path:
        """best.toml: the winner as a profile that inherits the start profile. changes: (key, TOML value)."""
        lines = [
            f"# {note}",
            f'[profile."{name}"]',
            f"inherit = {_toml(base)}",
            f"description = {_toml(note)}",
        ]
        lines += [f"{key} = {value}" for key, value in changes]
        path = self.path / "best.toml"
        write_whole(path, "\n".join(lines) + "\n")
        return path
