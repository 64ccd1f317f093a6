"""Makes the plug-in visible to an SGLang environment in which k2tui is not installed: one folder for PYTHONPATH."""

from __future__ import annotations

from pathlib import Path

from k2tui import __version__
from k2tui.files import write_whole

ENTRY_POINT = "[sglang.srt.plugins]\nk2tui_capture = k2tui.capture.plugin:activate\n"


def make_site(folder: Path) -> Path:
    """Fill `folder` with a link to this k2tui and the entry point that SGLang looks for; put it on the server's PYTHONPATH.

    Nothing is installed anywhere. Returns the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    package = Path(__file__).resolve().parents[1]
    link = folder / "k2tui"
    if link.is_symlink() and link.resolve() != package:
        link.unlink()
    if not link.exists():
        link.symlink_to(package, target_is_directory=True)
    info = folder / f"k2tui-{__version__}.dist-info"
    info.mkdir(exist_ok=True)
    write_whole(
        info / "METADATA", f"Metadata-Version: 2.1\nName: k2tui\nVersion: {__version__}\n", mode=0o644
    )
    write_whole(info / "entry_points.txt", ENTRY_POINT, mode=0o644)
    return folder
