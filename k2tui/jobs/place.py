"""Where jobs may lie: a local disk. A home on a network file system is noticed, and a local folder is used instead.

Locks and process ids are facts of one machine; a folder that several machines share would mix them up, and a server that
hangs would hang every keeper.
"""

from __future__ import annotations

import os
import re
import stat
from functools import lru_cache
from pathlib import Path

MOUNTINFO = Path("/proc/self/mountinfo")
LOCAL_BASE = Path("/var/tmp")  # unlike /tmp it survives a reboot

_NETWORK = re.compile(
    r"nfs\d?|cifs|smb\w*|ncpfs|afs|autofs|9p|lustre|gpfs|beegfs\w*|ceph|glusterfs|panfs|pvfs2|orangefs|weka\w*|wekafs|vast\w*"
    r"|fuse\.(sshfs|glusterfs|ceph\w*|s3fs|gcsfuse|goofys|rclone|juicefs|beegfs|lustre|davfs2?|curlftpfs|mountpoint-s3)"
)


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), text)


def type_of(path: Path, mountinfo: str) -> str:
    """The file system type under an absolute path, from the text of /proc/self/mountinfo; "" when not known."""
    best, found = -1, ""
    target = str(path)
    for line in mountinfo.splitlines():
        left, sep, right = line.partition(" - ")
        fields = left.split(" ")
        if not sep or len(fields) < 5:
            continue
        point = _unescape(fields[4])
        inside = target == point or target.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:  # a later mount on the same point hides the earlier one
            best, found = len(point), right.split(" ")[0]
    return found


def is_network(kind: str) -> bool:
    return _NETWORK.fullmatch(kind) is not None


@lru_cache(maxsize=16)
def _kind(path: str) -> str:
    try:
        text = MOUNTINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    kind = type_of(Path(os.path.abspath(path)), text)
    # links are followed only where the path itself is local: a look at a network mount whose server hangs would hang too
    return kind if is_network(kind) else type_of(Path(os.path.realpath(path)), text)


def local_root(state: Path) -> Path:
    """The folder that jobs and locks lie in: `state`, or a private one on this machine when that is on the network.

    K2TUI_HOME is the user's own choice and is kept.
    """
    if os.environ.get("K2TUI_HOME") or not is_network(_kind(str(state))):
        return state
    folder = LOCAL_BASE / f"k2tui-{os.getuid()}"
    return folder if _is_ours(folder) else state


def _is_ours(folder: Path) -> bool:
    """Whether the folder is there (or can be made) and belongs to nobody else: /var/tmp is everybody's."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        facts = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & 0o022


def notice(state: Path) -> str:
    """One sentence for people when the state folder is on a network file system; "" when it is local."""
    kind = _kind(str(state))
    if not is_network(kind):
        return ""
    root = local_root(state)
    if root == state:
        return f"{state} is on {kind}: jobs of several machines would mix; set K2TUI_HOME to a folder on a local disk"
    return f"{state} is on {kind}: jobs are kept on this machine, in {root}"
