"""A real sshd on loopback with keys and configuration of its own, and a client that logs in to it."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from k2tui.jobs import procs


def why_not() -> str:
    """Why no sshd can run here; "" when one can."""
    for name in ("/usr/sbin/sshd", "ssh", "ssh-keygen"):
        if shutil.which(name) is None:
            return f"{name} is not installed"
    return ""


class Sshd:
    """`start`, then `login(command)`: a client process inside a real session with a real terminal of its own."""

    def __init__(self, folder: Path, port: int, extra: str = "") -> None:
        self.folder = folder
        self.port = port
        self.extra = extra  # lines for its configuration
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        os.chmod(self.folder, 0o700)
        for name in ("host", "user"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)], check=True
            )
        shutil.copy(self.folder / "user.pub", self.folder / "authorized")
        (self.folder / "config").write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {self.folder}/host\nPidFile {self.folder}/pid\n"
            f"AuthorizedKeysFile {self.folder}/authorized\nStrictModes no\nUsePAM no\nPasswordAuthentication no\n"
            "PermitRootLogin yes\nPrintMotd no\nMaxStartups 100\n" + self.extra
        )
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        self.process = subprocess.Popen(
            ["/usr/sbin/sshd", "-D", "-e", "-f", str(self.folder / "config")],
            stdout=subprocess.DEVNULL,
            stderr=open(self.folder / "log", "wb"),
        )
        end = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                if time.monotonic() > end or self.process.poll() is not None:
                    raise RuntimeError(f"sshd did not start: {(self.folder / 'log').read_text()}")
                time.sleep(0.05)

    def argv(self, command: str) -> list[str]:
        """The client's command line, which runs that command in a session with a terminal."""
        user = pwd.getpwuid(os.getuid()).pw_name
        options = (
            "StrictHostKeyChecking=no",
            "UserKnownHostsFile=/dev/null",
            "LogLevel=ERROR",
            "IdentitiesOnly=yes",
        )
        argv = ["ssh", "-tt", "-F", "none", "-i", str(self.folder / "user"), "-p", str(self.port)]
        for option in options:
            argv += ["-o", option]
        return [*argv, f"{user}@127.0.0.1", command]

    def login(self, command: str) -> subprocess.Popen[bytes]:
        # ssh wants a terminal on its own side as well as on the far one
        return subprocess.Popen(
            self.argv(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def sessions(self) -> list[int]:
        """sshd's own processes of the sessions that are open now (not what runs in them)."""
        assert self.process is not None
        found: list[int] = []
        for pid in procs.family({self.process.pid}) - {self.process.pid}:
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            if words.startswith(b"sshd"):
                found.append(pid)
        return found

    def kill_sessions(self) -> int:
        """SIGKILL to every session's sshd, as an administrator or a crash does; returns how many."""
        return procs.signal_all(self.sessions(), signal.SIGKILL)

    def stop(self) -> None:
        if self.process is not None:
            self.kill_sessions()
            self.process.terminate()
            self.process.wait(10)
